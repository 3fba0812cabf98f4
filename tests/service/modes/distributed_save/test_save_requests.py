"""A save deals units to workers, and counts the files that they say are whole."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from headrace.service import messages
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.modes.distributed_save.records import files_of
from headrace.service.modes.distributed_save.requests import OpenSave, ReportDirectory
from tests.service.dispatcher.scenario import Scenario, list_open_saves, opening, saving

SAVE, OTHER = "0" * 16, "1" * 16


@pytest.fixture
def scene() -> Any:
    scene = Scenario(keeps_journal=True, gc_timeout=5.0)
    scene.register(num_splits=100, anonymous=True)
    scene.add_worker("u")
    scene.add_worker("v")
    yield scene
    scene.check()


def begin(scene: Scenario, save: str = SAVE, **fields: Any) -> messages.SaveStatus:
    return scene.ask(saving(save, **fields))


def note(scene: Scenario, what: str, save: str = SAVE, **fields: Any) -> None:
    scene.ask(ReportDirectory(save_id=save, outcome=what, **fields))  # type: ignore[arg-type]


def far(scene: Scenario, save: str = SAVE) -> messages.SaveStatus:
    return scene.ask(messages.GetSaveStatus(save_id=save))


def work(scene: Scenario) -> OpenSave:
    (found,) = list_open_saves(scene)
    return found


def write(
    scene: Scenario,
    task_id: int,
    done: int,
    files: int = 1,
    first: int | None = None,
    **fields: Any,
) -> None:
    task = scene.state.tasks[task_id]
    first = files_of(task.mode_state).num_files if first is None else first
    message = {
        "worker_id": task.worker_id,
        "report_number": files_of(task.mode_state).num_reports,
        "files": tuple(messages.SavedFile(first + place, 5, 100, "{}") for place in range(files)),
        "num_done": done,
        **scene.task_fields(task_id),
    }
    scene.ask(messages.CommitFiles(**{**message, **fields}))


def written(scene: Scenario) -> list[int]:
    """Begin a save whose directory is there; return its tasks."""
    begin(scene)
    note(scene, "opened")
    (save,) = scene.state.saves.values()
    return scene.state.iterations[save.iteration_id].tasks


def test_workers_get_tasks_once_the_directory_is_begun(scene: Scenario) -> None:
    assert begin(scene) == messages.SaveStatus()
    assert scene.worker_heartbeat_reply("u").tasks_to_start == ()
    assert not work(scene).is_open
    note(scene, "opened")
    assert far(scene).is_open
    (mine,), (other,) = (
        scene.worker_heartbeat_reply("u").tasks_to_start,
        scene.worker_heartbeat_reply("v").tasks_to_start,
    )
    assert scene.worker_heartbeat_reply("u", mine).tasks_to_start == ()
    found = scene.ask(messages.GetTask(worker_id="u", task_id=mine))
    assert found.delivery_policy == "files"
    assert found.save_destination == messages.SaveDestination(SAVE, "/saved", b"")
    assert (scene.split(mine, max_splits=3), scene.split(other, max_splits=3)) == ((0, 3), (3, 6))


@pytest.mark.catalogue("SF11")
def test_a_worker_that_joins_later_writes_too(scene: Scenario) -> None:
    written(scene)
    scene.add_worker("w")
    assert len(scene.worker_heartbeat_reply("w").tasks_to_start) == 1


def test_files_count_in_the_order_in_which_they_were_said_to_be_whole(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(one, max_splits=4), scene.split(two, max_splits=4)
    write(scene, two, done=2)
    write(scene, one, done=4, files=2)
    assert [(each.stream, each.number) for each in work(scene).new_files] == [
        (two, 0),
        (one, 0),
        (one, 1),
    ]
    update = far(scene)
    assert (update.files, update.elements, update.bytes) == (3, 15, 300)
    assert [scene.state.tasks[each].assigned.num_held for each in (one, two)] == [0, 2]


def test_what_is_said_twice_counts_once(scene: Scenario) -> None:
    one, _ = written(scene)
    scene.split(one, max_splits=4)
    write(scene, one, done=4)
    before = len(scene.events)
    write(scene, one, done=4, report_number=0)
    assert len(scene.events) == before
    with pytest.raises(ValueError, match=r"sent report 3"):
        write(scene, one, done=4, report_number=2)
    with pytest.raises(ValueError, match="was dealt 4"):
        write(scene, one, done=5)
    with pytest.raises(ValueError, match="cannot have written"):
        write(scene, one, done=4, first=5)


def test_a_request_for_units_that_is_older_than_the_files_is_no_error(scene: Scenario) -> None:
    one, _ = written(scene)
    scene.split(one, max_splits=4)
    write(scene, one, done=4)
    assert scene.split(one, max_splits=4, num_done=0) == (4, 8)
    assert scene.state.tasks[one].assigned.num_done == 4


def test_a_save_is_over_when_all_units_are_in_files(scene: Scenario) -> None:
    one, two = written(scene)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, done=scene.state.tasks[one].assigned.num_assigned)
    assert not found.wait
    assert not work(scene).is_finished
    scene.finish("u", one)
    scene.finish("v", two)
    assert work(scene).is_finished
    note(scene, "closed")
    update = far(scene)
    assert (update.is_closed, update.error) == (True, "")
    assert scene.state.iterations == scene.state.jobs == scene.state.tasks == {}
    assert list_open_saves(scene) == ()
    assert scene.worker_heartbeat("u", one) == (one,)


def test_an_empty_dataset_needs_no_worker(scene: Scenario) -> None:
    dataset_id = scene.register(num_splits=0, fingerprint="empty", cardinality=0)
    begin(scene, dataset_id=dataset_id)
    assert not work(scene).is_finished
    note(scene, "opened")
    assert work(scene).is_finished


def test_what_a_lost_worker_had_in_no_file_is_dealt_again(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(one, max_splits=6)
    write(scene, one, done=4)
    scene.lose("u")
    assert scene.split(two, max_splits=1) == (4, 5)
    scene.add_worker("u2")
    (third,) = scene.worker_heartbeat_reply("u2").tasks_to_start
    assert scene.split(third, max_splits=1) == (5, 6)
    with pytest.raises(NotFoundError):
        scene.ask(messages.GetTask(worker_id="u", task_id=one))


def test_files_of_a_worker_that_counts_as_lost_count_no_more(scene: Scenario) -> None:
    one, _ = written(scene)
    scene.split(one, max_splits=6)
    scene.lose("u")
    with pytest.raises(FailedPreconditionError, match="counts no more"):
        write(scene, one, done=6)
    assert work(scene).new_files == ()


def test_when_all_others_are_finished_somebody_writes_what_came_back(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(two, max_splits=2)
    scene.tick(3.0)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, done=scene.state.tasks[one].assigned.num_assigned)
        scene.worker_heartbeat("u"), scene.worker_heartbeat("v")
        scene.tick(3.0)
    scene.finish("u", one)
    scene.lose("v")
    (third,) = scene.worker_heartbeat_reply("u").tasks_to_start
    assert scene.split(third) == (0, 1)


def test_a_task_that_ends_with_units_in_no_file_fails_the_save(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(one, max_splits=6)
    scene.finish("u", one)
    assert scene.worker_heartbeat("v", two) == (two,)
    assert "6 units that are in no file" in work(scene).error


def test_units_that_never_came_to_a_worker_are_saved_by_others(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(one, max_splits=6)
    write(scene, one, done=6)
    scene.split(one, max_splits=4)  # in an answer that came when the worker had ended the task
    scene.finish("u", one, num_assigned=6)
    assert work(scene).error == ""
    assert scene.split(two, max_splits=4) == (6, 10)


def test_a_task_that_fails_ends_the_save(scene: Scenario) -> None:
    one, two = written(scene)
    scene.split(one, max_splits=6), scene.split(two, max_splits=6)
    scene.fail("u", one, "ValueError: seven")
    assert scene.worker_heartbeat("v", two) == (two,)
    found = work(scene)
    assert found.is_finished
    assert found.error == "the worker at u:1: ValueError: seven"
    assert far(scene).error == found.error
    note(scene, "closed")
    assert (far(scene).is_closed, far(scene).error) == (True, found.error)
    assert begin(scene, OTHER) == messages.SaveStatus()


def test_units_that_kill_their_workers_fail_the_save(scene: Scenario) -> None:
    written(scene)
    for death in range(20):
        if work(scene).is_finished:
            break
        name = f"w{death}"
        scene.lose("u" if death == 0 else "v" if death == 1 else f"w{death - 1}")
        scene.add_worker(name)
        for task_id in scene.worker_heartbeat_reply(name).tasks_to_start:
            scene.tick(3.0)
            scene.worker_heartbeat(name)
            scene.get_split(task_id)
    assert "position 25 of the dataset was given up, because the worker died" in work(scene).error


def test_a_directory_that_cannot_be_begun_is_an_error_and_no_task_is_made(scene: Scenario) -> None:
    begin(scene)
    note(scene, "failed", error="it is taken", error_class="AlreadyExistsError")
    update = far(scene)
    assert (update.is_open, update.error, update.error_class) == (
        False,
        "it is taken",
        "AlreadyExistsError",
    )
    assert work(scene).is_finished
    assert scene.state.tasks == {}
    note(scene, "closed")
    assert far(scene).error_class == "AlreadyExistsError"


def test_a_second_save_into_one_directory_is_refused_also_after_a_restart(scene: Scenario) -> None:
    written(scene)
    assert begin(scene).is_open, "a request that is repeated"
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match="already started or completed"):
            begin(scene, OTHER)
        scene.restart()
    begin(scene, OTHER, path="/elsewhere")


def test_what_cannot_be_saved_is_refused(scene: Scenario) -> None:
    endless = scene.register(num_splits=-1, fingerprint="endless")
    with pytest.raises(InvalidArgumentError, match="Saving an infinite dataset is not allowed"):
        begin(scene, dataset_id=endless)
    whole = scene.register(num_splits=None, fingerprint="whole")
    with pytest.raises(FailedPreconditionError, match="no positions that could be dealt"):
        begin(scene, dataset_id=whole)
    with pytest.raises(NotFoundError):
        begin(scene, dataset_id="7")
    for wrong in ({"save": "x"}, {"path": ""}, {"chunk_bytes": 0}, {"seed": 1 << 64}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            scene.ask(saving(**wrong))  # type: ignore[arg-type]
    assert scene.state.saves == {}


def test_without_a_journal_nothing_is_saved() -> None:
    scene = Scenario()
    scene.register()
    assert not DispatcherLimits().keeps_journal
    with pytest.raises(InvalidArgumentError, match="fault tolerant mode"):
        begin(scene)


@pytest.mark.catalogue("SF12")
def test_a_worker_writes_for_so_many_saves_at_a_time(scene: Scenario) -> None:
    scene.limits = scene.dispatcher.limits = DispatcherLimits(
        keeps_journal=True, max_saves_per_worker=2
    )
    names = [f"{number:016x}" for number in range(5)]
    for name in names:
        begin(scene, name, path=name)
        note(scene, "opened", name)
    for _ in names:
        tasks = scene.worker_heartbeat_reply("u").tasks_to_start
        assert len(tasks) == len(scene.worker_heartbeat_reply("v").tasks_to_start) <= 2
        if tasks:
            scene.fail("u", tasks[0])
            scene.check()
    assert all(each.is_finished for each in list_open_saves(scene))


def test_a_save_is_kept_though_nobody_reads_it(scene: Scenario) -> None:
    written(scene)
    for _ in range(20):
        scene.tick(5.0)
        scene.worker_heartbeat("u"), scene.worker_heartbeat("v")
    assert not far(scene).is_closed
    scene.restart()
    assert len(scene.worker_heartbeat_reply("u").tasks_to_start) == 1


def test_only_the_last_saves_that_are_over_are_remembered(scene: Scenario) -> None:
    for number in range(105):
        name = f"{number:016x}"
        begin(scene, name, path=name)
        note(scene, "failed", name, error="no")
        note(scene, "closed", name)
    assert len(scene.state.saves) == 100
    with pytest.raises(NotFoundError):
        far(scene, f"{0:016x}")


def test_no_client_joins_a_save(scene: Scenario) -> None:
    written(scene)
    for client_id in (SAVE, f"save {SAVE}"):
        scene.ask(opening(client_id, processing_mode=1))
    (save,) = [job for job in scene.state.jobs.values() if job.save_id]
    assert (save.name, save.owner, save.save_id) == (None, None, SAVE)
    assert not any(scene.state.iterations[each].clients for each in save.iterations.values())
    assert scene.state.jobs_by_owner.keys() == {SAVE, f"save {SAVE}"}
    scene.check()


def test_a_save_is_seen_with_its_path_and_with_what_counts(scene: Scenario) -> None:
    task_id, *_ = written(scene)
    said = messages.TaskActivity(task_id=task_id, elements=3, bytes=60)
    worker = scene.state.tasks[task_id].worker_id
    scene.ask(messages.WorkerHeartbeat(worker_id=worker, tasks=(task_id,), activity=(said,)))
    scene.split(task_id, max_splits=10)
    write(scene, task_id, done=2, files=2)
    (job,) = scene.ask(messages.GetStatus()).jobs
    (save,) = scene.state.saves.values()
    assert (job.path, job.elements, job.bytes) == (save.path, 10, 200)


def test_what_a_save_wrote_is_in_the_totals_when_it_is_over(scene: Scenario) -> None:
    one, two = written(scene)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, done=scene.state.tasks[one].assigned.num_assigned)
    scene.finish("u", one)
    scene.finish("v", two)
    (save,) = scene.state.saves.values()
    note(scene, "closed")
    stats = scene.ask(messages.GetStatus())
    assert save.num_elements > 0
    assert (stats.jobs, stats.elements, stats.bytes) == ((), save.num_elements, save.num_bytes)
