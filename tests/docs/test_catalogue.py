"""Tests that each catalogue row is covered by a test or listed as an exception."""

from __future__ import annotations

import pytest

from tests.docs.catalogue import (
    DIFFERENT,
    WITHOUT_A_TEST,
    all_rows,
    expand,
    listed_rows,
    marked_tests,
)

ROWS = all_rows()
MARKED = marked_tests()
WITHOUT = listed_rows(WITHOUT_A_TEST)
DIFFERING = listed_rows(DIFFERENT)


def test_each_row_is_marked_on_a_test_or_listed_as_without_one() -> None:
    assert sorted(ROWS.keys() - MARKED.keys() - WITHOUT.keys()) == []
    assert sorted(MARKED.keys() & WITHOUT.keys()) == []


def test_marks_name_rows_that_exist() -> None:
    assert {row: tests for row, tests in MARKED.items() if row not in ROWS} == {}


def test_tables_name_rows_that_exist() -> None:
    assert sorted((WITHOUT.keys() | DIFFERING.keys()) - ROWS.keys()) == []


def test_rows_where_headrace_differs_have_tests() -> None:
    assert sorted(DIFFERING.keys() - MARKED.keys()) == []


def test_ranges_of_rows_are_expanded() -> None:
    assert expand("AS9-11") == ["AS9", "AS10", "AS11"]
    assert expand("3.12.1") == ["3.12.1"]
    with pytest.raises(ValueError, match="is not a row"):
        expand("AS")
