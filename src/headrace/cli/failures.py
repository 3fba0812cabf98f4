"""How a failure looks on the command line: one line on stderr and an exit code.

    0  done, or stopped by Ctrl-C or SIGTERM after running
    1  something failed while it ran (`HeadraceError`, `OSError`)
    2  the command was called wrongly

`--debug` shows the traceback too.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from headrace.cli.help import GroupWithHelp
from headrace.errors import DataLossError, HeadraceError
from headrace.open_files import in_words

__all__ = ["CommandGroup", "wrong_arguments"]


class CommandGroup(GroupWithHelp):
    """The commands; what one of them raises becomes a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (HeadraceError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            # An error without words of its own is named by its class.
            print(f"headrace: {in_words(error) or type(error).__name__}", file=sys.stderr)
            raise typer.Exit(1) from error


@contextmanager
def wrong_arguments(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn the ValueError or TypeError of a checked record into a usage error.

    Args:
        options: The option for each field of the record: errors are to name what the user wrote.
    """
    try:
        yield
    except DataLossError:
        raise  # it is a ValueError, too, and says nothing of arguments
    except (TypeError, ValueError) as error:
        words = str(error)
        for field, option in (options or {}).items():
            words = words.replace(f"`{field}`", option)
            words = re.sub(rf"\b{field}=", f"{option} ", words)
            words = words.replace(f"{option} ({option})", option)
        raise typer.BadParameter(words) from error
