"""A dispatcher that runs for long stays small: what nobody can ask for any more is forgotten."""

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
    """Return a dispatcher that forgets after a minute."""
    return Scenario(dataset_timeout=60.0, client_timeout=30.0, gc_timeout=5.0)


def test_an_anonymous_dataset_that_nobody_uses_is_forgotten_with_its_plan_and_token(
    small: Scenario,
) -> None:
    dataset_id = small.register(anonymous=True)
    small.tick(59.0)
    assert dataset_id in small.state.datasets
    small.tick(3.0)
    assert small.facts[-1] == events.DatasetForgotten(dataset_id)
    assert (small.state.datasets, small.state.datasets_by_token, small.state.plan_sizes) == (
        {},
        {},
        {},
    )
    with pytest.raises(NotFoundError, match="apply `distribute` again"):
        small.open("c", dataset_id)
    assert small.register(anonymous=True) == "1001", "an id is never used twice"
    small.check()


def test_a_dataset_that_somebody_was_given_the_id_of_is_never_forgotten(small: Scenario) -> None:
    dataset_id = small.register()
    small.tick(200.0)
    assert dataset_id in small.state.datasets
    # Also one that was anonymous before.
    other = small.register(anonymous=True, fingerprint="other")
    small.register(dataset_id=other, fingerprint="other")
    assert small.facts[-1] == events.DatasetPinned(other)
    small.tick(200.0)
    assert other in small.state.datasets
    small.check()


def test_a_dataset_is_kept_while_a_job_reads_it_and_a_while_after(small: Scenario) -> None:
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


def test_a_plan_that_another_dataset_has_is_kept(small: Scenario) -> None:
    small.register()
    other = small.register(anonymous=True)
    small.tick(65.0)
    assert other not in small.state.datasets
    assert len(small.state.plan_sizes) == 1
    small.check()


def test_a_plan_that_never_got_a_dataset_is_forgotten(small: Scenario) -> None:
    small.put_plan()
    small.tick(29.0)
    assert small.state.plan_sizes
    small.tick(2.0)
    assert not small.state.plan_sizes
    small.check()


def crowded() -> Scenario:
    """Return a dispatcher that keeps 300 bytes of plans."""
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


def test_the_longest_unused_datasets_are_forgotten_for_a_plan_that_has_no_room() -> None:
    scene = crowded()
    first, second, third = (register_other(scene, number) for number in range(3))
    scene.tick(20.0)
    scene.ask(messages.GetDataset(dataset_id=first))
    scene.tick(15.0)
    put_other_plan(scene, 3)
    assert [fact for fact in scene.facts if isinstance(fact, events.DatasetForgotten)] == [
        events.DatasetForgotten(second)
    ]
    assert sum(scene.state.plan_sizes.values()) == 300
    assert {first, third} == {*scene.state.datasets}
    scene.check()


def test_a_plan_is_refused_where_those_in_use_leave_it_no_room() -> None:
    scene = crowded()
    register_other(scene, 0, anonymous=False)
    read = register_other(scene, 1)
    scene.open("c", read)
    unused = register_other(scene, 2)
    with pytest.raises(FailedPreconditionError, match="no room for a plan of 100 bytes"):
        put_other_plan(scene, 3)
    for _ in range(4):
        scene.tick(10.0)
        scene.heartbeat("c")
    with pytest.raises(FailedPreconditionError, match=r"this is 50 too much.*max_plan_bytes"):
        put_other_plan(scene, 3, size=150)
    assert unused in scene.state.datasets
    put_other_plan(scene, 3)
    assert unused not in scene.state.datasets
    scene.check()


def test_a_plan_that_a_job_needs_as_its_cost_function_makes_no_room() -> None:
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


def test_plans_that_arrive_have_their_room() -> None:
    scene = crowded()
    part = messages.PutPlan(digest=b"a" * 32, offset=0, total_bytes=250, chunk=b"x" * 10)
    scene.ask(part)
    scene.ask(part)
    with pytest.raises(FailedPreconditionError, match="this is 50 too much"):
        put_other_plan(scene, 1)
    scene.tick(31.0)
    put_other_plan(scene, 1)


def test_plans_of_four_gibibytes_are_kept_unless_another_bound_is_given() -> None:
    assert DispatcherLimits.from_config(DispatcherConfig()).max_plan_bytes == 4 << 30
    assert DispatcherLimits.from_config(DispatcherConfig(max_plan_bytes=5)).max_plan_bytes == 5


def test_a_pause_of_the_dispatcher_is_no_time_in_which_a_dataset_was_not_used(
    small: Scenario,
) -> None:
    dataset_id = small.register(anonymous=True)
    small.tick(1.0)
    small.pause(1e6)
    small.tick(1.0)
    assert dataset_id in small.state.datasets


def test_datasets_are_kept_for_a_week_and_for_ever_where_nothing_is_collected() -> None:
    assert DispatcherLimits.from_config(DispatcherConfig()).dataset_timeout == 7 * DAY
    assert (
        DispatcherLimits.from_config(DispatcherConfig(job_gc_timeout_ms=-1)).dataset_timeout is None
    )


def test_passes_that_were_read_are_remembered_in_little_memory(small: Scenario) -> None:
    small.register(5)
    small.add_worker("v")
    passes = MAX_FINISHED_EPOCHS + 50
    for number in range(passes):
        small.open("c", epoch=(3, number), processing_mode=OFF, job_name="job")
        task = small.state.next_task_id - 1
        small.finish("v", task)
        small.close("c")
        small.tick(5.5)
        small.beat("v")
    job = small.state.jobs[5000]
    assert job.iterations == {}
    assert len(job.finished_epochs) == MAX_FINISHED_EPOCHS
    assert job.older_finished_epochs == {(3,): ((0, 50),)}
    assert job.num_epochs == passes
    small.restart()
    for number in (0, 49, 50, passes - 1):
        opened = small.open("d", epoch=(3, number), processing_mode=OFF, job_name="job")
        assert opened.finished, number
        assert opened.finished_by
    small.beat("v")
    assert not small.open("d", epoch=(3, passes), processing_mode=OFF, job_name="job").finished
    small.check()


def join(scene: Scenario, worker_id: str) -> None:
    """Let a worker join, without the comparison of states around it, which costs with many."""
    request = messages.RegisterWorker(worker_id=worker_id, address="host:1")
    scene.facts += scene.dispatcher.handle(request, scene.now)[1]


def test_an_iteration_that_lost_very_many_workers_remembers_what_was_lost_and_not_each_task(
    scene: Scenario,
) -> None:
    scene.register(-1)
    scene.open("c", processing_mode=DYNAMIC)
    deaths = MAX_REMEMBERED_LOSSES + 300
    for number in range(deaths):
        join(scene, f"w{number}")
        task = scene.state.next_task_id - 1
        for request in (
            scene.split_request(task, max_splits=1),
            messages.UnregisterWorker(worker_id=f"w{number}"),
            messages.ReportDelivery(
                client_id="c", task_id=task, delivered=(), partially_delivered=((0, 1),)
            ),
        ):
            scene.facts += scene.dispatcher.handle(request, scene.now)[1]
        scene.tick()
    iteration = scene.state.iterations[2000]
    assert len(iteration.tasks) <= 300
    assert len(iteration.missing_splits) <= MAX_REMEMBERED_LOSSES
    remembered = sum(len(scene.state.tasks[each].missing_splits) for each in iteration.tasks)
    told = sum(stop - start for each in iteration.missing_splits for start, stop in each.splits)
    assert remembered + told + iteration.num_older_missing == deaths


def test_a_copy_that_goes_on_for_ever_does_not_remember_each_worker_that_was_there(
    scene: Scenario,
) -> None:
    scene.register(-1)
    scene.open("c", processing_mode=OFF)
    scene.add_worker("stays")
    for number in range(600):
        join(scene, f"w{number}")
        leaving = messages.UnregisterWorker(worker_id=f"w{number}")
        scene.facts += scene.dispatcher.handle(leaving, scene.now)[1]
        scene.tick()
    iteration = scene.state.iterations[2000]
    assert len(iteration.tasks) <= 300
    assert [task.worker_id for task in scene.state.running_tasks(iteration)] == ["stays"]
