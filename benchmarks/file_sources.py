"""Throughput of reading Parquet, JSON Lines and tar files, in the page cache.

Parquet: 400,000 rows of two numbers and a string in four row groups, in batches of 65,536.
JSON Lines: 100,000 objects of five values. Tar: 2,000 samples of two files, 8 KB each.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "write_inputs"]

ROWS, LINES, SAMPLES, SAMPLE_BYTES = 400_000, 100_000, 2_000, 8_000
_BATCH = 256


def write_inputs(directory: Path) -> None:
    """Write the three files."""
    import pyarrow
    import pyarrow.parquet

    numbers = np.arange(ROWS)
    table = pyarrow.table(
        {"id": numbers, "value": numbers / 7, "name": [f"name {n % 1000}" for n in range(ROWS)]}
    )
    pyarrow.parquet.write_table(table, directory / "rows.parquet", row_group_size=ROWS // 4)
    with open(directory / "lines.jsonl", "w", encoding="utf-8") as file:
        for n in range(LINES):
            line = {"id": n, "x": n / 7, "text": f"text of line {n}", "ok": n % 2 == 0, "v": [n, 1]}
            file.write(json.dumps(line) + "\n")
    with tarfile.open(directory / "samples.tar", "w") as archive:
        for n in range(SAMPLES):
            for ending, data in (("bin", bytes([n % 256]) * SAMPLE_BYTES), ("cls", b"%d" % n)):
                member = tarfile.TarInfo(f"{n:06}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


# --- Parquet --------------------------------------------------------------------------------------


def _check_parquet(batches: Elements) -> None:
    ids = np.concatenate([batch["id"] for batch in batches])
    expect(np.array_equal(ids, np.arange(ROWS)), "wrong rows")


def _count_rows(batch: dict[str, Any]) -> int:
    return len(batch["id"])


def _headrace_parquet(batch_size: int) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = hr.ParquetDataset(inputs / "rows.parquet", batch_size=batch_size)
        return lambda: iter(dataset)

    return build


def _pyarrow_parquet(batch_size: int) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import pyarrow.parquet

        def read() -> Iterator[Any]:
            file = pyarrow.parquet.ParquetFile(inputs / "rows.parquet")
            for batch in file.iter_batches(batch_size):
                yield {
                    name: column.to_numpy(zero_copy_only=False)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }

        return read

    return build


def _parquet(batch_size: int) -> Workload:
    return Workload(
        name=f"Parquet, batches of {batch_size:,} rows",
        unit="rows",
        check=_check_parquet,
        consume=_count_rows,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace_parquet(batch_size),
                needs=("headrace", "pyarrow"),
                role="headrace",
            ),
            Contender(name="pyarrow", build=_pyarrow_parquet(batch_size), needs=("pyarrow",)),
        ),
        targets=(Target(of=("pyarrow",), at_least=0.9),),
    )


# --- JSON Lines -----------------------------------------------------------------------------------


def _check_lines(rows: Elements) -> None:
    ids = [int(row["id"]) for row in rows]
    expect(ids == list(range(LINES)), "wrong lines")


def _check_line_batches(batches: Elements) -> None:
    ids = np.concatenate([batch["id"] for batch in batches])
    expect(np.array_equal(ids, np.arange(LINES)), "wrong lines")


def _headrace_lines(batch: int | None) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = hr.JsonLinesDataset(inputs / "lines.jsonl")
        if batch is not None:
            dataset = dataset.batch(batch)
        return lambda: iter(dataset)

    return build


def _orjson_lines(inputs: Path, _: ExitStack) -> Pipeline:
    import orjson

    def read() -> Iterator[Any]:
        with open(inputs / "lines.jsonl", "rb") as file:
            yield from map(orjson.loads, file)

    return read


def _lines(name: str, batch: int | None, consume: Callable[[Any], int], check: Any) -> Workload:
    return Workload(
        name=f"JSON Lines, {name}",
        unit="lines",
        check=check,
        consume=consume,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace_lines(batch),
                needs=("headrace", "orjson"),
                role="headrace",
            ),
            Contender(
                name="orjson over readline, dicts",
                build=_orjson_lines,
                needs=("orjson",),
                role="limit",
                consume=lambda row: 1,
                check=_check_lines,
            ),
        ),
        targets=(Target(of=("orjson over readline, dicts",), at_least=0.5),),
    )


# --- tar ------------------------------------------------------------------------------------------


def _check_samples(key: str, samples: Elements) -> None:
    found = list(samples)
    expect([int(sample[key]) for sample in found] == list(range(SAMPLES)), "wrong samples")


def _headrace_tar(inputs: Path, _: ExitStack) -> Pipeline:
    import headrace as hr

    dataset = hr.WebDataset(inputs / "samples.tar", index_dir=inputs / "index")
    return lambda: iter(dataset)


def _webdataset_tar(inputs: Path, _: ExitStack) -> Pipeline:
    import webdataset

    dataset = webdataset.WebDataset(str(inputs / "samples.tar"), shardshuffle=False)
    return lambda: iter(dataset)


_TAR = Workload(
    name="tar samples of 8 KB",
    unit="samples",
    check=partial(_check_samples, "cls"),
    contenders=(
        Contender(name="headrace", build=_headrace_tar, needs=("headrace",), role="headrace"),
        Contender(name="webdataset", build=_webdataset_tar, needs=("webdataset",)),
    ),
    targets=(Target(of=("webdataset",), at_least=2.0),),
)

WORKLOADS = (
    _parquet(65_536),
    _lines(f"batch({_BATCH})", _BATCH, lambda batch: len(batch["id"]), _check_line_batches),
    _TAR,
)
