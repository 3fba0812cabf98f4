"""Elements: what clients ask of workers."""

from __future__ import annotations

from headrace.serving.call import Message, Question

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
"""The number of a request for no element: where tasks are read in rounds, its answer says how many
of them are whole."""


class ElementIds(Message, frozen=True):
    """Where elements come from, for exactly-once and ordered reading."""

    runs: tuple[tuple[int, int, int, int], ...] = ()
    """The origins (`service.rows.OriginRun`) in the order of the elements; then, of units that
    ended, the ordinals after the last."""
    is_permuted: bool = False
    """The origins are in another order than the elements."""
    permutation: bytes = b""
    """Where they are: for each of them, in their order, which it is in the order of the elements,
    as 32 bits (little-endian)."""
    interleaving: tuple[tuple[int, ...], int, int, int] | None = None
    """In place of `permutation`, where units take turns: (units of the stream in turn, elements in
    a turn, elements that came before since the cycle began, elements). Origins are sorted by those
    units."""
    ids_per_element: tuple[int, ...] = ()
    """How many origins each element has; empty: all as many."""
    assigned: tuple[tuple[int, int, int, int], ...] = ()
    """(number, units, unit, first) for what was dealt to the task and is not done: `units` units of
    the stream from `unit` on, the first of which has this number in dealt order, and of each the
    ordinals from `first_element` on."""
    failed_split: int = -1
    """With an error, where elements are wanted in order: the unit, in dealt order, that it is
    of."""
    failed_position: tuple[int, int] = (0, 0)
    """With `failed_split`: where the error stands in the unit. (ordinal of the element before which
    it stands, its number among those that stand there, from 1 on; 0: the element before that one
    has failed itself; -1: so it has, below steps of the client's half that choose)"""


NO_ELEMENT_IDS = ElementIds()


class RoundProgress(Message, frozen=True):
    """How far rounds are, for coordinated reads. `GetElementsReply.first_element` is the number of
    the round."""

    num_complete: int
    """So many rounds, from the first on, arrived at every consumer."""
    lagging_consumers: tuple[int, ...] = ()
    """In the answer to a word: consumers that have not received the next round, which is made."""


class SkippedElements(Message, frozen=True):
    """What a trainer missed that fell behind a cross-trainer cache."""

    count: int
    """Elements before the first of the answer, which had gone."""


class GetElementsReply(Message, frozen=True):
    """The reply to `GetElements`, with the chunk in its buffers (`element.wire`)."""

    first_element: int
    """The task's own number of the first element in the chunk."""
    num_elements: int
    """Elements in the chunk. 0: none came with this answer; unless `end_of_task` is set, ask again
    once what came before is used up."""
    end_of_task: bool
    """The task has no more elements for anyone. No buffers come with it."""
    done_from: int = 0
    done_to: int = 0
    """Units from `done_from` to `done_to` - 1, in dealt order, are whole with this chunk: all their
    elements came in it or in earlier ones, to whichever clients. Equal: none."""
    delivered_end: int = 0
    """Of units from this one on, in dealt order, nothing came with this answer or an earlier one;
    of those before `done_from`, nothing came with this one."""
    earlier_delivered_end: int = 0
    """Of units from this one on, in dealt order, nothing came with an earlier answer to anybody."""
    num_done: int = 0
    """Units before this one, in dealt order, were delivered and acknowledged, to whichever
    clients, and the dispatcher knows it."""
    error: bytes | None = None
    """What stands in an element's place, with `num_elements` 0 (`transport.envelope.encode_error`).
    It is data, whatever its class: an error as the answer itself is about the request alone."""
    mode_data: ElementIds | RoundProgress | SkippedElements | None = None
    """What the task's reading mode adds."""

    @property
    def element_ids(self) -> ElementIds:
        """Where the elements come from; nothing where the reading mode does not say it."""
        return self.mode_data if isinstance(self.mode_data, ElementIds) else NO_ELEMENT_IDS


class GetElements(Question[GetElementsReply], frozen=True):
    """Ask for the next elements of a task: first come, first served, or this consumer's of a round,
    whose number is that of the request."""

    task_id: int
    ticket: str
    client_id: str
    request_number: int
    """0, 1, 2, ... for this client and task; the same number gets the same answer again."""
    acknowledged: int
    """All answers with a number below this one have arrived and may be forgotten."""
    max_elements: int = 0
    """At most so many elements may come; 0: as many as are at hand."""
    trainer_id: str = ""
    """For whom the client reads, where trainers share what workers make."""
    codec: str = ""
    """The answer may be packed with it (`element.packing`); empty: it is not."""
    consumer_index: int = -1
    """Which consumer asks, where the task is read in rounds."""
    known_rounds: int = -1
    """Of a word: it waits until more rounds than these are whole; negative: it does not wait."""
