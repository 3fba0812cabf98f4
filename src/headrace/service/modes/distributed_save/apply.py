"""Applies facts about saves: begun, files that count, the end. A part of `apply`, which says how.

What is done with the directory itself is no fact but follows from them (`publisher`).
"""

from __future__ import annotations

from headrace.service.dispatcher import updates
from headrace.service.dispatcher.apply_units import forget_done, running_task
from headrace.service.dispatcher.contradiction import require
from headrace.service.dispatcher.state import SAVES_REMEMBERED, DispatcherState, Save, Stored

__all__ = ["files_saved", "save_begun", "save_closed", "save_failed", "save_opened"]


def save_begun(state: DispatcherState, fact: updates.SaveBegun) -> None:
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


def save_opened(state: DispatcherState, fact: updates.SaveOpened) -> None:
    """Let workers write."""
    save = _at_work(state, fact.save)
    require(not save.is_open, "it is open already")
    save.is_open = True


def files_saved(state: DispatcherState, fact: updates.FilesSaved) -> None:
    """Let files of a task count; the units in them are done."""
    task = running_task(state, fact.task_id)
    iteration = state.iterations[task.iteration_id]
    save = _at_work(state, state.jobs[iteration.job_id].save)
    require(fact.number == task.commits, "it is not the next that the task says")
    require(task.done <= fact.done <= task.dealt, "it was not dealt these units")
    iteration.held -= task.held
    forget_done(task, fact.done)
    iteration.held += task.held
    task.commits += 1
    for file in fact.files:
        require(file.number == task.stored, "it is not the stream's next file")
        task.stored += 1
        save.stored.append(Stored(task.task_id, file.number, file.elements, file.bytes, file.form))
        save.files += 1
        save.elements += file.elements
        save.size += file.bytes


def save_failed(state: DispatcherState, fact: updates.SaveFailed) -> None:
    """Take note of why a save cannot go on."""
    save = _at_work(state, fact.save)
    require(not save.error, "it has failed already")
    require(bool(fact.error), "it does not say why")
    save.error, save.kind = fact.error, fact.kind


def save_closed(state: DispatcherState, fact: updates.SaveClosed) -> None:
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
