"""A task's story is told from its facts, in plain sentences and in order."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path

import msgspec
import pytest

from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.story import overview, tell_job, tell_task
from headrace.service.dispatcher.updates import Update

from .scenario import DYNAMIC


def records(scene):
    return [(number, [fact]) for number, fact in enumerate(scene.facts, 1)]


def words(told):
    return [each.words for each in told]


@pytest.fixture
def lost(scene):
    """Worker "w" is lost with a part of what task 4000 was dealt; "v" has the rest."""
    scene.register(positions=100)
    scene.add_worker("w")
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, want=4)
    scene.split(4000, want=4)
    scene.lose("w")
    scene.settle("c", 4000, (0, 2), touched=((2, 3),))
    return scene


def test_a_lost_task_s_story_goes_from_its_beginning_to_its_loss(lost):
    told = words(tell_task(0, DispatcherState(), records(lost), 4000))
    assert told[0] == "Task 4000 was given to the worker at w:1 (w), for pass 0 of job 'training'."
    assert told[1] == "Client c began to read."
    assert told[2] == "It was dealt units 0 to 7, 8 units in 2 grants."
    assert told[3].startswith("Its worker was taken for lost: it was not heard of for")
    assert told[4] == (
        "It became known that client c had received 2 units whole, and something of 1 more."
    )
    assert told[5] == "Nobody had received units 3 to 7, which are dealt again."


def test_a_job_s_story_names_its_passes_tasks_and_clients(lost):
    told = words(tell_job(0, DispatcherState(), records(lost), "training"))
    assert told[0] == "Job 'training' began, over dataset 1000, with policy DYNAMIC."
    assert told[1].startswith("Pass 0 began")
    assert told[2] == "Task 4000 was given to the worker at w:1."
    assert any(each.startswith("Tasks 4000 (the worker at w:1): Its worker was") for each in told)


def test_each_sentence_names_the_record_that_it_is_from(lost):
    (first, *_) = tell_task(0, DispatcherState(), records(lost), 4001)
    assert str(first).startswith(f"record {first.record}: Task 4001 ")


def test_of_what_was_before_the_first_record_the_sum_is_told(lost):
    told = words(tell_task(17, copy.deepcopy(lost.state), [], 4000))
    (only,) = told
    assert only.startswith("so far, task 4000 on the worker at w:1")
    assert "was lost (it was not heard of" in only
    assert "8 units in 2 grants" in only
    (job,) = words(tell_job(17, copy.deepcopy(lost.state), [], "training"))
    assert "had begun 1 passes" in job


def test_of_nobody_there_is_no_story(lost):
    assert tell_task(0, DispatcherState(), records(lost), 4711) == []
    assert tell_job(0, DispatcherState(), records(lost), "evaluation") == []


def test_an_overview_names_what_there_is_to_ask_about(lost):
    lines = overview(DispatcherState(), records(lost))
    assert lines[0] == "1 dataset, 1 worker, 1 job, 1 client"
    assert "job 'training', dataset 1000" in lines[1]
    assert "4000 (lost, w:1), 4001 (running, v:1)" in lines[2]


def test_a_client_that_leaves_and_a_worker_that_leaves_are_told(scene):
    scene.register(positions=100)
    scene.add_worker("w")
    scene.open("a", processing_mode=DYNAMIC, job_name="training")
    scene.open("b", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, want=4)
    scene.leaving("w")
    scene.hand_back("w", 4000, (2, 4))
    scene.close("b")
    scene.drop("b", 4000, (0, 1), lost=((1, 2),))
    scene.finish("w", 4000)
    told = words(tell_task(0, DispatcherState(), records(scene), 4000))
    assert "Its worker was asked to leave: it takes no more and delivers what it has." in told
    assert "Client b left." in told
    assert "It handed out its last element, and was finished." in told
    text = " ".join(told)
    assert "Its worker handed back units" in text
    assert "which are dealt again" in text
    assert "Client b was gone. Unit" in text
    assert "missing." in text


def test_every_fact_that_was_ever_kept_can_be_told():
    path = Path(__file__).parent / "journal_format_2.json"
    golden = json.loads(path.read_text())
    facts = msgspec.msgpack.decode(base64.b64decode(golden["facts"]), type=list[Update])
    state = DispatcherState()
    kept = [(number, [fact]) for number, fact in enumerate(facts, 1)]
    for fact in facts:
        apply(state, fact)
    for task_id in range(4000, state.next_task):
        tell_task(0, DispatcherState(), kept, task_id)
    for fact in facts:
        if (name := getattr(fact, "name", None)) is not None:
            assert tell_job(0, DispatcherState(), kept, name)
