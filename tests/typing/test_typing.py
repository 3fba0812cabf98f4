"""Pyright in strict mode on `typical_uses.py`; `make check` runs mypy on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIGURATION = Path(__file__).with_name("pyrightconfig.json")


@pytest.mark.heavy
def test_typical_uses_have_only_the_expected_errors_in_pyright() -> None:
    pyright = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    checked = subprocess.run(
        [*pyright, "--project", str(CONFIGURATION)], capture_output=True, text=True, timeout=150
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
