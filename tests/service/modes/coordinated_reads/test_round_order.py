"""Order of rounds: identical for all consumers, whenever they learn of changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from headrace.service.modes.coordinated_reads.round_order import RoundOrder


def take_turns(rounds: RoundOrder, limit: int = 100) -> list[tuple[int, int]]:
    """Advance through the rounds whose tasks are known; return them."""
    found = []
    while len(found) < limit and (turn := rounds.next_turn()) is not None:
        found.append(turn)
        rounds.advance()
    return found


def test_tasks_take_turns_in_the_order_in_which_they_joined() -> None:
    rounds = RoundOrder()
    rounds.add_task(2, 0)
    rounds.add_task(1, 0)
    rounds.extend_horizon(5)
    assert take_turns(rounds) == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]


def test_no_round_at_or_after_the_horizon_has_a_turn() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    assert rounds.next_turn() is None
    rounds.extend_horizon(2)
    assert take_turns(rounds) == [(1, 0), (1, 1)]
    assert rounds.next_turn() is None


def test_a_task_joins_at_its_starting_round_after_the_other_tasks() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 0)
    rounds.add_task(3, 3)
    rounds.extend_horizon(8)
    turns = [task for task, _ in take_turns(rounds)]
    assert turns == [1, 2, 1, 2, 3, 1, 2, 3]


def test_a_finished_task_leaves_the_ring_at_its_turn() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 0)
    rounds.extend_horizon(6)
    rounds.set_round_count(2, 1)
    assert take_turns(rounds) == [(1, 0), (2, 0), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_with_an_empty_ring_the_next_round_is_that_of_a_joining_task() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.extend_horizon(10)
    rounds.set_round_count(1, 2)
    assert take_turns(rounds) == [(1, 0), (1, 1)]
    rounds.add_task(2, 10)
    assert rounds.next_turn() is None, "other tasks may still join at that round"
    assert rounds.furthest_round == 10
    rounds.extend_horizon(20)
    assert rounds.next_turn() == (2, 0)
    assert rounds.next_number == 10


def test_upcoming_rounds_are_returned_without_advancing() -> None:
    rounds = RoundOrder()
    rounds.add_task(1, 0)
    rounds.add_task(2, 1)
    rounds.extend_horizon(4)
    assert rounds.upcoming(10) == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert take_turns(rounds) == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_a_task_without_rounds_does_not_change_the_order() -> None:
    one, other = RoundOrder(), RoundOrder()
    for each in (one, other):
        each.add_task(1, 0)
        each.extend_horizon(1)
        assert take_turns(each) == [(1, 0)]
    # Only consumer `one` learns of task 2, which is lost without a round.
    one.add_task(2, 0)
    one.set_round_count(2, 0)
    for each in (one, other):
        each.add_task(3, 1)
        each.extend_horizon(6)
    assert take_turns(one) == take_turns(other)


@pytest.mark.parametrize("seed", range(200))
def test_the_order_does_not_depend_on_when_consumers_learn_of_changes(
    seed: int,
) -> None:
    chance = random.Random(seed)
    horizon, tasks = 0, 0
    #: Changes in the order of the dispatcher: a task, its round count, or a horizon.
    changes: list[tuple[str, Callable[[RoundOrder], None]]] = []
    for _ in range(30):
        if chance.random() < 0.3:
            tasks += 1
            task = tasks
            length = chance.choice([0, 0, 1, 3, 10, 10_000])
            changes.append(
                ("task", partial(RoundOrder.add_task, task_id=task, starting_round=horizon))
            )
            if length < 10_000:
                changes.append(
                    ("end", partial(RoundOrder.set_round_count, task_id=task, rounds=length))
                )
        else:
            horizon += chance.randrange(1, 10)
            changes.append(("horizon", partial(RoundOrder.extend_horizon, horizon=horizon)))
    changes.append(("horizon", partial(RoundOrder.extend_horizon, horizon=horizon + 20)))

    def read(*, is_delayed: bool) -> list[tuple[int, int]]:
        rounds, found, waiting = RoundOrder(), [], []
        lengths = {}
        for kind, apply in changes:
            if kind == "end":
                lengths[apply.keywords["task_id"]] = apply.keywords["rounds"]  # type: ignore[attr-defined]
        for kind, apply in changes:
            if kind == "end" and is_delayed and chance.random() < 0.7:
                waiting.append(apply)
            else:
                apply(rounds)
            while (turn := rounds.next_turn()) is not None:
                if turn[1] >= lengths.get(turn[0], math.inf):
                    # This round does not exist; apply the delayed round counts first.
                    for end in waiting:
                        end(rounds)
                    waiting.clear()
                    continue
                found.append(turn)
                rounds.advance()
        return found

    expected = read(is_delayed=False)
    assert read(is_delayed=True) == expected, f"seed {seed}"
    assert read(is_delayed=True) == expected, f"seed {seed}"
