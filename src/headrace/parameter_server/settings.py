"""How a strategy of parameter servers works: what its handle carries, checked once."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.arguments import check_int

__all__ = ["StrategySettings", "checked_settings"]


class StrategySettings(msgspec.Struct, frozen=True):
    """How a strategy works, as its handle carries it."""

    mode: str
    staleness: int | None
    round_size: int | None
    replication: int
    replicas: int


def checked_settings(
    mode: Any, staleness: Any, round_size: Any, replication: Any, replicas: Any
) -> StrategySettings:
    """Check how a strategy is to work.

    Raises:
        ValueError: An argument is out of its bounds, or does not go with another.
    """
    if mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync", but got {mode!r}')
    if staleness is not None:
        check_int("staleness", staleness, minimum=0)
    if round_size is not None:
        check_int("round_size", round_size, minimum=1)
    check_int("replication", replication, minimum=1)
    check_int("replicas", replicas, minimum=1)
    if mode == "sync" and staleness is not None:
        raise ValueError('`staleness` is for mode="async": in mode="sync" no write is stale')
    if mode == "async" and round_size is not None:
        raise ValueError('`round_size` is for mode="sync"')
    if replication > 2:
        raise ValueError(
            f"`replication` must be 1 or 2, but got {replication}: what is on two servers is lost "
            "with both alone, and checkpoints keep it then"
        )
    return StrategySettings(mode, staleness, round_size, replication, replicas)
