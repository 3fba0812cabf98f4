"""Iterator of `unique`: remembers the keys of the elements yielded so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.keys import ElementKeys
from headrace.errors import DataLossError
from headrace.execution.context import Context
from headrace.execution.input_buffer import InputBuffer, LazyRowStream
from headrace.execution.iterator import ElementIterator, LazyRows, State, make_iterator
from headrace.plan.unique import Unique
from headrace.plan.user_function import step_name

__all__ = ["UniqueIterator"]

_MAX_READ_AT_ONCE = 1024


@make_iterator.register(Unique)
class UniqueIterator(ElementIterator):
    """Yields the elements that are not equal to an earlier one.

    The state holds no keys: it is the input's state at the start, and how many elements were read
    and have failed since. A restore reads them again and computes their keys.
    """

    def __init__(self, node: Unique, context: Context) -> None:
        self._step = step_name(node)
        self._input_buffer = InputBuffer(make_iterator(node.input, context))
        self.has_lazy_rows: bool = self._input_buffer.input.has_lazy_rows
        self._start_state: State = None
        self._has_started = False
        self._reset()

    @property
    def can_read_ahead(self) -> bool:
        return self._input_buffer.input.can_read_ahead

    def _reset(self) -> None:
        self._element_keys = ElementKeys()
        self._seen: set[bytes] = set()
        self._num_read = 0
        self._num_failed = 0
        self._keys: list[bytes] = []  # of the buffered chunk
        self._keyed_chunk: Chunk | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        self._start()
        while True:
            try:
                chunk = self._input_buffer.peek_ahead(limit)
            except Exception:
                self._num_failed += 1
                raise
            if chunk is None:
                return None
            start, num_read = self._input_buffer.offset, self._num_read
            indices = self._take_new(chunk, limit)
            if indices:
                states = self._states([num_read + index - start for index in indices])
                first, stop = indices[0], indices[-1] + 1
                are_all = stop - first == len(indices)
                found = chunk.slice(first, stop) if are_all else chunk.take(indices)
                return found.with_states(states)

    def _start(self) -> None:
        """Save the input's state before its first element."""
        if not self._has_started:
            self._has_started, self._start_state = True, self._input_buffer.get_state()

    def _take_new(self, chunk: Chunk, limit: int) -> list[int]:
        """Consume elements of the buffered chunk; return the indices of up to `limit` new ones."""
        start = self._input_buffer.offset
        if self._keyed_chunk is not chunk:
            # Elements before the offset need no keys.
            unused = [b""] * start
            self._keys = unused + self._element_keys.of_chunk(chunk, start)
            self._keyed_chunk = chunk
        seen, indices, index = self._seen, list[int](), start
        for index in range(start, chunk.size):
            key = self._keys[index]
            if key not in seen:
                seen.add(key)
                indices.append(index)
                if len(indices) == limit:
                    break
        count = index + 1 - start
        self._input_buffer.consume(count)
        self._num_read += count
        if self._input_buffer.chunk is None:
            self._keyed_chunk, self._keys = None, []
        return indices

    def lazy_rows(self) -> LazyRows | None:
        self._start()
        try:
            stream = self._input_buffer.lazy_rows()
        except Exception:
            self._num_failed += 1
            raise
        if stream is None:
            return None
        num_failed, start_state = self._num_failed, self._start_state
        after = [self._num_read]  # input elements read up to each element

        def states_at(index: int) -> State:
            # Before an element that is not found yet, the position is after the previous one.
            found = index + 1 < len(after)
            return _state(after[index + 1] - 1 if found else after[index], num_failed, start_state)

        return self._new_rows(stream, after), states_at

    def _new_rows(self, stream: LazyRowStream, after: list[int]) -> Iterator[Any]:
        key_of, seen = self._element_keys.of_element, self._seen
        try:
            for row in stream.rows:
                self._num_read += 1
                key = key_of(row)
                if key not in seen:
                    seen.add(key)
                    after.append(self._num_read)
                    yield row
        except Exception:
            self._num_failed += 1
            self._input_buffer.end_lazy_rows()
            raise
        self._input_buffer.end_lazy_rows()

    # --- state ----------------------------------------------------------------------------------

    def _states(self, counts: list[int]) -> States:
        """Return the states before elements with `counts` input elements before them."""
        counts = [*counts, self._num_read]
        num_failed, start_state = self._num_failed, self._start_state
        return lambda index: _state(counts[index], num_failed, start_state)

    def get_state(self) -> State:
        self._start()
        return _state(self._num_read, self._num_failed, self._start_state)

    def set_state(self, state: State) -> None:
        self._input_buffer.set_state(state["input"])
        self._has_started, self._start_state = True, state["input"]
        self._reset()
        num_read, num_failed = state["num_read"], state["failed"]
        while self._num_read < num_read or self._num_failed < num_failed:
            remaining = num_read - self._num_read
            try:
                chunk = self._input_buffer.peek(max(1, min(remaining, _MAX_READ_AT_ONCE)))
            except Exception:
                self._num_failed += 1
                if self._num_failed > num_failed:
                    raise
                continue
            if chunk is None:
                raise DataLossError(
                    f"the input of {self._step} has fewer elements than when the state was saved; "
                    "restore the state with the same data"
                )
            if remaining <= 0:  # it did not fail this time, so this is the next element
                self._num_failed = num_failed
                break
            self._seen.update(self._element_keys.of_chunk(chunk))
            self._input_buffer.consume(chunk.size)
            self._num_read += chunk.size

    def close(self) -> None:
        self._reset()
        self._input_buffer.close()


def _state(num_read: int, num_failed: int, start_state: State) -> State:
    return {"num_read": num_read, "failed": num_failed, "input": start_state}
