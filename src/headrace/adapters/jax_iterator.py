"""Iterator over batches as JAX arrays, on one device or a mesh, in one process or several."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from headrace.adapters.jax_input_steps import (
    DistributedInputSteps,
    InputStep,
    InputSteps,
    StepPosition,
)
from headrace.adapters.jax_placement import ShardedPlacement
from headrace.adapters.jax_process_input import make_agreement, open_process_input
from headrace.adapters.jax_step_agreement import InputStepAgreement, StepMessage
from headrace.arguments import check_int, check_state_version
from headrace.data.dataset import Dataset
from headrace.distribute.dataset import ReplicaDataset
from headrace.distribute.values import PerReplicaSpec
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import flatten, unflatten
from headrace.errors import (
    AbortedError,
    UnavailableError,
    describe_error,
)
from headrace.frameworks.batch_shards import Remainder, add_mask, check_remainder, rows_per_shard
from headrace.frameworks.jax_global_arrays import BatchLayout, check_is_numeric, jax_dtype
from headrace.plan.traverse import element_spec

__all__ = ["DeviceIterator", "device_iterator", "to_jax"]

_log = logging.getLogger("headrace")
_VERSION = 1


def device_iterator(
    dataset: Any, sharding: Any = None, prefetch: int = 2, *, remainder: Remainder = "error"
) -> DeviceIterator:
    """Return an iterator over one epoch of a dataset; its batches are arrays on devices.

    >>> import headrace as hr
    >>> for batch in hr.jax.device_iterator(hr.Dataset.range(6).batch(4)):
    ...     print(batch, type(batch).__name__)
    [0 1 2 3] ArrayImpl
    [4 5] ArrayImpl

    Args:
        dataset: A dataset of global batches, the same in all processes of the sharding; or a
            distributed dataset, which has one shard for each local shard of the sharding.
        sharding: A `jax.sharding.Sharding` or a device, for all leaves, or one for each leaf
            (nested like the elements). None uses JAX's default device.
        prefetch: Number of batches prepared ahead of their use; 0 disables prefetching.
        remainder: Handling of batches that cannot be split evenly: "error"; "pad", which appends
            rows of zeros and adds a leaf `mask` that is True for rows of data; or "drop", which
            skips the batch.

    Raises:
        TypeError: If `dataset` is not a dataset, or `sharding` is not a sharding.
        InvalidArgumentError: If elements are not batches, or contain bytes or str.
    """
    check_int("prefetch", prefetch, minimum=0)
    check_remainder(remainder)
    process = jax.process_index()
    if isinstance(dataset, ReplicaDataset):
        spec, num_replicas = _replica_spec(dataset.element_spec)
        placement = ShardedPlacement(
            _default_sharding(num_replicas) if sharding is None else sharding
        )
        layout = placement.layout
        agreement = make_agreement(layout, process)
        keep_whole = layout.num_shards == 1 and remainder != "pad" and agreement is None
        return DeviceIterator(
            DistributedInputSteps(iter(dataset), layout, keep_whole),
            placement,
            remainder,
            lambda: _with_rows(
                spec, lambda rows: None if rows is None else rows * layout.num_shards
            ),
            _num_rows(spec),
            agreement,
        )
    if not isinstance(dataset, Dataset):
        raise TypeError(
            "`dataset` must be a Dataset or a distributed dataset, but got "
            f"{type(dataset).__name__}: make one with Dataset.from_tensor_slices from arrays, or "
            "with Dataset.from_generator from a generator"
        )
    placement = ShardedPlacement(_default_device() if sharding is None else sharding)
    _check_is_numeric(element_spec(dataset.plan))
    part = open_process_input(dataset, placement.layout, process, prefetch, remainder == "pad")
    return DeviceIterator(
        part.steps,
        placement,
        remainder,
        lambda: dataset.element_spec,
        part.rows_per_shard,
        part.agreement,
        part.device_prefetch,
        part.open_resharded,
    )


to_jax = device_iterator
"""Alias of `device_iterator`."""


class _ReadyStep:
    """A step on its devices, or an error, and the position after it."""

    __slots__ = ("error", "is_returned", "position", "value")

    def __init__(self, value: Any, error: Exception | None, position: StepPosition) -> None:
        self.value, self.error, self.position = value, error, position
        self.is_returned = False


class DeviceIterator:
    """Yields elements whose leaves are `jax.Array`s; `device_iterator` makes it.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.

    >>> with hr.jax.device_iterator(hr.Dataset.range(4).batch(2)) as iterator:
    ...     [batch.tolist() for batch in iterator]
    [[0, 1], [2, 3]]

    Args:
        steps: Source of this process's rows.
        placement: Puts rows on devices.
        remainder: Handling of shards with different row counts.
        spec: Returns the NumPy spec of a whole batch.
        rows_per_shard: Rows in each shard of a full batch; None if unknown.
        agreement: Agreement of the processes on each step; None if not needed.
        device_prefetch: Number of steps that may be on devices before they are requested.
        open_resharded: Returns steps that continue from a state of a different number of
            processes; None if `steps` can.
    """

    def __init__(
        self,
        steps: InputSteps,
        placement: ShardedPlacement,
        remainder: str,
        spec: Callable[[], Spec],
        rows_per_shard: int | None = None,
        agreement: InputStepAgreement | None = None,
        device_prefetch: int = 0,
        open_resharded: Callable[[], InputSteps] | None = None,
    ) -> None:
        self._steps = steps
        self._placement = placement
        self._remainder = remainder
        self._spec = spec
        self._rows_per_shard = rows_per_shard
        self._agreement = agreement
        self._device_prefetch = device_prefetch
        self._open_resharded = open_resharded
        if agreement is not None:
            weakref.finalize(self, agreement.close).atexit = False
        self._reset(None)

    def _reset(self, position: StepPosition) -> None:
        #: Steps to return next; the first may have been returned already.
        self._ready: deque[_ReadyStep] = deque()
        #: Position after the last step in use, unless that step is the first of `_ready`.
        self._consumed_position = position
        self._has_begun = self._is_at_end = self._was_interrupted = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        ready = self._ready
        if ready and ready[0].is_returned:
            self._consumed_position = ready[0].position
            ready.popleft()
        # The second step must not delay the first.
        num_wanted = 1 + (self._device_prefetch if self._has_begun else 0)
        # Nor may reading ahead delay a step that is ready. But processes that agree on steps must
        # read equally far ahead: otherwise one that has a step delays the agreement of the others.
        may_wait = self._agreement is not None or (not ready and self._steps.is_ready)
        while len(ready) < num_wanted and not self._is_at_end:
            if ready and not may_wait and not self._steps.is_ready:
                break
            self._read()
        if not ready:
            raise StopIteration
        self._has_begun = True
        item = ready[0]
        if item.error is not None:
            self._consumed_position = item.position
            ready.popleft()
            raise item.error
        # No calls from here to the return: an interruption would lose the element.
        value, item.value = item.value, None
        item.is_returned = True
        return value

    def _read(self) -> None:
        """Read one more step and put it on its devices."""
        ready, steps = self._ready, self._steps
        if self._was_interrupted:
            steps.rewind(ready[-1].position if ready else self._consumed_position)
        elif not ready and self._consumed_position is None:
            self._consumed_position = steps.get_position()
        self._was_interrupted = True  # stays True if an interruption ends this call
        try:
            element = self._next_element()
        except Exception as error:
            self._is_at_end = self._agreement is not None
            ready.append(_ReadyStep(None, error, steps.get_position()))
        else:
            if element is None:
                self._is_at_end = True
            else:
                ready.append(_ReadyStep(element[0], None, steps.get_position()))
        self._was_interrupted = False

    def _next_element(self) -> tuple[Any] | None:
        """Return the next step's element in a tuple, or None at the end."""
        while True:
            step, rows = self._next_agreed_step() if self._agreement else self._next_local_step()
            if step is None:
                return None
            if rows is not None:
                return (self._placement.put(step, rows, self._remainder == "pad"),)
            _log.info("dropped a batch whose rows cannot be split evenly")

    def _next_local_step(self) -> tuple[InputStep | None, int | None]:
        """Return the next step and the rows of each shard; None as rows drops the step."""
        step = self._steps.next()
        if step is None or not step.rows:
            return step, 0
        return step, rows_per_shard(self._remainder, list(step.rows.values()), self._rows_per_shard)

    def _next_agreed_step(self) -> tuple[InputStep | None, int | None]:
        """Return the same as `_next_local_step`, after agreement with the other processes."""
        assert self._agreement is not None
        try:
            step = self._steps.next()
        except Exception as error:
            with contextlib.suppress(AbortedError, UnavailableError):
                self._agreement.agree({"error": describe_error(error)}, self._remainder)
            raise
        message: StepMessage = {"end": True}
        if step is not None:
            rows = {str(shard): count for shard, count in step.rows.items()}
            signatures = [_row_signature(column[0]) for column in step.columns]
            message = {"rows": rows, "signatures": signatures}
        decision = self._agreement.agree(message, self._remainder, self._rows_per_shard)
        if "end" in decision:
            return None, None
        if step is None:
            step = _empty_step(self._spec(), decision["signatures"], self._placement.layout)
        return step, decision.get("rows_per_shard")

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements: global array shapes, in JAX's dtypes."""
        shards, size = self._placement.layout.num_shards, self._rows_per_shard
        if self._remainder != "pad":
            return _with_rows(self._spec(), lambda rows: None if (rows or 0) % shards else rows)
        spec = _with_rows(self._spec(), lambda rows: None if size is None else size * shards)
        leaves, structure = flatten(spec)
        return add_mask(structure, leaves, ArraySpec(leaves[0].shape[:1], np.bool_))

    def get_state(self) -> dict[str, Any]:
        """Return the position after the step in use: a JSON value.

        Batches that are only prepared count as not read. `set_state` continues there, also with
        another sharding or number of processes. If processes read different rows, all of them must
        call it; all get the same state.
        """
        ready = self._ready
        is_first_in_use = bool(ready) and ready[0].is_returned
        position = ready[0].position if is_first_in_use else self._consumed_position
        state = self._steps.get_state(position)
        if self._open_resharded is not None and self._agreement is not None:
            gathered = [each["streams"] for each in self._agreement.all_gather(state)]
            streams = [next(filter(None, each), None) for each in zip(*gathered, strict=True)]
            state = {"streams": streams}
        return {"version": _VERSION, "distributed": state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            FailedPreconditionError: If the state is of another dataset or version.
        """
        if not isinstance(state, dict) or not {"version", "distributed"} <= state.keys():
            raise TypeError(
                f"`state` must be a result of DeviceIterator.get_state, but got {state!r:.80}"
            )
        check_state_version(state["version"], _VERSION)
        saved = state["distributed"]
        if self._open_resharded is not None and not self._steps.accepts_state(saved):
            self._steps.close()
            # A distributed dataset reads ahead itself, so its steps are read when they are used.
            self._steps, self._device_prefetch = self._open_resharded(), 0
        self._steps.set_state(saved)
        self._reset(None)

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end afterwards. Idempotent.

        Its state remains available: returned steps count as consumed.
        """
        self._is_at_end = True
        if self._ready and self._ready[0].is_returned:
            self._consumed_position = self._ready[0].position
        self._ready.clear()
        self._steps.close()
        if self._agreement is not None:
            self._agreement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _default_device() -> Any:
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _default_sharding(local_replicas: int) -> Any:
    """Return a sharding over one device of each process per local replica."""
    by_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    found = jax.local_device_count()
    if found < local_replicas:
        raise ValueError(
            f"the strategy has {local_replicas} replicas in this process, but JAX has only {found} "
            f"local devices: pass `sharding`, or use a strategy with at most {found} replicas"
        )
    devices = [device for each in by_process.values() for device in each[:local_replicas]]
    if local_replicas == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(Mesh(np.array(devices), ("replica",)), PartitionSpec("replica"))


def _replica_spec(spec: Spec) -> tuple[Spec, int]:
    """Return the spec of one replica's values, and the number of replicas in this process."""
    leaves, structure = flatten(spec)
    specs = [leaf.specs if isinstance(leaf, PerReplicaSpec) else (leaf,) for leaf in leaves]
    return unflatten(structure, [each[0] for each in specs]), len(specs[0]) if specs else 1


def _num_rows(spec: Spec) -> int | None:
    leaves, _ = flatten(spec)
    return leaves[0].shape[0] if leaves and leaves[0].shape else None


def _with_rows(spec: Spec, change: Callable[[int | None], int | None]) -> Spec:
    """Return a spec with changed row counts, in the dtypes that JAX converts to."""
    leaves, structure = flatten(spec)
    changed = []
    for leaf in leaves:
        shape = (change(leaf.shape[0]), *leaf.shape[1:]) if leaf.shape else ()
        changed.append(ArraySpec(shape, jax_dtype(leaf.dtype), leaf.name))
    return unflatten(structure, changed)


def _check_is_numeric(spec: Spec | None) -> None:
    if spec is None:
        return  # checked when the first element is read
    leaves, structure = flatten(spec)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        check_is_numeric(leaf.dtype, path)


def _row_signature(value: Any) -> list[Any]:
    """Return the shape without the first axis, and the dtype, which all processes must share."""
    return [*value.shape[1:], value.dtype.name]


def _empty_step(spec: Spec, signatures: list[list[Any]], layout: BatchLayout) -> InputStep:
    _, structure = flatten(spec)
    columns = [
        [np.zeros((0, *each[:-1]), each[-1])] * len(layout.local_shards) for each in signatures
    ]
    return InputStep(structure, columns, dict.fromkeys(layout.local_shards, 0))
