"""The iterator of `scan`: a function that has a value of its own beside each element.

The function owns what it is given, the value too: it may write to it, keep it, return it. So it
gets a copy, and what is kept here is never written to: a state that names it is a snapshot.
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
from headrace.element.ownership import copied, owned
from headrace.element.structure import Element, flatten, unflatten
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.intake import Live
from headrace.execution.iterator import Singles, State, make_iterator
from headrace.execution.stage import RowStage
from headrace.plan.elementwise import Scan
from headrace.plan.user_function import UserFunction, step_name

__all__ = [
    "ScanIterator",
    "decode_value",
    "encode_value",
]

_MOST_BYTES = 1 << 20
"""What the values before the elements of one chunk may take together."""


@make_iterator.register(Scan)
class ScanIterator(RowStage):
    """Hands a value from element to element; the state holds the one before the next element.

    An element whose function fails leaves the value as it was.
    """

    gives_rows = True

    def __init__(self, node: Scan, context: Context) -> None:
        call = UserFunction(node.fn, step_name(node), context.contain_exits)
        super().__init__(make_iterator(node.input, context), call)
        #: Before the next element. Nobody else holds it, and nothing is written into it.
        self._value = node.initial_state

    def step(self, row: Any) -> Any:
        # `owned` sees that nobody holds the copy but what the function returned.
        made = owned(self.call.fn(copied(self._value), row))
        if not isinstance(made, tuple) or len(made) != 2:
            raise InvalidElementError(
                f"`scan_func` must return a tuple (new_state, output_element), but returned "
                f"{type(made).__name__}{f' of {len(made)}' if isinstance(made, tuple) else ''}"
            )
        if made[1] is None:
            raise InvalidElementError("None is not an element, and `scan_func` returned it as one")
        self._value = made[0]
        return made[1]

    def _go_through(self, chunk: Chunk, limit: int) -> Chunk | None:
        start = self._intake.offset
        room = _MOST_BYTES
        results: list[Any] = []
        values = [self._value]
        try:
            for row in chunk.rows()[start : start + limit]:
                results.append(self.step(row))
                values.append(self._value)
                room -= _bytes_of(self._value) + 1
                if room <= 0:
                    break
        except BaseException as error:
            self._fail(error, chunk, start + len(results))
        self._use(len(results))
        if not results:
            return None
        states = chunk.states
        return Chunk.of_rows(
            results,
            lambda index: _state(values[index], states(start + index)),
            chunk.column_of(start, start + len(results)),
        )

    def singles(self) -> Singles | None:
        if self._failure is not None:
            return super().singles()
        live = self._intake.singles()
        if live is None:
            return None
        states, values = live.states, [self._value]
        return self._scanned(live, values), lambda index: _state(values[index], states(index))

    def _scanned(self, live: Live, values: list[Element]) -> Iterator[Any]:
        """Yield what becomes of single elements; append the value after each to `values`."""
        step, count, start = self.step, 0, live.taken
        room = _MOST_BYTES
        try:
            for count, row in enumerate(live.rows, 1):
                try:
                    made = step(row)
                except BaseException as error:
                    failure = self._blamed(error, live, count, row)
                    raise failure from failure.__cause__
                values.append(self._value)
                yield made
                room -= _bytes_of(self._value) + 1
                if room <= 0:
                    break
        except Exception:
            self._break_off(live, start, count)
            raise
        if room > 0:
            self._pass_over(count)
        else:
            self._looked_at += count
            live.taken += count

    def get_state(self) -> State:
        return _state(self._value, self._intake.get_state())

    def set_state(self, state: State) -> None:
        super().set_state(state["input"])
        self._value = decode_value(state["value"])


def _state(value: Element, place: State) -> State:
    return {"value": encode_value(value), "input": place}


def _bytes_of(value: Element) -> int:
    alone = getattr(value, "nbytes", None)
    if alone is not None:
        return int(alone)
    return sum([getattr(leaf, "nbytes", 8) for leaf in flatten(value)[0]])


# --- Values of the user's in states: elements as JSON, and back bit for bit -----------------------
#
#     [structure, [leaf, ...]]     structure as in `element.description`
#     leaf: "text"                 str
#           {"b": base64}          bytes
#           {"d": dtype, "v": base64}                 a NumPy scalar
#           {"d": dtype, "s": shape, "v": base64}     an array, in the order of C
#           {"o": "b" or "t", "s": shape, "v": [...]} an array of bytes (base64) or of str
#
# It is a format: values that were saved once are read for ever. Nothing is pickled.


def encode_value(value: Element) -> Any:
    """Return a normal element as a JSON value.

    Raises:
        InvalidElementError: It is nested too deeply, or holds Python objects.
    """
    leaves, structure = flatten(value)
    return [encode_structure(structure), [_encode_leaf(leaf) for leaf in leaves]]


def decode_value(saved: Any) -> Element:
    """Return the element that `encode_value` was given, in memory of its own."""
    structure, leaves = saved
    return unflatten(decode_structure(structure), [_decode_leaf(leaf) for leaf in leaves])


def _encode_leaf(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf
    if isinstance(leaf, bytes):
        return {"b": _text(leaf)}
    if leaf.dtype.kind == "O":
        held = leaf.ravel().tolist()
        if held and isinstance(held[0], str):
            return {"o": "t", "s": list(leaf.shape), "v": held}
        return {"o": "b", "s": list(leaf.shape), "v": [_text(item) for item in held]}
    encoded = {"d": encode_dtype(leaf.dtype), "v": _text(leaf.tobytes())}
    return {**encoded, "s": list(leaf.shape)} if isinstance(leaf, np.ndarray) else encoded


def _decode_leaf(saved: Any) -> Any:
    if isinstance(saved, str):
        return saved
    if "b" in saved:
        return base64.b64decode(saved["b"])
    if "o" in saved:
        made = np.empty(len(saved["v"]), object)
        made[:] = saved["v"] if saved["o"] == "t" else [base64.b64decode(v) for v in saved["v"]]
        return made.reshape(saved["s"])
    dtype = decode_dtype(saved["d"])
    flat = np.frombuffer(bytearray(base64.b64decode(saved["v"])), dtype)
    return flat.reshape(saved["s"]) if "s" in saved else flat[0]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
