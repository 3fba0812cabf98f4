"""Every error that Headrace raises at run time, in one tree.

    HeadraceError
    ├── OutOfRangeError        (StopIteration)      nothing is left to read
    ├── UnavailableError       (ConnectionError)    a peer cannot be reached; try again later
    │   └── JournalUnavailableError (ConnectionError) a server cannot write its journal
    ├── DeadlineExceededError  (TimeoutError)       no answer came in the time allowed
    ├── CancelledError         (RuntimeError)       the work was called off
    ├── AbortedError           (RuntimeError)       the work was overtaken by something else
    ├── DataLossError          (ValueError)         a record is corrupt, or lost
    ├── FailedPreconditionError (RuntimeError)      the system is not in a state that allows this
    ├── NotFoundError          (LookupError)        the thing that was named does not exist
    ├── AlreadyExistsError     (ValueError)         the name is taken by something else
    ├── InvalidArgumentError   (ValueError)         data does not fit what was asked of it
    │   └── InvalidElementError (ValueError)        an element cannot be batched, described or sent
    ├── UnauthenticatedError   (PermissionError)    the peer did not prove who it is
    └── UserFunctionError      (RuntimeError)       a function of the user's raised

Each also derives from the builtin that a Python user would catch. Wrong arguments are plain
`ValueError` and `TypeError`, raised where they are written. Errors carry plain values only, so that
they cross process boundaries as text.
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
    "JournalUnavailableError",
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
    """What every run-time error of Headrace derives from.

    >>> try:
    ...     next(iter(hr.Dataset.range(3).map(lambda x: 1 // 0)))
    ... except hr.errors.HeadraceError as error:
    ...     type(error).__name__
    'UserFunctionError'
    """


class OutOfRangeError(HeadraceError, StopIteration):
    """Nothing is left to read; a `for` loop takes it for its end.

    >>> iter(hr.Dataset.range(0)).get_next()
    Traceback (most recent call last):
    headrace.errors.OutOfRangeError: the dataset has no more elements
    """


class UnavailableError(HeadraceError, ConnectionError):
    """A peer cannot be reached now; another try may succeed.

    >>> error = hr.errors.UnavailableError("the dispatcher does not answer")
    >>> isinstance(error, ConnectionError), error.refused
    (True, False)

    Attributes:
        refused: Whether the peer refused or reset the connection, as the kernel does for a process
            that ended. False where it is only silent, or where that is not known; an error that
            crossed the wire says False.
        unsent: Whether it is known that nothing of what was asked has reached the peer, so that
            even what may be done only once may be asked again.
    """

    refused: bool = False
    unsent: bool = False


class JournalUnavailableError(UnavailableError):
    """A server answers, but cannot write its journal: its disk is full, perhaps.

    >>> issubclass(hr.errors.JournalUnavailableError, hr.errors.UnavailableError)
    True
    """


class DeadlineExceededError(HeadraceError, TimeoutError):
    """No answer came in the time allowed.

    >>> issubclass(hr.errors.DeadlineExceededError, TimeoutError)
    True
    """


class CancelledError(HeadraceError, RuntimeError):
    """The work was called off before it was done.

    >>> issubclass(hr.errors.CancelledError, RuntimeError)
    True
    """


class AbortedError(HeadraceError, RuntimeError):
    """The work was overtaken by something else and may be tried again.

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
    """The system is not in a state that allows this; trying again does not help.

    >>> state = iter(hr.Dataset.range(5)).get_state()
    >>> iter(hr.Dataset.range(6)).set_state(state)
    Traceback (most recent call last):
    headrace.errors.FailedPreconditionError: ...
    """


class NotFoundError(HeadraceError, LookupError):
    """The thing that was named does not exist.

    >>> hr.Dataset.list_files("missing/*.tfrecord")
    Traceback (most recent call last):
    headrace.errors.NotFoundError: ...missing/*.tfrecord...
    """


class AlreadyExistsError(HeadraceError, ValueError):
    """The name is taken by something that differs.

    >>> hr.Dataset.range(3).save("numbers")
    >>> hr.Dataset.range(3).save("numbers")
    Traceback (most recent call last):
    headrace.errors.AlreadyExistsError: ...numbers...
    """


class InvalidArgumentError(HeadraceError, ValueError):
    """What was asked does not fit the data; it shows only while reading.

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
    """The peer did not prove who it is.

    >>> issubclass(hr.errors.UnauthenticatedError, PermissionError)
    True
    """


class UserFunctionError(HeadraceError, RuntimeError):
    """A function of the user's raised while it produced an element.

    >>> iterator = iter(hr.Dataset.range(3).map(lambda x: ["a"][int(x)]))
    >>> _ = next(iterator)
    >>> try:
    ...     next(iterator)
    ... except hr.errors.UserFunctionError as error:
    ...     error.position, error.original_type
    (1, 'IndexError')

    Attributes:
        position: Index of the element in the stage that called the function, counted from 0 in
            this pass over the data; -1 where it is not known. After a restore, stages above files,
            an interleave or a generator count from there on.
        original_type: Name of the exception's class, as in `"ValueError"`.
        original_traceback: The formatted traceback of the exception, also in the message.
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


def missing_module_hint(error_type: str, cures: str) -> str:
    """Return what to add to the message of a user function's error on a worker.

    Args:
        error_type: Name of the exception's class.
        cures: Ways to have a module on the worker.

    Returns:
        Words that begin with "; "; empty unless a module was missing.
    """
    if error_type != "ModuleNotFoundError":
        return ""
    return f"; the worker lacks it: {cures}"


def describe_error(error: BaseException) -> str:
    """Return "Type: text" of an exception, whatever its `__str__` does.

    >>> hr.errors.describe_error(ValueError("no such color"))
    'ValueError: no such color'
    """
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        text = f"(its text cannot be shown: __str__ raised {type(failure).__name__})"
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
