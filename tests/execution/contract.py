"""Contract of all iterators: any chunk sizes, any state, restored in used and in new iterators.

An outcome is an element or the class of an error; errors stand where they were raised.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, LazyRows, State
from headrace.plan.node import Node

Outcome = Any


class ListIterator(ElementIterator):
    """Yields the entries of a list and raises those that are errors. Its state is an index."""

    can_read_ahead = True

    def __init__(self, entries: list[Any], *, reads_ahead_freely: bool = True) -> None:
        self.entries = entries
        self.can_read_ahead = reads_ahead_freely
        self.at = 0
        self.most_asked = 0
        self.passed_over = 0
        self.is_closed = False

    def next_chunk(self, limit: int) -> Chunk | None:
        assert limit >= 1
        self.most_asked = max(self.most_asked, limit)
        if self.at >= len(self.entries):
            return None
        start, rows = self.at, []
        while self.at < len(self.entries) and len(rows) < limit:
            entry = self.entries[self.at]
            if isinstance(entry, BaseException):
                if rows:
                    break
                self.at += 1
                raise entry
            rows.append(entry)
            self.at += 1
        return Chunk.of_rows(rows, lambda index: start + index)

    def skip(self, count: int) -> int:
        before = self.at
        passed = super().skip(count)
        self.passed_over += self.at - before
        return passed

    def get_state(self) -> State:
        return self.at

    def set_state(self, state: State) -> None:
        self.at = state

    def close(self) -> None:
        self.is_closed = True


def with_input(node: Node, input_: ElementIterator, context: Context) -> Context:
    """Return a context in which this iterator is the only input of a step."""
    (replaced,) = node.inputs
    return dataclasses.replace(
        context, instrument=lambda step, made: input_ if step is replaced else made
    )


def plain(element: Any) -> Any:
    """Return an element as a value that can be compared."""
    leaves, structure = flatten(element)
    return repr(structure), [
        (str(leaf.dtype), leaf.tolist()) if isinstance(leaf, np.ndarray | np.generic) else leaf
        for leaf in leaves
    ]


def copied(state: State) -> State:
    """Return a state as it is after having been saved."""
    return json.loads(json.dumps(state))


def read(
    iterator: ElementIterator, chance: random.Random, most: int, largest: int = 9
) -> tuple[list[Outcome], list[list[State]]]:
    """Read in chunks of random size, and sometimes single elements.

    Returns:
        Outcomes, and for each, and for after the last, the states that lead there.
    """
    outcomes: list[Outcome] = []
    states: list[list[State]] = [[copied(iterator.get_state())]]
    while len(outcomes) < most:
        limit = 1 if chance.random() < 0.3 else chance.randint(1, largest)
        try:
            if limit == 1:
                singles = iterator.lazy_rows()
                if singles is not None:
                    _read_singles(singles, outcomes, states, most)
                    continue
            are_needed = chance.random() < 0.5
            chunk = (iterator.next_needed_chunk if are_needed else iterator.next_chunk)(limit)
        except Exception as error:
            outcomes.append(type(error).__name__)
            states.append([copied(iterator.get_state())])
            continue
        if chunk is None:
            assert iterator.next_chunk(3) is None
            assert iterator.lazy_rows() is None
            states[-1].append(copied(iterator.get_state()))
            break
        assert 1 <= chunk.size <= limit
        outcomes += [plain(row) for row in chunk.rows()]
        positions = [copied(chunk.state_at(index)) for index in range(chunk.size + 1)]
        states[-1].append(positions[0])
        states += [[position] for position in positions[1:]]
        if chance.random() < 0.5:  # not needed
            states[-1].append(copied(iterator.get_state()))
    return outcomes, states


def _read_singles(
    singles: LazyRows, outcomes: list[Outcome], states: list[list[State]], most: int
) -> None:
    """Read single elements to their end, or up to a number of elements."""
    rows, at = singles
    states[-1].append(copied(at(0)))
    for count, row in enumerate(rows, 1):
        outcomes.append(plain(row))
        states.append([copied(at(count))])
        if len(outcomes) >= most:
            break


def assert_keeps_contract(
    make: Callable[[], ElementIterator],
    seed: int,
    *,
    most: int = 60,
    restores: int = 12,
    largest: int = 9,
) -> list[Outcome]:
    """Read, then go to states in random order, in used and in new iterators; compare the rest."""
    chance = random.Random(seed)
    first = make()
    outcomes, states = read(first, chance, most, largest)
    used = first
    try:
        for _ in range(restores):
            position = chance.randrange(len(states))
            state = chance.choice(states[position])
            if chance.random() < 0.3:
                used.close()
                used = make()
            used.set_state(state)
            assert copied(used.get_state()) == state
            if chance.random() < 0.3:
                used.set_state(copied(used.get_state()))
            want = outcomes[position:]
            if chance.random() < 0.5:
                want = want[: chance.randint(0, 10)]
            rest, _ = read(used, chance, len(want), largest)
            assert rest[: len(want)] == want, f"{seed=}, {position=}, {state=}"
            if len(want) == len(outcomes) - position and len(outcomes) < most:
                assert rest == want, f"{seed=}, {position=}, {state=}"
    finally:
        used.close()
        first.close()
    return outcomes


def outcomes(dataset: Iterable[Any]) -> list[Any]:
    """Return the elements as Python values, and errors as (type, position) or by their texts."""
    found: list[Any] = []
    with iter(dataset) as iterator:  # type: ignore[attr-defined]
        while True:
            try:
                found.append(np.asarray(next(iterator)).tolist())
            except StopIteration:
                return found
            except UserFunctionError as error:
                found.append((error.original_type, error.position))
            except InvalidElementError as error:
                found.append(str(error))
