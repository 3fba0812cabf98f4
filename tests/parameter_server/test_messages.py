from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.errors import FailedPreconditionError
from headrace.parameter_server import operations as ops
from headrace.parameter_server.messages import (
    BufferSpec,
    ExecuteOperations,
    ServerRequest,
    buffer_of,
    buffer_spec,
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
def test_arrays_round_trip(array):
    ((found,),) = read_arrays([[buffer_spec(array)]], [bytearray(buffer_of(array))])
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    assert found.flags.writeable or not found.size


def test_arrays_are_grouped_by_operation():
    one, two = np.zeros(3), np.ones((2, 2), np.int32)
    arrays = read_arrays(
        [[], [buffer_spec(one), buffer_spec(two)]], [buffer_of(one), buffer_of(two)]
    )
    assert [[array.shape for array in each] for each in arrays] == [[], [(3,), (2, 2)]]


@pytest.mark.parametrize(
    ("buffer_specs", "buffers"),
    [
        ([[BufferSpec("float32", (2,))]], []),
        ([[]], [b"12"]),
        ([[BufferSpec("float32", (2,))]], [b"1234"]),
        ([[BufferSpec("float32", (-1, -2))]], [b"12345678"]),
    ],
    ids=["too few", "too many", "short", "negative"],
)
def test_buffers_that_do_not_match_their_specs_are_rejected(buffer_specs, buffers):
    with pytest.raises(FailedPreconditionError, match=r"expected \d buffers|bytes, but got"):
        list(read_arrays(buffer_specs, buffers))


def test_non_numeric_arrays_are_rejected_before_sending():
    with pytest.raises(TypeError, match="numbers"):
        buffer_spec(np.array(["text"]))


def test_requests_round_trip():
    request = ExecuteOperations(
        (ops.ReadShard("w"), ops.IncrementCounter("steps", 2), ops.FenceWrites(3)),
        ((), (BufferSpec("int64", (2,)),), ()),
        "state",
    )
    decoded = msgspec.msgpack.Decoder(ServerRequest).decode(msgspec.msgpack.encode(request))
    assert decoded == request
