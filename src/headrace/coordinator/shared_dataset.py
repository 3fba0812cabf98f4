"""Dataset shared by all workers: each element is delivered to one of them, once per epoch.

The coordinator reads the dataset, and gives each function call the number of elements that previous
calls read. A call that needs more asks for them; unread ones go to another call. A call that is
lost with its worker is repeated with the same elements.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.arguments import check_instance
from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.closure_context import CurrentLeaseIterator
from headrace.coordinator.coordinator_runner import CoordinatorRunner
from headrace.coordinator.messages import CallSpec, ElementLease
from headrace.coordinator.packing import pack, record_handle
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError

__all__ = ["EpochProgress", "EpochRunner", "SharedDataset", "find_shared_dataset"]


_VERSION = 1
_MAX_HELD_ELEMENTS = 64
_CALLS_AHEAD = 2


class SharedDataset:
    """Shared dataset as an argument of `run_epoch`; the function receives it as an iterator.

    Created by `coordinator.create_shared_dataset`. Its state records which elements were used by
    functions that have ended, so a restarted coordinator continues with the others. The state may
    be read during an epoch, and saved in an `hr.Checkpoint`.

    Args:
        dataset: Dataset to read once per epoch.
    """

    def __init__(self, dataset: Dataset) -> None:
        check_instance("dataset", dataset, Dataset)
        self.dataset = dataset
        self._lock = threading.RLock()
        self._next_epoch = 0
        self._is_read = False
        #: Progress of the current or interrupted epoch; None if the next one starts.
        self._progress: EpochProgress | None = None
        #: Error that explains why no state is available; None if there is one.
        self._stateless: HeadraceError | None = None
        #: Start of the next epoch, if it was restored from a state.
        self._restored: tuple[EpochProgress, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        """Return which elements were used, as a JSON value.

        Elements of functions that have not ended count as unused. After an epoch the state is the
        start of the next one. After a failed epoch, `set_state` with this state makes the next
        epoch resume there.

        Raises:
            HeadraceError: If the dataset does not support states, or failed to return one.
        """
        with self._lock:
            progress = self._progress
            if progress is None and self._restored is not None:
                progress = self._restored[0]
            if progress is None:
                return {"version": _VERSION, "epoch": self._next_epoch}
            if self._stateless is not None:
                raise self._stateless
            position, used = progress.get_state()
            return {
                "version": _VERSION,
                "epoch": progress.epoch,
                "position": position,
                "used": used,
            }

    def set_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch resume from a state, possibly of another program.

        Raises:
            FailedPreconditionError: If an epoch is running, or the state is of a later version.
            InvalidArgumentError: If it is not a state of a shared dataset, or of another dataset.
        """
        if not isinstance(state, dict) or not isinstance(state.get("epoch"), int):
            raise InvalidArgumentError(
                f"`state` must be the state of a shared dataset, but got {state!r:.80}"
            )
        if state.get("version") != _VERSION:
            raise FailedPreconditionError(
                f"`state` has version {state.get('version')}, but this release of Headrace reads "
                f"version {_VERSION}"
            )
        restored = None
        if "position" in state:
            restored = EpochProgress(state["epoch"], state["used"]), state["position"]
            restored[0].record_position(state["position"])
            with self._open_iterator(state["epoch"]) as iterator:
                iterator.set_state(state["position"])
        with self._lock:
            if self._is_read:
                raise FailedPreconditionError(
                    "cannot set the state of a shared dataset during an epoch; set it before or "
                    "after"
                )
            self._next_epoch, self._restored, self._progress = state["epoch"], restored, None

    state_dict = get_state
    load_state_dict = set_state

    @contextlib.contextmanager
    def open_epoch(self) -> Iterator[tuple[DatasetIterator, EpochProgress]]:
        """Start the next epoch, or resume the one whose state was set."""
        with self._lock:
            if self._is_read:
                raise FailedPreconditionError(
                    "an epoch of this shared dataset is already running; start another one after "
                    "it has ended"
                )
            restored, self._restored = self._restored, None
            progress = EpochProgress(self._next_epoch) if restored is None else restored[0]
            iterator = self._open_iterator(progress.epoch)
            self._is_read, self._stateless = True, None
            self._next_epoch = progress.epoch + 1
            if restored is not None:
                iterator.set_state(restored[1])
            self._progress = progress
            self.record_position(iterator, progress)
        try:
            with iterator:
                yield iterator, progress
            with self._lock:
                self._progress = None
        finally:
            with self._lock:
                self._is_read = False

    def _open_iterator(self, epoch: int) -> DatasetIterator:
        return DatasetIterator(self.dataset.plan, epoch)

    def record_position(self, iterator: DatasetIterator, progress: EpochProgress) -> None:
        """Record the reader's position if it is needed."""
        if progress.wants_position and self._stateless is None:
            with self._lock:
                try:
                    progress.record_position(iterator.get_state())
                except HeadraceError as error:
                    self._stateless = error

    @property
    def element_spec(self) -> Any:
        """Spec of the elements."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator[Any]:
        raise FailedPreconditionError(
            "a shared dataset can be read only by functions that run_epoch calls: pass it in "
            "their arguments, and call next() on it there"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        record_handle(self)
        return CurrentLeaseIterator, ()

    def __repr__(self) -> str:
        return f"<SharedDataset of {self.dataset!r}>"


def find_shared_dataset(closure: Closure) -> SharedDataset:
    """Return the shared dataset that a call refers to.

    Raises:
        ValueError: If there is none, or more than one.
    """
    handles = (*closure.call_spec.function.handles, *closure.call_spec.handles)
    shared = {id(each): each for each in handles if isinstance(each, SharedDataset)}
    if len(shared) != 1:
        raise ValueError(
            f"run_epoch requires exactly one shared dataset in `args`, but found {len(shared)}; "
            "create one with create_shared_dataset(dataset)"
        )
    ((_, dataset),) = shared.items()
    return dataset


class _Element(NamedTuple):
    """Element with its number in the epoch."""

    number: int
    payload: Payload


class _OpenCall(NamedTuple):
    """Call with the elements that it was given so far."""

    closure: Closure
    lease: ElementLease
    elements: list[_Element]


class EpochRunner:
    """One epoch of a shared dataset.

    Args:
        runner: Runs closures.
        closure: Call template without elements.
        dataset: Shared dataset.
        elements: Iterator over it.
        progress: Progress of the epoch.
    """

    def __init__(
        self,
        runner: CoordinatorRunner,
        closure: Closure,
        dataset: SharedDataset,
        elements: DatasetIterator,
        progress: EpochProgress,
    ) -> None:
        self._runner = runner
        self._template = closure
        self._dataset = dataset
        self._elements = elements
        self._progress = progress
        self._end_of_data = False
        #: Elements that calls did not read.
        self._returned_elements: deque[_Element] = deque()
        #: Calls that have not ended, and their elements.
        self._open_calls: list[_OpenCall] = []
        #: Number of elements that the last call read; None before a call has returned.
        self._elements_per_call: int | None = None
        self._num_returned = 0

    def run(self) -> int:
        """Run calls until all elements were read; return the number of calls.

        Raises:
            Exception: The first error of a call, or of the dataset.
        """
        try:
            return self._run()
        finally:
            for closure, lease, elements in self._open_calls:
                if closure.result.is_ready and closure.result.error is None:
                    self._mark_used(lease, elements)

    def _run(self) -> int:
        while True:
            self._collect_ended()
            self._feed_waiting()
            if len(self._open_calls) < self._max_open_calls():
                elements = self._read_elements(self._elements_per_call or 1)
                if elements:
                    self._schedule_call(elements)
                    continue
                if not self._open_calls:
                    return self._num_returned
            self._runner.wait(self._has_work, "calls of an epoch")
            self._runner.raise_failure()

    def _max_open_calls(self) -> int:
        with self._runner.lock:
            loads = list(self._runner.core.queue.worker_pool)
        if self._elements_per_call is None:
            # It is not known how many elements a call reads. Calls still open at the end of the
            # data would lack elements, so there is only one per worker.
            return max(1, len(loads))
        return min(
            _MAX_HELD_ELEMENTS, _CALLS_AHEAD + _CALLS_AHEAD * sum(load.window for load in loads)
        )

    def _has_work(self) -> bool:
        return self._runner.core.queue.failure is not None or any(
            each.closure.result.is_ready or each.lease.num_wanted for each in self._open_calls
        )

    def _read_elements(self, count: int) -> list[_Element]:
        elements: list[_Element] = []
        while len(elements) < count and self._returned_elements:
            elements.append(self._returned_elements.popleft())
        while len(elements) < count and not self._end_of_data:
            self._dataset.record_position(self._elements, self._progress)
            for element in self._elements:
                number = self._progress.record_read()
                if number is not None:
                    elements.append(_Element(number, pack(element)))
                break
            else:
                self._end_of_data = True
        return elements

    def _schedule_call(self, elements: list[_Element]) -> None:
        call_spec: CallSpec = self._template.call_spec
        payloads = [element.payload for element in elements]
        lease = ElementLease(
            payloads, end_of_data=self._end_of_data and not self._returned_elements
        )
        new_spec = CallSpec(
            call_spec.function, call_spec.arguments, lease=lease, handles=call_spec.handles
        )
        closure = Closure(self._template.name, new_spec, self._template.inputs)
        self._runner.schedule(closure)
        self._open_calls.append(_OpenCall(closure, lease, elements))

    def _collect_ended(self) -> None:
        """Handle calls that have ended, and take back their unread elements."""
        with self._runner.lock:
            ended = [each for each in self._open_calls if each.closure.result.is_ready]
            self._open_calls = [
                each for each in self._open_calls if not each.closure.result.is_ready
            ]
        for closure, lease, elements in ended:
            has_returned = closure.result.error is None
            self._num_returned += has_returned and not lease.reached_end
            used = len(elements) - lease.num_unused
            self._returned_elements += elements[used:]
            self._elements_per_call = max(1, used)
            if has_returned:
                self._mark_used(lease, elements)
        if any(each.closure.result.error is not None for each in ended):
            self._runner.raise_failure()

    def _mark_used(self, lease: ElementLease, elements: list[_Element]) -> None:
        used = elements[: len(elements) - lease.num_unused]
        self._progress.mark_used([element.number for element in used])

    def _feed_waiting(self) -> None:
        for closure, lease, elements in self._open_calls:
            if lease.num_wanted:
                more = self._read_elements(lease.num_wanted)
                elements += more
                payloads = [element.payload for element in more]
                with self._runner.lock:
                    self._runner.core.feed_elements(closure, payloads, end_of_data=not more)
                self._runner.wake()


# --------------------------------------------------------------------------------------------------
# Progress of an epoch of a shared dataset: elements used by functions that have ended

# Elements are read in order and used in any order. The record is small: a few reader positions, and
# the used elements after the low watermark.

_POSITION_INTERVAL = 64


class EpochProgress:
    """Progress of one epoch; elements are numbered from where the reader started or resumed.

    Args:
        epoch: Number of the epoch.
        used: Elements that were used before, as ranges [first, last + 1].
    """

    def __init__(self, epoch: int, used: Iterable[Sequence[int]] = ()) -> None:
        self.epoch = epoch
        self._lock = threading.Lock()
        #: Number below which all elements were used.
        self._low_watermark = 0
        #: Used elements above it.
        self._used: set[int] = set()
        #: Number of elements read.
        self._read = 0
        #: Reader positions, each with the number of the next element.
        self._positions: deque[tuple[int, Any]] = deque()
        self._is_wanted = False
        for first, end in used:
            self.mark_used(range(first, end))

    @property
    def wants_position(self) -> bool:
        """Whether the reader's position should be recorded now.

        Always at the start, then regularly once states were requested: a position may be expensive.
        """
        if not self._positions:
            return True
        return self._is_wanted and self._read - self._positions[-1][0] >= _POSITION_INTERVAL

    def record_position(self, position: Any) -> None:
        """Record the reader's position."""
        with self._lock:
            self._positions.append((self._read, position))

    def record_read(self) -> int | None:
        """Count an element that was read; return its number, or None if it was used before."""
        with self._lock:
            number = self._read
            self._read += 1
            return None if number < self._low_watermark or number in self._used else number

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Record that elements were used."""
        with self._lock:
            self._used.update(numbers)
            while self._low_watermark in self._used:
                self._used.remove(self._low_watermark)
                self._low_watermark += 1
            while len(self._positions) > 1 and self._positions[1][0] <= self._low_watermark:
                self._positions.popleft()

    def get_state(self) -> tuple[Any, list[list[int]]]:
        """Return a reader position, and the elements used from there on, as ranges."""
        with self._lock:
            self._is_wanted = True
            first, position = self._positions[0]
            ranges = [[0, self._low_watermark - first]] if self._low_watermark > first else []
            for number in sorted(self._used):
                if ranges and ranges[-1][1] == number - first:
                    ranges[-1][1] += 1
                else:
                    ranges.append([number - first, number - first + 1])
            return position, ranges
