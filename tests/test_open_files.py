"""Tests of the errors at the limit of open files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from headrace.open_files import check_available, explain_open_error


def test_error_at_the_file_limit_names_the_remedy():
    assert explain_open_error(OSError(errno.EMFILE, "Too many open files")) == (
        "Too many open files; raise the limit (ulimit -n 4096)"
    )
    assert explain_open_error(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert explain_open_error(ValueError("x")) == "x"


def test_check_available_keeps_no_descriptor():
    before = len(os.listdir("/dev/fd"))
    check_available(30)
    assert len(os.listdir("/dev/fd")) == before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    try:
        with pytest.raises(OSError, match=r"500 more are required, but only \d+ can be.*ulimit -n"):
            check_available(500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(files, *command):
    """Run a command with a limit of open files; return its exit code and output."""
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if "ready" in process.stdout.readline():
        process.terminate()
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


@pytest.mark.heavy
@pytest.mark.parametrize("files", [12, 18, 24, 30, 36, 40])
def test_command_at_the_file_limit_fails_with_one_line(files):
    command = (sys.executable, "-m", "headrace", "dispatcher", "--port", "0")
    code, words = limited(files, *command)
    assert "Traceback" not in words
    if code:
        assert code == 1
        [line] = words.splitlines()
        assert line.startswith("headrace: Too many open files")
        assert "ulimit -n" in line
    else:
        assert files >= 30


@pytest.mark.heavy
def test_process_start_at_the_file_limit_is_an_error():
    script = (
        "import os, headrace as hr\n"
        "def main():\n"
        "    with hr.service.DispatchServer():\n"
        "        held = []\n"
        "        while True:\n"
        "            try: held.append(os.open('/dev/null', 0))\n"
        "            except OSError: break\n"
        "        for number in held[:5]: os.close(number)\n"
        "        from headrace.process.child import ChildProcess, ChildCommand\n"
        "        ChildProcess(ChildCommand(arguments=('-c', ''), environment={}))\n"
        "main()\n"
    )
    code, words = limited(64, sys.executable, "-c", script)
    assert code == 1
    assert "10 more are required, but only 5 can be opened; raise the limit (ulimit -n" in words
