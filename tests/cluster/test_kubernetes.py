"""Tests of the Kubernetes resolver with a recorded API over HTTP."""

from __future__ import annotations

import json
import socket

import pytest

from headrace.cluster.kubernetes import natural_sort_key
from headrace.distribute import KubernetesClusterResolver
from headrace.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.cluster.recorded_api import CERTIFICATE, TOKEN, serving_recorded_pods

LABELS = {"worker": ["app=train,role=worker"], "ps": ["app=train,role=ps"]}


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A recorded API, and the kubectl configuration for it."""
    for name in ("KUBERNETES_SERVICE_HOST", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving_recorded_pods() as api:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": f"http://{api.address}"}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield api


@pytest.fixture
def in_cluster(tmp_path, monkeypatch):
    """A recorded API, and the service account files of a pod."""
    import kubernetes.config.incluster_config as found  # noqa: PLC0415 - a second to load

    with serving_recorded_pods(encrypted=True) as api:
        host, _, port = api.address.partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setattr(found, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
        monkeypatch.setattr(found, "SERVICE_CERT_FILENAME", str(CERTIFICATE))
        yield api


def named(api, prefix):
    return [pod for pod in api.pods if pod["metadata"]["name"].startswith(prefix)]


@pytest.mark.catalogue("3.27.39", "3.27.40", "3.38.1", "3.38.2")
def test_default_labels_select_workers_ordered_by_name(api):
    resolver = KubernetesClusterResolver()
    # 999999, abc123, def456
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.2.3:8470", "10.1.2.4:8470", "10.1.2.5:8470"]
    }
    [(path, headers)] = api.requests
    assert path == "/api/v1/pods?labelSelector=job-name%3Dtensorflow"
    assert headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.catalogue("1.10.6", "3.27.38", "3.27.41", "3.38.5")
def test_tasks_are_ordered_by_numbers_in_pod_names(api):
    resolver = KubernetesClusterResolver(LABELS, tf_server_port=2222)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.2.10:2222", "10.1.2.11:2222", "10.1.2.12:2222", "10.1.2.20:2222"],
        "ps": ["10.1.2.90:2222", "10.1.2.91:2222"],
    }
    assert (resolver.task_type, resolver.task_id) == (None, None)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 3, "grpc"
    assert resolver.master() == "grpc://10.1.2.20:2222"
    assert resolver.master("ps", 1, rpc_layer="http") == "http://10.1.2.91:2222"


@pytest.mark.catalogue("3.27.43", "3.38.7")
def test_pods_of_several_selectors_are_concatenated(api):
    labels = {"worker": ["job-name=tensorflow", "app=train,role=ps"]}
    found = KubernetesClusterResolver(labels).cluster_spec().job_tasks("worker")
    assert [address.removesuffix(":8470") for address in found] == [
        "10.1.2.3", "10.1.2.4", "10.1.2.5", "10.1.2.90", "10.1.2.91",
    ]  # fmt: skip


def test_ipv6_address_is_written_in_brackets(api):
    found = KubernetesClusterResolver({"worker": ["job-name=six"]}).cluster_spec()
    assert found.job_tasks("worker") == ["[fd00:10:244::7]:8470"]


@pytest.mark.catalogue("3.27.42", "3.38.6")
def test_ended_pod_is_an_error_at_once(api):
    resolver = KubernetesClusterResolver({"worker": ["job-name=failed"]})
    with pytest.raises(
        FailedPreconditionError, match='Pod "failed-x2v9k" is not running; phase: "Failed"'
    ):
        resolver.cluster_spec()
    assert len(api.requests) == 1


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("slow", 'Pod "slow-1" is not running; phase: "Pending"'),
        ("rolling", 'Pod "rolling-0" is not running; phase: "Terminating"'),
    ],
)
def test_pending_pod_is_waited_for(api, label, words):
    resolver = KubernetesClusterResolver({"worker": [f"job-name={label}"]}, timeout=0.1)
    with pytest.raises(UnavailableError, match=f"no cluster of running pods after 0.1 s: {words}"):
        resolver.cluster_spec()
    assert len(api.requests) > 1


def test_missing_pods_are_waited_for_if_their_number_is_known(api):
    workers = named(api, "worker-")
    api.pods = workers[:3]
    resolver = KubernetesClusterResolver(
        {"worker": ["role=worker"]}, num_tasks={"worker": 4}, timeout=30.0
    )
    api.refusals = [(503, "the API server is starting")]
    answer, api.answer = api.answer, None

    def then_all(target):
        if len(api.requests) > 3:
            api.pods = workers
        return answer(target)

    api.answer = then_all
    assert resolver.cluster_spec().num_tasks("worker") == 4
    api.pods = workers[:1]
    api.requests.clear()
    short = KubernetesClusterResolver(
        {"worker": ["role=worker"]}, num_tasks={"worker": 4}, timeout=0.05
    )
    with pytest.raises(UnavailableError, match=r"1 of 4 pods of 'worker' exist \(role=worker"):
        short.cluster_spec()


def test_only_the_given_namespace_is_queried(api):
    resolver = KubernetesClusterResolver({"worker": ["job-name=twin"]}, namespace="blue")
    assert resolver.cluster_spec().job_tasks("worker") == ["10.1.6.2:8470"]
    assert api.requests[0][0].startswith("/api/v1/namespaces/blue/pods?")


def test_pods_in_two_namespaces_are_refused(api):
    with pytest.raises(InvalidArgumentError, match=r"several namespaces \(blue, red\)"):
        KubernetesClusterResolver({"worker": ["job-name=twin"]}).cluster_spec()


def test_labels_without_pods_give_a_type_without_tasks(api):
    assert not KubernetesClusterResolver({"worker": ["job-name=none"]}).cluster_spec()


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, UnauthenticatedError, r"cannot list.*set a namespace .*\(namespace=\)"),
        (401, UnauthenticatedError, "cannot list"),
        (400, InvalidArgumentError, "the API replied 400"),
        (500, UnavailableError, "the API replied 500"),
    ],
)
def test_refusal_of_the_api_is_quoted(api, status, kind, words):
    api.refusals = [(status, 'pods is forbidden: User "me" cannot list resource "pods"')] * 99
    with pytest.raises(kind, match=words):
        KubernetesClusterResolver(timeout=0.05).cluster_spec()


def test_unreachable_api_is_retried_until_the_timeout(api, tmp_path):
    text = (tmp_path / "config").read_text()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{unused.getsockname()[1]}"
        (tmp_path / "config").write_text(text.replace(api.address, there))
        with pytest.raises(UnavailableError, match="cannot reach the Kubernetes API"):
            KubernetesClusterResolver(timeout=0.05).cluster_spec()


def test_without_a_configuration_the_error_asks_whether_kubectl_works(api, tmp_path):
    (tmp_path / "config").unlink()
    with pytest.raises(
        FailedPreconditionError, match=r"off_cluster.*does kubectl work on this machine"
    ):
        KubernetesClusterResolver().cluster_spec()


@pytest.mark.catalogue("3.38.3")
def test_service_account_is_used_over_tls_within_the_cluster(in_cluster, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-10")
    resolver = KubernetesClusterResolver(LABELS)
    # The task follows from the name of this pod.
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "10.1.2.20:8470"
    assert in_cluster.requests[0][1]["authorization"].lower() == f"bearer {TOKEN}"
    assert KubernetesClusterResolver(LABELS, task_type="ps", task_id=0).task_type == "ps"
    monkeypatch.setattr(socket, "gethostname", lambda: "notebook-0")
    assert KubernetesClusterResolver(LABELS).task_type is None


def test_missing_service_account_is_an_error():
    resolver = KubernetesClusterResolver(executable_location="within_cluster")
    with pytest.raises(FailedPreconditionError, match="does this pod have a service account"):
        resolver.cluster_spec()


def test_override_client_is_used(api):
    from kubernetes import client  # noqa: PLC0415 - a second to load

    with client.ApiClient(client.Configuration(host=f"http://{api.address}")) as connection:
        resolver = KubernetesClusterResolver(override_client=client.CoreV1Api(connection))
        assert resolver.cluster_spec().num_tasks("worker") == 3
    assert "authorization" not in api.requests[0][1]


@pytest.mark.catalogue("3.38.4")
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"executable_location": "here"}, ValueError, 'must be "within_cluster" or "off_cluster"'),
        ({"job_to_label_mapping": {}}, TypeError, "`job_to_label_mapping` must be a dict"),
        ({"job_to_label_mapping": {"worker": "a=b"}}, TypeError, r"mapping\['worker'\]` must be"),
        ({"tf_server_port": 0}, ValueError, "`tf_server_port` must be at least 1"),
        ({"namespace": ""}, ValueError, "`namespace` must not be empty"),
        ({"num_tasks": {"ps": 1}}, ValueError, "`num_tasks` has the task type 'ps'"),
        ({"timeout": 0}, ValueError, "`timeout` must be more than 0"),
    ],
)
def test_invalid_arguments_are_named(arguments, kind, words):
    with pytest.raises(kind, match=words):
        KubernetesClusterResolver(**arguments)


def test_natural_sort_key_compares_numbers():
    names = ["w-10", "w-2", "w-02", "w", "w-2-b", "2", "v-3", "w-a"]
    assert sorted(names, key=natural_sort_key) == [
        "2", "v-3", "w", "w-02", "w-2", "w-2-b", "w-10", "w-a",
    ]  # fmt: skip
