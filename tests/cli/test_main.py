from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.cli.serve import OPTIONS
from headrace.service import DispatcherConfig, WorkerConfig
from headrace.transport.security import new_keys


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_version_is_the_package_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"headrace {headrace.__version__}\n")


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "dispatcher", "doctor", "journal", "keys", "status", "top", "worker"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-command"], "no-such-command"),
        (["demo", "--job", "keras"], "No such option: --job"),
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
        (["dispatcher", "--port", "65536"], "--port must be at most 65535"),
        (["dispatcher", "--client-timeout", "-3"], "--client-timeout must be at least 0"),
        (["dispatcher", "--max-plan-bytes", "0"], "--max-plan-bytes must be at least 1"),
        (["dispatcher", "--host", "0.0.0.0"], "--host '0.0.0.0' requires --keys"),
        (["dispatcher", "--prot", "1"], "--port"),
        (["worker", "--dispatcher", "nonsense"], '--dispatcher must be "host:port"'),
        (["worker", "--dispatcher", "a:1", "--heartbeat-interval", "-1"], "--heartbeat-interval"),
        (
            ["worker", "--dispatcher", "a:1", "--worker-address", "me"],
            "clients cannot connect to --worker-address",
        ),
        (
            ["worker", "--dispatcher", "a:1", "--worker-address", "0.0.0.0:%port%"],
            'as in "myhost:%port%"',
        ),
        (["status", "nonsense"], 'HOST:PORT must be "host:port" or "tcp://host:port", got \'nons'),
        (["doctor", "nonsense"], 'HOST:PORT must be "host:port" or "tcp://host:port", got \'nons'),
        (["status", "a:99999"], "'99999' is not a port between 1 and 65535"),
        (["status", "a:1", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_wrong_argument_is_a_usage_error_that_names_it(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


_NOT_SUPPORTED: set[str] = set()


@pytest.mark.parametrize(
    ("command", "config"), [("dispatcher", DispatcherConfig), ("worker", WorkerConfig)]
)
def test_each_configuration_field_has_an_option(command, config):
    shown = invoke(command, "--help").stdout
    fields = {field.name for field in dataclasses.fields(config) if field.name != "_"}
    for field in fields - _NOT_SUPPORTED:
        assert f"{OPTIONS[field]} " in shown, field


@pytest.mark.parametrize("command", ["dispatcher", "worker"])
def test_help_of_each_duration_names_unit_and_default(command):
    shown = invoke(command, "--help").stdout
    options = [" ".join(option.split()) for option in re.split(r"\n(?=  -)", shown)]
    times = [option for option in options if " MS " in option]
    assert times
    for option in times:
        assert "illiseconds" in option, option
        assert "default" in option, option


def _commands(group, *names):
    """Yield each command of a group with its path of names."""
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, *names, name)


@pytest.mark.parametrize("columns", [80, 60])
def test_narrow_help_cuts_no_word(columns):
    for names, command in _commands(typer.main.get_command(app)):
        result = CliRunner().invoke(app, [*names, "--help"], terminal_width=columns)
        lines = result.stdout.splitlines()
        assert all(len(line) <= columns for line in lines), names
        text = " ".join(lines)
        assert "..." not in re.sub(r"\[[A-Z]+\]\.\.\.", "", text), names
        assert "…" not in text, names
        shown = set(text.split())
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                continue
            options = [name for name in parameter.opts if name.startswith("-")]
            for name in [*options, *(parameter.help or "").split()]:
                assert {name, f"{name},", f"{name}."} & shown, (names, name)
        for subcommand in getattr(command, "commands", {}).values():
            first = " ".join((subcommand.help or "").partition("\n\n")[0].split())
            assert first in " ".join(text.split()), names


@pytest.mark.parametrize(
    ("host", "message"),
    [("nowhere.invalid", "not an address or host"), ("192.0.2.7", "not an address or host")],
)
def test_host_of_another_machine_is_an_error_with_a_remedy(host, message, tmp_path):
    new_keys(tmp_path)
    result = invoke("dispatcher", "--port", "0", "--host", host, "--keys", str(tmp_path))
    assert result.exit_code == 1
    assert host in result.stderr
    assert message in result.stderr
    assert "0.0.0.0" in result.stderr


def test_status_of_an_unreachable_server_is_one_line_and_exit_code_1():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = invoke("status", address, "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert address in line


def test_commands_do_not_import_jax_or_scikit_learn():
    code = (
        "import sys, headrace.cli.main; sys.exit(any(m in sys.modules for m in ('jax', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
