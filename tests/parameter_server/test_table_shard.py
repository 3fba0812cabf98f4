"""Rows of tables: admitted after enough look-ups, evicted because of age or capacity."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.operations import (
    ApplyIds,
    AssignIds,
    CreateTable,
    DescribeStore,
    Evict,
    Export,
    GatherIds,
    LookupIds,
)
from headrace.parameter_server.specs import (
    AdamRule,
    Constant,
    RowWiseAdagradRule,
    SgdRule,
    StepParameters,
    TableSpec,
    Uniform,
)
from headrace.parameter_server.store import ShardStore

F = np.float32


def ids_of(*numbers):
    return np.array(numbers, np.int64)


def a_table(store=None, **spec):
    store = store or ShardStore()
    settings = {"dim": 2, "initializer": Constant(1.0), "name": "t", "table": "t", **spec}
    store.execute(CreateTable(table=TableSpec(**settings)))
    return store


def lookup(store, *ids, counts=None, key=None):
    arrays = [ids_of(*ids)] if counts is None else [ids_of(*ids), ids_of(*counts)]
    return store.execute(LookupIds(table="t", key=key), arrays)[1][0]


def gather(store, *ids):
    return store.execute(GatherIds(table="t"), [ids_of(*ids)])[1][0]


def apply(store, ids, gradient, *, iteration=0, rule=None, rate=1.0, optimizer="o"):
    step = StepParameters(iteration=iteration, learning_rate=rate)
    operation = ApplyIds(table="t", optimizer=optimizer, rule=rule or SgdRule(), step=step)
    return store.execute(operation, [ids_of(*ids), np.asarray(gradient, F)])


def rows_of(store):
    described = store.execute(DescribeStore())[0]
    return described.tables[0].rows, described.tables[0].waiting_ids


def test_initial_rows_do_not_depend_on_order_or_number_of_shards():
    spec = {"dim": 5, "initializer": Uniform(-1.0, 1.0, 4)}
    one, other = a_table(**spec), a_table(**spec, index=1, shards=3)
    first = lookup(one, 7, -3, 10**15)
    lookup(other, *range(100, 200))
    assert lookup(other, 10**15)[0].tobytes() == first[2].tobytes()
    assert lookup(other, -3, 7).tobytes() == first[[1, 0]].tobytes()


def test_an_id_is_admitted_after_enough_counts():
    store = a_table(admission=3)
    assert lookup(store, 1, 2, counts=[2, 1]).tolist() == [[0, 0], [0, 0]]
    assert rows_of(store) == (0, 2)
    assert lookup(store, 1, 2).tolist() == [[1, 1], [0, 0]]
    assert lookup(store, 1, 2, 3, counts=[1, 1, 5]).tolist() == [[1, 1]] * 3
    assert rows_of(store) == (3, 0)


def test_a_row_created_again_has_initial_values_and_slots():
    store = a_table()
    lookup(store, 1, 2)
    for iteration in range(3):
        apply(store, [1, 2], [[1, 1]] * 2, rule=AdamRule(), iteration=iteration, rate=0.1)
        apply(store, [2], [[1, 1]], rule=RowWiseAdagradRule(), optimizer="r", rate=0.1)
    table = store.tables["t"]
    assert table.slots == ["o/momentum", "o/velocity", "r/accumulator"]
    apply(store, [2], [[0, 0]], iteration=9)
    assert store.execute(Evict(table="t", older_than=5))[0].rows == 1
    assert lookup(store, 1).tolist() == [[1, 1]]
    row = table.rows.index.find(ids_of(1))
    assert table.rows["o/momentum"][row].tolist() == [[0, 0]]
    np.testing.assert_allclose(table.rows["r/accumulator"][row], [0.1])


def test_rows_unused_for_long_are_evicted():
    store = a_table(evict_after=4)
    lookup(store, 1, 2, 3)
    for iteration in range(12):
        apply(store, [1], [[0, 0]], iteration=iteration)
        if iteration == 7:
            lookup(store, 2)
    assert (gather(store, 1, 2, 3) != 0).any(axis=1).tolist() == [True, False, False]
    assert rows_of(store) == (1, 0)


def test_ids_waiting_for_admission_are_evicted_too():
    store = a_table(admission=5)
    lookup(store, 1, 2)
    apply(store, [1], [[0, 0]], iteration=9)
    lookup(store, 2)
    assert store.execute(Evict(table="t", older_than=3))[0].rows == 0
    assert rows_of(store) == (0, 1)


def test_evict_without_an_age_is_rejected():
    with pytest.raises(InvalidArgumentError, match="t was created without `evict_after`"):
        a_table().execute(Evict(table="t"))


def test_the_oldest_rows_are_evicted_at_capacity():
    store = a_table(capacity=3)
    lookup(store, 1, 2, 3)
    apply(store, [1, 3], [[0, 0]] * 2, iteration=4)
    assert lookup(store, 4).tolist() == [[1, 1]]
    assert (gather(store, 1, 2, 3, 4)[:, 0] != 0).tolist() == [True, False, True, True]
    # Rows last used in the same step are evicted by count, except those of the current call.
    lookup(store, 1, 4)
    assert lookup(store, 5, 3).tolist() == [[1, 1]] * 2
    assert rows_of(store) == (3, 0)
    assert gather(store, 3, 5)[:, 0].tolist() == [1, 1]


def test_new_ids_beyond_the_capacity_read_zeros():
    store = a_table(capacity=2)
    assert lookup(store, 1, 2, 3).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert lookup(store, 2, 3, 4).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert rows_of(store) == (2, 0)


@pytest.mark.parametrize("seed", range(6))
def test_the_capacity_is_never_exceeded(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 60))
    store = a_table(capacity=capacity, admission=int(rng.integers(1, 3)))
    for iteration in range(40):
        ids = np.unique(rng.integers(0, 300, int(rng.integers(1, 50))))
        lookup(store, *ids)
        assert rows_of(store)[0] <= capacity, seed
        apply(store, ids, np.zeros((len(ids), 2)), iteration=iteration, rule=AdamRule())


def test_waiting_ids_are_at_most_four_times_the_capacity():
    store = a_table(capacity=10, admission=2)
    for start in range(0, 2000, 20):
        lookup(store, *range(start, start + 20))
        assert rows_of(store)[1] <= 40
    assert lookup(store, 1999, 1998).tolist() == [[1, 1]] * 2


def test_assigned_rows_are_admitted_and_the_last_duplicate_is_used():
    store = a_table(admission=10)
    values = np.arange(6, dtype=F).reshape(3, 2)
    store.execute(AssignIds(table="t"), [ids_of(5, 6, 5), values])
    assert gather(store, 5, 6).tolist() == [[4, 5], [2, 3]]
    assert rows_of(store) == (2, 0)


def test_export_returns_every_row_once_in_parts():
    store = a_table()
    lookup(store, *range(10))
    apply(store, [0], [[0, 0]], iteration=5)
    lookup(store, *range(4))
    store.execute(Evict(table="t", older_than=5))
    found, start = {}, 0
    while start is not None:
        answer, (ids, values) = store.execute(Export(table="t", start=start, limit=3))
        assert len(ids) <= 3
        assert answer.rows == 4
        found.update(zip(ids.tolist(), values.tolist(), strict=True))
        start = answer.next
    assert found == {one: [1, 1] for one in range(4)}
    with pytest.raises(InvalidArgumentError, match=r"`limit` must be at least 1 .* but got 0"):
        store.execute(Export(table="t", limit=0))


def test_mismatched_arrays_are_rejected_without_changes():
    store = a_table()
    lookup(store, 1)
    for ids, words in (
        (np.array([[1]]), r"must be int64 of one dimension, but got int64 of shape \(1, 1\)"),
        (np.array([1.0]), "must be int64 of one dimension, but got float64"),
        (np.array([1], np.int32), "but got int32"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            store.execute(GatherIds(table="t"), [ids])
    with pytest.raises(InvalidArgumentError, match=r"gradients of shape \(1, 3\) do not fit 1 ids"):
        apply(store, [1], [[1, 1, 1]])
    with pytest.raises(InvalidArgumentError, match="must have a floating dtype, but has int64"):
        store.execute(
            ApplyIds(
                table="t",
                optimizer="o",
                rule=SgdRule(),
                step=StepParameters(iteration=0, learning_rate=1),
            ),
            [ids_of(1), np.ones((1, 2), np.int64)],
        )
    with pytest.raises(InvalidArgumentError, match="values of dtype float64 cannot be written"):
        store.execute(AssignIds(table="t"), [ids_of(1), np.ones((1, 2))])
    with pytest.raises(InvalidArgumentError, match=r"counts of the table t must be integers of"):
        store.execute(LookupIds(table="t"), [ids_of(1), np.ones(1)])
    with pytest.raises(
        InvalidArgumentError, match="counts of the table t must be at least 1, but got 0"
    ):
        lookup(store, 1, counts=[0])
    with pytest.raises(NotFoundError, match="there is no table u on this server; it has t"):
        store.execute(GatherIds(table="u"), [ids_of(1)])
    assert gather(store, 1).tolist() == [[1, 1]]


def test_a_table_is_created_once_and_needs_a_floating_dtype():
    store = a_table()
    spec = store.tables["t"].spec
    assert store.execute(CreateTable(table=spec))[0].existed
    with pytest.raises(
        AlreadyExistsError, match="a table t with other settings: dim=2 instead of 3"
    ):
        a_table(store, dim=3)
    with pytest.raises(InvalidArgumentError, match="t needs a floating dtype, but got int32"):
        a_table(dtype="int32")
    for wrong in ({"dim": 0}, {"admission": 0}, {"capacity": 0}, {"index": 1}, {"evict_after": 0}):
        with pytest.raises(
            InvalidArgumentError, match="of the table t must be at least 1, and `index`"
        ):
            a_table(**wrong)


def test_rows_of_bfloat16_have_slots_of_float32():
    store = a_table(dtype="bfloat16")
    lookup(store, 1)
    apply(store, [1], [[0.5, 0.25]], rule=AdamRule(), rate=0.5)
    table = store.tables["t"]
    assert table.rows["o/momentum"].dtype == F
    assert gather(store, 1).astype(F).tolist() == [[0.5, 0.5]]
