from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator.packing import pack, unpack
from headrace.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.cluster_registry import unregister_cluster
from headrace.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from headrace.parameter_server.specs import Normal, Uniform, Zeros
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.parameter_server.small_cluster import cluster

F32 = np.float32


@pytest.fixture
def strategy():
    with cluster(2, FixedShardsPartitioner(3)) as made:
        yield made


@pytest.fixture
def table(strategy):
    """Eight rows, [1, 2] to [15, 16], in shards of 3, 3 and 2."""
    with strategy.scope():
        return hr.Variable(np.arange(1, 17, dtype=F32).reshape(8, 2), name="table")


def as_list(variable):
    return np.asarray(variable).tolist()


# --- placement ----------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_bags_are_summed_in_order_for_any_number_of_shards(shards):
    seed = np.random.default_rng().integers(2**32)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    value = chance.normal(size=(50, 3)).astype(F32)
    ids = chance.integers(0, 50, (4, 20, 7))
    total = value[ids[..., 0]].copy()
    for index in range(1, 7):
        total += value[ids[..., index]]
    with cluster(2, FixedShardsPartitioner(shards)) as strategy:
        with strategy.scope():
            v = hr.Variable(value, name="v")
        found = {how: v.gather(ids, combiner=how) for how in ("sum", "mean", "sqrtn")}
        with hr.distribute.cache_variable_reads(v):
            v.read()
            assert np.array_equal(v.gather(ids, combiner="mean"), found["mean"])
        assert v.gather(ids[..., :0], combiner="mean").tolist() == np.zeros((4, 20, 3)).tolist()
        assert v.gather(ids[:0], combiner="sum").shape == (0, 20, 3)
        assert v.gather(ids[0, 0], combiner="sum").shape == (3,)
    assert np.array_equal(found["sum"], total)
    assert np.array_equal(found["mean"], total / F32(7))
    assert np.array_equal(found["sqrtn"], total / F32(np.sqrt(7)))
    assert {each.dtype for each in found.values()} == {np.dtype(F32)}


def test_combiners_support_other_dtypes_or_reject_them(strategy, table):
    with strategy.scope():
        whole_numbers = hr.Variable(np.arange(6, dtype=np.int32), name="whole_numbers")
        halves = hr.Variable(np.full((3, 2), 2048, np.float16), name="halves")
        flags = hr.Variable(np.ones(3, bool), name="flags")
        complexes = hr.Variable(np.array([1 + 1j, 2]), name="complexes")
    summed = whole_numbers.gather([[5, 4], [1, 1]], combiner="sum")
    assert (summed.tolist(), summed.dtype) == ([9, 2], np.int32)
    assert whole_numbers.gather(np.zeros((2, 0), int), combiner="sum").dtype == np.int32
    # 2,049 is not a float16: sums are computed in float32.
    halves.scatter_update([1], np.ones((1, 2)))
    local = hr.Variable(halves.read())
    with hr.distribute.cache_variable_reads(halves):
        kept = halves.read()
        for each in (halves, local):
            assert each.gather([[0, 1, 1, 1, 1]], combiner="sum").tolist() == [[2052, 2052]]
            assert each.gather([0, 1, 1, 1, 1], combiner="sum").tolist() == [2052, 2052]
    assert halves.gather([[0, 1, 1, 1, 1]], combiner="sum").tolist() == [[2052, 2052]]
    assert kept.dtype == np.float16
    local.assign(np.full((3, 2), 60_000, np.float16))
    assert local.gather([[0, 1]], combiner="mean").tolist() == [[60_000, 60_000]]
    with pytest.raises(ValueError, match="whose rows are bools"):
        flags.gather([[1, 0]], combiner="sum")
    assert complexes.gather([[0, 1]], combiner="mean").tolist() == [1.5 + 0.5j]
    with pytest.raises(ValueError, match="`combiner` must be None or one of 'sum', 'mean'"):
        table.gather([[1]], combiner=np.array(["sum"]))
    with pytest.raises(
        ValueError, match=r"of Variable 'halves' must form an array.*different lengths"
    ):
        halves.gather([[1, 2], [0]], combiner="sum")
    with pytest.raises(ValueError, match="whose rows are integers; use 'sum'"):
        whole_numbers.gather([[1]], combiner="mean")
    with pytest.raises(ValueError, match="one of 'sum', 'mean', 'sqrtn', but got 'max'"):
        table.gather([[1]], combiner="max")
    with pytest.raises(
        ValueError, match="needs bags of ids along the last axis, but got a single id"
    ):
        table.gather(1, combiner="sum")
    with pytest.raises(InvalidArgumentError, match=r"ids\[0, 1\] = 8 is not in \[0, 8\)"):
        table.gather([[1, 8]], combiner="sum")


@pytest.mark.catalogue("2.6.1", "3.8.2-5")
def test_round_robin_placement_uses_one_counter():
    with cluster(2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        a = hr.Variable(0.0, name="a")
        b = hr.Variable([1.0, 2.0, 3.0], name="b")
        c = hr.Variable(np.zeros((5, 2)), name="c")
        d = hr.Variable(7.0, name="d")
        found = [[(s.name, s.server, s.shape) for s in v.shards] for v in (a, b, c, d)]
    assert found == [
        [("a", 0, ())],
        [("b/part_0", 1, (2,)), ("b/part_1", 0, (1,))],
        [("c/part_0", 1, (3, 2)), ("c/part_1", 0, (2, 2))],
        [("d", 1, ())],
    ]


@pytest.mark.catalogue("2.6.4", "3.7.1", "3.7.9-12")
def test_without_a_partitioner_variables_have_one_shard():
    with cluster(3) as strategy:
        outside = hr.Variable(1.0)
        with strategy.scope():
            made = [hr.Variable(np.zeros(10), name=f"v{n}") for n in range(4)]
    assert [v.shards[0].server for v in made] == [0, 1, 2, 0]
    assert not hasattr(outside, "shards")
    assert all(isinstance(v, hr.Variable) for v in (*made, outside))


@pytest.mark.catalogue("4.3.13")
def test_placement_by_bytes_uses_the_server_with_fewest_bytes():
    with cluster(2, placement="bytes") as strategy, strategy.scope():
        sizes = [100, 10, 10, 50, 40, 5]
        made = [hr.Variable(np.zeros(n), name=f"v{n}-{i}") for i, n in enumerate(sizes)]
    assert [v.shards[0].server for v in made] == [0, 1, 1, 1, 1, 0]


@pytest.mark.catalogue("2.6.5", "2.6.7", "3.7.9-12", "3.7.15", "3.8.6")
@pytest.mark.parametrize(
    ("partitioner", "rows", "servers"),
    [
        (FixedShardsPartitioner(4), [3, 3, 2, 2], [0, 1, 0, 1]),
        (MinSizePartitioner(64 << 20, 4), [10], [0]),
        (MaxSizePartitioner(24), [3, 3, 2, 2], [0, 1, 0, 1]),
        (lambda shape, dtype: [2], [5, 5], [0, 1]),
        (lambda shape, dtype: [100], [1] * 10, [0, 1] * 5),
    ],
)
def test_rows_are_split_by_the_partitioner(partitioner, rows, servers):
    with cluster(2, partitioner) as strategy, strategy.scope():
        v = hr.Variable(np.arange(10.0))
        assert [s.shape[0] for s in v.shards] == rows
        assert [s.server for s in v.shards] == servers
        assert [s.row for s in v.shards] == np.cumsum([0, *rows[:-1]]).tolist()
        assert as_list(v) == list(range(10))


@pytest.mark.catalogue("1.6.5", "3.7.19")
@pytest.mark.parametrize("answer", [None, [], [0, 1, 1], [2, 2, 1]])
def test_an_invalid_partitioner_result_is_rejected_and_reserves_no_name(answer):
    with cluster(1, lambda shape, dtype: answer) as strategy, strategy.scope():
        for _ in range(2):
            with pytest.raises(ValueError, match="variable_partitioner must return a list/tuple"):
                hr.Variable(np.zeros((5, 1, 1)), name="v")


@pytest.mark.catalogue("2.6.2", "3.7.16")
def test_colocated_variables_have_one_shard_and_skip_the_placement(strategy):
    with strategy.scope():
        first = hr.Variable(np.zeros((6, 1)))
        with strategy.extended.colocate_vars_with(first):
            colocated = hr.Variable(np.zeros((6, 1)))
        later = hr.Variable(0.0)
    assert [s.server for s in colocated.shards] == [0]
    assert later.shards[0].server == 1
    context = strategy.extended.colocate_vars_with(hr.Variable(1.0))
    with pytest.raises(ValueError, match="colocate_vars_with"):
        context.__enter__()


# --- names and initial values --------------------------------------------------------------------


def test_names_are_unique_in_a_strategy(strategy):
    with strategy.scope():
        assert [hr.Variable(0.0).name for _ in range(3)] == [
            "Variable",
            "Variable_1",
            "Variable_2",
        ]
        hr.Variable(0.0, name="w")
        with pytest.raises(ValueError, match="a variable or table 'w' exists"):
            hr.Variable(0.0, name="w")
        with pytest.raises(ValueError, match="must not be empty"):
            hr.Variable(0.0, name="")


def test_a_restarted_program_finds_its_variables_with_their_values(strategy, caplog):
    with strategy.scope():
        hr.Variable([1.0, 2.0], name="w").assign([5.0, 6.0])
    again, other = (
        contextlib.closing(hr.distribute.ParameterServerStrategy(strategy.cluster_resolver, how))
        for how in (FixedShardsPartitioner(3), None)
    )
    with again as made, made.scope():
        assert as_list(hr.Variable([1.0, 2.0], name="w")) == [5.0, 6.0]
    with other as made, made.scope(), pytest.raises(AlreadyExistsError):
        hr.Variable([1, 2], name="w")
    assert "keeps its value" in caplog.text


@pytest.mark.catalogue("3.9.2-5")
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (3, None, np.dtype(int)),
        (3, "float32", np.dtype(F32)),
        ([True, False], None, np.dtype(bool)),
        (np.zeros((0, 3)), None, np.dtype(float)),
        (lambda: np.ones((2, 2), F32), None, np.dtype(F32)),
        (np.ones(3, np.complex64), None, np.dtype(np.complex64)),
    ],
)
def test_shape_and_dtype_are_those_of_the_value(strategy, value, dtype, expected):
    with strategy.scope():
        v = hr.Variable(value, dtype=dtype)
    plain = np.asarray(value() if callable(value) else value, dtype)
    assert (v.shape, v.dtype, v.ndim, v.size) == (plain.shape, expected, plain.ndim, plain.size)
    assert np.array_equal(np.asarray(v), plain)
    assert np.asarray(v).dtype == expected


def test_bfloat16_variables_round_trip(strategy):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with strategy.scope():
        v = hr.Variable(np.array([1, 2, 3, 4], bfloat16))
    v.assign_add(np.array([1, 1, 1, 1], bfloat16))
    assert v.dtype == bfloat16
    assert v.read().tolist() == [2, 3, 4, 5]
    assert v.gather([3, 0]).tolist() == [5, 2]


@pytest.mark.catalogue("1.7.2")
@pytest.mark.parametrize("value", [["a", "b"], "zeros", [object()], np.zeros(2, "M8[s]")])
def test_non_numeric_values_are_rejected(strategy, value):
    with strategy.scope(), pytest.raises(TypeError, match="numbers"):
        hr.Variable(value)


@pytest.mark.catalogue("2.6.7", "3.7.17", "3.7.18")
def test_a_partition_aware_initializer_is_called_once_per_shard(strategy):
    calls = []

    def eye(partition_shape=None, partition_offset=None):
        calls.append((partition_shape, partition_offset))
        return np.eye(4)[partition_offset[0] : partition_offset[0] + partition_shape[0]]

    with cluster(2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        v = hr.Variable(eye, shape=(4, 4), dtype=F32)
        assert as_list(v) == np.eye(4).tolist()
    assert calls == [((2, 4), (0, 0)), ((2, 4), (2, 0))]


@pytest.mark.catalogue("2.6.7", "2.6.8", "3.7.17", "3.7.18")
@pytest.mark.parametrize("given", [{}, {"shape": (4,)}, {"dtype": F32}, {"shape": 4, "dtype": F32}])
def test_the_result_of_a_plain_initializer_is_split(given):
    with cluster(2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        v = hr.Variable(lambda: np.arange(4, dtype=F32), **given)
        assert [s.shape for s in v.shards] == [(2,), (2,)]
        assert as_list(v) == [0, 1, 2, 3]


@pytest.mark.parametrize("initializer", [Zeros(), Uniform(seed=3), Normal(seed=4)])
def test_server_side_initial_values_do_not_depend_on_shards(initializer):
    found = []
    for parts in (1, 3):
        with cluster(2, FixedShardsPartitioner(parts)) as strategy, strategy.scope():
            v = hr.Variable(initializer, shape=(7, 5), dtype="float32")
            found.append(v.read())
    assert found[0].shape == (7, 5)
    assert np.array_equal(*found)


@pytest.mark.catalogue("1.6.6")
def test_a_shape_that_is_missing_or_wrong_is_an_error(strategy):
    with strategy.scope():
        with pytest.raises(ValueError, match="`shape` is required"):
            hr.Variable(Zeros())
        with pytest.raises(ValueError, match="`shape` is"):
            hr.Variable([1.0], shape=(2,))
        with pytest.raises(InvalidArgumentError, match="but must return"):
            hr.Variable(lambda: np.zeros(5), shape=(6,), dtype=F32)


# --- the whole value ----------------------------------------------------------------------------


@pytest.mark.catalogue("2.7.1", "3.9.2-5", "3.9.15", "3.9.16", "3.35.1")
def test_assignments_apply_to_all_shards(strategy):
    with strategy.scope():
        v = hr.Variable([[0.0, 0], [1, 1], [2, 2], [3, 3]])
    assert v.assign([[4.0, 4], [5, 5], [6, 6], [7, 7]]) is v
    assert as_list(v) == [[4, 4], [5, 5], [6, 6], [7, 7]]
    v.assign_add(np.ones((4, 2)))
    v.assign_sub(np.full((4, 2), 3.0))
    assert as_list(v) == [[2, 2], [3, 3], [4, 4], [5, 5]]
    assert v.numpy().tolist() == v.value().tolist() == v.read_value().tolist() == as_list(v)


@pytest.mark.catalogue("2.7.1", "4.3.11")
@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (4,), (4, 1), ()])
def test_a_value_of_another_shape_is_rejected_without_changes(strategy, shape):
    with strategy.scope():
        v = hr.Variable(np.ones((4, 2)))
    for write in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match="needs a value of shape"):
            write(np.zeros(shape))
    with pytest.raises(TypeError, match="astype"):
        v.assign(np.zeros((4, 2), complex))
    assert as_list(v) == np.ones((4, 2)).tolist()


def test_a_number_out_of_range_of_the_dtype_is_rejected(strategy):
    with strategy.scope():
        v = hr.Variable(np.uint8(3))
    v.assign(255)
    for wrong in (256, -1, 1.5):
        with pytest.raises(TypeError, match="astype"):
            v.assign(wrong)
    assert v.read() == 255


def test_a_failed_creation_releases_the_name(strategy):
    with strategy.scope():
        with pytest.raises(InvalidArgumentError):
            hr.Variable(lambda: np.zeros(5), name="w", shape=(6,), dtype=F32)
        hr.Variable(0.0, name="w")


def test_one_variable_is_assigned_to_another(strategy):
    with strategy.scope():
        a, b = hr.Variable([1.0, 2.0]), hr.Variable([0.0, 0.0])
    b.assign(a)
    local = hr.Variable([7.0, 8.0])
    a.assign(local)
    local.assign(b)
    assert (as_list(a), as_list(b), as_list(local)) == ([7, 8], [1, 2], [1, 2])


def test_the_caller_owns_read_values(table):
    found = table.read()
    found[:] = 0
    assert as_list(table)[0] == [1, 2]


@pytest.mark.catalogue("1.8.2", "2.7.10-12", "3.9.15", "3.9.16", "3.9.26")
def test_variables_support_array_arithmetic(table):
    plain = table.read()
    assert (table + 1).tolist() == (plain + 1).tolist()
    assert (2 * table - table).tolist() == plain.tolist()
    assert (table == plain).all()
    assert np.sum(table) == plain.sum()
    assert (table @ np.ones((2, 1))).tolist() == (plain @ np.ones((2, 1))).tolist()
    assert [row.tolist() for row in table] == plain.tolist()
    assert len(table) == 8
    with pytest.raises(TypeError, match="operators cannot write"):
        np.add(table, 1, out=table)
    with pytest.raises(TypeError, match="scatter_update"):
        table[0] = 1


@pytest.mark.catalogue("1.8.2")
def test_scalar_variables_support_number_arithmetic(strategy):
    with strategy.scope():
        v = hr.Variable(2.5)
    assert (float(v), int(v), bool(v), v + 1, f"{v:.2f}") == (2.5, 2, True, 3.5, "2.50")
    with pytest.raises(TypeError):
        len(v)
    with pytest.raises(ValueError, match="no rows"):
        v.gather([0])


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.catalogue("2.7.3", "2.7.4", "3.9.9", "4.3.11")
@pytest.mark.parametrize(
    "ids", [[8, 0, 4], [0], [], [[1, 1], [7, 0]], np.array([3, 2, 2], np.uint8), 5]
)
def test_gathered_rows_are_in_id_order(strategy, ids):
    value = np.arange(18.0).reshape(9, 2)
    with strategy.scope():
        v = hr.Variable(value)
    assert np.array_equal(v.gather(ids), value[np.asarray(ids, int)])
    assert v.gather(ids).dtype == value.dtype


@pytest.mark.catalogue("2.7.5")
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 9], r"ids\[1\] = 9 is not in \[0, 9\) of Variable 'v'"),
        ([[0], [-1]], r"ids\[1, 0\] = -1"),
    ],
)
def test_an_id_out_of_range_is_named(strategy, ids, message):
    with strategy.scope():
        v = hr.Variable(np.zeros((9, 1)), name="v")
    for use in (v.gather, lambda ids: v.scatter_add(np.ravel(ids), np.ones((2, 1)))):
        if np.ndim(ids) == 1 or use is v.gather:
            with pytest.raises(InvalidArgumentError, match=message):
                use(ids)
    with pytest.raises(TypeError, match="integers"):
        v.gather([0.5])


@pytest.mark.catalogue("2.7.2", "3.9.7", "3.9.8")
@pytest.mark.parametrize("how", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_scatters_match_those_of_one_array(strategy, how):
    start = np.arange(1.0, 31).reshape(30, 1)
    ids = [0, 10, 12, 21, 22, 12]
    values = np.array([[3.0], [2], [4], [25], [2], [5]])
    with strategy.scope():
        v = hr.Variable(start)
    expected = start.copy()
    for row, value in zip(ids, values, strict=True):
        old = expected[row]
        expected[row] = {
            "add": old + value,
            "sub": old - value,
            "mul": old * value,
            "div": old / value,
            "min": np.minimum(old, value),
            "max": np.maximum(old, value),
            "update": value,
        }[how]
    assert getattr(v, f"scatter_{how}")(ids, values) is v
    assert np.array_equal(v.read(), expected)


@pytest.mark.catalogue("2.7.2", "3.9.6-8")
def test_uneven_shards_and_repeated_rows(strategy):
    with strategy.scope():
        small = hr.Variable(np.zeros((9, 1)))
    small.scatter_add(hr.IndexedSlices(np.array([[1.0], [1], [10]]), [0, 0, 8]))
    assert small.read()[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 10]
    small.scatter_update([1, 2], 5.0)
    small.batch_scatter_update([1], [[6.0]])
    small.scatter_add([], np.zeros((0, 1)))
    assert small.read()[:3, 0].tolist() == [2, 6, 5]
    with pytest.raises(ValueError, match="1-D"):
        small.scatter_add([[0]], [[[1.0]]])
    with pytest.raises(ValueError, match="needs a value of shape"):
        small.scatter_add([0, 1], np.ones((3, 1)))


S = slice
SLICES = [
    S(2), S(-8, 2), S(-10, 2), S(5, None), S(5, -1), S(None, None, 3), S(None, None, 5),
    S(1, None, 6), S(1, 5, 6), S(1, None, 7), S(2, 7), S(2, 7, 2), S(2, 7, 3), S(None, None, -1),
    S(2, None, -1), S(2, -8, -1), S(2, -10, -1), S(4, None, -1), S(-1, -3, -1),
    S(None, None, -5), S(6, None, -6), S(6, 5, -6), S(6, None, -7), S(7, 1, -1), S(7, 1, -2),
    S(7, 1, -4), S(0, 0), S(5, 3), S(3, 5, -1), S(-1, 0), S(2, -1, -1), S(None),
    (S(None), 0), (S(None), S(0, 1)), 2, 6, (2, 1), -2, Ellipsis, (Ellipsis, 0),
    (S(0, 1), Ellipsis), None, (None, S(2)), (S(2), None), (S(1, 3), 1), (), np.int64(3),
    (S(6, None, -3), S(None, None, -1)), [0, 2, 2], (S(None), [1, 0]),
]  # fmt: skip


@pytest.mark.catalogue("2.7.10", "3.9.25")
def test_slicing_matches_numpy(table):
    plain = np.arange(1, 17, dtype=F32).reshape(8, 2)
    for key in SLICES:
        found = table[key]
        assert np.array_equal(found, plain[key]), key
        assert np.shape(found) == plain[key].shape, key
    assert table[table.read() > 10].tolist() == plain[plain > 10].tolist()
    assert table[plain[:, 0] > 10].tolist() == plain[plain[:, 0] > 10].tolist()


@pytest.mark.catalogue("2.7.10", "3.9.25")
@pytest.mark.parametrize("key", [100, -100, (0, 5), (0, 0, 0)])
def test_an_index_out_of_bounds_raises_index_error(table, key):
    with pytest.raises(IndexError, match=r"out of bounds|too many"):
        table[key]
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        table[::0]


def test_only_the_rows_of_a_slice_are_sent(table):
    sent = table.cluster.servers.status

    def out():
        return sum(sent(server).bytes_out for server in range(2))

    before = out()
    table[2:4], table[-1]
    assert out() - before == 3 * 2 * 4


# --- handles ------------------------------------------------------------------------------------


@pytest.mark.catalogue("3.9.23")
def test_a_handle_resolves_to_its_variable(table):
    assert pickle.loads(pickle.dumps(table)) is table
    assert copy.deepcopy(table) is table
    assert copy.copy(table) is table
    captured = unpack(pack(lambda: table.assign_add(table.read())))
    captured()
    assert as_list(table)[0] == [2, 4]


def test_a_handle_is_small_and_needs_its_cluster(strategy, table):
    data = pickle.dumps(table)
    assert len(data) < 1000
    unregister_cluster(strategy.cluster)
    with pytest.raises(FailedPreconditionError, match="Variable 'table' belongs to the cluster"):
        pickle.loads(data)


def test_a_captured_local_variable_is_rejected(strategy):
    local = hr.Variable([1.0], name="local")
    with strategy.scope():
        placed = hr.Variable(0.0)
    with pytest.raises(FailedPreconditionError, match="'local', which was created outside"):
        pack(lambda: placed.assign(local.read()[0]))
    with pytest.raises(FailedPreconditionError, match="'local'"):
        pack(((local,), {}))
    assert unpack(pack((placed, 1)))[0] is placed


@pytest.mark.catalogue("3.7.20")
def test_creating_a_variable_in_a_closure_is_rejected(strategy):
    rejected = pytest.raises(FailedPreconditionError, match="create it in strategy")
    with write_as(ClosureRun(1, 1, 0)), strategy.scope(), rejected:
        hr.Variable(0.0, name="v")


@pytest.mark.catalogue("4.3.14")
def test_writes_of_a_retried_closure_are_applied_once(strategy, table):
    for worker in (0, 1):
        with write_as(ClosureRun(1, 4, worker)):
            table.assign_add(np.ones((8, 2)))
            table.scatter_add([0, 7], np.ones((2, 2)))
            table.scatter_mul([0], [[2.0, 2.0]])
    assert as_list(table)[0] == [6, 8]
    assert as_list(table)[1] == [4, 5]
    assert as_list(table)[7] == [17, 18]


def test_repr_names_the_servers(strategy, table):
    assert repr(table) == (
        "<Variable 'table' shape=(8, 2) dtype=float32 on servers [0, 1], 3 shards>"
    )
    assert repr(strategy) == "<ParameterServerStrategy of 2 parameter servers>"


@pytest.mark.parametrize(
    "wrong", [{"aggregation": "MOST"}, {"synchronization": "ON_READ"}, {"synchronization": "NONE"}]
)
def test_invalid_arguments_are_rejected(strategy, wrong):
    with strategy.scope(), pytest.raises(ValueError, match="must be"):
        hr.Variable(0.0, **wrong)
