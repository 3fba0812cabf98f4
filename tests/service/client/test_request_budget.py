"""Which requests may be sent now."""

from __future__ import annotations

import sys
from typing import Any

from headrace.service.client.request_scheduler import RequestBudget


def test_a_task_keeps_to_its_window() -> None:
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


def test_a_worker_that_does_not_answer_keeps_nobody_waiting_for_ever() -> None:
    budget = RequestBudget(1, lend_after=0.5)
    budget.add("stuck")
    budget.add("quick")
    assert budget.can_request("stuck", 0.0)
    budget.request_sent("stuck", 0, 0.0)

    assert not budget.can_request("quick", 0.4)
    assert budget.can_request("quick", 0.6)


def test_an_answer_that_is_not_used_counts_however_long_it_lies() -> None:
    budget = RequestBudget(1, lend_after=0.5)
    budget.add("a")
    budget.add("b")
    budget.request_sent("a", 0, 0.0)
    budget.reply_received("a", 0)

    assert not budget.can_request("b", 100.0)


def test_a_task_that_ends_gives_back_what_it_holds() -> None:
    budget = RequestBudget(1)
    budget.add("a")
    budget.add("b")
    budget.request_sent("a", 0, 0.0)
    budget.reply_received("a", 0)

    budget.remove("a")

    assert budget.can_request("b", 0.0)


def test_to_ask_for_one_of_many_tasks_takes_no_look_at_the_others() -> None:
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


def test_a_task_that_goes_gives_back_what_it_held() -> None:
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


def test_tasks_in_line_are_served_as_far_as_the_credit_goes() -> None:
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


def test_a_task_that_wants_more_is_served_after_those_without_any() -> None:
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


def test_where_elements_are_counted_no_more_are_asked_for_than_the_limit() -> None:
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


def test_an_answer_with_fewer_elements_than_asked_for_leaves_room_for_others() -> None:
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


def test_with_more_tasks_than_elements_one_that_does_not_answer_keeps_nobody_waiting() -> None:
    budget = RequestBudget(1, counts_elements=True)
    budget.add("stuck")
    budget.request_sent("stuck", 0, 0.0)
    budget.add("quick")
    assert not budget.can_request("quick", 0.4)
    assert budget.can_request("quick", 0.6)
