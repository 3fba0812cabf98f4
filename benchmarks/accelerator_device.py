"""Utilisation of a real accelerator by training loops in PyTorch and JAX.

    python -m benchmarks.accelerator --device cuda --out FILE

Each framework runs in its own process. For each task of `accelerator_inputs`, the depth of the
model is chosen so that a training step lasts as long as an input pipeline on 75 % of the cores
needs for a batch. Utilisation is the duration of a step whose batch is on the device already,
divided by the mean time between steps of the training loop. Loops queue at most two steps.
"""
# ruff: noqa: PLC0415  (each contender imports its own framework)

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator_inputs import TASKS, Task, load, step_seconds
from benchmarks.accelerator_models import Step, Wait, ideal_seconds, jax_step, torch_step

__all__ = ["DeviceError", "Row", "format_rows", "run"]

FRAMEWORKS = ("torch", "jax")

_BATCHES = 1_000_000
_WINDOWS, _WINDOW_SECONDS = 3, 0.8

#: Seconds that the measurement of a contender takes at most, on a device that is fast enough.
_CONTENDER_SECONDS = 8.0

#: Share of the time for the first framework, which has more contenders.
_FIRST_SHARE = 0.65

_MAX_DEPTH = 64
_NO_DEVICE = 3
_TIME_OVER = "left out: the time is over"

Open = Callable[[ExitStack], Iterator[Any]]
"""Opens a pipeline; yields batches of samples on the device, and their numbers."""


class DeviceError(Exception):
    """No framework can use the device."""


@dataclass(kw_only=True)
class Row:
    """The result of one contender.

    Attributes:
        framework: "torch" or "jax".
        task: Name of the task.
        contender: Name of the contender.
        step_ms: Milliseconds of a step whose batch is on the device already.
        utilisation: Share of the time in which the device computes, by window.
        problem: Why there is no result, or None.
    """

    framework: str
    task: str = ""
    contender: str = ""
    step_ms: float = 0.0
    utilisation: list[float] = field(default_factory=list)
    problem: str | None = None


def run(device: str, seconds: float, tasks: tuple[str, ...] = (), out: Path | None = None) -> None:
    """Measure all frameworks, print the table, and write the results to `out` as JSON.

    Args:
        device: "cuda" or "cpu".
        seconds: Maximum seconds of the whole run; contenders that do not fit are left out.
        tasks: Names of tasks; none for all.
        out: File to write.

    Raises:
        DeviceError: If no framework can use the device.
    """
    end = time.monotonic() + seconds
    chosen = [task for task in TASKS if not tasks or task.name in tasks]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        prepared = {}
        for task in chosen:
            task.write(Path(root))
            prepared[task.name] = step_seconds(task, Path(root))
        for index, framework in enumerate(FRAMEWORKS):
            rest = end - time.monotonic()
            share = rest if index == len(FRAMEWORKS) - 1 else _FIRST_SHARE * rest
            rows += _run_framework(framework, device, share, root, prepared)
    if all(row.problem is not None and not row.task for row in rows):
        reasons = "; ".join(f"{row.framework}: {row.problem}" for row in rows)
        raise DeviceError(f"no framework can use device {device!r} ({reasons})")
    print(format_rows(rows))
    if out is not None:
        result = {
            "device": device,
            "cores": _cores(),
            "python": sys.version.split()[0],
            "step_ms": {name: 1e3 * value for name, value in prepared.items()},
            "rows": [asdict(row) for row in rows],
        }
        out.write_text(json.dumps(result, indent=1) + "\n")


def format_rows(rows: list[Row]) -> str:
    """Return the results as a table."""
    lines = [f"{'framework':10} {'task':8} {'contender':34} {'step':>8}  utilisation (windows)"]
    for row in rows:
        found = f"{row.framework:10} {row.task:8} {row.contender:34} {row.step_ms:5.1f} ms"
        if row.problem is not None:
            lines.append(f"{found}  {row.problem}")
            continue
        windows = ", ".join(f"{100 * share:.0f}" for share in row.utilisation)
        lines.append(f"{found}  {100 * statistics.median(row.utilisation):3.0f} % ({windows})")
    return "\n".join(lines)


def _run_framework(
    framework: str, device: str, seconds: float, root: str, prepared: dict[str, float]
) -> list[Row]:
    """Measure a framework in its own process, which prints a row per line as JSON."""
    if find_spec(framework) is None:
        return [Row(framework=framework, problem="not installed")]
    command = [sys.executable, "-m", "benchmarks.accelerator_device", framework, device]
    command += [str(seconds), root, json.dumps(prepared)]
    rows = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | _ENVIRONMENT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            for line in process.stdout:
                rows.append(Row(**json.loads(line)))
                print(format_rows(rows[-1:]).splitlines()[1], file=sys.stderr, flush=True)
            process.wait()
        finally:
            watchdog.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode not in (0, _NO_DEVICE):
        over = process.returncode == -signal.SIGKILL
        problem = _TIME_OVER if over else f"failed: exit status {process.returncode}"
        rows.append(Row(framework=framework, contender="the rest", problem=problem))
    return rows


#: JAX takes memory as it needs it, rather than most of the device's at once.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _serve(arguments: list[str]) -> int:
    """Measure the contenders of one framework; print rows."""
    framework, device, seconds, root, prepared = arguments
    end = time.monotonic() + float(seconds)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # frameworks print to standard output

    def reply(row: Row) -> None:
        replies.write(json.dumps(asdict(row)) + "\n")
        replies.flush()

    missing = _missing_device(framework, device)
    if missing is not None:
        reply(Row(framework=framework, problem=missing))
        return _NO_DEVICE
    for name, target in json.loads(prepared).items():
        task = next(task for task in TASKS if task.name == name)
        for row in _measure_task(framework, device, task, Path(root), target, end):
            reply(row)
    return 0


def _missing_device(framework: str, device: str) -> str | None:
    """Return why a framework cannot use a device, or None."""
    if device == "cpu":
        if framework == "jax":
            os.environ["JAX_PLATFORMS"] = "cpu"
        return None
    if framework == "torch":
        import torch

        return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"jax {jax.__version__} finds no GPU ({' '.join(str(error).split())[:80]})"
    return None


def _measure_task(
    framework: str, device: str, task: Task, inputs: Path, target: float, end: float
) -> Iterator[Row]:
    make_step = torch_step if framework == "torch" else jax_step
    to_device = _torch_to(device) if framework == "torch" else _jax_put()
    resident, _ = to_device(
        (np.stack([task.prepare(inputs, n) for n in range(task.batch)]), np.arange(task.batch))
    )
    depth = _choose_depth(make_step, task.name, device, resident, target)
    step, wait = make_step(task.name, device, depth)
    ideal = ideal_seconds(step, wait, resident, 1.0)
    for name, build in _contenders(framework, device, task, inputs).items():
        row = Row(framework=framework, task=task.name, contender=name, step_ms=1e3 * ideal)
        if end - time.monotonic() < _CONTENDER_SECONDS:
            row.problem = _TIME_OVER
        else:
            try:
                with ExitStack() as stack:
                    times = _time_steps(build(stack), task, step, wait)
                row.utilisation = [ideal / each for each in times]
            except Exception as error:
                row.problem = f"failed: {type(error).__name__}: {error}"[:300]
        yield row


def _choose_depth(
    make_step: Callable[[str, str, int], tuple[Step, Wait]],
    task: str,
    device: str,
    samples: Any,
    target: float,
) -> int:
    """Return the number of blocks with which a step lasts about `target` seconds."""
    few, many = 2, 6
    short, long = (ideal_seconds(*make_step(task, device, n), samples, 0.2) for n in (few, many))
    per_block = max(1e-6, (long - short) / (many - few))
    return min(_MAX_DEPTH, max(1, round(few + (target - short) / per_block)))


def _time_steps(batches: Iterator[Any], task: Task, step: Step, wait: Wait) -> list[float]:
    """Return the mean seconds between steps, by window, after a window that is not counted."""
    times: list[float] = []
    before = None
    for _ in range(1 + _WINDOWS):
        began, steps = time.perf_counter(), 0
        while steps < 5 or time.perf_counter() - began < _WINDOW_SECONDS:
            samples, numbers = next(batches)
            if before is None and len(set(numbers.tolist())) != task.batch:
                raise ValueError(f"wrong data: the first batch has the samples {numbers}")
            done = step(samples)
            if before is not None:
                wait(before)
            before, steps = done, steps + 1
        wait(before)
        times.append((time.perf_counter() - began) / steps)
    return times[1:]


# --- contenders -----------------------------------------------------------------------------------


def _contenders(framework: str, device: str, task: Task, inputs: Path) -> dict[str, Open]:
    cores = _cores()
    if framework == "jax":
        return {
            "hr.jax.device_iterator": lambda stack: stack.enter_context(
                _device_iterator(_threads(task, inputs))
            ),
            "jax.device_put by hand": lambda stack: map(
                _jax_put(), stack.enter_context(closing(iter(_threads(task, inputs).prefetch(2))))
            ),
        }
    contenders: dict[str, Open] = {
        "headrace, threads": lambda stack: _loader(_threads(task, inputs), device, stack),
        f"headrace service, {cores} workers": lambda stack: _loader(
            _service(task, inputs, cores, stack), device, stack
        ),
        f"torch DataLoader, {cores} workers": lambda stack: map(
            _torch_to(device), _data_loader(task, inputs, cores, device, stack)
        ),
    }
    if task.name == "tokens":  # threads take turns
        contenders[f"headrace, {cores} processes"] = lambda stack: _loader(
            _processes(task, inputs, cores), device, stack
        )
    return contenders


def _threads(task: Task, inputs: Path) -> Any:
    import headrace as hr

    return (
        hr.Dataset.range(_BATCHES * task.batch)
        .map(load(task, inputs), num_parallel_calls=hr.AUTOTUNE)
        .batch(task.batch)
    )


def _processes(task: Task, inputs: Path, processes: int) -> Any:
    import headrace as hr

    dataset = hr.Dataset.range(_BATCHES * task.batch).map(load(task, inputs)).batch(task.batch)
    return dataset.in_processes(processes)


def _service(task: Task, inputs: Path, workers: int, stack: ExitStack) -> Any:
    import headrace as hr

    cluster = stack.enter_context(hr.service.LocalCluster(num_workers=workers, processes=True))
    dataset = hr.Dataset.range(_BATCHES * task.batch).map(load(task, inputs)).batch(task.batch)
    return dataset.apply(hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target))


def _loader(dataset: Any, device: str, stack: ExitStack) -> Iterator[Any]:
    import headrace as hr

    return stack.enter_context(closing(iter(hr.torch.loader(dataset, device))))


def _device_iterator(dataset: Any) -> Any:
    import headrace as hr

    return hr.jax.device_iterator(dataset)


def _data_loader(
    task: Task, inputs: Path, workers: int, device: str, stack: ExitStack
) -> Iterator[Any]:
    from torch.utils.data import DataLoader, Dataset

    prepared = load(task, inputs)

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return _BATCHES

        def __getitem__(self, number: int) -> Any:
            return prepared(number)

    loader = DataLoader(
        Samples(), batch_size=task.batch, num_workers=workers, pin_memory=device == "cuda"
    )
    batches = iter(loader)
    stack.callback(batches._shutdown_workers)
    return batches


def _torch_to(device: str) -> Callable[[Any], Any]:
    import torch

    def copied(batch: Any) -> Any:
        samples, numbers = batch
        return torch.as_tensor(samples).to(device, non_blocking=True), numbers

    return copied


def _jax_put() -> Callable[[Any], Any]:
    import jax

    return jax.device_put


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1:]))
