"""Answers of workers, with the fields of a reading mode given beside the others."""

from __future__ import annotations

from typing import Any

from headrace.service.messages import ElementOrigins, Elements, RoundProgress, Skipped


def answer_of(**fields: Any) -> Elements:
    """Return an answer; `origins` are the runs of `ElementOrigins`, `skipped` is of `Skipped`."""
    return Elements(**{"first": 0, "count": 0, "end": False, **in_mode(fields)})


def in_mode(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of an answer or a portion, those of a reading mode in a record of their own."""
    rest = dict(fields)
    if "origins" in rest:
        rest["runs"] = rest.pop("origins")
    for kind in (ElementOrigins, RoundProgress):
        own = {name: rest.pop(name) for name in kind.__struct_fields__ if name in rest}
        if own:
            rest["mode"] = kind(**own)
    if "skipped" in rest:
        rest["mode"] = Skipped(count=rest.pop("skipped"))
    return rest
