"""Rows of a table in one file that other programs read: safetensors, or Parquet."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from headrace.distribute.casting import is_floating
from headrace.errors import InvalidArgumentError
from headrace.saved.arrow import pyarrow

__all__ = ["load_table", "save_table"]

Part = tuple[NDArray[np.int64], NDArray[Any]]

T = TypeVar("T")

_ROWS = 65_536


class _Table(Protocol):
    name: str
    dim: int
    dtype: np.dtype[Any]

    def export(self, limit: int = _ROWS) -> Iterator[Part]: ...

    def assign(self, ids: Any, values: Any) -> None: ...


def save_table(table: _Table, path: Any) -> int:
    """Write all ids and rows; the file is there when it is whole. Return how many rows it has."""
    target = Path(path)
    write = _of_ending(target, _WRITERS)
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        count = write(beside, table)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return count


def load_table(table: _Table, path: Any) -> int:
    """Write the rows of a file to a table, part by part; return how many there were."""
    source = Path(path)
    count = 0
    for ids, rows in _of_ending(source, _READERS)(source):
        if rows.shape != (len(ids), table.dim) or not is_floating(rows.dtype):
            raise InvalidArgumentError(
                f"{source} has rows of shape {rows.shape[1:]} and dtype {rows.dtype}, and "
                f"EmbeddingTable {table.name!r} has rows of {table.dim} floating numbers"
            )
        table.assign(ids, rows)
        count += len(ids)
    return count


def _of_ending(path: Path, by_ending: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    found = by_ending.get(path.suffix)
    if found is None:
        raise ValueError(
            f"a table is saved as one of {', '.join(by_ending)}, but got {os.fspath(path)!r}"
        )
    return found


def _write_safetensors(path: Path, table: _Table) -> int:
    ids: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    rows: list[NDArray[Any]] = [np.zeros((0, table.dim), table.dtype)]
    for part, values in table.export():
        ids.append(part)
        rows.append(values)
    columns = {"ids": np.concatenate(ids), "rows": np.concatenate(rows)}
    save_file(columns, path, {"table": table.name})
    return len(columns["ids"])


def _read_safetensors(path: Path) -> Iterator[Part]:
    with safe_open(path, "numpy") as file:
        if not {"ids", "rows"} <= set(file.keys()):
            raise InvalidArgumentError(
                f"{path} has tensors {sorted(file.keys())}, and a saved table `ids` and `rows`"
            )
        ids, rows = file.get_slice("ids"), file.get_slice("rows")
        count = ids.get_shape()[0]
        for start in range(0, count, _ROWS):
            part = slice(start, min(start + _ROWS, count))
            yield ids[part], rows[part]


def _write_parquet(path: Path, table: _Table) -> int:
    arrow, parquet = _parquet()
    kind = table.dtype if table.dtype.isbuiltin == 1 else np.dtype(np.float32)
    row = arrow.list_(arrow.from_numpy_dtype(kind), table.dim)
    schema = arrow.schema([("id", arrow.int64()), ("row", row)])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for ids, rows in table.export():
            flat = arrow.array(rows.astype(kind, copy=False).reshape(-1))
            columns = [arrow.array(ids), arrow.FixedSizeListArray.from_arrays(flat, table.dim)]
            writer.write_table(arrow.table(columns, schema=schema))
            count += len(ids)
    return count


def _read_parquet(path: Path) -> Iterator[Part]:
    _, parquet = _parquet()
    with parquet.ParquetFile(path) as file:
        if not {"id", "row"} <= set(file.schema_arrow.names):
            raise InvalidArgumentError(
                f"{path} has columns {file.schema_arrow.names}, and a saved table `id` and `row`"
            )
        for batch in file.iter_batches(_ROWS, columns=["id", "row"]):
            ids = batch.column("id").to_numpy(zero_copy_only=False)
            flat = batch.column("row").flatten().to_numpy(zero_copy_only=False)
            yield ids, flat.reshape(len(ids), -1)


def _parquet() -> Sequence[Any]:
    return pyarrow(), importlib.import_module("pyarrow.parquet")


_WRITERS = {".safetensors": _write_safetensors, ".parquet": _write_parquet}
_READERS = {".safetensors": _read_safetensors, ".parquet": _read_parquet}
