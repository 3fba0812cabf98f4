"""Datasets of the records of text, TFRecord and Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.plan.source import Source
from headrace.sources.parquet import ParquetSource
from headrace.sources.text_files import FileNamesSource, TextLineSource
from headrace.sources.tfrecord import TFRecordSource
from headrace.storage.compression import Compression
from headrace.storage.names import expand_names
from headrace.storage.options import StorageOptions

__all__ = ["ParquetDataset", "TFRecordDataset", "TextLineDataset"]


def _record_dataset(
    filenames: Any,
    make: Callable[[Any], Source],
    num_parallel_reads: int | None,
    options: StorageOptions,
) -> Dataset[Any]:
    """Return the records of files named by patterns, or by a dataset of names."""
    if isinstance(filenames, Dataset):
        return filenames.interleave(
            lambda name: Dataset.from_source(make([name])),
            cycle_length=num_parallel_reads or 1,
            num_parallel_calls=num_parallel_reads,
        )
    names = expand_names("filenames", filenames, options)
    if num_parallel_reads is None:
        return Dataset.from_source(make(names))
    return _record_dataset(
        Dataset.from_source(FileNamesSource(names, names)), make, num_parallel_reads, options
    )


@explain_unknown_arguments
def TFRecordDataset(  # noqa: N802 - the field's name
    filenames: Any,
    compression_type: Compression | None = None,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[bytes]:
    """Return a dataset of the records of TFRecord files as `bytes`; all checksums are verified.

    >>> with hr.io.TFRecordWriter("data.tfrecord") as writer:
    ...     writer.write(b"one")
    ...     writer.write(b"two")
    >>> list(hr.TFRecordDataset("data.tfrecord"))
    [b'one', b'two']

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs.
        compression_type: "GZIP", "ZLIB", "" or None.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
    """
    options = StorageOptions(storage_options)
    return _record_dataset(
        filenames,
        lambda names: TFRecordSource(names, compression_type, storage_options=options),
        num_parallel_reads,
        options,
    )


@explain_unknown_arguments
def ParquetDataset(  # noqa: N802 - the field's name
    filenames: Any,
    columns: Sequence[str] | None = None,
    filters: Sequence[Any] | None = None,
    batch_size: int | None = None,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the rows of Parquet files as dicts. Requires pyarrow.

    The footers of the files are read now. Each row group can be read by another worker; with more
    than 256 files, each file, and only the first footer is read now.

    Numbers keep their dtype. Dates and timestamps become datetime64, strings `str` or `bytes`,
    lists arrays, and structs dicts. A null is NaN in a column of floats and NaT in one of dates or
    times; elsewhere its row raises an `InvalidArgumentError`.

    >>> import pyarrow
    >>> import pyarrow.parquet
    >>> table = pyarrow.table({"x": [1, 5, 7], "name": ["a", "b", "c"]})
    >>> pyarrow.parquet.write_table(table, "data.parquet")
    >>> list(hr.ParquetDataset("data.parquet", filters=[("x", ">", 3)]))
    [{'x': np.int64(5), 'name': 'b'}, {'x': np.int64(7), 'name': 'c'}]
    >>> next(iter(hr.ParquetDataset("data.parquet", columns=["x"], batch_size=2)))
    {'x': array([1, 5])}

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs. All files must have the same columns.
        columns: Names of the columns to read, in the order of the dicts; None reads all.
        filters: Predicates that must all hold for a row, as for `pyarrow.parquet.read_table`, or
            a list of such lists, of which one must hold. Row groups whose statistics exclude a
            match are not read. None reads all rows.
        batch_size: Number of rows per element, as for `Dataset.batch`; None makes each row an
            element.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
    """
    options = StorageOptions(storage_options)
    make: Callable[[Any], ParquetSource] = partial(
        ParquetSource.of_files, columns=columns, filters=filters, storage_options=options
    )
    if not isinstance(filenames, Dataset):
        # Read the footers once, and compare the columns of the files.
        filenames = expand_names("filenames", filenames, options)
        make = make(filenames).with_files
    rows: Dataset[Any] = _record_dataset(filenames, make, num_parallel_reads, options)
    return rows if batch_size is None else rows.batch(batch_size)


@explain_unknown_arguments
def TextLineDataset(  # noqa: N802 - the field's name
    filenames: Any,
    compression_type: Compression | None = None,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[bytes]:
    """Return a dataset of the lines of text files as `bytes` without line terminators.

    >>> with open("lines.txt", "w") as file:
    ...     print("first", file=file)
    ...     print("second", file=file)
    >>> list(hr.TextLineDataset("lines.txt"))
    [b'first', b'second']

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs.
        compression_type: "GZIP", "ZLIB", "" or None.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
    """
    options = StorageOptions(storage_options)
    return _record_dataset(
        filenames,
        lambda names: TextLineSource(names, compression_type, storage_options=options),
        num_parallel_reads,
        options,
    )
