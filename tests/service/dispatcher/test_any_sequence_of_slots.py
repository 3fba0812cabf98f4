"""Random sequences of requests, losses and restarts keep the invariants with worker slots."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.dispatcher.state import WorkerSlot
from headrace.service.modes.static.records import DatasetShard
from tests.service.dispatcher.scenario import STARTED, opening
from tests.service.dispatcher.test_any_sequence import CLIENTS, DATASETS, AnySequence

PATTERNS = ("host:1", "host:%port%")
STATIC = (ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.HINT)


class AnySequenceOfSlots(AnySequence):
    """Valid and invalid requests to a dispatcher with two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.scene.events[:1] = [STARTED, events.SlotsConfigured(patterns=PATTERNS)]
        self.scene.restart()

    @rule(
        client_id=CLIENTS,
        dataset_id=DATASETS,
        mode=st.sampled_from(STATIC),
        job_name=st.sampled_from([None, "j", "s"]),
        epoch=st.sampled_from([(), (0,), (1,)]),
    )
    def open_shards(
        self,
        client_id: str,
        dataset_id: str,
        mode: int,
        job_name: str | None,
        epoch: tuple[int, ...],
    ) -> None:
        self.ask(
            opening(
                client_id,
                dataset_id,
                processing_mode=mode,
                job_name=job_name,
                epoch=epoch,
            )
        )

    @rule(data=st.data())
    def end_shard(self, data: st.DataObject) -> None:
        """Let a worker finish its shard, or end it early because it drains."""
        tasks = [task for task in self.scene.state.tasks.values() if task.mode_state]
        if tasks:
            task = data.draw(st.sampled_from(tasks))
            task_fields = self.scene.task_fields(task.task_id)
            cut_short = data.draw(st.booleans())
            self.ask(
                messages.FinishTask(worker_id=task.worker_id, cut_short=cut_short, **task_fields)
            )

    def teardown(self) -> None:
        """Check that a slot has at most one holder, which reads its shard."""
        super().teardown()
        slots: list[WorkerSlot] = self.scene.state.slots
        holders = [slot.worker_id for slot in slots if slot.worker_id]
        assert len(set(holders)) == len(holders)
        slot_by_worker: dict[str, int | None] = {}
        for event in self.scene.events:
            if isinstance(event, events.WorkerRegistered):
                slot_by_worker.setdefault(event.worker_id, event.slot)
            elif isinstance(event, events.WorkerLeft | events.WorkerLost):
                slot_by_worker.pop(event.worker_id)
            elif isinstance(event, events.TaskCreated) and isinstance(
                event.mode_state, DatasetShard
            ):
                assert slot_by_worker[event.worker_id] == event.mode_state.index


TestAnySequenceOfSlots = AnySequenceOfSlots.TestCase
TestAnySequenceOfSlots.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
