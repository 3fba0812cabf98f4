"""Names of dtypes in specs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from headrace.distribute.row_access import is_floating
from headrace.parameter_server.specs import as_dtype, name_of, parse_dtype
from headrace.parameter_server.specs import working_dtype as working

SUPPORTED = [
    bool, np.int8, np.uint64, np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.int4,
]  # fmt: skip


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_dtype_names_round_trip(dtype):
    assert parse_dtype(name_of(dtype)) == np.dtype(dtype)
    assert as_dtype(name_of(dtype)) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["U3", "S", object, "V4", [("a", "i4")], "M8[s]", "m8[s]"])
def test_non_numeric_dtypes_are_rejected(dtype):
    with pytest.raises(TypeError, match="holds numbers or bools, but got dtype"):
        name_of(dtype)


def test_invalid_dtypes_are_rejected():
    with pytest.raises(TypeError, match="`dtype` must be the name of a dtype, but got 'float33'"):
        as_dtype("float33")
    with pytest.raises(TypeError):
        as_dtype(3)
    with pytest.raises(ValueError, match="is not a dtype"):
        parse_dtype("object")


def test_the_working_dtype_has_at_least_32_bits():
    floating = [np.dtype(one) for one in SUPPORTED if is_floating(np.dtype(one))]
    assert [one.name for one in floating] == [
        "float16", "float32", "float64", "bfloat16", "float8_e4m3fn",
    ]  # fmt: skip
    assert [working(one).name for one in floating] == [
        "float32", "float32", "float64", "float32", "float32",
    ]  # fmt: skip
