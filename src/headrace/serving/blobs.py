"""Blobs: bytes too large for an event, stored beside the events by key, in parts."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlobPart", "BlobPosition"]


class BlobPart(NamedTuple):
    """Bytes of a blob and their offset in it."""

    key: bytes
    offset: int
    part: bytes


class BlobPosition(NamedTuple):
    """Position in a stored blob."""

    key: bytes
    offset: int
