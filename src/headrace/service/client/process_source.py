"""Source that reads a plan through worker processes of this machine (`Dataset.in_processes`).

Rule 1. The plan is read in the order of one process, so its positions do not depend on the number
        of processes.
Rule 2. A data service runs the plan itself: it replaces the source by the plan
        (`rewrites.process_pools.inline_pools`).
Rule 3. Whoever shards a dataset shards the plan (`rewrites.process_pools.shard_in_pools`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from headrace.errors import DataLossError, FailedPreconditionError
from headrace.plan.determinism import collect_default_seeds
from headrace.plan.elements import FromSource, GatherIndices, ReadIndices
from headrace.plan.node import Node
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE, Position, Reader
from headrace.plan.traverse import cardinality, find_leaves, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.optimize import prepare, proved_spec
from headrace.rewrites.partition import PlanPartition, partition_with_mode
from headrace.service.client.options import ReadOptions
from headrace.service.client.source import RemoteSource
from headrace.service.client.visitation import find_exclusive_reason, partition_for
from headrace.service.modes.ordered.ordered_partition import OrderedPartition

__all__ = ["PoolAccess", "ProcessSource"]

_log = logging.getLogger(__name__)

_READING_STEPS = (FromSource, GatherIndices, ReadIndices)
_MAX_REASONS = 3


class PoolAccess(Protocol):
    """Access of one dataset to the worker processes."""

    num_processes: int

    def connect(self, plan: Node) -> tuple[str, str]:
        """Start the processes if necessary; return the service's address and the dataset's ID."""

    def for_derived_dataset(self) -> PoolAccess:
        """Return the access of another dataset, whose processes run while either exists."""

    def is_first_warning(self) -> bool:
        """Return True on the first call: for a warning that is logged once."""

    def without_ownership(self) -> PoolAccess:
        """Return an access that does not keep the processes running and cannot `connect`."""

    def exit_reasons(self) -> list[str]:
        """Return a reason for each process that ended unexpectedly, the latest last."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProcessSource(RemoteSource):
    """Elements of a plan that worker processes of this machine compute.

    Attributes:
        pool: Access to the processes, which start when the source is first opened.
    """

    is_process_pool: ClassVar[bool] = True

    pool: PoolAccess = field(repr=False)

    @classmethod
    def of_plan(cls, plan: Node, options: ReadOptions, pool: PoolAccess) -> ProcessSource:
        """Return the source of a plan.

        Raises:
            FailedPreconditionError: If worker processes cannot run a part of the plan.
        """
        try:
            partition = partition_for(plan, options)
        except FailedPreconditionError as error:
            raise FailedPreconditionError(_in_terms_of_processes(str(error))) from None
        assert partition is not None
        return cls(
            options=options,
            dataset_id="",
            cardinality=cardinality(plan),
            spec=proved_spec(plan),
            partition_mode=partition.mode,
            num_splits=partition.num_splits,
            exclusive_reason=find_exclusive_reason(partition),
            remote_plan=plan,
            ordered_partition=OrderedPartition(plan),
            fixed_seeds=tuple(collect_default_seeds(plan)),
            pool=pool,
        )

    def with_pool_plan(self, plan: Node) -> ProcessSource:
        return self.of_plan(plan, self.options, self.pool.for_derived_dataset())

    def __repr__(self) -> str:
        return f"ProcessSource(num_processes={self.pool.num_processes})"

    @property
    def explanation(self) -> str:
        text = (
            f"workers: {self.pool.num_processes} processes of this machine\n{super().explanation}"
        )
        return text if (problem := self._find_problem()) is None else f"{text}\n  {problem}"

    def explain_unusable_position(self, mode: str, *, is_single_process: bool) -> str:
        reason = super().explain_unusable_position(mode, is_single_process=is_single_process)
        return _in_terms_of_processes(reason)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        assert self.remote_plan is not None
        problem = self._find_problem()
        if problem is not None and self.pool.is_first_warning():
            _log.warning("in_processes(%d): %s", self.pool.num_processes, problem)
        address, dataset_id = self.pool.connect(self.remote_plan)
        # Readers are in reference cycles, which must not keep the processes running. The iterator
        # holds the plan, and so this source.
        connected = dataclasses.replace(
            self,
            pool=self.pool.without_ownership(),
            options=dataclasses.replace(self.options, service=address),
            dataset_id=dataset_id,
        )
        return RemoteSource.open(connected, start, stop, position, pass_number=pass_number)

    @property
    def lost_split_error(self) -> Callable[[int], Exception]:
        return self._make_lost_split_error

    def _make_lost_split_error(self, split: int) -> DataLossError:
        partition = self._chosen_partition()
        steps = [step_name(node) for node in walk(partition.worker_stage) if _calls_function(node)]
        reasons = self.pool.exit_reasons()[-_MAX_REASONS:]
        ends = f" ({', '.join(reasons)})" if reasons else ""
        return DataLossError(
            f"in_processes({self.pool.num_processes}): every process that computed "
            f"{_describe_split(partition, split)} ended unexpectedly{ends}, so its remaining "
            f"elements are skipped. Steps that ran there: "
            f"{', '.join(steps) or 'none with a function'}. To find the cause, read the dataset "
            "without in_processes"
        )

    def _chosen_partition(self) -> PlanPartition:
        assert self.remote_plan is not None
        assert self.ordered_partition is not None
        return partition_with_mode(prepare(self.remote_plan), self.ordered_partition.mode)

    def _find_problem(self) -> str | None:
        """Return why the processes do not compute functions in parallel; None if they do."""
        partition = self._chosen_partition()
        worker_steps = [node for node in walk(partition.worker_stage) if _calls_function(node)]
        if not worker_steps:
            placement = next(
                (each for each in partition.placements if each.runs_on == "client"), None
            )
            reason = (
                ""
                if placement is None
                else f": {placement.step} runs in this process, because it {placement.reason}"
            )
            return (
                f"no function runs in the worker processes{reason}; move in_processes before the "
                "first step that runs in this process, and functions before in_processes"
            )
        if 0 < partition.num_splits < self.pool.num_processes:
            leaves = find_leaves(partition.worker_stage)
            names = ", ".join(dict.fromkeys(step_name(leaf) for leaf in leaves))
            return (
                f"at most {partition.num_splits} of {self.pool.num_processes} processes can work, "
                f"because the data of {names} is divided into {partition.num_splits} splits "
                "(elements read by index, or files); a generator is one split"
            )
        return None


def _in_terms_of_processes(message: str) -> str:
    """Return a message about `distribute` as one about `in_processes`."""
    return message.replace("`distribute`", "`in_processes`")


def _calls_function(node: Node) -> bool:
    """Return whether a step runs a user's Python code."""
    if isinstance(node, _READING_STEPS):
        source = node.source
        is_own = type(source).__module__.startswith("headrace.")
        return source.runs_user_code or not is_own
    return any(callable(value) for value in node.parameters().values())


def _describe_split(partition: PlanPartition, split: int) -> str:
    """Return where a split is in the data, for messages."""
    (reads, *others) = [
        node for node in walk(partition.client_stage) if isinstance(node, ReadSplits)
    ]
    if others or not reads.positions_per_split:
        return f"split {split}"
    index = split - reads.first_split
    if reads.strides and reads.strides[-1] != INFINITE:
        index %= reads.strides[-1]  # in its epoch
    sources = [node for node in walk(partition.worker_stage) if isinstance(node, _READING_STEPS)]
    source = f" of {step_name(sources[0])}" if sources else ""
    first = index * reads.positions_per_split
    if reads.positions_per_split == 1:
        return f"position {first}{source}"
    return f"positions {first} to {first + reads.positions_per_split - 1}{source}"
