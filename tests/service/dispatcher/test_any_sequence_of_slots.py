"""Any sequence of requests, losses and restarts keeps a state sound that has slots of workers."""

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
    """Requests as anyone might send them, to a dispatcher with two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.scene.facts[:1] = [STARTED, events.SlotsConfigured(patterns=PATTERNS)]
        self.scene.restart()

    @rule(
        client_id=CLIENTS,
        dataset_id=DATASETS,
        mode=st.sampled_from(STATIC),
        job_name=st.sampled_from([None, "j", "s"]),
        pass_number=st.sampled_from([(), (0,), (1,)]),
    )
    def open_shares(
        self,
        client_id: str,
        dataset_id: str,
        mode: int,
        job_name: str | None,
        pass_number: tuple[int, ...],
    ) -> None:
        self.ask(
            opening(
                client_id,
                dataset_id,
                processing_mode=mode,
                job_name=job_name,
                epoch=pass_number,
            )
        )

    @rule(data=st.data())
    def end_share(self, data: st.DataObject) -> None:
        """Let a worker say that it has read its share, or that it leaves midway."""
        tasks = [task for task in self.scene.state.tasks.values() if task.mode_state]
        if tasks:
            task = data.draw(st.sampled_from(tasks))
            shown = self.scene.shown(task.task_id)
            cut = data.draw(st.booleans())
            self.ask(messages.FinishTask(worker_id=task.worker_id, cut_short=cut, **shown))

    def teardown(self) -> None:
        """No two workers ever held one slot, and a share is read by whoever holds its slot."""
        super().teardown()
        slots: list[WorkerSlot] = self.scene.state.slots
        holders = [slot.worker_id for slot in slots if slot.worker_id]
        assert len(set(holders)) == len(holders)
        held: dict[str, int | None] = {}
        for fact in self.scene.facts:
            if isinstance(fact, events.WorkerRegistered):
                held.setdefault(fact.worker_id, fact.slot)
            elif isinstance(fact, events.WorkerLeft | events.WorkerLost):
                held.pop(fact.worker_id)
            elif isinstance(fact, events.TaskCreated) and isinstance(fact.mode_state, DatasetShard):
                assert held[fact.worker_id] == fact.mode_state.index


TestAnySequenceOfSlots = AnySequenceOfSlots.TestCase
TestAnySequenceOfSlots.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
