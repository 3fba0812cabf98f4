"""A coordinator, workers and parameter servers on the simulation kernel (`tests/simulation`).

The coordinator core, the worker queues and the write keys of servers are the real ones. Threads,
users' functions, and the rest of the parameter store are simulated.

    messages are delayed; connections break, and lose their pending requests
    workers crash and restart, or pause and resume after they were lost
    writes are delayed, duplicated, reordered, and arrive after their worker was fenced
    servers pause; with replicas they crash, and count as lost (`replicated_store`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.coordinator.closure import Closure, ClosureResult, Payload
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.coordinator_core import CoordinatorCore
from headrace.coordinator.messages import (
    AcknowledgeResult,
    AwaitSessionEnd,
    CallSpec,
    CancelClosure,
    EndSession,
    FetchedResult,
    FetchResult,
    LoadFunction,
    PackedFunction,
    ReleaseResources,
    RunClosure,
    RunReply,
    SessionStarted,
    StartSession,
    WorkerCall,
    WorkerResource,
)
from headrace.coordinator.worker_queue import WorkerQueue, WorkerTask
from headrace.errors import AbortedError, CancelledError, HeadraceError, UnavailableError
from headrace.parameter_server.specs import WriteKey
from headrace.parameter_server.write_context import ClosureRun, WriteContext
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.rpc import Done
from headrace.transport.envelope import decode_error, encode_error
from tests.coordinator.invariants import check
from tests.coordinator.replicated_store import TwoServers, UnknownOutcomeError
from tests.simulation.kernel import SILENCE_TIMEOUT, Process, Simulation, require
from tests.simulation.network import Conditions, Link, Network, Request

FUNCTIONS = [
    PackedFunction(b"function%d" % number, f"function {number}", Payload(b"code"))
    for number in range(3)
]
ITERATOR = PackedFunction(b"iterator", "iterator", Payload(b"code"))


@dataclass
class Store:
    """Contents of the servers: counters, written with write keys."""

    #: Variable -> value.
    values: dict[str, int] = field(default_factory=dict)
    #: (closure, variable, number) -> number of times that the write was applied.
    applied: dict[tuple[int, str, int], int] = field(default_factory=dict)
    #: Closures of each push of a round that was applied.
    rounds: list[tuple[int, ...]] = field(default_factory=list)
    #: For each round, the number of earlier rounds on the servers at each of its steps.
    found: list[set[int]] = field(default_factory=list)
    keys: WriteKeys = field(default_factory=WriteKeys)

    @property
    def contents(self) -> Store:
        return self

    def carry_out(self, client: Any, do: Callable[[Store], None]) -> None:
        do(self)

    def copied(self, deeply: Callable[[Any], Any]) -> Store:
        """Return a deep copy."""
        values, applied, rounds, found = deeply(
            (self.values, self.applied, self.rounds, self.found)
        )
        return Store(values, applied, rounds, found, WriteKeys(self.keys.state()))

    def write(self, written: WriteKey, variable: str) -> None:
        """Apply a write once; raise AbortedError if it is rejected."""
        if self.keys.find_answer(written, variable) is not None:
            return
        self.keys.record(written, variable, Done())
        key = (written.closure, variable, written.number)
        self.applied[key] = self.applied.get(key, 0) + 1
        self.values[variable] = self.values.get(variable, 0) + 1

    def push_round(self, last: int, steps: list[Payload]) -> None:
        """Apply a round once, with the write key of its last closure."""
        key = WriteKey(coordinator_term=1, closure=last, worker_session=0, number=1 << 32)
        taken = [tuple(map(int, each.data.split(b":"))) for each in steps]
        numbers = tuple(number for number, _ in taken)
        try:
            is_new = self.keys.find_answer(key, "round") is None
        except AbortedError:
            assert numbers in self.rounds, "it was repeated after its keys were forgotten"
            return
        if is_new:
            self.keys.record(key, "round", Done())
            self.rounds.append(numbers)
            self.found.append({found for _, found in taken})


class ServerProcess(Process):
    """The servers, as one process; with replicas, `contents` has several.

    A request is (client, operation on the store). One in ten is applied but not answered, because
    its connection breaks.
    """

    address = "server:1"

    def __init__(self, network: Network, contents: Store | TwoServers) -> None:
        super().__init__(network, "server")
        self.contents = contents

    def start(self) -> None:
        super().start()
        self.network.listen(self, self.address, self._handle, accepts_repeats=True)

    def _handle(self, request: Request) -> None:
        try:
            self.contents.carry_out(*request.message)
        except UnknownOutcomeError:
            request.fail(UnavailableError("another server is to be asked"))
        except AbortedError as error:
            request.fail(error)
        else:
            if self.simulation.random.random() < 0.1:
                request.drop()
            else:
                request.reply(Done())


class ServerClient:
    """Requests of one process to the servers, each repeated until it is answered.

    Several connections carry them, so they overtake each other.
    """

    def __init__(self, process: Process, name: Any) -> None:
        self._process, self._name = process, name
        #: (operation, callback of the reply) by connection and request id.
        self._asked: list[dict[int, tuple[Callable[[Store], None], Callable[[Any], None]]]] = []
        self._links: list[Link] = []
        for number in range(3):
            answered, lost = partial(self._answered, number), partial(self._lost, number)
            network = process.network
            self._links.append(Link(network, process, ServerProcess.address, answered, lost))
            self._asked.append({})

    def ask(self, do: Callable[[Store], None], then: Callable[[Any], None]) -> None:
        """Apply an operation to the store; call `then` with the result or the error."""
        number = self._process.simulation.random.randrange(len(self._links))
        ticket = self._links[number].send((self._name, do))
        self._asked[number][ticket] = do, then

    def _answered(self, number: int, ticket: int, answer: Any, content: Any) -> None:
        do, then = self._asked[number].pop(ticket)
        if isinstance(answer, UnavailableError):
            self._process.call_later(0.05, lambda: self.ask(do, then))
        else:
            then(answer)

    def _lost(self, number: int, error: UnavailableError) -> None:
        asked, self._asked[number] = self._asked[number], {}
        for do, then in asked.values():
            self.ask(do, then)


@dataclass
class Plan:
    """Behaviour of a closure: writes to these variables, then a return or an error."""

    writes: list[str]
    fails: bool
    is_large: bool
    draws: bool
    steps: bool = True

    def numbered_writes(self) -> list[tuple[str, int]]:
        """Return (variable, number of this closure's earlier writes to it) for each write."""
        return [(each, self.writes[:place].count(each)) for place, each in enumerate(self.writes)]


class WorkerProcess(Process):
    """A worker, which crashes and restarts.

    Args:
        cluster: Cluster of the worker.
        number: Number of the worker.
        threads: Number of closures that it runs at a time.
    """

    def __init__(self, cluster: Cluster, number: int, threads: int) -> None:
        super().__init__(cluster.network, f"worker {number}")
        self.cluster = cluster
        self.number = number
        self.threads = threads
        self.address = f"worker:{number}"

    def start(self) -> None:
        super().start()
        self._forget_session()
        self.network.listen(self, self.address, self._handle)

    def _forget_session(self) -> None:
        self.session: StartSession | None = None
        self.agenda: WorkerQueue[Callable[[Any], None]] = WorkerQueue()
        self.functions: set[bytes] = set()
        self.attending: list[Callable[[Any], None]] = []
        self.iterators: dict[int, int] = {}

    def _handle(self, request: Request) -> None:
        """Handle a request; reply with a result or an error."""
        message, answer = request.message, request.reply
        if isinstance(message, StartSession):
            self._end_session()
            self._forget_session()
            self.session = message
            self.servers = ServerClient(self, message.session)
            answer(SessionStarted())
            return
        if self.session is None or self.session.session != message.session:
            answer(AbortedError("another session"))
            return
        match message:
            case AwaitSessionEnd():
                self.attending.append(answer)
            case LoadFunction():
                self.functions.add(message.digest)
                answer(Done())
            case RunClosure():
                self.agenda.add(message, [], answer)
                self._start_next()
            case CancelClosure():
                reply, others = self.agenda.cancel(message)
                for request_of_other, ran in others:
                    request_of_other(ran)
                if reply.is_dropped and message.mode == "abandon":
                    self._start_next()
                answer(reply)
            case FetchResult():
                answer(FetchedResult(value=self.agenda.results[message.number].data))
            case AcknowledgeResult():
                self.agenda.results.pop(message.number)
                answer(Done())
            case ReleaseResources() | EndSession():
                answer(Done())

    def _end_session(self) -> None:
        for answer, _ in self.agenda.close():
            answer(AbortedError("another session"))
        for answer in self.attending:
            answer(AbortedError("another session"))

    def _start_next(self) -> None:
        while len(self.agenda.running) < self.threads and (task := self.agenda.start_next()):
            assert self.session is not None
            self._continue(self._steps(task, self.session, self.agenda, self.servers))

    def _continue(self, steps: Iterator[float]) -> None:
        """Run a closure up to its next wait."""
        wait = next(steps, None)
        if wait is not None:
            self.call_later(wait, lambda: self._continue(steps))

    def _steps(
        self,
        task: WorkerTask[Callable[[Any], None]],
        session: StartSession,
        agenda: WorkerQueue[Any],
        servers: ServerClient,
    ) -> Iterator[float]:
        cluster, run, iterators = self.cluster, task.message, self.iterators
        if run.digest not in self.functions:
            self._end(task, agenda, RunReply(is_function_missing=True))
            return
        attempt = task.write_context = WriteContext(
            ClosureRun(session.term, run.number, session.session)
        )
        if task.writes_rejected:
            task.reject_writes()
        yield self.simulation.random.expovariate(1 / cluster.mean_seconds)
        if run.resource:
            iterators[run.resource] = int(run.arguments or b"0")
            self._end(task, agenda, RunReply())
            return
        plan = cluster.plans[run.number]
        cluster.note_first_read(run.number)
        step = b"%d:%d" % (run.number, len(cluster.store.rounds))
        error: Exception | None = None
        drawn = None
        if plan.draws:
            while 1 not in iterators:
                yield 0.01  # another thread is creating it
            drawn = iterators[1]
            iterators[1] = drawn + 1
        for variable in plan.writes:
            try:
                key = attempt.next_key(variable)
            except CancelledError as refused:
                error = refused
                break
            answers: list[Any] = []
            write = partial(Store.write, written=key, variable=variable)
            servers.ask(write, answers.append)
            pause = 0.001
            while not answers:
                yield pause
                pause = min(0.1, 1.5 * pause)
            if isinstance(answers[0], HeadraceError):
                error = answers[0]
                break
        if error is None and plan.fails:
            error = ValueError(f"closure {run.number}")
        value = (
            b"%d" % run.number if drawn is None else b"%d:%d:%d" % (run.number, self.number, drawn)
        )
        ran = RunReply(
            value=value,
            error=b"" if error is None else encode_error(error),
            nbytes=1 << 20 if plan.is_large and error is None else 0,
            has_written=attempt.has_written,
            optimizer_steps=step
            if session.collects_steps and plan.steps and error is None
            else b"",
            seconds=0.01,
            iterator_states={} if drawn is None else {1: b"%d" % iterators[1]},
        )
        self._end(task, agenda, ran)

    def _end(self, task: WorkerTask[Any], agenda: WorkerQueue[Any], ran: RunReply) -> None:
        if not agenda.finish(task):
            return
        if ran.nbytes:
            agenda.results[task.message.number] = Payload(ran.value)
            ran = msgspec.structs.replace(ran, value=b"")
        if task.request is not None:
            task.request(ran)
        if agenda is self.agenda:
            self._start_next()


class CoordinatorProcess(Process):
    """The coordinator core and its connections to workers and servers.

    Args:
        network: Simulated network.
        core: The core.
        check: Called after each step of the core.
    """

    def __init__(self, network: Network, core: CoordinatorCore, check: Callable[[], None]) -> None:
        super().__init__(network, "coordinator")
        self.core = core
        self._check = check
        self.links: dict[int, Link] = {}
        self._calls: dict[int, dict[int, WorkerCall]] = {}
        self._servers = ServerClient(self, "coordinator")

    def add_worker(self, address: str) -> int:
        number = self.core.add_worker(address, self.simulation.now)
        answered, lost = partial(self._answered, number), partial(self._lost, number)
        self.links[number] = Link(self.network, self, address, answered, lost)
        self._calls[number] = {}
        return number

    def _answered(self, worker: int, ticket: int, answer: Any, content: Any) -> None:
        call = self._calls[worker].pop(ticket)
        self.core.handle_reply(worker, call.message, answer, (), self.simulation.now)
        self.act()

    def _lost(self, worker: int, error: UnavailableError) -> None:
        self._calls[worker].clear()
        self.core.worker_lost(worker, error, self.simulation.now)
        self.act()

    def woken(self) -> None:
        self.act()

    def act(self) -> None:
        """Run the actions of the core, as the I/O thread does."""
        queue, simulation = self.core.queue, self.simulation
        actions = self.core.take_actions(simulation.now)
        self._check()
        for call in actions.calls:
            self.log("calls", call.worker, call.message)
            self._calls[call.worker][self.links[call.worker].send(call.message)] = call
        for session in actions.fences:
            self._notify_servers(
                lambda store, session=session: store.keys.fence(1, session),
                lambda session=session: queue.worker_fenced(session, simulation.now),
            )
        if (complete := actions.round_push) is not None:
            self._notify_servers(
                lambda store: store.push_round(complete.last_number, complete.optimizer_steps),
                lambda: queue.round_pushed(simulation.now),
            )
        if actions.key_cleanups:
            numbers = list(actions.key_cleanups)
            self._notify_servers(
                lambda store, below=queue.low_watermark: store.keys.forget_closures(
                    1, tuple(numbers), below
                ),
                lambda: queue.write_keys_forgotten(numbers, simulation.now),
            )
        if actions.wake_in < 1e6:
            self.wake_in(actions.wake_in + 1e-4)

    def _notify_servers(self, do: Callable[[Store], None], then: Callable[[], None]) -> None:
        def answered(answer: Any) -> None:
            then()
            self.act()

        self._servers.ask(do, answered)


class Cluster:
    """A coordinator, workers and servers.

    Args:
        seed: Random seed.
        num_workers: Number of workers.
        threads: Number of closures that each runs at a time.
        staleness: As in the queue.
        round_size: As in the queue; each closure then takes one step.
        replicas: Whether two replicated servers hold the store, and crash.
        key_cleanup_delay: As in the queue.
        mean_seconds: Mean run time of a closure.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_workers: int = 3,
        threads: int = 1,
        staleness: int | None = None,
        round_size: int | None = None,
        replicas: bool = False,
        key_cleanup_delay: float = 0.0,
        mean_seconds: float = 0.05,
    ) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        # Most messages arrive quickly.
        self.network.conditions = Conditions(latency=0.001, late=0.1, lateness=0.5, twice=0.1)
        self.mean_seconds = mean_seconds
        self.plans: dict[int, Plan] = {}
        self.told: dict[int, int] = {}
        self.results: dict[int, ClosureResult] = {}
        self.worst_gap = 0
        self.queue = ClosureQueue(
            staleness=staleness,
            round_size=round_size,
            threads=threads,
            key_cleanup_delay=key_cleanup_delay,
        )
        self.core = CoordinatorCore(
            self.queue,
            session_request=StartSession(
                cluster_id="c",
                term=1,
                session=0,
                worker=0,
                threads=threads,
                collects_steps=round_size is not None,
            ),
            read_error=decode_error,
        )
        self.servers = TwoServers(self.simulation, Store()) if replicas else Store()
        self.server = ServerProcess(self.network, self.servers)
        self.coordinator = CoordinatorProcess(
            self.network, self.core, lambda: check(self.queue, staleness)
        )
        self.workers: list[WorkerProcess] = []
        self.server.start()
        self.coordinator.start()
        for _ in range(num_workers):
            self.add_worker(threads)
        self.core.define_resource(
            WorkerResource(1, "iterator", ITERATOR, lambda state: Payload(state or b"0"))
        )
        self.coordinator.act()

    def add_worker(self, threads: int) -> None:
        number = self.coordinator.add_worker(f"worker:{len(self.workers)}")
        self.workers.append(WorkerProcess(self, number, threads))
        self.workers[number].start()

    @property
    def store(self) -> Store:
        """Contents of the servers."""
        found: Store = self.servers.contents
        return found

    def schedule(self, plan: Plan, inputs: tuple[ClosureResult, ...] = ()) -> Closure:
        work = CallSpec(self.simulation.random.choice(FUNCTIONS))
        closure = Closure("step", work, inputs)
        number = self.queue.last_number + 1
        self.plans[number] = plan
        closure.result = self.results[number] = _CountedResult(number, self.told)
        self.queue.schedule(closure, self.simulation.now)
        return closure

    def run_for(self, seconds: float) -> None:
        """Let the coordinator act, and advance the clock."""
        self.coordinator.act()
        self.simulation.run(self.simulation.now + seconds)

    def drain(self, seconds: float) -> None:
        """Advance the clock until all scheduled closures are done."""
        self.queue.end_round()
        self.coordinator.act()
        self.simulation.run(self.simulation.now + seconds, stop=lambda: self.queue.is_drained)
        require(self.queue.is_drained, "all closures end", f"in {seconds} s")

    def note_first_read(self, number: int) -> None:
        """Count closures before this one whose writes are not all applied."""
        gap = sum(
            1
            for before in range(1, number)
            if not self.results[before].is_ready and not self._is_applied(before)
        )
        self.worst_gap = max(self.worst_gap, gap)

    def _is_applied(self, number: int) -> bool:
        writes = self.plans[number].numbered_writes()
        return all(self.store.applied.get((number, *each)) for each in writes)

    # --- faults ---------------------------------------------------------------------------------

    def inject_faults(self, until: float, mean_seconds: float) -> None:
        """Inject random faults."""
        chance = self.simulation.random
        faults = {
            "crash a worker": self._crash_worker,
            "pause a worker": lambda: self._pause_worker(0.01, 3.0),
            "pause a worker for long": lambda: self._pause_worker(
                SILENCE_TIMEOUT, 2 * SILENCE_TIMEOUT
            ),
            "reset a connection of the coordinator": lambda: self.network.reset(self.coordinator),
            "reset a connection of a worker": self._reset_worker,
            "pause the servers": lambda: self.server.pause(chance.uniform(0.01, 2.0)),
        }
        self.simulation.inject_faults(faults, mean_seconds=mean_seconds, until=until)

    def _crash_worker(self) -> None:
        worker = self.simulation.random.choice(self.workers)
        if worker.is_up:
            worker.crash()
            worker.start_in(self.simulation.random.uniform(0.01, 3.0))

    def _pause_worker(self, least: float, most: float) -> None:
        chance = self.simulation.random
        chance.choice(self.workers).pause(chance.uniform(least, most))

    def _reset_worker(self) -> None:
        self.network.reset(self.simulation.random.choice(self.workers))


class _CountedResult(ClosureResult):
    """A result that counts how often it is resolved."""

    __slots__ = ("_number", "_told")

    def __init__(self, number: int, told: dict[int, int]) -> None:
        super().__init__()
        self._number, self._told = number, told

    def resolve(self, payload: Payload | None, error: Exception | None = None) -> bool:
        is_first = super().resolve(payload, error)
        self._told[self._number] = self._told.get(self._number, 0) + is_first
        return is_first
