"""The step that drops elements whose computation failed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from headrace.arguments import check_flag, check_path
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["IgnoreErrors"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IgnoreErrors(Node):
    """Drop the elements for which an earlier step raises an error."""

    kind: ClassVar[str] = "ignore_errors"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("log_warning", "limit", "dead_letter")

    input: Node
    log_warning: bool = False
    limit: int | None = None
    dead_letter: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_flag("log_warning", self.log_warning, or_none=False)
        if self.limit is not None:
            self.validate_int("limit", minimum=1)
        if self.dead_letter is not None:
            check_path("dead_letter", self.dead_letter)
            path = os.fspath(self.dead_letter)
            if "://" in path:
                raise ValueError(
                    f"`dead_letter` must be a path on a local or mounted disk, but is the URL "
                    f"{path!r}: object stores cannot append to a file"
                )
            # Absolute, because data workers have other working directories.
            object.__setattr__(self, "dead_letter", os.path.abspath(path))

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN
