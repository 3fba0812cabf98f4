"""Which of an iteration's tasks a client reads.

    ANY     all
    LOCAL   those of workers in this process; without any it is an error
    AUTO    all but those of other processes' workers that are tagged COLOCATED: each of these is
            for the process that it stands beside. Where shares are fixed, what the dispatcher's
            `deployment_mode` says: those in this process alone (COLOCATED: there must be some;
            not said: if there are any), or all (REMOTE).

Rule. Where a client passes tasks over, an iteration may go on for others: it is over for this
      client when the tasks that it read are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.service.messages import ClientHeartbeatReply, OpenIterationReply, TaskAddress
from headrace.transport import inprocess

__all__ = ["COLOCATED", "Target"]

COLOCATED = "COLOCATED"
"""The tag of a worker that stands beside one training process, and is for that one; written in
capitals or not."""

M = TypeVar("M", OpenIterationReply, ClientHeartbeatReply)


class Target:
    """What one client reads.

    Args:
        name: "AUTO", "ANY" or "LOCAL".
        static_policy: Not empty: the name of the policy that shares the dataset in fixed parts,
            where the client does not say which workers to read
            (`OpenIterationReply.deployment_mode`).
        heeds_tags: Whether AUTO heeds tags: not where all clients read the same rounds.
        is_copy: Whether the rest of what a worker reads is for nobody else when it is lost.
    """

    def __init__(
        self,
        name: str = "ANY",
        *,
        static_policy: str = "",
        heeds_tags: bool = True,
        is_copy: bool = True,
    ) -> None:
        self.is_local = name == "LOCAL"
        """Whether the workers of this process are read alone."""
        self.is_copy = is_copy
        self._static_policy = static_policy
        self._heeds_tags = name == "AUTO" and heeds_tags
        #: Some task was for this client.
        self._has_read = False
        self.passed_over: tuple[str, ...] = ()
        """Addresses of tagged workers that it did not read, at the last look."""

    def opened(self, heard: OpenIterationReply) -> OpenIterationReply:
        """Return what there is to read of an iteration that was opened.

        Raises:
            FailedPreconditionError: Only workers of this process are to be read, and there are
                none.
            InvalidArgumentError: The dispatcher says that there is one, and there is none.
        """
        local = [each for each in heard.tasks if _is_local(each)]
        policy, deployment = self._static_policy, heard.deployment_mode
        if policy and deployment == COLOCATED and not heard.finished and not local:
            raise InvalidArgumentError(
                f"Static sharding policy <{policy}> requires local workers, but no local "
                "worker is found. You need to run a local `WorkerServer` in each process that "
                'reads, as the dispatcher has deployment_mode="COLOCATED". Static sharding also '
                "requires a fixed list of workers (`worker_addresses` of the DispatcherConfig)"
            )
        if policy and (deployment == COLOCATED or (deployment != "REMOTE" and local)):
            self.is_local = True
        if self.is_local and not heard.finished and not local:
            raise FailedPreconditionError(
                "Local reads require local workers, but no local worker is found. Run a "
                '`WorkerServer` in this process, or use target_workers="AUTO"'
            )
        return self.of(heard)

    def of(self, heard: M) -> M:
        """Return what there is to read, of what the dispatcher said."""
        if isinstance(heard, ClientHeartbeatReply) and heard.unchanged:
            return heard
        if self.is_local:
            tasks = _chosen(heard, _is_local)
            return msgspec.structs.replace(heard, tasks=tasks, finished=heard.finished or not tasks)
        if not self._heeds_tags:
            return heard
        tasks = _chosen(heard, lambda task: _is_local(task) or not _is_colocated(task))
        left = len(heard.tasks) - len(tasks)
        self._has_read = self._has_read or bool(tasks)
        self.passed_over = tuple(each.worker_address for each in heard.tasks if each not in tasks)
        over = bool(left) and self._has_read and not tasks
        return msgspec.structs.replace(heard, tasks=tasks, finished=heard.finished or over)


def _chosen(
    heard: OpenIterationReply | ClientHeartbeatReply, choose: Callable[[TaskAddress], bool]
) -> tuple[TaskAddress, ...]:
    return tuple(task for task in heard.tasks if choose(task))


def _is_local(task: TaskAddress) -> bool:
    return inprocess.is_in_process(task.worker_address)


def _is_colocated(task: TaskAddress) -> bool:
    return any(tag.upper() == COLOCATED for tag in task.tags)
