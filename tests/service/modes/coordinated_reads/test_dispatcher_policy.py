"""Everything that consumers must agree on is decided and journaled by the dispatcher."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.dispatcher.apply import InvalidEventError, apply
from headrace.service.modes.coordinated_reads.events import HorizonAdvanced
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def scene() -> Scenario:
    scene = Scenario(client_timeout=30.0, gc_timeout=20.0)
    scene.register(num_splits=100, cardinality=-1)
    scene.add_worker("v")
    return scene


def join(scene: Scenario, *names: str, number: int = 2, mode: int = OFF, **terms: Any) -> Any:
    """Open an iteration as consumers 0, 1, ...; return the last reply."""
    reply = None
    for index, name in enumerate(names):
        reply = scene.open(
            name,
            job_name="job",
            processing_mode=mode,
            num_consumers=number,
            consumer_index=index,
            **terms,
        )
    return reply


def heartbeat(scene: Scenario, client_id: str, horizon: int = 0) -> Any:
    return scene.ask(messages.ClientHeartbeat(client_id=client_id, horizon=horizon))


def report_rounds(
    scene: Scenario, client_id: str, task_id: int, rounds: int, splits: int = 0
) -> None:
    received = ((0, splits),) if splits else ()
    scene.ask(
        messages.ReportDelivery(
            client_id=client_id, task_id=task_id, delivered=received, rounds=rounds
        )
    )


def test_a_joining_worker_starts_at_the_horizon(scene: Scenario) -> None:
    reply = join(scene, "a", "b")
    assert [(task.task_id, task.starting_round) for task in reply.tasks] == [(4000, 0)]
    assert heartbeat(scene, "a", horizon=16).horizon == 16
    scene.add_worker("w")
    scene.check()
    scene.restart()
    for client_id in "ab":
        update = heartbeat(scene, client_id)
        assert [(each.task_id, each.starting_round) for each in update.tasks] == [
            (4000, 0),
            (4001, 16),
        ]
        assert update.horizon == 16


def test_the_horizon_never_decreases_and_is_in_unchanged_replies(
    scene: Scenario,
) -> None:
    join(scene, "a", "b")
    heartbeat(scene, "a", horizon=20)
    assert heartbeat(scene, "b", horizon=10).horizon == 20
    version = heartbeat(scene, "b").version
    reply = scene.ask(messages.ClientHeartbeat(client_id="b", known_version=version, horizon=32))
    assert (reply.unchanged, reply.horizon) == (True, 32)
    assert [each.horizon for each in scene.events if isinstance(each, HorizonAdvanced)] == [
        20,
        32,
    ]
    scene.check()


def test_of_a_lost_task_only_rounds_received_everywhere_count(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    for client_id in "ab":
        update = heartbeat(scene, client_id)
        assert update.reports_needed == (4000,)
        assert update.complete_rounds == (), "the number of rounds is not known yet"
    report_rounds(scene, "a", 4000, rounds=7)
    assert heartbeat(scene, "b").complete_rounds == ()
    scene.restart()
    report_rounds(scene, "b", 4000, rounds=5)
    for client_id in "ab":
        assert heartbeat(scene, client_id).complete_rounds == ((4000, 5),)
    scene.check()


def test_before_all_consumers_joined_no_round_of_a_lost_task_counts(scene: Scenario) -> None:
    join(scene, "a", number=2)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    report_rounds(scene, "a", 4000, rounds=3)
    assert heartbeat(scene, "a").complete_rounds == ((4000, 0),)
    scene.check()


def finish_for_one_consumer(scene: Scenario) -> None:
    """Finish the task; consumer a reads to the end and closes, then the worker is lost."""
    scene.finish("v", 4000)
    assert heartbeat(scene, "a").finished
    scene.close("a")
    scene.lose("v")


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_all_rounds_of_a_finished_task_count_after_their_reader_left(
    scene: Scenario, mode: int
) -> None:
    ends = scene.register(num_splits=1, cardinality=10)
    join(scene, "a", "b", mode=mode, dataset_id=ends)
    if mode == DYNAMIC:
        scene.split(4000)
    finish_for_one_consumer(scene)
    assert heartbeat(scene, "b").reports_needed == (4000,)
    report_rounds(scene, "b", 4000, rounds=5, splits=int(mode == DYNAMIC))
    update = heartbeat(scene, "b")
    assert (update.complete_rounds, update.missing_consumer, update.finished) == (
        ((4000, 5),),
        "",
        True,
    )
    scene.check()


def test_all_rounds_of_a_finished_task_count_without_a_report_of_a_leaver(
    scene: Scenario,
) -> None:
    ends = scene.register(num_splits=10, cardinality=10)
    join(scene, "a", "b", dataset_id=ends)
    scene.finish("v", 4000)
    scene.lose("v")
    scene.close("a")
    report_rounds(scene, "b", 4000, rounds=5)
    update = heartbeat(scene, "b")
    assert (update.complete_rounds, update.missing_consumer, update.finished) == (
        ((4000, 5),),
        "",
        True,
    )
    scene.check()


def test_a_consumer_that_left_without_its_report_is_named(
    scene: Scenario,
) -> None:
    scene.add_worker("w")
    ends = scene.register(num_splits=10, cardinality=10)
    join(scene, "a", "b", dataset_id=ends)
    scene.finish("w", 4001)
    scene.lose("v")
    assert scene.state.iterations[2000].finished, "the other copy ended"
    scene.close("a")
    report_rounds(scene, "b", 4000, rounds=5)
    assert heartbeat(scene, "b").missing_consumer == "consumer 0 (client a) has left"
    scene.check()


def test_a_finished_task_without_splits_has_zero_rounds_after_its_worker_left(
    scene: Scenario,
) -> None:
    ends = scene.register(num_splits=1, cardinality=10)
    join(scene, "a", "b", mode=DYNAMIC, dataset_id=ends)
    scene.split(4000)
    scene.add_worker("w")
    assert scene.get_split(4001, num_done=0).wait is False
    scene.finish("w", 4001)
    # Worker w stopped before it knew that the task finished, and rejected the requests of a and b.
    scene.unregister_worker("w")
    for client_id in "ab":
        assert heartbeat(scene, client_id).reports_needed == (4001,)
        report_rounds(scene, client_id, 4001, rounds=0)
    assert heartbeat(scene, "a").complete_rounds == ((4001, 0),)
    scene.check()


def test_splits_of_rounds_that_did_not_arrive_everywhere_are_reassigned(scene: Scenario) -> None:
    join(scene, "a", "b", mode=DYNAMIC)
    scene.split(4000, max_splits=10)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    report_rounds(scene, "a", 4000, rounds=4, splits=8)
    report_rounds(scene, "b", 4000, rounds=3, splits=6)
    assert heartbeat(scene, "a").complete_rounds == ((4000, 3),)
    (iteration,) = scene.state.iterations.values()
    task = scene.state.tasks[4000]
    assert task.assigned.delivered == ((0, 6),)
    assert iteration.pool.returned[0][0] == 6
    scene.check()


def test_no_task_waits_for_splits_of_a_draining_worker(scene: Scenario) -> None:
    # The task would lack a part of its round, and the draining worker delivers none before the
    # round is complete.
    join(scene, "a", "b", mode=DYNAMIC)
    scene.add_worker("w")
    scene.split(4000, max_splits=10)
    scene.drain_worker("v")
    while (reply := scene.get_split(4001)).stop:
        pass
    assert not reply.wait
    scene.finish("w", 4001)
    # Returned splits are assigned to another task.
    scene.return_splits("v", 4000, (3, 5))
    scene.finish("v", 4000)
    scene.unregister_worker("v")
    (other,) = [each for each in heartbeat(scene, "a").tasks if each.worker_id == "w"]
    assert scene.get_split(other.task_id).stop
    scene.check()


def test_no_loss_is_final_before_a_silent_consumer_reports(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    report_rounds(scene, "a", 4000, rounds=7)
    for _ in range(29):
        scene.tick(1.0)
        assert heartbeat(scene, "a").complete_rounds == ()
    assert heartbeat(scene, "a").awaited_clients == ("b",)


def test_after_a_consumer_left_it_is_named_and_round_counts_are_unknown(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.close("b")
    assert heartbeat(scene, "a").missing_consumer == "consumer 1 (client b) has left"
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    report_rounds(scene, "a", 4000, rounds=7)
    assert heartbeat(scene, "a").complete_rounds == ()
    scene.check()


def test_a_consumer_index_is_read_by_one_client(scene: Scenario) -> None:
    join(scene, "a", "b")
    terms = {"job_name": "job", "processing_mode": OFF, "num_consumers": 2}
    with pytest.raises(
        FailedPreconditionError, match=r"consumer 1 of 2 of job \w+, epoch 0, is client b"
    ):
        scene.open("c", consumer_index=1, **terms)
    scene.open("b", consumer_index=1, **terms)
    scene.close("b")
    with pytest.raises(FailedPreconditionError, match="was client b, which has left"):
        scene.open("c", consumer_index=1, **terms)
    scene.check()


def test_after_all_consumers_left_the_epoch_is_discarded_and_restarts(scene: Scenario) -> None:
    join(scene, "a", "b")
    heartbeat(scene, "a", horizon=16)
    scene.close("a")
    scene.close("b")
    assert not scene.state.iterations
    reply = join(scene, "c", "d")
    assert [task.starting_round for task in reply.tasks] == [0]
    scene.check()


def test_expiry_of_all_consumers_discards_the_epoch(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.tick(32.0)
    assert not scene.state.clients
    assert not scene.state.iterations
    scene.check()


def test_a_consumer_index_may_be_reused_for_a_finished_epoch(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.finish("v", 4000)
    assert scene.open(
        "c", job_name="job", processing_mode=OFF, num_consumers=2, consumer_index=1
    ).finished
    scene.check()


@pytest.mark.parametrize("cardinality", [-1, -2, 10])
def test_a_restarted_worker_starts_another_copy(cardinality: int) -> None:
    scene = Scenario()
    scene.register(num_splits=None, cardinality=cardinality)
    scene.add_worker("u")
    scene.add_worker("v", "v:1")
    join(scene, "a", "b")
    heartbeat(scene, "a", horizon=16)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    scene.add_worker("v2", "v:1")
    update = heartbeat(scene, "a")
    assert [(each.worker_id, each.starting_round) for each in update.tasks] == [
        ("u", 0),
        ("v2", 16),
    ]
    scene.check()


def test_coordinated_reads_require_off_or_dynamic_and_a_job_name(scene: Scenario) -> None:
    with pytest.raises(FailedPreconditionError, match="OFF and DYNAMIC for num_consumers=2"):
        join(scene, "a", mode=int(ShardingPolicy.DATA))
    with pytest.raises(FailedPreconditionError, match="`job_name` must be set"):
        scene.open("a", processing_mode=OFF, num_consumers=2, consumer_index=0)


def test_a_task_definition_has_the_number_of_consumers(scene: Scenario) -> None:
    scene.put_plan(b"pickled")
    digest = hashlib.sha256(b"pickled").digest()
    join(scene, "a", "b", remainder="pad", cost_fn_id="digest", cost_fn_digest=digest)
    reply = scene.ask(messages.GetTask(worker_id="v", task_id=4000))
    assert (reply.delivery_policy, reply.num_consumers) == ("rounds", 2)
    assert (reply.remainder, reply.cost_fn_digest) == ("pad", digest)


def test_a_cost_function_must_be_uploaded_before_the_job_starts(scene: Scenario) -> None:
    digest = hashlib.sha256(b"pickled").digest()
    stored = len(scene.events)
    assert join(scene, "a", cost_fn_id="digest", cost_fn_digest=digest).cost_fn_needed
    assert len(scene.events) == stored
    scene.put_plan(b"pickled")
    assert not join(scene, "a", cost_fn_id="digest", cost_fn_digest=digest).cost_fn_needed
    # A cost function with the same id and other bytes is not sent at all.
    other = scene.open(
        "b",
        job_name="job",
        processing_mode=OFF,
        num_consumers=2,
        consumer_index=1,
        cost_fn_id="digest",
        cost_fn_digest=bytes(32),
    )
    assert not other.cost_fn_needed
    assert scene.state.clients.keys() == {"a", "b"}


def test_a_cost_function_is_stored_as_long_as_its_job(scene: Scenario) -> None:
    digest = hashlib.sha256(b"pickled").digest()
    scene.put_plan(b"pickled")
    join(scene, "a", cost_fn_id="digest", cost_fn_digest=digest)
    for _ in range(10):
        scene.worker_heartbeat("v")
        scene.heartbeat("a")
        scene.tick(5.0)
    assert digest in scene.state.plan_sizes
    (job,) = scene.state.jobs.values()
    assert job.options.cost_fn_digest == digest
    with pytest.raises(InvalidEventError, match="a dataset or a job uses the plan"):
        apply(scene.replay(), events.PlanForgotten(digest=digest))


def test_a_worker_that_dies_repeatedly_gets_no_further_copy() -> None:
    scene = Scenario()
    scene.register(num_splits=None, cardinality=-1)
    scene.add_worker("u")
    scene.add_worker("v0", "v:1")
    join(scene, "a", "b")
    for number in range(1, 9):
        scene.add_worker(f"v{number}", "v:1")
    copies = [task.worker_id for task in scene.state.tasks.values() if task.address == "v:1"]
    assert copies == ["v0", "v1", "v2", "v3", "v4", "v5"]
    scene.check()
