"""The examples in the docstrings of datasets run, and give what they say."""

from __future__ import annotations

import doctest

import pytest

from headrace.data.dataset import Dataset
from headrace.data.dataset_parts import Choosing, Windows
from headrace.data.sources import Sources


@pytest.mark.parametrize("part", [Choosing, Dataset, Sources, Windows])
def test_examples_in_docstrings_give_what_they_say(part: type) -> None:
    runner = doctest.DocTestRunner()
    # Without a module: methods are wrapped, and would not count as this module's.
    for example in doctest.DocTestFinder().find(part, module=False, globs={}):  # type: ignore[arg-type]
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
