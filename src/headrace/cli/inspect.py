"""`headrace status` and `headrace journal`: the status of a server, and what its journal holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.asking import Asking, Look
from headrace.cli.commands import Keys
from headrace.cli.coordinator_frame import render_coordinator, render_server
from headrace.cli.frame import render
from headrace.cli.tables import plural, printable
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
    "as_json",
    "render_look",
    "show_status",
    "tell_journal",
]


WIDTH_WITHOUT_TERMINAL = 120


def render_look(look: Look, previous: Look | None, width: int) -> str:
    """Return what was seen as lines of at most `width` letters."""
    match look.status:
        case CoordinatorStatus() as status:
            return render_coordinator(look, status, previous, width)
        case ServerStatus() as status:
            return render_server(look, status, previous, width)
        case status:
            before = None if previous is None else previous.status
            return render(status, before if isinstance(before, DispatcherStatus) else None, width)


def as_json(look: Look) -> str:
    """Write what was seen as JSON: the fields of the records, and modes by name."""
    plain = msgspec.to_builtins(look.status)
    for job in plain.get("jobs", ()):
        job["processing_mode"] = ShardingPolicy(job["processing_mode"]).name
    if look.servers:
        plain["servers"] = msgspec.to_builtins(look.servers)
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
                f"{worker.address} (leaving)" if worker.draining else worker.address,
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
                str(job.num_epochs),
                str(job.running_tasks),
                str(job.clients),
            )
        console.print(table)


def tell_journal(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The dispatcher's --work-dir.")],
    task: Annotated[int | None, typer.Option(help="Tell what became of this task.")] = None,
    job: Annotated[
        str | None, typer.Option(help="Tell what became of the job of this name.")
    ] = None,
) -> None:
    """Tell what became of a task or a job; also while the dispatcher runs.

    Without --task or --job it lists which there are. The directory is only read.
    """
    if task is not None and job is not None:
        raise typer.BadParameter("--task and --job: one story at a time")
    with JournalCopy(directory, FORMAT) as copy:
        number, state = copy.first()
        if task is not None:
            told = [str(each) for each in report_task(number, state, copy.records(), task)]
        elif job is not None:
            told = [str(each) for each in report_job(number, state, copy.records(), job)]
        else:
            told = summarize(state, copy.records())
    if not told:
        what = f"task {task}" if task is not None else f"job {job!r}"
        raise NotFoundError(
            f"the journal in {directory} tells of no {what}: there was none, or it was forgotten "
            f"before the journal was last shortened; `headrace journal {directory}` lists those "
            "that are there"
        )
    for line in told:
        print(printable(line))
