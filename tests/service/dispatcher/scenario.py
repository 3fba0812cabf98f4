"""A dispatcher with simulated time, for scenarios of requests."""

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

#: Options of a job with exactly-once delivery.
EXACTLY: dict[str, Any] = {
    "processing_mode": DYNAMIC,
    "visitation": "exactly_once",
    "job_name": "job",
}

STARTED = DispatcherStarted(dispatcher_id="run", secret=b"secret")
PLAN = b"plan"


class FakeConnections(WorkerConnections):
    """Simulated connections of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.exited: set[str] = set()
        #: Worker -> seconds since its process sent data.
        self.seconds_silent: dict[str, float] = {}

    def seconds_since_data(self, worker_id: str) -> float | None:
        return self.seconds_silent.get(worker_id)

    def has_exited(self, worker_id: str) -> bool:
        return worker_id in self.exited


class Scenario:
    """A dispatcher, its events, and the time."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        #: Whether to check that rejected requests change nothing; slow with many requests.
        self.checks_rejections = True
        self.limits = DispatcherLimits(**limits)
        self.events: list[AnyEvent] = [STARTED]
        self.connections = FakeConnections()
        self.restart()

    @property
    def state(self) -> DispatcherState:
        return self.dispatcher.state

    def ask(self, request: messages.DispatcherRequest) -> Any:
        before = copy.deepcopy(self.state) if self.checks_rejections else None
        try:
            decision, applied = self.dispatcher.handle(request, self.now)
        except Exception:
            assert not self.checks_rejections or self.state == before, (
                "a rejected request changed the state"
            )
            raise
        self.events += applied
        return decision.reply

    def tick(self, seconds: float = 0.0) -> list[AnyEvent]:
        """Let time pass, with a tick at each interval and one at the end."""
        end = self.now + seconds
        applied: list[AnyEvent] = []
        while self.now < end:
            self.now = min(self.now + self.limits.tick_interval, end)
            applied += self.dispatcher.tick(self.now)
        applied += self.dispatcher.tick(self.now)
        self.events += applied
        return applied

    def pause(self, seconds: float) -> list[AnyEvent]:
        """Pause the dispatcher; return the events of the first tick afterwards."""
        self.now += seconds
        applied = self.dispatcher.tick(self.now)
        self.events += applied
        return applied

    def restart(self) -> None:
        self.dispatcher = Dispatcher(self.replay(), self.limits, self.now)
        self.dispatcher.soft_state.connections = self.connections

    def replay(self) -> DispatcherState:
        state = DispatcherState()
        for event in self.events:
            apply(state, event)
        return state

    def check(self) -> None:
        validate(self.state)
        assert self.replay() == self.state
        soft_state = self.dispatcher.soft_state
        assert soft_state.worker_heartbeats.keys() == self.state.workers.keys()
        assert soft_state.client_heartbeats.keys() == self.state.clients.keys()
        assert (
            soft_state.idle_since.keys()
            == soft_state.last_assignments.keys()
            == self.state.iterations.keys()
        )
        assert soft_state.last_task_ends.keys() == self.state.iterations.keys()
        assert soft_state.last_task_losses.keys() <= self.state.iterations.keys()
        assert soft_state.refusing_workers <= soft_state.worker_heartbeats.keys()
        assert soft_state.heartbeat_intervals.keys() <= soft_state.worker_heartbeats.keys()
        assert soft_state.last_progress.keys() <= self.state.tasks.keys()
        assert soft_state.reported_done.keys() <= self.state.tasks.keys()
        assert soft_state.reassigned_splits.keys() <= self.state.iterations.keys()
        assert not soft_state.uploads.keys() & self.state.plan_sizes.keys()
        activity = soft_state.activity
        assert activity.iterations.keys() == self.state.iterations.keys()
        assert activity.tasks.keys() <= self.state.tasks.keys()
        assert activity.workers.keys() <= self.state.workers.keys()
        assert activity.clients.keys() <= self.state.clients.keys()
        assert activity.jobs.keys() <= self.state.jobs.keys()

    # --- requests, with default values for most fields ------------------------------------------

    def put_plan(self, plan: bytes = PLAN) -> Any:
        digest = hashlib.sha256(plan).digest()
        return self.ask(
            messages.PutPlan(digest=digest, offset=0, total_bytes=len(plan), chunk=plan)
        )

    def register(self, num_splits: int | None = 100, **fields: Any) -> str:
        self.put_plan()
        request = registration(num_splits, **{"token": f"token {len(self.events)}", **fields})
        return str(self.ask(request).dataset_id)

    def add_worker(self, worker_id: str, address: str = "", **fields: Any) -> Any:
        address = address or f"{worker_id}:1"
        return self.ask(messages.RegisterWorker(worker_id=worker_id, address=address, **fields))

    def open(self, client_id: str, dataset_id: str = "1000", **fields: Any) -> Any:
        return self.ask(opening(client_id, dataset_id, **fields))

    def heartbeat(self, client_id: str, **fields: Any) -> Any:
        return self.ask(messages.ClientHeartbeat(client_id=client_id, **fields))

    def worker_heartbeat(self, worker_id: str, *tasks: int) -> tuple[int, ...]:
        return tuple(self.worker_heartbeat_reply(worker_id, *tasks).tasks_to_delete)

    def worker_heartbeat_reply(self, worker_id: str, *tasks: int) -> Any:
        """Send a worker's heartbeat; return the whole reply."""
        return self.ask(messages.WorkerHeartbeat(worker_id=worker_id, tasks=tasks))

    def report_delivery(
        self,
        client_id: str,
        task_id: int,
        *received: tuple[int, int],
        partially_delivered: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Report the splits that a client received, completely and in part."""
        self.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=task_id,
                delivered=received,
                partially_delivered=partially_delivered,
            )
        )

    def close(self, client_id: str) -> None:
        self.ask(messages.CloseIteration(client_id=client_id))

    def finish(self, worker_id: str, task_id: int, **fields: Any) -> None:
        self.ask(messages.FinishTask(worker_id=worker_id, **self.task_fields(task_id), **fields))

    def fail(self, worker_id: str, task_id: int, reason: str = "a bug") -> None:
        self.ask(messages.FailTask(worker_id=worker_id, reason=reason, **self.task_fields(task_id)))

    def drain_worker(self, worker_id: str) -> None:
        self.ask(messages.DrainWorker(worker_id=worker_id))

    def unregister_worker(self, worker_id: str) -> None:
        self.ask(messages.UnregisterWorker(worker_id=worker_id))

    def lose(self, worker_id: str, *, exited: bool = True) -> None:
        """Let a worker be silent until it is lost, while all other peers send heartbeats.

        Args:
            worker_id: Worker to lose.
            exited: Whether its process is seen to end.
        """
        if exited:
            self.connections.exited.add(worker_id)
        while worker_id in self.state.workers:
            self.tick(self.limits.tick_interval)
            for other in [*self.state.workers]:
                if other != worker_id:
                    self.worker_heartbeat(other)
            for client_id in [*self.state.clients]:
                self.heartbeat(client_id)

    def return_splits(self, worker_id: str, task_id: int, *splits: tuple[int, int]) -> None:
        self.ask(
            messages.ReturnSplits(worker_id=worker_id, splits=splits, **self.task_fields(task_id))
        )

    def report_departed_client(
        self,
        client_id: str,
        task_id: int,
        *splits: tuple[int, int],
        lost: tuple[tuple[int, int], ...] = (),
        **fields: Any,
    ) -> None:
        """Let a worker report the unacknowledged splits of a departed client."""
        worker_id = self.state.tasks[task_id].worker_id
        self.ask(
            messages.ReportDepartedClient(
                worker_id=worker_id,
                client_id=client_id,
                unacknowledged=splits,
                possibly_lost=lost,
                **self.task_fields(task_id),
                **fields,
            )
        )

    def get_split(self, task_id: int, max_splits: int = 1000, **fields: Any) -> Any:
        """Request the next splits of a task; return the reply."""
        return self.ask(self.split_request(task_id, max_splits=max_splits, **fields))

    def split(self, task_id: int, max_splits: int = 1000, **fields: Any) -> tuple[int, int]:
        reply = self.get_split(task_id, max_splits, **fields)
        assert not reply.wait
        return reply.start, reply.stop

    def split_request(self, task_id: int, **fields: Any) -> messages.GetSplit:
        task = self.state.tasks.get(task_id)
        shown = {
            "worker_id": "" if task is None else task.worker_id,
            "assignment_number": 0 if task is None else task.assigned.num_assignments,
            "max_splits": 1000,
            "num_done": 0 if task is None else task.assigned.num_done,
            **self.task_fields(task_id),
        }
        return messages.GetSplit(**{**shown, **fields})

    def task_fields(self, task_id: int) -> dict[str, Any]:
        return {"task_id": task_id, "task_token": self.state.task_token(task_id)}


def registration(num_splits: int | None = 100, **fields: Any) -> messages.RegisterDataset:
    return messages.RegisterDataset(
        **{
            "token": "token",
            "digest": hashlib.sha256(PLAN).digest(),
            "fingerprint": "fingerprint",
            "element_spec": b"spec",
            "cardinality": 100,
            "num_splits": num_splits,
            **fields,
        }
    )


def opening(client_id: str, dataset_id: str = "1000", **fields: Any) -> messages.OpenIteration:
    """Return a request; job options may be given among the other fields."""
    options = {
        name: fields.pop(name) for name in messages.JobOptions.__struct_fields__ if name in fields
    }
    return messages.OpenIteration(
        **{
            "client_id": client_id,
            "dataset_id": dataset_id,
            "job_name": None,
            "epoch": (0,),
            "seed": 7,
            "options": messages.JobOptions(**{"processing_mode": OFF, **options}),
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


def list_open_saves(scene: Scenario) -> tuple[OpenSave, ...]:
    """Return the open saves whose directories need work."""
    return tuple(scene.ask(ListOpenSaves(known_files={})).saves)  # type: ignore[arg-type]
