"""`headrace doctor`: what of this machine would hurt, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from headrace.cli.commands import wrong_arguments
from headrace.cli.tables import plural
from headrace.errors import HeadraceError
from headrace.service.config import parse_service
from headrace.service.messages import DispatcherStatus, GetStatus, WorkerStatus
from headrace.service.stub import DispatcherStub
from headrace.transport.security import Security
from headrace.versions import own_versions, python_mismatch, release_mismatch

__all__ = ["Finding", "Verdict", "examine", "findings"]

_CORE = (
    "numpy",
    "msgspec",
    "pyzmq",
    "cloudpickle",
    "fsspec",
    "google-crc32c",
    "prometheus-client",
)
_OPTIONAL = {
    "pyarrow": "arrow",
    "jax": "jax",
    "torch": "torch",
    "keras": "keras",
    "lz4": "compression",
    "zstandard": "compression",
}
_ANSWER_SECONDS = 3.0
_MOST_NAMED = 3
_ENOUGH_FILES = 4096
_ENOUGH_SHARED_MEMORY = 512 << 20


class Verdict(Enum):
    """How a finding bears on running Headrace here."""

    FINE = "fine"
    SLOW = "would hurt"
    BROKEN = "does not work"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What was looked at.
        verdict: How it bears on running here.
        found: What was found.
        remedy: What to do; empty where nothing is needed.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(
    dispatcher: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT", help="A dispatcher that should be reachable from here."
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`, to reach it with."
        ),
    ] = None,
) -> None:
    """Look at this machine: what would hurt, and what to do."""
    security: Security | None = None
    if dispatcher is not None:
        with wrong_arguments({"service": "HOST:PORT", "address": "HOST:PORT"}):
            parse_service(dispatcher)
            security = None if keys is None else Security.load(keys, "client")
    table = Table("what", "verdict", Column("found", overflow="fold"), box=None, pad_edge=False)
    styles = {Verdict.FINE: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "bold red"}
    found = findings()
    if dispatcher is not None:
        found.append(_dispatcher(dispatcher, security))
    for finding in found:
        style = styles[finding.verdict]
        verdict = f"[{style}]{finding.verdict.value}[/{style}]"
        # Escaped: brackets in what was found are no markup.
        table.add_row(finding.subject, verdict, escape(finding.found))
    console = Console()
    console.print(table)
    remedies = [finding for finding in found if finding.remedy]
    if remedies:
        console.print("\nwhat to do")
    for finding in remedies:
        # Not wrapped: what is to be typed must be whole, however narrow the terminal.
        words = f"  {finding.subject}: {finding.remedy}"
        console.print(words, soft_wrap=True, markup=False, highlight=False)
    if any(finding.verdict is Verdict.BROKEN for finding in found):
        raise typer.Exit(1)


def findings() -> list[Finding]:
    """Look at everything that Headrace depends on."""
    return [
        _python(),
        _cores(),
        _quota(),
        _memory_files(),
        _shared_memory_size(),
        _open_files(),
        _loopback(),
        *(_dependency(name) for name in _CORE),
        *(_optional(name, extra) for name, extra in _OPTIONAL.items()),
    ]


def _python() -> Finding:
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.platform != "linux":
        return Finding("platform", Verdict.SLOW, found, "Headrace is tested on Linux alone")
    return Finding("platform", Verdict.FINE, found)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cores < 2:
        return Finding(
            "cores", Verdict.SLOW, f"{cores}", "run workers elsewhere: training wants this core"
        )
    return Finding("cores", Verdict.FINE, f"{cores}; up to as many `worker --processes`")


def _quota(limits: Path = Path("/sys/fs/cgroup/cpu.max")) -> Finding:
    try:
        quota, period = limits.read_text().split()
    except (OSError, ValueError):
        return Finding("CPU quota", Verdict.FINE, "none is set here")
    if quota == "max":
        return Finding("CPU quota", Verdict.FINE, "no limit")
    allowed, cores = int(quota) / int(period), os.cpu_count() or 1
    found = f"{allowed:.1f} cores' worth of time on {cores} cores"
    if allowed < cores:
        remedy = f"start about {max(1, int(allowed))} worker processes, or raise the quota"
        return Finding("CPU quota", Verdict.SLOW, found, remedy)
    return Finding("CPU quota", Verdict.FINE, found)


def _dispatcher(service: str, security: Security | None) -> Finding:
    subject = f"dispatcher at {service}"
    try:
        with DispatcherStub(parse_service(service), security=security) as stub:
            status = stub.call(GetStatus(), timeout=_ANSWER_SECONDS)
    except HeadraceError as error:
        remedy = (
            "is it running, is this its address, does a firewall lie between, has it keys (--keys)?"
        )
        return Finding(subject, Verdict.BROKEN, str(error), remedy)
    words = f"answers; {status.versions}; {plural(len(status.workers), 'worker')}"
    if not status.workers:
        remedy = f"headrace worker --dispatcher {service}"
        found = f"answers; {status.versions}; no worker is registered"
        return Finding(subject, Verdict.SLOW, found, remedy)
    return _versions(subject, words, status)


def _versions(subject: str, words: str, status: DispatcherStatus) -> Finding:
    """Compare the versions of this process with those of a dispatcher and its workers."""
    mine = own_versions()
    unfit = [each for each in status.workers if python_mismatch(each.versions.python, mine.python)]
    if unfit:
        found = f"{words}, of which {_named(unfit)}; this is {mine}"
        remedy = (
            f"run these workers with Python {mine.python}, or clients with the workers' version: "
            "functions of a dataset run on workers of the client's minor version alone"
        )
        # With some workers left it is slower; with none nothing runs.
        is_broken = len(unfit) == len(status.workers)
        return Finding(subject, Verdict.BROKEN if is_broken else Verdict.SLOW, found, remedy)
    others = [each for each in status.workers if release_mismatch(each.versions, mine)]
    if others or release_mismatch(status.versions, mine):
        found = f"{words}{f', of which {_named(others)}' if others else ''}; this is {mine}"
        return Finding(subject, Verdict.SLOW, found, "install the same release everywhere")
    return Finding(subject, Verdict.FINE, words)


def _named(workers: Sequence[WorkerStatus]) -> str:
    named = ", ".join(f"{each.address} runs {each.versions}" for each in workers[:_MOST_NAMED])
    return named + (f" and {len(workers) - _MOST_NAMED} more" * (len(workers) > _MOST_NAMED))


def _memory_files() -> Finding:
    subject = "memory between processes"
    if not hasattr(os, "memfd_create"):
        return Finding(
            subject, Verdict.SLOW, "no memfd here", "data between local processes goes by sockets"
        )
    try:
        descriptor = os.memfd_create("headrace-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        remedy = "allow memfd_create in the sandbox; until then local data goes by sockets"
        return Finding(subject, Verdict.SLOW, f"memfd fails: {error}", remedy)
    return Finding(subject, Verdict.FINE, "memfd works")


def _shared_memory_size() -> Finding:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return Finding("/dev/shm", Verdict.SLOW, "not there", "mount a tmpfs at /dev/shm")
    status = os.statvfs(directory)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{free >> 20} MiB free of {size >> 20} MiB"
    if free < _ENOUGH_SHARED_MEMORY:
        remedy = "give the container more (docker: --shm-size 2g); frameworks' loaders use it"
        return Finding("/dev/shm", Verdict.SLOW, found, remedy)
    return Finding("/dev/shm", Verdict.FINE, found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = {resource.RLIM_INFINITY: "no limit"}
    found = f"{words.get(soft, soft)} (may be raised to {words.get(hard, hard)})"
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        remedy = f"ulimit -n {_ENOUGH_FILES} before a dispatcher: each peer takes two or three"
        return Finding("open files", Verdict.SLOW, found, remedy)
    return Finding("open files", Verdict.FINE, found)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5.0):
                pass
    except OSError as error:
        remedy = "allow TCP on 127.0.0.1: dispatcher and workers talk by it even on one machine"
        return Finding("ports on loopback", Verdict.BROKEN, str(error), remedy)
    return Finding("ports on loopback", Verdict.FINE, "free ones are given and can be reached")


def _dependency(name: str) -> Finding:
    try:
        return Finding(name, Verdict.FINE, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, Verdict.BROKEN, "not installed", f"pip install {name}")


def _optional(name: str, extra: str) -> Finding:
    try:
        return Finding(name, Verdict.FINE, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        remedy = f"if you want it: pip install 'headrace[{extra}]'"
        return Finding(name, Verdict.FINE, "not installed (optional)", remedy)
