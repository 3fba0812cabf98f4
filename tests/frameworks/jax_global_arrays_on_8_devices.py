"""Global arrays over meshes of 8 devices; run by `test_jax_global_arrays.py` in a process of its
own."""

from __future__ import annotations

import doctest

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from headrace.errors import InvalidArgumentError
from headrace.frameworks import jax_global_arrays
from headrace.frameworks.jax_global_arrays import (
    BatchLayout,
    InputPipeline,
    batch_layout,
    global_array,
    whole_array,
)


def mesh(*shape: int) -> Mesh:
    names = ("data", "model", "other")[: len(shape)]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def cut(rows: np.ndarray, layout: BatchLayout) -> list[np.ndarray]:
    return np.split(rows, layout.num_shards)


@pytest.mark.parametrize(
    ("shape", "spec", "shards"),
    [
        ((8,), P("data"), 8),
        ((4, 2), P("data"), 4),
        ((4, 2), P("model"), 2),
        ((4, 2), P("data", "model"), 4),
        ((4, 2), P("model", "data"), 2),
        ((4, 2), P(("data", "model")), 8),
        ((4, 2), P(("model", "data")), 8),
        ((4, 2), P(None, "model"), 1),
        ((2, 2, 2), P(("data", "other"), "model"), 4),
        ((8,), P(), 1),
    ],
)
def test_a_global_array_equals_that_of_device_put(shape, spec, shards):
    sharding = NamedSharding(mesh(*shape), spec)
    layout = batch_layout(sharding)
    assert layout.num_shards == shards
    assert layout.local_shards == tuple(range(shards))
    rows = np.arange(16 * 8 * 3, dtype=np.float32).reshape(16, 8, 3)
    expected = jax.device_put(rows, sharding)
    for made in (global_array(layout, cut(rows, layout)), whole_array(layout, rows)):
        assert made.sharding == expected.sharding
        assert made.dtype == expected.dtype
        for mine, theirs in zip(made.addressable_shards, expected.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (theirs.device, theirs.index)
            np.testing.assert_array_equal(mine.data, theirs.data)


def test_reordered_devices_get_the_rows_of_their_mesh_position():
    order = np.random.default_rng(7).permutation(8)
    sharding = NamedSharding(Mesh(np.array(jax.devices())[order].reshape(4, 2), ("a", "b")), P("a"))
    layout = batch_layout(sharding)
    rows = np.arange(12)
    np.testing.assert_array_equal(global_array(layout, cut(rows, layout)), rows)


def test_other_kinds_of_sharding_have_layouts():
    single = batch_layout(SingleDeviceSharding(jax.devices()[3]))
    assert (single.num_shards, single.local_devices) == (1, ((jax.devices()[3], 0),))
    made = global_array(single, [np.ones((3, 2))])
    assert made.devices() == {jax.devices()[3]}
    computed = jax.jit(lambda x: x * 2)(
        jax.device_put(np.ones((8, 4)), NamedSharding(mesh(4, 2), P("data")))
    )
    assert batch_layout(computed.sharding).num_shards == 4


def test_a_leaf_with_fewer_axes_than_the_spec_uses_its_first_entries():
    layout = batch_layout(NamedSharding(mesh(4, 2), P("data", "model")))
    labels = global_array(layout, cut(np.arange(8), layout))
    assert labels.sharding.spec == P("data")
    assert labels.tolist() == list(range(8))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_shards_have_the_row_counts_of_their_pieces(rows):
    layout = batch_layout(NamedSharding(mesh(4, 2), P("data", "model")))
    pieces = [np.full((rows, 2), number, np.int8) for number in range(4)]
    made = global_array(layout, pieces)
    assert made.shape == (4 * rows, 2)
    np.testing.assert_array_equal(made, np.concatenate(pieces))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
        (np.bool_, np.bool_),
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    ],
)
def test_dtypes_are_converted_as_in_jax(dtype, expected):
    layout = batch_layout(NamedSharding(mesh(2, 4), P("data")))
    made = global_array(layout, [np.ones(2, dtype), np.zeros(2, dtype)])
    assert made.dtype == expected
    assert made.tolist() == [1, 1, 0, 0]


def test_integers_that_do_not_fit_into_32_bits_raise_and_name_the_leaf():
    layout = batch_layout(SingleDeviceSharding(jax.devices()[0]))
    for wrong in (np.array([2**31]), np.array([-(2**31) - 1]), np.array([2**32], np.uint64)):
        with pytest.raises(InvalidArgumentError, match=r"\['id'\] holds .*jax_enable_x64"):
            global_array(layout, [wrong], "['id']")
    assert global_array(layout, [np.array([2**31 - 1, -(2**31)])]).tolist() == [2**31 - 1, -(2**31)]
    assert global_array(layout, [np.array([np.nan, np.inf])]).dtype == np.float32


def test_dtypes_stay_64_bit_if_x64_is_enabled():
    layout = batch_layout(NamedSharding(mesh(8), P("data")))
    with jax.enable_x64(True):
        made = global_array(layout, [np.array([2**40])] * 8)
        assert made.dtype == np.int64
        assert made.tolist() == [2**40] * 8


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([b"a"], object),
        np.array(["a"], object),
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "datetime64[s]"),
        np.zeros(1, [("a", "i4")]),
        np.zeros(1, "V3"),
    ],
)
def test_unsupported_dtypes_raise_and_name_the_leaf(wrong):
    layout = batch_layout(SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(
        InvalidArgumentError, match=r"\['name'\] holds .*which JAX arrays cannot hold"
    ):
        global_array(layout, [wrong], "['name']")


def test_unequal_pieces_and_indivisible_axes_raise_and_name_the_leaf():
    layout = batch_layout(NamedSharding(mesh(4, 2), P("data", "model")))
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] has shapes \(1,\), \(2,\)"):
        global_array(layout, [np.zeros(1), np.zeros(2), np.zeros(1), np.zeros(1)], "['x']")
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] of shape \(4, 3\) cannot be sharded"):
        global_array(layout, [np.zeros((1, 3))] * 4, "['x']")
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] of shape \(4, 3\) cannot be sharded"):
        whole_array(layout, np.zeros((4, 3)), "['x']")


def test_scalars_are_accepted_only_on_one_device():
    layout = batch_layout(NamedSharding(mesh(4, 2), P("data")))
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] is a scalar.*`batch`"):
        global_array(layout, [np.float32(1)] * 4, "['x']")
    with pytest.raises(InvalidArgumentError, match=r"\['x'\] is a scalar.*`batch`"):
        whole_array(layout, np.float32(1), "['x']")
    one = batch_layout(SingleDeviceSharding(jax.devices()[1]))
    made = global_array(one, [np.int64(3)])
    assert (made.shape, made.dtype, int(made)) == ((), np.int32, 3)
    everywhere = batch_layout(NamedSharding(mesh(8), P()))
    assert len(global_array(everywhere, [np.bool_(True)]).devices()) == 8


def aligned(count: int) -> np.ndarray:
    memory = np.zeros(count * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * 4].view(np.float32)


def test_memory_is_copied_unless_it_may_be_aliased():
    layout = batch_layout(NamedSharding(mesh(8), P("data")))
    rows = aligned(8 * 16)
    kept = global_array(layout, cut(rows, layout))
    copied = global_array(layout, cut(rows, layout), may_alias=False)
    rows[:] = 5
    assert kept.sum() == 5 * 128
    assert copied.sum() == 0


def test_copies_are_aligned_and_made_once():
    layout = batch_layout(SingleDeviceSharding(jax.devices()[0]))
    copy = jax_global_arrays._aligned_copy(np.ones(1000))
    assert copy.ctypes.data % 64 == 0
    narrow = copy.astype(np.float32)  # the dtype of JAX, so that JAX uses the memory
    again = jax_global_arrays._aligned_copy(narrow)
    made = global_array(layout, [again])
    assert made.addressable_shards[0].data.unsafe_buffer_pointer() == again.ctypes.data


def test_jax_arrays_are_used_unchanged():
    layout = batch_layout(NamedSharding(mesh(8), P("data")))
    pieces = [jax.device_put(np.full(2, n), device) for n, device in enumerate(jax.devices())]
    made = global_array(layout, pieces)
    assert made.tolist() == [n for n in range(8) for _ in range(2)]


def test_values_that_are_no_sharding_are_rejected():
    for wrong in (P("data"), jax.devices()[0], "data", None):
        with pytest.raises(TypeError, match=r"must be a jax\.sharding\.Sharding"):
            batch_layout(wrong)


def test_processes_with_a_common_shard_form_one_pipeline():
    # Two models on two hosts each: (hosts 0, 1) and (2, 3).
    needs = {0: [0], 1: [0], 2: [1], 3: [1]}
    assert jax_global_arrays.group_pipelines(needs) == (
        InputPipeline((0, 1), (0,)),
        InputPipeline((2, 3), (1,)),
    )
    # Hosts overlap without needing the same: one pipeline reads for all three.
    needs = {0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [4]}
    assert jax_global_arrays.group_pipelines(needs) == (
        InputPipeline((0, 1, 2), (0, 1, 2, 3)),
        InputPipeline((3,), (4,)),
    )
    # A third process joins two separate pipelines.
    assert jax_global_arrays.group_pipelines({0: [0], 1: [1], 2: [0, 1]}) == (
        InputPipeline((0, 1, 2), (0, 1)),
    )
    # In the order of their first shards, not of the processes.
    assert jax_global_arrays.group_pipelines({0: [2, 3], 1: [0, 1]}) == (
        InputPipeline((1,), (0, 1)),
        InputPipeline((0,), (2, 3)),
    )


def test_docstring_examples_pass():
    result = doctest.testmod(jax_global_arrays)
    assert result.attempted > 5
    assert result.failed == 0
