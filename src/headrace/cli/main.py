"""The commands of `headrace`, and what holds for all of them."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from headrace.cli import doctor, inspect, journal, keys, serve, task, top
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


@app.command("demo")
def _run_demo() -> None:
    """Train a classifier through a dispatcher and two workers, and kill one of them."""
    try:
        from headrace.cli.demo import run_demo  # noqa: PLC0415 - optional: jax, scikit-learn
    except ModuleNotFoundError as error:
        print(
            f"headrace: the demo needs {error.name}: pip install 'headrace[demo]'", file=sys.stderr
        )
        raise typer.Exit(1) from error
    raise typer.Exit(run_demo())


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
