"""Model of a running pipeline: its bottleneck, and what a change would bring.

A model of linear utilisation, after Plumber (Kuchnik et al., "Plumber: Diagnosing and Removing
Performance Bottlenecks in Machine Learning Data Pipelines", MLSys 2022). Each resource has a
capacity in elements per second: the rate at which it would be busy all the time. The resource with
the lowest capacity limits the pipeline, and a change can raise the rate at most to the capacity of
the next one.

Workers. A task that did not wait for clients would produce `rate / (1 - wait)`. Its time per
    element is explained by the measured seconds of its steps: steps without threads take turns in
    one thread, so their seconds add up; a step with n threads takes 1/n of its seconds at the same
    time. The longest of these is the time per element. What the steps do not explain, such as
    sending, belongs to the steps without threads. Waits for splits are added. The sum is scaled so
    that it agrees with the measured rate.
Clients. A client that never waited for elements would take `rate / (1 - wait)`.
Connection. Its capacity is known only while it is the bottleneck: both ends wait.
Processors. Elements per second are at most `cores / processor time per element`. Whether a function
    holds the interpreter lock cannot be measured from outside. With more threads, one process takes
    at least its processor time per element if it does, and possibly less if it does not, so there
    are two figures.

Costs are assumed to be constant: those of a cache, of contention for memory and of other programs
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from headrace.execution.bottleneck import WAITING_SHARE, Bottleneck

__all__ = [
    "Capacity",
    "Change",
    "Diagnosis",
    "PipelineMeasurement",
    "Resource",
    "StepCost",
    "WhatIf",
    "analyze",
]

_SOURCE_KINDS = ("source", "indices", "gather", "read", "read_splits")
_FUNCTION_KINDS = ("map", "filter", "scan", "take_while")
_MIN_SHARE = 0.1
"""Share of the workers' time below which a step is not worth a change."""
_MIN_GAIN = 1.05
"""Factor below which a predicted change is not worth mentioning."""
_PARALLEL_CALLS = 4
_MIN_BUSY_SHARE = 0.02
"""Smallest share of busy time from which a capacity is extrapolated."""
_MAX_FACTOR = 100
"""Maximum factor by which more workers are suggested."""
_MAX_STEPS = 3
"""Maximum number of steps for which changes are predicted."""


class Resource(Enum):
    """What can limit a pipeline."""

    SOURCE = "source"
    FUNCTIONS = "user functions"
    STEPS = "steps"
    SPLITS = "splits"
    PROCESSORS = "processors"
    NETWORK = "network"
    CLIENTS = "clients"
    WORKERS = "workers"
    NOTHING = "nothing"


class Change(Enum):
    """Kind of a change."""

    ADD_WORKERS = "add workers"
    ADD_LOCAL_WORKER = "add worker on the same machines"
    SPEED_UP_STEP = "speed up step"
    PARALLEL_CALLS = "parallel calls"
    KEEP_OUTPUT = "keep output"
    PREFETCH = "prefetch"
    LARGER_SPLITS = "larger splits"
    FEWER_BYTES = "fewer bytes"


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one step on the workers.

    Attributes:
        name: Kind of the step and the user's line: "map at train.py:12".
        seconds: Seconds per element of the output of the plan, summed over threads.
        position: Number in the plan, inputs first; -1 if unknown.
        threads: Number of threads that call its function; 0 without such threads.
    """

    name: str
    seconds: float
    position: int = -1
    threads: int = 0

    @property
    def kind(self) -> str:
        """Kind of the step."""
        return self.name.partition(" ")[0]

    @property
    def resource(self) -> Resource:
        """Resource that the step belongs to."""
        if self.kind in _SOURCE_KINDS:
            return Resource.SOURCE
        return Resource.FUNCTIONS if self.kind in _FUNCTION_KINDS else Resource.STEPS

    @property
    def latency(self) -> float:
        """Seconds per element if all threads of the step are busy."""
        return self.seconds / max(1, self.threads)


@dataclass(frozen=True, kw_only=True)
class PipelineMeasurement:
    """Measured rates of one epoch of a job.

    Attributes:
        elements_per_second: Elements that all tasks produced per second.
        num_tasks: Number of tasks that produce elements at the same time.
        steps: Costs of the steps.
        num_clients: Number of clients that read.
        client_wait: Mean fraction of the time that clients waited for elements.
        task_client_wait: Mean fraction of the time that tasks waited for clients.
        task_split_wait: Mean fraction of the time that tasks waited for splits.
        client_capacity: Elements per second that the clients would take; None if unknown.
        bytes_per_element: Size of an element as it is sent.
        cores: Cores of the machines of the workers; 0.0 if unknown.
        cpu_seconds: Processor time of the workers per element; None if unknown.
        is_ending: Whether all splits are assigned.
    """

    elements_per_second: float
    num_tasks: int = 1
    steps: tuple[StepCost, ...] = ()
    num_clients: int = 1
    client_wait: float = 0.0
    task_client_wait: float = 0.0
    task_split_wait: float = 0.0
    client_capacity: float | None = None
    bytes_per_element: float = 0.0
    cores: float = 0.0
    cpu_seconds: float | None = None
    is_ending: bool = False


@dataclass(frozen=True)
class Capacity:
    """Capacity of one resource.

    Attributes:
        resource: The resource.
        name: Its name in a sentence.
        elements_per_second: Rate at which it is busy all the time; None if unknown.
    """

    resource: Resource
    name: str
    elements_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predicted effect of one change.

    Attributes:
        kind: Kind of the change.
        step: Name of the step that is changed; empty if none is.
        change: The change, as an instruction.
        elements_per_second: Predicted rate; None if it cannot be predicted.
        gain: Predicted rate over the present one; None if it cannot be predicted.
        at_most: Rate under the most favourable assumption, if that is higher; else None.
        limited_by: What limits the rate after the change.
        note: Assumption, or the reason why there is no prediction.
    """

    kind: Change
    step: str = ""
    change: str
    elements_per_second: float | None
    gain: float | None
    at_most: float | None = None
    limited_by: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Bottleneck of a pipeline, with its cost, and the effects of changes.

    Attributes:
        resource: Kind of the bottleneck.
        bottleneck: Its name, and advice.
        cost: Its cost; empty if it has none.
        elements_per_second: Present rate.
        capacities: Capacities of the resources, lowest first; unknown ones last.
        what_ifs: Changes by decreasing gain; those without a prediction last.
    """

    resource: Resource
    bottleneck: Bottleneck
    cost: str
    elements_per_second: float
    capacities: tuple[Capacity, ...]
    what_ifs: tuple[WhatIf, ...]


def analyze(measured: PipelineMeasurement) -> Diagnosis:
    """Return the bottleneck of a pipeline, and what changes would bring.

    >>> decode = StepCost(name="map at train.py:12", seconds=0.01)
    >>> measured = PipelineMeasurement(elements_per_second=100, steps=(decode,), client_wait=0.9)
    >>> found = analyze(measured)
    >>> found.bottleneck.location, found.cost
    ('map at train.py:12', "100% of the workers' time, 10 ms per element")
    >>> round(found.what_ifs[0].elements_per_second)
    200
    """
    model = _Model(measured)
    resource, bottleneck, cost = _find_bottleneck(model)
    found = (*model.capacities(), model.connection(resource))
    what_ifs = [] if measured.elements_per_second <= 0 else list(_what_ifs(model, resource))
    return Diagnosis(
        resource=resource,
        bottleneck=bottleneck,
        cost=cost,
        elements_per_second=measured.elements_per_second,
        capacities=tuple(
            sorted(found, key=lambda each: each.elements_per_second or math.inf),
        ),
        what_ifs=tuple(sorted(what_ifs, key=lambda each: -(each.gain or 0.0))),
    )


class _Limit(NamedTuple):
    """Upper bound of a rate, and the name of what sets it."""

    rate: float
    name: str


class _Model:
    """Capacities of the resources of a pipeline, now and after changes."""

    def __init__(self, measured: PipelineMeasurement) -> None:
        self.measured = measured
        rate = measured.elements_per_second
        working = max(_MIN_BUSY_SHARE, 1.0 - measured.task_client_wait)
        #: Elements per second of all tasks if clients never made them wait.
        self.worker_rate = rate / working
        #: Seconds per element of one task, and those of them that it waits for splits.
        self.task_seconds = measured.num_tasks / self.worker_rate if rate > 0 else 0.0
        self.split_seconds = self.task_seconds * min(1.0, measured.task_split_wait / working)
        work = max(0.0, self.task_seconds - self.split_seconds)
        #: Seconds per element outside of the steps, in the thread that sends.
        self.other_seconds = max(0.0, work - _latency(measured.steps))
        explained = _latency(measured.steps, self.other_seconds)
        #: Factor that makes the sampled times agree with the rate.
        self.scale = work / explained if explained else 1.0

    @property
    def client_limit(self) -> _Limit:
        """Rate of the clients if they never waited."""
        capacity = self.measured.client_capacity
        return _Limit(math.inf if capacity is None else capacity, "clients")

    def processor_limit(self, cpu_seconds: float | None) -> _Limit:
        """Rate at which the workers' machines are fully used."""
        cores = self.measured.cores
        if not cores or not cpu_seconds:
            return _Limit(math.inf, "processors")
        return _Limit(cores / cpu_seconds, f"the {cores:g} cores of the workers' machines")

    def rate_of(self, steps: Sequence[StepCost]) -> _Limit:
        """Return the rate of all tasks with other costs of steps."""
        seconds = self.scale * _latency(steps, self.other_seconds) + self.split_seconds
        rate = self.measured.num_tasks / seconds if seconds > 0 else math.inf
        return _Limit(rate, _slowest_name(steps, self))

    def share(self, step: StepCost) -> float:
        """Return the fraction of a task's time per element that a step takes."""
        return min(1.0, self.scale * step.latency / self.task_seconds) if self.task_seconds else 0.0

    def cpu_without(self, steps: Iterable[StepCost]) -> float | None:
        """Return processor seconds per element after a change of the steps' costs.

        The processor time is attributed to the steps in proportion to their seconds.
        """
        before = sum(each.seconds for each in self.measured.steps)
        if self.measured.cpu_seconds is None or not before:
            return self.measured.cpu_seconds
        return self.measured.cpu_seconds * sum(each.seconds for each in steps) / before

    def capacities(self) -> Iterator[Capacity]:
        """Yield the capacities of workers, clients and processors."""
        measured = self.measured
        yield Capacity(Resource.WORKERS, "workers", _known(self.worker_rate))
        yield Capacity(Resource.CLIENTS, "clients", _known(self.client_limit.rate))
        processors = self.processor_limit(measured.cpu_seconds).rate
        yield Capacity(Resource.PROCESSORS, "workers' processors", _known(processors))
        if self.split_seconds:
            rate = measured.num_tasks / self.split_seconds
            yield Capacity(Resource.SPLITS, "split assignment", rate)

    def connection(self, resource: Resource) -> Capacity:
        """Return the capacity of the connection, known if it is the bottleneck."""
        is_limit = resource is Resource.NETWORK
        rate = self.measured.elements_per_second if is_limit else None
        return Capacity(Resource.NETWORK, "connection", rate)


def _latency(steps: Sequence[StepCost], other_seconds: float = 0.0) -> float:
    """Return the seconds per element of steps that take turns, or of the slowest parallel one.

    Args:
        steps: The steps.
        other_seconds: Seconds per element outside of the steps.
    """
    serial = sum(each.seconds for each in steps if not each.threads) + other_seconds
    return max([serial, *(each.latency for each in steps if each.threads)])


def _slowest_name(steps: Sequence[StepCost], model: _Model) -> str:
    """Return the name of the step that limits a task; "the workers" if none does."""
    slowest = max(steps, key=lambda each: each.latency, default=None)
    if slowest is None or slowest.latency < model.other_seconds + model.split_seconds:
        return "sending and waits of the workers"
    return slowest.name


def _known(rate: float) -> float | None:
    return rate if math.isfinite(rate) and rate > 0 else None


# --- The bottleneck -------------------------------------------------------------------------------


def _find_bottleneck(model: _Model) -> tuple[Resource, Bottleneck, str]:
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
        advice = "check the network, move workers closer, or raise max_outstanding_requests"
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
    if step is None or step.latency < model.other_seconds:
        return Resource.WORKERS, Bottleneck("the workers", "add workers"), waits
    cost = f"{model.share(step):.0%} of the workers' time, {step.seconds * 1e3:.3g} ms per element"
    if step.threads:
        cost += f" on {step.threads} threads"
    return step.resource, Bottleneck(step.name, ""), cost


# --- Changes --------------------------------------------------------------------------------------


def _what_ifs(model: _Model, resource: Resource) -> Iterator[WhatIf]:
    """Yield the predicted effects of changes."""
    measured = model.measured
    if not measured.num_tasks or not measured.num_clients:
        return
    if resource is Resource.NETWORK:
        size = measured.bytes_per_element
        yield WhatIf(
            kind=Change.FEWER_BYTES,
            change="send fewer bytes: compression, smaller dtypes, smaller elements",
            elements_per_second=None,
            gain=None,
            note=f"now {size:,.0f} bytes per element; the rate grows as the size shrinks, at most "
            f"to {_format(min(model.worker_rate, model.client_limit.rate))}; how well the data "
            "compresses is not measured",
        )
        return
    if measured.is_ending and resource is Resource.SPLITS:
        return
    yield from _add_workers(model)
    costly = [each for each in measured.steps if model.share(each) >= _MIN_SHARE]
    costly.sort(key=lambda each: -each.latency)
    for step in costly[:_MAX_STEPS]:
        faster = _replace(measured.steps, step, replace(step, seconds=step.seconds / 2))
        cpu = model.cpu_without(faster)
        yield _predict(
            model,
            Change.SPEED_UP_STEP,
            f"make {step.name} twice as fast",
            model.rate_of(faster),
            model.processor_limit(cpu),
            step=step.name,
        )
        yield from _parallel_calls(model, step)
        yield from _cache(model, step)
    yield from _prefetch(model)
    if resource is Resource.SPLITS:
        rate = measured.num_tasks / max(1e-12, model.task_seconds - model.split_seconds)
        limit = _Limit(rate, "the workers")
        yield _predict(model, Change.LARGER_SPLITS, "make splits so large that nobody waits", limit)


def _add_workers(model: _Model) -> Iterator[WhatIf]:
    measured = model.measured
    now = measured.num_tasks
    counts = [1]
    demand = model.client_limit.rate
    if demand < _MAX_FACTOR * model.worker_rate:
        needed = math.ceil(demand / model.worker_rate * now - 0.01) - now
        if needed > 1:
            counts.append(needed)
    name = _slowest_name(measured.steps, model)
    for count in counts:
        limit = _Limit(model.worker_rate * (now + count) / now, name)
        plural = "s" * (count > 1)
        yield _predict(
            model,
            Change.ADD_WORKERS,
            f"{count} more worker{plural}, on other machines",
            limit,
            note="the source must be able to serve them",
        )
        if count == 1:
            processors = model.processor_limit(measured.cpu_seconds)
            yield _predict(
                model,
                Change.ADD_LOCAL_WORKER,
                "1 more worker, on the same machines",
                limit,
                processors,
                note="" if math.isfinite(processors.rate) else _NO_CPU,
            )


_NO_CPU = "assumes free cores: the workers report no processor time"


def _cache(model: _Model, step: StepCost) -> Iterator[WhatIf]:
    if step.position < 0 or step.kind == "cache":
        return
    rest = [each for each in model.measured.steps if each.position > step.position]
    limit = model.rate_of(rest)
    yield _predict(
        model,
        Change.KEEP_OUTPUT,
        f"keep the output of {step.name}: cache(), or save() it once",
        limit,
        model.processor_limit(model.cpu_without(rest)),
        step=step.name,
        note="from the second epoch on, if it is the same in every epoch; without the time to read "
        "it back",
    )


def _parallel_calls(model: _Model, step: StepCost) -> Iterator[WhatIf]:
    if step.kind != "map":
        return
    threads = max(_PARALLEL_CALLS, 2 * step.threads)
    changed = _replace(model.measured.steps, step, replace(step, threads=threads))
    text = f"num_parallel_calls={threads} in {step.name}"
    yield _predict_threads(model, Change.PARALLEL_CALLS, text, step.name, model.rate_of(changed))


def _prefetch(model: _Model) -> Iterator[WhatIf]:
    """Predict a prefetch between the steps that share one thread, where it helps most."""
    steps = sorted(
        (each for each in model.measured.steps if not each.threads and each.position >= 0),
        key=lambda each: each.position,
    )
    if len(steps) < 2 or len(steps) < len(model.measured.steps):
        return
    cuts = [
        (max(_latency(steps[:index]), _latency(steps[index:], model.other_seconds)), index)
        for index in range(1, len(steps))
    ]
    latency, index = min(cuts)
    seconds = model.scale * latency + model.split_seconds
    limit = _Limit(model.measured.num_tasks / seconds, steps[index].name)
    if limit.rate >= _MIN_GAIN * model.worker_rate:
        name = steps[index].name
        yield _predict_threads(model, Change.PREFETCH, f"prefetch() before {name}", name, limit)


def _predict_threads(model: _Model, kind: Change, change: str, step: str, limit: _Limit) -> WhatIf:
    """Predict a change that lets one process use more threads."""
    cpu = model.measured.cpu_seconds
    best = _predict(model, kind, change, limit, model.processor_limit(cpu), step=step)
    if cpu is None:
        return replace(
            best, elements_per_second=None, gain=None, at_most=best.elements_per_second, note=_LOCK
        )
    # With one interpreter lock, a task takes at least its processor time per element.
    locked = _Limit(model.measured.num_tasks / max(cpu, 1e-12), "the interpreter lock")
    found = _predict(model, kind, change, limit, model.processor_limit(cpu), locked, step=step)
    if not found.elements_per_second or not best.elements_per_second:
        return found
    if best.elements_per_second < _MIN_GAIN * found.elements_per_second:
        return found
    return replace(found, at_most=best.elements_per_second, note=_LOCK)


_LOCK = "more, up to the higher figure, if the functions release the interpreter lock"


def _replace(steps: Sequence[StepCost], step: StepCost, changed: StepCost) -> tuple[StepCost, ...]:
    return tuple(changed if each is step else each for each in steps)


def _predict(
    model: _Model, kind: Change, change: str, *limits: _Limit, step: str = "", note: str = ""
) -> WhatIf:
    """Return the effect of a change that leaves these limits, and that of the clients."""
    now = model.measured.elements_per_second
    lowest = min((*limits, model.client_limit), key=lambda each: each.rate)
    if not math.isfinite(lowest.rate):
        reason = "nothing else that limits the rate was measured"
        return WhatIf(
            kind=kind, step=step, change=change, elements_per_second=None, gain=None, note=reason
        )
    rate = max(now, lowest.rate)
    return WhatIf(
        kind=kind,
        step=step,
        change=change,
        elements_per_second=rate,
        gain=rate / now,
        limited_by=lowest.name,
        note=note,
    )


def _format(rate: float) -> str:
    return "an unknown rate" if math.isinf(rate) else f"{rate:,.4g} elements/s"
