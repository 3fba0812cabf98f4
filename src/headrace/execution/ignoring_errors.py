"""Iterator of `ignore_errors`, and its file of dropped elements."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
    UserFunctionError,
)
from headrace.execution.context import Context
from headrace.execution.iterator import (
    MAX_FAILURES,
    ElementIterator,
    LazyRows,
    State,
    make_iterator,
)
from headrace.plan.ignoring_errors import IgnoreErrors
from headrace.plan.user_function import ErrorParts, split_message, step_name

__all__ = ["IgnoreErrorsIterator"]

_logger = logging.getLogger("headrace")
_SERVICE_ERRORS = (AbortedError, CancelledError, DeadlineExceededError, UnavailableError)
"""Errors of a service and not of an element: if they were dropped, its elements would be lost."""
_MAX_MESSAGE_LENGTH = 2000


@make_iterator.register(IgnoreErrors)
class IgnoreErrorsIterator(ElementIterator):
    """Drops the elements of its input that fail, and counts them.

    The state is the number of elements dropped in this epoch, and the input's state. The states of
    an element are after the failed ones before it, so a restore does not drop those again.
    """

    def __init__(self, node: IgnoreErrors, context: Context) -> None:
        self._node = node
        self._step = step_name(node)
        self._input = make_iterator(node.input, context)
        self.has_lazy_rows: bool = self._input.has_lazy_rows
        self._total = context.ignored_errors
        self._count = 0  # dropped in this epoch
        self._last_error = ""
        self._has_reported = False  # whether the end of the epoch was logged
        self._num_consecutive = 0  # elements that failed since the last one that did not
        #: State of the input after the last error; None if an element followed, or if it has none.
        self._state_after_error: State = None

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._input.preferred_limit

    @property
    def available_elements(self) -> int:
        return self._input.available_elements

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception as error:
                self._drop(error)
                continue
            if chunk is None:
                self._report()
                return None
            self._clear_errors()
            return chunk.with_states(self._states(chunk.states))

    def lazy_rows(self) -> LazyRows | None:
        while True:
            try:
                found = self._input.lazy_rows()
            except Exception as error:
                self._drop(error)
                continue
            if found is None:
                self._report()
                return None
            rows, states = found
            return self._keep_rows(rows), self._states(states)

    def _keep_rows(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Yield rows up to the first that fails; the next call of `lazy_rows` continues."""
        try:
            for row in rows:
                if self._num_consecutive:
                    self._clear_errors()
                yield row
        except Exception as error:
            self._drop(error)

    def _states(self, input_states: States) -> States:
        count = self._count
        return lambda index: {"ignored": count, "input": input_states(index)}

    def _clear_errors(self) -> None:
        self._state_after_error, self._num_consecutive = None, 0

    # --- errors ---------------------------------------------------------------------------------

    def _drop(self, error: Exception) -> None:
        """Count an error of the input; raise it if it is not the error of an element."""
        if isinstance(error, _SERVICE_ERRORS) or self._is_stuck():
            raise error
        node, parts = self._node, split_message(error)
        if node.limit is not None and self._count >= node.limit:
            raise FailedPreconditionError(
                f"{self._step} dropped {self._count} elements of this epoch, the number that "
                f"`limit` allows, and another one failed: {parts.message}"
            ) from error
        if node.dead_letter is not None:
            _append_line(os.fspath(node.dead_letter), _dead_letter(error, parts))
        self._count += 1
        self._total.add(1)
        self._last_error = parts.message
        if node.log_warning:
            _logger.warning("%s dropped an element: %s", self._step, parts.message)

    def _is_stuck(self) -> bool:
        """Return whether the input fails twice at one position, and so might fail forever."""
        try:
            state = self._input.get_state()
        except Exception:  # a dataset that cannot save a state
            state = None
        self._num_consecutive += 1
        if state is None:
            return self._num_consecutive > MAX_FAILURES
        was_here = self._num_consecutive > 1 and state == self._state_after_error
        self._state_after_error = state
        return was_here

    def _report(self) -> None:
        """Log the number of dropped elements at the end of the epoch."""
        if self._count and not self._has_reported:
            self._has_reported = True
            _logger.warning(
                "%s dropped %d elements that failed; the last error: %s",
                self._step,
                self._count,
                self._last_error or "(before the iterator was restored)",
            )

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        return {"ignored": self._count, "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._clear_errors()
        self._total.add(state["ignored"] - self._count)
        self._count, self._last_error, self._has_reported = state["ignored"], "", False
        self._input.set_state(state["input"])

    def close(self) -> None:
        self._input.close()


# --- the file of dropped elements -----------------------------------------------------------------


def _dead_letter(error: Exception, parts: ErrorParts) -> dict[str, Any]:
    position = error.position if isinstance(error, UserFunctionError) else -1
    original_type = error.original_type if isinstance(error, UserFunctionError) else ""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "error": original_type or type(error).__name__,
        "message": parts.message[:_MAX_MESSAGE_LENGTH],
        "step": parts.step or None,
        "position": position if position >= 0 else None,
        "element": parts.element or None,
    }


def _append_line(path: str, entry: dict[str, Any]) -> None:
    """Append a line of JSON with one write, so that lines of several processes do not mix.

    The file is opened for each line: errors are rare, and a worker may have been forked since.
    """
    path = path.replace("{worker}", f"{socket.gethostname()}-{os.getpid()}")
    line = json.dumps(entry).encode() + b"\n"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            num_written = os.write(file, line)
            end = os.lseek(file, 0, os.SEEK_CUR)
            if num_written < len(line) and os.fstat(file).st_size == end:
                # The next line, when there is space again, must not continue this one.
                os.ftruncate(file, end - num_written)
        finally:
            os.close(file)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the dead letter file {path!r}: {error.strerror or error}"
        ) from error
    if num_written < len(line):
        raise FailedPreconditionError(
            f"only {num_written} of {len(line)} bytes fit into the dead letter file {path!r}; "
            "is its disk full?"
        )
