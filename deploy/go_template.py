"""The subset of Go templates, with Helm's functions, that the Helm chart uses.

Stricter than Helm: an unknown function or key, a nil, map or list that would be printed, and a
syntax outside the subset are errors. Where it renders a template, Helm renders the same YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import yaml

__all__ = ["TemplateError", "Templates"]


class TemplateError(ValueError):
    """A template that is wrong, or outside the subset; names the file and line."""


@dataclass(frozen=True)
class _Scope:
    """The dot and the variables of a block; `$` is the variable with the empty name."""

    dot: Any
    variables: dict[str, Any]

    def block(self, dot: Any, **variables: Any) -> _Scope:
        return _Scope(dot, {**self.variables, **variables})


_Part = Callable[[_Scope], str]
_Value = Callable[[_Scope], Any]


class Templates:
    """Named templates that can include each other."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}

    def add(self, name: str, source: str) -> None:
        """Parse a file; each `define` block in it becomes another template."""
        self.parts[name] = _Parser(name, source, self.parts).parse_file()

    def render(self, name: str, dot: Any) -> str:
        """Return the text of a template for the given dot."""
        return _include(self.parts, name, dot)


def _include(parts: Mapping[str, _Part], name: str, dot: Any) -> str:
    if name not in parts:
        raise TemplateError(f"no template {name!r} is defined")
    return parts[name](_Scope(dot, {"": dot}))


_ACTION = re.compile(r"\{\{(-(?=\s))?(.*?)((?<=\s)-)?\}\}", re.DOTALL)
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*")|(?P<number>-?\d+)|(?P<symbol>:=|[()|,])"""
    r"""|(?P<path>\$\w*(?:\.\w+)*|(?:\.\w+)+|\.)|(?P<word>\w+))"""
)
_CONSTANTS = {"true": True, "false": False, "nil": None}


@dataclass(frozen=True)
class _Item:
    """A piece of text (`tokens` is None) or an action."""

    text: str
    line: int
    tokens: list[tuple[str, str]] | None = None

    @property
    def keyword(self) -> str:
        return self.tokens[0][1] if self.tokens and self.tokens[0][0] == "word" else ""


class _Parser:
    """Turns one file into functions that render it."""

    def __init__(self, name: str, source: str, templates: dict[str, _Part]) -> None:
        self._name, self._line = name, 1
        self._templates = templates
        self._items = self._split(source)

    def parse_file(self) -> _Part:
        part, end = self._block()
        if end is not None:
            raise self._error(f"{end.text!r} without a block")
        return part

    def _error(self, problem: str) -> TemplateError:
        return TemplateError(f"{self._name}:{self._line}: {problem}")

    def _split(self, source: str) -> list[_Item]:
        items: list[_Item] = []
        position, trim = 0, False
        for match in [*_ACTION.finditer(source), None]:
            text = source[position : match.start() if match else None]
            text = text.lstrip() if trim else text
            if match and match[1]:
                text = text.rstrip()
            self._line = source.count("\n", 0, position) + 1
            if text:
                items.append(_Item(text, self._line))
            if match is None:
                break
            self._line = source.count("\n", 0, match.start()) + 1
            position, trim = match.end(), bool(match[3])
            body = match[2].strip()
            if not (body.startswith("/*") and body.endswith("*/")):
                items.append(_Item(body, self._line, self._tokens(body)))
        return items

    def _tokens(self, body: str) -> list[tuple[str, str]]:
        tokens, position = [], 0
        while position < len(body):
            match = _TOKEN.match(body, position)
            if match is None or match.lastgroup is None:
                raise self._error(f"cannot parse {body[position:]!r} in {body!r}")
            if match.lastgroup == "path" and body[:position].endswith(")") and match[0][0] == ".":
                raise self._error(f"a field of an expression in parentheses: {body!r}")
            tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        return tokens

    def _block(self) -> tuple[_Part, _Item | None]:
        """Parse up to `else` or `end`, which is returned, or to the end of the file."""
        parts: list[_Part] = []
        end = None
        while self._items:
            item = self._items.pop(0)
            self._line = item.line
            if item.tokens is None:
                parts.append(lambda scope, text=item.text: text)  # type: ignore[misc]
            elif item.keyword in ("else", "end"):
                end = item
                break
            else:
                parts.append(self._action(item.tokens, item.keyword))
        return lambda scope: "".join([part(scope) for part in parts]), end

    def _body(self) -> _Part:
        part, end = self._block()
        if end is None or end.keyword != "end":
            raise self._error("a block without `end`")
        return part

    def _branches(self) -> tuple[_Part, _Part]:
        """Parse the parts of a block before and after `else`."""
        part, end = self._block()
        if end is None or end.tokens is None:
            raise self._error("a block without `end`")
        if end.keyword == "end":
            return part, lambda scope: ""
        if len(end.tokens) == 1:
            return part, self._body()
        if end.tokens[1] != ("word", "if"):
            raise self._error(f"only `else` and `else if` are supported, not {end.text!r}")
        return part, self._action(end.tokens[1:], "if")

    def _action(self, tokens: list[tuple[str, str]], keyword: str) -> _Part:
        if keyword == "define":
            if len(tokens) != 2 or tokens[1][0] != "string":
                raise self._error("`define` takes a name in quotes")
            self._templates[json.loads(tokens[1][1])] = self._body()
            return lambda scope: ""
        if keyword in ("if", "with", "range"):
            names, tokens = _variables(tokens[1:])
            block: _Part = _BLOCKS[keyword](self._pipeline(tokens), names, *self._branches())
            return block
        names, tokens = _variables(tokens)
        value, where = self._pipeline(tokens), self._error("")
        if not names:
            return lambda scope: _text(value(scope), str(where))

        def assign(scope: _Scope) -> str:
            scope.variables[names[0]] = value(scope)
            return ""

        return assign

    def _pipeline(self, tokens: list[tuple[str, str]]) -> _Value:
        value = self._commands(tokens)
        if tokens:
            raise self._error(f"unexpected {tokens[0][1]!r}")
        return value

    def _commands(self, rest: list[tuple[str, str]]) -> _Value:
        """Parse commands separated by `|`, up to a closing parenthesis."""
        value: _Value | None = None
        while True:
            value = self._command(rest, value)
            if not rest or rest[0][1] != "|":
                return value
            del rest[0]

    def _command(self, rest: list[tuple[str, str]], piped: _Value | None) -> _Value:
        operands: list[_Value] = []
        function = None
        if rest and rest[0][0] == "word" and rest[0][1] not in _CONSTANTS:
            function = rest.pop(0)[1]
            if function not in _FUNCTIONS and function not in ("include", "and", "or"):
                raise self._error(f"unknown function {function!r}")
        while rest and rest[0][1] not in ("|", ")"):
            operands.append(self._operand(*rest.pop(0), rest))
        if piped is not None:
            operands.append(piped)
        if function is None:
            if len(operands) != 1:
                raise self._error("expected a function or one value")
            return operands[0]
        return self._call(function, operands, self._error(f"function {function!r}"))

    def _call(self, name: str, operands: list[_Value], where: TemplateError) -> _Value:
        def call(scope: _Scope) -> Any:
            if name in ("and", "or"):  # the last value that was needed
                found = None
                for operand in operands:
                    found = operand(scope)
                    if bool(found) is (name == "or"):
                        break
                return found
            arguments = [operand(scope) for operand in operands]
            try:
                if name == "include":
                    return _include(self._templates, *arguments)
                return _FUNCTIONS[name](*arguments)
            except (TypeError, ValueError) as error:
                raise TemplateError(f"{where}: {error}") from error

        return call

    def _operand(self, kind: str, text: str, rest: list[tuple[str, str]]) -> _Value:
        if text == "(":
            value = self._commands(rest)
            if not rest or rest.pop(0)[1] != ")":
                raise self._error("a parenthesis is not closed")
            return value
        if kind == "path":
            return self._path(text)
        if kind not in ("string", "number") and text not in _CONSTANTS:
            raise self._error(f"unexpected {text!r}")
        constant = _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
        return lambda scope: constant

    def _path(self, text: str) -> _Value:
        first, *fields = text.split(".")
        fields = [field for field in fields if field]
        where = self._error(text)

        def find(scope: _Scope) -> Any:
            value = scope.dot
            if first:
                if first[1:] not in scope.variables:
                    raise TemplateError(f"{where}: undefined variable")
                value = scope.variables[first[1:]]
            for field in fields:
                if not isinstance(value, Mapping) or field not in value:
                    raise TemplateError(f"{where}: there is no {field!r}")
                value = value[field]
            return value

        return find


def _variables(tokens: list[tuple[str, str]]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split `$a, $b := pipeline` into the names, without `$`, and the pipeline."""
    if ("symbol", ":=") not in tokens:
        return [], tokens
    index = tokens.index(("symbol", ":="))
    return [text[1:] for kind, text in tokens[:index] if kind == "path"], tokens[index + 1 :]


def _if(value: _Value, names: list[str], then: _Part, otherwise: _Part, dot: bool = False) -> _Part:
    def render(scope: _Scope) -> str:
        found = value(scope)
        block = scope.block(found if dot and found else scope.dot, **dict.fromkeys(names, found))
        return then(block) if found else otherwise(block)

    return render


def _range(value: _Value, names: list[str], then: _Part, otherwise: _Part) -> _Part:
    def render(scope: _Scope) -> str:
        found = value(scope)
        if isinstance(found, str | int):
            raise TemplateError(f"cannot iterate over {found!r}")
        pairs = sorted(found.items()) if isinstance(found, Mapping) else list(enumerate(found))
        texts = [
            then(scope.block(item, **dict(zip(names[::-1], (item, key), strict=False))))
            for key, item in pairs
        ]
        return "".join(texts) if texts else otherwise(scope.block(scope.dot))

    return render


_BLOCKS: dict[str, Any] = {"if": _if, "with": partial(_if, dot=True), "range": _range}


def _text(value: Any, where: str = "") -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, int) and abs(value) < 1_000_000:  # Helm prints larger ones as 1e+06
        return str(value)
    raise TemplateError(f"{where}cannot print {value!r}")


def _nindent(width: int, text: str) -> str:
    return "".join(["\n" + " " * width + line for line in text.split("\n")])


class _Dumper(yaml.SafeDumper):
    """Quotes `y` and `n`, which other parsers read as booleans."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))


def _to_yaml(value: Any) -> str:
    text = str(yaml.dump(value, Dumper=_Dumper, default_flow_style=False, allow_unicode=True))
    return text.removesuffix("\n").removesuffix("\n...")


def _required(problem: str, value: Any) -> Any:
    if value is None or value == "":
        raise TemplateError(problem)
    return value


def _fail(problem: str) -> NoReturn:
    raise TemplateError(problem)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(map(int, numbers)),
    "default": lambda fallback, value: value or fallback,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "eq": lambda value, *others: value in others,
    "fail": _fail,
    "gt": lambda value, other: value > other,
    "int": int,
    "nindent": _nindent,
    "printf": lambda form, *values: re.sub("%d", "%s", form) % tuple(map(_text, values)),
    "quote": lambda value: json.dumps(_text(value), ensure_ascii=False),
    "required": _required,
    "toYaml": _to_yaml,
    "until": range,
}
