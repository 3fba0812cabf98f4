"""Any sequence of requests, losses and restarts keeps the state's invariants."""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.errors import HeadraceError
from headrace.service import messages
from headrace.service.dispatcher import updates
from tests.service.dispatcher.scenario import (
    DYNAMIC,
    OFF,
    Scenario,
    opening,
    registration,
    split_request,
)

WORKERS = st.sampled_from(["u", "v", "w"])
ADDRESSES = st.sampled_from(["host:1", "host:2", "host:3"])
CLIENTS = st.sampled_from(["a", "b", "c"])
DATASETS = st.sampled_from(["1000", "1001", "mine"])
TASKS = st.integers(4000, 4030)


class AnySequence(RuleBasedStateMachine):
    """Requests as anyone might send them, in any order, sensible or not."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scenario(gc_timeout=20.0, client_timeout=30.0)
        self.scene.register(sizes=(7, 3), fingerprint="0")

    def ask(self, request: messages.DispatcherRequest) -> None:
        with contextlib.suppress(HeadraceError):
            reply = self.scene.ask(request)
            facts = len(self.scene.facts)
            if isinstance(request, messages.ReportUnreachable | messages.CloseIteration):
                self.scene.ask(request)
            elif not isinstance(request, messages.GetStatus):
                assert self.scene.ask(request) == reply, "a repeated request got another reply"
            assert len(self.scene.facts) == facts, "a repeated request made something"

    @rule(
        token=st.integers(0, 5),
        sizes=st.sampled_from([(), (5,), (0,), (-1,), (4, 9)]),
        fingerprint=st.sampled_from(["0", "1"]),
        dataset_id=st.sampled_from([None, "mine"]),
    )
    def register(
        self, token: int, sizes: tuple[int, ...], fingerprint: str, dataset_id: str | None
    ) -> None:
        self.ask(
            registration(sizes, token=f"t{token}", fingerprint=fingerprint, dataset_id=dataset_id)
        )

    @rule(worker_id=WORKERS, address=ADDRESSES, tags=st.sampled_from([(), ("x",)]))
    def add_worker(self, worker_id: str, address: str, tags: tuple[str, ...]) -> None:
        self.ask(messages.RegisterWorker(worker_id=worker_id, address=address, tags=tags))

    @rule(
        client_id=CLIENTS,
        dataset_id=DATASETS,
        mode=st.sampled_from([OFF, DYNAMIC]),
        job_name=st.sampled_from([None, "j", "k"]),
        repetition=st.integers(0, 2),
    )
    def open(
        self, client_id: str, dataset_id: str, mode: int, job_name: str | None, repetition: int
    ) -> None:
        self.ask(
            opening(
                client_id,
                dataset_id,
                processing_mode=mode,
                job_name=job_name,
                repetition=repetition,
            )
        )

    @rule(client_id=CLIENTS)
    def heartbeat(self, client_id: str) -> None:
        self.ask(messages.ClientHeartbeat(client_id=client_id))

    @rule(client_id=CLIENTS)
    def close(self, client_id: str) -> None:
        self.ask(messages.CloseIteration(client_id=client_id))

    @rule(client_id=CLIENTS, task_id=TASKS)
    def report(self, client_id: str, task_id: int) -> None:
        self.ask(messages.ReportUnreachable(client_id=client_id, task_id=task_id))

    @rule(worker_id=WORKERS, tasks=st.lists(TASKS, max_size=3))
    def beat(self, worker_id: str, tasks: list[int]) -> None:
        self.ask(messages.WorkerHeartbeat(worker_id=worker_id, tasks=tuple(tasks)))

    @rule(worker_id=WORKERS, task_id=TASKS)
    def finish(self, worker_id: str, task_id: int) -> None:
        self.ask(messages.FinishTask(worker_id=worker_id, task_id=task_id))

    @rule(worker_id=WORKERS, task_id=TASKS)
    def look_up(self, worker_id: str, task_id: int) -> None:
        self.ask(messages.GetTask(worker_id=worker_id, task_id=task_id))

    @rule(
        task_id=TASKS,
        source=st.integers(0, 1),
        repetition=st.integers(0, 2),
        number=st.integers(0, 6),
        want=st.integers(1, 9),
    )
    def split(self, task_id: int, source: int, repetition: int, number: int, want: int) -> None:
        self.ask(split_request(task_id, number, source=source, repetition=(repetition,), want=want))

    @rule()
    def status(self) -> None:
        self.ask(messages.GetStatus())

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.scene.tick(seconds)
        assert self.scene.tick() == [], "what time asked for was not all done"

    @rule()
    def restart(self) -> None:
        self.scene.restart()

    @invariant()
    def facts_add_up_to_the_state(self) -> None:
        self.scene.check()

    def teardown(self) -> None:
        dealt: set[tuple[object, ...]] = set()
        iteration_of: dict[int, int] = {}
        for fact in self.scene.facts:
            if isinstance(fact, updates.TaskCreated):
                iteration_of[fact.task_id] = fact.iteration_id
            if isinstance(fact, updates.SplitProduced):
                place = (iteration_of[fact.task_id], fact.source, fact.repetition)
                parts = {(*place, index) for index in range(fact.start, fact.stop)}
                assert parts, "an empty part is no fact"
                assert not parts & dealt, "an index was dealt twice in a pass"
                dealt |= parts


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40)


class _Worker:
    """Runs tasks the way a worker does: asks for splits until there are none, then finishes."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.numbers: dict[int, int] = {}


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 300), lossy=st.booleans())
def test_an_epoch_ends_whatever_is_lost_and_is_whole_if_nothing_is(
    seed: int, size: int, lossy: bool
) -> None:
    """Simulate workers that die, and a dispatcher that restarts, until the client is told the end.

    Replies get lost too (the request is then repeated): that never costs an element.
    """
    chance = random.Random(seed)
    scene = Scenario()
    scene.register(sizes=(size,))
    scene.open("client", processing_mode=DYNAMIC, job_name="job")
    workers: list[_Worker] = []
    delivered: list[int] = []
    abandoned = births = 0

    def join() -> None:
        nonlocal births
        births += 1
        worker = _Worker(f"worker {births}", f"host:{chance.randrange(1, 9)}")
        workers[:] = [each for each in workers if each.address != worker.address]
        workers.append(worker)
        scene.add_worker(worker.name, worker.address)

    for _ in range(20_000):
        update = scene.heartbeat("client")
        if update.finished:
            break
        event = chance.random()
        if not workers or (event < 0.02 and len(workers) < 4):
            # One that starts at the address of another takes its place.
            before = len(workers)
            join()
            abandoned += len(workers) <= before
        elif lossy and event < 0.04:
            workers.pop(chance.randrange(len(workers)))
            abandoned += 1
        elif event < 0.06:
            scene.restart()
        scene.tick(chance.random())
        for worker in workers:
            with contextlib.suppress(HeadraceError):
                scene.beat(worker.name)
        mine = {worker.name: worker for worker in workers}
        tasks = [task for task in update.tasks if task.worker_id in mine]
        if not tasks:
            continue
        task = chance.choice(tasks)
        worker = mine[task.worker_id]
        number = worker.numbers.get(task.task_id, 0)
        want = chance.randrange(1, 50)
        part = scene.split(task.task_id, number, want=want)
        while chance.random() < 0.2:
            assert scene.split(task.task_id, number, want=want) == part
        if part[0] < part[1]:
            worker.numbers[task.task_id] = number + 1
            delivered += range(*part)
        else:
            scene.finish(worker.name, task.task_id)
        scene.state.validate()
    else:
        raise AssertionError("the epoch did not end")
    scene.check()
    assert len(set(delivered)) == len(delivered)
    if not abandoned:
        assert sorted(delivered) == list(range(size))
