"""Iterator of `scan`: a function of a carried value and each element.

The function owns its arguments, including the value: it may modify, keep or return them. So it gets
a copy, and the value kept here is never modified: a state that contains it is a snapshot.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.description import (
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.ownership import copy_element, take_ownership
from headrace.element.structure import Element, flatten, unflatten
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.input_buffer import LazyRowStream
from headrace.execution.iterator import LazyRows, State, make_iterator
from headrace.execution.step_iterator import RowStepIterator
from headrace.plan.elementwise import Scan
from headrace.plan.user_function import UserFunction, step_name

__all__ = [
    "ScanIterator",
    "decode_value",
    "encode_value",
]

_MAX_STATE_BYTES = 1 << 20
"""Maximum total bytes of the values before the elements of one chunk."""


@make_iterator.register(Scan)
class ScanIterator(RowStepIterator):
    """Carries a value from element to element; the state contains the current value.

    If the function fails for an element, the value is unchanged.
    """

    has_lazy_rows = True

    def __init__(self, node: Scan, context: Context) -> None:
        call = UserFunction(node.fn, step_name(node), context.contain_exits)
        super().__init__(make_iterator(node.input, context), call)
        #: Value before the next element; not shared, never modified.
        self._value = node.initial_state

    def step(self, row: Any) -> Any:
        # `take_ownership` ensures that only the function's result refers to the copy.
        result = take_ownership(self.call.fn(copy_element(self._value), row))
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidElementError(
                f"`scan_func` must return a tuple (new_state, output_element), but returned "
                f"{type(result).__name__}"
                f"{f' of {len(result)}' if isinstance(result, tuple) else ''}"
            )
        if result[1] is None:
            raise InvalidElementError(
                "`scan_func` returned None as the output element; return an element"
            )
        self._value = result[0]
        return result[1]

    def _apply_to_rows(self, chunk: Chunk, limit: int) -> Chunk | None:
        start = self._input_buffer.offset
        remaining_bytes = _MAX_STATE_BYTES
        results: list[Any] = []
        values = [self._value]
        try:
            for row in chunk.rows()[start : start + limit]:
                results.append(self.step(row))
                values.append(self._value)
                remaining_bytes -= _bytes_of(self._value) + 1
                if remaining_bytes <= 0:
                    break
        except BaseException as error:
            self._defer_error(error, chunk, start + len(results))
        self._consume(len(results))
        if not results:
            return None
        states = chunk.states
        return Chunk.of_rows(
            results,
            lambda index: _state(values[index], states(start + index)),
            chunk.slice_compact_metadata(start, start + len(results)),
        )

    def lazy_rows(self) -> LazyRows | None:
        if self._pending_error is not None:
            return super().lazy_rows()
        stream = self._input_buffer.lazy_rows()
        if stream is None:
            return None
        states, values = stream.states, [self._value]
        return self._scan_rows(stream, values), lambda index: _state(values[index], states(index))

    def _scan_rows(self, lazy_rows: LazyRowStream, values: list[Element]) -> Iterator[Any]:
        """Yield the results for lazy rows; append the value after each to `values`."""
        step, count, start = self.step, 0, lazy_rows.num_taken
        remaining_bytes = _MAX_STATE_BYTES
        try:
            for count, row in enumerate(lazy_rows.rows, 1):
                try:
                    result = step(row)
                except BaseException as error:
                    failure = self._wrap_row_error(error, lazy_rows, count, row)
                    raise failure from failure.__cause__
                values.append(self._value)
                yield result
                remaining_bytes -= _bytes_of(self._value) + 1
                if remaining_bytes <= 0:
                    break
        except Exception:
            self._record_row_error(lazy_rows, start, count)
            raise
        if remaining_bytes > 0:
            self._record_rows(count)
        else:
            self._rows_seen += count
            lazy_rows.num_taken += count

    def get_state(self) -> State:
        return _state(self._value, self._input_buffer.get_state())

    def set_state(self, state: State) -> None:
        super().set_state(state["input"])
        self._value = decode_value(state["value"])


def _state(value: Element, input_state: State) -> State:
    return {"value": encode_value(value), "input": input_state}


def _bytes_of(value: Element) -> int:
    nbytes = getattr(value, "nbytes", None)
    if nbytes is not None:
        return int(nbytes)
    return sum([getattr(leaf, "nbytes", 8) for leaf in flatten(value)[0]])


# --- User values in states: elements as JSON, restored bit for bit --------------------------------
#
#     [structure, [leaf, ...]]     structure as in `element.description`
#     leaf: "text"                 str
#           {"b": base64}          bytes
#           {"d": dtype, "v": base64}                 a NumPy scalar
#           {"d": dtype, "s": shape, "v": base64}     an array in C order
#           {"o": "b" or "t", "s": shape, "v": [...]} an array of bytes (base64) or of str
#
# This is a stable format: all saved values remain readable. Nothing is pickled.


def encode_value(value: Element) -> Any:
    """Return a normalized element as a JSON value.

    Raises:
        InvalidElementError: If it is nested too deeply, or contains Python objects.
    """
    leaves, structure = flatten(value)
    return [encode_structure(structure), [_encode_leaf(leaf) for leaf in leaves]]


def decode_value(saved: Any) -> Element:
    """Return the element that was passed to `encode_value`, in fresh memory."""
    structure, leaves = saved
    return unflatten(decode_structure(structure), [_decode_leaf(leaf) for leaf in leaves])


def _encode_leaf(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf
    if isinstance(leaf, bytes):
        return {"b": _text(leaf)}
    if leaf.dtype.kind == "O":
        values = leaf.ravel().tolist()
        if values and isinstance(values[0], str):
            return {"o": "t", "s": list(leaf.shape), "v": values}
        return {"o": "b", "s": list(leaf.shape), "v": [_text(item) for item in values]}
    encoded = {"d": encode_dtype(leaf.dtype), "v": _text(leaf.tobytes())}
    return {**encoded, "s": list(leaf.shape)} if isinstance(leaf, np.ndarray) else encoded


def _decode_leaf(saved: Any) -> Any:
    if isinstance(saved, str):
        return saved
    if "b" in saved:
        return base64.b64decode(saved["b"])
    if "o" in saved:
        result = np.empty(len(saved["v"]), object)
        result[:] = saved["v"] if saved["o"] == "t" else [base64.b64decode(v) for v in saved["v"]]
        return result.reshape(saved["s"])
    dtype = decode_dtype(saved["d"])
    flat = np.frombuffer(bytearray(base64.b64decode(saved["v"])), dtype)
    return flat.reshape(saved["s"]) if "s" in saved else flat[0]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
