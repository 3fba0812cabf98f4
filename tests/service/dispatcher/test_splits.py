"""Assignment of splits on request, and their return."""

from __future__ import annotations

import pytest

from headrace.errors import (
    AbortedError,
    FailedPreconditionError,
    NotFoundError,
    UnauthenticatedError,
)
from headrace.plan.source import INFINITE
from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def open_dynamic(scene: Scenario, positions: int, workers: int = 2, **opening: object) -> list[int]:
    """Open a DYNAMIC iteration; return its tasks."""
    dataset_id = scene.register(positions)
    for number in range(workers):
        scene.add_worker(f"w{number}")
    opened = scene.open("c", dataset_id, processing_mode=DYNAMIC, **opening)
    return [task.task_id for task in opened.tasks]


def assign_all(scene: Scenario, tasks: list[int]) -> list[range]:
    """Let the tasks request and finish splits in turn until none remain."""
    assigned, requesting = [], list(tasks)
    while requesting:
        task = requesting.pop(0)
        start, stop = scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned)
        if start < stop:
            assigned.append(range(start, stop))
            requesting.append(task)
    return assigned


def test_assignments_are_large_at_first_and_small_near_the_end(scene: Scenario) -> None:
    assigned = assign_all(scene, open_dynamic(scene, 100))
    assert [split for part in assigned for split in part] == list(range(100))
    lengths = [len(part) for part in assigned]
    assert lengths[0] == 25
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)


def test_task_that_received_the_end_gets_no_more_splits(scene: Scenario) -> None:
    """A delayed request of it would get a reply that the worker ignores."""
    tasks = open_dynamic(scene, 10, 3)
    scene.split(tasks[2])
    for task in tasks[:2]:
        while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
            pass
    scene.lose("w2")
    scene.report_delivery("c", tasks[2])
    assert scene.state.iterations[2000].pool.returned
    assert scene.get_split(tasks[0]) == messages.GetSplitReply(start=0, stop=0)
    for number, task in enumerate(tasks[:2]):
        scene.finish(f"w{number}", task)
    scene.check()
    assert scene.dispatcher.soft_state.tasks_without_work == set()
    new_task = scene.heartbeat("c").tasks[-1].task_id
    assert new_task not in tasks
    assert not scene.get_split(new_task).wait


def test_is_last_requires_that_no_other_task_holds_splits(
    scene: Scenario,
) -> None:
    one, other = open_dynamic(scene, 3)
    assert not scene.get_split(one, max_splits=1).is_last
    assert not scene.get_split(other, max_splits=1).is_last
    assert not scene.get_split(one, max_splits=1, num_done=1).is_last, "the other task may be lost"
    assert scene.split(other, num_done=1) == (0, 0)


def test_sole_task_learns_is_last_with_its_last_splits(
    scene: Scenario,
) -> None:
    (task,) = open_dynamic(scene, 4, workers=1)
    reply = []
    while not reply or not reply[-1].is_last:
        num_assigned = scene.state.tasks[task].assigned.num_assigned
        reply.append(scene.get_split(task, num_done=num_assigned))
        assert reply[-1].start < reply[-1].stop
    assert reply[-1].stop == 4
    assert scene.split(task, num_done=4) == (0, 0)


def test_infinite_stream_has_no_last_assignment(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, INFINITE, workers=1)
    assert not scene.get_split(task).is_last


def test_repeated_assignment_number_gets_the_same_splits(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    first_splits = scene.split(first)
    assert scene.split(first, assignment_number=0) == first_splits
    assert scene.split(second) != first_splits
    scene.restart()
    assert scene.split(first, assignment_number=0) == first_splits
    scene.split(first, assignment_number=1)
    with pytest.raises(AbortedError, match="assignment 0 after 2 assignments"):
        scene.split(first, assignment_number=0)


def test_infinite_stream_of_many_splits_needs_few_requests(scene: Scenario) -> None:
    tasks = open_dynamic(scene, INFINITE)
    max_splits, requests, num_assigned = 1, 0, 0
    while num_assigned < 100_000:
        for task in tasks:
            start, stop = scene.split(
                task, max_splits=max_splits, num_done=scene.state.tasks[task].assigned.num_assigned
            )
            num_assigned += stop - start
            requests += 1
        max_splits *= 2
    assert requests < 40


def test_empty_stream_has_no_splits(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, 0, workers=1)
    assert scene.split(task) == (0, 0)


# --- even shares of the stream ----------------------------------------------------------------


def test_task_holds_at_most_an_even_share(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    held = 0
    while not (reply := scene.get_split(first)).wait:
        held += reply.stop - reply.start
    assert held == 50
    start, _ = scene.split(second)
    assert start == 50


def test_task_that_finished_splits_gets_more(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, 100)
    while not scene.get_split(first).wait:
        pass
    assert scene.get_split(first, num_done=10).wait is False
    assert scene.state.tasks[first].assigned.num_held > 40


def test_task_with_its_share_gets_more_if_no_other_task_requests(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, 100)
    while not scene.get_split(first).wait:
        pass
    scene.now += 1.9
    assert scene.get_split(first).wait
    scene.now += 0.2
    assert scene.split(first) == (50, 63)
    assert scene.get_split(first).wait


def test_assignment_to_another_task_resets_the_stall_timeout(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    while not scene.get_split(first).wait:
        pass
    scene.now += 1.9
    scene.split(second, max_splits=1)
    scene.now += 1.9
    assert scene.get_split(first).wait


def test_held_splits_of_an_infinite_stream_are_bounded(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, INFINITE)
    held = 0
    while not (reply := scene.get_split(first, max_splits=10_000)).wait:
        held += reply.stop - reply.start
    assert 4 * 10_000 <= held <= 1 << 16
    assert not scene.get_split(first, max_splits=10_000, num_done=held).wait


# --- returned splits --------------------------------------------------------------------


def test_returned_splits_are_assigned_first(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    assert scene.split(first, max_splits=10) == (0, 10)
    assert scene.split(second, max_splits=10) == (10, 20)
    scene.drain_worker("w0")
    assert scene.split(first) == (0, 0)
    scene.return_splits("w0", first, (3, 5), (7, 10))
    assert [scene.split(second, max_splits=4) for _ in range(3)] == [(3, 5), (7, 10), (20, 24)]


@pytest.mark.parametrize("visitation", ["at_most_once", "exactly_once"])
def test_assignments_that_the_worker_never_received_are_reassigned(
    scene: Scenario, visitation: str
) -> None:
    dataset_id = scene.register(100, has_element_ids=True)
    scene.add_worker("w0"), scene.add_worker("w1")
    opened = scene.open("c", dataset_id, processing_mode=DYNAMIC, visitation=visitation)
    first, second = [task.task_id for task in opened.tasks]
    assert scene.split(first, max_splits=10) == (0, 10)
    assert scene.split(first, max_splits=5) == (10, 15)
    scene.finish("w0", first, num_assigned=10)
    assert scene.events[-2] == events.SplitsReturned(first, ((10, 15),))
    assert scene.split(second, max_splits=4) == (10, 14)


def test_repeated_return_of_splits_changes_nothing(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.return_splits("w0", task, (4, 8))
    num_events = len(scene.events)
    scene.return_splits("w0", task, (4, 8))
    scene.return_splits("w0", task, (5, 6))
    assert len(scene.events) == num_events
    scene.return_splits("w0", task, (2, 9))
    assert scene.events[-1] == events.SplitsReturned(task, ((2, 4), (8, 9)))


@pytest.mark.parametrize("splits", [((0, 11),), ((-1, 2),), ((5, 5),), ((6, 5),), ((0, 1 << 62),)])
def test_unassigned_splits_cannot_be_returned(
    scene: Scenario, splits: tuple[tuple[int, int], ...]
) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    with pytest.raises(ValueError, match="has 10 assigned splits"):
        scene.return_splits("w0", task, *splits)


def test_done_splits_cannot_be_returned(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.split(task, max_splits=10, num_done=6)
    with pytest.raises(ValueError, match="all splits before 6 are done"):
        scene.return_splits("w0", task, (5, 8))


def test_finished_task_cannot_return_splits(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, 100)
    scene.split(first, max_splits=10)
    scene.return_splits("w0", first, (8, 10))
    scene.finish("w0", first)
    scene.return_splits("w0", first, (8, 10))
    with pytest.raises(FailedPreconditionError, match="is finished"):
        scene.return_splits("w0", first, (7, 10))


def test_tasks_wait_for_splits_that_a_draining_worker_may_return(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 4)
    scene.split(first, max_splits=2)
    while scene.split(second, num_done=scene.state.tasks[second].assigned.num_assigned)[1] < 4:
        pass
    scene.drain_worker("w0")
    assert scene.get_split(second).wait
    scene.return_splits("w0", first, (0, 1))
    assert scene.split(second) == (0, 1)
    scene.finish("w0", first)
    assert scene.split(second) == (0, 0)


# --- end of the stream -----------------------------------------------------------------------


def test_task_without_splits_does_not_keep_an_iteration_open(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 4)
    while scene.split(first, num_done=scene.state.tasks[first].assigned.num_assigned) != (0, 0):
        pass
    assert not scene.heartbeat("c").finished
    scene.finish("w0", first)
    assert scene.events[-2:] == [events.TaskFinished(second), events.IterationFinished(2000)]
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())
    scene.check()


def test_task_that_comes_too_late_for_splits_gets_the_end(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 4)
    while scene.split(first, num_done=scene.state.tasks[first].assigned.num_assigned) != (0, 0):
        pass
    scene.finish("w0", first)
    lookup = messages.GetTask(worker_id="w1", task_id=second)
    assert scene.ask(lookup).task_token == scene.state.task_token(second)
    assert scene.split(second) == (0, 0)
    scene.finish("w1", second)


def test_task_that_holds_splits_keeps_an_iteration_open(scene: Scenario) -> None:
    tasks = open_dynamic(scene, 4, workers=3)
    assert scene.split(tasks[0], max_splits=1) == (0, 1)
    while scene.split(tasks[1], num_done=scene.state.tasks[tasks[1]].assigned.num_assigned) != (
        0,
        0,
    ):
        pass
    scene.finish("w1", tasks[1])
    assert not scene.heartbeat("c").finished
    scene.finish("w0", tasks[0])
    assert scene.heartbeat("c").finished


def test_idle_task_waits_while_splits_may_be_returned(scene: Scenario) -> None:
    tasks = open_dynamic(scene, 4, workers=3)
    assert scene.split(tasks[0], max_splits=1) == (0, 1)
    while scene.split(tasks[1], num_done=scene.state.tasks[tasks[1]].assigned.num_assigned) != (
        0,
        0,
    ):
        pass
    scene.lose("w0")
    scene.finish("w1", tasks[1])
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [tasks[2]]
    scene.report_delivery("c", tasks[0])
    assert scene.split(tasks[2]) == (0, 1)
    scene.finish("w2", tasks[2])
    assert scene.heartbeat("c").finished


# --- validation -----------------------------------------------------------------------------


def test_ended_task_gets_no_splits(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    scene.finish("w0", first)
    assert scene.split(first) == (0, 0)
    scene.add_worker("again", "w1:1")
    expected = messages.GetSplitReply(start=0, stop=0, wait=True)
    assert scene.get_split(second) == expected, (
        "a lost task is not at its end: its client would finish early"
    )


def test_splits_of_a_lost_worker_are_not_reassigned_before_reports(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, 100)
    assert scene.split(first, max_splits=10) == (0, 10)
    scene.add_worker("again", "w0:1")
    (task,) = [each.task_id for each in scene.heartbeat("c").tasks if each.worker_id == "again"]
    assert scene.split(task, max_splits=10) == (10, 20)


def test_only_dynamic_sharding_assigns_splits(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    (task,) = scene.open("c").tasks
    with pytest.raises(FailedPreconditionError, match=r"only ShardingPolicy\.DYNAMIC"):
        scene.split(task.task_id)
    with pytest.raises(NotFoundError, match="task 1 not found"):
        scene.split(1)


def test_request_of_another_worker_or_with_a_wrong_token_is_rejected(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 100)
    with pytest.raises(NotFoundError, match="belongs to worker w0, not to w1"):
        scene.split(first, worker_id="w1")
    token = scene.state.task_token(second)
    for request in (
        scene.split_request(first, task_token=token),
        messages.FinishTask(worker_id="w0", task_id=first, task_token=token),
        messages.FailTask(worker_id="w0", task_id=first, task_token="nonsense", reason=""),
        messages.ReturnSplits(worker_id="w0", task_id=first, task_token="", splits=((0, 1),)),
    ):
        with pytest.raises(UnauthenticatedError, match="wrong task_token"):
            scene.ask(request)


def test_task_of_a_dispatcher_without_its_journal_is_rejected(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    digest = scene.state.task_token(task).partition("-")[2]
    with pytest.raises(FailedPreconditionError, match="restarted without its journal"):
        scene.split(task, task_token=f"earlier-{digest}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_splits": 0}, "max_splits must be at least 1; got 0"),
        ({"max_splits": -5}, "max_splits must be at least 1; got -5"),
        ({"assignment_number": -1}, "assignment_number must not be negative; got -1"),
        ({"assignment_number": 2}, "requested assignment 2, but the next one is 1"),
        ({"assignment_number": (1 << 64) - 1}, "but the next one is 1"),
        ({"num_done": 11}, "reported num_done=11; .* to 10"),
        ({"num_done": -1}, "reported num_done=-1"),
        ({"num_done": (1 << 64) - 1}, "expected a value from 0, .* to 10"),
    ],
)
def test_invalid_split_request_is_rejected(
    scene: Scenario, fields: dict[str, int], message: str
) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    with pytest.raises(ValueError, match=message):
        scene.split(task, **fields)


def test_huge_max_splits_is_limited(scene: Scenario) -> None:
    first, _ = open_dynamic(scene, INFINITE)
    start, stop = scene.split(first, max_splits=(1 << 64) - 1)
    assert (start, stop) == (0, 1 << 32)


def test_decreasing_progress_is_rejected(scene: Scenario) -> None:
    (task,) = open_dynamic(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.split(task, max_splits=10, num_done=10)
    with pytest.raises(ValueError, match="reported num_done=9; expected a value from 10"):
        scene.split(task, num_done=9)


# --- size of the state ----------------------------------------------------------------------


def test_record_of_assignments_is_compact(scene: Scenario) -> None:
    first, second = open_dynamic(scene, 1 << 20)
    for _ in range(100):
        scene.split(first, max_splits=1)
    assert scene.state.tasks[first].assigned.runs == [(0, 100)]
    for _ in range(100):
        for task in (first, second):
            scene.split(task, max_splits=1, num_done=scene.state.tasks[task].assigned.num_assigned)
    assert [len(scene.state.tasks[task].assigned.runs) for task in (first, second)] == [1, 1]
