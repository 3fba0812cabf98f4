"""Commands of `headrace`, and their common options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import dashboard, doctor, inspect, serve, task, top, up
from headrace.cli.commands import CommandGroup, GroupWithHelp
from headrace.release import __version__
from headrace.transport.security import new_keys

__all__ = ["app"]


keys_app = typer.Typer(
    no_args_is_help=True, help="Manage keys; required for servers that other machines can reach."
)


@keys_app.callback()
def _group() -> None:
    """Keep `new` a command of its own while it is the only one."""


@keys_app.command("new")
def make_keys(
    directory: Annotated[Path, typer.Argument(help="Directory to write to; created if missing.")],
) -> None:
    """Create keys for a server and for a first, authorized client."""
    folder = new_keys(directory)
    print(f"keys written to {folder}")
    print("  dispatcher and workers need server.key, server.key_secret and authorized_clients/")
    print("  clients need client.key, client.key_secret and server.key; keep *_secret files secret")
    print("  to authorize another client, copy its public key into authorized_clients/")


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
app.command("up")(up.run_up)
app.command("status")(inspect.show_status)
app.command("top")(top.show_top)
app.command("dashboard")(dashboard.run_dashboard)
app.command("report")(dashboard.write_report)
app.command("journal")(inspect.show_journal)
app.command("doctor")(doctor.examine)
app.add_typer(keys_app, name="keys", cls=GroupWithHelp)


@app.command("demo")
def _run_demo() -> None:
    """Train a classifier on data from a dispatcher and two workers, one of which is killed."""
    try:
        from headrace.cli.demo import run_demo  # noqa: PLC0415 - optional: jax, scikit-learn
    except ModuleNotFoundError as error:
        print(
            f"headrace: the demo needs {error.name}: pip install 'headrace[demo]'", file=sys.stderr
        )
        raise typer.Exit(1) from error
    raise typer.Exit(run_demo())


def _print_version(requested: bool) -> None:
    if requested:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run input pipelines for training jobs on separate worker machines."""
