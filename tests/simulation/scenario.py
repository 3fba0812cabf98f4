"""What a seed stands for: who is there, what is read, what may go wrong, what must hold."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.limits import DispatcherLimits
from tests.simulation.production import Plan

__all__ = ["KINDS", "Kind", "Scenario", "crowd_of", "scenario_of"]

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family of scenarios: its faults, and what holds in spite of them."""

    faults: tuple[str, ...] = ()
    """Methods of `FaultInjector`."""
    nobody_is_lost: bool = True
    """The dispatcher declares nobody lost, worker or client."""
    workers_die: bool = False
    """What workers had open may be lost, and is said."""
    clients_go: bool = False
    """Clients die or close before the end."""
    is_durable: bool = True
    """The dispatcher keeps its journal."""


KINDS: dict[str, Kind] = {
    "calm": Kind(),
    "network": Kind(faults=("change_conditions", "reset_connection", "part_briefly")),
    "pauses": Kind(
        faults=("change_conditions", "pause_worker", "pause_client", "pause_dispatcher")
    ),
    "restarts": Kind(
        faults=("change_conditions", "restart_dispatcher", "pause_dispatcher", "fill_disk")
    ),
    "leaving": Kind(faults=("change_conditions", "drain_worker", "add_worker", "pause_client")),
    "stopping": Kind(faults=("stop_worker", "add_worker", "drain_worker"), workers_die=True),
    "deaths": Kind(
        faults=("kill_worker", "add_worker", "change_conditions"),
        workers_die=True,
        nobody_is_lost=False,
    ),
    "false losses": Kind(
        faults=("pause_worker_for_long", "part_for_long", "reset_connection", "change_conditions"),
        workers_die=True,
        nobody_is_lost=False,
    ),
    "departures": Kind(
        faults=(
            "close_client",
            "kill_client",
            "change_conditions",
            "reset_connection",
            "add_worker",
        ),
        clients_go=True,
        nobody_is_lost=False,
    ),
    "forgetful": Kind(
        faults=("restart_dispatcher", "change_conditions", "pause_dispatcher"),
        is_durable=False,
        nobody_is_lost=False,
    ),
    "everything": Kind(
        faults=(
            "change_conditions",
            "reset_connection",
            "part_briefly",
            "part_for_long",
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
        workers_die=True,
        clients_go=True,
        nobody_is_lost=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run."""

    seed: int
    kind_name: str
    """In `KINDS`."""
    plan: Plan
    mode: ShardingPolicy = DYNAMIC
    visitation: str | None = "exactly_once"
    is_named: bool = False
    workers: int
    clients: int = 1
    passes: int = 1
    limits: DispatcherLimits = field(default_factory=DispatcherLimits)
    max_outstanding: int = 16
    think: float = 0.0
    """Seconds that a consumer needs for a portion, at most."""
    fault_seconds: float = 0.0
    """How long faults are injected."""
    seconds_between_faults: float = 1.0
    """On average."""
    counts_elements: bool = False
    """`max_outstanding` is of elements, and not of requests with whatever they bring."""
    in_order: bool = False
    """Whether elements come in order."""
    ahead: int = 20
    """How many may be at a client before their turn: so few that this is often reached."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]


def scenario_of(seed: int) -> Scenario:
    """Return what a seed stands for."""
    chance = random.Random(f"scenario {seed}")
    kind = chance.choice(list(KINDS))
    mode = DYNAMIC if chance.random() < 0.75 else OFF
    clients = chance.choice((1, 1, 1, 2, 3))
    if kind == "departures":
        clients = chance.choice((1, 2, 3))
    limits = DispatcherLimits(
        worker_timeout=chance.choice((4.0, 10.0)),
        client_timeout=chance.choice((40.0, 60.0)),
        gc_timeout=chance.choice((5.0, 20.0)),
    )
    plan = _plan(chance, kind)
    if plan.deadly and mode == OFF:
        # Copies that last for long before they die begin again without end.
        limits = dataclasses.replace(limits, stable_copy_seconds=1e9)
    visitations = ("exactly_once", "exactly_once", None)
    scenario = Scenario(
        seed=seed,
        kind_name=kind,
        plan=plan,
        mode=mode,
        visitation=chance.choice(visitations) if mode == DYNAMIC else None,
        is_named=clients > 1 or chance.random() < 0.4,
        workers=chance.choice((1, 2, 2, 3, 4, 6)),
        clients=clients,
        passes=chance.choice((1, 1, 1, 2)),
        limits=limits,
        max_outstanding=chance.choice((1, 2, 4, 16, 16)),
        think=chance.choice((0.0, 0.001, 0.05, 0.3)),
        fault_seconds=chance.choice((0.0, 3.0, 10.0, 25.0)),
        seconds_between_faults=chance.choice((0.3, 1.0, 3.0)),
        counts_elements=random.Random(f"counted {seed}").random() < 0.25,
    )
    return dataclasses.replace(scenario, in_order=_may_be_in_order(scenario))


def _may_be_in_order(scenario: Scenario) -> bool:
    """Whether it is one of the scenarios that are read in order, where that is possible."""
    plan = scenario.plan
    one_after_the_other = plan.window == plan.mixed == plan.joined == 1
    alone = scenario.clients == 1 and scenario.visitation == "exactly_once"
    # In order, what came before its turn is bounded in bytes and not counted.
    alone = alone and not scenario.counts_elements
    return alone and one_after_the_other and random.Random(f"order {scenario.seed}").random() < 0.6


def crowd_of(seed: int, *, workers: int, clients: int) -> Scenario:
    """Return a scenario with so many workers and clients, and short work for each."""
    chance = random.Random(f"crowd {seed}")
    return Scenario(
        seed=seed,
        kind_name=chance.choice(list(KINDS)),
        plan=Plan(size=chance.choice((5_000, 20_000)), cost=chance.choice((0.001, 0.1))),
        visitation=chance.choice(("exactly_once", None)),
        is_named=True,
        workers=workers,
        clients=clients,
        limits=DispatcherLimits(client_timeout=40.0, gc_timeout=5.0),
        think=0.001,
        fault_seconds=5.0,
        seconds_between_faults=0.05,
    )


def _plan(chance: random.Random, kind: str) -> Plan:
    size = chance.choice((0, 1, 3, 20, 60, 200, 400))
    style = chance.choice(("each", "each", "several", "interleave", "shuffle", "batch", "mix"))
    parts, window, joined, mixed = {
        "each": (1, 1, 1, 1),
        "several": (chance.choice((1, 3, 9, 40)), 1, 1, 1),
        "interleave": (chance.choice((3, 9, 40)), chance.choice((2, 4)), 1, 1),
        "shuffle": (1, chance.choice((3, 30, 1000)), 1, 1),
        "batch": (chance.choice((1, 2, 9)), chance.choice((1, 3)), chance.choice((2, 7)), 1),
        "mix": (
            chance.choice((1, 9, 40)),
            chance.choice((1, 3)),
            chance.choice((1, 1, 3)),
            chance.choice((3, 30)),
        ),
    }[style]
    if parts > 9:
        size = min(size, 60)
    few = frozenset(chance.randrange(max(size, 1)) for _ in range(chance.choice((0, 0, 1, 3))))
    deadly = kind in ("deaths", "everything") and chance.random() < 0.25
    return Plan(
        size=size,
        parts=parts,
        window=window,
        mixed=mixed,
        omits=chance.random() < 0.2,
        joined=joined,
        cost=chance.choice((0.0, 0.0005, 0.01, 0.1)),
        bytes=chance.choice((10, 10, 1 << 18, 3 << 20)),
        failing=few if chance.random() < 0.3 else frozenset(),
        slow=few if chance.random() < 0.2 else frozenset(),
        slowness=chance.choice((0.5, 5.0, 30.0)),
        deadly=frozenset((chance.randrange(max(size, 1)),)) if deadly else frozenset(),
        broken=chance.random() < 0.02,
    )
