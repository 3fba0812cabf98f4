"""An extension of Griffe that makes signatures of the API reference readable without the source.

* A type alias that no page describes is replaced by its value, such as the strings of a `Literal`.
* A private callback protocol is replaced by the `Callable` that it stands for.
* A constructor with a required parameter of a private class is hidden: only Headrace calls it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import griffe

PACKAGE = "headrace"

#: The section of a docstring about the arguments of a constructor.
ARGUMENTS = re.compile(r"^Args:\n(?:(?: .*)?\n)*", re.MULTILINE)


class Signatures(griffe.Extension):
    """Rewrites the annotations of a package after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self._public: set[str] = set()
        self._modules: Any = {}

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Rewrite all annotations of the package."""
        if pkg.path != PACKAGE:
            return
        self._modules = pkg.modules_collection
        self._public = {each.canonical_path for each in _exported(pkg)}
        for each in _classes_and_functions(pkg):
            if isinstance(each, griffe.Function):
                for parameter in each.parameters:
                    parameter.annotation = self._expand(parameter.annotation)
                each.returns = self._expand(each.returns)
            else:
                for member in each.members.values():
                    if isinstance(member, griffe.Attribute):
                        member.annotation = self._expand(member.annotation)
        public = [self._modules[path] for path in self._public]
        classes = [each for each in public if isinstance(each, griffe.Class)]
        for made in [each for each in classes if self._is_made_by_headrace(each)]:
            for each in (made, *made.mro()):
                each.members.pop("__init__", None)
            if made.docstring is not None:
                made.docstring.value = ARGUMENTS.sub("", f"{made.docstring.value}\n")

    def _expand(self, annotation: Any) -> Any:
        """Return an annotation without private aliases and protocols."""
        if isinstance(annotation, griffe.ExprName):
            return self._meaning(annotation) or annotation
        if isinstance(annotation, list | tuple):
            return type(annotation)(self._expand(each) for each in annotation)
        if not isinstance(annotation, griffe.Expr):
            return annotation
        fields = [field.name for field in dataclasses.fields(annotation) if field.init]
        values = {name: self._expand(getattr(annotation, name)) for name in fields}
        return dataclasses.replace(annotation, **values)

    def _meaning(self, name: griffe.ExprName) -> Any:
        """Return what a private name stands for; None if it is public, or stands for a class."""
        found = self._find(name)
        if found is None or found.canonical_path in self._public:
            return None
        if isinstance(found, griffe.Attribute) and _is_alias(found):
            value = self._expand(found.value)
            if not isinstance(value, griffe.Expr):  # as a string
                return None
            names = [each for each in value.iterate() if isinstance(each, griffe.ExprName)]
            return None if any(map(self._is_private, names)) or str(value) == "Any" else value
        calls = found.overloads.get("__call__") if isinstance(found, griffe.Class) else None
        if calls:
            return _callable(
                [each.annotation for each in calls[0].parameters][1:], calls[0].returns
            )
        return None

    def _find(self, name: griffe.ExprName) -> Any:
        """Return what a name of the package refers to."""
        path = name.canonical_path
        if not path.startswith(f"{PACKAGE}."):
            return None
        try:
            found = self._modules[path]
            return found.final_target if found.is_alias else found
        except (KeyError, griffe.AliasResolutionError):
            return None

    def _is_private(self, name: griffe.ExprName) -> bool:
        found = self._find(name)
        return found is not None and found.canonical_path not in self._public

    def _is_made_by_headrace(self, described: griffe.Class) -> bool:
        """Return whether the constructor has a required parameter of a private class."""
        init = described.all_members.get("__init__")
        return init is not None and any(
            isinstance(self._find(name), griffe.Class) and self._is_private(name)
            for parameter in getattr(init, "parameters", ())
            if parameter.required and isinstance(parameter.annotation, griffe.Expr)
            for name in parameter.annotation.iterate()
            if isinstance(name, griffe.ExprName)
        )


def _exported(package: Any) -> Iterator[Any]:
    """Yield what a public package and those in its `__all__` export."""
    for name in package.exports or ():
        member = package[str(name)]
        if member.is_module:
            yield from _exported(member)
        else:
            yield member


def _classes_and_functions(module: Any) -> Iterator[griffe.Class | griffe.Function]:
    """Yield the classes and functions that a module or class defines, with overloads."""
    for overloads in getattr(module, "overloads", {}).values():
        yield from overloads
    for member in module.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Class | griffe.Module):
            if isinstance(member, griffe.Class):
                yield member
            yield from _classes_and_functions(member)


def _is_alias(attribute: griffe.Attribute) -> bool:
    value = str(attribute.value)
    return str(attribute.annotation) == "TypeAlias" or value.startswith("Literal[")


def _callable(parameters: list[Any], result: Any) -> griffe.Expr:
    arguments = griffe.ExprTuple([griffe.ExprList(parameters), result], implicit=True)
    return griffe.ExprSubscript(griffe.ExprName("Callable"), arguments)
