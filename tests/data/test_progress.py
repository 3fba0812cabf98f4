"""The progress bar: shown only where somebody sees it, and closed whatever happens."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import headrace as hr
from headrace.data import progress
from headrace.errors import UserFunctionError

Dataset = hr.Dataset


class RecordedDisplay:
    """Records what is shown."""

    def __init__(self, total):
        self.total, self.shown, self.closed = total, [], 0

    def show(self, count, rate):
        self.shown.append(count)

    def close(self):
        self.closed += 1


@pytest.fixture
def displays(monkeypatch):
    found = []

    def make(total):
        found.append(RecordedDisplay(total))
        return found[-1]

    monkeypatch.setattr(progress, "_find_display", lambda: make)
    return found


def test_iterate_without_arguments_equals_iter():
    dataset = Dataset.range(5).shuffle(5)
    assert type(dataset.iterate()) is type(iter(dataset))
    assert [dataset.iterate().epoch, iter(dataset).epoch] == [2, 3]


def test_first_and_last_counts_are_shown(displays):
    assert [int(x) for x in Dataset.range(500).iterate(progress=True)] == list(range(500))
    (display,) = displays
    assert display.total == 500
    assert (display.shown[0], display.shown[-1], display.closed) == (0, 500, 1)
    assert len(display.shown) < 20


def test_unknown_and_infinite_totals_are_none(displays):
    list(Dataset.range(5).filter(lambda x: x > 2).iterate(progress=True))
    with Dataset.range(5).repeat().iterate(progress=True) as iterator:
        next(iterator)
    assert [(each.total, each.closed) for each in displays] == [(None, 1), (None, 1)]


def test_the_bar_is_closed_after_a_break(displays):
    for _ in Dataset.range(5).iterate(progress=True):
        break
    assert displays[0].closed == 1


def test_the_bar_is_closed_at_an_error_and_reading_continues(displays):
    iterator = Dataset.range(3).map(lambda x: 1 // x).iterate(progress=True)
    with pytest.raises(UserFunctionError):
        next(iterator)
    assert displays[0].closed == 1
    assert [int(x) for x in iterator] == [1, 0]
    assert all(each.closed for each in displays)


def test_states_can_be_saved_and_restored(displays):
    iterator = Dataset.range(4).iterate(progress=True)
    next(iterator)
    state = iterator.get_state()
    assert len(list(iterator)) == 3
    iterator.set_state(state)
    assert len(list(iterator)) == 3
    assert displays[-1].total is None


def test_nothing_is_written_to_a_file(capfd):
    assert len(list(Dataset.range(4).iterate(progress=True))) == 4
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_a_line(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_find_display", lambda: progress._TerminalDisplay)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert len(list(Dataset.range(4).iterate(progress=True))) == 4
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "elements" in shown


def test_a_notebook_shows_html(monkeypatch):
    updates = []
    handle = SimpleNamespace(update=lambda data, raw: updates.append(data))
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = SimpleNamespace(
        get_ipython=lambda: shell,
        display=SimpleNamespace(display=lambda data, raw, display_id: handle),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert len(list(Dataset.range(4).iterate(progress=True))) == 4
    assert updates[-1]["text/plain"].startswith("4 of 4 elements")
    assert '<progress value="4" max="4">' in updates[-1]["text/html"]
