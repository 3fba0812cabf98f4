"""Packed frames: what goes in comes out, and damage is an error."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.element import frame_compression, wire
from headrace.element.chunk import Chunk
from headrace.errors import DataLossError

pytestmark = pytest.mark.parametrize("codec", frame_compression.available_codecs())


def frame(rows: int = 100) -> list[wire.Buffer]:
    noise = np.random.default_rng(0).integers(0, 256, (rows, 400), np.uint8)
    return wire.encode(
        Chunk.of_rows([{"x": np.full(500, row), "y": noise[row]} for row in range(rows)])
    )


def test_a_decompressed_frame_is_equal_and_writable(codec: str) -> None:
    plain = frame()
    packed = frame_compression.compress_frame(plain, codec)
    assert frame_compression.is_compressed(packed)
    assert not frame_compression.is_compressed(plain)
    sizes = [sum(memoryview(each).nbytes for each in which) for which in (plain, packed)]
    assert sizes[1] < sizes[0] / 2
    assert (
        frame_compression.uncompressed_size(packed)
        == frame_compression.uncompressed_size(plain)
        == sizes[0]
    )
    back = frame_compression.decompress_frame(packed)
    assert [bytes(each) for each in back] == [bytes(each) for each in plain]
    rows = wire.decode(back).rows()
    rows[3]["x"][:] = 7
    assert frame_compression.decompress_frame(plain) is plain


def test_incompressible_buffers_are_not_changed(codec: str) -> None:
    noise = wire.encode(Chunk.of_rows([np.random.default_rng(0).bytes(5000)]))
    assert frame_compression.compress_frame(noise, codec) is noise
    assert frame_compression.compress_frame(noise, "unheard of") is noise


@pytest.mark.parametrize("damage", ["cut", "codec", "size", "count", "flip"])
def test_damage_is_an_error(codec: str, damage: str) -> None:
    packed = list(frame_compression.compress_frame(frame(), codec))
    number, name, sizes = msgspec.msgpack.decode(packed[0])
    if damage == "cut":
        packed[1:] = [bytes(memoryview(each)[:-9]) for each in packed[1:]]
    elif damage == "codec":
        packed[0] = msgspec.msgpack.encode([number, "other", sizes])
    elif damage == "size":
        packed[0] = msgspec.msgpack.encode(
            [number, name, [[size * 5000, is_packed] for size, is_packed in sizes]]
        )
    elif damage == "count":
        packed.pop()
    else:
        packed[0] = b"\x93\x02" + b"\xc1" * 20
    with pytest.raises(DataLossError, match=r"a compressed frame of .* cannot be read"):
        frame_compression.decompress_frame(packed)
