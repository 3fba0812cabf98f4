"""The cache in a file: complete or not there, and refused when it is something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.cache_store import FileFilling, FileStore

Dataset = hr.Dataset


def test_a_second_process_would_read_the_file_and_not_the_source(tmp_path: Path):
    calls = []

    def note(x):
        calls.append(int(x))
        return {"x": np.full(3, x), "name": b"n\0"}

    def make():
        return Dataset.range(5).map(note).cache(str(tmp_path / "cache"))

    first, second = list(make()), list(make())
    assert calls == [0, 1, 2, 3, 4]
    assert [e["x"].tolist() for e in first] == [e["x"].tolist() for e in second]
    assert second[0]["name"] == b"n\0"


def test_an_incomplete_pass_leaves_no_file(tmp_path: Path):
    with iter(Dataset.range(1000).map(lambda x: str(x)).cache(tmp_path / "cache")) as iterator:
        next(iterator)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_cache_or_was_cut_is_refused(tmp_path: Path):
    path = tmp_path / "cache"
    path.write_bytes(b"something else entirely")
    with pytest.raises(DataLossError, match="not a cache file"):
        list(Dataset.range(3).cache(path))
    path.unlink()
    list(Dataset.range(3).cache(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataLossError, match="ends inside a frame"):
        list(Dataset.range(3).cache(path))


def store_of(path: Path, identity: str = "this", seed: int = 7) -> None:
    store = FileFilling(str(path), seed, identity)
    store.append(Chunk.of_rows([np.int64(value) for value in range(5)]))
    store.complete()
    store.close()


def read_whole(path: Path) -> None:
    store = FileStore.find(str(path), "this")
    assert store is not None
    try:
        assert store.read(0, 10) is not None
    finally:
        store.close()


def test_a_cache_file_is_for_the_plan_that_wrote_it(tmp_path: Path):
    path = tmp_path / "cache"
    store_of(path)

    found = FileStore.find(str(path), "this")
    assert found is not None
    assert found.seed == 7
    chunk = found.read(3, 10)
    found.close()
    assert chunk is not None
    assert chunk.rows() == [3, 4]
    with pytest.raises(
        FailedPreconditionError, match=r"cache.* another pipeline .this, .*remove it"
    ):
        FileStore.find(str(path), "that")
    assert FileStore.find(str(tmp_path / "absent"), "this") is None


def test_a_cache_file_of_another_version_is_refused(tmp_path: Path):
    path = tmp_path / "cache"
    path.write_bytes(b"HRCACHE1" + bytes(100))

    with pytest.raises(FailedPreconditionError, match="another version of Headrace; remove it"):
        FileStore.find(str(path), "this")


@pytest.mark.parametrize("size", [0, 3, 10, 17, 19, 21, 40])
def test_a_cache_file_that_ends_early_is_damaged(tmp_path: Path, size: int):
    path = tmp_path / "cache"
    store_of(path)
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(DataLossError, match="remove it"):
        FileStore.find(str(path), "this")


def test_numbers_in_a_cache_file_that_cannot_be_are_damage(tmp_path: Path):
    path = tmp_path / "cache"
    store_of(path)
    whole = path.read_bytes()
    head = 18 + len("this")
    for at in range(head, head + 24):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with pytest.raises(DataLossError):
            read_whole(path)


@pytest.mark.parametrize("name", ["memory://cache", "s3://bucket/cache", "file:///tmp/cache"])
def test_a_cache_in_a_url_is_refused_when_it_is_written(name: str):
    with pytest.raises(ValueError, match="a path on a local disk, but is the URL"):
        Dataset.range(3).cache(name)


def test_a_cache_that_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    (tmp_path / "file").write_text("no folder")
    name = str(tmp_path / "file" / "cache")
    with pytest.raises(FailedPreconditionError, match="may write to") as caught:
        list(Dataset.range(3).cache(name))
    assert f"the cache '{name}' cannot be written: " in str(caught.value)
