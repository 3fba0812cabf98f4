"""What a cluster must have, so that parameter servers can train in it."""

from __future__ import annotations

from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.roles import CHIEF, EVALUATOR, PS, TYPES, WORKER
from headrace.cluster.spec import ClusterSpec

__all__ = ["check_resolver", "checked_cluster", "server_addresses", "worker_addresses"]


def check_resolver(resolver: object) -> None:
    """Raise TypeError for what is no resolver, and say where there is one."""
    if isinstance(resolver, ClusterResolver):
        return
    cure = ""
    if isinstance(resolver, ClusterSpec):
        cure = "; hr.distribute.SimpleClusterResolver(spec) is one"
    elif isinstance(getattr(resolver, "cluster_resolver", None), ClusterResolver):
        cure = "; its `cluster_resolver` is one"
    raise TypeError(
        f"`cluster_resolver` must be a ClusterResolver, but got {resolver!r:.80} of type "
        f"{type(resolver).__name__}{cure}"
    )


def checked_cluster(resolver: ClusterResolver) -> ClusterSpec:
    """Return the tasks of a cluster that has what is needed.

    Raises:
        ValueError: It says what is missing, or too much.
    """
    spec = resolver.cluster_spec()
    if not spec:
        raise ValueError(
            f"Cluster spec must be non-empty in {type(resolver).__name__}: name the addresses of "
            'the workers and of the parameter servers ("ps"), in a resolver or in TF_CONFIG'
        )
    allowed = ", ".join(map(repr, TYPES))
    strange = [name for name in spec.jobs if name not in TYPES]
    if strange:
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {allowed}, and the "
            f"cluster spec has {', '.join(map(repr, strange))}"
        )
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is not None and task_type not in TYPES:
        raise ValueError(f"Unrecognized task_type: {task_type}, valid task types are: {allowed}")
    if task_type not in (None, EVALUATOR, *spec.jobs):
        raise ValueError(f"task_type {task_type!r} not found in cluster_spec: {spec}")
    for single in (CHIEF, EVALUATOR):
        if single in spec.jobs and spec.num_tasks(single) > 1:
            raise ValueError(f"There must be at most one {single!r} job: {spec}")
    if task_type in spec.jobs and task_id is not None:
        last = max(spec.task_indices(task_type), default=-1)
        if task_id > last:
            raise ValueError(
                f"The task_id {task_id} exceeds the maximum id of {task_type}: it is {last}"
            )
    for needed in (PS, WORKER):
        if needed not in spec.jobs or not spec.num_tasks(needed):
            raise ValueError(f"There must be at least one {needed}: {spec}")
    return spec


def server_addresses(spec: ClusterSpec) -> list[str]:
    """Return where the parameter servers are, in the order of their numbers.

    Raises:
        ValueError: Their numbers have gaps.
    """
    numbers = spec.task_indices(PS)
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"parameter servers must be numbered from 0 without gaps, but have {numbers}"
        )
    return [_plain(spec.task_address(PS, number)) for number in numbers]


def worker_addresses(spec: ClusterSpec) -> list[str]:
    """Return where the workers are, in the order of their numbers."""
    numbers = spec.task_indices(WORKER) if WORKER in spec.jobs else []
    return [_plain(spec.task_address(WORKER, number)) for number in numbers]


def _plain(address: str) -> str:
    """Return "host:port" of what some resolvers write: "grpc://host:port"."""
    return address.rpartition("://")[2]
