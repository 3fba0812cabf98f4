"""Units of one stream are dealt to whoever asks, and come back from who leaves."""

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


def dealing(scene: Scenario, positions: int, workers: int = 2, **opening: object) -> list[int]:
    """Open a DYNAMIC iteration; return its tasks."""
    dataset_id = scene.register(positions)
    for number in range(workers):
        scene.add_worker(f"w{number}")
    opened = scene.open("c", dataset_id, processing_mode=DYNAMIC, **opening)
    return [task.task_id for task in opened.tasks]


def drain(scene: Scenario, tasks: list[int]) -> list[range]:
    """Let the tasks ask in turn, each doing at once what it gets, until nothing is left."""
    parts, asking = [], list(tasks)
    while asking:
        task = asking.pop(0)
        start, stop = scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned)
        if start < stop:
            parts.append(range(start, stop))
            asking.append(task)
    return parts


def test_grants_are_large_at_first_and_small_near_the_end(scene: Scenario) -> None:
    parts = drain(scene, dealing(scene, 100))
    assert [unit for part in parts for unit in part] == list(range(100))
    lengths = [len(part) for part in parts]
    assert lengths[0] == 25
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)


def test_a_task_that_was_told_that_nothing_is_left_is_dealt_nothing_more(scene: Scenario) -> None:
    """A request of it that was late would be answered to nobody."""
    tasks = dealing(scene, 10, 3)
    scene.split(tasks[2])
    for task in tasks[:2]:
        while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
            pass
    scene.lose("w2")
    scene.settle("c", tasks[2])
    assert scene.state.iterations[2000].pool.returned
    assert scene.deal(tasks[0]) == messages.GetSplitReply(start=0, stop=0)
    for number, task in enumerate(tasks[:2]):
        scene.finish(f"w{number}", task)
    scene.check()
    assert scene.dispatcher.soft_state.tasks_without_work == set()
    again = scene.heartbeat("c").tasks[-1].task_id
    assert again not in tasks
    assert not scene.deal(again).wait


def test_a_grant_is_the_last_where_nothing_is_left_and_nobody_else_has_any(
    scene: Scenario,
) -> None:
    one, other = dealing(scene, 3)
    assert not scene.deal(one, max_splits=1).is_last
    assert not scene.deal(other, max_splits=1).is_last
    assert not scene.deal(one, max_splits=1, num_done=1).is_last, "the other one may be lost"
    assert scene.split(other, num_done=1) == (0, 0)


def test_the_one_task_of_an_iteration_hears_with_its_last_units_that_they_are(
    scene: Scenario,
) -> None:
    (task,) = dealing(scene, 4, workers=1)
    granted = []
    while not granted or not granted[-1].is_last:
        dealt = scene.state.tasks[task].assigned.num_assigned
        granted.append(scene.deal(task, num_done=dealt))
        assert granted[-1].start < granted[-1].stop
    assert granted[-1].stop == 4
    assert scene.split(task, num_done=4) == (0, 0)


def test_a_stream_without_end_has_no_last_grant(scene: Scenario) -> None:
    (task,) = dealing(scene, INFINITE, workers=1)
    assert not scene.deal(task).is_last


def test_the_same_number_gets_the_same_units(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    part = scene.split(first)
    assert scene.split(first, assignment_number=0) == part
    assert scene.split(second) != part
    scene.restart()
    assert scene.split(first, assignment_number=0) == part
    scene.split(first, assignment_number=1)
    with pytest.raises(AbortedError, match="grant 0 again after 2 grants"):
        scene.split(first, assignment_number=0)


def test_many_short_passes_are_one_stream_and_need_few_requests(scene: Scenario) -> None:
    tasks = dealing(scene, INFINITE)
    want, requests, dealt = 1, 0, 0
    while dealt < 100_000:
        for task in tasks:
            start, stop = scene.split(
                task, max_splits=want, num_done=scene.state.tasks[task].assigned.num_assigned
            )
            dealt += stop - start
            requests += 1
        want *= 2
    assert requests < 40


def test_an_empty_stream_has_no_units(scene: Scenario) -> None:
    (task,) = dealing(scene, 0, workers=1)
    assert scene.split(task) == (0, 0)


# --- nobody drinks the stream ----------------------------------------------------------------


def test_a_task_holds_no_more_than_an_even_share(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    held = 0
    while not (granted := scene.deal(first)).wait:
        held += granted.stop - granted.start
    assert held == 50
    start, _ = scene.split(second)
    assert start == 50


def test_a_task_that_did_its_units_gets_more(scene: Scenario) -> None:
    first, _ = dealing(scene, 100)
    while not scene.deal(first).wait:
        pass
    assert scene.deal(first, num_done=10).wait is False
    assert scene.state.tasks[first].assigned.num_held > 40


def test_a_task_with_its_share_gets_more_when_nobody_else_asks(scene: Scenario) -> None:
    first, _ = dealing(scene, 100)
    while not scene.deal(first).wait:
        pass
    scene.now += 1.9
    assert scene.deal(first).wait
    scene.now += 0.2
    assert scene.split(first) == (50, 63)
    assert scene.deal(first).wait


def test_a_grant_to_another_makes_patience_begin_again(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    while not scene.deal(first).wait:
        pass
    scene.now += 1.9
    scene.split(second, max_splits=1)
    scene.now += 1.9
    assert scene.deal(first).wait


def test_what_is_held_of_a_stream_without_end_is_bounded(scene: Scenario) -> None:
    first, _ = dealing(scene, INFINITE)
    held = 0
    while not (granted := scene.deal(first, max_splits=10_000)).wait:
        held += granted.stop - granted.start
    assert 4 * 10_000 <= held <= 1 << 16
    assert not scene.deal(first, max_splits=10_000, num_done=held).wait


# --- units that come back --------------------------------------------------------------------


def test_units_that_were_handed_back_are_dealt_first(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    assert scene.split(first, max_splits=10) == (0, 10)
    assert scene.split(second, max_splits=10) == (10, 20)
    scene.leaving("w0")
    assert scene.split(first) == (0, 0)
    scene.hand_back("w0", first, (3, 5), (7, 10))
    assert [scene.split(second, max_splits=4) for _ in range(3)] == [(3, 5), (7, 10), (20, 24)]


@pytest.mark.parametrize("visitation", ["at_most_once", "exactly_once"])
def test_units_that_never_came_to_the_worker_are_dealt_again(
    scene: Scenario, visitation: str
) -> None:
    dataset_id = scene.register(100, has_element_ids=True)
    scene.add_worker("w0"), scene.add_worker("w1")
    opened = scene.open("c", dataset_id, processing_mode=DYNAMIC, visitation=visitation)
    first, second = [task.task_id for task in opened.tasks]
    assert scene.split(first, max_splits=10) == (0, 10)
    assert scene.split(first, max_splits=5) == (10, 15)
    scene.finish("w0", first, num_assigned=10)
    assert scene.facts[-2] == events.SplitsReturned(first, ((10, 15),))
    assert scene.split(second, max_splits=4) == (10, 14)


def test_handing_back_twice_is_once(scene: Scenario) -> None:
    (task,) = dealing(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.hand_back("w0", task, (4, 8))
    facts = len(scene.facts)
    scene.hand_back("w0", task, (4, 8))
    scene.hand_back("w0", task, (5, 6))
    assert len(scene.facts) == facts
    scene.hand_back("w0", task, (2, 9))
    assert scene.facts[-1] == events.SplitsReturned(task, ((2, 4), (8, 9)))


@pytest.mark.parametrize("units", [((0, 11),), ((-1, 2),), ((5, 5),), ((6, 5),), ((0, 1 << 62),)])
def test_units_that_were_not_dealt_cannot_be_handed_back(
    scene: Scenario, units: tuple[tuple[int, int], ...]
) -> None:
    (task,) = dealing(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    with pytest.raises(ValueError, match="was dealt 10 units"):
        scene.hand_back("w0", task, *units)


def test_units_that_are_done_cannot_be_handed_back(scene: Scenario) -> None:
    (task,) = dealing(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.split(task, max_splits=10, num_done=6)
    with pytest.raises(ValueError, match="all units before 6 are done"):
        scene.hand_back("w0", task, (5, 8))


def test_a_finished_task_hands_nothing_back(scene: Scenario) -> None:
    first, _ = dealing(scene, 100)
    scene.split(first, max_splits=10)
    scene.hand_back("w0", first, (8, 10))
    scene.finish("w0", first)
    scene.hand_back("w0", first, (8, 10))
    with pytest.raises(FailedPreconditionError, match="is finished"):
        scene.hand_back("w0", first, (7, 10))


def test_the_last_ones_wait_for_what_a_leaving_worker_may_hand_back(scene: Scenario) -> None:
    first, second = dealing(scene, 4)
    scene.split(first, max_splits=2)
    while scene.split(second, num_done=scene.state.tasks[second].assigned.num_assigned)[1] < 4:
        pass
    scene.leaving("w0")
    assert scene.deal(second).wait
    scene.hand_back("w0", first, (0, 1))
    assert scene.split(second) == (0, 1)
    scene.finish("w0", first)
    assert scene.split(second) == (0, 0)


# --- when all is dealt -----------------------------------------------------------------------


def test_a_task_that_was_dealt_nothing_does_not_keep_an_iteration_open(scene: Scenario) -> None:
    first, second = dealing(scene, 4)
    while scene.split(first, num_done=scene.state.tasks[first].assigned.num_assigned) != (0, 0):
        pass
    assert not scene.heartbeat("c").finished
    scene.finish("w0", first)
    assert scene.facts[-2:] == [events.TaskFinished(second), events.IterationFinished(2000)]
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())
    scene.check()


def test_who_comes_too_late_for_any_unit_is_told_so_and_not_refused(scene: Scenario) -> None:
    first, second = dealing(scene, 4)
    while scene.split(first, num_done=scene.state.tasks[first].assigned.num_assigned) != (0, 0):
        pass
    scene.finish("w0", first)
    lookup = messages.GetTask(worker_id="w1", task_id=second)
    assert scene.ask(lookup).task_token == scene.state.task_token(second)
    assert scene.split(second) == (0, 0)
    scene.finish("w1", second)


def test_a_task_that_holds_units_keeps_an_iteration_open(scene: Scenario) -> None:
    tasks = dealing(scene, 4, workers=3)
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


def test_a_task_that_holds_nothing_goes_on_while_units_may_come_back(scene: Scenario) -> None:
    tasks = dealing(scene, 4, workers=3)
    assert scene.split(tasks[0], max_splits=1) == (0, 1)
    while scene.split(tasks[1], num_done=scene.state.tasks[tasks[1]].assigned.num_assigned) != (
        0,
        0,
    ):
        pass
    scene.lose("w0")
    scene.finish("w1", tasks[1])
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [tasks[2]]
    scene.settle("c", tasks[0])
    assert scene.split(tasks[2]) == (0, 1)
    scene.finish("w2", tasks[2])
    assert scene.heartbeat("c").finished


# --- who may ask -----------------------------------------------------------------------------


def test_a_task_that_is_over_gets_nothing(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    scene.finish("w0", first)
    assert scene.split(first) == (0, 0)
    scene.add_worker("again", "w1:1")
    told = messages.GetSplitReply(start=0, stop=0, wait=True)
    assert scene.deal(second) == told, "that it is lost is no end: a trainer would hear of one"


def test_what_was_dealt_to_a_lost_worker_is_not_dealt_again(scene: Scenario) -> None:
    first, _ = dealing(scene, 100)
    assert scene.split(first, max_splits=10) == (0, 10)
    scene.add_worker("again", "w0:1")
    (task,) = [each.task_id for each in scene.heartbeat("c").tasks if each.worker_id == "again"]
    assert scene.split(task, max_splits=10) == (10, 20)


def test_only_dynamic_deals(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    (task,) = scene.open("c").tasks
    with pytest.raises(FailedPreconditionError, match=r"only ShardingPolicy\.DYNAMIC"):
        scene.split(task.task_id)
    with pytest.raises(NotFoundError, match="task 1 is not known"):
        scene.split(1)


def test_a_task_gives_nothing_to_another_worker(scene: Scenario) -> None:
    first, second = dealing(scene, 100)
    with pytest.raises(NotFoundError, match="belongs to worker w0, not to w1"):
        scene.split(first, worker_id="w1")
    ticket = scene.state.task_token(second)
    for request in (
        scene.split_request(first, task_token=ticket),
        messages.FinishTask(worker_id="w0", task_id=first, task_token=ticket),
        messages.FailTask(worker_id="w0", task_id=first, task_token="nonsense", reason=""),
        messages.ReturnSplits(worker_id="w0", task_id=first, task_token="", splits=((0, 1),)),
    ):
        with pytest.raises(UnauthenticatedError, match="is not its ticket"):
            scene.ask(request)


def test_a_task_of_a_dispatcher_that_forgot_everything_is_refused_by_name(scene: Scenario) -> None:
    (task,) = dealing(scene, 100, workers=1)
    proof = scene.state.task_token(task).partition("-")[2]
    with pytest.raises(FailedPreconditionError, match="restarted without its journal"):
        scene.split(task, task_token=f"earlier-{proof}")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_splits": 0}, "want=0"),
        ({"max_splits": -5}, "want=-5"),
        ({"assignment_number": -1}, "number=-1"),
        ({"assignment_number": 2}, "asked for grant 2, but received 1"),
        ({"assignment_number": (1 << 64) - 1}, "but received 1"),
        ({"num_done": 11}, "was dealt 10"),
        ({"num_done": -1}, "before -1 are done"),
        ({"num_done": (1 << 64) - 1}, "was dealt 10"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    scene: Scenario, fields: dict[str, int], said: str
) -> None:
    (task,) = dealing(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    with pytest.raises(ValueError, match=said):
        scene.split(task, **fields)


def test_a_huge_wish_is_an_ordinary_one(scene: Scenario) -> None:
    first, _ = dealing(scene, INFINITE)
    start, stop = scene.split(first, max_splits=(1 << 64) - 1)
    assert (start, stop) == (0, 1 << 32)


def test_progress_does_not_go_back(scene: Scenario) -> None:
    (task,) = dealing(scene, 100, workers=1)
    scene.split(task, max_splits=10)
    scene.split(task, max_splits=10, num_done=10)
    with pytest.raises(ValueError, match="before 9 are done"):
        scene.split(task, num_done=9)


# --- what is remembered ----------------------------------------------------------------------


def test_the_log_of_grants_is_short(scene: Scenario) -> None:
    first, second = dealing(scene, 1 << 20)
    for _ in range(100):
        scene.split(first, max_splits=1)
    assert scene.state.tasks[first].assigned.runs == [(0, 100)]
    for _ in range(100):
        for task in (first, second):
            scene.split(task, max_splits=1, num_done=scene.state.tasks[task].assigned.num_assigned)
    assert [len(scene.state.tasks[task].assigned.runs) for task in (first, second)] == [1, 1]
