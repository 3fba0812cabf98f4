"""Every error that Headrace raises at run time, in one tree.

    HeadraceError
    ├── OutOfRangeError        (StopIteration)      no elements are left
    ├── UnavailableError       (ConnectionError)    a peer is unreachable; retry later
    │   └── JournalUnavailableError (ConnectionError) a server cannot write its journal
    ├── DeadlineExceededError  (TimeoutError)       no answer within the timeout
    ├── CancelledError         (RuntimeError)       the operation was cancelled
    ├── AbortedError           (RuntimeError)       the operation was superseded by another
    ├── DataLossError          (ValueError)         a record is corrupt or lost
    ├── FailedPreconditionError (RuntimeError)      the state of the system does not allow this
    │   ├── JobLostError       (RuntimeError)       the dispatcher no longer knows the job
    │   └── MissingDependencyError (RuntimeError)   an optional package is not installed
    ├── NotFoundError          (LookupError)        the named object does not exist
    ├── AlreadyExistsError     (ValueError)         the name is in use by another object
    ├── InvalidArgumentError   (ValueError)         an argument does not match the data
    │   └── InvalidElementError (ValueError)        an element cannot be batched, described or sent
    ├── UnauthenticatedError   (PermissionError)    the peer is not authenticated
    └── UserFunctionError      (RuntimeError)       a user's function raised an error

Each also derives from the builtin that a Python user would catch. Wrong arguments raise plain
`ValueError` and `TypeError` in the call that passes them. Errors carry plain values only, so that
they can be sent between processes as text.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "HeadraceError",
    "InvalidArgumentError",
    "InvalidElementError",
    "JobLostError",
    "JournalUnavailableError",
    "MissingDependencyError",
    "NotFoundError",
    "OutOfRangeError",
    "UnauthenticatedError",
    "UnavailableError",
    "UserFunctionError",
    "describe_error",
]


def __dir__() -> list[str]:
    return list(__all__)


class HeadraceError(Exception):
    """Base class of all run-time errors of Headrace.

    >>> try:
    ...     next(iter(hr.Dataset.range(3).map(lambda x: 1 // 0)))
    ... except hr.errors.HeadraceError as error:
    ...     type(error).__name__
    'UserFunctionError'
    """


class OutOfRangeError(HeadraceError, StopIteration):
    """No elements are left; ends a `for` loop.

    >>> iter(hr.Dataset.range(0)).get_next()
    Traceback (most recent call last):
    headrace.errors.OutOfRangeError: the dataset has no more elements
    """


class UnavailableError(HeadraceError, ConnectionError):
    """A peer is unreachable now; a retry may succeed.

    >>> error = hr.errors.UnavailableError("the dispatcher does not answer")
    >>> isinstance(error, ConnectionError), error.refused
    (True, False)

    Attributes:
        refused: Whether the peer refused or reset the connection, as the kernel does for a process
            that ended. False if it is only silent, or if that is unknown, as in errors that were
            sent between processes.
        unsent: Whether the request is known not to have reached the peer, so that even requests
            that must not be executed twice may be repeated.
    """

    refused: bool = False
    unsent: bool = False


class JournalUnavailableError(UnavailableError):
    """A server answers, but cannot write its journal, possibly because its disk is full.

    >>> issubclass(hr.errors.JournalUnavailableError, hr.errors.UnavailableError)
    True
    """


class DeadlineExceededError(HeadraceError, TimeoutError):
    """No answer arrived within the timeout.

    >>> issubclass(hr.errors.DeadlineExceededError, TimeoutError)
    True
    """


class CancelledError(HeadraceError, RuntimeError):
    """The operation was cancelled before it was complete.

    >>> issubclass(hr.errors.CancelledError, RuntimeError)
    True
    """


class AbortedError(HeadraceError, RuntimeError):
    """The operation was superseded by another and may be retried.

    >>> issubclass(hr.errors.AbortedError, RuntimeError)
    True
    """


class DataLossError(HeadraceError, ValueError):
    """Data is corrupt or missing; the message names it: a file and a byte offset, or elements.

    >>> with open("broken.tfrecord", "wb") as file:
    ...     _ = file.write(b"no TFRecord file")
    >>> list(hr.TFRecordDataset("broken.tfrecord"))
    Traceback (most recent call last):
    headrace.errors.DataLossError: ...broken.tfrecord...
    """


class FailedPreconditionError(HeadraceError, RuntimeError):
    """The state of the system does not allow this; a retry does not help.

    >>> state = iter(hr.Dataset.range(5)).get_state()
    >>> iter(hr.Dataset.range(6)).set_state(state)
    Traceback (most recent call last):
    headrace.errors.FailedPreconditionError: ...
    """


class JobLostError(FailedPreconditionError, UnavailableError):
    """The dispatcher no longer knows the job that an iterator reads.

    Also an `UnavailableError`. The dispatcher was restarted without a journal, or the client was
    silent for too long. The iterator cannot continue, but another iteration may succeed.

    >>> issubclass(hr.errors.JobLostError, hr.errors.UnavailableError)
    True
    """


class MissingDependencyError(FailedPreconditionError, ImportError):
    """An optional package is not installed; the message names it and how to install it.

    Also an `ImportError`.

    >>> issubclass(hr.errors.MissingDependencyError, ImportError)
    True
    """


class NotFoundError(HeadraceError, LookupError):
    """The named object does not exist.

    >>> hr.Dataset.list_files("missing/*.tfrecord")
    Traceback (most recent call last):
    headrace.errors.NotFoundError: ...missing/*.tfrecord...
    """


class AlreadyExistsError(HeadraceError, ValueError):
    """The name is in use by a different object.

    >>> hr.Dataset.range(3).save("numbers")
    >>> hr.Dataset.range(3).save("numbers")
    Traceback (most recent call last):
    headrace.errors.AlreadyExistsError: ...numbers...
    """


class InvalidArgumentError(HeadraceError, ValueError):
    """An argument does not match the data, which shows only while reading.

    >>> hr.Lookup.from_vocabulary(["red", "green"], num_oov=0)(["blue"])
    Traceback (most recent call last):
    headrace.errors.InvalidArgumentError: ...blue...
    """


class InvalidElementError(InvalidArgumentError):
    """An element cannot be batched, described or sent; the message names the component.

    >>> list(hr.Dataset.range(1, 3).map(lambda n: [n] * int(n)).batch(2))
    Traceback (most recent call last):
    headrace.errors.InvalidElementError: ...
    """


class UnauthenticatedError(HeadraceError, PermissionError):
    """The peer is not authenticated.

    >>> issubclass(hr.errors.UnauthenticatedError, PermissionError)
    True
    """


class UserFunctionError(HeadraceError, RuntimeError):
    """A user's function raised an error while it produced an element.

    >>> iterator = iter(hr.Dataset.range(3).map(lambda x: ["a"][int(x)]))
    >>> _ = next(iterator)
    >>> try:
    ...     next(iterator)
    ... except hr.errors.UserFunctionError as error:
    ...     error.position, error.original_type
    (1, 'IndexError')

    Attributes:
        position: Index of the element in the stage that called the function, counted from 0 in
            this epoch; -1 if unknown. After a restore, stages above files, an interleave or a
            generator count from there on.
        original_type: Name of the exception's class, as in `"ValueError"`.
        original_traceback: Formatted traceback of the exception, also in the message.
    """

    def __init__(
        self,
        message: str,
        *,
        position: int = -1,
        original_type: str = "",
        original_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.position = position
        self.original_type = original_type
        self.original_traceback = original_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_user_function_error, (
            str(self),
            self.position,
            self.original_type,
            self.original_traceback,
        )


def missing_module_hint(error_type: str, fixes: str) -> str:
    """Return an addition to the message of a user function's error on a worker.

    Args:
        error_type: Name of the exception's class.
        fixes: Ways to make a module available on the worker.

    Returns:
        Text that begins with "; "; empty unless a module was missing.
    """
    if error_type != "ModuleNotFoundError":
        return ""
    return f"; it is not installed on the worker: {fixes}"


def describe_error(error: BaseException) -> str:
    """Return "Type: text" of an exception, even if its `__str__` fails.

    >>> hr.errors.describe_error(ValueError("no such color"))
    'ValueError: no such color'
    """
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        text = f"(no message: __str__ raised {type(failure).__name__})"
    return f"{name}: {text}" if text else name


def _restore_user_function_error(
    message: str, position: int, original_type: str, original_traceback: str
) -> UserFunctionError:
    return UserFunctionError(
        message,
        position=position,
        original_type=original_type,
        original_traceback=original_traceback,
    )
