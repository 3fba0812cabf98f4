"""Common behaviour of all commands: options, help, and failures.

Help is plain text that never breaks names, however narrow the terminal is. A failure is one line on
stderr and an exit code:

    0  success, or stopped by Ctrl-C or SIGTERM after running
    1  failed while running (`HeadraceError`, `OSError`)
    2  wrong usage

`--debug` also shows the traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.errors import DataLossError, HeadraceError
from headrace.open_files import explain_open_error
from headrace.transport.security import Security

__all__ = [
    "CommandGroup",
    "GroupWithHelp",
    "IgnoreSignalsOption",
    "Keys",
    "MetricsHost",
    "MetricsPort",
    "ParentOption",
    "convert_argument_errors",
    "load_client_keys",
]


Keys = Annotated[
    Path | None,
    typer.Option(envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Port for /metrics, /healthz and /readyz over HTTP; 0 picks a free port."),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        help="Address to serve metrics at; the default is reachable from this machine only."
    ),
]
ParentOption = Annotated[bool, typer.Option("--with-parent", hidden=True)]
IgnoreSignalsOption = Annotated[bool, typer.Option("--ignore-signals", hidden=True)]


def load_client_keys(directory: Path | None) -> Security | None:
    """Return the keys of a client, or those of the servers on a machine that has no others.

    Args:
        directory: Directory made by `headrace keys new`, or a copy of the files of one role.

    Raises:
        ValueError: If a file is missing, or does not contain a key.
    """
    if directory is None:
        return None
    if not (directory / "client.key").exists() and (directory / "server.key_secret").exists():
        return Security.load(directory, "server").as_client()
    return Security.load(directory, "client")


#: A hyphen without a line break after it: `--fault-tolerant` is one word.
_FIRM_HYPHEN = "\N{NON-BREAKING HYPHEN}"


_WrapsLines: Any = typer.Context.formatter_class  # has no public name


class _Formatter(_WrapsLines):  # type: ignore[misc]
    """Breaks lines at spaces only."""

    def write_text(self, text: str) -> None:
        super().write_text(_protect_names(text))

    def write_dl(self, rows: Sequence[tuple[str, str]], *args: Any, **options: Any) -> None:
        super().write_dl(
            [(_protect_names(term), _protect_names(text)) for term, text in rows], *args, **options
        )

    def write(self, string: str) -> None:
        super().write(string.replace(_FIRM_HYPHEN, "-"))


class _Context(typer.Context):
    formatter_class = _Formatter


class GroupWithHelp(TyperGroup):
    """Group of commands whose help lines are broken at spaces only."""

    context_class = _Context

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or None."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = _Context
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the complete first line of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, (command.help or "").partition("\n")[0])
            for name, command in commands
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _protect_names(text: str) -> str:
    return text.replace("-", _FIRM_HYPHEN)


class CommandGroup(GroupWithHelp):
    """Group of all commands; an error becomes a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (HeadraceError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            # An error without a message is named by its class.
            print(f"headrace: {explain_open_error(error) or type(error).__name__}", file=sys.stderr)
            raise typer.Exit(1) from error


@contextmanager
def convert_argument_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert the ValueError or TypeError of a validated record to a usage error.

    Args:
        options: Option for each field of the record, so that errors name what the user wrote.
    """
    try:
        yield
    except DataLossError:
        raise  # also a ValueError, but not about an argument
    except (TypeError, ValueError) as error:
        message = str(error)
        for field, option in (options or {}).items():
            message = message.replace(f"`{field}`", option)
            message = re.sub(rf"\b{field}=", f"{option} ", message)
            message = message.replace(f"{option} ({option})", option)
        raise typer.BadParameter(message) from error
