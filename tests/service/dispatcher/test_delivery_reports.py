"""Clients' delivery reports about lost tasks: the rest is reassigned or lost."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def tasks(scene: Scenario) -> list[int]:
    """Clients a and b read 100 splits from workers v and w; each task has assigned splits."""
    scene.register(100)
    scene.add_worker("v")
    scene.add_worker("w")
    scene.open("a", processing_mode=DYNAMIC, job_name="job")
    opened = scene.open("b", processing_mode=DYNAMIC, job_name="job")
    tasks = [task.task_id for task in opened.tasks]
    scene.split(tasks[0], max_splits=5)
    scene.split(tasks[1], max_splits=5)
    scene.split(tasks[0], max_splits=5)
    return tasks


def finish_remaining(scene: Scenario, task: int) -> None:
    for client_id in [*scene.state.tasks[task].unconfirmed_clients]:
        scene.report_departed_client(client_id, task)
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass
    scene.finish(scene.state.tasks[task].worker_id, task)


def test_each_client_present_at_a_loss_must_report(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.open("late", processing_mode=DYNAMIC, job_name="job")
    assert [scene.heartbeat(each).reports_needed for each in ("a", "b", "late")] == [
        (tasks[0],),
        (tasks[0],),
        (),
    ]
    scene.report_delivery("a", tasks[0], (0, 3))
    assert scene.heartbeat("a").reports_needed == ()
    assert scene.heartbeat("b").reports_needed == (tasks[0],)


def test_unreceived_splits_are_reassigned_after_all_reports(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.report_delivery("a", tasks[0], (0, 2), partially_delivered=((0, 4),))
    assert scene.state.iterations[2000].pool.returned == ()
    scene.report_delivery("b", tasks[0], (6, 8), partially_delivered=((5, 8),))
    assert scene.events[-1] == events.SplitsReturned(tasks[0], ((4, 5), (8, 10)))
    assert scene.split(tasks[1], num_done=5) == (4, 5)
    assert scene.split(tasks[1], num_done=6) == (13, 15)
    assert scene.split(tasks[1], num_done=8)[0] == 15


def test_partially_received_splits_are_lost(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.report_delivery("a", tasks[0], (0, 2), (6, 8), partially_delivered=((0, 8),))
    assert not scene.heartbeat("b").finished
    scene.report_delivery("b", tasks[0], (2, 3), partially_delivered=((7, 10),))
    finish_remaining(scene, tasks[1])
    expected = messages.LostSplits(
        worker_address="v:1",
        task_id=tasks[0],
        splits=((3, 5), (10, 11), (13, 15)),
        num_splits=5,
        reason="connection closed, no heartbeat for 10 s",
    )
    for client in ("a", "b"):
        update = scene.heartbeat(client)
        assert (update.finished, update.lost) == (True, (expected,))


def assign_until_wait(scene: Scenario, task: int) -> None:
    while not (
        reply := scene.get_split(task, num_done=scene.state.tasks[task].assigned.num_assigned)
    ).wait:
        assert reply.start < reply.stop


def test_iteration_waits_for_reports_about_lost_tasks(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    assign_until_wait(scene, tasks[1])
    scene.finish("w", tasks[1])
    assert not scene.state.iterations[2000].finished
    assert not scene.heartbeat("a").finished
    scene.restart()
    scene.report_delivery("a", tasks[0])
    scene.report_delivery("b", tasks[0], (0, 10))
    assert scene.events[-1] == events.IterationFinished(2000)
    update = scene.heartbeat("a")
    assert (update.tasks, update.finished, update.reports_needed, update.lost) == ((), True, (), ())


def test_missing_report_of_one_client_delays_others_only_briefly(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.report_delivery("a", tasks[0], (0, 4))
    assign_until_wait(scene, tasks[1])
    scene.finish("w", tasks[1])
    for _ in range(59):
        scene.tick(0.5)
        scene.worker_heartbeat("w")
    assert not scene.heartbeat("a").finished
    scene.tick(1.0)
    update = scene.heartbeat("a")
    # The other client may still yield what it received: nothing of it is reassigned.
    assert update.finished
    assert [lost.num_splits for lost in update.lost] == [6]
    # Its report is still accepted.
    scene.report_delivery("b", tasks[0], (4, 9))
    assert [lost.num_splits for lost in scene.heartbeat("a").lost] == [1]


def test_report_of_a_sole_client_is_awaited_until_it_expires(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.close("b")
    assert scene.split(tasks[0], max_splits=5) == (15, 20)
    scene.lose("v")
    for _ in range(200):
        scene.tick(1.0)
        scene.worker_heartbeat("w")
    assert scene.heartbeat("a").reports_needed == (tasks[0],)
    scene.report_delivery("a", tasks[0], (0, 3), partially_delivered=((0, 12),))
    assert scene.events[-1] == events.SplitsReturned(tasks[0], ((12, 15),))


def test_sole_client_expires_after_its_timeout(scene: Scenario, tasks: list[int]) -> None:
    scene.close("b")
    scene.lose("v")
    for _ in range(301):
        scene.tick(1.0)
        scene.worker_heartbeat("w")
    assert scene.state.clients == {}
    assert scene.state.tasks[tasks[0]].awaiting_reports == set()


def test_departed_client_may_have_received_every_assigned_split(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.close("b")
    scene.report_delivery("a", tasks[0], (0, 3))
    finish_remaining(scene, tasks[1])
    update = scene.heartbeat("a")
    assert update.finished
    assert [lost.num_splits for lost in update.lost] == [7]


def test_report_before_departure_settles_what_was_received(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.report_delivery("b", tasks[0], (0, 2))
    scene.close("b")
    scene.report_delivery("a", tasks[0], (2, 3))
    assert scene.events[-1] == events.SplitsReturned(tasks[0], ((3, 10),))


def test_client_may_report_on_a_running_task_before_it_leaves(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.report_delivery("b", tasks[0], (0, 10))
    scene.close("b")
    scene.lose("v")
    scene.report_delivery("a", tasks[0])
    finish_remaining(scene, tasks[1])
    assert scene.heartbeat("a").lost == ()


def test_repeated_delivery_report_changes_nothing(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.report_delivery("a", tasks[0], (0, 3), partially_delivered=((0, 4),))
    num_events = len(scene.events)
    scene.report_delivery("a", tasks[0], (0, 3), partially_delivered=((0, 4),))
    assert len(scene.events) == num_events


def test_unreceived_splits_of_a_finished_task_are_reassigned(
    scene: Scenario, tasks: list[int]
) -> None:
    finish_remaining(scene, tasks[1])
    scene.finish("v", tasks[0])
    assert scene.state.iterations[2000].finished
    scene.open("c", processing_mode=DYNAMIC)
    first, second = (task.task_id for task in scene.heartbeat("c").tasks)
    scene.split(first, max_splits=30)
    scene.finish("v", first)
    while scene.split(second, num_done=scene.state.tasks[second].assigned.num_assigned) != (0, 0):
        pass
    scene.lose("v")
    scene.finish("w", second)
    scene.report_delivery("c", first, (0, 10))
    (new_task,) = scene.heartbeat("c").tasks
    assert new_task.worker_id == "w"
    assert scene.split(new_task.task_id)[0] == 10


def test_no_report_is_needed_without_assigned_splits(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    scene.open("c", processing_mode=OFF)
    scene.open("d", processing_mode=DYNAMIC)
    scene.lose("v")
    assert scene.heartbeat("c").reports_needed == scene.heartbeat("d").reports_needed == ()


@pytest.mark.parametrize("received", [((0, 11),), ((-1, 1),), ((3, 3),), ((0, 1 << 63),)])
def test_report_of_unassigned_splits_is_rejected(
    scene: Scenario, tasks: list[int], received: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(ValueError, match="has 10 assigned splits"):
        scene.report_delivery("a", tasks[0], *received)


def test_report_on_a_task_of_another_iteration_is_rejected(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.open("other", processing_mode=DYNAMIC)
    with pytest.raises(NotFoundError, match="client other reads iteration 2001"):
        scene.report_delivery("other", tasks[0])
    with pytest.raises(NotFoundError, match="Unknown iteration client id unknown"):
        scene.report_delivery("unknown", tasks[0])


def test_lost_task_is_kept_until_its_client_reports() -> None:
    scene = Scenario(gc_timeout=1.0)
    scene.register(10)
    scene.add_worker("v")
    scene.open("a", processing_mode=DYNAMIC, job_name="job")
    scene.split(4000, max_splits=5)
    scene.add_worker("w")
    scene.lose("v")
    for _ in range(4):
        scene.tick(1.0)
        assert scene.heartbeat("a").reports_needed == (4000,)
    scene.check()


# --- splits that kill their workers -----------------------------------------------------------


class DyingWorkers:
    """Workers that die one after the other with their splits; one client that receives nothing."""

    def __init__(self, scene: Scenario, positions: int, **opening: object) -> None:
        self.scene, self.num_workers = scene, 0
        scene.register(positions)
        scene.open("a", processing_mode=DYNAMIC, job_name="job")

    def add_worker(self) -> int:
        """Let a worker join; return its task."""
        self.num_workers += 1
        self.scene.add_worker(f"w{self.num_workers}")
        return self.scene.state.next_task_id - 1

    def lose(self, task: int) -> None:
        self.scene.lose(self.scene.state.tasks[task].worker_id)
        for each in self.scene.heartbeat("a").reports_needed:
            self.scene.report_delivery("a", each)

    def num_assigned(self, task: int) -> int:
        return self.scene.state.tasks[task].assigned.num_assigned


def test_split_returned_by_two_dead_workers_is_assigned_alone(scene: Scenario) -> None:
    workers = DyingWorkers(scene, 20)
    for max_splits in (4, 2):
        task = workers.add_worker()
        assert scene.split(task, max_splits=max_splits) == (0, max_splits)
        workers.lose(task)
    task = workers.add_worker()
    candidate = scene.get_split(task)
    assert (candidate.start, candidate.stop, candidate.is_poison_candidate) == (0, 1, True)
    assert scene.get_split(task).wait, "no other splits before the candidate is done"
    candidate = scene.get_split(task, num_done=1)
    assert (candidate.start, candidate.stop, candidate.is_poison_candidate) == (1, 2, True)
    assert scene.get_split(task, assignment_number=1) == candidate
    normal = scene.get_split(task, num_done=2)
    assert (normal.start, normal.stop, normal.is_poison_candidate) == (2, 4, False)


def test_task_that_holds_splits_gets_no_poison_candidate(scene: Scenario) -> None:
    workers = DyingWorkers(scene, 2)
    for _ in range(2):
        task = workers.add_worker()
        assert scene.split(task, max_splits=1) == (0, 1)
        workers.lose(task)
    scene.add_worker("x")
    # It holds no splits yet, so it gets the poison candidate before the other task.
    task, other = workers.add_worker(), 0
    assert scene.split(task) == (0, 1)
    other = next(t.task_id for t in scene.heartbeat("a").tasks if t.task_id != task)
    assert scene.split(other) == (1, 2)
    workers.lose(task)
    assert scene.get_split(other).start == scene.get_split(other).stop


def test_split_that_kills_a_third_worker_is_abandoned(scene: Scenario) -> None:
    workers = DyingWorkers(scene, 3)
    for _ in range(3):
        task = workers.add_worker()
        assert scene.split(task, max_splits=1) == (0, 1)
        workers.lose(task)
    assert scene.events[-1] == events.SplitsAbandoned(task, ((0, 1),))
    task = workers.add_worker()
    assert scene.split(task, max_splits=5) == (1, 2)
    assert scene.split(task, max_splits=5) == (2, 3)
    assert scene.split(task, max_splits=5, num_done=2) == (0, 0)
    scene.finish("w4", task)
    update = scene.heartbeat("a")
    assert update.finished
    (lost,) = update.lost
    assert (lost.splits, lost.abandoned, lost.worker_address) == (((0, 1),), True, "w3:1")


def test_iteration_finishes_without_workers_if_all_is_abandoned(
    scene: Scenario,
) -> None:
    workers = DyingWorkers(scene, 1)
    for _ in range(3):
        task = workers.add_worker()
        assert scene.split(task) == (0, 1)
        workers.lose(task)
    assert scene.heartbeat("a").finished


@pytest.mark.parametrize("poison_split", [0, 777, 4999])
def test_poison_split_is_found_with_few_deaths_and_assignments(
    scene: Scenario, poison_split: int
) -> None:
    workers = DyingWorkers(scene, 5000)
    num_deaths = num_assignments = 0
    iteration = scene.state.iterations[2000]
    while not scene.heartbeat("a").finished:
        task = workers.add_worker()
        while True:
            reply = scene.get_split(task, num_done=workers.num_assigned(task))
            num_assignments += 1
            if reply.start <= poison_split < reply.stop:
                num_deaths += 1
                workers.lose(task)
                break
            if reply.start == reply.stop:
                scene.finish(scene.state.tasks[task].worker_id, task)
                break
    assert num_deaths <= 6
    assert num_assignments < 250
    assert iteration.pool.abandoned == ((poison_split, poison_split + 1),)
    assert [lost.splits for lost in scene.heartbeat("a").lost] == [
        ((poison_split, poison_split + 1),)
    ]


def test_task_stuck_on_a_poison_candidate_gets_more_splits(
    scene: Scenario,
) -> None:
    workers = DyingWorkers(scene, 2)
    for _ in range(2):
        task = workers.add_worker()
        assert scene.split(task, max_splits=1) == (0, 1)
        workers.lose(task)
    task = workers.add_worker()
    assert scene.split(task) == (0, 1)
    assert scene.get_split(task).wait
    scene.now += 2.1
    assert scene.split(task) == (1, 2)


def test_returned_splits_are_no_poison_candidates(scene: Scenario) -> None:
    workers = DyingWorkers(scene, 1)
    for _ in range(4):
        task = workers.add_worker()
        worker = scene.state.tasks[task].worker_id
        assert scene.split(task) == (0, 1)
        scene.drain_worker(worker)
        scene.return_splits(worker, task, (0, 1))
        scene.unregister_worker(worker)
    assert scene.state.iterations[2000].pool.recovered == ()
