"""Answers of workers, with the fields of a reading mode given beside the others."""

from __future__ import annotations

from typing import Any

from headrace.service.messages import ElementIds, GetElementsReply, RoundProgress, SkippedElements


def answer_of(**fields: Any) -> GetElementsReply:
    """Return an answer; `origins` are runs of `ElementIds`, `skipped` is of `SkippedElements`."""
    return GetElementsReply(
        **{
            "first_element": 0,
            "num_elements": 0,
            "end_of_task": False,
            **in_mode(fields, "mode_data"),
        }
    )


def in_mode(fields: dict[str, Any], field: str = "mode") -> dict[str, Any]:
    """Return fields of a reply, with those of a reading mode in a separate record."""
    rest = dict(fields)
    if "origins" in rest:
        rest["runs"] = rest.pop("origins")
    for kind in (ElementIds, RoundProgress):
        own = {name: rest.pop(name) for name in kind.__struct_fields__ if name in rest}
        if own:
            rest[field] = kind(**own)
    if "skipped" in rest:
        rest[field] = SkippedElements(count=rest.pop("skipped"))
    return rest
