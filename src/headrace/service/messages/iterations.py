"""Iterations: what clients say to the dispatcher."""

from __future__ import annotations

import math

from headrace.service.messages.job_options import JobOptions
from headrace.serving.call import Done, Message, Question

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
    """Where to read one task."""

    task_id: int
    worker_id: str
    worker_address: str
    task_token: str
    """Proves to the worker that the dispatcher sent the client. To be compared, not read."""
    attempt: int = 0
    """How often all copies of the iteration were lost before, or whoever had its shard; 0 where
    units are dealt."""
    shard_index: int | None = None
    """Which share of the dataset it is, where those are fixed."""
    tags: tuple[str, ...] = ()
    """Of the worker."""
    starting_round: int | None = None
    """With which round of the iteration it joins, where it is read in rounds."""


class OpenIterationReply(Message, frozen=True):
    """The reply to `OpenIteration`."""

    iteration_id: int
    tasks: tuple[TaskAddress, ...]
    seed: int
    """The first opener's: the same for all clients and tasks of the iteration."""
    finished: bool
    """The iteration is over: nothing is left to read."""
    job_name: str = ""
    lease: float = math.inf
    """Seconds without a heartbeat after which the client counts as gone, and what it has not
    acknowledged may go to others."""
    finished_by: str = ""
    """Only if finished: who used it up, in words that can stand in a warning."""
    opened_by: str = ""
    """Only if not finished: who opened it before, in words that can stand in a warning; empty: this
    client is the first."""
    has_other_readers: bool = False
    """Whether other clients that are alive read the job now, this iteration or another."""
    failure_reason: str = ""
    """Only if finished: why it failed; empty: it did not."""
    deployment_mode: str = ""
    """Where the workers are that share datasets in fixed parts, for clients that are not told:
    "COLOCATED" in their processes, "REMOTE" elsewhere; empty: wherever they find some."""
    horizon: int = 0
    """`ClientUpdate.horizon`."""
    cost_fn_needed: bool = False
    """Nothing was opened: the plan of the cost function must be put first."""


class OpenIteration(Question[OpenIterationReply], frozen=True):
    """Join the job's iteration for a pass, making job and iteration if need be. An open
    iteration of this client is closed. Where the reply says `cost_fn_needed`, nothing was made: the
    dispatcher has no plan with the digest `options.cost_plan`; put it (`PutPlan`), then repeat this
    request."""

    client_id: str
    dataset_id: str
    job_name: str | None
    """None: a job of this client's own."""
    epoch: tuple[int, ...]
    """Which pass over the data, from the user's iteration inwards."""
    seed: int
    """For unseeded randomness, if this client is the first to open the iteration."""
    options: JobOptions
    consumer_index: int | None = None
    """Which of the consumers this client is, where rounds are read."""
    first_split: int = 0
    """Of an iteration that this client is the first to open: nothing before this unit is read."""
    exclusive_reason: str = ""
    """Not empty: no other client may read this iteration, for what stands here, in the client's
    half, is about the whole stream."""
    delivered: tuple[tuple[int, int], ...] = ()
    """Of an iteration that this client is the first to open: units that came whole before, after
    `first_split`, as ranges that do not overlap."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """The same: other units of which some elements came, with ranges of their ordinals."""
    start_position_id: str = ""
    """Tells the place at which it begins from others; empty: the beginning. All clients of an
    iteration begin it at the same place. Where its seed is not the client's to choose, it is that
    of the place."""
    fixed_seeds: tuple[int, ...] = ()
    """What steps draw from that draw the same in each pass, and were given no seed: for all clients
    of an iteration the same. Empty: what the plan says."""


class LostSplits(Message, frozen=True):
    """What one task was dealt, and no client received: it is lost, or a client that it was sent to
    is gone."""

    worker_address: str
    task_id: int
    splits: tuple[tuple[int, int], ...]
    """Ranges of the iteration's stream, in order."""
    num_splits: int
    """How many units that is."""
    abandoned: bool = False
    """Worker processes ended while they computed them, again and again: they are dealt no more."""
    died_workers: tuple[str, ...] = ()
    """Of those that were given up: the worker of each process that ended, the last ones."""
    client_id: str = ""
    """Not empty: they were sent to this client, which left or died before it used them up."""
    reason: str = ""
    """What was seen of the worker, or why its task failed; can stand after a colon."""
    is_copy: bool = False
    """Nothing is dealt, and it is the rest of the worker's copy that is lost: how much that is,
    nobody knows (`num_splits` is 0)."""


class ClientHeartbeatReply(Message, frozen=True):
    """The reply to `ClientHeartbeat`."""

    tasks: tuple[TaskAddress, ...]
    """Tasks to read: all of the iteration that are neither over nor lost."""
    finished: bool
    """No task is left, none will come, and nothing is left to settle: what was received is all
    there is."""
    redeliverable: tuple[int, ...] = ()
    """Finished tasks whose workers are there, and give what is not acknowledged again: a client
    that was sent some of it asks until it has the end."""
    reports_needed: tuple[int, ...] = ()
    """Lost tasks that this client must settle (`ReportDelivery`), even if it received
    nothing."""
    lost: tuple[LostSplits, ...] = ()
    """Only if finished: what was lost with workers and clients."""
    version: int = 0
    """For `ClientHeartbeat.known_version`."""
    unchanged: bool = False
    """Nothing changed since the version that the client knows: what that update said still holds,
    and the other fields are empty."""
    failure_reason: str = ""
    """Only if finished: not empty where the iteration was given up, with the reason."""
    awaited_clients: tuple[str, ...] = ()
    """Other clients of which nothing was heard for a moment, where nothing but that keeps the
    iteration from its end: what they did not use is dealt again, if they are gone."""
    horizon: int = 0
    """Where it is read in rounds: tasks that join before this round are all known; others join
    later. It is said also where nothing else changed."""
    complete_rounds: tuple[tuple[int, int], ...] = ()
    """Tasks that are gone, each with the number of its rounds that arrived at every consumer."""
    missing_consumer: str = ""
    """Not empty where a consumer has left before the end, without which no round is whole: which
    one, in words that can stand after a colon."""
    abandoned_splits: tuple[tuple[int, int], ...] = ()
    """Where elements come in order: ranges of units of the stream that are dealt no more, since
    worker processes ended on them again and again."""
    heartbeat_interval: float = 1.0
    """Seconds until the next heartbeat, where nothing is urgent. It is said also where nothing else
    changed."""
    urgent_tasks: tuple[int, ...] = ()
    """Tasks that hold `ClientHeartbeat.wanted_split`, or are to be dealt it next: they are asked
    for more, however much is here. It is said also where nothing else changed."""
    journal_problem: str = ""
    """Why the dispatcher cannot write its journal, and so assigns nothing; empty: it can. It is
    said also where nothing else changed."""


class ClientHeartbeat(Question[ClientHeartbeatReply], frozen=True):
    """Say that a client is alive and reading. A NotFoundError says that the iteration was given up,
    or that the dispatcher is another one."""

    client_id: str
    known_version: int = -1
    """The `version` of the last update; -1: none yet."""
    horizon: int = 0
    """Where it is read in rounds: up to which round this consumer would like to go; 0: what it
    knows suffices."""
    elements: int = 0
    """How many it has received so far."""
    wait_seconds: float = 0.0
    """Seconds for which its consumer has waited for elements so far."""
    buffered_batches: int = 0
    """Answers of workers that are here and not used up."""
    wanted_split: int = -1
    """Where elements come in order: the unit of the stream that its consumer has waited for for a
    while; -1: none."""


class ReportDelivery(Question[Done], frozen=True):
    """Say what this client received of a lost task, after which it takes no more of it. Units of
    which nothing came to any of its clients are dealt again; of the others, those that came whole
    to none are lost. A client that leaves a shared job early settles tasks that still run: for
    what it used of them."""

    client_id: str
    task_id: int
    delivered: tuple[tuple[int, int], ...]
    """Ranges of units in dealt order that arrived whole (`GetElementsReply.done_from`)."""
    partially_delivered: tuple[tuple[int, int], ...] = ()
    """Ranges of units in dealt order of which something may have arrived
    (`GetElementsReply.delivered_end`)."""
    rounds: int | None = None
    """Where it is read in rounds: how many of the task's arrived, from the first on;
    `delivered` and `partially_delivered` are the units of those."""
    partial_splits: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Where elements have origins: units in dealt order of which some elements arrived, each with
    ranges of their ordinals. The others are dealt again."""
    consumed: bool = False
    """All that was used: if the client goes, nobody needs it. Of what it settled before and did not
    use, others do."""


class CloseIteration(Question[Done], frozen=True):
    """Stop reading."""

    client_id: str


class ReportUnreachable(Question[Done], frozen=True):
    """Say that the worker of a task does not answer."""

    client_id: str
    task_id: int
    connection_refused: bool
    """The connection was refused or reset: nothing listens there any more. A worker that is only
    silent is waited for."""
