"""Read exactly once and in order, though a process is killed every second.

    workers         list_files -> interleave -> decode
    this program    shuffle -> batch (in order, as part of the plan; in any order, after it)

One process reads the files first. Then the same pipeline is read over a dispatcher and workers, one
of which is killed (SIGKILL) every second. In order, the sequence of batches must be that of one
process; in any order, the elements must be.

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
START_SECONDS = 120.0
LOOK_SECONDS = 0.05

BATCH_SIZE = 16
SHUFFLE_BUFFER = 64
SIDE = 16
NUMBER_BYTES = 8


# --- the data -------------------------------------------------------------------------------------


def write_files(folder: Path, files: int, rows: int, seed: int) -> int:
    """Write files of rows; return how many rows there are in all.

    Args:
        folder: Where to.
        files: How many files.
        rows: How many rows a file has about: files differ, as real ones do.
        seed: Of their contents.
    """
    chance = random.Random(seed)
    total = 0
    for file in range(files):
        with hr.io.TFRecordWriter(str(folder / f"images-{file:03d}.tfrecord")) as writer:
            for _ in range(chance.randint(rows // 2, rows + rows // 2)):
                image = chance.randbytes(SIDE * SIDE)
                writer.write(total.to_bytes(NUMBER_BYTES, "little") + zlib.compress(image))
                total += 1
    return total


def decode(record: bytes, pause: float) -> dict[str, Any]:
    """Turn a record into an image and its number; take a while, as the decoding of photos does."""
    if pause:
        time.sleep(pause)
    image = np.frombuffer(zlib.decompress(record[NUMBER_BYTES:]), np.uint8)
    return {
        "image": image.reshape(SIDE, SIDE).astype(np.float32) / np.float32(255),
        "number": np.int64(int.from_bytes(record[:NUMBER_BYTES], "little")),
    }


def images(folder: Path, pause: float) -> hr.Dataset:
    """Return the images: of files in a random order, several open, decoded.

    Args:
        folder: Where the files are.
        pause: Seconds that a row takes to decode.
    """
    return (
        hr.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
        .interleave(hr.TFRecordDataset, cycle_length=4)
        .map(functools.partial(decode, pause=pause))
    )


def batches(rows: hr.Dataset) -> hr.Dataset:
    """Return images shuffled and in batches."""
    return rows.shuffle(SHUFFLE_BUFFER, seed=2).batch(BATCH_SIZE)


class SequenceHash:
    """Hash of batches in their order: of shape, dtype and bytes of each array."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def take(self, batch: Mapping[str, Any]) -> None:
        """Take in the next batch."""
        _feed(self._hash.update, batch)

    @property
    def text(self) -> str:
        """The hash of what was taken in so far."""
        return self._hash.hexdigest()


class ElementsHash:
    """Hash of elements in any order and in batches of any size: one that comes twice counts twice.

    It is the sum of the elements' own hashes.
    """

    _MODULUS = 1 << 128

    def __init__(self) -> None:
        self._sum = 0

    def take(self, batch: Mapping[str, Any]) -> None:
        """Take in the elements of another batch."""
        for row in range(len(next(iter(batch.values())))):
            own = hashlib.blake2b(digest_size=16)
            _feed(own.update, {name: array[row] for name, array in batch.items()})
            self._sum = (self._sum + int.from_bytes(own.digest(), "big")) % self._MODULUS

    @property
    def text(self) -> str:
        """The hash of what was taken in so far."""
        return f"{self._sum:032x}"


def _feed(update: Callable[[bytes], object], arrays: Mapping[str, Any]) -> None:
    for name, each in sorted(arrays.items()):
        array = np.asarray(each)
        update(f"{name} {array.shape} {array.dtype.str}\n".encode())
        update(array.tobytes())


# --- the processes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A process was killed (SIGKILL), and another one started in its place."""

    who: str
    pid: int


class Servers:
    """A dispatcher and its workers, each a process; one thread at a time may use them.

    Args:
        folder: Where the dispatcher's journal is kept, and what all of them write.
        workers: How many workers.
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
        """Start all of them."""
        for who in self._commands:
            self._start(who)

    def await_all(self) -> None:
        """Return when all are ready.

        Raises:
            RuntimeError: One did not start; the message holds what it wrote.
        """
        until = time.monotonic() + START_SECONDS
        while not self._are_ready():
            for who, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{who} did not start; it wrote:\n{self._written(who)}")
            time.sleep(LOOK_SECONDS)

    def look(self) -> list[str]:
        """Start those again that ended by themselves; return who may be killed.

        Nobody may be before all are ready: where a process takes longer than a second to start,
        too little would be done otherwise.
        """
        for who, process in self._processes.items():
            if process.poll() is not None:
                self._start(who)
        return list(self._processes) if self._are_ready() else []

    def kill(self, who: str) -> Kill:
        """Kill one (SIGKILL), and start another one in its place."""
        process = self._processes[who]
        process.kill()
        process.wait()
        self._start(who)
        return Kill(who, process.pid)

    def close(self) -> None:
        """Kill all of them: nothing that they have is needed any more."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, who: str) -> None:
        with self._log(who).open("wb") as log:
            self._processes[who] = subprocess.Popen(
                [sys.executable, "-m", "headrace", *self._commands[who]],
                # Workers import what this program can import.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for this program alone
            )

    def _are_ready(self) -> bool:
        return all(" ready at " in self._written(who) for who in self._processes)

    def _written(self, who: str) -> str:
        return self._log(who).read_text(errors="replace")

    def _log(self, who: str) -> Path:
        return self._folder / f"{who}.log"


def free_port() -> int:
    """Return a free port that the system gives to no client while the dispatcher is away."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port was found between 20000 and 32000")


class Killer:
    """Kills one of the servers every second, on a thread of its own, while its `with` block lasts.

    The next one is killed when the last has been replaced, if that takes longer than a second.

    Args:
        servers: Whom; nobody else may use them meanwhile.
        chance: Chooses.
        say: Called on the thread with each kill.
        seconds: From one to the next.
    """

    def __init__(
        self,
        servers: Servers,
        chance: random.Random,
        say: Callable[[Kill], None],
        seconds: float = 1.0,
    ) -> None:
        self._servers = servers
        self._chance = chance
        self._say = say
        self._seconds = seconds
        #: In order.
        self.kills: list[Kill] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-killer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._seconds
        while not self._over.wait(LOOK_SECONDS):
            victims = self._servers.look()
            if victims and time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self.kills.append(self._servers.kill(self._chance.choice(victims)))
                self._say(self.kills[-1])


# --- the program ----------------------------------------------------------------------------------


def run_chaos(
    seed: int | None = None,
    console: Console | None = None,
    *,
    files: int = FILES,
    rows: int = ROWS,
    pause: float = PAUSE,
) -> int:
    """Run the demonstration; return the exit code: 0 if both readings equal one process's.

    Args:
        seed: Of who is killed when; None: another one each time.
        console: Where to write.
        files: How many files are read.
        rows: How many rows a file has about.
        pause: Seconds that a worker takes for a row.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    try:
        with _sigterm_is_ctrl_c(), tempfile.TemporaryDirectory(prefix="headrace-chaos-") as name:
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
            sequence.take(batch)
            elements.take(batch)
    console.print(f"{total} images in {files} files, read by one process:")
    _show(console, "  every batch, in order", sequence)
    _show(console, "  every image, in any order", elements)

    servers = Servers(folder, WORKERS)
    try:
        with _words_go_to(folder / "client.log"):
            servers.start()
            console.print(
                f"dispatcher at {servers.address} and {WORKERS} workers, each a process; one of "
                f"the {WORKERS + 1} is killed (SIGKILL) every second (seed {seed})"
            )
            killed = 0
            differing = []
            for title, ordered, expected, got in (
                ("ordered", True, sequence, SequenceHash()),
                ("any order", False, elements, ElementsHash()),
            ):
                servers.await_all()
                console.print(f"over the service, {title}:")
                over_the_service = hr.service.distribute(
                    hr.service.ShardingPolicy.DYNAMIC, servers.address, ordered=ordered
                )
                # In any order a shuffle on workers would give its last elements at the very end
                # only, when no worker was lost for a while.
                decoded = images(data, pause)
                dataset = (
                    batches(decoded).apply(over_the_service)
                    if ordered
                    else batches(decoded.apply(over_the_service))
                )
                killed += _read(console, dataset, servers, random.Random(seed), got)
                what = "every batch, in order" if ordered else "every image, in any order"
                _show(console, f"  {what}", got)
                if got.text != expected.text:
                    differing.append(title)
    finally:
        servers.close()
    if differing:
        console.print(
            f"chaos: failed: {' and '.join(differing)} the service gave something else than one "
            f"process (seed {seed})",
            style="red",
        )
        return 1
    console.print(
        f"chaos: ok: {killed} processes were killed; over the service each image came exactly "
        f"once, and in order the sequence of batches is that of one process; "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 0


def _read(
    console: Console,
    dataset: hr.Dataset,
    servers: Servers,
    chance: random.Random,
    into: SequenceHash | ElementsHash,
) -> int:
    """Read a dataset while the servers are killed; return how many were."""
    began = time.perf_counter()
    count = 0

    def say(kill: Kill) -> None:
        seconds = time.perf_counter() - began
        console.print(
            f"  {seconds:4.1f} s  killed {kill.who} (process {kill.pid}) at batch {count}"
        )

    with Killer(servers, chance, say) as killer, iter(dataset) as reading:
        for batch in reading:
            into.take(batch)
            count += 1
    console.print(f"  {time.perf_counter() - began:4.1f} s  the end, after {count} batches")
    return len(killer.kills)


def _show(console: Console, what: str, hash_of_it: SequenceHash | ElementsHash) -> None:
    console.print(f"{what:<28}{hash_of_it.text}")


@contextmanager
def _words_go_to(path: Path) -> Iterator[None]:
    """Keep what the reader says of servers that are away out of the way."""
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
def _sigterm_is_ctrl_c() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        with suppress(TypeError):
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(run_chaos())
