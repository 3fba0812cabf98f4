"""Measurements of a running pipeline, and the capacities of its resources.

A model of linear utilisation, after Plumber (Kuchnik et al., "Plumber: Diagnosing and Removing
Performance Bottlenecks in Machine Learning Data Pipelines", MLSys 2022). Each resource has a
capacity in elements per second: the rate at which it would be busy all the time. The resource with
the lowest capacity limits the pipeline.

Workers. A task that did not wait for clients would produce `rate / (1 - wait)`. Its time per
    element is explained by the measured seconds of its steps: steps without threads take turns in
    one thread, so their seconds add up; a step with n threads takes 1/n of its seconds at the same
    time. The longest of these is the time per element. What the steps do not explain, such as
    sending, belongs to the steps without threads. Waits for splits are added. The sum is scaled so
    that it agrees with the measured rate.
Clients. A client that never waited for elements would take `rate / (1 - wait)`.
Processors. Elements per second are at most `cores / processor time per element`. The cores are
    those that the workers use now and those that are idle; other programs keep the rest.

Costs are assumed to be constant. Contention for memory, disks and locks is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Limit", "PipelineMeasurement", "PipelineModel", "Resource", "StepCost"]

_SOURCE_KINDS = ("source", "indices", "gather", "read", "read_splits")
_FUNCTION_KINDS = ("map", "filter", "scan", "take_while")
_MIN_BUSY_SHARE = 0.02
"""Smallest share of busy time from which a capacity is extrapolated."""


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
        idle_cores: Cores of these that no program used; None if unknown.
        cpu_seconds: Processor time of the workers per element; None if unknown.
        has_splits: Whether the dispatcher assigns splits (dynamic sharding).
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
    idle_cores: float | None = None
    cpu_seconds: float | None = None
    has_splits: bool = True
    is_ending: bool = False

    @property
    def available_cores(self) -> float:
        """Cores that the workers use or that are idle; 0.0 if unknown."""
        if self.idle_cores is None or self.cpu_seconds is None:
            return self.cores
        return min(self.cores, self.elements_per_second * self.cpu_seconds + self.idle_cores)

    @property
    def foreign_cores(self) -> float:
        """Cores that other programs use, as far as this is known."""
        return self.cores - self.available_cores


class Limit(NamedTuple):
    """Upper bound of a rate, and the name of what sets it."""

    rate: float
    name: str


class PipelineModel:
    """Capacities of the resources of a pipeline, now and after changes."""

    def __init__(self, measured: PipelineMeasurement) -> None:
        self.measured = measured
        rate = measured.elements_per_second
        working = max(_MIN_BUSY_SHARE, 1.0 - measured.task_client_wait)
        #: Elements per second of all tasks if clients never made them wait.
        self.worker_rate: float = rate / working
        #: Seconds per element of one task, and those of them that it waits for splits.
        self.task_seconds: float = measured.num_tasks / self.worker_rate if rate > 0 else 0.0
        self.split_seconds: float = self.task_seconds * min(1.0, measured.task_split_wait / working)
        work = max(0.0, self.task_seconds - self.split_seconds)
        #: Seconds per element outside of the steps, in the thread that sends.
        self.other_seconds: float = max(0.0, work - _latency(measured.steps))
        explained = _latency(measured.steps, self.other_seconds)
        #: Factor that makes the sampled times agree with the rate.
        self.scale: float = work / explained if explained else 1.0

    @property
    def client_limit(self) -> Limit:
        """Rate of the clients if they never waited."""
        capacity = self.measured.client_capacity
        return Limit(math.inf if capacity is None else capacity, "clients")

    def processor_limit(self, cores: float, cpu_seconds: float | None) -> Limit:
        """Rate at which this many cores are busy all the time."""
        if not self.measured.cores or not cpu_seconds:
            return Limit(math.inf, "processors")
        return Limit(cores / cpu_seconds, f"{cores:.2g} available cores of the workers' machines")

    def rate_of(self, steps: Sequence[StepCost]) -> Limit:
        """Return the rate of all tasks with other costs of steps."""
        seconds = self.scale * _latency(steps, self.other_seconds) + self.split_seconds
        rate = self.measured.num_tasks / seconds if seconds > 0 else math.inf
        return Limit(rate, self.slowest_name(steps))

    def share(self, step: StepCost) -> float:
        """Return the fraction of a task's time per element that a step takes."""
        return min(1.0, self.scale * step.latency / self.task_seconds) if self.task_seconds else 0.0

    def cpu_with(self, steps: Sequence[StepCost]) -> float | None:
        """Return the most processor time per element that the workers need with these steps.

        Which steps use the processors is not measured: at most all of it belongs to these steps and
        to sending, and no thread uses more processor time than time.
        """
        cpu = self.measured.cpu_seconds
        if cpu is None:
            return None
        return min(cpu, self.scale * (sum(each.seconds for each in steps) + self.other_seconds))

    def slowest_name(self, steps: Sequence[StepCost]) -> str:
        """Return the name of the step that limits a task."""
        slowest = max(steps, key=lambda each: each.latency, default=None)
        if slowest is None or slowest.latency < self.other_seconds + self.split_seconds:
            return "sending and waits of the workers"
        return slowest.name


def _latency(steps: Sequence[StepCost], other_seconds: float = 0.0) -> float:
    """Return the seconds per element of steps that take turns, or of the slowest parallel one.

    Args:
        steps: The steps.
        other_seconds: Seconds per element outside of the steps.
    """
    serial = sum(each.seconds for each in steps if not each.threads) + other_seconds
    return max([serial, *(each.latency for each in steps if each.threads)])
