"""A worker as a process: its session, its connection to the dispatcher, and its producers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.errors import UnavailableError
from headrace.service.messages import DispatcherRequest, GetElements
from headrace.service.modes.coordinated_reads.round_delivery import RoundDelivery
from headrace.service.worker import replies
from headrace.service.worker.core import DataWorkerCore
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.fifo_delivery import FifoDelivery
from headrace.service.worker.pending_actions import SplitGrant, StartProducer, WorkerActions
from headrace.service.worker.producer import MAX_BATCH_ELEMENTS
from headrace.service.worker.registry import is_ordered
from headrace.service.worker.result_batch import ResultBatch
from tests.simulation import production
from tests.simulation.kernel import Process
from tests.simulation.network import Link, Network, Request
from tests.simulation.production import FileSteps, Need, Plan, Production, produce

__all__ = ["BOUNDS", "WorkerProcess"]

BOUNDS = BufferLimits(client_bytes=4 << 20, total_bytes=8 << 20)
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
        bounds: BufferLimits = BOUNDS,
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
        self.session: DataWorkerCore[Request] = DataWorkerCore(
            self.address,
            self._dispatcher_address,
            self.simulation.now,
            new_id=self._new_id,
            random=self.simulation.random.random,
            limits=self.bounds,
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
        kept = [_kept(task._delivery) for task in tasks]
        return [each for each in kept if each is not None]

    # --- connections --------------------------------------------------------------------------

    def _take(self, request: Request) -> None:
        assert isinstance(request.message, GetElements)
        self.session.request_received(request, request.message, self.simulation.now)
        self.act()

    def _said(self, ticket: int, answer: Any, content: Any) -> None:
        asked = self._asked.pop(ticket)
        self.log("hears", answer)
        self.session.reply_received(asked, answer, self.simulation.now)
        self.act()

    def _lost(self, error: UnavailableError) -> None:
        asked, self._asked = list(self._asked.values()), {}
        if self.simulation.random.random() < 0.8:
            for message in asked:
                self.session.reply_received(message, error, self.simulation.now)
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

    def _do(self, actions: WorkerActions[Request]) -> bool:
        """Carry actions out; return whether there may be more."""
        for warning in actions.warnings:
            self.log("warns", warning)
        for call in actions.calls:
            self.log("asks", call)
            self._asked[self._dispatcher.send(call)] = call
        for request, answer in actions.replies:
            replies.send_reply(request, answer, production.frame_of)  # type: ignore[arg-type]
        for start in actions.starts:
            self.log("starts", start.definition)
            self._producers[start.producer] = _Producer(self, start)
        steps: list[tuple[int, Callable[[_Producer], None]]] = []
        steps += [(start.producer, _Producer.advance) for start in actions.starts]
        steps += [
            (each, partial(_Producer.resume, most=actions.max_elements.get(each)))
            for each in actions.resumes
        ]
        steps += [(each.producer, partial(_Producer.take, grant=each)) for each in actions.grants]
        steps += [(each, _Producer.let_wait) for each in actions.deferrals]
        steps += [(each, _Producer.cut) for each in actions.stops]
        for number, step in steps:
            if self.is_up and number in self._producers:
                step(self._producers[number])
        for number in actions.cancellations:
            self.forget(number)
        if actions.is_finished and self.is_up:
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
    if isinstance(hand_out, RoundDelivery):
        return hand_out._num_produced - hand_out._num_complete, 0
    if isinstance(hand_out, FifoDelivery):
        out = sum(portion.size for portion in hand_out._delivery.batches())
        return len(hand_out._ready_batches), out
    return None


class _Producer:
    """Stands for the thread that reads a task's plan."""

    def __init__(self, worker: WorkerProcess, start: StartProducer) -> None:
        self.worker, self.number = worker, start.producer
        self.is_over = False
        self.most: int | None = None
        task = start.definition
        self._steps: Production | FileSteps = produce(
            worker.plan,
            worker.simulation.random,
            is_dealt=task.assigns_splits,
            portion_bytes=start.max_batch_bytes,
            origins=task.has_element_ids,
            most=MAX_BATCH_ELEMENTS if task.num_consumers is None else 1,
            most_now=lambda: self.most,
            shard=task.shard_index or 0,
            of=task.num_shards or 1,
            in_order=is_ordered(task),
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
            self.worker.session.tasks.batch_produced(self.number, files, self.worker.simulation.now)

    def cut(self) -> None:
        self._is_cut = True
        if self._needs is Need.ROOM:
            self.advance()

    def take(self, grant: SplitGrant) -> None:
        assert self._needs is Need.UNITS, f"producer {self.number} did not ask for units"
        if grant.is_pause:
            self.advance(production.Grant(0, 0, is_pause=True))
        elif grant.splits is None:
            self.advance()
        else:
            self.advance(production.Grant(*grant.splits, grant.deliver_at_once, grant.ordinals))

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
            if isinstance(step, ResultBatch):
                self._has_room = False
                session.tasks.batch_produced(self.number, step, now)
            elif step is Need.DEATH:
                worker.was_killed_by_a_unit = True
                worker.killed_by_units += 1
                worker.crash("is killed by a unit")
            elif isinstance(step, Need):
                self._needs = step
                if step is Need.UNITS:
                    session.tasks.splits_needed(self.number, now)
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
        self.worker.session.tasks.producer_ended(self.number, failure, self.worker.simulation.now)
