"""Versions of a process, as peers compare them when they register or open a session.

Three things decide whether two processes can work together:

* The wire format. Every request carries its number; a server refuses requests of another format.
* The Python minor version, wherever one process runs functions that another one pickled. Functions
  travel as bytecode, and each minor version of Python has its own.
* The plan format: the first line of each pickled plan, with the Python version that pickled it.

Another release of Headrace with the same formats is allowed, with a warning.
"""

from __future__ import annotations

import sys

import msgspec

__all__ = [
    "PLAN_FORMAT",
    "WIRE_FORMAT",
    "Versions",
    "own_versions",
    "python_mismatch",
    "release_mismatch",
]

WIRE_FORMAT = 1
"""Number of the format of messages between processes. To be raised with each change after which
older processes cannot read them."""
PLAN_FORMAT = 1
"""Number of the format of pickled plans."""


class Versions(msgspec.Struct, frozen=True):
    """The versions of one process.

    Attributes:
        headrace: Its release of Headrace; empty: not known.
        python: The minor version of Python, as "3.11"; empty: not known.
    """

    headrace: str = ""
    python: str = ""

    def __str__(self) -> str:
        return f"Python {self.python or '(unknown)'} with Headrace {self.headrace or '(unknown)'}"


_this_process = Versions(
    headrace="0.1.0", python=f"{sys.version_info.major}.{sys.version_info.minor}"
)


def own_versions() -> Versions:
    """Return the versions of this process."""
    return _this_process


def python_mismatch(one: str, other: str) -> bool:
    """Return whether functions cannot travel between two minor versions of Python.

    A version that is not known (empty) is taken to match.
    """
    return bool(one and other) and one != other


def release_mismatch(one: Versions, other: Versions) -> bool:
    """Return whether two processes run different releases of Headrace, as far as is known."""
    return bool(one.headrace and other.headrace) and one.headrace != other.headrace
