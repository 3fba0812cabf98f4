"""Tests that docs/reliability.md names existing commits, tests and numbers of seeds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.simulation import test_simulation
from tests.soak import Counts, read_counts, summary

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
#: (short hash, file, test) of each command that reproduces a bug.
REPRODUCED = re.findall(r"`reproduce ([0-9a-f]{8}) (tests/[\w/]+\.py)::(\w+)`", PAGE)
#: (short hash, file, test) of the test that covers the bug today.
COVERED = re.findall(r"^\| ([0-9a-f]{8}) \| `(tests/[\w/]+\.py)::(\w+)` \|$", PAGE, re.MULTILINE)

#: Commits of the table of soak tests.
SOAKED = re.findall(r"^\| \d{4}-\d\d-\d\d \| ([0-9a-f]{8})", PAGE, re.MULTILINE)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def has_history() -> bool:
    """Return whether the commits of the page can be looked up: not in an sdist or shallow clone."""
    if not (ROOT / ".git").exists():
        return False
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


HISTORY = has_history()


@pytest.mark.parametrize(("commit", "file", "test"), REPRODUCED)
def test_a_command_names_a_commit_with_its_test(commit: str, file: str, test: str) -> None:
    assert commit in {each for each, _, _ in COVERED}
    if HISTORY:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        assert f"def {test}(" in git("show", f"{commit}:{file}").stdout


@pytest.mark.parametrize("commit", SOAKED)
def test_a_soak_test_names_an_existing_commit(commit: str) -> None:
    if HISTORY:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


@pytest.mark.parametrize(("commit", "file", "test"), COVERED)
def test_a_bug_is_covered_by_an_existing_test(commit: str, file: str, test: str) -> None:
    assert commit in {each for each, _, _ in REPRODUCED}
    assert f"def {test}(" in (ROOT / file).read_text()


def test_bugs_are_listed() -> None:
    assert len(REPRODUCED) >= 10
    assert len(COVERED) == len(REPRODUCED) == PAGE.count("`reproduce ")


def test_files_that_the_page_names_exist() -> None:
    today = re.sub(r"`reproduce [^`]*`", "", PAGE)
    for path in re.findall(r"`(tests/[\w/]+(?:\.py)?)[`:]", today):
        assert (ROOT / path).exists(), path


def test_the_numbers_of_seeds_are_those_of_the_simulation() -> None:
    block = test_simulation.SEEDS_PER_TEST
    rows = {
        mode: (
            test_simulation._QUICK.get(mode, count) * block,
            count * block,
            test_simulation._RANDOM[mode] * block,
        )
        for mode, count in test_simulation._BLOCKS.items()
    }
    totals = [sum(numbers) for numbers in zip(*rows.values(), strict=True)]
    for mode, numbers in rows.items():
        cells = " | ".join(f"{number:,}" for number in numbers)
        assert re.search(rf"`{mode}`\)? \| {cells} \|", PAGE), mode
    assert f"| **data service** | {' | '.join(f'**{each:,}**' for each in totals)} |" in PAGE
    assert f"simulates {totals[1] + 20 * totals[2]:,} seeds" in PAGE


def test_the_summary_of_a_soak_test_is_a_row_of_the_page(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="test_all_invariants_hold[default-0]"/>'
        '<testcase name="test_all_invariants_hold_with_many_processes[0]"/>'
        '<testcase name="test_other"><failure/></testcase>'
        '<testcase name="test_all_invariants_hold[default-1]"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = read_counts(report)
    assert counts == Counts(passed=2, failed=1, seeds=test_simulation.SEEDS_PER_TEST + 1)
    row = summary("make soak TIMES=1", 1, counts, 90.0, "0123abcd")
    assert row.endswith("| 0123abcd | `make soak TIMES=1` | 1 | 51 | 2 | 1 | 1.5 min |")
    header = next(line for line in PAGE.splitlines() if line.startswith("| date | commit |"))
    assert row.count("|") == header.count("|")
