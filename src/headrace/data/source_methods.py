"""Constructors of `Dataset` from arrays, generators, files and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from headrace.arguments import check_callable, check_flag, check_int, check_seconds
from headrace.data.missing_names import slices_error
from headrace.data.pipelines import from_pipeline, from_random_access
from headrace.data.saving import load_source, load_streams
from headrace.data.step_methods import StepMethods
from headrace.element.spec import Spec
from headrace.plan.elements import FromSource
from headrace.plan.node import Node, call_site
from headrace.plan.ordering import Shuffle
from headrace.plan.source import Source, validate_source
from headrace.sources.generator import GeneratorSource
from headrace.sources.image_files import ImageFilesSource, ReadImage
from headrace.sources.memory import RandomSource, RangeSource, SlicesSource, TensorsSource
from headrace.sources.text_files import FileNamesSource
from headrace.storage.names import FileName
from headrace.storage.options import StorageOptions

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["SourceMethods"]

S = TypeVar("S")


class SourceMethods(StepMethods):
    """Constructors of datasets from arrays, generators, files and sources."""

    @classmethod
    def from_source(cls, source: Source, *, name: str | None = None) -> Dataset[Any]:
        """Return a dataset of the elements of a source.

        >>> class Squares(hr.IndexedSource):
        ...     size = 3
        ...     element_spec = hr.ArraySpec((), "int64")
        ...
        ...     def gather(self, indices):
        ...         return indices * indices
        >>> [int(x) for x in hr.Dataset.from_source(Squares())]
        [0, 1, 4]

        Args:
            source: Where elements are read from; see `Source` and `IndexedSource`.
            name: Name of the step in errors and in `explain`.
        """
        return cls._from_plan(FromSource(source=validate_source(source), location=call_site(name)))

    @overload
    @classmethod
    def range(cls, *args: int, name: str | None = None) -> Dataset[np.int64]: ...

    @overload
    @classmethod
    def range(cls, *args: int, output_type: type[S], name: str | None = None) -> Dataset[S]: ...

    @overload
    @classmethod
    def range(cls, *args: int, output_type: Any, name: str | None = None) -> Dataset[Any]: ...

    @classmethod
    def range(
        cls, *args: int, output_type: Any = np.int64, name: str | None = None
    ) -> Dataset[Any]:
        """Return a dataset of the numbers of `range(*args)`, as scalars of `output_type`.

        >>> [int(x) for x in hr.Dataset.range(2, 10, 3)]
        [2, 5, 8]
        >>> next(iter(hr.Dataset.range(3, output_type=np.float32)))
        np.float32(0.0)

        Args:
            args: stop; start and stop; or start, stop and step.
            output_type: NumPy dtype of the elements.
            name: Name of the step in errors and in `explain`.
        """
        return cls.from_source(RangeSource(*_range_bounds(args), dtype=output_type), name=name)

    @classmethod
    def counter(
        cls, start: int = 0, step: int = 1, *, name: str | None = None
    ) -> Dataset[np.int64]:
        """Return an infinite dataset of the numbers `start`, `start + step`, ...

        >>> import headrace as hr
        >>> [int(x) for x in hr.Dataset.counter(5, step=2).take(3)]
        [5, 7, 9]

        Args:
            start: First number.
            step: Difference of consecutive numbers.
            name: Name of the step in errors and in `explain`.
        """
        return cls.from_source(
            RangeSource(_check_bound("start", start), None, _check_bound("step", step)), name=name
        )

    @classmethod
    def random(cls, seed: int | None = None, *, name: str | None = None) -> Dataset[np.int64]:
        """Return an infinite dataset of random int64 numbers from 0 to 2**32 - 1.

        >>> import headrace as hr
        >>> list(hr.Dataset.random(seed=4).take(3)) == list(hr.Dataset.random(seed=4).take(3))
        True

        Args:
            seed: Seed of the numbers, which are then the same in each epoch. None draws new numbers
                for each iteration over the dataset; within it, a `repeat` repeats them.
            name: Name of the step in errors and in `explain`.
        """
        return cls.from_source(RandomSource(seed), name=name)

    @classmethod
    def from_tensors(cls, x: Any, *, name: str | None = None) -> Dataset[Any]:
        """Return a dataset of a single element, `x`.

        >>> list(hr.Dataset.from_tensors(np.array([1, 2, 3])))
        [array([1, 2, 3])]

        Args:
            x: An array, or a nested structure of arrays.
            name: Name of the step in errors and in `explain`.
        """
        if x is None:
            raise TypeError("`x` must be an array, or a dict or tuple of arrays, but got None")
        return cls.from_source(TensorsSource(x), name=name)

    @classmethod
    def from_tensor_slices(cls, x: Any, *, name: str | None = None) -> Dataset[Any]:
        """Return a dataset of the rows of arrays: one element per index of their common first axis.

        >>> rows = hr.Dataset.from_tensor_slices({"x": np.array([[1, 2], [3, 4]]), "y": [0, 1]})
        >>> [(row["x"].tolist(), int(row["y"])) for row in rows]
        [([1, 2], 0), ([3, 4], 1)]

        Args:
            x: An array, or a nested structure of arrays, with first axes of the same length.
            name: Name of the step in errors and in `explain`.

        Raises:
            TypeError: If `x` cannot be divided into rows, such as a set.
            ValueError: If an array has no axis, or first axes differ in length.
        """
        reason = slices_error(x)
        if reason is not None:
            raise TypeError(reason)
        return cls.from_source(SlicesSource(x), name=name)

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        *,
        args: Sequence[Any] | None = None,
        output_signature: Spec | None = None,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Return a dataset of what `generator(*args)` yields; each epoch calls it again.

        >>> def words(n):
        ...     for number in range(n):
        ...         yield f"word {number}"
        >>> list(hr.Dataset.from_generator(words, args=[2]))
        ['word 0', 'word 1']

        Args:
            generator: Function that returns an iterable of elements.
            args: Arguments of the function.
            output_signature: Spec that every element must match; None uses the first element's.
            name: Name of the step in errors and in `explain`.
        """
        source = GeneratorSource(generator, () if args is None else args, output_signature)
        return cls.from_source(source, name=name)

    @classmethod
    def from_random_access(
        cls, sequence: Any, num_parallel_calls: int | None = None
    ) -> Dataset[Any]:
        """Return a dataset of the items of a sequence: a list, a torch or Hugging Face Dataset.

        The indices are known in advance, so it is shuffled and split without reading it.

        >>> import headrace as hr
        >>> list(hr.Dataset.from_random_access(["a", "b", "c"]).skip(1))
        ['b', 'c']

        Args:
            sequence: Object with `__len__` and `__getitem__` (or `__getitems__`, which gets a list
                of indices). It is part of the dataset, so it must be picklable if a data service
                reads the dataset.
            num_parallel_calls: Threads that get items, or `AUTOTUNE`; None uses the reading thread.

        Raises:
            TypeError: If it is not such a sequence.
        """
        dataset: Dataset[Any] = from_random_access(cls, sequence, num_parallel_calls)
        return dataset

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Dataset[Any]:
        """Return a dataset of the elements of another library's input pipeline.

        >>> import headrace as hr
        >>> list(hr.Dataset.from_pipeline(lambda: "abc"))
        ['a', 'b', 'c']

        Args:
            pipeline: A torch Dataset or DataLoader, a Hugging Face Dataset or IterableDataset, a
                Grain dataset, a sequence, an array (its rows), an iterable that can be iterated
                over several times, or a function that returns an iterable. The batches of a
                DataLoader with torch's own sequential or shuffling sampler are made wherever they
                are read, in an order that Headrace draws, with tuples in place of lists. Data that
                can only be iterated over is read as a whole by one worker of a data service.

        Raises:
            TypeError: If it is none of these.
        """
        dataset: Dataset[Any] = from_pipeline(cls, pipeline)
        return dataset

    @classmethod
    def from_image_folder(
        cls,
        directory: FileName,
        size: tuple[int, int] | None = None,
        class_names: Sequence[str] | None = None,
        channels: int = 3,
        num_parallel_calls: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Dataset[Any]:
        """Return a dataset of the images in DIRECTORY/CLASS/FILE and the numbers of their classes.

        Elements are `{"image": uint8 array (height, width, channels), "label": int64}`, class by
        class; `shuffle` draws from the file names, so it may have a large buffer. Needs Pillow
        (`pip install 'headrace[images]'`) or OpenCV.

        >>> import os
        >>> for name in ("cats", "dogs"):
        ...     os.makedirs(f"animals/{name}")
        ...     with open(f"animals/{name}/1.png", "wb") as file:
        ...         _ = file.write(hr.io.encode_png(np.zeros((5, 4, 3), np.uint8)))
        >>> images = hr.Dataset.from_image_folder("animals", size=(8, 8)).batch(2)
        >>> for batch in images:
        ...     print(batch["image"].shape, batch["label"])
        (2, 8, 8, 3) [0 1]

        Args:
            directory: Path or fsspec URL. Files in folders within those of the classes are images,
                too. Names that start with a dot, files beside the folders, and files with the
                suffix of another kind of file, such as `.txt`, are ignored.
            size: Height and width to which images are resized (bilinear), so that they can be
                batched; None keeps theirs.
            class_names: Folders to read, in the order of the labels 0, 1, ...; None for all,
                sorted by name.
            channels: 1 for grey, 3 for RGB, 4 for RGBA; 0 for those of each image.
            num_parallel_calls: Threads that read and decode images, or `AUTOTUNE`; None uses the
                reading thread.
            storage_options: Options of the file system of a URL, such as credentials.

        Raises:
            NotFoundError: If there are no class folders, or if one of `class_names` has no files.
                While reading, a file that is damaged or no image raises a DataLossError with its
                path; the next call of `next` continues after it.
        """
        options = StorageOptions(storage_options)
        files = ImageFilesSource.from_directory(directory, class_names, options)
        read_image = ReadImage(files.directory, size, channels, options)
        return cls.from_source(files).map(read_image, num_parallel_calls=num_parallel_calls)

    @classmethod
    def list_files(
        cls,
        patterns: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[str]:
        """Return a dataset of the names of the files that match glob patterns, as `str`.

        >>> for name in ("b.txt", "a.txt"):
        ...     with open(name, "w") as file:
        ...         _ = file.write("text")
        >>> list(hr.Dataset.list_files("*.txt", shuffle=False))
        ['a.txt', 'b.txt']

        Args:
            patterns: A pattern, path or fsspec URL, or a list of them.
            shuffle: Whether to shuffle the names in each epoch; None is True.
            seed: Seed of the shuffle.
            storage_options: Options of the file systems of URLs, such as credentials. Only the
                names are part of the dataset, not the options.
            name: Name of the step in errors and in `explain`.

        Raises:
            NotFoundError: If a pattern matches no file.
        """
        names = FileNamesSource.from_patterns(patterns, StorageOptions(storage_options))
        plan: Node = FromSource(source=names, location=call_site(name))
        if shuffle is not False:
            plan = Shuffle(input=plan, buffer_size=names.size, seed=seed, location=call_site(name))
        return cls._from_plan(plan)

    @classmethod
    def load(
        cls,
        path: FileName,
        wait: bool = False,
        reader_func: Callable[[Dataset[Any]], Dataset[Any]] | None = None,
        *,
        wait_timeout: float = 3600.0,
    ) -> Dataset[Any]:
        """Return a dataset saved with `save`, or by the workers of a service.

        >>> hr.Dataset.from_random_access(["a", "b", "c"]).save("letters")
        >>> list(hr.Dataset.load("letters").shuffle(3, seed=1).take(2)) != []
        True

        Args:
            path: Directory, by path or fsspec URL.
            wait: Whether to read the dataset while it is being saved, waiting for new data.
            reader_func: Function of a dataset of datasets, one for each stream that was written;
                returns the dataset to read, as in
                `lambda streams: streams.interleave(lambda s: s)`. None reads all elements in the
                order of the directory.
            wait_timeout: With `wait`, seconds to wait for new data, since the saving process may
                have died.

        Raises:
            DeadlineExceededError: If there was no new data for `wait_timeout` seconds, now or
                during reading.
            NotFoundError: If nothing was saved there and `wait` is False.
            FailedPreconditionError: If it is unfinished and `wait` is False, or if the save failed.
        """
        check_flag("wait", wait)
        check_seconds("wait_timeout", wait_timeout)
        if reader_func is None:
            return cls.from_source(load_source(path, wait, wait_timeout))
        check_callable("reader_func", reader_func)
        dataset = reader_func(cls.from_source(load_streams(path, wait, wait_timeout, cls)))
        if not isinstance(dataset, cls):
            raise TypeError(f"`reader_func` must return a Dataset, but returned {dataset!r:.80}")
        return dataset


def _range_bounds(args: tuple[int, ...]) -> tuple[int, int, int]:
    if not 1 <= len(args) <= 3:
        raise TypeError(f"`range` takes 1 to 3 arguments, but got {len(args)}")
    start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return _check_bound("start", start), _check_bound("stop", stop), _check_bound("step", step)


def _check_bound(name: str, value: int) -> int:
    return check_int(name, value, minimum=-(1 << 63))
