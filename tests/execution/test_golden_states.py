"""Saved states of version 3 remain readable; each is stored with the elements that follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr

Dataset = hr.Dataset
SAVED = Path(__file__).parent / "states_of_version_3.json"
"""Name -> [state, the elements after it]. Never changed: only added to."""

AT = 5
"""Elements that were read before each state was saved."""


def odd_or_half(x: Any) -> Any:
    """Branch, so that it is called element by element."""
    return x * 2 if x % 2 else x // 2


def even(x: Any) -> bool:
    return bool(x % 2 == 0)


def several(x: Any) -> Dataset:
    return Dataset.range(int(x) % 4).map(lambda y: y + 10)


def shuffled(x: Any) -> Dataset:
    return Dataset.range(4).shuffle(4)


def counted(state: Any, x: Any) -> Any:
    n, (array, text) = state["n"], state["s"]
    return {"n": n + x, "s": (array + n, text)}, (n, array)


def ragged(x: Any) -> Any:
    return np.full(int(x) % 5, x)


def thirds(x: Any) -> Any:
    return x % 3


def shuffled_window(key: Any, window: Dataset) -> Dataset:
    return window.shuffle(4).batch(2)


def numbers() -> Any:
    yield from range(30)


def seeded(dataset: Dataset) -> Dataset:
    return dataset.with_options(hr.Options(seed=7))


PLANS: dict[str, Callable[[], Dataset]] = {
    "range": lambda: Dataset.range(20),
    "slices": lambda: Dataset.from_tensor_slices({"a": np.arange(20), "b": np.arange(20) * 2}),
    "generator": lambda: Dataset.from_generator(numbers),
    "index part": lambda: Dataset.range(20).shuffle(6, seed=1).repeat(2).skip(3).shard(2, 1),
    "unseeded shuffle": lambda: seeded(Dataset.range(20).shuffle(6)),
    "shuffle of batches": lambda: Dataset.range(40).batch(3).shuffle(5, seed=2),
    "map": lambda: Dataset.range(20).map(odd_or_half),
    "parallel map": lambda: Dataset.range(20).map(odd_or_half, num_parallel_calls=2),
    "filter": lambda: Dataset.range(40).filter(even),
    "map and batch": lambda: Dataset.range(40).map(odd_or_half).batch(3),
    "filter and batch": lambda: Dataset.range(60).filter(even).batch(3),
    "unbatch": lambda: Dataset.range(40).map(odd_or_half).batch(3).unbatch(),
    "take and skip": lambda: Dataset.range(60).filter(even).skip(2).take(20),
    "shard and enumerate": lambda: Dataset.range(60).filter(even).shard(2, 1).enumerate(),
    "repeat": lambda: Dataset.range(6).filter(even).repeat(5),
    "zip": lambda: Dataset.zip(Dataset.range(20).filter(even), Dataset.range(15).map(odd_or_half)),
    "concatenate": lambda: (
        Dataset.range(6).filter(even).concatenate(Dataset.range(9).map(odd_or_half))
    ),
    "shuffle of values": lambda: Dataset.range(60).filter(even).shuffle(6, seed=3),
    "flat_map": lambda: Dataset.range(20).flat_map(several),
    "nested shuffles": lambda: seeded(Dataset.range(10).flat_map(shuffled)),
    "nested shuffles over a shuffle of values": lambda: seeded(
        Dataset.range(20).filter(even).shuffle(4).flat_map(shuffled)
    ),
    "interleave": lambda: Dataset.range(20).interleave(several, cycle_length=3, block_length=2),
    "cache": lambda: seeded(Dataset.range(8).shuffle(8).cache().repeat(2)),
    "prefetch": lambda: Dataset.range(20).map(odd_or_half).prefetch(3),
    "random": lambda: seeded(Dataset.random().take(12)),
    "scan": lambda: Dataset.range(20).scan({"n": 0, "s": (np.zeros(2), b"s")}, counted),
    "take_while": lambda: Dataset.range(20).take_while(lambda x: bool(x < 15)),
    "padded_batch": lambda: Dataset.range(40).map(ragged).padded_batch(3, padding_values=-1),
    "group_by_window": lambda: seeded(
        Dataset.range(40).filter(even).group_by_window(thirds, shuffled_window, window_size=4)
    ),
    "buckets": lambda: (
        Dataset.range(40).map(ragged).bucket_by_sequence_length(len, [2, 4], [3, 4, 2])
    ),
    "first fit": lambda: Dataset.range(40).map(ragged).pack_sequences(7, num_bins=3),
    "best fit": lambda: (
        Dataset.range(40).map(ragged).pack_sequences({"tokens": 7}, "best_fit", num_bins=3)
    ),
    "concat then split": lambda: (
        Dataset.range(40).map(ragged).pack_sequences(3, "concat_then_split")
    ),
    "batch by cost": lambda: Dataset.range(40).map(ragged).batch_by_cost(9, len),
    "sample": lambda: seeded(
        Dataset.sample_from_datasets([Dataset.range(4), Dataset.range(20, 39).filter(even)])
    ),
    "choose": lambda: Dataset.choose_from_datasets(
        [Dataset.range(3), Dataset.range(20, 39)],
        Dataset.range(30).filter(even).map(lambda x: x // 2 % 2),
        stop_on_empty_dataset=False,
    ),
}


def shown(element: Any) -> Any:
    """Return an element as a JSON value."""
    if isinstance(element, dict):
        return {key: shown(value) for key, value in element.items()}
    if isinstance(element, tuple):
        return [shown(value) for value in element]
    return np.asarray(element).tolist()


def saved(make: Callable[[], Dataset]) -> list[Any]:
    """Return the entry of the file for a plan; used to create the file."""
    with iter(make()) as iterator:
        for _ in range(AT):
            next(iterator)
        state = iterator.get_state()
        return [state, [shown(element) for element in iterator]]


@pytest.mark.parametrize("name", PLANS)
def test_a_saved_state_continues_with_the_same_elements(name: str) -> None:
    state, rest = json.loads(SAVED.read_text(encoding="utf-8"))[name]
    with iter(PLANS[name]()) as iterator:
        iterator.set_state(state)
        assert [shown(element) for element in iterator] == rest


@pytest.mark.parametrize("name", PLANS)
def test_a_state_at_the_same_position_is_still_written_in_the_same_form(name: str) -> None:
    state, _ = json.loads(SAVED.read_text(encoding="utf-8"))[name]
    with iter(PLANS[name]()) as iterator:
        iterator.set_state(state)
        for _ in range(2):
            next(iterator, None)
        written = iterator.get_state()
    assert written["version"] == state["version"]
    assert written.keys() == state.keys()
    assert [step[:2] for step in written["plan"]] == [step[:2] for step in state["plan"]]
    assert written["position"].keys() == state["position"].keys()


def test_every_saved_state_has_its_plan() -> None:
    assert json.loads(SAVED.read_text(encoding="utf-8")).keys() == PLANS.keys()
