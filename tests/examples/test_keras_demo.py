"""Test of the Keras demo: killed tasks do not change the trained weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_demo.py"


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(170)
def test_killed_tasks_do_not_change_the_trained_weights():
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("demo: ok: with a worker and a parameter server killed, all 9,610 ")
    assert "largest difference of a weight: 0.0;" in done.stdout
    assert "killed worker 0 (process" in done.stdout
    assert "killed ps 1 (process" in done.stdout
    assert done.stdout.count("epoch 12/12  45 steps") == 2
