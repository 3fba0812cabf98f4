"""Whose turn each round is: the same for all consumers, whatever they hear when."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from headrace.service.modes.coordinated_reads.round_order import RoundOrder


def taken(rounds: RoundOrder, limit: int = 100) -> list[tuple[int, int]]:
    """Take rounds as far as it is known whose they are."""
    found = []
    while len(found) < limit and (due := rounds.next_turn()) is not None:
        found.append(due)
        rounds.advance()
    return found


def test_tasks_take_turns_in_the_order_in_which_they_joined() -> None:
    rounds = RoundOrder()
    rounds.add_task(2, 0)
    rounds.add_task(1, 0)
    rounds.extend_horizon(5)
    assert taken(rounds) == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]


def test_nobody_goes_beyond_the_round_up_to_which_the_tasks_are_known() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    assert rounds.next_turn() is None
    rounds.extend_horizon(2)
    assert taken(rounds) == [(1, 0), (1, 1)]
    assert rounds.next_turn() is None


def test_a_task_joins_at_its_round_after_the_last_of_the_others() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 0)
    rounds.add_task(3, 3)
    rounds.extend_horizon(8)
    turns = [task for task, _ in taken(rounds)]
    assert turns == [1, 2, 1, 2, 3, 1, 2, 3]


def test_a_task_that_is_over_is_left_out_from_its_turn_on() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 0)
    rounds.extend_horizon(6)
    rounds.set_round_count(2, 1)
    assert taken(rounds) == [(1, 0), (2, 0), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_where_no_task_is_left_the_next_round_is_the_one_with_which_another_joins() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.extend_horizon(10)
    rounds.set_round_count(1, 2)
    assert taken(rounds) == [(1, 0), (1, 1)]
    rounds.add_task(2, 10)
    assert rounds.next_turn() is None, "others may still join with that round"
    assert rounds.furthest_round == 10
    rounds.extend_horizon(20)
    assert rounds.next_turn() == (2, 0)
    assert rounds.next_number == 10


def test_what_comes_next_is_foreseen_without_taking_it() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 1)
    rounds.extend_horizon(4)
    assert rounds.upcoming(10) == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert taken(rounds) == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_a_task_that_gave_nothing_makes_no_difference_to_those_who_never_heard_of_it() -> None:
    one, other = RoundOrder(), RoundOrder()
    for each in (one, other):
        each.add_task(1, 0)
        each.extend_horizon(1)
        assert taken(each) == [(1, 0)]
    # Consumer one heard of task 2 before it was lost without a round.
    one.add_task(2, 0)
    one.set_round_count(2, 0)
    for each in (one, other):
        each.add_task(3, 1)
        each.extend_horizon(6)
    assert taken(one) == taken(other)


@pytest.mark.parametrize("seed", range(200))
def test_consumers_who_hear_the_same_in_another_order_and_later_find_the_same_turns(
    seed: int,
) -> None:
    chance = random.Random(seed)
    horizon, tasks = 0, 0
    #: What the dispatcher says, in order: a task, an end, a horizon.
    story: list[tuple[str, Callable[[RoundOrder], None]]] = []
    for _ in range(30):
        if chance.random() < 0.3:
            tasks += 1
            task = tasks
            length = chance.choice([0, 0, 1, 3, 10, 10_000])
            story.append(
                ("task", partial(RoundOrder.add_task, task_id=task, starting_round=horizon))
            )
            if length < 10_000:
                story.append(
                    ("end", partial(RoundOrder.set_round_count, task_id=task, rounds=length))
                )
        else:
            horizon += chance.randrange(1, 10)
            story.append(("horizon", partial(RoundOrder.extend_horizon, horizon=horizon)))
    story.append(("horizon", partial(RoundOrder.extend_horizon, horizon=horizon + 20)))

    def read(*, late: bool) -> list[tuple[int, int]]:
        rounds, found, waiting = RoundOrder(), [], []
        lengths = {}
        for kind, say in story:
            if kind == "end":
                lengths[say.keywords["task_id"]] = say.keywords["rounds"]  # type: ignore[attr-defined]
        for kind, say in story:
            if kind == "end" and late and chance.random() < 0.7:
                waiting.append(say)
            else:
                say(rounds)
            while (due := rounds.next_turn()) is not None:
                if due[1] >= lengths.get(due[0], math.inf):
                    # It never comes: the end must be heard first.
                    for end in waiting:
                        end(rounds)
                    waiting.clear()
                    continue
                found.append(due)
                rounds.advance()
        return found

    expected = read(late=False)
    assert read(late=True) == expected, f"seed {seed}"
    assert read(late=True) == expected, f"seed {seed}"
