"""The benchmark that compares predictions with measurements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.what_if import PIPELINES, compare
from headrace.execution.what_if import Change

ROOT = Path(__file__).parent.parent.parent


def test_every_kind_of_change_is_compared_once_and_a_slow_reader():
    assert [each.change for each in PIPELINES if not each.step_seconds] == [
        Change.ADD_LOCAL_WORKER,
        Change.PARALLEL_CALLS,
        Change.SAVE_OUTPUT,
        Change.SPEED_UP_STEP,
    ]


def test_threads_for_a_function_that_waits_are_predicted_to_help():
    (pipeline,) = [each for each in PIPELINES if each.change is Change.PARALLEL_CALLS]
    found = compare(pipeline, seconds=4.0, warm_up=1.0)
    assert found.bottleneck.startswith("map at what_if.py:")
    assert found.at_most > found.before  # the lower end depends on other programs
    assert found.measured > 0


def test_a_terminated_run_removes_its_files(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "what_if", "lookup", "--quick"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("headrace-what-if-*/lookup/*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("headrace-what-if-*"))
