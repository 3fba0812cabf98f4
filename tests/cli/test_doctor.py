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


def finding(subject):
    [found] = [found for found in doctor.check_host() if found.subject == subject]
    return found


def test_on_a_machine_that_can_run_headrace_nothing_is_broken():
    assert [f for f in doctor.check_host() if f.severity is doctor.Severity.ERROR] == []


def test_every_finding_that_is_not_fine_says_what_to_do():
    assert [
        f for f in doctor.check_host() if f.severity is not doctor.Severity.OK and not f.remedy
    ] == []


def test_a_low_limit_on_open_files_would_hurt(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = finding("open files")
    assert found.severity is doctor.Severity.WARNING
    assert "256" in found.found
    assert "ulimit -n" in found.remedy


def test_a_machine_without_memory_files_is_told_how_data_goes_instead(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = finding("memory between processes")
    assert found.severity is doctor.Severity.WARNING
    assert "sockets" in found.remedy


@pytest.fixture
def no_loopback(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)


def test_a_machine_without_loopback_cannot_run_headrace(no_loopback):
    assert finding("ports on loopback").severity is doctor.Severity.ERROR


def test_the_command_fails_when_something_is_broken(no_loopback):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "does not work" in result.stdout


def test_the_extra_to_install_is_shown_with_its_brackets(monkeypatch):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "arrow"})
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert "headrace[arrow]" in result.stdout


@pytest.mark.parametrize("columns", ["50", "80"])
def test_in_a_narrow_terminal_what_is_to_be_typed_is_not_cut(monkeypatch, columns):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "compression"})
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": columns})
    assert "'headrace[compression]'" in result.stdout
    assert "…" not in result.stdout


def test_keras_and_lz4_are_looked_for():
    assert {"keras", "lz4"} <= {found.subject for found in doctor.check_host()}


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        ("max 100000\n", doctor.Severity.OK, "no limit"),
        ("50000 100000\n", doctor.Severity.WARNING, "0.5 cores"),
        ("unreadable", doctor.Severity.OK, "none is set"),
    ],
)
def test_a_quota_below_the_cores_would_hurt(tmp_path, text, verdict, words):
    limits = tmp_path / "cpu.max"
    limits.write_text(text)
    found = doctor._quota(limits)
    assert (found.severity, words in found.found) == (verdict, True)


def test_a_dispatcher_that_is_not_there_is_broken_and_the_remedy_asks_the_right_questions():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = CliRunner().invoke(app, ["doctor", f"127.0.0.1:{port}"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert f"dispatcher at 127.0.0.1:{port}" in result.stdout
    assert "is it running" in result.stdout


def test_a_dispatcher_without_workers_would_hurt():
    with DispatchServer() as dispatcher:
        address = dispatcher.target.split("://")[1]
        result = CliRunner().invoke(app, ["doctor", address], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "headrace worker --dispatcher" in result.stdout


def test_a_dispatcher_with_keys_is_reached_with_keys(tmp_path):
    new_keys(tmp_path)
    security = Security.load(tmp_path, "server")
    with DispatchServer(DispatcherConfig(security=security)) as dispatcher:
        address = dispatcher.target.split("://")[1]
        without = CliRunner().invoke(app, ["doctor", address], env={"COLUMNS": "300"})
        keys = ["--keys", str(tmp_path)]
        found = CliRunner().invoke(app, ["doctor", address, *keys], env={"COLUMNS": "300"})
    assert without.exit_code == 1
    assert "(--keys)" in without.stdout
    assert found.exit_code == 0
    assert "answers" in found.stdout


def test_the_command_succeeds_when_nothing_is_broken():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "numpy" in result.stdout
