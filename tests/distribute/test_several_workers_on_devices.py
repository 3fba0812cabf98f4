"""Several workers whose replicas have arrays of JAX or PyTorch."""

from __future__ import annotations

import signal
import time

import pytest

from tests.distribute import scenarios
from tests.distribute.several_workers import Workers

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("framework", "modules"), [("torch", ["torch"]), ("jax", ["jaxlib"])])
def test_values_of_a_framework_are_those_of_all_workers(framework, modules, tmp_path):
    pytest.importorskip(framework)
    workers = Workers(2)
    try:
        for steps, weight, mean, kinds in workers.run(scenarios.in_a_framework, framework):
            assert steps == [(6.0, 4, [0.0, 1.0, 2.0, 3.0]), (9.0, 2, [4.0, 5.0])]
            assert weight == 1.0 + 6.0 + 9.0
            assert mean == 4.5
            assert kinds == modules
        if framework == "torch":
            end_while_large_tensors_are_added_up(workers, tmp_path)
    finally:
        workers.close()


def end_while_large_tensors_are_added_up(workers, path):
    """They go by another way; who is missing is named all the same."""
    workers.start(scenarios.large_until_an_error, str(path / "added"))
    until = time.monotonic() + 60.0
    while len(list(path.glob("added-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    workers.workers[1].signal(signal.SIGKILL)
    text, gone = workers.answers()
    assert f"worker 1 ({workers.addresses[1]}) is gone" in text
    assert gone is None
