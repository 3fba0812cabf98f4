"""`strategy.extended`, where variables are on servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from headrace.distribute.extended import Extended
from headrace.parameter_server.variable import ServerVariable

__all__ = ["ServerExtended", "placed_beside"]

_beside: ContextVar[ServerVariable | None] = ContextVar("headrace_beside", default=None)


def placed_beside() -> ServerVariable | None:
    """Return the variable beside which new ones are placed; None: they are placed in turn."""
    return _beside.get()


class ServerExtended(Extended):
    """What `strategy.extended` has, where variables are on servers."""

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter servers."""
        count = len(self._strategy.cluster.servers)
        return tuple(f"ps:{number}" for number in range(count))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Place the variables that are made inside where that one's first shard is, in one."""
        if getattr(colocate_with_variable, "cluster", None) is not self._strategy.cluster:
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy.scope(), but got {colocate_with_variable!r:.80}"
            )
        token = _beside.set(colocate_with_variable)
        try:
            yield
        finally:
            _beside.reset(token)
