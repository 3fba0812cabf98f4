"""Versions of a process, as peers compare them when they register or open a session.

Three things decide whether two processes can work together:

* The wire format. Every request carries its number; a server refuses requests of another format.
* The Python minor version, if one process runs functions that another one pickled. Functions are
  sent as bytecode, which differs between minor versions of Python.
* The plan format: the first line of each pickled plan, with the Python version that pickled it.
  Workers also read the formats from `OLDEST_PLAN_FORMAT` on, so that they can be upgraded before
  the clients.

Another release of Headrace with the same formats is allowed, with a warning.
"""

from __future__ import annotations

import sys

import msgspec

from headrace.release import __version__

__all__ = [
    "OLDEST_PLAN_FORMAT",
    "PLAN_FORMAT",
    "WIRE_FORMAT",
    "Versions",
    "own_versions",
    "python_mismatch",
    "release_mismatch",
]

WIRE_FORMAT = 3
"""Version of the message format between processes. Raise it with each change after which older
processes cannot read messages."""
PLAN_FORMAT = 4
"""Version of the format of pickled plans. Raise it with each release that adds steps or fields."""
OLDEST_PLAN_FORMAT = 3
"""Oldest format of pickled plans that this release reads."""


class Versions(msgspec.Struct, frozen=True):
    """Versions of one process.

    Attributes:
        headrace: Release of Headrace; empty if unknown.
        python: Minor version of Python, such as "3.11"; empty if unknown.
    """

    headrace: str = ""
    python: str = ""

    def __str__(self) -> str:
        return f"Python {self.python or '(unknown)'} with Headrace {self.headrace or '(unknown)'}"


_this_process = Versions(
    headrace=__version__, python=f"{sys.version_info.major}.{sys.version_info.minor}"
)


def own_versions() -> Versions:
    """Return the versions of this process."""
    return _this_process


def python_mismatch(one: str, other: str) -> bool:
    """Return whether functions cannot be exchanged between two minor versions of Python.

    An unknown (empty) version matches any.
    """
    return bool(one and other) and one != other


def release_mismatch(one: Versions, other: Versions) -> bool:
    """Return whether two processes are known to run different releases of Headrace."""
    return bool(one.headrace and other.headrace) and one.headrace != other.headrace
