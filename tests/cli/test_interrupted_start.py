"""Ctrl-C or SIGTERM while a command is still being imported ends it without a word."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

# The signal comes when a module is about to be imported, as from a terminal.
SCRIPT = """
import os, sys
import headrace

module, number, *arguments = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, *rest):
        if name == module:
            sys.meta_path.remove(self)
            print("interrupted", flush=True)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Interrupt())
sys.argv = ["headrace", *arguments]
from headrace.__main__ import main
main()
"""


def run(module, number, *arguments):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, module, str(int(number)), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "module", ["headrace.cli", "typer", "rich.console", "numpy", "zmq", "headrace.cli.serve"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_while_a_command_is_imported_ends_it_without_a_word(module, number, code):
    done = run(module, number, "status", "127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr) == (code, "interrupted\n", "")


def test_a_signal_while_the_demo_is_imported_ends_it_without_a_word():
    done = run("sklearn.datasets", signal.SIGINT, "demo")
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("milliseconds", [0, 50, 100, 200, 400])
def test_a_process_can_be_interrupted_at_any_instant_of_its_start(milliseconds):
    script = "from headrace.__main__ import main; print('up', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "status", "127.0.0.1:1", "--timeout", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(milliseconds / 1000)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert "Traceback" not in words
    # 1: it was done before, and nobody answered. -SIGINT: Python was ending already, when nothing
    # of the command runs any more.
    assert process.returncode in (1, 130, -signal.SIGINT), words


def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it():
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "import headrace.__main__; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")
