"""Names of epochs in messages: "epoch 0", or "epoch 0.2" for nested repetitions."""

from __future__ import annotations

__all__ = ["format_epoch"]


def format_epoch(epoch: tuple[int, ...]) -> str:
    """Return the name of an epoch.

    Args:
        epoch: Indices from the user's iteration inwards; empty for a single epoch.
    """
    return f"epoch {'.'.join(map(str, epoch)) or '0'}"
