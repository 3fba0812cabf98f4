"""Events of all kinds, in random order, replay to the state that the dispatcher had.

Requests are chosen so that all kinds of events occur; `test_any_sequence` sends others.
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
from tests.service.dispatcher.scenario import (
    DYNAMIC,
    OFF,
    STARTED,
    Scenario,
    list_open_saves,
    saving,
)

SEEDS = range(24)
STEPS = 160
COST = b"cost function"


class Walk:
    """Random actions of clients, workers and the dispatcher's server."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scene = Scenario(
            gc_timeout=25.0,
            gc_dynamic=True,
            client_timeout=30.0,
            dataset_timeout=40.0,
            unreachable_timeout=5.0,
            stable_copy_seconds=15.0,
            keeps_journal=True,
        )
        self.scene.checks_rejections = False
        if seed % 3 == 0:
            slots = events.SlotsConfigured(patterns=("host:1", "host:%port%"))
            self.scene.events = [STARTED, slots]
            self.scene.restart()
        self.scene.register(8, has_element_ids=True, anonymous=True)
        self.workers = self.clients = 0

    def step(self) -> None:
        """Do a random action if it is possible."""
        action = self.rng.choices(*zip(*_ACTIONS, strict=True))[0]
        with contextlib.suppress(HeadraceError, ValueError):
            action(self)

    def pick(self, items: list[str]) -> str:
        """Return a random one of `items`."""
        if not items:
            raise ValueError("nothing to choose from")
        return self.rng.choice(items)

    def task(self, *, running: bool = True) -> DispatcherTask | None:
        """Return a random task, by default a running one; None if there is none."""
        tasks = [*self.scene.state.tasks.values()]
        tasks = [each for each in tasks if not running or not each.phase]
        return self.rng.choice(tasks) if tasks else None

    def partial_splits(self, task: DispatcherTask) -> Any:
        """Return some elements of random splits of a task."""
        splits = [
            each
            for each in range(task.assigned.num_done, task.assigned.num_assigned)
            if self.rng.random() < 0.4
        ]
        first = self.rng.choice((0, 3))
        last = self.rng.choice((5, END_ORDINAL))
        return tuple((split, ((first, last),)) for split in splits)

    # --- workers and clients --------------------------------------------------------------------

    def add_worker(self) -> None:
        if len(self.scene.state.workers) < 4:
            self.workers += 1
            address = self.rng.choice(("host:1", "host:2", "host:3", "host:4"))
            self.scene.add_worker(f"w{self.workers}", address)

    def drain_worker(self) -> None:
        worker_id = self.pick([*self.scene.state.workers])
        self.scene.drain_worker(worker_id)
        for task_id in [*self.scene.state.workers[worker_id].tasks]:
            task = self.scene.state.tasks[task_id]
            if task.assigned.num_held:
                self.scene.return_splits(
                    worker_id, task_id, (task.assigned.num_assigned - 1, task.assigned.num_assigned)
                )
            self.scene.finish(worker_id, task_id, cut_short=True)
        if self.rng.random() < 0.7:
            self.scene.unregister_worker(worker_id)

    def lose_worker(self) -> None:
        """Let a worker be silent until it is lost."""
        self.scene.lose(self.pick([*self.scene.state.workers]))

    def open(self) -> None:
        name = self.rng.choice(
            ("job", "exactly_once", "ordered", "rounds", "shared", "unnamed", "shards")
        )
        options: dict[str, Any] = {
            "exactly_once": {"processing_mode": DYNAMIC, "visitation": "exactly_once"},
            "ordered": {
                "processing_mode": DYNAMIC,
                "visitation": "exactly_once",
                "ordered": True,
                "partition_mode": "ordered",
                "num_splits": 8,
                "first_split": self.rng.choice((0, 2)),
            },
            "rounds": {"processing_mode": self.rng.choice((OFF, DYNAMIC)), "num_consumers": 2},
            "shared": {"processing_mode": OFF, "cross_trainer_cache": True},
            "shards": {"processing_mode": ShardingPolicy.DATA},
        }.get(name, {"processing_mode": self.rng.choice((OFF, DYNAMIC))})
        if name == "rounds":
            self.scene.put_plan(COST)
            options["cost_fn_digest"] = hashlib.sha256(COST).digest()
            options["consumer_index"] = self.rng.choice((0, 1))
        self.clients += 1
        self.scene.open(
            f"c{self.clients}",
            self.pick([*self.scene.state.datasets]),
            job_name=None if name == "unnamed" else name,
            epoch=(self.rng.choice((0, 1)),),
            **options,
        )

    def close(self) -> None:
        self.scene.close(self.pick([*self.scene.state.clients]))

    def register(self) -> None:
        state = self.scene.state
        number = self.rng.randrange(3)
        dataset_id = str(state.next_dataset_id - 1) if number == 0 else None
        self.scene.register(
            8,
            has_element_ids=True,
            anonymous=number == 1,
            dataset_id=dataset_id,
            fingerprint="fingerprint",
        )
        if number == 2:
            self.scene.put_plan(self.rng.randbytes(4))

    # --- work -----------------------------------------------------------------------------------

    def assign(self) -> None:
        task = self.task()
        if task is not None:
            done = self.rng.choice(
                (task.assigned.num_done, task.assigned.num_done, task.assigned.num_assigned)
            )
            self.scene.get_split(task.task_id, max_splits=self.rng.randrange(1, 5), num_done=done)

    def make_straggler(self) -> None:
        """Let one task of an ordered iteration finish all its splits and another one none."""
        state = self.scene.state
        for iteration in state.iterations.values():
            tasks = state.running_tasks(iteration)
            if len(tasks) > 1 and state.jobs[iteration.job_id].options.ordered:
                break
        else:
            return
        slow, idle = tasks[:2]
        self.scene.get_split(slow.task_id, max_splits=1, num_done=slow.assigned.num_done)
        for _ in range(9):
            self.scene.get_split(idle.task_id, max_splits=8, num_done=idle.assigned.num_assigned)
        self.wait(8.0)
        self.scene.get_split(idle.task_id, max_splits=8, num_done=idle.assigned.num_assigned)

    def end_task(self) -> None:
        task = self.task()
        if task is not None and self.rng.random() < 0.7:
            self.scene.finish(task.worker_id, task.task_id, num_done=task.assigned.num_assigned)
        elif task is not None:
            self.scene.fail(task.worker_id, task.task_id)

    def report_deliveries(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            rounds = self.scene.state.iterations[task.iteration_id].mode_state
            for client_id in sorted(task.awaiting_reports):
                if self.rng.random() < 0.7:
                    self.report_delivery(
                        client_id, task, None if rounds is None else self.rng.randrange(4)
                    )
            for client_id in sorted(task.assigned.unacknowledged):
                self.report_delivery(client_id, task, None, consumed=True)

    def report_delivery(
        self, client_id: str, task: DispatcherTask, rounds: int | None, consumed: bool = False
    ) -> None:
        middle = self.rng.randint(task.assigned.num_done, task.assigned.num_assigned)
        whole = ((task.assigned.num_done, middle),) if task.assigned.num_done < middle else ()
        partial_splits = tuple(each for each in self.partial_splits(task) if each[0] >= middle)
        self.scene.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=task.task_id,
                delivered=self.rng.choice((whole, ())),
                partially_delivered=self.rng.choice((whole, ())),
                partial_splits=partial_splits,
                rounds=rounds,
                consumed=consumed,
            )
        )

    def report_departed_clients(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            for client_id in sorted(task.unconfirmed_clients):
                middle = self.rng.randint(task.assigned.num_done, task.assigned.num_assigned)
                splits = (
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
                        unacknowledged=splits,
                        possibly_lost=lost,
                        partially_unacknowledged=tuple(
                            each for each in self.partial_splits(task) if each[0] >= middle
                        ),
                        partially_acknowledged=self.partial_splits(task),
                        **self.scene.task_fields(task.task_id),
                    )
                )

    def advance_horizon(self) -> None:
        client_id = self.pick([*self.scene.state.clients])
        horizon = self.rng.choice((0, 5, 50))
        self.scene.ask(messages.ClientHeartbeat(client_id=client_id, horizon=horizon))

    def report_unreachable(self) -> None:
        """Let all clients of a task report its worker as unreachable for long."""
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

    def kill_workers(self) -> None:
        """Repeatedly lose the worker of the first split of an exactly-once iteration."""
        for number in range(12):
            exactly_once = [
                each
                for each in self.scene.state.iterations.values()
                if each.pool.exactly_once and each.clients and not each.finished
            ]
            tasks = [each for one in exactly_once for each in self.scene.state.running_tasks(one)]
            if not tasks:
                return
            self.scene.get_split(
                tasks[0].task_id, max_splits=1, num_done=tasks[0].assigned.num_done
            )
            self.scene.add_worker(f"k{len(self.scene.events)}", f"host:{5 + number}")
            self.scene.lose(tasks[0].worker_id)
            for task in [*self.scene.state.tasks.values()]:
                for client_id in sorted(task.awaiting_reports):
                    self.scene.report_delivery(client_id, task.task_id)

    # --- saves ----------------------------------------------------------------------------------

    def save(self) -> None:
        number = self.rng.randrange(1 << 30)
        dataset_id = self.pick([*self.scene.state.datasets])
        self.scene.ask(saving(f"{number:016x}", dataset_id=dataset_id, path=f"/{number}"))

    def manage_saves(self) -> None:
        for save in list_open_saves(self.scene):
            fails = self.rng.random() < 0.1 and not save.error
            outcome = "failed" if fails else "closed" if save.is_finished else "opened"
            error = "no space left" if fails else ""
            self.scene.ask(ReportDirectory(save_id=save.save_id, outcome=outcome, error=error))  # type: ignore[arg-type]

    def write(self) -> None:
        for task in [*self.scene.state.tasks.values()]:
            iteration = self.scene.state.iterations[task.iteration_id]
            if self.scene.state.jobs[iteration.job_id].save_id and not task.phase:
                self.scene.get_split(task.task_id, max_splits=4, num_done=task.assigned.num_done)
                file = messages.SavedFile(files_of(task.mode_state).num_files, 4, 100, "{}")
                fields = {
                    "report_number": files_of(task.mode_state).num_reports,
                    "files": (file,),
                    "num_done": task.assigned.num_assigned,
                }
                task_fields = {"worker_id": task.worker_id, **self.scene.task_fields(task.task_id)}
                self.scene.ask(messages.CommitFiles(**fields, **task_fields))

    # --- time -----------------------------------------------------------------------------------

    def wait(self, seconds: float = 0.0) -> None:
        """Let time pass while all workers and most clients send heartbeats."""
        until = self.scene.now + (seconds or self.rng.choice((1.0, 8.0, 20.0)))
        while self.scene.now < until:
            for worker_id in [*self.scene.state.workers]:
                self.scene.worker_heartbeat(worker_id)
            for client_id in [*self.scene.state.clients]:
                if seconds or self.rng.random() < 0.9:
                    self.scene.heartbeat(client_id)
            self.scene.tick(1.0)

    def restart(self) -> None:
        self.scene.restart()


_ACTIONS: list[tuple[Callable[[Walk], None], float]] = [
    (Walk.add_worker, 12),
    (Walk.drain_worker, 2),
    (Walk.lose_worker, 4),
    (Walk.open, 14),
    (Walk.close, 5),
    (Walk.register, 4),
    (Walk.assign, 25),
    (Walk.make_straggler, 2),
    (Walk.end_task, 5),
    (Walk.report_deliveries, 12),
    (Walk.report_departed_clients, 6),
    (Walk.advance_horizon, 8),
    (Walk.report_unreachable, 1),
    (Walk.kill_workers, 1),
    (Walk.save, 2),
    (Walk.manage_saves, 8),
    (Walk.write, 8),
    (Walk.wait, 8),
    (Walk.restart, 2),
]


def run_walk(seed: int) -> list[events.AnyEvent]:
    """Return the events of a walk, after checking that they replay to its state."""
    walk = Walk(seed)
    scene = walk.scene
    for step in range(STEPS):
        walk.step()
        if step % 20 == 0:
            scene.check()
    scene.check()
    # Also from a snapshot at a random point.
    middle = walk.rng.randrange(len(scene.events))
    snapshot = FORMAT.initial_state()
    for event in scene.events[:middle]:
        apply(snapshot, event)
    state = FORMAT.decode_state(msgspec.msgpack.encode(snapshot))
    for event in FORMAT.decode_events(msgspec.msgpack.encode(scene.events[middle:])):
        apply(state, event)
    assert state == scene.state, f"from a snapshot after {middle} events"
    return scene.events


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make garbage collection forget lost tasks soon."""
    monkeypatch.setattr(garbage_collection, "_MAX_LOST_TASKS", 2)
    monkeypatch.setattr(garbage_collection, "_MIN_FORGOTTEN_TASKS", 1)


@pytest.mark.usefixtures("few_tasks")
def test_events_of_all_kinds_replay_to_the_same_state() -> None:
    kinds: set[type] = set()
    for seed in SEEDS:
        try:
            kinds.update(map(type, run_walk(seed)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert kinds == set(get_args(events.AnyEvent))


@pytest.mark.usefixtures("few_tasks")
def test_events_of_a_random_walk_replay_to_the_same_state() -> None:
    seed = random.randrange(len(SEEDS), 1 << 32)
    try:
        run_walk(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}") from error
