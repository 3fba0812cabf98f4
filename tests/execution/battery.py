"""What every pipeline must keep: the same elements from every state that can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace as hr
from headrace.element.tree import flatten


def equal(a: Any, b: Any) -> bool:
    """Whether two elements are the same: structure, dtypes, shapes and values."""
    leaves_a, structure_a = flatten(a)
    leaves_b, structure_b = flatten(b)
    return structure_a == structure_b and all(
        type(x) is type(y)
        and (x.dtype == y.dtype and x.shape == y.shape if hasattr(x, "dtype") else True)
        and np.array_equal(x, y)
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def read_with_states(iterator: hr.DatasetIterator, most: int) -> tuple[list[Any], list[Any]]:
    """Return the elements, and the state before each and behind the last."""
    elements, states = [], [json.loads(json.dumps(iterator.get_state()))]
    for element in iterator:
        elements.append(element)
        states.append(json.loads(json.dumps(iterator.get_state())))
        if len(elements) == most:
            break
    return elements, states


def assert_restores_everywhere(
    make: Callable[[], hr.Dataset], *, most: int = 200, every: int = 1, ordered: bool = True
) -> list[Any]:
    """Read a dataset, then restore a fresh one at every state and compare the rest."""
    with iter(make()) as iterator:
        elements, states = read_with_states(iterator, most)
    for position in range(0, len(states), every):
        with iter(make()) as restored:
            restored.set_state(states[position])
            rest = [element for element, _ in zip(restored, elements[position:], strict=False)]
            if len(elements) < most:
                assert next(restored, None) is None, f"too many elements from {position}"
        want = elements[position:]
        if not ordered:
            rest, want = sorted(rest, key=repr), sorted(want, key=repr)
        assert len(rest) == len(want), f"{len(rest)} elements from state {position}: {want=}"
        for number, (got, wanted) in enumerate(zip(rest, want, strict=True)):
            assert equal(got, wanted), f"state {position}, element {number}: {got!r} != {wanted!r}"
    return elements
