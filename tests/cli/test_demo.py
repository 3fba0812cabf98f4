"""The demo, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.heavy
@pytest.mark.timeout(150)
def test_the_demo_trains_survives_a_kill_and_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "demo"],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("demo: ok")
    assert "each of 1437 training examples was visited exactly once" in last
    assert "killed worker w0 after" in done.stdout
