"""Tests of the small programs in `examples`: each runs to its end and removes its files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
LAST_LINES = {
    "custom_source.py": r"2 workers: 300 records, each once; mean 12\.50 degrees Celsius",
    "recommender_torch.py": r"accuracy 0\.9\d+; 300 rows of users and 100 of films",
    "translation_coordinated_reads.py": r"in each of 60 rounds, both replicas had batches of .*",
    "sidecar_evaluation.py": r"best model: accuracy 0\.9\d+",
}


@pytest.mark.heavy
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", LAST_LINES)
def test_program_prints_its_result_and_removes_its_files(name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with tempfile.TemporaryDirectory(prefix="example-") as folder:
        run = subprocess.run(
            [sys.executable, str(FOLDER / name)],
            env={
                **os.environ,
                "TMPDIR": folder,
                "KERAS_BACKEND": "jax",
                "JAX_PLATFORMS": "cpu",
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
            },
            cwd=work,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert os.listdir(folder) == []
    assert os.listdir(work) == []
    assert re.fullmatch(LAST_LINES[name], run.stdout.splitlines()[-1])


def test_the_table_of_the_examples_lists_each_file() -> None:
    table = (FOLDER / "README.md").read_text()
    names = {
        path.relative_to(FOLDER).as_posix()
        for path in [*FOLDER.rglob("*.py"), *FOLDER.rglob("*.ipynb")]
        if path.name != "sample_data.py" and "__pycache__" not in path.parts
    }
    assert set(re.findall(r"^\| \[.*?\]\((.*?)\)", table, re.MULTILINE)) == names
