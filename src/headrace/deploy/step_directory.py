"""Directory on a shared file system in which the ranks of a Slurm step find each other.

    RUN_DIR/JOB.STEP/
        step.json         state of the step, rewritten by rank 0 about once per second
        ATTEMPT/keys/     keys of all servers and of the user's program
        ATTEMPT/ranks/    one file for each other rank: its address, or why it failed

Rule 1. Rank 0 creates the directory and its keys; another rank uses it only after it has seen the
        beat in `step.json` change. Files of an earlier attempt, whose rank 0 no longer runs, are
        therefore never used, even if the job was requeued with the same number.
Rule 2. All directories have mode 0700 and all files 0600. A directory of another user, or one that
        others can read, is refused.
Rule 3. Files are renamed into place, so that no reader sees a part of one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from headrace.errors import FailedPreconditionError
from headrace.transport.security import new_keys

__all__ = ["RankState", "StepFollower", "StepPublisher", "StepState"]

_STATE = "step.json"
_KEYS = "keys"
_RANKS = "ranks"


class StepState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a step, as rank 0 publishes it.

    Attributes:
        attempt: Random name of this attempt and of its subdirectory.
        beat: Number that grows while rank 0 runs.
        stage: "stopping" asks all ranks to end.
        dispatcher: Address of the dispatcher, "host:port".
        num_workers: Number of data workers that should run on all ranks; 0: one on each.
    """

    attempt: str
    beat: int = 0
    stage: Literal["running", "stopping"] = "running"
    dispatcher: str
    num_workers: int = 0


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """State of another rank, as it publishes it.

    Attributes:
        address: Address of its parameter server or coordinator worker, "host:port".
        error: Why the rank failed; empty unless it did.
    """

    address: str = ""
    error: str = ""


class StepPublisher:
    """Rank 0's side: creates the directory and publishes the state of the step.

    Args:
        directory: Directory of the step, which is created; contents of earlier attempts are
            removed.

    Raises:
        FailedPreconditionError: If the directory cannot be created, or belongs to another user.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        attempt = secrets.token_hex(8)
        with _explain_errors(directory):
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            _check_private(directory)
            for old in directory.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            (directory / attempt).mkdir(mode=0o700)
            (directory / attempt / _RANKS).mkdir(mode=0o700)
            self.keys: Path = new_keys(directory / attempt / _KEYS)
            for path in self.keys.rglob("*"):
                path.chmod(0o700 if path.is_dir() else 0o600)
        self._state = StepState(attempt=attempt, dispatcher="")

    def publish(
        self,
        *,
        dispatcher: str | None = None,
        stage: Literal["running", "stopping"] | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Write the state with the next beat.

        Args:
            dispatcher: Address of the dispatcher; None does not change it.
            stage: None does not change it.
            num_workers: None does not change it.

        Raises:
            OSError: If the file cannot be written.
        """
        state = self._state
        self._state = msgspec.structs.replace(
            state,
            beat=state.beat + 1,
            dispatcher=state.dispatcher if dispatcher is None else dispatcher,
            stage=state.stage if stage is None else stage,
            num_workers=state.num_workers if num_workers is None else num_workers,
        )
        _write(self._directory / _STATE, self._state)

    def ranks(self) -> dict[int, RankState]:
        """Return the states of the ranks that have published one."""
        folder = self._directory / self._state.attempt / _RANKS
        found = {}
        for path in folder.glob("*.json"):
            # A rank that leaves removes its file.
            with contextlib.suppress(FileNotFoundError):
                found[int(path.stem)] = msgspec.json.decode(path.read_bytes(), type=RankState)
        return found

    def remove(self) -> None:
        """Remove the directory of the step, with its keys."""
        shutil.rmtree(self._directory, ignore_errors=True)


class StepFollower:
    """Another rank's side: reads the state of the step, and publishes the rank's own.

    Args:
        directory: Directory of the step.
        rank: Number of this rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._first: StepState | None = None
        self._last: StepState | None = None
        #: Time at which the state last changed, or of the first `poll`.
        self._changed_at: float | None = None
        self._is_removed = False

    def poll(self, now: float) -> StepState | None:
        """Read the state; return it once rank 0 has been seen alive, None before.

        After rank 0 has removed the directory, the last state is returned with stage "stopping".

        Args:
            now: Time of a monotonic clock, in seconds.

        Raises:
            FailedPreconditionError: If the directory belongs to another user, or others can read
                it.
        """
        if self._changed_at is None:
            self._changed_at = now
        state = self._read()
        if state is None:
            if self._is_alive and not self._directory.exists():
                assert self._last is not None
                self._last = msgspec.structs.replace(self._last, stage="stopping")
        elif self._last is None or state.attempt != self._last.attempt:
            if not self._is_alive:
                # Possibly of an earlier attempt: alive when it changes.
                self._first = self._last = state
        elif state != self._last:
            self._last = state
            self._changed_at = now
        return self._last if self._is_alive else None

    def silent_seconds(self, now: float) -> float:
        """Return for how long rank 0 has not been seen alive."""
        return 0.0 if self._changed_at is None else now - self._changed_at

    @property
    def keys(self) -> Path:
        """Directory of the keys of this attempt."""
        return self._attempt / _KEYS

    @property
    def has_stale_state(self) -> bool:
        """Whether the directory has the state of a rank 0 that does not run."""
        return self._first is not None and not self._is_alive

    def publish(self, state: RankState) -> None:
        """Write the state of this rank.

        Raises:
            OSError: If the file cannot be written.
        """
        _write(self._attempt / _RANKS / f"{self._rank}.json", state)

    def leave(self) -> None:
        """Remove the state of this rank: its processes have ended."""
        if self._is_alive:
            with contextlib.suppress(OSError):
                (self._attempt / _RANKS / f"{self._rank}.json").unlink()

    @property
    def _attempt(self) -> Path:
        assert self._last is not None
        return self._directory / self._last.attempt

    @property
    def _is_alive(self) -> bool:
        return self._last is not self._first

    def _read(self) -> StepState | None:
        try:
            # Reading the directory makes NFS clients drop what they remember of missing files.
            if _STATE not in os.listdir(self._directory):
                return None
            _check_private(self._directory)
            return msgspec.json.decode((self._directory / _STATE).read_bytes(), type=StepState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def _write(path: Path, state: StepState | RankState) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(state))
    partial.replace(path)


def _check_private(directory: Path) -> None:
    """Check that only this user can read and change a directory.

    Raises:
        FailedPreconditionError: If others can.
    """
    found = directory.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise FailedPreconditionError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700, but belongs to "
            f"user {found.st_uid} and has mode {mode:04o}; choose another --run-dir"
        )


@contextlib.contextmanager
def _explain_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot create {directory}: {error.strerror}; choose with --run-dir a writable "
            "directory on a file system that all nodes of the step share"
        ) from error
