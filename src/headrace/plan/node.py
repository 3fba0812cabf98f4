"""A plan node: a frozen record of one step, its inputs and what it does to spec and cardinality.

Rule 1. A node does nothing: it is built, looked at, rewritten, pickled.
Rule 2. A node's arguments are checked when it is made, in `__post_init__`.
Rule 3. A node is compared by identity; two plans that say the same have equal fingerprints.
Rule 4. What a rule or the executor has to know of a step, the step says in a class attribute:
        nobody lists kinds of steps elsewhere.
Rule 5. A plan may be thousands of steps deep and a step may stand in it several times: whoever
        walks a plan does so without recursion (`traverse`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

from headrace.arguments import check_flag, check_int
from headrace.element.spec import Spec

__all__ = ["AUTOTUNE", "Node", "call_site", "describe_function", "distinct", "is_free"]

AUTOTUNE = -1
"""Let Headrace choose: where tf.data takes `tf.data.AUTOTUNE`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Node:
    """One step of a plan."""

    kind: ClassVar[str] = ""
    """The step's name in saved states and errors. It is a format: never changed."""
    draws: ClassVar[bool] = False
    """Whether the step draws random numbers, or opens datasets that may."""
    one_to_one: ClassVar[bool] = False
    """Whether each element of the input gives one, in its place, made from that element alone."""
    keeps_count: ClassVar[bool] = False
    """Whether each element of the input gives one, in its place, whatever it is made from."""
    chooses: ClassVar[bool] = False
    """Whether the step chooses which elements of its input come, and when, without a look."""
    within_units: ClassVar[bool] = False
    """Whether what it gives of the elements of one unit (`rewrites.positions`) follows from those
    alone, whatever comes before, between and after them."""
    carries: ClassVar[bool] = False
    """Whether each of its elements is made from some of the input's, each of which goes into one or
    none: so that it has their origins (`rewrites.roots`)."""
    index_step: ClassVar[bool] = False
    """Whether the step is arithmetic on positions where its inputs are (`traverse.index_part`)."""
    reads_again: ClassVar[bool] = False
    """Whether a restore reads elements of the input again: they must come in the same order."""
    dealt_whole: ClassVar[bool] = False
    """Whether its inputs cannot be dealt apart, where they are no index part: whoever is dealt a
    plan with such a step reads all of it."""
    only_reads: ClassVar[bool] = False
    """Whether the step passes the elements of its input to no function of the user's, and writes
    into none, so that they may be memory that something below keeps (`traverse.lending_steps`)."""
    own_spec: ClassVar[bool] = False
    """Whether the spec follows from the step alone: `spec()` takes no inputs then."""
    is_transparent: ClassVar[bool] = False
    """Whether the elements are the input's, and only how fast or how it is run differs."""
    speed_only: ClassVar[tuple[str, ...]] = ()
    """Parameters that change how fast the elements come, and nothing else."""

    location: str = ""
    """The user's file and line that made it, for `explain` and errors."""
    number: int | None = None
    """Which of the steps that draw it is, on the plan as written; set by the normal form."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes whose elements this one takes."""
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

    def with_inputs(self, inputs: Sequence[Node]) -> Self:
        """Return a step like this one over other inputs, as many as it has."""
        rest = iter(inputs)
        changes: dict[str, Any] = {}
        for name, is_tuple in _fields(type(self)).inputs:
            old = self.__dict__[name]
            changes[name] = tuple(next(rest) for _ in old) if is_tuple else next(rest)
        return self._changed(changes)

    def over(self, inputs: Sequence[Node]) -> Self:
        """Return the same step over these inputs: itself, if it has them already."""
        old = self.inputs
        if len(old) == 1 and old[0] is inputs[0]:
            return self
        if all(new is one for new, one in zip(inputs, old, strict=True)):
            return self
        return self.with_inputs(inputs)

    def with_number(self, number: int | None) -> Self:
        """Return the same step with this number."""
        return self._changed({"number": number})

    def with_parameters(self, **changes: Any) -> Self:
        """Return the same step with these parameters, which are known to be right."""
        return self._changed(changes)

    def _changed(self, changes: dict[str, Any]) -> Self:
        # The arguments were checked when `self` was made.
        node = object.__new__(type(self))
        node.__dict__.update(self.__dict__)
        node.__dict__.update(changes)
        return node

    def keep_int(
        self, field: str, *, minimum: int, also: Sequence[int] = (), name: str = ""
    ) -> None:
        """Check an argument when the step is made, and keep it as an int of Python's own.

        Args:
            field: The field that holds it.
            minimum: The least that it may be.
            also: What else it may be.
            name: What users call it, if not as the field.
        """
        value = check_int(name or field, self.__dict__[field], minimum=minimum, also=also)
        object.__setattr__(self, field, value)

    def keep_calls(self, num_parallel_calls: int | None, deterministic: bool | None) -> None:
        """Check and keep the arguments of these names, of a step that may run on threads."""
        if num_parallel_calls is not None:
            self.keep_int("num_parallel_calls", minimum=1, also=(AUTOTUNE,))
        check_flag("deterministic", deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        """Return the element spec for inputs of these specs; None when only running can tell."""
        return inputs[0]

    def cardinality(self, *inputs: int) -> int:
        """Return the number of elements for inputs of these many (INFINITE, UNKNOWN or >= 0)."""
        return inputs[0]

    def unit_below(self, unit: int) -> int | None:
        """Return how many elements of the input go together, so that `unit` of this step's do.

        Whoever deals out a plan cuts its index part only between those, so that no batch is made
        by two. None: where the elements of the input end up does not follow from their positions.
        """
        return unit if self.keeps_count else None

    def frees_order(self, deterministic: bool | None) -> bool:
        """Say whether elements may come as they are ready, in an order that is not repeated.

        With threads they do. Without, the state has the same form, so that they can be added.

        Args:
            deterministic: The option of this name that holds for the plan.
        """
        return False

    def parameters(self) -> dict[str, Any]:
        """Return what distinguishes this step from another of its kind, without its inputs."""
        return {name: self.__dict__[name] for name in _fields(type(self)).parameters}

    def describe(self) -> str:
        """Return one line for `explain`: the step, its arguments, where the user wrote it."""
        arguments = ", ".join(
            f"{name}={_shown(value)}"
            for name, value in self.parameters().items()
            if value is not None
        )
        place = f"  # {self.location}" if self.location else ""
        return f"{type(self).__name__}({arguments}){place}"

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # As a list, each step after its inputs: pickle recurses, and plans are deep.
        steps = distinct([self])
        places = {id(step): place for place, step in enumerate(steps)}
        return _rebuild, ([_flat(step, places) for step in steps],)


def distinct(plans: Iterable[Node]) -> list[Node]:
    """Return each node of the plans once, after its inputs, left to right."""
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


def is_free(own: bool | None, deterministic: bool | None) -> bool:
    """Say whether the user wishes a step's order to be free: what the step says wins.

    Args:
        own: The step's argument `deterministic`.
        deterministic: The option of this name that holds for the plan.
    """
    return (deterministic if own is None else own) is False


def describe_function(fn: Callable[..., Any]) -> str:
    """Return a short name for a function: its qualified name, and where it was written."""
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{name}:{code.co_firstlineno}" if code is not None else str(name)


def call_site() -> str:
    """Return "file:line" of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("headrace."):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


@dataclasses.dataclass(frozen=True)
class _Fields:
    """What the fields of a kind of step hold."""

    inputs: tuple[tuple[str, bool], ...]
    """Names of those that hold inputs, and whether they hold several."""
    parameters: tuple[str, ...]
    only_input: str | None
    """Name of the field of the one input, if there is just one."""


def _fields(kind: type[Node]) -> _Fields:
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = _find_fields(kind)
    return fields


def _find_fields(kind: type[Node]) -> _Fields:
    one, several = ("Node", Node), ("tuple[Node, ...]", tuple[Node, ...])
    fields = [
        field
        for field in dataclasses.fields(kind)
        if field.name not in _EVERYWHERE and field.metadata.get("counts", True)
    ]
    inputs = tuple((f.name, f.type in several) for f in fields if f.type in one + several)
    return _Fields(
        inputs,
        tuple(f.name for f in fields if f.type not in one + several),
        inputs[0][0] if len(inputs) == 1 and not inputs[0][1] else None,
    )


def _flat(step: Node, places: dict[int, int]) -> tuple[type[Node], dict[str, Any]]:
    """Return a step as its class and its fields, with the inputs' places in their stead."""
    state = dict(step.__dict__)
    for name, is_tuple in _fields(type(step)).inputs:
        value = state[name]
        state[name] = [places[id(v)] for v in value] if is_tuple else places[id(value)]
    return type(step), state


def _rebuild(flat: list[tuple[type[Node], dict[str, Any]]]) -> Node:
    """Return the plan of `Node.__reduce__`."""
    steps: list[Node] = []
    for kind, state in flat:
        for name, is_tuple in _fields(kind).inputs:
            value = state[name]
            state[name] = tuple(steps[place] for place in value) if is_tuple else steps[value]
        node = object.__new__(kind)
        node.__dict__.update(state)
        steps.append(node)
    return steps[-1]


def _shown(value: object) -> str:
    if callable(value):
        return describe_function(value)
    spec = getattr(value, "element_spec", None)
    if spec is not None:  # a source: its data would fill the page
        return f"{type(value).__name__}[{getattr(value, 'size', '?')} x {spec!r}]"
    text = repr(value)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..."


_FIELDS: dict[type[Node], _Fields] = {}
_EVERYWHERE = ("location", "number")
_LONGEST_ARGUMENT = 80
