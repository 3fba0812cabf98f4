"""Tests of the manifests: consistent with each other, the command's options and the keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from headrace.cli.main import app
from headrace.service import DispatcherConfig, Security, WorkerConfig
from headrace.serving.endpoint import Endpoint
from headrace.transport import address as addresses
from headrace.transport.security import new_keys

ROOT = Path(__file__).parents[2] / "deploy"
FOLDER = ROOT / "kubernetes"

API_VERSIONS = {
    "Deployment": "apps/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Service": "v1",
    "StatefulSet": "apps/v1",
}
#: Fields used under `spec`, by kind of object.
FIELDS = {
    "Deployment": {"selector", "strategy", "template"},
    "HorizontalPodAutoscaler": {
        "scaleTargetRef", "minReplicas", "maxReplicas", "metrics", "behavior",
    },
    "NetworkPolicy": {"podSelector", "policyTypes", "ingress"},
    "Service": {"selector", "ports"},
    "StatefulSet": {"serviceName", "replicas", "selector", "template", "volumeClaimTemplates"},
}  # fmt: skip
POD_FIELDS = {
    "automountServiceAccountToken", "terminationGracePeriodSeconds", "securityContext",
    "containers", "volumes",
}  # fmt: skip
CONTAINER_FIELDS = {
    "name", "image", "args", "env", "ports", "startupProbe", "livenessProbe", "readinessProbe",
    "resources", "securityContext", "volumeMounts",
}  # fmt: skip


def load(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


KUSTOMIZATION = load(FOLDER / "kustomization.yaml")[0]
OBJECTS = [each for name in KUSTOMIZATION["resources"] for each in load(FOLDER / name)]
SETS = [each for each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")]


def only(kind, name=None):
    (found,) = [
        each
        for each in OBJECTS
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def pod_of(owner):
    return owner["spec"]["template"]["spec"]


def container_of(owner):
    (container,) = pod_of(owner)["containers"]
    return container


def parsed(container):
    """Parse a container's arguments as the command does; return its name and the values."""
    known = {each["name"] for each in container.get("env", ())}
    arguments = []
    for argument in container["args"]:
        assert set(re.findall(r"\$\((\w+)\)", argument)) <= known, argument
        arguments.append(re.sub(r"\$\(POD_IP\)", "10.1.2.3", argument))
    name, *rest = arguments
    command = get_command(app).commands[name]
    return name, command.make_context(name, rest).params


def each_set(function):
    return pytest.mark.parametrize("owner", SETS, ids=lambda owner: owner["metadata"]["name"])(
        function
    )


def test_all_files_are_applied():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files


@pytest.mark.parametrize("each", [*OBJECTS, KUSTOMIZATION], ids=lambda each: each["kind"])
def test_each_object_has_a_known_kind_and_schema(each):
    kind = each["kind"]
    assert each["apiVersion"] == API_VERSIONS[kind]
    if kind == "Kustomization":
        return
    assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", each["metadata"]["name"])
    assert each["spec"].keys() == FIELDS[kind]
    if "template" in each["spec"]:
        assert pod_of(each).keys() == POD_FIELDS
        assert container_of(each).keys() <= CONTAINER_FIELDS
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@each_set
def test_container_arguments_are_options_of_the_command(owner):
    name, values = parsed(container_of(owner))
    assert name == owner["metadata"]["labels"]["app.kubernetes.io/component"]
    common = {"port": values["port"], "host": values["host"], "metrics_port": 9090}
    if name == "dispatcher":
        DispatcherConfig(work_dir=values["work_dir"], fault_tolerant_mode=True, **common)
        assert values["fault_tolerant"]
    else:
        config = WorkerConfig(
            values["dispatcher"], worker_address=values["worker_address"], **common
        )
        assert addresses.split(config.worker_address)[1] == values["port"]
    assert values["keys"] is not None, "a service that others can reach needs keys"


@each_set
def test_container_ports_are_the_ports_of_the_command(owner):
    container = container_of(owner)
    _, values = parsed(container)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"headrace": values["port"], "metrics": values["metrics_port"]}
    # Loopback is not reachable from another pod or from the node that probes.
    assert addresses.is_wildcard(values["host"])
    assert addresses.is_wildcard(values["metrics_host"])


def test_workers_use_the_dispatchers_service_and_port():
    service = only("Service")
    _, values = parsed(container_of(only("Deployment")))
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    name = service["metadata"]["name"]
    assert values["dispatcher"] == f"{name}:{ports['headrace']}"
    owner = only("StatefulSet")
    assert owner["spec"]["serviceName"] == name
    labels = owner["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    targets = {each["name"] for each in container_of(owner)["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= targets


@each_set
def test_probes_request_existing_pages(owner):
    endpoint = Endpoint("127.0.0.1", 0, metrics=list, not_ready_reason=str)
    endpoint.close()
    container = container_of(owner)
    probes = {name: each for name, each in container.items() if name.endswith("Probe")}
    assert {"livenessProbe", "readinessProbe"} <= probes.keys()
    for name, probe in probes.items():
        path = probe["httpGet"]["path"]
        assert path in endpoint._pages
        assert path == ("/readyz" if name == "readinessProbe" else "/healthz")
        assert probe["httpGet"]["port"] == "metrics"


@each_set
def test_volumes_are_mounted_where_the_command_reads(owner):
    container, pod = container_of(owner), pod_of(owner)
    _, values = parsed(container)
    claims = {each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", ())}
    volumes = {each["name"] for each in pod["volumes"]} | claims
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == volumes
    assert mounts[str(values["keys"])]["readOnly"]
    assert "/tmp" in mounts, "the root is read-only"
    if "work_dir" in values:
        journal = mounts[str(values["work_dir"])]
        assert journal["name"] in claims
        assert not journal.get("readOnly")


def mounted(sources, keys, folder):
    """Write the files of a projected volume as a pod sees them."""
    secrets = {each["name"]: each for each in KUSTOMIZATION["secretGenerator"]}
    for source in sources:
        secret = source["secret"]
        files = dict(each.split("=") for each in secrets[secret["name"]]["files"])
        for item in secret["items"]:
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((keys / Path(files[item["key"]]).relative_to("keys")).read_text())


@each_set
def test_secrets_contain_all_key_files(owner, tmp_path):
    keys = new_keys(tmp_path / "keys")
    (volume,) = [each for each in pod_of(owner)["volumes"] if each["name"] == "keys"]
    mounted(volume["projected"]["sources"], keys, tmp_path / "mounted")
    found = Security.load(tmp_path / "mounted", "server")
    made = Security.load(keys, "server")
    assert (found.public_key, found.secret_key) == (made.public_key, made.secret_key)
    listed = tmp_path / "mounted" / "authorized_clients" / "client.key"
    assert listed.read_text() == (keys / "client.key").read_text()
    # Read-only clients have no access to the servers' secret.
    assert volume["projected"]["defaultMode"] == 0o440


def test_trainers_have_client_keys_only(tmp_path):
    keys = new_keys(tmp_path / "keys")
    (secret,) = [
        each for each in KUSTOMIZATION["secretGenerator"] if each["name"] == "headrace-client"
    ]
    files = dict(each.split("=") for each in secret["files"])
    items = [{"key": key, "path": key} for key in files]
    source = {"secret": {"name": "headrace-client", "items": items}}
    mounted([source], keys, tmp_path / "mounted")
    Security.load(tmp_path / "mounted", "client")
    assert "server.key_secret" not in files


def test_termination_grace_period_covers_the_drain_timeout():
    owner = only("Deployment")
    _, values = parsed(container_of(owner))
    grace = pod_of(owner)["terminationGracePeriodSeconds"]
    assert grace >= values["drain_timeout"] + 10


@each_set
def test_containers_do_not_run_as_root(owner):
    pod, container = pod_of(owner), container_of(owner)
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    recipe = (ROOT / "Containerfile").read_text()
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}\n" in recipe


@each_set
def test_image_name_matches_the_build_instructions(owner):
    container = container_of(owner)
    assert container["image"] in {each["name"] for each in KUSTOMIZATION["images"]}
    assert 'ENTRYPOINT ["headrace"]' in (ROOT / "Containerfile").read_text()
    assert "command" not in container


def test_dockerfile_copies_existing_files():
    for line in (ROOT / "Containerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            for source in sources:
                assert (ROOT.parent / source).exists(), source


def test_autoscaler_uses_the_cpu_requests_of_workers():
    scaler, workers = only("HorizontalPodAutoscaler"), only("Deployment")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", workers["metadata"]["name"])
    assert "cpu" in container_of(workers)["resources"]["requests"]
    assert "replicas" not in workers["spec"]


def test_network_policy_admits_the_users_of_each_port():
    policy = only("NetworkPolicy")["spec"]
    own = policy["podSelector"]["matchLabels"]
    ports = set()
    for owner in SETS:
        assert own.items() <= owner["spec"]["template"]["metadata"]["labels"].items()
        ports |= {each["containerPort"] for each in container_of(owner)["ports"]}
    assert {each["port"] for rule in policy["ingress"] for each in rule["ports"]} == ports


def test_options_in_the_documentation_exist():
    text = (FOLDER / "README.md").read_text()
    known = {
        option
        for command in get_command(app).commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    elsewhere = {"--file", "--tag", "--kustomize"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known | elsewhere
