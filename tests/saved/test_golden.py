"""Tests with a stored directory in version 1 of the format, which must stay readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import headrace as hr
from headrace.data.saving import save_dataset
from tests.saved.strategies import bits

FOLDER = Path(__file__).parent / "format_1"
"""What `write` made in version 0.1. Never changed: only added to."""


class Pair(NamedTuple):
    words: Any
    none: None


def row(n: int) -> Any:
    return {
        "image": np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(n),
        "flag": np.bool_(n % 2),
        "half": np.float16(n / 2),
        "big": np.full(2, n, ">i4"),
        "z": np.complex64(n - 1j),
        "at": np.datetime64(n, "D"),
        "when": np.array([n, "NaT"], "M8[us]"),
        "record": np.array([(n, 0.5)], [("a", "<i2"), ("b", "<f8")]),
        "nan": np.array([0x7FF8000000000ABC + n], np.uint64).view(np.float64),
        "pair": Pair((b"\0b" * n, f"é{n}"), None),
        3: np.arange(n, dtype=np.int16),
        "grid": np.ones((n, 2), np.float32),
        "names": np.array([f"n{i}" for i in range(n)], object),
    }


def fixed(n: int) -> Any:
    return np.arange(n, n + 3, dtype=np.int32), f"row {n}"


def write() -> None:
    rows = [row(n) for n in range(5)]
    save_dataset(hr.Dataset.from_generator(lambda: iter(rows)).plan, 0, FOLDER / "files", 1000)
    rows = [fixed(n) for n in range(40)]
    save_dataset(hr.Dataset.from_generator(lambda: iter(rows)).plan, 0, FOLDER / "rows", 200)


@pytest.mark.parametrize(("name", "make", "count"), [("files", row, 5), ("rows", fixed, 40)])
@pytest.mark.parametrize("wait", [False, True])
def test_directory_of_version_1_is_read(name: str, make: Any, count: int, wait: bool) -> None:
    loaded = hr.Dataset.load(FOLDER / name, wait=wait)

    assert [bits(element) for element in loaded] == [bits(make(n)) for n in range(count)]


def test_rows_of_version_1_can_be_gathered() -> None:
    loaded = hr.Dataset.load(FOLDER / "rows").shuffle(40, seed=1).batch(40)
    ((numbers, names),) = loaded

    assert sorted(names.tolist()) == sorted(f"row {n}" for n in range(40))
    assert [f"row {n}" for n in numbers[:, 0]] == names.tolist()


if __name__ == "__main__":
    write()
