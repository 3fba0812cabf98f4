"""Files and folders by URL. Imported when the first URL is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from headrace.errors import HeadraceError, NotFoundError, UnavailableError
from headrace.storage.file_systems import convert_error, find_file_system
from headrace.storage.files import Folder
from headrace.storage.names import is_pattern
from headrace.storage.options import NO_OPTIONS, StorageOptions
from headrace.storage.remote_stream import RemoteStream, read_version
from headrace.storage.retrying import retry_read

__all__ = ["RemoteFolder", "create_url", "match_urls", "open_url", "read_url_version"]


def match_urls(pattern: str, options: StorageOptions = NO_OPTIONS) -> list[str]:
    """Return the URLs of the files that match a pattern without braces.

    Raises:
        UnavailableError: If they cannot be listed.
    """
    system, path = find_file_system(pattern, options, retries=False)

    def find() -> dict[str, Any] | None:
        if system.isfile(path):
            return None
        return dict(system.glob(path, detail=True)) if is_pattern(path) else {}

    try:
        listed = retry_read(find, pattern, 0)
    except UnavailableError:
        raise
    except Exception as error:
        converted = convert_error(error)
        if not isinstance(converted, OSError):
            raise converted from error
        raise UnavailableError(f"cannot list the files of {pattern!r}: {converted}") from error
    if listed is None:
        return [pattern]
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


def open_url(url: str, options: StorageOptions = NO_OPTIONS) -> RemoteStream:
    """Open a file for reading.

    Raises:
        OSError: If it does not exist, or cannot be opened.
        UnavailableError: If it could not be opened before the deadline of retries.
    """
    system, path = find_file_system(url, options, retries=False)
    return RemoteStream(url, system, path, options.cache)


def create_url(url: str, options: StorageOptions = NO_OPTIONS) -> Any:
    """Open a file for writing from the start."""
    system, path = find_file_system(url, options)
    try:
        return system.open(path, "wb")
    except Exception as error:
        raise convert_error(error) from error


def read_url_version(url: str, options: StorageOptions = NO_OPTIONS) -> tuple[int | None, str]:
    """Return the size of a file (None if unknown), and a text that changes with its contents.

    Raises:
        OSError: If it does not exist, or is a folder.
        UnavailableError: If it could not be accessed before the deadline of retries.
    """
    system, path = find_file_system(url, options, retries=False)
    return read_version(url, system, path)


_PUBLISHED_SUFFIX = ".whole"


class RemoteFolder(Folder):
    """A folder by URL. Each published file has a tiny marker file, `<public name>.whole`."""

    def __init__(self, url: str, options: StorageOptions = NO_OPTIONS) -> None:
        self.url: str = url.rstrip("/")
        self._options = options
        self._system, root = find_file_system(self.url, options)
        self._root = root.rstrip("/")

    def __reduce__(self) -> tuple[type[RemoteFolder], tuple[str, StorageOptions]]:
        return RemoteFolder, (self.url, self._options)

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

    def list_tree(self) -> list[str]:
        """Return the sorted names of all files in the folder and below."""
        with self._convert_errors(""):
            self._system.invalidate_cache()
            found = self._system.find(self._root)
        names = [str(path).removeprefix(f"{self._root}/") for path in found]
        return sorted(name for name in names if not name.endswith("/"))  # markers of empty folders

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        url, path = self.path(name), self._system_path(name)
        with self._convert_errors(name):
            if self._options.cache is None:
                return bytes(retry_read(lambda: self._system.cat_file(path), url, 0))
            stream = RemoteStream(url, self._system, path, self._options.cache)
            try:
                return stream.read()
            finally:
                stream.close()

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
        except Exception as error:
            converted = convert_error(error)
            if isinstance(converted, HeadraceError):
                raise
            if isinstance(converted, FileNotFoundError):
                raise NotFoundError(f"No such file: {self.path(name)!r}") from error
            if isinstance(converted, OSError):
                raise UnavailableError(f"cannot use {self.path(name)!r}: {converted}") from error
            raise converted from error
