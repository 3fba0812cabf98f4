"""Files that fsspec reaches. Nobody who reads local files alone has to load it."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.core import url_to_fs

from headrace.errors import UnavailableError
from headrace.storage.names import is_pattern

__all__ = ["match", "open_url"]


def match(pattern: str) -> list[str]:
    """Return the URLs of the files that match a pattern without braces.

    Raises:
        UnavailableError: They cannot be listed.
    """
    try:
        system, path = url_to_fs(pattern)
        if system.isfile(path):
            return [pattern]
        if not is_pattern(path):
            return []
        listed = system.glob(path, detail=True)
    except OSError as error:
        raise UnavailableError(f"files of {pattern!r} cannot be listed: {error}") from error
    except (ValueError, ImportError) as error:
        raise _unknown(pattern, error) from error
    paths = [str(found) for found, info in listed.items() if info["type"] == "file"]
    first, chained, rest = pattern.partition("::")
    if not chained:
        return [system.unstrip_protocol(found) for found in paths]
    if "://" in first:
        # An archive within another file: `zip://*.csv::s3://bucket/all.zip`.
        protocol = first.partition("://")[0]
        return [f"{protocol}://{found.lstrip('/')}::{rest}" for found in paths]
    # A cache in front of another file system: `simplecache::s3://bucket/*.csv`.
    protocol = rest.partition("://")[0]
    return [f"{first}::{protocol}://{found}" for found in paths]


def open_url(url: str, mode: str) -> Any:
    """Open a file to read ("rb") or to write it from its start ("wb")."""
    try:
        return fsspec.open(url, mode).open()
    except (ValueError, ImportError) as error:
        raise _unknown(url, error) from error


def _unknown(url: str, error: ValueError | ImportError) -> Exception:
    """Name the URL whose file system fsspec does not have."""
    kind = ImportError if isinstance(error, ImportError) else ValueError
    return kind(f'{url!r}: {error} (of this name before "://", fsspec has no file system here)')
