"""Events that all reading modes share (`event.Event`), and the union of all events."""

from __future__ import annotations

from typing import TypeAlias

from headrace.service.dispatcher.event import Event
from headrace.service.dispatcher.state import AnyIterationModeState, AnyTaskModeState
from headrace.service.element_sets import PartialSplits
from headrace.service.messages import JobOptions, PlanStep
from headrace.service.modes.coordinated_reads.events import HorizonAdvanced, RoundsReported
from headrace.service.modes.distributed_save.records import (
    FilesCommitted,
    SaveClosed,
    SaveDirectoryCreated,
    SaveFailed,
    SaveStarted,
)
from headrace.service.ranges import Ranges
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
    """A dispatcher started with an empty state; ids from other dispatchers are invalid for it."""

    dispatcher_id: str
    """Public name of the dispatcher."""
    secret: bytes
    """Secret key that signs task tokens."""


class PlanStored(Event, frozen=True):
    """A plan was stored completely under its SHA-256 digest."""

    digest: bytes
    size: int


class DatasetRegistered(Event, frozen=True):
    """A dataset was registered; its plan was stored before."""

    dataset_id: str
    token: str
    digest: bytes
    fingerprint: str
    element_spec: bytes
    cardinality: int
    num_splits: int | None
    compression: str | None
    anonymous: bool = False
    """No caller was given the id to keep: the dataset may be forgotten when it is unused."""
    has_element_ids: bool = False
    """Its elements have ids (`element_sets`)."""
    steps: tuple[tuple[str, str], ...] = ()
    """Names of its steps, each with a fingerprint."""
    python_version: str = ""
    """Minor version of the Python that pickled the plan; empty if unknown."""
    plan_steps: tuple[PlanStep, ...] = ()
    """Steps of the plan as it is executed; empty if unknown."""


class DatasetPinned(Event, frozen=True):
    """The id of an anonymous dataset was given to a caller; the dataset is kept from now on."""

    dataset_id: str


class DatasetForgotten(Event, frozen=True):
    """A long unused anonymous dataset was removed, with its plan if no other dataset has it."""

    dataset_id: str


class PlanForgotten(Event, frozen=True):
    """A plan that no dataset refers to was removed."""

    digest: bytes


class SlotsConfigured(Event, frozen=True):
    """The list of workers among which static policies divide datasets was replaced.

    Registered workers take the slots that fit, in the order of registration.
    """

    patterns: tuple[str, ...]


class WorkerRegistered(Event, frozen=True):
    """A worker registered, or changed its tags."""

    worker_id: str
    address: str
    tags: tuple[str, ...]
    slot: int | None = None
    """Index of the slot that it took; None if there are no slots."""
    versions: Versions = Versions()


class WorkerDraining(Event, frozen=True):
    """A worker gets no new work and will leave."""

    worker_id: str


class WorkerLeft(Event, frozen=True):
    """A worker unregistered; its running tasks ended."""

    worker_id: str


class WorkerLost(Event, frozen=True):
    """A worker was declared lost, with its running tasks."""

    worker_id: str
    reason: str = ""
    """What was observed: silence does not prove that the process ended."""
    timed_out: bool = False
    """The process was not seen to end, so its splits are not suspected of killing it."""


class JobCreated(Event, frozen=True):
    """A job was created: a named job, a client's own, or that of a save."""

    job_id: int
    name: str | None
    owner: str | None
    """Client that owns the job."""
    dataset_id: str
    options: JobOptions
    save_id: str = ""
    """Id of the save that the job writes; if set, the job has neither name nor owner."""


class JobForgotten(Event, frozen=True):
    """A job that no client can join any longer was removed; it had no iteration left."""

    job_id: int


class IterationCreated(Event, frozen=True):
    """An epoch of a job started."""

    iteration_id: int
    job_id: int
    epoch: tuple[int, ...]
    seed: int
    num_splits: int | None
    """Number of splits to assign, or INFINITE (-1); None if the iteration assigns none."""
    exactly_once: bool = False
    """Its elements have ids (`element_sets`), and each is delivered once."""
    first_split: int = 0
    """First split to assign."""
    delivered: Ranges = ()
    """Splits after `first_split` that were delivered before, and ordinals of others that were; they
    are not assigned."""
    partial_splits: PartialSplits = ()
    start_position_id: str = ""
    mode_state: AnyIterationModeState | None = None
    """Initial state that the reading mode of its job adds."""
    fixed_seeds: tuple[int, ...] = ()
    """Seeds for steps that draw the same values in each epoch; empty uses those of the plan."""


class IterationFinished(Event, frozen=True):
    """All tasks ended and nothing is left to assign."""

    iteration_id: int
    failure_reason: str = ""
    """Why the iteration was abandoned; empty if it was not."""


class IterationDiscarded(Event, frozen=True):
    """An iteration without clients was discarded; opening it again starts it from the beginning."""

    iteration_id: int


class IterationForgotten(Event, frozen=True):
    """A finished iteration was removed; its job remembers that it finished, and its readers."""

    iteration_id: int


class TaskCreated(Event, frozen=True):
    """A task was created on a worker."""

    task_id: int
    iteration_id: int
    worker_id: str
    mode_state: AnyTaskModeState | None = None
    """Initial state that the reading mode of its job adds."""
    attempt: int = 0
    """How often all tasks of the iteration were lost before, if it assigns no splits."""
    is_replacement: bool = False
    """The task reads a copy, and more copies were lost than had been replaced."""


class TaskFinished(Event, frozen=True):
    """A task delivered its last element."""

    task_id: int
    cut_short: bool = False
    """The task reads a copy and ended before it because its worker is draining."""
    num_done: int = 0
    """All splits before this one, in assignment order, were done."""


class TaskFailed(Event, frozen=True):
    """A task ended with an error of the worker itself."""

    task_id: int
    reason: str


class CopyMarkedStable(Event, frozen=True):
    """A task without splits has run for so long that its dataset is assumed not to kill workers."""

    task_id: int


class TaskLost(Event, frozen=True):
    """A task was declared lost while its worker is registered."""

    task_id: int
    reason: str


class DeliveryReported(Event, frozen=True):
    """The splits that a client received from a task, as ranges in assignment order, became known.

    The client reported them, or the dispatcher stopped waiting for its report. Without a client id
    the event covers all clients: the worker reported it when one of them had departed.
    """

    task_id: int
    client_id: str
    delivered: Ranges
    """Splits received completely."""
    partially_delivered: Ranges = ()
    """Splits that may have been received in part."""


class ElementsReceived(Event, frozen=True):
    """The elements that a client has received from a task became known (exactly-once delivery).

    The task was responsible for them, and no other client has them. If the client departs before it
    consumed them, they are assigned again.
    """

    task_id: int
    client_id: str
    splits: Ranges
    """Splits received completely, in assignment order."""
    partial_splits: PartialSplits = ()
    """Elements received of other splits."""


class ElementsConsumed(Event, frozen=True):
    """The elements of a task that a client consumed became known (exactly-once delivery).

    If the client departs, these elements are not assigned again; those that it received and did not
    consume are.
    """

    task_id: int
    client_id: str
    splits: Ranges
    partial_splits: PartialSplits = ()


class TasksForgotten(Event, frozen=True):
    """Lost tasks were removed; their iteration remembers the splits lost with them."""

    iteration_id: int
    task_ids: tuple[int, ...]


class ClientJoined(Event, frozen=True):
    """A client joined an iteration."""

    client_id: str
    iteration_id: int
    consumer_index: int | None = None


class ClientLeft(Event, frozen=True):
    """A client closed its iteration, or timed out."""

    client_id: str
    may_not_rejoin: bool = False
    """True if the unfinished iteration remembers the client, so that workers reject its requests.
    """


class DepartedClientReported(Event, frozen=True):
    """A worker reported which elements of a task a departed client had not acknowledged.

    `returned` and `lost` are splits in assignment order, which the task no longer holds.
    """

    task_id: int
    client_id: str
    returned: Ranges
    """Splits that no other client was sent elements of; they are assigned again."""
    lost: Ranges
    partially_returned: PartialSplits = ()
    """Elements to assign again, of splits that stay with the task."""
    partially_consumed: PartialSplits = ()
    """Elements that the client consumed, of splits that stay with the task; they are not assigned
    again."""


class SplitsAssigned(Event, frozen=True):
    """Splits `start` to `stop` - 1 of its iteration's stream were assigned to a task.

    This was assignment `assignment_number` of the task; all splits before `num_done`, in assignment
    order, were done. A split that is assigned in part is assigned alone.
    """

    task_id: int
    assignment_number: int
    start: int
    stop: int
    num_done: int = 0


class SplitsReturned(Event, frozen=True):
    """Splits of a task, in assignment order, were returned undelivered and are assigned again.

    The worker returned them, or the task is unavailable and no client received any element of them.
    """

    task_id: int
    splits: Ranges


class SplitsReassigned(Event, frozen=True):
    """Splits that a slow task holds, in assignment order, are assigned to other tasks as well.

    The task keeps them and may still deliver them, but only the other tasks are responsible for
    them.
    """

    task_id: int
    splits: Ranges


class SplitsAbandoned(Event, frozen=True):
    """Splits of an unavailable task, in assignment order, are not assigned again.

    Each task that held them was lost.
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
    | HorizonAdvanced
    | TaskCreated
    | TaskFinished
    | TaskFailed
    | TaskLost
    | CopyMarkedStable
    | DeliveryReported
    | RoundsReported
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
