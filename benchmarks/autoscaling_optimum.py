"""Lower bound of the worker-seconds of a load, for a policy that knows the future.

The optimum chooses the number of workers in each second, such that consumers wait for at most 2 %
of all their time. With W workers and a need of n, they wait for max(0, 1 - W / n) of it. Each
start of a worker costs the time to start it and to drain it in addition, as in the simulation;
the optimum starts workers in time, so that it needs no grace periods.

The limit of the wait becomes a price per second waited (a Lagrangian relaxation). With a price,
the k-th worker is independent of the others: its benefit in a second is the wait that it removes,
which is convex in k, so the least cost is a shortest path over "on" and "off" for each k. The
dual value is a lower bound for every price, and the highest one is returned. Measured ratios
therefore err to the disadvantage of the policy. Buffers, noise and unequal speeds are left out.
"""

from __future__ import annotations

import functools
import math

from benchmarks.autoscaling_loads import Load

__all__ = ["optimal_worker_seconds"]

_MAX_WAIT_RATIO = 0.02


@functools.cache
def optimal_worker_seconds(load: Load, max_wait_ratio: float = _MAX_WAIT_RATIO) -> float:
    """Return a lower bound of the worker-seconds that the load costs."""
    needs = [load.need(second + 0.5) for second in range(int(load.seconds))]
    demanding = [need for need in needs if need > 0.0]
    budget = max_wait_ratio * len(demanding)
    switch = sum(load.start_seconds) / 2 + load.drain_seconds
    low, high = 0.0, 4.0 * max(needs) + switch
    best = 0.0
    for _ in range(24):  # the dual is concave in the price
        third = (high - low) / 3
        left = _dual(needs, low + third, budget, switch)
        right = _dual(needs, high - third, budget, switch)
        best = max(best, left, right)
        low, high = (low + third, high) if left < right else (low, high - third)
    return best


def _dual(needs: list[float], price: float, budget: float, switch: float) -> float:
    """Return the least cost of workers and waits at a price, less the price of the budget."""
    total = price * (sum(need > 0.0 for need in needs) - budget)
    for k in range(1, math.ceil(max(needs)) + 1):
        off, on = 0.0, math.inf
        for need in needs:
            removed = min(1.0, max(0.0, need - (k - 1))) / need if need > 0.0 else 0.0
            off, on = min(off, on), min(on, off + switch) + 1.0 - price * removed
        total += min(off, on)
    return total
