"""Garbage collection of datasets, plans, epochs and lost tasks."""

from __future__ import annotations

import hashlib

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import events
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.state import MAX_FINISHED_EPOCHS, MAX_REMEMBERED_LOSSES
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario, registration

DAY = 86400.0


@pytest.fixture
def small() -> Scenario:
    """Return a dispatcher that removes unused datasets after a minute."""
    return Scenario(dataset_timeout=60.0, client_timeout=30.0, gc_timeout=5.0)


def test_unused_anonymous_dataset_is_removed_with_plan_and_token(
    small: Scenario,
) -> None:
    dataset_id = small.register(anonymous=True)
    small.tick(59.0)
    assert dataset_id in small.state.datasets
    small.tick(3.0)
    assert small.events[-1] == events.DatasetForgotten(dataset_id)
    assert (small.state.datasets, small.state.datasets_by_token, small.state.plan_sizes) == (
        {},
        {},
        {},
    )
    with pytest.raises(NotFoundError, match="apply `distribute` again"):
        small.open("c", dataset_id)
    assert small.register(anonymous=True) == "1001", "ids are not reused"
    small.check()


def test_registered_dataset_is_never_removed(small: Scenario) -> None:
    dataset_id = small.register()
    small.tick(200.0)
    assert dataset_id in small.state.datasets
    # This includes a dataset that was anonymous before.
    other = small.register(anonymous=True, fingerprint="other")
    small.register(dataset_id=other, fingerprint="other")
    assert small.events[-1] == events.DatasetPinned(other)
    small.tick(200.0)
    assert other in small.state.datasets
    small.check()


def test_dataset_is_kept_while_a_job_reads_it_and_for_the_timeout(small: Scenario) -> None:
    dataset_id = small.register(anonymous=True)
    small.open("c", dataset_id)
    for _ in range(20):
        small.tick(10.0)
        small.heartbeat("c")
    small.close("c")
    small.tick(59.0)
    assert dataset_id in small.state.datasets
    small.tick(3.0)
    assert dataset_id not in small.state.datasets
    small.check()


def test_plan_used_by_another_dataset_is_kept(small: Scenario) -> None:
    small.register()
    other = small.register(anonymous=True)
    small.tick(65.0)
    assert other not in small.state.datasets
    assert len(small.state.plan_sizes) == 1
    small.check()


def test_plan_without_dataset_is_removed(small: Scenario) -> None:
    small.put_plan()
    small.tick(29.0)
    assert small.state.plan_sizes
    small.tick(2.0)
    assert not small.state.plan_sizes
    small.check()


def limited() -> Scenario:
    """Return a dispatcher with room for 300 bytes of plans."""
    return Scenario(dataset_timeout=1e6, client_timeout=30.0, gc_timeout=5.0, max_plan_bytes=300)


def put_other_plan(scene: Scenario, number: int, size: int = 100) -> bytes:
    plan = bytes([number]) * size
    digest = hashlib.sha256(plan).digest()
    scene.ask(messages.PutPlan(digest=digest, offset=0, total_bytes=size, chunk=plan))
    return digest


def register_other(scene: Scenario, number: int, *, anonymous: bool = True) -> str:
    digest = put_other_plan(scene, number)
    request = registration(
        100, token=f"other {number}", digest=digest, fingerprint=digest.hex(), anonymous=anonymous
    )
    return str(scene.ask(request).dataset_id)


def test_longest_unused_datasets_make_room_for_a_plan() -> None:
    scene = limited()
    first, second, third = (register_other(scene, number) for number in range(3))
    scene.tick(20.0)
    scene.ask(messages.GetDataset(dataset_id=first))
    scene.tick(15.0)
    put_other_plan(scene, 3)
    assert [event for event in scene.events if isinstance(event, events.DatasetForgotten)] == [
        events.DatasetForgotten(second)
    ]
    assert sum(scene.state.plan_sizes.values()) == 300
    assert {first, third} == {*scene.state.datasets}
    scene.check()


def test_plan_is_rejected_if_plans_in_use_leave_no_room() -> None:
    scene = limited()
    register_other(scene, 0, anonymous=False)
    in_use = register_other(scene, 1)
    scene.open("c", in_use)
    unused = register_other(scene, 2)
    with pytest.raises(FailedPreconditionError, match="no room for a plan of 100 bytes"):
        put_other_plan(scene, 3)
    for _ in range(4):
        scene.tick(10.0)
        scene.heartbeat("c")
    with pytest.raises(FailedPreconditionError, match=r"max_plan_bytes=300 by 50 bytes"):
        put_other_plan(scene, 3, size=150)
    assert unused in scene.state.datasets
    put_other_plan(scene, 3)
    assert unused not in scene.state.datasets
    scene.check()


def test_plan_of_a_cost_function_in_use_is_not_removed() -> None:
    scene = Scenario(dataset_timeout=1e6, client_timeout=5.0, max_plan_bytes=10)
    scene.register()
    cost = hashlib.sha256(b"cost").digest()
    scene.put_plan(b"cost")
    scene.ask(registration(token="idle", digest=cost, fingerprint="cost", anonymous=True))
    scene.open("c", job_name="job", num_consumers=1, consumer_index=0, cost_fn_digest=cost)
    for _ in range(30):
        scene.heartbeat("c")
        scene.tick(1.0)
    with pytest.raises(FailedPreconditionError, match="max_plan_bytes"):
        scene.put_plan(b"larger")
    scene.check()


def test_incomplete_plans_count_with_their_full_size() -> None:
    scene = limited()
    part = messages.PutPlan(digest=b"a" * 32, offset=0, total_bytes=250, chunk=b"x" * 10)
    scene.ask(part)
    scene.ask(part)
    with pytest.raises(FailedPreconditionError, match="max_plan_bytes=300 by 50 bytes"):
        put_other_plan(scene, 1)
    scene.tick(31.0)
    put_other_plan(scene, 1)


def test_plans_are_limited_to_4_gib_by_default() -> None:
    assert DispatcherLimits.from_config(DispatcherConfig()).max_plan_bytes == 4 << 30
    assert DispatcherLimits.from_config(DispatcherConfig(max_plan_bytes=5)).max_plan_bytes == 5


def test_pause_of_the_dispatcher_does_not_count_as_idle_time(
    small: Scenario,
) -> None:
    dataset_id = small.register(anonymous=True)
    small.tick(1.0)
    small.pause(1e6)
    small.tick(1.0)
    assert dataset_id in small.state.datasets


def test_datasets_are_kept_for_a_week_or_forever_without_gc() -> None:
    assert DispatcherLimits.from_config(DispatcherConfig()).dataset_timeout == 7 * DAY
    assert (
        DispatcherLimits.from_config(DispatcherConfig(job_gc_timeout_ms=-1)).dataset_timeout is None
    )


def test_finished_epochs_are_remembered_in_bounded_memory(small: Scenario) -> None:
    small.register(5)
    small.add_worker("v")
    num_epochs = MAX_FINISHED_EPOCHS + 50
    for number in range(num_epochs):
        small.open("c", epoch=(3, number), processing_mode=OFF, job_name="job")
        task = small.state.next_task_id - 1
        small.finish("v", task)
        small.close("c")
        small.tick(5.5)
        small.worker_heartbeat("v")
    job = small.state.jobs[5000]
    assert job.iterations == {}
    assert len(job.finished_epochs) == MAX_FINISHED_EPOCHS
    assert job.older_finished_epochs == {(3,): ((0, 50),)}
    assert job.num_epochs == num_epochs
    small.restart()
    for number in (0, 49, 50, num_epochs - 1):
        opened = small.open("d", epoch=(3, number), processing_mode=OFF, job_name="job")
        assert opened.finished, number
        assert opened.finished_by
    small.worker_heartbeat("v")
    assert not small.open("d", epoch=(3, num_epochs), processing_mode=OFF, job_name="job").finished
    small.check()


def join(scene: Scenario, worker_id: str) -> None:
    """Register a worker without comparing states, which takes long with many workers."""
    request = messages.RegisterWorker(worker_id=worker_id, address="host:1")
    scene.events += scene.dispatcher.handle(request, scene.now)[1]


def test_very_many_lost_tasks_are_remembered_as_lost_splits(
    scene: Scenario,
) -> None:
    scene.register(-1)
    scene.open("c", processing_mode=DYNAMIC)
    num_losses = MAX_REMEMBERED_LOSSES + 300
    for number in range(num_losses):
        join(scene, f"w{number}")
        task = scene.state.next_task_id - 1
        for request in (
            scene.split_request(task, max_splits=1),
            messages.UnregisterWorker(worker_id=f"w{number}"),
            messages.ReportDelivery(
                client_id="c", task_id=task, delivered=(), partially_delivered=((0, 1),)
            ),
        ):
            scene.events += scene.dispatcher.handle(request, scene.now)[1]
        scene.tick()
    iteration = scene.state.iterations[2000]
    assert len(iteration.tasks) <= 300
    assert len(iteration.missing_splits) <= MAX_REMEMBERED_LOSSES
    num_remembered = sum(len(scene.state.tasks[each].missing_splits) for each in iteration.tasks)
    num_missing = sum(
        stop - start for each in iteration.missing_splits for start, stop in each.splits
    )
    assert num_remembered + num_missing + iteration.num_older_missing == num_losses


def test_endless_copies_do_not_remember_each_departed_worker(
    scene: Scenario,
) -> None:
    scene.register(-1)
    scene.open("c", processing_mode=OFF)
    scene.add_worker("stays")
    for number in range(600):
        join(scene, f"w{number}")
        request = messages.UnregisterWorker(worker_id=f"w{number}")
        scene.events += scene.dispatcher.handle(request, scene.now)[1]
        scene.tick()
    iteration = scene.state.iterations[2000]
    assert len(iteration.tasks) <= 300
    assert [task.worker_id for task in scene.state.running_tasks(iteration)] == ["stays"]
