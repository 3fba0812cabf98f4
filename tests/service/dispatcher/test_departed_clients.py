"""Clients that leave or are silent: what they held, and what is kept for those who stay."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def task(scene: Scenario) -> int:
    """Clients a and b read 20 units from one worker, which was dealt ten of them."""
    scene.register(20)
    scene.add_worker("v")
    scene.open("a", processing_mode=DYNAMIC, job_name="job")
    scene.open("b", processing_mode=DYNAMIC, job_name="job")
    assert scene.split(4000, max_splits=10) == (0, 10)
    return 4000


def finish(scene: Scenario, task: int) -> None:
    finish_as(scene, "v", task)


def finish_as(scene: Scenario, worker_id: str, task: int) -> None:
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass
    scene.finish(worker_id, task)


def test_a_worker_is_asked_about_clients_that_left_until_it_has_spoken(
    scene: Scenario, task: int
) -> None:
    assert scene.beaten("v", task).departed_clients == ()
    scene.close("a")
    assert scene.beaten("v", task).departed_clients == ((task, "a"),)
    scene.restart()
    assert scene.beaten("v", task).departed_clients == ((task, "a"),)
    scene.drop("a", task)
    assert scene.beaten("v", task).departed_clients == ()
    facts = len(scene.facts)
    scene.drop("a", task)
    assert len(scene.facts) == facts


def test_units_that_went_to_a_gone_client_alone_are_dealt_again(scene: Scenario, task: int) -> None:
    scene.close("a")
    scene.drop("a", task, (2, 4), (6, 7))
    assert scene.facts[-1] == events.DepartedClientReported(task, "a", ((2, 4), (6, 7)), ())
    assert scene.split(task) == (2, 4)
    assert scene.split(task) == (6, 7)
    assert scene.split(task)[0] == 10
    finish(scene, task)
    assert scene.heartbeat("b").finished
    assert scene.heartbeat("b").lost == ()


def test_units_that_others_were_sent_a_part_of_are_missing_and_named_with_the_client(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.drop("a", task, (2, 4), lost=((4, 6),))
    assert scene.split(task) == (2, 4)
    finish(scene, task)
    update = scene.heartbeat("b")
    assert update.finished
    assert update.lost == (
        messages.LostSplits(
            worker_address="v:1", task_id=task, splits=((4, 6),), num_splits=2, client_id="a"
        ),
    )


def test_what_a_client_said_that_it_used_before_it_left_is_not_dealt_again(
    scene: Scenario, task: int
) -> None:
    """It was sent units 2 to 7, used 2 and 3, and some of 4."""
    scene.settle("a", task, (2, 4), touched=((2, 5),))
    scene.close("a")
    scene.drop("a", task, (2, 8))
    assert scene.facts[-1] == events.DepartedClientReported(task, "a", ((5, 8),), ((4, 5),))


def test_what_a_client_that_is_gone_acknowledged_is_not_dealt_again_if_the_worker_is_lost_later(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.add_worker("w")
    scene.drop("a", task, (6, 7), delivered=((1, 3), (4, 5)), partially_delivered=((1, 6),))
    scene.restart()
    scene.lose("v")
    scene.settle("b", task, (0, 1))
    other = scene.state.iterations[2000].tasks[-1]
    dealt = [scene.split(other, max_splits=1) for _ in range(5)]
    assert dealt == [(6, 7), (7, 8), (8, 9), (9, 10), (10, 11)]
    finish_as(scene, "w", other)
    (lost,) = scene.heartbeat("b").lost
    assert lost.splits == ((3, 4), (5, 6)), "what came whole is not missing"


def test_a_client_that_was_silent_for_its_timeout_is_gone_as_one_that_closed(
    scene: Scenario, task: int
) -> None:
    for _ in range(301):
        scene.tick(1.0)
        scene.beat("v")
        scene.heartbeat("b")
    assert scene.beaten("v", task).departed_clients == ((task, "a"),)


def test_an_iteration_does_not_end_before_the_worker_has_spoken_of_a_client_that_left(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    while not (granted := scene.deal(task, num_done=0)).wait:
        assert granted.start < granted.stop
    scene.finish("v", task)
    assert not scene.heartbeat("b").finished
    assert scene.beat("v", task) == ()
    scene.drop("a", task, (3, 4))
    (again,) = scene.heartbeat("b").tasks
    assert scene.split(again.task_id) == (3, 4)
    assert scene.split(again.task_id) == (0, 0)
    scene.finish("v", again.task_id)
    assert scene.heartbeat("b").finished


def test_the_end_waits_for_a_client_that_is_silent_and_says_so(scene: Scenario, task: int) -> None:
    scene.heartbeat("a")
    finish_after(scene, task, silence=3.0)
    update = scene.heartbeat("b")
    assert not update.finished
    assert update.awaited_clients == ("a",)
    # It was only paused: it is heard again.
    scene.heartbeat("a")
    scene.tick(0.5)
    assert scene.heartbeat("b").finished


def test_what_a_client_held_that_died_before_the_end_is_dealt_to_the_others(
    scene: Scenario, task: int
) -> None:
    finish_after(scene, task, silence=3.0)
    for _ in range(301):
        scene.tick(1.0)
        scene.beat("v", task)
        assert not scene.heartbeat("b").finished
    scene.drop("a", task, (18, 20))
    (again,) = scene.heartbeat("b").tasks
    assert [scene.split(again.task_id) for _ in range(2)] == [(18, 19), (19, 20)]


def finish_after(scene: Scenario, task: int, silence: float) -> None:
    """Let the task end after client a was silent for so long; what a holds is not done."""
    while (granted := scene.deal(task, num_done=0)).start < granted.stop:
        pass
    for _ in range(int(silence)):
        scene.tick(1.0)
        scene.beat("v", task)
        scene.heartbeat("b")
    scene.finish("v", task)


def test_what_is_left_over_when_the_iteration_has_ended_is_missing(
    scene: Scenario, task: int
) -> None:
    while (granted := scene.deal(task, num_done=0)).start < granted.stop:
        pass
    scene.finish("v", task)
    assert scene.heartbeat("b").finished
    scene.close("a")
    scene.drop("a", task, (18, 20))
    assert scene.facts[-1] == events.DepartedClientReported(task, "a", (), ((18, 20),))
    assert [lost.client_id for lost in scene.heartbeat("b").lost] == ["a"]


def test_units_that_were_returned_or_are_done_do_not_come_back_twice(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.hand_back("v", task, (8, 10))
    scene.split(task, max_splits=1, num_done=3)
    scene.drop("a", task, (0, 4), (7, 9))
    assert scene.facts[-1] == events.DepartedClientReported(task, "a", ((3, 4), (7, 8)), ())


def test_where_nothing_is_dealt_nobody_is_asked(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    scene.open("a", processing_mode=OFF, job_name="job")
    scene.open("b", processing_mode=OFF, job_name="job")
    scene.close("a")
    assert scene.beaten("v", 4000).departed_clients == ()


def test_only_the_tasks_worker_speaks_of_its_clients(scene: Scenario, task: int) -> None:
    scene.add_worker("w")
    scene.close("a")
    with pytest.raises(NotFoundError, match="belongs to worker v"):
        scene.ask(
            messages.ReportDepartedClient(
                worker_id="w",
                client_id="a",
                unacknowledged=(),
                possibly_lost=(),
                **scene.shown(task),
            )
        )
    scene.drop("a", task)


# --- an iteration whose units are all done waits for a client that may be gone --------------------


def test_a_worker_that_joins_while_a_silent_client_is_waited_for_gets_no_task(
    scene: Scenario,
) -> None:
    scene.register(3)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.tick(1.0)
    scene.heartbeat("one")
    done = 0
    while done < 3:
        start, stop = scene.split(task.task_id, num_done=done)
        done += stop - start
    scene.finish("a", task.task_id)
    assert not scene.heartbeat("one").finished
    scene.add_worker("b")
    scene.check()
    assert len(scene.state.tasks) == 1
    assert scene.heartbeat("two").finished


def test_who_counts_as_gone_joins_no_second_time_for_workers_refuse_it(scene: Scenario) -> None:
    scene.register(100)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    with pytest.raises(FailedPreconditionError, match=r"one closed .* iterate over the dataset"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    scene.check()
    scene.restart()
    with pytest.raises(FailedPreconditionError, match="does not know this reader any more"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    assert scene.open("three", processing_mode=DYNAMIC, job_name="job").tasks == (task,)


def test_who_left_and_asks_again_after_the_end_hears_that_it_is_over(scene: Scenario) -> None:
    scene.register(1)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    scene.drop("one", task.task_id)
    scene.split(task.task_id, num_done=0)
    scene.split(task.task_id, num_done=1)
    scene.finish("a", task.task_id)
    scene.tick(1.0)
    assert scene.heartbeat("two").finished
    assert scene.open("one", processing_mode=DYNAMIC, job_name="job").finished
    assert not [
        each.departed_clients for each in scene.state.iterations.values() if each.departed_clients
    ]


# --- A finished task whose worker is there is not lost to a client that missed an answer ----------


def unreachable(scene: Scenario, client_id: str, task_id: int) -> None:
    scene.ask(
        messages.ReportUnreachable(client_id=client_id, task_id=task_id, connection_refused=False)
    )


def begun(scene: Scenario, mode: int, units: int = 4) -> int:
    """Let two clients read one task on a worker; where units are dealt, all are dealt to it."""
    scene.register(units)
    scene.add_worker("w")
    scene.open("b", processing_mode=mode, job_name="job")
    task = scene.open("a", processing_mode=mode, job_name="job").tasks[0].task_id
    while mode == DYNAMIC and scene.split(task)[1] < units:
        pass
    return int(task)


def pass_time(scene: Scenario, seconds: int, *clients: str) -> None:
    for _ in range(seconds):
        scene.tick(1.0)
        scene.beat("w")
        for client_id in clients:
            scene.heartbeat(client_id)


def test_a_finished_task_is_kept_for_its_clients_while_its_worker_is_there(
    scene: Scenario,
) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (update.tasks, update.redeliverable, update.finished) == ((), (task,), True)
    scene.restart()
    assert scene.heartbeat("a").redeliverable == (task,)
    scene.lose("w")
    update = scene.heartbeat("a")
    assert (update.redeliverable, update.reports_needed) == ((), (task,))
    scene.check()


def test_a_finished_copy_is_kept_too_and_the_loss_of_its_worker_is_heard(scene: Scenario) -> None:
    task = begun(scene, OFF)
    scene.add_worker("v")
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (len(update.tasks), update.redeliverable, update.finished) == (1, (task,), False)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=update.version))
    assert (later.unchanged, later.redeliverable) == (False, ())
    scene.check()


def test_of_a_copy_that_failed_the_loss_of_its_worker_is_heard(scene: Scenario) -> None:
    task = begun(scene, OFF)
    scene.fail("w", task)
    update = scene.heartbeat("a")
    assert (update.redeliverable, update.finished) == ((task,), True)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=update.version))
    assert (later.unchanged, later.redeliverable, later.finished) == (False, (), True)
    scene.check()


def test_a_task_that_was_dealt_nothing_is_not_kept(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.add_worker("v")
    assert len(scene.heartbeat("a").tasks) == 2
    scene.finish("v", task + 1)
    scene.finish("w", task)
    assert scene.heartbeat("a").redeliverable == (task,)


def test_a_client_that_cannot_reach_the_worker_for_long_waits_no_more(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    known = scene.heartbeat("a").version
    for _ in range(int(scene.limits.unreachable_timeout) + 1):
        beat = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=known))
        assert beat.unchanged
        unreachable(scene, "a", task)
        pass_time(scene, 1, "b")
    given_up = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=known))
    assert (given_up.unchanged, given_up.redeliverable, given_up.finished) == (False, (), True)
    assert scene.heartbeat("b").redeliverable == (task,)


def test_a_client_that_others_wait_for_to_settle_is_named(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    scene.lose("w")
    scene.settle("a", task)
    update = scene.heartbeat("a")
    assert (update.finished, update.awaited_clients) == (False, ("b",))
