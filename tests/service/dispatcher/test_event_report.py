"""A task's story is told from its facts, in plain sentences and in order."""

from __future__ import annotations

import copy
import itertools
from typing import get_args

import pytest

from headrace.service.dispatcher import events
from headrace.service.dispatcher.core import FORMAT
from headrace.service.dispatcher.event_report import (
    ITERATION_DESCRIPTIONS,
    SAVE_DESCRIPTIONS,
    TASK_DESCRIPTIONS,
    UNREPORTED_EVENTS,
    WORKER_DESCRIPTIONS,
    report_job,
    report_task,
    summarize,
)
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.distributed_save.records import SaveClosed

from .golden_journal import STORIES, saved
from .scenario import DYNAMIC


def records(scene):
    return [(number, [fact]) for number, fact in enumerate(scene.facts, 1)]


def words(told):
    return [each.text for each in told]


@pytest.fixture
def lost(scene):
    """Worker "w" is lost with a part of what task 4000 was dealt; "v" has the rest."""
    scene.register(positions=100)
    scene.add_worker("w")
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, max_splits=4)
    scene.split(4000, max_splits=4)
    scene.lose("w")
    scene.settle("c", 4000, (0, 2), touched=((2, 3),))
    return scene


def test_a_lost_task_s_story_goes_from_its_beginning_to_its_loss(lost):
    told = words(report_task(0, DispatcherState(), records(lost), 4000))
    assert told[0] == "Task 4000 was given to the worker at w:1 (w), for epoch 0 of job 'training'."
    assert told[1] == "Client c began to read."
    assert told[2] == "It was dealt units 0 to 7, 8 units in 2 grants."
    assert told[3].startswith(
        "Its worker was taken for lost: it closed its connection, and was not heard of for"
    )
    assert told[4] == (
        "It became known that client c had received 2 units whole, and something of 1 more."
    )
    assert told[5] == "Nobody had received units 3 to 7, which are dealt again."


def test_a_job_s_story_names_its_passes_tasks_and_clients(lost):
    told = words(report_job(0, DispatcherState(), records(lost), "training"))
    assert told[0] == "Job 'training' began, over dataset 1000, with policy DYNAMIC."
    assert told[1].startswith("Epoch 0 began")
    assert told[2] == "Task 4000 was given to the worker at w:1."
    assert any(each.startswith("Task 4000 (the worker at w:1): Its worker was") for each in told)


def test_each_sentence_names_the_record_that_it_is_from(lost):
    (first, *_) = report_task(0, DispatcherState(), records(lost), 4001)
    assert str(first).startswith(f"record {first.record}: Task 4001 ")


def test_of_what_was_before_the_first_record_the_sum_is_told(lost):
    told = words(report_task(17, copy.deepcopy(lost.state), [], 4000))
    (only,) = told
    assert only.startswith("so far, task 4000 on the worker at w:1")
    assert "was lost (it closed its connection, and was not heard of" in only
    assert "8 units in 2 grants" in only
    (job,) = words(report_job(17, copy.deepcopy(lost.state), [], "training"))
    assert "had begun 1 pass," in job


def test_of_nobody_there_is_no_story(lost):
    assert report_task(0, DispatcherState(), records(lost), 4711) == []
    assert report_job(0, DispatcherState(), records(lost), "evaluation") == []


def test_an_overview_names_what_there_is_to_ask_about(lost):
    lines = summarize(DispatcherState(), records(lost))
    assert lines[0] == "1 dataset, 1 worker, 1 job, 1 client"
    assert "job 'training', dataset 1000" in lines[1]
    assert "4000 (lost, w:1), 4001 (running, v:1)" in lines[2]


def test_a_client_that_leaves_and_a_worker_that_leaves_are_told(scene):
    scene.register(positions=100)
    scene.add_worker("w")
    scene.open("a", processing_mode=DYNAMIC, job_name="training")
    scene.open("b", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, max_splits=4)
    scene.leaving("w")
    scene.hand_back("w", 4000, (2, 4))
    scene.close("b")
    scene.drop("b", 4000, (0, 1), lost=((1, 2),))
    scene.finish("w", 4000)
    told = words(report_task(0, DispatcherState(), records(scene), 4000))
    assert "Its worker was asked to leave: it takes no more and delivers what it has." in told
    assert "Client b left." in told
    assert "It handed out its last element, and was finished." in told
    text = " ".join(told)
    assert "Its worker handed back units" in text
    assert "which are dealt again" in text
    assert "Client b was gone. Unit" in text
    assert "missing." in text


def story(name):
    """Return the records of a story that is kept."""
    facts = FORMAT.decode_events(saved()[name][0])
    return [(number, [fact]) for number, fact in enumerate(facts, 1)]


def test_every_kind_of_fact_has_a_sentence_or_is_of_no_job():
    """Those that begin a job or a task, or let go of a client or a job, are told where they are."""
    here = {
        events.JobCreated,
        events.JobForgotten,
        events.TaskCreated,
        events.TasksForgotten,
        events.ClientLeft,
    }
    told = (
        TASK_DESCRIPTIONS.keys()
        | WORKER_DESCRIPTIONS.keys()
        | ITERATION_DESCRIPTIONS.keys()
        | SAVE_DESCRIPTIONS.keys()
    )
    assert told | here | UNREPORTED_EVENTS == set(get_args(AnyEvent))
    assert not told & UNREPORTED_EVENTS


@pytest.mark.parametrize("name", STORIES)
def test_every_story_is_told_in_sentences(name):
    kept = story(name)
    jobs = [getattr(fact, "path", getattr(fact, "name", None)) for _, (fact,) in kept]
    tasks = [fact.task_id for _, (fact,) in kept if isinstance(fact, events.TaskCreated)]
    told = [report_job(0, DispatcherState(), kept, each) for each in jobs if each]
    told += [report_task(0, DispatcherState(), kept, task_id) for task_id in tasks]
    assert all(told)
    for each in itertools.chain(*told):
        assert each.text[0].isupper(), each
        assert each.text.endswith("."), each
        assert "(task_id" not in each.text, each
        assert "=" not in each.text, each


def test_what_clients_received_in_part_and_used_is_told_unit_by_unit():
    told = words(report_task(0, DispatcherState(), story("each once"), 4000))
    assert told[1:3] == ["Client a began to read.", "Client b began to read."]
    dealt = told.index(
        "It became known that client b had used unit 0 whole and some elements of unit 1."
    )
    assert told[dealt - 1].startswith("It was dealt units 0 to ")
    assert told[dealt + 1 :] == [
        "Client b left.",
        "Client b was gone. It had used elements of unit 1. Elements of unit 1 that it was sent "
        "and had not used are dealt again.",
        "Its worker was taken for lost: it closed its connection, and was not heard of for 10 s.",
        "It became known that client a had received unit 2 whole and some elements of unit 1.",
        "Nobody had received unit 3, which is dealt again. What nobody had received of unit 1 is "
        "dealt again.",
        "It became known that client a had used unit 2 whole and some elements of unit 1.",
    ]


def test_units_that_are_given_up_are_told():
    kept = story("each once")
    last = max(fact.task_id for _, (fact,) in kept if isinstance(fact, events.SplitsAbandoned))
    told = words(report_task(0, DispatcherState(), kept, last))
    assert told[-1] == "Unit 1 was given up: each task that was dealt it was lost."
    assert "It was dealt what nobody had of unit 1." in told
    assert "It became known that client a had received nothing of it." in told


def test_rounds_are_told_once_however_often_they_were_opened():
    told = words(report_task(0, DispatcherState(), story("in rounds"), 4000))
    assert told == [
        "Task 4000 was given to the worker at v:1 (v), for epoch 0 of job 'rounds'.",
        "Client a began to read, as consumer 0.",
        "Client b began to read, as consumer 1.",
        "Consumers could go on up to round 20.",
        "It was dealt units 0 to 5.",
        "Its worker was taken for lost: it closed its connection, and was not heard of for 10 s.",
        "It became known that client a had received 5 rounds of it.",
        "It became known that client b had received 3 rounds of it.",
        "Nobody had received units 4 to 5, which are dealt again.",
    ]
    (joined,) = words(report_task(0, DispatcherState(), story("in rounds"), 4001))[:1]
    assert joined.endswith("for epoch 0 of job 'rounds', from round 20 on.")


def test_a_save_is_told_by_its_directory():
    told = words(report_job(0, DispatcherState(), story("saves"), "/data/one"))
    assert told == [
        "A save into '/data/one' began.",
        "Epoch 0 began, with seed 7.",
        "The directory was begun: workers could write.",
        "Task 4000 was given to the worker at v:1.",
        "Its tasks were dealt units 0 to 7, 8 units in 4 grants.",
        "They saved 4 files, of 16 elements.",
        "Task 4000: It handed out its last element, and was finished.",
        "The pass was finished.",
        "The directory said how the save ended.",
        "The pass was over, and left the dispatcher's memory.",
        "The job was forgotten.",
    ]
    assert words(report_task(0, DispatcherState(), story("saves"), 4001)) == [
        "Task 4001 was given to the worker at v:1 (v), for the save into '/data/two'.",
        "The save failed: no space left.",
        "It was given up, though its worker was there: its save has failed.",
        "The pass was given up: no space left.",
        "The directory said how the save ended.",
        "The pass was over, and left the dispatcher's memory.",
    ]


def test_a_save_is_no_client_s_in_an_overview():
    begun = [each for each in story("saves") if not isinstance(each[1][0], SaveClosed)]
    begun = begun[: [type(fact) for _, (fact,) in begun].index(events.SplitsAssigned)]
    lines = summarize(DispatcherState(), begun)
    assert lines[0].endswith("2 jobs, 0 clients")
    assert lines[1] == "the save into '/data/one', dataset 1000"


def test_copies_and_shares_are_told():
    copies = words(report_task(0, DispatcherState(), story("shares"), 4002))
    assert copies[1] == "Client b began to read."
    assert copies[2].startswith("It was given up, though its worker was there: none of its clients")
    other = words(report_task(0, DispatcherState(), story("shares"), 4003))
    assert "It had run for so long that what it reads kills no worker." in other
    assert "It ended before its copy did, because its worker was asked to leave." in other
    (share,) = words(report_task(0, DispatcherState(), story("shares"), 4001))[:1]
    assert share.endswith("for epoch 0 of job 'shares', for share 1 of 2.")


def test_what_was_forgotten_is_told():
    told = {
        name: words(report_job(0, DispatcherState(), story("forgotten"), name))
        for name in ("kept", "given up", "missing")
    }
    assert told["kept"][-1] == "The pass was over, and left the dispatcher's memory."
    assert told["given up"][-1].startswith("Nobody read the pass any more: it was given up")
    assert told["missing"][-1] == "Task 4002 left the dispatcher's memory."
    assert (
        "Task 4002: Client f was gone. Unit 0 was sent to it alone: dealt again. Unit 1 was sent "
        "to it in part: missing."
    ) in told["missing"]
    task = words(report_task(0, DispatcherState(), story("forgotten"), 4002))
    assert task[-1].startswith("The task left the dispatcher's memory; what was lost")


def test_a_day_is_told():
    told = words(report_task(0, DispatcherState(), story("a day"), 4000))
    assert "Its worker left." in told
    assert (
        "It became known that client c had received 35 units whole, and something of 5 more."
        in told
    )
    failed = words(report_task(0, DispatcherState(), story("a day"), 4001))
    assert "It failed: no memory." in failed
    assert "It became known that client c had received something of 10 units." in failed
