"""What to say to whoever asks for what is not here, under the names of tf.data and its kin."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.data.elsewhere import OF_ARGUMENTS, OF_DATASETS, OF_MODULES

__all__ = ["AbsentNames", "no_slices", "no_such_method", "no_such_name", "with_known_arguments"]

F = TypeVar("F", bound=Callable[..., Any])


def no_such_method(name: str, known: Sequence[str]) -> str:
    """Return what is wrong with a name, and what would do: a nearby name, or another way."""
    if name in OF_DATASETS:
        return f"Dataset has no {name!r}; what does its work: {OF_DATASETS[name]}"
    near = difflib.get_close_matches(name, [*known, *OF_DATASETS], n=1)
    if near and near[0] in known:
        return f"Dataset has no method {name!r}; did you mean {near[0]!r}?"
    if near:
        return f"Dataset has no method {name!r}, and no {near[0]!r}; {OF_DATASETS[near[0]]}"
    return f"Dataset has no method {name!r}; it has: {', '.join(known)}"


def no_such_name(package: str, name: str, known: Sequence[str]) -> str:
    """Return what is wrong with a name of a module, and what would do, where that is known."""
    words = f"module {package!r} has no attribute {name!r}"
    table = OF_MODULES.get(package, {})
    if name in table:
        return f"{words}; what does its work: {table[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    if near and not name.startswith("_"):
        return f"{words}; did you mean {near[0]!r}?"
    return words


class AbsentNames(type):
    """The type of a class that has words for methods and arguments that it lacks."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> AbsentNames:
        """Make the class; its public methods name arguments that they do not have."""
        named = {
            key: value if key.startswith("_") else _with_words(value)
            for key, value in namespace.items()
        }
        return super().__new__(cls, name, bases, named)

    if not TYPE_CHECKING:  # or every name would pass for a method

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            known = [method for method in dir(cls) if not method.startswith("_")]
            raise AttributeError(no_such_method(name, known), name=name, obj=cls)


def _with_words(value: Any) -> Any:
    if isinstance(value, classmethod | staticmethod):
        return type(value)(with_known_arguments(value.__func__))
    return with_known_arguments(value) if isinstance(value, FunctionType) else value


def with_known_arguments(function: F) -> F:
    """Have a function name the arguments that it does not have, with what does their work."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function
    known = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not known.issuperset(kwargs):
            raise TypeError(_no_such_argument(function, next(k for k in kwargs if k not in known)))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _no_such_argument(function: Callable[..., Any], name: str) -> str:
    words = f"{function.__qualname__}() has no argument {name!r}"
    known = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
    near = difflib.get_close_matches(name, known, n=1)
    if name in OF_ARGUMENTS:
        return f"{words}; {OF_ARGUMENTS[name]}"
    if near:
        return f"{words}; did you mean {near[0]!r}?"
    return f"{words}; it has: {', '.join(known) or 'none'}"


def no_slices(data: Any) -> str | None:
    """Return why rows cannot be made of data, and what would do; None: there is no such reason."""
    kind = type(data).__name__
    cure = None
    if isinstance(data, list) and data and isinstance(data[0], dict):
        kind = "a list of dicts"
        cure = (
            "turn the rows into columns, {key: [row[key] for row in rows] for key in rows[0]}, "
            "or use Dataset.from_generator(lambda: rows)"
        )
    elif isinstance(data, list | tuple) and any(hasattr(x, "as_numpy_iterator") for x in data):
        kind = f"a {type(data).__name__} of Datasets"
        cure = (
            "elements cannot be Datasets: chain them with `concatenate`, mix them with "
            "Dataset.sample_from_datasets or choose_from_datasets, or open them by number, "
            "Dataset.range(len(x)).interleave(lambda i: x[int(i)])"
        )
    elif isinstance(data, set | frozenset):
        cure = "give it an order: sorted(x)"
    elif hasattr(data, "as_numpy_iterator"):
        kind, cure = "a Dataset already", "use it as it is"
    elif hasattr(data, "__next__"):
        cure = "it can be read but once: use Dataset.from_generator with the function that makes it"
    elif _has_rows(data):
        cure = "read its items by number: Dataset.from_random_access(x)"
    if cure is None:
        return None
    return f"`x` must be arrays (or dicts and tuples of them) with rows, but got {kind}; {cure}"


def _has_rows(data: Any) -> bool:
    """Whether this is some library's dataset: rows by number, and no array."""
    kinds = (str, bytes, list, tuple, dict)
    return (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, kinds)
        and not hasattr(data, "__array__")
        and not hasattr(data, "__array_interface__")
        and not hasattr(data, "__dlpack__")
        and not hasattr(data, "keys")
    )
