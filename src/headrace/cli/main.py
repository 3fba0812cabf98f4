"""The commands of `headrace`, and what holds for all of them."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from headrace.cli import chaos, doctor, inspect, journal, keys, serve, task, top
from headrace.cli.failures import CommandGroup
from headrace.cli.help import GroupWithHelp

__all__ = ["app"]

app = typer.Typer(
    rich_markup_mode=None,
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("dispatcher")(serve.run_dispatcher)
app.command("worker")(serve.run_worker)
app.command("server")(task.run_task)
app.command("status")(inspect.show_status)
app.command("top")(top.show_top)
app.command("journal")(journal.tell_journal)
app.command("doctor")(doctor.examine)
app.add_typer(keys.app, name="keys", cls=GroupWithHelp)


class Job(enum.StrEnum):
    """What the demo shows."""

    DIGITS = "digits"
    CHAOS = "chaos"
    FLIGHTS = "flights"
    KERAS = "keras"


@app.command("demo")
def _run_demo(
    job: Annotated[
        Job,
        typer.Option(
            help="digits: train a classifier on real digits through a dispatcher and two workers, "
            "and kill one. chaos: kill a process every second, and compare what arrives with what "
            "one process reads. flights: train a model of late flights on two workers and two "
            "parameter servers, and kill one of each. keras: train a Keras model on as many, "
            "with and without kills, and compare the weights."
        ),
    ] = Job.DIGITS,
) -> None:
    """Show what Headrace does, with processes that are killed."""
    if job is Job.CHAOS:
        raise typer.Exit(chaos.run_chaos())
    extra = "demo" if job is Job.DIGITS else f"demo-{job}"
    try:
        if job is Job.FLIGHTS:
            from headrace.cli.flights import run_flights  # noqa: PLC0415 - optional: scikit-learn

            raise typer.Exit(run_flights())
        if job is Job.KERAS:
            os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
            from headrace.cli.keras_demo import run_keras  # noqa: PLC0415 - optional: keras, jax

            raise typer.Exit(run_keras())
        from headrace.cli.demo import run_demo  # noqa: PLC0415 - optional: jax, scikit-learn

        raise typer.Exit(run_demo())
    except ModuleNotFoundError as error:
        print(
            f"headrace: the demo needs {error.name}: pip install 'headrace[{extra}]'",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback when something fails.")
    ] = False,
) -> None:
    """Feed training jobs from a service: pipelines run on workers, off the training hosts."""
