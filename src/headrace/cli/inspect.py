"""`headrace status`: who is there, and what is going on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.failures import wrong_arguments
from headrace.cli.quantities import plural, printable
from headrace.service.config import ShardingPolicy, parse_service
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import DispatcherStatus, GetStatus
from headrace.transport.security import Security

__all__ = ["Address", "Keys", "Timeout", "as_json", "connected", "show_status"]


Address = Annotated[
    str,
    typer.Argument(
        envvar="HEADRACE_DISPATCHER", metavar="HOST:PORT", help="The dispatcher to ask."
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`."),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


@contextlib.contextmanager
def connected(
    address: str, keys: Path | None, timeout: float
) -> Iterator[tuple[str, DispatcherStub]]:
    """Check what a user wrote; give the dispatcher's address, and a connection to it."""
    with wrong_arguments({"service": "HOST:PORT", "address": "HOST:PORT"}):
        if not timeout > 0:
            raise ValueError(f"--timeout {timeout:g} must be above 0")
        address = parse_service(address)
        security = None if keys is None else Security.load(keys, "client")
    stub = DispatcherStub(address, security=security)
    try:
        yield address, stub
    finally:
        stub.close()


def show_status(
    address: Address,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print everything that is known, as one JSON object."),
    ] = False,
) -> None:
    """Show the workers and jobs of a dispatcher."""
    with connected(address, keys, timeout) as (checked, stub):
        status = stub.call(GetStatus(), timeout=timeout)
    if json:
        print(as_json(status))
    else:
        _print(checked, status)


def as_json(status: DispatcherStatus) -> str:
    """Write a status as JSON: the fields of the records, and modes by name."""
    plain = msgspec.to_builtins(status)
    for job in plain["jobs"]:
        job["processing_mode"] = ShardingPolicy(job["processing_mode"]).name
    _drop_types(plain)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def _drop_types(value: Any) -> None:
    """Leave out which record it was: what it is, its place says."""
    if isinstance(value, dict):
        value.pop("type", None)
        for each in value.values():
            _drop_types(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _drop_types(each)


def _print(address: str, status: DispatcherStatus) -> None:
    console = Console()
    console.print(
        f"dispatcher at {address}: {plural(len(status.workers), 'worker')}, "
        f"{plural(status.datasets, 'dataset')}, {plural(len(status.jobs), 'job')}",
        highlight=False,
    )
    if status.workers:
        table = Table("worker", "address", "tasks", "last heard of", box=None, pad_edge=False)
        for worker in status.workers:
            table.add_row(
                worker.worker_id[:8],
                f"{worker.address} (leaving)" if worker.leaving else worker.address,
                str(worker.tasks),
                f"{worker.seconds_since_heartbeat:.1f} s ago",
            )
        console.print(table)
    if status.jobs:
        columns = ("job", "name", "dataset", "mode", "iterations", "running tasks", "clients")
        table = Table(*columns, box=None, pad_edge=False)
        for job in status.jobs:
            table.add_row(
                str(job.job_id),
                printable(job.name) or "-",
                job.dataset_id,
                ShardingPolicy(job.processing_mode).name,
                str(job.iterations),
                str(job.running_tasks),
                str(job.clients),
            )
        console.print(table)
