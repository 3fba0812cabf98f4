"""A plot is a letter for each number."""

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
def test_the_largest_is_the_darkest_and_only_nothing_is_empty(
    values: tuple[float, ...], shown: str
):
    assert density_bar(values) == shown
