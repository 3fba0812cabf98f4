"""Cluster of the tasks of one Slurm step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from headrace.arguments import check_flag, check_int, check_string
from headrace.cluster.environment import read_number, read_variable
from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.errors import InvalidArgumentError

__all__ = ["SlurmClusterResolver", "parse_hosts", "parse_tasks_per_node"]

_LAUNCHER = "srun, as a task of a Slurm step"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_MAX_PORT = 65535
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class SlurmClusterResolver(ClusterResolver):
    """Assigns a type, a number and a port to each task of the Slurm step of this process.

    Tasks are numbered as in Slurm, node after node; types take their numbers in alphabetical order.
    The tasks of a node listen at `port_base`, `port_base + 1` and so on.

    >>> import os
    >>> os.environ.update(  # srun sets these variables
    ...     SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="node[1-2]",
    ...     SLURM_STEP_TASKS_PER_NODE="1(x2)",
    ... )
    >>> hr.distribute.SlurmClusterResolver(auto_set_gpu=False).cluster_spec().as_dict()
    {'worker': ['node1:8888', 'node2:8888']}

    Args:
        jobs: Number of tasks of each type, as in {"ps": 1, "worker": 2}; None: all are workers.
        port_base: First port on each node.
        gpus_per_node: None uses the number that Slurm made visible.
        gpus_per_task: None divides the GPUs of a node equally among its tasks.
        tasks_per_node: One number for all nodes, or one for each; None uses Slurm's.
        auto_set_gpu: Whether the first call of `cluster_spec` restricts this task to its GPUs
            (CUDA_VISIBLE_DEVICES).
        rpc_layer: Prefix of addresses.

    Raises:
        FailedPreconditionError: If this process is not in a Slurm step.
        InvalidArgumentError: If more tasks or GPUs are requested than exist, or this task's number
            is outside the step.
        TypeError, ValueError: If `jobs` is not a mapping from types to counts.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._port_base = check_int("port_base", port_base, minimum=1, maximum=_MAX_PORT)
        check_flag("auto_set_gpu", auto_set_gpu, or_none=False)
        self._rank = read_number("SLURM_PROCID", launcher=_LAUNCHER)
        assigned = read_number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", launcher=_LAUNCHER)
        if self._rank >= assigned:
            raise InvalidArgumentError(
                f"SLURM_PROCID={self._rank} must be less than the {assigned} tasks of the "
                "step: is one of the variables left over from another step?"
            )
        hosts = parse_hosts(
            read_variable("SLURM_STEP_NODELIST", "SLURM_NODELIST", launcher=_LAUNCHER)
        )
        self._locations = list(_task_locations(hosts, _tasks_per_node(tasks_per_node, hosts)))
        self._jobs = {"worker": assigned} if jobs is None else _counts(jobs)
        asked = sum(self._jobs.values())
        if asked > min(assigned, len(self._locations)):
            raise InvalidArgumentError(
                f"`jobs` requires {asked} tasks ({self._jobs}), but the step has "
                f"{min(assigned, len(self._locations))}; start it with --ntasks={asked}"
            )
        most = max((number + 1 for _, number in self._locations), default=1)
        if port_base + most - 1 > _MAX_PORT:
            raise InvalidArgumentError(
                f"`port_base` must be at most {_MAX_PORT - most + 1}, since the {most} "
                f"tasks of a node listen at consecutive ports, but got {port_base}"
            )
        for name, value in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
            if value is not None:
                check_int(name, value, minimum=0)
        on_node = _visible_gpus() if gpus_per_node is None else gpus_per_node
        self._gpus = on_node // most if gpus_per_task is None else gpus_per_task
        if self._gpus * most > on_node:
            raise InvalidArgumentError(
                f"{most} tasks per node with {self._gpus} GPUs each require "
                f"{self._gpus * most} GPUs, but a node has {on_node}"
            )
        self._auto_set_gpu = auto_set_gpu
        self.task_type, self.task_id = self._own_task()

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's tasks; restricts this task to its GPUs if `auto_set_gpu` is set."""
        locations = iter(self._locations)
        cluster = {
            name: [
                f"{host}:{self._port_base + number}"
                for host, number in _first_locations(locations, count)
            ]
            for name, count in self._jobs.items()
        }
        if self._auto_set_gpu and self._gpus and self._rank < len(self._locations):
            self._auto_set_gpu = False
            first = self._locations[self._rank][1] * self._gpus
            last = first + self._gpus
            # Numbers or names from Slurm: other GPUs may belong to another job.
            said = [each.strip() for each in os.environ.get(_VISIBLE_GPUS, "").split(",")]
            given = said if len(said) >= last else [str(each) for each in range(last)]
            if len(said) != self._gpus or not all(said):  # else these are its own already
                os.environ[_VISIBLE_GPUS] = ",".join(given[first:last])
        return ClusterSpec(cluster)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return the number of GPUs of a task."""
        return {"GPU": self._gpus} if self._gpus else {}

    def _own_task(self) -> tuple[str | None, int | None]:
        before = 0
        for name, count in self._jobs.items():
            if self._rank < before + count:
                return name, self._rank - before
            before += count
        return None, None


def _counts(jobs: object) -> dict[str, int]:
    """Return the requested number of tasks of each type, in alphabetical order."""
    if not isinstance(jobs, Mapping):
        raise TypeError(
            "`jobs` must be a dict from task types to counts, as in {'ps': 1, 'worker': 2}, but "
            f"got {jobs!r} of type {type(jobs).__name__}"
        )
    for name in jobs:
        check_string("task_type", name)
    return {
        name: check_int(f"jobs[{name!r}]", count, minimum=0) for name, count in sorted(jobs.items())
    }


def parse_hosts(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm list such as "n[01-02,7],m5", in its order.

    Raises:
        InvalidArgumentError: If it is malformed.
    """
    if nodelist.count("[") != nodelist.count("]"):
        raise InvalidArgumentError(f"unbalanced brackets in the list of Slurm nodes {nodelist!r}")
    return [host for part in _split_nodelist(nodelist) for host in _expand_brackets(part, nodelist)]


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node in Slurm's format: "3(x2),1" is [3, 3, 1].

    Raises:
        InvalidArgumentError: If it is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part.strip())
        if found is None:
            raise InvalidArgumentError(
                f"invalid list of tasks per node, expected a form like '3(x2),1', got {text!r}"
            )
        counts.extend([int(found[1])] * int(found[2] or 1))
    return counts


def _split_nodelist(nodelist: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets."""
    depth, begun = 0, 0
    for position, sign in enumerate(nodelist):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield nodelist[begun:position].strip()
            begun = position + 1
    yield nodelist[begun:].strip()


def _expand_brackets(part: str, nodelist: str) -> list[str]:
    """Return the hosts of one part, which may contain several brackets at any position."""
    found = _BRACKETS.search(part)
    if found is None:
        if not part or "[" in part or "]" in part:
            raise InvalidArgumentError(
                "invalid list of Slurm nodes, expected a form like 'n[01-02,7],m5', got "
                f"{nodelist!r}"
            )
        return [part]
    before, after = part[: found.start()], part[found.end() :]
    return [
        host
        for number in _expand_range(found[1], nodelist)
        for host in _expand_brackets(f"{before}{number}{after}", nodelist)
    ]


def _expand_range(text: str, nodelist: str) -> Iterator[str]:
    """Yield the numbers of a bracket, with their leading zeros."""
    for each in text.split(","):
        first, dash, last = each.strip().partition("-")
        if not first.isdigit() or (dash and (not last.isdigit() or int(last) < int(first))):
            raise InvalidArgumentError(f"invalid range of Slurm nodes {each!r} in {nodelist!r}")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _task_locations(hosts: list[str], counts: list[int]) -> Iterator[tuple[str, int]]:
    """Yield the host of each task, and the task's number on the host."""
    if len(hosts) != len(counts):
        raise InvalidArgumentError(
            f"the step has {len(hosts)} nodes ({', '.join(hosts)}), but numbers of "
            f"tasks for {len(counts)} nodes: {counts}"
        )
    for host, count in zip(hosts, counts, strict=True):
        yield from ((host, number) for number in range(count))


def _tasks_per_node(asked: int | Sequence[int] | None, hosts: list[str]) -> list[int]:
    if asked is None:
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        return parse_tasks_per_node(read_variable(*names, launcher=_LAUNCHER))
    if isinstance(asked, int):
        return [check_int("tasks_per_node", asked, minimum=1)] * len(hosts)
    return [check_int("tasks_per_node", each, minimum=0) for each in asked]


def _first_locations(locations: Iterator[tuple[str, int]], count: int) -> Iterator[tuple[str, int]]:
    return (next(locations) for _ in range(count))


def _visible_gpus() -> int:
    visible = os.environ.get(_VISIBLE_GPUS)
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    return int(on_node) if on_node.isdigit() else 0
