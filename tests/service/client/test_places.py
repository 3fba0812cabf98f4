"""What is left to read where the client's half of a plan stands at a saved place."""

from __future__ import annotations

import random
from typing import Any

import pytest

import headrace as hr
from headrace.execution.build import LocalUnits, start, start_above
from headrace.execution.delivered import END
from headrace.rewrites.cut import Cut, cut
from headrace.service.client.places import going_on, named_place, units_read
from headrace.service.messages import JobOptions, OpenIteration
from headrace.service.ranges import subtracted


def opened(number: int) -> hr.Dataset:
    # One of them is still read long after others are done.
    return hr.Dataset.range(40 if number == 1 else number % 3 + 1)


PLANS: dict[str, Any] = {
    "in turn": lambda: hr.Dataset.range(20).interleave(opened, cycle_length=3),
    "in turn, batched": lambda: hr.Dataset.range(20).interleave(opened, cycle_length=3).batch(2),
    "in turn, repeated": lambda: hr.Dataset.range(9).interleave(opened, cycle_length=2).repeat(3),
    "in turn, shuffled": lambda: (
        hr.Dataset.range(20).interleave(opened, cycle_length=3).shuffle(4, seed=1)
    ),
    "one after the other": lambda: hr.Dataset.range(20).flat_map(opened),
    "rows": lambda: hr.Dataset.range(20).map(lambda x: x),
}


class Noting:
    """Makes units in this process, and notes which."""

    def __init__(self, plan: Any, made: Cut) -> None:
        self.opened: set[int] = set()
        self._units = LocalUnits(
            lambda units: start(plan, seed=7, units=units, origins=True, half=made.half)  # type: ignore[arg-type, return-value]
        )

    def open(self, unit: int, first: int) -> Any:
        self.opened.add(unit)
        return self._units.open(unit, first)


@pytest.mark.parametrize("name", PLANS)
def test_what_is_left_is_what_whoever_goes_on_there_opens(name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    plan = PLANS[name]().plan
    made = cut(plan, ordered=True, bound=0)
    iterator = start_above(made, Noting(plan, made), seed=7)
    while (chunk := iterator.next_chunk(chance.randint(1, 9))) is not None:
        state = chunk.state_at(chance.randint(0, chunk.size))
        first, read = units_read(made, state)
        assert all(first < start < stop <= made.units for start, stop in read)
        left = subtracted(((first, made.units),), read)
        units = Noting(plan, made)
        rest = start_above(made, units, seed=7)
        rest.set_state(state)
        while rest.next_chunk(16) is not None:
            pass
        rest.close()
        assert units.opened == {unit for begin, end in left for unit in range(begin, end)}
    iterator.close()


def test_of_an_interleave_that_waits_for_one_long_dataset_the_others_are_not_left() -> None:
    plan = hr.Dataset.range(60).interleave(opened, cycle_length=2).plan
    made = cut(plan, ordered=True)
    state = {
        "slots": [{"origin": 5, "place": 3}, {"origin": 41, "place": 0}],
        "input": 42,
    }
    assert units_read(made, state) == (5, ((6, 41),))
    assert units_read(made, {**state, "slots": [None, None]}) == (42, ())
    assert units_read(made, None) == (0, ())


OPENING = OpenIteration(
    client_id="c",
    dataset_id="1000",
    job_name="job",
    epoch=(0,),
    seed=1,
    options=JobOptions(processing_mode=2),
)


def test_who_goes_on_from_a_place_asks_for_what_is_left() -> None:
    position = {
        "positions": {"frontier": 3, "delivered": [[5, 7]], "parts": [[8, 1, [[0, 2], [4, None]]]]},
        "seed": 9,
    }
    opening, base = going_on(OPENING, position)
    assert (opening.seed, opening.first_split) == (9, 3)
    assert opening.delivered == ((5, 7),)
    assert opening.partial_splits == ((8, ((0, 2), (4, END))),)
    assert base.to_json() == position["positions"]
    assert opening.start_position_id


def test_places_are_told_apart_by_what_they_say() -> None:
    place = {"frontier": 3, "delivered": [[5, 7]]}
    names = {
        going_on(OPENING, {"positions": each, "seed": seed})[0].start_position_id
        for each in (place, {"frontier": 3}, {"frontier": 4})
        for seed in (1, 2)
    }
    assert len(names) == 6
    assert named_place([1, {"a": 2, "b": 3}]) == named_place([1, {"b": 3, "a": 2}])
