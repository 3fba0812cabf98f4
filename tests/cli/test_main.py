from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_version_is_the_package_s():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"headrace {headrace.__version__}\n")


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "dispatcher", "doctor", "keys", "status", "worker"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-command"], "no-such-command"),
        (["worker"], "--dispatcher"),
        (["worker", "--dispatcher", "nonsense"], "nonsense"),
        (["worker", "--dispatcher", "a:1", "--processes", "0"], "--processes 0"),
        (["worker", "--dispatcher", "a:1", "--data-transfer-protocol", "pigeon"], "pigeon"),
        (["worker", "--dispatcher", "a:1", "--preload", "no_such_module"], "no_such_module"),
        (["worker", "--dispatcher", "a:1", "--port", "65535", "--processes", "2"], "65535"),
        (["dispatcher", "--fault-tolerant"], "--work-dir"),
        (["dispatcher", "--port", "70000"], "70000"),
        (["dispatcher", "--keys", "/no/such/directory"], "/no/such/directory"),
        (["dispatcher", "--metrics-port", "-1"], "--metrics-port -1"),
        (["status", "nonsense"], "nonsense"),
        (["doctor", "nonsense"], "nonsense"),
        (["status", "a:1", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_wrong_arguments_are_a_usage_error_that_names_them(arguments, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_the_status_of_nobody_is_one_line_and_exit_code_1():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = invoke("status", address, "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert address in line
