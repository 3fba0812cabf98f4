"""Worker process: core, connection to the dispatcher, and producers."""

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
"""Memory limits of each task."""


class WorkerProcess(Process):
    """Process that runs tasks; a restart is a new process at the same address.

    Args:
        network: Network of the simulation.
        name: Name in the trace, and host in the default address.
        dispatcher: Address of the dispatcher.
        plan: Dataset that its tasks read.
        bounds: Memory limits of each task.
        address: Address to listen at; None for a separate host.
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
        self.is_shutting_down = self.has_stopped = self.was_killed_by_split = False
        self.was_ever_shut_down = False
        self.starts = self.split_kills = 0
        #: Factor by which its work takes longer.
        self.slowness = 1.0
        self._dispatcher_address, self.bounds = dispatcher, bounds

    def start(self) -> None:
        super().start()
        self.is_shutting_down = self.has_stopped = self.was_killed_by_split = False
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
        self._pending_calls: dict[int, DispatcherRequest] = {}
        self._dispatcher = Link(
            self.network, self, self._dispatcher_address, self._reply_received, self._lost
        )
        self.network.listen(self, self.address, self._request_received)
        self.act()

    def _new_id(self) -> str:
        self.starts += 1
        return f"{self.name}-{self.starts}"

    def drain(self, seconds: float) -> None:
        """Deliver buffered output, then stop."""
        if self.is_up and not self.is_paused and not self.is_shutting_down:
            self.log("drains for", f"{seconds:.1f} s")
            self.is_shutting_down = self.was_ever_shut_down = True
            self.session.drain(seconds, self.simulation.now)
            self.act()

    def stop(self) -> None:
        """Return splits, and stop."""
        if self.is_up and not self.is_paused:
            self.log("stops")
            self.is_shutting_down = self.was_ever_shut_down = True
            self.session.stop(self.simulation.now)
            self.act()

    def buffered_output(self) -> list[tuple[int, int]]:
        """Return (batches without a request, unacknowledged bytes) of each task."""
        tasks = self.session.tasks._tasks.values()
        outputs = [_buffered_output(task._delivery) for task in tasks]
        return [each for each in outputs if each is not None]

    # --- connections --------------------------------------------------------------------------

    def _request_received(self, request: Request) -> None:
        assert isinstance(request.message, GetElements)
        self.session.request_received(request, request.message, self.simulation.now)
        self.act()

    def _reply_received(self, ticket: int, answer: Any, content: Any) -> None:
        call = self._pending_calls.pop(ticket)
        self.log("hears", answer)
        self.session.reply_received(call, answer, self.simulation.now)
        self.act()

    def _lost(self, error: UnavailableError) -> None:
        calls, self._pending_calls = list(self._pending_calls.values()), {}
        if self.simulation.random.random() < 0.8:
            for message in calls:
                self.session.reply_received(message, error, self.simulation.now)
            self.act()

    def woken(self) -> None:
        self.act()

    def act(self) -> None:
        """Execute the core's actions until there are none."""
        if self._is_acting:
            return  # the running call handles it afterwards
        self._is_acting = True
        try:
            while True:
                actions = self.session.act(self.simulation.now)
                if not self._do(actions):
                    break
        finally:
            self._is_acting = False

    def _do(self, actions: WorkerActions[Request]) -> bool:
        """Execute actions; return whether there may be more."""
        for warning in actions.warnings:
            self.log("warns", warning)
        for call in actions.calls:
            self.log("asks", call)
            self._pending_calls[self._dispatcher.send(call)] = call
        for request, answer in actions.replies:
            replies.send_reply(request, answer, production.frame_of)  # type: ignore[arg-type]
        for start in actions.starts:
            self.log("starts", start.definition)
            self._producers[start.producer] = _Producer(self, start)
        steps: list[tuple[int, Callable[[_Producer], None]]] = []
        steps += [(start.producer, _Producer.advance) for start in actions.starts]
        steps += [
            (each, partial(_Producer.resume, max_elements=actions.max_elements.get(each)))
            for each in actions.resumes
        ]
        steps += [
            (each.producer, partial(_Producer.grant_splits, grant=each)) for each in actions.grants
        ]
        steps += [(each, _Producer.defer) for each in actions.deferrals]
        steps += [(each, _Producer.stop) for each in actions.stops]
        for number, step in steps:
            if self.is_up and number in self._producers:
                step(self._producers[number])
        for number in actions.cancellations:
            self.forget(number)
        if actions.is_finished and self.is_up:
            self.has_stopped = True
            self.crash("has left")
        if self.is_up:
            self.wake_in(actions.wake_in)
        return bool(steps) and self.is_up

    def forget(self, producer: int) -> None:
        removed = self._producers.pop(producer, None)
        if removed is not None:
            removed.is_over = True


def _buffered_output(delivery: Any) -> tuple[int, int] | None:
    if isinstance(delivery, RoundDelivery):
        return delivery._num_produced - delivery._num_complete, 0
    if isinstance(delivery, FifoDelivery):
        unacknowledged = sum(batch.size for batch in delivery._unacknowledged_replies.batches())
        return len(delivery._ready_batches), unacknowledged
    return None


class _Producer:
    """Stand-in for the thread that reads a task's plan."""

    def __init__(self, worker: WorkerProcess, start: StartProducer) -> None:
        self.worker, self.number = worker, start.producer
        self.is_over = False
        self.max_elements: int | None = None
        task = start.definition
        self._steps: Production | FileSteps = produce(
            worker.plan,
            worker.simulation.random,
            assigns_splits=task.assigns_splits,
            max_batch_bytes=start.max_batch_bytes,
            has_ids=task.has_element_ids,
            max_elements=MAX_BATCH_ELEMENTS if task.num_consumers is None else 1,
            requested_elements=lambda: self.max_elements,
            shard=task.shard_index or 0,
            num_shards=task.num_shards or 1,
            in_order=is_ordered(task),
            to_files=task.save_destination is not None,
        )
        if task.save_destination is not None:
            self._steps = FileSteps(self._steps, worker.simulation.random)
        self._has_room, self._is_stopped = True, False
        self._needs: Need | None = None

    def resume(self, max_elements: int | None) -> None:
        self._has_room, self.max_elements = True, max_elements
        if self._needs is Need.ROOM:
            self.advance()

    def defer(self) -> None:
        files = self._steps.defer() if isinstance(self._steps, FileSteps) else None
        if files is not None and self._needs is Need.SPLITS:
            self._has_room = False
            self.worker.session.tasks.batch_produced(self.number, files, self.worker.simulation.now)

    def stop(self) -> None:
        self._is_stopped = True
        if self._needs is Need.ROOM:
            self.advance()

    def grant_splits(self, grant: SplitGrant) -> None:
        assert self._needs is Need.SPLITS, f"producer {self.number} did not request splits"
        if grant.is_pause:
            self.advance(production.Grant(0, 0, is_pause=True))
        elif grant.splits is None:
            self.advance()
        else:
            self.advance(production.Grant(*grant.splits, grant.deliver_at_once, grant.ordinals))

    def advance(self, grant: production.Grant | None = None) -> None:
        """Continue until it must wait."""
        worker = self.worker
        session, now = worker.session, worker.simulation.now
        while not self.is_over and worker.is_up:
            if self._needs is Need.ROOM:
                if self._is_stopped:
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
                worker.was_killed_by_split = True
                worker.split_kills += 1
                worker.crash("is killed by a split")
            elif isinstance(step, Need):
                self._needs = step
                if step is Need.SPLITS:
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
