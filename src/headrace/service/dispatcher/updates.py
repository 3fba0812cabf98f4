"""Facts that all reading modes share (`fact.Fact`), and the union of all."""

from __future__ import annotations

from typing import TypeAlias

from headrace.service.dispatcher.fact import Fact
from headrace.service.dispatcher.state import IterationMode, TaskMode
from headrace.service.messages import Terms
from headrace.service.modes.coordinated_reads.records import RoundsOpened, RoundsSettled
from headrace.service.modes.distributed_save.records import (
    FilesSaved,
    SaveBegun,
    SaveClosed,
    SaveFailed,
    SaveOpened,
)
from headrace.service.ranges import Ranges
from headrace.service.rows import Parts
from headrace.versions import Versions

__all__ = [
    "ClientDropped",
    "ClientJoined",
    "ClientLeft",
    "CopyLasted",
    "DatasetForgotten",
    "DatasetKept",
    "DatasetRegistered",
    "DispatcherStarted",
    "ElementsReceived",
    "ElementsUsed",
    "IterationCollected",
    "IterationCreated",
    "IterationFinished",
    "IterationForgotten",
    "JobCreated",
    "JobForgotten",
    "PlanForgotten",
    "PlanStored",
    "SlotsConfigured",
    "TaskCreated",
    "TaskFailed",
    "TaskFinished",
    "TaskLost",
    "TaskSettled",
    "TasksForgotten",
    "UnitsDealt",
    "UnitsGivenUp",
    "UnitsReturned",
    "UnitsTakenOver",
    "Update",
    "WorkerLeaving",
    "WorkerLeft",
    "WorkerLost",
    "WorkerRegistered",
]


class DispatcherStarted(Fact, frozen=True):
    """A dispatcher began with nothing: numbers that another one gave out mean nothing to it."""

    incarnation: str
    """Its name, which everybody may know."""
    secret: bytes
    """The key of its tickets, which nobody else knows."""


class PlanStored(Fact, frozen=True):
    """All bytes of a plan are kept under their SHA-256 digest."""

    digest: bytes
    size: int


class DatasetRegistered(Fact, frozen=True):
    """A dataset became known; its plan was stored before."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    positions: int | None
    compression: str | None
    anonymous: bool = False
    """Nobody was given its id to keep: it may be forgotten when nobody uses it."""
    origins: bool = False
    """Its elements have origins (`rows`)."""
    steps: tuple[tuple[str, str], ...] = ()
    """Names of its steps, each with a fingerprint."""
    python: str = ""
    """The minor version of Python that pickled the plan; empty: not known."""


class DatasetKept(Fact, frozen=True):
    """Somebody was given the id of an anonymous dataset: it is forgotten no more."""

    dataset_id: str


class DatasetForgotten(Fact, frozen=True):
    """An anonymous dataset that nobody used for long left memory; so did a plan of its own."""

    dataset_id: str


class PlanForgotten(Fact, frozen=True):
    """A plan that no dataset has left memory."""

    digest: bytes


class SlotsConfigured(Fact, frozen=True):
    """The list of workers that static policies share datasets among is another one.

    Workers that are there take the slots that fit, in the order in which they registered.
    """

    patterns: tuple[str, ...]


class WorkerRegistered(Fact, frozen=True):
    """A worker joined, or changed its tags."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    slot: int | None = None
    """Which slot it took; None where there are none."""
    versions: Versions = Versions()


class WorkerLeaving(Fact, frozen=True):
    """A worker takes no more work and will leave."""

    worker_id: str


class WorkerLeft(Fact, frozen=True):
    """A worker left on its own; what it still ran ended there."""

    worker_id: str


class WorkerLost(Fact, frozen=True):
    """A worker is taken for gone, and its running tasks with it."""

    worker_id: str
    reason: str = ""
    """What was seen of it: a silence is not yet a death."""
    silent: bool = False
    """Its process was not seen to end: what it was computing is not suspected to have killed it."""


class JobCreated(Fact, frozen=True):
    """A job began: a named one, a client's own, or a save's."""

    job_id: int
    name: str | None
    owner: str | None
    """The client whose own it is."""
    dataset_id: str
    terms: Terms
    save: str = ""
    """Not empty: it writes the save of this id, and has neither name nor owner."""


class JobForgotten(Fact, frozen=True):
    """A job that nobody can join any more left memory; it had no iteration left."""

    job_id: int


class IterationCreated(Fact, frozen=True):
    """One more pass of a job began."""

    iteration_id: int
    job_id: int
    pass_number: tuple[int, ...]
    seed: int
    positions: int | None
    """Units that are dealt in it, or INFINITE (-1); None: nothing is dealt."""
    exactly_once: bool = False
    """Its elements have origins (`rows`), and each comes once."""
    first_unit: int = 0
    """Nothing before this unit is dealt."""
    delivered: Ranges = ()
    """Units after that which are dealt no more, and of others the ordinals: they came before."""
    parts: Parts = ()
    start: str = ""
    mode: IterationMode | None = None
    """What the mode of its job adds, at the beginning."""
    fixed_seeds: tuple[int, ...] = ()
    """What steps draw from that draw the same in each pass; empty: what the plan says."""


class IterationFinished(Fact, frozen=True):
    """All tasks are over and nothing is left that somebody could still be dealt."""

    iteration_id: int
    failed: str = ""
    """Not empty: it was given up, for this reason."""


class IterationCollected(Fact, frozen=True):
    """An iteration without clients was given up; opening it again starts it from the beginning."""

    iteration_id: int


class IterationForgotten(Fact, frozen=True):
    """A finished iteration left memory; its job remembers that it finished, and by whom."""

    iteration_id: int


class TaskCreated(Fact, frozen=True):
    """A worker was given an iteration."""

    task_id: int
    iteration_id: int
    worker_id: str
    mode: TaskMode | None = None
    """What the mode of its job adds, at the beginning."""
    attempt: int = 0
    """How often all tasks that the iteration had were lost before, where nothing is dealt."""
    replaces: bool = False
    """It makes a copy, and more copies were lost than had been replaced."""


class TaskFinished(Fact, frozen=True):
    """A task handed out its last element."""

    task_id: int
    cut: bool = False
    """It made a copy, and ended before the copy did: its worker leaves."""
    done: int = 0
    """Units before this one, in dealt order, were done."""


class TaskFailed(Fact, frozen=True):
    """A task ended by an error of the worker's own."""

    task_id: int
    reason: str


class CopyLasted(Fact, frozen=True):
    """A task in which nothing is dealt has run for so long that its dataset kills no worker."""

    task_id: int


class TaskLost(Fact, frozen=True):
    """A task was given up, though its worker is there."""

    task_id: int
    reason: str


class TaskSettled(Fact, frozen=True):
    """It became known what a client had received of a task: ranges of units in dealt order.

    It said so itself, or nobody waits for it any more. Without a name it is what all clients had:
    the worker said so when one of them was gone.
    """

    task_id: int
    client_id: str
    received: Ranges
    """Units that came whole."""
    touched: Ranges = ()
    """Units of which something may have come."""


class ElementsReceived(Fact, frozen=True):
    """It became known which elements of a task a client has, where each comes once.

    They are the task's to give, and known to be nobody else's. If the client goes and did not use
    them, they are dealt again.
    """

    task_id: int
    client_id: str
    units: Ranges
    """Units that came whole, in dealt order."""
    parts: Parts = ()
    """Units of which these elements came."""


class ElementsUsed(Fact, frozen=True):
    """It became known which elements of a task a client used, where each comes once.

    If it goes, nobody else needs them; what it has and did not use, others do.
    """

    task_id: int
    client_id: str
    units: Ranges
    parts: Parts = ()


class TasksForgotten(Fact, frozen=True):
    """Tasks that are lost left memory; their iteration remembers what was lost with them."""

    iteration_id: int
    task_ids: tuple[int, ...]


class ClientJoined(Fact, frozen=True):
    """A client reads an iteration."""

    client_id: str
    iteration_id: int
    consumer_index: int | None = None


class ClientLeft(Fact, frozen=True):
    """A client closed its iteration, or was silent for too long."""

    client_id: str
    is_final: bool = False
    """Whether the iteration, which was not at its end, remembers it: workers refuse it."""


class ClientDropped(Fact, frozen=True):
    """A worker said what of a task a client that is gone was sent and had not acknowledged.

    Both are units in dealt order, which are no longer with the task.
    """

    task_id: int
    client_id: str
    returned: Ranges
    """Nobody else was sent anything of these: they are dealt again."""
    lost: Ranges
    parts: Parts = ()
    """Of these units, which stay with the task, some elements are dealt again."""
    used: Parts = ()
    """Of these units it used some elements, which are dealt to nobody."""


class UnitsDealt(Fact, frozen=True):
    """A task was dealt units `start` to `stop` - 1 of its iteration's stream.

    It was grant `number` of the task, of whose units, in dealt order, all before `done` were done.
    A unit of which only a part was to be dealt was dealt alone, and in part.
    """

    task_id: int
    number: int
    start: int
    stop: int
    done: int = 0


class UnitsReturned(Fact, frozen=True):
    """Units that were dealt to a task, in dealt order, were not delivered and are dealt again.

    Its worker handed them back, or the task is gone and nothing of them came to anybody.
    """

    task_id: int
    units: Ranges


class UnitsTakenOver(Fact, frozen=True):
    """Units that a task holds, in dealt order, are dealt to others too: it is slow with them.

    It keeps them and may give them yet; only the others are to.
    """

    task_id: int
    units: Ranges


class UnitsGivenUp(Fact, frozen=True):
    """Units that were dealt to a task that is gone, in dealt order, are dealt no more.

    Each task that was dealt them was lost.
    """

    task_id: int
    units: Ranges


Update: TypeAlias = (
    DispatcherStarted
    | PlanStored
    | PlanForgotten
    | DatasetRegistered
    | DatasetKept
    | DatasetForgotten
    | SlotsConfigured
    | WorkerRegistered
    | WorkerLeaving
    | WorkerLeft
    | WorkerLost
    | JobCreated
    | JobForgotten
    | IterationCreated
    | IterationFinished
    | IterationCollected
    | IterationForgotten
    | RoundsOpened
    | TaskCreated
    | TaskFinished
    | TaskFailed
    | TaskLost
    | CopyLasted
    | TaskSettled
    | RoundsSettled
    | ElementsReceived
    | ElementsUsed
    | TasksForgotten
    | ClientJoined
    | ClientLeft
    | ClientDropped
    | UnitsDealt
    | UnitsReturned
    | UnitsTakenOver
    | UnitsGivenUp
    | SaveBegun
    | SaveOpened
    | FilesSaved
    | SaveFailed
    | SaveClosed
)
