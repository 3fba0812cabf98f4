"""Requests that nobody sent: what a dispatcher's core is handed where there are no sockets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import msgspec

from headrace.service import ShardingPolicy, messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import DispatcherCore, open_journal
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.transport.channel import Buffer, Request

__all__ = ["HeldCrowd", "HeldRequest"]

_PLAN = b"a plan, which no dispatcher opens"
_AT_ONCE = 8


class HeldRequest(Request):
    """A request that keeps its answer."""

    role = None

    def __init__(self, message: msgspec.Struct, peer: str = "peer") -> None:
        self.message, self.buffers, self.peer = message, (), peer
        self.answer: Any = None

    def reply(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        self.answer = message

    def fail(self, error: Exception) -> None:
        raise error


class HeldCrowd:
    """Workers and clients of one named job over a dataset without end, as a core sees them.

    Args:
        stack: What closes the journal.
        config: Of the dispatcher.
        workers: How many.
        clients: How many.
    """

    def __init__(
        self, stack: ExitStack, config: DispatcherConfig, workers: int, clients: int = 1
    ) -> None:
        journal = open_journal(config)
        stack.callback(journal.close)
        self._core = DispatcherCore(journal, DispatcherLimits.from_config(config))
        for number in range(workers):
            address = f"127.0.0.1:{20_000 + number}"
            self._ask(messages.RegisterWorker(worker_id=f"worker-{number}", address=address))
        digest = hashlib.sha256(_PLAN).digest()
        self._ask(messages.PutPlan(digest=digest, offset=0, total_bytes=len(_PLAN), chunk=_PLAN))
        dataset = self._ask(
            messages.RegisterDataset(
                token="once", digest=digest, fingerprint="f", element_spec=b"", cardinality=-1,
                num_splits=-1, has_element_ids=True,
            )
        )  # fmt: skip
        opened: Any = None
        self._clients = [f"client-{number}" for number in range(clients)]
        for name in self._clients:
            opened = self._ask(
                messages.OpenIteration(
                    client_id=name, dataset_id=dataset.dataset_id,
                    options=messages.JobOptions(processing_mode=int(ShardingPolicy.DYNAMIC)),
                    job_name="training", epoch=(0,), seed=1,
                )
            )  # fmt: skip
        self._tasks = opened.tasks

    def grants(self) -> Iterator[int]:
        """Hand over a question for one unit by each worker; yield how many units each got."""
        number = 0
        while True:
            requests = [
                HeldRequest(
                    messages.GetSplit(
                        worker_id=task.worker_id, task_id=task.task_id, task_token=task.task_token,
                        assignment_number=number, max_splits=1, num_done=number,
                    ),
                    task.worker_id,
                )
                for task in self._tasks
            ]  # fmt: skip
            self._core.handle(requests)
            number += 1
            for request in requests:
                yield request.answer.stop - request.answer.start

    def idle_second(self) -> None:
        """Hand over the heartbeats of a second, a few at a time, as many as the core asks for."""
        first = self._tasks[0]
        worker = self._ask(
            messages.WorkerHeartbeat(worker_id=first.worker_id, tasks=(first.task_id,))
        )
        client = self._ask(messages.ClientHeartbeat(client_id=self._clients[0]))
        workers = round(len(self._tasks) / worker.heartbeat_interval)
        clients = round(len(self._clients) / client.heartbeat_interval)
        beats: list[msgspec.Struct] = [
            messages.WorkerHeartbeat(worker_id=task.worker_id, tasks=(task.task_id,))
            for task in islice(cycle(self._tasks), workers)
        ]
        beats += [
            messages.ClientHeartbeat(client_id=name, known_version=client.version)
            for name in islice(cycle(self._clients), clients)
        ]
        handed = iter(beats)
        while requests := [HeldRequest(beat) for beat in islice(handed, _AT_ONCE)]:
            self._core.handle(requests)

    def _ask(self, message: msgspec.Struct) -> Any:
        request = HeldRequest(message)
        self._core.handle([request])
        return request.answer
