"""Discrete-event simulation of a data service that an autoscaling policy controls.

Consumers take batches and compute for the time that their demand curve gives; workers produce
batches into bounded buffers, and share their time between jobs. What the policy sees is measured
as by the dispatcher: totals arrive with heartbeats, and `headrace.serving.rates.Rate` averages
them. Time is virtual, and all randomness comes from a seed.

Rule 1. A worker costs worker-seconds from the request to start it until it has drained.
Rule 2. Demand is in workers: a demand of 3 needs the whole time of 3 workers of speed 1.
Rule 3. A consumer without demand pauses; a pause is not a wait.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from benchmarks.autoscaling_loads import GRACE, Load, SimulatedJob
from headrace.service.dispatcher.worker_scaling import JobLoad, ServiceLoad
from headrace.serving.rates import Rate

__all__ = ["Decide", "Outcome", "simulate"]

_BATCHES_PER_SECOND = 4.0
"""Batches that a worker of speed 1 produces per second."""
_BUFFERED_BATCHES = 4
"""Capacity of a task's buffer."""
_BATCHES_PER_SPLIT = 8
_WORKER_HEARTBEAT, _CLIENT_HEARTBEAT = 0.5, 1.0
_WORK_NOISE, _STEP_NOISE = 0.3, 0.1
"""Standard deviations of the logarithms of the times per batch."""
_PAUSE_CHECK = 0.25

Decide = Callable[[ServiceLoad], int]
"""Returns the number of wanted workers; called about once per second."""


@dataclass
class Outcome:
    """What a policy achieved.

    Attributes:
        worker_seconds: Cost.
        wait_seconds: Seconds that consumers waited, outside the grace periods.
        consumer_seconds: Seconds of all consumers, outside the grace periods.
        wanted: Time and value of each change of the wanted workers.
        max_workers: Highest number of workers, starting ones included.
    """

    worker_seconds: float = 0.0
    wait_seconds: float = 0.0
    consumer_seconds: float = 0.0
    wanted: list[tuple[float, int]] = field(default_factory=list)
    max_workers: int = 0

    @property
    def wait_ratio(self) -> float:
        """Fraction of the time that consumers waited, outside the grace periods."""
        return self.wait_seconds / max(self.consumer_seconds, 1e-9)

    @property
    def num_changes(self) -> int:
        """Number of changes of the wanted workers after the first."""
        return max(0, len(self.wanted) - 1)


class _Task:
    """Work of one worker on one job."""

    def __init__(self, worker: _Worker, job: _Job, now: float) -> None:
        self.worker, self.job = worker, job
        self.buffered = self.reported_buffered = 0
        self.is_computing = False
        self.waited, self.waits_since, self.reported = 0.0, now, 0.0
        self.wait_rate = Rate(now)

    def total_wait(self, now: float) -> float:
        return self.waited + (0.0 if self.is_computing else now - self.waits_since)

    def report(self, now: float) -> None:
        waited = self.total_wait(now)
        self.wait_rate.add(waited - self.reported, now)
        self.reported, self.reported_buffered = waited, self.buffered


class _Worker:
    def __init__(self, speed: float, now: float) -> None:
        self.speed, self.requested_at = speed, now
        self.is_registered = self.is_draining = False
        self.tasks: dict[int, _Task] = {}

    def num_computing(self) -> int:
        return sum(task.is_computing for task in self.tasks.values())


class _Client:
    def __init__(self, job: _Job, now: float) -> None:
        self.job = job
        self.waits_since: float | None = None
        self.waited = self.reported = 0.0
        self.taken = self.reported_taken = 0
        self.wait_rate, self.rate = Rate(now), Rate(now)

    def report(self, now: float) -> None:
        waited = self.waited + (0.0 if self.waits_since is None else now - self.waits_since)
        self.wait_rate.add(waited - self.reported, now)
        self.rate.add(self.taken - self.reported_taken, now)
        self.reported, self.reported_taken = waited, self.taken


class _Job:
    def __init__(self, number: int, spec: SimulatedJob) -> None:
        self.number, self.spec = number, spec
        self.clients: list[_Client] = []
        self.waiting: deque[_Client] = deque()
        self.tasks: list[_Task] = []
        self.to_produce = (
            math.inf if spec.num_splits is None else spec.num_splits * _BATCHES_PER_SPLIT
        )
        self.to_take = self.to_produce


class _Simulation:
    def __init__(self, load: Load, decide: Decide, seed: int) -> None:
        self.load, self.decide = load, decide
        self.random = random.Random(seed)
        self.now = 0.0
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.workers: list[_Worker] = []
        self.jobs: list[_Job] = []
        for number, spec in enumerate(load.jobs):
            self._at(spec.start, lambda spec=spec, number=number: self._start_job(number, spec))
        self.wanted = 0
        self._at(0.0, self._evaluate)
        self._at(0.5, self._scale)

    def run(self) -> Outcome:
        while self._events and self._events[0][0] < self.load.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = self.load.seconds
        for worker in self.workers:
            self.outcome.worker_seconds += self.now - worker.requested_at
        for job in list(self.jobs):
            self._end_job(job)
        return self.outcome

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _noise(self, sigma: float) -> float:
        return math.exp(self.random.gauss(-sigma * sigma / 2, sigma))

    # --- jobs and consumers -----------------------------------------------------------------------

    def _start_job(self, number: int, spec: SimulatedJob) -> None:
        job = _Job(number, spec)
        self.jobs.append(job)
        for worker in self.workers:
            if worker.is_registered and not worker.is_draining:
                self._start_task(worker, job)
        for _ in range(spec.num_clients):
            client = _Client(job, self.now)
            job.clients.append(client)
            self._at(self.now, lambda client=client: self._take(client))
            phase = self.random.random() * _CLIENT_HEARTBEAT
            self._at(self.now + phase, lambda client=client: self._client_heartbeat(client))
        if spec.end < math.inf:
            self._at(spec.end, lambda: self._end_job(job))

    def _end_job(self, job: _Job) -> None:
        if job not in self.jobs:
            return
        self.jobs.remove(job)
        for client in job.clients:
            self._end_wait(client)
        start, end = job.spec.start, self.now
        num_seconds = max(1, round(end - start))
        graced = sum(self.load.is_grace(start + second) for second in range(num_seconds))
        self.outcome.consumer_seconds += len(job.clients) * (num_seconds - graced)
        for task in job.tasks:
            task.worker.tasks.pop(job.number, None)

    def _take(self, client: _Client) -> None:
        """Take the next batch, or wait for it, or pause."""
        job = client.job
        if job not in self.jobs:
            return
        demand = job.spec.demand(self.now)
        if demand <= 0.0 and client.waits_since is None:
            self._at(self.now + _PAUSE_CHECK, lambda: self._take(client))
            return
        task = max(job.tasks, key=lambda task: task.buffered, default=None)
        if task is None or not task.buffered:
            client.waits_since = self.now
            job.waiting.append(client)
            return
        task.buffered -= 1
        if not task.is_computing:
            self._compute(task)
        self._step(client, demand)

    def _step(self, client: _Client, demand: float) -> None:
        job = client.job
        client.taken += 1
        job.to_take -= 1
        if job.to_take <= 0:
            self._end_job(job)
            return
        rate = max(demand, 0.01) * _BATCHES_PER_SECOND / job.spec.num_clients
        self._at(self.now + self._noise(_STEP_NOISE) / rate, lambda: self._take(client))

    def _end_wait(self, client: _Client) -> None:
        if client.waits_since is None:
            return
        since, client.waits_since = client.waits_since, None
        client.waited += self.now - since
        self.outcome.wait_seconds += self._outside_grace(since, self.now)

    def _outside_grace(self, since: float, until: float) -> float:
        """Return the part of a wait that counts."""
        for step in self.load.steps:
            if step <= since < step + GRACE:
                since = step + GRACE
            elif since < step < until:
                return (step - since) + self._outside_grace(step, until)
        return max(0.0, until - since)

    def _client_heartbeat(self, client: _Client) -> None:
        if client.job in self.jobs:
            client.report(self.now)
            self._at(self.now + _CLIENT_HEARTBEAT, lambda: self._client_heartbeat(client))

    # --- workers ----------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        worker = _Worker(self.random.uniform(*self.load.speeds), self.now)
        self.workers.append(worker)
        delay = self.random.uniform(*self.load.start_seconds)
        self._at(self.now + delay, lambda: self._register(worker))

    def _register(self, worker: _Worker) -> None:
        if worker.is_draining:
            return
        worker.is_registered = True
        for job in self.jobs:
            self._start_task(worker, job)
        phase = self.random.random() * _WORKER_HEARTBEAT
        self._at(self.now + phase, lambda: self._worker_heartbeat(worker))

    def _drain(self, worker: _Worker) -> None:
        worker.is_draining = True
        self._at(self.now + self.load.drain_seconds, lambda: self._stop(worker))

    def _stop(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        self.outcome.worker_seconds += self.now - worker.requested_at
        for task in worker.tasks.values():
            task.job.tasks.remove(task)

    def _start_task(self, worker: _Worker, job: _Job) -> None:
        task = worker.tasks[job.number] = _Task(worker, job, self.now)
        job.tasks.append(task)
        self._compute(task)

    def _compute(self, task: _Task) -> None:
        """Start to compute a batch, unless there is nothing to do."""
        if task.worker.is_draining or task.job.to_produce <= 0:
            return
        task.job.to_produce -= 1
        task.is_computing = True
        task.waited += self.now - task.waits_since
        sharing = task.worker.num_computing()
        seconds = self._noise(_WORK_NOISE) * sharing / (task.worker.speed * _BATCHES_PER_SECOND)
        self._at(self.now + seconds, lambda: self._computed(task))

    def _computed(self, task: _Task) -> None:
        task.is_computing, task.waits_since = False, self.now
        job = task.job
        if job not in self.jobs or task not in job.tasks:
            return
        if job.waiting:
            client = job.waiting.popleft()
            self._end_wait(client)
            self._step(client, job.spec.demand(self.now))
        else:
            task.buffered += 1
        if task.buffered < _BUFFERED_BATCHES:
            self._compute(task)

    def _worker_heartbeat(self, worker: _Worker) -> None:
        if worker in self.workers:
            for task in worker.tasks.values():
                task.report(self.now)
            self._at(self.now + _WORKER_HEARTBEAT, lambda: self._worker_heartbeat(worker))

    # --- dispatcher and launcher ------------------------------------------------------------------

    def _evaluate(self) -> None:
        wanted = self.decide(self._measure())
        if wanted != self.wanted or not self.outcome.wanted:
            self.outcome.wanted.append((self.now, wanted))
        self.wanted = wanted
        self._at(self.now + 1.0, self._evaluate)

    def _scale(self) -> None:
        active = [worker for worker in self.workers if not worker.is_draining]
        for _ in range(self.wanted - len(active)):
            self._start_worker()
        for worker in self.random.sample(active, max(0, len(active) - self.wanted)):
            self._drain(worker)
        self.outcome.max_workers = max(self.outcome.max_workers, len(self.workers))
        self._at(self.now + 1.0, self._scale)

    def _measure(self) -> ServiceLoad:
        registered = [w for w in self.workers if w.is_registered and not w.is_draining]
        return ServiceLoad(now=self.now, num_workers=len(registered), jobs=tuple(self._job_loads()))

    def _job_loads(self) -> Iterator[JobLoad]:
        now = self.now
        for job in self.jobs:
            tasks = [task for task in job.tasks if not task.worker.is_draining]
            remaining = None
            if job.spec.num_splits is not None:
                computing = sum(task.is_computing for task in job.tasks)
                remaining = math.ceil((job.to_produce + computing) / _BATCHES_PER_SPLIT)
            yield JobLoad(
                iteration_id=job.number,
                elements_per_second=sum(client.rate.read(now) for client in job.clients),
                client_wait_ratio=sum(min(1.0, c.wait_rate.read(now)) for c in job.clients)
                / len(job.clients),
                busy_workers=sum(1.0 - min(1.0, task.wait_rate.read(now)) for task in tasks),
                ready_batches=sum(task.reported_buffered for task in tasks),
                num_clients=len(job.clients),
                remaining_splits=remaining,
            )


def simulate(load: Load, decide: Decide, seed: int) -> Outcome:
    """Run a policy on a load.

    Args:
        load: Load and cluster.
        decide: Policy.
        seed: Seed of all randomness.
    """
    return _Simulation(load, decide, seed).run()
