"""Methods of `Dataset` that read all elements, iterate over them or display the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from headrace.arguments import check_callable, check_flag
from headrace.data.element_type import T_co
from headrace.data.iterator import DatasetIterator
from headrace.data.iterator_stats import summarize
from headrace.data.progress import ProgressIterator
from headrace.data.step_methods import StepMethods
from headrace.element.normalize import normalize
from headrace.element.ownership import copy_element
from headrace.element.spec import Spec
from headrace.errors import InvalidArgumentError, InvalidElementError
from headrace.execution.statistics import StatisticsCollector
from headrace.plan import traverse
from headrace.plan.node import Node
from headrace.plan.source import INFINITE

__all__ = ["ReadingMethods"]

_MAX_DEPTH = 60


class ReadingMethods(StepMethods, Generic[T_co]):
    """Methods that read a dataset or display it."""

    _epochs: count[int]
    _last_statistics: StatisticsCollector | None

    if TYPE_CHECKING:

        @property
        def element_spec(self) -> Spec: ...  # noqa: D102

        def __iter__(self) -> DatasetIterator[T_co]: ...

    def iterate(self, *, progress: bool = False, stats: bool = False) -> DatasetIterator[T_co]:
        """Return an iterator, like `iter(dataset)`, with a progress bar or statistics.

        >>> for element in hr.Dataset.range(3).iterate(progress=True):
        ...     print(element)
        0
        1
        2

        Args:
            progress: Whether to show the number of elements, the rate and, if the number of
                elements is known, the remaining time. It is written to standard error, only if
                that is a terminal, or below the cell of a notebook.
            stats: Whether to measure where the time goes, for `DatasetIterator.stats()`. It slows
                a dataset down by a few percent, and by more if its elements are cheap scalars.
        """
        check_flag("progress", progress)
        check_flag("stats", stats)
        plan, epoch = self.plan, next(self._epochs)
        statistics = StatisticsCollector() if stats else None
        if stats:
            self._last_statistics = statistics
        if progress:
            return ProgressIterator(plan, epoch, lambda: self.element_spec, statistics=statistics)
        return DatasetIterator(plan, epoch, lambda: self.element_spec, statistics=statistics)

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
        if traverse.cardinality(self.plan) == INFINITE:
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

    def __repr__(self) -> str:
        return f"<Dataset {type(self.plan).__name__} element_spec={_describe_spec(self.plan)}>"

    def _repr_html_(self) -> str:
        """Return the dataset as HTML, for notebooks."""
        title = f"Dataset, element_spec={_describe_spec(self.plan)}"
        steps = "".join(_list_steps(self.plan))
        return f"<div><b>{escape(title)}</b><ul>{steps}</ul>{self._format_statistics()}</div>"

    def _format_statistics(self) -> str:
        if self._last_statistics is None:
            return ""
        table = str(summarize(self._last_statistics.measurements()))
        return f"<div>Last iteration with statistics</div><pre>{escape(table)}</pre>"


def _describe_spec(plan: Node, known: dict[int, Spec | None] | None = None) -> str:
    """Return the spec of a plan's elements as far as it is known without running the plan."""
    try:
        spec = traverse.element_spec(plan, known=known)
    except InvalidElementError:  # `element_spec` and `batch` explain it
        return "not the same for all elements"
    return "unknown until read" if spec is None else repr(spec)


def _list_steps(plan: Node) -> Iterator[str]:
    """Yield a list item for each step, last step first, with its inputs indented."""
    specs: dict[int, Spec | None] = {}
    pending: list[tuple[Node, int]] = [(plan, 0)]
    while pending:
        node, depth = pending.pop()
        spec = _describe_spec(node, specs)
        indent = f"margin-left: {min(depth, _MAX_DEPTH) * 1.5}em"
        yield (f'<li style="{indent}"><code>{escape(node.describe())}</code>: {escape(spec)}</li>')
        pending.extend((input_, depth + 1) for input_ in reversed(node.inputs))
