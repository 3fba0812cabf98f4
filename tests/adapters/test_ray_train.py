"""The Ray Train program of docs/bridges.md: two workers on a data service, one of which fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "bridges.md"


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.system
@pytest.mark.timeout(600)
def test_ray_train_resumes_from_a_checkpoint_after_a_failure(tmp_path: Path) -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if "TorchTrainer" in block]
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
