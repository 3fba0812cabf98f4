"""Tests of the report: tables, targets, stored results, and the committed pages and charts."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks
from benchmarks.areas import AREAS
from benchmarks.measure import Measurement, ratio
from benchmarks.report import render, results_table, store
from benchmarks.results import Result, Results, code
from benchmarks.targets import outcomes
from benchmarks.titles import TITLES
from benchmarks.workload import Bound, Contender, Elements, Pipeline, Target, Workload

DIRECTORY = Path(benchmarks.__file__).parent


def _build(_: Path, __: ExitStack) -> Pipeline:
    return lambda: iter(())


def _check(_: Elements) -> None:
    return None


#: Has the name of a real workload: pages show the workloads of AREAS only.
WORKLOAD = Workload(
    name="TFRecord, batch(256)",
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


def _result(name: str, **changes: object) -> Result:
    values = {"date": "2026-01-02", "measurements": [], "code": "abc", **changes}
    return Result(workload=name, unit="rows", **values)  # type: ignore[arg-type]


def _stored_names(directory: Path) -> list[str]:
    stored = json.loads((directory / "results.json").read_text())
    return [entry["workload"] for entry in stored["results"]]


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


def test_the_table_compares_with_the_fastest_peer() -> None:
    measured = _measured([12.0, 10.0, 12.0], [2.0, 2.0, 3.0], [13.0] * 3)
    slow = Measurement(contender="slow", role="peer", rates=[1.0, 1.0, 1.0])
    table = results_table([Result.of(WORKLOAD, [*measured, slow])])
    assert "| 12 rows/s | peer          | 2 rows/s   | 5x    | 4x to 6x          |" in table
    assert "slow" not in table


def test_without_a_peer_the_lowest_limit_is_compared() -> None:
    ours, _, bound = _measured([8.0], [], [10.0])
    other = Measurement(contender="fast", role="limit", rates=[99.0])
    table = results_table([replace(Result.of(WORKLOAD, _measured([8.0], [2.0], [10.0])),
                                   measurements=[ours, bound, other])])  # fmt: skip
    assert "| bound (upper limit) | 10 rows/s  | 0.8x  |" in table


def test_a_failed_contender_of_headrace_is_shown() -> None:
    failed = Measurement(contender="headrace", role="headrace", problem="failed: OSError")
    peer = Measurement(contender="peer", role="peer", rates=[2.0])
    table = results_table([_result(WORKLOAD.name, measurements=[failed, peer])])
    assert "| failed: OSError | peer          | 2 rows/s   | –     |" in table


@pytest.mark.parametrize("problem", ["not installed", "failed: ValueError: wrong data: the order"])
def test_a_problem_of_a_peer_is_in_the_details(problem: str, tmp_path: Path) -> None:
    result = Result.of(WORKLOAD, _measured([8.0], [], [9.0], problem))
    store(tmp_path, [result], [WORKLOAD.name], "Method.")
    assert f"| peer      | {problem}" in (tmp_path / "DETAILS.md").read_text()
    assert "0 of 1. Not met, or unknown: TFRecord, batch(256), headrace: 5x peer." in results_table(
        [result], show_targets=True
    )


def test_a_missed_target_is_named() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([8.0], [2.0], [9.0]))], show_targets=True)
    assert table.endswith(
        "Not met, or unknown: TFRecord, batch(256), headrace: 5x peer, measured 4x."
    )


def test_met_targets_are_counted_on_request() -> None:
    results = [Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))]
    table = results_table(results, show_targets=True)
    assert table.endswith("Targets of development met: 1 of 1.")
    assert "upper limit" not in table
    assert "Targets" not in results_table(results)


def test_a_rate_above_its_limit_is_reported_as_wrong() -> None:
    table = results_table([Result.of(WORKLOAD, _measured([12.0], [2.0], [6.0]))])
    assert "so the figures are wrong: TFRecord, batch(256)." in table


@pytest.mark.parametrize(
    ("target", "rate", "text", "is_met"),
    [
        (Target(of=(), at_least=10.0), 12.0, "at least 10 rows/s, measured 12 rows/s", True),
        (Target(of=(), at_least=10.0), 8.0, "at least 10 rows/s, measured 8 rows/s", False),
        (
            Target(of=("peer",), at_least=5.0, or_rate=9.0),
            9.5,
            "5x peer or 9 rows/s, measured 9.5 rows/s",
            True,
        ),
        (
            Target(of=("peer",), at_least=5.0, or_rate=9.0),
            8.0,
            "5x peer or 9 rows/s, measured 4x",
            False,
        ),
        (
            Target(of=("peer",), at_least=5.0, or_rate=90.0),
            12.0,
            "5x peer or 90 rows/s, measured 6x",
            True,
        ),
        (Bound(at_most=0.1), 12.0, "at most 100 ms per item, measured 83.3 ms", True),
        (Bound(at_most=0.1), 8.0, "at most 100 ms per item, measured 125 ms", False),
    ],
)
def test_outcomes_of_targets(target: Target | Bound, rate: float, text: str, is_met: bool) -> None:
    found = outcomes(replace(WORKLOAD, targets=(target,)), _measured([rate], [2.0], [99.0]))
    assert found == {f"TFRecord, batch(256), headrace: {text}": is_met}


def test_self_timed_workloads_show_seconds_per_item() -> None:
    workload = replace(WORKLOAD, self_timed=True, targets=())
    table = results_table([Result.of(workload, _measured([8.0], [2.0], [99.0]))])
    assert "| 125 ms per row | peer          | 500 ms per row | 4x    |" in table


@pytest.mark.parametrize(
    ("self_timed", "unit", "rate", "row"),
    [
        (True, "kills", 0.5, "| 2 s per kill | – (lower is better)  |"),
        (False, "splits", 12.0, "| 12 splits/s | – (higher is better) |"),
        (True, "busy ms", 934.0, "| 93.4 % busy | – (higher is better) |"),
        (True, "µs of work of two workers", 1.84e6, "| 92.0 % busy | – (higher is better) |"),
    ],
)
def test_without_an_alternative_a_row_says_what_is_better(
    self_timed: bool, unit: str, rate: float, row: str
) -> None:
    result = Result.of(WORKLOAD, _measured([rate], [], []))
    alone = replace(result, unit=unit, self_timed=self_timed, measurements=result.measurements[:1])
    assert row.replace(" ", "") in results_table([alone]).replace(" ", "")


def test_stored_results_keep_other_workloads(tmp_path: Path) -> None:
    order = [WORKLOAD.name, "other"]
    store(tmp_path, [Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))], order, "Method.")
    store(tmp_path, [_result("other")], order, "Method.")
    assert _stored_names(tmp_path) == order
    assert "| 12 rows/s | peer          | 2 rows/s   | 6x " in (tmp_path / "RESULTS.md").read_text()


def test_stored_results_are_read_back(tmp_path: Path) -> None:
    result = Result.of(WORKLOAD, _measured([12.0], [2.0], [13.0]))
    results = Results(method="Method.", thread_round_trip_us=7, results=[result])
    results.save(tmp_path / "results.json")
    read = Results.load(tmp_path / "results.json")
    assert read == replace(results, results=[replace(result, targets={})])


def test_stored_results_in_another_format_are_dropped(tmp_path: Path) -> None:
    order = [WORKLOAD.name, "other"]
    store(tmp_path, [_result(WORKLOAD.name)], order, "Method.")
    stored = json.loads((tmp_path / "results.json").read_text())
    stored["results"][0]["rows"] = []
    (tmp_path / "results.json").write_text(json.dumps(stored))
    store(tmp_path, [_result("other")], order, "Method.")
    assert _stored_names(tmp_path) == ["other"]


def test_runs_and_differences_of_machines_are_listed(tmp_path: Path) -> None:
    usual = {"cores": "2", "cpu": "C", "memory": "8 GiB", "system": "Linux", "python": "3.11"}
    results = [
        _result("a", machine=usual),
        _result("b", machine=usual),
        _result("c", machine=usual | {"cores": "1000"}),
        _result("d", machine=usual, date="2026-01-01", code=""),
    ]
    store(tmp_path, results, ["a", "b", "c", "d"], "Method.")
    page, details = ((tmp_path / f"{name}.md").read_text() for name in ("RESULTS", "DETAILS"))
    assert "Measured 2026-01-01 to 2026-01-02 on 2 cores (C, 8 GiB), Linux, Python 3.11." in page
    assert "* 2026-01-02, code `abc`: a; b.\n" in details
    assert "* 2026-01-02, code `abc`, cores 1000: c.\n" in details
    assert "* 2026-01-01, code `unknown`: d.\n" in details


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


def test_processor_time_is_in_the_details(tmp_path: Path) -> None:
    ours, peer, bound = _measured([12.0, 12.0, 12.0], [2.0] * 3, [13.0] * 3)
    ours.cpus, peer.cpus, bound.cpus = [0.00234, 0.5, 0.001], [3e-9] * 3, [5.24e-6] * 3
    store(tmp_path, [Result.of(WORKLOAD, [ours, peer, bound])], [WORKLOAD.name], "Method.")
    details = (tmp_path / "DETAILS.md").read_text()
    assert "| Headrace  | 12 rows/s | 10.0 ms       | 2.34 ms      | –      |" in details
    assert "| peer      | 2 rows/s  | 10.0 ms       | 3 ns         | 6x     |" in details
    assert "| *bound*   | 13 rows/s | 10.0 ms       | 5.24 µs      | 0.923x |" in details


def test_page_shows_stored_scale_curves_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    curve = {"title": "Peak memory", "unit": "megabytes", "rounds": {"100": [1.5], "1000": [2500]}}
    (tmp_path / "curves" / "scale_memory.json").write_text(json.dumps(curve))
    store(tmp_path, [], [], "")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| unit      | 100 of each | 1,000 of each | 3,000 of each |" in page
    row = (
        "| [Peak memory](curves/scale_memory.json) | megabytes | 1.5         | 2,500         | –  "
    )
    assert row in page


def test_committed_pages_and_charts_are_up_to_date(tmp_path: Path) -> None:
    shutil.copy(DIRECTORY / "results.json", tmp_path)
    shutil.copytree(DIRECTORY / "curves", tmp_path / "curves")
    render(tmp_path)
    names = [*(f"charts/{path.name}" for path in (DIRECTORY / "charts").iterdir()),
             "RESULTS.md", "DETAILS.md"]  # fmt: skip
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {
        path.name for path in (DIRECTORY / "charts").iterdir()
    }
    for name in names:
        assert (DIRECTORY / name).read_text() == (tmp_path / name).read_text(), (
            "run `python -m benchmarks.report`"
        )


def test_each_workload_has_a_title_and_one_area() -> None:
    modules = [name for area in AREAS for name in area.benchmarks]
    found = {path.stem for path in DIRECTORY.glob("*.py") if "\nWORKLOADS = " in path.read_text()}
    assert sorted(modules) == sorted(found)
    names = [
        workload.name
        for name in modules
        for workload in importlib.import_module(f"benchmarks.{name}").WORKLOADS
    ]
    assert sorted(names) == sorted(TITLES)
    assert {name for area in AREAS for name in area.headlines} <= set(names)
    assert max(map(len, TITLES.values())) <= 50
