"""Two ways to run a step in tests: a replacement of srun, and Slurm itself on one machine."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from headrace.transport import address as addresses

SECONDS = 120.0
HAS_SLURM = all(map(shutil.which, ("slurmctld", "slurmd", "srun", "scancel", "sbatch")))
FAKE_SRUN = Path(__file__).with_name("fake_srun.py")
HEADRACE = [sys.executable, "-m", "headrace"]


def wait_until(is_met, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_met():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS:g} s"
        time.sleep(0.05)


def kill(processes) -> None:
    """Kill all processes before one of them can act on the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Step:
    """A running step and the lines that its ranks have printed."""

    def __init__(self, command, *, job_id, cancel, env, cwd):
        self.job_id = job_id
        self._cancel = cancel
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()

    def find(self, pattern, count=1):
        """Wait until `count` lines match; return the matches."""

        def found():
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= count, SECONDS), (
                f"no {count} lines like {pattern!r} in:\n" + "\n".join(self.lines)
            )
            return found()

    def cancel(self):
        """Send SIGTERM to all processes of the step, as scancel does."""
        self._cancel(self)

    def processes(self, rank):
        """Return the process of a rank, and then its descendants."""
        for process in self.find_processes(SLURM_PROCID=str(rank)):
            if "up" in process.cmdline():
                return [process, *process.children(recursive=True)]
        raise AssertionError(f"no process of rank {rank}")

    def find_processes(self, **variables):
        """Return the processes of this step that were started with these variables."""
        variables["SLURM_JOB_ID"] = str(self.job_id)
        variables["HEADRACE_TEST_STEP"] = os.environ["HEADRACE_TEST_STEP"]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if variables.items() <= process.environ().items():
                    found.append(process)
        return found

    def end(self):
        """Wait for the end of the step; return its exit status."""
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        self.process.stdout.close()
        return status

    def close(self):
        if self.process.poll() is None:
            self._cancel(self)
        if not self.process.stdout.closed:
            self.end()


class FakeSlurm:
    """Runs steps with `fake_srun.py`."""

    name = "fake"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.steps: list[Step] = []

    def run(self, ntasks, *command, env=None, job_id=None):
        job_id = random.randrange(1, 1 << 20) if job_id is None else job_id
        step = Step(
            [
                *(sys.executable, str(FAKE_SRUN), "--ntasks", str(ntasks)),
                *("--job-id", str(job_id), *command),
            ],
            job_id=job_id,
            cancel=lambda step: step.process.send_signal(signal.SIGTERM),
            env=env or {},
            cwd=self._directory,
        )
        self.steps.append(step)
        return step

    def lose_node(self, step, rank):
        """Kill all processes of a rank, as if its node lost power."""
        kill(step.find_processes(SLURM_PROCID=str(rank)))

    def close(self):
        for step in self.steps:
            step.close()


class Slurm:
    """A controller and three node daemons of Slurm on this machine, which need no privileges."""

    name = "slurm"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.steps: list[Step] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        host, user = socket.gethostname().partition(".")[0], os.getuid()
        ports = [addresses.find_stable_port() for _ in range(4)]
        (directory / "state").mkdir(mode=0o700)
        nodes = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 "
            "RealMemory=1000 State=UNKNOWN"
            for number, port in enumerate(ports[1:], 1)
        ]
        config = directory / "slurm.conf"
        config.write_text(
            "\n".join(
                [
                    "ClusterName=test",
                    f"SlurmctldHost={host}(127.0.0.1)",
                    f"SlurmctldPort={ports[0]}",
                    "AuthType=auth/none",
                    "CredType=cred/none",
                    f"SlurmUser=#{user}" if user else "SlurmUser=root",
                    "SlurmdUser=root",
                    f"StateSaveLocation={directory}/state",
                    f"SlurmdSpoolDir={directory}/spool-%n",
                    f"SlurmctldPidFile={directory}/slurmctld.pid",
                    f"SlurmdPidFile={directory}/slurmd-%n.pid",
                    f"SlurmctldLogFile={directory}/slurmctld.log",
                    f"SlurmdLogFile={directory}/slurmd-%n.log",
                    "ProctrackType=proctrack/linuxproc",
                    "TaskPlugin=task/none",
                    "SelectType=select/cons_tres",
                    "SelectTypeParameters=CR_CPU",
                    "SchedulerParameters=bf_interval=1,sched_min_interval=1",
                    "SlurmdParameters=config_overrides",
                    "ReturnToService=2",
                    "SlurmdTimeout=5",
                    "KillWait=60",
                    "MpiDefault=none",
                    *nodes,
                    "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
                ]
            )
        )
        self.env = {"SLURM_CONF": str(config)}
        self._start("slurmctld", "-D", "-c", "-f", str(config))
        for number in (1, 2, 3):
            (directory / f"spool-n{number}").mkdir()
            self._start("slurmd", "-D", "-f", str(config), "-N", f"n{number}")
        wait_until(lambda: "3 idle" in self.ask("sinfo", "-h", "-o", "%D %t"), "three idle nodes")

    def _start(self, *command):
        log = (self._directory / f"{command[0]}-{len(self._daemons)}.out").open("wb")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def ask(self, *command):
        """Run a command of Slurm; return its output."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.env},
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return done.stdout + done.stderr

    def run(self, ntasks, *command, env=None):
        # The number of the job is known before it starts: `salloc` would need a terminal.
        name = f"step{len(self.steps)}"
        step = Step(
            ["srun", "--label", "--job-name", name, "--nodes=3", f"--ntasks={ntasks}", *command],
            job_id=None,
            cancel=lambda step: self.ask("scancel", step.job_id),
            env={**self.env, **(env or {})},
            cwd=self._directory,
        )
        self.steps.append(step)

        def has_started():
            step.job_id = self.ask("squeue", "-h", "-n", name, "-o", "%A").strip()
            return step.job_id.isdigit() or step.process.poll() is not None

        wait_until(has_started, "the step")
        return step

    def lose_node(self, step, rank):
        """Kill the daemons and all processes of a rank's node, as if it lost power."""
        node = step.processes(rank)[0].environ()["SLURMD_NODENAME"]
        lost = step.find_processes(SLURMD_NODENAME=node)
        daemons = {process.parent() for process in lost} - {*lost, None}
        assert {daemon.name() for daemon in daemons} == {"slurmstepd"}
        node_daemon = self._daemons.pop(int(node.removeprefix("n")))
        kill([psutil.Process(node_daemon.pid), *daemons, *lost])
        node_daemon.wait()

    def close(self):
        for step in self.steps:
            step.close()
        self.ask("scancel", "--state=RUNNING", "--state=PENDING", "-p", "main")
        wait_until(lambda: not self.ask("squeue", "-h").strip(), "no jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(SECONDS)
