"""Command line of the benchmarks; the docstring of the package describes its use."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from benchmarks import what_if
from benchmarks.measure import FULL, QUICK, measure, write_inputs
from benchmarks.report import Result, results_table, store
from benchmarks.workload import Workload

__all__ = ["main"]

BENCHMARKS = (
    "adapters_jax",
    "small_rows",
    "scalar_map",
    "distributed_input",
    "interleave",
    "autotune",
    "packing",
    "nested_datasets",
    "windows",
    "tfrecord",
    "file_sources",
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
    """Run the names benchmarks; return 1 if a contender failed, else 0."""
    if arguments[:1] == [what_if.__name__.rpartition(".")[2]]:  # measures predictions, not peers
        return what_if.main(arguments[1:])
    options = _parser().parse_args(arguments)
    names = options.benchmark or list(BENCHMARKS)
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in BENCHMARKS}
    if options.list:
        for name in names:
            _describe(name, modules[name])
        return 0
    effort = QUICK if options.quick else FULL
    method = (
        f"{effort.rounds} rounds. In each, the contenders take turns, each in its own process, "
        f"with {effort.ramp:g} s of untimed and {effort.seconds:g} s of timed reading."
    )
    workloads = [workload for module in modules.values() for workload in module.WORKLOADS]
    method += _exceptions_text(workloads)
    order = [workload.name for workload in workloads]
    results: list[Result] = []
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as inputs:
            if hasattr(modules[name], "write_inputs"):
                write_inputs(name, Path(inputs))
            for workload in modules[name].WORKLOADS:
                measurements = measure(name, workload, effort, Path(inputs), log=_log)
                results.append(Result.of(workload, measurements))
                failed |= any((m.problem or "").startswith("failed") for m in measurements)
                if not options.quick:  # after each, so that an interrupted run keeps its results
                    store(Path(__file__).parent, results, order, method)
    print(results_table(results))
    return int(failed)


def _exceptions_text(workloads: list[Workload]) -> str:
    """List the workloads with rounds of another length or number, grouped by the difference."""
    groups: dict[str, list[str]] = {}
    for workload in workloads:
        if workload.duration_factor != 1:
            text = f"{workload.duration_factor:g} times the duration"
            groups.setdefault(text, []).append(workload.name)
        if workload.rounds_factor != 1:
            text = f"{workload.rounds_factor} times the rounds"
            groups.setdefault(text, []).append(workload.name)
        if workload.restart_every:
            text = f"New processes every {workload.restart_every} rounds"
            groups.setdefault(text, []).append(workload.name)
    return "".join(f"\n* {text}: {'; '.join(names)}." for text, names in groups.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benchmark", nargs="*", choices=[[], *BENCHMARKS], help="default: all")
    parser.add_argument("--quick", action="store_true", help="run short rounds and write nothing")
    parser.add_argument("--list", action="store_true", help="list the contenders and exit")
    return parser


def _describe(name: str, module: ModuleType) -> None:
    print(f"{name}: {(module.__doc__ or '').splitlines()[0]}")
    for workload in module.WORKLOADS:
        print(f"    {workload.name}: {', '.join(c.name for c in workload.contenders)}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
