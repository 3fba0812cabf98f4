"""Training programs that are interrupted and restarted resume at the next batch."""

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


@pytest.mark.parametrize(
    ("back_end", "mode", "where"),
    [
        ("torch", "ordered", "threads"),
        *(
            pytest.param(back_end, mode, "processes", marks=pytest.mark.slow)
            for back_end in ("jax", "torch")
            for mode in ("ordered", "sync")
        ),
    ],
)
def test_an_interrupted_program_resumes_to_the_same_weights(
    tmp_path: Path, back_end: str, mode: str, where: str
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = result(run(back_end, tmp_path / "whole", mode, where, 2))
    assert whole["left"] == []
    # An epoch has 13 batches. Each interruption is within an epoch; then the server count changes.
    at = rng.randrange(6, 30)
    folder = tmp_path / "ended"
    killed = run(back_end, folder, mode, where, 2, at, int(signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    terminated = run(back_end, folder, mode, where, 1, 8, int(signal.SIGTERM))
    assert terminated.returncode == -signal.SIGTERM, terminated.stderr
    assert "training is saved" in terminated.stderr
    last = result(run(back_end, folder, mode, where, 1))
    assert last["weights"] == whole["weights"], f"killed after batch {at}"
    assert last["history"] == whole["history"]
    assert last["left"] == []
