"""Read exactly once and in order while a process is killed every second.

    workers         list_files -> interleave -> decode
    this program    shuffle -> batch (ordered: part of the plan; unordered: after `distribute`)

First one process reads the files. Then the same pipeline is read over a dispatcher and workers, one
of which is killed (SIGKILL) every second. Ordered reading must deliver the same sequence of batches
as one process; unordered reading must deliver the same elements.

    pip install headrace
    python examples/chaos.py
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
from rich.console import Console

import headrace as hr

FILES = 60
ROWS = 30
WORKERS = 3
PAUSE = 0.004
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
START_SECONDS = 120.0
POLL_SECONDS = 0.05

BATCH_SIZE = 16
SHUFFLE_BUFFER = 64
SIDE = 16
NUMBER_BYTES = 8


# --- the data -------------------------------------------------------------------------------------


def write_files(folder: Path, files: int, rows: int, seed: int) -> int:
    """Write files of rows; return the total number of rows.

    Args:
        folder: Output directory.
        files: Number of files.
        rows: Average number of rows per file; the sizes vary.
        seed: Seed of the contents.
    """
    rng = random.Random(seed)
    total = 0
    for file in range(files):
        with hr.io.TFRecordWriter(str(folder / f"images-{file:03d}.tfrecord")) as writer:
            for _ in range(rng.randint(rows // 2, rows + rows // 2)):
                image = rng.randbytes(SIDE * SIDE)
                writer.write(total.to_bytes(NUMBER_BYTES, "little") + zlib.compress(image))
                total += 1
    return total


def decode(record: bytes, pause: float) -> dict[str, Any]:
    """Decode a record into an image and its number, in `pause` seconds like a real photograph."""
    if pause:
        time.sleep(pause)
    image = np.frombuffer(zlib.decompress(record[NUMBER_BYTES:]), np.uint8)
    return {
        "image": image.reshape(SIDE, SIDE).astype(np.float32) / np.float32(255),
        "number": np.int64(int.from_bytes(record[:NUMBER_BYTES], "little")),
    }


def images(folder: Path, pause: float) -> hr.Dataset:
    """Return the decoded images of interleaved files, which are in random order.

    Args:
        folder: Directory of the files.
        pause: Seconds to decode a row.
    """
    return (
        hr.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
        .interleave(hr.TFRecordDataset, cycle_length=4)
        .map(functools.partial(decode, pause=pause))
    )


def batches(rows: hr.Dataset) -> hr.Dataset:
    """Return shuffled batches of images."""
    return rows.shuffle(SHUFFLE_BUFFER, seed=2).batch(BATCH_SIZE)


class SequenceHash:
    """Order-dependent hash of batches: of the shape, dtype and bytes of each array."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, batch: Mapping[str, Any]) -> None:
        """Add the next batch."""
        _hash_arrays(self._hash.update, batch)

    @property
    def hexdigest(self) -> str:
        """Hash of the batches so far."""
        return self._hash.hexdigest()


class ElementsHash:
    """Hash of elements that does not depend on their order or batches, but counts duplicates.

    It is the sum of the hashes of the elements.
    """

    _MODULUS = 1 << 128

    def __init__(self) -> None:
        self._sum = 0

    def update(self, batch: Mapping[str, Any]) -> None:
        """Add the elements of a batch."""
        for row in range(len(next(iter(batch.values())))):
            element_hash = hashlib.blake2b(digest_size=16)
            _hash_arrays(element_hash.update, {name: array[row] for name, array in batch.items()})
            self._sum = (self._sum + int.from_bytes(element_hash.digest(), "big")) % self._MODULUS

    @property
    def hexdigest(self) -> str:
        """Hash of the batches so far."""
        return f"{self._sum:032x}"


def _hash_arrays(update: Callable[[bytes], object], arrays: Mapping[str, Any]) -> None:
    for name, each in sorted(arrays.items()):
        array = np.asarray(each)
        update(f"{name} {array.shape} {array.dtype.str}\n".encode())
        update(array.tobytes())


# --- the processes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A process that was killed with SIGKILL and replaced."""

    name: str
    pid: int


class Servers:
    """Processes of a dispatcher and its workers. Not thread-safe.

    Args:
        folder: Directory of the dispatcher's journal and of the log files.
        workers: Number of workers.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._folder = folder
        worker = ["worker", "--dispatcher", self.address, "--drain-timeout", "0"]
        self._commands = {
            "dispatcher": [
                *("dispatcher", "--port", str(port)),
                *("--fault-tolerant", "--work-dir", str(folder / "journal")),
            ],
            **{f"worker {number}": worker for number in range(1, workers + 1)},
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all processes."""
        for name in self._commands:
            self._start(name)

    def wait_until_ready(self) -> None:
        """Wait until all processes are ready.

        Raises:
            RuntimeError: If a process failed to start; the message has its output.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._are_ready():
            for name, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} failed to start; its log:\n{self._read_log(name)}")
            time.sleep(POLL_SECONDS)

    def restart_ended(self) -> list[str]:
        """Restart processes that ended unexpectedly; return the names of those that may be killed.

        The list is empty until all processes are ready. Otherwise reading would make little
        progress on machines where a process takes longer than a second to start.
        """
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._start(name)
        return list(self._processes) if self._are_ready() else []

    def kill(self, name: str) -> Kill:
        """Kill a process with SIGKILL, and start its replacement."""
        process = self._processes[name]
        process.kill()
        process.wait()
        self._start(name)
        return Kill(name, process.pid)

    def close(self) -> None:
        """Kill all processes; their state is no longer needed."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str) -> None:
        with self._log_path(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "headrace", *self._commands[name]],
                # Workers can import the same modules as this program.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # only this program receives Ctrl-C
            )

    def _are_ready(self) -> bool:
        return all(" ready at " in self._read_log(name) for name in self._processes)

    def _read_log(self, name: str) -> str:
        return self._log_path(name).read_text(errors="replace")

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def free_port() -> int:
    """Return a free port outside the ephemeral range, which a restarted dispatcher can reuse."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("found no free port between 20000 and 32000 in 100 attempts")


class Killer:
    """Context manager with a thread that kills a random server every second.

    A kill is delayed until the replacement of the previous victim is ready.

    Args:
        servers: Processes to kill; no other thread may use this object.
        rng: Random generator that chooses the victims.
        log: Called on the thread after each kill.
        seconds: Seconds between kills.
    """

    def __init__(
        self,
        servers: Servers,
        rng: random.Random,
        log: Callable[[Kill], None],
        seconds: float = 1.0,
    ) -> None:
        self._servers = servers
        self._rng = rng
        self._log = log
        self._seconds = seconds
        #: Kills so far, in chronological order.
        self.kills: list[Kill] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-killer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._seconds
        while not self._stopped.wait(POLL_SECONDS):
            victims = self._servers.restart_ended()
            if victims and time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self.kills.append(self._servers.kill(self._rng.choice(victims)))
                self._log(self.kills[-1])


# --- the program ----------------------------------------------------------------------------------


def run_chaos(
    seed: int | None = None,
    console: Console | None = None,
    *,
    files: int = FILES,
    rows: int = ROWS,
    pause: float = PAUSE,
) -> int:
    """Run the demo; return the exit code, 0 if both readings match that of one process.

    Args:
        seed: Seed of the data and of the choice of victims; None chooses one.
        console: Output.
        files: Number of files.
        rows: Average number of rows per file.
        pause: Seconds that a worker takes for a row.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    try:
        with _sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="headrace-chaos-") as name:
            return _run(seed, console, Path(name), files, rows, pause)
    except KeyboardInterrupt:
        console.print("chaos: stopped before the end")
        return INTERRUPTED


def _run(seed: int, console: Console, folder: Path, files: int, rows: int, pause: float) -> int:
    began = time.perf_counter()
    data = folder / "data"
    data.mkdir()
    total = write_files(data, files, rows, seed)
    sequence, elements = SequenceHash(), ElementsHash()
    with iter(batches(images(data, 0.0))) as reading:
        for batch in reading:
            sequence.update(batch)
            elements.update(batch)
    console.print(f"{total} images in {files} files, read by one process:")
    _print_hash(console, "  every batch, in order", sequence)
    _print_hash(console, "  every image, unordered", elements)

    servers = Servers(folder, WORKERS)
    try:
        with _log_to(folder / "client.log"):
            servers.start()
            console.print(
                f"dispatcher at {servers.address} and {WORKERS} workers; one of these processes is "
                f"killed (SIGKILL) every second (seed {seed})"
            )
            killed = 0
            failed = []
            for title, ordered, expected, actual in (
                ("ordered", True, sequence, SequenceHash()),
                ("unordered", False, elements, ElementsHash()),
            ):
                servers.wait_until_ready()
                console.print(f"over the service, {title}:")
                distribute = hr.service.distribute(
                    hr.service.ShardingPolicy.DYNAMIC, servers.address, ordered=ordered
                )
                # In unordered reading a shuffle on workers would hold its last elements until no
                # worker was lost for a while, so it runs in this process.
                decoded = images(data, pause)
                dataset = (
                    batches(decoded).apply(distribute)
                    if ordered
                    else batches(decoded.apply(distribute))
                )
                killed += _read(console, dataset, servers, random.Random(seed), actual)
                title_of_hash = "every batch, in order" if ordered else "every image, unordered"
                _print_hash(console, f"  {title_of_hash}", actual)
                if actual.hexdigest != expected.hexdigest:
                    failed.append(title)
    finally:
        servers.close()
    if failed:
        console.print(
            f"chaos: failed: {' and '.join(failed)} reading over the service differs from one "
            f"process (seed {seed})",
            style="red",
        )
        return 1
    console.print(
        f"chaos: ok: {killed} processes were killed; each image was delivered exactly once, and "
        f"ordered reading delivered the batches of one process in the same order; "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 0


def _read(
    console: Console,
    dataset: hr.Dataset,
    servers: Servers,
    rng: random.Random,
    total: SequenceHash | ElementsHash,
) -> int:
    """Read a dataset while servers are killed; return the number of kills."""
    began = time.perf_counter()
    count = 0

    def log(kill: Kill) -> None:
        seconds = time.perf_counter() - began
        console.print(
            f"  {seconds:4.1f} s  killed {kill.name} (process {kill.pid}) at batch {count}"
        )

    with Killer(servers, rng, log) as killer, iter(dataset) as reading:
        for batch in reading:
            total.update(batch)
            count += 1
    console.print(
        f"  {time.perf_counter() - began:4.1f} s  end of the dataset after {count} batches"
    )
    return len(killer.kills)


def _print_hash(console: Console, title: str, result: SequenceHash | ElementsHash) -> None:
    console.print(f"{title:<28}{result.hexdigest}")


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Write the log messages of the client about unreachable servers to a file."""
    logger = logging.getLogger("headrace")
    handler = logging.FileHandler(path)
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)
        handler.close()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        with suppress(TypeError):
            signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(run_chaos())
