"""A dataset that all workers share: each element goes to one of them, once an epoch.

The coordinator reads it, and gives each call of the function as many elements as the calls before
took. One that takes more asks for them; what one leaves over is given to another. A call that is
lost with its worker is made again with the same elements.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headrace.arguments import check_instance
from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.current import LeasedHere
from headrace.coordinator.messages import Lease, Work
from headrace.coordinator.packing import keep, pack
from headrace.coordinator.shell import Shell
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError

__all__ = ["Epoch", "Progress", "SharedDataset", "shared_by"]


_VERSION = 1
_MOST_IN_HAND = 64
_AHEAD = 2


class SharedDataset:
    """Stands for a shared dataset among the arguments of `run_epoch`; there it is an iterator.

    `coordinator.create_shared_dataset` makes it. Its state says which elements were used by
    functions that have ended: a coordinator that starts again goes on with the others. It may be
    asked for while an epoch runs, and be in an `hr.Checkpoint`.

    Args:
        dataset: Read once an epoch.
    """

    def __init__(self, dataset: Dataset) -> None:
        check_instance("dataset", dataset, Dataset)
        self.dataset = dataset
        self._lock = threading.RLock()
        self._next_pass = 0
        self._is_read = False
        #: The pass that is under way, or was interrupted; None: the next one begins.
        self._progress: Progress | None = None
        #: Why there is no state; None: there is.
        self._stateless: HeadraceError | None = None
        #: Where the next pass begins, if not at the beginning.
        self._restored: tuple[Progress, Any] | None = None

    def get_state(self) -> dict[str, Any]:
        """Return which elements were used: a value of JSON.

        Elements of functions that have not ended are not among them. After an epoch the state is
        the beginning of the next one; after an epoch that failed, `set_state` with it has the
        next one go on there.

        Raises:
            HeadraceError: The dataset has no states, or could not say its own.
        """
        with self._lock:
            progress = self._progress
            if progress is None and self._restored is not None:
                progress = self._restored[0]
            if progress is None:
                return {"version": _VERSION, "pass": self._next_pass}
            if self._stateless is not None:
                raise self._stateless
            place, used = progress.state()
            return {
                "version": _VERSION,
                "pass": progress.pass_number,
                "place": place,
                "used": used,
            }

    def set_state(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on where another one was, in whatever program.

        Raises:
            FailedPreconditionError: An epoch runs, or the state is of a later version.
            InvalidArgumentError: It is no state of a shared dataset, or of another dataset.
        """
        if not isinstance(state, dict) or not isinstance(state.get("pass"), int):
            raise InvalidArgumentError(f"this is no state of a shared dataset: {state!r:.80}")
        if state.get("version") != _VERSION:
            raise FailedPreconditionError(
                f"the state of a shared dataset is of version {state.get('version')}, and this "
                f"version of Headrace reads version {_VERSION}"
            )
        restored = None
        if "place" in state:
            restored = Progress(state["pass"], state["used"]), state["place"]
            restored[0].mark(state["place"])
            with self._iterator(state["pass"]) as iterator:
                iterator.set_state(state["place"])
        with self._lock:
            if self._is_read:
                raise FailedPreconditionError(
                    "an epoch of this shared dataset runs; set its state before or after it"
                )
            self._next_pass, self._restored, self._progress = state["pass"], restored, None

    state_dict = get_state
    load_state_dict = set_state

    @contextlib.contextmanager
    def reading(self) -> Iterator[tuple[DatasetIterator, Progress]]:
        """Begin the next pass, or go on with the one whose state was set."""
        with self._lock:
            if self._is_read:
                raise FailedPreconditionError(
                    "an epoch of this shared dataset runs; begin another one when it has ended"
                )
            restored, self._restored = self._restored, None
            progress = Progress(self._next_pass) if restored is None else restored[0]
            iterator = self._iterator(progress.pass_number)
            self._is_read, self._stateless = True, None
            self._next_pass = progress.pass_number + 1
            if restored is not None:
                iterator.set_state(restored[1])
            self._progress = progress
            self.mark(iterator, progress)
        try:
            with iterator:
                yield iterator, progress
            with self._lock:
                self._progress = None
        finally:
            with self._lock:
                self._is_read = False

    def _iterator(self, pass_number: int) -> DatasetIterator:
        return DatasetIterator(self.dataset.plan, pass_number)

    def mark(self, iterator: DatasetIterator, progress: Progress) -> None:
        """Take note of where the reader stands, if that is wanted."""
        if progress.wants_mark and self._stateless is None:
            with self._lock:
                try:
                    progress.mark(iterator.get_state())
                except HeadraceError as error:
                    self._stateless = error

    @property
    def element_spec(self) -> Any:
        """Spec of the elements."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator[Any]:
        raise FailedPreconditionError(
            "a shared dataset is read by the functions that run_epoch calls: pass it among their "
            "arguments, and call next() on it there"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        keep(self)
        return LeasedHere, ()

    def __repr__(self) -> str:
        return f"<SharedDataset of {self.dataset!r}>"


def shared_by(closure: Closure) -> SharedDataset:
    """Return the shared dataset that a call names.

    Raises:
        ValueError: There is none, or several.
    """
    kept = (*closure.work.function.kept, *closure.work.kept)
    shared = {id(each): each for each in kept if isinstance(each, SharedDataset)}
    if len(shared) != 1:
        raise ValueError(
            f"run_epoch needs one shared dataset among `args`, and found {len(shared)}; "
            "create_shared_dataset(dataset) makes one"
        )
    ((_, dataset),) = shared.items()
    return dataset


class _Element(NamedTuple):
    """An element that was read, and its number in the pass."""

    number: int
    payload: Payload


class _Open(NamedTuple):
    """A call, and the elements that it was given, those that it was fed among them."""

    closure: Closure
    lease: Lease
    elements: list[_Element]


class Epoch:
    """One pass over a shared dataset.

    Args:
        shell: Runs closures.
        closure: The call, without elements.
        dataset: What is read.
        elements: Reads it.
        progress: What was used of it.
    """

    def __init__(
        self,
        shell: Shell,
        closure: Closure,
        dataset: SharedDataset,
        elements: DatasetIterator,
        progress: Progress,
    ) -> None:
        self._shell = shell
        self._first = closure
        self._dataset = dataset
        self._elements = elements
        self._progress = progress
        self._has_ended = False
        #: Left over by calls that took fewer than the ones before.
        self._left_over: deque[_Element] = deque()
        #: Calls that have not ended, and what they were given.
        self._open: list[_Open] = []
        #: How many elements the last call took; None: none has returned yet.
        self._each: int | None = None
        self._steps = 0

    def run(self) -> int:
        """Make calls until all elements were taken; return how many have returned.

        Raises:
            Exception: The first error of a call, or of the dataset.
        """
        try:
            return self._run()
        finally:
            for closure, lease, elements in self._open:
                if closure.result.is_ready and closure.result.error is None:
                    self._use(lease, elements)

    def _run(self) -> int:
        while True:
            self._take_back()
            self._answer_wants()
            if len(self._open) < self._most_open():
                elements = self._take(self._each or 1)
                if elements:
                    self._call(elements)
                    continue
                if not self._open:
                    return self._steps
            self._shell.wait(self._has_news, "calls of an epoch")
            self._shell.raise_failure()

    def _most_open(self) -> int:
        with self._shell.lock:
            loads = list(self._shell.core.queue.loads)
        if self._each is None:
            # How many elements a call takes is not known. Each that is under way when they end
            # would be left without some, so there is one for each worker.
            return max(1, len(loads))
        return min(_MOST_IN_HAND, _AHEAD + _AHEAD * sum(load.window for load in loads))

    def _has_news(self) -> bool:
        return self._shell.core.queue.failure is not None or any(
            each.closure.result.is_ready or each.lease.wants for each in self._open
        )

    def _take(self, count: int) -> list[_Element]:
        taken: list[_Element] = []
        while len(taken) < count and self._left_over:
            taken.append(self._left_over.popleft())
        while len(taken) < count and not self._has_ended:
            self._dataset.mark(self._elements, self._progress)
            for element in self._elements:
                number = self._progress.read()
                if number is not None:
                    taken.append(_Element(number, pack(element)))
                break
            else:
                self._has_ended = True
        return taken

    def _call(self, elements: list[_Element]) -> None:
        first: Work = self._first.work
        payloads = [element.payload for element in elements]
        lease = Lease(payloads, has_ended=self._has_ended and not self._left_over)
        work = Work(first.function, first.arguments, lease=lease, kept=first.kept)
        closure = Closure(self._first.name, work, self._first.inputs)
        self._shell.schedule(closure)
        self._open.append(_Open(closure, lease, elements))

    def _take_back(self) -> None:
        """Take note of calls that have ended, and of what they left over."""
        with self._shell.lock:
            ended = [each for each in self._open if each.closure.result.is_ready]
            self._open = [each for each in self._open if not each.closure.result.is_ready]
        for closure, lease, elements in ended:
            has_returned = closure.result.error is None
            self._steps += has_returned and not lease.met_end
            used = len(elements) - lease.unused
            self._left_over += elements[used:]
            self._each = max(1, used)
            if has_returned:
                self._use(lease, elements)
        if any(each.closure.result.error is not None for each in ended):
            self._shell.raise_failure()

    def _use(self, lease: Lease, elements: list[_Element]) -> None:
        used = elements[: len(elements) - lease.unused]
        self._progress.use([element.number for element in used])

    def _answer_wants(self) -> None:
        for closure, lease, elements in self._open:
            if lease.wants:
                more = self._take(lease.wants)
                elements += more
                payloads = [element.payload for element in more]
                with self._shell.lock:
                    self._shell.core.feed(closure, payloads, has_ended=not more)
                self._shell.wake()


# --------------------------------------------------------------------------------------------------
# How far a pass over a shared dataset is: which elements were used by functions that have ended

# Elements are read in order and used in any. What is kept is small: places of the reader, a few of
# them, and which elements after the oldest one that counts were used.

_BETWEEN_MARKS = 64


class Progress:
    """One pass; elements are numbered from where it was begun or gone on with.

    Args:
        pass_number: Which pass it is.
        used: Elements that were used before, as ranges [first, last + 1].
    """

    def __init__(self, pass_number: int, used: Iterable[Sequence[int]] = ()) -> None:
        self.pass_number = pass_number
        self._lock = threading.Lock()
        #: All elements before it were used.
        self._low = 0
        #: Those after it that were used.
        self._used: set[int] = set()
        #: How many were read.
        self._read = 0
        #: Places of the reader, each with the number of the element that comes next there.
        self._marks: deque[tuple[int, Any]] = deque()
        self._is_wanted = False
        for first, end in used:
            self.use(range(first, end))

    @property
    def wants_mark(self) -> bool:
        """Whether it should know where the reader stands now.

        From the beginning on where somebody asks for states; a place may cost its reader something.
        """
        if not self._marks:
            return True
        return self._is_wanted and self._read - self._marks[-1][0] >= _BETWEEN_MARKS

    def mark(self, place: Any) -> None:
        """Take note of where the reader stands."""
        with self._lock:
            self._marks.append((self._read, place))

    def read(self) -> int | None:
        """Take note that an element was read; return its number, or None if it was used before."""
        with self._lock:
            number = self._read
            self._read += 1
            return None if number < self._low or number in self._used else number

    def use(self, numbers: Iterable[int]) -> None:
        """Take note that elements were used."""
        with self._lock:
            self._used.update(numbers)
            while self._low in self._used:
                self._used.remove(self._low)
                self._low += 1
            while len(self._marks) > 1 and self._marks[1][0] <= self._low:
                self._marks.popleft()

    def state(self) -> tuple[Any, list[list[int]]]:
        """Return a place of the reader, and which elements from there on were used, as ranges."""
        with self._lock:
            self._is_wanted = True
            first, place = self._marks[0]
            ranges = [[0, self._low - first]] if self._low > first else []
            for number in sorted(self._used):
                if ranges and ranges[-1][1] == number - first:
                    ranges[-1][1] += 1
                else:
                    ranges.append([number - first, number - first + 1])
            return place, ranges
