"""A task that waits for what a death brings is to give what it holds: nobody waits for it then."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service import messages
from headrace.service.messages import GetSplitReply
from headrace.service.modes.distributed_save.requests import ReportDirectory
from tests.service.dispatcher.scenario import DYNAMIC, EXACTLY, Scenario, saving

WAIT = GetSplitReply(start=0, stop=0, wait=True)
FLUSH = GetSplitReply(start=0, stop=0, wait=True, flush=True)


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Twenty units, and two workers."""
    scene.register(20, has_element_ids=True)
    scene.add_worker("v")
    scene.add_worker("w")
    return scene


def settle(scene: Scenario, task_id: int) -> None:
    in_rounds = scene.state.iterations[2000].mode_state is not None
    scene.ask(
        messages.ReportDelivery(
            client_id="c",
            task_id=task_id,
            delivered=(),
            partially_delivered=(),
            rounds=0 if in_rounds else None,
        )
    )
    scene.check()


def suspected(scene: Scenario) -> int:
    """Let two workers die with unit 0, of which nothing came; return the task of a third one."""
    for worker_id, task_id, next_one in (("v", 4000, "x"), ("x", 4002, "y")):
        assert scene.split(task_id, max_splits=1) == (0, 1)
        scene.lose(worker_id)
        settle(scene, task_id)
        scene.add_worker(next_one)
    return 4003


@pytest.mark.parametrize("visitation", ["exactly_once", "at_most_once"])
def test_who_holds_a_suspect_gives_all_that_it_holds_and_gets_more_when_that_is_done(
    scene: Scenario, visitation: str
) -> None:
    scene.open("c", **{**EXACTLY, "visitation": visitation})
    task_id = suspected(scene)
    granted = scene.deal(task_id, max_splits=1)
    assert (granted.start, granted.stop, granted.is_poison_candidate) == (0, 1, True)
    assert scene.deal(task_id) == FLUSH
    assert scene.deal(task_id, num_done=1).start == 1
    scene.check()


def test_who_writes_files_too() -> None:
    scene = Scenario(keeps_journal=True)
    scene.register(20, has_element_ids=True, anonymous=True)
    for worker_id in "vwxyz":
        scene.add_worker(worker_id)
    scene.ask(saving())
    scene.ask(ReportDirectory(save_id="0" * 16, outcome="opened"))
    for worker_id, task_id in (("v", 4000), ("w", 4001)):
        assert scene.split(task_id, max_splits=1) == (0, 1)
        scene.lose(worker_id)
    assert scene.deal(4002, max_splits=1).is_poison_candidate
    assert scene.deal(4002) == FLUSH
    scene.check()


@pytest.mark.parametrize(
    "asked",
    [
        {"num_consumers": 1, "consumer_index": 0, "visitation": None},
        {"cross_trainer_cache": True, "visitation": None},
    ],
)
def test_not_where_a_portion_without_elements_says_nothing(
    scene: Scenario, asked: dict[str, Any]
) -> None:
    scene.open("c", **{**EXACTLY, **asked})
    task_id = suspected(scene)
    assert scene.deal(task_id, max_splits=1).is_poison_candidate
    assert scene.deal(task_id) == WAIT


def test_not_where_a_step_works_on_the_whole_stream() -> None:
    scene = Scenario()
    scene.register(20, has_element_ids=False)
    scene.add_worker("v")
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, visitation="at_most_once", job_name="job")
    task_id = suspected(scene)
    assert scene.deal(task_id, max_splits=1).is_poison_candidate
    assert scene.deal(task_id) == WAIT, "to begin it again would change what comes"


def test_who_waits_for_what_others_may_have_lost_gives_all_that_it_holds(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.split(4001, max_splits=1)
    scene.lose("w")
    while scene.state.iterations[2000].pool.num_unassigned:
        scene.split(4000)
    assert scene.deal(4000) == FLUSH, "what came of the lost one is not known yet"
    settle(scene, 4001)
    assert scene.split(4000) == (0, 1)
    assert scene.deal(4000) == GetSplitReply(start=0, stop=0), "nothing is left"


def test_who_has_its_share_waits_and_keeps_what_it_holds(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    while not (granted := scene.deal(4000)).wait:
        pass
    assert granted == WAIT


def test_at_most_once_nobody_gives_before_the_end(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="at_most_once")
    scene.split(4001, max_splits=1)
    scene.lose("w")
    while scene.state.iterations[2000].pool.num_unassigned:
        scene.split(4000)
    assert scene.deal(4000) == WAIT
