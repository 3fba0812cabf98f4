"""The examples in the docstrings of what users hold run, and give what they say."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import headrace as hr
from headrace.parameter_server import optimizers, partitioners, schedules
from headrace.parameter_server.server import ParameterServer
from headrace.parameter_server.strategy import ParameterServerStrategy


@pytest.mark.parametrize(
    "part",
    [
        *(ParameterServer, ParameterServerStrategy, hr.IndexedSlices),
        *(optimizers, partitioners, schedules),
    ],
)
def test_examples_in_docstrings_give_what_they_say(part: Any) -> None:
    runner = doctest.DocTestRunner()
    named = {**getattr(part, "__dict__", {}), "ParameterServerStrategy": ParameterServerStrategy}
    for example in doctest.DocTestFinder().find(part, globs=named):
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
