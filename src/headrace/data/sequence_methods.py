"""Methods of `Dataset` over the whole sequence: repeated elements, batch sizes, and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from headrace.arguments import check_callable
from headrace.data.element_type import T_co
from headrace.data.missing_names import MissingNamesMeta
from headrace.element.normalize import normalize
from headrace.element.ownership import copy_element
from headrace.element.ragged import find_fixed_lengths
from headrace.errors import InvalidArgumentError, InvalidElementError
from headrace.plan.node import Node
from headrace.plan.ragged import RaggedBatch
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, element_spec
from headrace.plan.unique import Unique
from headrace.rewrites.optimize import prepare

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset
    from headrace.data.iterator import DatasetIterator

__all__ = ["SequenceMethods"]


class SequenceMethods(Generic[T_co], metaclass=MissingNamesMeta):
    """Methods that drop repeated elements, change batch sizes, or read the whole dataset."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Node: ...  # noqa: D102

        def _append_step(
            self, step: Callable[..., Node], *, name: str | None = None, **arguments: Any
        ) -> Dataset[Any]: ...

        def __iter__(self) -> DatasetIterator[T_co]: ...

        def unbatch(self, *, name: str | None = None) -> Dataset[Any]: ...  # noqa: D102

    def unique(self, *, name: str | None = None) -> Dataset[T_co]:
        """Drop each element that equals an earlier one.

        Elements are equal if their structures, dtypes, shapes and bits are: NaN equals NaN, and 1
        differs from 1.0. About 100 bytes of memory are needed per distinct element, of any size.

        A state of the iterator contains no elements: a restore reads the input again from its
        start, which takes as long as it took to reach the state, without the time of the steps
        after this one.

        >>> import headrace as hr
        >>> numbers = hr.Dataset.from_tensor_slices([3, 1, 3, 2, 1])
        >>> [int(x) for x in numbers.unique()]
        [3, 1, 2]

        Args:
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Unique, name=name)

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, *, name: str | None = None
    ) -> Dataset[Any]:
        """Change the number of rows per batch: the same as `unbatch().batch(batch_size)`.

        Batches are sliced and concatenated; no row is handled on its own.

        >>> import headrace as hr
        >>> batches = hr.Dataset.range(7).batch(3)
        >>> [batch.tolist() for batch in batches.rebatch(2)]
        [[0, 1], [2, 3], [4, 5], [6]]

        Args:
            batch_size: Number of rows per batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            name: Name of the steps in errors and in `explain`.
        """
        return self.unbatch(name=name).batch(batch_size, drop_remainder, name=name)

    def ragged_batch(
        self, batch_size: int, drop_remainder: bool = False, *, name: str | None = None
    ) -> Dataset[Any]:
        """Join `batch_size` consecutive elements, without padding, into one of `hr.RaggedArray`.

        An array becomes a `RaggedArray` unless the plan tells the length of its first axis;
        arrays that a function makes count as unknown. Other components are stacked as by `batch`.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 4).map(lambda n: {"x": [n] * int(n), "label": n})
        >>> batch = next(iter(rows.ragged_batch(3)))
        >>> batch["x"].to_list(), batch["label"].tolist()
        ([[1], [2, 2], [3, 3, 3]], [1, 2, 3])
        >>> batch["x"].values.tolist(), batch["x"].row_splits.tolist()
        ([1, 2, 2, 3, 3, 3], [0, 1, 3, 6])

        Args:
            batch_size: Number of elements per batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            name: Name of the step in errors and in `explain`.
        """
        spec = element_spec(prepare(self.plan).plan)
        return self._append_step(
            RaggedBatch,
            size=batch_size,
            drop_remainder=drop_remainder,
            fixed_lengths=find_fixed_lengths(spec),
            name=name,
        )

    # --- Results ------------------------------------------------------------------------------

    def reduce(
        self,
        initial_state: Any,
        reduce_func: Callable[[Any, T_co], Any],
        *,
        name: str | None = None,
    ) -> Any:
        """Read one epoch and return the last result of `reduce_func(state, element)`.

        >>> import headrace as hr
        >>> int(hr.Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        >>> pairs = hr.Dataset.range(5).enumerate(start=1)
        >>> pairs.reduce((0, 0), lambda s, pair: (s[0] + pair[0], s[1] + pair[1]))
        (np.int64(15), np.int64(10))

        Args:
            initial_state: State for the first element, and the result if there are none; an
                element, such as a number, an array, or a dict or tuple of them.
            reduce_func: Function of the state and the element (a tuple is one argument) that
                returns the new state, which it may have modified in place.
            name: Accepted as in tf.data.

        Raises:
            ValueError: If the dataset is infinite.
            InvalidElementError: If a result is None or no element.
        """
        check_callable("reduce_func", reduce_func)
        if cardinality(self.plan) == INFINITE:
            raise ValueError("`reduce` would never return: the dataset is infinite; use take(n)")
        state = copy_element(normalize(initial_state))
        with iter(self) as elements:
            for element in elements:
                state = normalize(reduce_func(state, element))
                if state is None:
                    raise InvalidElementError(
                        "`reduce_func` returned None; it must return the new state"
                    )
        return state

    def get_single_element(self, *, name: str | None = None) -> T_co:
        """Return the only element.

        >>> import headrace as hr
        >>> hr.Dataset.range(3).batch(3).get_single_element()
        array([0, 1, 2])

        Args:
            name: Accepted as in tf.data.

        Raises:
            InvalidArgumentError: If there is not exactly one element.
        """
        with iter(self) as elements:
            found: list[T_co] = []
            for element in elements:
                if found:
                    raise InvalidArgumentError(
                        "the dataset must have exactly one element, but it has more; use take(1) "
                        "for the first, or batch(n) to join them"
                    )
                found.append(element)
        if not found:
            raise InvalidArgumentError("the dataset must have exactly one element, but it has none")
        return found[0]

    def fingerprint(self) -> np.uint64:
        """Return a number that is equal for datasets with the same steps, in any process.

        It covers the kinds, arguments and order of the steps, options, data in memory (every
        value), names of files, and functions: their code, their default arguments, and the values
        that they refer to, but functions of other modules by name only. It does not cover what
        files contain, the names of functions and steps, and lines of code. Another version of
        Python or Headrace may give another number.

        >>> import headrace as hr
        >>> first, second = (hr.Dataset.range(9).map(lambda x: x + 1).batch(2) for _ in "ab")
        >>> bool(first.fingerprint() == second.fingerprint())
        True
        >>> bool(first.fingerprint() == first.take(1).fingerprint())
        False
        """
        # Imports cloudpickle, which a program without a data service does not need.
        from headrace.plan.fingerprint import fingerprint  # noqa: PLC0415

        return np.uint64(int(fingerprint(self.plan)[:16], 16))
