"""Elements from a Python generator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.ownership import owned
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Element, component, flatten
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidElementError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.source import Position, Reader, Source, check_limit, check_range
from headrace.sources.signature import converter

__all__ = ["GeneratorSource"]


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
        self._convert, self._may_share = converter(source.output_signature)
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

    def rows(self) -> Iterator[Element]:
        if self._iterator is None or self._error is not None:
            chunk = self.read(1)
            if chunk is None:
                return
            yield chunk.rows()[0]
        iterator, convert, may_share = self._iterator, self._convert, self._may_share
        put, take = self._waiting.append, self._waiting.pop
        # As in `_take`; an error is raised at once.
        while iterator is not None:
            try:
                put(next(iterator))
            except StopIteration:
                self._end()
                return
            except Exception as error:
                self._end()
                failure: Exception = self._blame(error, self._consumed)
                self._consumed += 1
                raise failure from error
            except BaseException:
                self._go_back()
                raise
            try:
                row = owned(convert(take())) if may_share else convert(take())
            except Exception as error:
                failure = self._refused(error, self._consumed)
                self._consumed += 1
                raise failure from error
            except BaseException:
                self._go_back()
                raise
            self._consumed += 1
            yield row

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
                self._error = DataLossError(
                    f"the generator {self._name()} ended after {index} elements, but at least "
                    f"{self._consumed} were read before the state was saved; restore it with the "
                    "same data"
                )
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
