"""Tasks: what a worker asks the dispatcher about one, and says of it."""

from __future__ import annotations

from headrace.service.messages.saves import SaveDestination
from headrace.serving.call import Done, Message, Question

__all__ = [
    "FailTask",
    "FinishTask",
    "GetSplit",
    "GetSplitReply",
    "GetTask",
    "ReportDepartedClient",
    "ReturnSplits",
    "TaskDefinition",
]


class TaskDefinition(Message, frozen=True):
    """The reply to `GetTask`."""

    task_id: int
    iteration_id: int
    dataset_id: str
    digest: bytes
    """Of the plan, for `GetPlan`."""
    epoch: tuple[int, ...]
    seed: int
    """What random steps of this task draw from that have no seed of their own. Where parts of one
    dataset are dealt or fixed, it is the same for all tasks of the iteration."""
    task_token: str
    """What a client that the dispatcher sent shows, and what the worker shows the dispatcher."""
    assigns_splits: bool
    """It reads units, which its worker asks for (`GetSplit`); else it reads the plan whole, or the
    part of it that is fixed."""
    shard_index: int | None = None
    num_shards: int | None = None
    starting_round: int | None = None
    shard_kind: str = ""
    """Which part of the plan shard `shard_index` of `num_shards` is; the name of a way of the
    worker's. Empty: the plan as it is."""
    delivery_policy: str = "first_come"
    """Which client gets which of its elements; the name of a way of the worker's."""
    has_element_ids: bool = False
    """Its portions say of which units their elements are, and which of each."""
    num_consumers: int | None = None
    """For how many consumers a round of its elements is (`terms.Terms`, as the next ones)."""
    save_destination: SaveDestination | None = None
    """Not None: its elements are for no client, and are written to files."""
    remainder: str = "drop"
    cost_fn_digest: bytes = b""
    """Digest of the cost function, for `GetPlan`."""
    partition_mode: str = ""
    """Which half of the plan it runs."""
    fixed_seeds: tuple[int, ...] = ()
    """What steps draw from that draw the same in each pass, and have no seed of their own; empty:
    what the plan says."""


class GetTask(Question[TaskDefinition], frozen=True):
    """Ask what a task is about that a client asked for."""

    worker_id: str
    task_id: int


class GetSplitReply(Message, frozen=True):
    """The reply to `GetSplit`: units from `start` to `stop` - 1."""

    start: int
    stop: int
    """`start == stop` and not `wait`: nothing is left for this task."""
    wait: bool = False
    """Nothing now: the task has its share, or what others hold may yet come back. Ask again
    soon."""
    is_poison_candidate: bool = False
    """Workers died with these units before: deliver what comes of them at once. Nothing more is
    granted meanwhile."""
    ordinals: tuple[tuple[int, int], ...] = ()
    """Not empty: it is one unit, and of its elements only these are wanted, by their ordinals
    (`service.rows`)."""
    flush: bool = False
    """Where it is to wait: nothing may come before what it holds is delivered. Its steps are to
    give all that they hold, as at the end, and others begin with what is granted next."""
    is_last: bool = False
    """Nothing is left after these units, and nobody else has any that may come back: the task need
    not ask again."""


class GetSplit(Question[GetSplitReply], frozen=True):
    """Ask for the next units of a task."""

    worker_id: str
    task_id: int
    task_token: str
    assignment_number: int
    """How many grants the task has received so far; the same number gets the same units again. An
    answer without units does not count."""
    max_splits: int
    """Units that the worker would like; it gets no more."""
    num_done: int
    """All units before this one, in dealt order, are done: delivered and acknowledged. The
    dispatcher forgets where they went."""


class FinishTask(Question[Done], frozen=True):
    """Say that a task's last element was handed out."""

    worker_id: str
    task_id: int
    task_token: str
    cut_short: bool = False
    """The worker was asked to leave while it made a copy: the rest of that is missing."""
    num_done: int = 0
    """As in `GetSplit`."""
    num_assigned: int | None = None
    """How many units came: what was dealt after them was in an answer that came too late, and is
    dealt again. None: nobody says."""


class FailTask(Question[Done], frozen=True):
    """Say that a task ended by an error of the worker's own: what it did not deliver is lost."""

    worker_id: str
    task_id: int
    task_token: str
    reason: str


class ReturnSplits(Question[Done], frozen=True):
    """Say that units of a task were not delivered and never will be: they are dealt again."""

    worker_id: str
    task_id: int
    task_token: str
    splits: tuple[tuple[int, int], ...]
    """Ranges in dealt order."""


class ReportDepartedClient(Question[Done], frozen=True):
    """Say what of a task a client that is gone was sent and had not acknowledged. It gets nothing
    more of the task."""

    worker_id: str
    task_id: int
    task_token: str
    client_id: str
    unacknowledged: tuple[tuple[int, int], ...]
    """Ranges in dealt order, all of whose elements went to that client alone: they are dealt
    again, except for those that it said it used."""
    possibly_lost: tuple[tuple[int, int], ...]
    """Ranges of others of which something may have gone to it."""
    partially_unacknowledged: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Where elements have origins: units in dealt order of which some elements went to it that it
    did not acknowledge, each with ranges of their ordinals. They are dealt again."""
    partially_acknowledged: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """The same of what it acknowledged, of units that are not done."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Where elements have no origins: ranges of which all was acknowledged, by this client or
    others. If the worker is lost, nobody else knows what a client that is gone had of it."""
    partially_delivered: tuple[tuple[int, int], ...] = ()
    """The same of units of which something was acknowledged."""
