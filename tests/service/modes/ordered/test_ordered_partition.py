"""Partition of a plan for ordered reading, which depends on (measured) element sizes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.service.modes.ordered.ordered_partition import OrderedPartition

Dataset = hr.Dataset


def opened(number: int) -> hr.Dataset:
    return Dataset.range(number * 5, number * 5 + 5)


READ = Dataset.range(8).interleave(opened, cycle_length=4)


class Called:
    """A function that counts its calls and returns elements of a given size."""

    def __init__(self, make: Callable[[int], object] = lambda number: np.zeros(100, np.uint8)):
        self.count, self.make = 0, make

    def __call__(self, number: object) -> object:
        self.count += 1
        return self.make(int(np.ravel(number)[0]))


def test_a_step_of_unknown_size_is_pushed_down_if_samples_fit() -> None:
    fn = Called()
    chosen = OrderedPartition(READ.shuffle(10_000).map(fn).batch(4).plan)
    assert fn.count == 0, "nothing is computed before the mode is requested"
    assert chosen.mode == "ordered + pushed down + deferred errors"
    assert fn.count == 4
    assert "map (test_ordered_partition.py:" in chosen.explain()
    assert "100 bytes per element, measured" in chosen.explain()
    assert "shuffles in the client: 1,000,000 bytes" in chosen.explain()
    assert (chosen.mode, fn.count) == ("ordered + pushed down + deferred errors", 4)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda n: np.zeros((n + 1, 10), np.int16), 20 * 16),
        (lambda n: b"x" * 92, 100),
        (lambda n: {"a": np.float32(n), "b": ("text" * 23, np.zeros(3))}, 4 + 100 + 24),
        (lambda n: np.array(["a" * 30, "b" * 10], object), 16 + 40),
    ],
    ids=["ragged", "bytes", "nested", "objects"],
)
def test_the_size_is_that_of_the_largest_sample(make: Callable[[int], object], size: int) -> None:
    chosen = OrderedPartition(READ.shuffle(1000).map(Called(make)).plan)
    assert f" {size:,} bytes per element" in chosen.explain()
    assert f" {size * 1000:,} bytes of processed elements" in chosen.explain()


def test_a_step_whose_elements_do_not_fit_stays_in_the_client() -> None:
    fn = Called(lambda n: np.zeros(1 << 20, np.uint8))
    assert (
        OrderedPartition(READ.shuffle(1024).map(fn).plan).mode
        == "ordered + pushed down + deferred errors"
    )
    chosen = OrderedPartition(READ.shuffle(1025).map(fn).plan)
    assert chosen.mode == "ordered"
    assert "would exceed the memory limit" in chosen.explain()


def test_a_function_that_raises_while_measured_stays_in_the_client() -> None:
    def fails_here(number: int) -> int:
        raise OSError("no such device")

    chosen = OrderedPartition(READ.shuffle(10).map(fails_here).plan)
    assert chosen.mode == "ordered"
    assert "unknown element size: " in chosen.explain()
    assert "OSError" in chosen.explain()
    assert "elements of unknown size" in chosen.explain()


def test_missing_files_leave_the_element_size_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    lines = Dataset.list_files(f"{tmp_path}/*.txt").interleave(hr.TextLineDataset)
    dataset = lines.shuffle(10).map(Called(lambda n: b"x"))
    (tmp_path / "a.txt").unlink()
    assert OrderedPartition(dataset.plan).mode == "ordered"


def no_generator() -> Iterator[int]:
    raise AssertionError("it was opened")
    yield 1


NOT_NEEDED = {
    "no shuffle of values": lambda fn: Dataset.range(9).shuffle(4).map(fn).batch(2),
    "no shuffle": lambda fn: READ.take(7).map(fn),
    "a size that follows from specs": lambda fn: (
        Dataset.range(9).filter(lambda x: x > 1).shuffle(4).map(lambda x: x + 1)
    ),
    "no step that can be pushed down": lambda fn: READ.shuffle(4).filter(lambda x: x > 1).map(fn),
    "no step over batches of several splits": lambda fn: READ.batch(3).shuffle(4).map(fn),
}


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_no_function_is_called_if_the_decision_does_not_need_it(name: str) -> None:
    fn = Called(lambda n: n)
    chosen = OrderedPartition(NOT_NEEDED[name](fn).plan)
    assert chosen.mode.startswith("ordered + pushed down")
    assert "unknown size" not in chosen.explain()
    assert fn.count == 0


def test_a_generator_is_not_opened_for_measuring() -> None:
    chosen = OrderedPartition(Dataset.from_generator(no_generator).shuffle(4).map(Called()).plan)
    assert chosen.mode == "ordered"
    assert "a generator runs only in the process" in chosen.explain()


def test_no_buffer_is_filled_and_few_functions_are_called() -> None:
    below, filtered, opens = Called(lambda n: n), Called(lambda n: True), []

    def opening(number: int) -> hr.Dataset:
        opens.append(number)
        return opened(number)

    files = Dataset.range(1000).interleave(opening, cycle_length=3, num_parallel_calls=2)
    values = files.filter(filtered).skip(900).take(50).shuffle(500).repeat(3)
    chosen = OrderedPartition(values.map(below, num_parallel_calls=8).cache().prefetch(9).plan)
    assert chosen.mode == "ordered + pushed down + deferred errors"
    assert below.count == 4
    assert filtered.count < 20
    assert len(opens) < 9


def test_a_dataset_without_early_elements_is_not_pushed_down() -> None:
    rare = Called(lambda n: False)
    chosen = OrderedPartition(Dataset.range(1 << 40).filter(rare).shuffle(9).map(Called()).plan)
    assert chosen.mode == "ordered"
    assert 0 < rare.count < 10_000
    nested = Dataset.range(1 << 40).flat_map(lambda x: Dataset.range(9).filter(lambda y: y > 9))
    assert OrderedPartition(nested.shuffle(9).map(Called()).plan).mode == "ordered"
    empty = Dataset.range(9).filter(rare).shuffle(9).map(Called())
    assert "the dataset has no elements" in OrderedPartition(empty.plan).explain()


def test_two_stacked_shuffles_hold_elements_of_the_steps_above_both() -> None:
    fn, last = Called(), Called(lambda n: np.zeros(50, np.uint8))
    chosen = OrderedPartition(READ.shuffle(10).map(fn).shuffle(20).map(last).plan)
    assert f" {30 * 50:,} bytes of processed elements" in chosen.explain()
    assert last.count == 4


def test_shuffles_below_a_concatenation_count() -> None:
    fn = Called(lambda n: np.zeros(1 << 20, np.uint8))
    both = READ.shuffle(1000).concatenate(READ.shuffle(100))
    assert OrderedPartition(both.map(fn).plan).mode == "ordered"
    assert (
        OrderedPartition(both.map(lambda x: x + 1).plan).mode
        == "ordered + pushed down + deferred errors"
    )


def test_the_mode_of_a_restored_position_is_used_if_none_was_decided() -> None:
    fn = Called()
    chosen = OrderedPartition(READ.shuffle(10).map(fn).plan)
    chosen.fix_mode("ordered")
    assert (chosen.mode, fn.count) == ("ordered", 0)
    assert "restored state" in chosen.explain()
    chosen = OrderedPartition(READ.shuffle(10).map(fn).plan)
    assert chosen.mode == "ordered + pushed down + deferred errors"
    chosen.fix_mode("ordered")
    assert chosen.mode == "ordered + pushed down + deferred errors"


def length_of(number: int) -> bytes:
    return bytes(int(number))


def test_a_pickled_partition_keeps_its_mode() -> None:
    for restored in (10, 1 << 40):
        chosen = OrderedPartition(
            Dataset.range(8).filter(bool).shuffle(restored).map(length_of).plan
        )
        mode = chosen.mode
        assert mode == ("ordered + pushed down + deferred errors" if restored == 10 else "ordered")
        assert pickle.loads(pickle.dumps(chosen)).mode == mode
