"""Tests of the report: problems, missed targets, noise, impossible figures and stored results."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measure import Measurement, ratio
from benchmarks.report import Result, code, results_table, store
from benchmarks.workload import Bound, Contender, Elements, Pipeline, Target, Workload


def _build(_: Path, __: ExitStack) -> Pipeline:
    return lambda: iter(())


def _check(_: Elements) -> None:
    return None


WORKLOAD = Workload(
    name="rows",
    unit="rows",
    check=_check,
    contenders=(
        Contender(name="headrace", build=_build, role="headrace"),
        Contender(name="peer", build=_build),
        Contender(name="bound", build=_build, role="limit"),
    ),
    targets=(Target(of=("peer",), at_least=5.0),),
)


def _measured(
    ours: list[float], peer: list[float], bound: list[float], problem: str | None = None
) -> list[Measurement]:
    firsts = [0.01] * len(ours)
    return [
        Measurement(contender="headrace", role="headrace", rates=ours, firsts=firsts),
        Measurement(contender="peer", role="peer", rates=peer, firsts=firsts, problem=problem),
        Measurement(contender="bound", role="limit", rates=bound, firsts=firsts),
    ]


def test_a_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    ours, peer, _ = _measured([10.0, 40.0, 60.0], [10.0, 10.0, 30.0], [1.0] * 3)
    assert ratio(ours, [peer]) == 2.0


def test_the_fastest_of_several_is_chosen_in_each_round() -> None:
    ours, first, second = _measured([8.0, 8.0, 8.0], [1.0, 4.0, 2.0], [2.0, 1.0, 4.0])
    assert ratio(ours, [first, second]) == 2.0


def test_the_contender_with_the_best_median_is_one_of_all_rounds() -> None:
    ours, first, second = _measured([8.0, 8.0, 8.0], [1.0, 4.0, 2.0], [3.0, 1.0, 4.0])
    assert ratio(ours, [first, second], of_best_median=True) == 8.0 / 3.0


def test_there_is_no_ratio_to_a_failed_contender() -> None:
    ours, peer, bound = _measured([8.0], [1.0], [1.0], problem="failed: OSError")
    assert ratio(ours, [peer]) is None
    assert ratio(ours, [peer, bound]) is None


@pytest.mark.parametrize("problem", ["not installed", "failed: ValueError: wrong data: the order"])
def test_a_problem_is_in_the_table_and_the_target_is_unknown(problem: str) -> None:
    table = results_table([Result.of(WORKLOAD, _measured([8.0], [], [9.0], problem))])
    assert problem in table
    assert "5x peer: unknown" in table


def test_a_missed_target_is_marked() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([8.0], [2.0], [9.0]))])
    assert "5x peer: MISSED, 4x" in table


def test_a_met_target_is_marked() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))])
    assert "5x peer: met, 6x" in table
    assert "LIMIT" not in table


def test_rounds_with_a_large_spread_are_marked_as_noisy() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([10.0, 16.0], [2.0, 2.1], [20.0, 21.0]))])
    assert table.count("NOISY") == 1


def test_a_rate_above_its_limit_is_marked_as_wrong() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([12.0], [2.0], [6.0]))])
    assert "ABOVE THE LIMIT" in table


def test_stored_results_keep_other_workloads_of_the_same_machine(tmp_path: Path) -> None:
    first = Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))
    other = Result(workload="other", date=first.date, measurements=[], rows=[])
    store(tmp_path, [first], ["rows", "other"], "Method.")
    store(tmp_path, [other], ["rows", "other"], "Method.")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [entry["workload"] for entry in stored["results"]] == ["rows", "other"]
    assert "5x peer: met" in (tmp_path / "RESULTS.md").read_text()


def test_a_page_of_one_run_has_its_date_and_code(tmp_path: Path) -> None:
    result = Result(workload="rows", date="2026-01-02", measurements=[], rows=[], code="abc")
    store(tmp_path, [result], ["rows"], "Method.")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "measured 2026-01-02, code abc (`git rev-parse" in page


def test_a_page_of_several_runs_lists_workloads_of_other_runs(
    tmp_path: Path,
) -> None:
    runs = [("a", "2026-01-02", "abc"), ("b", "2026-01-02", "abc"), ("c", "2026-01-01", "")]
    results = [
        Result(workload=name, date=date, measurements=[], rows=[], code=code)
        for name, date, code in runs
    ]
    store(tmp_path, results, ["a", "b", "c"], "Method.")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "measured 2026-01-02, code abc (" in page
    assert "Exceptions:\n\n* measured 2026-01-01, code unknown: c.\n" in page


def test_code_is_the_tree_hash_and_marks_changed_files(tmp_path: Path) -> None:
    directory = tmp_path / "library"
    directory.mkdir()
    source = directory / "module.py"
    source.write_text("x = 1\n")
    assert code(directory) == ""
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "A library"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    clean = code(directory)
    assert len(clean) == 10
    (tmp_path / "page.md").write_text("results\n")
    assert code(directory) == clean
    source.write_text("x = 2\n")
    assert code(directory) == clean + "+"


def test_processor_time_is_in_the_table() -> None:
    ours, peer, bound = _measured([12.0, 12.0, 12.0], [2.0] * 3, [13.0] * 3)
    ours.cpus, peer.cpus, bound.cpus = [0.00234, 0.5, 0.001], [3e-9] * 3, [5.24e-6] * 3
    table = results_table([Result.of(WORKLOAD, [ours, peer, bound])])
    assert "CPU per item" in table
    assert "2.34 ms" in table
    assert "3 ns" in table
    assert "5.24 µs" in table


def test_stored_results_with_other_columns_are_dropped(tmp_path: Path) -> None:
    first = Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))
    store(tmp_path, [first], ["rows", "other"], "Method.")
    stored = json.loads((tmp_path / "results.json").read_text())
    stored["results"][0]["rows"][0].pop()
    (tmp_path / "results.json").write_text(json.dumps(stored))
    other = Result(workload="other", date=first.date, measurements=[], rows=[])
    store(tmp_path, [other], ["rows", "other"], "Method.")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [entry["workload"] for entry in stored["results"]] == ["other"]


def test_results_of_another_machine_are_kept_and_labelled(tmp_path: Path) -> None:
    order = ["a", "b", "other"]
    for name in order:
        result = Result(
            workload=name,
            date="2026-01-02",
            measurements=[],
            rows=[],
            code="abc",
            machine={"cores": "2" if name != "other" else "1000", "cpu": "C"},
        )
        store(tmp_path, [result], order, "Method.")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [entry["workload"] for entry in stored["results"]] == order
    page = (tmp_path / "RESULTS.md").read_text()
    assert "**Machine.** cores 2, cpu C; measured 2026-01-02, code abc (" in page
    assert "Exceptions:\n\n* measured 2026-01-02, code abc, cores 1000: other.\n" in page


def _table_with(workload: Workload, rates: list[float]) -> str:
    ours, peer, bound = _measured(rates, [2.0] * len(rates), [99.0] * len(rates))
    return results_table([Result.of(workload, [ours, peer, bound])])


def test_a_target_can_be_an_absolute_rate() -> None:
    workload = replace(WORKLOAD, targets=(Target(of=(), at_least=10.0),))
    assert "at least 10 rows/s: met, 12 rows/s" in _table_with(workload, [12.0])
    assert "at least 10 rows/s: MISSED, 8 rows/s" in _table_with(workload, [8.0])


def test_a_target_of_a_ratio_or_a_rate_is_met_by_either() -> None:
    workload = replace(WORKLOAD, targets=(Target(of=("peer",), at_least=5.0, or_rate=9.0),))
    assert "5x peer or 9 rows/s: met, 9.5 rows/s" in _table_with(workload, [9.5])
    assert "5x peer or 9 rows/s: MISSED, 4x" in _table_with(workload, [8.0])
    assert "5x peer or 90 rows/s: met, 6x" in _table_with(
        replace(WORKLOAD, targets=(Target(of=("peer",), at_least=5.0, or_rate=90.0),)), [12.0]
    )


def test_a_bound_limits_the_seconds_per_item() -> None:
    workload = replace(WORKLOAD, targets=(Bound(at_most=0.1),), self_timed=True)
    assert "at most 100 ms per item: met, 83.3 ms" in _table_with(workload, [12.0])
    table = _table_with(workload, [8.0])
    assert "at most 100 ms per item: MISSED, 125 ms" in table
    assert "125 ms per item" in table


def test_page_shows_stored_scale_curves_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    curve = {"title": "Peak memory", "unit": "megabytes", "rounds": {"100": [1.5], "1000": [2500]}}
    (tmp_path / "curves" / "scale_memory.json").write_text(json.dumps(curve))
    (tmp_path / "curves" / "scale_memory.svg").touch()
    store(tmp_path, [], [], "")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| curve       | unit      | 100 peers of each kind | 1,000 peers of each kind |" in page
    assert "| Peak memory | megabytes | 1.5                    | 2,500                    |" in page
