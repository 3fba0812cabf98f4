"""How a failure looks on the command line: one line on stderr and an exit code.

    0  done, or stopped by Ctrl-C or SIGTERM after running
    1  something failed while it ran (`HeadraceError`, `OSError`)
    2  the command was called wrongly

`--debug` shows the traceback too.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.errors import HeadraceError

__all__ = ["CommandGroup", "wrong_arguments"]


class CommandGroup(TyperGroup):
    """The commands; what one of them raises becomes a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (HeadraceError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            # An error without words of its own is named by its class.
            print(f"headrace: {error or type(error).__name__}", file=sys.stderr)
            raise typer.Exit(1) from error


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Turn the ValueError or TypeError of a checked record into a usage error."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
