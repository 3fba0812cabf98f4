"""Time contenders in turn, in the same run: A, B, C, A, B, C, ...

Machines drift: other work, clocks, caches. A contender is therefore compared with another only
round by round, and a ratio is the median of the rounds' ratios, never a ratio of two runs. Each
contender lives in its own process, so that no thread pool or allocator of one disturbs another;
while one is timed the others wait for a command. Where pages lie in memory makes two processes
of the same program differ by some percent for as long as they live: where as little is looked for,
they are begun anew after a few rounds.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.workload import Contender, Workload

__all__ = ["FULL", "QUICK", "Effort", "Measurement", "measure", "ratio", "write_inputs"]

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long and how often: seconds a round, seconds of ramp before it, number of rounds."""

    seconds: float
    ramp: float
    rounds: int


FULL = Effort(seconds=1.2, ramp=0.4, rounds=5)
QUICK = Effort(seconds=0.3, ramp=0.1, rounds=2)

#: Seconds after which a contender that does not answer has failed.
_BUILD_DEADLINE, _ROUND_DEADLINE, _STOP_DEADLINE = 120.0, 60.0, 15.0


@dataclass(kw_only=True)
class Measurement:
    """What one contender did: a rate a round, or the reason why there is none.

    Attributes:
        contender: Its name.
        role: "headrace", "peer" or "limit".
        rates: Items per second, by round.
        firsts: Seconds from opening an iterator to its first element, by round.
        cpus: Seconds of processor time for an item, by round.
        problem: "not installed" or "failed: ..."; None when it ran.
    """

    contender: str
    role: str
    rates: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def rate(self) -> float | None:
        """The median rate, None when it did not run."""
        return statistics.median(self.rates) if self.rates and self.problem is None else None

    @property
    def first(self) -> float | None:
        """The median seconds to the first element, None when it did not run."""
        return statistics.median(self.firsts) if self.firsts and self.problem is None else None

    @property
    def cpu(self) -> float | None:
        """The median processor time for an item, None when it did not run."""
        return statistics.median(self.cpus) if self.cpus and self.problem is None else None


def measure(
    question: str,
    workload: Workload,
    effort: Effort,
    inputs: Path,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Run all contenders of a workload in turn; returns a measurement each, in their order.

    Args:
        question: The module of the workload inside this package.
        workload: What to run.
        effort: How long and how often.
        inputs: The folder that the question's `write_inputs` has filled.
        say: Is told what goes on.
    """
    results = [Measurement(contender=c.name, role=c.role) for c in workload.contenders]
    seconds, ramp = effort.seconds * workload.stretch, effort.ramp * workload.stretch
    command = {"do": "round", "seconds": seconds, "ramp": ramp}
    running: list[tuple[_Process, Measurement]] = []
    rounds = effort.rounds * workload.times_rounds
    try:
        for number in range(rounds):
            if number % (workload.renew_after or rounds) == 0:
                _stop(running)
                _begin(question, workload, inputs, seconds / 2, results, running, say)
            for process, result in running:
                if result.problem is not None:
                    continue
                answer = process.ask(command, _ROUND_DEADLINE, result)
                if answer is not None:
                    result.rates.append(answer["rate"])
                    result.firsts.append(answer["first"])
                    result.cpus.append(answer["cpu"])
            say(f"{workload.name} · round {number + 1} of {rounds}")
    finally:
        _stop(running)
    return results


def _begin(
    question: str,
    workload: Workload,
    inputs: Path,
    seconds: float,
    results: list[Measurement],
    running: list[tuple[_Process, Measurement]],
    say: Callable[[str], None],
) -> None:
    """Begin the contenders that have no problem, each in a process that is added to `running`."""
    for contender, result in zip(workload.contenders, results, strict=True):
        if result.problem is None:
            process = _Process(question, workload, contender, inputs)
            running.append((process, result))
            process.ask({"do": "build", "seconds": seconds}, _BUILD_DEADLINE, result)
            say(f"{workload.name} · {contender.name}: {result.problem or 'ready'}")


def _stop(running: list[tuple[_Process, Measurement]]) -> None:
    while running:
        process, _ = running[-1]
        process.stop()
        running.pop()


def ratio(ours: Measurement, theirs: list[Measurement]) -> float | None:
    """Our rate over that of the fastest of `theirs`, the median over rounds; None if unknown.

    Unknown also when one of several did not run: the best of them would be a guess.
    """
    if ours.rate is None or not theirs or any(m.rate is None for m in theirs):
        return None
    rounds = zip(ours.rates, *(m.rates for m in theirs), strict=True)
    return float(statistics.median(own / max(others) for own, *others in rounds))


def write_inputs(question: str, inputs: Path) -> None:
    """Write a question's input files, in a process of its own.

    Raises:
        RuntimeError: They could not be written.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contender", question, str(inputs)],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"cannot write the inputs of {question}: {_last_line(done.stderr)}")


class _Process:
    """One contender in its own process, and in its own process group so that none is left."""

    def __init__(
        self, question: str, workload: Workload, contender: Contender, inputs: Path
    ) -> None:
        # Closed by stop(), not here: the process writes to it as long as it lives.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender", question, workload.name,
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
        """Send a command; returns the answer, or notes the problem in `result`."""
        try:
            self._send(command)
            answer = self._receive(deadline)
        except (OSError, EOFError):
            code = self._process.wait(_STOP_DEADLINE)
            result.problem = f"failed: ended with status {code}: {self._last_words()}"
        except TimeoutError:
            result.problem = f"failed: no answer within {deadline:.0f} s: {self._last_words()}"
        else:
            if "missing" in answer:
                result.problem = "not installed"
            elif "failed" in answer:
                result.problem = "failed: " + " ".join(answer["failed"].split())[:300]
            else:
                return answer
        self.stop()
        return None

    def stop(self) -> None:
        """End the process and whatever it started; may be called twice."""
        if self._errors.closed:
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            self._send({"do": "stop"})
            self._process.wait(_STOP_DEADLINE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
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

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        return _last_line(self._errors.read().decode(errors="replace"))


#: Peers that log to standard error, or look for accelerators, by default.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR", "CUDA_VISIBLE_DEVICES": ""}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
