"""Reports: the page in one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli.main import app
from headrace.dashboard.history import Point
from headrace.dashboard.report import render_report, write_report
from headrace.dashboard.sampler import Sample, StatusSampler

NAMES = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "\u2028&lt;",
    '"\\</SCRIPT >',
]


def read_data(text: str):
    found = re.search(
        r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("name", NAMES)
def test_names_cannot_end_the_element_that_holds_the_data(name: str):
    status = json.dumps({"name": name}, ensure_ascii=False).encode()
    text = render_report(Sample(1, Point(0.0, {}), status, 0), b"[]", b"{}")
    assert read_data(text) == {"status": {"name": name}, "history": [], "plans": {}}
    assert text.count("</script>") == 2
    data = re.search(r'id="report">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]


def test_report_refers_to_no_other_file():
    text = render_report(Sample(1, Point(0.0, {}), b"{}", 0), b"[]", b"{}")
    assert '<link rel="stylesheet"' not in text
    assert not re.search(r"<script[^>]* src=", text)
    assert "default-src 'none'" in text
    assert "unsafe-inline" not in text


def test_command_writes_a_report_of_a_job(tmp_path: Path):
    output = tmp_path / "report.html"
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        distribute = hr.service.distribute(
            hr.service.ShardingPolicy.DYNAMIC, service=cluster.target, job_name=NAMES[0]
        )
        with iter(hr.Dataset.range(1000).apply(distribute)) as elements:
            next(elements)
            address = cluster.target.removeprefix("tcp://")
            result = CliRunner().invoke(
                app, ["report", address, "-o", str(output), "--seconds", "2"]
            )
    assert result.exit_code == 0, result.output
    assert str(output) in result.stdout
    data = read_data(output.read_text(encoding="utf-8"))
    (job,) = data["status"]["view"]["jobs"]
    assert job["name"] == NAMES[0]
    assert data["plans"][job["dataset"]]
    assert len(data["history"]) >= 1


def test_report_of_a_server_that_does_not_reply_is_an_error(tmp_path: Path):
    output = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", "127.0.0.1:1", "-o", str(output)])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr
    assert not output.exists()


def test_directory_that_does_not_exist_is_an_error_before_measuring(tmp_path: Path):
    with hr.service.LocalCluster(num_workers=0, processes=False) as cluster:
        address = cluster.target.removeprefix("tcp://")
        output = tmp_path / "missing" / "report.html"
        result = CliRunner().invoke(
            app, ["report", address, "-o", str(output), "--seconds", "1000"]
        )
    assert result.exit_code == 1
    assert str(output) in result.stderr


def test_interrupted_report_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(sampler: StatusSampler) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "report.html"
    monkeypatch.setattr(StatusSampler, "sample_once", interrupt)
    with hr.service.LocalCluster(num_workers=0, processes=False) as cluster:
        address = cluster.target.removeprefix("tcp://")
        with pytest.raises(KeyboardInterrupt):
            write_report(address, None, 1000.0, output)
    assert not output.exists()


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_invalid_duration_is_refused(tmp_path: Path, seconds: str):
    result = CliRunner().invoke(
        app, ["report", "127.0.0.1:1", "-o", str(tmp_path / "r.html"), "--seconds", seconds]
    )
    assert result.exit_code == 2
    assert "--seconds" in result.stderr
