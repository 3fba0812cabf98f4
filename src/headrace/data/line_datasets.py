"""Datasets of the records of JSON Lines and CSV files, and of files of records of one length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from headrace.arguments import check_instance, check_int, check_string
from headrace.data.dataset import Dataset
from headrace.data.file_datasets import _record_dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.plan.source import Source
from headrace.sources.byte_ranges import count_parts
from headrace.sources.csv_files import CsvSource, find_columns, find_dtype
from headrace.sources.csv_syntax import CsvSyntax
from headrace.sources.fixed_length import make_fixed_length_source
from headrace.sources.json_lines import JsonLinesSource
from headrace.storage.compression import Compression, check_compression
from headrace.storage.names import as_names, expand_names
from headrace.storage.options import StorageOptions

__all__ = ["CsvDataset", "FixedLengthRecordDataset", "JsonLinesDataset"]


@explain_unknown_arguments
def JsonLinesDataset(  # noqa: N802 - the field's name
    filenames: Any,
    columns: Iterable[str] | None = None,
    compression_type: Compression | None = None,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the JSON objects of files with one object on each line, as dicts.

    Numbers become NumPy scalars (int64 or float64, as written), booleans `np.bool_`, lists arrays,
    and null becomes None. Blank lines are skipped. Large uncompressed files are read in parts of
    about 8 MiB, which may be shuffled and distributed. Parsing is faster if orjson is installed.

    >>> with open("people.jsonl", "w") as file:
    ...     print('{"name": "Ada", "age": 36}', file=file)
    ...     print('{"name": "Alan", "age": 41}', file=file)
    >>> list(hr.JsonLinesDataset("people.jsonl", columns=["age", "name"]))
    [{'age': np.int64(36), 'name': 'Ada'}, {'age': np.int64(41), 'name': 'Alan'}]

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs.
        columns: Keys of the elements, in this order; None keeps all keys of each object. An object
            without one of them raises `InvalidArgumentError`.
        compression_type: "GZIP", "ZLIB", "" or None.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
    """
    options = StorageOptions(storage_options)
    compression = check_compression(compression_type)
    chosen = None if columns is None else _check_columns(columns)

    def make(names: Any, part_counts: tuple[int, ...] = ()) -> Source:
        return JsonLinesSource(
            names, compression, part_counts, storage_options=options, columns=chosen
        )

    if num_parallel_reads is None and not isinstance(filenames, Dataset):
        names = expand_names("filenames", filenames, options)
        return Dataset.from_source(make(names, () if compression else count_parts(names, options)))
    return _record_dataset(filenames, make, num_parallel_reads, options)


@explain_unknown_arguments
def CsvDataset(  # noqa: N802 - the field's name
    filenames: Any,
    columns: Iterable[str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    header: bool = True,
    delimiter: str = ",",
    quote: str = '"',
    num_parallel_reads: int | None = None,
    newlines_in_values: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    compression_type: Compression | None = None,
) -> Dataset[dict[str, Any]]:
    """Return a dataset of the rows of CSV files, as dicts by column name.

    Dtypes that are not given are inferred from the first MiB of the first file with rows: int64,
    float64, bool or str. They are the same for all files; a value that does not fit raises
    `InvalidArgumentError`. Empty values are NaN in columns of floats, "" in columns of str, and
    errors in others. If `filenames` is a Dataset, dtypes are inferred for each file.

    Large uncompressed files are read in parts of about 8 MiB, which may be shuffled and
    distributed. Requires pyarrow.

    >>> with open("people.csv", "w") as file:
    ...     print("name,age", file=file)
    ...     print("Ada,36", file=file)
    >>> list(hr.CsvDataset("people.csv", dtypes={"age": "float32"}))
    [{'name': 'Ada', 'age': np.float32(36.0)}]

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs.
        columns: Names of the columns of the elements, in this order; None for all. Without headers,
            names of all columns of the files; None names them `f0`, `f1` and so on.
        dtypes: Dtypes by column name: of bool, int, float or datetime64, or str or bytes.
        header: Whether the first line of each file contains the names of its columns. The files
            may have different orders of columns.
        delimiter: Character between values.
        quote: Character around values that contain delimiters; "" if values are never quoted.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        newlines_in_values: Whether quoted values may contain line breaks. If so, files are not
            divided into parts.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
        compression_type: "GZIP", "ZLIB", "" or None.
    """
    options = StorageOptions(storage_options)
    compression = check_compression(compression_type)
    syntax = CsvSyntax(delimiter, quote, header, newlines_in_values)
    chosen = None if columns is None else _check_columns(columns)
    if dtypes is not None:
        check_instance("dtypes", dtypes, Mapping, fix="map names of columns to dtypes")
    given = {name: find_dtype(name, dtype) for name, dtype in (dtypes or {}).items()}

    find = partial(
        find_columns,
        columns=chosen,
        dtypes=given,
        syntax=syntax,
        options=options,
        compression=compression,
    )

    def make_known(
        names: Any,
        columns: tuple[str, ...],
        dtypes: tuple[Any, ...],
        part_counts: tuple[int, ...] = (),
    ) -> Source:
        return CsvSource(
            names,
            compression,
            part_counts,
            storage_options=options,
            columns=columns,
            dtypes=dtypes,
            syntax=syntax,
        )

    def make(names: Any) -> Source:
        return make_known(names, *find(as_names("filenames", names)))

    if isinstance(filenames, Dataset):
        return _record_dataset(filenames, make, num_parallel_reads, options)
    names = expand_names("filenames", filenames, options)
    found = find(names)
    if num_parallel_reads is None:
        is_divided = not (newlines_in_values or compression)
        parts = count_parts(names, options) if is_divided else ()
        return Dataset.from_source(make_known(names, *found, parts))
    return _record_dataset(
        names, lambda each: make_known(each, *found), num_parallel_reads, options
    )


@explain_unknown_arguments
def FixedLengthRecordDataset(  # noqa: N802 - the field's name
    filenames: Any,
    record_bytes: int,
    header_bytes: int = 0,
    footer_bytes: int = 0,
    num_parallel_reads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset[bytes]:
    """Return a dataset of the records of files of records of one length, as `bytes`.

    Records of local files can be read in any order, so that shuffling them is exact and cheap.

    >>> with open("data.bin", "wb") as file:
    ...     _ = file.write(b"HEADabcdef")
    >>> list(hr.FixedLengthRecordDataset("data.bin", record_bytes=2, header_bytes=4))
    [b'ab', b'cd', b'ef']

    Args:
        filenames: A path, fsspec URL or pattern (str, bytes or os.PathLike), a list of them, or a
            Dataset of paths or URLs.
        record_bytes: Size of a record in bytes.
        header_bytes: Number of bytes before the first record of each file.
        footer_bytes: Number of bytes after the last record of each file.
        num_parallel_reads: Number of files to read at once, in turn; None reads them in order.
        storage_options: Options of the file systems of URLs, such as `endpoint_url` or credentials
            (see *Object stores* in the guide to file formats); None uses the environment's.
    """
    options = StorageOptions(storage_options)
    check_int("record_bytes", record_bytes, minimum=1)
    check_int("header_bytes", header_bytes, minimum=0)
    check_int("footer_bytes", footer_bytes, minimum=0)
    return _record_dataset(
        filenames,
        lambda names: make_fixed_length_source(
            as_names("filenames", names), record_bytes, header_bytes, footer_bytes, options
        ),
        num_parallel_reads,
        options,
    )


def _check_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Return names of columns as a tuple.

    Raises:
        TypeError: If they are not strings.
        ValueError: If there are none, or one occurs twice.
    """
    if isinstance(columns, str):
        raise TypeError(f"`columns` must be a list of names, but is the str {columns!r}")
    names = tuple(columns)
    for name in names:
        check_string("columns", name)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`columns` must be different names, at least one, got {list(names)}")
    return names
