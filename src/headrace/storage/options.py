"""Options of file systems, such as endpoints and credentials, as given by users."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.arguments import check_int

__all__ = ["NO_OPTIONS", "StorageCache", "StorageOptions"]

_CACHE = "cache"


@dataclass(frozen=True)
class StorageCache:
    """A cache of remote files on a local disk, for `storage_options={"cache": ...}`.

    Blocks of 8 MiB are stored when they are first read. Processes on one host may share the
    directory. Without space on the disk, files are read directly.

    >>> hr.StorageCache("/scratch/cache", max_bytes=200 << 30)
    StorageCache(directory='/scratch/cache', max_bytes=214748364800)

    Args:
        directory: Path of a folder on a local disk; created if needed. On each host of a data
            service it is another folder.
        max_bytes: Size of the cache in bytes. Several processes may exceed it by some blocks.
    """

    directory: str
    max_bytes: int

    def __post_init__(self) -> None:
        path = os.fsdecode(self.directory)
        if "://" in path:
            raise ValueError(f"`directory` must be a local path, but got {path!r}")
        object.__setattr__(self, "directory", os.path.abspath(os.path.expanduser(path)))
        check_int("max_bytes", self.max_bytes, minimum=1)


@dataclass(frozen=True, init=False, repr=False)
class StorageOptions:
    """Options for the file systems of URLs.

    They may contain credentials, so no text shows them. They are pickled with the plan, but are no
    part of its meaning: the class has no dataclass fields, so all instances are equal and have the
    same fingerprint. A state remains usable after a token was replaced.

    Args:
        values: Options of the file system, and optionally a `StorageCache` as `"cache"`.

    Raises:
        TypeError: If it is no mapping with keys of type str, or the cache is no `StorageCache`.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        if not isinstance(values, Mapping | None):
            raise TypeError(
                "`storage_options` must be a dict of options of the file system, but is of type "
                f"{type(values).__name__}"
            )
        system = dict(values or {})
        for key in system:
            if not isinstance(key, str):
                raise TypeError(f"keys of `storage_options` must be str, but got {key!r}")
        cache = system.pop(_CACHE, None)
        if not isinstance(cache, StorageCache | None):
            raise TypeError(
                f"storage_options[{_CACHE!r}] must be a hr.StorageCache, but is of type "
                f"{type(cache).__name__}"
            )
        object.__setattr__(self, "_system", system)
        object.__setattr__(self, "_cache", cache)

    @classmethod
    def of(cls, values: Mapping[str, Any] | StorageOptions | None) -> StorageOptions:
        """Return the options of an argument `storage_options`."""
        return values if isinstance(values, StorageOptions) else cls(values)

    @property
    def system(self) -> dict[str, Any]:
        """Options of the file system."""
        return dict(self.__dict__["_system"])

    @property
    def cache(self) -> StorageCache | None:
        """Cache of the blocks of files; None reads them directly."""
        cache: StorageCache | None = self.__dict__["_cache"]
        return cache

    def __repr__(self) -> str:
        return "StorageOptions(...)"


NO_OPTIONS = StorageOptions()
