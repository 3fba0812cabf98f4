"""The bottleneck of a dataset, as `headrace top` and `DatasetIterator.stats` report it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WAITING_SHARE", "Bottleneck"]

WAITING_SHARE = 0.2
"""Fraction of the time below which a wait does not count."""


@dataclass(frozen=True)
class Bottleneck:
    """Bottleneck of a dataset, or of an epoch of the data service."""

    location: str
    """Short phrase to print after "bound by"."""
    advice: str
    """Advice; empty if none is needed."""

    def __str__(self) -> str:
        return f"bound by {self.location}{f': {self.advice}' if self.advice else ''}"
