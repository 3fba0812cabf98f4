"""Run seeds by hand: python -m tests.simulation SEED [SEED ...] [--last N]."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from typing import Any

from tests.simulation import run as running
from tests.simulation import saving, scenario, shared, static

_USUAL: Any = (scenario.scenario_of, running.run)
_OTHERS: dict[str, Any] = {
    "rounds": (scenario.rounds_of, running.run),
    "save": (saving.save_scenario_of, saving.run_save),
    "shared": (shared.shared_scenario_of, shared.run_shared),
    "static": (static.static_scenario_of, static.run_static),
}


def main() -> int:
    """Run the seeds of the command line; return 1 if one breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+", help="one, or the first and how many")
    parser.add_argument("--count", type=int, default=0, help="so many seeds from the first on")
    parser.add_argument("--last", type=int, default=40, help="events to tell of a failure")
    parser.add_argument("--kind", help="only seeds of this kind")
    parser.add_argument("--slow", type=float, default=5.0, help="name seeds that take longer")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--rounds", action="store_true", help="all clients read in rounds")
    what.add_argument("--save", action="store_true", help="workers write files")
    what.add_argument("--shared", action="store_true", help="trainers share what workers make")
    what.add_argument("--static", action="store_true", help="with fixed shares")
    args = parser.parse_args()
    scenario_of, run = next((_OTHERS[each] for each in _OTHERS if getattr(args, each)), _USUAL)
    logging.disable(logging.CRITICAL)
    seeds = args.seeds
    if args.count:
        seeds = range(seeds[0], seeds[0] + args.count)
    began, failed, done, events = time.perf_counter(), [], 0, 0
    for seed in seeds:
        found = scenario_of(seed)
        if args.kind and found.kind != args.kind:
            continue
        done += 1
        since = time.perf_counter()
        try:
            cast = run(found, last=args.last)
            events += cast.world.happened
        except Exception as error:
            failed.append(seed)
            if len(seeds) == 1:
                traceback.print_exc()
            else:
                print(f"{seed} {found.kind}: {type(error).__name__} {str(error)[:250]}")
        took = time.perf_counter() - since
        if took > args.slow:
            print(f"{seed} {found.kind}: took {took:.1f} s")
    seconds = time.perf_counter() - began
    print(f"{done} seeds, {len(failed)} failed, {events} events, {seconds:.1f} s; {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
