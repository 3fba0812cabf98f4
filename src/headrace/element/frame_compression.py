"""Compression of a frame's buffers for slow networks.

A compressed frame has its own header, [format, codec, [[bytes, is compressed], ...]], followed by
the frame's buffers. Buffers that compression would hardly shrink are left unchanged. Codecs are
identified by name; a codec whose package is not installed is not offered.

Rule. Sizes in a header are accepted only up to the largest ratio that the codec can achieve.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace.element.wire import Buffer
from headrace.errors import DataLossError

__all__ = ["available_codecs", "compress_frame", "decompress_frame", "uncompressed_size"]

_FORMAT = 2
"""Differs from the format of uncompressed frames (`wire`)."""
_MAGIC = b"\x93\x02"
"""First bytes of such a header: an array of three items that starts with 2."""
_MAX_RATIO = 0.9
_MIN_BYTES = 1 << 10

_Sizes = list[tuple[int, bool]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, str, _Sizes]).decode


class _Codec(NamedTuple):
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], Buffer]
    max_ratio: int
    """Largest compression ratio that the codec can achieve."""


def _make_lz4() -> _Codec:
    import lz4.block  # noqa: PLC0415 - optional dependency

    return _Codec(
        lambda data: bytes(lz4.block.compress(data, store_size=False)),
        lambda data, size: memoryview(
            lz4.block.decompress(data, uncompressed_size=size, return_bytearray=True)
        ),
        256,
    )


def _make_zlib() -> _Codec:
    return _Codec(
        lambda data: zlib.compress(data, 1),
        lambda data, size: memoryview(bytearray(zlib.decompressobj().decompress(data, size + 1))),
        1040,
    )


_CODEC_FACTORIES = {"lz4": _make_lz4, "zlib": _make_zlib}
_loaded_codecs: dict[str, _Codec | None] = {}


def _load_codec(name: str) -> _Codec | None:
    """Return a codec, or None if it is unknown or not installed."""
    if name not in _loaded_codecs:
        try:
            _loaded_codecs[name] = _CODEC_FACTORIES[name]() if name in _CODEC_FACTORIES else None
        except ImportError:
            _loaded_codecs[name] = None
    return _loaded_codecs[name]


def available_codecs() -> tuple[str, ...]:
    """Return the names of the installed codecs, fastest first."""
    return tuple(name for name in _CODEC_FACTORIES if _load_codec(name) is not None)


def compress_frame(buffers: Sequence[Buffer], codec: str) -> Sequence[Buffer]:
    """Return the compressed frame, or the frame itself if the codec is missing or does not help."""
    found = _load_codec(codec)
    if found is None:
        return buffers
    sizes: _Sizes = []
    packed: list[Buffer] = [b""]
    for buffer in buffers:
        flat = memoryview(buffer).cast("B")
        small: Buffer = found.compress(flat) if flat.nbytes >= _MIN_BYTES else b""
        is_packed = 0 < len(small) < _MAX_RATIO * flat.nbytes
        sizes.append((flat.nbytes, is_packed))
        packed.append(small if is_packed else buffer)
    if not any(is_packed for _, is_packed in sizes):
        return buffers
    packed[0] = _encode((_FORMAT, codec, sizes))
    return packed


def is_compressed(buffers: Sequence[Buffer]) -> bool:
    """Return whether a frame is compressed."""
    return bool(buffers) and bytes(memoryview(buffers[0])[:2]) == _MAGIC


def uncompressed_size(buffers: Sequence[Buffer]) -> int:
    """Return the size of the uncompressed frame in bytes, as claimed by its header."""
    if is_compressed(buffers):
        try:
            return sum(size for size, _ in _decode(buffers[0])[2])
        except msgspec.DecodeError:
            return 0
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def decompress_frame(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return a frame uncompressed; buffers that were compressed become writable.

    Raises:
        DataLossError: If the frame is damaged, or its codec is not installed.
    """
    if not is_compressed(buffers):
        return buffers
    try:
        _, name, sizes = _decode(buffers[0])
        codec = _load_codec(name)
        if codec is None:
            available = ", ".join(available_codecs())
            raise ValueError(
                f"codec {name!r} is not installed in this process (installed: {available})"
            )
        if len(sizes) != len(buffers) - 1:
            raise ValueError(f"its header lists {len(sizes)} buffers")
        frame: list[Buffer] = []
        for (size, packed), buffer in zip(sizes, buffers[1:], strict=True):
            length = memoryview(buffer).nbytes
            if packed and not 0 <= size <= codec.max_ratio * length + 64:
                raise ValueError(f"{length} bytes cannot decompress to {size}")
            whole = codec.decompress(buffer, size) if packed else buffer
            if memoryview(whole).nbytes != size:
                raise ValueError(f"the size of {length} compressed bytes is not {size}")
            frame.append(whole)
    except Exception as error:  # codecs may raise anything
        raise DataLossError(
            f"a compressed frame of {len(buffers)} buffers cannot be read: {error}"
        ) from error
    return frame
