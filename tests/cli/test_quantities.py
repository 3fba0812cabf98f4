from __future__ import annotations

import pytest

from headrace.cli.formatting import (
    escape_controls,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
    pluralize,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (0.126, "0.13"),
        (7.64, "7.6"),
        (99, "99"),
        (1234.4, "1,234"),
        (1e9, "1,000,000,000"),
    ],
)
def test_numbers_have_as_many_places_as_matter(value, written):
    assert format_number(value) == written
    assert format_rate(value) == f"{written}/s"


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_400_000, "123 MB"), (2e18, "2,000 PB")],
)
def test_bytes(value, written):
    assert format_bytes(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (135, "2 min 15 s"),
        (8000, "2 h 13 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_times_have_the_two_units_that_matter(seconds, written):
    assert format_duration(seconds) == written


def test_nouns():
    assert pluralize(1, "pass", "passes") == "1 pass"
    assert pluralize(1200, "pass", "passes") == "1,200 passes"
    assert pluralize(0, "worker") == "0 workers"


def test_what_would_move_the_cursor_is_not_printed():
    assert escape_controls("a\x1b[2Jb\nc\u202e") == "a?[2Jb?c?"
