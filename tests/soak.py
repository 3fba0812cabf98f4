"""Soak test of `make soak`: new seeds of the simulation, and repeated tests of the service.

    python -m tests.soak ROUNDS [--select EXPRESSION]

The last line is a row for the table of soak tests in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.test_simulation import SEEDS_PER_TEST

__all__ = ["Counts", "read_counts", "summary"]

_PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of tests that passed and failed, and of simulated seeds of the data service."""

    passed: int = 0
    failed: int = 0
    seeds: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            seeds=self.seeds + other.seeds,
        )


def read_counts(report: Path) -> Counts:
    """Count the tests of a JUnit report. A failed block of seeds counts with all its seeds."""
    passed = failed = seeds = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        if case.find("failure") is None and case.find("error") is None:
            passed += 1
        else:
            failed += 1
        name = case.get("name", "").partition("[")[0]
        seeds += {
            "test_all_invariants_hold": SEEDS_PER_TEST,
            "test_all_invariants_hold_with_many_processes": 1,
        }.get(name, 0)
    return Counts(passed=passed, failed=failed, seeds=seeds)


def summary(command: str, rounds: int, counts: Counts, seconds: float, commit: str) -> str:
    """Return a row of Markdown: date, commit, command, rounds, seeds, passed, failed, minutes."""
    cells = (
        datetime.date.today().isoformat(),
        commit,
        f"`{command}`",
        f"{rounds:,}",
        f"{counts.seeds:,}",
        f"{counts.passed:,}",
        f"{counts.failed:,}",
        f"{seconds / 60:.1f} min",
    )
    return f"| {' | '.join(cells)} |"


def _commit() -> str:
    """Return the short hash of the commit, with "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _run(*arguments: str, report: Path, **variables: str) -> tuple[bool, Counts]:
    """Run pytest; return whether it succeeded, and what it counted."""
    report.unlink(missing_ok=True)
    command = [*_PYTEST, f"--junitxml={report}", *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, check=False)
    return done.returncode == 0, read_counts(report) if report.exists() else Counts()


def main() -> int:
    """Run the soak test of the command line; return 1 after the first round with a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("rounds", type=int, help="number of rounds")
    parser.add_argument("--select", default="", help="run only matching tests, as pytest -k")
    args = parser.parse_args()
    selected = ["-k", args.select] if args.select else []
    suffix = f" SELECT='{args.select}'" if args.select else ""
    started_at, commit, completed = time.monotonic(), _commit(), 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        times = str(args.rounds)
        succeeded, counts = _run(
            *selected,
            "tests/simulation",
            report=report,
            SIMULATION_ROUNDS=times,
            SIMULATION_CROWDS=times,
        )
        while succeeded and completed < args.rounds:
            print(f"round {completed + 1} of {args.rounds}", flush=True)
            succeeded, added = _run(*selected, "tests/service", "tests/transport", report=report)
            counts += added
            completed += succeeded
    seconds = time.monotonic() - started_at
    print(summary(f"make soak TIMES={args.rounds}{suffix}", completed, counts, seconds, commit))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
