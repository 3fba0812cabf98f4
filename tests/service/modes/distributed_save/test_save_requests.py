"""Requests about saves: split assignment, committed files, status and limits."""

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


def report_directory(scene: Scenario, outcome: str, save: str = SAVE, **fields: Any) -> None:
    scene.ask(ReportDirectory(save_id=save, outcome=outcome, **fields))  # type: ignore[arg-type]


def save_status(scene: Scenario, save: str = SAVE) -> messages.SaveStatus:
    return scene.ask(messages.GetSaveStatus(save_id=save))


def open_save(scene: Scenario) -> OpenSave:
    (found,) = list_open_saves(scene)
    return found


def write(
    scene: Scenario,
    task_id: int,
    num_done: int,
    files: int = 1,
    first: int | None = None,
    **fields: Any,
) -> None:
    task = scene.state.tasks[task_id]
    first = files_of(task.mode_state).num_files if first is None else first
    message = {
        "worker_id": task.worker_id,
        "report_number": files_of(task.mode_state).num_reports,
        "files": tuple(messages.SavedFile(first + index, 5, 100, "{}") for index in range(files)),
        "num_done": num_done,
        **scene.task_fields(task_id),
    }
    scene.ask(messages.CommitFiles(**{**message, **fields}))


def start_open_save(scene: Scenario) -> list[int]:
    """Start a save, report its directory as created, and return its tasks."""
    begin(scene)
    report_directory(scene, "opened")
    (save,) = scene.state.saves.values()
    return scene.state.iterations[save.iteration_id].tasks


def test_workers_get_tasks_once_the_directory_is_created(scene: Scenario) -> None:
    assert begin(scene) == messages.SaveStatus()
    assert scene.worker_heartbeat_reply("u").tasks_to_start == ()
    assert not open_save(scene).is_open
    report_directory(scene, "opened")
    assert save_status(scene).is_open
    (own,), (other,) = (
        scene.worker_heartbeat_reply("u").tasks_to_start,
        scene.worker_heartbeat_reply("v").tasks_to_start,
    )
    assert scene.worker_heartbeat_reply("u", own).tasks_to_start == ()
    found = scene.ask(messages.GetTask(worker_id="u", task_id=own))
    assert found.delivery_policy == "files"
    assert found.save_destination == messages.SaveDestination(SAVE, "/saved", b"")
    assert (scene.split(own, max_splits=3), scene.split(other, max_splits=3)) == ((0, 3), (3, 6))


@pytest.mark.catalogue("SF11")
def test_a_worker_that_joins_later_writes_too(scene: Scenario) -> None:
    start_open_save(scene)
    scene.add_worker("w")
    assert len(scene.worker_heartbeat_reply("w").tasks_to_start) == 1


def test_files_are_committed_in_the_order_of_their_reports(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(one, max_splits=4), scene.split(two, max_splits=4)
    write(scene, two, num_done=2)
    write(scene, one, num_done=4, files=2)
    assert [(each.stream, each.number) for each in open_save(scene).new_files] == [
        (two, 0),
        (one, 0),
        (one, 1),
    ]
    update = save_status(scene)
    assert (update.files, update.elements, update.bytes) == (3, 15, 300)
    assert [scene.state.tasks[each].assigned.num_held for each in (one, two)] == [0, 2]


def test_a_repeated_report_counts_once(scene: Scenario) -> None:
    one, _ = start_open_save(scene)
    scene.split(one, max_splits=4)
    write(scene, one, num_done=4)
    num_events = len(scene.events)
    write(scene, one, num_done=4, report_number=0)
    assert len(scene.events) == num_events
    with pytest.raises(ValueError, match=r"sent report_number=2"):
        write(scene, one, num_done=4, report_number=2)
    with pytest.raises(ValueError, match="reported num_done=5; expected a value from 4"):
        write(scene, one, num_done=5)
    with pytest.raises(ValueError, match="reported SavedFile"):
        write(scene, one, num_done=4, first=5)


def test_a_split_request_older_than_the_files_is_accepted(scene: Scenario) -> None:
    one, _ = start_open_save(scene)
    scene.split(one, max_splits=4)
    write(scene, one, num_done=4)
    assert scene.split(one, max_splits=4, num_done=0) == (4, 8)
    assert scene.state.tasks[one].assigned.num_done == 4


def test_a_save_finishes_when_all_splits_are_in_files(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, num_done=scene.state.tasks[one].assigned.num_assigned)
    assert not found.wait
    assert not open_save(scene).is_finished
    scene.finish("u", one)
    scene.finish("v", two)
    assert open_save(scene).is_finished
    report_directory(scene, "closed")
    update = save_status(scene)
    assert (update.is_closed, update.error) == (True, "")
    assert scene.state.iterations == scene.state.jobs == scene.state.tasks == {}
    assert list_open_saves(scene) == ()
    assert scene.worker_heartbeat("u", one) == (one,)


def test_an_empty_dataset_needs_no_worker(scene: Scenario) -> None:
    dataset_id = scene.register(num_splits=0, fingerprint="empty", cardinality=0)
    begin(scene, dataset_id=dataset_id)
    assert not open_save(scene).is_finished
    report_directory(scene, "opened")
    assert open_save(scene).is_finished


def test_splits_of_a_lost_worker_that_are_in_no_file_are_reassigned(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(one, max_splits=6)
    write(scene, one, num_done=4)
    scene.lose("u")
    assert scene.split(two, max_splits=1) == (4, 5)
    scene.add_worker("u2")
    (third,) = scene.worker_heartbeat_reply("u2").tasks_to_start
    assert scene.split(third, max_splits=1) == (5, 6)
    with pytest.raises(NotFoundError):
        scene.ask(messages.GetTask(worker_id="u", task_id=one))


def test_files_of_a_lost_worker_are_rejected(scene: Scenario) -> None:
    one, _ = start_open_save(scene)
    scene.split(one, max_splits=6)
    scene.lose("u")
    with pytest.raises(FailedPreconditionError, match="only a running task can commit"):
        write(scene, one, num_done=6)
    assert open_save(scene).new_files == ()


def test_returned_splits_get_a_new_task_after_all_others_finished(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(two, max_splits=2)
    scene.tick(3.0)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, num_done=scene.state.tasks[one].assigned.num_assigned)
        scene.worker_heartbeat("u"), scene.worker_heartbeat("v")
        scene.tick(3.0)
    scene.finish("u", one)
    scene.lose("v")
    (third,) = scene.worker_heartbeat_reply("u").tasks_to_start
    assert scene.split(third) == (0, 1)


def test_a_task_that_ends_with_splits_in_no_file_fails_the_save(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(one, max_splits=6)
    scene.finish("u", one)
    assert scene.worker_heartbeat("v", two) == (two,)
    assert "6 splits that are in no file" in open_save(scene).error


def test_splits_that_never_reached_a_worker_are_saved_by_others(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(one, max_splits=6)
    write(scene, one, num_done=6)
    scene.split(one, max_splits=4)  # in a reply that arrived after the worker had ended the task
    scene.finish("u", one, num_assigned=6)
    assert open_save(scene).error == ""
    assert scene.split(two, max_splits=4) == (6, 10)


def test_a_failed_task_fails_the_save(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    scene.split(one, max_splits=6), scene.split(two, max_splits=6)
    scene.fail("u", one, "ValueError: seven")
    assert scene.worker_heartbeat("v", two) == (two,)
    found = open_save(scene)
    assert found.is_finished
    assert found.error == "task 4000 on worker u:1 failed: ValueError: seven"
    assert save_status(scene).error == found.error
    report_directory(scene, "closed")
    assert (save_status(scene).is_closed, save_status(scene).error) == (True, found.error)
    assert begin(scene, OTHER) == messages.SaveStatus()


def test_splits_that_kill_workers_fail_the_save(scene: Scenario) -> None:
    start_open_save(scene)
    for death in range(20):
        if open_save(scene).is_finished:
            break
        name = f"w{death}"
        scene.lose("u" if death == 0 else "v" if death == 1 else f"w{death - 1}")
        scene.add_worker(name)
        for task_id in scene.worker_heartbeat_reply(name).tasks_to_start:
            scene.tick(3.0)
            scene.worker_heartbeat(name)
            scene.get_split(task_id)
    assert "split 25 of the dataset was abandoned, because every worker" in open_save(scene).error


def test_if_the_directory_cannot_be_created_no_task_starts(scene: Scenario) -> None:
    begin(scene)
    report_directory(scene, "failed", error="it is taken", error_class="AlreadyExistsError")
    update = save_status(scene)
    assert (update.is_open, update.error, update.error_class) == (
        False,
        "it is taken",
        "AlreadyExistsError",
    )
    assert open_save(scene).is_finished
    assert scene.state.tasks == {}
    report_directory(scene, "closed")
    assert save_status(scene).error_class == "AlreadyExistsError"


def test_a_second_save_into_a_directory_is_rejected_after_a_restart_too(scene: Scenario) -> None:
    start_open_save(scene)
    assert begin(scene).is_open, "a repeated request"
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match="already started or completed"):
            begin(scene, OTHER)
        scene.restart()
    begin(scene, OTHER, path="/elsewhere")


def test_datasets_that_cannot_be_saved_are_rejected(scene: Scenario) -> None:
    endless = scene.register(num_splits=-1, fingerprint="endless")
    with pytest.raises(InvalidArgumentError, match="Saving an infinite dataset is not allowed"):
        begin(scene, dataset_id=endless)
    unsplittable = scene.register(num_splits=None, fingerprint="whole")
    with pytest.raises(FailedPreconditionError, match="it has no splits, because"):
        begin(scene, dataset_id=unsplittable)
    with pytest.raises(NotFoundError):
        begin(scene, dataset_id="7")
    for wrong in ({"save": "x"}, {"path": ""}, {"chunk_bytes": 0}, {"seed": 1 << 64}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            scene.ask(saving(**wrong))  # type: ignore[arg-type]
    assert scene.state.saves == {}


def test_saves_are_rejected_without_a_journal() -> None:
    scene = Scenario()
    scene.register()
    assert not DispatcherLimits().keeps_journal
    with pytest.raises(InvalidArgumentError, match="fault tolerant mode"):
        begin(scene)


@pytest.mark.catalogue("SF12")
def test_the_number_of_saves_per_worker_is_limited(scene: Scenario) -> None:
    scene.limits = scene.dispatcher.limits = DispatcherLimits(
        keeps_journal=True, max_saves_per_worker=2
    )
    names = [f"{number:016x}" for number in range(5)]
    for name in names:
        begin(scene, name, path=name)
        report_directory(scene, "opened", name)
    for _ in names:
        tasks = scene.worker_heartbeat_reply("u").tasks_to_start
        assert len(tasks) == len(scene.worker_heartbeat_reply("v").tasks_to_start) <= 2
        if tasks:
            scene.fail("u", tasks[0])
            scene.check()
    assert all(each.is_finished for each in list_open_saves(scene))


def test_a_save_is_retained_without_status_requests(scene: Scenario) -> None:
    start_open_save(scene)
    for _ in range(20):
        scene.tick(5.0)
        scene.worker_heartbeat("u"), scene.worker_heartbeat("v")
    assert not save_status(scene).is_closed
    scene.restart()
    assert len(scene.worker_heartbeat_reply("u").tasks_to_start) == 1


def test_only_the_last_closed_saves_are_retained(scene: Scenario) -> None:
    for number in range(105):
        name = f"{number:016x}"
        begin(scene, name, path=name)
        report_directory(scene, "failed", name, error="no")
        report_directory(scene, "closed", name)
    assert len(scene.state.saves) == 100
    with pytest.raises(NotFoundError):
        save_status(scene, f"{0:016x}")


def test_no_client_joins_a_save(scene: Scenario) -> None:
    start_open_save(scene)
    for client_id in (SAVE, f"save {SAVE}"):
        scene.ask(opening(client_id, processing_mode=1))
    (save,) = [job for job in scene.state.jobs.values() if job.save_id]
    assert (save.name, save.owner, save.save_id) == (None, None, SAVE)
    assert not any(scene.state.iterations[each].clients for each in save.iterations.values())
    assert scene.state.jobs_by_owner.keys() == {SAVE, f"save {SAVE}"}
    scene.check()


def test_the_status_shows_the_path_and_totals_of_a_save(scene: Scenario) -> None:
    task_id, *_ = start_open_save(scene)
    status = messages.TaskActivity(task_id=task_id, elements=3, bytes=60)
    worker = scene.state.tasks[task_id].worker_id
    scene.ask(messages.WorkerHeartbeat(worker_id=worker, tasks=(task_id,), activity=(status,)))
    scene.split(task_id, max_splits=10)
    write(scene, task_id, num_done=2, files=2)
    (job,) = scene.ask(messages.GetStatus()).jobs
    (save,) = scene.state.saves.values()
    assert (job.path, job.elements, job.bytes) == (save.path, 10, 200)


def test_elements_of_a_closed_save_are_in_the_totals(scene: Scenario) -> None:
    one, two = start_open_save(scene)
    while (found := scene.get_split(one)).start < found.stop:
        write(scene, one, num_done=scene.state.tasks[one].assigned.num_assigned)
    scene.finish("u", one)
    scene.finish("v", two)
    (save,) = scene.state.saves.values()
    report_directory(scene, "closed")
    stats = scene.ask(messages.GetStatus())
    assert save.num_elements > 0
    assert (stats.jobs, stats.elements, stats.bytes) == ((), save.num_elements, save.num_bytes)
