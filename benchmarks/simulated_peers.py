"""Simulated workers and clients of a dispatcher, which exchange messages with it and do no work.

Each peer has its own connection and sends the messages of a real worker or client to a real
dispatcher. A thousand of them run in one thread, with almost no state.
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
_MAX_PENDING = 8
"""Maximum number of heartbeats without a reply."""


class Peer:
    """Connection to a dispatcher with one request at a time.

    Args:
        context: ZeroMQ context of the socket.
        address: "host:port" of the dispatcher.
    """

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = b"H" + secrets.token_bytes(16) + bytes(4)
        self.socket.rcvtimeo = _TIMEOUT_MS
        # ZeroMQ heartbeats with the settings of a channel.
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = 4000, 12_000
        self.socket.connect(f"tcp://{address}")

    def send(self, message: msgspec.Struct) -> None:
        """Send a request."""
        self.socket.send(_encode_request(message))

    def receive(self, kind: Any = Any) -> Any:
        """Return the reply, decoded as `kind`.

        Raises:
            RuntimeError: If the reply is an error.
        """
        return _decode_reply(self.socket.recv(), kind)

    def ask(self, message: msgspec.Struct) -> Any:
        """Send a request and return the reply."""
        self.send(message)
        return self.receive()


def _encode_request(message: msgspec.Struct) -> bytes:
    return encode(RequestHeader(1, REQUEST, msgspec.Raw(encode(message))))


def _decode_reply(frame: bytes, kind: Any) -> Any:
    header = decode_reply_header(frame)
    if header.kind != REPLY:
        error = msgspec.msgpack.decode(header.body)
        raise RuntimeError(f"error reply of the dispatcher: {error}")
    return msgspec.msgpack.decode(header.body, type=kind)


class _SplitRange(msgspec.Struct):
    """The fields that a simulated worker reads of a reply to GetSplit."""

    start: int
    stop: int


class _HeartbeatReply(msgspec.Struct):
    """The fields that a peer reads of a heartbeat reply; that of a worker has no version."""

    version: int = 0
    same: bool = True
    heartbeat_interval: float = 0.0


@dataclass
class _Worker:
    peer: Peer
    worker_id: str
    task: dict[str, Any]
    num_assigned: int = 0
    num_splits: int = 0
    interval: float = 0.0


@dataclass
class _Client:
    peer: Peer
    client_id: str
    known_version: int = -1
    interval: float = 0.0


class SimulatedPeers:
    """Workers and clients, in equal numbers, of one named job over a practically endless dataset.

    Args:
        stack: Exit stack that closes the connections.
        address: "host:port" of the dispatcher.
        count: Number of workers, and of clients.
    """

    def __init__(self, stack: ExitStack, address: str, count: int) -> None:
        context = stack.enter_context(zmq.Context())
        context.max_sockets = 8192
        stack.callback(context.destroy, 0)
        self._stack, self._address = stack, address
        self.workers: list[_Worker] = []
        self.clients: list[_Client] = []
        self._rotation: deque[_Worker | _Client] = deque()
        #: Heap of (time of the next heartbeat in seconds of idle time, number of the peer, peer).
        self._due: list[tuple[float, int, _Worker | _Client]] = []
        workers = [(f"worker-{number}", Peer(context, address)) for number in range(count)]
        for number, (name, peer) in enumerate(workers):
            worker_address = f"127.0.0.1:{20_000 + number}"
            peer.ask(messages.RegisterWorker(worker_id=name, address=worker_address))
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
            # All clients get the same long reply; decode one of them.
            opened = client.peer.receive(Any if number == count - 1 else msgspec.Raw)
            self.clients.append(client)
        tasks = {task["worker_id"]: task for task in opened["tasks"]}
        for name, peer in workers:
            self.workers.append(_Worker(peer, name, tasks[name]))
        self._rotation.extend([*self.workers, *self.clients])
        # The first heartbeat returns the list of tasks to clients, and the interval to all peers.
        self.heartbeat(len(self._rotation))

    def heartbeat(self, count: int) -> None:
        """Send `count` heartbeats of the peers in rotation, each after the reply to the last."""
        for _ in range(count):
            peer = self._rotation[0]
            self._rotation.rotate(-1)
            self._send_heartbeat(peer)
            self._receive_heartbeat(peer)

    @property
    def longest_interval(self) -> float:
        """The longest heartbeat interval of a peer, in seconds."""
        return max(each.interval for each in self._rotation)

    def idle(self, seconds: float) -> float:
        """Send the heartbeats of all peers at their intervals, evenly spread, for `seconds`.

        Returns:
            Seconds of the schedule that were completed: fewer than `seconds` if this process is too
            slow.
        """
        due = self._due
        peers: list[_Worker | _Client] = [] if due else [*self.workers, *self.clients]
        for spread, each in enumerate(peers):
            fraction = spread % len(self.workers) / len(self.workers)
            heapq.heappush(due, (each.interval * fraction, spread, each))
        first, pending = due[0][0], deque[tuple[int, _Worker | _Client]]()
        began = time.monotonic() - first
        while (elapsed := time.monotonic() - began) < first + seconds:
            is_due = bool(due) and due[0][0] <= elapsed
            if is_due:
                _, number, peer = heapq.heappop(due)
                self._send_heartbeat(peer)
                pending.append((number, peer))
            if len(pending) >= _MAX_PENDING or (pending and not is_due):
                number, peer = pending.popleft()
                self._receive_heartbeat(peer)
                # A real peer also starts the interval when the reply arrives.
                heapq.heappush(due, (time.monotonic() - began + peer.interval, number, peer))
            elif not is_due:
                time.sleep(0.001)
        completed = due[0][0] - first if due else seconds
        for number, peer in pending:
            self._receive_heartbeat(peer)
            heapq.heappush(due, (time.monotonic() - began + peer.interval, number, peer))
        return min(seconds, completed)

    def splits(self) -> Iterator[int]:
        """Request splits for all workers, one at a time each; yield the size of each assignment.

        Requests use connections without threads (`raw_connection`) to save processor time.
        """
        ready, by_fileno = select.epoll(), {}
        for worker in self.workers:
            connection = RawConnection(self._address, _TIMEOUT_MS / 1000)
            self._stack.callback(connection.close)
            ready.register(connection.fileno(), select.EPOLLIN)
            by_fileno[connection.fileno()] = worker, connection
            connection.send(_encode_request(self._split_request(worker)))
        while True:
            found = ready.poll(_TIMEOUT_MS / 1000)
            if not found:
                raise RuntimeError(f"no reply from the dispatcher for {_TIMEOUT_MS / 1000:g} s")
            for fileno, _event in found:
                worker, connection = by_fileno[fileno]
                for message in connection.messages():
                    assigned = _decode_reply(message, _SplitRange)
                    num_splits = assigned.stop - assigned.start
                    worker.num_splits += num_splits
                    worker.num_assigned += num_splits > 0
                    connection.send(_encode_request(self._split_request(worker)))
                    yield num_splits

    def _split_request(self, worker: _Worker) -> messages.GetSplit:
        return messages.GetSplit(
            worker_id=worker.worker_id,
            task_id=worker.task["task_id"],
            task_token=worker.task["task_token"],
            assignment_number=worker.num_assigned,
            max_splits=1,
            num_done=worker.num_splits,
        )

    def _send_heartbeat(self, peer: _Worker | _Client) -> None:
        if isinstance(peer, _Worker):
            tasks = (peer.task["task_id"],)
            peer.peer.send(messages.WorkerHeartbeat(worker_id=peer.worker_id, tasks=tasks))
        else:
            peer.peer.send(
                messages.ClientHeartbeat(client_id=peer.client_id, known_version=peer.known_version)
            )

    @staticmethod
    def _receive_heartbeat(peer: _Worker | _Client) -> None:
        reply: _HeartbeatReply = peer.peer.receive(_HeartbeatReply)
        peer.interval = reply.heartbeat_interval
        if isinstance(peer, _Client) and not reply.same:
            peer.known_version = reply.version
