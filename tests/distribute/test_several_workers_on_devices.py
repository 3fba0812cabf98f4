"""Several workers whose replicas have arrays of JAX or PyTorch."""

from __future__ import annotations

import pytest

from tests.distribute import scenarios
from tests.distribute.several_workers import Workers

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("framework", "modules"), [("torch", ["torch"]), ("jax", ["jaxlib"])])
def test_values_of_a_framework_are_those_of_all_workers(framework, modules):
    pytest.importorskip(framework)
    workers = Workers(2)
    try:
        for steps, weight, mean, kinds in workers.run(scenarios.in_a_framework, framework):
            assert steps == [(6.0, 4, [0.0, 1.0, 2.0, 3.0]), (9.0, 2, [4.0, 5.0])]
            assert weight == 1.0 + 6.0 + 9.0
            assert mean == 4.5
            assert kinds == modules
    finally:
        workers.close()
