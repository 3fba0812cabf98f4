from __future__ import annotations

import errno
import os
import resource
import socket

import pytest
from typer.testing import CliRunner

from headrace.cli import doctor
from headrace.cli.main import app


def finding(subject):
    [found] = [found for found in doctor.findings() if found.subject == subject]
    return found


def test_on_a_machine_that_can_run_headrace_nothing_is_broken():
    assert [f for f in doctor.findings() if f.verdict is doctor.Verdict.BROKEN] == []


def test_every_finding_that_is_not_fine_says_what_to_do():
    assert [
        f for f in doctor.findings() if f.verdict is not doctor.Verdict.FINE and not f.remedy
    ] == []


def test_a_low_limit_on_open_files_would_hurt(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = finding("open files")
    assert found.verdict is doctor.Verdict.SLOW
    assert "256" in found.found
    assert "ulimit -n" in found.remedy


def test_a_machine_without_memory_files_is_told_how_data_goes_instead(monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = finding("memory between processes")
    assert found.verdict is doctor.Verdict.SLOW
    assert "sockets" in found.remedy


@pytest.fixture
def no_loopback(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EACCES, "no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)


def test_a_machine_without_loopback_cannot_run_headrace(no_loopback):
    assert finding("ports on loopback").verdict is doctor.Verdict.BROKEN


def test_the_command_fails_when_something_is_broken(no_loopback):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "does not work" in result.stdout


def test_the_command_succeeds_when_nothing_is_broken():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "numpy" in result.stdout
