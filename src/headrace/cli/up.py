"""`headrace up`: a data service and parameter servers on the ranks of one Slurm step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.chief_rank import ChiefRank
from headrace.cli.commands import convert_argument_errors
from headrace.cli.server_rank import ServerRank
from headrace.cli.step_options import StepOptions
from headrace.deploy.slurm_step import SlurmStep, find_node_host

__all__ = ["run_up"]


def run_up(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM",
            help="Program to run on rank 0, with its arguments; without one, the step serves until "
            "SIGTERM.",
        ),
    ] = None,
    ps: Annotated[int, typer.Option(min=0, help="Number of ranks that run parameter servers.")] = 0,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for keys and addresses, on a file system that all nodes share; by "
            "default .headrace in $SLURM_SUBMIT_DIR, or in the home directory.",
        ),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the dispatcher's journal. With one, the dispatcher resumes after a "
            "crash or a requeue of the job; without one there is no journal.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address of this node for the other nodes; by default that of its Slurm name.",
        ),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module that workers import first, by name or as a file FOLDER/NAME.py; repeat "
            "for several.",
        ),
    ] = None,
    max_workers_per_rank: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of data workers of each worker rank, which are added while "
            "clients wait for elements, and removed while fewer suffice.",
        ),
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            min=5.0,
            metavar="SECONDS",
            help="Maximum time to wait for the other ranks to start, and for a sign of rank 0.",
        ),
    ] = 180.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Time after SIGTERM for the program to end, or without one for workers to deliver "
            "their elements; at least 5 s less than KillWait of slurm.conf.",
        ),
    ] = 20.0,
) -> None:
    """Run a data service and parameter servers on the ranks of a Slurm step.

    Started by srun: rank 0 runs the dispatcher and PROGRAM, ranks 1 to N the parameter servers, and
    each other rank a worker of the data service and a coordinator worker. PROGRAM finds them in the
    environment variables HEADRACE_SERVICE, HEADRACE_KEYS and TF_CONFIG. The step ends with it.
    """
    with convert_argument_errors():
        step = SlurmStep.from_environment(ps)
        options = StepOptions(
            directory=step.directory(run_dir),
            host=find_node_host() if host is None else host,
            work_dir=None if work_dir is None else work_dir.absolute(),
            preload=tuple(preload or ()),
            max_workers_per_rank=max_workers_per_rank,
            timeout=timeout,
            grace=grace,
            program=tuple(program or ()),
        )
    rank = ChiefRank(step, options) if step.rank == 0 else ServerRank(step, options)
    status = rank.run()
    if status:
        raise typer.Exit(status)
