"""Methods of `Dataset` that iterate over it with a progress bar or statistics, and display it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Generic

from headrace.arguments import check_flag
from headrace.data.element_type import T_co
from headrace.data.iterator import DatasetIterator
from headrace.data.iterator_stats import summarize
from headrace.data.missing_names import MissingNamesMeta
from headrace.data.progress import ProgressIterator
from headrace.element.spec import Spec
from headrace.execution.statistics import StatisticsCollector
from headrace.plan import traverse
from headrace.plan.node import Node

if TYPE_CHECKING:
    from itertools import count

__all__ = ["ReadingMethods"]

_MAX_DEPTH = 60


class ReadingMethods(Generic[T_co], metaclass=MissingNamesMeta):
    """Methods that iterate over a dataset or display it."""

    if TYPE_CHECKING:
        _epochs: count[int]

        @property
        def plan(self) -> Node: ...  # noqa: D102

        @property
        def element_spec(self) -> Spec: ...  # noqa: D102

    _last_statistics: StatisticsCollector | None

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
    spec = traverse.element_spec(plan, known=known)
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
