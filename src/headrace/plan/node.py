"""Plan node: an immutable record of one step, its inputs, and its effect on spec and cardinality.

Rule 1. A node has no behavior: it is built, inspected, rewritten and pickled.
Rule 2. A node's arguments are checked at construction, in `__post_init__`.
Rule 3. Nodes are compared by identity; plans with the same meaning have equal fingerprints.
Rule 4. Class attributes of a step tell rewrites and iterators all they need to know about it; no
        other module lists kinds of steps.
Rule 5. A plan may be thousands of steps deep, and a step may occur in it several times. Code that
        walks a plan does not recurse (`traverse`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

from headrace.arguments import check_flag, check_int, check_string
from headrace.element.spec import Spec

__all__ = [
    "AUTOTUNE",
    "Node",
    "call_site",
    "describe_function",
    "distinct_nodes",
    "is_unordered_requested",
]

AUTOTUNE = -1
"""Lets Headrace choose a value; corresponds to `tf.data.AUTOTUNE`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Node:
    """One step of a plan."""

    kind: ClassVar[str] = ""
    """Name of the step in errors and saved states, whose format it is part of: it never changes."""
    is_random: ClassVar[bool] = False
    """Whether the step draws random numbers, or opens datasets that may."""
    uses_element_numbers: ClassVar[bool] = False
    """Whether the step needs the element numbers (`execution.element_numbers`) of its input."""
    one_to_one: ClassVar[bool] = False
    """Whether the n-th element is made from the n-th input element alone."""
    preserves_count: ClassVar[bool] = False
    """Whether there is one element per input element, in the same order, whatever it is made
    from."""
    selects_by_position: ClassVar[bool] = False
    """Whether the step selects and orders input elements without looking at them."""
    is_split_local: ClassVar[bool] = False
    """Whether the elements made from one split (`rewrites.split_space`) depend on the split's
    elements alone, whatever comes before, between and after them."""
    propagates_ids: ClassVar[bool] = False
    """Whether each element is made from input elements that go into no other element, so that it
    has their element ids (`rewrites.partition_boundaries`)."""
    is_index_step: ClassVar[bool] = False
    """Whether the step is arithmetic on indices if its inputs are (`traverse.is_index_plan`)."""
    rereads_input: ClassVar[bool] = False
    """Whether a restore reads input elements again, which must come in the same order."""
    needs_single_split: ClassVar[bool] = False
    """Whether the inputs cannot be divided into splits unless they are index plans. A reader of
    such a plan is assigned all of it."""
    needs_input_order: ClassVar[bool] = False
    """Whether the step joins consecutive elements, so that a service must not reorder them."""
    is_read_only: ClassVar[bool] = False
    """Whether the step neither passes input elements to user functions nor writes to them, so that
    they may be memory that another step owns (`traverse.find_borrowing_steps`)."""
    has_own_spec: ClassVar[bool] = False
    """Whether the spec follows from the step alone; `spec()` then takes no inputs."""
    is_transparent: ClassVar[bool] = False
    """Whether the elements are the input's, and only their speed or execution differs."""
    dynamic_sharding_obstacle: ClassVar[str] = ""
    """Why a plan with the step cannot be read with `ShardingPolicy.DYNAMIC`, and what to do; "" if
    it can."""
    performance_fields: ClassVar[tuple[str, ...]] = ()
    """Parameters that affect performance only, not the elements."""

    location: str = ""
    """File and line of the user's call that made the step, and the name given to the step, for
    `explain` and errors."""
    number: int | None = None
    """Number among the random steps of the plan as written; set by `canonicalize`."""

    @property
    def method(self) -> str:
        """Name of the method that made the step, for errors; most steps have one of their own."""
        return self.kind

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Nodes whose elements this one takes."""
        state = self.__dict__
        fields = _fields(type(self))
        if fields.only_input is not None:
            return (state[fields.only_input],)
        found: list[Node] = []
        for name, is_tuple in fields.inputs:
            if is_tuple:
                found.extend(state[name])
            else:
                found.append(state[name])
        return tuple(found)

    def copy_with_inputs(self, inputs: Sequence[Node]) -> Self:
        """Return a copy of this step with other inputs; their number must be the same."""
        remaining = iter(inputs)
        changes: dict[str, Any] = {}
        for name, is_tuple in _fields(type(self)).inputs:
            old = self.__dict__[name]
            changes[name] = tuple(next(remaining) for _ in old) if is_tuple else next(remaining)
        return self._replace_fields(changes)

    def with_inputs(self, inputs: Sequence[Node]) -> Self:
        """Return this step with these inputs; the step itself if it has them already."""
        old = self.inputs
        if len(old) == 1 and old[0] is inputs[0]:
            return self
        if all(input_ is old_input for input_, old_input in zip(inputs, old, strict=True)):
            return self
        return self.copy_with_inputs(inputs)

    def with_number(self, number: int | None) -> Self:
        """Return this step with another number."""
        return self._replace_fields({"number": number})

    def with_parameters(self, **changes: Any) -> Self:
        """Return this step with these parameters, which are not validated."""
        return self._replace_fields(changes)

    def _replace_fields(self, changes: dict[str, Any]) -> Self:
        # The arguments were validated when `self` was made.
        node = object.__new__(type(self))
        node.__dict__.update(self.__dict__)
        node.__dict__.update(changes)
        return node

    def validate_int(
        self, field: str, *, minimum: int, also_allowed: Sequence[int] = (), public_name: str = ""
    ) -> None:
        """Check an integer argument at construction and store it as a Python int.

        Args:
            field: Name of the field.
            minimum: Smallest value allowed.
            also_allowed: Other values that are allowed.
            public_name: Name of the argument in the public API, if it differs from the field's.
        """
        value = check_int(
            public_name or field, self.__dict__[field], minimum=minimum, or_one_of=also_allowed
        )
        object.__setattr__(self, field, value)

    def validate_parallelism(
        self, num_parallel_calls: int | None, deterministic: bool | None
    ) -> None:
        """Validate and store these arguments of a step that may run on threads."""
        if num_parallel_calls is not None:
            self.validate_int("num_parallel_calls", minimum=1, also_allowed=(AUTOTUNE,))
        check_flag("deterministic", deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        """Return the element spec for these input specs, or None if it depends on a run."""
        return inputs[0]

    def cardinality(self, *inputs: int) -> int:
        """Return the number of elements for these input cardinalities (or INFINITE, UNKNOWN)."""
        return inputs[0]

    def input_split_size(self, split_size: int) -> int | None:
        """Return how many input elements must stay together for `split_size` elements of this step.

        Splits of an index plan end only at multiples of it, so that no batch spans two splits. None
        means that the positions of input elements do not determine where they end up.
        """
        return split_size if self.preserves_count else None

    def allows_unordered(self, deterministic: bool | None) -> bool:
        """Return whether elements may come as they are ready, in an order that is not reproducible.

        They do so if the step has threads. Without threads the state has the same form, so that
        threads can be added later.

        Args:
            deterministic: The plan's `Options.deterministic`.
        """
        return False

    def parameters(self) -> dict[str, Any]:
        """Return the fields that distinguish this step from others of its kind, without inputs."""
        return {name: self.__dict__[name] for name in _fields(type(self)).parameters}

    def describe(self) -> str:
        """Return one line for `explain`: the step, its arguments, and the user's file and line."""
        arguments = ", ".join(
            f"{name}={_format_argument(value)}"
            for name, value in self.parameters().items()
            if value is not None
        )
        location = f"  # {self.location}" if self.location else ""
        return f"{type(self).__name__}({arguments}){location}"

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A flat list, each step after its inputs: pickle recurses, and plans are deep.
        steps = distinct_nodes([self])
        step_numbers = {id(step): number for number, step in enumerate(steps)}
        return _rebuild_plan, ([_flatten_step(step, step_numbers) for step in steps],)


def distinct_nodes(plans: Iterable[Node]) -> list[Node]:
    """Return each node of the plans once, inputs first, left to right."""
    found: list[Node] = []
    seen: set[int] = set()
    pending = [(plan, False) for plan in plans]
    pending.reverse()
    while pending:
        node, is_ready = pending.pop()
        if is_ready:
            found.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            pending.append((node, True))
            pending.extend((input_, False) for input_ in reversed(node.inputs))
    return found


def is_unordered_requested(step_setting: bool | None, deterministic: bool | None) -> bool:
    """Return whether the user frees a step's order; the step's own argument takes precedence.

    Args:
        step_setting: The step's argument `deterministic`.
        deterministic: The plan's `Options.deterministic`.
    """
    return (deterministic if step_setting is None else step_setting) is False


def describe_function(fn: Callable[..., Any]) -> str:
    """Return a short name for a function: its qualified name and line."""
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{name}:{code.co_firstlineno}" if code is not None else str(name)


def call_site(name: str | None = None) -> str:
    """Return "file:line" of the nearest caller outside this package.

    Args:
        name: Name that the user gave to the step, to be added in quotes.

    Raises:
        TypeError: If the name is not a str.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("headrace."):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    location = _format_location(frame.f_code.co_filename, frame.f_lineno)
    if name is None:
        return location
    check_string("name", name)
    return f'{location} "{name}"'


@functools.lru_cache(maxsize=1024)
def _format_location(filename: str, line: int) -> str:
    return f"{filename.rsplit('/', 1)[-1]}:{line}"


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Classification of the fields of one kind of step."""

    inputs: tuple[tuple[str, bool], ...]
    """Names of the input fields, and whether they hold several inputs."""
    parameters: tuple[str, ...]
    only_input: str | None
    """Name of the input field if the step has exactly one input."""


def _fields(kind: type[Node]) -> _Fields:
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = _inspect_fields(kind)
    return fields


def _inspect_fields(kind: type[Node]) -> _Fields:
    single_types, tuple_types = ("Node", Node), ("tuple[Node, ...]", tuple[Node, ...])
    fields = [
        field
        for field in dataclasses.fields(kind)
        if field.name not in _COMMON_FIELDS and field.metadata.get("is_parameter", True)
    ]
    input_types = single_types + tuple_types
    inputs = tuple((f.name, f.type in tuple_types) for f in fields if f.type in input_types)
    return _Fields(
        inputs,
        tuple(f.name for f in fields if f.type not in input_types),
        inputs[0][0] if len(inputs) == 1 and not inputs[0][1] else None,
    )


def _flatten_step(step: Node, step_numbers: dict[int, int]) -> tuple[type[Node], dict[str, Any]]:
    """Return a step as its class and fields, with inputs replaced by their list indices."""
    state = dict(step.__dict__)
    for name, is_tuple in _fields(type(step)).inputs:
        value = state[name]
        state[name] = [step_numbers[id(v)] for v in value] if is_tuple else step_numbers[id(value)]
    return type(step), state


def _rebuild_plan(flat_steps: list[tuple[type[Node], dict[str, Any]]]) -> Node:
    """Rebuild the plan that `Node.__reduce__` flattened."""
    steps: list[Node] = []
    for kind, state in flat_steps:
        for name, is_tuple in _fields(kind).inputs:
            value = state[name]
            state[name] = tuple(steps[number] for number in value) if is_tuple else steps[value]
        node = object.__new__(kind)
        node.__dict__.update(state)
        steps.append(node)
    return steps[-1]


def _format_argument(value: object) -> str:
    if callable(value):
        return describe_function(value)
    spec = getattr(value, "element_spec", None)
    if spec is not None:  # a source: its data would be too long
        return f"{type(value).__name__}[{getattr(value, 'size', '?')} x {spec!r}]"
    text = repr(value)
    return text if len(text) <= _MAX_ARGUMENT_LENGTH else f"{text[:_MAX_ARGUMENT_LENGTH]}..."


_FIELDS: dict[type[Node], _Fields] = {}
_COMMON_FIELDS = ("location", "number")
_MAX_ARGUMENT_LENGTH = 80
