"""The shared directory of a step: whom the ranks trust, and how they notice the end."""

from __future__ import annotations

import os
import stat

import pytest

from headrace.deploy.step_directory import RankState, StepFollower, StepPublisher
from headrace.errors import FailedPreconditionError
from headrace.transport.security import Security


def test_all_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        publisher = StepPublisher(tmp_path / "runs" / "7.0")
        publisher.publish()
    finally:
        os.umask(before)
    modes = {
        stat.S_IMODE(path.stat().st_mode) | (0 if path.is_dir() else 0o1000000)
        for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    }
    assert modes == {0o700, 0o1000600}
    assert Security.load(publisher.keys, "client").server_key


def test_follower_trusts_a_state_only_after_it_changed(tmp_path):
    directory = tmp_path / "7.0"
    follower = StepFollower(directory, 1)
    assert follower.poll(0.0) is None
    publisher = StepPublisher(directory)
    publisher.publish(dispatcher="127.0.0.1:5050")
    assert follower.poll(1.0) is None
    assert follower.has_stale_state
    publisher.publish()
    state = follower.poll(2.0)
    assert state is not None
    assert state.dispatcher == "127.0.0.1:5050"
    assert follower.keys == publisher.keys
    assert not follower.has_stale_state


def test_follower_ignores_an_earlier_attempt_and_follows_the_next(tmp_path):
    directory = tmp_path / "7.0"
    StepPublisher(directory).publish(dispatcher="127.0.0.1:1")
    follower = StepFollower(directory, 1)
    for second in range(5):
        assert follower.poll(float(second)) is None
    assert follower.silent_seconds(5.0) == 5.0
    publisher = StepPublisher(directory)
    publisher.publish(dispatcher="127.0.0.1:2")
    assert follower.poll(5.0) is None
    publisher.publish()
    state = follower.poll(6.0)
    assert state is not None
    assert state.dispatcher == "127.0.0.1:2"
    assert follower.silent_seconds(6.5) == 0.5


def test_ranks_publish_their_addresses_and_leave(tmp_path):
    publisher = StepPublisher(tmp_path / "7.0")
    followers = [StepFollower(tmp_path / "7.0", rank) for rank in (1, 2)]
    for _ in range(2):
        publisher.publish(dispatcher="127.0.0.1:5050")
        for follower in followers:
            follower.poll(0.0)
    followers[0].publish(RankState(address="127.0.0.1:1"))
    followers[1].publish(RankState(error="failed"))
    assert publisher.ranks() == {1: RankState(address="127.0.0.1:1"), 2: RankState(error="failed")}
    followers[0].leave()
    assert publisher.ranks() == {2: RankState(error="failed")}


def test_removed_directory_means_stopping(tmp_path):
    publisher = StepPublisher(tmp_path / "7.0")
    follower = StepFollower(tmp_path / "7.0", 1)
    for second in (0.0, 1.0):
        publisher.publish()
        follower.poll(second)
    publisher.remove()
    state = follower.poll(2.0)
    assert state is not None
    assert state.stage == "stopping"


def test_directory_that_others_can_read_is_refused(tmp_path):
    directory = tmp_path / "7.0"
    directory.mkdir()
    directory.chmod(0o750)
    with pytest.raises(FailedPreconditionError, match=r"mode 0700, but .* has mode 0750"):
        StepPublisher(directory)
    directory.chmod(0o700)
    StepPublisher(directory).publish()
    directory.chmod(0o755)
    with pytest.raises(FailedPreconditionError, match=r"has mode 0755; choose another --run-dir"):
        StepFollower(directory, 1).poll(0.0)


def test_directory_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "7.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPreconditionError, match="must be a directory of user"):
        StepPublisher(tmp_path / "7.0")
    assert list((tmp_path / "elsewhere").iterdir()) == []
