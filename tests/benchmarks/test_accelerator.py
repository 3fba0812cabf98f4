"""Tests of the accelerator benchmarks: samples, the loop, kills of real processes, a CPU device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accelerator, accelerator_peers
from benchmarks.accelerator_inputs import Task, Tokens, Volumes, load
from benchmarks.accelerator_loop import (
    Epoch,
    Service,
    busy_steps,
    epoch_with_kills,
    headrace_service,
)

TOKENS = Tokens(batch=4, files=8, length=32)
VOLUMES = Volumes(batch=2, files=2, side=20, crop=8)


@pytest.mark.parametrize("task", [TOKENS, VOLUMES], ids=lambda task: task.name)
def test_a_sample_depends_on_its_number_only(task: Task, tmp_path: Path) -> None:
    task.write(tmp_path)
    prepared = load(task, tmp_path)
    first, again = prepared(np.int64(1)), prepared(1)
    np.testing.assert_array_equal(first[0], again[0])
    assert first[1] == 1
    other = prepared(3)[0]  # of the same file, as there are 2 or 8
    assert other.shape == first[0].shape
    assert not np.array_equal(other, first[0])


def test_volumes_are_standardized(tmp_path: Path) -> None:
    VOLUMES.write(tmp_path)
    crop = VOLUMES.prepare(tmp_path, 0)
    assert crop.shape == (8, 8, 8)
    assert crop.dtype == np.float32
    assert abs(crop.mean()) < 1e-4
    assert abs(crop.std() - 1) < 1e-4


def _batches() -> Iterator[tuple[None, list[int]]]:
    for index in range(10_000_000):
        yield None, [2 * index, 2 * index + 1]


def test_a_step_computes_in_a_part_of_its_time() -> None:
    for busy, seconds in islice(busy_steps(_batches(), batch=4, seconds=0.002), 3):
        assert busy == 0.001  # half a batch
        assert seconds >= busy


def test_a_duplicated_sample_is_an_error() -> None:
    steps = busy_steps(iter([(None, [1, 2]), (None, [2, 3])]), batch=2, seconds=0.001)
    with pytest.raises(ValueError, match="duplicated"):
        next(steps)


def test_lost_and_duplicated_samples_are_counted() -> None:
    service = Service(epoch=lambda: iter([(None, [0, 1]), (None, [1, 2])]), kill=lambda: None)
    epoch = epoch_with_kills(service, TOKENS, batches=2, seconds=0.001)
    assert (epoch.samples, epoch.lost, epoch.duplicated) == (8, 5, 1)


def test_epochs_are_described() -> None:
    epoch = Epoch(busy=1.0, seconds=2.0, samples=10, kills=1, lost=3, duplicated=0)
    text = accelerator.format_epochs("a service", [epoch, epoch])
    assert "busy 50, 50 %; 2 kills; of 20 samples, 6 lost and 0 duplicated" in text


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [0, 2])
def test_headrace_keeps_the_accelerator_busy_for_some_time(workers: int, tmp_path: Path) -> None:
    accelerator.write_inputs(tmp_path, (TOKENS,))
    build = accelerator.trained(accelerator_peers.headrace(TOKENS, workers), TOKENS)
    with ExitStack() as stack:
        steps = build(tmp_path, stack)()
        stack.callback(steps.close)  # type: ignore[attr-defined]
        assert all(0 < busy <= 1000 * seconds for busy, seconds in islice(steps, 5))


@pytest.mark.heavy
@pytest.mark.system
def test_headrace_delivers_each_sample_once_while_workers_are_killed(tmp_path: Path) -> None:
    TOKENS.write(tmp_path)
    with ExitStack() as stack:
        service = headrace_service(TOKENS, tmp_path, 100, stack)
        epoch = epoch_with_kills(service, TOKENS, 100, seconds=0.02, pause=0.3)
    assert epoch.kills >= 1
    assert (epoch.samples, epoch.lost, epoch.duplicated) == (400, 0, 0)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator", *arguments],
        capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
def test_a_missing_gpu_is_an_error() -> None:
    done = _run("--device", "cuda", "--task", "tokens")
    assert done.returncode == 2
    assert "no framework can use device 'cuda'" in done.stderr


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
def test_a_cpu_device_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = _run("--device", "cpu", "--task", "volumes", "--seconds", "150", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    measured = [row for row in rows if row["problem"] is None]
    assert all(min(row["utilisation"]) > 0 for row in measured)
    assert all("failed" not in (row["problem"] or "") for row in rows)
