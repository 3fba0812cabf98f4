"""Facts that all reading modes share (`fact.Fact`), and the union of all."""

from __future__ import annotations

from typing import TypeAlias

from headrace.service.dispatcher.event import Event
from headrace.service.dispatcher.state import AnyIterationModeState, AnyTaskModeState
from headrace.service.messages import JobOptions
from headrace.service.modes.coordinated_reads.records import RoundsOpened, RoundsSettled
from headrace.service.modes.distributed_save.records import (
    FilesCommitted,
    SaveClosed,
    SaveDirectoryCreated,
    SaveFailed,
    SaveStarted,
)
from headrace.service.ranges import Ranges
from headrace.service.rows import Parts
from headrace.versions import Versions

__all__ = [
    "AnyEvent",
    "ClientJoined",
    "ClientLeft",
    "CopyMarkedStable",
    "DatasetForgotten",
    "DatasetPinned",
    "DatasetRegistered",
    "DeliveryReported",
    "DepartedClientReported",
    "DispatcherStarted",
    "ElementsConsumed",
    "ElementsReceived",
    "IterationCreated",
    "IterationDiscarded",
    "IterationFinished",
    "IterationForgotten",
    "JobCreated",
    "JobForgotten",
    "PlanForgotten",
    "PlanStored",
    "SlotsConfigured",
    "SplitsAbandoned",
    "SplitsAssigned",
    "SplitsReassigned",
    "SplitsReturned",
    "TaskCreated",
    "TaskFailed",
    "TaskFinished",
    "TaskLost",
    "TasksForgotten",
    "WorkerDraining",
    "WorkerLeft",
    "WorkerLost",
    "WorkerRegistered",
]


class DispatcherStarted(Event, frozen=True):
    """A dispatcher began with nothing: numbers that another one gave out mean nothing to it."""

    dispatcher_id: str
    """Its name, which everybody may know."""
    secret: bytes
    """The key of its tickets, which nobody else knows."""


class PlanStored(Event, frozen=True):
    """All bytes of a plan are kept under their SHA-256 digest."""

    digest: bytes
    size: int


class DatasetRegistered(Event, frozen=True):
    """A dataset became known; its plan was stored before."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    anonymous: bool = False
    """Nobody was given its id to keep: it may be forgotten when nobody uses it."""
    has_element_ids: bool = False
    """Its elements have origins (`rows`)."""
    steps: tuple[tuple[str, str], ...] = ()
    """Names of its steps, each with a fingerprint."""
    python_version: str = ""
    """The minor version of Python that pickled the plan; empty: not known."""


class DatasetPinned(Event, frozen=True):
    """Somebody was given the id of an anonymous dataset: it is forgotten no more."""

    dataset_id: str


class DatasetForgotten(Event, frozen=True):
    """An anonymous dataset that nobody used for long left memory; so did a plan of its own."""

    dataset_id: str


class PlanForgotten(Event, frozen=True):
    """A plan that no dataset has left memory."""

    digest: bytes


class SlotsConfigured(Event, frozen=True):
    """The list of workers that static policies share datasets among is another one.

    Workers that are there take the slots that fit, in the order in which they registered.
    """

    patterns: tuple[str, ...]


class WorkerRegistered(Event, frozen=True):
    """A worker joined, or changed its tags."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    slot: int | None = None
    """Which slot it took; None where there are none."""
    versions: Versions = Versions()


class WorkerDraining(Event, frozen=True):
    """A worker takes no more work and will leave."""

    worker_id: str


class WorkerLeft(Event, frozen=True):
    """A worker left on its own; what it still ran ended there."""

    worker_id: str


class WorkerLost(Event, frozen=True):
    """A worker is taken for gone, and its running tasks with it."""

    worker_id: str
    reason: str = ""
    """What was seen of it: a silence is not yet a death."""
    timed_out: bool = False
    """Its process was not seen to end: what it was computing is not suspected to have killed it."""


class JobCreated(Event, frozen=True):
    """A job began: a named one, a client's own, or a save's."""

    job_id: int
    name: str | None
    owner: str | None
    """The client whose own it is."""
    dataset_id: str
    options: JobOptions
    save_id: str = ""
    """Not empty: it writes the save of this id, and has neither name nor owner."""


class JobForgotten(Event, frozen=True):
    """A job that nobody can join any more left memory; it had no iteration left."""

    job_id: int


class IterationCreated(Event, frozen=True):
    """One more pass of a job began."""

    iteration_id: int
    job_id: int
    epoch: tuple[int, ...]
    seed: int
    num_splits: int | None
    """Units that are dealt in it, or INFINITE (-1); None: nothing is dealt."""
    exactly_once: bool = False
    """Its elements have origins (`rows`), and each comes once."""
    first_split: int = 0
    """Nothing before this unit is dealt."""
    delivered: Ranges = ()
    """Units after that which are dealt no more, and of others the ordinals: they came before."""
    partial_splits: Parts = ()
    start_position_id: str = ""
    mode_state: AnyIterationModeState | None = None
    """What the mode of its job adds, at the beginning."""
    fixed_seeds: tuple[int, ...] = ()
    """What steps draw from that draw the same in each pass; empty: what the plan says."""


class IterationFinished(Event, frozen=True):
    """All tasks are over and nothing is left that somebody could still be dealt."""

    iteration_id: int
    failure_reason: str = ""
    """Not empty: it was given up, for this reason."""


class IterationDiscarded(Event, frozen=True):
    """An iteration without clients was given up; opening it again starts it from the beginning."""

    iteration_id: int


class IterationForgotten(Event, frozen=True):
    """A finished iteration left memory; its job remembers that it finished, and by whom."""

    iteration_id: int


class TaskCreated(Event, frozen=True):
    """A worker was given an iteration."""

    task_id: int
    iteration_id: int
    worker_id: str
    mode_state: AnyTaskModeState | None = None
    """What the mode of its job adds, at the beginning."""
    attempt: int = 0
    """How often all tasks that the iteration had were lost before, where nothing is dealt."""
    is_replacement: bool = False
    """It makes a copy, and more copies were lost than had been replaced."""


class TaskFinished(Event, frozen=True):
    """A task handed out its last element."""

    task_id: int
    cut_short: bool = False
    """It made a copy, and ended before the copy did: its worker leaves."""
    num_done: int = 0
    """Units before this one, in dealt order, were done."""


class TaskFailed(Event, frozen=True):
    """A task ended by an error of the worker's own."""

    task_id: int
    reason: str


class CopyMarkedStable(Event, frozen=True):
    """A task in which nothing is dealt has run for so long that its dataset kills no worker."""

    task_id: int


class TaskLost(Event, frozen=True):
    """A task was given up, though its worker is there."""

    task_id: int
    reason: str


class DeliveryReported(Event, frozen=True):
    """It became known what a client had received of a task: ranges of units in dealt order.

    It said so itself, or nobody waits for it any more. Without a name it is what all clients had:
    the worker said so when one of them was gone.
    """

    task_id: int
    client_id: str
    delivered: Ranges
    """Units that came whole."""
    partially_delivered: Ranges = ()
    """Units of which something may have come."""


class ElementsReceived(Event, frozen=True):
    """It became known which elements of a task a client has, where each comes once.

    They are the task's to give, and known to be nobody else's. If the client goes and did not use
    them, they are dealt again.
    """

    task_id: int
    client_id: str
    splits: Ranges
    """Units that came whole, in dealt order."""
    partial_splits: Parts = ()
    """Units of which these elements came."""


class ElementsConsumed(Event, frozen=True):
    """It became known which elements of a task a client used, where each comes once.

    If it goes, nobody else needs them; what it has and did not use, others do.
    """

    task_id: int
    client_id: str
    splits: Ranges
    partial_splits: Parts = ()


class TasksForgotten(Event, frozen=True):
    """Tasks that are lost left memory; their iteration remembers what was lost with them."""

    iteration_id: int
    task_ids: tuple[int, ...]


class ClientJoined(Event, frozen=True):
    """A client reads an iteration."""

    client_id: str
    iteration_id: int
    consumer_index: int | None = None


class ClientLeft(Event, frozen=True):
    """A client closed its iteration, or was silent for too long."""

    client_id: str
    may_not_rejoin: bool = False
    """Whether the iteration, which was not at its end, remembers it: workers refuse it."""


class DepartedClientReported(Event, frozen=True):
    """A worker said what of a task a client that is gone was sent and had not acknowledged.

    Both are units in dealt order, which are no longer with the task.
    """

    task_id: int
    client_id: str
    returned: Ranges
    """Nobody else was sent anything of these: they are dealt again."""
    lost: Ranges
    partially_returned: Parts = ()
    """Of these units, which stay with the task, some elements are dealt again."""
    partially_consumed: Parts = ()
    """Of these units it used some elements, which are dealt to nobody."""


class SplitsAssigned(Event, frozen=True):
    """A task was dealt units `start_position_id` to `stop` - 1 of its iteration's stream.

    It was grant `assignment_number` of the task, of whose units, in dealt order, all before
    `num_done` were done. A unit of which only a part was to be dealt was dealt alone, and in part.
    """

    task_id: int
    assignment_number: int
    start: int
    stop: int
    num_done: int = 0


class SplitsReturned(Event, frozen=True):
    """Units that were dealt to a task, in dealt order, were not delivered and are dealt again.

    Its worker handed them back, or the task is gone and nothing of them came to anybody.
    """

    task_id: int
    splits: Ranges


class SplitsReassigned(Event, frozen=True):
    """Units that a task holds, in dealt order, are dealt to others too: it is slow with them.

    It keeps them and may give them yet; only the others are to.
    """

    task_id: int
    splits: Ranges


class SplitsAbandoned(Event, frozen=True):
    """Units that were dealt to a task that is gone, in dealt order, are dealt no more.

    Each task that was dealt them was lost.
    """

    task_id: int
    splits: Ranges


AnyEvent: TypeAlias = (
    DispatcherStarted
    | PlanStored
    | PlanForgotten
    | DatasetRegistered
    | DatasetPinned
    | DatasetForgotten
    | SlotsConfigured
    | WorkerRegistered
    | WorkerDraining
    | WorkerLeft
    | WorkerLost
    | JobCreated
    | JobForgotten
    | IterationCreated
    | IterationFinished
    | IterationDiscarded
    | IterationForgotten
    | RoundsOpened
    | TaskCreated
    | TaskFinished
    | TaskFailed
    | TaskLost
    | CopyMarkedStable
    | DeliveryReported
    | RoundsSettled
    | ElementsReceived
    | ElementsConsumed
    | TasksForgotten
    | ClientJoined
    | ClientLeft
    | DepartedClientReported
    | SplitsAssigned
    | SplitsReturned
    | SplitsReassigned
    | SplitsAbandoned
    | SaveStarted
    | SaveDirectoryCreated
    | FilesCommitted
    | SaveFailed
    | SaveClosed
)
