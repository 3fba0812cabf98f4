"""Tests of density plots, with one character for each value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_rounding_never_exceeds_the_densest_character(value: float):
    assert density_bar((value,)) == "[#]"
