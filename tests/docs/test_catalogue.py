"""The pages on the catalogues name tests that exist, and leave no row of their sections out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DESIGN = TESTS.parent / "docs" / "design"
PAGE = (DESIGN / "0015-catalogue-rows.md").read_text()
LISTED = PAGE.partition("## Rows and their tests")[2]
#: How many rows the catalogue of the data service has of each section that is listed in full.
ROWS = {
    "DS": 28, "FT": 16, "CR": 6, "CF": 3, "CT": 19, "CX": 2, "WT": 10, "MP": 2, "SL": 17, "OP": 66,
    "LW": 20, "ME": 7, "AS": 32, "SV": 18, "SF": 18, "LD": 16, "LF": 4,
}  # fmt: skip
OF_DISTRIBUTION = (DESIGN / "0022-catalogue-rows-of-distribution.md").read_text()
#: The same of the catalogue of distribution: rows are numbered in their section where the catalogue
#: has no name for them, as `2.1.3`, and have that name elsewhere.
ROWS_OF_DISTRIBUTION = {
    "1.1": 18, "1.2": 6, "1.3": 7, "1.4": 9, "1.5": 7, "1.10": 11,
    "2.1": 12, "2.2": 12, "2.3": 10, "2.4": 9, "2.5": 5,
    "3.10": 36, "3.11": 14, "3.12": 34, "3.13": 26, "3.14": 15, "3.15": 25, "3.26": 32, "3.27": 49,
    "3.28": 18, "3.29": 2, "3.30": 18, "3.31": 32, "3.32": 10, "3.33": 52, "3.34": 37, "3.35": 2,
    "3.36": 21, "3.38": 24, "4.3": 10,
    "1.6": 8, "1.7": 2, "1.8": 2, "1.9": 7, "2.6": 11, "2.7": 14, "2.8": 30, "2.9": 8, "2.14": 6,
    "2.15": 8, "3.1": 55, "3.2": 6, "3.3": 20, "3.4": 4, "3.5": 4, "3.6": 2, "3.7": 26, "3.8": 23,
    "3.9": 27, "3.18": 2, "3.20": 1, "3.22": 3,
}  # fmt: skip
#: A test of the catalogue, with its class where several have one of that name; or a class of them.
NAME = r"\b(?:\w+\.)?test\w*|\b\w+Test\b"
NAMED: dict[str, set[str]] = {}
for file, test in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE + OF_DISTRIBUTION):
    NAMED.setdefault(file, set()).update({test} - {""})


@pytest.mark.parametrize("file", NAMED)
def test_tests_that_the_pages_name_exist(file: str) -> None:
    name = file.removeprefix("tests/")
    # Above the tables of differences, names of files are relative to the tests of the service.
    found = [path for path in (TESTS / name, TESTS / "service" / name) if path.is_file()]
    assert found, file
    text = found[0].read_text()
    assert [test for test in sorted(NAMED[file]) if f"def {test}(" not in text] == []


def rows_of(first_cell: str, section: str) -> list[int]:
    """Return the numbers that a cell names, as `DS1`, or `DS1 to DS3`."""
    found: list[int] = []
    for first, last in re.findall(rf"\b{section}(\d+)\b(?: to {section}(\d+))?", first_cell):
        found += range(int(first), int(last or first) + 1)
    return found


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("section", ROWS)
def test_each_row_of_a_section_stands_there_once(section: str) -> None:
    found = [row for cell in first_cells(LISTED) for row in rows_of(cell, section)]
    assert sorted(found) == list(range(1, ROWS[section] + 1))


def test_every_section_of_the_page_on_distribution_is_counted() -> None:
    assert set(re.findall(r"^### ([\d.]+) ", OF_DISTRIBUTION, re.MULTILINE)) == set(
        ROWS_OF_DISTRIBUTION
    )


@pytest.mark.parametrize("section", ROWS_OF_DISTRIBUTION)
def test_each_row_of_a_section_of_distribution_stands_there_once(section: str) -> None:
    _, heading, text = OF_DISTRIBUTION.partition(f"\n### {section} ")
    assert heading
    cells = first_cells(text.partition("\n##")[0])[1:]
    numbers = [row for cell in cells for row in rows_of(cell, re.escape(f"{section}."))]
    names = [name for cell in cells for name in re.findall(NAME, cell)]
    assert len(names) == len(set(names))
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) + len(names) == ROWS_OF_DISTRIBUTION[section]
