"""What all consumers must know alike is decided by the dispatcher, and kept."""

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


def beat(scene: Scenario, client_id: str, horizon: int = 0) -> Any:
    return scene.ask(messages.ClientHeartbeat(client_id=client_id, horizon=horizon))


def settle(scene: Scenario, client_id: str, task_id: int, rounds: int, units: int = 0) -> None:
    received = ((0, units),) if units else ()
    scene.ask(
        messages.ReportDelivery(
            client_id=client_id, task_id=task_id, delivered=received, rounds=rounds
        )
    )


def test_a_worker_that_joins_begins_where_no_consumer_may_be_yet(scene: Scenario) -> None:
    reply = join(scene, "a", "b")
    assert [(task.task_id, task.starting_round) for task in reply.tasks] == [(4000, 0)]
    assert beat(scene, "a", horizon=16).horizon == 16
    scene.add_worker("w")
    scene.check()
    scene.restart()
    for client_id in "ab":
        update = beat(scene, client_id)
        assert [(each.task_id, each.starting_round) for each in update.tasks] == [
            (4000, 0),
            (4001, 16),
        ]
        assert update.horizon == 16


def test_the_horizon_never_goes_back_and_is_said_also_where_nothing_else_is_new(
    scene: Scenario,
) -> None:
    join(scene, "a", "b")
    beat(scene, "a", horizon=20)
    assert beat(scene, "b", horizon=10).horizon == 20
    version = beat(scene, "b").version
    reply = scene.ask(messages.ClientHeartbeat(client_id="b", known_version=version, horizon=32))
    assert (reply.unchanged, reply.horizon) == (True, 32)
    assert [each.horizon for each in scene.events if isinstance(each, HorizonAdvanced)] == [
        20,
        32,
    ]
    scene.check()


def test_of_a_lost_task_the_rounds_that_arrived_everywhere_count(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    for client_id in "ab":
        update = beat(scene, client_id)
        assert update.reports_needed == (4000,)
        assert update.complete_rounds == (), "it is not known yet"
    settle(scene, "a", 4000, rounds=7)
    assert beat(scene, "b").complete_rounds == ()
    scene.restart()
    settle(scene, "b", 4000, rounds=5)
    for client_id in "ab":
        assert beat(scene, client_id).complete_rounds == ((4000, 5),)
    scene.check()


def test_before_all_have_joined_no_round_of_a_lost_task_arrived_everywhere(scene: Scenario) -> None:
    join(scene, "a", number=2)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    settle(scene, "a", 4000, rounds=3)
    assert beat(scene, "a").complete_rounds == ((4000, 0),)
    scene.check()


def others_end_first(scene: Scenario) -> None:
    """Have consumer a read to the end, and b not yet, when the worker is lost."""
    scene.finish("v", 4000)
    assert beat(scene, "a").finished
    scene.close("a")
    scene.lose("v")


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_of_a_finished_task_all_rounds_count_though_who_had_them_has_left(
    scene: Scenario, mode: int
) -> None:
    ends = scene.register(num_splits=1, cardinality=10)
    join(scene, "a", "b", mode=mode, dataset_id=ends)
    if mode == DYNAMIC:
        scene.split(4000)
    others_end_first(scene)
    assert beat(scene, "b").reports_needed == (4000,)
    settle(scene, "b", 4000, rounds=5, units=int(mode == DYNAMIC))
    update = beat(scene, "b")
    assert (update.complete_rounds, update.missing_consumer, update.finished) == (
        ((4000, 5),),
        "",
        True,
    )
    scene.check()


def test_of_a_finished_task_all_rounds_count_though_another_leaves_and_does_not_say_so(
    scene: Scenario,
) -> None:
    ends = scene.register(num_splits=10, cardinality=10)
    join(scene, "a", "b", dataset_id=ends)
    scene.finish("v", 4000)
    scene.lose("v")
    scene.close("a")
    settle(scene, "b", 4000, rounds=5)
    update = beat(scene, "b")
    assert (update.complete_rounds, update.missing_consumer, update.finished) == (
        ((4000, 5),),
        "",
        True,
    )
    scene.check()


def test_a_consumer_that_left_and_did_not_say_what_it_had_of_the_last_copy_is_named(
    scene: Scenario,
) -> None:
    scene.add_worker("w")
    ends = scene.register(num_splits=10, cardinality=10)
    join(scene, "a", "b", dataset_id=ends)
    scene.finish("w", 4001)
    scene.lose("v")
    assert scene.state.iterations[2000].finished, "the other copy ended"
    scene.close("a")
    settle(scene, "b", 4000, rounds=5)
    assert beat(scene, "b").missing_consumer == "consumer 0 (client a) has left"
    scene.check()


def test_of_a_finished_task_without_units_it_is_said_that_it_gave_none_when_its_worker_left(
    scene: Scenario,
) -> None:
    ends = scene.register(num_splits=1, cardinality=10)
    join(scene, "a", "b", mode=DYNAMIC, dataset_id=ends)
    scene.split(4000)
    scene.add_worker("w")
    assert scene.get_split(4001, num_done=0).wait is False
    scene.finish("w", 4001)
    # Before it heard that, worker w stopped, and refused what a and b asked it.
    scene.unregister_worker("w")
    for client_id in "ab":
        assert beat(scene, client_id).reports_needed == (4001,)
        settle(scene, client_id, 4001, rounds=0)
    assert beat(scene, "a").complete_rounds == ((4001, 0),)
    scene.check()


def test_units_of_rounds_that_did_not_arrive_everywhere_are_dealt_again(scene: Scenario) -> None:
    join(scene, "a", "b", mode=DYNAMIC)
    scene.split(4000, max_splits=10)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    settle(scene, "a", 4000, rounds=4, units=8)
    settle(scene, "b", 4000, rounds=3, units=6)
    assert beat(scene, "a").complete_rounds == ((4000, 3),)
    (iteration,) = scene.state.iterations.values()
    task = scene.state.tasks[4000]
    assert task.assigned.delivered == ((0, 6),)
    assert iteration.pool.returned[0][0] == 6
    scene.check()


def test_no_task_waits_for_what_a_leaving_worker_holds(scene: Scenario) -> None:
    # It would lack a part of its round, and the leaving worker gives none before that is whole.
    join(scene, "a", "b", mode=DYNAMIC)
    scene.add_worker("w")
    scene.split(4000, max_splits=10)
    scene.drain_worker("v")
    while (reply := scene.get_split(4001)).stop:
        pass
    assert not reply.wait
    scene.finish("w", 4001)
    # What comes back is for another task.
    scene.return_splits("v", 4000, (3, 5))
    scene.finish("v", 4000)
    scene.unregister_worker("v")
    (other,) = [each for each in beat(scene, "a").tasks if each.worker_id == "w"]
    assert scene.get_split(other.task_id).stop
    scene.check()


def test_nobody_settles_for_a_consumer_that_is_silent(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    settle(scene, "a", 4000, rounds=7)
    for _ in range(29):
        scene.tick(1.0)
        assert beat(scene, "a").complete_rounds == ()
    assert beat(scene, "a").awaited_clients == ("b",)


def test_a_consumer_that_left_is_named_and_no_length_is_said_any_more(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.close("b")
    assert beat(scene, "a").missing_consumer == "consumer 1 (client b) has left"
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    settle(scene, "a", 4000, rounds=7)
    assert beat(scene, "a").complete_rounds == ()
    scene.check()


def test_an_index_is_read_by_one_client(scene: Scenario) -> None:
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


def test_when_all_have_left_the_pass_is_given_up_and_begins_again(scene: Scenario) -> None:
    join(scene, "a", "b")
    beat(scene, "a", horizon=16)
    scene.close("a")
    scene.close("b")
    assert not scene.state.iterations
    reply = join(scene, "c", "d")
    assert [task.starting_round for task in reply.tasks] == [0]
    scene.check()


def test_consumers_that_all_are_silent_for_too_long_give_the_pass_up(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.tick(32.0)
    assert not scene.state.clients
    assert not scene.state.iterations
    scene.check()


def test_the_same_index_may_read_a_finished_pass(scene: Scenario) -> None:
    join(scene, "a", "b")
    scene.finish("v", 4000)
    assert scene.open(
        "c", job_name="job", processing_mode=OFF, num_consumers=2, consumer_index=1
    ).finished
    scene.check()


@pytest.mark.parametrize("cardinality", [-1, -2, 10])
def test_a_worker_that_comes_again_begins_another_copy(cardinality: int) -> None:
    scene = Scenario()
    scene.register(num_splits=None, cardinality=cardinality)
    scene.add_worker("u")
    scene.add_worker("v", "v:1")
    join(scene, "a", "b")
    beat(scene, "a", horizon=16)
    scene.ask(messages.UnregisterWorker(worker_id="v"))
    scene.add_worker("v2", "v:1")
    update = beat(scene, "a")
    assert [(each.worker_id, each.starting_round) for each in update.tasks] == [
        ("u", 0),
        ("v2", 16),
    ]
    scene.check()


def test_rounds_are_of_copies_or_of_units_that_are_dealt(scene: Scenario) -> None:
    with pytest.raises(FailedPreconditionError, match="OFF and DYNAMIC for num_consumers=2"):
        join(scene, "a", mode=int(ShardingPolicy.DATA))
    with pytest.raises(FailedPreconditionError, match="`job_name` must be set"):
        scene.open("a", processing_mode=OFF, num_consumers=2, consumer_index=0)


def test_what_a_task_is_read_by_is_in_its_definition(scene: Scenario) -> None:
    scene.put_plan(b"pickled")
    digest = hashlib.sha256(b"pickled").digest()
    join(scene, "a", "b", remainder="pad", cost_fn_id="digest", cost_fn_digest=digest)
    reply = scene.ask(messages.GetTask(worker_id="v", task_id=4000))
    assert (reply.delivery_policy, reply.num_consumers) == ("rounds", 2)
    assert (reply.remainder, reply.cost_fn_digest) == ("pad", digest)


def test_a_cost_function_is_wanted_before_a_job_begins(scene: Scenario) -> None:
    digest = hashlib.sha256(b"pickled").digest()
    kept = len(scene.events)
    assert join(scene, "a", cost_fn_id="digest", cost_fn_digest=digest).cost_fn_needed
    assert len(scene.events) == kept
    scene.put_plan(b"pickled")
    assert not join(scene, "a", cost_fn_id="digest", cost_fn_digest=digest).cost_fn_needed
    # One that says the same and is other bytes is not sent at all.
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


def test_a_cost_function_is_kept_as_long_as_its_job(scene: Scenario) -> None:
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


def test_a_worker_that_dies_of_its_copy_again_and_again_gets_no_other() -> None:
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
