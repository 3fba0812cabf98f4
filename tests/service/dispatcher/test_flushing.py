"""Waiting tasks must flush their steps if buffered elements could delay other tasks."""

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
    """A dataset with twenty splits, and two workers."""
    scene.register(20, has_element_ids=True)
    scene.add_worker("v")
    scene.add_worker("w")
    return scene


def settle(scene: Scenario, task_id: int) -> None:
    is_coordinated = scene.state.iterations[2000].mode_state is not None
    scene.ask(
        messages.ReportDelivery(
            client_id="c",
            task_id=task_id,
            delivered=(),
            partially_delivered=(),
            rounds=0 if is_coordinated else None,
        )
    )
    scene.check()


def kill_two_workers(scene: Scenario) -> int:
    """Let two workers die with split 0 undelivered; return the task of a third one."""
    for worker_id, task_id, next_worker_id in (("v", 4000, "x"), ("x", 4002, "y")):
        assert scene.split(task_id, max_splits=1) == (0, 1)
        scene.lose(worker_id)
        settle(scene, task_id)
        scene.add_worker(next_worker_id)
    return 4003


@pytest.mark.parametrize("visitation", ["exactly_once", "at_most_once"])
def test_holder_of_a_poison_candidate_must_flush_before_more_splits(
    scene: Scenario, visitation: str
) -> None:
    scene.open("c", **{**EXACTLY, "visitation": visitation})
    task_id = kill_two_workers(scene)
    reply = scene.get_split(task_id, max_splits=1)
    assert (reply.start, reply.stop, reply.is_poison_candidate) == (0, 1, True)
    assert scene.get_split(task_id) == FLUSH
    assert scene.get_split(task_id, num_done=1).start == 1
    scene.check()


def test_save_task_with_a_poison_candidate_must_flush() -> None:
    scene = Scenario(keeps_journal=True)
    scene.register(20, has_element_ids=True, anonymous=True)
    for worker_id in "vwxyz":
        scene.add_worker(worker_id)
    scene.ask(saving())
    scene.ask(ReportDirectory(save_id="0" * 16, outcome="opened"))
    for worker_id, task_id in (("v", 4000), ("w", 4001)):
        assert scene.split(task_id, max_splits=1) == (0, 1)
        scene.lose(worker_id)
    assert scene.get_split(4002, max_splits=1).is_poison_candidate
    assert scene.get_split(4002) == FLUSH
    scene.check()


@pytest.mark.parametrize(
    "options",
    [
        {"num_consumers": 1, "consumer_index": 0, "visitation": None},
        {"cross_trainer_cache": True, "visitation": None},
    ],
)
def test_no_flush_where_empty_result_batches_carry_no_progress(
    scene: Scenario, options: dict[str, Any]
) -> None:
    scene.open("c", **{**EXACTLY, **options})
    task_id = kill_two_workers(scene)
    assert scene.get_split(task_id, max_splits=1).is_poison_candidate
    assert scene.get_split(task_id) == WAIT


def test_no_flush_without_element_ids() -> None:
    scene = Scenario()
    scene.register(20, has_element_ids=False)
    scene.add_worker("v")
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, visitation="at_most_once", job_name="job")
    task_id = kill_two_workers(scene)
    assert scene.get_split(task_id, max_splits=1).is_poison_candidate
    assert scene.get_split(task_id) == WAIT, "restarting the step would change its elements"


def test_task_waiting_for_reports_must_flush(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.split(4001, max_splits=1)
    scene.lose("w")
    while scene.state.iterations[2000].pool.num_unassigned:
        scene.split(4000)
    assert scene.get_split(4000) == FLUSH, "the report about the lost task is missing"
    settle(scene, 4001)
    assert scene.split(4000) == (0, 1)
    assert scene.get_split(4000) == GetSplitReply(start=0, stop=0), "no splits remain"


def test_task_with_its_even_share_waits_without_flush(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    while not (reply := scene.get_split(4000)).wait:
        pass
    assert reply == WAIT


def test_no_flush_with_at_most_once_delivery(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="at_most_once")
    scene.split(4001, max_splits=1)
    scene.lose("w")
    while scene.state.iterations[2000].pool.num_unassigned:
        scene.split(4000)
    assert scene.get_split(4000) == WAIT
