"""Error messages for unknown arguments of functions and classes, with a remedy."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["ARGUMENT_NAMES", "explain_unknown_arguments", "explain_unknown_options"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

#: Names of arguments in other libraries, and their names here; the first that a function has.
ARGUMENT_NAMES = {
    "column_names": ("columns",),
    "compression": ("compression_type",),
    "data_files": ("filenames",),
    "drop_last": ("drop_remainder",),
    "dtype": ("output_type", "dtypes"),
    "eps": ("epsilon",),
    "field_delim": ("delimiter",),
    "fn": ("map_func", "predicate", "cost_fn", "reduce_func", "scan_func", "class_func"),
    "image_size": ("size",),
    "local": ("directory",),
    "lr": ("learning_rate",),
    "max_tokens": ("max_cost", "length"),
    "n_jobs": ("num_processes", "num_parallel_calls"),
    "names": ("columns",),
    "num_packing_bins": ("num_bins",),
    "num_proc": ("num_processes", "num_parallel_calls"),
    "num_workers": ("num_processes",),
    "paths": ("filenames", "urls"),
    "quotechar": ("quote",),
    "remote": ("directory", "uri"),
    "select_cols": ("columns",),
    "sep": ("delimiter",),
    "skip": ("header_bytes",),
    "usecols": ("columns",),
    "use_quote_delim": ("quote",),
    "window_size": ("size",),
}


def explain_unknown_arguments(function: F, alternatives: Mapping[str, str] | None = None) -> F:
    """Make a function, or the constructor of a class, raise a TypeError with a remedy.

    Args:
        function: The function or class. One that accepts any keyword is left as it is.
        alternatives: Remedies by the name of the unknown argument.
    """
    if isinstance(function, type):
        constructor = explain_unknown_arguments(function.__init__, alternatives)  # type: ignore[misc]
        function.__init__ = constructor  # type: ignore[misc]
        return function
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    known = {each.name for each in parameters if each.kind not in unnamed}
    num_bound = sum(each.name in ("self", "cls") for each in parameters[:1])
    only_named = [
        each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "name"
    ]
    limit = (
        math.inf
        if any(each.kind is each.VAR_POSITIONAL for each in parameters)
        else sum(each.kind is not each.KEYWORD_ONLY for each in parameters)
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > limit and only_named:
            raise TypeError(
                f"{_called_name(function)}() takes at most {limit - num_bound} arguments by "
                f"position, but got {len(args) - num_bound}; pass {', '.join(only_named)} by name"
            )
        if kwargs and not known.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in known)
            raise TypeError(_message(_called_name(function), unknown, parameters, alternatives))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def explain_unknown_options(base: C) -> C:
    """Explain unknown arguments of a class, and of subclasses that pass options on to it.

    Args:
        base: Class whose constructor accepts the options by keyword only.
    """
    constructor = base.__init__  # type: ignore[misc]
    parameters = inspect.signature(constructor).parameters.values()
    options = [each for each in parameters if each.kind is each.KEYWORD_ONLY]

    @functools.wraps(constructor)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if all(name != each.name for each in parameters):
                own = inspect.signature(type(self)).parameters.values()
                raise TypeError(_message(type(self).__name__, name, [*own, *options], None))
        constructor(self, *args, **kwargs)

    base.__init__ = call  # type: ignore[misc]
    return base


def _called_name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _message(
    called: str,
    name: str,
    parameters: Iterable[inspect.Parameter],
    alternatives: Mapping[str, str] | None,
) -> str:
    message = f"{called}() has no argument {name!r}"
    known = dict.fromkeys(
        each.name
        for each in parameters
        if each.name not in ("self", "cls") and each.kind is not each.VAR_KEYWORD
    )
    same = [each for each in ARGUMENT_NAMES.get(name, ()) if each in known]
    if same:
        return f"{message}; it is called {same[0]}"
    if alternatives is not None and name in alternatives:
        return f"{message}; {alternatives[name]}"
    containing = [each for each in known if name in each]
    near = difflib.get_close_matches(name, containing, n=1)
    near = near or difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{message}; did you mean {near[0]!r}?"
    return f"{message}; it has: {', '.join(known) or 'none'}"
