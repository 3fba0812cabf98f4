"""Peers of a dispatcher that do nothing else: workers and clients that only speak, over sockets.

Each has a connection of its own and sends the words that the real ones send, which are read by the
real server; but a thousand of them live in one thread, and keep nothing.
"""

from __future__ import annotations

import heapq
import secrets
import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

import headrace as hr
from benchmarks.raw_connection import RawConnection
from headrace.service import messages
from headrace.service.stub import DispatcherStub
from headrace.transport.envelope import REPLY, REQUEST, RequestHeader, decode_reply_header, encode

__all__ = ["Peer", "SimulatedPeers"]

_TIMEOUT_MS = 20_000
_JOB = "training"
_MAX_UNANSWERED = 8
"""Heartbeats under way at a time."""


class Peer:
    """One connection to a dispatcher: a request, then its answer.

    Args:
        context: For the socket.
        address: "host:port" of the dispatcher.
    """

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = b"H" + secrets.token_bytes(16) + bytes(4)
        self.socket.rcvtimeo = _TIMEOUT_MS
        # ZeroMQ's own signs of life, as a channel asks for them.
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = 4000, 12_000
        self.socket.connect(f"tcp://{address}")

    def send(self, message: msgspec.Struct) -> None:
        """Ask."""
        self.socket.send(_asked(message))

    def receive(self, kind: Any = Any) -> Any:
        """Return the answer, as far as `kind` wants to know it.

        Raises:
            RuntimeError: It is an error.
        """
        return _answered(self.socket.recv(), kind)

    def ask(self, message: msgspec.Struct) -> Any:
        """Ask, and return the answer."""
        self.send(message)
        return self.receive()


def _asked(message: msgspec.Struct) -> bytes:
    return encode(RequestHeader(1, REQUEST, msgspec.Raw(encode(message))))


def _answered(frame: bytes, kind: Any) -> Any:
    header = decode_reply_header(frame)
    if header.kind != REPLY:
        answer = msgspec.msgpack.decode(header.body)
        raise RuntimeError(f"the dispatcher answered: {answer}")
    return msgspec.msgpack.decode(header.body, type=kind)


class _Granted(msgspec.Struct):
    """What a light worker keeps of the units that it was dealt."""

    start: int
    stop: int


class _Heard(msgspec.Struct):
    """What a light peer keeps of an answer to a heartbeat; a worker's has no version."""

    version: int = 0
    same: bool = True
    heartbeat_interval: float = 0.0


@dataclass
class _Worker:
    peer: Peer
    worker_id: str
    task: dict[str, Any]
    num_granted: int = 0
    num_splits: int = 0
    interval: float = 0.0


@dataclass
class _Client:
    peer: Peer
    client_id: str
    known: int = -1
    interval: float = 0.0


class SimulatedPeers:
    """As many workers as clients, all of one named job over a dataset without end.

    Args:
        stack: What closes the connections.
        address: "host:port" of the dispatcher.
        count: How many of each.
    """

    def __init__(self, stack: ExitStack, address: str, count: int) -> None:
        context = stack.enter_context(zmq.Context())
        context.max_sockets = 8192
        stack.callback(context.destroy, 0)
        self._stack, self._address = stack, address
        self.workers: list[_Worker] = []
        self.clients: list[_Client] = []
        self._turns: deque[_Worker | _Client] = deque()
        #: When each is to speak next, in seconds of idle time.
        self._due: list[tuple[float, int, _Worker | _Client]] = []
        workers = [(f"worker-{number}", Peer(context, address)) for number in range(count)]
        for number, (name, peer) in enumerate(workers):
            where = f"127.0.0.1:{20_000 + number}"
            peer.ask(messages.RegisterWorker(worker_id=name, address=where))
        dataset_id = hr.service.register_dataset(address, hr.Dataset.range(1 << 40))
        with DispatcherStub(address) as stub:
            dataset = stub.call(messages.GetDataset(dataset_id=dataset_id))
        assert dataset is not None
        for number in range(count):
            client = _Client(Peer(context, address), f"client-{number}")
            client.peer.send(
                messages.OpenIteration(
                    client_id=client.client_id,
                    dataset_id=dataset_id,
                    options=messages.JobOptions(
                        processing_mode=int(hr.service.ShardingPolicy.DYNAMIC)
                    ),
                    job_name=_JOB,
                    epoch=(0,),
                    seed=1,
                )
            )
            # All are told the same, at length.
            opened = client.peer.receive(Any if number == count - 1 else msgspec.Raw)
            self.clients.append(client)
        tasks = {task["worker_id"]: task for task in opened["tasks"]}
        for name, peer in workers:
            self.workers.append(_Worker(peer, name, tasks[name]))
        self._turns.extend([*self.workers, *self.clients])
        # Each client is told once where all tasks are, and everybody how often to speak.
        self.beat(len(self._turns))

    def beat(self, count: int) -> None:
        """Have so many peers send a heartbeat, one after the other is answered, in turn."""
        for _ in range(count):
            peer = self._turns[0]
            self._turns.rotate(-1)
            self._send_beat(peer)
            self._hear_beat(peer)

    @property
    def longest_interval(self) -> float:
        """Seconds in which everybody sends a heartbeat."""
        return max(each.interval for each in self._turns)

    def idle(self, seconds: float) -> float:
        """Let all peers send heartbeats in their rhythm, evenly spread, for so long.

        Returns:
            For how many seconds' heartbeats there was time, where this process is too slow.
        """
        due = self._due
        peers: list[_Worker | _Client] = [] if due else [*self.workers, *self.clients]
        for spread, each in enumerate(peers):
            part = spread % len(self.workers) / len(self.workers)
            heapq.heappush(due, (each.interval * part, spread, each))
        first, unheard = due[0][0], deque[tuple[int, _Worker | _Client]]()
        began = time.monotonic() - first
        while (passed := time.monotonic() - began) < first + seconds:
            is_due = bool(due) and due[0][0] <= passed
            if is_due:
                _, number, peer = heapq.heappop(due)
                self._send_beat(peer)
                unheard.append((number, peer))
            if len(unheard) >= _MAX_UNANSWERED or (unheard and not is_due):
                number, peer = unheard.popleft()
                self._hear_beat(peer)
                # From when it is answered: as those do that are no light ones.
                heapq.heappush(due, (time.monotonic() - began + peer.interval, number, peer))
            elif not is_due:
                time.sleep(0.001)
        late = due[0][0] - first if due else seconds
        for number, peer in unheard:
            self._hear_beat(peer)
            heapq.heappush(due, (time.monotonic() - began + peer.interval, number, peer))
        return min(seconds, late)

    def splits(self) -> Iterator[int]:
        """Have each worker ask for a unit as soon as it has one; yield how many were granted.

        They ask by connections without threads (`raw_connection`), which take little of the
        machine.
        """
        ready, by_number = select.epoll(), {}
        for worker in self.workers:
            wire = RawConnection(self._address, _TIMEOUT_MS / 1000)
            self._stack.callback(wire.close)
            ready.register(wire.fileno(), select.EPOLLIN)
            by_number[wire.fileno()] = worker, wire
            wire.send(_asked(self._want(worker)))
        while True:
            found = ready.poll(_TIMEOUT_MS / 1000)
            if not found:
                raise RuntimeError("the dispatcher grants nothing")
            for number, _event in found:
                worker, wire = by_number[number]
                for message in wire.messages():
                    granted = _answered(message, _Granted)
                    got = granted.stop - granted.start
                    worker.num_splits += got
                    worker.num_granted += got > 0
                    wire.send(_asked(self._want(worker)))
                    yield got

    def _want(self, worker: _Worker) -> messages.GetSplit:
        return messages.GetSplit(
            worker_id=worker.worker_id,
            task_id=worker.task["task_id"],
            task_token=worker.task["task_token"],
            assignment_number=worker.num_granted,
            max_splits=1,
            num_done=worker.num_splits,
        )

    def _send_beat(self, peer: _Worker | _Client) -> None:
        if isinstance(peer, _Worker):
            tasks = (peer.task["task_id"],)
            peer.peer.send(messages.WorkerHeartbeat(worker_id=peer.worker_id, tasks=tasks))
        else:
            peer.peer.send(
                messages.ClientHeartbeat(client_id=peer.client_id, known_version=peer.known)
            )

    @staticmethod
    def _hear_beat(peer: _Worker | _Client) -> None:
        heard: _Heard = peer.peer.receive(_Heard)
        peer.interval = heard.heartbeat_interval
        if isinstance(peer, _Client) and not heard.same:
            peer.known = heard.version
