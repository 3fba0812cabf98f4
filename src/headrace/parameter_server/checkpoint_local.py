"""Restoring the objects of this process: all of them, or none.

1. what was saved is read, and compared with the object (`prepared`): an error changes nothing
2. the objects get their values one after the other (`changed`); if one refuses its value, those
   before it get back what they had
3. the servers, which have read theirs, put them in place; if they fail, 2 is taken back as well

Not taken back: objects with a `set_state` (iterators), which come last in 2, and what one server
has put in place when another one fails in 3.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.variable import Variable
from headrace.errors import InvalidArgumentError, describe_error
from headrace.parameter_server.assembling import assembled_shard
from headrace.parameter_server.checkpoint_folder import Read
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    Entry,
    Piece,
    StateDictEntry,
    StateEntry,
    ValueEntry,
    VariableEntry,
)
from headrace.parameter_server.checkpoint_frameworks import (
    array_like,
    array_of,
    assign,
    decode_state,
    encode_state,
    is_array,
    is_variable,
    state_mismatch,
    write_refusal,
)
from headrace.parameter_server.checkpoint_tree import (
    Leaf,
    changes_in_place,
    has_state,
    is_state_dict,
)
from headrace.parameter_server.operations import ShardSpec
from headrace.parameter_server.tensor_file import TensorFile
from headrace.parameter_server.variable import ServerVariable

__all__ = ["Change", "changed", "prepared"]

_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """An object, and what gives it the value that was saved."""

    leaf: Leaf
    put: Callable[[], object]


@contextlib.contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """Carry out changes, and take them back where one of them or the block fails."""
    with contextlib.ExitStack() as back:
        for change in sorted(changes, key=lambda change: has_state(change.leaf)):
            back.callback(_put_back, change.leaf.path, _undoing(change.leaf))
            change.put()
        yield
        back.pop_all()


def _put_back(path: str, undo: Callable[[], object]) -> None:
    try:
        undo()
    except Exception as error:  # the others are put back all the same, and the first is raised
        _log.warning(
            "%r could not be put back after a restore that failed: %s", path, describe_error(error)
        )


def _undoing(leaf: Leaf) -> Callable[[], object]:
    """Return what gives an object back the value that it has now."""
    value = leaf.value
    if has_state(leaf):
        # Distributed iterators would wait for the other workers here.
        return lambda: None
    if is_state_dict(leaf):
        arrays: dict[str, NDArray[Any]] = {}

        def add(array: NDArray[Any]) -> str:
            key = str(len(arrays))
            arrays[key] = np.array(array)
            return key

        try:
            state = encode_state(leaf.path, value.state_dict(), add)
        except TypeError:  # it has now what a checkpoint does not save
            return functools.partial(value.load_state_dict, copy.deepcopy(value.state_dict()))
        return lambda: value.load_state_dict(decode_state(state, arrays.__getitem__))
    if isinstance(value, Variable):
        before = copy.copy(value)  # its copies are never written into
        return lambda: vars(value).update(vars(before))
    if isinstance(value, ServerVariable):
        return functools.partial(value.assign, np.array(value.read()))
    if is_variable(value):
        return functools.partial(assign, value, np.array(array_of(value)))
    if isinstance(value, np.ndarray) and changes_in_place(value):
        return functools.partial(np.copyto, value, value.copy())
    return functools.partial(leaf.replace, value)


def prepared(leaf: Leaf, entry: Entry, read: Read, local: TensorFile | None) -> Change | None:
    """Return what restores an object, for which everything was read and checked; None: servers do.

    Raises:
        DataLossError: What was saved is damaged.
        InvalidArgumentError: It does not fit the object.
    """
    value = leaf.value
    refused = write_refusal(value)
    if refused:
        raise InvalidArgumentError(f"{leaf.path!r} cannot be restored in place: {refused}")

    def saved_array(key: str, checksum: int | None) -> NDArray[Any]:
        assert local is not None
        array = local[key]
        local.check(key, {key: array}, checksum)
        return array

    match entry:
        case ValueEntry():
            if changes_in_place(value):
                return Change(leaf, functools.partial(_put, leaf, np.asarray(entry.value)))
            return Change(leaf, functools.partial(leaf.replace, entry.value))
        case StateEntry():
            return Change(leaf, functools.partial(value.set_state, entry.state))
        case StateDictEntry():
            state = decode_state(entry.state, lambda key: saved_array(key, entry.checksums[key]))
            why = state_mismatch(value, state, entry.kind, entry.parameters)
            if why:
                raise InvalidArgumentError(
                    f"the checkpoint {read.path!r} is of another model: {leaf.path!r}: {why}"
                )
            return Change(leaf, functools.partial(value.load_state_dict, state))
        case ArrayEntry():
            return Change(
                leaf, functools.partial(_put, leaf, saved_array(entry.key, entry.checksum))
            )
        case VariableEntry() if not isinstance(value, ServerVariable):
            return Change(leaf, functools.partial(_put, leaf, _whole(read, entry)))
    return None


def _put(leaf: Leaf, array: NDArray[Any]) -> None:
    """Make an array the value of what is there."""
    value = leaf.value
    if isinstance(value, ServerVariable | Variable):
        value.assign(array)
    elif is_variable(value):
        assign(value, array)
    elif isinstance(value, np.ndarray) and changes_in_place(value):
        value[...] = array
    elif is_array(value):
        leaf.replace(array_like(value, array))
    else:
        is_number = isinstance(value, int | float | complex) and not array.ndim
        leaf.replace(array.item() if is_number else np.array(array)[()])


def _whole(read: Read, entry: VariableEntry) -> NDArray[Any]:
    """Return a variable that was on servers."""
    spec = ShardSpec(
        name=entry.name,
        variable=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        variable_shape=entry.shape,
    )
    pieces = [piece for piece in read.pieces if (piece.kind, piece.of) == ("shard", entry.name)]

    def arrays_of(piece: Piece) -> dict[str, NDArray[Any]]:
        return TensorFile(read.folder, piece.file).of(piece.key, piece.checksum)

    return assembled_shard(spec, pieces, arrays_of, {}).arrays["value"]
