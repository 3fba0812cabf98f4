"""The base class of the groups of methods of `Dataset`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import MissingNamesMeta
from headrace.plan.node import Node, call_site

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["StepMethods"]


class StepMethods(metaclass=MissingNamesMeta):
    """A plan, and how methods make datasets of other plans.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan

    @property
    def plan(self) -> Node:
        """The plan: an immutable tree of the dataset's steps.

        >>> type(hr.Dataset.range(6).batch(2).plan).__name__
        'Batch'
        """
        return self._plan

    @classmethod
    def _from_plan(cls, plan: Node) -> Dataset[Any]:
        """Return the dataset of a plan."""
        dataset: Any = cls(plan)
        return dataset  # type: ignore[no-any-return]

    def _append_step(
        self, step: Callable[..., Node], *, name: str | None = None, **arguments: Any
    ) -> Dataset[Any]:
        """Return a dataset with another step appended."""
        return self._from_plan(step(input=self._plan, location=call_site(name), **arguments))
