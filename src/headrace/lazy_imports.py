"""Lazy loading of a package's names on first use.

A package with many modules would otherwise load all of them, and their dependencies, for users of
one. Type checkers and editors read the same names from imports under `TYPE_CHECKING`; a test
compares the two.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_attributes"]


def lazy_attributes(
    package: str, modules: Mapping[str, str], missing: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: The package's own name.
        modules: The module that holds each name: `module` for a name that it has too,
            `module:other` for what is called otherwise there, `module:` for the module itself.
        missing: `module:function` that says what is wrong with another name; it gets the package,
            the name and those that there are.
    """

    def load(name: str) -> Any:
        home = modules.get(name)
        if home is None:
            message = f"module {package!r} has no attribute {name!r}"
            if missing is not None and not name.startswith("_"):
                module_name, _, function = missing.partition(":")
                message = getattr(importlib.import_module(module_name), function)(
                    package, name, list(modules)
                )
            raise AttributeError(message, name=name, obj=sys.modules[package])
        module_name, colon, attribute = home.partition(":")
        value = importlib.import_module(module_name)
        if attribute or not colon:
            value = getattr(value, attribute or name)
        # Found without a call from now on.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(modules)

    return load, names
