"""Bottleneck of a running pipeline, its cost, and what changes would bring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.execution.bottleneck import WAITING_SHARE, Bottleneck
from headrace.execution.pipeline_model import PipelineMeasurement, PipelineModel, Resource
from headrace.execution.what_if import WhatIf, predict_changes

__all__ = ["Capacity", "Diagnosis", "analyze"]

_MIN_FOREIGN_SHARE = 0.25
"""Share of the cores that other programs must use to be mentioned."""


@dataclass(frozen=True)
class Capacity:
    """Capacity of one resource.

    Attributes:
        resource: The resource.
        name: Its name in a sentence.
        elements_per_second: Rate at which it is busy all the time.
    """

    resource: Resource
    name: str
    elements_per_second: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Bottleneck of a pipeline, with its cost, and the effects of changes.

    Attributes:
        resource: Kind of the bottleneck.
        bottleneck: Its name, and advice.
        cost: Its cost; empty if it has none.
        elements_per_second: Present rate.
        capacities: Known capacities of the resources, lowest first.
        what_ifs: Changes by decreasing gain; none if the workers are not the bottleneck.
    """

    resource: Resource
    bottleneck: Bottleneck
    cost: str
    elements_per_second: float
    capacities: tuple[Capacity, ...]
    what_ifs: tuple[WhatIf, ...]


def analyze(measured: PipelineMeasurement) -> Diagnosis:
    """Return the bottleneck of a pipeline, and what changes would bring.

    >>> from headrace.execution.pipeline_model import StepCost
    >>> decode = StepCost(name="map at train.py:12", seconds=0.01)
    >>> measured = PipelineMeasurement(
    ...     elements_per_second=100, steps=(decode,), client_wait=0.9, client_capacity=1000
    ... )
    >>> found = analyze(measured)
    >>> found.bottleneck.location, found.cost
    ('map at train.py:12', "100% of the workers' time, 10 ms per element")
    >>> max(round(each.gain) for each in found.what_ifs)
    10
    """
    model = PipelineModel(measured)
    resource, bottleneck, cost = _find_bottleneck(model)
    return Diagnosis(
        resource=resource,
        bottleneck=bottleneck,
        cost=cost,
        elements_per_second=measured.elements_per_second,
        capacities=tuple(sorted(_capacities(model), key=lambda each: each.elements_per_second)),
        # A change of the workers is of no use to slow clients, and how a connection reacts to it is
        # not measured.
        what_ifs=() if resource in (Resource.NETWORK, Resource.CLIENTS) else predict_changes(model),
    )


def _capacities(model: PipelineModel) -> Iterator[Capacity]:
    measured = model.measured
    processors = model.processor_limit(measured.available_cores, measured.cpu_seconds).rate
    rates = (
        (Resource.WORKERS, "workers", model.worker_rate),
        (Resource.CLIENTS, "clients", model.client_limit.rate),
        (Resource.PROCESSORS, "workers' processors", processors),
    )
    for resource, name, rate in rates:
        if 0 < rate < math.inf:
            yield Capacity(resource, name, rate)


def _find_bottleneck(model: PipelineModel) -> tuple[Resource, Bottleneck, str]:
    """Return the bottleneck as `headrace top` does, but with its cost."""
    measured = model.measured
    if not measured.num_tasks:
        return (
            Resource.WORKERS,
            Bottleneck("missing workers", "no worker runs a task of this job; start one"),
            "",
        )
    if not measured.num_clients:
        advice = "tasks are idle until a client reconnects"
        return Resource.CLIENTS, Bottleneck("missing clients", advice), ""
    clients_wait, tasks_wait = measured.client_wait, measured.task_client_wait
    workers_limit = clients_wait >= max(WAITING_SHARE, tasks_wait / 2)
    clients_limit = tasks_wait >= max(WAITING_SHARE, clients_wait / 2)
    waits = f"clients wait {clients_wait:.0%} of the time, workers {tasks_wait:.0%}"
    if workers_limit and clients_limit:
        advice = (
            "move workers closer, send fewer bytes (compression, smaller dtypes), or raise "
            "max_outstanding_requests"
        )
        return Resource.NETWORK, Bottleneck("the connection", advice), waits
    if clients_limit:
        advice = "the training step, or steps after distribute(); fewer workers suffice"
        return Resource.CLIENTS, Bottleneck("the clients", advice), waits
    if not workers_limit:
        return Resource.NOTHING, Bottleneck("nothing", "workers and clients keep pace"), waits
    if measured.task_split_wait >= 0.5:
        cost = f"workers wait for splits {measured.task_split_wait:.0%} of the time"
        if measured.is_ending:
            advice = "all splits are assigned; the epoch ends when they are done"
            return Resource.SPLITS, Bottleneck("the last splits", advice), cost
        advice = "make splits larger: batch before distribute, larger files"
        return Resource.SPLITS, Bottleneck("split assignment", advice), cost
    step = max(measured.steps, key=lambda each: each.latency, default=None)
    if measured.elements_per_second <= 0:
        name = "the workers" if step is None else step.name
        advice = "no element was produced: watch it for longer, or see the logs of the workers"
        return Resource.WORKERS, Bottleneck(name, advice), ""
    advice = ""
    if measured.foreign_cores > _MIN_FOREIGN_SHARE * measured.cores:
        advice = (
            f"other programs use {measured.foreign_cores:.1f} of the {measured.cores:g} cores of "
            "the workers' machines"
        )
    if step is None or step.latency < model.other_seconds:
        return Resource.WORKERS, Bottleneck("the workers", advice or "add workers"), waits
    cost = f"{model.share(step):.0%} of the workers' time, {step.seconds * 1e3:.3g} ms per element"
    if step.threads:
        cost += f" on {step.threads} threads"
    return step.resource, Bottleneck(step.name, advice), cost
