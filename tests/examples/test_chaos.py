"""Tests of the chaos demo: the whole program, its hashes, its data and its killer."""

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
def test_killed_processes_do_not_change_the_elements_that_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    seed = random.randrange(10_000)
    # 600 rows of 20 ms on three workers take at least four seconds, so some processes are killed.
    code = run_chaos(seed, files=30, rows=20, pause=0.02)
    output = capsys.readouterr().out
    assert code == 0, output
    lines = output.splitlines()
    for title in ("every batch, in order", "every image, unordered"):
        local, remote = (line.split()[-1] for line in lines if line.startswith(f"  {title}"))
        assert local == remote
    assert lines[-1].startswith("chaos: ok")
    assert any("  killed " in line for line in lines)
    assert os.listdir(tmp_path) == []
    address = next(line.split()[2] for line in lines if line.startswith("dispatcher at "))
    assert running(address, str(tmp_path)) == []


@pytest.mark.heavy
@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up_and_exits_with_130(
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


def running(*patterns: str) -> list[str]:
    """Return the commands of running processes that contain one of the patterns."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(pattern in command for pattern in patterns):
            found.append(command)
    return found


def batch(*numbers: int) -> dict[str, Any]:
    return {"number": np.array(numbers)}


def test_the_sequence_hash_depends_on_order_batches_shape_and_dtype() -> None:
    def hash_of(*batches: dict[str, Any]) -> str:
        sequence = SequenceHash()
        for each in batches:
            sequence.update(each)
        return sequence.hexdigest

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


def test_the_elements_hash_depends_on_elements_and_their_counts_only() -> None:
    def hash_of(*batches: dict[str, Any]) -> str:
        elements = ElementsHash()
        for each in batches:
            elements.update(each)
        return elements.hexdigest

    first = hash_of(batch(1, 2), batch(3))
    assert hash_of(batch(3, 1), batch(2)) == first
    assert (
        len({first, hash_of(batch(1, 2)), hash_of(batch(1, 2, 3, 3, 3)), hash_of(batch(1, 2, 4))})
        == 4
    )


def test_the_files_contain_each_number_once(tmp_path: Path) -> None:
    total = write_files(tmp_path, files=5, rows=8, seed=3)
    numbers = [int(n) for each in batches(images(tmp_path, 0.0)) for n in each["number"]]
    assert sorted(numbers) == list(range(total))


class FakeServers:
    """Servers whose `victims` are always ready to be killed."""

    def __init__(self, victims: list[str]) -> None:
        self.victims = victims
        self.killed: list[str] = []

    def restart_ended(self) -> list[str]:
        return self.victims

    def kill(self, name: str) -> Kill:
        self.killed.append(name)
        return Kill(name, 1)


def killed_with(seed: int) -> list[str]:
    servers = FakeServers(["dispatcher", "worker 1", "worker 2"])
    deadline = time.monotonic() + 20
    with Killer(servers, random.Random(seed), lambda kill: None, seconds=0.01):
        while len(servers.killed) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    return servers.killed[:6]


def test_the_seed_determines_the_killed_servers() -> None:
    assert len(killed_with(1)) == 6
    assert killed_with(1) == killed_with(1) != killed_with(2)


def test_no_server_is_killed_before_all_are_ready() -> None:
    servers = FakeServers([])
    with Killer(servers, random.Random(1), lambda kill: None, seconds=0.0) as killer:
        time.sleep(0.2)
    assert killer.kills == []
