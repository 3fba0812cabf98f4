"""The examples in the docstrings of what users hold run, and give what they say."""

from __future__ import annotations

import doctest

import pytest

import headrace as hr
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy


@pytest.mark.parametrize("part", [ParameterServer, ParameterServerStrategy, hr.IndexedSlices])
def test_examples_in_docstrings_give_what_they_say(part: type) -> None:
    runner = doctest.DocTestRunner()
    named = {"ParameterServerStrategy": ParameterServerStrategy}
    for example in doctest.DocTestFinder().find(part, module=False, globs=named):  # type: ignore[arg-type]
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
