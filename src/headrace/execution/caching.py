"""The iterator of `cache`: elements are kept for the passes after the first."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.errors import FailedPreconditionError
from headrace.execution.cache_store import (
    FileFilling,
    FileStore,
    Filling,
    MemoryStore,
    Store,
    plan_cache,
)
from headrace.execution.context import Context, counters_of
from headrace.execution.dealt import as_first_pass
from headrace.execution.iterator import MOST_FAILURES, ElementIterator, State, make_iterator
from headrace.execution.places import of_positions
from headrace.plan.buffering import Cache
from headrace.plan.combined_sources import draws
from headrace.plan.identity import identity_digest
from headrace.plan.node import Node, distinct
from headrace.plan.traverse import is_index_part

__all__ = ["CacheIterator", "has_seed"]

_BLOCK = 1024
_SEED_BITS = 52


@make_iterator.register(Cache)
def _make_cache(node: Cache, context: Context) -> ElementIterator:
    if context.dealer is not None:
        # Who reads parts of the plan has no complete pass to keep.
        return make_iterator(node.input, as_first_pass(context, context.dealer))
    if context.unit_source is not None:
        # What a plan's other half makes has no identity here, nor a seed that could be decided.
        return make_iterator(node.input, context.in_first_pass())
    return CacheIterator(node, context)


class CacheIterator(ElementIterator):
    """Writes its input's first complete pass to a store; reads from the store ever after.

    What the store holds is the input's first pass under one seed, whichever pass this is, so that a
    cache that is filled again has the same elements. The state names that seed. A store with
    other elements is then left alone, and the elements are made again.
    """

    def __init__(self, node: Cache, context: Context) -> None:
        self._node = node
        self._context = context
        self._is_random = _draws(node.input)
        # What is the same under every seed has one place under every seed.
        self._own_seed = _seed_of(context) if self._is_random else 0
        self._identity = identity_digest(node.input) if node.filename else ""
        self._wants_places = context.wants_places
        self._lends = id(node) in context.lending
        #: Whether the store keeps no places: they follow from how many elements come before.
        self._has_positions = _has_positions(node.input)
        self._memory = plan_cache(node.key) if not node.filename else None
        self._reading: Store | None = None
        self._writing: Filling | None = None
        self._input: ElementIterator | None = None
        self._begin()

    @property
    def reads_ahead_freely(self) -> bool:
        if self._input is None:
            return self._reading is not None  # not known before it is open
        return self._input.reads_ahead_freely

    def _begin(self) -> None:
        self._count = 0  # elements that were yielded
        #: Of the elements; None: whatever the store holds, or our own.
        self._seed = self._context.cache_seeds.get(self._node.key)
        if self._context.fills_cache or self._context.outer:
            # A nested dataset draws from its place, whichever of them filled the cache.
            self._seed = self._own_seed
        self._has_failed = False  # an element of this pass has
        #: Where the input is to go on; None: it starts.
        self._place: State = None
        self._has_ended = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        if self._reading is None and self._input is None:
            self._open()
        first = self._count
        if self._reading is not None:
            read = self._reading.lend if self._lends else self._reading.read
            chunk = read(first, limit)
            if chunk is None:
                self._end()
                return None
            if self._wants_places and self._has_positions:
                chunk = chunk.with_places(of_positions(first, chunk.size))
            states = self._states_in_store(first)
        else:
            chunk = self._make(limit)
            if chunk is None:
                self._end()
                return None
            states = self._states_in_input(first, chunk.states)
        self._count += chunk.size
        if not self._wants_places:
            chunk = chunk.with_places(None)  # kept for others
        return chunk.with_states(states)

    def _end(self) -> None:
        self._stop()
        self._has_ended = True

    def _make(self, limit: int) -> Chunk | None:
        """Return the next elements of the input, and write them to the store."""
        assert self._input is not None
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            # Without this element the pass is not complete: another one may be.
            self._has_failed = True
            self._write_no_more()
            raise
        if self._writing is not None:
            if chunk is None:
                self._writing.complete()
            else:
                self._writing.append(chunk.with_places(None) if self._has_positions else chunk)
        return chunk

    def _open(self) -> None:
        """Begin to read the store, or to fill it; go on after the elements that were yielded."""
        store = self._find_store()
        if store is not None:
            if self._fits(store):
                self._reading = store
                self._decide(store.seed)
                return
            store.close()
        self._decide(self._own_seed if self._seed is None else self._seed)
        assert self._seed is not None
        if self._count and self._place is None and counters_of(self._node.input):
            raise FailedPreconditionError(
                "this state was saved while elements came from a cache() that is not here any "
                "more, and its input reads a named job of the data service, of which each "
                "iteration is read once: put `cache` before `distribute`, or leave out job_name"
            )
        context = dataclasses.replace(
            self._context.in_first_pass(),
            seed=self._seed,
            cache_seeds={},
            fills_cache=True,
            # Whoever reads the store may want them.
            wants_places=self._wants_places or not self._has_positions,
        )
        self._input = make_iterator(self._node.input, context)
        if self._place is not None:
            self._input.set_state(self._place)
        elif store is not None:
            self._input.skip(self._count)
        else:
            self._writing = (
                MemoryStore(self._memory, self._seed)
                if self._memory
                else FileFilling(self._node.path, self._seed, self._identity)
            )
            self._make_again(self._count)

    def _decide(self, seed: int) -> None:
        self._seed = self._context.cache_seeds[self._node.key] = seed

    def _find_store(self) -> Store | None:
        if self._memory:
            return self._memory.complete_store()
        return FileStore.find(self._node.path, self._identity)

    def _fits(self, store: Store) -> bool:
        """Say whether a store has the elements that are to come."""
        if self._seed is None:
            return True
        # A count of elements some of which had failed is no count of those in a store.
        return not self._has_failed and (store.seed == self._seed or not self._is_random)

    def _make_again(self, count: int) -> None:
        passed = failed = 0
        while passed < count:
            try:
                chunk = self._make(min(count - passed, _BLOCK))
            except Exception:
                failed += 1
                if failed > MOST_FAILURES + count:
                    raise
                continue
            if chunk is None:
                break
            passed += chunk.size

    # --- state ----------------------------------------------------------------------------------

    def _states_in_store(self, first: int) -> States:
        seed = self._seed
        return lambda index: _state(first + index, seed)

    def _states_in_input(self, first: int, places: States) -> States:
        seed, failed = self._seed, self._has_failed
        return lambda index: _state(first + index, seed, failed=failed, place=places(index))

    def get_state(self) -> State:
        place = self._place if self._input is None else self._input.get_state()
        if self._has_ended or self._reading is not None:
            place = None
        if self._seed is None:
            # A state names it, so whoever fills the store from now on does not matter.
            self._decide(self._seed_to_come())
        return _state(
            self._count,
            self._seed,
            failed=self._has_failed,
            place=place,
            ended=self._has_ended,
        )

    def _seed_to_come(self) -> int:
        """Return the seed of the elements, before it was decided by the first read."""
        store = self._find_store() if self._is_random else None
        if store is None:
            return self._own_seed
        store.close()
        return store.seed

    def set_state(self, state: State) -> None:
        self._stop()
        self._begin()
        self._count = state["count"]
        self._decide(state["seed"])
        self._has_failed, self._place = state["failed"], state.get("hint")
        self._has_ended = state["ended"]

    def _write_no_more(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self._writing = None

    def _stop(self) -> None:
        self._write_no_more()
        for held in (self._input, self._reading):
            if held is not None:
                held.close()
        self._input = self._reading = None

    def close(self) -> None:
        self._stop()
        self._has_ended = True


def _state(
    count: int,
    seed: int | None,
    *,
    failed: bool = False,
    place: State = None,
    ended: bool = False,
) -> dict[str, Any]:
    # Whether there is a place in the input depends on who filled the store: it only saves time.
    return {"count": count, "seed": seed, "failed": failed, "hint": place, "ended": ended}


def _seed_of(context: Context) -> int:
    """Return the seed of what a cache holds: its passes are left out of it.

    In a nested dataset it is one for each place where that was opened.
    """
    if not context.outer:
        return context.seed
    passes = context.passes[: context.outer_passes]
    names = f"{context.seed} {context.outer} {passes}"
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def has_seed(plan: Node) -> bool:
    """Say whether the elements of a plan depend on the seed of what a cache in it holds."""
    return any(isinstance(node, Cache) and _draws(node.input) for node in distinct([plan]))


def _has_positions(plan: Node) -> bool:
    """Say whether each element of a plan is one of an index part, in its place."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return is_index_part(plan)


def _draws(plan: Node) -> bool:
    """Say whether the elements of a plan depend on its seed."""
    return any(
        draws(node) or (node.draws and getattr(node, "seed", None) is None)
        for node in distinct([plan])
    )
