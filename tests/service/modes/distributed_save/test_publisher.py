"""Publisher: directories follow the journaled events; each step may be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UnavailableError
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord, SaveHeader
from headrace.service import messages
from headrace.service.modes.distributed_save import publisher as publishing
from headrace.service.modes.distributed_save.publisher import SavePublisher
from headrace.service.modes.distributed_save.records import files_of
from headrace.serving.rpc import TypedRequest
from tests.service.dispatcher.scenario import Scenario, saving

SAVE, OTHER = "0" * 16, "1" * 16


class Directories:
    """A dispatcher, one worker with a task, and a publisher that the test polls."""

    def __init__(self, path: Path, retry_seconds: float = 30.0) -> None:
        self.path = path / "saved"
        self.scene = Scenario(keeps_journal=True)
        self.scene.register(num_splits=4)
        self.scene.add_worker("u")
        self.retry_seconds = retry_seconds
        self.begin_again()

    def begin_again(self) -> None:
        """Start another publisher, as after a restart."""
        self.publisher = SavePublisher(self._ask, self.retry_seconds)

    def _ask(self, request: TypedRequest[Any]) -> Any:
        return self.scene.ask(request)  # type: ignore[arg-type]

    def look(self) -> None:
        self.publisher._poll()

    def begin(self, save: str = SAVE) -> None:
        self.scene.ask(saving(save, path=str(self.path)))

    def write(self, *contents: bytes, done: int) -> None:
        """Write files as the worker, and commit them."""
        (task,) = self.scene.state.tasks.values()
        while task.assigned.num_assigned < done:
            self.scene.split(task.task_id, max_splits=done - task.assigned.num_assigned)
        records = [
            ChunkRecord(
                task.task_id, files_of(task.mode_state).num_files + index, 1, len(content), "{}"
            )
            for index, content in enumerate(contents)
        ]
        folder = SavedDirectory(self.path).folder
        for record, content in zip(records, contents, strict=True):
            with folder.create(record.name(SAVE)) as file:
                file.write(content)
        self.scene.ask(
            messages.CommitFiles(
                worker_id="u",
                report_number=files_of(task.mode_state).num_reports,
                files=tuple(
                    messages.SavedFile(r.number, r.elements, r.bytes, "{}") for r in records
                ),
                num_done=done,
                **self.scene.task_fields(task.task_id),
            )
        )

    def finish(self) -> None:
        (task,) = self.scene.state.tasks.values()
        self.scene.finish("u", task.task_id)

    def update(self, save: str = SAVE) -> messages.SaveStatus:
        return self.scene.ask(messages.GetSaveStatus(save_id=save))

    def names(self) -> list[str]:
        return sorted(each.name for each in self.path.iterdir())


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[Directories]:
    directories = Directories(tmp_path)
    yield directories
    directories.scene.check()


def test_a_directory_is_created_filled_and_finished(directories: Directories) -> None:
    directories.begin()
    directories.look()
    assert directories.update().is_open
    assert directories.names() == ["dataset.json"]
    directories.write(b"one", b"two", done=2)
    directories.look()
    assert [name[:8] for name in directories.names()] == ["00000000", "00000001", "dataset."]
    directories.write(b"three", done=4)
    directories.finish()
    directories.look()
    assert directories.update().is_closed
    header = SavedDirectory(directories.path).read_status()
    assert header.chunks is not None
    assert [each.bytes for each in header.chunks] == [3, 3, 5]


def test_after_a_restart_unconfirmed_steps_are_repeated(directories: Directories) -> None:
    directories.begin()
    for step in (
        lambda: None,
        lambda: directories.write(b"one", done=2),
        lambda: directories.write(b"two", done=4),
        directories.finish,
    ):
        step()
        directories.look()
        directories.begin_again()
        directories.scene.restart()
        directories.look()
    assert directories.update().is_closed
    assert len(SavedDirectory(directories.path).read_status().chunks or ()) == 2


def test_uncommitted_files_are_never_visible_and_are_removed(directories: Directories) -> None:
    directories.begin()
    directories.look()
    directory = SavedDirectory(directories.path)
    with directory.folder.create(ChunkRecord(7, 0).name(SAVE)) as file:
        file.write(b"of a worker that died")
    (directories.path / "stray").write_bytes(b"")
    directories.write(b"one", done=4)
    directories.look()
    assert len(directory.list_published(SAVE)) == 1
    directories.finish()
    directories.look()
    assert directory.folder.list_unpublished() == []
    assert "stray" in directories.names()


def test_a_directory_with_a_saved_dataset_is_unchanged(directories: Directories) -> None:
    directory = SavedDirectory(directories.path)
    directory.begin(SaveHeader(OTHER, "other", None))
    directory.finish(OTHER, [])
    directories.begin()
    directories.look()
    directories.look()
    update = directories.update()
    assert (update.is_closed, update.error_class) == (True, "AlreadyExistsError")
    assert directories.names() == ["DONE", "dataset.json"]


def test_a_failed_save_is_recorded_in_its_directory(directories: Directories) -> None:
    directories.begin()
    directories.look()
    directories.write(b"one", done=2)
    (task,) = directories.scene.state.tasks
    directories.scene.fail("u", task, "ValueError: seven")
    directories.look()
    assert directories.update().is_closed
    assert directories.names() == ["ERROR", "dataset.json"]
    assert (
        SavedDirectory(directories.path).read_status().error
        == "task 4000 on worker u:1 failed: ValueError: seven"
    )


def test_a_directory_that_belongs_to_another_save_is_unchanged(directories: Directories) -> None:
    directories.begin()
    directories.look()
    SavedDirectory(directories.path).begin(SaveHeader(OTHER, "digest", None))
    directories.write(b"one", done=4)
    directories.look()
    directories.look()
    update = directories.update()
    assert (update.is_closed, update.error_class) == (True, "AbortedError")
    assert SavedDirectory(directories.path).read_status() == (
        SaveHeader(OTHER, "digest", None),
        None,
        None,
        None,
    )


def test_temporary_errors_are_retried_until_the_save_fails(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(self: object, *args: object) -> None:
        raise UnavailableError("no space left on device")

    directories.begin()
    directories.look()
    directories.write(b"one", done=4)
    directories.finish()
    with monkeypatch.context() as patched:
        patched.setattr(SavedDirectory, "finish", raise_disk_full)
        directories.look()
        assert not directories.update().error
    directories.look()
    assert directories.update().is_closed
    assert not directories.update().error


def test_a_disk_that_stays_full_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(self: object, *args: object) -> None:
        raise UnavailableError("no space left on device")

    directories = Directories(tmp_path, retry_seconds=0.0)
    directories.begin()
    directories.look()
    directories.write(b"one", done=4)
    directories.finish()
    monkeypatch.setattr(SavedDirectory, "finish", raise_disk_full)
    directories.look()
    directories.look()
    assert (directories.update().is_closed, directories.update().error) == (
        True,
        "no space left on device",
    )


def test_the_thread_wakes_up_for_events_about_saves(tmp_path: Path) -> None:
    directories = Directories(tmp_path)
    asked: list[object] = []
    publisher = SavePublisher(asked.append)
    assert publishing._POLL_SECONDS == 1.0
    publisher.observe(directories.scene.events)
    assert not publisher._wake_up.is_set()
    directories.begin()
    publisher.observe(directories.scene.events)
    assert publisher._wake_up.is_set()
    publisher.close()
