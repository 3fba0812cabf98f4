"""`hr.keras.SidecarEvaluator` in parallel with a program that writes checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.on_devices import ROOT

PROGRAMS = Path(__file__).parent / "keras_sidecar_processes.py"

pytestmark = pytest.mark.heavy


@contextlib.contextmanager
def program(back_end: str, name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS), name, *map(str, arguments)],
        env={**os.environ, "KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def notes_in(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_evaluations(path: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(notes_in(path)) < count:
        assert time.monotonic() < until, f"{path} has {notes_in(path)}"
        time.sleep(0.05)


@pytest.mark.parametrize(("back_end", "suffix"), [("jax", ".weights.h5"), ("torch", ".keras")])
def test_checkpoints_are_evaluated_during_training(back_end, suffix, tmp_path):
    folder, best = tmp_path / "ckpt", tmp_path / "best" / "best.keras"
    trained, evaluated = tmp_path / "trained", tmp_path / "evaluated"
    with (
        program(back_end, "evaluate", folder, evaluated, 3, best) as evaluator,
        program(back_end, "train", f"{folder}/ckpt-{{epoch}}{suffix}", trained, 3) as trainer,
    ):
        finish(trainer)
        finish(evaluator)  # it ends with the checkpoint of the third epoch
    by_step = {step: (loss, weights) for step, loss, weights in notes_in(trained)}
    assert sorted(by_step) == [8, 16, 24]
    found = notes_in(evaluated)
    steps = [step for step, _, _ in found]
    assert steps == sorted(set(steps))
    assert steps[-1] == 24
    for step, loss, weights in found:
        assert loss == pytest.approx(by_step[step][0], rel=1e-5)
        assert weights == by_step[step][1]
    assert best.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("back_end", "suffix"), [("jax", ".keras"), ("torch", ".weights.h5")])
def test_a_partially_written_file_is_evaluated_once_it_is_complete(back_end, suffix, tmp_path):
    with program(back_end, "train", f"{tmp_path}/ckpt-{{epoch}}{suffix}", tmp_path / "n", 1) as it:
        finish(it)
    ((step, loss, weights),) = notes_in(tmp_path / "n")
    whole = (tmp_path / f"ckpt-1{suffix}").read_bytes()
    folder, evaluated = tmp_path / "ckpt", tmp_path / "evaluated"
    folder.mkdir()
    (folder / f"ckpt-0{suffix}").write_bytes(whole)
    os.utime(folder / f"ckpt-0{suffix}", (1, 1))
    with (folder / f"ckpt-1{suffix}").open("wb", buffering=0) as half:
        half.write(whole[: len(whole) // 2])
        best = tmp_path / "best" / "best.keras"
        with program(back_end, "evaluate", folder, evaluated, 2, best) as evaluator:
            # The newest checkpoint is tried first, so the partial file was examined before.
            wait_for_evaluations(evaluated, 1)
            with pytest.raises(subprocess.TimeoutExpired):
                evaluator.wait(2)
            assert len(notes_in(evaluated)) == 1
            half.write(whole[len(whole) // 2 :])
            finish(evaluator)
    _, (found_step, found_loss, found_weights) = notes_in(evaluated)
    assert (found_step, found_weights) == (step, weights)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert best.exists()


LOAD_ALL = """
import sys, time
import keras
import numpy as np
from headrace.adapters.keras_training.training_checkpoints import (
    CheckpointWatch,
    IncompleteError,
    load,
)

made = keras.Sequential([keras.Input((300,)), *(keras.layers.Dense(300) for _ in range(4))])
watch, loaded, until = CheckpointWatch(sys.argv[1]), [], time.monotonic() + 60
while len(loaded) < 4 and time.monotonic() < until:
    for found in watch.candidates():
        if watch.is_due(found):
            try:
                load(made, found, sys.argv[2])
            except IncompleteError:
                continue
            watch.finish(found)
            loaded.append({float(v) for each in made.get_weights() for v in np.unique(each)})
    time.sleep(0.01)
assert all(len(versions) == 1 for versions in loaded), loaded
print(len(loaded))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_versions_of_a_constantly_rewritten_file_are_not_mixed(suffix, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with program("jax", "overwrite", tmp_path / "ckpt" / f"last{suffix}") as writer:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_ALL, str(tmp_path / "ckpt"), str(scratch)],
            env={**os.environ, "KERAS_BACKEND": "torch"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert writer.poll() is None  # reading does not disturb it
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr
