"""Tests of density plots, with one character for each value."""

from __future__ import annotations

import pytest

from headrace.cli.formatting import density_bar


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((), "[]"),
        ((0.0, 0.0), "[  ]"),
        ((0.0, 5.0, 10.0, 1e-9), "[ =#.]"),
        (tuple(range(8)), "[ .:-=+*#]"),
        ((3.0,), "[#]"),
    ],
)
def test_largest_value_is_densest_and_only_zero_is_blank(values: tuple[float, ...], shown: str):
    assert density_bar(values) == shown
