"""Reports of tasks and jobs, made from events."""

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

from .golden_journal import SCENARIOS, load_golden
from .scenario import DYNAMIC


def records(scene):
    return [(number, [event]) for number, event in enumerate(scene.events, 1)]


def texts(lines):
    return [each.text for each in lines]


@pytest.fixture
def lost(scene):
    """Worker "w" is lost with splits of task 4000; client "c" received some of them."""
    scene.register(num_splits=100)
    scene.add_worker("w")
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, max_splits=4)
    scene.split(4000, max_splits=4)
    scene.lose("w")
    scene.report_delivery("c", 4000, (0, 2), partially_delivered=((2, 3),))
    return scene


def test_report_of_lost_task_covers_creation_to_loss(lost):
    report = texts(report_task(0, DispatcherState(), records(lost), 4000))
    assert report[0] == "Task 4000 created on worker w:1 (w): epoch 0 of job 'training'."
    assert report[1] == "Client c joined."
    assert report[2] == "Assigned splits 0 to 7 (8 splits, 2 assignments)."
    assert report[3].startswith("Its worker was lost: connection closed, no heartbeat for")
    assert report[4] == "Known to be received by client c: 2 splits and elements of 1 split."
    assert report[5] == "No client received splits 3 to 7: to be assigned again."


def test_report_of_job_names_epochs_tasks_and_workers(lost):
    report = texts(report_job(0, DispatcherState(), records(lost), "training"))
    assert report[0] == "Job 'training' created for dataset 1000 with policy DYNAMIC."
    assert report[1].startswith("Epoch 0 started")
    assert report[2] == "Task 4000 created on worker w:1."
    assert any(each.startswith("Task 4000 on worker w:1: Its worker was lost") for each in report)


def test_each_report_line_has_its_record_number(lost):
    (first, *_) = report_task(0, DispatcherState(), records(lost), 4001)
    assert str(first).startswith(f"record {first.record}: Task 4001 ")


def test_report_starts_with_the_state_before_the_records(lost):
    report = texts(report_task(17, copy.deepcopy(lost.state), [], 4000))
    (line,) = report
    assert line.startswith("State at this record: task 4000 on worker w:1, epoch 0 of job")
    assert "lost (connection closed, no heartbeat for" in line
    assert "8 splits in 2 assignments" in line
    (job,) = texts(report_job(17, copy.deepcopy(lost.state), [], "training"))
    assert "dataset 1000, 1 epoch started, 1 unfinished." in job


def test_report_of_unknown_task_or_job_is_empty(lost):
    assert report_task(0, DispatcherState(), records(lost), 4711) == []
    assert report_job(0, DispatcherState(), records(lost), "evaluation") == []


def test_summary_lists_jobs_and_tasks(lost):
    lines = summarize(DispatcherState(), records(lost))
    assert lines[0] == "1 dataset, 1 worker, 1 job, 1 client"
    assert "job 'training', dataset 1000" in lines[1]
    assert "4000 (lost, w:1), 4001 (running, v:1)" in lines[2]


def test_report_covers_departed_client_and_draining_worker(scene):
    scene.register(num_splits=100)
    scene.add_worker("w")
    scene.open("a", processing_mode=DYNAMIC, job_name="training")
    scene.open("b", processing_mode=DYNAMIC, job_name="training")
    scene.split(4000, max_splits=4)
    scene.drain_worker("w")
    scene.return_splits("w", 4000, (2, 4))
    scene.close("b")
    scene.report_departed_client("b", 4000, (0, 1), lost=((1, 2),))
    scene.finish("w", 4000)
    report = texts(report_task(0, DispatcherState(), records(scene), 4000))
    draining = "Its worker is draining: no new work; it delivers the elements that it has computed."
    assert draining in report
    assert "Client b left." in report
    assert "Finished: all elements were delivered." in report
    text = " ".join(report)
    assert "Its worker returned splits 2 to 3: to be assigned again." in text
    assert "Departed client b: only it was sent split" in text
    assert "elements of split 1 sent to it are lost." in text


def golden_records(name):
    """Return the records of a golden journal."""
    decoded = FORMAT.decode_events(load_golden()[name][0])
    return [(number, [event]) for number, event in enumerate(decoded, 1)]


def test_every_event_kind_has_a_description_or_is_not_reported():
    """Some kinds have no entry in the tables: the report functions describe them."""
    described_elsewhere = {
        events.JobCreated,
        events.JobForgotten,
        events.TaskCreated,
        events.TasksForgotten,
        events.ClientLeft,
    }
    described = (
        TASK_DESCRIPTIONS.keys()
        | WORKER_DESCRIPTIONS.keys()
        | ITERATION_DESCRIPTIONS.keys()
        | SAVE_DESCRIPTIONS.keys()
    )
    assert described | described_elsewhere | UNREPORTED_EVENTS == set(get_args(AnyEvent))
    assert not described & UNREPORTED_EVENTS


@pytest.mark.parametrize("name", SCENARIOS)
def test_reports_of_golden_journals_are_sentences(name):
    records_ = golden_records(name)
    jobs = [getattr(event, "path", getattr(event, "name", None)) for _, (event,) in records_]
    tasks = [event.task_id for _, (event,) in records_ if isinstance(event, events.TaskCreated)]
    report = [report_job(0, DispatcherState(), records_, each) for each in jobs if each]
    report += [report_task(0, DispatcherState(), records_, task_id) for task_id in tasks]
    assert all(report)
    for each in itertools.chain(*report):
        assert each.text[0].isupper(), each
        assert each.text.endswith("."), each
        assert "(task_id" not in each.text, each
        assert "=" not in each.text, each


def test_report_names_partially_received_and_consumed_splits():
    report = texts(report_task(0, DispatcherState(), golden_records("exactly_once"), 4000))
    assert report[1:3] == ["Client a joined.", "Client b joined."]
    consumed = report.index(
        "Known to be consumed by client b: split 0 completely and some elements of split 1."
    )
    assert report[consumed - 1].startswith("Assigned splits 0 to ")
    assert report[consumed + 1 :] == [
        "Client b left.",
        "Departed client b: it had consumed elements of split 1; unconsumed elements of split 1, "
        "to be assigned again.",
        "Its worker was lost: connection closed, no heartbeat for 10 s.",
        "Known to be received by client a: split 2 completely and some elements of split 1.",
        "No client received split 3: to be assigned again. No client received the remaining "
        "elements of split 1: to be assigned again.",
        "Known to be consumed by client a: split 2 completely and some elements of split 1.",
    ]


def test_report_names_abandoned_splits():
    records_ = golden_records("exactly_once")
    last = max(
        event.task_id for _, (event,) in records_ if isinstance(event, events.SplitsAbandoned)
    )
    report = texts(report_task(0, DispatcherState(), records_, last))
    assert report[-1] == "Abandoned split 1: every task that held them was lost."
    assert "Assigned the undelivered elements of split 1." in report
    assert "Known to be received by client a: nothing." in report


def test_report_combines_horizon_events():
    report = texts(report_task(0, DispatcherState(), golden_records("coordinated_reads"), 4000))
    assert report == [
        "Task 4000 created on worker v:1 (v): epoch 0 of job 'rounds'.",
        "Client a joined as consumer 0.",
        "Client b joined as consumer 1.",
        "Consumers may read rounds before 20.",
        "Assigned splits 0 to 5.",
        "Its worker was lost: connection closed, no heartbeat for 10 s.",
        "Known to be received by client a: 5 rounds.",
        "Known to be received by client b: 3 rounds.",
        "No client received splits 4 to 5: to be assigned again.",
    ]
    (joined,) = texts(report_task(0, DispatcherState(), golden_records("coordinated_reads"), 4001))[
        :1
    ]
    assert joined.endswith("epoch 0 of job 'rounds', starting at round 20.")


def test_report_of_save_is_found_by_its_directory():
    report = texts(report_job(0, DispatcherState(), golden_records("saves"), "/data/one"))
    assert report == [
        "Save into '/data/one' started.",
        "Epoch 0 started with seed 7.",
        "Directory created: workers may write.",
        "Task 4000 created on worker v:1.",
        "Assigned to its tasks: splits 0 to 7 (8 splits, 4 assignments).",
        "Its tasks saved 4 files with 16 elements.",
        "Task 4000: Finished: all elements were delivered.",
        "Epoch finished.",
        "Outcome of the save recorded in the directory.",
        "Finished epoch removed from the dispatcher's state.",
        "Job removed from the dispatcher's state.",
    ]
    assert texts(report_task(0, DispatcherState(), golden_records("saves"), 4001)) == [
        "Task 4001 created on worker v:1 (v): save into '/data/two'.",
        "Save failed: no space left.",
        "Declared lost, although its worker is registered: its save has failed.",
        "Epoch abandoned: no space left.",
        "Outcome of the save recorded in the directory.",
        "Finished epoch removed from the dispatcher's state.",
    ]


def test_summary_of_save_names_its_directory():
    started = [each for each in golden_records("saves") if not isinstance(each[1][0], SaveClosed)]
    started = started[: [type(event) for _, (event,) in started].index(events.SplitsAssigned)]
    lines = summarize(DispatcherState(), started)
    assert lines[0].endswith("2 jobs, 0 clients")
    assert lines[1] == "save into '/data/one', dataset 1000"


def test_report_covers_copies_and_shards():
    copies = texts(report_task(0, DispatcherState(), golden_records("static"), 4002))
    assert copies[1] == "Client b joined."
    assert copies[2].startswith("Declared lost, although its worker is registered: no client could")
    other = texts(report_task(0, DispatcherState(), golden_records("static"), 4003))
    assert any(each.startswith("Marked stable: ") for each in other)
    assert "Ended before the end of its copy, because its worker is draining." in other
    (shard,) = texts(report_task(0, DispatcherState(), golden_records("static"), 4001))[:1]
    assert shard.endswith("epoch 0 of job 'shards', shard 1 of 2.")


def test_report_covers_garbage_collection():
    report = {
        name: texts(report_job(0, DispatcherState(), golden_records("garbage_collection"), name))
        for name in ("finished", "discarded", "lost")
    }
    assert report["finished"][-1] == "Finished epoch removed from the dispatcher's state."
    assert report["discarded"][-1].startswith("Epoch discarded, because it had no clients.")
    assert report["lost"][-1] == "Task 4002 removed from the dispatcher's state."
    assert (
        "Task 4002: Departed client f: only it was sent split 0, to be assigned again; elements of "
        "split 1 sent to it are lost."
    ) in report["lost"]
    task = texts(report_task(0, DispatcherState(), golden_records("garbage_collection"), 4002))
    assert task[-1].startswith("Removed from the dispatcher's state; its iteration remembers")


def test_report_covers_partial_delivery_and_failure():
    report = texts(report_task(0, DispatcherState(), golden_records("dynamic"), 4000))
    assert "Its worker left." in report
    assert "Known to be received by client c: 35 splits and elements of 5 splits." in report
    failed = texts(report_task(0, DispatcherState(), golden_records("dynamic"), 4001))
    assert "Failed: no memory." in failed
    assert "Known to be received by client c: elements of 10 splits." in failed
