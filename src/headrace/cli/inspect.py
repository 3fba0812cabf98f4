"""`headrace status`: who is there, and what is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.failures import wrong_arguments
from headrace.service.config import ShardingPolicy, parse_service
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import DispatcherStatus, GetStatus
from headrace.transport.security import Security

__all__ = ["show_status"]


def show_status(
    address: Annotated[
        str,
        typer.Argument(
            envvar="HEADRACE_DISPATCHER", metavar="HOST:PORT", help="The dispatcher to ask."
        ),
    ],
    keys: Annotated[
        Path | None,
        typer.Option(envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Show the workers and jobs of a dispatcher."""
    with wrong_arguments({"service": "HOST:PORT", "address": "HOST:PORT"}):
        if not timeout > 0:
            raise ValueError(f"--timeout {timeout:g} must be above 0")
        address = parse_service(address)
        security = None if keys is None else Security.load(keys, "client")
    stub = DispatcherStub(address, security=security)
    try:
        status = stub.call(GetStatus(), timeout=timeout)
    finally:
        stub.close()
    _print(address, status)


def _print(address: str, status: DispatcherStatus) -> None:
    console = Console()
    console.print(
        f"dispatcher at {address}: {_count(len(status.workers), 'worker')}, "
        f"{_count(status.datasets, 'dataset')}, {_count(len(status.jobs), 'job')}",
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
                job.name or "-",
                job.dataset_id,
                ShardingPolicy(job.processing_mode).name,
                str(job.iterations),
                str(job.running_tasks),
                str(job.clients),
            )
        console.print(table)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
