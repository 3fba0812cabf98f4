"""Folders that fsspec reaches. Nobody who uses local folders alone has to load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from fsspec.core import url_to_fs

from headrace.errors import NotFoundError, UnavailableError
from headrace.storage.folder import Folder

__all__ = ["RemoteFolder"]

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
