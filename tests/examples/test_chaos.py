"""Tests of the chaos example for exactly-once delivery, and of its hashes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.chaos import (
    ElementsHash,
    Kill,
    Killer,
    SequenceHash,
    batches,
    images,
    run_chaos,
    write_files,
)

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "examples" / "chaos.py")]


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_elements_read_during_kills_equal_those_of_one_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    seed = random.randrange(10_000)
    # 600 rows of 20 ms on three workers take at least four seconds, so some workers are killed.
    code = run_chaos(seed, files=30, rows=20, pause=0.02)
    written = capsys.readouterr().out
    assert code == 0, written
    lines = written.splitlines()
    for what in ("every batch, in order", "every image, in any order"):
        here, there = (line.split()[-1] for line in lines if line.startswith(f"  {what}"))
        assert here == there
    assert lines[-1].startswith("chaos: ok")
    assert any("  killed " in line for line in lines)
    assert os.listdir(tmp_path) == []
    address = next(line.split()[2] for line in lines if line.startswith("dispatcher at "))
    assert running(address, str(tmp_path)) == []


@pytest.mark.heavy
@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_reports_it_and_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "  killed " in line:
                process.send_signal(number)
                break
        rest = process.stdout.read()
        assert process.wait(60) == 130
    assert rest.splitlines()[-1] == "chaos: stopped before the end"
    assert "Traceback" not in rest
    assert os.listdir(tmp_path) == []
    assert running(str(tmp_path)) == []


def running(*words: str) -> list[str]:
    """Return the command lines of processes that contain one of the strings."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(word in command for word in words):
            found.append(command)
    return found


def batch(*numbers: int) -> dict[str, Any]:
    return {"number": np.array(numbers)}


def test_sequence_hash_depends_on_order_batches_shape_and_dtype() -> None:
    def hash_of(*batches: dict[str, Any]) -> str:
        sequence = SequenceHash()
        for each in batches:
            sequence.take(each)
        return sequence.text

    first = hash_of(batch(1, 2), batch(3))
    assert hash_of(batch(1, 2), batch(3)) == first
    others = [
        hash_of(batch(3), batch(1, 2)),
        hash_of(batch(1), batch(2, 3)),
        hash_of({"number": np.array([[1], [2]])}, batch(3)),
        hash_of({"number": np.array([1, 2], np.uint64)}, batch(3)),
        hash_of(batch(1, 2)),
    ]
    assert len({first, *others}) == 6


def test_element_hash_depends_only_on_elements_and_their_counts() -> None:
    def hash_of(*batches: dict[str, Any]) -> str:
        elements = ElementsHash()
        for each in batches:
            elements.take(each)
        return elements.text

    first = hash_of(batch(1, 2), batch(3))
    assert hash_of(batch(3, 1), batch(2)) == first
    assert (
        len({first, hash_of(batch(1, 2)), hash_of(batch(1, 2, 3, 3, 3)), hash_of(batch(1, 2, 4))})
        == 4
    )


def test_files_contain_each_number_once(tmp_path: Path) -> None:
    total = write_files(tmp_path, files=5, rows=8, seed=3)
    numbers = [int(n) for each in batches(images(tmp_path, 0.0)) for n in each["number"]]
    assert sorted(numbers) == list(range(total))


class Doomed:
    """Fake servers; those in `victims` may be killed at any time."""

    def __init__(self, victims: list[str]) -> None:
        self.victims = victims
        self.killed: list[str] = []

    def look(self) -> list[str]:
        return self.victims

    def kill(self, who: str) -> Kill:
        self.killed.append(who)
        return Kill(who, 1)


def killed_with(seed: int) -> list[str]:
    servers = Doomed(["dispatcher", "worker 1", "worker 2"])
    deadline = time.monotonic() + 20
    with Killer(servers, random.Random(seed), lambda kill: None, seconds=0.01):
        while len(servers.killed) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    return servers.killed[:6]


def test_seed_determines_the_killed_processes() -> None:
    assert len(killed_with(1)) == 6
    assert killed_with(1) == killed_with(1) != killed_with(2)


def test_only_ready_processes_are_killed() -> None:
    servers = Doomed([])
    with Killer(servers, random.Random(1), lambda kill: None, seconds=0.0) as killer:
        time.sleep(0.2)
    assert killer.kills == []
