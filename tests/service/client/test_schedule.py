"""Which requests may be sent, and in what order answers are taken."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.service.client.schedule import Budget, Window


def test_answers_are_taken_in_the_order_of_their_numbers() -> None:
    window: Window[str] = Window()
    first, second = window.ask(), window.ask()

    assert window.take(second, "b") == []
    assert window.take(first, "a") == [(0, "a"), (1, "b")]


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    window: Window[str] = Window()
    number = window.ask()

    assert window.take(number, "a") == [(number, "a")]
    assert window.take(number, "a") == []


def test_what_was_used_up_is_acknowledged_and_no_more() -> None:
    window: Window[str] = Window()
    for number in (window.ask(), window.ask(), window.ask()):
        window.take(number, "x")

    window.use_up(1)
    assert window.acknowledged == 0
    window.use_up(0)
    assert window.acknowledged == 2
    assert window.outstanding == 1


def test_after_a_lost_connection_the_unanswered_are_repeated_in_order() -> None:
    window: Window[str] = Window()
    for _ in range(4):
        window.ask()
    window.take(1, "x")

    assert window.to_repeat() == [0, 2, 3]


def test_elements_seen_before_are_not_new() -> None:
    window: Window[str] = Window()

    assert window.is_new(0, 10)
    assert not window.is_new(0, 10)
    assert window.is_new(10, 0)
    assert window.is_new(30, 5)
    assert not window.is_new(10, 20)


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_whatever_is_lost_or_repeated_each_answer_comes_once_in_order(
    count: int, chance: random.Random
) -> None:
    window: Window[int] = Window()
    taken: list[int] = []
    flying: list[int] = []
    while len(taken) < count:
        if window.outstanding < 3:
            flying.append(window.ask())
        if chance.random() < 0.2:
            flying = window.to_repeat() + chance.sample(flying, len(flying) // 2)
        chance.shuffle(flying)
        if flying:
            number = flying.pop()
            for due, answer in window.take(number, number):
                taken.append(answer)
                window.use_up(due)
    assert taken == list(range(len(taken)))
    assert window.acknowledged == len(taken)


def test_a_task_keeps_to_its_window() -> None:
    budget = Budget(16, window=3)
    budget.add("t")
    for number in range(3):
        assert budget.may_ask("t", 0.0)
        budget.asked("t", number, 0.0)

    assert not budget.may_ask("t", 0.0)
    budget.answered("t", 0)
    assert not budget.may_ask("t", 0.0)
    budget.used_up("t", 0)
    assert budget.may_ask("t", 0.0)


def test_with_one_request_for_all_tasks_take_turns() -> None:
    budget = Budget(1)
    turns = []
    for task in "abc":
        budget.add(task)
    asking = "a"
    for number in range(9):
        for task in "abc":
            if budget.may_ask(task, 0.0):
                asking = task
                budget.asked(task, number, 0.0)
                turns.append(task)
                break
        for task in "abc":
            budget.may_ask(task, 0.0)
        budget.answered(asking, number)
        budget.used_up(asking, number)

    assert turns == list("abcabcabc")


def test_a_worker_that_does_not_answer_keeps_nobody_waiting_for_ever() -> None:
    budget = Budget(1, patience=0.5)
    budget.add("stuck")
    budget.add("quick")
    assert budget.may_ask("stuck", 0.0)
    budget.asked("stuck", 0, 0.0)

    assert not budget.may_ask("quick", 0.4)
    assert budget.may_ask("quick", 0.6)


def test_an_answer_that_is_not_used_counts_however_long_it_lies() -> None:
    budget = Budget(1, patience=0.5)
    budget.add("a")
    budget.add("b")
    budget.asked("a", 0, 0.0)
    budget.answered("a", 0)

    assert not budget.may_ask("b", 100.0)


def test_a_task_that_ends_gives_back_what_it_holds() -> None:
    budget = Budget(1)
    budget.add("a")
    budget.add("b")
    budget.asked("a", 0, 0.0)
    budget.answered("a", 0)

    budget.remove("a")

    assert budget.may_ask("b", 0.0)
