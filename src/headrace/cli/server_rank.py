"""A rank of `headrace up` other than rank 0: a parameter server, or workers."""

from __future__ import annotations

import json
import os
import time

from headrace.cli.run_server import PARENT_SIGNALS, STOP_SIGNALS, Signals, print_line
from headrace.cli.step_options import STOP_SECONDS, RankProcesses, StepOptions, warn
from headrace.cluster.spec import WORKER
from headrace.deploy.slurm_step import SlurmStep
from headrace.deploy.step_directory import RankState, StepFollower, StepState
from headrace.errors import CancelledError, DeadlineExceededError
from headrace.process.child import NO_ACCELERATORS, clean_environment
from headrace.process.parent_link import large_copy_tunables
from headrace.transport import address as addresses
from headrace.waiting import WaitWarningLimiter

__all__ = ["ServerRank"]

_START_INTERVAL = 0.2
_INTERVAL = 1.0


class ServerRank:
    """Runs the servers of one rank until rank 0 ends the step.

    Args:
        step: This rank.
        options: Options of the command.
    """

    def __init__(self, step: SlurmStep, options: StepOptions) -> None:
        self._step = step
        self._options = options
        self._follower = StepFollower(options.directory, step.rank)
        self._role = "{} {}".format(*step.task)

    def run(self) -> int:
        """Run the servers; return the exit status of this rank.

        Raises:
            DeadlineExceededError: If rank 0 did not appear, or has been silent for too long.
        """
        with Signals(children=True, ignored=PARENT_SIGNALS - STOP_SIGNALS) as signals:
            try:
                state = self._wait_for_chief(signals)
            except CancelledError:
                return 0
            processes = RankProcesses(signals)
            drain_seconds = STOP_SECONDS
            try:
                self._start(processes, state)
                drain_seconds = self._serve(processes, signals)
            finally:
                processes.stop(drain_seconds)
                if not processes.has_failed:
                    self._follower.leave()
        print_line(f"rank {self._step.rank} stopped")
        return int(processes.has_failed)

    def _wait_for_chief(self, signals: Signals) -> StepState:
        warnings = WaitWarningLimiter()
        while True:
            now = time.monotonic()
            state = self._follower.poll(now)
            if state is not None and state.dispatcher:
                return state
            waited = self._follower.silent_seconds(now)
            if waited > self._options.timeout:
                raise DeadlineExceededError(self._describe_silence(waited))
            if warnings.should_warn(waited):
                warn(f"{self._role}: {self._describe_silence(waited)}")
            if STOP_SIGNALS & signals.wait(_START_INTERVAL):
                raise CancelledError("stopped before rank 0 was ready")

    def _describe_silence(self, waited: float) -> str:
        place = self._options.directory
        if self._follower.has_stale_state:
            found = f"{place} has only files of an earlier attempt"
        elif not place.exists():
            found = f"{place} does not exist on this node"
        else:
            found = f"rank 0 has not updated {place}"
        return (
            f"no sign of rank 0 for {waited:.0f} s: {found}. Rank 0 or its node failed, or "
            "--run-dir is not on a file system that all nodes share"
        )

    def _start(self, processes: RankProcesses, state: StepState) -> None:
        options, (task_type, index) = self._options, self._step.task
        keys = str(self._follower.keys)
        self._address = addresses.join(options.host, self._step.find_port(options.host))
        environment = clean_environment(os.environ)
        preload = [word for module in options.preload for word in ("--preload", module)]
        task = ["server", "--type", task_type, "--index", str(index), "--keys", keys]
        cluster = {"cluster": {task_type: {str(index): self._address}}}
        task_environment = {**environment, "TF_CONFIG": json.dumps(cluster)}
        if task_type != WORKER:
            processes.start(task, {**task_environment, **NO_ACCELERATORS})
            return
        # A coordinator worker trains on the accelerators of its rank, a data worker needs none.
        processes.start([*task, *preload], task_environment)
        self._data_worker = ["worker", "--dispatcher", state.dispatcher, "--host", options.host]
        self._data_worker += ["--keys", keys, "--drain-timeout", str(options.grace), *preload]
        self._data_environment = {
            **environment,
            **large_copy_tunables(environment),
            **NO_ACCELERATORS,
        }
        processes.start(self._data_worker, self._data_environment)

    def _serve(self, processes: RankProcesses, signals: Signals) -> float:
        """Serve until the step ends; return the seconds that the servers have to stop.

        Raises:
            DeadlineExceededError: If rank 0 has been silent for too long.
        """
        terminate_at: float | None = None
        is_published = False
        while True:
            received = signals.wait(_INTERVAL if is_published else _START_INTERVAL)
            now = time.monotonic()
            if STOP_SIGNALS & received:
                if terminate_at is not None:
                    return 0.0
                terminate_at = now + self._options.grace
            processes.poll()
            if processes.has_failed:
                self._follower.publish(RankState(error=f"a server of {self._role} failed"))
                return STOP_SECONDS
            if not is_published and processes.are_ready:
                self._follower.publish(RankState(address=self._address))
                is_published = True
            state = self._follower.poll(now)
            silence = self._follower.silent_seconds(now)
            if silence > self._options.timeout:
                raise DeadlineExceededError(self._describe_silence(silence))
            if state is not None and state.stage == "stopping":
                remaining = self._options.grace if terminate_at is None else terminate_at - now
                return max(remaining, STOP_SECONDS)
            if state is not None and self._step.task[0] == WORKER:
                additional = self._step.share(state.num_workers) - 1
                processes.scale(additional, self._data_worker, self._data_environment)
            if terminate_at is not None and now >= terminate_at:
                return STOP_SECONDS
