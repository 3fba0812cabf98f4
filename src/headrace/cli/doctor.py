"""`headrace doctor`: checks of this machine, with advice; with `--job`, those of `job_report`."""

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

from headrace.cli.commands import convert_argument_errors, load_client_keys
from headrace.cli.formatting import pluralize
from headrace.cli.job_report import diagnose_job
from headrace.errors import HeadraceError
from headrace.service.config import parse_service
from headrace.service.messages import DispatcherStatus, GetStatus, WorkerStatus
from headrace.service.stub import DispatcherStub
from headrace.transport.security import Security
from headrace.versions import own_versions, python_mismatch, release_mismatch

__all__ = ["Finding", "Severity", "check_host", "examine"]

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
_MAX_LISTED = 3
_MIN_OPEN_FILES = 4096
_MIN_SHARED_MEMORY = 512 << 20


class Severity(Enum):
    """Effect of a finding on running Headrace here."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        subject: Subject of the check.
        severity: How it affects running here.
        found: Result.
        remedy: What to do; empty if nothing is needed.
    """

    subject: str
    severity: Severity
    found: str
    remedy: str = ""


def examine(
    dispatcher: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="Address of a dispatcher to connect to."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_KEYS",
            help="Directory made by `headrace keys new`, for the dispatcher.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="Name of a running job: find its bottleneck, and what would help."),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds to watch the job.")] = 10.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the report on the job as JSON.")
    ] = False,
) -> None:
    """Check this machine for problems, or find the bottleneck of a job; suggest fixes.

    With --job, name what limits a running job, and predict what changes would bring. The address is
    then taken from HEADRACE_DISPATCHER if it is not given.
    """
    if job is not None:
        address = dispatcher or os.environ.get("HEADRACE_DISPATCHER")
        if not address:
            raise typer.BadParameter("--job needs HOST:PORT, the address of the job's dispatcher")
        if not interval > 0:
            raise typer.BadParameter(f"--interval {interval:g} must be greater than 0")
        diagnose_job(address, keys, job, interval, as_json=json)
        return
    if json:
        raise typer.BadParameter("--json needs --job")
    security: Security | None = None
    if dispatcher is not None:
        with convert_argument_errors({"service": "HOST:PORT", "address": "HOST:PORT"}):
            parse_service(dispatcher)
            security = load_client_keys(keys)
    table = Table("check", "result", Column("found", overflow="fold"), box=None, pad_edge=False)
    styles = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
    found = check_host()
    if dispatcher is not None:
        found.append(_dispatcher(dispatcher, security))
    for finding in found:
        style = styles[finding.severity]
        verdict = f"[{style}]{finding.severity.value}[/{style}]"
        # Escaped: brackets in results are not markup.
        table.add_row(finding.subject, verdict, escape(finding.found))
    console = Console()
    console.print(table)
    problems = [each for each in found if each.severity is not Severity.OK]
    optional = [each for each in found if each.severity is Severity.OK]
    for title, group in (("suggested fixes", problems), ("optional packages", optional)):
        remedies = [finding for finding in group if finding.remedy]
        if remedies:
            console.print(f"\n{title}")
        for finding in remedies:
            # Not wrapped: commands to type must be complete, even on a narrow terminal.
            line = f"  {finding.subject}: {finding.remedy}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    if any(finding.severity is Severity.ERROR for finding in found):
        raise typer.Exit(1)


def check_host() -> list[Finding]:
    """Check everything that Headrace depends on."""
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
        return Finding(
            "platform", Severity.WARNING, found, "run it on Linux: Headrace is not tested elsewhere"
        )
    return Finding("platform", Severity.OK, found)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if cores < 2:
        return Finding(
            "cores",
            Severity.WARNING,
            f"{cores}",
            "run workers on other machines: training needs this core",
        )
    return Finding("cores", Severity.OK, f"{cores}, so at most `worker --processes {cores}`")


def _quota(limits: Path = Path("/sys/fs/cgroup/cpu.max")) -> Finding:
    try:
        quota, period = limits.read_text().split()
    except (OSError, ValueError):
        return Finding("CPU quota", Severity.OK, "not set")
    if quota == "max":
        return Finding("CPU quota", Severity.OK, "no limit")
    allowed, cores = int(quota) / int(period), os.cpu_count() or 1
    found = f"{allowed:.1f} of {cores} cores"
    if allowed < cores:
        remedy = f"start at most {max(1, int(allowed))} worker processes, or raise the quota"
        return Finding("CPU quota", Severity.WARNING, found, remedy)
    return Finding("CPU quota", Severity.OK, found)


def _dispatcher(service: str, security: Security | None) -> Finding:
    subject = f"dispatcher at {service}"
    try:
        with DispatcherStub(parse_service(service), security=security) as stub:
            status = stub.call(GetStatus(), timeout=_ANSWER_SECONDS)
    except HeadraceError as error:
        remedy = "is it running at this address, does a firewall block it, does it require --keys?"
        return Finding(subject, Severity.ERROR, str(error), remedy)
    found = f"reachable; {status.versions}; {pluralize(len(status.workers), 'worker')}"
    if not status.workers:
        remedy = f"headrace worker --dispatcher {service}"
        found = f"reachable; {status.versions}; no worker is registered"
        return Finding(subject, Severity.WARNING, found, remedy)
    return _versions(subject, found, status)


def _versions(subject: str, description: str, status: DispatcherStatus) -> Finding:
    """Compare the versions of this process with those of a dispatcher and its workers."""
    mine = own_versions()
    incompatible = [
        each for each in status.workers if python_mismatch(each.versions.python, mine.python)
    ]
    if incompatible:
        found = f"{description}; different: {_list_workers(incompatible)}; this is {mine}"
        remedy = (
            f"run these workers with Python {mine.python}, or clients with the workers' version: "
            "dataset functions run only on workers with the client's minor version of Python"
        )
        # With some workers left the service is slower; without any, nothing runs.
        is_broken = len(incompatible) == len(status.workers)
        return Finding(subject, Severity.ERROR if is_broken else Severity.WARNING, found, remedy)
    others = [each for each in status.workers if release_mismatch(each.versions, mine)]
    if others or release_mismatch(status.versions, mine):
        workers = f"; different: {_list_workers(others)}" if others else ""
        found = f"{description}{workers}; this is {mine}"
        return Finding(subject, Severity.WARNING, found, "install the same release everywhere")
    return Finding(subject, Severity.OK, description)


def _list_workers(workers: Sequence[WorkerStatus]) -> str:
    named = ", ".join(f"{each.address} runs {each.versions}" for each in workers[:_MAX_LISTED])
    return named + (f" and {len(workers) - _MAX_LISTED} more" * (len(workers) > _MAX_LISTED))


def _memory_files() -> Finding:
    subject = "shared memory"
    if not hasattr(os, "memfd_create"):
        return Finding(
            subject,
            Severity.WARNING,
            "memfd_create is not supported",
            "use a platform with memfd_create; until then local data is sent over sockets",
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
        remedy = "allow memfd_create in the sandbox; until then local data is sent over sockets"
        return Finding(subject, Severity.WARNING, f"memfd fails: {error}", remedy)
    return Finding(subject, Severity.OK, "memfd works")


def _shared_memory_size() -> Finding:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return Finding("/dev/shm", Severity.WARNING, "missing", "mount a tmpfs at /dev/shm")
    status = os.statvfs(directory)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{free >> 20} MiB free of {size >> 20} MiB"
    if free < _MIN_SHARED_MEMORY:
        remedy = (
            "give the container more (docker: --shm-size 2g); data loaders of frameworks use it"
        )
        return Finding("/dev/shm", Severity.WARNING, found, remedy)
    return Finding("/dev/shm", Severity.OK, found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = {resource.RLIM_INFINITY: "no limit"}
    found = f"{names.get(soft, soft)} (can be raised to {names.get(hard, hard)})"
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        remedy = (
            f"run `ulimit -n {_MIN_OPEN_FILES}` before a dispatcher: each peer needs two or three"
        )
        return Finding("open files", Severity.WARNING, found, remedy)
    return Finding("open files", Severity.OK, found)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5.0):
                pass
    except OSError as error:
        remedy = "allow TCP on 127.0.0.1: dispatcher and workers use it even on one machine"
        return Finding("ports on loopback", Severity.ERROR, str(error), remedy)
    return Finding("ports on loopback", Severity.OK, "a free port can be opened and connected to")


def _dependency(name: str) -> Finding:
    try:
        return Finding(name, Severity.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, Severity.ERROR, "not installed", f"pip install {name}")


def _optional(name: str, extra: str) -> Finding:
    try:
        return Finding(name, Severity.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        remedy = f"to use it: pip install 'headrace[{extra}]'"
        return Finding(name, Severity.OK, "not installed (optional)", remedy)
