"""Interface of the delivery policies, which decide which client receives which result batch.

Each method handles one input and returns the replies that are due because of it. A policy has no
thread, lock or clock: times are arguments. A task's definition names its policy (`registry`), so
that a new policy changes no other module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from headrace.service.element_sets import PartialSplits
from headrace.service.messages import GetElements, SavedFile, TrainerActivity
from headrace.service.ranges import Ranges
from headrace.service.worker.result_batch import BatchReply, ResultBatch

__all__ = [
    "BufferLimits",
    "BufferedByTask",
    "BufferedOutput",
    "DeliveryPolicy",
    "DepartedClientOutput",
    "UndeliveredOutput",
]

R = TypeVar("R")


class BufferedOutput(NamedTuple):
    """Output of a task that waits for clients."""

    batches: int = 0
    bytes: int = 0
    trainers: tuple[TrainerActivity, ...] = ()
    """Progress of each trainer, if several read all of it."""


BufferedByTask: TypeAlias = Mapping[int, BufferedOutput]
"""Output that waits for clients, by task; tasks without any may be absent."""


@dataclass(frozen=True, kw_only=True)
class BufferLimits:
    """Memory and time limits for the output of one task."""

    ready_batches: int = 3
    ready_bytes: int = 64 << 20
    """Batches without a request; one is kept regardless of its size."""
    client_bytes: int = 64 << 20
    """Unacknowledged bytes per client."""
    total_bytes: int = 256 << 20
    """Unacknowledged bytes of all clients."""
    client_timeout: float = 300.0
    """Seconds after which a silent client's unacknowledged batches are dropped."""
    window_bytes: int = 1 << 30
    """Window of newest elements that trainers share and read each at its own pace."""


@dataclass(frozen=True)
class UndeliveredOutput:
    """Output that a task had not delivered when it was cancelled."""

    elements: int
    """Number of elements in batches without a request."""
    unacknowledged: int
    """Number of elements that were sent to clients and may have arrived."""
    delivered_splits: Ranges
    """Splits with elements that were sent, in assignment order; no element of other splits was
    sent.
    """


@dataclass(frozen=True)
class DepartedClientOutput:
    """Unacknowledged splits of a departed client, in assignment order."""

    unacknowledged: Ranges
    """Splits whose elements were all sent to this client."""
    possibly_lost: Ranges
    """Other splits with elements among those sent; empty if element ids are tracked."""
    partially_unacknowledged: PartialSplits = ()
    """The elements of those other splits, if element ids are tracked."""
    partially_acknowledged: PartialSplits = ()
    """Elements of unfinished splits that it had acknowledged."""


class DeliveryPolicy(ABC, Generic[R]):
    """Delivers one task's result batches. `R` is the type that represents a client's request."""

    # --- state ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another batch may be made."""

    @property
    @abstractmethod
    def completed_splits(self) -> Ranges:
        """Splits that were delivered and acknowledged, in assignment order."""

    @property
    def acknowledged_splits(self) -> tuple[Ranges, Ranges]:
        """Splits acknowledged completely and in part; empty if that is not tracked.

        Used if a departed client may hold elements that are delivered at most once.
        """
        return (), ()

    @property
    @abstractmethod
    def can_finish(self) -> bool:
        """Whether the dispatcher may learn that nothing is left to deliver."""

    @property
    @abstractmethod
    def is_fully_acknowledged(self) -> bool:
        """Whether everything was delivered and acknowledged."""

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients have departed, so that remaining splits can be returned."""
        return False

    @property
    def max_batch_bytes(self) -> int | None:
        """Maximum bytes of a batch with more than one element; None for the default."""
        return None

    @property
    def max_batch_elements(self) -> int | None:
        """Maximum number of elements of the next batch; None for the default."""
        return None

    @property
    def unreported_files(self) -> tuple[int, tuple[SavedFile, ...], int] | None:
        """Files to report to the dispatcher next: report number, files, splits done.

        The splits are those that are done with these files. None if there are no files to report,
        as for policies that send elements to clients.
        """
        return None

    @property
    def dropped_elements(self) -> int:
        """Number of elements left over at the end, which no client receives."""
        return 0

    @property
    def buffered(self) -> BufferedOutput:
        """Output that waits for clients, if this policy counts it."""
        return BufferedOutput()

    # --- inputs -----------------------------------------------------------------------------------

    def files_reported(self, number: int) -> None:
        """Record that the dispatcher acknowledged a report of files."""
        return None

    @abstractmethod
    def request_received(
        self, request: R, message: GetElements, now: float
    ) -> list[tuple[R, BatchReply]]:
        """Handle a client's request."""

    @abstractmethod
    def add_batch(self, batch: ResultBatch) -> list[tuple[R, BatchReply]]:
        """Add the next batch."""

    def note_outcome(self, *, failed: bool, drained: bool) -> None:
        """Record the cause of the end that follows (`note_exhausted`).

        Args:
            failed: Whether the task failed; the last batch then carries the error for the clients.
            drained: Whether the task was asked to stop although it had more to produce.
        """
        return None

    def assign(self, start: int, stop: int, ordinals: Ranges) -> None:
        """Record the next assignment of the task, splits `start` to `stop` - 1 of the stream.

        Args:
            start: First split.
            stop: End of the range (exclusive).
            ordinals: If not empty, the range is one split and only these ordinals are assigned.
        """
        return None

    @abstractmethod
    def note_exhausted(self, splits: int = 0) -> list[tuple[R, BatchReply]]:
        """Record that no further batch will come; `splits` splits are complete with the end."""

    @abstractmethod
    def note_finished(self) -> list[tuple[R, BatchReply]]:
        """Record that the task is finished: clients receive the end."""

    @abstractmethod
    def cancel(self, refusal: Exception) -> tuple[list[tuple[R, BatchReply]], UndeliveredOutput]:
        """Reject all further requests, except repeated requests for batches sent before."""

    @abstractmethod
    def remove_client(
        self, client_id: str
    ) -> tuple[list[tuple[R, BatchReply]], DepartedClientOutput]:
        """Record that a client departed; return what to report about it. Idempotent."""

    @abstractmethod
    def forget_client(self, client_id: str) -> list[tuple[R, BatchReply]]:
        """Record that the dispatcher knows what a departed client had received."""

    def forget_completed(self, splits: int) -> None:
        """Record that the dispatcher knows that all splits before this one are done."""

    @abstractmethod
    def drop_expired(self, now: float) -> tuple[list[tuple[R, BatchReply]], int]:
        """Drop batches held by silent clients; return replies and the number of lost elements."""
