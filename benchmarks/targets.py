"""Targets of development, which the command line compares with the measurements.

They are no part of RESULTS.md.
"""

from __future__ import annotations

from benchmarks.formats import cost, ratio_text, workload_rate
from benchmarks.measure import Measurement, ratio
from benchmarks.workload import Bound, Target, Workload

__all__ = ["outcomes"]


def outcomes(workload: Workload, measurements: list[Measurement]) -> dict[str, bool | None]:
    """Return whether each target is met, by its description; None if that is unknown."""
    by_name = {m.contender: m for m in measurements}
    found: dict[str, bool | None] = {}
    for target in workload.targets:
        text, is_met = (
            _bound(target, by_name[target.by])
            if isinstance(target, Bound)
            else _target(target, by_name, workload)
        )
        found[f"{workload.name}, {target.by}: {text}"] = is_met
    return found


def _bound(bound: Bound, measured: Measurement) -> tuple[str, bool | None]:
    text = f"at most {cost(bound.at_most)} per item"
    if measured.rate is None:
        return text, None
    return f"{text}, measured {cost(1 / measured.rate)}", 1 / measured.rate <= bound.at_most


def _target(
    target: Target, by_name: dict[str, Measurement], workload: Workload
) -> tuple[str, bool | None]:
    measured = by_name[target.by]
    shown = workload_rate(measured.rate, workload)
    if not target.of:
        text = f"at least {workload_rate(target.at_least, workload)}, measured {shown}"
        return text, None if measured.rate is None else measured.rate >= target.at_least
    of = target.of[0] if len(target.of) == 1 else "the fastest of " + ", ".join(target.of)
    text = f"{target.at_least:.3g}x {of}"
    if target.or_rate is not None:
        text += f" or {workload_rate(target.or_rate, workload)}"
        if measured.rate is not None and measured.rate >= target.or_rate:
            return f"{text}, measured {shown}", True
    peers = [by_name[name] for name in target.of]
    reached = ratio(measured, peers, of_best_median=target.of_best_median)
    if reached is None:
        return text, None
    return f"{text}, measured {ratio_text(reached)}", reached >= target.at_least
