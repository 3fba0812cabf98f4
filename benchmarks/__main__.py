"""Run the benchmarks; see the package's docstring for the ways to call it."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from benchmarks.measure import FULL, QUICK, measure, write_inputs
from benchmarks.report import Result, results_table, store

__all__ = ["main"]

QUESTIONS = (
    "adapters_jax",
    "small_rows",
    "scalar_map",
    "distributed_input",
    "interleave",
    "tfrecord",
    "jpeg",
    "service_scalars",
    "service_batches",
    "coordinated_reads",
    "exactly_once",
    "exactly_once_bytes",
    "service_elements",
    "service_limits",
    "service_jpeg",
    "ordered",
    "ordered_shuffled",
    "python_bound",
    "trainers",
    "adapters_torch",
    "latencies",
    "worker_kills",
    "parameter_store",
    "parameter_servers",
    "dense_variable",
    "keras_fit",
    "dispatcher",
)


def main(arguments: list[str]) -> int:
    """Run what was asked for; returns 1 when a contender failed, 0 otherwise."""
    options = _parser().parse_args(arguments)
    chosen = options.question or list(QUESTIONS)
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in QUESTIONS}
    if options.list:
        for name in chosen:
            _describe(name, modules[name])
        return 0
    effort = QUICK if options.quick else FULL
    how = (
        f"{effort.rounds} rounds; in each, every contender in turn reads for {effort.ramp:g} s "
        f"untimed and {effort.seconds:g} s timed, in a process of its own."
    )
    workloads = [workload for module in modules.values() for workload in module.WORKLOADS]
    for workload in workloads:
        if workload.stretch != 1:
            how += f" {workload.name}: {workload.stretch:g} times as long."
        if workload.times_rounds != 1:
            how += f" {workload.name}: {workload.times_rounds} times as many rounds."
        if workload.renew_after:
            how += f" {workload.name}: in new processes after each {workload.renew_after} rounds."
    order = [workload.name for workload in workloads]
    results: list[Result] = []
    failed = False
    for name in chosen:
        with tempfile.TemporaryDirectory() as inputs:
            if hasattr(modules[name], "write_inputs"):
                write_inputs(name, Path(inputs))
            for workload in modules[name].WORKLOADS:
                measurements = measure(name, workload, effort, Path(inputs), say=_say)
                results.append(Result.of(workload, measurements))
                failed |= any((m.problem or "").startswith("failed") for m in measurements)
                if not options.quick:  # after each, so that an interrupted run keeps what it has
                    store(Path(__file__).parent, results, order, how)
    print(results_table(results))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("question", nargs="*", choices=[[], *QUESTIONS], help="default: all")
    parser.add_argument("--quick", action="store_true", help="short rounds, nothing is written")
    parser.add_argument("--list", action="store_true", help="name the contenders and stop")
    return parser


def _describe(name: str, module: ModuleType) -> None:
    print(f"{name}: {(module.__doc__ or '').splitlines()[0]}")
    for workload in module.WORKLOADS:
        print(f"    {workload.name}: {', '.join(c.name for c in workload.contenders)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
