from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.errors import FailedPreconditionError
from headrace.parameter_server import operations as ops
from headrace.parameter_server.messages import (
    ArrayForm,
    ExecuteOperations,
    ServerRequest,
    buffer_of,
    form_of,
    read_arrays,
)

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.float32(1.5) * np.ones(()),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.arange(3).astype(bfloat16),
        np.array([1 + 2j]),
    ],
    ids=["int64", "0-d", "no rows", "bool", "bfloat16", "complex"],
)
def test_an_array_arrives_as_it_was(array):
    ((found,),) = read_arrays([[form_of(array)]], [bytearray(buffer_of(array))])
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    assert found.flags.writeable or not found.size


def test_arrays_of_each_operation_come_together():
    one, two = np.zeros(3), np.ones((2, 2), np.int32)
    given = read_arrays([[], [form_of(one), form_of(two)]], [buffer_of(one), buffer_of(two)])
    assert [[array.shape for array in each] for each in given] == [[], [(3,), (2, 2)]]


@pytest.mark.parametrize(
    ("forms", "buffers"),
    [
        ([[ArrayForm("float32", (2,))]], []),
        ([[]], [b"12"]),
        ([[ArrayForm("float32", (2,))]], [b"1234"]),
        ([[ArrayForm("float32", (-1, -2))]], [b"12345678"]),
    ],
    ids=["too few", "too many", "short", "negative"],
)
def test_buffers_that_are_not_as_announced_are_refused(forms, buffers):
    with pytest.raises(FailedPreconditionError, match=r"announced|came"):
        list(read_arrays(forms, buffers))


def test_arrays_of_no_numbers_are_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match="numbers"):
        form_of(np.array(["word"]))


def test_a_request_arrives_as_it_was():
    request = ExecuteOperations(
        (ops.ReadShard("w"), ops.IncrementCounter("steps", 2), ops.FenceWrites(3)),
        ((), (ArrayForm("int64", (2,)),), ()),
        "life",
    )
    decoded = msgspec.msgpack.Decoder(ServerRequest).decode(msgspec.msgpack.encode(request))
    assert decoded == request
