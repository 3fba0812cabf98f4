"""Sliding windows: datasets of consecutive elements, and such windows as batches."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.arguments import check_flag
from headrace.element.dataset_leaf import WINDOW_REMEDY, DatasetSpec
from headrace.element.spec import Spec
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch
from headrace.plan.combining import Interleave
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import element_spec
from headrace.plan.user_function import step_name

__all__ = ["BatchedWindows", "Window", "WindowBatchProof", "refuse_windows"]


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


@dataclass(frozen=True, kw_only=True)
class WindowBatchProof:
    """Proof that a function makes one batch of each component of a window."""

    fn: types.FunctionType
    code: types.CodeType
    names: tuple[str, ...]
    """Globals that the function reads."""
    values: list[Any] | None
    """Values of its cells and globals when it was proved."""
    batches: tuple[Batch, ...]
    """The batch of each component, for an argument each."""

    @property
    def holds(self) -> bool:
        """Whether the function is still the proved one: rebinding a name changes it."""
        return self.fn.__code__ is self.code and self.read_values() == self.values

    @property
    def drops_remainder(self) -> bool:
        """Whether there is no batch of a window with fewer elements than the others."""
        return any(batch.drop_remainder for batch in self.batches)

    def read_values(self) -> list[Any] | None:
        """Return the current values of cells and globals; None if one is not bound."""
        module = self.fn.__globals__
        try:
            cells = [cell.cell_contents for cell in self.fn.__closure__ or ()]
            return cells + [module[name] for name in self.names]
        except (KeyError, ValueError):
            return None


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
    proof: WindowBatchProof

    @property
    def general_plan(self) -> Node:
        """The steps that this one replaces."""
        return self.flat_map.with_inputs([self.window.with_inputs([self.input])])

    def spec(self, *inputs: Spec) -> Spec | None:
        return None

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN


def refuse_windows(plan: Node, name: str) -> None:
    """Raise an error if a plan is known to yield windows.

    Args:
        plan: The plan.
        name: The step or method that cannot take them, for the error.

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
