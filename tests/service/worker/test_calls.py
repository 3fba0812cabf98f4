"""Calls that are not answered are made again; the waiting is said, and ends."""

from __future__ import annotations

import math
import random

from headrace.service.messages import GetPlan, WorkerLeaving, WorkerLeft
from headrace.service.worker.agenda import Calls

LEAVING, LEFT, PLAN = WorkerLeaving("w"), WorkerLeft("w"), GetPlan(b"")


def test_what_is_asked_twice_is_one_call_until_it_is_answered() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    assert calls.ask(LEAVING, 0.0)
    assert not calls.ask(LEAVING, 0.5)
    assert calls.answered(LEAVING, 1.0)
    assert not calls.answered(LEAVING, 1.0)
    assert calls.ask(LEAVING, 1.0)


def test_a_call_is_made_again_after_a_second_and_a_plan_is_waited_for_longer() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    calls.ask(LEAVING, 0.0)
    calls.ask(PLAN, 0.0)
    assert calls.due(0.9) == []
    assert calls.due(1.0) == [LEAVING]
    assert calls.due(1.9) == []
    assert calls.due(10.0) == [LEAVING, PLAN]


def test_workers_that_lost_the_dispatcher_at_once_do_not_come_back_at_once() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    crowd = [Calls(60.0, 0.0, chance.random) for _ in range(1000)]
    for calls in crowd:
        calls.ask(LEAVING, 0.0)
        calls.lost(LEAVING, 0.0)
    first = sorted(calls.next_at for calls in crowd)
    for at, calls in zip([each.next_at for each in crowd], crowd, strict=True):
        assert calls.due(at) == [LEAVING]
        calls.lost(LEAVING, 1.0)
    second = sorted(calls.next_at for calls in crowd)
    # Half as long again as the first delay of 50 ms, at most; the next delay is longer.
    assert 0.05 <= first[0] < 0.06
    assert 0.07 < first[-1] < 0.075
    assert 1.065 <= second[0] < second[-1] < 1.0975
    for times in (first, second):
        most = max(sum(at <= each < at + 0.001 for each in times) for at in times)
        assert most < 150


def test_what_is_not_answered_is_made_again_after_another_time_by_each() -> None:
    times = []
    for drawn in (0.0, 0.5, 0.999):
        calls = Calls(60.0, 0.0, lambda drawn=drawn: drawn)  # type: ignore[misc]
        calls.ask(LEAVING, 0.0)
        times.append(round(calls.next_at, 3))
        assert calls.due(calls.next_at) == [LEAVING]
        times.append(round(calls.next_at, 3))
    assert times == [1.0, 2.0, 1.25, 2.5, 1.5, 2.999]


def test_the_loss_of_a_call_that_nobody_waits_for_is_none() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    assert calls.lost(LEAVING, 0.0) == 0
    calls.ask(LEAVING, 0.0)
    assert [calls.lost(LEAVING, 0.0), calls.lost(LEAVING, 1.0)] == [1, 2]


def test_calls_that_are_of_no_use_any_more_are_forgotten() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    calls.ask(LEAVING, 0.0)
    calls.ask(LEFT, 0.0)
    calls.forget(lambda call: isinstance(call, WorkerLeaving))
    assert calls.of(WorkerLeaving, WorkerLeft) == [LEFT]
    calls.forget()
    assert calls.next_at == math.inf


def test_a_call_is_given_up_when_patience_ends() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    calls.ask(LEAVING, 5.0)
    assert calls.give_up(64.9) == []
    assert calls.give_up(65.0) == [LEAVING]
    assert calls.due(100.0) == []


def test_time_in_which_the_worker_did_not_run_is_left_out() -> None:
    calls = Calls(60.0, 0.0, lambda: 0.0)
    calls.ask(LEAVING, 0.0)
    calls.forgive(100.0, 105.0)
    assert calls.silence_to_warn_of(109.9) == 0.0
    assert calls.silence_to_warn_of(110.0) == 10.0
    assert calls.give_up(159.9) == []
    assert calls.give_up(160.0) == [LEAVING]
