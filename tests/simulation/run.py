"""One seed, from the first event to the last check; the story where a promise is broken."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.simulation.cast import Cast
from tests.simulation.client import GROUP_SECONDS
from tests.simulation.promises import check_at_end, check_now, check_retention
from tests.simulation.round_promises import check_rounds
from tests.simulation.scenario import Scenario
from tests.simulation.storm import Storm
from tests.simulation.world import BrokenPromiseError

__all__ = ["run"]

_LOOK_SECONDS = 0.5
_THOROUGH = 0.02
"""The chance that a look compares the journal with the state."""


def run(
    scenario: Scenario,
    *,
    cast: Cast | None = None,
    check: Callable[[Cast], None] = check_at_end,
    last: int = 40,
) -> Cast:
    """Run a scenario; check every promise.

    Args:
        scenario: What to run.
        cast: Who is in it; None: whoever is usually.
        check: Checks what must hold in the end.
        last: How many events are told where one is broken.

    Raises:
        AssertionError: One is broken; its notes tell the seed, the scenario and the story.
    """
    cast = cast or Cast(scenario)
    try:
        _run(cast, check)
    except Exception as error:
        tell(cast, error, last=last)
        raise
    return cast


def _run(cast: Cast, check: Callable[[Cast], None]) -> None:
    world, scenario = cast.world, cast.scenario
    cast.begin()
    storm = Storm(cast)
    storm.begin()

    def look() -> None:
        check_now(cast, thoroughly=world.chance.random() < _THOROUGH)
        world.at(_LOOK_SECONDS, look)

    look()
    world.run(_longest(scenario), stop=lambda: cast.is_over)
    check_now(cast, thoroughly=True)
    late = [each.name for each in cast.clients if not each.is_done]
    if late:
        raise BrokenPromiseError(f"all readings end: {', '.join(late)} read on at {world.now:.0f}")
    if scenario.promises.is_durable:
        # A client that died, or whose last word was lost, counts as there until its timeout; all
        # begins again where the dispatcher itself was away. Who is paused forgets nothing.
        world.run(
            math.inf,
            stop=lambda: (
                storm.is_over
                and cast.dispatcher.is_running
                and not any(worker.is_paused for worker in cast.workers)
            ),
        )
        pass_away(cast)
        check_retention(cast)
    check(cast)
    if scenario.in_rounds:
        check_rounds(cast)


def pass_away(cast: Cast) -> None:
    """Let as much time pass as it takes until nothing of those who read is known any more."""
    world, limits = cast.world, cast.scenario.limits
    patience = limits.client_timeout + (limits.gc_timeout or 0.0) + 5.0
    due = world.now + patience
    while world.now < due:
        world.run(min(due, world.now + limits.client_timeout / 2))  # nobody is gone sooner
        # What was on its way for long has made somebody heard of late.
        heard = cast.dispatcher.dispatcher.presence.clients.values()
        due = max([due, *(each + patience for each in heard)])


def _longest(scenario: Scenario) -> float:
    """Return by when everybody must be done."""
    limits, plan = scenario.limits, scenario.plan
    elements = plan.size * max(1, plan.parts)
    work = elements * plan.cost * (scenario.workers + 3) + 10 * len(plan.slow) * plan.slowness
    reading = elements * scenario.think * 3
    waits = 3 * limits.worker_timeout + 2 * limits.client_timeout + 2 * limits.settle_patience
    group = scenario.passes * 2 * GROUP_SECONDS if scenario.in_rounds else 0.0
    return scenario.storm_seconds + 200.0 + group + scenario.passes * (work + reading + waits)


def tell(cast: Cast, error: Exception, *, last: int) -> None:
    """Add to an error what is needed to look into it."""
    scenario = cast.scenario
    about = set(" ".join(getattr(error, "__notes__", [])).split())
    error.add_note(
        f"seed {scenario.seed} at {cast.world.now:.3f} s; again, with the whole story: "
        f"python -m tests.simulation {scenario.seed} --last 100000"
        f" {'--rounds' if scenario.in_rounds else cast.option}".rstrip()
    )
    error.add_note(str(scenario))
    known = {each.name for each in [cast.dispatcher, *cast.workers, *cast.clients]}
    peers = about & known if isinstance(error, BrokenPromiseError) else set()
    error.add_note("\n".join(cast.world.story(peers, last=last)))
