"""The checkpoints in a folder: found, read, deleted, and what is left of saves that did not end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from headrace.errors import DataLossError, NotFoundError
from headrace.parameter_server.checkpoint_format import Manifest, Piece, attempt_of, decode
from headrace.storage.folder import Folder, open_folder
from headrace.storage.names import FileName, as_names, is_local

__all__ = [
    "Read",
    "checkpoint_names",
    "delete",
    "increments_of",
    "names_up_to",
    "place_of",
    "read_checkpoint",
    "sweep",
]

_MANIFEST = ".json"
_NUMBERED = re.compile(r"-(\d+)$")
_INCREMENT = re.compile(r"(?P<full>.+)\+(?P<number>\d+)$")


class Read:
    """A checkpoint that was read: its manifest, and the pieces of those that it continues.

    Args:
        folder: Where it is.
        name: Its name there.
        manifest: Of it.
        pieces: Of all, in their order.
    """

    def __init__(
        self, folder: Folder, name: str, manifest: Manifest, pieces: Sequence[Piece]
    ) -> None:
        self.folder = folder
        self.name = name
        self.manifest = manifest
        self.pieces = tuple(pieces)

    @property
    def path(self) -> str:
        """Its path or URL."""
        return self.folder.path(self.name)

    def exists(self) -> bool:
        """Whether it is still there."""
        try:
            self.folder.read(self.name + _MANIFEST)
        except NotFoundError:
            return False
        return True


def place_of(path: FileName) -> tuple[Folder, str]:
    """Return the folder of a checkpoint and its name there."""
    (given,) = as_names("path", [path])
    given = given.removeprefix("file://")
    directory, _, name = given.rpartition("/")
    if not name:
        raise ValueError(f"`path` must end with the name of a checkpoint, but got {given!r}")
    if not directory:
        directory = "/" if given.startswith("/") else "."
    # Servers have other working directories.
    return open_folder(os.path.abspath(directory) if is_local(given) else directory), name


def read_checkpoint(folder: Folder, name: str) -> Read:
    """Return a checkpoint.

    Raises:
        NotFoundError: There is none, or it was deleted meanwhile.
        DataLossError: Its manifest is damaged.
    """
    manifest = _manifest(folder, name)
    pieces: list[Piece] = []
    for before in manifest.continues:
        try:
            pieces += _manifest(folder, before).pieces
        except NotFoundError as error:
            raise NotFoundError(
                f"the checkpoint {folder.path(name)!r} continues {before!r}, which is not there"
            ) from error
    return Read(folder, name, manifest, [*pieces, *manifest.pieces])


def _manifest(folder: Folder, name: str) -> Manifest:
    try:
        data = folder.read(name + _MANIFEST)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no checkpoint {folder.path(name)!r}: it was deleted, or never finished"
        ) from error
    return decode(data, folder.path(name))


def checkpoint_names(folder: Folder, prefix: str | None = None) -> list[str]:
    """Return the names of full checkpoints, by their number."""
    found = []
    for file in _listed(folder):
        name = file.removesuffix(_MANIFEST)
        number = _NUMBERED.search(name)
        if name != file and number and (prefix is None or name[: number.start()] == prefix):
            found.append((int(number[1]), name))
    return [name for _, name in sorted(found)]


def increments_of(folder: Folder, full: str) -> list[str]:
    """Return the names of the increments of a checkpoint, in their order."""
    found = []
    for file in _listed(folder):
        match = _INCREMENT.fullmatch(file.removesuffix(_MANIFEST))
        if match and file.endswith(_MANIFEST) and match["full"] == full:
            found.append((int(match["number"]), match.string))
    return [name for _, name in sorted(found)]


def names_up_to(folder: Folder, prefix: str, last: str) -> list[str]:
    """Return the names of full checkpoints and increments up to one, in their order."""
    names = []
    for full in checkpoint_names(folder, prefix):
        for name in (full, *increments_of(folder, full)):
            names.append(name)
            if name == last:
                return names
    return names


def delete(folder: Folder, full: str) -> None:
    """Delete a checkpoint with its increments: the manifests first."""
    names = [full, *increments_of(folder, full)]
    for name in reversed(names):
        folder.remove(name + _MANIFEST)
    sweep(folder, lambda name: name in names)


def sweep(folder: Folder, of: Callable[[str], bool]) -> None:
    """Delete the files of saves that did not end.

    Args:
        folder: Where they are.
        of: Says of the name of a checkpoint whether its files may be deleted.
    """
    left: dict[str, list[str]] = {}
    for file in _listed(folder):
        attempt = attempt_of(file)
        if attempt is not None and of(attempt[0]):
            left.setdefault(attempt[0], []).append(file)
    for name, files in left.items():
        try:
            needed = _manifest(folder, name).files()
        except (NotFoundError, DataLossError):
            needed = set()
        for file in files:
            if file not in needed:
                folder.remove(file)


def _listed(folder: Folder) -> list[str]:
    names = set(folder.names())
    # On a local disk these are of files that are not whole.
    names.update(folder.leftovers())
    if folder.is_local:
        names -= {name for name in folder.leftovers() if name.endswith(_MANIFEST)} - set(
            folder.names()
        )
    return sorted(names)
