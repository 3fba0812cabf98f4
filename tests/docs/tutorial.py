"""Runs a tutorial as a reader would: saves its files, types its commands, compares the output.

    python -m tests.docs.tutorial docs/tutorials/first-pipeline.md    # prints what happens

A block of Python or shell starts with the name of its file in a comment, and is saved under that
name. A `console` block has commands and their output:

    $ python train.py               run to the end; the output must be the one shown
    (worker1) $ headrace worker     run in a terminal of its own until the output shown has appeared
    (worker1)                       the output that appears next in that terminal
    (worker1) Ctrl-C                press a key: Ctrl-C or Ctrl-\\

`...` in an output matches any text; seconds, bytes, percentages and losses are not compared. A
terminal named `worker1@node1` is on another machine: its folder is separate, and `scp FILE...
node1:headrace` copies to it. Hosts of the page (`node0`, 10.0.0.2) mean this machine, and its ports
are replaced by free ones, so that several tests can run at the same time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"^```(python|sh|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\(([\w@]+)\) ?)?(?:\$ (.*)|Ctrl-(.))?$")
PORT = re.compile(r"\b(505\d|805\d|222\d)\b")
MEASURED = re.compile(r"\b[\d.]+ (?:s|B|kB|MB)\b|\b[\d.]+%|(?<=loss )[\d.]+")
KEYS = {"C": signal.SIGINT, "\\": signal.SIGQUIT}
SECONDS = 120.0
"""Time limit in seconds of a command, and of a wait for output."""

SCP = """#!/bin/sh
# Copies files to the folder that stands for another machine.
for target; do :; done
folder="$MACHINES/${target%%:*}/${target#*:}"
mkdir -p "$folder"
while [ $# -gt 1 ]; do [ "$1" = -r ] || cp -r "$1" "$folder"; shift; done
"""


@dataclass
class Step:
    """A file to save, or something to do in a terminal, and the output that the page shows."""

    terminal: str = ""
    command: str | None = None
    key: str | None = None
    file: str | None = None
    text: str = ""


def steps_of(page: str) -> Iterator[Step]:
    """Yield the steps of a page, in order."""
    for kind, body in BLOCK.findall(page):
        if kind != "console":
            name = re.match(r"# ([\w./]+)\n", body)
            assert name, f"the first line must be a comment with the file name: {body[:80]!r}"
            yield Step(file=name[1], text=body)
            continue
        step = None
        for line in re.sub(r"\\\n +", "", body).splitlines():
            match = COMMAND.match(line)
            if match and any(match.groups()):
                if step:
                    yield step
                step = Step(match[1] or "", match[2], match[3])
            else:
                assert step, f"no command before {line!r}"
                step.text += line + "\n"
        if step:
            yield step


def normalize(text: str) -> str:
    """Return an output without measured figures and warnings of waits, and with single spaces."""
    text = re.sub(r"^wait(?:ed|ing) .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"[ ]+", " ", MEASURED.sub("", text)).replace(" \n", "\n")


def pattern_of(text: str) -> str:
    """Return a regular expression that matches the normalized output that a page shows."""
    return re.escape(normalize(text).rstrip()).replace(r"\.\.\.", "(?s:.*?)")


@dataclass
class Terminal:
    """A running command, with the file of its output and what of it has been compared."""

    process: subprocess.Popen[bytes]
    log: Path
    compared: int = 0
    stopped: bool = field(default=False)

    def output(self) -> str:
        """Return all complete lines, normalized."""
        return normalize(re.sub(r"[^\n]+\Z", "", self.log.read_text()))

    def wait_for(self, text: str) -> str:
        """Wait until `text` is the next output; return the output."""
        deadline = time.monotonic() + SECONDS
        pattern = re.compile(pattern_of(text))
        while True:
            ended = self.process.poll() is not None
            output = self.output()
            if match := pattern.search(output, self.compared):
                self.compared = match.end()
                return match[0]
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"the page shows:\n{text}\nthe output was:\n{output[self.compared :]}"
                )
            time.sleep(0.05)


class Tutorial:
    """A page that runs in a folder."""

    def __init__(self, page: Path, folder: Path) -> None:
        self._steps = list(steps_of(page.read_text()))
        self._folder = folder
        self._terminals: dict[str, Terminal] = {}
        self._ports: dict[str, str] = {}
        tools = folder / "bin"
        tools.mkdir()
        (tools / "scp").write_text(SCP)
        (tools / "scp").chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MACHINES": str(folder),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "120",
        }

    def run(self) -> None:
        """Follow the page; raise an AssertionError where it differs."""
        try:
            for step in self._steps:
                self._follow(step)
            for name, terminal in self._terminals.items():
                ended = terminal.process.poll()
                assert terminal.stopped or not ended, f"{name}: {terminal.output()}"
        finally:
            for terminal in self._terminals.values():
                _end(terminal.process)

    def _follow(self, step: Step) -> None:
        text = self._adapted(step.text)
        if step.file:
            self._save(step.file, text)
        elif step.key:
            terminal = self._terminals[step.terminal]
            terminal.stopped = True
            os.killpg(terminal.process.pid, KEYS[step.key])
            terminal.process.wait(SECONDS)
            terminal.wait_for(text)
        elif step.command is None:
            print(f"({step.terminal})\n{self._terminals[step.terminal].wait_for(text)}")
        elif step.terminal:
            self._start(step, text)
        else:
            self._run(step, text)

    def _save(self, name: str, text: str) -> None:
        path = self._directory("") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _run(self, step: Step, text: str) -> None:
        assert step.command
        done = subprocess.run(
            ["bash", "-c", self._adapted(step.command)],
            cwd=self._directory(""),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        print(f"$ {step.command}\n{done.stdout}")
        assert done.returncode == 0 or "Error" in text, f"{step.command} failed:\n{done.stdout}"
        assert re.fullmatch(pattern_of(text) + r"\s*", normalize(done.stdout)), (
            f"{step.command}\nthe page shows:\n{text}\nthe output was:\n{done.stdout}"
        )

    def _start(self, step: Step, text: str) -> None:
        assert step.command
        if before := self._terminals.get(step.terminal):
            before.process.wait(SECONDS)
        log = self._folder / f"{step.terminal}-{len(list(self._folder.glob('*.log')))}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                # A shell ignores these signals for commands that it runs in the background.
                ["env", "--default-signal=INT,QUIT", "bash", "-c", self._adapted(step.command)],
                cwd=self._directory(step.terminal),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._terminals[step.terminal] = Terminal(process, log)
        print(f"({step.terminal}) $ {step.command}")
        print(self._terminals[step.terminal].wait_for(text))

    def _directory(self, terminal: str) -> Path:
        _, _, host = terminal.partition("@")
        folder = self._folder / (f"{host}/headrace" if host else "tutorial")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _adapted(self, text: str) -> str:
        def port(match: re.Match[str]) -> str:
            if match[0] not in self._ports:
                self._ports[match[0]] = _free_port()
            return self._ports[match[0]]

        text = re.sub(r"\bnode\d:(?=\d)", "127.0.0.1:", text)
        return PORT.sub(port, re.sub(r"\b10\.0\.0\.\d\b", "127.0.0.1", text))


def _free_port() -> str:
    """Return a free port; the next one is free as well, for a second worker."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            two.bind(("127.0.0.1", port + 1))
            return str(port)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all processes of the terminal have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SECONDS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        Tutorial(Path(sys.argv[1]), Path(name)).run()
