from __future__ import annotations

import errno
import os
import resource
import socket

import pytest
from typer.testing import CliRunner

from headrace.cli import doctor
from headrace.cli.main import app
from headrace.service import DispatcherConfig, DispatchServer
from headrace.transport.security import Security, new_keys


def find_finding(subject):
    [found] = [found for found in doctor.check_host() if found.subject == subject]
    return found


def test_host_that_runs_the_tests_has_no_errors():
    assert [f for f in doctor.check_host() if f.severity is doctor.Severity.ERROR] == []


def test_every_problem_has_a_remedy():
    assert [
        f for f in doctor.check_host() if f.severity is not doctor.Severity.OK and not f.remedy
    ] == []


def test_low_limit_of_open_files_is_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = find_finding("open files")
    assert found.severity is doctor.Severity.WARNING
    assert "256" in found.found
    assert "ulimit -n" in found.remedy


def test_missing_memfd_is_a_warning_that_names_the_fallback(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = find_finding("shared memory")
    assert found.severity is doctor.Severity.WARNING
    assert "sockets" in found.remedy


@pytest.fixture
def no_loopback(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "sockets are forbidden")

    monkeypatch.setattr(socket, "create_server", refuse)


def test_missing_loopback_is_an_error(no_loopback):
    assert find_finding("ports on loopback").severity is doctor.Severity.ERROR


def test_command_fails_if_a_check_has_an_error(no_loopback):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "error" in result.stdout


def test_extra_to_install_is_shown_with_its_brackets(monkeypatch):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "arrow"})
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert "headrace[arrow]" in result.stdout


@pytest.mark.parametrize("columns", ["50", "80"])
def test_commands_to_type_are_not_cut_in_a_narrow_terminal(monkeypatch, columns):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "compression"})
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": columns})
    assert "'headrace[compression]'" in result.stdout
    assert "…" not in result.stdout


def test_keras_and_lz4_are_checked():
    assert {"keras", "lz4"} <= {found.subject for found in doctor.check_host()}


@pytest.mark.parametrize(
    ("text", "severity", "expected"),
    [
        ("max 100000\n", doctor.Severity.OK, "no limit"),
        ("50000 100000\n", doctor.Severity.WARNING, "0.5 of"),
        ("unreadable", doctor.Severity.OK, "not set"),
    ],
)
def test_cpu_quota_below_the_cores_is_a_warning(tmp_path, text, severity, expected):
    limits = tmp_path / "cpu.max"
    limits.write_text(text)
    found = doctor._quota(limits)
    assert (found.severity, expected in found.found) == (severity, True)


def test_unreachable_dispatcher_is_an_error_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = CliRunner().invoke(app, ["doctor", f"127.0.0.1:{port}"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert f"dispatcher at 127.0.0.1:{port}" in result.stdout
    assert "is it running" in result.stdout


def test_dispatcher_without_workers_is_a_warning():
    with DispatchServer() as dispatcher:
        address = dispatcher.target.split("://")[1]
        result = CliRunner().invoke(app, ["doctor", address], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "headrace worker --dispatcher" in result.stdout


def test_dispatcher_with_keys_is_reachable_with_keys_only(tmp_path):
    new_keys(tmp_path)
    security = Security.load(tmp_path, "server")
    with DispatchServer(DispatcherConfig(security=security)) as dispatcher:
        address = dispatcher.target.split("://")[1]
        without = CliRunner().invoke(app, ["doctor", address], env={"COLUMNS": "300"})
        keys = ["--keys", str(tmp_path)]
        found = CliRunner().invoke(app, ["doctor", address, *keys], env={"COLUMNS": "300"})
    assert without.exit_code == 1
    assert "--keys" in without.stdout
    assert found.exit_code == 0
    assert "reachable" in found.stdout


def test_command_succeeds_without_errors():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "numpy" in result.stdout
