"""An iterator that shows a progress bar in a terminal or notebook.

Rule 1. The bar is drawn by the reading thread, at most five times a second; there is no thread.
Rule 2. It is drawn before an element is requested: nothing happens between the moment an element
    is taken and its return, so that an interruption loses none.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from headrace.data.element_type import T_co
from headrace.data.iterator import DatasetIterator
from headrace.plan.traverse import cardinality

__all__ = ["ProgressIterator"]

_UPDATE_SECONDS = 0.2


class ProgressIterator(DatasetIterator[T_co]):
    """A `DatasetIterator` that shows its progress; arguments as there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        size = cardinality(self._plan)
        self._progress = _Progress(size if size >= 0 else None)
        self._close_progress = weakref.finalize(self, self._progress.close)

    def __next__(self) -> T_co:
        self._progress.advance()
        try:
            return super().__next__()
        except StopIteration:
            self._progress.finish()
            raise
        except BaseException:
            self._progress.close()
            raise

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position of `state`, and count elements from there."""
        self._progress.close()
        # The state does not tell how many elements are left.
        self._progress = _Progress(None)
        self._close_progress = weakref.finalize(self, self._progress.close)
        super().set_state(state)

    def close(self) -> None:
        """End the output, and release threads and files. Idempotent."""
        self._progress.close()
        super().close()

    load_state_dict = set_state


class _Display(Protocol):
    """Shows the progress somewhere."""

    def show(self, count: int, rate: float) -> None:
        """Show that `count` elements were returned, at `rate` elements per second."""

    def close(self) -> None:
        """End the output; called once."""


class _Progress:
    """Counts elements, and shows their number from time to time.

    Args:
        total: Number of elements; None if it is infinite or unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._requested = 0
        self._start = self._next_update = 0.0
        self._display: _Display | None = None
        self._make_display: Callable[[int | None], _Display] | None = _find_display()

    def advance(self) -> None:
        """Count the request of an element; all requested before have been returned."""
        returned = self._requested
        self._requested += 1
        if self._make_display is None:
            return
        now = time.perf_counter()
        if not returned:
            self._start = now
        elif now < self._next_update:
            return
        self._next_update = now + _UPDATE_SECONDS
        self._show(returned, now)

    def _show(self, returned: int, now: float) -> None:
        if self._display is None and self._make_display is not None:
            self._display = self._make_display(self._total)
        if self._display is not None:
            self._display.show(returned, returned / (now - self._start + 1e-9))

    def finish(self) -> None:
        """Show that the elements have ended, and close."""
        if self._display is not None:
            self._show(self._requested - 1, time.perf_counter())
        self.close()

    def close(self) -> None:
        """End the output. Idempotent."""
        display, self._display = self._display, None
        if display is not None:
            with contextlib.suppress(Exception):  # such as a closed standard error
                display.close()


def _find_display() -> Callable[[int | None], _Display] | None:
    """Return the kind of display of this process; None without a terminal or notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and type(shell).__name__ == "ZMQInteractiveShell":
        return _NotebookDisplay
    return _TerminalDisplay if sys.stderr is not None and sys.stderr.isatty() else None


class _TerminalDisplay:
    """A line at the bottom of the terminal.

    Args:
        total: Number of elements, or None.
    """

    def __init__(self, total: int | None) -> None:
        from rich.console import Console  # noqa: PLC0415  (slow to import, and seldom needed)
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elements, {task.fields[rate]}/s"),
            *([TimeElapsedColumn()] if total is None else [TimeRemainingColumn()]),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=total, rate="0")
        self._progress.start()

    def show(self, count: int, rate: float) -> None:
        """Show the line."""
        self._progress.update(self._task, completed=count, rate=_format_rate(rate))
        self._progress.refresh()

    def close(self) -> None:
        """Leave the line as it is."""
        self._progress.stop()


class _NotebookDisplay:
    """A line below the cell of a notebook. Needs no widgets.

    Args:
        total: Number of elements, or None.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        display = sys.modules["IPython"].display.display
        self._handle = display(self._format(0, 0.0), raw=True, display_id=True)

    def _format(self, count: int, rate: float) -> dict[str, str]:
        total = self._total
        if total is None:
            text, bar = f"{count:,} elements, {_format_rate(rate)}/s", ""
        else:
            left = f", {(total - count) / rate:,.0f} s left" if rate else ""
            text = f"{count:,} of {total:,} elements, {_format_rate(rate)}/s{left}"
            bar = f'<progress value="{count}" max="{total}"></progress> '
        return {"text/plain": text, "text/html": bar + text}

    def show(self, count: int, rate: float) -> None:
        """Replace the line."""
        self._handle.update(self._format(count, rate), raw=True)

    def close(self) -> None:
        """Leave the line as it is."""


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
