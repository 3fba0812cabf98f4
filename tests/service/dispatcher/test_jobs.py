"""Jobs, iterations and tasks."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from headrace.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import jobs
from headrace.service.modes.coordinated_reads.events import coordinated_iteration
from tests.service.dispatcher.scenario import DYNAMIC, OFF, PLAN, Scenario, opening


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """One dataset, two workers."""
    scene.register()
    scene.add_worker("v")
    scene.add_worker("w")
    return scene


def test_opening_creates_one_task_per_worker(scene: Scenario) -> None:
    opened = scene.open("c")
    assert opened.iteration_id == 2000
    assert [(task.task_id, task.worker_address) for task in opened.tasks] == [
        (4000, "v:1"),
        (4001, "w:1"),
    ]
    assert not opened.finished


def test_late_worker_gets_a_task_of_every_unfinished_iteration(
    scene: Scenario,
) -> None:
    scene.open("c")
    scene.open("d")
    scene.finish("v", 4000)
    scene.finish("w", 4001)
    scene.add_worker("late")
    assert len(scene.heartbeat("c").tasks) == 0
    assert [task.worker_id for task in scene.heartbeat("d").tasks] == ["v", "w", "late"]


def test_iteration_without_workers_waits_for_one() -> None:
    scene = Scenario()
    scene.register()
    opened = scene.open("c")
    assert (opened.tasks, opened.finished) == ((), False)
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    assert len(scene.heartbeat("c").tasks) == 1
    scene.check()


def test_only_clients_of_a_named_job_share_an_iteration(scene: Scenario) -> None:
    shared = {scene.open(each, job_name="job").iteration_id for each in ("a", "b")}
    unnamed = {scene.open(each).iteration_id for each in ("c", "d")}
    assert len(shared) == 1
    assert len(unnamed) == 2
    assert not shared & unnamed


def test_each_epoch_of_a_job_is_its_own_iteration(scene: Scenario) -> None:
    epochs = [(0,), (1, 0), (1, 1)]
    ids = [scene.open("a", job_name="job", epoch=each).iteration_id for each in epochs]
    assert len(set(ids)) == 3
    assert scene.open("b", job_name="job", epoch=(1, 0)).iteration_id == ids[1]
    with pytest.raises(FailedPreconditionError, match="read with 1 `repeat` steps"):
        scene.open("c", job_name="job", epoch=(1,))


def test_first_client_sets_the_seed_of_an_iteration(scene: Scenario) -> None:
    assert scene.open("a", job_name="job", processing_mode=DYNAMIC, seed=5).seed == 5
    assert scene.open("b", job_name="job", processing_mode=DYNAMIC, seed=6).seed == 5
    assert scene.open("c", job_name="job", processing_mode=DYNAMIC, epoch=(1,), seed=6).seed == 6
    scene.restart()
    assert scene.open("d", job_name="job", processing_mode=DYNAMIC, seed=7).seed == 5
    lookup = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(lookup).seed == 5


def test_opening_another_epoch_closes_the_previous_one(scene: Scenario) -> None:
    for number in range(3):
        opened = scene.open("c", epoch=(number,))
    assert scene.state.clients == {"c": opened.iteration_id}
    assert len(scene.state.iterations) == len(scene.state.jobs) == 1


def test_equal_datasets_share_a_named_job(scene: Scenario) -> None:
    other = scene.register()
    first, second = scene.open("a", "1000", job_name="j"), scene.open("b", other, job_name="j")
    assert first.iteration_id == second.iteration_id


def test_job_name_with_other_options_is_rejected(scene: Scenario) -> None:
    scene.open("a", job_name="job")
    other = scene.register(fingerprint="other")
    message = (
        "Tried to create job with name job, but found an existing job with different parameters"
    )
    with pytest.raises(AlreadyExistsError, match=message) as caught:
        scene.open("b", other, job_name="job", processing_mode=DYNAMIC, target_workers="ANY")
    assert "Existing processing mode: <OFF>; got <DYNAMIC>" in str(caught.value)
    assert "Existing target workers: <AUTO>; got <ANY>" in str(caught.value)
    assert "Existing dataset: <1000>; got <1001>" in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            (("from_tensor_slices (a.py:3)", "0"), ("map (a.py:9)", "2")),
            r"step 2, map \(a.py:9\), has",
        ),
        (
            (("from_tensor_slices (a.py:3)", "1"), ("map (a.py:4)", "1")),
            "step 1, from_tensor_sl.*seed",
        ),
        ((("from_tensor_slices (a.py:3)", "0"),), r"step 2 is none, but was map \(a.py:4\)"),
        (
            (("range (a.py:3)", "0"), ("map (a.py:4)", "1")),
            "step 1 is range .*, but was from_tensor",
        ),
        ((("from_tensor_slices (b.py:8)", "0"), ("map (b.py:9)", "1")), "module-level names"),
    ],
)
def test_error_about_another_dataset_names_the_different_step(
    scene: Scenario, steps: tuple[tuple[str, str], ...], message: str
) -> None:
    known = (("from_tensor_slices (a.py:3)", "0"), ("map (a.py:4)", "1"))
    one = scene.register(fingerprint="one", steps=known)
    scene.open("a", one, job_name="job")
    scene.restart()
    other = scene.register(fingerprint="other", steps=steps)
    with pytest.raises(AlreadyExistsError, match=message):
        scene.open("b", other, job_name="job")


@pytest.mark.catalogue("FT15")
def test_job_options_survive_a_restart(scene: Scenario) -> None:
    scene.open("a", job_name="test")
    scene.restart()
    message = (
        "Tried to create job with name test, but found an existing job with different parameters"
    )
    with pytest.raises(AlreadyExistsError, match=message):
        scene.open("b", job_name="test", processing_mode=DYNAMIC)


@pytest.mark.parametrize(
    ("option_name", "value"),
    [
        ("num_consumers", 3),
        ("cross_trainer_cache", True),
        ("visitation", "at_most_once"),
        ("ordered", True),
        ("remainder", "pad"),
        ("target_workers", "LOCAL"),
        ("cost_fn_id", "digest"),
    ],
)
def test_clients_of_a_job_must_request_equal_options(
    scene: Scenario, option_name: str, value: object
) -> None:
    options = {
        option_name: value,
        **({"consumer_index": 0} if option_name == "num_consumers" else {}),
    }
    scene.open("a", job_name="job", **options)
    scene.restart()
    if option_name == "num_consumers":
        options["consumer_index"] = 1
    scene.open("b", job_name="job", **options)
    scene.check()
    with pytest.raises(AlreadyExistsError, match="existing job") as caught:
        scene.open("c", job_name="job")
    option = {
        "target_workers": "target workers: <LOCAL>",
        "cross_trainer_cache": "cross-trainer cache: <enabled>",
        "cost_fn_id": "cost_fn: <digest>",
    }.get(option_name, f"{option_name}: <{value}>")
    assert f"Existing {option}; got <" in str(caught.value)


def test_consumer_indices_are_recorded_while_clients_read(scene: Scenario) -> None:
    options: dict[str, Any] = {"job_name": "job", "num_consumers": 2}
    for index, client_id in enumerate("ab"):
        scene.open(client_id, consumer_index=index, **options)
    scene.restart()
    (iteration,) = scene.state.iterations.values()
    assert coordinated_iteration(iteration.mode_state).consumer_by_client == {"a": 0, "b": 1}
    scene.close("a")
    scene.check()
    assert coordinated_iteration(iteration.mode_state).consumer_by_client == {"b": 1}
    for index in (None, 2, -1):
        with pytest.raises(
            ValueError, match=r"num_consumers=2 requires consumer_index in \[0, 2\)"
        ):
            scene.open("c", consumer_index=index, **options)


def test_dynamic_sharding_requires_splits(scene: Scenario) -> None:
    dataset_id = scene.register(num_splits=None)
    with pytest.raises(FailedPreconditionError, match="it has no splits, because"):
        scene.open("c", dataset_id, processing_mode=DYNAMIC)
    assert scene.open("c", dataset_id, processing_mode=OFF).tasks


def test_unsupported_mode_is_rejected_by_name(scene: Scenario) -> None:
    with pytest.raises(FailedPreconditionError, match="FILE_OR_DATA and HINT; got 17"):
        scene.open("c", processing_mode=17)


def test_iteration_finishes_with_its_last_task(scene: Scenario) -> None:
    scene.open("c", job_name="job")
    scene.finish("v", 4000)
    assert not scene.heartbeat("c").finished
    scene.finish("w", 4001)
    update = scene.heartbeat("c")
    assert (update.tasks, update.finished) == ((), True)
    late = scene.open("d", job_name="job")
    assert (late.tasks, late.finished) == ((), True)
    assert scene.open("e", job_name="job", epoch=(1,)).tasks


def test_late_client_learns_who_read_the_finished_epoch() -> None:
    scene = Scenario(gc_timeout=1.0)
    scene.register()
    scene.add_worker("w")
    scene.open("trainer-1", job_name="job")
    assert scene.open("trainer-2", job_name="job").finished_by == ""
    scene.finish("w", 4000)
    late = scene.open("late", job_name="job")
    assert (late.finished, late.job_name) == (True, "job")
    assert late.finished_by == "client trainer-1 and another"
    for client in ("late", "trainer-1", "trainer-2"):
        scene.close(client)
    scene.tick(2.0)
    assert not scene.state.iterations
    scene.restart()
    later = scene.open("later", job_name="job")
    assert (later.finished, later.finished_by) == (True, "client trainer-1 and another")
    scene.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"client_id": ""}, "client_id must not be empty"),
        ({"job_name": ""}, "job_name must be None or a non-empty string"),
        ({"seed": 1 << 63}, "64-bit integer; got 9223372036854775808"),
        ({"epoch": (-1,)}, "epoch must be at most 32 unsigned 64-bit integers"),
        ({"epoch": (0,) * 100}, "got 100: "),
        ({"epoch": (1 << 64,)}, "got 1: "),
    ],
)
def test_invalid_opening_is_rejected(scene: Scenario, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scene.ask(opening(**{"client_id": "c", **fields}))


def test_heartbeat_reply_is_unchanged_for_a_known_version(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC)

    def beat(known: int) -> messages.ClientHeartbeatReply:
        reply: messages.ClientHeartbeatReply = scene.ask(
            messages.ClientHeartbeat(client_id="c", known_version=known)
        )
        return reply

    first = beat(-1)
    assert (len(first.tasks), first.unchanged) == (2, False)
    again = beat(first.version)
    assert (again.tasks, again.unchanged, again.finished) == ((), True, False)
    scene.split(4000, max_splits=5)
    assert beat(first.version).unchanged
    scene.add_worker("x")
    joined = beat(first.version)
    assert (len(joined.tasks), joined.unchanged) == (3, False)
    scene.lose("v")
    lost = beat(joined.version)
    assert (len(lost.tasks), lost.reports_needed) == (2, (4000,))
    scene.report_delivery("c", 4000, partially_delivered=((0, 5),))
    assert beat(lost.version).reports_needed == ()
    scene.finish("w", 4001)
    scene.finish("x", 4002)
    ended = beat(lost.version)
    assert ended.finished
    assert beat(ended.version).unchanged
    assert beat(-1) == ended


def test_unknown_task_is_rejected(scene: Scenario) -> None:
    scene.open("c")
    with pytest.raises(NotFoundError, match="task 9 not found"):
        scene.finish("v", 9)
    with pytest.raises(NotFoundError, match="belongs to worker v"):
        scene.finish("w", 4000)


def test_task_tokens_are_unique_and_survive_a_restart(scene: Scenario) -> None:
    tasks = scene.open("c", job_name="job").tasks
    assert len({task.task_token for task in tasks}) == 2
    scene.restart()
    assert scene.heartbeat("c").tasks == tasks
    lookup = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(lookup).task_token == tasks[0].task_token


def test_worker_receives_the_definition_of_its_task(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, epoch=(3, 1), seed=9)
    assert scene.ask(messages.GetTask(worker_id="w", task_id=4001)) == messages.TaskDefinition(
        task_id=4001,
        iteration_id=2000,
        dataset_id="1000",
        digest=hashlib.sha256(PLAN).digest(),
        epoch=(3, 1),
        seed=9,
        task_token=scene.state.task_token(4001),
        assigns_splits=True,
    )
    with pytest.raises(NotFoundError, match="worker v cannot run task 4001"):
        scene.ask(messages.GetTask(worker_id="v", task_id=4001))
    scene.split(4001)
    scene.finish("w", 4001)
    with pytest.raises(NotFoundError, match="finished on worker w"):
        scene.ask(messages.GetTask(worker_id="w", task_id=4001))


def test_splits_share_a_seed_and_copies_have_different_seeds(
    scene: Scenario,
) -> None:
    seeds = {}
    for mode in (OFF, DYNAMIC):
        tasks = scene.open("c", processing_mode=mode, seed=9).tasks
        seeds[mode] = [
            scene.ask(messages.GetTask(worker_id=each.worker_id, task_id=each.task_id)).seed
            for each in tasks
        ]
        scene.close("c")
    assert seeds[DYNAMIC] == [9, 9]
    # These numbers must never change: reading a copy again must produce the same order.
    assert seeds[OFF] == [2533964853742113, 1660505076377979]


def test_unnamed_job_is_removed_with_its_client(scene: Scenario) -> None:
    scene.open("c")
    scene.close("c")
    state = scene.state
    assert not any([state.jobs, state.iterations, state.tasks, state.clients, state.jobs_by_owner])
    assert scene.worker_heartbeat("v", 4000) == (4000,)
    scene.close("c")
    with pytest.raises(NotFoundError, match="Unknown iteration client id c"):
        scene.heartbeat("c")


def test_status_lists_workers_and_jobs(scene: Scenario) -> None:
    scene.open("c", job_name="job")
    scene.now += 2
    status = scene.ask(messages.GetStatus())
    assert [(each.worker_id, each.seconds_since_heartbeat) for each in status.workers] == [
        ("v", 2.0),
        ("w", 2.0),
    ]
    (job,) = status.jobs
    assert (job.name, job.num_epochs, job.running_tasks, job.clients) == ("job", 1, 2, 1)
    assert (status.datasets, status.dispatcher_id) == (1, "run")
    scene.drain_worker("v")
    assert [each.draining for each in scene.ask(messages.GetStatus()).workers] == [True, False]


def test_every_job_option_is_compared() -> None:
    # If cost functions have equal ids, the plan of the first one is used.
    assert {*jobs._COMPARED_OPTIONS, "cost_fn_digest"} == {*messages.JobOptions.__struct_fields__}


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_epoch_may_be_any_unsigned_64_bit_number(scene: Scenario, number: int) -> None:
    assert scene.open("c", epoch=(0, number)).tasks
