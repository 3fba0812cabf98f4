"""The examples in docstrings of the coordinator run, and give what they say."""

from __future__ import annotations

import doctest

import pytest

from headrace.coordinator import ClosureWorker, ClusterCoordinator, PerWorkerValues


@pytest.mark.parametrize("part", [ClosureWorker, ClusterCoordinator, PerWorkerValues])
def test_examples_in_docstrings_give_what_they_say(part: type) -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(part, module=False, globs={}):  # type: ignore[arg-type]
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0
