"""Who is in a world: one dispatcher, workers, clients, and the network between them."""

from __future__ import annotations

import hashlib

from headrace.service.messages import OpenIteration, PutPlan, RegisterDataset, Terms
from headrace.service.worker.hand_out import Bounds
from tests.simulation.client import ClientProcess
from tests.simulation.dispatcher import DispatcherProcess
from tests.simulation.network import Network
from tests.simulation.scenario import Scenario
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World

__all__ = ["BOUNDS", "Cast"]

BOUNDS = Bounds(client_bytes=4 << 20, total_bytes=8 << 20)
"""Of each worker's tasks."""
_DISPATCHER = "dispatcher:1"
_PLAN = b"a pickled plan"


class Cast:
    """Everybody in one run.

    Args:
        scenario: What the run is.
    """

    option = ""
    """Of `python -m tests.simulation`, which runs a seed with such a cast."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.network = Network(self.world)
        self.dispatcher = DispatcherProcess(
            self.network, _DISPATCHER, scenario.limits, is_durable=scenario.promises.is_durable
        )
        self.workers: list[WorkerProcess] = []
        self.clients: list[ClientProcess] = []
        self._done = self._looks = 0

    def begin(self) -> None:
        """Start everybody, within a second, in any order."""
        world, chance, scenario = self.world, self.world.chance, self.scenario
        world.at(chance.random(), self.dispatcher.begin)
        for _ in range(scenario.workers):
            world.at(chance.random(), self.add_worker)
        for _ in range(scenario.clients):
            late = 3.0 if chance.random() < 0.2 else 1.0
            world.at(chance.random() * late, self.add_client)

    def add_worker(self) -> WorkerProcess:
        """Start another worker."""
        worker = WorkerProcess(
            self.network,
            f"worker{len(self.workers) + 1}",
            _DISPATCHER,
            lambda _: self.scenario.plan,
            BOUNDS,
        )
        self.workers.append(worker)
        worker.begin()
        return worker

    def add_client(self) -> ClientProcess:
        """Start another client."""
        scenario, plan = self.scenario, self.scenario.plan
        number = len(self.clients) + 1
        digest = hashlib.sha256(_PLAN).digest()
        client = ClientProcess(
            self.network,
            f"client{number}",
            _DISPATCHER,
            before=(
                PutPlan(digest=digest, offset=0, total=len(_PLAN), part=_PLAN),
                RegisterDataset(
                    token="token",
                    digest=digest,
                    fingerprint="fingerprint",
                    element_spec=b"spec",
                    cardinality=-2,
                    positions=plan.size,
                    origins=True,
                ),
            ),
            opening=OpenIteration(
                client_id="",
                dataset_id="",
                job_name="job" if scenario.is_named else None,
                pass_number=(),
                seed=7,
                terms=Terms(
                    processing_mode=int(scenario.mode),
                    num_consumers=scenario.clients if scenario.in_rounds else None,
                    visitation=scenario.visitation,
                    ordered=scenario.in_order,
                    half="in order" if scenario.in_order else "",
                    units=plan.size if scenario.in_order else None,
                ),
                consumer_index=number - 1 if scenario.in_rounds else None,
                whole_stream="the order" if scenario.in_order else "",
            ),
            passes=scenario.passes,
            max_outstanding=scenario.max_outstanding,
            ahead=scenario.ahead,
            think=scenario.think,
            counts_elements=scenario.counts_elements,
        )
        self.clients.append(client)
        client.begin()
        return client

    @property
    def staying(self) -> list[WorkerProcess]:
        """Workers that are there, and not on their way out."""
        return [each for each in self.workers if each.is_up and not each.is_leaving]

    def next_look(self) -> int:
        """Return the number of another look at all of them."""
        self._looks += 1
        return self._looks

    @property
    def is_over(self) -> bool:
        """Whether no client reads any more."""
        # Asked after each event: who is done stays so, and is not looked at again.
        while self._done < len(self.clients) and self.clients[self._done].is_done:
            self._done += 1
        return self.scenario.clients <= len(self.clients) == self._done
