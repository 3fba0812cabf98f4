"""Messages from workers to the dispatcher about tasks."""

from __future__ import annotations

from headrace.service.messages.saves import SaveDestination
from headrace.serving.rpc import Done, Message, TypedRequest

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
    """Reply to `GetTask`."""

    task_id: int
    iteration_id: int
    dataset_id: str
    digest: bytes
    """Digest of the plan, for `GetPlan`."""
    epoch: tuple[int, ...]
    seed: int
    """Seed for unseeded random steps of this task. With dynamic or static sharding it is the same
    for all tasks of the iteration."""
    task_token: str
    """Token that a client sent by the dispatcher presents to the worker, and the worker to the
    dispatcher."""
    assigns_splits: bool
    """True if the task reads splits, which its worker requests (`GetSplit`); otherwise it reads the
    whole plan or a fixed shard."""
    shard_index: int | None = None
    """Index of the shard of the plan that the task reads, with static sharding; otherwise None."""
    num_shards: int | None = None
    shard_kind: str = ""
    """How shard `shard_index` of `num_shards` is taken from the plan: a name that the worker knows.
    Empty reads the plan unchanged."""
    starting_round: int | None = None
    """First round of the task, with coordinated reads; otherwise None."""
    delivery_policy: str = "fifo"
    """Delivery policy, which decides the client that receives an element: a name that the worker
    knows."""
    has_element_ids: bool = False
    """True if its result batches contain the ids of their elements."""
    num_consumers: int | None = None
    """Number of consumers of a round (`JobOptions.num_consumers`)."""
    save_destination: SaveDestination | None = None
    """Directory to write to: the elements go into files, not to clients. None delivers to clients.
    """
    remainder: str = "drop"
    cost_fn_digest: bytes = b""
    """Digest of the cost function, for `GetPlan`."""
    partition_mode: str = ""
    """How the plan is partitioned into worker stage and client stage."""
    fixed_seeds: tuple[int, ...] = ()
    """Seeds for unseeded steps that draw the same values in each epoch; empty uses those of the
    plan."""


class GetTask(TypedRequest[TaskDefinition], frozen=True):
    """Request the definition of a task that a client asked for."""

    worker_id: str
    task_id: int


class GetSplitReply(Message, frozen=True):
    """Reply to `GetSplit`: splits `start` to `stop` - 1."""

    start: int
    stop: int
    """End of the range. If `start == stop` and not `wait`, nothing is left for this task."""
    wait: bool = False
    """True if nothing can be assigned now: the task has its part, or splits of other tasks may yet
    be returned. The worker requests again soon."""
    is_poison_candidate: bool = False
    """True if workers died with these splits before: the worker must deliver their elements at
    once. Until then it gets no other splits."""
    ordinals: tuple[tuple[int, int], ...] = ()
    """If not empty, the assignment is one split, and only these ordinals of its elements are needed
    (`service.element_sets`)."""
    flush: bool = False
    """With `wait`: nothing can be assigned until what the task holds is delivered. Its steps must
    flush all that they buffer, as at the end, and new ones start with the next assignment."""
    is_last: bool = False
    """True if nothing is left after these splits, and no other task holds any that may be returned:
    the task need not request again."""


class GetSplit(TypedRequest[GetSplitReply], frozen=True):
    """Request the next splits of a task."""

    worker_id: str
    task_id: int
    task_token: str
    assignment_number: int
    """Number of assignments that the task has received so far; a repeated number gets the same
    splits again. A reply without splits does not count."""
    max_splits: int
    """Maximum number of splits to assign."""
    num_done: int
    """All splits before this one, in assignment order, are delivered and acknowledged. The
    dispatcher forgets where they are in the stream."""


class FinishTask(TypedRequest[Done], frozen=True):
    """Report that a task delivered its last element."""

    worker_id: str
    task_id: int
    task_token: str
    cut_short: bool = False
    """True if the worker was draining while the task read a copy: the rest of the copy is missing.
    """
    num_done: int = 0
    """As in `GetSplit`."""
    num_assigned: int | None = None
    """Number of splits received: those assigned after them were in a reply that came too late, and
    are assigned again. None if unknown."""


class FailTask(TypedRequest[Done], frozen=True):
    """Report that a task ended with an error of the worker: undelivered elements are lost."""

    worker_id: str
    task_id: int
    task_token: str
    reason: str


class ReturnSplits(TypedRequest[Done], frozen=True):
    """Report splits of a task that will never be delivered: they are assigned again."""

    worker_id: str
    task_id: int
    task_token: str
    splits: tuple[tuple[int, int], ...]
    """Ranges in assignment order."""


class ReportDepartedClient(TypedRequest[Done], frozen=True):
    """Report the elements of a task that a departed client was sent and had not acknowledged.

    The client receives nothing more of the task.
    """

    worker_id: str
    task_id: int
    task_token: str
    client_id: str
    unacknowledged: tuple[tuple[int, int], ...]
    """Ranges in assignment order whose elements all went to that client alone: they are assigned
    again, except those that it reported as consumed."""
    possibly_lost: tuple[tuple[int, int], ...]
    """Ranges of other splits that may have been sent to it in part."""
    partially_unacknowledged: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """If elements have ids: splits, in assignment order, with ranges of the ordinals that it did
    not acknowledge. These elements are assigned again."""
    partially_acknowledged: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """Likewise the elements that it acknowledged, of splits that are not done."""
    delivered: tuple[tuple[int, int], ...] = ()
    """If elements have no ids: ranges acknowledged completely, by this client or others. If the
    worker is lost, no other process knows what a departed client received."""
    partially_delivered: tuple[tuple[int, int], ...] = ()
    """Likewise, splits that were acknowledged in part."""
