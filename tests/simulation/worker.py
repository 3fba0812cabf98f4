"""A worker as a process: its session, its connection to the dispatcher, and its producers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.errors import UnavailableError
from headrace.service.messages import DispatcherRequest, GetElements
from headrace.service.modes.coordinated_reads.delivery import Rounds
from headrace.service.worker import answering
from headrace.service.worker.agenda import Actions, Grant, Start
from headrace.service.worker.first_come import FirstCome
from headrace.service.worker.hand_out import Bounds
from headrace.service.worker.portion import Portion
from headrace.service.worker.producer import MOST_ELEMENTS
from headrace.service.worker.session import Session
from headrace.service.worker.ways import is_in_order
from tests.simulation import production
from tests.simulation.kernel import Process
from tests.simulation.network import Link, Network, Request
from tests.simulation.production import FileSteps, Need, Plan, Production, produce

__all__ = ["BOUNDS", "WorkerProcess"]

BOUNDS = Bounds(client_bytes=4 << 20, total_bytes=8 << 20)
"""Of what is kept of each worker's tasks."""


class WorkerProcess(Process):
    """Runs tasks. One that is begun again is another process at the same address.

    Args:
        network: What connects it.
        name: Its name, and the host in its address.
        dispatcher: The dispatcher's address.
        plan: What its tasks read.
        bounds: How much of a task may be kept.
        address: Where it listens; None: on a host of its own.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        dispatcher: str,
        plan: Plan,
        bounds: Bounds = BOUNDS,
        address: str | None = None,
    ) -> None:
        super().__init__(network, name)
        self.address = address or f"{name}:1"
        self.plan = plan
        self.is_leaving = self.has_left = self.was_killed_by_a_unit = False
        self.has_ever_left = False
        self.starts = self.killed_by_units = 0
        #: How many times as long as others it takes for everything.
        self.slowness = 1.0
        self._dispatcher_address, self.bounds = dispatcher, bounds

    def start(self) -> None:
        super().start()
        self.is_leaving = self.has_left = self.was_killed_by_a_unit = False
        self.session: Session[Request] = Session(
            self.address,
            self._dispatcher_address,
            self.simulation.now,
            new_id=self._new_id,
            chance=self.simulation.random.random,
            bounds=self.bounds,
        )
        self._producers: dict[int, _Producer] = {}
        self._is_acting = False
        self._asked: dict[int, DispatcherRequest] = {}
        self._dispatcher = Link(
            self.network, self, self._dispatcher_address, self._said, self._lost
        )
        self.network.listen(self, self.address, self._take)
        self.act()

    def _new_id(self) -> str:
        self.starts += 1
        return f"{self.name}-{self.starts}"

    def drain(self, seconds: float) -> None:
        """Deliver what there is, then leave."""
        if self.is_up and not self.is_paused and not self.is_leaving:
            self.log("drains for", f"{seconds:.1f} s")
            self.is_leaving = self.has_ever_left = True
            self.session.drain(seconds, self.simulation.now)
            self.act()

    def stop(self) -> None:
        """Hand back, and leave."""
        if self.is_up and not self.is_paused:
            self.log("stops")
            self.is_leaving = self.has_ever_left = True
            self.session.stop(self.simulation.now)
            self.act()

    def kept(self) -> list[tuple[int, int]]:
        """Return of each task the portions that nobody asked for, and the bytes that are out."""
        tasks = self.session.tasks._tasks.values()
        kept = [_kept(task._hand_out) for task in tasks]
        return [each for each in kept if each is not None]

    # --- connections --------------------------------------------------------------------------

    def _take(self, request: Request) -> None:
        assert isinstance(request.message, GetElements)
        self.session.requested(request, request.message, self.simulation.now)
        self.act()

    def _said(self, ticket: int, answer: Any, content: Any) -> None:
        asked = self._asked.pop(ticket)
        self.log("hears", answer)
        self.session.answered(asked, answer, self.simulation.now)
        self.act()

    def _lost(self, error: UnavailableError) -> None:
        asked, self._asked = list(self._asked.values()), {}
        if self.simulation.random.random() < 0.8:
            for message in asked:
                self.session.answered(message, error, self.simulation.now)
            self.act()

    def woken(self) -> None:
        self.act()

    def act(self) -> None:
        """Do what the session wants done, until it wants nothing more."""
        if self._is_acting:
            return  # whoever acts sees it when this is over
        self._is_acting = True
        try:
            while True:
                actions = self.session.act(self.simulation.now)
                if not self._do(actions):
                    break
        finally:
            self._is_acting = False

    def _do(self, actions: Actions[Request]) -> bool:
        """Carry actions out; return whether there may be more."""
        for warning in actions.warnings:
            self.log("warns", warning)
        for call in actions.calls:
            self.log("asks", call)
            self._asked[self._dispatcher.send(call)] = call
        for request, answer in actions.answers:
            answering.answer(request, answer, production.frame_of)  # type: ignore[arg-type]
        for start in actions.starts:
            self.log("starts", start.definition)
            self._producers[start.producer] = _Producer(self, start)
        steps: list[tuple[int, Callable[[_Producer], None]]] = []
        steps += [(start.producer, _Producer.advance) for start in actions.starts]
        steps += [
            (each, partial(_Producer.resume, most=actions.most.get(each)))
            for each in actions.resumes
        ]
        steps += [(each.producer, partial(_Producer.take, grant=each)) for each in actions.grants]
        steps += [(each, _Producer.let_wait) for each in actions.waits]
        steps += [(each, _Producer.cut) for each in actions.cuts]
        for number, step in steps:
            if self.is_up and number in self._producers:
                step(self._producers[number])
        for number in actions.closes:
            self.forget(number)
        if actions.over and self.is_up:
            self.has_left = True
            self.crash("has left")
        if self.is_up:
            self.wake_in(actions.wake_in)
        return bool(steps) and self.is_up

    def forget(self, producer: int) -> None:
        known = self._producers.pop(producer, None)
        if known is not None:
            known.is_over = True


def _kept(hand_out: Any) -> tuple[int, int] | None:
    if isinstance(hand_out, Rounds):
        return hand_out._made - hand_out._whole, 0
    if isinstance(hand_out, FirstCome):
        out = sum(portion.size for portion in hand_out._delivery.portions())
        return len(hand_out._ready), out
    return None


class _Producer:
    """Stands for the thread that reads a task's plan."""

    def __init__(self, worker: WorkerProcess, start: Start) -> None:
        self.worker, self.number = worker, start.producer
        self.is_over = False
        self.most: int | None = None
        task = start.definition
        self._steps: Production | FileSteps = produce(
            worker.plan,
            worker.simulation.random,
            is_dealt=task.assigns_splits,
            portion_bytes=start.portion_bytes,
            origins=task.has_element_ids,
            most=MOST_ELEMENTS if task.num_consumers is None else 1,
            most_now=lambda: self.most,
            shard=task.shard_index or 0,
            of=task.num_shards or 1,
            in_order=is_in_order(task),
            to_files=task.save_destination is not None,
        )
        if task.save_destination is not None:
            self._steps = FileSteps(self._steps, worker.simulation.random)
        self._has_room, self._is_cut = True, False
        self._needs: Need | None = None

    def resume(self, most: int | None) -> None:
        self._has_room, self.most = True, most
        if self._needs is Need.ROOM:
            self.advance()

    def let_wait(self) -> None:
        files = self._steps.let_wait() if isinstance(self._steps, FileSteps) else None
        if files is not None and self._needs is Need.UNITS:
            self._has_room = False
            self.worker.session.tasks.produced(self.number, files, self.worker.simulation.now)

    def cut(self) -> None:
        self._is_cut = True
        if self._needs is Need.ROOM:
            self.advance()

    def take(self, grant: Grant) -> None:
        assert self._needs is Need.UNITS, f"producer {self.number} did not ask for units"
        if grant.is_pause:
            self.advance(production.Grant(0, 0, is_pause=True))
        elif grant.units is None:
            self.advance()
        else:
            self.advance(production.Grant(*grant.units, grant.is_alone, grant.rows))

    def advance(self, grant: production.Grant | None = None) -> None:
        """Go on until it must wait for something."""
        worker = self.worker
        session, now = worker.session, worker.simulation.now
        while not self.is_over and worker.is_up:
            if self._needs is Need.ROOM:
                if self._is_cut:
                    self._end(None)
                    return
                if not self._has_room:
                    return
            self._needs = None
            try:
                step = self._steps.send(grant)
            except StopIteration as end:
                self._end(end.value)
                return
            grant = None
            if isinstance(step, Portion):
                self._has_room = False
                session.tasks.produced(self.number, step, now)
            elif step is Need.DEATH:
                worker.was_killed_by_a_unit = True
                worker.killed_by_units += 1
                worker.crash("is killed by a unit")
            elif isinstance(step, Need):
                self._needs = step
                if step is Need.UNITS:
                    session.tasks.needs_units(self.number, now)
                    return
            else:
                worker.call_later(step * worker.slowness, self._after_work)
                return

    def _after_work(self) -> None:
        if not self.is_over:
            self.advance()
            self.worker.act()

    def _end(self, failure: str | None) -> None:
        self.worker.forget(self.number)
        self.worker.session.tasks.ended(self.number, failure, self.worker.simulation.now)
