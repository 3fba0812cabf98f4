"""Training programs that end and are started again: they go on with the batch that comes next."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "keras_backup_program.py"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def run(back_end: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        env={**os.environ, "KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=190,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "ordered"])
@pytest.mark.parametrize("back_end", ["jax", "torch"])
def test_a_killed_program_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, back_end: str, mode: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    whole = result(run(back_end, tmp_path / "whole", mode, 2))
    assert whole["left"] == []
    # 13 batches an epoch; within an epoch each, with another number of servers after it.
    at = chance.randrange(6, 30)
    first = run(back_end, tmp_path / "killed", mode, 2, at, int(signal.SIGKILL))
    assert first.returncode == -signal.SIGKILL, first.stderr
    again = result(run(back_end, tmp_path / "killed", mode, 1))
    assert again["weights"] == whole["weights"], f"killed after batch {at}"
    assert again["history"] == whole["history"]
    assert again["left"] == []


def test_a_program_that_is_told_to_end_saves_first(tmp_path: Path) -> None:
    whole = result(run("jax", tmp_path / "whole", "ordered", 1))
    first = run("jax", tmp_path / "told", "ordered", 1, 8, int(signal.SIGTERM))
    assert first.returncode == -signal.SIGTERM, first.stderr
    assert "training is saved" in first.stderr
    assert result(run("jax", tmp_path / "told", "ordered", 1))["history"] == whole["history"]
