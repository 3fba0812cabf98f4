"""Run seeds by hand: python -m tests.simulation SEED [SEED ...] [--last N]."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.simulation.cluster import Cluster
from tests.simulation.coordinated_reads import CoordinatedReads
from tests.simulation.cross_trainer_cache import CrossTrainerCache
from tests.simulation.distributed_save import DistributedSave
from tests.simulation.static_sharding import StaticSharding

__all__ = ["MODES"]

MODES = {
    each.mode: each
    for each in (Cluster, CoordinatedReads, CrossTrainerCache, DistributedSave, StaticSharding)
}


def main() -> int:
    """Run the seeds of the command line; return 1 if an invariant does not hold for one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+", help="one, or the first and how many")
    parser.add_argument("--count", type=int, default=0, help="so many seeds from the first on")
    parser.add_argument("--last", type=int, default=40, help="lines of the trace of a failure")
    parser.add_argument("--kind", help="only seeds of this kind")
    parser.add_argument("--slow", type=float, default=5.0, help="name seeds that take longer")
    parser.add_argument("--mode", choices=MODES, default=Cluster.mode, help="how clients read")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seeds = range(args.seeds[0], args.seeds[0] + args.count) if args.count else args.seeds
    began, failed, done, events = time.perf_counter(), [], 0, 0
    for seed in seeds:
        cluster = MODES[args.mode].of_seed(seed)
        kind = cluster.scenario.kind_name
        if args.kind and kind != args.kind:
            continue
        done += 1
        since = time.perf_counter()
        try:
            cluster.run(last=args.last)
        except Exception as error:
            failed.append(seed)
            if len(seeds) == 1:
                traceback.print_exc()
            else:
                print(f"{seed} {kind}: {type(error).__name__} {str(error)[:250]}")
        events += cluster.simulation.event_count
        took = time.perf_counter() - since
        if took > args.slow:
            print(f"{seed} {kind}: took {took:.1f} s")
    seconds = time.perf_counter() - began
    print(f"{done} seeds, {len(failed)} failed, {events} events, {seconds:.1f} s; {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
