"""`headrace journal`: what became of a task or a job, told from the facts that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.quantities import printable
from headrace.errors import NotFoundError
from headrace.service.dispatcher.journal import FORMAT
from headrace.service.dispatcher.story import overview, tell_job, tell_task
from headrace.serving.journal_copy import JournalCopy

__all__ = ["tell_journal"]


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
            told = [str(each) for each in tell_task(number, state, copy.records(), task)]
        elif job is not None:
            told = [str(each) for each in tell_job(number, state, copy.records(), job)]
        else:
            told = overview(state, copy.records())
    if not told:
        what = f"task {task}" if task is not None else f"job {job!r}"
        raise NotFoundError(
            f"the journal in {directory} tells of no {what}: there was none, or it was forgotten "
            f"before the journal was last shortened; `headrace journal {directory}` lists those "
            "that are there"
        )
    for line in told:
        print(printable(line))
