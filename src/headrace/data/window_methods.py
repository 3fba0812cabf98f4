"""Methods of `Dataset` that make windows, which are datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.data.step_methods import StepMethods
from headrace.element.dataset_leaf import DatasetLeaf
from headrace.plan.elements import FromSource
from headrace.plan.node import distinct_nodes
from headrace.plan.sliding_windows import Window, refuse_windows
from headrace.plan.traverse import element_spec
from headrace.plan.windows import GroupByWindow
from headrace.sources.window import WindowSource

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["WindowMethods"]


class WindowMethods(StepMethods, DatasetLeaf):
    """Methods that make windows, and what a dataset reports as an element of other datasets."""

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Yield windows of consecutive elements, each as a Dataset.

        If elements are tuples or dicts, a window has their structure, with a Dataset for each
        component.

        >>> import headrace as hr
        >>> windows = hr.Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> [batch.tolist() for batch in windows.flat_map(lambda w: w.batch(3))]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        >>> pairs = hr.Dataset.range(4).map(lambda x: (x, x * x)).window(2)
        >>> batches = pairs.flat_map(lambda a, b: hr.Dataset.zip((a.batch(2), b.batch(2))))
        >>> [(a.tolist(), b.tolist()) for a, b in batches]
        [([0, 1], [0, 1]), ([2, 3], [4, 9])]

        Windows are held in memory and share the elements in which they overlap. They exist only in
        this process: a data service, `save`, `batch` and `cache` cannot take them. Their
        `element_spec` has a `DatasetSpec` for each component.

        Args:
            size: Number of elements of a window; the last windows may have fewer.
            shift: Number of elements from the start of a window to that of the next; None is
                `size`.
            stride: Distance between consecutive elements of a window.
            drop_remainder: Whether to drop windows of fewer than `size` elements.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            Window,
            size=size,
            shift=shift,
            stride=stride,
            drop_remainder=drop_remainder,
            make_dataset=type(self),
            name=name,
        )

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Dataset[Any]], Any] | Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Group elements by key; apply `reduce_func` to full windows and yield the elements.

        At the end of the data, incomplete windows follow in the order of their oldest elements.

        >>> import headrace as hr
        >>> by_parity = hr.Dataset.range(7).group_by_window(
        ...     key_func=lambda x: x % 2, reduce_func=lambda key, window: window.batch(3),
        ...     window_size=3,
        ... )
        >>> [batch.tolist() for batch in by_parity]
        [[0, 2, 4], [1, 3, 5], [6]]

        Args:
            key_func: Function that returns the key of an element, an integer.
            reduce_func: Function of a key and a Dataset of the elements of a window; returns a
                Dataset.
            window_size: Number of elements per window.
            window_size_func: Function that returns the window size for a key, instead of
                `window_size`.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            GroupByWindow,
            key_func=key_func,
            reduce_func=reduce_func,
            window_size=window_size,
            window_size_func=window_size_func,
            make_dataset=type(self),
            name=name,
        )

    @property
    def _reads_window(self) -> bool:
        """Whether the dataset is a window or made from one, and so may be an element."""
        return any(
            isinstance(node, FromSource) and isinstance(node.source, WindowSource)
            for node in distinct_nodes([self.plan])
        )

    @property
    def _known_spec(self) -> Any:
        """Spec of the elements if it is known without reading one, else None."""
        return element_spec(self.plan)

    def _refuse_windows(self, name: str) -> None:
        """Raise an error if elements are windows, which the method `name` cannot take."""
        refuse_windows(self.plan, name)
