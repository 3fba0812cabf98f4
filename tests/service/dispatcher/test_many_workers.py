"""More tasks in one iteration than Python allows nested calls."""

from __future__ import annotations

import sys

import pytest

from tests.service.dispatcher.scenario import EXACTLY, Scenario

NUM_WORKERS = sys.getrecursionlimit() + 100


@pytest.fixture
def scene() -> Scenario:
    scene = Scenario()
    scene.checks_rejections = False
    for number in range(NUM_WORKERS):
        scene.add_worker(f"w{number}")
    return scene


def open_dynamic(scene: Scenario, num_splits: int) -> list[int]:
    dataset_id = scene.register(num_splits, has_element_ids=True)
    opened = scene.open("c", dataset_id, **EXACTLY)
    return [task.task_id for task in opened.tasks]


def test_last_split_ends_all_idle_tasks(scene: Scenario) -> None:
    tasks = open_dynamic(scene, 1)
    assert scene.split(tasks[0]) == (0, 1)
    scene.finish("w0", tasks[0])
    assert scene.heartbeat("c").finished
    scene.check()


def test_departure_of_the_last_client_returns_the_splits_of_all_lost_tasks(
    scene: Scenario,
) -> None:
    tasks = open_dynamic(scene, 10 * NUM_WORKERS)
    for task_id in tasks[1:]:
        scene.split(task_id, max_splits=1)
    lose_all_but_the_first(scene)
    assert not scene.state.iterations[2000].pool.returned
    scene.close("c")
    assert scene.state.iterations[2000].pool.returned == ((0, NUM_WORKERS - 1),)
    scene.check()


def lose_all_but_the_first(scene: Scenario) -> None:
    while len(scene.state.workers) > 1:
        scene.tick(scene.limits.tick_interval)
        scene.worker_heartbeat("w0")
        scene.heartbeat("c")
