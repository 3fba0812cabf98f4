"""Messages from clients to the dispatcher about iterations."""

from __future__ import annotations

import math

from headrace.service.messages.job_options import JobOptions
from headrace.serving.rpc import Done, Message, TypedRequest

__all__ = [
    "ClientHeartbeat",
    "ClientHeartbeatReply",
    "CloseIteration",
    "LostSplits",
    "OpenIteration",
    "OpenIterationReply",
    "ReportDelivery",
    "ReportUnreachable",
    "TaskAddress",
]


class TaskAddress(Message, frozen=True):
    """Address of one task."""

    task_id: int
    worker_id: str
    worker_address: str
    task_token: str
    """Proves to the worker that the dispatcher sent the client. An opaque value."""
    attempt: int = 0
    """How often all copies of the iteration, or the owners of this shard, were lost before; 0 if
    the iteration assigns splits."""
    shard_index: int | None = None
    """Index of the dataset shard, with static sharding."""
    tags: tuple[str, ...] = ()
    """Tags of the worker."""
    starting_round: int | None = None
    """Reading round at which the task joins the iteration, with coordinated reads."""


class OpenIterationReply(Message, frozen=True):
    """Reply to `OpenIteration`."""

    iteration_id: int
    tasks: tuple[TaskAddress, ...]
    seed: int
    """Seed of the first client: the same for all clients and tasks of the iteration."""
    finished: bool
    """True if the iteration is finished: nothing is left to read."""
    job_name: str = ""
    lease: float = math.inf
    """Seconds without a heartbeat after which the client expires, and its unacknowledged elements
    may be assigned again."""
    finished_by: str = ""
    """Description, for warnings, of the client that read it to the end; only if finished."""
    opened_by: str = ""
    """Description, for warnings, of the client that opened it before; only if not finished. Empty
    if this client is the first."""
    has_other_readers: bool = False
    """Whether other active clients read the job now, in this iteration or another."""
    failure_reason: str = ""
    """Why the iteration failed; only if finished. Empty if it did not fail."""
    deployment_mode: str = ""
    """Location of the workers among which datasets are divided statically, for clients whose
    options do not say it: "COLOCATED" in the clients' processes, "REMOTE" elsewhere; empty:
    wherever workers are found."""
    horizon: int = 0
    """See `ClientHeartbeatReply.horizon`."""
    cost_fn_needed: bool = False
    """True if nothing was opened: the plan of the cost function must be stored first."""


class OpenIteration(TypedRequest[OpenIterationReply], frozen=True):
    """Join the job's iteration for an epoch; create the job and iteration if necessary.

    An open iteration of this client is closed. If the reply has `cost_fn_needed`, nothing was
    created: the dispatcher has no plan with the digest `options.cost_fn_digest`; send it
    (`PutPlan`), then repeat this request.
    """

    client_id: str
    dataset_id: str
    job_name: str | None
    """Name of the job; None for a job of this client alone."""
    epoch: tuple[int, ...]
    """Epoch numbers, from the user's loop inwards."""
    seed: int
    """Seed for unseeded randomness, used if this client is the first to open the iteration."""
    options: JobOptions
    consumer_index: int | None = None
    """Index of this client among the consumers, with coordinated reads."""
    first_split: int = 0
    """First split to read, used if this client is the first to open the iteration."""
    exclusive_reason: str = ""
    """The step of the client stage that needs the whole stream, so that no other client may read
    the iteration; empty allows others."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Splits after `first_split` that were delivered before, as disjoint ranges; used if this
    client is the first to open the iteration."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Other splits that were delivered in part, with ranges of the delivered ordinals; used
    likewise."""
    start_position_id: str = ""
    """Identifies the start position; empty for the beginning. All clients of an iteration start it
    at the same position. If the client does not choose the seed, the start position determines it.
    """
    fixed_seeds: tuple[int, ...] = ()
    """Seeds for unseeded steps that draw the same values in each epoch, the same for all clients of
    an iteration. Empty uses those of the plan."""


class LostSplits(Message, frozen=True):
    """Splits of one task that no client received, because the task or the client that they were
    sent to was lost."""

    worker_address: str
    task_id: int
    splits: tuple[tuple[int, int], ...]
    """Ranges of the iteration's stream, in order."""
    num_splits: int
    """Number of splits in `splits`."""
    abandoned: bool = False
    """True if worker processes ended repeatedly while they computed the splits, which are not
    assigned again."""
    died_workers: tuple[str, ...] = ()
    """For abandoned splits: the workers of the last processes that ended."""
    client_id: str = ""
    """Client that the splits were sent to and that left or died before it consumed them; empty if
    they were lost with the task."""
    reason: str = ""
    """Cause of the loss, such as the error of the task: text to follow a colon."""
    is_copy: bool = False
    """True if the iteration assigns no splits and the rest of the worker's copy is lost, an unknown
    amount (`num_splits` is 0)."""


class ClientHeartbeatReply(Message, frozen=True):
    """Reply to `ClientHeartbeat`."""

    tasks: tuple[TaskAddress, ...]
    """Tasks to read: all of the iteration that are neither finished nor lost. If `changed_since` is
    set, only those that started since that version."""
    finished: bool
    """True if no task is left, none will be created, and all losses are reported: the received
    elements are complete."""
    redeliverable: tuple[int, ...] = ()
    """Finished tasks whose workers are available and redeliver unacknowledged elements: a client
    that was sent some requests them until it receives the end of the task."""
    reports_needed: tuple[int, ...] = ()
    """Lost tasks that this client must report on (`ReportDelivery`), even if it received nothing.
    """
    lost: tuple[LostSplits, ...] = ()
    """What was lost with workers and clients; only if finished."""
    version: int = 0
    """Value for `ClientHeartbeat.known_version`."""
    unchanged: bool = False
    """True if nothing changed since the version that the client knows: that update still holds, and
    the other fields are empty."""
    failure_reason: str = ""
    """Why the iteration was abandoned; only if finished. Empty if it was not."""
    awaited_clients: tuple[str, ...] = ()
    """Other clients that have been silent for a moment, if only they keep the iteration from
    finishing: if they have expired, the elements that they did not consume are assigned again."""
    horizon: int = 0
    """With coordinated reads: all tasks that join before this round are known; others join later.
    Set also if nothing else changed."""
    complete_rounds: tuple[tuple[int, int], ...] = ()
    """Unavailable tasks, each with the number of its rounds that all consumers received."""
    missing_consumer: str = ""
    """Description of a consumer that left before the end, without which no round is complete: text
    to follow a colon. Empty if none did."""
    abandoned_splits: tuple[tuple[int, int], ...] = ()
    """With ordered reading: ranges of splits that are not assigned again because worker processes
    ended on them repeatedly."""
    heartbeat_interval: float = 1.0
    """Seconds until the next heartbeat if nothing is urgent. Set also if nothing else changed."""
    urgent_tasks: tuple[int, ...] = ()
    """Tasks that hold `ClientHeartbeat.wanted_split`, or will be assigned it next: the client
    requests more from them even if its buffer is full. Set also if nothing else changed."""
    journal_problem: str = ""
    """Why the dispatcher cannot write its journal, and so assigns nothing; empty if it can. Set
    also if nothing else changed."""
    changed_since: int = -1
    """Version from which `tasks` and `ended_tasks` list the changes; -1 if `tasks` is complete."""
    ended_tasks: tuple[int, ...] = ()
    """Tasks of that version that no longer run."""


class ClientHeartbeat(TypedRequest[ClientHeartbeatReply], frozen=True):
    """Report that a client is alive and reading.

    A NotFoundError means that the iteration was discarded, or that another dispatcher replied.
    """

    client_id: str
    known_version: int = -1
    """`version` of the last update; -1 if none was received."""
    horizon: int = 0
    """With coordinated reads: exclusive bound of the rounds that this consumer wants to read; 0 if
    its known horizon suffices."""
    elements: int = 0
    """Number of elements received so far."""
    wait_seconds: float = 0.0
    """Seconds that the consumer has waited for elements so far."""
    buffered_batches: int = 0
    """Number of result batches that are buffered and not consumed."""
    wanted_split: int = -1
    """With ordered reading: the split that the consumer has been waiting for; -1 if none."""
    accepts_changes: bool = False
    """Whether the reply may list only changes of tasks (`ClientHeartbeatReply.changed_since`)."""


class ReportDelivery(TypedRequest[Done], frozen=True):
    """Report what this client received of a lost task, after which it takes nothing more from it.

    Splits that no client received any element of are assigned again; of the others, those that no
    client received completely are lost. A client that leaves a shared job early also reports on
    running tasks: the elements that it consumed.
    """

    client_id: str
    task_id: int
    delivered: tuple[tuple[int, int], ...]
    """Ranges of splits received completely, in assignment order (`GetElementsReply.done_from`)."""
    partially_delivered: tuple[tuple[int, int], ...] = ()
    """Ranges of splits that may have been received in part, in assignment order
    (`GetElementsReply.delivered_end`)."""
    rounds: int | None = None
    """With coordinated reads: number of the task's rounds received, from the first; `delivered` and
    `partially_delivered` are the splits of those rounds."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """If elements have ids: splits, in assignment order, that were received in part, each with
    ranges of the received ordinals. The other elements are assigned again."""
    consumed: bool = False
    """True if everything reported was consumed, so that it is not assigned again if the client
    departs; what it only reported as received is assigned again."""


class CloseIteration(TypedRequest[Done], frozen=True):
    """Stop reading."""

    client_id: str


class ReportUnreachable(TypedRequest[Done], frozen=True):
    """Report that the worker of a task does not reply."""

    client_id: str
    task_id: int
    connection_refused: bool
    """True if the connection was refused or reset: no process listens at the address any longer. If
    False, the worker is only silent and keeps its lease."""
