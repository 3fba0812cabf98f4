"""One entry for each transformation of `Dataset`; its name begins with that of the method.

The input has 12 elements, arrays of two numbers. A step gets it with the number of threads and a
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import headrace as hr

Dataset = hr.Dataset

COUNT = 12

SameAs = Literal["elements", "rows", "tokens", "count", "nothing"]
"""What an unordered read has in common with one process: the elements, in any order; the numbers in
them, or those of packed sequences, if elements depend on the order of those before; the number of
elements; or nothing but the kind of elements."""


@dataclass(frozen=True)
class Setting:
    """Values for a step: a number of threads, and an empty directory."""

    folder: Path
    threads: int | None = None


@dataclass(frozen=True)
class Step:
    """A transformation, and what is expected of it with a data service.

    Attributes:
        apply: Applies it.
        dynamic: What DYNAMIC sharding has in common with one process.
        refused: Parts of the message with which a reading mode refuses the step, by mode: "OFF",
            "DYNAMIC" or "ordered", and possibly the input, as in "ordered, generated".
    """

    apply: Callable[[Dataset[Any], Setting], Dataset[Any]]
    dynamic: SameAs = "elements"
    refused: Mapping[str, str] = field(default_factory=dict)


def branching(x: Any) -> Any:
    """Branch, so that it is called element by element."""
    return x * 3 if x[0] % 4 else x - 1


def failing(x: Any) -> Any:
    """Fail for some elements."""
    if x[0] % 10 == 4:
        raise KeyError(int(x[0]))
    return x


def small(x: Any) -> Dataset[Any]:
    """Return a dataset of up to three arrays."""
    return Dataset.range(int(x[0]) // 2 % 4).map(lambda y: np.stack([y, x[1]]))


def opened(x: Any) -> Dataset[Any]:
    """Return a shuffled dataset."""
    return Dataset.range(int(x[0]) % 5 + 1).shuffle(3)


def noised(x: Any, rng: np.random.Generator) -> Any:
    return x + rng.integers(100, size=2)


def ragged(x: Any) -> Any:
    return np.full(int(x[0]) // 2 % 5, x[1])


def other(count: int = 5) -> Dataset[Any]:
    return Dataset.range(100, 100 + count).map(lambda n: np.stack([n, n]))


def summed(total: Any, x: Any) -> Any:
    """Write into the state, and return it as part of the element, too."""
    total += x
    return total, (total, x)


INPUTS: dict[str, Callable[[Setting], Dataset[Any]]] = {
    "slices": lambda s: Dataset.from_tensor_slices(np.arange(2 * COUNT).reshape(COUNT, 2)),
    "computed": lambda s: Dataset.range(COUNT).map(
        lambda n: np.array([2 * n, 2 * n + 1] if n >= 0 else []), s.threads
    ),
    "generated": lambda s: Dataset.from_generator(
        lambda: (np.array([2 * n, 2 * n + 1]) for n in range(COUNT))
    ),
}

STEPS: dict[str, Step] = {
    "apply": Step(lambda ds, s: ds.apply(lambda dataset: dataset.skip(1).map(branching))),
    "batch": Step(lambda ds, s: ds.batch(5, num_parallel_calls=s.threads), "rows"),
    "batch, whole": Step(lambda ds, s: ds.batch(5, drop_remainder=True), "count"),
    "batch_by_cost": Step(
        lambda ds, s: ds.map(ragged).batch_by_cost(6, len, padding_values=0), "rows"
    ),
    "bucket_by_sequence_length": Step(
        lambda ds, s: ds.map(ragged).bucket_by_sequence_length(len, [2, 4], [2, 3, 2]), "rows"
    ),
    "cache": Step(lambda ds, s: ds.map(branching).cache().repeat(2)),
    "cache, file": Step(lambda ds, s: ds.map(branching).cache(s.folder / "cache").repeat(2)),
    "cache, in the client": Step(
        lambda ds, s: ds.scan(np.zeros(2, np.int64), summed).cache().batch(5).repeat(2),
        refused=dict.fromkeys(
            ("DYNAMIC", "ordered"),
            r"^cache \(steps.py:\d+\) requires .* repeat \(steps.py:\d+\) .* after `distribute`$",
        ),
    ),
    "choose_from_datasets": Step(
        lambda ds, s: Dataset.choose_from_datasets(
            [ds, other()], Dataset.range(40).map(lambda n: n % 3 // 2), stop_on_empty_dataset=False
        )
    ),
    "concatenate": Step(lambda ds, s: ds.concatenate(other())),
    "enumerate": Step(lambda ds, s: ds.enumerate(7)),
    "filter": Step(lambda ds, s: ds.filter(lambda x: bool(x[0] % 3))),
    "filter, columns": Step(lambda ds, s: ds.filter(lambda x: x[0] % 3 == 0)),
    "flat_map": Step(lambda ds, s: ds.flat_map(small)),
    "flat_map, shuffled": Step(lambda ds, s: ds.flat_map(opened)),
    "group_by_window": Step(
        lambda ds, s: ds.group_by_window(
            lambda x: x[0] % 3, lambda key, window: window.batch(3), window_size=3
        ),
        "rows",
        refused={
            "ordered": r"group_by_window \(steps.py:\d+\) would open datasets in this process"
        },
    ),
    "ignore_errors": Step(lambda ds, s: ds.map(failing, s.threads).ignore_errors()),
    "in_processes": Step(lambda ds, s: ds.map(branching).in_processes(2)),
    "interleave": Step(
        lambda ds, s: ds.interleave(small, 3, 2, num_parallel_calls=s.threads),
        # The elements of a generator are computed by several workers in turn.
        refused={"ordered, generated": r"interleave \(steps.py:\d+\) would open datasets in this"},
    ),
    "map": Step(lambda ds, s: ds.map(branching, num_parallel_calls=s.threads)),
    "map, columns": Step(lambda ds, s: ds.map(lambda x: {"a": x, "b": x[1:] + 1}, s.threads)),
    "map, unordered": Step(lambda ds, s: ds.map(branching, deterministic=False)),
    "pack_sequences": Step(lambda ds, s: ds.map(ragged).pack_sequences(6, num_bins=2), "tokens"),
    "pack_sequences, split": Step(
        lambda ds, s: ds.map(ragged).pack_sequences(6, "concat_then_split"), "tokens"
    ),
    "padded_batch": Step(lambda ds, s: ds.map(ragged).padded_batch(5, [4]), "rows"),
    "prefetch": Step(lambda ds, s: ds.map(branching).prefetch(s.threads or 1)),
    "ragged_batch": Step(lambda ds, s: ds.map(ragged).ragged_batch(5), "rows"),
    "random_map": Step(lambda ds, s: ds.random_map(noised, s.threads)),
    "rebatch": Step(lambda ds, s: ds.batch(5).rebatch(3), "rows"),
    "rejection_resample": Step(
        lambda ds, s: ds.rejection_resample(lambda x: int(x[0]) // 2 % 2, [0.3, 0.7], [0.5, 0.5])
    ),
    "rejection_resample, estimated": Step(
        lambda ds, s: ds.rejection_resample(lambda x: int(x[0]) // 2 % 2, [0.3, 0.7]), "count"
    ),
    "repeat": Step(lambda ds, s: ds.repeat(2)),
    "repeat, shuffled": Step(lambda ds, s: ds.shuffle(5).repeat(2)),
    "sample_from_datasets": Step(
        lambda ds, s: Dataset.sample_from_datasets([ds, other()], [0.7, 0.3])
    ),
    "scan": Step(lambda ds, s: ds.scan(np.zeros(2, np.int64), summed), "count"),
    "shard": Step(lambda ds, s: ds.shard(3, 1)),
    "shuffle": Step(lambda ds, s: ds.shuffle(4)),
    "shuffle, whole": Step(lambda ds, s: ds.shuffle(99, reshuffle_each_iteration=False)),
    "skip": Step(lambda ds, s: ds.skip(5)),
    "snapshot": Step(
        lambda ds, s: ds.map(branching).snapshot(s.folder / "snapshot"),
        refused={"DYNAMIC": r"snapshot \(steps.py", "ordered": r"snapshot \(steps.py"},
    ),
    "take": Step(lambda ds, s: ds.take(5)),
    # Without an order it ends at the first such element that arrives.
    "take_while": Step(lambda ds, s: ds.take_while(lambda x: x[0] < 15), "nothing"),
    "unbatch": Step(lambda ds, s: ds.unbatch()),
    "unbatch, batches": Step(lambda ds, s: ds.batch(5).unbatch()),
    "unique": Step(lambda ds, s: ds.map(lambda x: x // 6).unique()),
    "window": Step(
        lambda ds, s: ds.window(3).flat_map(lambda w: w.map(branching)),
        refused=dict.fromkeys(
            ("DYNAMIC", "ordered"), r"flat_map \(steps.py:\d+\) would open datasets in this process"
        ),
    ),
    "window, batches": Step(
        lambda ds, s: ds.window(4, 3, 2, True).flat_map(lambda w: w.batch(4)), "rows"
    ),
    "with_options": Step(lambda ds, s: ds.shuffle(4).with_options(hr.Options(seed=2))),
    "zip": Step(lambda ds, s: Dataset.zip(ds, other(9)), "elements"),
}

#: Steps that are tested elsewhere.
TESTED_ELSEWHERE = {
    "in_processes": "starts processes: tests/service/test_in_processes.py restores every state",
}

#: Public attributes of `Dataset` that are neither sources nor transformations.
NO_STEPS = {
    "as_numpy_iterator": "returns an iterator",
    "cardinality": "returns a number",
    "element_spec": "describes elements",
    "explain": "returns a text",
    "fingerprint": "returns a number",
    "get_single_element": "returns an element",
    "iterate": "returns an iterator",
    "options": "returns options",
    "plan": "the plan itself",
    "reduce": "returns a value",
    "save": "writes files, which the source `load` reads",
}
