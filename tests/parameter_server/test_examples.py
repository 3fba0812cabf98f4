"""The example in the docstring of `ParameterServer`."""

from __future__ import annotations

import doctest

from headrace.parameter_server.server import ParameterServer


def test_docstring_example_has_the_documented_result() -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(ParameterServer):
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
