"""Packages that only one resolver needs, and that are installed only where it is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from headrace.errors import FailedPreconditionError

__all__ = ["load"]


def load(module: str, *, needed_by: str, instead: str = "") -> Any:
    """Return the package of a module, which is imported.

    Args:
        module: As in "torch.distributed". The extra of Headrace has the name of its package.
        needed_by: Who says so in the error.
        instead: What else would do, to end the error with.

    Raises:
        FailedPreconditionError: It is not installed here.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise FailedPreconditionError(
            f"{needed_by} needs the package {package}, which is not installed here; "
            f"pip install 'headrace[{package}]'{instead}"
        ) from error
    return sys.modules[package]
