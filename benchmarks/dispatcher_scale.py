"""Curves of one dispatcher with up to 10,000 workers and 10,000 clients, in virtual time.

    python -m benchmarks.dispatcher_scale                 measure, then render; some minutes
    python -m benchmarks.dispatcher_scale --counts 300    print other counts; stores nothing
    python -m benchmarks.dispatcher_scale --full-lists    print the costs without lists of changes

So many peers do not fit on one machine. The dispatcher's core and its journal are real, while time
is virtual: a clock advances by the processor time that the core needs for the requests that are
due, or to the next request if none is. Peers send the heartbeats of real ones at the intervals that
the dispatcher requires, and clients report on lost tasks. Replies are encoded as for sending.
Sockets, handshakes and encryption are not included: a real dispatcher reaches its limits earlier.

All peers share one job with DYNAMIC sharding. Each count is measured in its own process:

heartbeat   processor time of the core per heartbeat, in microseconds
load        fraction of one core that the heartbeats of idle peers use
splits      durable splits assigned per second of processor time
opening     mean processor time for one client to open the job, in milliseconds
change      virtual seconds after the loss of a worker until all clients know it and have reported
change_cpu  processor time of the core in these seconds
failover    virtual seconds from the restart of the dispatcher until each peer had a reply
replay      processor time to read the journal in that time
memory      peak resident memory of the process, in megabytes
mass_loss   processor time to notice the loss of a tenth of the workers at the same time

`mass_loss_memory` is the peak memory after that. Each lost task then lists all clients, which must
report on it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
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
from benchmarks.report import machine, render
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.core import DispatcherCore, open_journal
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.transport.envelope import encode

__all__ = ["COUNTS", "CURVES", "main", "measure"]

COUNTS = (100, 1000, 3000, 10_000)
CURVES = {
    "heartbeat": ("Processor time of the dispatcher per heartbeat", "microseconds"),
    "load": ("Fraction of a core used by the heartbeats of idle peers", "cores"),
    "splits": ("Durable splits assigned per second of processor time", "splits per second"),
    "opening": ("Processor time to open a job, per client", "milliseconds"),
    "change": ("Time until all clients know of and reported on a lost worker", "seconds"),
    "change_cpu": ("Processor time for one lost worker", "seconds"),
    "failover": ("Time from a restart until each peer had a reply", "seconds"),
    "replay": ("Processor time to resume from the journal", "seconds"),
    "memory": ("Peak memory of the dispatcher", "megabytes"),
    "mass_loss": ("Processor time to notice the loss of a tenth of the workers", "seconds"),
    "mass_loss_memory": ("Peak memory after the loss of a tenth of the workers", "megabytes"),
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
        #: Reports of clients on lost tasks, sent before their next heartbeat.
        self._reports: list[messages.ReportDelivery] = []
        self._due: list[tuple[float, str]] = []
        self._messages: dict[str, messages.WorkerHeartbeat | messages.ClientHeartbeat] = {}
        self._next_tick = 0.0
        self.count = 0
        self.tick_seconds = 0.0
        #: Peers that had a reply.
        self.replied: set[str] = set()
        #: Clients that have reported on a lost task.
        self.reported: set[str] = set()

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
                busy = clock.busy
                clock.charge(self.core.tick)
                self.tick_seconds += clock.busy - busy
                self._next_tick = clock.now + self._limits.tick_interval
            self._send_reports()
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

    def _send_reports(self) -> None:
        while self._reports:
            batch = [_EncodedRequest(report) for report in self._reports[:_MAX_BATCH]]
            self._clock.charge(lambda batch=batch: self.core.handle(batch))
            for report in self._reports[:_MAX_BATCH]:
                self.reported.add(report.client_id)
                # A real client sends its next heartbeat as soon as its report was received.
                heapq.heappush(self._due, (self._clock.now, report.client_id))
            del self._reports[:_MAX_BATCH]

    def _receive(self, name: str, reply: Any) -> None:
        self.count += 1
        self.replied.add(name)
        message = self._messages[name]
        if isinstance(message, messages.ClientHeartbeat):
            self._messages[name] = msgspec.structs.replace(message, known_version=reply.version)
            if reply.reports_needed:
                self._reports += [
                    messages.ReportDelivery(client_id=name, task_id=task_id, delivered=())
                    for task_id in reply.reports_needed
                ]
                return
        heapq.heappush(self._due, (self._clock.now + reply.heartbeat_interval, name))


def measure(count: int, *, accepts_changes: bool = True) -> dict[str, float]:
    """Measure all curves for `count` workers and an equal number of clients.

    Args:
        count: Number of peers of each kind.
        accepts_changes: Whether clients accept lists of changed tasks.
    """
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
            message = messages.ClientHeartbeat(client_id=name, accepts_changes=accepts_changes)
            heartbeats.add(name, message, number / count)
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
        state = core.state_machine
        assert state is not None
        heartbeats.run(lambda: workers[0] not in state.state.workers)
        noticed, busy = clock.now, clock.busy
        heartbeats.run(lambda: len(heartbeats.reported) == count)
        found["change"] = clock.now - noticed
        found["change_cpu"] = clock.busy - busy

        # Until all clients know the last version: others receive all tasks after a restart.
        settled = clock.now + max(2.0, limits.interval_between_client_heartbeats(count))
        heartbeats.run(lambda: clock.now >= settled)
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

        found["memory"] = _peak_megabytes()

        # Without clients: each would report on each lost task.
        lost = workers[1 : 1 + max(1, count // 10)]
        for name in (*lost, *peers.clients):
            heartbeats.remove(name)
        connections.silent.update(lost)
        state = heartbeats.core.state_machine
        assert state is not None
        ticks = heartbeats.tick_seconds
        heartbeats.run(lambda: not any(name in state.state.workers for name in lost))
        found["mass_loss"] = heartbeats.tick_seconds - ticks
        heartbeats.core.close()
    found["mass_loss_memory"] = _peak_megabytes()
    return found


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str]) -> int:
    """Measure each count in its own process; store the figures unless counts are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatcher_scale")
    parser.add_argument("--counts", type=int, nargs="+", help="counts to print; stores nothing")
    parser.add_argument(
        "--full-lists", action="store_true", help="print costs without lists of changes"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        logging.disable(logging.WARNING)  # a message per lost worker
        print(json.dumps(measure(options.one, accepts_changes=not options.full_lists)))
        return 0
    found: dict[int, dict[str, float]] = {}
    for count in options.counts or COUNTS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.dispatcher_scale", "--one", str(count)]
            + ["--full-lists"] * options.full_lists,
            stdout=subprocess.PIPE,
            check=True,
        )
        found[count] = json.loads(done.stdout)
        values = "  ".join(f"{name} {value:.3g}" for name, value in found[count].items())
        print(f"{count:>6}  {values}", flush=True)
    if not (options.counts or options.full_lists):
        for name, (title, unit) in CURVES.items():
            content = {
                "title": title,
                "unit": unit,
                "machine": machine(),
                "rounds": {str(count): [values[name]] for count, values in found.items()},
            }
            (_DIRECTORY / f"scale_{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        render(_DIRECTORY.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
