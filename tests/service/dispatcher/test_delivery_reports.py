"""When workers are lost, clients say what they received; the rest is dealt again, or is lost."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def tasks(scene: Scenario) -> list[int]:
    """Clients a and b read 100 units from workers v and w; each task was dealt some."""
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


def finish_the_rest(scene: Scenario, task: int) -> None:
    for client_id in [*scene.state.tasks[task].unconfirmed_clients]:
        scene.drop(client_id, task)
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass
    scene.finish(scene.state.tasks[task].worker_id, task)


def test_each_client_that_was_there_settles_a_lost_task(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.open("late", processing_mode=DYNAMIC, job_name="job")
    assert [scene.heartbeat(each).reports_needed for each in ("a", "b", "late")] == [
        (tasks[0],),
        (tasks[0],),
        (),
    ]
    scene.settle("a", tasks[0], (0, 3))
    assert scene.heartbeat("a").reports_needed == ()
    assert scene.heartbeat("b").reports_needed == (tasks[0],)


def test_what_nobody_received_anything_of_is_dealt_again_once_all_have_said_so(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.settle("a", tasks[0], (0, 2), touched=((0, 4),))
    assert scene.state.iterations[2000].pool.returned == ()
    scene.settle("b", tasks[0], (6, 8), touched=((5, 8),))
    assert scene.facts[-1] == events.SplitsReturned(tasks[0], ((4, 5), (8, 10)))
    assert scene.split(tasks[1], num_done=5) == (4, 5)
    assert scene.split(tasks[1], num_done=6) == (13, 15)
    assert scene.split(tasks[1], num_done=8)[0] == 15


def test_what_came_to_somebody_in_part_is_lost(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.settle("a", tasks[0], (0, 2), (6, 8), touched=((0, 8),))
    assert not scene.heartbeat("b").finished
    scene.settle("b", tasks[0], (2, 3), touched=((7, 10),))
    finish_the_rest(scene, tasks[1])
    expected = messages.LostSplits(
        worker_address="v:1",
        task_id=tasks[0],
        splits=((3, 5), (10, 11), (13, 15)),
        num_splits=5,
        reason="it closed its connection, and was not heard of for 10 s",
    )
    for client in ("a", "b"):
        update = scene.heartbeat(client)
        assert (update.finished, update.lost) == (True, (expected,))


def deal_until_told_to_wait(scene: Scenario, task: int) -> None:
    while not (
        granted := scene.deal(task, num_done=scene.state.tasks[task].assigned.num_assigned)
    ).wait:
        assert granted.start < granted.stop


def test_nothing_ends_before_the_clients_have_settled(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    deal_until_told_to_wait(scene, tasks[1])
    scene.finish("w", tasks[1])
    assert not scene.state.iterations[2000].finished
    assert not scene.heartbeat("a").finished
    scene.restart()
    scene.settle("a", tasks[0])
    scene.settle("b", tasks[0], (0, 10))
    assert scene.facts[-1] == events.IterationFinished(2000)
    update = scene.heartbeat("a")
    assert (update.tasks, update.finished, update.reports_needed, update.lost) == ((), True, (), ())


def test_a_client_that_hangs_does_not_hold_up_the_others_for_long(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.settle("a", tasks[0], (0, 4))
    deal_until_told_to_wait(scene, tasks[1])
    scene.finish("w", tasks[1])
    for _ in range(59):
        scene.tick(0.5)
        scene.beat("w")
    assert not scene.heartbeat("a").finished
    scene.tick(1.0)
    update = scene.heartbeat("a")
    # What the other received, it may still yield: nothing of it is dealt again.
    assert update.finished
    assert [lost.num_splits for lost in update.lost] == [6]
    # It may yet say so.
    scene.settle("b", tasks[0], (4, 9))
    assert [lost.num_splits for lost in scene.heartbeat("a").lost] == [1]


def test_a_client_that_reads_alone_is_waited_for_as_long_as_it_counts_as_alive(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.close("b")
    assert scene.split(tasks[0], max_splits=5) == (15, 20)
    scene.lose("v")
    for _ in range(200):
        scene.tick(1.0)
        scene.beat("w")
    assert scene.heartbeat("a").reports_needed == (tasks[0],)
    scene.settle("a", tasks[0], (0, 3), touched=((0, 12),))
    assert scene.facts[-1] == events.SplitsReturned(tasks[0], ((12, 15),))


def test_a_client_that_reads_alone_and_is_silent_for_its_timeout_is_let_go(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.close("b")
    scene.lose("v")
    for _ in range(301):
        scene.tick(1.0)
        scene.beat("w")
    assert scene.state.clients == {}
    assert scene.state.tasks[tasks[0]].awaiting_reports == set()


def test_a_client_that_leaves_may_have_received_something_of_all_that_was_dealt(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.close("b")
    scene.settle("a", tasks[0], (0, 3))
    finish_the_rest(scene, tasks[1])
    update = scene.heartbeat("a")
    assert update.finished
    assert [lost.num_splits for lost in update.lost] == [7]


def test_a_client_that_settled_before_it_left_leaves_no_doubt(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.lose("v")
    scene.settle("b", tasks[0], (0, 2))
    scene.close("b")
    scene.settle("a", tasks[0], (2, 3))
    assert scene.facts[-1] == events.SplitsReturned(tasks[0], ((3, 10),))


def test_a_client_may_settle_a_running_task_before_it_leaves(
    scene: Scenario, tasks: list[int]
) -> None:
    scene.settle("b", tasks[0], (0, 10))
    scene.close("b")
    scene.lose("v")
    scene.settle("a", tasks[0])
    finish_the_rest(scene, tasks[1])
    assert scene.heartbeat("a").lost == ()


def test_settling_twice_is_once(scene: Scenario, tasks: list[int]) -> None:
    scene.lose("v")
    scene.settle("a", tasks[0], (0, 3), touched=((0, 4),))
    facts = len(scene.facts)
    scene.settle("a", tasks[0], (0, 3), touched=((0, 4),))
    assert len(scene.facts) == facts


def test_units_of_a_finished_task_come_back_for_new_tasks(
    scene: Scenario, tasks: list[int]
) -> None:
    finish_the_rest(scene, tasks[1])
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
    scene.settle("c", first, (0, 10))
    (again,) = scene.heartbeat("c").tasks
    assert again.worker_id == "w"
    assert scene.split(again.task_id)[0] == 10


def test_nothing_is_settled_where_nothing_was_dealt(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    scene.open("c", processing_mode=OFF)
    scene.open("d", processing_mode=DYNAMIC)
    scene.lose("v")
    assert scene.heartbeat("c").reports_needed == scene.heartbeat("d").reports_needed == ()


@pytest.mark.parametrize("received", [((0, 11),), ((-1, 1),), ((3, 3),), ((0, 1 << 63),)])
def test_units_that_were_never_dealt_cannot_have_been_received(
    scene: Scenario, tasks: list[int], received: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(ValueError, match="was dealt 10 units"):
        scene.settle("a", tasks[0], *received)


def test_a_client_settles_tasks_of_its_own_iteration(scene: Scenario, tasks: list[int]) -> None:
    scene.open("other", processing_mode=DYNAMIC)
    with pytest.raises(NotFoundError, match="client other reads iteration 2001"):
        scene.settle("other", tasks[0])
    with pytest.raises(NotFoundError, match="Unknown iteration client id nobody"):
        scene.settle("nobody", tasks[0])


def test_a_lost_task_is_kept_for_who_must_settle_it() -> None:
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


# --- units that kill their workers -----------------------------------------------------------


class Deaths:
    """Workers of which each dies with what it was dealt; one client that receives nothing."""

    def __init__(self, scene: Scenario, positions: int, **opening: object) -> None:
        self.scene, self.births = scene, 0
        scene.register(positions)
        scene.open("a", processing_mode=DYNAMIC, job_name="job")

    def born(self) -> int:
        """Let a worker join; return its task."""
        self.births += 1
        self.scene.add_worker(f"w{self.births}")
        return self.scene.state.next_task_id - 1

    def die(self, task: int) -> None:
        self.scene.lose(self.scene.state.tasks[task].worker_id)
        for each in self.scene.heartbeat("a").reports_needed:
            self.scene.settle("a", each)

    def done(self, task: int) -> int:
        return self.scene.state.tasks[task].assigned.num_assigned


def test_a_unit_that_outlived_two_workers_is_dealt_alone(scene: Scenario) -> None:
    deaths = Deaths(scene, 20)
    for want in (4, 2):
        task = deaths.born()
        assert scene.split(task, max_splits=want) == (0, want)
        deaths.die(task)
    task = deaths.born()
    alone = scene.deal(task)
    assert (alone.start, alone.stop, alone.is_poison_candidate) == (0, 1, True)
    assert scene.deal(task).wait, "it gets nothing else before that is done"
    alone = scene.deal(task, num_done=1)
    assert (alone.start, alone.stop, alone.is_poison_candidate) == (1, 2, True)
    assert scene.deal(task, assignment_number=1) == alone
    others = scene.deal(task, num_done=2)
    assert (others.start, others.stop, others.is_poison_candidate) == (2, 4, False)


def test_a_task_that_holds_something_is_not_dealt_a_suspect(scene: Scenario) -> None:
    deaths = Deaths(scene, 2)
    for _ in range(2):
        task = deaths.born()
        assert scene.split(task, max_splits=1) == (0, 1)
        deaths.die(task)
    scene.add_worker("x")
    # It holds nothing yet, and would get the suspect: another does first.
    task, other = deaths.born(), 0
    assert scene.split(task) == (0, 1)
    other = next(t.task_id for t in scene.heartbeat("a").tasks if t.task_id != task)
    assert scene.split(other) == (1, 2)
    deaths.die(task)
    assert scene.deal(other).start == scene.deal(other).stop


def test_a_unit_with_which_a_third_worker_dies_is_given_up_and_named(scene: Scenario) -> None:
    deaths = Deaths(scene, 3)
    for _ in range(3):
        task = deaths.born()
        assert scene.split(task, max_splits=1) == (0, 1)
        deaths.die(task)
    assert scene.facts[-1] == events.SplitsAbandoned(task, ((0, 1),))
    task = deaths.born()
    assert scene.split(task, max_splits=5) == (1, 2)
    assert scene.split(task, max_splits=5) == (2, 3)
    assert scene.split(task, max_splits=5, num_done=2) == (0, 0)
    scene.finish("w4", task)
    update = scene.heartbeat("a")
    assert update.finished
    (lost,) = update.lost
    assert (lost.splits, lost.abandoned, lost.worker_address) == (((0, 1),), True, "w3:1")


def test_an_iteration_ends_without_a_worker_once_all_that_is_left_was_given_up(
    scene: Scenario,
) -> None:
    deaths = Deaths(scene, 1)
    for _ in range(3):
        task = deaths.born()
        assert scene.split(task) == (0, 1)
        deaths.die(task)
    assert scene.heartbeat("a").finished


@pytest.mark.parametrize("deadly", [0, 777, 4999])
def test_among_many_a_deadly_unit_is_found_in_few_deaths_and_few_grants(
    scene: Scenario, deadly: int
) -> None:
    deaths = Deaths(scene, 5000)
    died = grants = 0
    given_up = scene.state.iterations[2000]
    while not scene.heartbeat("a").finished:
        task = deaths.born()
        while True:
            granted = scene.deal(task, num_done=deaths.done(task))
            grants += 1
            if granted.start <= deadly < granted.stop:
                died += 1
                deaths.die(task)
                break
            if granted.start == granted.stop:
                scene.finish(scene.state.tasks[task].worker_id, task)
                break
    assert died <= 6
    assert grants < 250
    assert given_up.pool.abandoned == ((deadly, deadly + 1),)
    assert [lost.splits for lost in scene.heartbeat("a").lost] == [((deadly, deadly + 1),)]


def test_a_task_that_cannot_get_a_suspect_done_is_dealt_more_all_the_same(
    scene: Scenario,
) -> None:
    deaths = Deaths(scene, 2)
    for _ in range(2):
        task = deaths.born()
        assert scene.split(task, max_splits=1) == (0, 1)
        deaths.die(task)
    task = deaths.born()
    assert scene.split(task) == (0, 1)
    assert scene.deal(task).wait
    scene.now += 2.1
    assert scene.split(task) == (1, 2)


def test_units_that_are_handed_back_are_not_suspected(scene: Scenario) -> None:
    deaths = Deaths(scene, 1)
    for _ in range(4):
        task = deaths.born()
        worker = scene.state.tasks[task].worker_id
        assert scene.split(task) == (0, 1)
        scene.leaving(worker)
        scene.hand_back(worker, task, (0, 1))
        scene.left(worker)
    assert scene.state.iterations[2000].pool.recovered == ()
