"""The page on the catalogue names tests that exist, and leaves no row of its sections out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "design" / "0015-catalogue-rows.md").read_text()
LISTED = PAGE.partition("## Rows and their tests")[2]
#: How many rows the catalogue has of each section that is listed in full.
ROWS = {
    "DS": 28, "FT": 16, "CR": 6, "CF": 3, "CT": 19, "CX": 2, "WT": 10, "MP": 2, "SL": 17, "OP": 66,
    "LW": 20, "ME": 7,
}  # fmt: skip
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_that_the_page_names_exists(file: str, test: str) -> None:
    name = file.removeprefix("tests/")
    # Above the tables of differences, names of files are relative to the tests of the service.
    found = [path for path in (TESTS / name, TESTS / "service" / name) if path.is_file()]
    assert found, file
    assert f"def {test}(" in found[0].read_text() or not test


@pytest.mark.parametrize("section", ROWS)
def test_each_row_of_a_section_stands_there_once(section: str) -> None:
    found: list[int] = []
    for line in LISTED.splitlines():
        rows = line.split("|")[1] if line.startswith("| ") else ""
        for first, last in re.findall(rf"\b{section}(\d+)(?: to {section}(\d+))?", rows):
            found += range(int(first), int(last or first) + 1)
    assert sorted(found) == list(range(1, ROWS[section] + 1))
