"""Autoscaling policies in simulation: waits and costs on eight loads.

    python -m benchmarks.autoscaling              the table; about a minute
    python -m benchmarks.autoscaling --seeds 20   more seeds
    python -m benchmarks.autoscaling --load step  one load

The simulation (`autoscaling_simulation`) has a virtual clock, so the figures are the same on any
machine. Cost is relative to a lower bound for a policy that knows the future
(`autoscaling_optimum`). A row has the medians over the seeds, with the highest value in brackets.
The other policies:

    fixed    as many workers as the highest load needs at the policy's target utilization
    HPA      a HorizontalPodAutoscaler of Kubernetes with a target of 70 % of processor time and
             the default behaviour: evaluated every 15 s with a tolerance of 10 %; at most twice
             the workers or 4 more per 15 s; fewer if that was enough for 300 s
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable

from benchmarks.autoscaling_loads import LOADS, Load
from benchmarks.autoscaling_optimum import optimal_worker_seconds
from benchmarks.autoscaling_simulation import Decide, simulate
from headrace.service.dispatcher.worker_scaling import ScalingPolicy, ScalingState, ServiceLoad

__all__ = ["POLICIES", "headrace_policy", "main"]


def headrace_policy(load: Load) -> Decide:
    """Return the policy of the dispatcher, with a fresh state."""
    policy, state = ScalingPolicy(), ScalingState()

    def decide(service: ServiceLoad) -> int:
        nonlocal state
        wanted, state = policy.decide(service, state)
        return wanted

    return decide


def _fixed(load: Load) -> Decide:
    highest = max(load.need(second + 0.5) for second in range(int(load.seconds)))
    workers = math.ceil(highest / ScalingPolicy().target_utilization)
    return lambda service: workers


def _hpa(load: Load) -> Decide:
    wanted, evaluated_at = 1, -math.inf
    recommended: list[tuple[float, int]] = []

    def decide(service: ServiceLoad) -> int:
        nonlocal wanted, evaluated_at
        now, workers = service.now, service.num_workers
        if now < evaluated_at + 15.0 or not workers:
            return wanted
        evaluated_at = now
        # Any of the jobs of a worker uses its processors.
        idle = math.prod(1.0 - min(1.0, job.busy_workers / workers) for job in service.jobs)
        ratio = (1.0 - idle) / 0.7
        enough = wanted if abs(ratio - 1.0) <= 0.1 else max(1, math.ceil(workers * ratio))
        recommended[:] = [(at, n) for at, n in recommended if at > now - 300.0]
        recommended.append((now, enough))
        if enough > wanted:
            wanted = min(enough, max(2 * wanted, wanted + 4))
        else:
            wanted = min(wanted, max(n for _, n in recommended))
        return wanted

    return decide


POLICIES: dict[str, Callable[[Load], Decide]] = {
    "headrace": headrace_policy,
    "HPA": _hpa,
    "fixed": _fixed,
}


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--load", choices=[load.name for load in LOADS], help="default: all")
    options = parser.parse_args(arguments)
    print("| load | policy | wait | worker-seconds / optimum | changes |\n|---|---|---|---|---|")
    for load in LOADS:
        if options.load not in (None, load.name):
            continue
        optimum = optimal_worker_seconds(load)
        for name, policy in POLICIES.items():
            outcomes = [simulate(load, policy(load), seed) for seed in range(options.seeds)]
            cells = (
                _cell([100.0 * outcome.wait_ratio for outcome in outcomes], ".2f", " %"),
                _cell([outcome.worker_seconds / optimum for outcome in outcomes], ".2f"),
                _cell([outcome.num_changes for outcome in outcomes], ".0f"),
            )
            print(f"| {load.name} | {name} | {' | '.join(cells)} |", flush=True)
    return 0


def _cell(values: list[float] | list[int], form: str, unit: str = "") -> str:
    return f"{statistics.median(values):{form}}{unit} ({max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
