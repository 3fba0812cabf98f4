"""Variables with a copy on each replica: the documented numbers of each aggregation."""

from __future__ import annotations

import copy
import doctest

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import PerReplica, get_replica_context, variable
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from tests.distribute.replicas import mirrored


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def made(value=1.0, replicas=2, **kwargs):
    strategy = mirrored(replicas)
    with strategy.scope():
        return strategy, hr.Variable(value, **kwargs)


@pytest.mark.catalogue("3.33.43-45")
def test_outside_any_strategy_it_is_a_local_array():
    v = hr.Variable([1.0, 2.0], name="w", dtype=np.float32)
    assert (v.shape, v.dtype, v.name, v.trainable) == ((2,), np.float32, "w", True)
    assert v.assign_add([1, 1]).tolist() == [2.0, 3.0]
    assert (v * 2).tolist() == [4.0, 6.0]
    assert np.asarray(v).tolist() == v.numpy().tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="read-only"):
        v.read()[0] = 5


@pytest.mark.catalogue("2.1.7")
@pytest.mark.parametrize(
    ("aggregation", "added", "assigned"),
    [
        ("NONE", [2.0, 3.0], [1.0, 2.0]),
        ("SUM", [4.0, 4.0], [3.0, 3.0]),
        ("MEAN", [2.5, 2.5], [1.5, 1.5]),
        ("ONLY_FIRST_REPLICA", [2.0, 2.0], [1.0, 1.0]),
    ],
)
def test_copies_after_replica_writes_equal_the_documented_table(aggregation, added, assigned):
    for method, copies in (("assign_add", added), ("assign", assigned)):
        strategy, v = made(aggregation=aggregation)
        returned = strategy.run(lambda v=v, m=method: getattr(v, m)(replica_id() + 1))
        assert list(v.values) == copies
        assert list(returned.values) == copies


@pytest.mark.catalogue("3.34.1")
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_write_outside_of_replicas_sets_every_copy(aggregation):
    strategy, v = made(0.0, aggregation=aggregation)
    for use, expected in ((v.assign, 1), (v.assign_add, 2), (v.assign_sub, 1)):
        assert use(1) == expected
        assert v.values == (expected, expected)
    with strategy.scope():
        assert v.assign_add(2) == 3
    assert strategy.local_results(v) == (3, 3)


@pytest.mark.catalogue("4.3.9")
def test_differing_copies_without_an_aggregation_warn_once():
    strategy, v = made()
    strategy.run(lambda: v.assign(replica_id()))
    with pytest.warns(UserWarning, match="copies of Variable 'Variable' differ"):
        assert v.read() == 0
    assert v.read() == 0
    strategy.run(lambda: v.assign(7.0))
    assert v.read() == 7


@pytest.mark.catalogue("2.1.9", "3.33.46")
@pytest.mark.parametrize(
    ("aggregation", "read"), [("SUM", 3.0), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1.0)]
)
def test_on_read_copies_are_separate_and_aggregated_outside(aggregation, read):
    strategy, v = made(0.0, aggregation=aggregation, synchronization="ON_READ")
    own = strategy.run(lambda: (v.assign_add(replica_id() + 1), v.read())[1])
    assert own.values == (1.0, 2.0) == v.values
    assert v.read() == read


@pytest.mark.catalogue("1.3.6", "3.34.36")
def test_on_read_without_an_aggregation_raises_outside():
    _, v = made(0.0, synchronization="ON_READ")
    with pytest.raises(ValueError, match=r"Could not convert from VariableAggregation\.NONE"):
        v.read()


@pytest.mark.catalogue("2.1.10", "2.1.11", "3.34.33", "3.34.34", "4.3.10")
def test_on_read_sums_start_at_the_initial_value():
    _, v = made(3.0, aggregation="SUM", synchronization="ON_READ")
    assert v.read() == 3.0
    assert v.assign(10.0) == 10.0
    assert v.values == (5.0, 5.0)
    for method in (v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match="SyncOnReadVariable does not support"):
            method(1.0)
    _, count = made(7, aggregation="SUM", synchronization="ON_READ")
    assert count.read() == 7


@pytest.mark.catalogue("3.30.18", "3.34.35")
def test_a_reduction_on_replicas_uses_each_replicas_copy():
    strategy, v = made(0, replicas=3, aggregation="SUM", synchronization="ON_READ")

    def step():
        v.assign(3 * replica_id())
        return get_replica_context().all_reduce("SUM", v)

    assert strategy.run(step).values == (9, 9, 9)
    assert strategy.reduce("SUM", v) == 9


@pytest.mark.parametrize("methods", [("assign_add", "assign"), ("scatter_add", "scatter_sub")])
def test_replicas_must_write_with_one_method_of_one_variable(methods):
    strategy, v = made([0.0, 0.0], aggregation="SUM")
    with strategy.scope():
        other = hr.Variable([0.0, 0.0], aggregation="SUM")
    given = (np.ones(2),) if methods[1] == "assign" else ([0, 1], np.ones(2))
    for targets, names in (((v, other), methods[:1] * 2), ((v, v), methods)):
        calls = [getattr(*each) for each in zip(targets, names, strict=True)]
        with pytest.raises(FailedPreconditionError, match=f"{methods[0]} of .*, {names[1]} of"):
            strategy.run(lambda calls=calls: calls[replica_id()](*given))
    assert v.read().tolist() == other.read().tolist() == [0, 0]


@pytest.mark.catalogue("3.33.13-15", "3.34.12", "3.34.13")
def test_replicas_create_one_shared_variable():
    strategy = mirrored(2)
    rng = np.random.default_rng()
    v = strategy.run(lambda: hr.Variable(lambda: rng.normal(size=3), aggregation="SUM"))
    assert isinstance(v, hr.Variable)
    assert np.array_equal(*v.values)
    strategy.run(lambda: v.assign(np.ones(3)))
    assert v.read().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.catalogue("3.33.42")
def test_per_replica_values_are_assigned_to_the_copies():
    strategy, v = made(0.0)
    v.assign(PerReplica([1, 2]))
    assert v.values == (1, 2)
    v.assign_add(PerReplica([1, 2]))
    assert v.values == (2, 4)
    assert strategy.run(lambda: v + 1).values == (3, 5)


@pytest.mark.catalogue("3.33.13-15")
def test_a_copy_of_a_variable_is_independent():
    _, v = made(1.0, aggregation="MEAN")
    other = copy.deepcopy(v)
    other.assign(5)
    assert (v.read(), other.read()) == (1.0, 5.0)
    assert other.aggregation is v.aggregation


@pytest.mark.catalogue("1.1.18", "2.1.8", "3.31.7")
def test_mismatched_values_are_named():
    strategy, v = made([1.0, 2.0])
    with pytest.raises(ValueError, match=r"has shape \(2,\), but got a value of shape \(3,\)"):
        v.assign([1.0, 2.0, 3.0])
    _, count = made(1)
    with pytest.raises(TypeError, match=r"dtype int64 of Variable .* without loss"):
        count.assign(1.5)
    with pytest.raises(TypeError, match="use assign, assign_add"):
        v += 1
    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype"):
        made(1, aggregation="MEAN")
    with pytest.raises(ValueError, match="`synchronization` NONE is not supported"):
        made(1, synchronization="NONE")
    with pytest.raises(ValueError, match="`aggregation` must be one of NONE, SUM"):
        made(1, aggregation="MAX")
    other = mirrored(2)
    with other.scope(), pytest.raises(ValueError, match="write it in the scope of its strategy"):
        v.assign([0.0, 0.0])
    with strategy.extended.colocate_vars_with(v):
        pass
    with pytest.raises(ValueError, match="must only be passed a variable created in this"):
        other.extended.colocate_vars_with(v)


def test_docstring_examples_return_the_shown_results():
    assert doctest.testmod(variable).failed == 0


def test_writes_to_a_copied_variable_do_not_affect_the_original():
    strategy = mirrored(2)
    with strategy.scope():
        first = hr.Variable(np.zeros(2), aggregation="SUM", synchronization="ON_READ")
    for make in (copy.copy, copy.deepcopy):
        second = make(first)
        strategy.run(lambda made=second: made.assign_add(np.ones(2)))
        assert first.read().tolist() == [0, 0]
        assert second.read().tolist() == [2, 2]


@pytest.mark.parametrize("value", [None, "abc", [b"a"]])
def test_a_variable_holds_numbers(value):
    with pytest.raises(ValueError, match="must be a number or an array of numbers"):
        hr.Variable(value)


def test_parameter_server_arguments_are_checked_in_all_strategies():
    assert hr.Variable(np.zeros((2, 3)), shape=(2, 3)).shape == (2, 3)
    assert hr.Variable([1, 2, 3], shape=3).shape == (3,)
    with pytest.raises(ValueError, match=r"`shape` is \(3,\), but the initial value has shape \(2"):
        hr.Variable(np.zeros((2, 3)), shape=(3,))
    with pytest.raises(ValueError, match="scope of a ParameterServerStrategy"):
        hr.Variable(0.0, per_worker_variable=True)


def test_replicas_cannot_write_a_variable_from_outside_the_scope():
    strategy, outside = mirrored(2), hr.Variable(np.zeros(2))
    for write in (
        lambda: outside.assign_add([1.0, 1.0]),
        lambda: outside.scatter_add([0], [1.0]),
    ):
        with pytest.raises(ValueError, match=r"outside of the scope.*with strategy\.scope\(\)"):
            strategy.run(write)
    assert outside.read().tolist() == [0, 0]
    assert mirrored(1).run(lambda: outside.assign_add([1.0, 1.0])).tolist() == [1, 1]
    assert strategy.run(lambda: outside.read().sum()).values == (2.0, 2.0)


def test_a_variable_whose_copies_differ_is_not_trainable() -> None:
    # TensorFlow has these, too.
    with mirrored(2).scope():
        assert hr.Variable(1.0).trainable
        assert not hr.Variable(1.0, trainable=False).trainable
        assert not hr.Variable(1.0, synchronization="ON_READ").trainable
        with pytest.raises(ValueError, match="`trainable` True is not supported with `synchroniz"):
            hr.Variable(1.0, trainable=True, synchronization="ON_READ")


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_numbers_out_of_the_dtypes_range_are_rejected(framework):
    with hr.distribute.MirroredStrategy(["cpu:0"], framework=framework).scope():
        whole = hr.Variable(np.zeros(2, np.int32))
        small = hr.Variable(np.zeros(2, np.float32), name="f")
        for variable, number in ((whole, 2**40), (small, 1e300)):
            kind, before = variable.dtype, np.asarray(variable.read()).tolist()
            for write in (
                lambda number=number, v=variable: v.assign(np.full(2, number)),
                lambda number=number, v=variable: v.assign_add([number, 0]),
                lambda number=number, v=variable: v.scatter_update([0], [number]),
                lambda number=number, kind=kind: hr.Variable(np.array(number), dtype=kind),
            ):
                with pytest.raises(InvalidArgumentError, match=r"dtype .*32, but got the value"):
                    write()
            assert np.asarray(variable.read()).tolist() == before
        assert np.isinf(np.asarray(small.assign(np.full(2, np.inf)))).all()
        assert np.asarray(whole.assign(np.full(2, 2**31 - 1))).tolist() == [2**31 - 1] * 2
