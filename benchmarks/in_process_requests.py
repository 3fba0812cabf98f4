"""Requests that are passed to a dispatcher's core in the same process, without sockets."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import msgspec

from headrace.service import ShardingPolicy, messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import DispatcherCore, open_journal
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import encode

__all__ = ["InProcessPeers", "InProcessRequest"]

_PLAN = b"a plan; dispatchers do not decode it"
_HEARTBEATS_PER_BATCH = 8
_SETUP_BATCH = 16


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
        core: Core of the dispatcher.
        workers: Number of workers.
        clients: Number of clients.

    Attributes:
        tasks: The task of each worker.
        clients: Names of the clients.
        opening_seconds: Processor time of the core to open the job for all clients.
    """

    def __init__(self, core: DispatcherCore, workers: int, clients: int = 1) -> None:
        self._core = core
        self._ask_all(
            messages.RegisterWorker(
                worker_id=f"worker-{number}", address=f"127.0.0.1:{20_000 + number}"
            )
            for number in range(workers)
        )
        digest = hashlib.sha256(_PLAN).digest()
        self._ask(messages.PutPlan(digest=digest, offset=0, total_bytes=len(_PLAN), chunk=_PLAN))
        dataset = self._ask(
            messages.RegisterDataset(
                token="once", digest=digest, fingerprint="f", element_spec=b"", cardinality=-1,
                num_splits=-1, has_element_ids=True,
            )
        )  # fmt: skip
        self.clients = [f"client-{number}" for number in range(clients)]
        began = time.thread_time()
        opened: Any = self._ask_all(
            messages.OpenIteration(
                client_id=name, dataset_id=dataset.dataset_id,
                options=messages.JobOptions(processing_mode=int(ShardingPolicy.DYNAMIC)),
                job_name="training", epoch=(0,), seed=1,
            )
            for name in self.clients
        )  # fmt: skip
        self.opening_seconds = time.thread_time() - began
        self.tasks = opened.tasks

    @classmethod
    def of_config(
        cls, stack: ExitStack, config: DispatcherConfig, workers: int, clients: int = 1
    ) -> InProcessPeers:
        """Connect peers to a new core, whose journal is closed by `stack`."""
        core = DispatcherCore(open_journal(config), DispatcherLimits.from_config(config))
        stack.callback(core.close)
        return cls(core, workers, clients)

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
                for task in self.tasks
            ]  # fmt: skip
            self._core.handle(requests)
            number += 1
            for request in requests:
                yield request.answer.stop - request.answer.start

    def idle_second(self) -> None:
        """Pass the heartbeats of one second to the core, at the interval that it requests."""
        first = self.tasks[0]
        worker = self._ask(
            messages.WorkerHeartbeat(worker_id=first.worker_id, tasks=(first.task_id,))
        )
        client = self._ask(messages.ClientHeartbeat(client_id=self.clients[0]))
        workers = round(len(self.tasks) / worker.heartbeat_interval)
        clients = round(len(self.clients) / client.heartbeat_interval)
        heartbeats: list[msgspec.Struct] = [
            messages.WorkerHeartbeat(worker_id=task.worker_id, tasks=(task.task_id,))
            for task in islice(cycle(self.tasks), workers)
        ]
        heartbeats += [
            messages.ClientHeartbeat(client_id=name, known_version=client.version)
            for name in islice(cycle(self.clients), clients)
        ]
        unsent = iter(heartbeats)
        while requests := [
            InProcessRequest(each) for each in islice(unsent, _HEARTBEATS_PER_BATCH)
        ]:
            self._core.handle(requests)

    def _ask_all(self, unsent: Iterable[msgspec.Struct]) -> Any:
        """Pass requests to the core in batches; return the last reply."""
        answer, unsent = None, iter(unsent)
        while requests := [InProcessRequest(each) for each in islice(unsent, _SETUP_BATCH)]:
            self._core.handle(requests)
            for request in requests:
                encode(request.answer)  # as for sending
            answer = requests[-1].answer
        return answer

    def _ask(self, message: msgspec.Struct) -> Any:
        request = InProcessRequest(message)
        self._core.handle([request])
        return request.answer
