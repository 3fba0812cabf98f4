"""Files and folders that fsspec reaches. This file is loaded when the first URL is met."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from headrace.errors import NotFoundError, UnavailableError
from headrace.storage.files import Folder
from headrace.storage.names import is_pattern

__all__ = ["RemoteFolder", "match", "open_url"]


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


_WHOLE = ".whole"


class RemoteFolder(Folder):
    """A folder by URL. For each published file there is a tiny one: `<public name>.whole`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            system, root = url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(
                f'{url!r}: {error} (of this name before "://", fsspec has no file system here)'
            ) from error
        self._system = system
        self._root = str(root).rstrip("/")

    def __reduce__(self) -> tuple[type[RemoteFolder], tuple[str]]:
        return RemoteFolder, (self.url,)

    def path(self, name: str) -> str:
        """Return the URL of a file in it."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """Return the names of the files that were published, sorted."""
        return sorted(n.removesuffix(_WHOLE) for n in self._listed() if n.endswith(_WHOLE))

    def leftovers(self) -> list[str]:
        """Return the names under which all files were created, published or not, sorted."""
        return sorted(n for n in self._listed() if not n.endswith(_WHOLE))

    def read(self, name: str) -> bytes:
        """Return what a file holds."""
        with self._explained(name):
            return bytes(self._system.cat_file(self._at(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, in place of one of this name."""
        with self._explained(name):
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._at(name), data)

    def create(self, name: str) -> BinaryIO:
        """Open a file for writing, empty; the folder is made if need be."""
        with self._explained(name):
            self._system.makedirs(self._root, exist_ok=True)
            return cast(BinaryIO, self._system.open(self._at(name), "wb"))

    def publish(self, name: str, public: str) -> None:
        """Let others see a file that was created, written and closed."""
        with self._explained(public):
            self._system.pipe_file(self._at(public + _WHOLE), name.encode())

    def found_as(self, name: str, public: str) -> str:
        """Return under which of its two names a file that was published is opened."""
        return name

    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it is there."""
        with self._explained(name):
            self._remove(name + _WHOLE)
            self._remove(name)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def _listed(self) -> set[str]:
        with self._explained(""):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._root, detail=False)
            except FileNotFoundError:
                return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in found}

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFoundError(f"No such file: {self.path(name)!r}") from error
        except OSError as error:
            raise UnavailableError(f"{self.path(name)!r} cannot be used: {error}") from error
