"""Sliding windows: which elements they have, as datasets and as batches, and where they may go."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

import headrace as hr
from headrace.element.dataset_leaf import DatasetSpec
from headrace.errors import FailedPreconditionError, InvalidElementError
from headrace.execution.build import build_iterator
from headrace.plan.sliding_windows import BatchedWindows
from headrace.plan.source import INFINITE
from headrace.plan.traverse import walk
from headrace.rewrites.optimize import prepare
from tests.execution.pipelines import failing

Dataset = hr.Dataset
ARGUMENTS = tuple(
    itertools.product((1, 2, 3, 6), (None, 1, 2, 5, 9), (1, 2, 3), (False, True))
)  # size, shift, stride, drop_remainder


def expected(elements, size, shift, stride, drop_remainder):
    """Return the windows that tf.data 2.x makes; compared with it for all `ARGUMENTS`."""
    shift = size if shift is None else shift
    windows = [
        elements[start : start + (size - 1) * stride + 1 : stride]
        for start in range(0, len(elements), shift)
    ]
    return [w for w in windows if not drop_remainder or len(w) == size]


def is_batched(dataset):
    return any(isinstance(node, BatchedWindows) for node in walk(prepare(dataset.plan).plan))


@pytest.mark.parametrize("count", [0, 1, 5, 10])
def test_windows_have_the_elements_of_tfdata(count):
    for arguments in ARGUMENTS:
        want = expected(list(range(count)), *arguments)
        windows = Dataset.range(count).window(*arguments)
        assert [[int(x) for x in window] for window in windows] == want, arguments
        assert windows.cardinality() == len(want), arguments
        size = arguments[0]
        for batches in (
            windows.flat_map(lambda w, size=size: w.batch(size)),
            windows.flat_map(lambda w: w.batch(9)),
            Dataset.range(count).map(str).window(*arguments).flat_map(lambda w: w.batch(9)),
        ):
            assert [[int(x) for x in batch] for batch in batches] == want, arguments


def test_windows_of_an_endless_dataset_are_endless():
    windows = Dataset.range(3).repeat().window(2, shift=1)
    assert windows.cardinality() == INFINITE
    assert [[int(x) for x in w] for w in windows.take(3)] == [[0, 1], [1, 2], [2, 0]]


def test_each_component_of_an_element_is_a_dataset():
    rows = Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(12).reshape(6, 2)})
    (first, second) = rows.window(4)
    assert [float(x) for x in first["x"]] == [0, 1, 2, 3]
    assert [y.tolist() for y in second["y"]] == [[8, 9], [10, 11]]
    joined = rows.window(4).flat_map(lambda w: Dataset.zip({k: v.batch(4) for k, v in w.items()}))
    assert [batch["y"].shape for batch in joined] == [(4, 2), (2, 2)]
    assert rows.window(2).element_spec["y"] == DatasetSpec(hr.ArraySpec((2,), np.int64))


def test_windows_pass_through_other_steps():
    windows = Dataset.range(9).window(3)
    mapped = windows.map(lambda w: w.skip(1)).filter(lambda w: int(next(iter(w))) != 4)
    assert [[int(x) for x in w] for w in mapped] == [[1, 2], [7, 8]]
    pairs = Dataset.zip(windows, Dataset.range(3)).flat_map(lambda w, n: w.map(lambda x: x * n))
    assert [int(x) for x in pairs] == [0, 0, 0, 3, 4, 5, 12, 14, 16]
    mixed = windows.interleave(lambda w: w, cycle_length=3)
    assert [int(x) for x in mixed] == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    order = [int(next(iter(w))) for w in windows.shuffle(3, seed=1).take(2)]
    assert set(order) < {0, 3, 6}


def test_elements_of_a_window_can_be_changed_without_changing_others():
    for batch in Dataset.range(4).window(2, shift=1).flat_map(lambda w: w.batch(2)):
        batch *= 100
    windows = list(Dataset.from_tensor_slices(np.zeros((3, 2))).window(2, shift=1))
    for row in windows[0]:
        row += 1
    assert all(row.sum() == 0 for window in windows for row in window)


def test_ragged_batches_of_windows_do_not_depend_on_the_lengths_in_them():
    rows = Dataset.range(6).map(lambda n: np.full(2 if n < 4 else int(n) % 3, n))
    batches = rows.window(2).flat_map(lambda w: w.ragged_batch(2))
    assert [batch.to_list() for batch in batches] == [
        [[0, 0], [1, 1]],
        [[2, 2], [3, 3]],
        [[4], [5, 5]],
    ]
    pairs = Dataset.from_tensor_slices(np.arange(8).reshape(4, 2))  # the plan tells the length
    stacked = pairs.window(2).flat_map(lambda w: w.ragged_batch(2))
    assert [batch.tolist() for batch in stacked] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_an_error_is_raised_once_and_its_element_is_left_out():
    for make in (lambda w: w.batch(3), lambda w: w.take(9).batch(3)):
        found = []
        iterator = iter(Dataset.range(9).map(failing).window(3, shift=2).flat_map(make))
        while True:
            try:
                found.append(next(iterator).tolist())
            except hr.errors.UserFunctionError as error:
                found.append(error.position)
            except StopIteration:
                break
        assert found == [[0, 1, 2], 3, [2, 4, 5], [5, 6, 7], [7, 8]]


def test_skipped_elements_are_not_computed():
    calls = []
    windows = Dataset.range(12).map(lambda x: calls.append(int(x)) or x).window(2, shift=5)
    assert [b.tolist() for b in windows.flat_map(lambda w: w.batch(2))] == [
        [0, 1],
        [5, 6],
        [10, 11],
    ]
    assert calls == [0, 1, 5, 6, 10, 11]


def test_only_functions_that_batch_are_replaced():
    windows = Dataset.range(9).window(3)
    size = 3
    assert is_batched(windows.flat_map(lambda w: w.batch(3)))
    assert is_batched(windows.flat_map(lambda w: w.batch(size, drop_remainder=True)))
    assert is_batched(
        Dataset.zip(Dataset.range(9), Dataset.range(9))
        .window(3)
        .flat_map(lambda a, b: hr.Dataset.zip((a.batch(3), b.batch(size))))
    )
    for function in (
        lambda w: w.batch(2),
        lambda w: w.batch(4, drop_remainder=True),
        lambda w: w.batch(3).batch(1),
        lambda w: w.batch(int("3")),
        lambda w: Dataset.zip((w.batch(3),)),
        lambda w, extra=1: w.batch(3),
        lambda *w: w[0].batch(3),
    ):
        assert not is_batched(windows.flat_map(function))
    swapped = Dataset.zip(Dataset.range(9), Dataset.range(9)).window(3)
    assert not is_batched(swapped.flat_map(lambda a, b: Dataset.zip((b.batch(3), a.batch(3)))))


def test_a_replaced_function_follows_the_values_that_it_reads():
    size = 3

    def batch(window):
        return window.batch(size)

    with iter(Dataset.range(9).window(3).flat_map(batch).prefetch(0)) as iterator:
        assert next(iterator).tolist() == [0, 1, 2]
    size = 2
    found = [b.tolist() for b in Dataset.range(5).window(3).flat_map(batch)]
    assert found == [[0, 1], [2], [3, 4]]


def test_states_of_the_replaced_step_and_of_the_steps_themselves_are_exchangeable():
    windows = Dataset.range(20).map(str).window(3, shift=2)
    fast = windows.flat_map(lambda w: w.batch(3))
    general = windows.flat_map(lambda w: w.batch(max(3, 0)))
    assert is_batched(fast)
    assert not is_batched(general)
    want = [b.tolist() for b in fast]
    for one, other in ((fast, general), (general, fast)):
        iterator = build_iterator(one.plan)
        for position in range(len(want)):
            states = [iterator.get_state()]
            chunk = iterator.next_chunk(1)
            assert chunk.rows()[0].tolist() == want[position]
            states.append(chunk.state_at(0))
            for state in states:
                resumed = build_iterator(other.plan)
                resumed.set_state(state)
                assert [b.tolist() for b in rows_of(resumed)] == want[position:]


def rows_of(iterator):
    while (chunk := iterator.next_chunk(1)) is not None:
        yield from chunk.rows()


def test_memory_is_that_of_a_few_windows():
    rows = np.zeros((3000, 1000), np.float32)  # 12 MB
    for function in (lambda w: w.batch(10), lambda w: w.take(10).batch(10)):
        batches = Dataset.from_tensor_slices(rows).window(10, shift=1).flat_map(function)
        iterator = iter(batches)
        next(iterator)
        tracemalloc.start()
        for _ in itertools.islice(iterator, 500):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3_000_000


def test_large_overlapping_windows_share_their_elements():
    windows = Dataset.range(1 << 40).window(100_000, shift=1)
    tracemalloc.start()
    held = list(windows.take(50))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert int(next(iter(held[49]))) == 49


def test_what_cannot_take_windows_says_so(tmp_path):
    windows = Dataset.range(9).window(3)
    message = r"window \(test_sliding_windows.py:.*flat_map\(lambda w: w.batch\(n\)\)"
    for refused in (
        lambda: windows.batch(2),
        lambda: windows.save(tmp_path / "saved"),
        lambda: windows.cache(str(tmp_path / "cached")),
        lambda: windows.cache(),
        lambda: windows.apply(hr.service.distribute("distributed_epoch", "localhost:1")),
        lambda: windows.enumerate().apply(hr.service.distribute("parallel_epochs", "localhost:1")),
    ):
        with pytest.raises(FailedPreconditionError, match=message):
            refused()
    with pytest.raises(InvalidElementError, match=r"window.*flat_map"):
        list(windows.map(lambda w: w).batch(2))
    with pytest.raises(InvalidElementError, match="belongs in flat_map"):
        list(Dataset.range(3).map(lambda x: Dataset.range(2)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size"),
        ({"size": 2, "shift": 0}, ValueError, "shift"),
        ({"size": 2, "stride": -1}, ValueError, "stride"),
        ({"size": "a"}, TypeError, "size"),
        ({"size": 2, "drop_remainder": 3}, TypeError, "drop_remainder"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).window(**arguments)


def test_windows_made_by_a_service_are_those_of_one_process():
    windows = Dataset.range(40).map(lambda x: x * int(x)).window(4, shift=2)
    batches, others = (
        windows.flat_map(lambda w: w.batch(4)),
        windows.flat_map(lambda w: w.take(3).batch(4)),
    )
    want = [b.tolist() for b in batches]
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        for mode, ordered in (("distributed_epoch", False), ("distributed_epoch", True)):
            remote = batches.apply(hr.service.distribute(mode, cluster.target, ordered=ordered))
            assert [b.tolist() for b in remote] == want
        copies = batches.apply(hr.service.distribute("parallel_epochs", cluster.target))
        assert sorted(b.tolist() for b in copies) == sorted(2 * want)
        for ordered in (False, True):
            with pytest.raises(FailedPreconditionError, match=r"move that step after"):
                others.apply(
                    hr.service.distribute("distributed_epoch", cluster.target, ordered=ordered)
                )
        copies = others.apply(hr.service.distribute("parallel_epochs", cluster.target))
        assert sorted(b.tolist() for b in copies) == sorted(2 * [b.tolist() for b in others])
