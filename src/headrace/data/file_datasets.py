"""Datasets of the records of text and TFRecord files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.plan.source import Source
from headrace.sources.text_files import FileNamesSource, TextLineSource
from headrace.sources.tfrecord import TFRecordSource
from headrace.storage.compression import Compression
from headrace.storage.names import as_names

__all__ = ["TFRecordDataset", "TextLineDataset"]


def _record_dataset(
    filenames: Any, make: Callable[[Any], Source], num_parallel_reads: int | None
) -> Dataset[Any]:
    """Return the records of files named by a string, a list, or a dataset of names."""
    if isinstance(filenames, Dataset):
        return filenames.interleave(
            lambda name: Dataset.from_source(make([name])),
            cycle_length=num_parallel_reads or 1,
            num_parallel_calls=num_parallel_reads,
        )
    if num_parallel_reads is None:
        return Dataset.from_source(make(filenames))
    names = as_names("filenames", filenames)
    return _record_dataset(
        Dataset.from_source(FileNamesSource(names, names)), make, num_parallel_reads
    )


@explain_unknown_arguments
def TFRecordDataset(  # noqa: N802 - the field's name
    filenames: Any,
    compression_type: Compression | None = None,
    num_parallel_reads: int | None = None,
) -> Dataset[bytes]:
    """Return a dataset of the records of TFRecord files as `bytes`; all checksums are verified.

    >>> with hr.io.TFRecordWriter("data.tfrecord") as writer:
    ...     writer.write(b"one")
    ...     writer.write(b"two")
    >>> list(hr.TFRecordDataset("data.tfrecord"))
    [b'one', b'two']

    Args:
        filenames: A path or fsspec URL (str, bytes or os.PathLike), a list of them, or a Dataset
            of them.
        compression_type: "GZIP", "ZLIB", "" or None.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
    """
    return _record_dataset(
        filenames, lambda names: TFRecordSource(names, compression_type), num_parallel_reads
    )


@explain_unknown_arguments
def TextLineDataset(  # noqa: N802 - the field's name
    filenames: Any,
    compression_type: Compression | None = None,
    num_parallel_reads: int | None = None,
) -> Dataset[bytes]:
    """Return a dataset of the lines of text files as `bytes` without line terminators.

    >>> with open("lines.txt", "w") as file:
    ...     print("first", file=file)
    ...     print("second", file=file)
    >>> list(hr.TextLineDataset("lines.txt"))
    [b'first', b'second']

    Args:
        filenames: A path or fsspec URL (str, bytes or os.PathLike), a list of them, or a Dataset
            of them.
        compression_type: "GZIP", "ZLIB", "" or None.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
    """
    return _record_dataset(
        filenames, lambda names: TextLineSource(names, compression_type), num_parallel_reads
    )
