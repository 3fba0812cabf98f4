"""The examples in the docstrings of datasets run, and give what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from headrace.data import choosing, dataset, sources, windows


@pytest.mark.parametrize("module", [choosing, dataset, sources, windows])
def test_examples_in_docstrings_give_what_they_say(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0
