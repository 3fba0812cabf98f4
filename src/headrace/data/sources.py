"""Where datasets come from: the part of `Dataset` that makes one out of something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.arguments import check_callable, check_flag, check_int, check_seconds
from headrace.data.absent import AbsentNames, no_slices
from headrace.data.pipelines import from_pipeline, from_random_access
from headrace.data.saving import load_source, load_streams
from headrace.element.spec import Spec
from headrace.plan.elements import FromSource
from headrace.plan.node import Node, call_site
from headrace.plan.ordering import Shuffle
from headrace.plan.source import Source, checked_source
from headrace.sources.files import FileNamesSource
from headrace.sources.generator import GeneratorSource
from headrace.sources.memory import RandomSource, RangeSource, SlicesSource, TensorsSource
from headrace.storage.names import FileName

__all__ = ["Sources"]


class Sources(metaclass=AbsentNames):
    """Makes datasets out of arrays, generators, files and sources; a `Dataset` is a plan."""

    if TYPE_CHECKING:

        def __init__(self, plan: Node) -> None: ...

    @classmethod
    def _made(cls, dataset: Any) -> Self:
        """Return a dataset as one of this class."""
        return dataset if isinstance(dataset, cls) else cls(dataset.plan)

    @classmethod
    def from_source(cls, source: Source) -> Self:
        """Return the elements of anything with the Source contract (`headrace.plan.source`).

        >>> class Squares(hr.IndexedSource):
        ...     size = 3
        ...     element_spec = hr.ArraySpec((), "int64")
        ...
        ...     def gather(self, indices):
        ...         return indices * indices
        >>> [int(x) for x in hr.Dataset.from_source(Squares())]
        [0, 1, 4]
        """
        return cls(FromSource(source=checked_source(source), location=call_site()))

    @classmethod
    def range(cls, *args: int, output_type: Any = np.int64) -> Self:
        """Return the numbers of `range(*args)`, as scalars of `output_type`.

        >>> [int(x) for x in hr.Dataset.range(2, 10, 3)]
        [2, 5, 8]
        >>> next(iter(hr.Dataset.range(3, output_type=np.float32)))
        np.float32(0.0)
        """
        return cls.from_source(RangeSource(*_range_bounds(args), dtype=output_type))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1) -> Self:
        """Return the numbers `start`, `start + step`, ... without end.

        >>> import headrace as hr
        >>> [int(x) for x in hr.Dataset.counter(5, step=2).take(3)]
        [5, 7, 9]
        """
        return cls.from_source(RangeSource(_bound("start", start), None, _bound("step", step)))

    @classmethod
    def random(cls, seed: int | None = None) -> Self:
        """Return random int64 numbers from 0 to 2**32 - 1, without end.

        >>> import headrace as hr
        >>> list(hr.Dataset.random(seed=4).take(3)) == list(hr.Dataset.random(seed=4).take(3))
        True

        Args:
            seed: Seed of the numbers, which are the same in each pass then; None: others in each
                iteration over the dataset. They are the same in each pass of a `repeat` within.
        """
        return cls.from_source(RandomSource(seed))

    @classmethod
    def from_tensors(cls, x: Any) -> Self:
        """Return a dataset of one element, `x`.

        >>> list(hr.Dataset.from_tensors(np.array([1, 2, 3])))
        [array([1, 2, 3])]
        """
        return cls.from_source(TensorsSource(x))

    @classmethod
    def from_tensor_slices(cls, x: Any) -> Self:
        """Return the rows of arrays: one element for each index of their common first axis.

        >>> rows = hr.Dataset.from_tensor_slices({"x": np.array([[1, 2], [3, 4]]), "y": [0, 1]})
        >>> [(row["x"].tolist(), int(row["y"])) for row in rows]
        [([1, 2], 0), ([3, 4], 1)]
        """
        refusal = no_slices(x)
        if refusal is not None:
            raise TypeError(refusal)
        return cls.from_source(SlicesSource(x))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        *,
        args: Sequence[Any] | None = None,
        output_signature: Spec | None = None,
    ) -> Self:
        """Return what `generator(*args)` yields; it is called again for each pass.

        >>> def words(n):
        ...     for number in range(n):
        ...         yield f"word {number}"
        >>> list(hr.Dataset.from_generator(words, args=[2]))
        ['word 0', 'word 1']

        Args:
            generator: A function that returns an iterable of elements.
            args: Its arguments.
            output_signature: Spec that every element must match; None: that of the first element.
        """
        return cls.from_source(GeneratorSource(generator, tuple(args or ()), output_signature))

    @classmethod
    def from_random_access(cls, sequence: Any, num_parallel_calls: int | None = None) -> Self:
        """Return the items of a sequence: a list, a torch Dataset, a Hugging Face Dataset.

        Its indices are known beforehand, so it is shuffled, split and dealt without being read.

        >>> import headrace as hr
        >>> list(hr.Dataset.from_random_access(["a", "b", "c"]).skip(1))
        ['b', 'c']

        Args:
            sequence: Anything with `__len__` and `__getitem__` (or `__getitems__`, which gets a
                list of indices). It travels with the dataset, so it must be picklable where the
                data service reads it.
            num_parallel_calls: Threads that get items, or `AUTOTUNE`; None: on the reading thread.

        Raises:
            TypeError: It is no such sequence.
        """
        return cls._made(from_random_access(cls, sequence, num_parallel_calls))

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Self:
        """Return the elements of what another library reads data with.

        >>> import headrace as hr
        >>> list(hr.Dataset.from_pipeline(lambda: "abc"))
        ['a', 'b', 'c']

        Args:
            pipeline: A torch Dataset or DataLoader, a Hugging Face Dataset or IterableDataset, a
                Grain dataset, a sequence, an array (its rows), an iterable that can be iterated
                over again, or a function that returns an iterable. A DataLoader with torch's own
                sequential or shuffling sampler gives its batches, made wherever they are read, in
                an order that Headrace draws; tuples stand where it has lists. What can only be
                iterated over is one part: one worker of a data service reads it.

        Raises:
            TypeError: It is none of these.
        """
        return cls._made(from_pipeline(cls, pipeline))

    @classmethod
    def list_files(
        cls, patterns: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> Self:
        """Return the names of the files that match glob patterns, as `str`.

        >>> for name in ("b.txt", "a.txt"):
        ...     with open(name, "w") as file:
        ...         _ = file.write("text")
        >>> list(hr.Dataset.list_files("*.txt", shuffle=False))
        ['a.txt', 'b.txt']

        Args:
            patterns: A pattern, path or fsspec URL, or a list of them.
            shuffle: Whether to order them at random, another in each pass; None is True.
            seed: Seed of that order.

        Raises:
            NotFoundError: A pattern matches no file.
        """
        names = FileNamesSource.matching(patterns)
        plan: Node = FromSource(source=names, location=call_site())
        if shuffle is not False:
            plan = Shuffle(input=plan, buffer_size=names.size, seed=seed, location=call_site())
        return cls(plan)

    @classmethod
    def load(
        cls,
        path: FileName,
        wait: bool = False,
        reader_func: Callable[[Self], Self] | None = None,
        *,
        wait_timeout: float = 3600.0,
    ) -> Self:
        """Return a dataset that was saved with `save`, or by the workers of a service.

        >>> hr.Dataset.from_random_access(["a", "b", "c"]).save("letters")
        >>> list(hr.Dataset.load("letters").shuffle(3, seed=1).take(2)) != []
        True

        Args:
            path: Its directory, by path or fsspec URL.
            wait: Whether to read it while it is being saved: what is there at once, the rest as it
                appears.
            reader_func: Called with a dataset of datasets, one for each that wrote files; returns
                the dataset to read, as in `lambda streams: streams.interleave(lambda s: s)`. None:
                all elements in the order of the directory.
            wait_timeout: With `wait`, how many seconds without anything new are waited: whoever
                saves may have died.

        Raises:
            DeadlineExceededError: Nothing new came for `wait_timeout` seconds (also while it is
                read).
            NotFoundError: Nothing was saved there; with `wait`, it is waited for.
            FailedPreconditionError: It is not finished, and `wait` is False; or the save failed.
        """
        check_flag("wait", wait)
        check_seconds("wait_timeout", wait_timeout)
        if reader_func is None:
            return cls.from_source(load_source(path, wait, wait_timeout))
        check_callable("reader_func", reader_func)
        made = reader_func(cls.from_source(load_streams(path, wait, wait_timeout, cls)))
        if not isinstance(made, cls):
            raise TypeError(f"`reader_func` must return a Dataset, but returned {made!r:.80}")
        return made


def _range_bounds(args: tuple[int, ...]) -> tuple[int, int, int]:
    if not 1 <= len(args) <= 3:
        raise TypeError(f"`range` takes 1 to 3 arguments, but got {len(args)}")
    start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return _bound("start", start), _bound("stop", stop), _bound("step", step)


def _bound(name: str, value: int) -> int:
    return check_int(name, value, minimum=-(1 << 63))
