"""Files and folders accessed through fsspec. Imported when the first URL is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from headrace.errors import NotFoundError, UnavailableError
from headrace.storage.files import Folder
from headrace.storage.names import is_pattern

__all__ = ["RemoteFolder", "find_url_size", "match_urls", "open_url"]


def match_urls(pattern: str) -> list[str]:
    """Return the URLs of the files that match a pattern without braces.

    Raises:
        UnavailableError: If they cannot be listed.
    """
    try:
        system, path = url_to_fs(pattern)
        if system.isfile(path):
            return [pattern]
        if not is_pattern(path):
            return []
        listed = system.glob(path, detail=True)
    except OSError as error:
        raise UnavailableError(f"cannot list the files of {pattern!r}: {error}") from error
    except (ValueError, ImportError) as error:
        raise _unknown_file_system_error(pattern, error) from error
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
    """Open a file for reading ("rb") or for writing from the start ("wb")."""
    try:
        return fsspec.open(url, mode).open()
    except (ValueError, ImportError) as error:
        raise _unknown_file_system_error(url, error) from error


def find_url_size(url: str) -> int | None:
    """Return the size of a file in bytes, or None if its file system does not tell it."""
    try:
        system, path = url_to_fs(url)
        size = system.info(path).get("size")
    except (ValueError, ImportError) as error:
        raise _unknown_file_system_error(url, error) from error
    return size if type(size) is int else None


def _unknown_file_system_error(url: str, error: ValueError | ImportError) -> Exception:
    """Return an error that names the URL of a file system unknown to fsspec."""
    kind = ImportError if isinstance(error, ImportError) else ValueError
    return kind(f"{url!r}: {error} (fsspec has no file system for this URL scheme)")


_PUBLISHED_SUFFIX = ".whole"


class RemoteFolder(Folder):
    """A folder by URL. Each published file has a tiny marker file, `<public name>.whole`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            system, root = url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(
                f"{url!r}: {error} (fsspec has no file system for this URL scheme)"
            ) from error
        self._system = system
        self._root = str(root).rstrip("/")

    def __reduce__(self) -> tuple[type[RemoteFolder], tuple[str]]:
        return RemoteFolder, (self.url,)

    def path(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return f"{self.url}/{name}"

    def list_published(self) -> list[str]:
        """Return the sorted names of published files."""
        return sorted(
            n.removesuffix(_PUBLISHED_SUFFIX)
            for n in self._list_names()
            if n.endswith(_PUBLISHED_SUFFIX)
        )

    def list_unpublished(self) -> list[str]:
        """Return the sorted names under which files were created, published or not."""
        return sorted(n for n in self._list_names() if not n.endswith(_PUBLISHED_SUFFIX))

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        with self._convert_errors(name):
            return bytes(self._system.cat_file(self._system_path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self._convert_errors(name):
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(self._system_path(name), data)

    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing; create the folder if needed."""
        with self._convert_errors(name):
            self._system.makedirs(self._root, exist_ok=True)
            return cast(BinaryIO, self._system.open(self._system_path(name), "wb"))

    def publish(self, name: str, public: str) -> None:
        """Publish a file that was created, written and closed."""
        with self._convert_errors(public):
            self._system.pipe_file(self._system_path(public + _PUBLISHED_SUFFIX), name.encode())

    def find_name(self, name: str, public: str) -> str:
        """Return which of the two names of a published file to open."""
        return name

    def remove(self, name: str) -> None:
        """Remove a file, published or not, if it exists."""
        with self._convert_errors(name):
            self._remove_file(name + _PUBLISHED_SUFFIX)
            self._remove_file(name)

    def _system_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remove_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._system_path(name))

    def _list_names(self) -> set[str]:
        with self._convert_errors(""):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._root, detail=False)
            except FileNotFoundError:
                return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in found}

    @contextlib.contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFoundError(f"No such file: {self.path(name)!r}") from error
        except OSError as error:
            raise UnavailableError(f"cannot use {self.path(name)!r}: {error}") from error
