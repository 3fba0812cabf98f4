"""Partition of a plan for ordered reading, decided once, when it is first needed.

Whether steps move below a shuffle of values depends on the bytes that the shuffle would hold in the
client. If specs do not give the size of an element, some elements are computed in this process to
measure it; those steps would otherwise run here. The decision holds for all epochs, for `explain`,
and for the job. A state names its partition mode, and reading resumes with that mode.

Rule. No user function is called before reading begins, or if the decision does not depend on it.
"""

from __future__ import annotations

import functools
import threading

from headrace.data.inference import largest_sample_bytes
from headrace.errors import describe_error
from headrace.plan.node import Node
from headrace.plan.user_function import step_name
from headrace.rewrites.explain import explain_partition
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition import (
    PartitionMode,
    PlanPartition,
    partition_plan,
    partition_with_mode,
)
from headrace.rewrites.shuffle_memory import bytes_from_spec

__all__ = ["OrderedPartition"]

_SAMPLE_ELEMENTS = 4
"""Number of elements that are computed to measure their size."""
_MAX_REASON_LENGTH = 200


class OrderedPartition:
    """Partition of a plan that is read in order.

    Args:
        plan: The plan as written.
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._chosen: PlanPartition | None = None
        self._notes: list[str] = []

    @property
    def mode(self) -> PartitionMode:
        """Mode that determines the worker stage."""
        return self._partition().mode

    def explain(self) -> str:
        """Return a description of the partition."""
        return explain_partition(self._partition(), self._notes)

    def fix_mode(self, mode: PartitionMode) -> None:
        """Use this mode, that of the state to resume from, unless the partition was decided."""
        with self._lock:
            if self._chosen is None:
                self._chosen = partition_with_mode(prepare(self._plan), mode)
                self._notes = [
                    "partitioned as in the restored state, without measuring element sizes"
                ]

    def _partition(self) -> PlanPartition:
        with self._lock:
            if self._chosen is None:
                self._notes = []
                bytes_of = functools.cache(self._bytes_of)
                self._chosen = partition_plan(self._plan, ordered=True, element_bytes=bytes_of)
            return self._chosen

    def _bytes_of(self, node: Node) -> int | None:
        """Return the bytes of an element of a step; if specs lack them, of the largest sample."""
        size, reason = bytes_from_spec(node), "the dataset has no elements"
        if size is not None:
            return size
        try:
            size = largest_sample_bytes(node, _SAMPLE_ELEMENTS)
        except Exception as error:
            # For example, if only workers have the files; the client then runs these steps.
            reason = describe_error(error).partition("\n")[0][:_MAX_REASON_LENGTH]
        self._notes.append(
            f"{step_name(node)}: unknown element size: {reason}"
            if size is None
            else f"{step_name(node)}: {size:,} bytes per element, measured: the largest of "
            f"{_SAMPLE_ELEMENTS} elements that were computed in this process"
        )
        return size

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self._plan, None if self._chosen is None else self._chosen.mode)


def _restore(plan: Node, mode: PartitionMode | None) -> OrderedPartition:
    partition = OrderedPartition(plan)
    if mode is not None:
        partition.fix_mode(mode)
    return partition
