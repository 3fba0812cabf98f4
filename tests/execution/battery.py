"""Checks that a pipeline continues with the same elements from every saved state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import headrace as hr
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError, UserFunctionError


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


def elements_of(iterator: hr.DatasetIterator, most: int) -> Iterator[Any]:
    """Yield up to `most` elements; elements whose function fails are skipped."""
    while most > 0:
        try:
            element = next(iterator)
        except StopIteration:
            return
        except (UserFunctionError, InvalidElementError):
            continue
        most -= 1
        yield element


def read_with_states(iterator: hr.DatasetIterator, most: int) -> tuple[list[Any], list[Any]]:
    """Return the elements, and the state before each and after the last."""
    elements, states = [], [saved(iterator)]
    for element in elements_of(iterator, most):
        elements.append(element)
        states.append(saved(iterator))
    return elements, states


def saved(iterator: hr.DatasetIterator) -> Any:
    """Return the iterator's state as it comes back from a file."""
    return json.loads(json.dumps(iterator.get_state()))


def assert_restores_everywhere(
    make: Callable[[], hr.Dataset],
    *,
    others: Sequence[Callable[[], hr.Dataset]] = (),
    most: int = 200,
    ordered: bool = True,
    seed: int = 0,
) -> list[Any]:
    """Read a dataset, then restore at every state and compare the rest.

    States are restored in random order: each into a fresh iterator, and into one that is used for
    all of them.

    Args:
        make: Makes the dataset.
        others: Make datasets that say the same and run otherwise; states fit these, too.
        most: Elements to read.
        ordered: Whether the elements come in the same order.
        seed: Of the order of the states.
    """
    with iter(make()) as iterator:
        elements, states = read_with_states(iterator, most)
    makers = [make, *others]
    used = [iter(maker()) for maker in makers]
    positions = list(range(len(states)))
    random.Random(seed).shuffle(positions)
    for turn, position in enumerate(positions):
        maker = turn % len(makers)
        with iter(makers[maker]()) as fresh:
            for restored in (fresh, used[maker]):
                # One more than there are, where the dataset was read to its end.
                rest, more = elements[position:], len(elements) < most
                _assert_same_rest(restored, states[position], rest, len(rest) + more, ordered)
    for iterator in used:
        iterator.close()
    return elements


def _assert_same_rest(
    restored: hr.DatasetIterator, state: Any, want: list[Any], count: int, ordered: bool
) -> None:
    restored.set_state(state)
    assert saved(restored) == state
    position = json.dumps(state["position"])
    got = list(elements_of(restored, count))
    if not ordered:
        got, want = sorted(got, key=repr), sorted(want, key=repr)
    assert len(got) == len(want), f"{len(got)} elements instead of {len(want)} from {position}"
    for number, (one, wanted) in enumerate(zip(got, want, strict=True)):
        assert equal(one, wanted), f"element {number} after {position}: {one!r} != {wanted!r}"
