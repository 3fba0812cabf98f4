"""Predicted effects of changes of a running pipeline.

A change raises the rate at most to the capacity of the next resource (`pipeline_model`). Only
changes whose prediction `python -m benchmarks what_if` compares with a measurement are predicted.
Where an effect depends on something that cannot be measured from outside, there are two figures:

* With more threads, one process takes at least its processor time per element if its functions hold
  the interpreter lock, and possibly less if they do not.
* Without a step that mostly waits, one process takes at least its processor time per element if
  that belongs to the other steps, and possibly less if some belongs to the step. Samples do not
  tell: those of Python code between two waits are too few, as the sampler waits for the lock.
* If other programs use the same cores, the workers get the idle ones, and possibly more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from headrace.execution.pipeline_model import Limit, PipelineModel, Resource, StepCost

__all__ = ["Change", "WhatIf", "predict_changes"]

_MIN_SHARE = 0.1
"""Share of the workers' time below which a step is not worth a change."""
_MIN_GAIN = 1.05
"""Factor below which two predictions are the same."""
_PARALLEL_CALLS = 4
_MAX_FACTOR = 10
"""Maximum factor by which more workers are suggested."""
_MAX_STEPS = 3
"""Maximum number of steps for which changes are predicted."""
_WAIT_FACTOR = 2.0
"""A step waits mostly if its time exceeds the processor time of the whole task by this factor."""
_SAVED_CPU = "more, if the step uses the processor itself"
_LOCK = "more, if the function waits or computes in NumPy"
_LOCK_OR_CORES = "more, if the function waits or computes in NumPy, and gets the cores"


class Change(Enum):
    """Kind of a change."""

    ADD_WORKERS = "add workers"
    ADD_LOCAL_WORKER = "add worker on the same machines"
    SPEED_UP_STEP = "speed up step"
    PARALLEL_CALLS = "parallel calls"
    SAVE_OUTPUT = "save output"


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predicted effect of one change.

    Attributes:
        kind: Kind of the change.
        step: Name of the step that is changed; empty if none is.
        change: The change, as an instruction.
        elements_per_second: Predicted rate.
        gain: Predicted rate over the present one.
        at_most: Rate under the most favourable assumption, if that is higher; else None.
        limited_by: What limits the rate after the change.
        note: Assumption.
    """

    kind: Change
    step: str = ""
    change: str
    elements_per_second: float
    gain: float
    at_most: float | None = None
    limited_by: str = ""
    note: str = ""


def predict_changes(model: PipelineModel) -> tuple[WhatIf, ...]:
    """Return the effects of changes, by decreasing gain."""
    measured = model.measured
    if measured.elements_per_second <= 0 or not measured.num_tasks or not measured.num_clients:
        return ()
    return tuple(sorted(_predictions(model), key=lambda each: (-each.gain, -(each.at_most or 0.0))))


def _predictions(model: PipelineModel) -> Iterator[WhatIf]:
    measured = model.measured
    # If all splits are assigned, another worker gets none.
    if not measured.is_ending:
        yield from _add_workers(model)
    costly = [each for each in measured.steps if model.share(each) >= _MIN_SHARE]
    costly.sort(key=lambda each: -each.latency)
    for step in costly[:_MAX_STEPS]:
        yield _speed_up(model, step)
        # A saved source has to be read again, too.
        if step.position >= 0 and step.kind != "cache" and step.resource is not Resource.SOURCE:
            yield _save(model, step)
        if step.kind == "map":
            yield _parallel_calls(model, step)


def _add_workers(model: PipelineModel) -> Iterator[WhatIf]:
    measured = model.measured
    now = measured.num_tasks
    counts = [1]
    demand = model.client_limit.rate
    if demand <= _MAX_FACTOR * model.worker_rate:
        needed = math.ceil(demand / model.worker_rate * now - 0.01) - now
        if needed > 1:
            counts.append(needed)
    name = model.slowest_name(measured.steps)
    for count in counts:
        limit = Limit(model.worker_rate * (now + count) / now, name)
        plural = "s" * (count > 1)
        yield _predict(
            model,
            Change.ADD_WORKERS,
            f"{count} more worker{plural}, on other machines",
            limit,
            note="the source must be able to serve them",
        )
        if count == 1:
            yield _predict(
                model,
                Change.ADD_LOCAL_WORKER,
                "1 more worker, on the same machines",
                limit,
                cpu=measured.cpu_seconds,
                note=""
                if measured.cores and measured.cpu_seconds
                else "assumes idle cores: the processor time of the workers is unknown",
            )


def _speed_up(model: PipelineModel, step: StepCost) -> WhatIf:
    faster = _replace(model.measured.steps, step, replace(step, seconds=step.seconds / 2))
    return _predict(
        model,
        Change.SPEED_UP_STEP,
        f"make {step.name} twice as fast",
        model.rate_of(faster),
        cpu=model.cpu_with(faster),
        step=step.name,
    )


def _save(model: PipelineModel, step: StepCost) -> WhatIf:
    rest = [each for each in model.measured.steps if each.position > step.position]
    # Workers that read parts of a dataset have no complete epoch that a cache could keep.
    cache = (
        "cache() before distribute keeps nothing"
        if model.measured.has_splits
        else "or cache() it, before a repeat()"
    )

    def predict(*limits: Limit) -> WhatIf:
        return _predict(
            model,
            Change.SAVE_OUTPUT,
            f"save() the output of {step.name}, and load() it",
            model.rate_of(rest),
            *limits,
            cpu=model.cpu_with(rest),
            step=step.name,
            note=f"if it is the same in every epoch; without the time to load it; {cache}",
        )

    best, cpu = predict(), model.measured.cpu_seconds
    if cpu is None or model.scale * step.latency < _WAIT_FACTOR * cpu:
        return best
    limit = Limit(model.measured.num_tasks / max(cpu, 1e-12), "processor time of the other steps")
    return _to_range(predict(limit), best, f"{best.note}; {_SAVED_CPU}")


def _parallel_calls(model: PipelineModel, step: StepCost) -> WhatIf:
    measured = model.measured
    threads = max(_PARALLEL_CALLS, 2 * step.threads)
    limit = model.rate_of(_replace(measured.steps, step, replace(step, threads=threads)))

    def predict(*limits: Limit) -> WhatIf:
        change = f"num_parallel_calls={threads} in {step.name}"
        cpu = measured.cpu_seconds
        return _predict(
            model, Change.PARALLEL_CALLS, change, limit, *limits, cpu=cpu, step=step.name
        )

    best = predict()
    # With one interpreter lock, a task takes at least its processor time per element. Without a
    # measurement, it may be busy all the time.
    cpu = model.task_seconds if measured.cpu_seconds is None else measured.cpu_seconds
    locked = predict(Limit(measured.num_tasks / max(cpu, 1e-12), "the interpreter lock"))
    return _to_range(locked, best, _LOCK if best.at_most is None else _LOCK_OR_CORES)


def _to_range(least: WhatIf, best: WhatIf, note: str) -> WhatIf:
    """Return the first prediction, with the rate of the second as the most favourable one."""
    most = best.at_most or best.elements_per_second
    if most < _MIN_GAIN * least.elements_per_second:
        return replace(least, at_most=None, note=best.note if best.at_most is None else "")
    return replace(least, at_most=most, note=note)


def _replace(steps: Sequence[StepCost], step: StepCost, changed: StepCost) -> tuple[StepCost, ...]:
    return tuple(changed if each is step else each for each in steps)


def _predict(
    model: PipelineModel,
    kind: Change,
    change: str,
    *limits: Limit,
    cpu: float | None = None,
    step: str = "",
    note: str = "",
) -> WhatIf:
    """Return the effect of a change that leaves these limits, and those of clients and processors.

    Args:
        model: The pipeline before the change.
        kind: Kind of the change.
        change: The change, as an instruction.
        limits: Limits after it.
        cpu: Processor time per element on the workers' machines after it; None if unknown.
        step: Name of the changed step.
        note: Assumption.
    """
    measured = model.measured
    now = measured.elements_per_second

    def lowest(cores: float) -> Limit:
        found = (*limits, model.client_limit, model.processor_limit(cores, cpu))
        limit = min(found, key=lambda each: each.rate)
        # Without any measured limit, nothing is promised.
        return limit if now < limit.rate < math.inf else Limit(now, limit.name)

    found, most = lowest(measured.available_cores), lowest(measured.cores)
    is_range = most.rate >= _MIN_GAIN * found.rate
    if is_range:
        busy = f"more, if it gets cores from other programs, which use {measured.foreign_cores:.1f}"
        note = f"{note}; {busy}" if note else busy
    return WhatIf(
        kind=kind,
        step=step,
        change=change,
        elements_per_second=found.rate,
        gain=found.rate / now,
        at_most=most.rate if is_range else None,
        limited_by=found.name,
        note=note,
    )
