"""Packing: a frame's buffers made smaller for a slow wire.

A packed frame has a header of its own, [format, codec, [[bytes, is packed], ...]], and a buffer for
each of the frame's; those that would hardly be smaller are left as they are. Codecs are found by
name; one that needs a package that is not here is not offered.

Rule. What a header says of sizes is believed as far as its codec could have shrunk them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace.element.wire import Buffer
from headrace.errors import DataLossError

__all__ = ["codecs", "pack", "raw_size", "unpack"]

_FORMAT = 2
"""Other than that of frames which are not packed (`wire`)."""
_MARK = b"\x93\x02"
"""With which such a header begins: an array of three, the first of them 2."""
_WORTH_IT = 0.9
_LEAST_BYTES = 1 << 10

_Sizes = list[tuple[int, bool]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, str, _Sizes]).decode


class _Codec(NamedTuple):
    pack: Callable[[Buffer], bytes]
    unpack: Callable[[Buffer, int], Buffer]
    most: int
    """How many times smaller it makes anything at most."""


def _lz4() -> _Codec:
    import lz4.block  # noqa: PLC0415 - optional dependency

    return _Codec(
        lambda data: bytes(lz4.block.compress(data, store_size=False)),
        lambda data, size: memoryview(
            lz4.block.decompress(data, uncompressed_size=size, return_bytearray=True)
        ),
        256,
    )


def _zlib() -> _Codec:
    return _Codec(
        lambda data: zlib.compress(data, 1),
        lambda data, size: memoryview(bytearray(zlib.decompressobj().decompress(data, size + 1))),
        1040,
    )


_MAKE = {"lz4": _lz4, "zlib": _zlib}
_made: dict[str, _Codec | None] = {}


def _codec(name: str) -> _Codec | None:
    """Return a codec; None: it is not known or not installed."""
    if name not in _made:
        try:
            _made[name] = _MAKE[name]() if name in _MAKE else None
        except ImportError:
            _made[name] = None
    return _made[name]


def codecs() -> tuple[str, ...]:
    """Return the names of the codecs that are here, the fastest first."""
    return tuple(name for name in _MAKE if _codec(name) is not None)


def pack(buffers: Sequence[Buffer], codec: str) -> Sequence[Buffer]:
    """Return a frame in a smaller form; as it is where the codec is not here, or does not help."""
    found = _codec(codec)
    if found is None:
        return buffers
    sizes: _Sizes = []
    packed: list[Buffer] = [b""]
    for buffer in buffers:
        flat = memoryview(buffer).cast("B")
        small: Buffer = found.pack(flat) if flat.nbytes >= _LEAST_BYTES else b""
        is_packed = 0 < len(small) < _WORTH_IT * flat.nbytes
        sizes.append((flat.nbytes, is_packed))
        packed.append(small if is_packed else buffer)
    if not any(is_packed for _, is_packed in sizes):
        return buffers
    packed[0] = _encode((_FORMAT, codec, sizes))
    return packed


def is_packed(buffers: Sequence[Buffer]) -> bool:
    """Whether a frame is packed."""
    return bool(buffers) and bytes(memoryview(buffers[0])[:2]) == _MARK


def raw_size(buffers: Sequence[Buffer]) -> int:
    """Return the bytes of a frame as they are when it is not packed, as far as it says."""
    if is_packed(buffers):
        try:
            return sum(size for size, _ in _decode(buffers[0])[2])
        except msgspec.DecodeError:
            return 0
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def unpack(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return a frame as it was before it was packed, if it was; what was packed is writable.

    Raises:
        DataLossError: It is damaged, or its codec is not here.
    """
    if not is_packed(buffers):
        return buffers
    try:
        _, name, sizes = _decode(buffers[0])
        codec = _codec(name)
        if codec is None:
            here = ", ".join(codecs())
            raise ValueError(f"its codec {name!r} is not installed here (only {here})")
        if len(sizes) != len(buffers) - 1:
            raise ValueError(f"it says {len(sizes)} buffers")
        frame: list[Buffer] = []
        for (size, packed), buffer in zip(sizes, buffers[1:], strict=True):
            length = memoryview(buffer).nbytes
            if packed and not 0 <= size <= codec.most * length + 64:
                raise ValueError(f"{length} bytes cannot be {size}")
            whole = codec.unpack(buffer, size) if packed else buffer
            if memoryview(whole).nbytes != size:
                raise ValueError(f"{length} bytes are not {size}")
            frame.append(whole)
    except Exception as error:  # whatever a codec raises
        raise DataLossError(
            f"a packed frame of {len(buffers)} buffers cannot be read: {error}"
        ) from error
    return frame
