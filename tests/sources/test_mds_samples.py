"""MDS shards: samples by index, decoding of columns, damage."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError
from headrace.sources.mds_samples import read_index
from headrace.testing.conformance import check_source

COMPRESS = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress}


def array_bytes(array: np.ndarray[Any, Any], *, dtype: bool, shape: bool) -> bytes:
    """Encode an array, with its dtype and shape if they are not in the index."""
    codes = {"uint8": 8, "int32": 33, "float32": 34, "int64": 65}
    parts = [bytes([codes[array.dtype.name]])] if dtype else []
    if shape:
        parts += [bytes([array.ndim << 2 | 1]), np.array(array.shape, "<u2").tobytes()]
    return b"".join([*parts, array.tobytes()])


def write_directory(
    folder: Path,
    columns: list[tuple[str, str, int | None]],
    shards: list[list[list[bytes]]],
    compression: str = "",
) -> Path:
    """Write shards of encoded samples, as MosaicML Streaming writes them, and their index."""
    folder.mkdir(exist_ok=True)
    names, encodings, sizes = zip(*columns, strict=True)
    described = {
        "column_encodings": encodings, "column_names": names, "column_sizes": sizes,
        "compression": f"{compression}:9" if compression else None, "format": "mds", "hashes": [],
        "size_limit": 1 << 26, "version": 2,
    }  # fmt: skip
    entries = []
    for number, samples in enumerate(shards):
        header = json.dumps(described).encode()
        encoded = []
        for values in samples:
            variable = [len(v) for v, size in zip(values, sizes, strict=True) if size is None]
            encoded.append(np.array(variable, "<u4").tobytes() + b"".join(values))
        starts = 4 * (len(samples) + 2) + len(header)
        ends = np.cumsum([starts, *map(len, encoded)])
        numbers = np.array([len(samples), *ends], "<u4").tobytes()
        data = b"".join([numbers, header, *encoded])
        basename = f"shard.{number:05}.mds"
        entry = {**described, "samples": len(samples)}
        entry["raw_data"] = {"basename": basename, "bytes": len(data), "hashes": {}}
        entry["zip_data"] = None
        if compression:
            data = COMPRESS[compression](data)
            basename += f".{compression}"
            entry["zip_data"] = {"basename": basename, "bytes": len(data), "hashes": {}}
        (folder / basename).write_bytes(data)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


COLUMNS = [("number", "int", 8), ("text", "str", None), ("tokens", "ndarray:int32", None)]


def sample(number: int) -> list[bytes]:
    tokens = np.arange(number % 4 + 1, dtype=np.int32)
    return [
        np.int64(number).tobytes(),
        f"text {number}".encode(),
        array_bytes(tokens, dtype=False, shape=True),
    ]


@pytest.fixture(params=["", "gz", "bz2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    counts = [range(7), range(0), range(7, 20)]
    shards = [[sample(number) for number in count] for count in counts]
    return write_directory(tmp_path / "data", COLUMNS, shards, request.param)


def test_source_conforms(folder: Path) -> None:
    source, columns = read_index(str(folder))
    assert [column.name for column in columns] == ["number", "text", "tokens"]
    expected = [
        {"index": np.int64(n), "sample": row}
        for n, row in enumerate(source.gather(np.arange(20))["sample"])
    ]
    check_source(source, expected)
    assert len({row["sample"] for row in expected}) == 20
    assert pickle.loads(pickle.dumps(source)) == source


def test_samples_have_their_columns_in_order(folder: Path) -> None:
    dataset = hr.MDSDataset(folder)
    assert len(dataset) == 20
    for number, row in enumerate(dataset):
        assert list(row) == ["number", "text", "tokens"]
        assert row["number"].dtype == np.int64
        assert row["number"] == number
        assert row["text"] == f"text {number}"
        assert row["tokens"].dtype == np.int32
        assert row["tokens"].tolist() == list(range(number % 4 + 1))


def test_only_selected_columns_are_decoded(folder: Path) -> None:
    row = next(iter(hr.MDSDataset(folder, columns=["tokens", "text"], encoded=["text"])))
    assert row["text"] == b"text 0"
    assert sorted(row) == ["text", "tokens"]
    with pytest.raises(InvalidArgumentError, match=r"no column 'label'; its columns are \['numb"):
        hr.MDSDataset(folder, columns=["label"])


def test_shuffled_iterators_resume_at_each_sample(folder: Path) -> None:
    dataset = hr.MDSDataset(folder, columns=["number"]).shuffle(20, seed=3)
    expected = [int(row["number"]) for row in dataset]
    assert sorted(expected) == list(range(20)) != expected
    dataset = hr.MDSDataset(folder, columns=["number"]).shuffle(20, seed=3)
    iterator = iter(dataset)
    for position in range(20):
        resumed = iter(dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        assert [int(row["number"]) for row in resumed] == expected[position:]
        next(iterator)


@pytest.mark.parametrize("ordered", [False, True])
def test_workers_read_each_sample_once(folder: Path, ordered: bool) -> None:
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        distribute = hr.service.distribute(
            hr.service.ShardingPolicy.DYNAMIC, cluster.target, ordered=ordered
        )
        numbers = [int(row["number"]) for row in hr.MDSDataset(folder).apply(distribute)]
    assert (numbers if ordered else sorted(numbers)) == list(range(20))


def test_a_remote_directory_is_read(folder: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.put(f"{folder}/*", "memory://mds-samples/")
    try:
        names = [row["text"] for row in hr.MDSDataset("memory://mds-samples/")]
    finally:
        remote.rm("memory://mds-samples", recursive=True)
    assert names == [f"text {number}" for number in range(20)]


def test_each_encoding_is_decoded(tmp_path: Path) -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    raw = np.array([4, 2, 3], "<u4").tobytes() + b"RGB" + image.tobytes()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    values: dict[str, tuple[str, int | None, bytes, Any]] = {
        "bytes": ("bytes", None, b"\0a", b"\0a"),
        "half": ("float16", 2, np.float16(1.5).tobytes(), np.float16(1.5)),
        "small": ("uint8", 1, b"\xff", np.uint8(255)),
        "digits": ("str_int", None, b"-12", -12),
        "real": ("str_float", None, b"0.1", 0.1),
        "decimal": ("str_decimal", None, b"1.10", "1.10"),
        "json": ("json", None, b'{"a": [1, 2]}', {"a": [1, 2]}),
        "fixed": ("ndarray:float32:2,3", 24, array.tobytes(), array),
        "any": ("ndarray", None, array_bytes(array, dtype=True, shape=True), array),
        "png": ("png", None, hr.io.encode_png(image), image),
        "pil": ("pil", None, raw, image),
    }
    columns = [(name, encoding, size) for name, (encoding, size, _, _) in values.items()]
    shard = [[data for _, _, data, _ in values.values()]]
    (row,) = hr.MDSDataset(write_directory(tmp_path / "data", columns, [shard]))
    for name, (_, _, _, expected) in values.items():
        np.testing.assert_equal(row[name], expected, err_msg=name)
    assert row["half"].dtype == np.float16
    assert row["fixed"].flags.writeable


def test_pickled_and_unknown_columns_are_refused_unless_left_out(tmp_path: Path) -> None:
    columns = [("n", "int", 8), ("p", "pkl", None), ("u", "zarr:3", None)]
    shard = [[np.int64(5).tobytes(), pickle.dumps(1), b"?"]]
    folder = write_directory(tmp_path / "data", columns, [shard])
    with pytest.raises(InvalidArgumentError, match=r"column 'p' contains pickles"):
        hr.MDSDataset(folder, columns=["n", "p"])
    with pytest.raises(InvalidArgumentError, match=r"unknown encoding 'zarr:3'"):
        hr.MDSDataset(folder, encoded=["p"])
    (row,) = hr.MDSDataset(folder, encoded=["p", "u"])
    assert (row["n"], pickle.loads(row["p"]), row["u"]) == (5, 1, b"?")
    assert [dict(row) for row in hr.MDSDataset(folder, columns=["n"])] == [{"n": 5}]


# --- damage -----------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "data", COLUMNS, [[sample(n) for n in range(5)]])


def test_missing_files_are_named(plain: Path) -> None:
    (plain / "shard.00000.mds").unlink()
    with pytest.raises(NotFoundError, match=r"shard\.00000\.mds"):
        list(hr.MDSDataset(plain))
    with pytest.raises(NotFoundError, match=r"none/index\.json"):
        hr.MDSDataset(plain / "none")


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"shards": [{}]}', b'{"shards": 3}'])
def test_a_damaged_index_is_an_error(plain: Path, text: bytes) -> None:
    (plain / "index.json").write_bytes(text)
    with pytest.raises(DataLossError, match=r"index\.json' is no valid index of MDS shards"):
        hr.MDSDataset(plain)


def test_other_formats_and_compressions_are_refused(plain: Path) -> None:
    index = json.loads((plain / "index.json").read_text())
    index["shards"][0]["compression"] = "br:11"
    (plain / "index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgumentError, match=r"compression 'br'"):
        hr.MDSDataset(plain)
    index["shards"][0]["format"] = "jsonl"
    (plain / "index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgumentError, match=r"has \['jsonl'\] and \[2\]"):
        hr.MDSDataset(plain)


@pytest.mark.parametrize("size", [0, 3, 30, -1])
def test_a_truncated_shard_is_an_error(plain: Path, size: int) -> None:
    path = plain / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataLossError, match=r"shard\.00000\.mds' has \d+ bytes, but \d+ accord"):
        list(hr.MDSDataset(plain))


def test_a_truncated_compressed_shard_is_an_error(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "data", COLUMNS, [[sample(0)]], "gz")
    path = folder / "shard.00000.mds.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataLossError, match=r"shard\.00000\.mds\.gz' cannot be decompressed"):
        list(hr.MDSDataset(folder))


def test_a_damaged_compressed_shard_is_an_error(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "data", COLUMNS, [[sample(n) for n in range(50)]], "gz")
    path = folder / "shard.00000.mds.gz"
    data = path.read_bytes()
    path.write_bytes(data[:20] + b"\xff" * 100 + data[120:])
    with pytest.raises(DataLossError, match=r"shard\.00000\.mds\.gz' cannot be decompressed"):
        list(hr.MDSDataset(folder))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_number_of_open_shards_is_limited(tmp_path: Path) -> None:
    shards = [[sample(n)] for n in range(200)]
    dataset = hr.MDSDataset(write_directory(tmp_path / "data", COLUMNS, shards))
    num_open = len(os.listdir("/proc/self/fd"))
    assert [int(row["number"]) for row in dataset] == list(range(200))
    assert len(os.listdir("/proc/self/fd")) < num_open + 100
    assert sorted(int(row["number"]) for row in dataset.shuffle(200)) == list(range(200))


def test_samples_after_a_damaged_one_are_read(plain: Path) -> None:
    path = plain / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[4 + 4 * 2 : 8 + 4 * 2], "little")
    data[start : start + 4] = (10**6).to_bytes(4, "little")  # the size of `text` in sample 2
    path.write_bytes(data)
    iterator = iter(hr.MDSDataset(plain))
    assert [int(next(iterator)["number"]) for _ in range(2)] == [0, 1]
    with pytest.raises(DataLossError, match=r"mds', sample 2: it has \d+ bytes, but its columns"):
        next(iterator)
    assert [int(row["number"]) for row in iterator] == [3, 4]


def test_damaged_values_and_offsets_are_errors(plain: Path) -> None:
    path = plain / "shard.00000.mds"
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"text 3", b"text \xff"))
    iterator = iter(hr.MDSDataset(plain).skip(3))
    with pytest.raises(DataLossError, match=r"sample 3: column 'text' cannot be decoded"):
        next(iterator)
    path.write_bytes(intact[:16] + b"\xff" * 4 + intact[20:])
    with pytest.raises(DataLossError, match=r"sample 3 is at bytes 4,294,967,295 to"):
        list(hr.MDSDataset(plain).skip(3))
