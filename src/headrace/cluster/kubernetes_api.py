"""Pods, asked of the API of Kubernetes through the official client."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from headrace.cluster.packages import load
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)

__all__ = ["Location", "Pod", "list_pods", "load_package", "open_api"]

Location = Literal["within_cluster", "off_cluster"]

_REQUEST_SECONDS = 30.0
_NO_RIGHT = (401, 403)
_COMES_BACK = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""


@dataclass(frozen=True)
class Pod:
    """What counts of a pod here.

    Attributes:
        name: Unique in its namespace.
        namespace: Where it is.
        phase: As the API says, as in "Running"; "Terminating" for one that is being deleted.
        ip: Its address; "" where it has none yet.
    """

    name: str
    namespace: str
    phase: str
    ip: str

    @classmethod
    def of(cls, pod: Any) -> Pod:
        """Take it from what the official client returns."""
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
        FailedPreconditionError: It is not installed here.
    """
    return load(
        "kubernetes",
        needed_by="KubernetesClusterResolver",
        instead=", or give it a client (override_client)",
    )


@contextmanager
def open_api(location: Location) -> Iterator[Any]:
    """Yield a `CoreV1Api` with the rights of this process's pod, or those of kubectl here.

    Raises:
        FailedPreconditionError: There is no configuration, or it is wrong.
    """
    package = load_package()
    try:
        if location == "within_cluster":
            configuration = package.client.Configuration()
            package.config.load_incluster_config(client_configuration=configuration)
            client = package.client.ApiClient(configuration)
        else:
            # The package reads the variable when it is imported, and that may be too early.
            client = package.config.new_client_from_config(os.environ.get("KUBECONFIG"))
    except (package.config.ConfigException, OSError) as error:
        where = (
            "has this pod a service account?"
            if location == "within_cluster"
            else "does kubectl work here?"
        )
        raise FailedPreconditionError(
            f"no way to ask the API of Kubernetes ({location}): {error}; {where}"
        ) from error
    with client:
        yield package.client.CoreV1Api(client)


def list_pods(api: Any, selector: str, namespace: str | None) -> list[Pod]:
    """Return the pods that a label selector names.

    Args:
        api: A `CoreV1Api`.
        selector: As in "app=train,role=worker".
        namespace: Where; None: in all.

    Raises:
        InvalidArgumentError: The API does not understand the request.
        UnauthenticatedError: It refuses it.
        UnavailableError: It does not answer now.
    """
    asked = {"label_selector": selector, "_request_timeout": _REQUEST_SECONDS}
    try:
        if namespace is None:
            found = api.list_pod_for_all_namespaces(**asked)
        else:
            found = api.list_namespaced_pod(namespace=namespace, **asked)
    except Exception as error:
        where = "all namespaces" if namespace is None else f"namespace {namespace!r}"
        described = _described(error, f"pods with the label {selector} in {where}")
        if described is None:
            raise
        raise described from error
    return [Pod.of(pod) for pod in found.items]


def _described(error: Exception, what: str) -> HeadraceError | None:
    """Return what an error of the client means; None: it is none of the client's."""
    package = type(error).__module__.partition(".")[0]
    if package == "urllib3" or isinstance(error, OSError):
        return UnavailableError(f"the API of Kubernetes cannot be reached: {error}")
    if package != "kubernetes":
        return None
    status = getattr(error, "status", None) or 0
    words = f"{what} cannot be listed: the API says {status} ({_words_of(error)})"
    if status in _NO_RIGHT:
        return UnauthenticatedError(
            f"{words}; give this process's account a role that may list pods, or choose a "
            "namespace of its own (namespace=)"
        )
    if status in _COMES_BACK or not status:
        return UnavailableError(words)
    return InvalidArgumentError(words)


def _words_of(error: Exception) -> str:
    """Return what the API says itself, where it does."""
    try:
        return str(json.loads(str(getattr(error, "body", "")))["message"])
    except (ValueError, KeyError, TypeError):
        return str(getattr(error, "reason", error)).strip()
