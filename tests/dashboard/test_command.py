"""`headrace dashboard` as a process, and the files of the page."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli.main import app
from headrace.dashboard import report
from tests.dashboard.pages import SECONDS, events, get, wait_for_status
from tests.dashboard.test_server import address_of

STATIC = Path(report.__file__).parent / "static"


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_prints_the_url_and_stops_on_a_signal(number: signal.Signals):
    with hr.service.LocalCluster(num_workers=0, processes=False) as cluster:
        address = address_of(cluster.target)
        command = [sys.executable, "-m", "headrace", "dashboard", address, "--port", "0"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                line = process.stdout.readline()
                found = re.fullmatch(r"dashboard ready at (http://127\.0\.0\.1:\d+/)\n", line)
                assert found, line or process.stderr.read()
                assert "<h1>Headrace</h1>" in get(found[1])[2]
                wait_for_status(found[1], lambda status: status["view"] is not None)
                stream = events(found[1])
                next(stream)
                process.send_signal(number)
                output, errors = process.communicate(timeout=SECONDS)
                stream.close()
            finally:
                process.kill()
        assert (process.returncode, output, errors) == (0, "dashboard stopped\n", "")


def test_server_that_does_not_reply_is_an_error():
    result = CliRunner().invoke(app, ["dashboard", "127.0.0.1:1", "--port", "0"])
    assert result.exit_code == 1
    assert "no server reachable at 127.0.0.1:1" in result.stderr
    assert "ready" not in result.stdout


@pytest.mark.heavy
def test_port_in_use_is_an_error():
    with (
        hr.service.LocalCluster(num_workers=0, processes=False) as cluster,
        socket.create_server(("127.0.0.1", 0)) as used,
    ):
        port = str(used.getsockname()[1])
        result = CliRunner().invoke(app, ["dashboard", address_of(cluster.target), "--port", port])
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1" in result.stderr


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_missing_package_is_an_error_that_names_the_extra(missing: str):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "sys.argv = ['headrace', 'dashboard', '127.0.0.1:1']\n"
        "from headrace.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert f"needs {missing}: pip install 'headrace[dashboard]'" in done.stderr


def test_program_inserts_no_html_and_runs_no_text():
    program = (STATIC / "dashboard.js").read_text(encoding="utf-8")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                   "new Function", "</script", "http://", "https://"):  # fmt: skip
        assert unsafe not in program.replace("http://www.w3.org/2000/svg", "")


def test_files_of_the_page_belong_to_the_package():
    assert sorted(path.name for path in STATIC.iterdir()) == [
        "dashboard.css", "dashboard.js", "index.html",
    ]  # fmt: skip
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|<script(?! src=\"static/)|style=", page)
