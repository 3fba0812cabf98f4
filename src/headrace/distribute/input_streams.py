"""Streams: parts of a dataset that workers read in parallel, and their assignment to workers.

A dataset that N workers shard by files, or by a hint, has N streams, one for each worker. A dataset
sharded by batches has one stream that all workers read; so has the dataset of a single worker. A
state with N streams can be restored with another number M of workers:

    M = N      worker w reads stream w
    M > N      worker w reads stream w mod N; the readers of one stream divide its batches
    M < N      worker w reads streams w, w + M, w + 2M, ..., one after another

Rule 1. A state has a position for each stream, independent of its readers. So M workers resume
        where N workers stopped: no element is lost or duplicated.
Rule 2. Workers that read a stream together have the same position in it at each step.
Rule 3. If each worker reads the whole dataset, the streams are copies: with another number of
        workers, a worker resumes from any one of the positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.distribute.input_context import InputContext
from headrace.distribute.step_inputs import StepColumns, StepInput
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.execution.build import opens_files
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy
from headrace.plan.traverse import merged_options
from headrace.rewrites.process_pools import shard_in_pools
from headrace.rewrites.reader_agreement import explain_reader_differences, find_sources
from headrace.rewrites.shard import shard_files, shard_hints

__all__ = [
    "InputStreams",
    "StreamAssignment",
    "WorkerShard",
    "assign_streams",
    "auto_shard",
    "is_merged_state",
    "is_read_by_all",
    "merge_states",
]


@dataclass(frozen=True)
class StreamAssignment:
    """Assignment of a stream to one of its readers.

    Attributes:
        stream: Number of the stream.
        num_streams: Number of streams.
        num_readers: Number of workers that read the stream together.
        reader_index: Index of this worker among them.
        num_readers_before: Number of workers that read the streams before it.
    """

    stream: int
    num_streams: int
    num_readers: int = 1
    reader_index: int = 0
    num_readers_before: int = 0


def assign_streams(worker: int, workers: int, streams: int) -> list[StreamAssignment]:
    """Return the streams that a worker reads, in order.

    >>> [(each.stream, each.num_readers, each.reader_index) for each in assign_streams(2, 3, 2)]
    [(0, 2, 1)]
    >>> [each.stream for each in assign_streams(0, 2, 5)]
    [0, 2, 4]
    """
    if workers < streams:
        return [
            StreamAssignment(each, streams, num_readers_before=worker)
            for each in range(worker, streams, workers)
        ]
    counts = [len(range(each, workers, streams)) for each in range(streams)]
    stream, reader = worker % streams, worker // streams
    return [StreamAssignment(stream, streams, counts[stream], reader, sum(counts[:stream]))]


class InputStreams(StepInput):
    """Reads the streams assigned to a worker, one after another.

    Args:
        open_stream: Returns the input of an assigned stream, at its beginning.
        worker: Index of this worker.
        workers: Number of workers.
        streams: Number of streams without a restored state.
        kind: "shared": the streams of a state are divided among the current workers. "copies": each
            worker reads all elements, so any position of the state fits. "own": the user created a
            separate dataset for each worker, so the number of workers must not change.
    """

    def __init__(
        self,
        open_stream: Callable[[StreamAssignment], StepInput],
        worker: int = 0,
        workers: int = 1,
        streams: int = 1,
        kind: str = "shared",
    ) -> None:
        self._open_stream = open_stream
        self._worker, self._workers = worker, workers
        self._kind = kind
        self._start(streams)

    def _start(self, streams: int) -> None:
        self._num_streams = streams
        self._assignments = assign_streams(self._worker, self._workers, streams)
        self._inputs = [self._open_stream(assignment) for assignment in self._assignments]
        self._current = 0

    def next_step(self) -> StepColumns | None:
        while self._current < len(self._inputs):
            step = self._inputs[self._current].next_step()
            if step is not None:
                return step
            self._current += 1
        return None

    def get_state(self) -> dict[str, Any]:
        positions = [
            [assignment.stream, step_input.get_state()]
            for assignment, step_input in zip(self._assignments, self._inputs, strict=True)
            if assignment.reader_index == 0
        ]
        return {"streams": self._num_streams, "positions": positions}

    def set_state(self, state: dict[str, Any]) -> None:
        positions = state["streams"]
        if self._kind == "own" and len(positions) != self._workers:
            raise FailedPreconditionError(
                f"the state holds the positions of {len(positions)} datasets, one per worker, but "
                f"there are {self._workers} workers; resume with {len(positions)} workers, or "
                "distribute the dataset with distribute_dataset"
            )
        streams = self._workers if self._kind == "copies" else len(positions)
        if streams != self._num_streams:
            self.close()
            self._start(streams)
        self._current = 0
        for assignment, step_input in zip(self._assignments, self._inputs, strict=True):
            position = positions[assignment.stream % len(positions)]
            if position is None:
                raise FailedPreconditionError(
                    f"the state lacks the position of stream {assignment.stream} of "
                    f"{len(positions)}: one worker saved it without the others"
                )
            step_input.set_state(position)

    def close(self) -> None:
        for step_input in self._inputs:
            step_input.close()


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all workers, given each worker's `InputStreams.get_state`."""
    positions = dict(position for state in states for position in state["positions"])
    return {"streams": [positions.get(number) for number in range(states[0]["streams"])]}


def is_merged_state(state: Any) -> bool:
    """Return whether a value looks like a result of `merge_states`."""
    streams = state.get("streams") if isinstance(state, dict) else None
    return (
        isinstance(streams, list)
        and bool(streams)
        and all(
            position is None
            or (isinstance(position, dict) and {"inputs", "rows"} <= position.keys())
            for position in streams
        )
    )


# --- Worker shards by the dataset's `auto_shard_policy` -------------------------------------------

_log = logging.getLogger(__name__)

_SHARDING_POLICIES = (AutoShardPolicy.AUTO, AutoShardPolicy.FILE, AutoShardPolicy.DATA)
"""Policies that shard datasets which are not sharded yet."""


@dataclass(frozen=True)
class WorkerShard:
    """Shard of one worker.

    Attributes:
        plan: Plan of the shard.
        policy: Policy by which it was sharded; never AUTO.
    """

    plan: Node
    policy: AutoShardPolicy

    @property
    def splits_each_batch(self) -> bool:
        """Whether all workers read the same batches, and each uses a part of each."""
        return self.policy is AutoShardPolicy.DATA


def auto_shard(plan: Node, context: InputContext) -> WorkerShard:
    """Return one worker's shard of a dataset.

    Raises:
        InvalidArgumentError: If there are fewer files than workers, or if workers that each use a
            part of each batch would read different batches.
        NotFoundError: If a dataset to be sharded by files does not read files.
    """
    policy = _policy(plan)
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if workers == 1 or is_read_by_all(plan):
        return WorkerShard(plan, AutoShardPolicy.OFF)
    try:
        if policy is AutoShardPolicy.HINT:
            shard = shard_in_pools(plan, lambda opened: shard_hints(opened, workers, worker))
            return WorkerShard(shard, policy)
        if policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
            shard = shard_in_pools(
                plan, lambda opened: shard_files(opened, workers, worker, opens_files)
            )
            return WorkerShard(shard, AutoShardPolicy.FILE)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"AutoShardPolicy.{policy.name} cannot shard the dataset among {workers} workers: "
            f"{error}. Set options.auto_shard_policy to AutoShardPolicy.DATA, or to OFF to read "
            "all of it on every worker"
        ) from error
    except NotFoundError as error:
        if policy is not AutoShardPolicy.AUTO:
            raise NotFoundError(
                f"AutoShardPolicy.FILE cannot shard the dataset among {workers} workers: "
                f"{error}. Set options.auto_shard_policy to AutoShardPolicy.DATA, AUTO or OFF"
            ) from error
        _log.info("AutoShardPolicy.AUTO shards the dataset by DATA, not by FILE: %s", error)
        policy = AutoShardPolicy.DATA
    if policy is AutoShardPolicy.DATA:
        _check_same_batches(plan, workers)
    return WorkerShard(plan, policy)


def is_read_by_all(plan: Node) -> bool:
    """Return whether each worker reads the whole dataset, however many there are."""
    policy = _policy(plan)
    service_sources = [
        source
        for source in find_sources(plan)
        if source.replay_buffers is not None and not source.is_process_pool
    ]
    is_shared = any(getattr(source, "job_name", None) is not None for source in service_sources)
    # The data service shards a job among its clients, or copies it, as the user chose.
    return (
        policy is AutoShardPolicy.OFF
        or (bool(service_sources) and policy is AutoShardPolicy.AUTO)
        or (is_shared and policy in _SHARDING_POLICIES)
    )


def _policy(plan: Node) -> AutoShardPolicy:
    return merged_options(plan).auto_shard_policy or AutoShardPolicy.AUTO


def _check_same_batches(plan: Node, workers: int) -> None:
    difference = explain_reader_differences(plan)
    if difference:
        raise InvalidArgumentError(
            f"AutoShardPolicy.DATA cannot shard the dataset among {workers} workers, which must "
            f"all read the same batches: {difference}. Set options.auto_shard_policy to "
            "AutoShardPolicy.OFF to read all of it on every worker, or to FILE if it is read "
            "from files"
        )
