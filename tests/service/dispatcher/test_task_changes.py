"""Heartbeat replies with only the changes of an iteration's tasks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.service.client.task_list import TaskList
from headrace.service.messages import ClientHeartbeatReply
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


class Reader:
    """A client that knows tasks from complete updates and changes."""

    def __init__(self, scene: Scenario, client_id: str) -> None:
        self.scene, self.client_id = scene, client_id
        self.version, self.tasks = -1, TaskList()
        self.known: set[int] = set()

    def ask(self, *, accepts_changes: bool = True) -> ClientHeartbeatReply:
        reply: Any = self.scene.heartbeat(
            self.client_id, known_version=self.version, accepts_changes=accepts_changes
        )
        return reply

    def hear(self, reply: ClientHeartbeatReply) -> None:
        update = self.tasks.complete(reply)
        if not update.unchanged:
            self.version = update.version
            self.known = {task.task_id for task in update.tasks}


@pytest.fixture
def reader(scene: Scenario) -> Reader:
    for number in range(5):
        scene.add_worker(f"w{number}")
    scene.open("c", scene.register(1000), processing_mode=DYNAMIC, job_name="job")
    reader = Reader(scene, "c")
    reader.hear(reader.ask())
    return reader


def test_update_after_a_loss_lists_only_the_lost_task(scene: Scenario, reader: Reader) -> None:
    before = reader.version
    scene.lose("w1", exited=False)
    reply = reader.ask()
    assert reply.tasks == ()
    assert reply.ended_tasks == (4001,)
    assert reply.changed_since == before


def test_update_after_a_registration_lists_only_the_new_task(
    scene: Scenario, reader: Reader
) -> None:
    scene.add_worker("new")
    reply = reader.ask()
    assert [task.worker_id for task in reply.tasks] == ["new"]
    assert not reply.ended_tasks


def test_client_of_an_earlier_release_receives_all_tasks(scene: Scenario, reader: Reader) -> None:
    scene.lose("w1")
    reply = reader.ask(accepts_changes=False)
    assert len(reply.tasks) == 4
    assert reply.changed_since == -1


def test_restarted_dispatcher_sends_all_tasks(scene: Scenario, reader: Reader) -> None:
    scene.restart()
    scene.lose("w1")
    scene.restart()
    assert reader.ask().changed_since == -1


def test_changed_tags_are_sent_with_the_next_change(scene: Scenario, reader: Reader) -> None:
    scene.add_worker("w0", tags=("tag",))
    scene.lose("w1")
    assert reader.ask().tasks[0].tags == ("tag",)


def test_delayed_changes_are_ignored(scene: Scenario, reader: Reader) -> None:
    scene.add_worker("new")
    delayed = reader.ask()
    reader.hear(reader.ask())
    scene.lose("new")
    reader.hear(reader.ask())
    known = set(reader.known)
    reader.hear(delayed)
    assert reader.known == known


@pytest.mark.parametrize("seed", range(20))
def test_changes_give_the_same_tasks_as_complete_updates(seed: int) -> None:
    scene, rng = Scenario(), random.Random(seed)
    scene.register(10_000)
    readers: list[Reader] = []
    for step in range(60):
        workers = [*scene.state.workers]
        match rng.randrange(7):
            case 0 | 1:
                scene.add_worker(f"w{step}")
            case 2 if workers:
                scene.unregister_worker(rng.choice(workers))
            case 3 if workers:
                scene.drain_worker(rng.choice(workers))
            case 4:
                name = f"c{step}"
                scene.open(name, processing_mode=DYNAMIC, job_name="job")
                readers.append(Reader(scene, name))
            case 5 if scene.state.tasks:
                task = rng.choice([*scene.state.tasks.values()])
                if task.worker_id in workers:
                    scene.fail(task.worker_id, task.task_id)
            case _:
                for reader in rng.sample(readers, len(readers) // 2):
                    reader.hear(reader.ask())
    for reader in readers:
        reader.hear(reader.ask())
        complete = scene.heartbeat(reader.client_id)
        assert reader.known == {task.task_id for task in complete.tasks}
        assert reader.version == complete.version
