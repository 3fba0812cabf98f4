"""Elements from a Python generator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import owned
from headrace.element.spec import ArraySpec, Spec, check
from headrace.element.structure import Element, component, flatten, flatten_like, unflatten
from headrace.element.tree import NORMAL_KINDS, normalize
from headrace.errors import (
    FailedPreconditionError,
    InvalidElementError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.source import Position, Reader, Source, check_limit, check_range

__all__ = ["GeneratorSource"]

_PYTHON_VALUES = (bool, int, float, complex, list)


@dataclass(frozen=True, eq=False)
class GeneratorSource(Source):
    """What a generator function yields; each reader calls the function again.

    It runs for the elements that were asked for and no further, and each is taken over, in memory
    of its own, before it runs on: it may yield one buffer again and again.

    Python numbers and lists take the dtypes of the signature where no value is lost (rounding to
    a narrower float is no loss). Arrays and NumPy scalars must have them.

    Args:
        generator: A function that returns an iterable.
        args: What to call it with.
        output_signature: Spec of the elements; None to take them as they come.
    """

    generator: Callable[..., Iterable[Any]]
    args: tuple[Any, ...] = ()
    output_signature: Spec | None = None

    def __post_init__(self) -> None:
        generator: Any = self.generator
        if not callable(generator):
            advice = "pass a function that returns an iterable"
            if isinstance(generator, Iterator):
                advice = (
                    "pass the generator function itself, without calling it, so that the data "
                    "can be read more than once; its arguments go into args"
                )
            raise TypeError(f"generator must be callable, got {type(generator).__name__}: {advice}")
        object.__setattr__(self, "args", () if self.args is None else tuple(self.args))
        if self.output_signature is not None:
            leaves, structure = flatten(self.output_signature)
            for leaf, path in zip(leaves, structure.paths, strict=True):
                if not isinstance(leaf, ArraySpec):
                    raise TypeError(
                        f"output_signature must hold ArraySpec, but {component(path)} is {leaf!r}"
                    )

    @property
    def size(self) -> int:
        return 1

    @property
    def element_spec(self) -> Spec | None:
        return self.output_signature

    @property
    def runs_user_code(self) -> bool:
        return True

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, 1)
        return _GeneratorReader(self, start == stop, position)


class _GeneratorReader:
    """Position: number of elements consumed; restored by passing over as many."""

    def __init__(self, source: GeneratorSource, empty: bool, position: Position) -> None:
        if position is not None and (type(position) is not int or position < 0):
            raise ValueError(f"position must be a number of elements, got {position!r}")
        self._source = source
        self._convert, self._may_share = _converter(source.output_signature)
        self._consumed: int = position or 0
        self._iterator: Iterator[Any] | None = None
        self._generated: Any = None
        self._error: Exception | None = None
        self._ended = empty
        self._closed = False
        #: A value waits here for its conversion: no variable may hold it then, see `owned`.
        self._waiting: list[Any] = []

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        if self._error is None and not self._ended:
            rows = self._collect(limit)
            if rows:
                self._consumed += len(rows)
                return Chunk.of_rows(rows)
        if self._error is not None:
            error, self._error = self._error, None
            self._consumed += 1
            raise error
        return None

    def read_row(self) -> Element:
        iterator = self._iterator
        if iterator is None or self._error is not None:
            chunk = self.read(1)
            if chunk is None:
                raise StopIteration
            return chunk.rows()[0]
        waiting = self._waiting
        # As in `_take`, without a list and a chunk for one element.
        try:
            waiting.append(next(iterator))
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            self._end()
            blamed = self._blame(error, self._consumed)
            self._consumed += 1
            raise blamed from error
        except BaseException:
            self._go_back()
            raise
        convert = self._convert
        try:
            row = owned(convert(waiting.pop())) if self._may_share else convert(waiting.pop())
        except Exception as error:
            refused = self._refused(error, self._consumed)
            self._consumed += 1
            raise refused from error
        except BaseException:
            self._go_back()
            raise
        self._consumed += 1
        return row

    def get_position(self) -> Position:
        return self._consumed

    def close(self) -> None:
        self._closed = True
        generated, self._generated, self._iterator = self._generated, None, None
        close = getattr(generated, "close", None)
        # One that runs at this moment, on another thread, ends when that thread lets go of it.
        if close is not None and not getattr(generated, "gi_running", False):
            close()

    def _collect(self, limit: int) -> list[Element]:
        """Return up to `limit` elements; keep an error for when its turn comes."""
        try:
            if self._iterator is None and not self._begin():
                return []
            return self._take(limit)
        except BaseException:
            self._go_back()
            raise

    def _end(self) -> None:
        self._ended, self._iterator = True, None

    def _go_back(self) -> None:
        """After Ctrl-C, sys.exit(): begin again at the element that this call began at.

        What was collected goes. A generator that was left by an exception is over.
        """
        generated, self._generated, self._iterator = self._generated, None, None
        self._error, self._ended = None, False
        self._waiting.clear()
        with suppress(Exception):
            getattr(generated, "close", bool)()

    def _take(self, limit: int) -> list[Element]:
        assert self._iterator is not None
        iterator, convert, may_share = self._iterator, self._convert, self._may_share
        rows: list[Element] = []
        append = rows.append
        put, take = self._waiting.append, self._waiting.pop
        for _ in range(limit):
            try:
                put(next(iterator))
            except StopIteration:
                self._end()
                break
            except Exception as error:
                self._end()
                self._error = self._blame(error, self._consumed + len(rows))
                break
            try:
                append(owned(convert(take())) if may_share else convert(take()))
            except Exception as error:
                self._error = self._refused(error, self._consumed + len(rows))
                break
        return rows

    def _begin(self) -> bool:
        """Call the function and pass over what was consumed; return whether more may come."""
        try:
            self._generated = self._source.generator(*self._source.args)
            self._iterator = iter(self._generated)
        except Exception as error:
            self._end()
            # A call that failed was reported as element 0.
            self._error = self._blame(error, 0) if not self._consumed else None
            return False
        for index in range(self._consumed):
            try:
                next(self._iterator)
            except StopIteration:
                self._end()
                return False
            except Exception as error:
                self._end()
                # The error that ended it at the last element passed over was reported then.
                if index < self._consumed - 1:
                    self._error = self._blame(error, index)
                return False
        return True

    def _blame(self, error: Exception, position: int) -> UserFunctionError:
        trace = "".join(traceback.format_exception(error))
        made = UserFunctionError(
            f"the generator {self._name()} raised at element {position}: {describe_error(error)}"
            f"\n\nOriginal traceback:\n{trace}",
            position=position,
            original_type=type(error).__name__,
            original_traceback=trace,
        )
        made.__cause__ = error
        return made

    def _refused(self, error: Exception, position: int) -> InvalidElementError:
        known = isinstance(error, InvalidElementError)
        made = InvalidElementError(
            f"element {position} of the generator {self._name()}: "
            f"{error if known else describe_error(error)}"
        )
        made.__cause__ = error
        return made

    def _name(self) -> str:
        function = self._source.generator
        return str(getattr(function, "__qualname__", None) or repr(function))


def _converter(signature: Spec | None) -> tuple[Callable[[Any], Element], bool]:
    """Return what makes an element of a value and checks it; whether it may share its memory.

    With a signature the result's containers are new ones.
    """
    if signature is None:
        return owned, False
    specs, structure = flatten(signature)
    # Scalars do not change, so nobody can share them.
    may_share = any(spec.shape or spec.dtype.kind == "V" for spec in specs)
    leaves = zip(specs, structure.paths, strict=True)
    converts = [_leaf_converter(spec, path) for spec, path in leaves]
    if len(specs) == 1 and specs[0] is signature:
        return converts[0], may_share

    def convert_nested(value: Any) -> Element:
        values = flatten_like(structure, value)
        return unflatten(
            structure, [convert(item) for convert, item in zip(converts, values, strict=True)]
        )

    if type(signature) is dict and all(isinstance(s, ArraySpec) for s in signature.values()):
        by_key = list(zip(structure.root.keys, converts, strict=True))
        keys = signature.keys()

        def convert_flat(value: Any) -> Element:
            # The commonest structure, without the general walk.
            if type(value) is dict and value.keys() == keys:
                return {key: convert(value[key]) for key, convert in by_key}
            return convert_nested(value)

        return convert_flat, may_share

    return convert_nested, may_share


_PYTHON_TYPES = {"i": int, "u": int, "f": float, "b": bool, "S": bytes, "U": str}


def _leaf_converter(spec: ArraySpec, path: str) -> Callable[[Any], Any]:
    """Return what makes a component of a value; what is commonly yielded takes a short way."""
    convert = _Leaf(spec, path).convert
    dtype, shape, kind = spec.dtype, spec.shape, spec.dtype.kind
    if not dtype.isnative or (kind not in _PYTHON_TYPES and not shape):
        return convert
    if shape:
        if kind not in NORMAL_KINDS or None in shape:
            return convert

        def convert_array(value: Any) -> Any:
            fits = type(value) is np.ndarray and value.shape == shape and value.dtype == dtype
            return value if fits else convert(value)

        return convert_array
    python_type = _PYTHON_TYPES[kind]
    if kind in "SU":
        return lambda value: value if type(value) is python_type else convert(value)
    low, high = _limits(dtype)
    make = dtype.type

    def convert_number(value: Any) -> Any:
        cls = type(value)
        if cls is make:
            return value
        if cls is python_type and low <= value <= high:
            return make(value)
        return convert(value)

    return convert_number


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest number of a dtype, as Python's."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return -most, most
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


class _Leaf:
    """Makes a component of what was yielded for it, as its spec asks."""

    def __init__(self, spec: ArraySpec, path: str) -> None:
        self._spec = spec
        self._path = path
        self._dtype = spec.dtype
        self._shape = spec.shape

    def convert(self, value: Any) -> Any:
        """Return the component.

        Raises:
            InvalidElementError: It does not fit the spec.
        """
        if self._fits(value):
            return value
        plain = isinstance(value, _PYTHON_VALUES) and not isinstance(value, np.generic)
        if plain and self._dtype.kind not in "SU":
            value = self._cast(value)
            if self._fits(value):
                return value
        try:
            made = normalize(value)
            check(self._spec, made)
        except InvalidElementError as error:
            # They know the component alone, without the element that it belongs to.
            text, place = str(error), component(self._path)
            named = text.replace(component(""), place, 1)
            raise InvalidElementError(named if place in named else f"{place}: {text}") from error
        return made

    def _fits(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray | np.generic) or value.dtype != self._dtype:
            return False
        if value.dtype.kind not in "biufcmM" or (type(value) is np.ndarray and not value.ndim):
            return False
        found, wanted = value.shape, self._shape
        return found == wanted or (
            len(found) == len(wanted)
            and all(n is None or n == m for m, n in zip(found, wanted, strict=True))
        )

    def _cast(self, value: Any) -> Any:
        """Return a Python value as an array or scalar of the spec's dtype, if none is lost."""
        dtype = self._dtype
        found: Any = normalize(value)
        if not isinstance(found, np.ndarray | np.generic) or found.dtype.kind not in "biufc":
            return found
        if found.size == 0 or found.dtype == dtype:
            return found.astype(dtype)
        if not _may_become(found.dtype.kind, dtype.kind):
            raise self._refusal(value)
        with np.errstate(all="ignore"):
            cast: Any = found.astype(dtype)
            if found.dtype.kind in "fc":
                # A narrower float rounds; it must not run over.
                same = np.isfinite(cast) | ~np.isfinite(found)
            else:
                same = (cast.astype(found.dtype) == found) & (np.less(cast, 0) == np.less(found, 0))
        if not np.all(same):
            raise self._refusal(value)
        return cast

    def _refusal(self, value: Any) -> InvalidElementError:
        text = repr(value)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return InvalidElementError(
            f"{component(self._path)} is {shown}, which {self._dtype} cannot hold without loss; "
            f"yield other values, or change the signature"
        )


def _may_become(found: str, wanted: str) -> bool:
    """Tell whether Python values of one kind of dtype stand for those of another."""
    order = "b", "iu", "f", "c"
    ranks = {kind: rank for rank, kinds in enumerate(order) for kind in kinds}
    if found == "b" or wanted == "b":
        return found == wanted
    return wanted in ranks and ranks[found] <= ranks[wanted]
