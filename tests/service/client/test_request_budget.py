"""Which requests may be sent now."""

from __future__ import annotations

import sys
from typing import Any

from headrace.service.client.request_scheduler import RequestBudget


def test_a_task_respects_its_window() -> None:
    budget = RequestBudget(16, window=3)
    budget.add("t")
    for number in range(3):
        assert budget.can_request("t", 0.0)
        budget.request_sent("t", number, 0.0)

    assert not budget.can_request("t", 0.0)
    budget.reply_received("t", 0)
    assert not budget.can_request("t", 0.0)
    budget.reply_consumed("t", 0)
    assert budget.can_request("t", 0.0)


def test_with_one_request_for_all_tasks_take_turns() -> None:
    budget = RequestBudget(1)
    turns = []
    for task in "abc":
        budget.add(task)
    asking = "a"
    for number in range(9):
        for task in "abc":
            if budget.can_request(task, 0.0):
                asking = task
                budget.request_sent(task, number, 0.0)
                turns.append(task)
                break
        for task in "abc":
            budget.can_request(task, 0.0)
        budget.reply_received(asking, number)
        budget.reply_consumed(asking, number)

    assert turns == list("abcabcabc")


def test_credit_of_an_unresponsive_worker_is_lent() -> None:
    budget = RequestBudget(1, lend_after=0.5)
    budget.add("stuck")
    budget.add("quick")
    assert budget.can_request("stuck", 0.0)
    budget.request_sent("stuck", 0, 0.0)

    assert not budget.can_request("quick", 0.4)
    assert budget.can_request("quick", 0.6)


def test_an_unconsumed_reply_counts_without_time_limit() -> None:
    budget = RequestBudget(1, lend_after=0.5)
    budget.add("a")
    budget.add("b")
    budget.request_sent("a", 0, 0.0)
    budget.reply_received("a", 0)

    assert not budget.can_request("b", 100.0)


def test_a_removed_task_releases_its_credit() -> None:
    budget = RequestBudget(1)
    budget.add("a")
    budget.add("b")
    budget.request_sent("a", 0, 0.0)
    budget.reply_received("a", 0)

    budget.remove("a")

    assert budget.can_request("b", 0.0)


def test_a_request_does_not_examine_other_tasks() -> None:
    def steps(tasks: int) -> int:
        budget = RequestBudget(16)
        for task in range(tasks):
            budget.add(task)
            if budget.can_request(task, 0.0):
                budget.request_sent(task, 0, 0.0)
        taken = []

        def count(frame: Any, event: str, argument: Any) -> None:
            taken.append(event)

        sys.setprofile(count)
        try:
            budget.can_request(tasks - 1, 0.1)
        finally:
            sys.setprofile(None)
        return len(taken)

    assert steps(1000) == steps(20)


def test_removing_a_task_releases_all_its_credit() -> None:
    budget = RequestBudget(2)
    for task in "ab":
        budget.add(task)
        budget.request_sent(task, 0, 0.0)
    budget.reply_received("a", 0)
    budget.remove("a")
    budget.remove("b")
    budget.reply_consumed("a", 0)
    budget.add("c")
    for number in range(2):
        assert budget.can_request("c", 0.0)
        budget.request_sent("c", number, 0.0)
    assert not budget.can_request("c", 0.0)


def test_waiting_tasks_are_served_within_the_credit() -> None:
    budget = RequestBudget(1, lend_after=0.5)
    for task in "abc":
        budget.add(task)
    assert budget.can_request("a", 0.0)
    budget.request_sent("a", 0, 0.0)
    assert not budget.can_request("b", 0.0)
    assert not budget.can_request("c", 0.0)
    assert budget.tasks_to_serve(0.0) == []
    assert budget.tasks_to_serve(0.6) == ["b"]
    budget.reply_received("a", 0)
    assert budget.tasks_to_serve(0.6) == []
    budget.reply_consumed("a", 0)
    assert budget.tasks_to_serve(0.6) == ["b"]
    budget.withdraw("b")
    assert budget.tasks_to_serve(0.6) == ["c"]


def test_tasks_with_credit_are_served_after_those_without() -> None:
    budget = RequestBudget(6, lend_after=0.5)
    budget.add("a")
    budget.add("b")
    for task, number in ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2):
        assert budget.can_request(task, 0.0)
        budget.request_sent(task, number, 0.0)
    assert not budget.can_request("b", 0.0)
    assert not budget.is_short  # they have their share
    budget.add("c")
    budget.reply_consumed("b", 0)
    budget.reply_consumed("b", 1)
    budget.request_sent("c", 0, 0.0)
    budget.request_sent("c", 1, 0.0)
    assert not budget.can_request("b", 0.0)
    budget.add("d")
    assert not budget.can_request("d", 0.0)
    assert budget.is_short
    assert budget.tasks_to_serve(0.0) == []
    assert budget.tasks_to_serve(0.6)[0] == "d"
    budget.withdraw("d")
    assert budget.tasks_to_serve(0.6) == ["b"]


def test_requested_elements_do_not_exceed_the_limit() -> None:
    for limit, tasks in ((1, 1), (4, 1), (16, 1), (16, 2), (5, 3), (100, 7)):
        budget = RequestBudget(limit, counts_elements=True)
        for task in range(tasks):
            budget.add(task)
        asked = 0
        for number in range(limit):
            for task in range(tasks):
                if budget.can_request(task, 0.0):
                    budget.request_sent(task, number, 0.0)
                    asked += budget.max_elements(task, number)
        assert limit / 2 < asked <= limit, (limit, tasks, asked)
        assert not any(budget.can_request(task, 1e9) for task in range(tasks))


def test_a_small_reply_releases_credit_for_other_tasks() -> None:
    budget = RequestBudget(6, counts_elements=True)
    budget.add("a")
    for number in range(3):
        assert budget.can_request("a", 0.0)
        budget.request_sent("a", number, 0.0)
        assert budget.max_elements("a", number) == 2
    budget.reply_received("a", 0, 1)
    budget.add("b")
    assert budget.can_request("b", 0.0)
    budget.request_sent("b", 0, 0.0)
    assert budget.max_elements("b", 0) == 1
    assert not budget.can_request("b", 0.0)
    budget.reply_consumed("a", 0)
    assert budget.can_request("b", 0.0)


def test_credit_is_lent_if_there_are_more_tasks_than_elements() -> None:
    budget = RequestBudget(1, counts_elements=True)
    budget.add("stuck")
    budget.request_sent("stuck", 0, 0.0)
    budget.add("quick")
    assert not budget.can_request("quick", 0.4)
    assert budget.can_request("quick", 0.6)
