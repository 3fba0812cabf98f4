"""Strategies: running functions on replicas, values, and contexts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import (
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    ReduceOp,
    ValueContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from headrace.distribute.values import regroup, select
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from tests.distribute.replicas import mirrored


def replica_id():
    return get_replica_context().replica_id_in_sync_group


# --- running ----------------------------------------------------------------------------------


@pytest.mark.catalogue("1.1.3")
def test_each_replica_gets_its_own_values_and_shared_plain_ones():
    strategy = mirrored(3)
    values = PerReplica([1, 2, 3])
    got = strategy.run(
        lambda a, b, c: (a, b["x"], c), args=(values, {"x": values}), kwargs={"c": "same"}
    )
    assert got[0].values == got[1].values == (1, 2, 3)
    assert got[2] == "same"


@pytest.mark.catalogue("2.1.4")
def test_replicas_run_at_the_same_time():
    barrier = threading.Barrier(4, timeout=30)
    result = mirrored(4).run(lambda: (barrier.wait() >= 0, threading.get_ident()))
    assert len(set(result[1].values)) == 4


def test_a_dropped_strategy_leaves_no_thread():
    strategy = mirrored(3)
    barrier = threading.Barrier(3, timeout=30)
    strategy.run(barrier.wait)
    assert threading.active_count() > 1
    del strategy  # checked by the fixture of all tests


def test_one_replica_runs_on_the_calling_thread_with_plain_values():
    here = threading.get_ident()
    for strategy in (OneDeviceStrategy(), mirrored(1), get_strategy()):
        assert strategy.run(lambda x: (x, threading.get_ident()), args=(5,)) == (5, here)


def test_a_failed_replica_ends_the_others_at_their_next_merge():
    strategy = mirrored(4)
    reached = []

    def step():
        context = get_replica_context()
        if context.replica_id_in_sync_group == 2:
            raise KeyError("mine")
        context.all_reduce("SUM", 1)
        reached.append(context)

    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            strategy.run(step)
    assert reached == []
    assert strategy.run(replica_id).values == (0, 1, 2, 3)


@pytest.mark.catalogue("1.2.6")
@pytest.mark.parametrize("shy", [0, 1, 3])
def test_replicas_with_different_numbers_of_merges_raise(shy):
    strategy = mirrored(4)

    def step():
        if replica_id() != shy:
            get_replica_context().merge_call(lambda strategy: None)

    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"made a different number of .*merge_call"):
            strategy.run(step)


def test_an_error_in_the_merged_function_is_raised():
    def merged(strategy):
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        mirrored(3).run(lambda: get_replica_context().merge_call(merged))


@pytest.mark.catalogue("1.2.2", "3.30.1")
def test_merge_call_runs_once_with_all_values_and_gives_each_replica_its_part():
    strategy = mirrored(3)
    calls = []

    def merged(given, values, word):
        calls.append((in_cross_replica_context(), get_replica_context(), values.values))
        assert given is get_strategy() is strategy
        return PerReplica([value * 10 for value in values.values]), word

    def step():
        first = get_replica_context().merge_call(merged, (replica_id(),), {"word": "all"})
        assert not in_cross_replica_context()
        second = get_replica_context().merge_call(lambda s, x: s.reduce("SUM", x), (first[0],))
        return first, second

    (first, word), total = strategy.run(step)
    assert first.values == (0, 10, 20)
    assert word == "all"
    assert total.values == (30, 30, 30)
    assert calls == [(True, None, (0, 1, 2))]


def test_replicas_inherit_numpy_settings_and_context_variables():
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        mirrored(3).run(lambda: np.float64(1) / np.float64(0))


def test_two_threads_can_use_one_strategy():
    strategy = mirrored(2)
    failures = []

    def work(seed):
        for _ in range(50):
            total = strategy.run(lambda: get_replica_context().all_reduce("SUM", np.float64(seed)))
            if total.values != (2 * seed, 2 * seed):
                failures.append(total)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_strategy_of_numpy_loads_no_framework():
    program = (
        "import sys, headrace as hr\n"
        "s = hr.distribute.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "s.reduce('SUM', s.run(len, args=(next(iter(s.distribute_dataset("
        "hr.Dataset.range(4).batch(4)))),)))\n"
        "print({'jax', 'torch', 'ml_dtypes'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# --- contexts ---------------------------------------------------------------------------------


@pytest.mark.catalogue("1.1.16", "1.2.1", "3.31.25")
def test_outside_any_strategy_the_default_has_one_replica():
    assert not has_strategy()
    assert not in_cross_replica_context()
    context = get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    merged = context.merge_call(
        lambda s, x: (s is get_strategy(), x + "_bar", has_strategy()), ("foo",)
    )
    assert merged == (True, "foo_bar", False)
    assert context.all_reduce("MEAN", 3.0) == 3.0
    assert get_strategy().num_replicas_in_sync == 1


@pytest.mark.catalogue("1.1.1", "3.31.1-3")
def test_a_scope_sets_the_current_strategy_and_is_reentrant():
    strategy = mirrored(2)
    scope = strategy.scope()
    with scope as entered:
        assert entered is strategy is get_strategy()
        assert has_strategy()
        assert in_cross_replica_context()
        assert get_replica_context() is None
        with scope, strategy.scope():
            assert get_strategy() is strategy
        assert get_strategy() is strategy
    assert not has_strategy()

    def on_replica():
        assert has_strategy()
        assert not in_cross_replica_context()
        assert get_strategy() is get_replica_context().strategy is strategy

    strategy.run(on_replica)


@pytest.mark.catalogue("1.1.2", "3.31.1-3")
def test_mixing_two_strategies_raises():
    one, other = mirrored(2), mirrored(2)
    values = PerReplica([1, 2])
    with one.scope():
        for use in (
            lambda: other.scope().__enter__(),
            lambda: other.run(lambda: 1),
            lambda: other.reduce("SUM", values),
            lambda: other.distribute_dataset(hr.Dataset.range(4).batch(2)),
        ):
            with pytest.raises(RuntimeError, match=r"Mixing different .*Strategy objects"):
                use()


@pytest.mark.catalogue("1.1.2")
@pytest.mark.parametrize(
    ("method", "instead"),
    [
        (lambda s: s.scope().__enter__(), "merge_call"),
        (lambda s: s.run(replica_id), "merge_call"),
        (lambda s: s.reduce("SUM", 1), "all_reduce"),
        (lambda s: s.gather(np.ones(2), 0), "all_gather"),
    ],
)
def test_cross_replica_methods_raise_on_a_replica(method, instead):
    strategy = mirrored(2)
    with pytest.raises(RuntimeError, match=f"cross-replica context, use .*{instead}"):
        strategy.run(lambda: method(strategy))


@pytest.mark.catalogue("1.2.5")
def test_a_replica_context_of_another_replica_is_rejected():
    kept = mirrored(2).run(get_replica_context).values[0]
    with pytest.raises(FailedPreconditionError, match="belongs to another replica"):
        mirrored(2).run(lambda: kept.all_reduce("SUM", 1))


@pytest.mark.catalogue("1.1.4", "1.5.1", "3.14.15", "3.31.24")
def test_invalid_arguments_are_named():
    strategy = mirrored(2)
    with pytest.raises(
        ValueError, match="positional args must be a list or tuple, got <class 'int'"
    ):
        strategy.run(replica_id, args=5)
    with pytest.raises(TypeError, match="`fn` must be a function"):
        strategy.run(5)
    with pytest.raises(ValueError, match="No duplicates allowed in `devices`"):
        MirroredStrategy(["cpu:0", "CPU:0"])
    with pytest.raises(TypeError, match="`devices` must be a list"):
        MirroredStrategy("cpu:0")
    with pytest.raises(ValueError, match="cannot hold NumPy arrays"):
        MirroredStrategy(["gpu:0"])
    with pytest.raises(ValueError, match="must be one of 'numpy'"):
        MirroredStrategy(framework="tensorflow")
    assert MirroredStrategy([]).num_replicas_in_sync == 1
    assert mirrored(2).extended.worker_devices == ("cpu:0", "cpu:1")
    assert mirrored(2).cluster_resolver is None
    with pytest.raises(AttributeError, match=r"reduce_to.*strategy\.reduce"):
        _ = strategy.extended.reduce_to


# --- values -----------------------------------------------------------------------------------


@pytest.mark.catalogue("1.1.5", "2.1.5", "3.31.12", "3.31.13")
def test_reductions_equal_the_documented_tables():
    strategy = mirrored(2)
    uneven = PerReplica([np.array([1, 2, 3, 4]), np.array([5, 6])])
    assert strategy.reduce("MEAN", uneven, axis=0) == 3.5
    assert strategy.reduce("SUM", uneven, axis=0) == 21
    with pytest.raises(InvalidArgumentError, match=r"shapes \(4,\), \(2,\).*axis=0"):
        strategy.reduce("SUM", uneven)
    p = np.array([[1.0, 2.0], [3.0, 4.0]])
    both = PerReplica([p, 2 * p])
    assert strategy.reduce(ReduceOp.MEAN, both, axis=-1).tolist() == [2.25, 5.25]
    assert strategy.reduce("mean", both, axis=(0, 1)) == 3.75
    assert strategy.reduce("sum", both, axis=[0, 1]) == 30.0
    assert strategy.reduce("MEAN", PerReplica([0, 1])) == 0.5
    assert strategy.reduce("SUM", PerReplica([True, True])) == 2
    pair = strategy.reduce("SUM", {"a": both, "b": [PerReplica([1, 2])]})
    assert (pair["a"].tolist(), pair["b"]) == ([[3.0, 6.0], [9.0, 12.0]], [3])


@pytest.mark.catalogue("3.14.2-5", "3.30.11-14")
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_ones_and_rows_reduce_equally_for_any_number_of_replicas(replicas):
    strategy = mirrored(replicas)
    assert strategy.reduce("SUM", strategy.run(lambda: 1.0)) == replicas
    rows = strategy.run(lambda: np.array([1.0, 2.0]))
    assert strategy.reduce("MEAN", rows, axis=0) == 1.5
    assert strategy.reduce("SUM", rows, axis=0) == 3.0 * replicas
    assert strategy.run(lambda: get_replica_context().all_reduce("SUM", 1.0)) is not None


def test_reductions_keep_dtypes_except_means_of_integers():
    strategy = mirrored(2)
    for dtype in (np.float32, np.int32):
        ones = PerReplica([np.ones(3, dtype), np.ones(3, dtype)])
        assert strategy.reduce("SUM", ones).dtype == dtype
        assert strategy.reduce("SUM", ones, axis=0).dtype == dtype
    assert strategy.reduce("MEAN", PerReplica([np.float32(1), np.float32(2)])).dtype == np.float32


@pytest.mark.catalogue("1.1.6", "1.3.6")
def test_invalid_reductions_raise_specific_errors():
    strategy = mirrored(2)
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        strategy.reduce("MAX", PerReplica([1, 2]))
    with pytest.raises(TypeError, match=r"Expected reduce_op to be a ReduceOp.*not: 5"):
        strategy.reduce(5, PerReplica([1, 2]), axis=0)
    with pytest.raises(ValueError, match="axis = 1 out of range for value with rank 1"):
        strategy.reduce("SUM", PerReplica([np.ones(1), np.ones(1)]), axis=1)
    with pytest.raises(TypeError, match="`axis` must be None, an integer or a tuple"):
        strategy.reduce("SUM", PerReplica([np.ones(1), np.ones(1)]), axis="0")
    with pytest.raises(ValueError, match=r"non-DistributedValues value 3\.0 cannot be reduced"):
        strategy.reduce("SUM", 3.0)
    assert strategy.reduce("MEAN", 3.0) == 3.0
    with pytest.raises(InvalidArgumentError, match="cannot be summed"):
        strategy.reduce("SUM", PerReplica(["a", "b"]))


@pytest.mark.catalogue("1.1.7", "1.2.4", "3.15.1-6", "3.15.17-24")
@pytest.mark.parametrize(
    ("shape", "axis", "gathered"),
    [((3,), 0, (6,)), ((1, 3), 0, (2, 3)), ((1, 3), 1, (1, 6)), ((1, 2, 3), 2, (1, 2, 6))],
)
def test_gathered_values_are_concatenated_in_replica_order(shape, axis, gathered):
    strategy = mirrored(2)
    values = strategy.run(lambda: np.full(shape, replica_id()))
    assert strategy.gather(values, axis).shape == gathered
    both = strategy.run(lambda x: get_replica_context().all_gather([x, x], axis), args=(values,))
    assert [each.shape for each in both[0].values] == [gathered, gathered]


@pytest.mark.catalogue("1.1.8", "3.15.11-14")
def test_lengths_may_differ_only_along_the_gathered_axis():
    strategy = mirrored(3)
    values = strategy.run(lambda: np.zeros((replica_id() + 1, 2)))
    assert strategy.gather(values, 0).shape == (6, 2)
    with pytest.raises(InvalidArgumentError, match="Shape mismatch"):
        strategy.gather(values, 1)
    with pytest.raises(ValueError, match="rank 0"):
        strategy.gather(PerReplica([1.0, 2.0, 3.0]), 0)
    ranks = strategy.run(lambda: np.zeros((1,) * (replica_id() + 1)))
    with pytest.raises(InvalidArgumentError, match="Shape mismatch"):
        strategy.gather(ranks, 0)
    with pytest.raises(ValueError, match="`axis` must be at least 0"):
        strategy.gather(values, -1)


def test_each_replica_gets_its_own_copy_of_a_reduced_value():
    def step():
        total = get_replica_context().all_reduce("SUM", {"g": np.ones(2)})["g"]
        total += replica_id()
        get_replica_context().merge_call(lambda strategy: None)
        return total

    assert [each.tolist() for each in mirrored(3).run(step).values] == [[3, 3], [4, 4], [5, 5]]


def test_each_replica_gets_its_own_copy_of_a_merged_value():
    shared, same = np.zeros(2), object()
    shared_view = shared.view()
    shared_view.flags.writeable = False

    def step():
        context = get_replica_context()
        got = context.merge_call(lambda s: {"a": [shared], "view": shared_view, "same": same})
        got["a"][0][:] += replica_id() + 1
        context.merge_call(lambda strategy: None)
        return got["a"][0], got["view"] is shared_view, got["same"] is same

    written, view_is_shared, is_same = mirrored(3).run(step)
    assert [each.tolist() for each in written.values] == [[1, 1], [2, 2], [3, 3]]
    assert view_is_shared.values == is_same.values == (True, True, True)


@pytest.mark.catalogue("1.1.12", "1.3.2", "2.1.6", "3.33.1-6")
def test_values_from_a_function_are_created_for_each_replica():
    strategy = mirrored(3)
    values = strategy.distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, {"n": c.num_replicas_in_sync})
    )
    assert values[0].values == (0, 1, 2)
    assert values[1]["n"].values == (3, 3, 3)
    assert strategy.run(lambda x: x**2, args=(values[0],)).values == (0, 1, 4)
    assert isinstance(mirrored(1).distribute_values_from_function(lambda c: 7), PerReplica)
    assert OneDeviceStrategy().distribute_values_from_function(lambda c: 7) == 7
    assert str(ValueContext()) == (
        "hr.distribute.ValueContext(replica id 0, total replicas in sync: 1)"
    )


@pytest.mark.catalogue("1.1.13", "3.30.2-9")
@pytest.mark.parametrize(
    ("returned", "results"),
    [
        (lambda i: {"a": 1, "b": 2}, ({"a": 1, "b": 2}, {"a": 1, "b": 2})),
        (lambda i: [1, 2], ([1, 2], [1, 2])),
        (lambda i: (1, 2, 3), ((1, 2, 3), (1, 2, 3))),
        (lambda i: i, (0, 1)),
        (
            lambda i: {"a": i + 1, "b": (i, [2.0])},
            ({"a": 1, "b": (0, [2.0])}, {"a": 2, "b": (1, [2.0])}),
        ),
    ],
)
def test_local_results_are_a_tuple_of_the_replicas_structures(returned, results):
    strategy = mirrored(2)
    assert strategy.local_results(strategy.run(lambda: returned(replica_id()))) == results
    assert strategy.experimental_local_results("plain") == ("plain",)


@pytest.mark.catalogue("2.1.1", "2.1.2", "3.32.1-7")
def test_regroup_keeps_types_and_identical_objects_and_select_inverts_it():
    @dataclass
    class Record:
        x: object

    class Pair(NamedTuple):
        x: object
        y: object = 3

    def structure(n):
        return {
            "list": [f"a{n}", (f"b{n}",)],
            "pair": Pair(f"x{n}", f"y{n}"),
            "ordered": OrderedDict(k=f"o{n}"),
            "default": defaultdict(list, k=f"d{n}"),
            "record": Record(f"r{n}"),
            "none": None,
        }

    made = regroup([structure(0), structure(1)])
    assert made["list"][1][0].values == ("b0", "b1")
    assert type(made["pair"]) is Pair
    assert type(made["ordered"]) is OrderedDict
    assert made["default"].default_factory is list
    assert made["none"] is None
    assert [select(i, made) for i in range(2)] == [structure(0), structure(1)]
    same = object()
    assert regroup([same, same]) is same
    assert regroup([same]) is same
    assert regroup([1, 1]).values == (1, 1)
    assert regroup([same], always_wrap=True).values == (same,)
    assert [pair.values for pair in regroup([("1", "2"), ("3", "4")])] == [("1", "3"), ("2", "4")]


def test_replicas_that_return_different_structures_are_named():
    def step():
        return {"a": 1} if replica_id() else {"a": 1, "b": 2}

    with pytest.raises(
        ValueError, match=r"different structures at the top \(replica 0: a dict with"
    ):
        mirrored(2).run(step)
    with pytest.raises(ValueError, match=r"different structures at \['a'\]"):
        regroup([{"a": [1]}, {"a": [1, 2]}])


@pytest.mark.catalogue("1.4.9", "2.1.3")
def test_a_per_replica_value_is_not_an_array():
    value = PerReplica([np.ones(2), np.zeros(2)])
    for use in (
        lambda: value + 1, lambda: 1 - value, lambda: np.add(value, 1), lambda: np.asarray(value),
        lambda: value[0], lambda: len(value), lambda: float(value), lambda: list(value),
        lambda: value < 3, lambda: np.ones(2) * value, lambda: f"{value:.3f}",
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match="using a PerReplica object while not inside a replica"
        ):
            use()
    with pytest.raises(AttributeError, match=r"no attribute 'shape'.*strategy\.run"):
        _ = value.shape
    assert repr(PerReplica([1, 2])) == "PerReplica:{\n  0: 1,\n  1: 2\n}"


@pytest.mark.parametrize("count", [1, 3])
def test_values_for_another_number_of_replicas_raise_with_both_numbers(count):
    strategy, values = mirrored(2), PerReplica(range(count))
    words = f"values for {count} replicas, but this strategy has 2"
    for use in (
        lambda: strategy.run(lambda x: x, args=(values,)),
        lambda: strategy.run(lambda x: x, kwargs={"x": {"a": values}}),
        lambda: strategy.reduce("SUM", values),
        lambda: strategy.gather(PerReplica([np.ones(1)] * count), 0),
    ):
        with pytest.raises(ValueError, match=words):
            use()


def test_a_tuple_that_takes_only_numbers_becomes_a_tuple():
    class Shape(tuple):
        def __new__(cls, numbers):
            if not all(isinstance(each, int) for each in numbers):
                raise TypeError("numbers only")
            return super().__new__(cls, numbers)

    shape = mirrored(2).run(lambda: Shape([3, 4]))
    assert type(shape) is tuple
    assert [each.values for each in shape] == [(3, 3), (4, 4)]


def test_a_distributed_dataset_cannot_be_distributed_again():
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(hr.Dataset.range(4).batch(2))
    with pytest.raises(TypeError, match="is already distributed: iterate over it"):
        strategy.distribute_dataset(distributed)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (lambda context: hr.Dataset.range(4).batch(2), "distribute_datasets_from_function"),
        ([1, 2], r"Dataset\.from_tensor_slices.*hr\.torch\.from_torch"),
    ],
)
def test_errors_for_other_values_name_the_right_method(given, fix):
    with pytest.raises(TypeError, match=f"Invalid dataset.*{fix}"):
        MirroredStrategy(["cpu:0", "cpu:1"]).distribute_dataset(given)
