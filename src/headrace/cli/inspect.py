"""`headrace status` and `headrace journal`: status of a server, and contents of its journal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.commands import Keys
from headrace.cli.coordinator_frame import render_coordinator, render_server
from headrace.cli.dispatcher_frame import format_wanted, render_dispatcher
from headrace.cli.formatting import escape_controls, pluralize
from headrace.cli.status_client import StatusClient, StatusSnapshot
from headrace.coordinator.status import CoordinatorStatus
from headrace.errors import NotFoundError
from headrace.parameter_server.messages import ServerStatus
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.core import FORMAT
from headrace.service.dispatcher.event_report import report_job, report_task, summarize
from headrace.service.messages import DispatcherStatus
from headrace.serving.journal_copy import JournalCopy

__all__ = [
    "WIDTH_WITHOUT_TERMINAL",
    "Address",
    "Timeout",
    "render_snapshot",
    "show_journal",
    "show_status",
    "to_json",
]


WIDTH_WITHOUT_TERMINAL = 120


def render_snapshot(snapshot: StatusSnapshot, previous: StatusSnapshot | None, width: int) -> str:
    """Return a snapshot as lines of at most `width` characters."""
    match snapshot.status:
        case CoordinatorStatus() as status:
            return render_coordinator(snapshot, status, previous, width)
        case ServerStatus() as status:
            return render_server(snapshot, status, previous, width)
        case status:
            before = None if previous is None else previous.status
            return render_dispatcher(
                status, before if isinstance(before, DispatcherStatus) else None, width
            )


def to_json(snapshot: StatusSnapshot) -> str:
    """Return a snapshot as JSON: the fields of the records, with names of modes."""
    plain = msgspec.to_builtins(snapshot.status)
    for job in plain.get("jobs", ()):
        job["processing_mode"] = ShardingPolicy(job["processing_mode"]).name
    if snapshot.servers:
        plain["servers"] = msgspec.to_builtins(snapshot.servers)
    _drop_types(plain)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def _drop_types(value: Any) -> None:
    """Drop the type tags of nested records, which the field names already imply."""
    if isinstance(value, dict):
        value.pop("type", None)
        for each in value.values():
            _drop_types(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _drop_types(each)


Address = Annotated[
    str,
    typer.Argument(
        envvar="HEADRACE_DISPATCHER",
        metavar="HOST:PORT",
        help="Address of the dispatcher, coordinator or parameter server.",
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a reply.")]


def show_status(
    address: Address,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the complete status as one JSON object."),
    ] = False,
) -> None:
    """Show the status of a dispatcher, coordinator or parameter server.

    The address of a coordinator is the one that `coordinator.listen()` returns.
    """
    with StatusClient(address, keys, timeout) as client:
        snapshot = client.fetch()
    if json:
        print(to_json(snapshot))
    elif isinstance(snapshot.status, DispatcherStatus):
        _print(client.address, snapshot.status)
    else:
        sys.stdout.write(render_snapshot(snapshot, None, WIDTH_WITHOUT_TERMINAL))


def _print(address: str, status: DispatcherStatus) -> None:
    console = Console()
    console.print(
        f"dispatcher at {address}: {pluralize(len(status.workers), 'worker')}"
        f"{format_wanted(status)}, "
        f"{pluralize(status.datasets, 'dataset')}, {pluralize(len(status.jobs), 'job')}; "
        f"{status.versions}",
        highlight=False,
    )
    if status.workers:
        head = ("worker", "address", "tasks", "last heartbeat", "Python", "Headrace")
        table = Table(*head, box=None, pad_edge=False)
        for worker in status.workers:
            table.add_row(
                worker.worker_id[:8],
                f"{worker.address} (draining)" if worker.draining else worker.address,
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
                escape_controls(job.name) or "-",
                job.dataset_id,
                ShardingPolicy(job.processing_mode).name,
                str(job.num_epochs),
                str(job.running_tasks),
                str(job.clients),
            )
        console.print(table)


def show_journal(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The dispatcher's --work-dir.")],
    task: Annotated[int | None, typer.Option(help="ID of a task whose history to print.")] = None,
    job: Annotated[str | None, typer.Option(help="Name of a job whose history to print.")] = None,
) -> None:
    """Print the history of a task or a job; also works while the dispatcher runs.

    Without --task and --job, list the tasks and jobs in the journal. The directory is only read.
    """
    if task is not None and job is not None:
        raise typer.BadParameter("--task and --job cannot be used together")
    with JournalCopy(directory, FORMAT) as copy:
        number, state = copy.first_state()
        if task is not None:
            lines = [str(each) for each in report_task(number, state, copy.records(), task)]
        elif job is not None:
            lines = [str(each) for each in report_job(number, state, copy.records(), job)]
        else:
            lines = summarize(state, copy.records())
    if not lines:
        missing = f"task {task}" if task is not None else f"job {job!r}"
        raise NotFoundError(
            f"the journal in {directory} has no {missing}: it never existed, or was removed before "
            f"the last snapshot of the journal; `headrace journal {directory}` lists the existing "
            "tasks and jobs"
        )
    for line in lines:
        print(escape_controls(line))
