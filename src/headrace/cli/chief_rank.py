"""Rank 0 of `headrace up`: the dispatcher, and the user's program."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping

from headrace.cli.run_server import PARENT_SIGNALS, STOP_SIGNALS, Signals, print_line
from headrace.cli.step_options import STOP_SECONDS, RankProcesses, StepOptions, warn
from headrace.deploy.slurm_step import SlurmStep
from headrace.deploy.step_directory import StepPublisher
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from headrace.process.child import NO_ACCELERATORS, clean_environment
from headrace.process.program import Program
from headrace.service.worker_scaler import WorkerScaler
from headrace.transport import address as addresses
from headrace.transport.security import Security
from headrace.waiting import WaitWarningLimiter

__all__ = ["ChiefRank"]

_START_INTERVAL = 0.2
_INTERVAL = 1.0


class ChiefRank:
    """Runs the dispatcher and the user's program, and ends the step with it.

    Args:
        step: This rank.
        options: Options of the command.
    """

    def __init__(self, step: SlurmStep, options: StepOptions) -> None:
        self._step = step
        self._options = options
        self._publisher = StepPublisher(options.directory)
        port = step.find_port(options.host)
        self._dispatcher = addresses.join(options.host, port)
        #: Listed in TF_CONFIG; nothing listens there unless the program does.
        self._own_address = addresses.join(options.host, port + 1)
        self._workers = _StepWorkers(step.num_worker_ranks)
        self._program: Program | None = None
        self._terminate_at: float | None = None

    def run(self) -> int:
        """Run the step; return the exit status of the program, or 0 without one.

        Raises:
            DeadlineExceededError: If another rank did not start in time.
            UnavailableError: If another rank, or the dispatcher, failed to start.
            FailedPreconditionError: If the program cannot be started.
        """
        status = 0
        with Signals(children=True, ignored=PARENT_SIGNALS - STOP_SIGNALS) as signals:
            # Without a journal, a restarted dispatcher would know none of the jobs.
            processes = RankProcesses(signals, restarts=self._options.work_dir is not None)
            try:
                self._start_dispatcher(processes)
                self._wait_for_ranks(processes, signals)
                with self._scale_workers():
                    status = self._run_step(processes, signals)
            except CancelledError:
                pass
            finally:
                self._end_step(processes, signals)
        print_line("rank 0 stopped")
        return status

    def _start_dispatcher(self, processes: RankProcesses) -> None:
        host, port = addresses.split(self._dispatcher)
        arguments = ["dispatcher", "--host", host, "--port", str(port)]
        arguments += ["--keys", str(self._publisher.keys)]
        if self._options.work_dir is not None:
            arguments += ["--fault-tolerant", "--work-dir", str(self._options.work_dir)]
        processes.start(arguments, {**clean_environment(os.environ), **NO_ACCELERATORS})

    def _scale_workers(self) -> contextlib.AbstractContextManager[object]:
        """Let the number of workers follow the demand, if a rank may run several."""
        num_ranks, limit = self._step.num_worker_ranks, self._options.max_workers_per_rank
        if limit == 1:
            return contextlib.nullcontext()
        return WorkerScaler(
            f"tcp://{self._dispatcher}",
            self._workers,
            min_workers=num_ranks,
            max_workers=num_ranks * limit,
            security=Security.load(self._publisher.keys, "client"),
        )

    def _run_step(self, processes: RankProcesses, signals: Signals) -> int:
        ranks = self._publisher.ranks()
        service = f"tcp://{self._dispatcher}"
        print_line(
            f"step {self._step.job_id}.{self._step.step_id} ready: data service at {service}, keys "
            f"in {self._publisher.keys}"
        )
        if self._options.program:
            found = {rank: state.address for rank, state in ranks.items()}
            self._program = self._start_program(service, found)
        while True:
            received = signals.wait(_INTERVAL)
            self._beat(processes, received)
            if self._program is None:
                if self._terminate_at is not None:
                    return 0
            elif (status := self._program.exit_status) is not None:
                return status
            elif self._terminate_at is not None and time.monotonic() > self._terminate_at:
                warn(
                    f"the program still runs {self._options.grace:g} s after SIGTERM: killing it; "
                    "give it more time with --grace, and KillWait in slurm.conf"
                )
                self._program.kill()

    def _start_program(self, service: str, addresses_of_ranks: Mapping[int, str]) -> Program:
        config = {
            "cluster": self._step.cluster(self._own_address, addresses_of_ranks),
            "task": {"type": "chief", "index": 0},
        }
        environment = {
            **os.environ,
            "HEADRACE_SERVICE": service,
            "HEADRACE_DISPATCHER": self._dispatcher,
            "HEADRACE_KEYS": str(self._publisher.keys),
            "TF_CONFIG": json.dumps(config),
        }
        try:
            return Program(self._options.program, environment)
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot start the program {self._options.program[0]!r}: {error.strerror}; it must "
                "be an executable file, given by its path or found on PATH on the node of rank 0"
            ) from error

    def _wait_for_ranks(self, processes: RankProcesses, signals: Signals) -> None:
        """Wait until the dispatcher and the servers of all ranks are ready."""
        began = time.monotonic()
        warnings = WaitWarningLimiter()
        while True:
            received = signals.wait(_START_INTERVAL)
            self._beat(processes, received)
            if self._terminate_at is not None:
                raise CancelledError("stopped before all ranks were ready")
            ranks = self._publisher.ranks()
            failed = {rank: state.error for rank, state in ranks.items() if state.error}
            if failed:
                raise UnavailableError(
                    "; ".join(f"rank {rank}: {error}" for rank, error in sorted(failed.items()))
                )
            missing = [rank for rank in range(1, self._step.num_ranks) if rank not in ranks]
            if not missing and processes.are_ready:
                return
            waited = time.monotonic() - began
            text = (
                f"{len(missing)} of {self._step.num_ranks} ranks are not ready after "
                f"{waited:.0f} s: {_describe_numbers(missing)}; is {self._options.directory} on a "
                "file system that all nodes share (--run-dir)?"
            )
            if waited > self._options.timeout:
                raise DeadlineExceededError(text)
            if warnings.should_warn(waited):
                warn(text)

    def _beat(self, processes: RankProcesses, received: frozenset[int]) -> None:
        """Supervise the dispatcher and publish that this rank is alive."""
        if STOP_SIGNALS & received:
            again = self._terminate_at is not None
            self._terminate_at = time.monotonic() + (0.0 if again else self._options.grace)
        processes.poll()
        if processes.has_failed:
            raise UnavailableError("the dispatcher failed; its message is above")
        self._publisher.publish(
            dispatcher=self._dispatcher if processes.are_ready else None,
            num_workers=self._workers.num_workers(),
        )

    def _end_step(self, processes: RankProcesses, signals: Signals) -> None:
        """Ask the other ranks to stop, wait for them, and stop the dispatcher last."""
        if self._program is not None:
            self._program.kill()
        try:
            self._publisher.publish(stage="stopping")
            deadline = time.monotonic() + STOP_SECONDS
            if self._terminate_at is not None:
                deadline = max(deadline, self._terminate_at)
            while time.monotonic() < deadline:
                if all(state.error for state in self._publisher.ranks().values()):
                    break
                if STOP_SIGNALS & signals.wait(_START_INTERVAL):
                    break
                self._publisher.publish()
        finally:
            processes.stop(STOP_SECONDS)
            self._publisher.remove()


class _StepWorkers:
    """Number of data workers of the step: set by a `WorkerScaler`, published for the ranks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def num_workers(self) -> int:
        return self._count

    def start_workers(self, count: int) -> None:
        self._count += count

    def stop_workers(self, count: int) -> None:
        self._count -= count


def _describe_numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown} and {len(numbers) - 10} more"
