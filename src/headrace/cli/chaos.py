"""`headrace demo --job chaos`: exactly once and in order, though a process is killed every second.

    on the workers    list_files -> interleave -> decode
    here              shuffle -> batch (in order, as part of the plan; in any order, after it)

One process reads the files first. Then the same pipeline is read over a dispatcher and workers of
which one is killed (SIGKILL) every second: in order, where the sequence of batches must be that of
one process, and in any order, where the elements must be.
"""

from __future__ import annotations

import logging
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import headrace as hr
from headrace.cli.chaos_data import ElementsHash, SequenceHash, batches, images, write_files
from headrace.cli.chaos_servers import Kill, Killer, Servers

__all__ = ["run_chaos"]

_FILES = 60
_ROWS = 30
_WORKERS = 3
_PAUSE = 0.004
_INTERRUPTED = 130


def run_chaos(
    seed: int | None = None,
    console: Console | None = None,
    *,
    files: int = _FILES,
    rows: int = _ROWS,
    pause: float = _PAUSE,
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
        return _INTERRUPTED


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

    servers = Servers(folder, _WORKERS)
    try:
        with _words_go_to(folder / "client.log"):
            servers.start()
            console.print(
                f"dispatcher at {servers.address} and {_WORKERS} workers, each a process; one of "
                f"the {_WORKERS + 1} is killed (SIGKILL) every second (seed {seed})"
            )
            killed = 0
            differing = []
            for title, ordered, expected, got in (
                ("in order", True, sequence, SequenceHash()),
                ("in any order", False, elements, ElementsHash()),
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
