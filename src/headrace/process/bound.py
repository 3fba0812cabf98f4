"""Children that are of no use without their parent: how they are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from headrace.process.child import Command, clean_environment

__all__ = ["NO_ACCELERATORS", "bound_command"]

NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators belong to the process that trains; a child would take memory on them."""


def bound_command(module: str, *arguments: str, environment: Mapping[str, str]) -> Command:
    """Return the command of a child that runs a module of ours and ends with this process.

    Args:
        module: It is run as a program, with two more arguments (see `Command.is_bound`).
        *arguments: Of the program.
        environment: Variables that it gets besides those of this process, and more than these:
            accelerators are hidden from it.
    """
    return Command(
        arguments=("-m", module, *arguments),
        environment=clean_environment(
            os.environ,
            NO_ACCELERATORS,
            environment,
            # Functions of the user's modules travel by name: a child must find the same modules.
            paths=tuple(sys.path),
        ),
        is_bound=True,
    )
