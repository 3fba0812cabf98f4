"""Datasets of files: names in any form, patterns, open files refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import NotFoundError

Dataset = hr.Dataset


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"s{index}.records") for index in range(3)]
    for index, name in enumerate(names):
        with hr.io.TFRecordWriter(name) as writer:
            writer.write(b"%d" % index)
    return names


EXPECTED = [b"0", b"1", b"2"]


@pytest.mark.parametrize("as_written", [str, str.encode, Path, np.str_, lambda n: np.array(n)])
def test_files_are_named_in_any_form(files: list[str], as_written: Any) -> None:
    assert list(hr.TFRecordDataset([as_written(name) for name in files])) == EXPECTED
    assert list(hr.TFRecordDataset(as_written(files[0]))) == EXPECTED[:1]
    assert sorted(hr.TFRecordDataset([as_written(n) for n in files], None, 2)) == EXPECTED


@pytest.mark.parametrize("as_element", [str, str.encode])
def test_files_are_named_by_elements_of_text_or_bytes(files: list[str], as_element: Any) -> None:
    names = Dataset.from_tensor_slices([as_element(name) for name in files])

    assert sorted(names.interleave(hr.TFRecordDataset)) == EXPECTED
    assert list(names.flat_map(hr.TextLineDataset))
    assert list(hr.TFRecordDataset(names)) == EXPECTED


def test_an_open_file_is_no_name(files: list[str]) -> None:
    with open(files[0]) as file, pytest.raises(TypeError, match=r"an open file .*pass its name"):
        hr.TextLineDataset(file)


def test_files_are_listed_by_braces(files: list[str], tmp_path: Path) -> None:
    listed = Dataset.list_files(str(tmp_path / "s{0..1}.*"), shuffle=False)

    assert list(listed) == files[:2]
    with pytest.raises(NotFoundError, match=r"No such file: .*s3\.records"):
        Dataset.list_files(str(tmp_path / "s{2..3}.records"))
