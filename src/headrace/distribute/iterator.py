"""The iterator over a distributed dataset: one step at a time, for all local replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import numpy as np

from headrace.arguments import check_state_version
from headrace.data.optional import Optional
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_feeds import spec_of_step
from headrace.distribute.context import OnReplica, here
from headrace.distribute.feeds import Step
from headrace.distribute.streams import Streams, has_form_of_state, merged_states
from headrace.distribute.values import PerReplica, PerReplicaSpec
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from headrace.frameworks import shares
from headrace.frameworks.framework import Device, Framework

__all__ = ["VERSION", "Delivery", "DistributedIterator", "GlobalArrays", "OnDevices", "OnHost"]

VERSION = 1
"""Of states."""


class DistributedIterator:
    """Yields what the local replicas get, step by step.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with iter(strategy.distribute_dataset(hr.Dataset.range(4).batch(4))) as iterator:
    ...     step = iterator.get_next()
    ...     iterator.get_next_as_optional().has_value()
    False
    >>> [rows.tolist() for rows in step.values]
    [[0, 1], [2, 3]]

    Args:
        feed: What the replicas get.
        wraps: Whether leaves are `PerReplica`s; else they are those of the only replica.
        element_spec: Returns the spec.
        agreement: Asked at each step whether any worker has data: all workers so end together.
        empty: Returns a step without rows, given what the others' rows are like, if they said it.
        delivery: What becomes of the rows; None: arrays of NumPy.
        check_jobs: Raises if a job that is read was used up; called at an end without a step.
    """

    def __init__(
        self,
        feed: Streams,
        wraps: bool,
        element_spec: Callable[[], Spec],
        agreement: StepAgreement | None = None,
        empty: Callable[[Spec | None], Step] | None = None,
        delivery: Delivery | None = None,
        check_jobs: Callable[[], None] | None = None,
    ) -> None:
        self._feed = feed
        self._wraps = wraps
        self._element_spec = element_spec
        self._agreement = agreement
        self._empty = empty
        self._delivery = delivery or OnHost()
        #: What was read for a step that the workers have not agreed on: the step, or None.
        self._read: list[Step | None] = []
        #: What was read and agreed on, and not delivered yet; () has no rows.
        self._step: Step | tuple[()] | None = None
        self._has_ended = False
        #: None once there was a step.
        self._check_jobs = check_jobs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if isinstance(here.get(), OnReplica):
            raise InvalidArgumentError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        delivered = None
        while delivered is None:
            if self._step is None:  # else an interruption came while it was delivered
                self._step = self._next_step()
            try:
                delivered = self._delivery.deliver(*(self._step or self._empty_step()), self._wraps)
            except Exception:
                self._step = None
                raise
            self._step = None
        return delivered[0]

    def _next_step(self) -> Step | tuple[()]:
        """Return the next step; (): one without rows. Interrupted, it loses nothing (`feeds`)."""
        if self._has_ended:
            raise StopIteration
        step = self._feed.next_step() if self._agreement is None else self._agreed()
        if step is None:
            self._has_ended = True
            self.close()
            if self._check_jobs is not None:
                self._check_jobs()
            raise StopIteration
        self._check_jobs = None
        return step

    def _empty_step(self) -> Step:
        assert self._empty is not None
        return self._empty(None if self._agreement is None else self._agreement.spec)

    def _agreed(self) -> Step | tuple[()] | None:
        """Return the next step; (): one without rows; None: no worker has data."""
        assert self._agreement is not None
        if not self._read:  # else an interruption came while the others were waited for
            self._read.append(self._feed.next_step())
        (step,) = self._read
        if step is not None and self._agreement.wants_spec:
            has_data = self._agreement.has_data(True, spec_of_step(*step))
        else:
            has_data = self._agreement.has_data(step is not None)
        self._read = []
        return () if step is None and has_data else step

    def get_next(self) -> Any:
        """Return what the replicas get next.

        Raises:
            OutOfRangeError: There is nothing left; a StopIteration, too.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("the distributed dataset has no more elements") from None

    def get_next_as_optional(self) -> Optional:
        """Return what the replicas get next, or an `Optional` without a value at the end."""
        for step in self:
            return Optional(step)
        return Optional()

    @property
    def element_spec(self) -> Spec:
        """Spec of what `next` returns; at each leaf a `PerReplicaSpec` of several replicas."""
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return where the next step begins: a JSON value, the same on all workers, who all ask.

        `set_state` on an iterator of the same dataset goes on there, also where it is distributed
        among another number of replicas or workers: nothing is lost, and nothing comes twice.
        """
        if self._read or self._step is not None:
            raise FailedPreconditionError(
                "the last step was interrupted when it had been read already; take the state after "
                "the next one"
            )
        here = self._feed.get_state()
        states = [here] if self._agreement is None else self._agreement.of_all(here)
        return {"version": VERSION, "distributed": merged_states(states)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            FailedPreconditionError: The state is of another dataset, or of one that was distributed
                in another way.
        """
        if not isinstance(state, dict) or not {"version", "distributed"} <= state.keys():
            _refuse_state(state)
        check_state_version(state["version"], VERSION)
        if not has_form_of_state(state["distributed"]):
            _refuse_state(state)
        self._feed.set_state(state["distributed"])
        if self._agreement is not None:
            self._agreement.begin_again()
        self._read, self._step = [], None
        self._has_ended = False

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end then. May be called twice."""
        self._has_ended, self._step = True, None
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_state(state: Any) -> NoReturn:
    raise TypeError(
        f"`state` must be a value of a DistributedIterator's `get_state`, but got {state!r:.80}"
    )


# --- What becomes of a step's rows: as which arrays, and where, the replicas get them -------------
#
#     OnHost          arrays of NumPy
#     OnDevices       arrays of a framework, each on the device of its replica
#     GlobalArrays    arrays over the devices of all replicas


class Delivery(ABC):
    """Makes one value of what the local replicas get of each leaf.

    Attributes:
        keeps_order: Whether rows of a batch that all workers read stand in their order.
    """

    keeps_order = False

    @abstractmethod
    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Return the step in a tuple; None: it is left out.

        Args:
            structure: Of an element.
            columns: For each leaf the local replicas' values.
            wraps: Whether leaves are `PerReplica`s; else they are those of the only replica.
        """

    @abstractmethod
    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """Return the spec of what `deliver` returns.

        Args:
            piece: Spec of what a replica gets, as arrays of NumPy.
            here: Local replicas.
            everywhere: Replicas of all workers.
            wraps: As above.
        """


class OnHost(Delivery):
    """Hands the arrays out as they are (`Delivery`)."""

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Wrap them."""
        if not wraps:
            return (unflatten(structure, [column[0] for column in columns]),)
        return (unflatten(structure, [PerReplica(column) for column in columns]),)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """One for each replica."""
        if not wraps:
            return piece
        return map_leaves(lambda leaf: PerReplicaSpec(*[leaf] * here), piece)


class OnDevices(OnHost):
    """Puts each replica's arrays on its device.

    Args:
        framework: Whose arrays they become.
        devices: Of the local replicas.
    """

    def __init__(self, framework: Framework, devices: Sequence[Device]) -> None:
        self._framework = framework
        self._devices = list(devices)

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Put them, and wrap them; strings stay on the host."""
        count = len(self._devices)
        values = [value for column in columns for value in column]
        put = self._framework.put(values, self._devices * len(columns))
        parts = [put[start : start + count] for start in range(0, len(put), count)]
        return super().deliver(structure, parts, wraps)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """With the dtypes that the framework has."""
        return super().spec(_converted(piece, self._framework), here, everywhere, wraps)


class GlobalArrays(Delivery):
    """Makes one array over all devices of each leaf; each replica's rows are on its device.

    Args:
        framework: One that has such arrays.
        devices: Of the replicas of all workers.
        remainder: What becomes of a step in which they have different numbers of rows.
        rows_of_all: Given the rows of the local replicas, returns those of all.
        size: Rows of a replica in a full batch, if they are known.
    """

    keeps_order = True

    def __init__(
        self,
        framework: Framework,
        devices: tuple[Device, ...],
        remainder: str,
        rows_of_all: Callable[[list[int]], list[int]],
        size: int | None,
    ) -> None:
        self._framework = framework
        self._remainder = remainder
        self._rows_of_all = rows_of_all
        self._size = size
        program = framework.program()
        self._layout = program.layout_of(devices)
        self._joined = program.global_array

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Make them alike in length as `remainder` says, and one."""
        rows = shares.rows_of_shares(structure, columns)
        used = shares.rows_to_use(self._remainder, self._rows_of_all(rows), self._size)
        if used is None:
            return None
        paths = structure.paths
        if self._remainder != "pad":
            made = [
                self._joined(self._layout, column, path)
                for column, path in zip(columns, paths, strict=True)
            ]
            return (unflatten(structure, made),)
        made = [
            self._joined(self._layout, shares.padded(column, used), path)
            for column, path in zip(columns, paths, strict=True)
        ]
        mask = self._joined(self._layout, shares.mask_of(rows, used))
        return (shares.with_mask(structure, made, mask),)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """Plain, of all replicas' rows."""
        pads = self._remainder == "pad"

        def whole(leaf: ArraySpec) -> ArraySpec:
            rows = self._size if pads and self._size else leaf.shape[0] if leaf.shape else None
            total = None if rows is None else rows * everywhere
            return ArraySpec((total, *leaf.shape[1:]), leaf.dtype, leaf.name)

        spec = map_leaves(whole, _converted(piece, self._framework))
        if not pads:
            return spec
        leaves, structure = flatten(spec)
        rows = leaves[0].shape[:1] if leaves else (None,)
        return shares.with_mask(structure, leaves, ArraySpec(rows, np.bool_))


def _converted(spec: Spec, framework: Framework) -> Spec:
    return map_leaves(
        lambda leaf: ArraySpec(leaf.shape, framework.dtype_put(leaf.dtype), leaf.name), spec
    )
