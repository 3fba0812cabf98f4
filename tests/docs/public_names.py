"""The public packages of Headrace, and the classes and functions in them, with their docstrings."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import headrace as hr

#: Framework that is imported when the first name of a package is used.
FRAMEWORKS = {
    "headrace.grain": "grain",
    "headrace.jax": "jax",
    "headrace.keras": "keras",
    "headrace.torch": "torch",
}


def public_packages() -> dict[str, ModuleType]:
    """Map `headrace` and each module in the `__all__` of a public package to the module."""
    packages: dict[str, ModuleType] = {}
    waiting: list[tuple[str, ModuleType]] = [("headrace", hr)]
    while waiting:
        path, package = waiting.pop(0)
        packages[path] = package
        if path not in FRAMEWORKS:  # reading a name would import the framework
            for name in package.__all__:
                if isinstance(value := getattr(package, name), ModuleType):
                    waiting.append((f"{path}.{name}", value))
    return packages


def is_missing(path: str) -> bool:
    """Return whether the framework of a package is not installed."""
    return path in FRAMEWORKS and importlib.util.find_spec(FRAMEWORKS[path]) is None


def documented(path: str, package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a package, by full name."""
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type | FunctionType):
            yield f"{path}.{name}", value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that Headrace defines, by name."""
    for name in sorted({name for base in kind.__mro__ for name in vars(base)}):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if not isinstance(value, FunctionType | property):
            continue
        function = value.fget if isinstance(value, property) else value
        if getattr(function, "__module__", "").startswith("headrace"):
            yield name, value
