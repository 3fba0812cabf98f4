"""Simulation of collectives: connections break, processes crash and restart."""

from __future__ import annotations

import pytest

from headrace.distribute.collective_server.state import (
    CollectiveOutcome,
    CollectiveState,
    Contribution,
    RetryAfter,
)
from headrace.errors import HeadraceError, UnavailableError
from headrace.serving.request_window import RequestWindow
from tests.simulation.kernel import Process, Simulation, require
from tests.simulation.network import Conditions, Link, Network

NUM_COLLECTIVES = 30
AT_ONCE = 4
ADDRESS = "server:1"


class ServerProcess(Process):
    """The server: the collective state, and requests held until their collective has a result."""

    def __init__(self, network, workers):
        super().__init__(network, "server")
        self.state = CollectiveState(
            [f"worker {rank}" for rank in range(workers)], lambda _, v: tuple(v)
        )
        self.held = {}
        #: The latest connection of each worker, by rank.
        self.latest = {}

    def start(self):
        super().start()
        self.network.listen(
            self,
            ADDRESS,
            self.handle,
            accepts_repeats=True,
            on_client_lost=self.client_lost,
        )

    def handle(self, request):
        rank, process_id, number, done = request.message
        if request.connection.number < self.latest.get(rank, 0):
            return  # late, through an abandoned connection
        self.latest[rank] = request.connection.number
        if not request.is_repeat:
            self.held[rank, number] = request
        value = Contribution(f"collective {number}", "all", (rank, process_id, number))
        now = self.simulation.now
        self.answer(self.state.contribute(rank, process_id, number, done, value, now))

    def client_lost(self, connection):
        for rank, number in list(self.latest.items()):
            if number == connection.number:
                self.answer(self.state.disconnected(rank, self.simulation.now))

    def answer(self, answers):
        for rank, number, answer in answers:
            if (request := self.held.pop((rank, number), None)) is not None:
                request.reply(answer)


class Worker(Process):
    """Contributes to all collectives, some at once; repeats after a lost connection."""

    def __init__(self, network, rank):
        super().__init__(network, f"worker {rank}")
        self.rank = rank

    def start(self):
        super().start()
        self.window = RequestWindow()
        self.results = []
        self.failure = None
        self.asked = 0
        self.numbers = {}
        self.link = Link(self.network, self, ADDRESS, self.on_reply, self.lost)
        self.call_later(self.simulation.random.random(), self.act)

    def act(self):
        if self.failure:
            return
        if self.window.num_unanswered < AT_ONCE and self.asked < NUM_COLLECTIVES:
            self.send(self.window.allocate())
            self.asked += 1
        if len(self.results) < NUM_COLLECTIVES:
            self.call_later(self.simulation.random.expovariate(2.0), self.act)

    def send(self, number):
        if self.window.is_unanswered(number):
            message = self.rank, str(self.incarnation), number, self.window.acknowledged
            self.numbers[self.link.send(message)] = number

    def lost(self, error):
        for number in self.window.numbers_to_resend():
            self.send(number)

    def on_reply(self, ticket, answer, content):
        number = self.numbers.pop(ticket)
        if isinstance(answer, RetryAfter):
            self.call_later(answer.seconds, lambda: self.send(number))
        elif isinstance(answer, HeadraceError):
            self.failure = self.failure or answer
        else:
            for taken, each in self.window.accept(number, answer):
                require(taken == len(self.results), "results come in order", taken, of=[self])
                self.results.append(each.value)
                self.window.mark_consumed(taken)


class Session:
    """Workers and the server."""

    def __init__(self, seed, workers):
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.network.conditions = Conditions(latency=0.05, late=0.1, lateness=0.3, twice=0.2)
        self.server = ServerProcess(self.network, workers)
        self.state = self.server.state
        self.server.start()
        self.workers = [Worker(self.network, rank) for rank in range(workers)]
        for worker in self.workers:
            worker.start()

    def disturb(self, until):
        """Break connections, and pause the server, at random times."""
        random = self.simulation.random
        faults = {
            "break a connection": self.break_connection,
            "pause the server": lambda: self.server.pause(random.uniform(0.0, 1.0)),
        }
        self.simulation.inject_faults(faults, mean_seconds=1.0, until=until)

    def break_connection(self):
        # A worker without pending requests does not notice, and counts as lost (Rule 5).
        worker = self.simulation.random.choice(self.workers)
        if worker.is_up and worker.link.unanswered:
            self.network.reset(worker)

    def time_out_waits(self):
        """Time out all waiting workers."""
        for worker in self.workers:
            if worker.is_up and not worker.failure and worker.window.num_unanswered:
                number = worker.window.numbers_to_resend()[0]
                missing = self.state.describe_missing(number, self.simulation.now)
                self.server.answer(self.state.fail_missing(number, 300.0, missing))
                self.simulation.run(self.simulation.now + 300.0)


def expected(workers, process_ids=None):
    process_ids = process_ids or ["1"] * workers
    return [
        tuple((rank, process_ids[rank], number) for rank in range(workers))
        for number in range(NUM_COLLECTIVES)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_all_workers_get_equal_results_in_order_despite_faults(seed):
    workers = 2 + seed % 3
    session = Session(seed, workers)
    with session.simulation.report():
        session.disturb(until=15.0)
        session.simulation.run(300.0)
        for worker in session.workers:
            assert worker.failure is None
            assert worker.results == expected(workers)
        assert session.state.num_results <= AT_ONCE + 1


@pytest.mark.parametrize("seed", range(40))
def test_a_dead_worker_is_named_to_all_others_and_no_wait_hangs(seed):
    workers = 2 + seed % 3
    session = Session(1000 + seed, workers)
    simulation = session.simulation
    with simulation.report():
        victim = simulation.random.choice(session.workers)
        simulation.call_later(simulation.random.uniform(0.5, 8), victim.crash)
        simulation.run(300.0)
        has_begun = session.state.has_started  # before the start, another process may replace it
        assert has_begun or all(worker.failure is None for worker in session.workers)
        session.time_out_waits()
        for worker in session.workers:
            if worker is not victim:
                assert isinstance(worker.failure, UnavailableError)
                assert victim.name in str(worker.failure)
            assert worker.results == expected(workers)[: len(worker.results)]
        assert all(isinstance(each, CollectiveOutcome) for each in session.state._results.values())


@pytest.mark.parametrize("seed", range(40))
def test_no_collective_mixes_two_processes_of_a_restarted_worker(seed):
    workers = 2 + seed % 3
    session = Session(2000 + seed, workers)
    simulation = session.simulation
    with simulation.report():
        victim = simulation.random.choice(session.workers)
        crash_at = simulation.random.uniform(0.5, 8)
        simulation.call_later(crash_at, victim.crash)
        simulation.run(crash_at + 0.001)
        has_begun = session.state.has_started
        victim.start_in(simulation.random.uniform(0.0, 0.3))
        simulation.run(300.0)
        process_ids = ["1"] * workers
        if not has_begun:
            process_ids[victim.rank] = "2"
        for worker in session.workers:
            assert worker.results == expected(workers, process_ids)[: len(worker.results)]
            if has_begun:
                assert isinstance(worker.failure, UnavailableError)
                assert victim.name in str(worker.failure)
            else:
                assert worker.failure is None
                assert len(worker.results) == NUM_COLLECTIVES
