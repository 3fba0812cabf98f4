"""Messages from clients to workers about elements."""

from __future__ import annotations

from headrace.serving.rpc import Message, TypedRequest

__all__ = [
    "NO_ELEMENT_IDS",
    "PROGRESS_REQUEST",
    "ElementIds",
    "GetElements",
    "GetElementsReply",
    "RoundProgress",
    "SkippedElements",
]

PROGRESS_REQUEST = -1
"""Request number of a request for no element; with coordinated reads its reply contains the number
of complete rounds."""


class ElementIds(Message, frozen=True):
    """Ids of the elements in a result batch, for exactly-once and ordered reading."""

    runs: tuple[tuple[int, int, int, int], ...] = ()
    """Runs of element ids (`service.element_sets`), then the end ordinals of finished splits.

    The ids are in the order of the elements unless `is_permuted`.
    """
    is_permuted: bool = False
    """True if the ids are in another order than the elements."""
    permutation: bytes = b""
    """For each id, the index of its element as a little-endian 32-bit integer."""
    interleaving: tuple[tuple[int, ...], int, int, int] | None = None
    """Replaces `permutation` if splits are interleaved: (splits of the stream in the cycle,
    elements per turn, elements since the cycle began, number of elements). Ids are sorted by these
    splits."""
    ids_per_element: tuple[int, ...] = ()
    """Number of ids of each element; empty if all have the same number."""
    assigned: tuple[tuple[int, int, int, int], ...] = ()
    """(number, count, split, first) for assigned splits that are not done: `count` splits of the
    stream from `split` on, whose numbers in assignment order start with `number`, and of each the
    ordinals from `first` on."""
    failed_split: int = -1
    """With an error in ordered reading: its split, in assignment order."""
    failed_position: tuple[int, int] = (0, 0)
    """With `failed_split`: position of the error in the split, as (ordinal of the element that it
    precedes, its number among the errors there, from 1). Number 0: the element before that ordinal
    failed; -1: it failed below filtering steps of the client stage."""


NO_ELEMENT_IDS = ElementIds()


class RoundProgress(Message, frozen=True):
    """Progress of reading rounds, for coordinated reads. `GetElementsReply.first_element` is the
    round number."""

    num_complete: int
    """Number of rounds, from the first, that all consumers received."""
    lagging_consumers: tuple[int, ...] = ()
    """In a reply to a progress request: consumers that have not received the next round, which is
    ready."""


class SkippedElements(Message, frozen=True):
    """Elements that a trainer missed because it lagged behind a cross-trainer cache."""

    count: int
    """Number of evicted elements before the first of the reply."""


class GetElementsReply(Message, frozen=True):
    """Reply to `GetElements`, with the chunk in its buffers (`element.wire`).

    With exactly-once reading, the splits of a task in assignment order are after this reply:

        0            num_done           done_from          done_to          delivered_end
        |acknowledged| complete earlier | complete with it | partly delivered | none delivered ...
    """

    first_element: int
    """Number of the chunk's first element within the task."""
    num_elements: int
    """Number of elements in the chunk. 0: none in this reply; unless `end_of_task` is set, the
    client requests again when it has consumed the earlier ones."""
    end_of_task: bool
    """True if the task has delivered its last element to all clients. The reply has no buffers."""
    done_from: int = 0
    done_to: int = 0
    """Splits from `done_from` to `done_to` - 1, in assignment order, are complete with this chunk:
    all their elements were in this or earlier chunks, of any client. None if equal."""
    delivered_end: int = 0
    """No elements of splits from this one on, in assignment order, were in this reply or an earlier
    one; this reply has none of splits before `done_from`."""
    earlier_delivered_end: int = 0
    """No elements of splits from this one on, in assignment order, were in an earlier reply to any
    client."""
    num_done: int = 0
    """Splits before this one, in assignment order, were delivered and acknowledged, by any clients,
    and the dispatcher knows it."""
    error: bytes | None = None
    """Error in place of an element, with `num_elements` 0 (`transport.envelope.encode_error`). It
    is data, whatever its class; an error as the reply itself concerns only the request."""
    mode_data: ElementIds | RoundProgress | SkippedElements | None = None
    """Data of the task's reading mode."""

    @property
    def element_ids(self) -> ElementIds:
        """Ids of the elements; empty if the reading mode does not provide them."""
        return self.mode_data if isinstance(self.mode_data, ElementIds) else NO_ELEMENT_IDS


class GetElements(TypedRequest[GetElementsReply], frozen=True):
    """Request the next elements of a task: in arrival order, or this consumer's of a round, whose
    number is the request number."""

    task_id: int
    task_token: str
    """Token of the task, which the client received from the dispatcher (`TaskAddress`)."""
    client_id: str
    request_number: int
    """0, 1, 2, ... for this client and task; a repeated number gets the same reply."""
    acknowledged: int
    """All replies with a number below this one were received and may be forgotten."""
    max_elements: int = 0
    """Maximum number of elements; 0 accepts all that are buffered."""
    trainer_id: str = ""
    """Trainer that the client reads for, with a cross-trainer cache."""
    codec: str = ""
    """Codec for compressing the reply (`element.frame_compression`); empty disables compression."""
    consumer_index: int = -1
    """Index of the requesting consumer, with coordinated reads."""
    known_rounds: int = -1
    """In a progress request: wait until more rounds than these are complete; a negative number does
    not wait."""
