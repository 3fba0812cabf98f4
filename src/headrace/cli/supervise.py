"""Child processes of one command: started together, kept running, stopped together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from headrace.cli.signals import STOP_SIGNALS, Signals
from headrace.open_files import in_words
from headrace.process.child import Command, clean_environment
from headrace.process.family import Ended, Event, Family, NotStarted
from headrace.process.stopping import stop

__all__ = ["run_children"]

_STOP_SECONDS = 15.0
_OWN_CODES = (0, 1, 2)
"""What a command of ours ends with before it is ready: done, failed with a message, wrongly
called."""


def run_children(
    commands: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    patience: float = 0.0,
) -> int:
    """Run commands of `headrace` as child processes until all have ended.

    Ctrl-C or SIGTERM lets all of them deliver what they have and stop; a second one stops them at
    once. One that ends unasked is reported on stderr and started again, after a delay that grows
    with each end of it; one that never was ready and ends with a message of its own is not. Should
    this process be killed, the children see it and stop.

    Args:
        commands: The arguments of each.
        environment: Of the children; None: that of this process.
        patience: Seconds that a child may take to deliver what it has.

    Returns:
        The exit code: 0, or 1 if a child failed.
    """
    variables = clean_environment(os.environ if environment is None else environment)
    failed = False
    family = Family(retries=lambda code: code not in _OWN_CODES)
    with Signals(children=True) as signals:
        try:
            for arguments in commands:
                ours = ("-P", "-m", "headrace", *arguments)
                family.add(Command(arguments=ours, environment=variables), time.monotonic())
            while not family.is_empty:
                due = family.next_due()
                wait = None if due is None else max(0.0, due - time.monotonic())
                if STOP_SIGNALS & signals.wait(wait):
                    break
                for event in family.look(time.monotonic()):
                    failed = _note(event, family, len(commands)) or failed
        finally:
            killed = stop(
                family.children,
                patience + _STOP_SECONDS,
                hurried=_STOP_SECONDS,
                is_hurried=lambda seconds: bool(STOP_SIGNALS & signals.wait(seconds)),
            )
    if killed:
        pids = ", ".join(str(child.pid) for child in killed)
        print(f"headrace: did not stop in time and was killed: process {pids}", file=sys.stderr)
    return int(failed or bool(killed))


def _note(event: Event, family: Family, count: int) -> bool:
    """Report what has happened to a child; return whether it failed for good."""
    match event:
        case Ended(_, child, again_in):
            words = "left when a signal asked it to" if child.was_asked else child.ending
            if again_in is not None:
                words += f" and is started again in {again_in:g} s"
            left = sum(other.is_running for other in family.children)
            _say(f"process {child.pid} {words}; {left} of {count} are left")
            return again_in is None and not child.was_asked and child.code != 0
        case NotStarted(_, error, again_in):
            _say(f"a process could not be started ({in_words(error)}); next try in {again_in:g} s")
    return False


def _say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
