"""Where elements that fail on workers fail at the client, beside steps that choose (`rewrites`).

    in one process:   map over shuffle            an element that fails was drawn
    in two halves:    raise_failed over shuffle   over units whose map ran on workers

What fails in a step that sank below those that choose is held in the place of its element, and is
chosen with it. What fails below them is raised at once, as ever. Both steps are put in by a rewrite
alone (`rewrites.cut`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.root import Mark

__all__ = ["FailsBelow", "RaiseFailed"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RaiseFailed(Mark):
    """The same elements; an error that stands in the place of one is raised."""

    kind: ClassVar[str] = "raise_failed"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FailsBelow(Mark):
    """The same elements; errors say that they were raised below what the client chooses from."""

    kind: ClassVar[str] = "fails_below"
