"""Distributed datasets of one process: the rows, structure and spec of each replica."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    OneDeviceStrategy,
    PerReplicaSpec,
)
from headrace.errors import InvalidArgumentError
from tests.distribute.replicas import BALANCED, mirrored, rows, split, steps_of

numbers = hr.Dataset.range


@pytest.mark.catalogue("2.2.8", "2.2.9", "2.2.11", "3.13.6-9")
@pytest.mark.parametrize(
    ("dataset", "replicas", "steps"),
    [
        (numbers(6).batch(4), 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (numbers(4).batch(4), 5, [[[0], [1], [2], [3], []]]),
        (numbers(8).batch(4), 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (numbers(9).batch(4), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
        (numbers(9).batch(4, drop_remainder=True), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (numbers(10).batch(4), 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (numbers(10).batch(2), 3, [[[n], [n + 1], []] for n in range(0, 10, 2)]),
        (numbers(7).batch(5), 2, [[[0, 1, 2], [3, 4]], [[5], [6]]]),
        (
            numbers(12).batch(5),
            2,
            [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]], [[10], [11]]],
        ),
        (
            numbers(10).batch(4),
            3,
            [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]],
        ),
        (
            numbers(5).batch(4).repeat().take(3),
            2,
            [[[0, 1], [2, 3]], [[4], []], [[0, 1], [2, 3]]],
        ),
        (numbers(0).batch(4), 2, []),
        (numbers(7).batch(4).map(lambda x: x), 2, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
        (numbers(5).batch(2), 1, [[0, 1], [2, 3], [4]]),
    ],
)
def test_batches_are_split_as_in_the_documented_table(dataset, replicas, steps):
    assert split(dataset, replicas) == steps


@pytest.mark.catalogue("2.2.5", "2.2.6")
@pytest.mark.parametrize(
    ("dataset", "replicas", "steps"),
    [
        (numbers(10).batch(4), 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]], [[8, 9], [], []]]),
        (numbers(7).batch(5), 2, [[[0, 1, 2], [3, 4]], [[5, 6], []]]),
        (numbers(6).batch(4), 2, [[[0, 1], [2, 3]], [[4, 5], []]]),
        # Fewer rows than replicas: in each step another replica gets none.
        (numbers(4).batch(2), 3, [[[0], [1], []], [[2], [], [3]]]),
        # Short batches are joined.
        (numbers(3).batch(2).repeat(2), 2, [[[0], [1]], [[2], [0]], [[1], [2]]]),
        (numbers(0).batch(4), 2, []),
    ],
)
def test_a_balanced_split_leaves_no_replica_permanently_idle(dataset, replicas, steps):
    assert split(dataset, replicas, BALANCED) == steps


@pytest.mark.catalogue("3.13.13", "3.13.14")
def test_components_keep_their_structure_and_are_split_together():
    class Pair(NamedTuple):
        x: object
        y: object

    dataset = numbers(5).map(lambda i: {"a": Pair(i, i * i), "b": (i, b"%d" % i)}).batch(3)
    first, second = mirrored(2).distribute_dataset(dataset)
    assert isinstance(first["a"], Pair)
    assert rows(first["a"].y) == [[0, 1], [4]]
    assert rows(first["b"][1]) == [[b"0", b"1"], [b"2"]]
    assert rows(second["a"].x) == [[3], [4]]


def test_one_replica_gets_elements_unchanged():
    assert [int(x) for x in OneDeviceStrategy().distribute_dataset(numbers(3))] == [0, 1, 2]
    assert [int(x) for x in mirrored(1).distribute_dataset(numbers(3))] == [0, 1, 2]


@pytest.mark.catalogue("1.1.9", "3.13.12", "4.3.3")
@pytest.mark.parametrize(
    ("dataset", "leaf"),
    [
        (numbers(4), "the element"),
        (numbers(4).batch(2).map(lambda x: {"x": x, "n": np.int64(1)}), r"component \['n'\]"),
        (hr.Dataset.from_generator(lambda: [(np.ones(2), 1.0)]), r"component \[1\]"),
    ],
)
def test_a_scalar_leaf_is_rejected_by_name_with_a_fix(dataset, leaf):
    with pytest.raises(InvalidArgumentError, match=f"{leaf} is a scalar.*`batch` method"):
        list(mirrored(2).distribute_dataset(dataset))


@pytest.mark.catalogue("2.2.12")
def test_components_with_different_row_counts_are_rejected():
    dataset = hr.Dataset.from_tensors({"a": np.ones((4, 2)), "b": np.ones(3)})
    with pytest.raises(InvalidArgumentError, match=r"\['a'\] has 4 rows and .*\['b'\] has 3"):
        next(iter(mirrored(2).distribute_dataset(dataset)))


@pytest.mark.catalogue("2.4.9", "3.10.16", "3.10.17")
def test_each_iteration_is_a_separate_epoch():
    strategy = mirrored(2)
    cached = strategy.distribute_dataset(numbers(16).shuffle(16).cache().batch(4))
    assert steps_of(cached) == steps_of(cached)
    again = strategy.distribute_dataset(numbers(64).shuffle(64, seed=3).batch(8))
    assert steps_of(again) != steps_of(again)
    same = numbers(64).shuffle(64, seed=3, reshuffle_each_iteration=False).batch(8)
    fixed = strategy.distribute_dataset(same)
    assert steps_of(fixed) == steps_of(fixed)


@pytest.mark.catalogue("1.4.2", "3.10.18", "3.11.4", "3.11.5")
def test_the_spec_has_a_spec_per_replica_for_each_leaf():
    whole = numbers(9).map(lambda i: {"x": np.float32(i)}).batch(4, drop_remainder=True)
    distributed = mirrored(2).distribute_dataset(whole)
    half = hr.ArraySpec((2,), np.float32)
    assert distributed.element_spec == {"x": PerReplicaSpec(half, half)}
    assert iter(distributed).element_spec == distributed.element_spec
    rest = hr.ArraySpec((None,), np.int64)
    assert mirrored(2).distribute_dataset(numbers(9).batch(4)).element_spec == PerReplicaSpec(
        rest, rest
    )
    odd = mirrored(3).distribute_dataset(numbers(9).batch(4, drop_remainder=True))
    assert odd.element_spec == PerReplicaSpec(rest, rest, rest)
    assert mirrored(1).distribute_dataset(numbers(3)).element_spec == hr.ArraySpec((), np.int64)
    assert hash(PerReplicaSpec(rest)) == hash(PerReplicaSpec(rest)) != PerReplicaSpec(half)


@pytest.mark.catalogue("1.4.3")
@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (numbers(9).batch(4), 3),
        (numbers(9).batch(4).repeat(), hr.INFINITE_CARDINALITY),
        (numbers(9).filter(lambda x: x > 3).batch(4), hr.UNKNOWN_CARDINALITY),
    ],
)
def test_cardinality_counts_steps(dataset, count):
    assert mirrored(2).distribute_dataset(dataset).cardinality() == count


@pytest.mark.catalogue("1.1.10", "2.5.1")
def test_replicas_take_elements_of_a_dataset_function_in_turn():
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return numbers(4).map(lambda x: 2 * x).batch(context.get_per_replica_batch_size(2))

    distributed = mirrored(2).distribute_datasets_from_function(dataset_fn)
    assert steps_of(distributed) == [[[0], [2]], [[4], [6]]]
    assert contexts == [InputContext(1, 0, 2)]
    assert len(distributed) == 2


@pytest.mark.catalogue("2.4.1", "2.4.2", "3.10.11", "4.3.5")
@pytest.mark.parametrize(
    ("dataset", "steps"),
    [
        (numbers(9).batch(2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
        (numbers(9).batch(2, drop_remainder=True), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        # No element is dropped, although all have the same shape.
        (numbers(5).batch(1, drop_remainder=True), [[[0], [1]], [[2], [3]], [[4], []]]),
    ],
)
def test_replicas_without_an_element_of_a_dataset_function_get_no_rows(dataset, steps):
    distributed = mirrored(2).distribute_datasets_from_function(lambda context: dataset)
    assert steps_of(distributed) == steps
    assert len(distributed) == len(steps)
    iterator = iter(distributed)
    assert [rows(iterator.get_next_as_optional().get_value()) for _ in steps] == steps


@pytest.mark.catalogue("2.4.4", "3.10.5", "3.10.6", "3.26.21", "3.26.22")
def test_scalars_of_a_dataset_function_stay_scalars():
    data = [5.0, 6.0, 7.0, 8.0]
    distributed = mirrored(4).distribute_datasets_from_function(
        lambda context: hr.Dataset.from_tensor_slices(data)
    )
    (step,) = distributed
    assert step.values == (5.0, 6.0, 7.0, 8.0)


@pytest.mark.catalogue("1.3.3", "2.5.2", "2.5.3", "3.10.33", "4.3.4")
def test_per_replica_mode_creates_a_dataset_per_replica_for_one_call():
    strategy = mirrored(2)
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return numbers(1, 10).map(lambda x: x * (context.input_pipeline_id + 1))

    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert [step.values for step in distributed] == [(i, 2 * i) for i in range(1, 10)]
    assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
    contexts.clear()
    assert len(strategy.distribute_datasets_from_function(dataset_fn)) == 5
    assert contexts == [InputContext(1, 0, 2)]


def test_replicas_with_datasets_of_different_lengths_end_with_the_longest():
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    distributed = mirrored(2).distribute_datasets_from_function(
        lambda context: numbers(2 + 2 * context.input_pipeline_id).batch(2), options
    )
    assert steps_of(distributed) == [[[0, 1], [0, 1]], [[], [2, 3]]]


@pytest.mark.catalogue("1.1.9", "1.1.10", "1.3.4", "3.10.30")
def test_incompatible_options_are_rejected():
    strategy = mirrored(2)
    per_replica = InputReplicationMode.PER_REPLICA
    with pytest.raises(NotImplementedError, match="only supported in distribute_datasets_from"):
        strategy.distribute_dataset(
            numbers(2).batch(2), InputOptions(experimental_replication_mode=per_replica)
        )
    with pytest.raises(ValueError, match="must also specify"):
        strategy.distribute_datasets_from_function(
            lambda c: numbers(2), InputOptions(experimental_place_dataset_on_device=True)
        )
    with pytest.raises(ValueError, match="can not be set to True"):
        strategy.distribute_datasets_from_function(
            lambda c: numbers(2),
            InputOptions(
                experimental_place_dataset_on_device=True,
                experimental_replication_mode=per_replica,
                experimental_fetch_to_device=True,
            ),
        )
    with pytest.raises(ValueError, match='"ceil" or "balanced"'):
        InputOptions(split="fair")


@pytest.mark.catalogue("1.1.9")
def test_values_other_than_datasets_are_rejected():
    with pytest.raises(TypeError, match="Expected a Dataset object but got ndarray"):
        mirrored(2).distribute_dataset(np.ones(3))
    with pytest.raises(TypeError, match="`dataset_fn` must return a Dataset, but returned"):
        mirrored(2).distribute_datasets_from_function(lambda context: [1, 2])


@pytest.mark.catalogue("1.4.4")
def test_a_distributed_dataset_has_no_dataset_methods():
    distributed = mirrored(2).distribute_dataset(numbers(4).batch(2))
    with pytest.raises(AttributeError, match="transform the Dataset first"):
        distributed.map(lambda x: x)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = distributed.nonsense


@pytest.mark.catalogue("1.3.4")
def test_batches_are_read_ahead_as_the_options_request():
    read = []

    def note(x):
        read.append(int(x))
        return x

    quiet = InputOptions(experimental_per_replica_buffer_size=0)
    plain = hr.Dataset.from_generator(lambda: map(note, range(100))).batch(4)
    with iter(mirrored(2).distribute_dataset(plain, quiet)) as iterator:
        next(iterator)
        assert len(read) == 4


@pytest.mark.catalogue("2.2.1", "4.3.7")
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_worker_holds_only_the_current_batch_and_those_read_ahead(ahead):
    read = []

    def note(x):
        read.append(x)
        time.sleep(1e-3)  # cheap elements are computed on request, without a thread
        return x

    dataset = hr.Dataset.from_generator(lambda: map(note, range(100))).batch(4)
    options = InputOptions(experimental_per_replica_buffer_size=ahead)
    with iter(mirrored(2).distribute_dataset(dataset, options)) as iterator:
        for _ in range(5):
            next(iterator)
        deadline = time.monotonic() + 30
        while len(read) < 4 * (5 + ahead) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # time in which it might read too much
        assert len(read) == 4 * (5 + ahead)


@pytest.mark.catalogue("1.3.1", "1.4.8", "3.31.30-32")
def test_the_input_context_checks_its_arguments_and_has_a_str():
    context = InputContext(2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="global_batch_size 13 is not divisible by num_replicas"):
        context.get_per_replica_batch_size(13)
    assert str(InputContext(3, 1, 42)) == (
        "hr.distribute.InputContext(input pipeline id 1, total: 3)"
    )
    with pytest.raises(ValueError, match=r"\(3\) is not a multiple of num_workers \(2\)"):
        _ = InputContext(2, 0, 3).num_replicas_per_pipeline


def test_joining_rows_of_different_shapes_raises_with_their_name_and_a_fix():
    short_first = hr.Dataset.from_generator(
        lambda: iter([{"x": np.ones((4, 2))}, {"x": np.ones((1, 2))}, {"x": np.ones((3, 5))}]),
        output_signature={"x": hr.ArraySpec((None, None), np.dtype("float64"))},
    )
    iterator = iter(mirrored(2).distribute_dataset(short_first, BALANCED))
    assert [value.shape for value in next(iterator)["x"].values] == [(2, 2), (2, 2)]
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] have shapes \(2,\), \(5,\).*pad"):
        next(iterator)


def test_a_replica_without_rows_gets_a_default_date():
    days = np.arange(3).astype("datetime64[D]")
    plan = hr.Dataset.from_tensor_slices(days)
    steps = [*mirrored(2).distribute_datasets_from_function(lambda context: plan)]
    assert steps[1].values == (days[2], np.datetime64(0, "D"))
