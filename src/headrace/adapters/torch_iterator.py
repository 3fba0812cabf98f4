"""Iterator of a loader: elements as tensors, with a state that counts the yielded elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from headrace.adapters.torch_device_transfer import DeviceTransfer, PendingTransfer
from headrace.adapters.torch_tensors import to_tensors
from headrace.arguments import check_state_version
from headrace.data.lookahead import IteratorPosition, LookaheadIterator
from headrace.distribute.iterator import DistributedIterator
from headrace.errors import FailedPreconditionError

__all__ = ["LoaderIterator", "OpenedEpoch", "check_loader_state"]

_VERSION = 1


class OpenedEpoch(NamedTuple):
    """An open epoch: its elements and the start position."""

    elements: LookaheadIterator | DistributedIterator
    epoch: int
    sharding: list[int]
    """Number of ranks, rank, number of worker processes, worker; [] for a distributed dataset."""
    start: int = 0
    """Elements that all ranks together had read before the current sharding began."""
    num_taken: int = 0
    """Elements that this process has taken since then, including failed ones."""
    num_failed: int = 0
    """Failed elements among those taken."""


class LoaderIterator:
    """Yields the elements of an epoch as tensors; `iter(loader)` makes it.

    Also a context manager; `close` (or the end, or garbage collection) releases threads and files.
    Not for several threads at once.

    >>> with iter(hr.torch.loader(hr.Dataset.range(4).batch(2))) as iterator:
    ...     next(iterator)
    tensor([0, 1])

    Args:
        opened: The open epoch.
        transfer: Transfer to the device; None leaves tensors where they are.
        reopen: Opens the dataset at the position of a state.
    """

    def __init__(
        self,
        opened: OpenedEpoch,
        transfer: DeviceTransfer | None,
        reopen: Callable[[dict[str, Any]], OpenedEpoch],
    ) -> None:
        self._opened = opened
        self._num_taken, self._num_failed = opened.num_taken, opened.num_failed
        self._transfer = transfer
        self._reopen = reopen
        self._has_ended = False
        self._is_closed = False
        #: An element that was read but not returned, as after an interruption; () if there is none.
        self._pending: tuple[()] | tuple[Any] = ()
        #: Position before that element; None if it is not possible to return there.
        self._pending_position: IteratorPosition | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._has_ended or self._is_closed:
            raise StopIteration
        if not self._pending:
            self._read_next()
        try:
            made = self._to_device(*self._pending)
        except Exception:
            self._pending = ()
            raise
        # No calls from here to the return: an interruption would lose the element.
        self._pending = ()
        return made

    def _read_next(self) -> None:
        """Read the next element into `_pending`."""
        elements = self._opened.elements
        before = None
        if isinstance(elements, LookaheadIterator) and elements.can_read_ahead:
            before = elements.position
        try:
            for element in elements:
                self._pending, self._pending_position, self._num_taken = (
                    (element,),
                    before,
                    self._num_taken + 1,
                )
                return
        except Exception:
            self._num_taken += 1  # the next element follows the failed one
            self._num_failed += 1
            raise
        self._has_ended = True
        raise StopIteration

    def _to_device(self, element: Any) -> Any:
        """Return an element as tensors that are safe to use."""
        transfer = self._transfer
        if transfer is None:
            return to_tensors(element)
        if not isinstance(element, PendingTransfer):
            element = PendingTransfer(*transfer.send(to_tensors(element)))
        return transfer.receive(*element)

    def _rewind_pending(self) -> None:
        """Return to the position before an element that was read when an interruption came."""
        elements = self._opened.elements
        if self._pending_position is None or not isinstance(elements, LookaheadIterator):
            raise FailedPreconditionError(
                "the iteration was interrupted when the next element had already been read; take "
                "the state after that element"
            )
        elements.rewind(self._pending_position)
        self._pending, self._num_taken = (), self._num_taken - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next element: a JSON value of a few hundred bytes.

        Elements that were read ahead, or are being transferred to the device, do not count as read.

        Raises:
            FailedPreconditionError: If the state could not be restored, for instance because the
                dataset reads from a data service.
        """
        if self._pending:
            self._rewind_pending()
        opened = self._opened
        state = {
            "version": _VERSION,
            "sharding": opened.sharding,
            "start": opened.start,
            "num_taken": self._num_taken,
            "epoch": opened.epoch,
            "ended": self._has_ended,
            "iterator": None if self._has_ended else opened.elements.get_state(),
        }
        return {**state, "num_failed": self._num_failed} if self._num_failed else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            FailedPreconditionError: If the state is of another dataset, or of a sharding that this
                loader cannot continue.
        """
        check_loader_state(state)
        if state["ended"]:
            self._opened.elements.close()
            self._opened = self._opened._replace(epoch=state["epoch"], start=state["start"])
            self._num_taken, self._num_failed = state["num_taken"], state.get("num_failed", 0)
        else:
            opened = self._reopen(state)
            self._opened.elements.close()
            self._opened, self._num_taken, self._num_failed = (
                opened,
                opened.num_taken,
                opened.num_failed,
            )
        self._has_ended, self._is_closed, self._pending = state["ended"], False, ()

    get_state = state_dict
    set_state = load_state_dict

    def close(self) -> None:
        """Release threads and files, and end the iterator. Idempotent."""
        self._is_closed = True
        self._opened.elements.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_loader_state(state: Any) -> None:
    """Raise an error unless a value is a state of a loader.

    Raises:
        TypeError: If it is not a result of `state_dict`.
        FailedPreconditionError: If it is of another version.
    """
    keys = {"version", "sharding", "start", "num_taken", "epoch", "ended", "iterator"}
    if not isinstance(state, dict) or not keys <= state.keys():
        raise TypeError(
            f"`state` must be a result of a loader's `state_dict`, but got {state!r:.80}"
        )
    check_state_version(state["version"], _VERSION)
