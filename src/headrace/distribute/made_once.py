"""Making a variable: of which kind, and once for all replicas that make it."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from headrace.distribute.context import OnReplica, here, refusing_variables
from headrace.distribute.current import get_strategy, has_strategy

__all__ = ["MadeOnce"]


class MadeOnce(ABCMeta):
    """The type of a class of which replicas that make one each make one together."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one, of the kind that the strategy has, unless the code may make none."""
        refuse = refusing_variables.get()
        if refuse is not None:
            raise refuse(str(args[1] if len(args) > 1 else kwargs.get("name") or ""))
        kind = get_strategy().variable_type
        if kind is not None:
            return kind(*args, **kwargs)

        def make(*_: Any) -> Any:
            return super(MadeOnce, cls).__call__(*args, **kwargs)

        place = here.get()
        if isinstance(place, OnReplica) and has_strategy():
            # That of the first replica: a random initial value is the same on all.
            return place.merge_call(make)  # type: ignore[attr-defined]
        return make()
