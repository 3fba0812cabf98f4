"""Tests of the notebooks in `examples/notebooks`: they run, and are stored without outputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
EXECUTE = "from nbclient.cli import NbClientApp; NbClientApp.launch_instance()"


def test_all_three_notebooks_are_found() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.heavy
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_to_its_end(name: str, tmp_path: Path) -> None:
    # In a separate process, because nbclient leaves sockets open until its process ends.
    shutil.copy(FOLDER / name, tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, name, "--timeout=150"],
        env={
            **os.environ,
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_stored_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
