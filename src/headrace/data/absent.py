"""What to say to whoever asks for what a Dataset does not have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

__all__ = ["no_slices", "no_such_method"]

_IN_A_GENERATOR = (
    "a generator over the dataset does it in one process: "
    "Dataset.from_generator(lambda: steps(dataset))"
)
_IN_A_FILE = "save(path) keeps the elements of a pass in a directory, Dataset.load(path) reads them"

#: Names of tf.data, old and new, and what does their work here.
_ELSEWHERE = {
    "as_iterator": "iterate over it: `for element in dataset`, or iter(dataset)",
    "distribute": "dataset.apply(hr.service.distribute(...))",
    "from_list": "Dataset.from_generator(lambda: items)",
    "get_single_element": "next(iter(dataset))",
    "ignore_errors": "catch the error in the function, and filter() what it returns then",
    "make_initializable_iterator": "iter(dataset)",
    "make_one_shot_iterator": "iter(dataset)",
    "map_with_legacy_function": "map()",
    "numpy": "elements are NumPy already",
    "output_classes": "element_spec",
    "output_shapes": "element_spec",
    "output_types": "element_spec",
    "ragged_batch": "padded_batch(), with the lengths beside it: map(lambda x: (x, len(x)))",
    "reduce": "functools.reduce(function, dataset, first)",
    "rejection_resample": _IN_A_GENERATOR,
    "snapshot": _IN_A_FILE,
    "unique": _IN_A_GENERATOR,
    "window": "of an array np.lib.stride_tricks.sliding_window_view; else " + _IN_A_GENERATOR,
}


def no_such_method(name: str, known: Sequence[str]) -> str:
    """Return what is wrong with a name, and what would do: a nearby name, or another way."""
    if name in _ELSEWHERE:
        return f"Dataset has no {name!r}; what does its work: {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, [*known, *_ELSEWHERE], n=1)
    if near and near[0] in known:
        return f"Dataset has no method {name!r}; did you mean {near[0]!r}?"
    if near:
        return f"Dataset has no method {name!r}, and no {near[0]!r}; {_ELSEWHERE[near[0]]}"
    return f"Dataset has no method {name!r}; it has: {', '.join(known)}"


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
