"""Applies facts about saves: begun, files that count, the end. A part of `apply`, which says how.

What is done with the directory itself is no fact but follows from them (`publisher`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.apply_units import forget_done, running_task
from headrace.service.dispatcher.fact import require
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.distributed_save.records import (
    SAVES_REMEMBERED,
    FilesSaved,
    Save,
    SaveBegun,
    SaveClosed,
    SaveFailed,
    SaveOpened,
    Stored,
    files_of,
)

__all__ = ["APPLY"]


def save_begun(state: DispatcherState, fact: SaveBegun) -> None:
    """Take note of a save; its job and its iteration are made by the facts that follow."""
    require(fact.save not in state.saves, "the id is taken")
    state.saves[fact.save] = Save(
        save=fact.save,
        path=fact.path,
        plan=fact.plan,
        spec=fact.spec,
        chunk_bytes=fact.chunk_bytes,
        at_once=fact.at_once,
        job_id=fact.job_id,
        iteration_id=fact.iteration_id,
    )


def save_opened(state: DispatcherState, fact: SaveOpened) -> None:
    """Let workers write."""
    save = _at_work(state, fact.save)
    require(not save.is_open, "it is open already")
    save.is_open = True


def files_saved(state: DispatcherState, fact: FilesSaved) -> None:
    """Let files of a task count; the units in them are done."""
    task = running_task(state, fact.task_id)
    splits = task.splits
    iteration = state.iterations[task.iteration_id]
    save = _at_work(state, state.jobs[iteration.job_id].save)
    files = files_of(task.mode)
    require(fact.number == files.reports, "it is not the next that the task says")
    require(splits.done <= fact.done <= splits.dealt, "it was not dealt these units")
    iteration.splits.held -= splits.held
    forget_done(task, fact.done)
    iteration.splits.held += splits.held
    files.reports += 1
    for file in fact.files:
        require(file.number == files.number, "it is not the stream's next file")
        files.number += 1
        save.stored.append(Stored(task.task_id, file.number, file.elements, file.bytes, file.form))
        save.files += 1
        save.elements += file.elements
        save.size += file.bytes


def save_failed(state: DispatcherState, fact: SaveFailed) -> None:
    """Take note of why a save cannot go on."""
    save = _at_work(state, fact.save)
    require(not save.error, "it has failed already")
    require(bool(fact.error), "it does not say why")
    save.error, save.kind = fact.error, fact.kind


def save_closed(state: DispatcherState, fact: SaveClosed) -> None:
    """Keep of a save what those who ask are to hear; its job is forgotten next."""
    save = _at_work(state, fact.save)
    iteration = state.iterations[save.iteration_id]
    require(iteration.finished, "its units are still dealt")
    save.is_closed = True
    save.error = save.error or iteration.failed
    save.stored = []
    closed = [each.save for each in state.saves.values() if each.is_closed]
    for oldest in closed[:-SAVES_REMEMBERED]:
        del state.saves[oldest]


def _at_work(state: DispatcherState, save_id: str) -> Save:
    save = state.saves[save_id]
    require(not save.is_closed, "the save is closed")
    return save


APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    SaveBegun: save_begun,
    SaveOpened: save_opened,
    FilesSaved: files_saved,
    SaveFailed: save_failed,
    SaveClosed: save_closed,
}
