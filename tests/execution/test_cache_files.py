"""The cache in a file: complete or not there, and refused when it is something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DataLossError

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
