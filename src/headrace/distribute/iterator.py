"""Iterator over a distributed dataset: one step at a time, for all local replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from headrace.arguments import check_state_version
from headrace.data.optional import Optional
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_inputs import step_spec
from headrace.distribute.execution_context import ReplicaView, current_context
from headrace.distribute.input_streams import InputStreams, is_merged_state, merge_states
from headrace.distribute.step_inputs import StepColumns
from headrace.distribute.values import PerReplica, PerReplicaSpec
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from headrace.frameworks import batch_shards
from headrace.frameworks.framework import Device, Framework

__all__ = [
    "VERSION",
    "DevicePlacement",
    "DistributedIterator",
    "GlobalArrayPlacement",
    "HostPlacement",
    "StepPlacement",
]

VERSION = 1
"""Version of states."""


class DistributedIterator:
    """Yields the local replicas' values, step by step; `iter` of a distributed dataset makes it.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not thread-safe.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with iter(strategy.distribute_dataset(hr.Dataset.range(4).batch(4))) as iterator:
    ...     step = iterator.get_next()
    ...     iterator.get_next_as_optional().has_value()
    False
    >>> [rows.tolist() for rows in step.values]
    [[0, 1], [2, 3]]

    Args:
        step_input: Input of the replicas.
        wraps: Whether leaves are `PerReplica`s; otherwise they are the only replica's values.
        element_spec: Returns the spec.
        agreement: Tells at each step whether any worker has data, so that all workers end at the
            same step.
        make_empty_step: Returns a step without rows, given the spec of the other workers' rows if
            it is known.
        placement: Conversion and placement of the rows; None keeps NumPy arrays.
        check_jobs: Raises if a job was read completely before; called at an end without a step.
    """

    def __init__(
        self,
        step_input: InputStreams,
        wraps: bool,
        element_spec: Callable[[], Spec],
        agreement: StepAgreement | None = None,
        make_empty_step: Callable[[Spec | None], StepColumns] | None = None,
        placement: StepPlacement | None = None,
        check_jobs: Callable[[], None] | None = None,
    ) -> None:
        self._step_input = step_input
        self._wraps = wraps
        self._element_spec = element_spec
        self._agreement = agreement
        self._make_empty_step = make_empty_step
        self._placement = placement or HostPlacement()
        #: Step (or None) that was read and not yet agreed on by the workers.
        self._read: list[StepColumns | None] = []
        #: Step that was agreed on and not yet delivered; () has no rows.
        self._step: StepColumns | tuple[()] | None = None
        self._has_ended = False
        #: None after the first step.
        self._check_jobs = check_jobs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if isinstance(current_context.get(), ReplicaView):
            raise InvalidArgumentError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        delivered = None
        while delivered is None:
            if self._step is None:  # otherwise an interruption came during its delivery
                self._step = self._next_step()
            try:
                delivered = self._placement.place(*(self._step or self._empty_step()), self._wraps)
            except Exception:
                self._step = None
                raise
            self._step = None
        return delivered[0]

    def _next_step(self) -> StepColumns | tuple[()]:
        """Return the next step; () has no rows. An interruption loses nothing (`step_inputs`)."""
        if self._has_ended:
            raise StopIteration
        step = self._step_input.next_step() if self._agreement is None else self._next_agreed_step()
        if step is None:
            self._has_ended = True
            self.close()
            if self._check_jobs is not None:
                self._check_jobs()
            raise StopIteration
        self._check_jobs = None
        return step

    def _empty_step(self) -> StepColumns:
        assert self._make_empty_step is not None
        return self._make_empty_step(None if self._agreement is None else self._agreement.spec)

    def _next_agreed_step(self) -> StepColumns | tuple[()] | None:
        """Return the next step; () has no rows; None if no worker has data."""
        assert self._agreement is not None
        if not self._read:  # otherwise an interruption came while waiting for other workers
            self._read.append(self._step_input.next_step())
        (step,) = self._read
        if step is not None and self._agreement.wants_spec:
            has_data = self._agreement.any_has_data(True, step_spec(*step))
        else:
            has_data = self._agreement.any_has_data(step is not None)
        self._read = []
        return () if step is None and has_data else step

    def get_next(self) -> Any:
        """Return the replicas' next values.

        Raises:
            OutOfRangeError: At the end; also a StopIteration.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("end of the distributed dataset") from None

    def get_next_as_optional(self) -> Optional:
        """Return the replicas' next values, or an `Optional` without a value at the end."""
        for step in self:
            return Optional(step)
        return Optional()

    @property
    def element_spec(self) -> Spec:
        """Spec of the results of `next`; with several replicas each leaf is a `PerReplicaSpec`."""
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next step as a JSON value; all workers must call it.

        The value is the same on all workers. `set_state` on an iterator of the same dataset resumes
        there, even with another number of replicas or workers: no element is lost or duplicated.
        """
        if self._read or self._step is not None:
            raise FailedPreconditionError(
                "the last step was interrupted after it was read; save the state after the next "
                "step"
            )
        local_state = self._step_input.get_state()
        states = (
            [local_state] if self._agreement is None else self._agreement.gather_values(local_state)
        )
        return {"version": VERSION, "distributed": merge_states(states)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to the position at which `state` was taken.

        Raises:
            FailedPreconditionError: If the state is of another dataset, or of one distributed in
                another way.
        """
        if not isinstance(state, dict) or not {"version", "distributed"} <= state.keys():
            _refuse_state(state)
        check_state_version(state["version"], VERSION)
        if not is_merged_state(state["distributed"]):
            _refuse_state(state)
        self._step_input.set_state(state["distributed"])
        if self._agreement is not None:
            self._agreement.reset()
        self._read, self._step = [], None
        self._has_ended = False

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files, and end the iterator. Idempotent."""
        self._has_ended, self._step = True, None
        self._step_input.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_state(state: Any) -> NoReturn:
    raise TypeError(
        f"`state` must be a value of a DistributedIterator's `get_state`, but got {state!r:.80}"
    )


# --- Conversion and placement of a step's rows ----------------------------------------------------
#
#     HostPlacement          NumPy arrays
#     DevicePlacement        arrays of a framework, each on the device of its replica
#     GlobalArrayPlacement   arrays over the devices of all replicas


class StepPlacement(ABC):
    """Converts the local replicas' values of each leaf into one value.

    Attributes:
        keeps_order: Whether rows of a batch that all workers read must keep their order.
    """

    keeps_order = False

    @abstractmethod
    def place(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Return the step in a tuple; None drops the step.

        Args:
            structure: Structure of an element.
            columns: For each leaf the local replicas' values.
            wraps: Whether leaves are `PerReplica`s; otherwise they are the only replica's values.
        """

    @abstractmethod
    def spec(self, piece: Spec, num_local: int, num_replicas: int, wraps: bool) -> Spec:
        """Return the spec of the result of `place`.

        Args:
            piece: Spec of a replica's piece, as NumPy arrays.
            num_local: Number of local replicas.
            num_replicas: Number of replicas of all workers.
            wraps: As in `place`.
        """


class HostPlacement(StepPlacement):
    """Returns the NumPy arrays unchanged (`StepPlacement`)."""

    def place(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Wrap the arrays."""
        if not wraps:
            return (unflatten(structure, [column[0] for column in columns]),)
        return (unflatten(structure, [PerReplica(column) for column in columns]),)

    def spec(self, piece: Spec, num_local: int, num_replicas: int, wraps: bool) -> Spec:
        """Return one spec per replica."""
        if not wraps:
            return piece
        return map_leaves(lambda leaf: PerReplicaSpec(*[leaf] * num_local), piece)


class DevicePlacement(HostPlacement):
    """Puts each replica's arrays on its device.

    Args:
        framework: Framework of the resulting arrays.
        devices: Devices of the local replicas.
    """

    def __init__(self, framework: Framework, devices: Sequence[Device]) -> None:
        self._framework = framework
        self._devices = list(devices)

    def place(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Put the arrays on devices, and wrap them; strings stay on the host."""
        count = len(self._devices)
        values = [value for column in columns for value in column]
        put = self._framework.put(values, self._devices * len(columns))
        columns_on_devices = [put[start : start + count] for start in range(0, len(put), count)]
        return super().place(structure, columns_on_devices, wraps)

    def spec(self, piece: Spec, num_local: int, num_replicas: int, wraps: bool) -> Spec:
        """Return the spec with the framework's dtypes."""
        return super().spec(_convert_spec(piece, self._framework), num_local, num_replicas, wraps)


class GlobalArrayPlacement(StepPlacement):
    """Creates one array over all devices for each leaf; each replica's rows are on its device.

    Args:
        framework: Framework that supports such arrays.
        devices: Devices of the replicas of all workers.
        remainder: Handling of steps in which replicas have different numbers of rows.
        gather_row_counts: Returns the row counts of all replicas, given those of the local ones.
        size: Rows of a replica in a full batch, if known.
    """

    keeps_order = True

    def __init__(
        self,
        framework: Framework,
        devices: tuple[Device, ...],
        remainder: str,
        gather_row_counts: Callable[[list[int]], list[int]],
        size: int | None,
    ) -> None:
        self._framework = framework
        self._remainder = remainder
        self._gather_row_counts = gather_row_counts
        self._size = size
        program = framework.replica_programs()
        self._layout = program.make_layout(devices)
        self._build_array = program.global_array

    def place(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Equalize row counts as `remainder` says, and create global arrays."""
        rows = batch_shards.shard_row_counts(structure, columns)
        row_count = batch_shards.rows_per_shard(
            self._remainder, self._gather_row_counts(rows), self._size
        )
        if row_count is None:
            return None
        paths = structure.paths
        if self._remainder != "pad":
            arrays = [
                self._build_array(self._layout, column, path)
                for column, path in zip(columns, paths, strict=True)
            ]
            return (unflatten(structure, arrays),)
        arrays = [
            self._build_array(self._layout, batch_shards.pad_column(column, row_count), path)
            for column, path in zip(columns, paths, strict=True)
        ]
        mask = self._build_array(self._layout, batch_shards.make_mask(rows, row_count))
        return (batch_shards.add_mask(structure, arrays, mask),)

    def spec(self, piece: Spec, num_local: int, num_replicas: int, wraps: bool) -> Spec:
        """Return a plain spec over all replicas' rows."""
        pads = self._remainder == "pad"

        def global_spec(leaf: ArraySpec) -> ArraySpec:
            rows = self._size if pads and self._size else leaf.shape[0] if leaf.shape else None
            total = None if rows is None else rows * num_replicas
            return ArraySpec((total, *leaf.shape[1:]), leaf.dtype, leaf.name)

        spec = map_leaves(global_spec, _convert_spec(piece, self._framework))
        if not pads:
            return spec
        leaves, structure = flatten(spec)
        rows = leaves[0].shape[:1] if leaves else (None,)
        return batch_shards.add_mask(structure, leaves, ArraySpec(rows, np.bool_))


def _convert_spec(spec: Spec, framework: Framework) -> Spec:
    return map_leaves(
        lambda leaf: ArraySpec(leaf.shape, framework.device_dtype(leaf.dtype), leaf.name), spec
    )
