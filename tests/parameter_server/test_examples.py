"""The example in the docstring of a parameter server runs, and gives what it says."""

from __future__ import annotations

import doctest

from headrace.parameter_server.server import ParameterServer


def test_example_in_docstring_gives_what_it_says() -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(ParameterServer):
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
