"""Parts of sources are dealt to whoever asks."""

from __future__ import annotations

import pytest

from headrace.errors import AbortedError, FailedPreconditionError, NotFoundError
from headrace.plan.source import INFINITE
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def dealing(scene: Scenario, *sizes: int, workers: int = 2) -> list[int]:
    """Open a DYNAMIC iteration; return its tasks."""
    dataset_id = scene.register(sizes=sizes)
    for number in range(workers):
        scene.add_worker(f"w{number}")
    opened = scene.open("c", dataset_id, processing_mode=DYNAMIC)
    return [task.task_id for task in opened.tasks]


def drain(scene: Scenario, tasks: list[int], repetition: tuple[int, ...]) -> list[range]:
    parts, numbers, asking = [], dict.fromkeys(tasks, 1000 * repetition[0]), list(tasks)
    while asking:
        task = asking.pop(0)
        numbers[task] += 1
        start, stop = scene.split(task, numbers[task], repetition=repetition)
        if start < stop:
            parts.append(range(start, stop))
            asking.append(task)
    return parts


def test_parts_are_large_at_first_and_small_near_the_end(scene: Scenario) -> None:
    parts = drain(scene, dealing(scene, 100), (0,))
    assert [index for part in parts for index in part] == list(range(100))
    lengths = [len(part) for part in parts]
    assert lengths[0] == 25
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)


def test_nobody_gets_more_than_it_wants(scene: Scenario) -> None:
    (task, _) = dealing(scene, 100)
    assert scene.split(task, 0, want=3) == (0, 3)
    with pytest.raises(ValueError, match="want=0"):
        scene.split(task, 1, want=0)


def test_the_same_number_gets_the_same_part(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    part = scene.split(first, 0)
    assert scene.split(first, 0) == part
    assert scene.split(second, 0) != part
    scene.restart()
    assert scene.split(first, 0) == part
    scene.split(first, 1)
    with pytest.raises(AbortedError, match="split 0 of source 0 after split 1"):
        scene.split(first, 0)


def test_sources_are_dealt_each_for_itself(scene: Scenario) -> None:
    (task,) = dealing(scene, 10, 20, workers=1)
    assert scene.split(task, 0, source=0) == (0, 5)
    assert scene.split(task, 0, source=1) == (0, 10)
    with pytest.raises(NotFoundError, match="has 2 sources"):
        scene.split(task, 0, source=2)


def test_a_later_pass_begins_anew_and_an_earlier_one_is_over(scene: Scenario) -> None:
    first, second = dealing(scene, 8)
    assert scene.split(first, 0) == (0, 2)
    assert scene.split(first, 1, repetition=(1,)) == (0, 2)
    assert scene.split(second, 0, repetition=(0,)) == (0, 0)
    assert scene.split(second, 1, repetition=(1,)) == (2, 4)


def test_passes_within_passes_are_compared_from_the_outside_in(scene: Scenario) -> None:
    (task,) = dealing(scene, 4, workers=1)
    assert scene.split(task, 0, repetition=(0, 9)) == (0, 2)
    assert scene.split(task, 1, repetition=(1, 0)) == (0, 2)
    assert scene.split(task, 2, repetition=(0, 10)) == (0, 0)


def test_each_pass_deals_everything_once(scene: Scenario) -> None:
    tasks = dealing(scene, 57, workers=3)
    for repetition in range(4):
        parts = drain(scene, tasks, (repetition,))
        assert sorted(index for part in parts for index in part) == list(range(57))


def test_a_source_without_end_is_dealt_for_ever(scene: Scenario) -> None:
    first, second = dealing(scene, INFINITE)
    assert scene.split(first, 0, want=10) == (0, 10)
    assert scene.split(second, 0, want=5) == (10, 15)


def test_an_empty_source_has_no_parts(scene: Scenario) -> None:
    (task,) = dealing(scene, 0, workers=1)
    assert scene.split(task, 0) == (0, 0)
    assert scene.split(task, 1, repetition=(1,)) == (0, 0)


def test_a_task_that_is_over_gets_nothing(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    scene.finish("w0", first)
    assert scene.split(first, 0) == (0, 0)
    scene.add_worker("again", "w1:1")
    assert scene.split(second, 0) == (0, 0)


def test_what_was_dealt_to_a_lost_worker_is_not_dealt_again(scene: Scenario) -> None:
    first, _ = dealing(scene, 100)
    assert scene.split(first, 0, want=10) == (0, 10)
    scene.add_worker("again", "w0:1")
    (task,) = [each.task_id for each in scene.heartbeat("c").tasks if each.worker_id == "again"]
    assert scene.split(task, 0, want=10) == (10, 20)


def test_only_dynamic_deals(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    (task,) = scene.open("c").tasks
    with pytest.raises(FailedPreconditionError, match=r"only ShardingPolicy\.DYNAMIC"):
        scene.split(task.task_id, 0)
    with pytest.raises(NotFoundError, match="task 1 is not known"):
        scene.split(1, 0)
