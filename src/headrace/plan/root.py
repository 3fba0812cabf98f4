"""The root of a dealt plan: the step from which on each element is named by its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.node import Node

__all__ = ["Mark", "Root"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Mark(Node):
    """The same elements: a step that a rewrite alone puts in, to say something of where it is."""

    only_reads: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    input: Node


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Root(Mark):
    """The same elements, each with its origin. Put in by `rewrites.roots`."""

    kind: ClassVar[str] = "root"
