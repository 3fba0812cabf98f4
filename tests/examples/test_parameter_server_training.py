"""Test of the parameter server example on each Keras back end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.heavy
@pytest.mark.parametrize("back_end", ["jax", "torch"])
def test_the_example_classifies_all_words_on_each_back_end(back_end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "parameter_server_training.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in shards: 1.000 1.000 1.000" in done.stdout
