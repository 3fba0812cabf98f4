"""Calls that are not answered are made again; the waiting is said, and ends."""

from __future__ import annotations

import math

from headrace.service.messages import GetPlan, WorkerLeaving, WorkerLeft
from headrace.service.worker.calls import Calls

LEAVING, LEFT, PLAN = WorkerLeaving("w"), WorkerLeft("w"), GetPlan(b"")


def test_what_is_asked_twice_is_one_call_until_it_is_answered() -> None:
    calls = Calls(60.0, 0.0)
    assert calls.ask(LEAVING, 0.0)
    assert not calls.ask(LEAVING, 0.5)
    assert calls.answered(LEAVING, 1.0)
    assert not calls.answered(LEAVING, 1.0)
    assert calls.ask(LEAVING, 1.0)


def test_a_call_is_made_again_after_a_second_and_a_plan_is_waited_for_longer() -> None:
    calls = Calls(60.0, 0.0)
    calls.ask(LEAVING, 0.0)
    calls.ask(PLAN, 0.0)
    assert calls.due(0.9) == []
    assert calls.due(1.0) == [LEAVING]
    assert calls.due(1.9) == []
    assert calls.due(10.0) == [LEAVING, PLAN]


def test_the_loss_of_a_call_that_nobody_waits_for_is_none() -> None:
    calls = Calls(60.0, 0.0)
    assert calls.lost(LEAVING, 0.0) == 0
    calls.ask(LEAVING, 0.0)
    assert [calls.lost(LEAVING, 0.0), calls.lost(LEAVING, 1.0)] == [1, 2]


def test_calls_that_are_of_no_use_any_more_are_forgotten() -> None:
    calls = Calls(60.0, 0.0)
    calls.ask(LEAVING, 0.0)
    calls.ask(LEFT, 0.0)
    calls.forget(lambda call: isinstance(call, WorkerLeaving))
    assert calls.of(WorkerLeaving, WorkerLeft) == [LEFT]
    calls.forget()
    assert calls.next_at == math.inf


def test_a_call_is_given_up_when_patience_ends() -> None:
    calls = Calls(60.0, 0.0)
    calls.ask(LEAVING, 5.0)
    assert calls.give_up(64.9) == []
    assert calls.give_up(65.0) == [LEAVING]
    assert calls.due(100.0) == []


def test_time_in_which_the_worker_did_not_run_is_left_out() -> None:
    calls = Calls(60.0, 0.0)
    calls.ask(LEAVING, 0.0)
    calls.forgive(100.0, 105.0)
    assert calls.silence_to_warn_of(109.9) == 0.0
    assert calls.silence_to_warn_of(110.0) == 10.0
    assert calls.give_up(159.9) == []
    assert calls.give_up(160.0) == [LEAVING]
