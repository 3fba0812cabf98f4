"""A dataset that all workers share: each element goes to one of them, once an epoch.

The coordinator reads it, and gives each call of the function as many elements as the calls before
took. One that takes more asks for them; what one leaves over is given to another. A call that is
lost with its worker is made again with the same elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from headrace.arguments import check_instance
from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.current import leased_here
from headrace.coordinator.packing import keep, pack
from headrace.coordinator.shell import Shell
from headrace.coordinator.work import Lease, Work
from headrace.data.dataset import Dataset
from headrace.errors import FailedPreconditionError

__all__ = ["Epoch", "SharedDataset"]

_MOST_IN_HAND = 64
_AHEAD = 2


class SharedDataset:
    """Stands for a shared dataset among the arguments of `run_epoch`; there it is an iterator.

    `coordinator.create_shared_dataset` makes it.

    Args:
        dataset: Read once an epoch.
    """

    def __init__(self, dataset: Dataset) -> None:
        check_instance("dataset", dataset, Dataset)
        self.dataset = dataset

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
        return leased_here, ()

    def __repr__(self) -> str:
        return f"<SharedDataset of {self.dataset!r}>"


class Epoch:
    """One pass over a shared dataset.

    Args:
        shell: Runs closures.
        closure: The call, without elements.
        elements: What is read.
    """

    def __init__(self, shell: Shell, closure: Closure, elements: Iterator[Any]) -> None:
        self._shell = shell
        self._first = closure
        self._elements = elements
        self._has_ended = False
        #: Left over by calls that took fewer than the ones before.
        self._left_over: deque[Payload] = deque()
        #: Calls that have not ended, and what they were given.
        self._open: list[tuple[Closure, Lease]] = []
        #: How many elements the last call took; None: none has returned yet.
        self._each: int | None = None
        self._steps = 0

    def run(self) -> int:
        """Make calls until all elements were taken; return how many have returned.

        Raises:
            Exception: The first error of a call, or of the dataset.
        """
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
            closure.result.is_ready or lease.wants for closure, lease in self._open
        )

    def _take(self, count: int) -> list[Payload]:
        taken: list[Payload] = []
        while len(taken) < count and self._left_over:
            taken.append(self._left_over.popleft())
        while len(taken) < count and not self._has_ended:
            for element in self._elements:
                taken.append(pack(element))
                break
            else:
                self._has_ended = True
        return taken

    def _call(self, elements: list[Payload]) -> None:
        first: Work = self._first.work
        lease = Lease(elements, has_ended=self._has_ended and not self._left_over)
        work = Work(first.function, first.arguments, lease=lease, kept=first.kept)
        closure = Closure(self._first.name, work, self._first.inputs)
        self._shell.schedule(closure)
        self._open.append((closure, lease))

    def _take_back(self) -> None:
        """Take note of calls that have ended, and of what they left over."""
        with self._shell.lock:
            ended = [each for each in self._open if each[0].result.is_ready]
            self._open = [each for each in self._open if not each[0].result.is_ready]
        for closure, lease in ended:
            self._steps += closure.result.error is None and not lease.met_end
            used = len(lease.elements) - lease.unused
            self._left_over += lease.elements[used:]
            self._each = max(1, used)
        if any(closure.result.error is not None for closure, _ in ended):
            self._shell.raise_failure()

    def _answer_wants(self) -> None:
        for closure, lease in self._open:
            if lease.wants:
                elements = self._take(lease.wants)
                with self._shell.lock:
                    self._shell.core.feed(closure, elements, has_ended=not elements)
                self._shell.wake()
