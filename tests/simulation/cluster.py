"""Simulated cluster of the data service: a dispatcher, workers and clients; and one run of it.

`Cluster(scenario).run()` runs from the first event to the last check. A reading mode with its own
processes or invariants has a subclass.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self, TypeVar

from headrace.service.messages import JobOptions, OpenIteration, PutPlan, RegisterDataset
from tests.simulation import invariants
from tests.simulation.client import ClientProcess, Consumer, Reading
from tests.simulation.dispatcher import DispatcherProcess
from tests.simulation.faults import FaultInjector
from tests.simulation.kernel import Simulation, require
from tests.simulation.network import Network
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess

__all__ = ["DISPATCHER", "PUT_PLAN", "Cluster"]

E = TypeVar("E")

DISPATCHER = "dispatcher:1"
_PLAN = b"a pickled plan"
_DIGEST = hashlib.sha256(_PLAN).digest()
PUT_PLAN = PutPlan(digest=_DIGEST, offset=0, total_bytes=len(_PLAN), chunk=_PLAN)

_CHECK_SECONDS = 0.5
_THOROUGH = 0.02
"""Probability that a check compares the journal with the state."""


class Cluster:
    """All processes of one run.

    Args:
        scenario: Scenario of the run.
    """

    mode = "default"
    """Name for `python -m tests.simulation --mode`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.simulation = Simulation(scenario.seed)
        self.network = Network(self.simulation)
        self.dispatcher = DispatcherProcess(
            self.network, DISPATCHER, scenario.limits, is_durable=scenario.kind.is_durable
        )
        self.workers: list[WorkerProcess] = []
        self.clients: list[ClientProcess] = []
        self.faults = FaultInjector(self)
        self._num_done = self._num_checks = 0

    @classmethod
    def of_seed(cls, seed: int) -> Self:
        """Return the cluster of a seed in this mode."""
        return cls(cls.scenario_of(seed))

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        return scenario_of(seed)

    # --- processes ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes within a few seconds, in any order."""
        simulation, random, scenario = self.simulation, self.simulation.random, self.scenario
        simulation.call_later(random.random(), self.dispatcher.start)
        for _ in range(scenario.workers):
            simulation.call_later(random.random(), self.add_worker)
        for _ in range(scenario.clients):
            late = 3.0 if random.random() < 0.2 else 1.0
            simulation.call_later(random.random() * late, self.add_client)

    def add_worker(self) -> None:
        """Start another worker."""
        self.workers.append(self.new_worker(len(self.workers) + 1))
        self.workers[-1].start()

    def new_worker(self, number: int) -> WorkerProcess:
        return WorkerProcess(self.network, f"worker{number}", DISPATCHER, self.scenario.plan)

    def add_client(self) -> None:
        """Start another client."""
        self.clients.append(self.new_client(len(self.clients) + 1))
        self.clients[-1].start()

    def new_client(self, number: int, **options: Any) -> ClientProcess:
        scenario = self.scenario
        opening = OpenIteration(
            client_id="",
            dataset_id="",
            job_name="job" if scenario.is_named else None,
            epoch=(),
            seed=7,
            options=self.job_options(),
            exclusive_reason="the order" if scenario.in_order else "",
            **options,
        )
        before, consumer = (PUT_PLAN, self.registration()), self.consumer(number)
        name = f"client{number}"
        return ClientProcess(self.network, name, DISPATCHER, before, opening, consumer)

    def registration(self, **options: Any) -> RegisterDataset:
        """Return the request that registers the dataset."""
        usual = {"cardinality": -2, "num_splits": self.scenario.plan.size, "has_element_ids": True}
        return RegisterDataset(
            token="token",
            digest=_DIGEST,
            fingerprint="fingerprint",
            element_spec=b"spec",
            **usual | options,
        )

    def job_options(self) -> JobOptions:
        """Return the options of the job."""
        scenario, in_order = self.scenario, self.scenario.in_order
        return JobOptions(
            processing_mode=int(scenario.mode),
            visitation=scenario.visitation,
            ordered=in_order,
            partition_mode="ordered" if in_order else "",
            num_splits=scenario.plan.size if in_order else None,
        )

    def consumer(self, number: int) -> Consumer:
        """Return the options of a client's reading."""
        scenario = self.scenario
        return Consumer(
            epochs=scenario.epochs,
            max_outstanding=scenario.max_outstanding,
            reorder_limit=scenario.reorder_limit,
            think=scenario.think,
            counts_elements=scenario.counts_elements,
        )

    @property
    def active_workers(self) -> list[WorkerProcess]:
        """Workers that are up, and not draining or stopping."""
        return [each for each in self.workers if each.is_up and not each.is_shutting_down]

    @property
    def readings(self) -> list[Reading]:
        return [reading for client in self.clients for reading in client.readings]

    def readings_by_iteration(self) -> dict[int, list[Reading]]:
        """Return the opened readings by iteration."""
        found: dict[int, list[Reading]] = defaultdict(list)
        for reading in self.readings:
            if reading.iteration_id > 0:
                found[reading.iteration_id].append(reading)
        return found

    def journaled(self, *types: type[E]) -> list[E]:
        """Return all events of these types that the dispatcher ever journaled."""
        return [each for each in self.dispatcher.disk.history if isinstance(each, types)]

    def next_check_number(self) -> int:
        """Return the number of the next check."""
        self._num_checks += 1
        return self._num_checks

    @property
    def is_over(self) -> bool:
        """Whether all clients are done."""
        # Evaluated after each event: a client that is done stays so and is not checked again.
        while self._num_done < len(self.clients) and self.clients[self._num_done].is_done:
            self._num_done += 1
        return self.scenario.clients <= len(self.clients) == self._num_done

    # --- one run --------------------------------------------------------------------------------

    def run(self, *, last: int = 40) -> None:
        """Run the scenario, and check all invariants.

        Raises:
            AssertionError: If one fails; its notes have the seed, the scenario and the last
                lines of the trace.
        """
        with self._report(last):
            self._run()

    def run_for(self, seconds: float, arrange: Callable[[], None] = lambda: None) -> None:
        """Run with the arranged faults only; all clients must be done within `seconds`."""
        with self._report():
            self.start()
            arrange()
            self.simulation.run(seconds, stop=lambda: self.is_over)
            require(self.is_over, "all readings end in time")
            self.check_at_end()

    def _report(self, last: int = 40) -> Any:
        seed = self.scenario.seed
        again = f"python -m tests.simulation {seed} --last 100000 --mode {self.mode}"
        return self.simulation.report(again, self.scenario, last=last)

    def _run(self) -> None:
        simulation = self.simulation
        self.start()
        self.faults.start()
        self._check_regularly()
        simulation.run(self.deadline(), stop=lambda: self.is_over)
        invariants.check_now(self, thoroughly=True)
        late = [each for each in self.clients if not each.is_done]
        require(not late, "all readings end", [each.name for each in late], of=late)
        if self.scenario.kind.is_durable:
            self._wait_for_garbage_collection()
            invariants.check_retention(self)
        self.check_at_end()

    def _check_regularly(self) -> None:
        thoroughly = self.simulation.random.random() < _THOROUGH
        invariants.check_now(self, thoroughly=thoroughly)
        self.simulation.call_later(_CHECK_SECONDS, self._check_regularly)

    def check_at_end(self) -> None:
        """Check what must hold once all clients are done."""
        invariants.check_at_end(self)

    def may_fail(self, reading: Reading) -> bool:
        """Return whether a reading may have failed for a reason specific to this mode."""
        return False

    def deadline(self) -> float:
        """Return the time by which all clients must be done."""
        scenario, limits, plan = self.scenario, self.scenario.limits, self.scenario.plan
        elements = plan.size * max(1, plan.max_split_elements)
        work = elements * plan.cost * (scenario.workers + 3) + 10 * len(plan.slow) * plan.slowness
        reading = elements * scenario.think * 3
        waits = 3 * limits.worker_timeout + 2 * limits.client_timeout + 2 * limits.report_timeout
        return scenario.fault_seconds + 200.0 + scenario.epochs * (work + reading + waits)

    def _wait_for_garbage_collection(self) -> None:
        """Run until the dispatcher has had time to remove all clients.

        A client that crashed, or whose last request was lost, is kept until its lease expires. The
        lease starts again if the dispatcher was down, and a paused process removes nothing.
        """
        simulation, limits = self.simulation, self.scenario.limits
        simulation.run(
            math.inf,
            stop=lambda: (
                self.faults.are_over
                and self.dispatcher.is_running
                and not any(worker.is_paused for worker in self.workers)
            ),
        )
        timeout = limits.client_timeout + (limits.gc_timeout or 0.0) + 5.0
        due = simulation.now + timeout
        while simulation.now < due:
            # No client expires sooner than this.
            simulation.run(min(due, simulation.now + limits.client_timeout / 2))
            # A delayed message may have renewed a client's lease.
            heartbeats = self.dispatcher.dispatcher.soft_state.client_heartbeats.values()
            due = max([due, *(each + timeout for each in heartbeats)])
