"""Iterators of `random_map`: random words by element number, and calls with a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.metadata import element_numbers, without_element_numbers
from headrace.execution.context import Context
from headrace.execution.element_numbers import nest_ids
from headrace.execution.elementwise import MapIterator
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.plan.random_map import DrawRandomWords, RandomMap
from headrace.plan.random_words import derive_key, random_words
from headrace.plan.user_function import UserFunction, step_name

__all__ = ["DrawRandomWordsIterator", "GeneratorFunction"]

_MASK = (1 << 64) - 1


@make_iterator.register(DrawRandomWords)
class DrawRandomWordsIterator(ElementIterator):
    """Pairs each element with the random word of its element number, in this step and epoch."""

    def __init__(self, node: DrawRandomWords, context: Context) -> None:
        self._input = make_iterator(node.input, context.with_element_numbers(True))
        self._keeps_numbers = context.wants_element_numbers
        context, self._inner_epochs = context.outside_repeats(node.repeats_above)
        # The first number differs from those of other kinds of draws (`Context.entropy`).
        self._key = derive_key(
            [5, *context.entropy(node.number)]
            if node.seed is None
            else [6, node.seed & _MASK, *context.epochs]
        )

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._input.preferred_limit

    @property
    def available_elements(self) -> int:
        return self._input.available_elements

    @property
    def is_ready(self) -> bool:
        return self._input.is_ready

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        metadata = chunk.metadata
        assert metadata is not None
        numbers = element_numbers(metadata)
        assert numbers is not None
        for epoch in reversed(self._inner_epochs):  # as a `repeat` below this step would do
            numbers = nest_ids(np.array([epoch], np.uint64), numbers)
        words = random_words(self._key, numbers)
        if not self._keeps_numbers:
            metadata = without_element_numbers(metadata)
        if chunk.is_columnar:
            return Chunk.of_columns((chunk.columns(), words), chunk.size, chunk.states, metadata)
        pairs = list(zip(chunk.rows(), words, strict=True))
        return Chunk.of_rows(pairs, chunk.states, metadata)

    def get_state(self) -> State:
        return self._input.get_state()

    def set_state(self, state: State) -> None:
        self._input.set_state(state)

    def skip(self, count: int) -> int:
        return self._input.skip(count)

    def close(self) -> None:
        self._input.close()


@make_iterator.register(RandomMap)
def _make_random_map(node: RandomMap, context: Context) -> ElementIterator:
    call = GeneratorFunction(node.fn, step_name(node), context.contain_exits)
    if node.num_parallel_calls is None:
        return MapIterator(node, context, call)
    return ParallelMapIterator(node, context, call)


class GeneratorFunction(UserFunction):
    """A user's function of an element and a generator, called with an element and a random word."""

    __slots__ = ("_without_generator",)

    def __init__(self, fn: Callable[..., Any], step: str, contain_exits: bool) -> None:
        super().__init__(_with_generator(fn), step, contain_exits)
        self._without_generator = UserFunction(fn, step, contain_exits)

    def wrap_error(self, error: BaseException, position: int, *element: Any) -> Exception:
        elements = [pair[0] for pair in element]
        return self._without_generator.wrap_error(error, position, *elements)


def _with_generator(fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function that calls `fn` with a generator made from a random word.

    Creating a generator takes 15 µs, most of it for a seed that is replaced; setting the state of
    an existing one takes 2 µs. So generators are reused; there is one for each call in progress.
    """
    unused: list[_ReusableGenerator] = []  # several threads share it; pop and append are atomic

    def call(element: Any, word: Any) -> Any:
        try:
            reusable = unused.pop()
        except IndexError:
            reusable = _ReusableGenerator()
        rng = reusable.start_at(word)
        result = fn(*element, rng) if type(element) is tuple else fn(element, rng)
        unused.append(reusable)
        return result

    return call


class _ReusableGenerator:
    """A generator over Philox, which turns any two keys into independent streams."""

    __slots__ = ("_bits", "_generator", "_key", "_state")

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._key = self._state["state"]["key"]

    def start_at(self, word: Any) -> np.random.Generator:
        """Return the generator, at the start of the stream of this random word."""
        self._key[0] = word
        self._bits.state = self._state
        return self._generator
