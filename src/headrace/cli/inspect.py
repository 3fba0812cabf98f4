"""`headrace status`: who is there, and what is going on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.asking import Asking
from headrace.cli.options import Keys
from headrace.cli.quantities import plural, printable
from headrace.cli.shown import WIDTH_WITHOUT_TERMINAL, as_json, render_look
from headrace.service.config import ShardingPolicy
from headrace.service.messages import DispatcherStatus

__all__ = ["Address", "Timeout", "show_status"]

Address = Annotated[
    str,
    typer.Argument(
        envvar="HEADRACE_DISPATCHER",
        metavar="HOST:PORT",
        help="Where the one who is asked listens.",
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


def show_status(
    address: Address,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print everything that is known, as one JSON object."),
    ] = False,
) -> None:
    """Show how a dispatcher, a coordinator or a parameter server is.

    A coordinator is asked where it listens: `coordinator.listen()` returns the address.
    """
    with Asking(address, keys, timeout) as asking:
        look = asking.look()
    if json:
        print(as_json(look))
    elif isinstance(look.status, DispatcherStatus):
        _print(asking.address, look.status)
    else:
        sys.stdout.write(render_look(look, None, WIDTH_WITHOUT_TERMINAL))


def _print(address: str, status: DispatcherStatus) -> None:
    console = Console()
    console.print(
        f"dispatcher at {address}: {plural(len(status.workers), 'worker')}, "
        f"{plural(status.datasets, 'dataset')}, {plural(len(status.jobs), 'job')}; "
        f"{status.versions}",
        highlight=False,
    )
    if status.workers:
        head = ("worker", "address", "tasks", "last heard of", "Python", "Headrace")
        table = Table(*head, box=None, pad_edge=False)
        for worker in status.workers:
            table.add_row(
                worker.worker_id[:8],
                f"{worker.address} (leaving)" if worker.leaving else worker.address,
                str(worker.tasks),
                f"{worker.seconds_since_heartbeat:.1f} s ago",
                worker.versions.python or "-",
                worker.versions.headrace or "-",
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
