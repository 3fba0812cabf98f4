"""Samples of MDS shards (the format of MosaicML Streaming), read by index, and their decoding.

A directory has a file `index.json` that lists the shards and the columns. A shard is

    uint32 count | uint32 offsets[count + 1] | JSON with the columns | samples

and a sample is the uint32 sizes of its columns of variable size, followed by the columns. Integers
are little-endian. https://docs.mosaicml.com/projects/streaming describes the format.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import mmap
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError, InvalidArgumentError, MissingDependencyError
from headrace.plan.source import INDEX_SPEC, IndexedSource
from headrace.sources.mds_columns import Column
from headrace.storage.files import file_error, open_folder
from headrace.storage.names import is_local
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["DecodeSample", "MDSSource", "read_index"]

_MAX_CACHED_BYTES = 256 << 20
"""Maximum size of the remote or compressed shards that a source keeps in memory."""
_MAX_MAPPED_SHARDS = 64
"""Maximum number of other shards that a source keeps open. Each has a file descriptor."""

_INDEX = "index.json"

_Data: TypeAlias = mmap.mmap | bytes


@dataclass(frozen=True)
class Shard:
    """A shard as the index describes it.

    Args:
        directory: Path or URL of the directory.
        name: Name of the file in it.
        count: Number of samples.
        num_bytes: Size of the uncompressed file.
        compression: Name of the compression, without its level; empty if there is none.
        options: Options of the file system of a URL.
    """

    directory: str
    name: str
    count: int
    num_bytes: int
    compression: str
    options: StorageOptions

    @property
    def path(self) -> str:
        """Path or URL of the file."""
        return open_folder(self.directory, self.options).path(self.name)


class _OpenShards:
    """Contents of the shards used last. A pickled copy opens them again."""

    def __init__(self) -> None:
        self._contents: OrderedDict[Shard, _Data] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, shard: Shard) -> _Data:
        """Return the contents of a shard: a memory map, or bytes if it is remote or compressed."""
        with self._lock:
            data = self._contents.get(shard)
            if data is None:
                data = self._contents[shard] = _read_shard(shard)
                self._discard_oldest()
            self._contents.move_to_end(shard)
            return data

    def _discard_oldest(self) -> None:
        """Discard shards, not the last one, until those in memory and the maps are few enough."""
        in_memory = [(shard, len(d)) for shard, d in self._contents.items() if type(d) is bytes]
        excess = sum(size for _, size in in_memory) - _MAX_CACHED_BYTES
        for shard, size in in_memory[:-1]:
            if excess > 0:
                del self._contents[shard]
                excess -= size
        mapped = [shard for shard, d in self._contents.items() if type(d) is not bytes]
        for shard in mapped[:-_MAX_MAPPED_SHARDS]:
            del self._contents[shard]  # closed once no thread reads from it

    def __reduce__(self) -> tuple[type[_OpenShards], tuple[()]]:
        return _OpenShards, ()


@dataclass(frozen=True)
class MDSSource(IndexedSource):
    """Encoded samples of MDS shards, `{"index": int64, "sample": bytes}`; an index is a sample."""

    shards: tuple[Shard, ...]
    _open_shards: _OpenShards = field(
        default_factory=_OpenShards, init=False, repr=False, compare=False
    )

    @property
    def size(self) -> int:
        return sum(shard.count for shard in self.shards)

    @property
    def element_spec(self) -> Spec | None:
        return {"index": INDEX_SPEC, "sample": ArraySpec((), bytes)}

    def gather(self, indices: NDArray[np.int64]) -> Any:
        flat = np.asarray(indices).ravel()
        ends = np.cumsum([shard.count for shard in self.shards])
        shard_numbers = np.searchsorted(ends, flat, side="right")
        column = np.empty(flat.size, object)
        for number in np.unique(shard_numbers).tolist():
            shard = self.shards[number]
            rows = np.flatnonzero(shard_numbers == number)
            data = self._open_shards.open(shard)
            for row, sample in zip(rows, flat[rows] - (ends[number] - shard.count), strict=True):
                column[row] = _read_sample(data, shard, int(sample))
        return {"index": np.array(indices, np.int64), "sample": column.reshape(indices.shape)}

    def describe_index(self, index: int) -> str:
        """Return the shard of a sample, and its number there, for an error."""
        for shard in self.shards:
            if index < shard.count:
                return f"{shard.path!r}, sample {index}"
            index -= shard.count
        raise IndexError(index)


def _read_shard(shard: Shard) -> _Data:
    """Return the checked contents of a shard.

    Raises:
        DataLossError: If it does not have the size or the number of samples of the index.
    """
    data: _Data
    if is_local(shard.directory) and not shard.compression:
        data = _map_file(shard.path)
    else:
        data = _decompress(open_folder(shard.directory, shard.options).read(shard.name), shard)
    if len(data) != shard.num_bytes:
        raise DataLossError(
            f"{shard.path!r} has {len(data):,} bytes, but {shard.num_bytes:,} according to "
            "index.json; the file is incomplete, or belongs to another index"
        )
    if shard.count and (found := int.from_bytes(data[:4], "little")) != shard.count:
        raise DataLossError(
            f"{shard.path!r} has {found} samples, but {shard.count} according to index.json"
        )
    return data


def _map_file(path: str) -> _Data:
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise file_error(path, error) from error


def _decompress(data: bytes, shard: Shard) -> bytes:
    try:
        if shard.compression == "gz":
            return gzip.decompress(data)
        if shard.compression == "bz2":
            return bz2.decompress(data)
        if shard.compression == "zstd":
            return _decompress_zstd(data, shard)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataLossError(f"{shard.path!r} cannot be decompressed: {error}") from error
    return data


def _decompress_zstd(data: bytes, shard: Shard) -> bytes:
    try:
        # Optional, and used in this function only.
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            f"{shard.path!r} requires the package zstandard, which is not installed; "
            "pip install 'headrace[compression]'"
        ) from error
    try:
        return bytes(zstandard.ZstdDecompressor().decompress(data, shard.num_bytes))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _read_sample(data: _Data, shard: Shard, number: int) -> bytes:
    """Return an encoded sample.

    Raises:
        DataLossError: If its offsets are outside the shard.
    """
    where = 4 + 4 * number
    start, stop = np.frombuffer(data[where : where + 8], "<u4").tolist()
    if not 4 * (shard.count + 2) <= start <= stop <= len(data):
        raise DataLossError(
            f"{shard.path!r}: sample {number} is at bytes {start:,} to {stop:,} according to the "
            f"offsets at byte {where:,}, but the file has {len(data):,} bytes"
        )
    return data[start:stop]


@dataclass(frozen=True)
class DecodeSample:
    """Function that decodes an element of `MDSSource` to a dict of its columns.

    Args:
        source: The source.
        columns: All columns of the samples, in their order.
        selected: Names of the columns to decode.
        encoded: Names of the columns that remain `bytes`.

    Raises:
        InvalidArgumentError: If a selected column cannot be decoded.
    """

    source: MDSSource
    columns: tuple[Column, ...]
    selected: frozenset[str]
    encoded: frozenset[str]
    #: Function for each column; None if it is not selected.
    _decoders: list[Callable[[bytes], Any] | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoders", [self._find_decoder(c) for c in self.columns])

    def _find_decoder(self, column: Column) -> Callable[[bytes], Any] | None:
        if column.name not in self.selected:
            return None
        return bytes if column.name in self.encoded else column.find_decoder()

    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Decode a sample.

        Raises:
            DataLossError: If it is damaged; the message names the shard and the column.
        """
        result: dict[str, Any] = {}
        name = None
        try:
            values = self._split(element["sample"])
            for column, decode, value in zip(self.columns, self._decoders, values, strict=True):
                if decode is not None:
                    name = column.name
                    result[name] = decode(value)
        except (ValueError, IndexError, KeyError, DataLossError) as error:
            where = self.source.describe_index(int(element["index"]))
            part = "" if name is None else f"column {name!r} cannot be decoded: "
            raise DataLossError(f"{where}: {part}{error}") from error
        return result

    def _split(self, sample: bytes) -> list[bytes]:
        """Return the encoded values of a sample."""
        num_variable = sum(column.num_bytes is None for column in self.columns)
        variable_sizes = iter(np.frombuffer(sample[: 4 * num_variable], "<u4").tolist())
        sizes = [column.num_bytes or next(variable_sizes, 0) for column in self.columns]
        stops = list(itertools.accumulate(sizes, initial=4 * num_variable))
        if stops[-1] != len(sample):
            raise ValueError(
                f"it has {len(sample):,} bytes, but its columns end at byte {stops[-1]:,}"
            )
        return [sample[start:stop] for start, stop in itertools.pairwise(stops)]


def read_index(
    directory: str, options: StorageOptions = NO_OPTIONS
) -> tuple[MDSSource, tuple[Column, ...]]:
    """Return the samples of a directory and their columns.

    Raises:
        NotFoundError: If it has no index.
        DataLossError: If it is no valid index.
        InvalidArgumentError: If it describes another format, or uses an unknown compression.
    """
    folder = open_folder(directory, options)
    path, text = folder.path(_INDEX), folder.read(_INDEX)
    try:
        entries = json.loads(text)["shards"]
        formats = {entry["format"] for entry in entries}
        versions = {entry["version"] for entry in entries}
        if formats - {"mds"} or versions - {2}:
            raise InvalidArgumentError(
                f"{path!r} must list shards of format 'mds' and version 2, but has "
                f"{sorted(formats)} and {sorted(versions)}"
            )
        columns = {_columns_of(entry) for entry in entries}
        if len(columns) > 1:
            raise InvalidArgumentError(f"{path!r} lists shards with different columns")
        shards = tuple(_shard_of(entry, directory, path, options) for entry in entries)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise DataLossError(f"{path!r} is no valid index of MDS shards: {error!r}") from error
    return MDSSource(shards), columns.pop() if columns else ()


def _columns_of(entry: Mapping[str, Any]) -> tuple[Column, ...]:
    described = (entry["column_names"], entry["column_encodings"], entry["column_sizes"])
    return tuple(
        Column(str(name), str(encoding), size or None)
        for name, encoding, size in zip(*described, strict=True)
    )


def _shard_of(
    entry: Mapping[str, Any], directory: str, path: str, options: StorageOptions
) -> Shard:
    compression = (entry["compression"] or "").partition(":")[0]
    if compression not in ("", "bz2", "gz", "zstd"):
        raise InvalidArgumentError(
            f"{path!r} lists shards with compression {compression!r}; 'gz', 'bz2' and 'zstd' can "
            "be read: write the dataset again, or decompress its shards"
        )
    raw, zipped = entry["raw_data"], entry["zip_data"]
    file = zipped if compression else raw
    return Shard(
        directory=directory,
        name=file["basename"],
        count=int(entry["samples"]),
        num_bytes=int(raw["bytes"]),
        compression=compression,
        options=options,
    )
