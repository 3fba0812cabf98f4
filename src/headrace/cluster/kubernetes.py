"""Cluster of the pods that have given labels."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from headrace.arguments import check_int, check_seconds, check_string, check_strings
from headrace.cluster.resolver import ClusterResolver, import_package, wait_for
from headrace.cluster.spec import ClusterSpec
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.transport import address as addresses

__all__ = [
    "KubernetesClusterResolver",
    "Location",
    "Pod",
    "list_pods",
    "load_package",
    "natural_sort_key",
    "open_api",
]


Location = Literal["within_cluster", "off_cluster"]

_REQUEST_SECONDS = 30.0
_FORBIDDEN_CODES = (401, 403)
_RETRYABLE_CODES = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""


@dataclass(frozen=True)
class Pod:
    """Relevant properties of a pod.

    Attributes:
        name: Name, unique in its namespace.
        namespace: Namespace of the pod.
        phase: Phase from the API, such as "Running"; "Terminating" if it is being deleted.
        ip: IP address; "" if it has none yet.
    """

    name: str
    namespace: str
    phase: str
    ip: str

    @classmethod
    def from_client(cls, pod: Any) -> Pod:
        """Convert a pod of the official client."""
        is_leaving = getattr(pod.metadata, "deletion_timestamp", None) is not None
        return cls(
            name=str(pod.metadata.name),
            namespace=str(pod.metadata.namespace or ""),
            phase="Terminating" if is_leaving else str(pod.status.phase),
            ip=str(pod.status.pod_ip or ""),
        )


def load_package() -> Any:
    """Return the package kubernetes.

    Raises:
        FailedPreconditionError: If it is not installed.
    """
    return import_package(
        "kubernetes",
        needed_by="KubernetesClusterResolver",
        instead=", or pass a client (override_client)",
    )


@contextmanager
def open_api(location: Location) -> Iterator[Any]:
    """Yield a `CoreV1Api` with the rights of this process's pod, or of kubectl on this machine.

    Raises:
        FailedPreconditionError: If the configuration is missing or invalid.
    """
    package = load_package()
    try:
        if location == "within_cluster":
            configuration = package.client.Configuration()
            package.config.load_incluster_config(client_configuration=configuration)
            client = package.client.ApiClient(configuration)
        else:
            # The package reads the variable only when it is imported, which may be too early.
            client = package.config.new_client_from_config(os.environ.get("KUBECONFIG"))
    except (package.config.ConfigException, OSError) as error:
        scope = (
            "does this pod have a service account?"
            if location == "within_cluster"
            else "does kubectl work on this machine?"
        )
        raise FailedPreconditionError(
            f"cannot configure access to the Kubernetes API ({location}): {error}; {scope}"
        ) from error
    with client:
        yield package.client.CoreV1Api(client)


def list_pods(api: Any, selector: str, namespace: str | None) -> list[Pod]:
    """Return the pods that match a label selector.

    Args:
        api: A `CoreV1Api`.
        selector: Selector such as "app=train,role=worker".
        namespace: Namespace of the pods; None for all.

    Raises:
        InvalidArgumentError: If the API does not understand the request.
        UnauthenticatedError: If the API refuses the request.
        UnavailableError: If the API does not answer now.
    """
    options = {"label_selector": selector, "_request_timeout": _REQUEST_SECONDS}
    try:
        if namespace is None:
            found = api.list_pod_for_all_namespaces(**options)
        else:
            found = api.list_namespaced_pod(namespace=namespace, **options)
    except Exception as error:
        scope = "all namespaces" if namespace is None else f"namespace {namespace!r}"
        described = _describe_error(error, f"pods with the label {selector} in {scope}")
        if described is None:
            raise
        raise described from error
    return [Pod.from_client(pod) for pod in found.items]


def _describe_error(error: Exception, description: str) -> HeadraceError | None:
    """Return the translation of an error of the client; None for other errors."""
    package = type(error).__module__.partition(".")[0]
    if package == "urllib3" or isinstance(error, OSError):
        return UnavailableError(f"cannot reach the Kubernetes API: {error}")
    if package != "kubernetes":
        return None
    status = getattr(error, "status", None) or 0
    message = f"cannot list {description}: the API replied {status} ({_api_message(error)})"
    if status in _FORBIDDEN_CODES:
        return UnauthenticatedError(
            f"{message}; give this process's service account a role that may list pods, "
            "or set a namespace that it may read (namespace=)"
        )
    if status in _RETRYABLE_CODES or not status:
        return UnavailableError(message)
    return InvalidArgumentError(message)


def _api_message(error: Exception) -> str:
    """Return the message from the API's reply, if there is one."""
    try:
        return str(json.loads(str(getattr(error, "body", "")))["message"])
    except (ValueError, KeyError, TypeError):
        return str(getattr(error, "reason", error)).strip()


_LABELS = {"worker": ["job-name=tensorflow"]}
_SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
#: Phases of pods that may run soon.
_STARTING_PHASES = ("Pending", "Terminating", "Unknown")


class KubernetesClusterResolver(ClusterResolver):
    """Resolves tasks from the running pods with given labels, at the addresses of the pods.

        KubernetesClusterResolver({"worker": ["app=train,role=worker"]}, namespace="training")

    The pods of a selector are numbered by their names, and numbers within names are compared as
    numbers: "worker-2" comes before "worker-10". The tasks of several selectors of one type are
    concatenated. Within the cluster, this process is the task whose pod is named like its host.

    Each call of `cluster_spec` queries the API, and waits for pods that are about to run. In the
    cluster it needs a service account that may list pods.

    Args:
        job_to_label_mapping: Label selectors for each type of task, as in
            {"worker": ["app=train,role=worker"], "ps": ["app=train,role=ps"]}; None: workers, with
            the label job-name=tensorflow.
        tf_server_port: Port at which all tasks listen.
        rpc_layer: Prefix of addresses.
        override_client: A `kubernetes.client.CoreV1Api`; None creates one.
        executable_location: "within_cluster" uses the pod's service account; "off_cluster" uses the
            configuration of kubectl (KUBECONFIG, ~/.kube/config); None uses whichever is found.
        namespace: Namespace of the pods; None: any, but a selector must match pods of only one.
        num_tasks: Number of tasks of each type to wait for, as in {"worker": 4}; a type without a
            number uses the current pods.
        timeout: Seconds to wait for pods that are about to run, or for the API.
        task_type: Type of this process's task; None: that of its pod, if it runs in one.
        task_id: Number of this process's task; None as above.

    Raises:
        ValueError: If `executable_location` is invalid.
        FailedPreconditionError: If the package `kubernetes` is not installed.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = None,
        override_client: Any = None,
        executable_location: Location | None = None,
        *,
        namespace: str | None = None,
        num_tasks: Mapping[str, int] | None = None,
        timeout: float = 300.0,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._selectors = _check_selectors(
            _LABELS if job_to_label_mapping is None else job_to_label_mapping
        )
        self._port = check_int("tf_server_port", tf_server_port, minimum=1, maximum=65535)
        if executable_location is None:
            is_within = bool(os.environ.get(_SERVICE_HOST))
            executable_location = "within_cluster" if is_within else "off_cluster"
        if executable_location not in ("within_cluster", "off_cluster"):
            raise ValueError(
                '`executable_location` must be "within_cluster" or "off_cluster", but got '
                f"{executable_location!r}"
            )
        self._location = executable_location
        if namespace is not None:
            check_string("namespace", namespace, empty=False)
        self._namespace = namespace
        self._num_tasks = _counts(num_tasks or {}, self._selectors)
        check_seconds("timeout", timeout)
        self._timeout = timeout
        self._client = override_client
        if override_client is None:
            load_package()
        self._found: tuple[str, int] | None = None

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the running pods, once all expected pods run.

        Raises:
            FailedPreconditionError: If a pod has ended, or no client can be configured.
            InvalidArgumentError: If the API refuses a selector, or its pods are in several
                namespaces.
            UnauthenticatedError: If the API refuses to list pods.
            UnavailableError: If pods do not run, or the API does not answer, after `timeout`
                seconds.
        """
        jobs = self._find_running_pods()
        return ClusterSpec(
            {
                name: [addresses.join(pod.ip, self._port) for pod in pods]
                for name, pods in jobs.items()
            }
        )

    def _find_task(self) -> tuple[str | None, int | None]:
        is_said = self._task_type is not None or self._task_id is not None
        if is_said or self._location == "off_cluster":
            return self._task_type, self._task_id
        if self._found is None:
            self._find_running_pods()
        return self._found or (None, None)

    def _find_running_pods(self) -> dict[str, list[Pod]]:
        """Return the pods of each type, in order, once all expected pods run."""
        jobs = wait_for(self._query_pods, what="cluster of running pods", seconds=self._timeout)
        own = socket.gethostname()
        for name, pods in jobs.items():
            for index, pod in enumerate(pods):
                if pod.name == own:
                    self._found = (name, index)
        return jobs

    def _query_pods(self) -> dict[str, list[Pod]]:
        client = self._client
        with nullcontext(client) if client is not None else open_api(self._location) as api:
            jobs = {
                name: [pod for selector in selectors for pod in self._list_pods(api, selector)]
                for name, selectors in self._selectors.items()
            }
        for pod in (pod for pods in jobs.values() for pod in pods):
            message = f'Pod "{pod.name}" is not running; phase: "{pod.phase}"'
            if pod.phase in _STARTING_PHASES:
                raise UnavailableError(message)
            if pod.phase != "Running":
                raise FailedPreconditionError(
                    f"{message}; delete it, or use labels that do not match it"
                )
            if not pod.ip:
                raise UnavailableError(f'Pod "{pod.name}" has no address yet')
        for name, count in self._num_tasks.items():
            if len(jobs[name]) != count:
                raise UnavailableError(
                    f"{len(jobs[name])} of {count} pods of {name!r} exist "
                    f"({', '.join(self._selectors[name])})"
                )
        return jobs

    def _list_pods(self, api: Any, selector: str) -> list[Pod]:
        pods = list_pods(api, selector, self._namespace)
        spaces = sorted({pod.namespace for pod in pods})
        if len(spaces) > 1:
            raise InvalidArgumentError(
                f"pods with the label {selector} are in several namespaces ({', '.join(spaces)}); "
                "choose one with namespace="
            )
        return sorted(pods, key=lambda pod: natural_sort_key(pod.name))


def natural_sort_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that compares numbers in names by value: "w-2" before "w-10"."""
    parts = re.split(r"(\d+)", name)
    key = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]
    return tuple(key), name


def _check_selectors(mapping: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(mapping, Mapping) or not mapping:
        raise TypeError(
            "`job_to_label_mapping` must be a dict from task types to label selectors, as in "
            f"{{'worker': ['app=train']}}, but got {mapping!r} of type {type(mapping).__name__}"
        )
    for name, selectors in mapping.items():
        check_string("task_type", name)
        check_strings(f"job_to_label_mapping[{name!r}]", selectors)
    return {name: tuple(selectors) for name, selectors in mapping.items()}


def _counts(num_tasks: Mapping[str, int], known: Mapping[str, object]) -> dict[str, int]:
    for name in num_tasks:
        if name not in known:
            raise ValueError(
                f"`num_tasks` has the task type {name!r}, but `job_to_label_mapping` has "
                f"only {', '.join(map(repr, known))}"
            )
    return {
        name: check_int(f"num_tasks[{name!r}]", count, minimum=0)
        for name, count in num_tasks.items()
    }
