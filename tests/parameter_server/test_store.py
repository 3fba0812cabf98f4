"""Operations of a store on variables, and the operations that it rejects."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np
import pytest

from headrace.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.operations import (
    Apply,
    Assign,
    Create,
    Created,
    CreateTable,
    DescribeStore,
    FenceWrites,
    ForgetWriteKeys,
    GatherRows,
    IncrementCounter,
    Operation,
    ReadShard,
    Scatter,
)
from headrace.parameter_server.specs import (
    AdamRule,
    Constant,
    SgdRule,
    ShardSpec,
    StepParameters,
    TableSpec,
    Uniform,
)
from headrace.parameter_server.store import ShardStore
from headrace.serving.rpc import Done

F = np.float32
STEP = StepParameters(iteration=0, learning_rate=1.0)


def spec_of(value, name="v", **other):
    return ShardSpec(
        name=name, variable=name, shape=value.shape, dtype=value.dtype.name,
        variable_shape=other.pop("variable_shape", value.shape), **other,
    )  # fmt: skip


def a_store(value, **spec):
    store = ShardStore()
    value = np.asarray(value)
    assert store.execute(Create(shard=spec_of(value, **spec)), [value])[0] == Created(existed=False)
    return store


def read(store, name="v"):
    return store.execute(ReadShard(shard=name))[1][0]


def rows(*numbers):
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    "value",
    [
        F(3), np.zeros(0, F), np.zeros((0, 3), F), np.zeros((3, 0), F), np.arange(6).reshape(2, 3),
        np.array([True, False]), np.array([1.5], ml_dtypes.bfloat16), np.array([1 + 2j]),
    ],
    ids=lambda value: f"{value.dtype} {value.shape}",
)  # fmt: skip
def test_values_of_all_shapes_and_dtypes_round_trip(value):
    store = a_store(value)
    found = read(store)
    assert (found.shape, found.dtype) == (np.shape(value), value.dtype)
    assert found.tobytes() == value.tobytes()
    store.execute(Assign(shard="v"), [found.copy()])
    assert read(store).tobytes() == value.tobytes()


def test_a_shard_is_created_once_and_keeps_its_value():
    store = a_store(F([1, 2]))
    again = Create(shard=spec_of(F([5, 6])))
    assert store.execute(again, [F([5, 6])])[0] == Created(existed=True)
    assert read(store).tolist() == [1, 2]


@pytest.mark.catalogue("1.8.1", "3.9.22")
@pytest.mark.parametrize("other", [F([[1, 2]]), np.array([1.0, 2.0]), F([1, 2, 3])])
def test_another_shape_or_dtype_under_a_name_is_an_error(other):
    with pytest.raises(AlreadyExistsError, match="there is a shard v of dtype float32 and shape"):
        a_store(F([1, 2])).execute(Create(shard=spec_of(other)), [other])


def test_a_shard_needs_a_value_or_an_initializer():
    store = ShardStore()
    spec = spec_of(np.zeros((4, 3), F), row=6, variable_shape=(10, 3))
    store.execute(Create(shard=spec, initializer=Uniform(0.0, 1.0, 5)))
    whole = spec_of(np.zeros((10, 3), F), name="w")
    store.execute(Create(shard=whole, initializer=Uniform(0.0, 1.0, 5)))
    assert read(store).tobytes() == read(store, "w")[6:].tobytes()
    for arrays, initializer, message in (
        ([], None, "but got neither"),
        ([F([1])], Constant(1.0), "but got both"),
        ([F([1, 2])], None, r"an initial value of shape \(2,\) and dtype float32 does not fit"),
        ([np.array([1.0])], None, "dtype float64 does not fit"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.execute(Create(shard=spec_of(F([1]), "x"), initializer=initializer), arrays)


@pytest.mark.parametrize(
    ("shape", "row", "whole"),
    [((2,), 9, (10,)), ((2,), -1, (10,)), ((2, 3), 0, (2, 4)), ((), 0, (1,)), ((-1,), 0, (1,))],
)
def test_a_shard_must_be_consecutive_rows_of_its_variable(shape, row, whole):
    spec = ShardSpec(
        name="v", variable="v", row=row, shape=shape, dtype="float32", variable_shape=whole
    )
    with pytest.raises(InvalidArgumentError, match="does not fit into a variable of shape"):
        ShardStore().execute(Create(shard=spec, initializer=Constant(0.0)))


def test_inputs_are_copied_and_outputs_are_read_only():
    value = F([1, 2])
    store = a_store(value)
    value[0] = 9
    assert read(store).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        read(store)[0] = 9
    gathered = store.execute(GatherRows(shard="v"), [rows(0)])[1][0]
    gathered[0] = 9
    assert read(store).tolist() == [1, 2]


def test_rows_are_gathered_in_the_given_order():
    store = a_store(np.arange(8, dtype=F).reshape(4, 2), row=10, variable_shape=(20, 2))
    gathered = store.execute(GatherRows(shard="v"), [rows(13, 10, 13)])[1][0]
    assert gathered.tolist() == [[6, 7], [0, 1], [6, 7]]
    square = store.execute(GatherRows(shard="v"), [rows(11, 12).reshape(1, 2)])[1][0]
    assert square.tolist() == [[[2, 3], [4, 5]]]
    assert store.execute(GatherRows(shard="v"), [rows()])[1][0].shape == (0, 2)
    assert store.execute(GatherRows(shard="v"), [np.array(11)])[1][0].tolist() == [2, 3]


def test_replies_use_the_allocator():
    made = []

    def allocate(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    store = ShardStore(allocate)
    store.execute(Create(shard=spec_of(F([1, 2]))), [F([1, 2])])
    gathered = store.execute(GatherRows(shard="v"), [rows(1)])[1][0]
    assert gathered is made[0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("add", [11, 2, 23]), ("sub", [-9, 2, -17]), ("mul", [10, 2, 60]),
        ("update", [10, 2, 20]), ("min", [1, 2, 3]), ("max", [10, 2, 20]), ("div", [0, 2, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int64", "float32", "bfloat16"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_rows_support_all_scatter_modes(mode, expected, dtype, order):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    store = a_store(np.array([1, 2, 3]).astype(kind))
    which, values = rows(0, 2)[order], np.array([10, 20]).astype(kind)[order]
    store.execute(Scatter(shard="v", mode=mode), [which, values])
    if mode == "div" and dtype != "int64":
        expected = (np.float32([1, 2, 3]) / np.float32([10, 1, 20])).astype(kind).tolist()
    assert read(store).tolist() == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("add", 1 + 10 + 30), ("sub", -39), ("mul", 300), ("update", 30), ("min", 1), ("max", 30)],
)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_repeated_row_is_changed_each_time(mode, expected, dtype):
    store = a_store(np.ones((3, 2), dtype))
    values = np.array([[10, 10], [5, 5], [30, 30]], dtype)
    store.execute(Scatter(shard="v", mode=mode), [rows(2, 0, 2), values])
    assert read(store)[2].tolist() == [expected] * 2
    assert read(store)[1].tolist() == [1, 1]


def test_bools_support_only_assign_and_update():
    store = a_store(np.array([True, False, True]))
    store.execute(Scatter(shard="v", mode="update"), [rows(1), np.array([True])])
    store.execute(Assign(shard="v"), [~read(store)])
    assert read(store).tolist() == [False] * 3
    for operation, arrays in (
        (Assign(shard="v", mode="add"), [np.ones(3, bool)]),
        (Scatter(shard="v", mode="sub"), [rows(0), np.ones(1, bool)]),
    ):
        with pytest.raises(
            InvalidArgumentError, match="is not supported for the variable v of dtyp"
        ):
            store.execute(operation, arrays)


@pytest.mark.parametrize(
    ("operation", "arrays", "message"),
    [
        (
            Assign(shard="v"),
            [np.zeros((4, 2), F)],
            r"shape \(4, 2\) of a value does not fit the va",
        ),
        (Assign(shard="v"), [np.zeros((2, 2), F)], r"shard 1 needs \(3, 2\)"),
        (Assign(shard="v"), [np.zeros((3, 2))], "dtype float64 cannot be written to the variable"),
        (
            Assign(shard="v", mode="mul"),
            [np.zeros((3, 2), F)],
            "`mode` must be one of assign, add,",
        ),
        (Assign(shard="v"), [], "Assign needs 1 arrays, but got 0"),
        (
            GatherRows(shard="v"),
            [rows(4, 30)],
            r"ids\[1\] = 30 is not in \[0, 9\) of the variable v",
        ),
        (GatherRows(shard="v"), [rows(-1)], r"ids\[0\] = -1 is not in \[0, 9\)"),
        (
            GatherRows(shard="v"),
            [np.uint64([2**64 - 1])],
            r"ids\[0\] = 18446744073709551615 is not in",
        ),
        (
            GatherRows(shard="v"),
            [np.uint64([2**63 + 4])],
            r"ids\[0\] = 9223372036854775812 is not in",
        ),
        (
            GatherRows(shard="v"),
            [rows(5, 3)],
            "id 3 of the variable v is not in shard 1, which has ro",
        ),
        (Scatter(shard="v"), [rows(9), np.zeros((1, 2), F)], r"ids\[0\] = 9 is not in \[0, 9\)"),
        (
            Scatter(shard="v"),
            [rows(4), np.zeros((2, 2), F)],
            r"shape \(2, 2\) of values does not f",
        ),
        (Scatter(shard="v"), [rows(4), np.zeros((1, 2))], "values of dtype float64 cannot be wri"),
        (Scatter(shard="v"), [rows(4).reshape(1, 1), np.zeros((1, 2), F)], "one dimension, but go"),
        (
            Scatter(shard="v", mode="pow"),
            [rows(4), np.zeros((1, 2), F)],
            "`mode` must be one of add",
        ),
        (
            Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP),
            [np.zeros((3, 1), F)],
            r"shape \(3, 1\) of a gradient does not fit",
        ),
        (
            Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP),
            [np.zeros((3, 2), int)],
            "a gradient of v must have a floating dtype, but has int64",
        ),
        (
            Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP),
            [rows(5), np.zeros((2, 2), F)],
            r"shape \(2, 2\) of gradients does not fit",
        ),
        (
            IncrementCounter(counter="c", delta=-1),
            [],
            "the counter c cannot decrease, but got delta=-1",
        ),
    ],
)
def test_mismatched_arrays_are_rejected_without_changes(operation, arrays, message):
    value = np.arange(6, dtype=F).reshape(3, 2)
    store = a_store(value, row=4, index=1, variable_shape=(9, 2))
    with pytest.raises(InvalidArgumentError, match=message):
        store.execute(operation, arrays)
    assert read(store).tobytes() == value.tobytes()
    assert not store.shards["v"].slots
    assert not store.counters


def test_scalars_have_no_rows_and_integers_no_steps():
    with pytest.raises(TypeError, match="ids of the variable v must be integers, but got dtype f"):
        a_store(F([1])).execute(GatherRows(shard="v"), [F([0])])
    with pytest.raises(InvalidArgumentError, match="v is a scalar and has no rows"):
        a_store(F(1)).execute(GatherRows(shard="v"), [rows(0)])
    step = Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP)
    with pytest.raises(
        InvalidArgumentError, match="needs a variable of a floating dtype, but v has"
    ):
        a_store(np.array([1])).execute(step, [F([1])])


def test_errors_of_unknown_names_list_the_existing_ones():
    with pytest.raises(NotFoundError, match="there is no shard w on this server; it has v"):
        read(a_store(F([1])), "w")
    with pytest.raises(NotFoundError, match="it has none"):
        read(ShardStore(), "w")


@pytest.mark.catalogue("3.22.1")
def test_the_first_step_of_each_optimizer_creates_its_slots():
    store = a_store(np.ones((4, 2), F))
    for name in ("a", "b"):
        adam = Apply(shard="v", optimizer=name, rule=AdamRule(), step=STEP)
        store.execute(adam, [rows(1, 3), np.ones((2, 2), F)])
    described = store.execute(DescribeStore())[0]
    assert described.shards[0].slots == ("a/momentum", "a/velocity", "b/momentum", "b/velocity")
    assert described.bytes == 5 * 32
    assert (read(store)[:, 0] < 1).tolist() == [False, True, False, True]


def test_rows_may_share_gradients():
    store = a_store(np.zeros((5, 2), F))
    sgd = Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP)
    shared = np.array([[1, 2], [10, 20]], F)
    store.execute(sgd, [rows(0, 3, 4), shared, np.uint8([1, 0, 1])])
    assert read(store)[:, 0].tolist() == [-10, 0, 0, -1, -10]
    store.execute(sgd, [rows(4, 0, 4), shared, np.uint8([0, 0, 1])])
    assert read(store)[:, 1].tolist() == [-22, 0, 0, -2, -42]
    before = read(store).copy()
    for which in (np.uint8([0, 2, 0]), np.int8([0, -1, 0]), np.uint8([0, 0]), np.ones(3, F)):
        with pytest.raises(InvalidArgumentError, match="value indices of v must"):
            store.execute(sgd, [rows(0, 3, 4), shared, which])
    assert np.array_equal(read(store), before)


def test_gradients_of_another_precision_are_accepted():
    store = a_store(np.zeros((2, 2), F))
    for kind in (np.float64, np.float16, ml_dtypes.bfloat16):
        store.execute(
            Apply(shard="v", optimizer="o", rule=SgdRule(), step=STEP), [np.ones((2, 2), kind)]
        )
    assert read(store).tolist() == [[-3, -3]] * 2


def test_every_operation_can_be_serialized_and_executed():
    store = a_store(F([1, 2]))
    store.execute(CreateTable(table=TableSpec(name="t", table="t", dim=2)))
    for operation in (
        ReadShard(shard="v"),
        ForgetWriteKeys(coordinator_term=1),
        FenceWrites(coordinator_term=1),
        DescribeStore(),
    ):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(operation), type=Operation)
        assert sent == operation
        answer, _ = store.execute(sent)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=type(answer))
        assert again == answer
    assert store.execute(ForgetWriteKeys(coordinator_term=1))[0] == Done()
