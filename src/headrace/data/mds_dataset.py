"""Datasets of the samples of MDS shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.arguments import check_strings
from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.errors import InvalidArgumentError
from headrace.sources.mds_samples import DecodeSample, read_index
from headrace.storage.names import FileName, as_names
from headrace.storage.options import StorageOptions

__all__ = ["MDSDataset"]


@explain_unknown_arguments
def MDSDataset(  # noqa: N802 - the field's name
    directory: FileName,
    columns: Sequence[str] | None = None,
    encoded: Sequence[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the samples of MDS shards, which MosaicML Streaming writes.

    Samples are dicts of their columns: numbers are NumPy scalars, `ndarray` columns arrays, images
    uint8 arrays of height, width and channels. The number of samples is known, and `shuffle` draws
    from their indices. Shards of remote directories and compressed shards are read as a whole, and
    256 MiB of them are kept in memory; to read them in turn, shuffle with a small buffer.

    >>> samples = hr.MDSDataset("s3://bucket/train", columns=["tokens"])  # doctest: +SKIP
    >>> samples.shuffle(10_000, seed=1).batch(32)  # doctest: +SKIP

    Args:
        directory: Path or URL of a directory with a file `index.json`.
        columns: Names of the columns to decode; None decodes all.
        encoded: Names of columns that remain `bytes`, such as images to decode later.
        storage_options: Options of the file system of a URL, such as `endpoint_url` or credentials.

    Raises:
        NotFoundError: If there is no index, or while reading, if there is no such shard.
        InvalidArgumentError: If there is no such column, or if a column contains pickles.
        DataLossError: If the index is damaged; while reading, if a shard or a sample is.
    """
    for name, value in (("columns", columns), ("encoded", encoded)):
        if value is not None:
            check_strings(name, value)
    folders = as_names("directory", directory)
    if len(folders) != 1:
        raise ValueError(f"`directory` must be one directory, but got {len(folders)} names")
    source, found = read_index(folders[0], StorageOptions(storage_options))
    names = [column.name for column in found]
    for name in [*(columns or ()), *encoded]:
        if name not in names:
            raise InvalidArgumentError(
                f"{folders[0]!r} has no column {name!r}; its columns are {names}"
            )
    selected = frozenset(names if columns is None else columns)
    decode = DecodeSample(source, found, selected, frozenset(encoded))
    return Dataset.from_source(source).map(decode)
