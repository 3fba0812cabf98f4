"""List of running tasks, which a client keeps and updates with the dispatcher's changes."""

from __future__ import annotations

import msgspec

from headrace.service.messages import ClientHeartbeatReply, TaskAddress

__all__ = ["TaskList"]


class TaskList:
    """The running tasks of an iteration in the last version received."""

    def __init__(self) -> None:
        self._version = -1
        self._tasks: dict[int, TaskAddress] = {}

    def complete(self, reply: ClientHeartbeatReply) -> ClientHeartbeatReply:
        """Return an update with all running tasks, if it lists only changes.

        Changes from another version, in a reply that was delayed, are ignored.
        """
        if reply.unchanged:
            return reply
        if reply.changed_since < 0:
            self._tasks = {task.task_id: task for task in reply.tasks}
        elif reply.changed_since != self._version:
            return msgspec.structs.replace(reply, unchanged=True)
        else:
            for task_id in reply.ended_tasks:
                self._tasks.pop(task_id, None)
            self._tasks.update((task.task_id, task) for task in reply.tasks)
        self._version = reply.version
        if reply.changed_since < 0:
            return reply
        return msgspec.structs.replace(
            reply, tasks=tuple(self._tasks.values()), changed_since=-1, ended_tasks=()
        )
