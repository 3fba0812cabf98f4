"""A dispatcher for scenarios: requests with times in, facts and replies out."""

from __future__ import annotations

import copy
from typing import Any

from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.decision import Limits
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC


class Scenario:
    """A dispatcher, the facts that it came to, and the time."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self.limits = Limits(**limits)
        self.facts: list[Update] = []
        self.dispatcher = Dispatcher(DispatcherState(), self.limits, self.now)

    @property
    def state(self) -> DispatcherState:
        return self.dispatcher.state

    def ask(self, request: messages.DispatcherRequest) -> Any:
        before = copy.deepcopy(self.state)
        try:
            decision = self.dispatcher.handle(request, self.now)
        except Exception:
            assert self.state == before, "a refused request changed the state"
            raise
        self.facts += decision.updates
        return decision.reply

    def tick(self, seconds: float = 0.0) -> list[Update]:
        self.now += seconds
        facts = self.dispatcher.tick(self.now)
        self.facts += facts
        return facts

    def restart(self) -> None:
        self.dispatcher = Dispatcher(self.replay(), self.limits, self.now)

    def replay(self) -> DispatcherState:
        state = DispatcherState()
        for fact in self.facts:
            state.apply(fact)
        return state

    def check(self) -> None:
        self.state.validate()
        assert self.replay() == self.state
        presence = self.dispatcher.presence
        assert presence.workers.keys() == self.state.workers.keys()
        assert presence.clients.keys() == self.state.clients.keys()
        assert presence.idle.keys() == self.state.iterations.keys()
        assert presence.suspects <= presence.workers.keys()

    # --- requests, with what most scenarios do not care about filled in -------------------------

    def register(self, sizes: tuple[int, ...] = (100,), **fields: Any) -> str:
        request = registration(sizes, **{"token": f"token {len(self.facts)}", **fields})
        return str(self.ask(request).dataset_id)

    def add_worker(self, worker_id: str, address: str = "", **fields: Any) -> Any:
        address = address or f"{worker_id}:1"
        return self.ask(messages.RegisterWorker(worker_id=worker_id, address=address, **fields))

    def open(self, client_id: str, dataset_id: str = "1000", **fields: Any) -> Any:
        return self.ask(opening(client_id, dataset_id, **fields))

    def heartbeat(self, client_id: str) -> Any:
        return self.ask(messages.ClientHeartbeat(client_id=client_id))

    def beat(self, worker_id: str, *tasks: int) -> tuple[int, ...]:
        reply = self.ask(messages.WorkerHeartbeat(worker_id=worker_id, tasks=tasks))
        return tuple(reply.tasks_to_delete)

    def finish(self, worker_id: str, task_id: int) -> None:
        self.ask(messages.FinishTask(worker_id=worker_id, task_id=task_id))

    def close(self, client_id: str) -> None:
        self.ask(messages.CloseIteration(client_id=client_id))

    def split(self, task_id: int, number: int, **fields: Any) -> tuple[int, int]:
        reply = self.ask(split_request(task_id, number, **fields))
        return reply.start, reply.stop


def registration(sizes: tuple[int, ...] = (100,), **fields: Any) -> messages.RegisterDataset:
    return messages.RegisterDataset(
        **{
            "token": "token",
            "plan": b"plan",
            "fingerprint": "fingerprint",
            "element_spec": b"spec",
            "cardinality": 100,
            "split_sizes": sizes,
            **fields,
        }
    )


def opening(client_id: str, dataset_id: str = "1000", **fields: Any) -> messages.OpenIteration:
    return messages.OpenIteration(
        **{
            "client_id": client_id,
            "dataset_id": dataset_id,
            "processing_mode": OFF,
            "job_name": None,
            "repetition": 0,
            **fields,
        }
    )


def split_request(task_id: int, number: int, **fields: Any) -> messages.GetSplit:
    return messages.GetSplit(
        **{
            "task_id": task_id,
            "source": 0,
            "repetition": (0,),
            "number": number,
            "want": 1000,
            **fields,
        }
    )
