"""Whole epochs, with workers that come and go and die, and a dispatcher that restarts."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


class _Worker:
    """Runs tasks as a worker does: asks for units until there are none, then finishes."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.leaving = False


class _Portion(NamedTuple):
    """Elements on their way to a client; an element is (unit, number in the unit)."""

    elements: list[tuple[int, int]]
    done_from: int
    done_to: int
    touched: int


class _Task:
    """A task as its worker knows it: units in dealt order, several of which are open at once."""

    def __init__(self, parts: Callable[[int], int]) -> None:
        self.parts = parts
        self.units: list[int] = []
        #: How many elements of each unit were produced.
        self.produced: list[int] = []
        self.whole = self.touched = self.done = 0
        self.on_the_way: dict[str, list[_Portion]] = {}
        self.is_fenced: set[str] = set()

    def deal(self, start: int, stop: int) -> None:
        self.units += range(start, stop)
        self.produced += [0] * (stop - start)

    def produce(self, chance: random.Random, window: int, count: int, to: str) -> int | None:
        """Put some elements of the open units on their way; return a unit that was begun last."""
        begun, elements, done_from = None, [], self.whole
        for _ in range(count):
            places = range(self.whole, min(self.whole + window, len(self.units)))
            open_units = [each for each in places if not self.is_whole(each)]
            if not open_units:
                break
            place = chance.choice(open_units)
            begun = self.units[place]
            elements.append((begun, self.produced[place]))
            self.produced[place] += 1
            self.touched = max(self.touched, place + 1)
            while self.is_whole(self.whole):
                self.whole += 1
        self.touched = max(self.touched, self.whole)
        if elements:
            portion = _Portion(elements, done_from, self.whole, self.touched)
            self.on_the_way.setdefault(to, []).append(portion)
        return begun

    def is_whole(self, place: int) -> bool:
        return place < len(self.units) and self.produced[place] == self.parts(self.units[place])

    @property
    def is_delivered(self) -> bool:
        return not any(self.on_the_way.values())

    def acknowledged(self) -> int:
        unknown = [each[0].done_from for each in self.on_the_way.values() if each]
        return min(unknown, default=self.whole)


class _Client:
    """Takes portions in turn, and says what it received of what was lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.elements: list[tuple[int, int]] = []
        self.received: dict[int, list[tuple[int, int]]] = {}
        self.touched: dict[int, list[tuple[int, int]]] = {}

    def take(self, task_id: int, portion: _Portion) -> None:
        self.elements += portion.elements
        for runs, stop in (
            (self.received.setdefault(task_id, []), portion.done_to),
            (self.touched.setdefault(task_id, []), portion.touched),
        ):
            if portion.done_from < stop:
                runs.append((portion.done_from, stop))


class _Epoch:
    """Clients that read from workers which come, leave and die."""

    def __init__(
        self, chance: random.Random, size: int, clients: int, deadly: int | None, lossy: bool
    ) -> None:
        self.chance, self.lossy, self.deadly = chance, lossy, deadly
        #: Where one unit's elements may come to two clients, nobody knows who has which.
        self.parts = (lambda unit: 1 + unit % 3) if clients == 1 else (lambda unit: 1)
        self.window = 4 if clients == 1 else 1
        self.scene = Scenario()
        self.scene.compares = False
        self.scene.register(size)
        self.clients = [_Client(f"client {number}") for number in range(clients)]
        for client in self.clients:
            self.scene.open(client.name, processing_mode=DYNAMIC, job_name="job")
        self.workers: list[_Worker] = []
        self.tasks: dict[int, _Task] = {}
        self.losses = self.births = 0

    def join(self) -> None:
        self.births += 1
        worker = _Worker(f"worker {self.births}", f"host:{self.births}")
        self.workers.append(worker)
        self.scene.add_worker(worker.name, worker.address)

    def die(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        self.losses += 1

    def happen(self) -> None:
        event = self.chance.random()
        staying = [worker for worker in self.workers if not worker.leaving]
        if not staying or (event < 0.02 and len(self.workers) < 4):
            self.join()
        elif event < 0.04 and self.lossy:
            self.die(self.chance.choice(self.workers))
        elif event < 0.06:
            worker = self.chance.choice(staying)
            worker.leaving = True
            self.scene.leaving(worker.name)
        elif event < 0.07 and self.lossy:
            self.stop(self.chance.choice(self.workers))
        elif event < 0.08:
            self.scene.restart()
        self.scene.tick(self.chance.random())
        if event > 0.97:
            self.scene.pause(self.chance.uniform(1, 100))
        for worker in self.workers:
            with contextlib.suppress(HeadraceError):
                self.scene.beat(worker.name)
        for client in self.clients:
            self.scene.heartbeat(client.name)

    def task(self, task_id: int) -> _Task:
        return self.tasks.setdefault(task_id, _Task(self.parts))

    def arrive(self) -> None:
        """Let something arrive that is on its way, from a worker that is there."""
        names = {worker.name for worker in self.workers}
        for task_id, task in self.tasks.items():
            if self.scene.state.tasks[task_id].worker_id not in names:
                continue
            for client in self.clients:
                waiting = task.on_the_way.get(client.name, [])
                if waiting and self.chance.random() < 0.5 and client.name not in task.is_fenced:
                    client.take(task_id, waiting.pop(0))
            if self.chance.random() < 0.7:
                task.done = max(task.done, task.acknowledged())

    def work(self, worker: _Worker, task_id: int) -> None:
        task, chance = self.task(task_id), self.chance
        if chance.random() < 0.6:
            to = chance.choice(self.clients).name
            if task.produce(chance, self.window, chance.randrange(1, 8), to) == self.deadly:
                if self.deadly is not None:
                    # It dies of it before anything is sent.
                    task.on_the_way[to].pop()
                    self.die(worker)
                return
        request = self.scene.split_request(
            task_id, want=chance.randrange(1, 50), done=max(task.done, self.known_done(task_id))
        )
        granted = self.scene.ask(request)
        while granted.start < granted.stop and chance.random() < 0.2:
            assert self.scene.ask(request) == granted
        task.deal(granted.start, granted.stop)
        if granted.start == granted.stop and not granted.wait:
            self.end(worker, task_id, task)

    def stop(self, worker: _Worker) -> None:
        """Leave at once; what is on its way does not arrive."""
        for task_id in sorted(self.scene.state.workers[worker.name].tasks):
            task = self.task(task_id)
            if task.touched < len(task.units):
                self.scene.hand_back(worker.name, task_id, (task.touched, len(task.units)))
        self.scene.left(worker.name)
        self.workers.remove(worker)
        self.losses += 1

    def known_done(self, task_id: int) -> int:
        return self.scene.state.tasks[task_id].done

    def end(self, worker: _Worker, task_id: int, task: _Task) -> None:
        if task.whole == len(task.units) and (task.is_delivered or len(self.clients) > 1):
            self.scene.finish(worker.name, task_id)

    def leave(self) -> None:
        for worker in [each for each in self.workers if each.leaving]:
            known = self.scene.state.workers[worker.name]
            tasks = [self.task(each) for each in known.finished]
            if known.tasks or not all(task.is_delivered for task in tasks):
                continue
            if self.chance.random() < 0.2:
                self.scene.left(worker.name)
                self.workers.remove(worker)

    def settle(self, client: _Client) -> None:
        for task_id in self.scene.heartbeat(client.name).settle:
            self.task(task_id).is_fenced.add(client.name)
            self.scene.settle(
                client.name,
                task_id,
                *client.received.get(task_id, []),
                touched=tuple(client.touched.get(task_id, [])),
            )

    def step(self) -> None:
        for client in self.clients:
            self.settle(client)
        self.happen()
        mine = {worker.name: worker for worker in self.workers}
        tasks = self.scene.heartbeat(self.clients[0].name).tasks
        tasks = tuple(task for task in tasks if task.worker_id in mine)
        if tasks:
            task = self.chance.choice(tasks)
            self.work(mine[task.worker_id], task.task_id)
        self.arrive()
        self.leave()

    def units_of(self, known: list[dict[int, list[tuple[int, int]]]]) -> set[int]:
        return {
            self.tasks[task_id].units[place]
            for runs_of in known
            for task_id, runs in runs_of.items()
            for start, stop in runs
            for place in range(start, stop)
        }

    @property
    def is_over(self) -> bool:
        # Until what is on its way from workers that count as alive has come, or has not.
        names = self.scene.state.workers
        return all(self.scene.heartbeat(each.name).finished for each in self.clients) and all(
            task.is_delivered
            for task_id, task in self.tasks.items()
            if self.scene.state.tasks[task_id].worker_id in names
        )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 300),
    clients=st.sampled_from([1, 1, 2]),
    deadly=st.one_of(st.none(), st.integers(0, 300)),
    lossy=st.booleans(),
)
def test_an_epoch_ends_and_what_is_missing_at_the_end_was_said_to_be_lost(
    seed: int, size: int, clients: int, deadly: int | None, lossy: bool
) -> None:
    """Simulate workers that die and leave, and a dispatcher that restarts and pauses, to the end.

    Replies get lost too (the request is then repeated): that never costs a unit.
    """
    epoch = _Epoch(random.Random(seed), size, clients, deadly, lossy)
    for _ in range(20_000):
        epoch.step()
        epoch.scene.state.validate()
        if epoch.is_over:
            break
    else:
        raise AssertionError("the epoch did not end")
    epoch.scene.check()
    received = [element for client in epoch.clients for element in client.elements]
    assert len(set(received)) == len(received), "an element came twice"
    count_of = Counter(unit for unit, _ in received)
    whole = {unit for unit, number in count_of.items() if number == epoch.parts(unit)}
    said = epoch.scene.heartbeat(epoch.clients[0].name).lost
    lost = {unit for each in said for start, stop in each.units for unit in range(start, stop)}
    given_up = {
        unit
        for each in said
        if each.given_up
        for start, stop in each.units
        for unit in range(start, stop)
    }
    assert sum(each.count for each in said) == len(lost)
    # A unit is known to be whole once those before it are.
    known = epoch.units_of([client.received for client in epoch.clients])
    assert not lost & known, "a unit came whole and was said to be lost"
    assert lost | whole == set(range(size)), "a unit is missing and was not said to be lost"
    touched = epoch.units_of([client.touched for client in epoch.clients])
    if clients == 1:
        # With several, an iteration may be over while something is on its way to one of them.
        assert lost - given_up <= touched, "a unit is lost of which nobody has anything"
    if given_up and not lossy:
        # A task that got nothing done for long may have held others beside it.
        assert deadly in given_up
    if not epoch.losses:
        assert not lost
