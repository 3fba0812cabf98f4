"""Tests of `TrainingCluster` on real Ray clusters of one and of several nodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from tests.cluster.alone import on_loopback_alone

PROGRAMS = Path(__file__).with_name("training_programs.py")
_PROGRAM_SECONDS = 400.0


def run(program, folder):
    output = on_loopback_alone(
        [str(PROGRAMS), program, str(folder / "found.json")], seconds=_PROGRAM_SECONDS
    )
    assert (folder / "found.json").exists(), output
    return json.loads((folder / "found.json").read_text()), output


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"workers": -1}, ValueError, "`workers` must be at least 0"),
        ({"ps": 1.5}, TypeError, "`ps` must be an integer"),
        ({"workers": 0, "ps": 0}, ValueError, "needs at least one task"),
        ({"resources_per_worker": 2}, TypeError, "`resources_per_worker` must be a dict such as"),
        (
            {"resources_per_ps": {"CPU": "2"}},
            TypeError,
            r"`resources_per_ps\['CPU'\]` must be a nu",
        ),
        (
            {"resources_per_ps": {"CPU": -2}},
            ValueError,
            r"`resources_per_ps\['CPU'\]` must be at l",
        ),
        ({"resources_per_ps": {"CPU": 0}}, ValueError, "`resources_per_ps` must reserve something"),
        ({"placement": "DENSE"}, ValueError, "`placement` must be one of"),
        ({"runtime_env": ["A=b"]}, TypeError, "`runtime_env` must be a dict or None"),
        ({"name": ""}, ValueError, "`name` must not be empty"),
        ({"timeout": "x"}, TypeError, "`timeout` must be a number of seconds"),
    ],
)
def test_invalid_arguments_are_named(arguments, kind, words):
    with pytest.raises(kind, match=words):
        hr.ray.TrainingCluster(**{"workers": 1, "ps": 1, **arguments})


@pytest.mark.heavy
def test_killed_actors_do_not_change_the_trained_weights(tmp_path):
    found, output = run("one_node", tmp_path)
    assert found["num_tasks"] == {"worker": 2, "ps": 2}
    assert found["expected"][1] == 30  # rounds of two steps
    assert found["disturbed"] == found["expected"], output
    assert found["same_addresses"]
    assert found["are_running"]
    assert "was lost; Ray restarts it" in output

    kind, words = found["without_keys"]
    assert kind == "UnauthenticatedError", words
    assert found["duplicate"][0] == "AlreadyExistsError"
    assert "a Ray actor 'train-worker-0' exists already" in found["duplicate"][1]
    kind, words = found["too_large"]
    assert kind == "UnavailableError"
    assert "for 9 tasks with placement='SPREAD'. They need 9 CPU (2 of 4 are unused)" in words
    assert not found["running_after_close"]
    assert found["kill_after_close"][0] == "FailedPreconditionError"
    kind, words = found["kill_after_shutdown"]
    assert kind == "FailedPreconditionError"
    assert words.startswith("Ray was shut down in this process")
    assert not found["running_after_shutdown"]
    assert not found["is_ray_started"]


@pytest.mark.slow
@pytest.mark.heavy
def test_worker_of_a_lost_node_continues_on_another_node(tmp_path):
    found, output = run("lost_nodes", tmp_path)
    assert found["disturbed"] == found["undisturbed"], output
    # The worker has the next number at its new address.
    assert found["workers"] == [1]
    assert sorted(found["moved"]) == ["ps", "worker"]
    # The server that moved is filled when a strategy with its new address starts.
    assert found["read_again"] == found["disturbed"][0]
    assert np.allclose(found["after_kill"], found["disturbed"][0])
    assert "moved from 127.0.0.3:" in output


@pytest.mark.slow
@pytest.mark.heavy
def test_killed_actors_do_not_change_a_keras_model(tmp_path):
    found, output = run("keras_fit", tmp_path)
    weights, losses = found["undisturbed"]
    assert len(weights) == 4
    assert losses[-1] < losses[0]
    assert found["disturbed"] == found["undisturbed"], output
    assert not set(found["killed"]) & set(found["pids"])
