"""Iterator of `cache`: stores elements in the first epoch for later ones."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.errors import FailedPreconditionError
from headrace.execution.assigned_iterators import as_first_epoch
from headrace.execution.cache_store import (
    ElementStore,
    FileStore,
    FileStoreWriter,
    MemoryStore,
    StoreWriter,
    memory_cache,
)
from headrace.execution.context import Context, count_counters
from headrace.execution.element_numbers import number_positions
from headrace.execution.iterator import MAX_FAILURES, ElementIterator, State, make_iterator
from headrace.plan.buffering import Cache
from headrace.plan.combined_sources import reads_unresolved_source
from headrace.plan.identity import identity_digest
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.traverse import is_index_plan
from headrace.plan.user_function import step_name

__all__ = ["CacheIterator", "depends_on_seed"]

_BLOCK = 1024
_SEED_BITS = 52


@make_iterator.register(Cache)
def _make_cache(node: Cache, context: Context) -> ElementIterator:
    if context.split_provider is not None:
        # Readers of parts of the plan have no complete epoch to store.
        return make_iterator(node.input, as_first_epoch(context, context.split_provider))
    if context.split_source is not None:
        # The elements of the worker stage have no identity here, and no known seed.
        return make_iterator(node.input, context.in_first_epoch())
    return CacheIterator(node, context)


class CacheIterator(ElementIterator):
    """Writes its input's first complete epoch to a store, and reads from the store afterwards.

    The store contains the input's epoch 0 under one seed, whatever the current epoch, so that a
    refilled cache has the same elements. The state contains that seed. A store with other elements
    is not used then, and the elements are computed again.
    """

    def __init__(self, node: Cache, context: Context) -> None:
        self._node = node
        self._context = context
        self._is_random = _is_random(node.input)
        # Elements that do not depend on the seed have the same states under every seed.
        self._own_seed = _seed_of(context) if self._is_random else 0
        self._identity = identity_digest(node.input) if node.filename else ""
        self._wants_element_numbers = context.wants_element_numbers
        self._borrows = id(node) in context.borrowing_steps
        #: Whether the store omits element numbers, because they equal the elements' positions.
        self._has_positions = _is_positional(node.input)
        self._memory = memory_cache(node.key) if not node.filename else None
        self._store: ElementStore | None = None
        self._writer: StoreWriter | None = None
        self._input: ElementIterator | None = None
        self._reset()

    @property
    def can_read_ahead(self) -> bool:
        if self._input is None:
            return self._store is not None  # not known before it is open
        return self._input.can_read_ahead

    def _reset(self) -> None:
        self._count = 0  # elements that were yielded
        #: Seed of the elements; None accepts the store's seed, or uses the context's.
        self._seed = self._context.cache_seeds.get(self._node.key)
        if self._context.fills_cache or self._context.outer_steps:
            # A nested dataset draws from its element number, whichever dataset filled the cache.
            self._seed = self._own_seed
        self._has_failed = False  # whether an element of this epoch failed
        #: State to restore in the input; None starts at its beginning.
        self._position: State = None
        self._has_ended = False
        #: Elements that could not be stored, and are next.
        self._unstored: Chunk | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        if self._store is None and self._input is None:
            self._open()
        first = self._count
        if self._store is not None:
            read = self._store.read_borrowed if self._borrows else self._store.read
            chunk = read(first, limit)
            if chunk is None:
                self._end()
                return None
            if self._wants_element_numbers and self._has_positions:
                chunk = chunk.with_metadata(number_positions(first, chunk.size))
            states = self._states_in_store(first)
        else:
            chunk = self._read_input(limit)
            if chunk is None:
                self._end()
                return None
            states = self._states_in_input(first, chunk.states)
        self._count += chunk.size
        if not self._wants_element_numbers:
            chunk = chunk.with_metadata(None)  # stored for other readers only
        return chunk.with_states(states)

    def _end(self) -> None:
        self._stop()
        self._has_ended = True

    def _read_input(self, limit: int) -> Chunk | None:
        """Return the next elements of the input, and write them to the store."""
        assert self._input is not None
        if self._unstored is not None:
            unstored = self._unstored
            fits = unstored.size <= limit
            self._unstored = None if fits else unstored.slice(limit, unstored.size)
            return unstored if fits else unstored.slice(0, limit)
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            # Without this element the epoch is incomplete; a later epoch may be complete.
            self._has_failed = True
            self._stop_writing()
            raise
        if self._writer is not None:
            try:
                if chunk is None:
                    self._writer.complete()
                else:
                    self._writer.append(chunk.with_metadata(None) if self._has_positions else chunk)
            except OSError as error:
                self._unstored = chunk
                self._stop_writing()
                raise FailedPreconditionError(
                    f"{step_name(self._node)} cannot write '{self._node.path}': "
                    f"{error.strerror or error}; if you continue to read, this epoch is not stored"
                ) from error
        return chunk

    def _open(self) -> None:
        """Open the store, or start filling it; continue after the elements already yielded."""
        store = self._find_store()
        if store is not None:
            if self._is_usable(store):
                self._store = store
                self._fix_seed(store.seed)
                return
            store.close()
        self._fix_seed(self._own_seed if self._seed is None else self._seed)
        assert self._seed is not None
        if self._count and self._position is None and count_counters(self._node.input):
            raise FailedPreconditionError(
                "the state was saved while a cache() supplied the elements, but that cache no "
                "longer exists, and each iteration of the job that its input reads from the "
                "data service can be read only once; put `cache` before `distribute`, or omit "
                "job_name"
            )
        context = dataclasses.replace(
            self._context.in_first_epoch(),
            seed=self._seed,
            cache_seeds={},
            fills_cache=True,
            # Later readers of the store may need them.
            wants_element_numbers=self._wants_element_numbers or not self._has_positions,
        )
        self._input = make_iterator(self._node.input, context)
        if self._position is not None:
            self._input.set_state(self._position)
        elif store is not None:
            self._input.skip(self._count)
        else:
            self._writer = (
                MemoryStore(self._memory, self._seed)
                if self._memory
                else FileStoreWriter(self._node.path, self._seed, self._identity, self._node.kind)
            )
            self._recompute(self._count)

    def _fix_seed(self, seed: int) -> None:
        self._seed = self._context.cache_seeds[self._node.key] = seed

    def _find_store(self) -> ElementStore | None:
        if self._memory:
            return self._memory.complete_store()
        return FileStore.find(self._node.path, self._identity, self._node.kind)

    def _is_usable(self, store: ElementStore) -> bool:
        """Return whether a store contains the elements that come next."""
        if self._seed is None:
            return True
        # If elements failed, the count does not correspond to positions in a store.
        return not self._has_failed and (store.seed == self._seed or not self._is_random)

    def _recompute(self, count: int) -> None:
        num_read = num_failed = 0
        while num_read < count:
            try:
                chunk = self._read_input(min(count - num_read, _BLOCK))
            except Exception:
                num_failed += 1
                if num_failed > MAX_FAILURES + count:
                    raise
                continue
            if chunk is None:
                break
            num_read += chunk.size

    # --- state ----------------------------------------------------------------------------------

    def _states_in_store(self, first: int) -> States:
        seed = self._seed
        return lambda index: _state(first + index, seed)

    def _states_in_input(self, first: int, input_states: States) -> States:
        seed, failed = self._seed, self._has_failed
        return lambda index: _state(
            first + index, seed, failed=failed, input_state=input_states(index)
        )

    def get_state(self) -> State:
        input_state = self._position if self._input is None else self._input.get_state()
        if self._unstored is not None:
            input_state = self._unstored.state_at(0)
        if self._has_ended or self._store is not None:
            input_state = None
        if self._seed is None:
            # Fix the seed, so that the state stays valid if another iterator fills the store later.
            self._fix_seed(self._upcoming_seed())
        return _state(
            self._count,
            self._seed,
            failed=self._has_failed,
            input_state=input_state,
            ended=self._has_ended,
        )

    def _upcoming_seed(self) -> int:
        """Return the seed that the first read would decide on."""
        store = self._find_store() if self._is_random else None
        if store is None:
            return self._own_seed
        store.close()
        return store.seed

    def set_state(self, state: State) -> None:
        self._stop()
        self._reset()
        self._count = state["count"]
        self._fix_seed(state["seed"])
        self._has_failed, self._position = state["failed"], state.get("hint")
        self._has_ended = state["ended"]

    def _stop_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _stop(self) -> None:
        self._stop_writing()
        for resource in (self._input, self._store):
            if resource is not None:
                resource.close()
        self._input = self._store = None

    def close(self) -> None:
        self._stop()
        self._has_ended = True


def _state(
    count: int,
    seed: int | None,
    *,
    failed: bool = False,
    input_state: State = None,
    ended: bool = False,
) -> dict[str, Any]:
    # The input's state is only present if this iterator fills the store: it only saves time.
    return {"count": count, "seed": seed, "failed": failed, "hint": input_state, "ended": ended}


def _seed_of(context: Context) -> int:
    """Return the seed of a cache's contents, which does not depend on the epochs.

    A nested dataset has a different seed for each outer element.
    """
    if not context.outer_steps:
        return context.seed
    epochs = context.epochs[: context.num_outer_epochs]
    label = f"{context.seed} {context.outer_steps} {epochs}"
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def depends_on_seed(plan: Node) -> bool:
    """Return whether elements of a plan depend on the seed of a cache's contents."""
    return any(
        isinstance(node, Cache) and _is_random(node.input) for node in distinct_nodes([plan])
    )


def _is_positional(plan: Node) -> bool:
    """Return whether each element of a plan is an element of an index plan at the same position."""
    while plan.one_to_one:
        (plan,) = plan.inputs
    return is_index_plan(plan)


def _is_random(plan: Node) -> bool:
    """Return whether the elements of a plan depend on its seed."""
    return any(
        reads_unresolved_source(node) or (node.is_random and getattr(node, "seed", None) is None)
        for node in distinct_nodes([plan])
    )
