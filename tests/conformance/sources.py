"""One entry for each source; its name begins with that of the public function.

Functions of `Dataset` are named without the class, those of the package with all their name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import fsspec
import grain
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch.utils.data
from array_record.python import array_record_module

import headrace as hr
from tests.conformance.steps import SameAs, Setting
from tests.sources.tar_shards import numbered_files, write_tar
from tests.sources.test_mds_samples import COLUMNS, sample, write_directory

Dataset = hr.Dataset


@dataclass(frozen=True)
class SourceCase:
    """A source, and what is expected of it with a data service; see `steps.Step`.

    Attributes:
        read: Returns the dataset.
        write: Writes its files, once in a test.
    """

    read: Callable[[Setting], Dataset[Any]]
    write: Callable[[Setting], object] = lambda setting: None
    dynamic: SameAs = "elements"
    refused: Mapping[str, str] = field(default_factory=dict)


class Squares(hr.IndexedSource):
    size = 9  # type: ignore[assignment]

    def gather(self, indices: Any) -> Any:
        return {"root": indices.copy(), "square": indices**2}


class Items:
    """Random access to arrays."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full(3, index), "n": index}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (np.full(2, n) for n in range(7))


class Tensors(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index), index


def reusing() -> Any:
    """Yield one array again and again."""
    buffer = np.zeros(3)
    for number in range(8):
        buffer[:] = number
        yield {"x": buffer, "n": number}


def write_bytes(setting: Setting, name: str, *parts: bytes) -> None:
    """Write numbered files."""
    for number, data in enumerate(parts):
        (setting.folder / name.format(number)).write_bytes(data)


def write_memory(setting: Setting, name: str, *parts: bytes) -> None:
    files = fsspec.filesystem("memory")
    files.makedirs(f"/conformance/{setting.folder.name}", exist_ok=True)
    for number, data in enumerate(parts):
        files.pipe(in_memory(setting, name.format(number)), data)


def in_memory(setting: Setting, name: str) -> str:
    return f"memory://conformance/{setting.folder.name}/{name}"


def record_files(setting: Setting) -> list[bytes]:
    """Write two files of records; return their contents."""
    names = [setting.folder / f"{number}.tfrecord" for number in range(2)]
    for name, count in zip(names, (5, 3), strict=True):
        with hr.io.TFRecordWriter(str(name)) as writer:
            for record in range(count):
                writer.write(b"%s %d" % (name.name.encode(), record) * (record % 3))
    return [name.read_bytes() for name in names]


def table(numbers: range) -> pa.Table:
    lists = pa.array([[n] * (n % 4) for n in numbers], pa.list_(pa.int64()))
    return pa.table({"n": pa.array(numbers), "x": lists, "text": [f"row {n}" for n in numbers]})


def parquet_files(setting: Setting) -> list[bytes]:
    names = [setting.folder / f"{number}.parquet" for number in range(2)]
    for name, numbers in zip(names, (range(7), range(7, 11)), strict=True):
        pyarrow.parquet.write_table(table(numbers), name, row_group_size=3)
    return [name.read_bytes() for name in names]


def lance_files(setting: Setting) -> None:
    lance.write_dataset(table(range(6)), str(setting.folder / "x.lance"))
    lance.write_dataset(table(range(6, 11)), str(setting.folder / "x.lance"), mode="append")


def array_record_files(setting: Setting) -> None:
    for number, count in enumerate((5, 3)):
        name = str(setting.folder / f"{number}.array_record")
        writer = array_record_module.ArrayRecordWriter(name, "group_size:2")
        for record in range(count):
            writer.write(b"%d %d" % (number, record))
        writer.close()


def mds_files(setting: Setting) -> None:
    shards = [[sample(n) for n in numbers] for numbers in (range(5), range(5, 9))]
    write_directory(setting.folder / "mds", COLUMNS, shards)


def tar_files(setting: Setting) -> list[bytes]:
    names = [setting.folder / f"{number}.tar" for number in range(2)]
    for name, numbers in zip(names, (range(5), range(5, 8)), strict=True):
        write_tar(name, numbered_files(numbers, 20))
    return [name.read_bytes() for name in names]


def image_folder(setting: Setting) -> None:
    for number in range(7):
        folder = setting.folder / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = np.full((4, 5, 3), 20 * number, np.uint8)
        (folder / f"{number}.png").write_bytes(hr.io.encode_png(image))


def rows_of_hugging_face() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": list(range(9)), "text": [f"row {n}" for n in range(9)]})


def nested(n: Any) -> Any:
    """Return an element with arrays, strings and tuples."""
    return {"x": np.full(int(n) % 3, n), "pair": (n, f"text {n}")}


def loader_of(data: Any, **arguments: Any) -> Dataset[Any]:
    return Dataset.from_pipeline(torch.utils.data.DataLoader(data, **arguments))


LINES = b"".join(b"line %d\n" % n for n in range(6)), b"last\n\nno newline"
CSV = b"n,text\n" + b"".join(b'%d,"row, %d"\n' % (n, n) for n in range(7)), b"n,text\n7,end\n"
JSON = b"".join(b'{"n": %d, "x": [%d, 1]}\n' % (n, n) for n in range(7)), b'{"n": 7, "x": [0]}'
FIXED = b"head" + b"".join(b"%03d" % n for n in range(7)), b"head" + b"007008"

SOURCES: dict[str, SourceCase] = {
    "range": SourceCase(lambda s: Dataset.range(3, 30, 4)),
    "from_tensors": SourceCase(lambda s: Dataset.from_tensors((np.arange(3), "text"))),
    "from_tensor_slices": SourceCase(
        lambda s: Dataset.from_tensor_slices({"x": np.arange(20).reshape(10, 2), "b": [b"x"] * 10})
    ),
    "from_generator": SourceCase(lambda s: Dataset.from_generator(reusing)),
    "from_source": SourceCase(lambda s: Dataset.from_source(Squares())),
    "from_random_access": SourceCase(lambda s: Dataset.from_random_access(Items(), s.threads)),
    "list_files": SourceCase(
        lambda s: Dataset.list_files(f"{s.folder}/*.txt", shuffle=False),
        lambda s: write_bytes(s, "{}.txt", *[b""] * 6),
    ),
    "list_files, shuffled, memory": SourceCase(
        lambda s: Dataset.list_files(in_memory(s, "*.txt")),
        lambda s: write_memory(s, "{}.txt", *[b"x"] * 6),
    ),
    "random": SourceCase(lambda s: Dataset.random().take(9)),
    "counter": SourceCase(lambda s: Dataset.counter(5, 3).take(9)),
    "from_pipeline, Hugging Face table": SourceCase(
        lambda s: Dataset.from_pipeline(rows_of_hugging_face())
    ),
    "from_pipeline, Hugging Face stream": SourceCase(
        lambda s: Dataset.from_pipeline(rows_of_hugging_face().to_iterable_dataset(num_shards=2))
    ),
    "from_pipeline, torch DataLoader": SourceCase(lambda s: loader_of(Tensors(), batch_size=4)),
    "from_pipeline, torch DataLoader, shuffled": SourceCase(
        lambda s: loader_of(Tensors(), shuffle=True, batch_size=None)
    ),
    "from_pipeline, torch stream": SourceCase(lambda s: Dataset.from_pipeline(Stream())),
    "from_pipeline, torch Dataset": SourceCase(lambda s: Dataset.from_pipeline(Tensors())),
    "from_pipeline, Grain": SourceCase(
        lambda s: Dataset.from_pipeline(
            grain.MapDataset.range(9).filter(lambda n: bool(n % 3)).map(lambda n: np.full(2, n))
        )
    ),
    "load": SourceCase(
        lambda s: Dataset.load(s.folder / "saved"),
        lambda s: Dataset.range(9).map(nested).save(s.folder / "saved"),
    ),
    "load, memory": SourceCase(
        lambda s: Dataset.load(in_memory(s, "saved")),
        lambda s: Dataset.range(9).map(nested).save(in_memory(s, "saved")),
    ),
    "from_image_folder": SourceCase(
        lambda s: Dataset.from_image_folder(
            s.folder / "images", (4, 5), num_parallel_calls=s.threads
        ),
        image_folder,
    ),
    "TFRecordDataset": SourceCase(
        lambda s: hr.TFRecordDataset(f"{s.folder}/*.tfrecord", num_parallel_reads=None),
        record_files,
    ),
    "TFRecordDataset, memory": SourceCase(
        lambda s: hr.TFRecordDataset(in_memory(s, "*.tfrecord")),
        lambda s: write_memory(s, "{}.tfrecord", *record_files(s)),
    ),
    "TFRecordDataset, parallel reads": SourceCase(
        lambda s: hr.TFRecordDataset(f"{s.folder}/*.tfrecord", num_parallel_reads=2),
        record_files,
    ),
    "TextLineDataset": SourceCase(
        lambda s: hr.TextLineDataset(f"{s.folder}/*.txt"),
        lambda s: write_bytes(s, "{}.txt", *LINES),
    ),
    "TextLineDataset, memory": SourceCase(
        lambda s: hr.TextLineDataset(in_memory(s, "*.txt")),
        lambda s: write_memory(s, "{}.txt", *LINES),
    ),
    "FixedLengthRecordDataset": SourceCase(
        lambda s: hr.FixedLengthRecordDataset(f"{s.folder}/*.bin", 3, header_bytes=4),
        lambda s: write_bytes(s, "{}.bin", *FIXED),
    ),
    "CsvDataset": SourceCase(
        lambda s: hr.CsvDataset(f"{s.folder}/*.csv"),
        lambda s: write_bytes(s, "{}.csv", *CSV),
    ),
    "CsvDataset, memory": SourceCase(
        lambda s: hr.CsvDataset(in_memory(s, "*.csv")),
        lambda s: write_memory(s, "{}.csv", *CSV),
    ),
    "JsonLinesDataset": SourceCase(
        lambda s: hr.JsonLinesDataset(f"{s.folder}/*.jsonl"),
        lambda s: write_bytes(s, "{}.jsonl", *JSON),
    ),
    "ParquetDataset": SourceCase(
        lambda s: hr.ParquetDataset(f"{s.folder}/*.parquet"), parquet_files
    ),
    "ParquetDataset, batches, memory": SourceCase(
        lambda s: hr.ParquetDataset(in_memory(s, "*.parquet"), ["n", "text"], batch_size=2),
        lambda s: write_memory(s, "{}.parquet", *parquet_files(s)),
        "rows",
    ),
    "ArrayRecordDataset": SourceCase(
        lambda s: hr.ArrayRecordDataset(f"{s.folder}/*.array_record"), array_record_files
    ),
    "WebDataset": SourceCase(lambda s: hr.WebDataset(f"{s.folder}/*.tar"), tar_files),
    "WebDataset, memory": SourceCase(
        lambda s: hr.WebDataset(in_memory(s, "*.tar")),
        lambda s: write_memory(s, "{}.tar", *tar_files(s)),
    ),
    "MDSDataset": SourceCase(lambda s: hr.MDSDataset(s.folder / "mds"), mds_files),
    "LanceDataset": SourceCase(lambda s: hr.LanceDataset(s.folder / "x.lance"), lance_files),
}
