"""Tests of the programs in `examples/pipelines`: each runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "pipelines"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "sample_data.py")


def test_all_twelve_programs_are_found() -> None:
    assert len(PROGRAMS) == 12


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs_to_its_end_and_removes_its_files(name: str, tmp_path: Path) -> None:
    # Ray needs a short path for its sockets.
    with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as folder:
        run = subprocess.run(
            [sys.executable, str(FOLDER / name)],
            env={**os.environ, "TMPDIR": folder, "KERAS_BACKEND": "jax"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout, "it reports what it did"
        assert not list(Path(folder).glob("headrace-example-*"))
