"""Help in plain text, in which names are whole however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["GroupWithHelp"]

#: A hyphen at which no line is broken: `--fault-tolerant` is one word.
_FIRM_HYPHEN = "\N{NON-BREAKING HYPHEN}"


_WrapsLines: Any = typer.Context.formatter_class  # which has no public name


class _Formatter(_WrapsLines):  # type: ignore[misc]
    """Breaks lines at blanks alone."""

    def write_text(self, text: str) -> None:
        super().write_text(_firm(text))

    def write_dl(self, rows: Sequence[tuple[str, str]], *args: Any, **options: Any) -> None:
        super().write_dl([(_firm(term), _firm(text)) for term, text in rows], *args, **options)

    def write(self, string: str) -> None:
        super().write(string.replace(_FIRM_HYPHEN, "-"))


class _Context(typer.Context):
    formatter_class = _Formatter


class GroupWithHelp(TyperGroup):
    """Commands with such a help."""

    context_class = _Context

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or None."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = _Context
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the whole first line of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, (command.help or "").partition("\n")[0])
            for name, command in commands
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _firm(text: str) -> str:
    return text.replace("-", _FIRM_HYPHEN)
