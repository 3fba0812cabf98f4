"""Tests of processor time: threads, running and ended descendants, and other processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.cpu_time import cpu_seconds, cpu_seconds_of

_WORK = """
import sys, time
while time.process_time() < 0.2: pass
print(flush=True)
sys.stdin.read()
"""


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_processor_time_of_threads_is_counted() -> None:
    before = cpu_seconds()
    thread = threading.Thread(target=_work, args=(0.05,))
    thread.start()
    thread.join()
    assert cpu_seconds() - before >= 0.05


def test_running_and_ended_child_processes_are_counted() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = cpu_seconds() - before
    assert running >= 0.15  # the system counts in ticks of some milliseconds
    assert cpu_seconds() - before >= 0.15


def test_only_descendants_are_counted(tmp_path: Path) -> None:
    own = Path("/proc/self").resolve().name
    for number, parent in (("11", own), ("12", "11"), ("13", "1")):
        (tmp_path / number).mkdir()
        fields = ["0"] * 9 + ["100", "50", "0", "0"]
        (tmp_path / number / "stat").write_text(f"{number} (a (b) c) S {parent} {' '.join(fields)}")
    own_seconds = cpu_seconds(tmp_path / "nowhere")
    assert 2.9 < cpu_seconds(tmp_path) - own_seconds < 3.5  # at 100 ticks a second


def test_processor_time_of_another_process_is_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds_of(process.pid) >= 0.2
