"""Blobs: bytes too large for a fact, kept beside the facts, in parts and under a key."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BlobPart", "BlobPlace"]


class BlobPart(NamedTuple):
    """Bytes of a blob, and where they begin in it."""

    key: bytes
    offset: int
    part: bytes


class BlobPlace(NamedTuple):
    """A place in a blob that is kept."""

    key: bytes
    offset: int
