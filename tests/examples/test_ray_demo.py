"""Tests of the Ray demo: the whole program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_demo.py"


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(490)
def test_each_example_is_visited_once_while_actors_are_killed_and_added():
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=470,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.strip().splitlines()
    assert last.startswith("demo: ok: each of 1437 examples was visited exactly once in each of ")
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.rpartition("; ")[2] for line in epochs] == [
        "data workers were added",
        "a data worker was killed",
        "training worker 0 was killed",
        "parameter server 1 was killed",
        "data workers were drained",
    ]
    assert all("  45 steps in " in line and "  each example once; " in line for line in epochs)
    # Messages of Ray's processes are not shown.
    assert "raylet" not in done.stdout + done.stderr
