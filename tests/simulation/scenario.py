"""Scenarios: processes, dataset, faults and expected guarantees of each seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.limits import DispatcherLimits
from tests.simulation.production import Plan

__all__ = ["KINDS", "Kind", "Scenario", "many_processes_scenario", "scenario_of"]

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Family of scenarios: its faults, and the guarantees that hold with them."""

    faults: tuple[str, ...] = ()
    """Methods of `FaultInjector`."""
    no_losses: bool = True
    """Whether the dispatcher declares no worker or client lost."""
    workers_crash: bool = False
    """Whether splits held by workers may be lost, with a report."""
    clients_leave: bool = False
    """Whether clients crash or close before the end."""
    is_durable: bool = True
    """Whether the dispatcher's journal survives restarts."""


KINDS: dict[str, Kind] = {
    "calm": Kind(),
    "network": Kind(faults=("change_conditions", "reset_connection", "partition_briefly")),
    "pauses": Kind(
        faults=("change_conditions", "pause_worker", "pause_client", "pause_dispatcher")
    ),
    "restarts": Kind(
        faults=("change_conditions", "restart_dispatcher", "pause_dispatcher", "fill_disk")
    ),
    "draining": Kind(faults=("change_conditions", "drain_worker", "add_worker", "pause_client")),
    "stopping": Kind(faults=("stop_worker", "add_worker", "drain_worker"), workers_crash=True),
    "kills": Kind(
        faults=("kill_worker", "add_worker", "change_conditions"),
        workers_crash=True,
        no_losses=False,
    ),
    "false losses": Kind(
        faults=(
            "pause_worker_for_long",
            "partition_for_long",
            "reset_connection",
            "change_conditions",
        ),
        workers_crash=True,
        no_losses=False,
    ),
    "departures": Kind(
        faults=(
            "close_client",
            "kill_client",
            "change_conditions",
            "reset_connection",
            "add_worker",
        ),
        clients_leave=True,
        no_losses=False,
    ),
    "no journal": Kind(
        faults=("restart_dispatcher", "change_conditions", "pause_dispatcher"),
        is_durable=False,
        no_losses=False,
    ),
    "all faults": Kind(
        faults=(
            "change_conditions",
            "reset_connection",
            "partition_briefly",
            "partition_for_long",
            "pause_worker",
            "pause_worker_for_long",
            "pause_client",
            "pause_client_for_long",
            "pause_dispatcher",
            "restart_dispatcher",
            "fill_disk",
            "kill_worker",
            "add_worker",
            "drain_worker",
            "stop_worker",
            "close_client",
            "kill_client",
        ),
        workers_crash=True,
        clients_leave=True,
        no_losses=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Description of one run."""

    seed: int
    kind_name: str
    """Name in `KINDS`."""
    plan: Plan
    mode: ShardingPolicy = DYNAMIC
    visitation: str | None = "exactly_once"
    is_named: bool = False
    workers: int
    clients: int = 1
    epochs: int = 1
    limits: DispatcherLimits = field(default_factory=DispatcherLimits)
    max_outstanding: int = 16
    think: float = 0.0
    """Maximum seconds to consume a batch."""
    fault_seconds: float = 0.0
    """Seconds during which faults are injected."""
    seconds_between_faults: float = 1.0
    """Mean seconds between faults."""
    counts_elements: bool = False
    """Whether `max_outstanding` limits elements instead of requests."""
    in_order: bool = False
    """Whether elements are read in order."""
    reorder_limit: int = 20
    """Capacity of the reorder buffer in elements; small, so that it is often full."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    kind = rng.choice(list(KINDS))
    mode = DYNAMIC if rng.random() < 0.75 else OFF
    clients = rng.choice((1, 1, 1, 2, 3))
    if kind == "departures":
        clients = rng.choice((1, 2, 3))
    limits = DispatcherLimits(
        worker_timeout=rng.choice((4.0, 10.0)),
        client_timeout=rng.choice((40.0, 60.0)),
        gc_timeout=rng.choice((5.0, 20.0)),
    )
    plan = _plan(rng, kind)
    if plan.poison and mode == OFF:
        # Copies that run long before they crash would restart forever.
        limits = dataclasses.replace(limits, stable_copy_seconds=1e9)
    visitations = ("exactly_once", "exactly_once", None)
    scenario = Scenario(
        seed=seed,
        kind_name=kind,
        plan=plan,
        mode=mode,
        visitation=rng.choice(visitations) if mode == DYNAMIC else None,
        is_named=clients > 1 or rng.random() < 0.4,
        workers=rng.choice((1, 2, 2, 3, 4, 6)),
        clients=clients,
        epochs=rng.choice((1, 1, 1, 2)),
        limits=limits,
        max_outstanding=rng.choice((1, 2, 4, 16, 16)),
        think=rng.choice((0.0, 0.001, 0.05, 0.3)),
        fault_seconds=rng.choice((0.0, 3.0, 10.0, 25.0)),
        seconds_between_faults=rng.choice((0.3, 1.0, 3.0)),
        counts_elements=random.Random(f"counted {seed}").random() < 0.25,
    )
    return dataclasses.replace(scenario, in_order=_may_be_in_order(scenario))


def _may_be_in_order(scenario: Scenario) -> bool:
    """Return whether to read the scenario in order, if that is possible."""
    plan = scenario.plan
    one_after_the_other = plan.cycle_length == plan.shuffle_buffer == plan.batch_size == 1
    is_alone = scenario.clients == 1 and scenario.visitation == "exactly_once"
    # In order, the reorder buffer is bounded in bytes, not in elements.
    is_alone = is_alone and not scenario.counts_elements
    return (
        is_alone and one_after_the_other and random.Random(f"order {scenario.seed}").random() < 0.6
    )


def many_processes_scenario(seed: int, *, workers: int, clients: int) -> Scenario:
    """Return a scenario with many workers and clients, each with little work."""
    rng = random.Random(f"crowd {seed}")
    return Scenario(
        seed=seed,
        kind_name=rng.choice(list(KINDS)),
        plan=Plan(size=rng.choice((5_000, 20_000)), cost=rng.choice((0.001, 0.1))),
        visitation=rng.choice(("exactly_once", None)),
        is_named=True,
        workers=workers,
        clients=clients,
        limits=DispatcherLimits(client_timeout=40.0, gc_timeout=5.0),
        think=0.001,
        fault_seconds=5.0,
        seconds_between_faults=0.05,
    )


def _plan(rng: random.Random, kind: str) -> Plan:
    size = rng.choice((0, 1, 3, 20, 60, 200, 400))
    style = rng.choice(("each", "each", "several", "interleave", "shuffle", "batch", "mix"))
    max_split_elements, cycle_length, batch_size, shuffle_buffer = {
        "each": (1, 1, 1, 1),
        "several": (rng.choice((1, 3, 9, 40)), 1, 1, 1),
        "interleave": (rng.choice((3, 9, 40)), rng.choice((2, 4)), 1, 1),
        "shuffle": (1, rng.choice((3, 30, 1000)), 1, 1),
        "batch": (rng.choice((1, 2, 9)), rng.choice((1, 3)), rng.choice((2, 7)), 1),
        "mix": (
            rng.choice((1, 9, 40)),
            rng.choice((1, 3)),
            rng.choice((1, 1, 3)),
            rng.choice((3, 30)),
        ),
    }[style]
    if max_split_elements > 9:
        size = min(size, 60)
    few = frozenset(rng.randrange(max(size, 1)) for _ in range(rng.choice((0, 0, 1, 3))))
    poison = kind in ("kills", "all faults") and rng.random() < 0.25
    return Plan(
        size=size,
        max_split_elements=max_split_elements,
        cycle_length=cycle_length,
        shuffle_buffer=shuffle_buffer,
        filters=rng.random() < 0.2,
        batch_size=batch_size,
        cost=rng.choice((0.0, 0.0005, 0.01, 0.1)),
        bytes=rng.choice((10, 10, 1 << 18, 3 << 20)),
        failing=few if rng.random() < 0.3 else frozenset(),
        slow=few if rng.random() < 0.2 else frozenset(),
        slowness=rng.choice((0.5, 5.0, 30.0)),
        poison=frozenset((rng.randrange(max(size, 1)),)) if poison else frozenset(),
        broken=rng.random() < 0.02,
    )
