"""The Dataset class: a plan with methods. Each method creates a node, which checks its arguments.

Most methods are in base classes, grouped by topic: `data/source_methods.py` (datasets of arrays and
files), `selection_methods`, `batching_methods`, `window_methods`, `random_methods`,
`execution_methods` and `reading_methods`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import numpy as np

from headrace.data.batching_methods import BatchingMethods
from headrace.data.element_type import T_co
from headrace.data.execution_methods import ExecutionMethods
from headrace.data.inference import infer_spec
from headrace.data.iterator import DatasetIterator
from headrace.data.missing_names import missing_method_message
from headrace.data.random_methods import RandomMethods
from headrace.data.reading_methods import ReadingMethods
from headrace.data.saving import save_dataset
from headrace.data.selection_methods import SelectionMethods
from headrace.data.source_methods import SourceMethods
from headrace.data.window_methods import WindowMethods
from headrace.element.spec import Spec
from headrace.element.structure import flatten
from headrace.plan import traverse
from headrace.plan.batching import Batch, Unbatch
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.combining import DEFAULT_CYCLE_LENGTH, Concatenate, Interleave, Zip
from headrace.plan.elementwise import Filter, Map, Scan, TakeWhile
from headrace.plan.node import AUTOTUNE, Node, call_site
from headrace.plan.options import Options, WithOptions
from headrace.plan.ordering import Enumerate, Repeat, ShardElements, Shuffle, Skip, Take
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.rewrites.explain import explain
from headrace.storage.names import FileName

__all__ = ["Dataset"]

S = TypeVar("S")
FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")
ResultT = TypeVar("ResultT", bound="Dataset[Any]")


class Dataset(
    SourceMethods,
    SelectionMethods[T_co],
    BatchingMethods,
    WindowMethods,
    RandomMethods,
    ExecutionMethods,
    ReadingMethods[T_co],
    Generic[T_co],
):
    """A sequence of elements that can be read any number of times.

    An element is an array, a NumPy scalar, `bytes` or `str`, or a dict, tuple, namedtuple or
    dataclass of these. A dataset does nothing until it is iterated over; each `iter` starts a new
    epoch, for which shuffles draw a new order.

    Steps take a `name`, as in tf.data. Errors and `explain` show it beside the file and line of the
    step; it has no other effect.

    For type checkers, `Dataset[T]` is a dataset of elements of type T. T is known after most
    sources and after functions with annotations, and otherwise Any.

    >>> dataset = hr.Dataset.range(6).map(lambda x: x * x).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 1], [4, 9], [16, 25]]
    """

    def __init__(self, plan: Node) -> None:
        if not isinstance(plan, Node):
            raise TypeError(
                f"`plan` must be a plan node, but got {type(plan).__name__}; for data in memory "
                "use Dataset.from_tensor_slices, for a generator Dataset.from_generator"
            )
        super().__init__(plan)
        self._epochs = itertools.count()
        self._last_statistics = None

    @overload
    @staticmethod
    def zip(
        first: Dataset[FirstT], second: Dataset[SecondT], /, *, name: str | None = None
    ) -> Dataset[tuple[FirstT, SecondT]]: ...

    @overload
    @staticmethod
    def zip(
        datasets: tuple[Dataset[FirstT], Dataset[SecondT]], /, *, name: str | None = None
    ) -> Dataset[tuple[FirstT, SecondT]]: ...

    @overload
    @staticmethod
    def zip(*datasets: Any, name: str | None = None) -> Dataset[Any]: ...

    @staticmethod
    def zip(*datasets: Any, name: str | None = None) -> Dataset[Any]:
        """Return tuples of the n-th elements of several datasets; ends with the shortest one.

        A single argument may be a nested structure of datasets; elements then have its structure.

        >>> numbers = hr.Dataset.range(3)
        >>> letters = hr.Dataset.from_random_access(["a", "b"])
        >>> [(int(number), letter) for number, letter in hr.Dataset.zip(numbers, letters)]
        [(0, 'a'), (1, 'b')]
        >>> [sorted(element) for element in hr.Dataset.zip({"x": numbers, "y": letters}).take(1)]
        [['x', 'y']]

        Args:
            datasets: Datasets, or one nested structure of them.
            name: Name of the step in errors and in `explain`.
        """
        nested = datasets[0] if len(datasets) == 1 else datasets
        members, structure = flatten(nested)
        if any(isinstance(member, list) for member in members):
            raise TypeError(
                "`datasets` must be Datasets, or tuples and dicts of them, but has a list; use a "
                "tuple of datasets, or from_tensor_slices for a list of values"
            )
        plans = tuple(_check_dataset("datasets", member) for member in members)
        return Dataset(Zip(datasets=plans, structure=structure, location=call_site(name)))

    # --- Transformations ----------------------------------------------------------------------

    # Overloads give the argument of a lambda function the type of the elements, and two arguments
    # (of the parts of a tuple) the type Any. Python numbers and lists become NumPy values: Any.

    @overload
    def map(
        self,
        map_func: Callable[[T_co], bool | int | float | list[Any]],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    @overload
    def map(
        self,
        map_func: Callable[[T_co], S],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def map(
        self,
        map_func: Callable[[Any, Any], bool | int | float | list[Any]],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    @overload
    def map(
        self,
        map_func: Callable[[Any, Any], S],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def map(  # type: ignore[overload-cannot-match]
        self,
        map_func: Callable[..., bool | int | float | list[Any]],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]: ...

    @overload
    def map(  # type: ignore[overload-cannot-match]
        self,
        map_func: Callable[..., S],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Replace each element by `map_func(element)`.

        >>> [int(x) for x in hr.Dataset.range(4).map(lambda x: x * 10)]
        [0, 10, 20, 30]
        >>> pairs = hr.Dataset.range(3).enumerate(start=5)
        >>> [int(x) for x in pairs.map(lambda number, x: number + x)]
        [5, 7, 9]

        Args:
            map_func: Function of the element; a tuple is passed as several arguments. A function
                of plain arithmetic is called with whole columns.
            num_parallel_calls: Threads that call it, or `AUTOTUNE`; None uses the reading thread.
            deterministic: False yields results as they are ready; None follows the options.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            Map,
            fn=map_func,
            num_parallel_calls=num_parallel_calls,
            deterministic=deterministic,
            name=name,
        )

    @overload
    def filter(
        self, predicate: Callable[[T_co], Any], *, name: str | None = None
    ) -> Dataset[T_co]: ...

    @overload
    def filter(
        self,
        predicate: Callable[[Any, Any], Any] | Callable[..., Any],
        *,
        name: str | None = None,
    ) -> Dataset[T_co]: ...

    def filter(self, predicate: Callable[..., Any], *, name: str | None = None) -> Dataset[T_co]:
        """Keep the elements for which `predicate(element)` is true.

        >>> [int(x) for x in hr.Dataset.range(10).filter(lambda x: x % 3 == 0)]
        [0, 3, 6, 9]

        Args:
            predicate: Function that returns a bool or a number, of Python or NumPy. Any other
                result, such as the None of a function without `return`, is an error.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Filter, predicate=predicate, name=name)

    @overload
    def take_while(
        self, predicate: Callable[[T_co], Any], *, name: str | None = None
    ) -> Dataset[T_co]: ...

    @overload
    def take_while(
        self,
        predicate: Callable[[Any, Any], Any] | Callable[..., Any],
        *,
        name: str | None = None,
    ) -> Dataset[T_co]: ...

    def take_while(
        self, predicate: Callable[..., Any], *, name: str | None = None
    ) -> Dataset[T_co]:
        """Yield elements until `predicate(element)` is false; drop that element and the rest.

        >>> import headrace as hr
        >>> [int(x) for x in hr.Dataset.counter().take_while(lambda x: x * x < 20)]
        [0, 1, 2, 3, 4]

        Args:
            predicate: Function of the element; a tuple is passed as several arguments.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(TakeWhile, predicate=predicate, name=name)

    def scan(
        self,
        initial_state: Any,
        scan_func: Callable[[Any, T_co], Any] | Callable[..., Any],
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Replace each element by the second result of `scan_func(state, element)`.

        >>> import headrace as hr
        >>> sums = hr.Dataset.range(1, 6).scan(0, lambda total, x: (total + x, total + x))
        >>> [int(x) for x in sums]
        [1, 3, 6, 10, 15]

        Args:
            initial_state: State for the first element; any element.
            scan_func: Function of the state and the element (a tuple is one argument) that returns
                `(new_state, output_element)`. If it fails for an element, the state is unchanged.
                Saved states of an iterator contain the state, so keep it small.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Scan, initial_state=initial_state, fn=scan_func, name=name)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Stack `batch_size` consecutive elements into one, in new memory.

        >>> [batch.tolist() for batch in hr.Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        >>> [batch.tolist() for batch in hr.Dataset.range(5).batch(2, drop_remainder=True)]
        [[0, 1], [2, 3]]

        Args:
            batch_size: Number of elements per batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            num_parallel_calls: Accepted as in tf.data; stacking is one copy and needs no threads.
            deterministic: Accepted as in tf.data.
            name: Name of the step in errors and in `explain`.
        """
        self._refuse_windows("`batch`")
        return self._append_step(Batch, size=batch_size, drop_remainder=drop_remainder, name=name)

    def unbatch(self, *, name: str | None = None) -> Dataset[Any]:
        """Split each element along its first axis.

        >>> batches = hr.Dataset.from_tensors(np.array([[1, 2], [3, 4]]))
        >>> [row.tolist() for row in batches.unbatch()]
        [[1, 2], [3, 4]]
        """
        return self._append_step(Unbatch, name=name)

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        *,
        name: str | None = None,
    ) -> Dataset[T_co]:
        """Yield random elements of a buffer that is filled in order.

        >>> shuffled = hr.Dataset.range(100).shuffle(100, seed=1)
        >>> first, second = list(shuffled), list(shuffled)
        >>> first != second, sorted(first) == sorted(second)
        (True, True)

        Args:
            buffer_size: Number of elements in the buffer; if it is at least the size of the
                dataset, every order is equally likely.
            seed: Seed of the order; None draws a new one in each run.
            reshuffle_each_iteration: Whether each epoch has a new order.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            Shuffle,
            buffer_size=buffer_size,
            seed=seed,
            reshuffle_each_iteration=reshuffle_each_iteration is not False,
            name=name,
        )

    def repeat(self, count: int | None = None, *, name: str | None = None) -> Dataset[T_co]:
        """Repeat the elements `count` times; None or -1 repeats them forever.

        >>> [int(x) for x in hr.Dataset.range(3).repeat(2)]
        [0, 1, 2, 0, 1, 2]

        Args:
            count: Number of repetitions; None or -1: forever.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Repeat, count=count, name=name)

    def take(self, count: int, *, name: str | None = None) -> Dataset[T_co]:
        """Yield the first `count` elements; -1 yields all.

        >>> [int(x) for x in hr.Dataset.counter().take(3)]
        [0, 1, 2]

        Args:
            count: Maximum number of elements; -1: all.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Take, count=count, name=name)

    def skip(self, count: int, *, name: str | None = None) -> Dataset[T_co]:
        """Skip the first `count` elements; -1 skips all.

        >>> [int(x) for x in hr.Dataset.range(5).skip(3)]
        [3, 4]

        Args:
            count: Number of elements to skip; -1: all.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Skip, count=count, name=name)

    def shard(self, num_shards: int, index: int, *, name: str | None = None) -> Dataset[T_co]:
        """Yield every `num_shards`-th element, starting with element `index`.

        >>> [int(x) for x in hr.Dataset.range(8).shard(num_shards=3, index=1)]
        [1, 4, 7]

        Args:
            num_shards: Number of shards, at least 1.
            index: Number of the shard to keep, in [0, num_shards).
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(ShardElements, num_shards=num_shards, index=index, name=name)

    def enumerate(
        self, start: int = 0, *, name: str | None = None
    ) -> Dataset[tuple[np.int64, T_co]]:
        """Pair each element with its number: `(int64, element)`.

        >>> letters = hr.Dataset.from_random_access(["a", "b"])
        >>> [(int(number), letter) for number, letter in letters.enumerate(start=1)]
        [(1, 'a'), (2, 'b')]

        Args:
            start: Number of the first element.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Enumerate, start=start, name=name)

    @overload
    def flat_map(
        self,
        map_func: Callable[[T_co], Dataset[S]],
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def flat_map(
        self,
        map_func: Callable[[Any, Any], Dataset[S]],
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def flat_map(  # type: ignore[overload-cannot-match]
        self,
        map_func: Callable[..., Dataset[S]],
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    def flat_map(
        self, map_func: Callable[..., Dataset[S]], *, name: str | None = None
    ) -> Dataset[S]:
        """Yield all elements of the dataset `map_func(element)` for each element in order.

        >>> ranges = hr.Dataset.range(1, 4).flat_map(lambda n: hr.Dataset.range(int(n)))
        >>> [int(x) for x in ranges]
        [0, 0, 1, 0, 1, 2]

        Args:
            map_func: Function that returns a dataset for an element; a tuple is passed as several
                arguments.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Interleave, fn=map_func, cycle_length=1, name=name)

    @overload
    def interleave(
        self,
        map_func: Callable[[T_co], Dataset[S]],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def interleave(
        self,
        map_func: Callable[[Any, Any], Dataset[S]],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    @overload
    def interleave(  # type: ignore[overload-cannot-match]
        self,
        map_func: Callable[..., Dataset[S]],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]: ...

    def interleave(
        self,
        map_func: Callable[..., Dataset[S]],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[S]:
        """Read the datasets `map_func(element)` of several elements in turn.

        >>> ones_and_twos = hr.Dataset.range(1, 3).interleave(
        ...     lambda n: hr.Dataset.from_tensors(n).repeat(4), cycle_length=2, block_length=2
        ... )
        >>> [int(x) for x in ones_and_twos]
        [1, 1, 2, 2, 1, 1, 2, 2]

        Args:
            map_func: Function that returns a Dataset for an element.
            cycle_length: Number of datasets open at once; None or `AUTOTUNE` is 8 on every machine.
            block_length: Number of elements to take from each in its turn; None is 1.
            num_parallel_calls: Threads that read the datasets ahead, or `AUTOTUNE`.
            deterministic: False takes elements from any dataset that is ready.
            name: Name of the step in errors and in `explain`.
        """
        automatic = cycle_length is None or cycle_length == AUTOTUNE
        return self._append_step(
            Interleave,
            fn=map_func,
            cycle_length=DEFAULT_CYCLE_LENGTH if automatic else cycle_length,
            block_length=1 if block_length is None else block_length,
            num_parallel_calls=num_parallel_calls,
            deterministic=deterministic,
            name=name,
        )

    def concatenate(self, dataset: Dataset[S], *, name: str | None = None) -> Dataset[T_co | S]:
        """Yield these elements, followed by those of `dataset`.

        >>> [int(x) for x in hr.Dataset.range(2).concatenate(hr.Dataset.range(10, 12))]
        [0, 1, 10, 11]

        Args:
            dataset: Dataset to read after this one.
            name: Name of the step in errors and in `explain`.
        """
        second = _check_dataset("dataset", dataset)
        return Dataset(Concatenate(first=self._plan, second=second, location=call_site(name)))

    def prefetch(self, buffer_size: int = AUTOTUNE, *, name: str | None = None) -> Dataset[T_co]:
        """Read up to `buffer_size` elements ahead on a thread; AUTOTUNE reads up to 64 MiB.

        >>> with iter(hr.Dataset.range(3).map(lambda x: x + 1).prefetch(2)) as iterator:
        ...     [int(x) for x in iterator]
        [1, 2, 3]

        Args:
            buffer_size: Maximum number of elements in the buffer, or AUTOTUNE.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Prefetch, buffer_size=buffer_size, name=name)

    def cache(
        self, filename: str | os.PathLike[str] = "", *, name: str | None = None
    ) -> Dataset[T_co]:
        """Keep the elements of the first complete epoch, in memory or in a file.

        >>> calls = []
        >>> cached = hr.Dataset.range(3).map(lambda x: calls.append(x) or x).cache()
        >>> [int(x) for x in cached] == [int(x) for x in cached]
        True
        >>> len(calls)
        3

        Before `distribute` with dynamic sharding it keeps nothing, because workers read other parts
        in each epoch: use `save` and `load`, or `cache` after `distribute`.

        Args:
            filename: File on a local disk; empty keeps the elements in memory. Workers with
                dataset shards (FILE, HINT) append the shard to the name: NAME.shard-0-of-2.
            name: Name of the step in errors and in `explain`.
        """
        path = os.fspath(filename) if isinstance(filename, os.PathLike) else filename
        self._refuse_windows("`cache`")
        return self._append_step(Cache, filename=path, name=name)

    def save(self, path: FileName) -> None:
        """Read one epoch and save its elements in a directory of Arrow files, for `load`.

        >>> hr.Dataset.range(3).save("numbers")
        >>> [int(x) for x in hr.Dataset.load("numbers")]
        [0, 1, 2]

        Args:
            path: Directory, by path or fsspec URL, that contains no saved dataset.

        Raises:
            AlreadyExistsError: If it contains a saved dataset, or an unfinished one of another
                pipeline.
            InvalidElementError: If an element cannot be saved; the message names the component.
        """
        self._refuse_windows("`save`")
        save_dataset(self._plan, next(self._epochs), path)

    def apply(self, transformation_func: Callable[[Dataset[T_co]], ResultT]) -> ResultT:
        """Return `transformation_func(self)`.

        >>> def every_other(dataset):
        ...     return dataset.shard(2, 0)
        >>> [int(x) for x in hr.Dataset.range(5).apply(every_other)]
        [0, 2, 4]
        """
        result = transformation_func(self)
        if not isinstance(result, Dataset):
            raise TypeError(
                f"`transformation_func` must return a Dataset, but returned {type(result).__name__}"
            )
        return result

    def with_options(self, options: Options, *, name: str | None = None) -> Dataset[T_co]:
        """Run the whole dataset with `options`, which override options set before.

        >>> options = hr.Options(seed=7)
        >>> first, second = (hr.Dataset.range(9).shuffle(9).with_options(options) for _ in "ab")
        >>> list(first) == list(second)
        True

        Args:
            options: Options; those that are None keep their value.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(WithOptions, options=options, name=name)

    def options(self) -> Options:
        """Return the options that apply to this dataset.

        >>> dataset = hr.Dataset.range(3).with_options(hr.Options(seed=1))
        >>> dataset.with_options(hr.Options(deterministic=False)).options()
        Options(deterministic=False, seed=1, auto_shard_policy=None)
        """
        return traverse.merged_options(self._plan)

    # --- Inspection ---------------------------------------------------------------------------

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements: a nested structure of `ArraySpec`.

        If it depends on the results of user functions, one element is computed. All elements are
        then assumed to have its structure, dtypes and numbers of axes, but not its axis lengths.

        >>> rows = hr.Dataset.from_tensor_slices({"x": np.zeros((4, 3), np.float32)})
        >>> rows.element_spec
        {'x': ArraySpec(shape=(3,), dtype=float32)}
        """
        return infer_spec(self._plan)

    def cardinality(self) -> int:
        """Return the number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        >>> hr.Dataset.range(10).batch(4).cardinality()
        3
        >>> hr.Dataset.range(10).repeat().cardinality() == hr.INFINITE_CARDINALITY
        True
        >>> hr.Dataset.range(10).filter(lambda x: x > 3).cardinality() == hr.UNKNOWN_CARDINALITY
        True
        """
        return traverse.cardinality(self._plan)

    def __len__(self) -> int:
        size = self.cardinality()
        if size == INFINITE:
            raise TypeError("the dataset is infinite and has no length; limit it with take(n)")
        if size == UNKNOWN:
            raise TypeError(
                "the length of this dataset is unknown until it is read: count its elements with "
                "dataset.reduce(0, lambda count, _: count + 1), or use dataset.cardinality(), "
                "which returns hr.UNKNOWN_CARDINALITY for it"
            )
        return size

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            "a Dataset does not support indexing: use next(iter(dataset)) for the first element "
            "and dataset.skip(n).take(1) for element n; in PyTorch, use hr.torch.loader(dataset) "
            "instead of a DataLoader"
        )

    def __bool__(self) -> bool:
        return True  # `if dataset:` tests for None, not for an empty dataset

    def explain(self) -> str:
        """Return the plan as written and as it runs, as text.

        The text shows the index plan (steps that only compute indices), the number of splits that
        a service would assign, and steps whose `deterministic=False` has no effect.

        >>> lines = hr.Dataset.range(10).shuffle(10).batch(2).explain().splitlines()
        >>> print(lines[1].strip())
        Batch(size=2, drop_remainder=False)...
        """
        return explain(self._plan)

    # --- Reading ------------------------------------------------------------------------------

    def __iter__(self) -> DatasetIterator[T_co]:
        return DatasetIterator(self._plan, next(self._epochs), lambda: self.element_spec)

    def as_numpy_iterator(self) -> DatasetIterator[T_co]:
        """Return an iterator over the elements, which consist of NumPy values in any case.

        >>> list(hr.Dataset.from_random_access(["a", "b"]).as_numpy_iterator())
        ['a', 'b']
        """
        return self.__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        # The plan is the whole state; the number of epochs read so far is left out.
        return Dataset, (self._plan,)

    if not TYPE_CHECKING:  # else type checkers accept every name as a method

        def __getattr__(self, name: str) -> Any:
            known = [method for method in dir(type(self)) if not method.startswith("_")]
            raise AttributeError(missing_method_message(name, known), name=name, obj=self)


def _check_dataset(name: str, dataset: Any) -> Node:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`{name}` must be a Dataset, but got {type(dataset).__name__}; "
            "create one from arrays with Dataset.from_tensor_slices"
        )
    return dataset.plan
