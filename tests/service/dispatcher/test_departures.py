"""What was sent to clients that are gone is dealt again, or said to be missing."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import updates
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def task(scene: Scenario) -> int:
    """Clients a and b read 20 units from one worker, which was dealt ten of them."""
    scene.register(20)
    scene.add_worker("v")
    scene.open("a", processing_mode=DYNAMIC, job_name="job")
    scene.open("b", processing_mode=DYNAMIC, job_name="job")
    assert scene.split(4000, want=10) == (0, 10)
    return 4000


def finish(scene: Scenario, task: int) -> None:
    finish_as(scene, "v", task)


def finish_as(scene: Scenario, worker_id: str, task: int) -> None:
    while scene.split(task, done=scene.state.tasks[task].splits.dealt) != (0, 0):
        pass
    scene.finish(worker_id, task)


def test_a_worker_is_asked_about_clients_that_left_until_it_has_spoken(
    scene: Scenario, task: int
) -> None:
    assert scene.beaten("v", task).departed == ()
    scene.close("a")
    assert scene.beaten("v", task).departed == ((task, "a"),)
    scene.restart()
    assert scene.beaten("v", task).departed == ((task, "a"),)
    scene.drop("a", task)
    assert scene.beaten("v", task).departed == ()
    facts = len(scene.facts)
    scene.drop("a", task)
    assert len(scene.facts) == facts


def test_units_that_went_to_a_gone_client_alone_are_dealt_again(scene: Scenario, task: int) -> None:
    scene.close("a")
    scene.drop("a", task, (2, 4), (6, 7))
    assert scene.facts[-1] == updates.ClientDropped(task, "a", ((2, 4), (6, 7)), ())
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
        messages.LostUnits(
            worker_address="v:1", task_id=task, units=((4, 6),), count=2, client_id="a"
        ),
    )


def test_what_a_client_said_that_it_used_before_it_left_is_not_dealt_again(
    scene: Scenario, task: int
) -> None:
    """It was sent units 2 to 7, used 2 and 3, and some of 4."""
    scene.settle("a", task, (2, 4), touched=((2, 5),))
    scene.close("a")
    scene.drop("a", task, (2, 8))
    assert scene.facts[-1] == updates.ClientDropped(task, "a", ((5, 8),), ((4, 5),))


def test_what_a_client_that_is_gone_acknowledged_is_not_dealt_again_if_the_worker_is_lost_later(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.add_worker("w")
    scene.drop("a", task, (6, 7), received=((1, 3), (4, 5)), touched=((1, 6),))
    scene.restart()
    scene.lose("v")
    scene.settle("b", task, (0, 1))
    other = scene.state.iterations[2000].tasks[-1]
    dealt = [scene.split(other, want=1) for _ in range(5)]
    assert dealt == [(6, 7), (7, 8), (8, 9), (9, 10), (10, 11)]
    finish_as(scene, "w", other)
    (lost,) = scene.heartbeat("b").lost
    assert lost.units == ((3, 4), (5, 6)), "what came whole is not missing"


def test_a_client_that_was_silent_for_its_timeout_is_gone_as_one_that_closed(
    scene: Scenario, task: int
) -> None:
    for _ in range(301):
        scene.tick(1.0)
        scene.beat("v")
        scene.heartbeat("b")
    assert scene.beaten("v", task).departed == ((task, "a"),)


def test_an_iteration_does_not_end_before_the_worker_has_spoken_of_a_client_that_left(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    while not (granted := scene.deal(task, done=0)).wait:
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
    assert update.silent == ("a",)
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
    while (granted := scene.deal(task, done=0)).start < granted.stop:
        pass
    for _ in range(int(silence)):
        scene.tick(1.0)
        scene.beat("v", task)
        scene.heartbeat("b")
    scene.finish("v", task)


def test_the_end_does_not_wait_for_clients_that_are_heard(scene: Scenario, task: int) -> None:
    finish(scene, task)
    assert scene.heartbeat("b").finished


def test_what_is_left_over_when_the_iteration_has_ended_is_missing(
    scene: Scenario, task: int
) -> None:
    while (granted := scene.deal(task, done=0)).start < granted.stop:
        pass
    scene.finish("v", task)
    assert scene.heartbeat("b").finished
    scene.close("a")
    scene.drop("a", task, (18, 20))
    assert scene.facts[-1] == updates.ClientDropped(task, "a", (), ((18, 20),))
    assert [lost.client_id for lost in scene.heartbeat("b").lost] == ["a"]


def test_with_a_lost_worker_nobody_knows_what_a_client_that_left_received(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.lose("v")
    scene.settle("b", task, (0, 3))
    assert scene.state.tasks[task].splits.untouched == ()
    assert scene.state.tasks[task].departed == {}


def test_units_that_were_returned_or_are_done_do_not_come_back_twice(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.hand_back("v", task, (8, 10))
    scene.split(task, want=1, done=3)
    scene.drop("a", task, (0, 4), (7, 9))
    assert scene.facts[-1] == updates.ClientDropped(task, "a", ((3, 4), (7, 8)), ())


def test_where_nothing_is_dealt_nobody_is_asked(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    scene.open("a", processing_mode=OFF, job_name="job")
    scene.open("b", processing_mode=OFF, job_name="job")
    scene.close("a")
    assert scene.beaten("v", 4000).departed == ()


def test_only_the_tasks_worker_speaks_of_its_clients(scene: Scenario, task: int) -> None:
    scene.add_worker("w")
    scene.close("a")
    with pytest.raises(NotFoundError, match="belongs to worker v"):
        scene.ask(
            messages.DropClient(
                worker_id="w", client_id="a", units=(), lost=(), **scene.shown(task)
            )
        )
    scene.drop("a", task)
