"""Selection of the tasks that a client reads.

    ANY     all
    LOCAL   those of workers in this process; an error if there are none
    AUTO    all except those of workers in other processes with the tag COLOCATED, which are
            reserved for their processes. With static sharding, `deployment_mode` of the dispatcher
            decides: only local ones (COLOCATED: there must be some; unset: if there are any), or
            all (REMOTE).

Rule. If a client skips tasks, an iteration may continue for other clients: it ends for this client
when the tasks that it read have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.service.messages import ClientHeartbeatReply, OpenIterationReply, TaskAddress
from headrace.transport import inprocess

__all__ = ["COLOCATED", "TaskSelector"]

COLOCATED = "COLOCATED"
"""Tag of a worker that is reserved for the training process on its machine; case-insensitive."""

M = TypeVar("M", OpenIterationReply, ClientHeartbeatReply)


class TaskSelector:
    """Selects the tasks that one client reads.

    Args:
        target_workers: "AUTO", "ANY" or "LOCAL".
        static_policy: Name of the static sharding policy if the client does not choose the workers
            (`OpenIterationReply.deployment_mode`); otherwise empty.
        uses_tags: Whether AUTO uses tags; False if all clients read the same rounds.
        is_copy: Whether each worker reads a copy, whose rest no other worker continues after a
            loss.
    """

    def __init__(
        self,
        target_workers: str = "ANY",
        *,
        static_policy: str = "",
        uses_tags: bool = True,
        is_copy: bool = True,
    ) -> None:
        self.is_local: bool = target_workers == "LOCAL"
        """Whether only workers of this process are read."""
        self.is_copy = is_copy
        self._static_policy = static_policy
        self._uses_tags = target_workers == "AUTO" and uses_tags
        #: Whether any task was selected so far.
        self._has_read = False
        self.skipped_workers: tuple[str, ...] = ()
        """Addresses of tagged workers that were skipped in the last update."""

    def select_initial(self, reply: OpenIterationReply) -> OpenIterationReply:
        """Return the reply to `OpenIteration` with the selected tasks.

        Raises:
            FailedPreconditionError: If only local workers may be read and there are none.
            InvalidArgumentError: If the dispatcher's deployment mode requires a local worker and
                there is none.
        """
        local = [each for each in reply.tasks if _is_local(each)]
        policy, deployment = self._static_policy, reply.deployment_mode
        if policy and deployment == COLOCATED and not reply.finished and not local:
            raise InvalidArgumentError(
                f"Static sharding policy <{policy}> requires local workers, but no local "
                "worker is found. You need to run a local `WorkerServer` in each process that "
                'reads, as the dispatcher has deployment_mode="COLOCATED". Static sharding also '
                "requires a fixed list of workers (`worker_addresses` of the DispatcherConfig)"
            )
        if policy and (deployment == COLOCATED or (deployment != "REMOTE" and local)):
            self.is_local = True
        if self.is_local and not reply.finished and not local:
            raise FailedPreconditionError(
                "Local reads require local workers, but no local worker is found. Run a "
                '`WorkerServer` in this process, or use target_workers="AUTO"'
            )
        return self.select(reply)

    def select(self, reply: M) -> M:
        """Return a reply of the dispatcher with the selected tasks."""
        if isinstance(reply, ClientHeartbeatReply) and reply.unchanged:
            return reply
        if self.is_local:
            tasks = _select_tasks(reply, _is_local)
            return msgspec.structs.replace(reply, tasks=tasks, finished=reply.finished or not tasks)
        if not self._uses_tags:
            return reply
        tasks = _select_tasks(reply, lambda task: _is_local(task) or not _is_colocated(task))
        num_skipped = len(reply.tasks) - len(tasks)
        self._has_read = self._has_read or bool(tasks)
        self.skipped_workers = tuple(
            each.worker_address for each in reply.tasks if each not in tasks
        )
        has_ended = bool(num_skipped) and self._has_read and not tasks
        return msgspec.structs.replace(reply, tasks=tasks, finished=reply.finished or has_ended)


def _select_tasks(
    reply: OpenIterationReply | ClientHeartbeatReply, choose: Callable[[TaskAddress], bool]
) -> tuple[TaskAddress, ...]:
    return tuple(task for task in reply.tasks if choose(task))


def _is_local(task: TaskAddress) -> bool:
    return inprocess.is_in_process(task.worker_address)


def _is_colocated(task: TaskAddress) -> bool:
    return any(tag.upper() == COLOCATED for tag in task.tags)
