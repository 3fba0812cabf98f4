"""How a plan is cut for reading in order: by what its elements take, measured where need be."""

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
    """A function that counts its calls, and makes elements of a size."""

    def __init__(self, make: Callable[[int], object] = lambda number: np.zeros(100, np.uint8)):
        self.count, self.make = 0, make

    def __call__(self, number: object) -> object:
        self.count += 1
        return self.make(int(np.ravel(number)[0]))


def test_a_step_of_unknown_size_sinks_where_a_few_elements_say_that_it_fits() -> None:
    fn = Called()
    chosen = OrderedPartition(READ.shuffle(10_000).map(fn).batch(4).plan)
    assert fn.count == 0, "nothing is made before somebody asks"
    assert chosen.mode == "ordered + pushed down + deferred errors"
    assert fn.count == 4
    assert "map (test_ordered_partition.py:" in chosen.explain()
    assert "100 bytes an element, measured" in chosen.explain()
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
def test_the_largest_of_what_was_made_counts_with_all_its_bytes(
    make: Callable[[int], object], size: int
) -> None:
    chosen = OrderedPartition(READ.shuffle(1000).map(Called(make)).plan)
    assert f" {size:,} bytes an element" in chosen.explain()
    assert f" {size * 1000:,} bytes of processed elements" in chosen.explain()


def test_what_does_not_fit_stays_at_the_client() -> None:
    fn = Called(lambda n: np.zeros(1 << 20, np.uint8))
    assert (
        OrderedPartition(READ.shuffle(1024).map(fn).plan).mode
        == "ordered + pushed down + deferred errors"
    )
    chosen = OrderedPartition(READ.shuffle(1025).map(fn).plan)
    assert chosen.mode == "ordered"
    assert "would exceed the memory limit" in chosen.explain()


def test_a_function_that_raises_here_stays_at_the_client() -> None:
    def only_there(number: int) -> int:
        raise OSError("no such device")

    chosen = OrderedPartition(READ.shuffle(10).map(only_there).plan)
    assert chosen.mode == "ordered"
    assert "size of an element is not known: " in chosen.explain()
    assert "OSError" in chosen.explain()
    assert "elements of unknown size" in chosen.explain()


def test_files_that_are_not_here_leave_the_size_unknown(tmp_path: Path) -> None:
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
    "nothing that can sink": lambda fn: READ.shuffle(4).filter(lambda x: x > 1).map(fn),
    "nothing over batches of several units": lambda fn: READ.batch(3).shuffle(4).map(fn),
}


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_no_function_is_called_where_nothing_hangs_on_it(name: str) -> None:
    fn = Called(lambda n: n)
    chosen = OrderedPartition(NOT_NEEDED[name](fn).plan)
    assert chosen.mode.startswith("ordered + pushed down")
    assert "unknown size" not in chosen.explain()
    assert fn.count == 0


def test_a_generator_is_not_opened_here() -> None:
    chosen = OrderedPartition(Dataset.from_generator(no_generator).shuffle(4).map(Called()).plan)
    assert chosen.mode == "ordered"
    assert "a generator runs where it is read" in chosen.explain()


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


def test_what_has_no_elements_near_its_beginning_is_left_alone() -> None:
    rare = Called(lambda n: False)
    chosen = OrderedPartition(Dataset.range(1 << 40).filter(rare).shuffle(9).map(Called()).plan)
    assert chosen.mode == "ordered"
    assert 0 < rare.count < 10_000
    nested = Dataset.range(1 << 40).flat_map(lambda x: Dataset.range(9).filter(lambda y: y > 9))
    assert OrderedPartition(nested.shuffle(9).map(Called()).plan).mode == "ordered"
    empty = Dataset.range(9).filter(rare).shuffle(9).map(Called())
    assert "there are no elements" in OrderedPartition(empty.plan).explain()


def test_two_shuffles_over_each_other_hold_what_the_steps_above_both_make() -> None:
    fn, last = Called(), Called(lambda n: np.zeros(50, np.uint8))
    chosen = OrderedPartition(READ.shuffle(10).map(fn).shuffle(20).map(last).plan)
    assert f" {30 * 50:,} bytes of processed elements" in chosen.explain()
    assert last.count == 4


def test_shuffles_below_an_end_to_end_are_held_too() -> None:
    fn = Called(lambda n: np.zeros(1 << 20, np.uint8))
    both = READ.shuffle(1000).concatenate(READ.shuffle(100))
    assert OrderedPartition(both.map(fn).plan).mode == "ordered"
    assert (
        OrderedPartition(both.map(lambda x: x + 1).plan).mode
        == "ordered + pushed down + deferred errors"
    )


def test_what_a_place_says_is_kept_where_nothing_was_decided_yet() -> None:
    fn = Called()
    chosen = OrderedPartition(READ.shuffle(10).map(fn).plan)
    chosen.fix_mode("ordered")
    assert (chosen.mode, fn.count) == ("ordered", 0)
    assert "went on from" in chosen.explain()
    chosen = OrderedPartition(READ.shuffle(10).map(fn).plan)
    assert chosen.mode == "ordered + pushed down + deferred errors"
    chosen.fix_mode("ordered")
    assert chosen.mode == "ordered + pushed down + deferred errors"


def length_of(number: int) -> bytes:
    return bytes(int(number))


def test_another_process_has_what_was_decided_here() -> None:
    for bound_by in (10, 1 << 40):
        chosen = OrderedPartition(
            Dataset.range(8).filter(bool).shuffle(bound_by).map(length_of).plan
        )
        half = chosen.mode
        assert half == ("ordered + pushed down + deferred errors" if bound_by == 10 else "ordered")
        assert pickle.loads(pickle.dumps(chosen)).mode == half
