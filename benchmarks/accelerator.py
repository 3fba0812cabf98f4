"""Utilisation of an accelerator by training loops that wait for their input, as in MLPerf Storage.

The accelerator is simulated: a step is a sleep, which needs no processor and does not hold the GIL.
Utilisation is the time in which the accelerator computes, divided by the time that passes: 900 busy
ms per second are 90 %. MLPerf Storage likewise sleeps for the duration of a real model's step
(0.323 s for 7 samples of U-Net 3D on an H100), and counts the accelerators that are busy for 90 %
of the time (70 % for CosmoFlow).

Here the duration of a step follows from the machine (`accelerator_inputs.step_seconds`): preparing
batches at the rate of the steps keeps 75 % of the cores busy, more than one process that holds the
GIL can use. The rest is for the training loop and for moving batches. The loop waits for each step,
so the time in which its own thread takes a batch is not hidden.

In the last workload, the older of two worker processes gets SIGKILL 3 s after the last killed one
has been replaced. Each sample must be delivered once. A DataLoader of PyTorch raises an error if
its worker is killed, which ends the loop.

    python -m benchmarks accelerator                 utilisation
    python -m benchmarks.accelerator                 epochs with kills: samples lost, duplicated
    python -m benchmarks.accelerator --device cuda   a real device: see `accelerator_device`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from benchmarks import accelerator_device
from benchmarks import accelerator_peers as peers
from benchmarks.accelerator_inputs import TASKS, Images, Task, Tokens, Volumes, step_seconds
from benchmarks.accelerator_loop import Epoch, busy_steps, epoch_with_kills, headrace_service
from benchmarks.accelerator_peers import PROCESSES, Build
from benchmarks.workload import Contender, Elements, Pipeline, Workload, expect

__all__ = ["WORKLOADS", "format_epochs", "main", "trained", "trained_with_kills", "write_inputs"]

#: Busy seconds of an epoch with kills.
_EPOCH_SECONDS = 5.0

_STEPS_FILE = "steps.json"


def write_inputs(directory: Path, tasks: tuple[Task, ...] = TASKS) -> None:
    """Write the files of tasks, and the durations of their steps."""
    steps = {}
    for task in tasks:
        task.write(directory)
        steps[task.name] = step_seconds(task, directory)
    (directory / _STEPS_FILE).write_text(json.dumps(steps))


def trained(build: Build, task: Task) -> Build:
    """Return a contender's steps: pairs of busy milliseconds and seconds."""

    def built(inputs: Path, stack: ExitStack) -> Pipeline:
        pipeline, step = build(inputs, stack), _step(task, inputs)
        return lambda: (
            (1000 * busy, seconds) for busy, seconds in busy_steps(pipeline(), task.batch, step)
        )

    return built


def trained_with_kills(task: Task) -> Build:
    """Return Headrace's epochs with kills: pairs of busy milliseconds and seconds."""

    def built(inputs: Path, stack: ExitStack) -> Pipeline:
        def pairs() -> Iterator[tuple[float, float]]:
            for epoch in _epochs(task, inputs, stack):
                expect(epoch.lost == 0, f"{epoch.lost} samples were lost")
                expect(epoch.duplicated == 0, f"{epoch.duplicated} samples were duplicated")
                yield 1000 * epoch.busy, epoch.seconds

        return pairs

    return built


def _epochs(task: Task, inputs: Path, stack: ExitStack) -> Iterator[Epoch]:
    step = _step(task, inputs)
    batches = max(8, round(_EPOCH_SECONDS / step))
    service = headrace_service(task, inputs, batches, stack)
    while True:
        yield epoch_with_kills(service, task, batches, step)


def _step(task: Task, inputs: Path) -> float:
    return float(json.loads((inputs / _STEPS_FILE).read_text())[task.name])


def _check(steps: Elements) -> None:
    for busy, seconds in islice(steps, 2):
        expect(0 < busy <= 1000 * seconds, f"a step computes {busy} ms of {seconds} s")


def _contender(name: str, build: Build, *needs: str) -> Contender:
    role = "headrace" if name.startswith("headrace") else "peer"
    return Contender(name=name, build=build, needs=needs, role=role)  # type: ignore[arg-type]


def _workload(task: Task, needs: tuple[str, ...], *others: Contender) -> Workload:
    return Workload(
        name=f"accelerator, {task.name}",
        unit="busy ms",
        check=_check,
        reopen=False,
        self_timed=True,
        in_turns=False,
        long_rounds=True,
        contenders=(
            _contender("headrace", trained(peers.headrace(task, PROCESSES), task), *needs),
            _contender("headrace, in process", trained(peers.headrace(task), task), *needs),
            *others,
            _contender(
                f"torch DataLoader, {PROCESSES} workers",
                trained(peers.torch(task), task),
                "torch",
                *needs,
            ),
        ),
    )


def _grain(task: Task, *needs: str) -> Contender:
    build = trained(peers.grain(task), task)
    return _contender(f"grain, {PROCESSES} processes", build, "grain", *needs)


_IMAGES, _VOLUMES, _TOKENS = Images(), Volumes(), Tokens()

WORKLOADS = (
    _workload(
        _IMAGES,
        ("cv2",),
        _contender("tf.data", trained(peers.tf_data(_IMAGES), _IMAGES), "tensorflow"),
        _grain(_IMAGES, "cv2"),
    ),
    _workload(
        _VOLUMES,
        (),
        _contender("tf.data", trained(peers.tf_data(_VOLUMES), _VOLUMES), "tensorflow"),
    ),
    _workload(_TOKENS, (), _grain(_TOKENS)),
    Workload(
        name="accelerator, images, workers killed",
        unit="busy ms",
        check=_check,
        reopen=False,
        self_timed=True,
        contenders=(_contender("headrace", trained_with_kills(_IMAGES), "cv2"),),
    ),
)


def main(arguments: list[str]) -> int:
    """Measure a real device, or epochs with kills; return 2 without a device, 1 after losses."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description="Measure the utilisation of an accelerator under kills, or of a real one.",
    )
    parser.add_argument("--device", choices=("simulated", "cuda", "cpu"), default="simulated")
    parser.add_argument("--epochs", type=int, default=3, help="epochs with kills (simulated)")
    parser.add_argument("--seconds", type=float, default=165.0, help="limit of the run (a device)")
    parser.add_argument("--task", action="append", choices=[task.name for task in TASKS])
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args(arguments)
    if options.device == "simulated":
        return 0 if _run_kills(options.epochs, options.out) else 1
    try:
        accelerator_device.run(
            options.device, options.seconds, tuple(options.task or ()), options.out
        )
    except accelerator_device.DeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run_kills(epochs: int, out: Path | None) -> bool:
    """Print and store epochs with kills; return whether each sample was delivered once."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        write_inputs(Path(directory), (_IMAGES,))
        found = list(islice(_epochs(_IMAGES, Path(directory), stack), epochs))
    print(format_epochs("headrace", found))
    if out is not None:
        out.write_text(json.dumps([asdict(epoch) for epoch in found], indent=1) + "\n")
    return not any(epoch.lost or epoch.duplicated for epoch in found)


def format_epochs(name: str, epochs: list[Epoch]) -> str:
    """Return one line that describes epochs with kills."""
    busy = [round(100 * epoch.busy / epoch.seconds) for epoch in epochs]
    kills, lost, duplicated, samples = (
        sum(getattr(epoch, total) for epoch in epochs)
        for total in ("kills", "lost", "duplicated", "samples")
    )
    return (
        f"{name:16} busy {', '.join(map(str, busy))} %; {kills} kills; of {samples} samples, "
        f"{lost} lost and {duplicated} duplicated"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
