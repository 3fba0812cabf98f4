"""Image files in a folder per class: a source of their names and labels, and their reading."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_strings
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError
from headrace.plan.source import INDEX_SPEC, IndexedSource, IndexKind
from headrace.sources.images import check_channels, check_size, decode_image, resize
from headrace.storage.files import open_folder
from headrace.storage.names import FileName, as_names
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["ImageFilesSource", "ReadImage"]

_log = logging.getLogger(__name__)

_IMAGE_SUFFIXES = (
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2"),
    *(".jpe", ".jpeg", ".jpg", ".jxl", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif"),
    *(".tiff", ".webp"),
)


@dataclass(frozen=True)
class ImageFilesSource(IndexedSource):
    """Names and labels of image files, `{"name": str, "label": int64}`; an index is a file.

    Args:
        directory: Path or URL.
        names: Names of the files in the directory, `"class/file"`, class by class.
        counts: Number of files of each class, by label.
        storage_options: Options of the file systems of URLs.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("storage_options",)

    directory: str
    names: tuple[str, ...]
    counts: tuple[int, ...]
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False)

    @classmethod
    def from_directory(
        cls,
        directory: FileName,
        class_names: Sequence[str] | None,
        storage_options: StorageOptions = NO_OPTIONS,
    ) -> ImageFilesSource:
        """Return a source of the images in the folders of a directory.

        Files whose names end as those of other kinds of files are ignored, with a warning.

        Args:
            directory: Path or URL.
            class_names: Names of the folders to read, by label; None for all, sorted.
            storage_options: Options of the file system of a URL.

        Raises:
            NotFoundError: If there are no classes, or if one has no files.
        """
        found = as_names("directory", directory)
        if len(found) != 1:
            raise ValueError(f"`directory` must be a single directory, but got {len(found)} names")
        listed: dict[str, list[str]] = {}
        ignored: list[str] = []
        for name in open_folder(found[0], storage_options).list_tree():
            folder, *below = name.split("/")
            if not below or any(part.startswith(".") for part in (folder, *below)):
                continue
            suffix = PurePosixPath(name).suffix.lower()
            if suffix and suffix not in _IMAGE_SUFFIXES:
                ignored.append(name)
            else:
                listed.setdefault(folder, []).append(name)
        if ignored:
            _log.warning(
                "%r: ignored %d files whose names do not end like those of images (.jpg, .png, "
                "...), such as %r",
                found[0],
                len(ignored),
                ignored[0],
            )
        if class_names is None:
            classes = tuple(sorted(listed))
        else:
            classes = _check_class_names(class_names)
            if missing := [name for name in classes if name not in listed]:
                raise NotFoundError(
                    f"the class folders {missing!r} in {found[0]!r} do not exist or have no files"
                )
        if not classes:
            raise NotFoundError(
                f"{found[0]!r} has no folders with files; images are expected in one folder per "
                "class, as DIRECTORY/CLASS/FILE"
            )
        return cls(
            found[0],
            tuple(name for each in classes for name in listed[each]),
            tuple(len(listed[each]) for each in classes),
            storage_options,
        )

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def element_spec(self) -> Spec | None:
        return {"label": INDEX_SPEC, "name": ArraySpec((), np.dtype("U"))}

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        folder = open_folder(self.directory, self.storage_options)
        return tuple(map(folder.path, self.names))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        column = np.empty(indices.size, object)
        column[:] = [self.names[index] for index in indices.ravel().tolist()]
        labels = np.searchsorted(np.cumsum(self.counts), indices, side="right")
        return {
            "name": column.reshape(indices.shape),
            "label": np.asarray(labels, np.int64),
        }


def _check_class_names(names: object) -> tuple[str, ...]:
    check_strings("class_names", names)
    given: Any = names
    if not given or len(set(given)) < len(given):
        raise ValueError(f"`class_names` must be different names, at least one, but got {names!r}")
    return tuple(given)


@dataclass(frozen=True)
class ReadImage:
    """Function of an element of `ImageFilesSource` that reads and decodes the image.

    Args:
        directory: Path or URL.
        size: Height and width to resize to, or None.
        channels: As for `decode_image`.
        storage_options: Options of the file systems of URLs.
    """

    directory: str
    size: tuple[int, int] | None
    channels: int
    storage_options: StorageOptions = field(default=NO_OPTIONS, repr=False)

    def __post_init__(self) -> None:
        check_channels(self.channels)
        if self.size is not None:
            object.__setattr__(self, "size", check_size(self.size))

    def __call__(self, file: dict[str, Any]) -> dict[str, Any]:
        """Return `{"image": uint8 array (height, width, channels), "label": int64}`.

        Raises:
            DataLossError: If the file is damaged, or no image.
        """
        folder = open_folder(self.directory, self.storage_options)
        try:
            image = decode_image(folder.read(file["name"]), self.channels)
        except (DataLossError, InvalidArgumentError) as error:
            raise type(error)(f"{folder.path(file['name'])!r}: {error}") from error
        if self.size is not None:
            image = resize(image, self.size)
        return {"image": image, "label": file["label"]}
