"""Coordinator, workers and servers in virtual time, on one thread; a seed decides what goes wrong.

The coordinator's core, the agendas of workers and the keys of servers are the real ones. Stood in
for are the network, threads, users' functions, and all of a store but its keys and fences.

    messages are late; connections break, with all that was asked on them
    workers crash and come back, or stand still and go on after they were given up
    writes are late, come twice, and arrive after their worker was fenced
    servers stand still; with replicas they crash, and are taken for gone (`replicated_store`)
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.coordinator.agenda import Agenda, Task
from headrace.coordinator.closure import Closure, Payload, Result
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.coordination import Coordination
from headrace.coordinator.messages import (
    Attend,
    Call,
    CallOff,
    Forget,
    Function,
    Greet,
    Greeted,
    LoadFunction,
    Ran,
    Received,
    Release,
    Resource,
    Run,
    Taken,
    TakeResult,
    Work,
)
from headrace.errors import AbortedError, CancelledError, UnavailableError
from headrace.parameter_server.origin import Attempt, Origin
from headrace.parameter_server.specs import WriteKey
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.call import Done
from headrace.transport.envelope import decode_error, encode_error
from tests.coordinator.invariants import check
from tests.coordinator.replicated_store import GoneError, TwoServers

PATIENCE = 12.0
FUNCTIONS = [
    Function(b"function%d" % number, f"function {number}", Payload(b"code")) for number in range(3)
]
ITERATOR = Function(b"iterator", "iterator", Payload(b"code"))


class World:
    """Virtual time, and what is to happen when."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def late(self) -> float:
        """How long something takes on its way: usually a moment."""
        chance = self.random
        return chance.uniform(0.0002, 0.002) if chance.random() < 0.95 else chance.uniform(0, 0.5)

    def run_until(self, is_met: Callable[[], bool], until: float) -> bool:
        while not is_met():
            if not self._events or self._events[0][0] > until:
                return False
            self.now, _, do = heapq.heappop(self._events)
            do()
        return True


@dataclass
class Store:
    """All servers: counters that are written under keys."""

    world: World
    #: Variable -> value.
    values: dict[str, int] = field(default_factory=dict)
    #: (closure, variable, number) -> how often it was applied.
    applied: dict[tuple[int, str, int], int] = field(default_factory=dict)
    #: Closures of each round that was pushed, as often as that was carried out.
    rounds: list[tuple[int, ...]] = field(default_factory=list)
    #: How many rounds their steps found on the servers, for each round.
    found: list[set[int]] = field(default_factory=list)
    keys: WriteKeys = field(default_factory=WriteKeys)
    stands_until: float = 0.0

    @property
    def contents(self) -> Store:
        return self

    def carry_out(self, client: Any, do: Callable[[Store], None]) -> None:
        do(self)

    def copied(self, deeply: Callable[[Any], Any]) -> Store:
        """Return a copy in which nothing is shared but the world."""
        values, applied, rounds, found = deeply(
            (self.values, self.applied, self.rounds, self.found)
        )
        return Store(self.world, values, applied, rounds, found, WriteKeys(self.keys.state()))

    def when(self) -> float:
        """How long a request takes to arrive and begin."""
        return max(self.stands_until - self.world.now, 0.0) + self.world.late()

    def write(self, written: WriteKey, variable: str) -> None:
        """Apply a write once; raise AbortedError where it is refused."""
        if self.keys.known(written, variable) is not None:
            return
        self.keys.remember(written, variable, Done())
        key = (written.closure, variable, written.number)
        self.applied[key] = self.applied.get(key, 0) + 1
        self.values[variable] = self.values.get(variable, 0) + 1

    def push_round(self, last: int, steps: list[Payload]) -> None:
        """Carry out a round, once: it is written with a key of its last closure."""
        key = WriteKey(incarnation=1, closure=last, worker=0, number=1 << 32)
        taken = [tuple(map(int, each.data.split(b":"))) for each in steps]
        numbers = tuple(number for number, _ in taken)
        try:
            is_new = self.keys.known(key, "round") is None
        except AbortedError:
            assert numbers in self.rounds, "it comes once more after it has settled"
            return
        if is_new:
            self.keys.remember(key, "round", Done())
            self.rounds.append(numbers)
            self.found.append({found for _, found in taken})


@dataclass
class Plan:
    """What a closure does: writes to these variables, then it returns or fails."""

    writes: list[str]
    fails: bool
    is_large: bool
    draws: bool
    steps: bool = True


class Worker:
    """A worker's process, which crashes and comes back."""

    def __init__(self, cluster: Cluster, number: int, threads: int) -> None:
        self.cluster = cluster
        self.number = number
        self.threads = threads
        self.is_up = True
        self.stands_until = 0.0
        self.process = 1
        self.begin()

    def begin(self) -> None:
        """Be a new process."""
        self.life: Greet | None = None
        self.agenda: Agenda[Callable[[Any], None]] = Agenda()
        self.functions: set[bytes] = set()
        self.attending: list[Callable[[Any], None]] = []
        self.iterators: dict[int, int] = {}
        self.busy = 0

    def handle(self, message: Any, answer: Callable[[Any], None]) -> None:
        """Do what is asked, or say why not."""
        if isinstance(message, Greet):
            self._end_life()
            self.begin()
            self.life = message
            answer(Greeted())
            return
        if self.life is None or self.life.session != message.session:
            answer(AbortedError("another life"))
            return
        match message:
            case Attend():
                self.attending.append(answer)
            case LoadFunction():
                self.functions.add(message.digest)
                answer(Done())
            case Run():
                self.agenda.add(message, [], answer)
                self._begin_next()
            case CallOff():
                reply, others = self.agenda.call_off(message)
                for request, ran in others:
                    request(ran)
                if reply.is_dropped and message.how == "abandon":
                    self.busy = len(self.agenda.running)
                    self._begin_next()
                answer(reply)
            case TakeResult():
                answer(Taken(value=self.agenda.values[message.number].data))
            case Received():
                self.agenda.values.pop(message.number)
                answer(Done())
            case Release() | Forget():
                answer(Done())

    def _end_life(self) -> None:
        for answer, _ in self.agenda.close():
            answer(AbortedError("another life"))
        for answer in self.attending:
            answer(AbortedError("another life"))

    def _begin_next(self) -> None:
        while len(self.agenda.running) < self.threads and (task := self.agenda.begin_next()):
            steps = self._steps(task, self.life, self.agenda)
            self._go_on(steps)

    def _go_on(self, steps: Iterator[float], process: int = 0) -> None:
        """Run a closure up to its next wait; it ends with its process alone."""
        process = process or self.process
        if process != self.process:
            return
        world = self.cluster.world
        wait = next(steps, None)
        if wait is not None:
            still = max(self.stands_until - world.now, 0.0)
            world.after(wait + still, lambda: self._go_on(steps, process))

    def _steps(
        self, task: Task[Callable[[Any], None]], life: Greet | None, agenda: Agenda[Any]
    ) -> Iterator[float]:
        cluster, run, iterators = self.cluster, task.run, self.iterators
        assert life is not None
        if run.digest not in self.functions:
            self._end(task, agenda, Ran(lacks_function=True))
            return
        attempt = task.attempt = Attempt(Origin(life.incarnation, run.number, life.session))
        if task.is_refused:
            task.refuse()
        yield cluster.world.random.expovariate(1 / cluster.mean_seconds)
        if run.keeps:
            iterators[run.keeps] = int(run.arguments or b"0")
            self._end(task, agenda, Ran())
            return
        plan = cluster.plans[run.number]
        cluster.note_first_read(run.number)
        step = b"%d:%d" % (run.number, len(cluster.store.rounds))
        error: Exception | None = None
        drawn = None
        if plan.draws:
            while 1 not in iterators:
                yield 0.01  # it is being made, beside this one
            drawn = iterators[1]
            iterators[1] = drawn + 1
        for variable in plan.writes:
            try:
                key = attempt.next_key(variable)
            except CancelledError as refused:
                error = refused
                break
            outcome: list[Exception | None] = []
            cluster.send_write(key, variable, outcome)
            pause = 0.001
            while not outcome:
                yield pause
                pause = min(0.1, 1.5 * pause)
            error = outcome[0]
            if error is not None:
                break
        if error is None and plan.fails:
            error = ValueError(f"closure {run.number}")
        value = (
            b"%d" % run.number if drawn is None else b"%d:%d:%d" % (run.number, self.number, drawn)
        )
        ran = Ran(
            value=value,
            error=b"" if error is None else encode_error(error),
            nbytes=1 << 20 if plan.is_large and error is None else 0,
            wrote=attempt.wrote,
            steps=step if life.gathers and plan.steps and error is None else b"",
            seconds=0.01,
            states={} if drawn is None else {1: b"%d" % iterators[1]},
        )
        self._end(task, agenda, ran)

    def _end(self, task: Task[Any], agenda: Agenda[Any], ran: Ran) -> None:
        if not agenda.end(task):
            return
        if ran.nbytes:
            agenda.values[task.run.number] = Payload(ran.value)
            ran = msgspec.structs.replace(ran, value=b"")
        if task.request is not None:
            task.request(ran)
        if agenda is self.agenda and self.is_up:
            self._begin_next()


class Link:
    """The connection of the coordinator to one worker; messages keep their order."""

    def __init__(self, cluster: Cluster, worker: int) -> None:
        self.cluster = cluster
        self.worker = worker
        self.number = 0
        self._open: set[int] = set()
        self._tickets = itertools.count()
        self._last_there = self._last_back = 0.0

    def send(self, call: Call) -> None:
        cluster, worker = self.cluster, self.cluster.workers[self.worker]
        world, connection, ticket = cluster.world, self.number, next(self._tickets)
        self._open.add(ticket)
        if not worker.is_up:
            world.after(world.late(), lambda: self.break_off("refused", connection))
            return
        arrives = max(self._last_there, world.now + world.late())
        self._last_there = arrives

        def answer(reply: Any) -> None:
            back = max(self._last_back, world.now + world.late())
            self._last_back = back
            world.after(back - world.now, lambda: take(reply))

        def take(reply: Any) -> None:
            if connection == self.number and ticket in self._open:
                self._open.discard(ticket)
                core = cluster.core
                core.answered(self.worker, call.message, reply, (), world.now)
                cluster.turn()

        def arrive() -> None:
            if connection != self.number or not worker.is_up:
                return
            still = worker.stands_until - world.now
            if still > 0:
                world.after(still, arrive)
                return
            worker.handle(call.message, answer)

        world.after(arrives - world.now, arrive)

    def break_off(self, why: str, connection: int | None = None) -> None:
        """Lose the connection, and all that was asked on it."""
        if connection is not None and connection != self.number:
            return
        if not self._open:
            return
        self.number += 1
        self._open.clear()
        self._last_there = self._last_back = self.cluster.world.now
        self.cluster.core.lost(self.worker, UnavailableError(why), self.cluster.world.now)
        self.cluster.turn()


class Cluster:
    """Everybody.

    Args:
        seed: Decides what happens.
        num_workers: How many there are.
        threads: How many closures each runs at a time.
        staleness: As in the queue.
        round_size: As in the queue; closures take a step each then.
        replicas: Whether the store is on two servers, which crash.
        settle_within: As in the queue.
        mean_seconds: How long a closure runs, on average.
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
        settle_within: float = 0.0,
        mean_seconds: float = 0.05,
    ) -> None:
        self.world = World(seed)
        self.mean_seconds = mean_seconds
        self.staleness = staleness
        self.plans: dict[int, Plan] = {}
        self.told: dict[int, int] = {}
        self.results: dict[int, Result] = {}
        self.failed: list[str] = []
        self.worst_gap = 0
        self._idle = Store(self.world)
        self.servers = TwoServers(self.world, Store(self.world)) if replicas else self._idle
        self.is_in_rounds = round_size is not None
        self.queue = ClosureQueue(
            staleness=staleness,
            round_size=round_size,
            threads=threads,
            settle_within=settle_within,
        )
        self.core = Coordination(
            self.queue,
            greeting=Greet(
                cluster_id="c",
                incarnation=1,
                session=0,
                worker=0,
                threads=threads,
                gathers=self.is_in_rounds,
            ),
            read_error=decode_error,
        )
        self.workers: dict[int, Worker] = {}
        self.links: dict[int, Link] = {}
        self._wakes_at = -1.0
        for _ in range(num_workers):
            self.add_worker(threads)
        self.core.define(Resource(1, "iterator", ITERATOR, lambda state: Payload(state or b"0")))
        self.turn()

    def add_worker(self, threads: int) -> None:
        number = self.core.add_worker(f"worker:{len(self.workers)}", self.world.now)
        self.workers[number] = Worker(self, number, threads)
        self.links[number] = Link(self, number)

    @property
    def store(self) -> Store:
        """What is on the servers."""
        found: Store = self.servers.contents
        return found

    # --- the coordinator's shell ----------------------------------------------------------------

    def schedule(self, plan: Plan, inputs: tuple[Result, ...] = ()) -> Closure:
        work = Work(self.world.random.choice(FUNCTIONS))
        closure = Closure("step", work, inputs)
        number = self.queue.last + 1
        self.plans[number] = plan
        self.results[number] = closure.result
        closure.result = self.results[number] = _Watched(number, self.told)
        self.queue.schedule(closure, self.world.now)
        return closure

    def run_until_drained(self, until: float) -> bool:
        """Let things happen until nothing is left of what was scheduled; False: it is too late."""
        return self.world.run_until(lambda: self.queue.is_drained, until)

    def turn(self) -> None:
        """Carry out what the core wants, as the I/O thread does."""
        world = self.world
        actions = self.core.act(world.now)
        check(self.queue, self.staleness)
        for call in actions.calls:
            self.links[call.worker].send(call)
        for session in actions.fences:
            self._tell_servers(
                lambda store, session=session: store.keys.fence(1, session),
                lambda session=session: self.queue.fenced(session, world.now),
            )
        if (complete := actions.round) is not None:
            self._tell_servers(
                lambda store: store.push_round(complete.last, complete.steps),
                lambda: self.queue.pushed(world.now),
            )
        if actions.settles:
            numbers = list(actions.settles)
            self._tell_servers(
                lambda store, below=self.queue.low: store.keys.settle(1, tuple(numbers), below),
                lambda: self.queue.settled(numbers, world.now),
            )
        if actions.wake_in < 1e6:
            world.after(actions.wake_in + 1e-4, self._wake)

    def _wake(self) -> None:
        if self._wakes_at < self.world.now:  # once an instant is enough
            self._wakes_at = self.world.now
            self.turn()

    def _tell_servers(self, tell: Callable[[Store], None], then: Callable[[], None]) -> None:
        def arrive() -> None:
            try:
                self.servers.carry_out("coordinator", tell)
                if self.world.random.random() < 0.1:  # it comes twice
                    self.servers.carry_out("coordinator", tell)
            except GoneError:
                self.world.after(self._idle.when(), arrive)
                return
            self.world.after(self.world.late(), answered)

        def answered() -> None:
            then()
            self.turn()

        self.world.after(self._idle.when(), arrive)

    # --- what workers do with servers -----------------------------------------------------------

    def send_write(self, key: WriteKey, variable: str, outcome: list[Exception | None]) -> None:
        """Send a write; it may come late, and twice."""

        def arrive() -> None:
            try:
                self.servers.carry_out(key.worker, lambda store: store.write(key, variable))
            except GoneError:
                self.world.after(self._idle.when(), arrive)
                return
            except AbortedError as error:
                reply: Exception | None = error
            else:
                reply = None
            if self.world.random.random() < 0.1:
                # The answer is lost: it is sent again, and an old copy may still be on its way.
                self.world.after(self._idle.when(), arrive)
            else:
                self.world.after(self.world.late(), lambda: outcome.append(reply))

        self.world.after(self._idle.when(), arrive)

    def note_first_read(self, number: int) -> None:
        """Count closures before this one whose writes are not all applied."""
        gap = sum(
            1
            for before in range(1, number)
            if not self.results[before].is_ready and not self._is_applied(before)
        )
        self.worst_gap = max(self.worst_gap, gap)

    def _is_applied(self, number: int) -> bool:
        counts: dict[str, int] = {}
        for variable in self.plans[number].writes:
            place = counts.get(variable, 0)
            counts[variable] = place + 1
            if not self.store.applied.get((number, variable, place)):
                return False
        return True

    # --- what goes wrong ------------------------------------------------------------------------

    def crash(self, number: int, seconds: float) -> None:
        """End a worker's process; another one begins after a while."""
        worker = self.workers[number]
        if not worker.is_up:
            return
        worker.is_up = False
        worker.process += 1
        worker.agenda.close()
        worker.begin()
        self.links[number].break_off("its process has ended")

        def come_back() -> None:
            worker.is_up = True
            worker.stands_until = 0.0

        self.world.after(seconds, come_back)

    def pause(self, number: int, seconds: float) -> None:
        """Have a worker stand still; if it is for long, it is given up, and goes on later."""
        worker, link = self.workers[number], self.links[number]
        worker.stands_until = max(worker.stands_until, self.world.now + seconds)
        if seconds > PATIENCE:
            connection = link.number
            self.world.after(PATIENCE, lambda: link.break_off("it is silent", connection))

    def storm(self, until: float, mean: float = 1.0) -> None:
        """Have something go wrong every now and then."""
        chance = self.world.random

        def strike() -> None:
            number = chance.choice(list(self.workers))
            kind = chance.choice(["crash", "pause", "long pause", "cut", "cut", "server"])
            if kind == "crash":
                self.crash(number, chance.uniform(0.01, 3.0))
            elif kind == "pause":
                self.pause(number, chance.uniform(0.01, 3.0))
            elif kind == "long pause":
                self.pause(number, chance.uniform(PATIENCE, 2 * PATIENCE))
            elif kind == "cut":
                self.links[number].break_off("the network was cut")
            else:
                self._idle.stands_until = self.world.now + chance.uniform(0.01, 2.0)
            if self.world.now < until:
                self.world.after(chance.expovariate(1 / mean), strike)

        self.world.after(chance.expovariate(1 / mean), strike)


class _Watched(Result):
    """A result that counts how often it is told."""

    __slots__ = ("_number", "_told")

    def __init__(self, number: int, told: dict[int, int]) -> None:
        super().__init__()
        self._number, self._told = number, told

    def tell(self, payload: Payload | None, error: Exception | None = None) -> bool:
        is_first = super().tell(payload, error)
        self._told[self._number] = self._told.get(self._number, 0) + is_first
        return is_first
