"""Division of tar archives into parts of consecutive samples, cached in small files.

Headers of an archive are linked by the sizes of the members, so finding a sample in its middle
requires a walk over all headers. The result, a few offsets, is stored in a folder under a name that
depends on the path, size and modification time of the archive.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.errors import DataLossError, HeadraceError
from headrace.sources.tar_members import TarMembers
from headrace.storage.files import open_file, open_folder, read_file_version
from headrace.storage.names import FileName, is_local
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = [
    "DEFAULT_FOLDER",
    "MAX_INDEXED",
    "PART_SIZE",
    "Shard",
    "index_shards",
    "is_compressed",
    "split_name",
]

DEFAULT_FOLDER = os.path.join("~", ".cache", "headrace", "tar")
PART_SIZE = 8 << 20
"""Least size of a part in bytes, except for the last one of an archive."""
MAX_INDEXED = 256
"""Largest number of archives that are divided into parts."""

_FORMAT = 1
_BLOCK_SIZE = 16 << 10
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """An archive and its parts.

    Attributes:
        name: Path or URL.
        starts: Offset of each part; the last one extends to the end of the archive.
        num_bytes: Size of the archive when the parts were found; None if it was not divided.
    """

    name: str
    starts: tuple[int, ...] = (0,)
    num_bytes: int | None = None


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the extension of a member; None if it does not belong to a sample.

    The key is the path up to the first dot of the base name.

    >>> split_name("train/0001.seg.PNG")
    ('train/0001', 'seg.png')
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return None if dot <= base else (name[:dot], name[dot + 1 :].lower())


def is_compressed(name: str) -> bool:
    """Return whether the name of an archive ends in `.gz` or `.tgz`."""
    return name.lower().endswith((".gz", ".tgz"))


def index_shards(
    names: Sequence[str], index_dir: FileName | None, options: StorageOptions = NO_OPTIONS
) -> tuple[Shard, ...]:
    """Return the shards with these names, divided into parts where possible.

    Compressed archives are not divided, nor are more than `MAX_INDEXED`. Archives by URL are
    divided only if there is an `index_dir`, as reading all their headers may be slow.

    Args:
        names: Paths and URLs.
        index_dir: Folder of cached indexes; None uses `DEFAULT_FOLDER`.
        options: Options of the file systems of URLs.

    Raises:
        NotFoundError: If an archive that can be divided does not exist.
        UnavailableError: If it cannot be read.
    """
    if len(names) > MAX_INDEXED:
        return tuple([Shard(name) for name in names])
    folder = os.path.expanduser(DEFAULT_FOLDER) if index_dir is None else index_dir

    def index(name: str) -> Shard:
        if is_compressed(name) or (index_dir is None and not is_local(name)):
            return Shard(name)
        return _load_or_build(name, folder, options)

    with ThreadPoolExecutor(min(len(names), _MAX_THREADS), "headrace-tar-index") as threads:
        return tuple(threads.map(index, names))


def _load_or_build(name: str, index_dir: FileName, options: StorageOptions) -> Shard:
    num_bytes, version = read_file_version(name, options)
    if num_bytes is None or num_bytes <= PART_SIZE:
        return Shard(name)
    path = os.path.abspath(name) if is_local(name) else name
    identity = {"format": _FORMAT, "path": path, "version": version, "part_size": PART_SIZE}
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    file_name = f"{key}.json"
    try:
        found = json.loads(open_folder(index_dir, options).read(file_name))
        starts = found.pop("starts")
        if found == identity and _are_starts(starts, num_bytes):
            return _make_shard(name, starts, num_bytes)
    except (HeadraceError, OSError, ImportError, ValueError, KeyError, AttributeError, TypeError):
        pass  # missing or unusable: build it again
    starts = _find_starts(name, options)
    try:
        text = json.dumps({**identity, "starts": starts})
        open_folder(index_dir, options).write(file_name, text.encode())
    except (HeadraceError, OSError, ImportError, ValueError):
        pass  # the cache only saves time
    return _make_shard(name, starts, num_bytes)


def _make_shard(name: str, starts: list[int], num_bytes: int) -> Shard:
    return Shard(name, tuple(starts), num_bytes) if len(starts) > 1 else Shard(name)


def _are_starts(starts: object, num_bytes: int) -> bool:
    return (
        isinstance(starts, list)
        and all(type(start) is int for start in starts)
        and starts[:1] == [0]
        and starts == sorted(set(starts))
        and starts[-1] < num_bytes
    )


def _find_starts(name: str, options: StorageOptions) -> list[int]:
    """Return the offset of each part, from the headers; damage is left to the last part."""
    members = TarMembers(open_file(name, options=options), name, 0, _BLOCK_SIZE, can_seek=True)
    starts, key = [0], None
    try:
        while (member := members.next()) is not None:
            split = split_name(member.name)
            if split is not None and split[0] != key:
                key = split[0]
                if member.start - starts[-1] >= PART_SIZE:
                    starts.append(member.start)
    except DataLossError:
        pass
    finally:
        members.close()
    return starts
