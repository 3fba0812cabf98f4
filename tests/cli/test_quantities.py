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
    ("value", "expected"),
    [
        (0, "0"),
        (0.126, "0.13"),
        (7.64, "7.6"),
        (99, "99"),
        (1234.4, "1,234"),
        (1e9, "1,000,000,000"),
    ],
)
def test_numbers_show_significant_digits(value, expected):
    assert format_number(value) == expected
    assert format_rate(value) == f"{expected}/s"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_400_000, "123 MB"), (2e18, "2,000 PB")],
)
def test_bytes_are_shown_with_a_decimal_unit(value, expected):
    assert format_bytes(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
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
def test_durations_show_two_units(seconds, expected):
    assert format_duration(seconds) == expected


def test_nouns_are_pluralized():
    assert pluralize(1, "batch", "batches") == "1 batch"
    assert pluralize(1200, "batch", "batches") == "1,200 batches"
    assert pluralize(0, "worker") == "0 workers"


def test_control_characters_are_escaped():
    assert escape_controls("a\x1b[2Jb\nc\u202e") == "a?[2Jb?c?"
