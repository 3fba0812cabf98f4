"""Sliding windows: datasets of consecutive elements, and such windows as batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.arguments import check_flag
from headrace.element.dataset_leaf import WINDOW_REMEDY, DatasetSpec
from headrace.element.spec import Spec
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError
from headrace.plan.combining import Interleave
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import element_spec
from headrace.plan.user_function import step_name

__all__ = ["BatchedWindows", "Window", "refuse_windows"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Window(Node):
    """Yield windows of `size` elements, as a dataset for each component of an element.

    Window n has the elements n * shift, n * shift + stride, ...; the last ones may have fewer.
    """

    kind: ClassVar[str] = "window"
    rereads_input: ClassVar[bool] = True
    needs_input_order: ClassVar[bool] = True

    input: Node
    size: int
    shift: int | None = None
    stride: int = 1
    drop_remainder: bool = False
    make_dataset: Callable[[Node], Any] = field(metadata={"is_parameter": False})
    """Makes a dataset from a plan."""

    def __post_init__(self) -> None:
        self.validate_int("size", minimum=1)
        if self.shift is None:
            object.__setattr__(self, "shift", self.size)
        self.validate_int("shift", minimum=1)
        self.validate_int("stride", minimum=1)
        check_flag("drop_remainder", self.drop_remainder, or_none=False)

    @property
    def step(self) -> int:
        """Number of elements between the starts of consecutive windows."""
        assert self.shift is not None
        return self.shift

    @property
    def span(self) -> int:
        """Number of elements from the first to the last of a full window."""
        return (self.size - 1) * self.stride + 1

    def spec(self, *inputs: Spec) -> Spec | None:
        return map_leaves(DatasetSpec, inputs[0])

    def cardinality(self, *inputs: int) -> int:
        count = inputs[0]
        if count in (INFINITE, UNKNOWN):
            return count
        if self.drop_remainder:
            return max(0, (count - self.span) // self.step + 1)
        return -(-count // self.step)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BatchedWindows(Node):
    """A `flat_map` over a `Window` whose function makes one batch of each window.

    `rewrites.window_batches` replaces such steps; elements and states are the same.
    """

    kind: ClassVar[str] = "interleave"
    is_random: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    needs_input_order: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True

    input: Node
    """The input of the windows."""
    window: Window
    flat_map: Interleave
    batch_location: str

    def spec(self, *inputs: Spec) -> Spec | None:
        return None

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN


def refuse_windows(plan: Node, name: str) -> None:
    """Raise an error if a plan is known to yield windows.

    Args:
        plan: The plan.
        name: What cannot take them.

    Raises:
        FailedPreconditionError: If elements are, or contain, datasets.
    """
    if not plan.inputs:  # as in most nested datasets
        return
    windows = [node for node in distinct_nodes([plan]) if isinstance(node, Window)]
    if not windows:
        return
    # The structure of elements may be unknown, but not that windows are datasets.
    spec = element_spec(plan, lambda node: DatasetSpec() if isinstance(node, Window) else None)
    if any(isinstance(leaf, DatasetSpec) for leaf in flatten(spec)[0]):
        raise FailedPreconditionError(
            f"{name} cannot take the elements of {step_name(windows[-1])}: windows are datasets, "
            f"which exist only in this process; {WINDOW_REMEDY}"
        )
