"""Replacement of `srun` on one machine: starts one process per rank, with the variables of Slurm.

    python fake_srun.py --ntasks N --job-id J [--kill-wait SECONDS] COMMAND...

Like srun, it labels lines of output with the rank, exits with the highest status, and on SIGTERM
sends SIGTERM to every process of the step, in whatever process group. It forwards SIGINT and
SIGUSR1 likewise.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

import psutil


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--job-id", type=int, required=True)
    parser.add_argument("--kill-wait", type=float, default=60.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    ranks = [start(rank, options) for rank in range(options.ntasks)]
    printers = [
        threading.Thread(target=print_labelled, args=(rank, process))
        for rank, process in enumerate(ranks)
    ]
    for printer in printers:
        printer.start()
    kill_at = None
    while any(process.poll() is None for process in ranks):
        while received:
            number = received.pop(0)
            if number == signal.SIGTERM and kill_at is None:
                kill_at = time.monotonic() + options.kill_wait
            send(ranks, number)
        if kill_at is not None and time.monotonic() > kill_at:
            send(ranks, signal.SIGKILL)
        time.sleep(0.05)
    for printer in printers:
        printer.join()
    codes = [process.wait() for process in ranks]
    return max(128 - code if code < 0 else code for code in codes)


def start(rank: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    variables = {
        "SLURM_JOB_ID": str(options.job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(options.ntasks),
        "SLURM_NTASKS": str(options.ntasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURMD_NODENAME": "node1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    return subprocess.Popen(
        options.command,
        env={**os.environ, **variables},
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def print_labelled(rank: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{rank}: {line}")
        sys.stdout.flush()


def send(ranks: list[subprocess.Popen[str]], number: int) -> None:
    processes: list[psutil.Process] = []
    for rank in ranks:
        if rank.poll() is None:
            process = psutil.Process(rank.pid)
            processes += [process, *process.children(recursive=True)]
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    sys.exit(main())
