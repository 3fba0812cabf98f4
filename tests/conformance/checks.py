"""Checks of one dataset, made again for each read: here and with a data service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.structure import flatten
from headrace.errors import HeadraceError
from headrace.service import ShardingPolicy, distribute
from tests.conformance.steps import SameAs
from tests.execution.battery import assert_restores_everywhere, elements_of, equal, saved
from tests.execution.contract import plain

MODES = ("OFF", "DYNAMIC", "ordered")

Make = Callable[[], hr.Dataset[Any]]


def assert_elements_are_owned(make: Make) -> None:
    """Write into each array once it was yielded; no other element and no later epoch changes."""
    dataset = make()
    expected = [plain(element) for element in dataset]
    for _ in range(2):
        found = []
        for element in make():
            found.append(plain(element))
            arrays = [leaf for leaf in flatten(element)[0] if isinstance(leaf, np.ndarray)]
            for number, array in enumerate(arrays):
                others = [each.copy() for each in arrays[number + 1 :]]
                array[...] = np.ones((), array.dtype) if array.dtype.kind in "biufc" else "!"
                assert all(map(np.array_equal, arrays[number + 1 :], others))
        assert found == expected


def assert_same_with_threads(make: Make, *others: Make, ordered: bool = True) -> None:
    """Compare datasets that differ in threads only; the states of each restore in the others."""
    expected = assert_restores_everywhere(make, others=others, ordered=ordered)
    for other in others:
        with iter(other()) as iterator:
            found = list(elements_of(iterator, len(expected) + 1))
        assert same_elements(found, expected, ordered)


def same_elements(found: list[Any], expected: list[Any], ordered: bool) -> bool:
    if not ordered:
        found, expected = (sorted(each, key=repr) for each in (found, expected))
    return len(found) == len(expected) and all(map(equal, found, expected))


def assert_conforms_with_service(
    make: Make, service: str, dynamic: SameAs, refused: Mapping[str, str], ordered: bool = True
) -> None:
    """Read with OFF, DYNAMIC and in order, and compare with one process.

    Args:
        make: Makes the dataset.
        service: Address of a service with two workers.
        dynamic: What DYNAMIC sharding has in common with one process.
        refused: Parts of the messages of the modes that refuse it.
        ordered: Whether the dataset has an order.
    """
    expected = list(make())
    for mode in MODES:
        policy = ShardingPolicy.OFF if mode == "OFF" else ShardingPolicy.DYNAMIC
        share = distribute(policy, service, ordered=mode == "ordered", wait_timeout=20)
        if mode in refused:
            with pytest.raises(HeadraceError, match=refused[mode]):
                make().apply(share)
            continue
        found = list(make().apply(share))
        if mode == "OFF":
            assert counted(found) == counted(expected * 2), mode
        elif mode == "ordered":
            assert same_elements(found, expected, ordered), (found, expected)
            _assert_restores_in_order(make().apply(share), expected, ordered)
        elif dynamic == "elements":
            assert counted(found) == counted(expected), mode
        elif dynamic in ("rows", "tokens"):
            assert numbers_in(found, dynamic) == numbers_in(expected, dynamic), mode
        elif dynamic == "count":
            assert len(found) == len(expected), (found, expected)
        assert {kind_of(element) for element in found} <= {kind_of(each) for each in expected}


def _assert_restores_in_order(dataset: hr.Dataset[Any], expected: list[Any], ordered: bool) -> None:
    states = []
    with iter(dataset) as iterator:
        for _ in expected:
            states.append(saved(iterator))
            next(iterator)
        states.append(saved(iterator))
    with iter(dataset) as fresh, iter(dataset) as used:
        for iterator, position in (
            (fresh, len(expected) // 3),
            (used, len(expected)),
            (used, 2 * len(expected) // 3),
        ):
            iterator.set_state(states[position])
            assert saved(iterator) == states[position]
            found = list(iterator)
            if ordered:
                assert same_elements(found, expected[position:], True), (position, found)
            else:
                assert len(found) == len(expected) - position


def counted(elements: Iterable[Any]) -> Counter[str]:
    return Counter(repr(plain(element)) for element in elements)


def numbers_in(elements: Iterable[Any], what: SameAs) -> Counter[Any]:
    """Count the numbers in all elements, except zeros, which pad them."""
    found: Counter[Any] = Counter()
    for element in elements:
        for leaf in flatten(element["tokens"] if what == "tokens" else element)[0]:
            found.update(x for x in np.ravel(leaf).tolist() if x)
    return found


def kind_of(element: Any) -> str:
    """Return the structure and dtypes of an element."""
    leaves, structure = flatten(element)
    return f"{structure} {[str(getattr(leaf, 'dtype', type(leaf))) for leaf in leaves]}"
