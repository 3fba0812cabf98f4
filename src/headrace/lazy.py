"""Names of a package that are loaded when they are first used.

A package that offers many rooms would else load all of them, and what they need of others, for
whoever uses one. Type checkers and editors read the same names from imports under `TYPE_CHECKING`;
a test compares the two.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(
    package: str, homes: Mapping[str, str], absent: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: The package's own name.
        homes: The module that holds each name: `module` for a name that it has too, `module:other`
            for what is called otherwise there, `module:` for the module itself.
        absent: `module:function` that says what is wrong with another name; it gets the package,
            the name and those that there are.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            words = f"module {package!r} has no attribute {name!r}"
            if absent is not None and not name.startswith("_"):
                module_name, _, function = absent.partition(":")
                words = getattr(importlib.import_module(module_name), function)(
                    package, name, list(homes)
                )
            raise AttributeError(words, name=name, obj=sys.modules[package])
        module_name, colon, attribute = home.partition(":")
        value = importlib.import_module(module_name)
        if attribute or not colon:
            value = getattr(value, attribute or name)
        # Found without a call from now on.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(homes)

    return load, names
