"""A dispatcher for scenarios: requests with times in, facts and replies out."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.events import AnyEvent, DispatcherStarted
from headrace.service.dispatcher.invariants import validate
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.service.modes.distributed_save.requests import ListOpenSaves, OpenSave

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC

#: Terms of a job that is read exactly once.
EXACTLY: dict[str, Any] = {
    "processing_mode": DYNAMIC,
    "visitation": "exactly_once",
    "job_name": "job",
}

STARTED = DispatcherStarted(dispatcher_id="run", secret=b"secret")
PLAN = b"plan"


class Processes(WorkerConnections):
    """Workers' connections as a scenario has them."""

    def __init__(self) -> None:
        super().__init__()
        self.exited: set[str] = set()
        #: Seconds since anything came from the process of a worker.
        self.silent: dict[str, float] = {}

    def seconds_since_data(self, worker_id: str) -> float | None:
        return self.silent.get(worker_id)

    def has_exited(self, worker_id: str) -> bool:
        return worker_id in self.exited


class Scenario:
    """A dispatcher, its facts, and the time."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        #: Whether to see that refused requests change nothing, which takes long with many requests.
        self.compares = True
        self.limits = DispatcherLimits(**limits)
        self.facts: list[AnyEvent] = [STARTED]
        self.processes = Processes()
        self.restart()

    @property
    def state(self) -> DispatcherState:
        return self.dispatcher.state

    def ask(self, request: messages.DispatcherRequest) -> Any:
        before = copy.deepcopy(self.state) if self.compares else None
        try:
            decision, facts = self.dispatcher.handle(request, self.now)
        except Exception:
            assert not self.compares or self.state == before, "a refused request changed the state"
            raise
        self.facts += facts
        return decision.reply

    def tick(self, seconds: float = 0.0) -> list[AnyEvent]:
        """Let time pass, with a tick at each interval and one at the end."""
        until = self.now + seconds
        facts: list[AnyEvent] = []
        while self.now < until:
            self.now = min(self.now + self.limits.tick_interval, until)
            facts += self.dispatcher.tick(self.now)
        facts += self.dispatcher.tick(self.now)
        self.facts += facts
        return facts

    def pause(self, seconds: float) -> list[AnyEvent]:
        """Stop the dispatcher for a while; return what the first tick afterwards does."""
        self.now += seconds
        facts = self.dispatcher.tick(self.now)
        self.facts += facts
        return facts

    def restart(self) -> None:
        self.dispatcher = Dispatcher(self.replay(), self.limits, self.now)
        self.dispatcher.soft_state.connections = self.processes

    def replay(self) -> DispatcherState:
        state = DispatcherState()
        for fact in self.facts:
            apply(state, fact)
        return state

    def check(self) -> None:
        validate(self.state)
        assert self.replay() == self.state
        presence = self.dispatcher.soft_state
        assert presence.worker_heartbeats.keys() == self.state.workers.keys()
        assert presence.client_heartbeats.keys() == self.state.clients.keys()
        assert (
            presence.idle_since.keys()
            == presence.last_assignments.keys()
            == self.state.iterations.keys()
        )
        assert presence.last_task_ends.keys() == self.state.iterations.keys()
        assert presence.last_task_losses.keys() <= self.state.iterations.keys()
        assert presence.refusing_workers <= presence.worker_heartbeats.keys()
        assert presence.heartbeat_intervals.keys() <= presence.worker_heartbeats.keys()
        assert presence.last_progress.keys() <= self.state.tasks.keys()
        assert presence.reported_done.keys() <= self.state.tasks.keys()
        assert presence.reassigned_splits.keys() <= self.state.iterations.keys()
        assert not presence.uploads.keys() & self.state.plan_sizes.keys()
        activity = presence.activity
        assert activity.iterations.keys() == self.state.iterations.keys()
        assert activity.tasks.keys() <= self.state.tasks.keys()
        assert activity.workers.keys() <= self.state.workers.keys()
        assert activity.clients.keys() <= self.state.clients.keys()
        assert activity.jobs.keys() <= self.state.jobs.keys()

    # --- requests, with what most scenarios do not care about filled in -------------------------

    def put_plan(self, plan: bytes = PLAN) -> Any:
        digest = hashlib.sha256(plan).digest()
        return self.ask(
            messages.PutPlan(digest=digest, offset=0, total_bytes=len(plan), chunk=plan)
        )

    def register(self, positions: int | None = 100, **fields: Any) -> str:
        self.put_plan()
        request = registration(positions, **{"token": f"token {len(self.facts)}", **fields})
        return str(self.ask(request).dataset_id)

    def add_worker(self, worker_id: str, address: str = "", **fields: Any) -> Any:
        address = address or f"{worker_id}:1"
        return self.ask(messages.RegisterWorker(worker_id=worker_id, address=address, **fields))

    def open(self, client_id: str, dataset_id: str = "1000", **fields: Any) -> Any:
        return self.ask(opening(client_id, dataset_id, **fields))

    def heartbeat(self, client_id: str, **fields: Any) -> Any:
        return self.ask(messages.ClientHeartbeat(client_id=client_id, **fields))

    def beat(self, worker_id: str, *tasks: int) -> tuple[int, ...]:
        return tuple(self.beaten(worker_id, *tasks).tasks_to_delete)

    def beaten(self, worker_id: str, *tasks: int) -> Any:
        """Send a worker's heartbeat; return the whole reply."""
        return self.ask(messages.WorkerHeartbeat(worker_id=worker_id, tasks=tasks))

    def settle(
        self,
        client_id: str,
        task_id: int,
        *received: tuple[int, int],
        touched: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Say what a client received whole, and of what else it received something."""
        self.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=task_id,
                delivered=received,
                partially_delivered=touched,
            )
        )

    def close(self, client_id: str) -> None:
        self.ask(messages.CloseIteration(client_id=client_id))

    def finish(self, worker_id: str, task_id: int, **fields: Any) -> None:
        self.ask(messages.FinishTask(worker_id=worker_id, **self.shown(task_id), **fields))

    def fail(self, worker_id: str, task_id: int, reason: str = "a bug") -> None:
        self.ask(messages.FailTask(worker_id=worker_id, reason=reason, **self.shown(task_id)))

    def leaving(self, worker_id: str) -> None:
        self.ask(messages.DrainWorker(worker_id=worker_id))

    def left(self, worker_id: str) -> None:
        self.ask(messages.UnregisterWorker(worker_id=worker_id))

    def lose(self, worker_id: str, *, exited: bool = True) -> None:
        """Let a worker be silent until it is lost, while everybody else is heard.

        Args:
            worker_id: Which worker.
            exited: Whether its process was seen to end.
        """
        if exited:
            self.processes.exited.add(worker_id)
        while worker_id in self.state.workers:
            self.tick(self.limits.tick_interval)
            for other in [*self.state.workers]:
                if other != worker_id:
                    self.beat(other)
            for client_id in [*self.state.clients]:
                self.heartbeat(client_id)

    def hand_back(self, worker_id: str, task_id: int, *units: tuple[int, int]) -> None:
        self.ask(messages.ReturnSplits(worker_id=worker_id, splits=units, **self.shown(task_id)))

    def drop(
        self,
        client_id: str,
        task_id: int,
        *units: tuple[int, int],
        lost: tuple[tuple[int, int], ...] = (),
        **fields: Any,
    ) -> None:
        """Let a task's worker say what a client that is gone had not acknowledged."""
        worker_id = self.state.tasks[task_id].worker_id
        self.ask(
            messages.ReportDepartedClient(
                worker_id=worker_id,
                client_id=client_id,
                unacknowledged=units,
                possibly_lost=lost,
                **self.shown(task_id),
                **fields,
            )
        )

    def deal(self, task_id: int, max_splits: int = 1000, **fields: Any) -> Any:
        """Ask for a task's next units; return the reply."""
        return self.ask(self.split_request(task_id, max_splits=max_splits, **fields))

    def split(self, task_id: int, max_splits: int = 1000, **fields: Any) -> tuple[int, int]:
        reply = self.deal(task_id, max_splits, **fields)
        assert not reply.wait
        return reply.start, reply.stop

    def split_request(self, task_id: int, **fields: Any) -> messages.GetSplit:
        task = self.state.tasks.get(task_id)
        shown = {
            "worker_id": "" if task is None else task.worker_id,
            "assignment_number": 0 if task is None else task.assigned.num_assignments,
            "max_splits": 1000,
            "num_done": 0 if task is None else task.assigned.num_done,
            **self.shown(task_id),
        }
        return messages.GetSplit(**{**shown, **fields})

    def shown(self, task_id: int) -> dict[str, Any]:
        return {"task_id": task_id, "task_token": self.state.task_token(task_id)}


def registration(positions: int | None = 100, **fields: Any) -> messages.RegisterDataset:
    return messages.RegisterDataset(
        **{
            "token": "token",
            "digest": hashlib.sha256(PLAN).digest(),
            "fingerprint": "fingerprint",
            "element_spec": b"spec",
            "cardinality": 100,
            "num_splits": positions,
            **fields,
        }
    )


def opening(client_id: str, dataset_id: str = "1000", **fields: Any) -> messages.OpenIteration:
    """Return a request; fields of its terms may stand among the others."""
    terms = {
        name: fields.pop(name) for name in messages.JobOptions.__struct_fields__ if name in fields
    }
    return messages.OpenIteration(
        **{
            "client_id": client_id,
            "dataset_id": dataset_id,
            "job_name": None,
            "epoch": (0,),
            "seed": 7,
            "options": messages.JobOptions(**{"processing_mode": OFF, **terms}),
            **fields,
        }
    )


def saving(save: str = "0" * 16, **fields: Any) -> messages.StartSave:
    return messages.StartSave(
        **{
            "save_id": save,
            "dataset_id": "1000",
            "path": "/saved",
            "plan_digest": "digest",
            "spec": b"",
            "seed": 7,
            **fields,
        }
    )


def look_at(scene: Scenario) -> tuple[OpenSave, ...]:
    """Return what is to be done with the directories of saves."""
    return tuple(scene.ask(ListOpenSaves(known_files={})).saves)  # type: ignore[arg-type]
