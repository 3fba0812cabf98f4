"""Measurement of contenders in interleaved rounds: A, B, C, A, B, C, ...

The speed of a machine drifts with other load, clocks and caches. Contenders are therefore compared
within a round only, and a ratio is the median of the rounds' ratios, never a ratio of two runs.
Each contender runs in its own process, so that its thread pools and allocators do not disturb the
others, which are idle while it is timed. The memory layout makes two processes of the same program
differ by a few percent for their whole lifetime; to detect differences that small, a workload runs
its rounds once more with new processes. Training loops on an accelerator run one after another
(`Workload.in_turns`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.workload import Contender, Workload

__all__ = [
    "FULL",
    "LONG_ROUNDS",
    "QUICK",
    "Effort",
    "Measurement",
    "measure",
    "ratio",
    "write_inputs",
]

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Duration and number of rounds.

    Attributes:
        seconds: Timed seconds per round.
        ramp: Seconds of warm-up before each round.
        rounds: Number of rounds.
        repeats: Number of times that workloads with `repeated` run their rounds.
    """

    seconds: float
    ramp: float
    rounds: int
    repeats: int = 2


FULL = Effort(seconds=0.5, ramp=0.2, rounds=5)
QUICK = Effort(seconds=0.2, ramp=0.1, rounds=3, repeats=1)

#: Factor of the duration of long rounds.
LONG_ROUNDS = 3

#: Seconds to wait for a contender's reply before it counts as failed.
_BUILD_DEADLINE, _ROUND_DEADLINE, _STOP_DEADLINE = 120.0, 60.0, 15.0

#: Seconds after an interrupt in which contenders may end their own processes.
_INTERRUPT_DEADLINE = 2.0


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one contender in each round, or the reason why there are none.

    Attributes:
        contender: Name of the contender.
        role: "headrace", "peer" or "limit".
        rates: Items per second, by round.
        firsts: Seconds from opening the iterator to the first element, by round.
        cpus: Seconds of processor time per item, by round.
        problem: "not installed", "failed: ...", or None if it ran.
    """

    contender: str
    role: str
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def rate(self) -> float | None:
        """The median rate, or None if it did not run."""
        return statistics.median(self.rates) if self.rates and self.problem is None else None

    @property
    def first(self) -> float | None:
        """The median seconds to the first element, or None if it did not run."""
        return statistics.median(self.firsts) if self.firsts and self.problem is None else None

    @property
    def cpu(self) -> float | None:
        """The median processor time per item, or None if it did not run."""
        return statistics.median(self.cpus) if self.cpus and self.problem is None else None


def measure(
    benchmark: str,
    workload: Workload,
    effort: Effort,
    inputs: Path,
    log: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Run the contenders of a workload in turn; return their measurements, in the same order.

    Args:
        benchmark: Name of the module of the workload in this package.
        workload: The workload to run.
        effort: Duration and number of rounds.
        inputs: Directory with the input files that the benchmark's `write_inputs` has written.
        log: Called with a description of each activity before it begins.
    """
    results = [Measurement(contender=c.name, role=c.role) for c in workload.contenders]
    length = LONG_ROUNDS if workload.long_rounds else 1
    seconds, ramp = effort.seconds * length, effort.ramp * length
    command = {"do": "round", "seconds": seconds, "ramp": ramp}
    pairs = list(zip(workload.contenders, results, strict=True))
    groups = [pairs] if workload.in_turns else [[each] for each in pairs]
    for group in groups * (effort.repeats if workload.repeated else 1):
        with _started(benchmark, workload, inputs, seconds / 2, group, log) as running:
            for number in range(effort.rounds):
                for process, result in running:
                    if result.problem is not None:
                        continue
                    log(f"round {number + 1} of {effort.rounds}, {result.contender}")
                    answer = process.ask(command, _ROUND_DEADLINE, result)
                    if answer is not None:
                        result.rates.append(answer["rate"])
                        result.firsts.append(answer["first"])
                        result.cpus.append(answer["cpu"])
    return results


@contextmanager
def _started(
    benchmark: str,
    workload: Workload,
    inputs: Path,
    seconds: float,
    contenders: list[tuple[Contender, Measurement]],
    log: Callable[[str], None],
) -> Iterator[list[tuple[_Process, Measurement]]]:
    """Start a process for each contender without a problem; stop them at the end.

    Starts are mostly imports and checks, which are not timed, so as many contenders as there are
    cores start at the same time.
    """
    running = [
        (_Process(benchmark, workload, contender, inputs), result)
        for contender, result in contenders
        if result.problem is None
    ]

    def build(process: _Process, result: Measurement) -> None:
        log(f"starting {result.contender}")
        process.ask({"do": "build", "seconds": seconds}, _BUILD_DEADLINE, result)

    starts: list[Future[None]] = []
    with ThreadPoolExecutor(usable_cores()) as pool:
        try:
            starts += [pool.submit(build, *each) for each in running]
            for start in starts:
                start.result()
            yield running
        except BaseException:
            for start in starts:
                start.cancel()
            _interrupt([process for process, _ in running])
            wait(starts)
            raise
        finally:
            for _ in pool.map(lambda each: each[0].stop(), running):
                pass


def _interrupt(processes: list[_Process]) -> None:
    """Interrupt contenders, and kill those that have not exited soon after."""
    for process in processes:
        process.interrupt()
    end = time.monotonic() + _INTERRUPT_DEADLINE
    for process in processes:
        process.kill(max(0.0, end - time.monotonic()))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ratio(
    ours: Measurement, theirs: list[Measurement], *, of_best_median: bool = False
) -> float | None:
    """Our rate over that of the fastest of `theirs`, the median over rounds; None if unknown.

    The fastest is that of each round or, with `of_best_median`, the one with the highest median.
    None also if only one of several peers did not run: the fastest of them is unknown.
    """
    if ours.rate is None or not theirs or any(m.rate is None for m in theirs):
        return None
    if of_best_median:
        theirs = [max(theirs, key=lambda m: m.rate or 0.0)]
    rounds = zip(ours.rates, *(m.rates for m in theirs), strict=True)
    return float(statistics.median(own / max(others) for own, *others in rounds))


def write_inputs(benchmark: str, inputs: Path) -> None:
    """Write the input files of a benchmark, in a separate process.

    Raises:
        RuntimeError: If the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contender", benchmark, str(inputs)],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"cannot write the inputs of {benchmark}: {_last_line(done.stderr)}")


class _Process:
    """Process of one contender, in its own process group, which `stop` kills."""

    def __init__(
        self, benchmark: str, workload: Workload, contender: Contender, inputs: Path
    ) -> None:
        # Closed by stop(): the process writes to it for its whole lifetime.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender", benchmark, workload.name,
             contender.name, str(inputs)],
            cwd=_ROOT, env=os.environ | _QUIET, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self._unread = b""

    def __enter__(self) -> _Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def ask(
        self, command: dict[str, Any], deadline: float, result: Measurement
    ) -> dict[str, Any] | None:
        """Send a command; return the reply, or record the problem in `result` and return None."""
        try:
            self._send(command)
            answer = self._receive(deadline)
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # it may close its output before it exits
                self._process.wait(_STOP_DEADLINE)
            code = self._process.poll()
            ended = "no exit" if code is None else f"exit status {code}"
            result.problem = f"failed: {ended}: {self._last_error_line()}"
        except TimeoutError:
            result.problem = f"failed: no reply within {deadline:.0f} s: {self._last_error_line()}"
        else:
            if "missing" in answer:
                result.problem = "not installed"
            elif "failed" in answer:
                result.problem = "failed: " + " ".join(answer["failed"].split())[:300]
            else:
                return answer
        self.stop()
        return None

    def interrupt(self) -> None:
        """Interrupt the process as Ctrl-C would, so that it ends its own processes and exits."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self, after: float) -> None:
        """Wait `after` seconds for the process to exit, then kill what is left of its group."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(after)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the process and its descendants. Idempotent."""
        if self._errors.closed:
            return
        with suppress(OSError):
            self._send({"do": "stop"})
        self.kill(_STOP_DEADLINE)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + deadline
        while b"\n" not in self._unread:
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, end - time.monotonic())
            )
            if not ready:
                raise TimeoutError
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise EOFError
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error_line(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        return _last_line(self._errors.read().decode(errors="replace"))


#: Environment variables that turn off log messages and the search for accelerators.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR", "CUDA_VISIBLE_DEVICES": ""}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
