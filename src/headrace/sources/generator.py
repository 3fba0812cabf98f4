"""Source of the elements of a Python generator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import take_ownership
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Element, describe_component, flatten
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidElementError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.source import Position, Reader, Source, check_limit, check_range
from headrace.sources.signature import make_converter

__all__ = ["GeneratorSource"]


@dataclass(frozen=True, eq=False)
class GeneratorSource(Source):
    """The elements that a generator function yields; each reader calls the function again.

    The generator runs only for elements that were requested, and each element is copied if needed
    before the generator resumes, so it may yield the same buffer repeatedly.

    Python numbers and lists are converted to the dtypes of the signature if no value is lost
    (rounding to a narrower float is allowed). Arrays and NumPy scalars must have these dtypes.

    Args:
        generator: Function that returns an iterable.
        args: Arguments of the function.
        output_signature: Spec of the elements; None accepts any.
    """

    generator: Callable[..., Iterable[Any]]
    args: Sequence[Any] = ()
    output_signature: Spec | None = None

    def __post_init__(self) -> None:
        generator: Any = self.generator
        if not callable(generator):
            advice = "pass a function that returns an iterable"
            if isinstance(generator, Iterator):
                advice = (
                    "pass the generator function itself, without calling it, so that the data "
                    "can be read more than once; pass its arguments in `args`"
                )
            raise TypeError(f"generator must be callable, got {type(generator).__name__}: {advice}")
        args: Any = self.args
        if isinstance(args, str | bytes) or not isinstance(args, Sequence | np.ndarray):
            raise TypeError(
                f"`args` must be a tuple or list of arguments, but got {args!r:.80} of type "
                f"{type(args).__name__}; pass a single argument as args=(value,)"
            )
        object.__setattr__(self, "args", tuple(args))
        if self.output_signature is not None:
            leaves, structure = flatten(self.output_signature)
            for leaf, path in zip(leaves, structure.paths, strict=True):
                if not isinstance(leaf, ArraySpec):
                    raise TypeError(
                        f"output_signature must hold ArraySpec, but {describe_component(path)} is "
                        f"{leaf!r}; pass hr.ArraySpec(shape, dtype)"
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
    """Reader of a generator; its position is the number of elements read, which a restore skips."""

    def __init__(self, source: GeneratorSource, is_empty: bool, position: Position) -> None:
        if position is not None and (type(position) is not int or position < 0):
            raise ValueError(f"position must be a number of elements, got {position!r}")
        self._source = source
        self._convert, self._may_share = make_converter(source.output_signature)
        self._consumed: int = position or 0
        self._iterator: Iterator[Any] | None = None
        self._generated: Any = None
        self._error: Exception | None = None
        self._has_ended = is_empty
        self._is_closed = False
        #: A value before its conversion. No variable may refer to it until then; see
        #: `take_ownership`.
        self._unconverted: list[Any] = []

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._is_closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        if self._error is None and not self._has_ended:
            rows = self._collect(limit)
            if rows:
                self._consumed += len(rows)
                return Chunk.of_rows(rows)
        if self._error is not None:
            error, self._error = self._error, None
            self._consumed += 1
            raise error
        return None

    def rows(self) -> Iterator[Element]:
        if self._iterator is None or self._error is not None:
            chunk = self.read(1)
            if chunk is None:
                return
            yield chunk.rows()[0]
        iterator, convert, may_share = self._iterator, self._convert, self._may_share
        put, take = self._unconverted.append, self._unconverted.pop
        # As in `_read_elements`, but errors are raised at once.
        while iterator is not None:
            try:
                put(next(iterator))
            except StopIteration:
                self._mark_ended()
                return
            except Exception as error:
                self._mark_ended()
                failure: Exception = self._generator_error(error, self._consumed)
                self._consumed += 1
                raise failure from error
            except BaseException:
                self._rewind()
                raise
            try:
                row = take_ownership(convert(take())) if may_share else convert(take())
            except Exception as error:
                failure = self._invalid_element_error(error, self._consumed)
                self._consumed += 1
                raise failure from error
            except BaseException:
                self._rewind()
                raise
            self._consumed += 1
            yield row

    def get_position(self) -> Position:
        return self._consumed

    def close(self) -> None:
        self._is_closed = True
        generated, self._generated, self._iterator = self._generated, None, None
        close = getattr(generated, "close", None)
        # A generator that is running on another thread ends when that thread releases it.
        if close is not None and not getattr(generated, "gi_running", False):
            close()

    def _collect(self, limit: int) -> list[Element]:
        """Return up to `limit` elements; keep an error until the elements before it are read."""
        try:
            if self._iterator is None and not self._start_generator():
                return []
            return self._read_elements(limit)
        except BaseException:
            self._rewind()
            raise

    def _mark_ended(self) -> None:
        self._has_ended, self._iterator = True, None

    def _rewind(self) -> None:
        """Return to the first element of this call after Ctrl-C or `sys.exit()`.

        The collected elements are dropped. A generator that raised an exception has ended.
        """
        generated, self._generated, self._iterator = self._generated, None, None
        self._error, self._has_ended = None, False
        self._unconverted.clear()
        with suppress(Exception):
            getattr(generated, "close", bool)()

    def _read_elements(self, limit: int) -> list[Element]:
        assert self._iterator is not None
        iterator, convert, may_share = self._iterator, self._convert, self._may_share
        rows: list[Element] = []
        append = rows.append
        put, take = self._unconverted.append, self._unconverted.pop
        for _ in range(limit):
            try:
                put(next(iterator))
            except StopIteration:
                self._mark_ended()
                break
            except Exception as error:
                self._mark_ended()
                self._error = self._generator_error(error, self._consumed + len(rows))
                break
            try:
                append(take_ownership(convert(take())) if may_share else convert(take()))
            except Exception as error:
                self._error = self._invalid_element_error(error, self._consumed + len(rows))
                break
        return rows

    def _start_generator(self) -> bool:
        """Call the function and skip consumed elements; return whether there may be more."""
        try:
            generated: Any = self._source.generator(*self._source.args)
            if not isinstance(generated, Iterable) and not hasattr(generated, "__getitem__"):
                self._mark_ended()
                self._error = self._no_iterable_error(generated)
                return False
            self._generated = generated
            self._iterator = iter(generated)
        except Exception as error:
            self._mark_ended()
            # A failed call was reported as element 0.
            self._error = self._generator_error(error, 0) if not self._consumed else None
            return False
        for index in range(self._consumed):
            try:
                next(self._iterator)
            except StopIteration:
                self._mark_ended()
                self._error = DataLossError(
                    f"the generator {self._generator_name()} ended after {index} elements, but "
                    f"at least {self._consumed} were read before the state was saved; restore "
                    "the state with the same data"
                )
                return False
            except Exception as error:
                self._mark_ended()
                # The error that ended the generator at the last skipped element was already
                # reported.
                if index < self._consumed - 1:
                    self._error = self._generator_error(error, index)
                return False
        return True

    def _generator_error(self, error: Exception, position: int) -> UserFunctionError:
        trace = "".join(traceback.format_exception(error))
        result = UserFunctionError(
            f"the generator {self._generator_name()} raised at element {position}: "
            f"{describe_error(error)}"
            f"\n\nOriginal traceback:\n{trace}",
            position=position,
            original_type=type(error).__name__,
            original_traceback=trace,
        )
        result.__cause__ = error
        return result

    def _no_iterable_error(self, returned: object) -> UserFunctionError:
        return UserFunctionError(
            f"the generator {self._generator_name()} must return an iterable, but returned "
            f"{returned!r:.80} of type {type(returned).__name__}; use `yield` for each element, or "
            "return a list of them",
            position=0,
            original_type="TypeError",
        )

    def _invalid_element_error(self, error: Exception, position: int) -> InvalidElementError:
        known = isinstance(error, InvalidElementError)
        result = InvalidElementError(
            f"element {position} of the generator {self._generator_name()}: "
            f"{error if known else describe_error(error)}"
        )
        result.__cause__ = error
        return result

    def _generator_name(self) -> str:
        function = self._source.generator
        return str(getattr(function, "__qualname__", None) or repr(function))
