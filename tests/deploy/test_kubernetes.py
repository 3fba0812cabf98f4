"""Tests of the objects: consistent with each other, the command's options and the keys."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from headrace.cli.main import app
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.service import DispatcherConfig, Security, WorkerConfig
from headrace.serving.endpoint import Endpoint
from headrace.transport import address as addresses
from headrace.transport.security import new_keys
from tests.deploy.charts import CASES, ROOT, objects, render

FOLDER = ROOT / "deploy" / "kubernetes"
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
#: Type of the tasks of each component of a training cluster.
TASKS = {"ps": "ps", "coordinator-worker": "worker"}
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def only(case, kind, component=None):
    """Return the only object of a kind and component."""
    (found,) = [
        each
        for each in objects(case)
        if each["kind"] == kind and component in (None, component_of(each))
    ]
    return found


def pod_of(owner):
    return owner["spec"]["template"]["spec"]


def container_of(owner):
    (container,) = pod_of(owner)["containers"]
    return container


def component_of(owner):
    return owner["metadata"]["labels"].get("app.kubernetes.io/component")


def parsed(container):
    """Parse a container's arguments as the command does; return its name and the values."""
    known = {each["name"] for each in container.get("env", ())}
    arguments = []
    for argument in container["args"]:
        assert set(re.findall(r"\$\((\w+)\)", argument)) <= known, argument
        argument = argument.replace("$(POD_IP)", "10.1.2.3").replace("$(POD_INDEX)", "1")
        arguments.append(argument)
    name, *rest = arguments
    command = get_command(app).commands[name]
    return name, command.make_context(name, rest).params


def owners(*kinds):
    return [
        pytest.param(case, each, id=f"{case}-{each['metadata']['name']}")
        for case in ("default", "everything")
        for each in objects(case)
        if each["kind"] in kinds
    ]


each_set = pytest.mark.parametrize(("case", "owner"), owners("Deployment", "StatefulSet"))


def test_chart_has_all_servers():
    components = {component_of(each.values[1]) for each in owners("Deployment", "StatefulSet")}
    assert components == {"dispatcher", "worker", "ps", "coordinator-worker"}


def test_all_files_are_applied():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files == {*render.render_chart()}
    for name in ("hpa", "keda"):
        component = yaml.safe_load((FOLDER / name / "kustomization.yaml").read_text())
        assert [(FOLDER / name / each).exists() for each in component["resources"]] == [True]
        (target,) = [each["target"] for each in component["patches"]]
        assert only("default", target["kind"])["metadata"]["name"] == target["name"]


@each_set
def test_selectors_match_the_pods(case, owner):
    labels = owner["spec"]["template"]["metadata"]["labels"]
    assert owner["spec"]["selector"]["matchLabels"].items() <= labels.items()
    component = component_of(owner)
    service = only(case, "Service", component)
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {each["name"]: each["containerPort"] for each in container_of(owner)["ports"]}
    # A headless Service translates no ports.
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports
    assert service["spec"]["clusterIP"] == "None"
    if owner["kind"] == "StatefulSet":
        assert owner["spec"]["serviceName"] == service["metadata"]["name"]
    if component in ("worker", "ps"):
        budget = only(case, "PodDisruptionBudget", component)
        assert budget["spec"]["selector"] == owner["spec"]["selector"]
    others = [each.values[1] for each in owners("Deployment", "StatefulSet")]
    for other in others:
        if component_of(other) != component:
            found = other["spec"]["template"]["metadata"]["labels"]
            assert not owner["spec"]["selector"]["matchLabels"].items() <= found.items()


@each_set
def test_container_arguments_are_options_of_the_command(case, owner):
    name, values = parsed(container_of(owner))
    component = component_of(owner)
    assert values["keys"] is not None, "a service that others can reach needs keys"
    if component == "dispatcher":
        assert name == component
        common = {"port": values["port"], "host": values["host"], "metrics_port": 9090}
        DispatcherConfig(work_dir=values["work_dir"], fault_tolerant_mode=True, **common)
        assert values["fault_tolerant"]
    elif component == "worker":
        assert name == component
        config = WorkerConfig(values["dispatcher"], worker_address=values["worker_address"])
        assert addresses.split(config.worker_address)[1] == values["port"]
    else:
        assert name == "server"
        assert values["task_type"].value == TASKS[component]


@each_set
def test_container_ports_are_the_ports_of_the_command(case, owner):
    container = container_of(owner)
    _, values = parsed(container)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["metrics"] == values["metrics_port"]
    if component_of(owner) not in TASKS:  # TF_CONFIG has their ports
        assert ports["headrace"] == values["port"]
    # Loopback is not reachable from another pod or from the node that probes.
    assert addresses.is_wildcard(values["host"])
    assert addresses.is_wildcard(values["metrics_host"])


@pytest.mark.parametrize("case", ["default", "everything"])
def test_workers_use_the_dispatchers_service_and_port(case):
    service = only(case, "Service", "dispatcher")
    _, values = parsed(container_of(only(case, "Deployment", "worker")))
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert values["dispatcher"] == f"{service['metadata']['name']}:{ports['headrace']}"


@pytest.mark.parametrize(("component", "task_type"), TASKS.items())
def test_tasks_find_themselves_in_the_cluster(component, task_type, monkeypatch):
    owner = only("everything", "StatefulSet", component)
    settings = only("everything", "ConfigMap")
    assert container_of(owner)["envFrom"] == [
        {"configMapRef": {"name": settings["metadata"]["name"]}}
    ]
    monkeypatch.setitem(os.environ, "TF_CONFIG", settings["data"]["TF_CONFIG"])
    _, values = parsed(container_of(owner))
    resolver = TFConfigClusterResolver(values["task_type"], values["index"])
    spec = resolver.cluster_spec()
    assert spec.jobs == ["ps", "worker"]
    assert spec.num_tasks(task_type) == owner["spec"]["replicas"]
    # The name of a pod of a StatefulSet, in the domain of its headless Service.
    name, service = owner["metadata"]["name"], owner["spec"]["serviceName"]
    port = container_of(owner)["ports"][0]["containerPort"]
    assert spec.task_address(task_type, 1) == f"{name}-1.{service}:{port}"


def test_cluster_contains_only_what_is_enabled():
    for value, task_type in (("parameterServer", "ps"), ("coordinatorWorker", "worker")):
        (text,) = [
            each["data"]["TF_CONFIG"]
            for each in yaml.safe_load_all(
                render.render_chart({value: {"enabled": True, "replicas": 1}})["cluster.yaml"]
            )
            if each["kind"] == "ConfigMap"
        ]
        assert [*json.loads(text)["cluster"]] == [task_type]


@each_set
def test_probes_request_existing_pages(case, owner):
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
def test_volumes_are_mounted_where_the_command_reads(case, owner):
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
    if case == "everything":
        assert mounts["/data"]["readOnly"]
        assert {"name": "MODE", "value": "true"} in container["env"]
        if component_of(owner) in ("worker", "coordinator-worker"):
            (memory,) = [each for each in pod["volumes"] if each["name"] == "shared-memory"]
            assert memory["emptyDir"]["medium"] == "Memory"
            assert mounts["/dev/shm"]["name"] == "shared-memory"


def secret_files(name, keys):
    """Return the paths of the files of a Secret, by key."""
    (secret,) = [each for each in KUSTOMIZATION["secretGenerator"] if each["name"] == name]
    files = dict(each.split("=") for each in secret["files"])
    return {key: keys / Path(path).relative_to("keys") for key, path in files.items()}


def mount(files, folder):
    """Mount a Secret as Kubernetes does: links to a directory that is replaced as a whole."""
    data = folder / "..2026_01_01"
    data.mkdir(parents=True)
    (folder / "..data").symlink_to(data.name)
    for key, path in files.items():
        (data / key).write_text(path.read_text())
        (folder / key).symlink_to(Path("..data") / key)


@pytest.mark.parametrize(("case", "owner"), owners("Deployment", "StatefulSet")[:2])
def test_secrets_contain_all_key_files(case, owner, tmp_path):
    keys = new_keys(tmp_path / "keys")
    volumes = {each["name"]: each.get("secret") for each in pod_of(owner)["volumes"]}
    for each in container_of(owner)["volumeMounts"]:
        secret = volumes.get(each["name"])
        if secret is not None:
            folder = tmp_path / "root" / each["mountPath"].removeprefix("/")
            mount(secret_files(secret["secretName"], keys), folder)
            # Only the group can read it, to which the process belongs.
            assert secret["defaultMode"] == 0o440
    found = Security.load(tmp_path / "root" / "etc" / "headrace" / "keys", "server")
    made = Security.load(keys, "server")
    assert (found.public_key, found.secret_key) == (made.public_key, made.secret_key)
    listed = [path.read_text() for path in found.authorized_clients.glob("*.key")]
    assert listed == [(keys / "client.key").read_text()]


def test_trainers_have_client_keys_only(tmp_path):
    keys = new_keys(tmp_path / "keys")
    files = secret_files("headrace-client", keys)
    mount(files, tmp_path / "mounted")
    Security.load(tmp_path / "mounted", "client")
    assert "server.key_secret" not in files


def test_secrets_are_those_of_the_values():
    keys = yaml.safe_load((render.CHART / "values.yaml").read_text())["keys"]
    made = {each["name"] for each in KUSTOMIZATION["secretGenerator"]}
    assert made == {*keys.values(), "headrace-client"}
    assert not any(each["kind"] == "Secret" for case in CASES for each in objects(case))


@pytest.mark.parametrize("case", ["default", "everything"])
def test_termination_grace_period_covers_the_drain_timeout(case):
    owner = only(case, "Deployment", "worker")
    _, values = parsed(container_of(owner))
    grace = pod_of(owner)["terminationGracePeriodSeconds"]
    assert values["drain_timeout"] == (60 if case == "default" else 30)
    assert grace == values["drain_timeout"] + 15


@each_set
def test_containers_do_not_run_as_root(case, owner):
    pod, container = pod_of(owner), container_of(owner)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}\n" in CONTAINERFILE


@each_set
def test_image_name_matches_the_build_instructions(case, owner):
    container = container_of(owner)
    if case == "default":
        (image,) = KUSTOMIZATION["images"]
        assert container["image"] == f"{image['name']}:{image['newTag']}"
    assert 'ENTRYPOINT ["headrace"]' in CONTAINERFILE
    assert "command" not in container


@pytest.mark.parametrize("case", ["hpa", "keda", "keda-prometheus"])
def test_autoscaler_sets_the_number_of_workers(case):
    workers = only(case, "Deployment")
    scaler = only(case, "HorizontalPodAutoscaler" if case == "hpa" else "ScaledObject")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", workers["metadata"]["name"])
    assert "replicas" not in workers["spec"]
    assert "replicas" in only("default", "Deployment")["spec"]
    assert "headrace_wanted_workers" in json.dumps(scaler)


def test_keda_asks_the_metrics_port_of_the_dispatcher():
    service = only("keda", "Service", "dispatcher")
    (trigger,) = only("keda", "ScaledObject")["spec"]["triggers"]
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    name = service["metadata"]["name"]
    assert trigger["metadata"]["url"] == f"http://{name}.default.svc:{ports['metrics']}/metrics"


@pytest.mark.parametrize("case", ["default", "everything"])
def test_network_policy_admits_the_users_of_each_port(case):
    policy = only(case, "NetworkPolicy")["spec"]
    own = policy["podSelector"]["matchLabels"]
    ports = set()
    for each in objects(case):
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert own.items() <= each["spec"]["template"]["metadata"]["labels"].items()
            ports |= {each["containerPort"] for each in container_of(each)["ports"]}
    assert {each["port"] for rule in policy["ingress"] for each in rule["ports"]} == ports


def test_service_monitor_selects_all_services():
    monitor = only("everything", "ServiceMonitor")
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    services = [each for each in objects("everything") if each["kind"] == "Service"]
    assert len(services) == 4
    for each in services:
        assert labels <= each["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] in {p["name"] for p in each["spec"]["ports"]}


def test_kueue_admits_workers_only():
    label = "kueue.x-k8s.io/queue-name"
    for each in objects("everything"):
        is_workers = each == only("everything", "Deployment", "worker")
        assert (label in each["metadata"]["labels"]) is is_workers
