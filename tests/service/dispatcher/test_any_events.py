"""Facts of all kinds, in any order in which they happen, add up to the state: after a restart, too.

Requests are chosen so that all kinds of facts come about; `test_any_sequence` sends others.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from headrace.errors import HeadraceError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events, garbage_collection
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.core import FORMAT
from headrace.service.dispatcher.state import DispatcherTask
from headrace.service.element_sets import END_ORDINAL
from headrace.service.modes.distributed_save.records import files_of
from headrace.service.modes.distributed_save.requests import ReportDirectory
from tests.service.dispatcher.scenario import DYNAMIC, OFF, STARTED, Scenario, look_at, saving

SEEDS = range(24)
STEPS = 160
COST = b"what a row costs"


class Walk:
    """What clients, workers and the dispatcher's shell do, by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.scene = Scenario(
            gc_timeout=25.0,
            gc_dynamic=True,
            client_timeout=30.0,
            dataset_timeout=40.0,
            unreachable_timeout=5.0,
            stable_copy_seconds=15.0,
            keeps_journal=True,
        )
        self.scene.compares = False
        if seed % 3 == 0:
            slots = events.SlotsConfigured(patterns=("host:1", "host:%port%"))
            self.scene.facts = [STARTED, slots]
            self.scene.restart()
        self.scene.register(8, has_element_ids=True, anonymous=True)
        self.workers = self.clients = 0

    def step(self) -> None:
        """Do something, if it can be done."""
        act = self.chance.choices(*zip(*_ACTS, strict=True))[0]
        with contextlib.suppress(HeadraceError, ValueError):
            act(self)

    def pick(self, things: list[str]) -> str:
        """Return one of them."""
        if not things:
            raise ValueError("there is none")
        return self.chance.choice(things)

    def task(self, *, runs: bool = True) -> DispatcherTask | None:
        """Return any task; one that runs, if asked to."""
        tasks = [*self.scene.state.tasks.values()]
        tasks = [each for each in tasks if not runs or not each.phase]
        return self.chance.choice(tasks) if tasks else None

    def parts(self, task: DispatcherTask) -> Any:
        """Return some elements of units that a task was dealt."""
        units = [
            each
            for each in range(task.assigned.num_done, task.assigned.num_assigned)
            if self.chance.random() < 0.4
        ]
        first = self.chance.choice((0, 3))
        last = self.chance.choice((5, END_ORDINAL))
        return tuple((unit, ((first, last),)) for unit in units)

    # --- who comes and goes ---------------------------------------------------------------------

    def come(self) -> None:
        if len(self.scene.state.workers) < 4:
            self.workers += 1
            address = self.chance.choice(("host:1", "host:2", "host:3", "host:4"))
            self.scene.add_worker(f"w{self.workers}", address)

    def go(self) -> None:
        worker_id = self.pick([*self.scene.state.workers])
        self.scene.leaving(worker_id)
        for task_id in [*self.scene.state.workers[worker_id].tasks]:
            task = self.scene.state.tasks[task_id]
            if task.assigned.num_held:
                self.scene.hand_back(
                    worker_id, task_id, (task.assigned.num_assigned - 1, task.assigned.num_assigned)
                )
            self.scene.finish(worker_id, task_id, cut_short=True)
        if self.chance.random() < 0.7:
            self.scene.left(worker_id)

    def vanish(self) -> None:
        """Let one worker be silent until it is lost."""
        self.scene.lose(self.pick([*self.scene.state.workers]))

    def open(self) -> None:
        name = self.chance.choice(
            ("job", "exactly", "ordered", "rounds", "shared", "own", "shares")
        )
        terms: dict[str, Any] = {
            "exactly": {"processing_mode": DYNAMIC, "visitation": "exactly_once"},
            "ordered": {
                "processing_mode": DYNAMIC,
                "visitation": "exactly_once",
                "ordered": True,
                "partition_mode": "ordered",
                "num_splits": 8,
                "first_split": self.chance.choice((0, 2)),
            },
            "rounds": {"processing_mode": self.chance.choice((OFF, DYNAMIC)), "num_consumers": 2},
            "shared": {"processing_mode": OFF, "cross_trainer_cache": True},
            "shares": {"processing_mode": ShardingPolicy.DATA},
        }.get(name, {"processing_mode": self.chance.choice((OFF, DYNAMIC))})
        if name == "rounds":
            self.scene.put_plan(COST)
            terms["cost_fn_digest"] = hashlib.sha256(COST).digest()
            terms["consumer_index"] = self.chance.choice((0, 1))
        self.clients += 1
        self.scene.open(
            f"c{self.clients}",
            self.pick([*self.scene.state.datasets]),
            job_name=None if name == "own" else name,
            epoch=(self.chance.choice((0, 1)),),
            **terms,
        )

    def close(self) -> None:
        self.scene.close(self.pick([*self.scene.state.clients]))

    def register(self) -> None:
        state = self.scene.state
        number = self.chance.randrange(3)
        dataset_id = str(state.next_dataset_id - 1) if number == 0 else None
        self.scene.register(
            8,
            has_element_ids=True,
            anonymous=number == 1,
            dataset_id=dataset_id,
            fingerprint="fingerprint",
        )
        if number == 2:
            self.scene.put_plan(self.chance.randbytes(4))

    # --- work -----------------------------------------------------------------------------------

    def deal(self) -> None:
        task = self.task()
        if task is not None:
            done = self.chance.choice(
                (task.assigned.num_done, task.assigned.num_done, task.assigned.num_assigned)
            )
            self.scene.deal(task.task_id, max_splits=self.chance.randrange(1, 5), num_done=done)

    def idle(self) -> None:
        """Let one task of an ordered iteration have done all, and another one nothing for long."""
        state = self.scene.state
        for iteration in state.iterations.values():
            tasks = state.running_tasks(iteration)
            if len(tasks) > 1 and state.jobs[iteration.job_id].options.ordered:
                break
        else:
            return
        slow, idle = tasks[:2]
        self.scene.deal(slow.task_id, max_splits=1, num_done=slow.assigned.num_done)
        for _ in range(9):
            self.scene.deal(idle.task_id, max_splits=8, num_done=idle.assigned.num_assigned)
        self.wait(8.0)
        self.scene.deal(idle.task_id, max_splits=8, num_done=idle.assigned.num_assigned)

    def end(self) -> None:
        task = self.task()
        if task is not None and self.chance.random() < 0.7:
            self.scene.finish(task.worker_id, task.task_id, num_done=task.assigned.num_assigned)
        elif task is not None:
            self.scene.fail(task.worker_id, task.task_id)

    def settle(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            rounds = self.scene.state.iterations[task.iteration_id].mode_state
            for client_id in sorted(task.awaiting_reports):
                if self.chance.random() < 0.7:
                    self.say(client_id, task, None if rounds is None else self.chance.randrange(4))
            for client_id in sorted(task.assigned.unacknowledged):
                self.say(client_id, task, None, used=True)

    def say(
        self, client_id: str, task: DispatcherTask, rounds: int | None, used: bool = False
    ) -> None:
        middle = self.chance.randint(task.assigned.num_done, task.assigned.num_assigned)
        whole = ((task.assigned.num_done, middle),) if task.assigned.num_done < middle else ()
        parts = tuple(each for each in self.parts(task) if each[0] >= middle)
        self.scene.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=task.task_id,
                delivered=self.chance.choice((whole, ())),
                partially_delivered=self.chance.choice((whole, ())),
                partial_splits=parts,
                rounds=rounds,
                consumed=used,
            )
        )

    def drop(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            for client_id in sorted(task.unconfirmed_clients):
                middle = self.chance.randint(task.assigned.num_done, task.assigned.num_assigned)
                units = (
                    ((task.assigned.num_done, middle),) if task.assigned.num_done < middle else ()
                )
                lost = (
                    ((middle, task.assigned.num_assigned),)
                    if middle < task.assigned.num_assigned
                    else ()
                )
                self.scene.ask(
                    messages.ReportDepartedClient(
                        worker_id=task.worker_id,
                        client_id=client_id,
                        unacknowledged=units,
                        possibly_lost=lost,
                        partially_unacknowledged=tuple(
                            each for each in self.parts(task) if each[0] >= middle
                        ),
                        partially_acknowledged=self.parts(task),
                        **self.scene.shown(task.task_id),
                    )
                )

    def read_on(self) -> None:
        client_id = self.pick([*self.scene.state.clients])
        horizon = self.chance.choice((0, 5, 50))
        self.scene.ask(messages.ClientHeartbeat(client_id=client_id, horizon=horizon))

    def report(self) -> None:
        """Let all clients of a task say for long that they cannot reach its worker."""
        task = self.task()
        if task is None:
            return
        for _ in range(8):
            iteration = self.scene.state.iterations.get(task.iteration_id)
            for client_id in sorted(iteration.clients if iteration else ()):
                self.scene.ask(
                    messages.ReportUnreachable(
                        client_id=client_id, task_id=task.task_id, connection_refused=False
                    )
                )
            self.wait(1.0)

    def kill(self) -> None:
        """Let whoever is dealt the first unit of an exact iteration die, again and again."""
        for number in range(12):
            exact = [
                each
                for each in self.scene.state.iterations.values()
                if each.pool.exactly_once and each.clients and not each.finished
            ]
            tasks = [each for one in exact for each in self.scene.state.running_tasks(one)]
            if not tasks:
                return
            self.scene.deal(tasks[0].task_id, max_splits=1, num_done=tasks[0].assigned.num_done)
            self.scene.add_worker(f"k{len(self.scene.facts)}", f"host:{5 + number}")
            self.scene.lose(tasks[0].worker_id)
            for task in [*self.scene.state.tasks.values()]:
                for client_id in sorted(task.awaiting_reports):
                    self.scene.settle(client_id, task.task_id)

    # --- saves ----------------------------------------------------------------------------------

    def save(self) -> None:
        number = self.chance.randrange(1 << 30)
        dataset_id = self.pick([*self.scene.state.datasets])
        self.scene.ask(saving(f"{number:016x}", dataset_id=dataset_id, path=f"/{number}"))

    def look_after(self) -> None:
        for work in look_at(self.scene):
            fails = self.chance.random() < 0.1 and not work.error
            what = "failed" if fails else "closed" if work.is_finished else "opened"
            error = "no space left" if fails else ""
            self.scene.ask(ReportDirectory(save_id=work.save_id, outcome=what, error=error))  # type: ignore[arg-type]

    def write(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            iteration = self.scene.state.iterations[task.iteration_id]
            if self.scene.state.jobs[iteration.job_id].save_id and not task.phase:
                self.scene.deal(task.task_id, max_splits=4, num_done=task.assigned.num_done)
                file = messages.SavedFile(files_of(task.mode_state).num_files, 4, 100, "{}")
                said = {
                    "report_number": files_of(task.mode_state).num_reports,
                    "files": (file,),
                    "num_done": task.assigned.num_assigned,
                }
                shown = {"worker_id": task.worker_id, **self.scene.shown(task.task_id)}
                self.scene.ask(messages.CommitFiles(**said, **shown))

    # --- time -----------------------------------------------------------------------------------

    def wait(self, seconds: float = 0.0) -> None:
        """Let time pass in which all workers, and most clients, are heard."""
        until = self.scene.now + (seconds or self.chance.choice((1.0, 8.0, 20.0)))
        while self.scene.now < until:
            for worker_id in [*self.scene.state.workers]:
                self.scene.beat(worker_id)
            for client_id in [*self.scene.state.clients]:
                if seconds or self.chance.random() < 0.9:
                    self.scene.heartbeat(client_id)
            self.scene.tick(1.0)

    def restart(self) -> None:
        self.scene.restart()


_ACTS: list[tuple[Callable[[Walk], None], float]] = [
    (Walk.come, 12),
    (Walk.go, 2),
    (Walk.vanish, 4),
    (Walk.open, 14),
    (Walk.close, 5),
    (Walk.register, 4),
    (Walk.deal, 25),
    (Walk.idle, 2),
    (Walk.end, 5),
    (Walk.settle, 12),
    (Walk.drop, 6),
    (Walk.read_on, 8),
    (Walk.report, 1),
    (Walk.kill, 1),
    (Walk.save, 2),
    (Walk.look_after, 8),
    (Walk.write, 8),
    (Walk.wait, 8),
    (Walk.restart, 2),
]


def walked(seed: int) -> list[events.AnyEvent]:
    """Return the facts of a walk, which were seen to add up to its state all along."""
    walk = Walk(seed)
    scene = walk.scene
    for step in range(STEPS):
        walk.step()
        if step % 20 == 0:
            scene.check()
    scene.check()
    # From a snapshot that was kept somewhere in between, too.
    middle = walk.chance.randrange(len(scene.facts))
    kept = FORMAT.initial_state()
    for fact in scene.facts[:middle]:
        apply(kept, fact)
    state = FORMAT.decode_state(msgspec.msgpack.encode(kept))
    for fact in FORMAT.decode_events(msgspec.msgpack.encode(scene.facts[middle:])):
        apply(state, fact)
    assert state == scene.state, f"from a snapshot after {middle} facts"
    return scene.facts


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that were lost are forgotten soon."""
    monkeypatch.setattr(garbage_collection, "_MAX_LOST_TASKS", 2)
    monkeypatch.setattr(garbage_collection, "_MIN_FORGOTTEN_TASKS", 1)


@pytest.mark.usefixtures("few_tasks")
def test_facts_of_all_kinds_add_up_to_the_state() -> None:
    kinds: set[type] = set()
    for seed in SEEDS:
        try:
            kinds.update(map(type, walked(seed)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert kinds == set(get_args(events.AnyEvent))


@pytest.mark.usefixtures("few_tasks")
def test_facts_of_any_walk_add_up_to_the_state() -> None:
    seed = random.randrange(len(SEEDS), 1 << 32)
    try:
        walked(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}") from error
