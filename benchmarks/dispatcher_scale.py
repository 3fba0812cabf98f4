"""Curves of one dispatcher with 100 to 3,000 workers, and as many clients, in virtual time.

    python -m benchmarks.dispatcher_scale              measure; about two minutes
    python -m benchmarks.dispatcher_scale --counts 10000     print other counts; stores nothing

So many peers do not fit on one machine. The dispatcher's core and its journal are real, while time
is virtual: a clock advances by the processor time that the core needs for the requests that are
due, or to the next request if none is. Peers send the heartbeats of real ones at the intervals that
the dispatcher requests. Replies are encoded as for sending. Sockets, handshakes and encryption are
not included, so a real dispatcher reaches its limits earlier.

All peers share one job with DYNAMIC sharding. Each count is measured in its own process:

heartbeat   processor time of the core per heartbeat, in microseconds
load        fraction of one core that the heartbeats of idle peers use
splits      durable splits assigned per second of processor time
opening     mean processor time for one client to open the job, in milliseconds
change      virtual seconds after the loss of a worker until all clients know it
change_cpu  processor time of the core in these seconds
failover    virtual seconds from the restart of the dispatcher until each peer had a reply
replay      processor time to read the journal in that time
memory      resident memory of the process, in megabytes
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.in_process_requests import InProcessPeers, InProcessRequest
from benchmarks.report import machine
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import DispatcherCore, open_journal
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.transport.envelope import encode

__all__ = ["COUNTS", "CURVES", "main", "measure"]

COUNTS = (100, 300, 1000, 3000)
CURVES = {
    "heartbeat": ("Processor time of the core per heartbeat", "microseconds"),
    "load": ("Fraction of a core used by the heartbeats of idle peers", "cores"),
    "splits": ("Durable splits assigned per second of processor time", "splits per second"),
    "opening": ("Processor time of the core to open a job, per client", "milliseconds"),
    "change": ("Time until all clients know that a worker was lost", "seconds"),
    "change_cpu": ("Processor time until all clients know that a worker was lost", "seconds"),
    "failover": ("Time from a restart until each peer had a reply", "seconds"),
    "replay": ("Processor time to resume from the journal", "seconds"),
    "memory": ("Resident memory of the dispatcher", "megabytes"),
}
"""Title and unit of each curve."""

_DIRECTORY = Path(__file__).parent / "curves"
_STEADY_SECONDS = 5.0
_SPLITS = 20_000
_MAX_BATCH = 256
_GIVE_UP_SECONDS = 600.0


class _Clock:
    """Virtual time, which advances by the processor time of the calls that it measures."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, call: Callable[[], object]) -> None:
        began = time.thread_time()
        call()
        spent = time.thread_time() - began
        self.now += spent
        self.busy += spent


class _EncodedRequest(InProcessRequest):
    def reply(self, message: msgspec.Struct, buffers: Any = ()) -> None:
        encode(message)
        self.answer = message


class _Connections(WorkerConnections):
    """Connections of workers, which carry data while heartbeats wait for the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()

    def seconds_since_data(self, worker_id: str) -> float | None:
        return None if worker_id in self.silent else 0.0


class _Heartbeats:
    """Heartbeats of all peers in virtual time."""

    def __init__(self, core: DispatcherCore, clock: _Clock, limits: DispatcherLimits) -> None:
        self.core, self._clock, self._limits = core, clock, limits
        self._due: list[tuple[float, str]] = []
        self._messages: dict[str, messages.WorkerHeartbeat | messages.ClientHeartbeat] = {}
        self._next_tick = 0.0
        self.count = 0
        #: Peers that had a reply, with its version if they are clients.
        self.replied: dict[str, int] = {}
        #: Clients that had a reply with a version above `newer_than`.
        self.newer_than = 0
        self.informed: set[str] = set()

    def add(self, name: str, message: Any, first: float) -> None:
        """Add a peer, with the time of its first heartbeat."""
        self._messages[name] = message
        heapq.heappush(self._due, (first, name))

    def remove(self, name: str) -> None:
        """Silence a peer."""
        del self._messages[name]

    def run(self, is_done: Callable[[], bool]) -> None:
        """Send heartbeats when they are due, until `is_done`."""
        clock = self._clock
        end = clock.now + _GIVE_UP_SECONDS
        while not is_done():
            if clock.now > end:
                raise RuntimeError(f"not done within {_GIVE_UP_SECONDS:g} virtual seconds")
            clock.now = max(clock.now, min(self._due[0][0], self._next_tick))
            if clock.now >= self._next_tick:
                clock.charge(self.core.tick)
                self._next_tick = clock.now + self._limits.tick_interval
            requests: list[tuple[str, _EncodedRequest]] = []
            while self._due and self._due[0][0] <= clock.now and len(requests) < _MAX_BATCH:
                name = heapq.heappop(self._due)[1]
                if name in self._messages:
                    requests.append((name, _EncodedRequest(self._messages[name], name)))
            if requests:
                batch = [request for _, request in requests]
                clock.charge(lambda batch=batch: self.core.handle(batch))
                for name, request in requests:
                    self._receive(name, request.answer)

    def _receive(self, name: str, reply: Any) -> None:
        self.count += 1
        version = 0
        message = self._messages[name]
        if isinstance(message, messages.ClientHeartbeat):
            version = reply.version
            self._messages[name] = msgspec.structs.replace(message, known_version=version)
            if version > self.newer_than:
                self.informed.add(name)
        self.replied[name] = version
        heapq.heappush(self._due, (self._clock.now + reply.heartbeat_interval, name))


def measure(count: int) -> dict[str, float]:
    """Measure all curves for `count` workers and as many clients."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        config = DispatcherConfig(work_dir=directory, fault_tolerant_mode=True)
        limits = DispatcherLimits.from_config(config)
        clock, connections = _Clock(), _Connections()
        core = DispatcherCore(open_journal(config), limits, clock=clock, connections=connections)
        peers = InProcessPeers(core, count, count)
        found["opening"] = peers.opening_seconds / count * 1e3

        began, assigned = time.thread_time(), 0
        for number in peers.splits():
            assigned += number
            if assigned >= min(_SPLITS, 200 * count):
                break
        found["splits"] = assigned / (time.thread_time() - began)

        heartbeats = _Heartbeats(core, clock, limits)
        workers = [task.worker_id for task in peers.tasks]
        for number, task in enumerate(peers.tasks):
            message = messages.WorkerHeartbeat(worker_id=task.worker_id, tasks=(task.task_id,))
            heartbeats.add(task.worker_id, message, number / count)
        for number, name in enumerate(peers.clients):
            heartbeats.add(name, messages.ClientHeartbeat(client_id=name), number / count)
        # Until every client has the list of tasks, and every peer its interval.
        heartbeats.run(lambda: len(heartbeats.replied) == 2 * count)
        first_end = clock.now + max(2.0, limits.interval_between_client_heartbeats(count))
        heartbeats.run(lambda: clock.now >= first_end)
        start, busy, sent = clock.now, clock.busy, heartbeats.count
        heartbeats.run(lambda: clock.now >= start + _STEADY_SECONDS)
        found["load"] = (clock.busy - busy) / (clock.now - start)
        found["heartbeat"] = (clock.busy - busy) / (heartbeats.count - sent) * 1e6

        # The worker whose loss is noticed has been silent for the worker timeout.
        heartbeats.remove(workers[0])
        connections.silent.add(workers[0])
        before = max(heartbeats.replied[name] for name in peers.clients)
        state = core.state_machine
        assert state is not None
        heartbeats.run(lambda: workers[0] not in state.state.workers)
        noticed, busy = clock.now, clock.busy
        heartbeats.newer_than = before
        heartbeats.informed.clear()
        heartbeats.run(lambda: len(heartbeats.informed) == count)
        found["change"] = clock.now - noticed
        found["change_cpu"] = clock.busy - busy

        core.close()
        restarted = clock.now

        def restart() -> None:
            heartbeats.core = DispatcherCore(
                open_journal(config), limits, clock=clock, connections=connections
            )

        clock.charge(restart)
        found["replay"] = clock.now - restarted
        heartbeats.replied.clear()
        heartbeats.run(lambda: len(heartbeats.replied) == 2 * count - 1)
        found["failover"] = clock.now - restarted
        heartbeats.core.close()
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main(arguments: list[str]) -> int:
    """Measure each count in its own process; store the figures unless counts are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatcher_scale")
    parser.add_argument("--counts", type=int, nargs="+", help="counts to print; stores nothing")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.one)))
        return 0
    found: dict[int, dict[str, float]] = {}
    for count in options.counts or COUNTS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.dispatcher_scale", "--one", str(count)],
            stdout=subprocess.PIPE,
            check=True,
        )
        found[count] = json.loads(done.stdout)
        values = "  ".join(f"{name} {value:.3g}" for name, value in found[count].items())
        print(f"{count:>6}  {values}", flush=True)
    if not options.counts:
        for name, (title, unit) in CURVES.items():
            content = {
                "title": title,
                "unit": unit,
                "target": None,
                "machine": machine(),
                "rounds": {str(count): [values[name]] for count, values in found.items()},
            }
            (_DIRECTORY / f"scale_{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
