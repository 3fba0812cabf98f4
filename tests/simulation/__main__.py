"""Run seeds manually: python -m tests.simulation SEED [SEED ...] [--last N]."""

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
    """Run the seeds of the command line; return 1 if an invariant fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "seeds", type=int, nargs="+", help="seeds to run; with --count, the first one"
    )
    parser.add_argument("--count", type=int, default=0, help="number of consecutive seeds to run")
    parser.add_argument(
        "--last", type=int, default=40, help="number of trace lines to print after a failure"
    )
    parser.add_argument("--kind", help="only seeds of this kind")
    parser.add_argument(
        "--slow", type=float, default=5.0, help="seconds after which a seed is reported as slow"
    )
    parser.add_argument(
        "--mode", choices=MODES, default=Cluster.mode, help="reading mode of the clients"
    )
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seeds = range(args.seeds[0], args.seeds[0] + args.count) if args.count else args.seeds
    started_at, failed, done, events = time.perf_counter(), [], 0, 0
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
    seconds = time.perf_counter() - started_at
    print(f"{done} seeds, {len(failed)} failed, {events} events, {seconds:.1f} s; {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
