"""Tests of the messages for invalid arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import arguments


@pytest.mark.parametrize(
    ("check", "value", "options", "said"),
    [
        ("int", 1.5, {"minimum": 0}, "`x` must be an integer, but got 1.5 of type float"),
        ("int", True, {"minimum": 0}, "`x` must be an integer, but got True"),
        ("int", None, {"minimum": 0}, "`x` must be an integer, but got None"),
        ("int", 0, {"minimum": 1}, "`x` must be at least 1, but got 0"),
        ("int", -2, {"minimum": 0, "or_one_of": (-1,)}, "`x` must be at least 0 or -1, but got -2"),
        (
            "int",
            70000,
            {"minimum": 0, "maximum": 65535},
            "`x` must be at most 65535, but got 70000",
        ),
        ("flag", 1, {}, "`x` must be a bool or None, but got 1 of type int"),
        ("flag", None, {"or_none": False}, "`x` must be a bool, but got None"),
        ("string", b"s", {}, "`x` must be a string, but got b's' of type bytes"),
        ("string", "", {"empty": False}, "`x` must not be empty, but got ''"),
        ("strings", "ab", {}, "`x` must be a list of strings, but got 'ab' of type str"),
        ("strings", ["a", 2], {}, "`x[1]` must be a string, but got 2 of type int"),
        ("path", 5, {}, "`x` must be a path, but got 5 of type int"),
        ("path", "", {}, "`x` must not be empty, but got ''"),
        ("instance", 5, {"kind": Path}, "`x` must be a Path, but got 5 of type int"),
        ("callable", 5, {}, "`x` must be a function, but got 5 of type int"),
        ("callable", np.zeros(999), {}, "`x` must be a function, but got a value of type ndarray"),
    ],
)
def test_invalid_argument_is_named_with_the_expected_value(
    check: str, value: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(arguments, f"check_{check}")("x", value, **options)
    assert str(caught.value) == said


def test_valid_arguments_pass() -> None:
    assert arguments.check_int("x", np.int32(3), minimum=1) == 3
    assert arguments.check_int("x", -1, minimum=1, or_one_of=(-1,)) == -1
    arguments.check_flag("x", np.True_, or_none=False)
    arguments.check_strings("x", ("a", "b"))
    arguments.check_path("x", Path("a"))
    arguments.check_instance("x", 3, int)
