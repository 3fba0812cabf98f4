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


def test_opening_gives_each_worker_one_task(scene: Scenario) -> None:
    opened = scene.open("c")
    assert opened.iteration_id == 2000
    assert [(task.task_id, task.worker_address) for task in opened.tasks] == [
        (4000, "v:1"),
        (4001, "w:1"),
    ]
    assert not opened.finished


def test_a_worker_that_joins_late_gets_a_task_of_every_unfinished_iteration(
    scene: Scenario,
) -> None:
    scene.open("c")
    scene.open("d")
    scene.finish("v", 4000)
    scene.finish("w", 4001)
    scene.add_worker("late")
    assert len(scene.heartbeat("c").tasks) == 0
    assert [task.worker_id for task in scene.heartbeat("d").tasks] == ["v", "w", "late"]


def test_an_iteration_without_workers_waits_for_one() -> None:
    scene = Scenario()
    scene.register()
    opened = scene.open("c")
    assert (opened.tasks, opened.finished) == ((), False)
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    assert len(scene.heartbeat("c").tasks) == 1
    scene.check()


def test_clients_of_a_name_share_an_iteration_and_others_do_not(scene: Scenario) -> None:
    shared = {scene.open(each, job_name="job").iteration_id for each in ("a", "b")}
    own = {scene.open(each).iteration_id for each in ("c", "d")}
    assert len(shared) == 1
    assert len(own) == 2
    assert not shared & own


def test_passes_of_a_job_are_iterations_of_their_own(scene: Scenario) -> None:
    passes = [(0,), (1, 0), (1, 1)]
    ids = [scene.open("a", job_name="job", epoch=each).iteration_id for each in passes]
    assert len(set(ids)) == 3
    assert scene.open("b", job_name="job", epoch=(1, 0)).iteration_id == ids[1]
    with pytest.raises(FailedPreconditionError, match="read with 1 `repeat` steps"):
        scene.open("c", job_name="job", epoch=(1,))


def test_the_seed_of_an_iteration_is_its_first_openers(scene: Scenario) -> None:
    assert scene.open("a", job_name="job", processing_mode=DYNAMIC, seed=5).seed == 5
    assert scene.open("b", job_name="job", processing_mode=DYNAMIC, seed=6).seed == 5
    assert scene.open("c", job_name="job", processing_mode=DYNAMIC, epoch=(1,), seed=6).seed == 6
    scene.restart()
    assert scene.open("d", job_name="job", processing_mode=DYNAMIC, seed=7).seed == 5
    lookup = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(lookup).seed == 5


def test_a_client_that_opens_another_pass_has_left_the_one_before(scene: Scenario) -> None:
    for number in range(3):
        opened = scene.open("c", epoch=(number,))
    assert scene.state.clients == {"c": opened.iteration_id}
    assert len(scene.state.iterations) == len(scene.state.jobs) == 1


def test_equal_datasets_share_a_named_job(scene: Scenario) -> None:
    other = scene.register()
    first, second = scene.open("a", "1000", job_name="j"), scene.open("b", other, job_name="j")
    assert first.iteration_id == second.iteration_id


def test_a_name_that_belongs_to_another_job_is_refused(scene: Scenario) -> None:
    scene.open("a", job_name="job")
    other = scene.register(fingerprint="other")
    said = "Tried to create job with name job, but found an existing job with different parameters"
    with pytest.raises(AlreadyExistsError, match=said) as caught:
        scene.open("b", other, job_name="job", processing_mode=DYNAMIC, target_workers="ANY")
    assert "Existing processing mode: <OFF>; got <DYNAMIC>" in str(caught.value)
    assert "Existing target workers: <AUTO>; got <ANY>" in str(caught.value)
    assert "Existing dataset: <1000>; got <1001>" in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            (("from_tensor_slices (a.py:3)", "0"), ("map (a.py:9)", "2")),
            r"step 2, map \(a.py:9\), has",
        ),
        (
            (("from_tensor_slices (a.py:3)", "1"), ("map (a.py:4)", "1")),
            "step 1, from_tensor_sl.*seed",
        ),
        ((("from_tensor_slices (a.py:3)", "0"),), r"step 2 is none, and was map \(a.py:4\)"),
        (
            (("range (a.py:3)", "0"), ("map (a.py:4)", "1")),
            "step 1 is range .*, and was from_tensor",
        ),
        ((("from_tensor_slices (b.py:8)", "0"), ("map (b.py:9)", "1")), "look up in their modules"),
    ],
)
def test_of_a_job_with_another_dataset_the_step_that_differs_is_named(
    scene: Scenario, steps: tuple[tuple[str, str], ...], said: str
) -> None:
    known = (("from_tensor_slices (a.py:3)", "0"), ("map (a.py:4)", "1"))
    one = scene.register(fingerprint="one", steps=known)
    scene.open("a", one, job_name="job")
    scene.restart()
    other = scene.register(fingerprint="other", steps=steps)
    with pytest.raises(AlreadyExistsError, match=said):
        scene.open("b", other, job_name="job")


@pytest.mark.catalogue("FT15")
def test_a_job_means_the_same_after_a_restart(scene: Scenario) -> None:
    scene.open("a", job_name="test")
    scene.restart()
    said = "Tried to create job with name test, but found an existing job with different parameters"
    with pytest.raises(AlreadyExistsError, match=said):
        scene.open("b", job_name="test", processing_mode=DYNAMIC)


@pytest.mark.parametrize(
    ("term", "value"),
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
def test_whoever_joins_a_job_must_ask_for_the_same(
    scene: Scenario, term: str, value: object
) -> None:
    asked = {term: value, **({"consumer_index": 0} if term == "num_consumers" else {})}
    scene.open("a", job_name="job", **asked)
    scene.restart()
    if term == "num_consumers":
        asked["consumer_index"] = 1
    scene.open("b", job_name="job", **asked)
    scene.check()
    with pytest.raises(AlreadyExistsError, match="existing job") as caught:
        scene.open("c", job_name="job")
    said = {
        "target_workers": "target workers: <LOCAL>",
        "cross_trainer_cache": "cross-trainer cache: <enabled>",
        "cost_fn_id": "cost_fn: <digest>",
    }.get(term, f"{term}: <{value}>")
    assert f"Existing {said}; got <" in str(caught.value)


def test_consumers_are_known_while_they_read(scene: Scenario) -> None:
    terms: dict[str, Any] = {"job_name": "job", "num_consumers": 2}
    for index, client_id in enumerate("ab"):
        scene.open(client_id, consumer_index=index, **terms)
    scene.restart()
    (iteration,) = scene.state.iterations.values()
    assert coordinated_iteration(iteration.mode_state).consumer_by_client == {"a": 0, "b": 1}
    scene.close("a")
    scene.check()
    assert coordinated_iteration(iteration.mode_state).consumer_by_client == {"b": 1}
    for index in (None, 2, -1):
        with pytest.raises(ValueError, match="must be one of the num_consumers=2"):
            scene.open("c", consumer_index=index, **terms)


def test_dynamic_needs_positions_that_can_be_dealt(scene: Scenario) -> None:
    dataset_id = scene.register(positions=None)
    with pytest.raises(FailedPreconditionError, match="no positions that could be dealt"):
        scene.open("c", dataset_id, processing_mode=DYNAMIC)
    assert scene.open("c", dataset_id, processing_mode=OFF).tasks


def test_modes_that_are_not_offered_are_refused_by_name(scene: Scenario) -> None:
    with pytest.raises(FailedPreconditionError, match="FILE_OR_DATA and HINT; got 17"):
        scene.open("c", processing_mode=17)


def test_an_iteration_is_finished_when_all_its_tasks_are(scene: Scenario) -> None:
    scene.open("c", job_name="job")
    scene.finish("v", 4000)
    assert not scene.heartbeat("c").finished
    scene.finish("w", 4001)
    update = scene.heartbeat("c")
    assert (update.tasks, update.finished) == ((), True)
    late = scene.open("d", job_name="job")
    assert (late.tasks, late.finished) == ((), True)
    assert scene.open("e", job_name="job", epoch=(1,)).tasks


def test_who_comes_too_late_hears_by_whom_the_pass_was_used_up() -> None:
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
    ("fields", "said"),
    [
        ({"client_id": ""}, "client_id=''"),
        ({"job_name": ""}, "job_name=''"),
        ({"seed": 1 << 63}, "seed=9223372036854775808"),
        ({"epoch": (-1,)}, "pass_number="),
        ({"epoch": (0,) * 100}, "pass_number="),
        ({"epoch": (1 << 64,)}, "pass_number="),
    ],
)
def test_an_opening_that_makes_no_sense_is_refused(
    scene: Scenario, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        scene.ask(opening(**{"client_id": "c", **fields}))


def test_a_client_that_knows_everything_hears_nothing_twice(scene: Scenario) -> None:
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
    scene.settle("c", 4000, touched=((0, 5),))
    assert beat(lost.version).reports_needed == ()
    scene.finish("w", 4001)
    scene.finish("x", 4002)
    ended = beat(lost.version)
    assert ended.finished
    assert beat(ended.version).unchanged
    assert beat(-1) == ended


def test_an_unknown_task_is_refused(scene: Scenario) -> None:
    scene.open("c")
    with pytest.raises(NotFoundError, match="task 9 is not known"):
        scene.finish("v", 9)
    with pytest.raises(NotFoundError, match="belongs to worker v"):
        scene.finish("w", 4000)


def test_the_ticket_of_a_task_is_its_own_and_stays(scene: Scenario) -> None:
    tasks = scene.open("c", job_name="job").tasks
    assert len({task.task_token for task in tasks}) == 2
    scene.restart()
    assert scene.heartbeat("c").tasks == tasks
    lookup = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(lookup).task_token == tasks[0].task_token


def test_a_worker_learns_what_its_task_is_about(scene: Scenario) -> None:
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
    with pytest.raises(NotFoundError, match="not for worker v"):
        scene.ask(messages.GetTask(worker_id="v", task_id=4001))
    scene.split(4001)
    scene.finish("w", 4001)
    with pytest.raises(NotFoundError, match="finished on worker w"):
        scene.ask(messages.GetTask(worker_id="w", task_id=4001))


def test_units_mean_the_same_on_every_worker_and_copies_are_shuffled_differently(
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
    # These numbers are for ever: a copy that is read again has the order that it had.
    assert seeds[OFF] == [2533964853742113, 1660505076377979]


def test_a_clients_own_job_goes_with_it(scene: Scenario) -> None:
    scene.open("c")
    scene.close("c")
    state = scene.state
    assert not any([state.jobs, state.iterations, state.tasks, state.clients, state.jobs_by_owner])
    assert scene.beat("v", 4000) == (4000,)
    scene.close("c")
    with pytest.raises(NotFoundError, match="Unknown iteration client id c"):
        scene.heartbeat("c")


def test_status_tells_who_is_there(scene: Scenario) -> None:
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
    scene.leaving("v")
    assert [each.draining for each in scene.ask(messages.GetStatus()).workers] == [True, False]


def test_all_who_join_a_job_must_ask_for_every_term_alike() -> None:
    # Of cost functions that say the same, the first one's plan is taken.
    assert {*jobs._OPTIONS, "cost_fn_digest"} == {*messages.JobOptions.__struct_fields__}


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_a_pass_may_have_any_number_of_64_bits(scene: Scenario, number: int) -> None:
    assert scene.open("c", epoch=(0, number)).tasks
