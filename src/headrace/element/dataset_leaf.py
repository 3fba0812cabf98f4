"""Datasets as leaves of elements, as `Dataset.window` yields them; only within one process."""

from __future__ import annotations

from typing import Any

__all__ = ["WINDOW_REMEDY", "DatasetLeaf", "DatasetSpec"]

WINDOW_REMEDY = "make arrays of the windows first, as in .flat_map(lambda w: w.batch(n))"
"""What to do where elements of `window` cannot be used."""


class DatasetLeaf:
    """Base class of datasets."""

    __slots__ = ()

    @property
    def _reads_window(self) -> bool:
        """Whether the dataset is a window or made from one, and so may be a leaf."""
        return False

    @property
    def _known_spec(self) -> Any:
        """Spec of the dataset's elements if it is known without reading one, else None."""
        return None


class DatasetSpec:
    """Spec of a leaf that is a dataset. Immutable and hashable.

    >>> import headrace as hr
    >>> hr.Dataset.range(9).window(3).element_spec
    DatasetSpec(ArraySpec(shape=(), dtype=int64))

    Attributes:
        element_spec: Spec of the dataset's elements, or None if it is unknown.
    """

    __slots__ = ("element_spec",)

    element_spec: Any

    def __init__(self, element_spec: Any = None) -> None:
        object.__setattr__(self, "element_spec", element_spec)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"DatasetSpec is immutable: cannot set {attribute}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DatasetSpec):
            return NotImplemented
        return bool(self.element_spec == other.element_spec)

    def __hash__(self) -> int:
        return hash(DatasetSpec)

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetSpec, (self.element_spec,)
