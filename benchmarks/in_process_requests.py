"""Requests that are passed to a dispatcher's core in the same process, without sockets."""

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

__all__ = ["InProcessPeers", "InProcessRequest"]

_PLAN = b"a plan; dispatchers do not decode it"
_HEARTBEATS_PER_BATCH = 8


class InProcessRequest(Request):
    """A request that stores its reply in `answer`."""

    role = None

    def __init__(self, message: msgspec.Struct, peer: str = "peer") -> None:
        self.message, self.buffers, self.peer = message, (), peer
        self.answer: Any = None

    def reply(self, message: msgspec.Struct, buffers: Sequence[Buffer] = ()) -> None:
        self.answer = message

    def fail(self, error: Exception) -> None:
        raise error


class InProcessPeers:
    """Workers and clients of one named job over an endless dataset, connected to a core directly.

    Args:
        stack: Exit stack that closes the journal.
        config: Configuration of the dispatcher.
        workers: Number of workers.
        clients: Number of clients.
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

    def splits(self) -> Iterator[int]:
        """Request a split for each worker in one batch, repeatedly; yield the assigned sizes."""
        number = 0
        while True:
            requests = [
                InProcessRequest(
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
        """Pass the heartbeats of one second to the core, at the interval that it requests."""
        first = self._tasks[0]
        worker = self._ask(
            messages.WorkerHeartbeat(worker_id=first.worker_id, tasks=(first.task_id,))
        )
        client = self._ask(messages.ClientHeartbeat(client_id=self._clients[0]))
        workers = round(len(self._tasks) / worker.heartbeat_interval)
        clients = round(len(self._clients) / client.heartbeat_interval)
        heartbeats: list[msgspec.Struct] = [
            messages.WorkerHeartbeat(worker_id=task.worker_id, tasks=(task.task_id,))
            for task in islice(cycle(self._tasks), workers)
        ]
        heartbeats += [
            messages.ClientHeartbeat(client_id=name, known_version=client.version)
            for name in islice(cycle(self._clients), clients)
        ]
        unsent = iter(heartbeats)
        while requests := [
            InProcessRequest(each) for each in islice(unsent, _HEARTBEATS_PER_BATCH)
        ]:
            self._core.handle(requests)

    def _ask(self, message: msgspec.Struct) -> Any:
        request = InProcessRequest(message)
        self._core.handle([request])
        return request.answer
