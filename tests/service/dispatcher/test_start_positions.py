"""Iterations that start at a saved position, groups of jobs, and common positions."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.element_sets import END_ORDINAL
from tests.service.dispatcher.scenario import EXACTLY, Scenario

POSITION: dict[str, Any] = {
    "first_split": 3,
    "delivered": ((5, 7), (9, 10)),
    "partial_splits": ((8, ((0, 2), (4, END_ORDINAL))),),
    "start_position_id": "position",
    "seed": 7,
}


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """A dataset with twelve splits, and a worker."""
    scene.register(12, has_element_ids=True)
    scene.add_worker("v")
    return scene


def assign_all(scene: Scenario, task_id: int = 4000) -> list[tuple[int, int, Any]]:
    """Assign all remaining splits to a task; return them with the ordinals of partial splits."""
    assigned: list[tuple[int, int, Any]] = []
    task = scene.state.tasks[task_id]
    while True:
        reply = scene.ask(
            messages.GetSplit(
                worker_id=task.worker_id,
                task_id=task_id,
                task_token=task.task_token,
                assignment_number=task.assigned.num_assignments,
                max_splits=100,
                num_done=task.assigned.num_assigned,
            )
        )
        scene.check()
        if reply.start == reply.stop:
            return assigned
        assigned.append((reply.start, reply.stop, reply.ordinals))


def test_only_undelivered_elements_are_assigned(scene: Scenario) -> None:
    opened = scene.open("c", **EXACTLY, **POSITION)
    assert opened.seed == 7
    scene.check()
    scene.restart()
    splits = assign_all(scene)
    complete = {
        split for start, stop, ordinals in splits if not ordinals for split in range(start, stop)
    }
    assert complete == {3, 4, 7, 10, 11}
    assert [each for each in splits if each[2]] == [(8, 9, ((2, 4),))]


def test_clients_of_a_job_must_start_at_the_same_position(scene: Scenario) -> None:
    scene.open("c", **EXACTLY, **POSITION)
    scene.open("d", **EXACTLY, **POSITION)
    with pytest.raises(FailedPreconditionError, match="another saved state"):
        scene.open("e", **EXACTLY, **{**POSITION, "start_position_id": "other position"})
    with pytest.raises(FailedPreconditionError, match="starts from the beginning"):
        scene.open("e", **EXACTLY)
    scene.open("f", **{**EXACTLY, "job_name": "fresh"})
    with pytest.raises(FailedPreconditionError, match="read from the beginning"):
        scene.open("e", **{**EXACTLY, **POSITION, "job_name": "fresh"})
    scene.check()


@pytest.mark.parametrize(
    "position",
    [
        {"delivered": ((2, 4),)},
        {"delivered": ((5, 7), (6, 8))},
        {"delivered": ((7, 8), (5, 6))},
        {"partial_splits": ((5, ((0, 2),)),)},
        {"partial_splits": ((8, ()),)},
        {"partial_splits": ((8, ((0, END_ORDINAL),)),)},
        {"partial_splits": ((8, ((3, 2),)),)},
    ],
)
def test_invalid_start_position_is_rejected(scene: Scenario, position: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`delivered` and `partial_splits`"):
        scene.open("c", **EXACTLY, **{**POSITION, **position})


def test_start_position_of_another_dataset_or_without_ids_is_rejected(scene: Scenario) -> None:
    with pytest.raises(
        FailedPreconditionError, match=r"delivered splits up to 20, but the dataset has only 12"
    ):
        scene.open("c", **EXACTLY, **{**POSITION, "delivered": ((15, 20),), "partial_splits": ()})
    with pytest.raises(FailedPreconditionError, match="exactly_once"):
        scene.open("c", **{**EXACTLY, **POSITION, "visitation": "at_most_once"})


def test_sole_client_resumes_from_a_position_after_a_departed_one(scene: Scenario) -> None:
    alone = {
        **EXACTLY,
        "ordered": True,
        "partition_mode": "ordered",
        "num_splits": 12,
        "exclusive_reason": "order",
    }
    scene.open("c", **alone)
    assign_all(scene)
    with pytest.raises(FailedPreconditionError, match="is read from the beginning"):
        scene.open("d", **alone, first_split=5, start_position_id="position")
    scene.close("c")
    opened = scene.open("d", **alone, first_split=5, start_position_id="position")
    scene.check()
    assert scene.state.iterations[opened.iteration_id].pool.next_split == 5


def test_shared_job_does_not_restart_from_a_position(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    assign_all(scene)
    scene.close("c")
    with pytest.raises(FailedPreconditionError, match="read from the beginning"):
        scene.open("d", **EXACTLY, **POSITION)


def test_finished_iteration_is_reported_for_any_start_position(
    scene: Scenario,
) -> None:
    scene.open("c", **EXACTLY, **POSITION)
    assign_all(scene)
    scene.finish("v", 4000, num_done=scene.state.tasks[4000].assigned.num_assigned)
    assert scene.heartbeat("c").finished
    assert scene.open("d", **EXACTLY).finished
    assert scene.open(
        "e", **EXACTLY, **{**POSITION, "start_position_id": "other position"}
    ).finished


def test_ordered_iteration_of_a_departed_client_cannot_be_joined(
    scene: Scenario,
) -> None:
    alone = {
        **EXACTLY,
        "ordered": True,
        "partition_mode": "ordered",
        "num_splits": 12,
        "exclusive_reason": "order",
    }
    scene.open("c", **alone)
    scene.split(4000, max_splits=2)
    scene.close("c")
    with pytest.raises(
        FailedPreconditionError, match="read in order, was started by client c, which has departed"
    ):
        scene.open("d", **alone)


# --- groups -------------------------------------------------------------------------------------


def consumer(scene: Scenario, name: str, **fields: Any) -> Any:
    options = {**EXACTLY, "job_name": name, "group": "train", "group_options": "two", **fields}
    return scene.open(f"client of {name} {scene.now}", **options)


def test_jobs_of_a_group_share_the_seed_of_each_epoch(scene: Scenario) -> None:
    first = consumer(scene, "one", seed=1, epoch=(0,))
    second = consumer(scene, "two", seed=2, epoch=(0,))
    later = consumer(scene, "one", seed=3, epoch=(1,))
    resumed = consumer(
        scene, "three", seed=4, epoch=(1,), first_split=3, start_position_id="position"
    )
    assert first.seed == second.seed != later.seed
    assert resumed.seed == 4
    scene.restart()
    assert consumer(scene, "four", seed=5, epoch=(0,)).seed == first.seed
    scene.check()


def test_seed_of_a_group_never_changes_between_versions(scene: Scenario) -> None:
    # Saved states of consumers contain it, and other consumers may open the epoch later.
    assert consumer(scene, "one", epoch=(0,)).seed == 2_306_747_959_675_709


def test_jobs_of_a_group_must_have_equal_options(scene: Scenario) -> None:
    consumer(scene, "one")
    with pytest.raises(AlreadyExistsError, match="<two>; got <three>"):
        consumer(scene, "two", group_options="three")


def test_error_about_another_dataset_in_a_group_names_the_step(scene: Scenario) -> None:
    consumer(scene, "one", group_options="two, dataset 1\nrange 7\nmap f 8")
    with pytest.raises(
        AlreadyExistsError, match=r"dataset 2>: the datasets differ: step 2 is batch"
    ):
        consumer(scene, "two", group_options="two, dataset 2\nrange 7\nbatch 9")
    with pytest.raises(AlreadyExistsError, match=r"step 2, map f, has different arguments"):
        consumer(scene, "two", group_options="two, dataset 3\nrange 7\nmap f 9")
    with pytest.raises(AlreadyExistsError, match=r"step 2 is none"):
        consumer(scene, "two", group_options="two, dataset 4\nrange 7")


def test_group_name_cannot_be_a_job_name(scene: Scenario) -> None:
    consumer(scene, "one")
    with pytest.raises(AlreadyExistsError, match=r"'train' .* set `num_consumers`"):
        scene.open("without index", **{**EXACTLY, "job_name": "train"})
    scene.open("other", **EXACTLY)
    with pytest.raises(AlreadyExistsError, match="'job' is read without `num_consumers`"):
        consumer(scene, "two", group="job")
    scene.check()


def test_consumer_has_one_client_at_a_time(scene: Scenario) -> None:
    ordered = {"ordered": True, "exclusive_reason": "reading in order"}
    scene.open("c", **{**EXACTLY, **ordered, "group": "train", "job_name": "one"})
    options = {**EXACTLY, **ordered, "group": "train", "job_name": "one"}
    with pytest.raises(FailedPreconditionError, match=r"read by client c: .* `consumer_index`"):
        scene.open("d", **options)
    scene.close("c")
    with pytest.raises(
        FailedPreconditionError, match=r"client c, which has departed: .*`set_state`"
    ):
        scene.open("d", **options)
    scene.open("d", **options, first_split=3, start_position_id="position")
    scene.check()


# --- common positions -----------------------------------------------------------------------------


def contribute(
    scene: Scenario, client_id: str, token: str, delivered: Any, partial_splits: Any = ()
) -> Any:
    request = messages.ContributeCheckpoint(
        client_id=client_id,
        token=token,
        delivered=tuple(delivered),
        partial_splits=tuple(partial_splits),
    )
    return scene.ask(request)


def test_common_position_is_returned_once_all_clients_contributed(scene: Scenario) -> None:
    for client_id in "cde":
        scene.open(client_id, **EXACTLY)
    assert contribute(scene, "c", "1", [(0, 2)], [(5, ((0, 3),))]).missing_clients == ("d", "e")
    assert contribute(scene, "d", "2", [(4, 5)], [(6, ((1, 2),))]).missing_clients == ("e",)
    result = contribute(scene, "e", "3", [(2, 3)], [(5, ((3, END_ORDINAL),)), (6, ((0, 1),))])
    assert result.missing_clients == ()
    assert result.delivered == ((0, 3), (4, 6))
    assert result.partial_splits == ((6, ((0, 2),)),)
    assert contribute(scene, "c", "1", []) == result
    assert contribute(scene, "d", "2", []) == result
    # The next checkpoint needs new contributions of all clients.
    assert contribute(scene, "d", "4", [(0, 1)]).missing_clients == ("c", "e")


def test_contribution_of_a_silent_client_expires(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.open("d", **EXACTLY)
    contribute(scene, "c", "1", [(0, 2)])
    scene.now += 6.0
    assert contribute(scene, "d", "2", [(2, 3)]).missing_clients == ("c",)
    assert contribute(scene, "c", "3", [(3, 4)]).delivered == ((2, 4),)


def test_no_common_position_after_a_client_left(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.open("d", **EXACTLY)
    scene.close("d")
    with pytest.raises(
        FailedPreconditionError, match=r"no common state of epoch 0: 1 of 2 clients have left"
    ):
        contribute(scene, "c", "1", [])
    with pytest.raises(NotFoundError):
        contribute(scene, "d", "1", [])


@pytest.mark.parametrize("delivered", [[(40, 50)], [(5, 3)], [(4, 6), (5, 8)]])
def test_invalid_contribution_is_rejected(scene: Scenario, delivered: Any) -> None:
    scene.open("c", **EXACTLY)
    with pytest.raises((ValueError, FailedPreconditionError), match="delivered"):
        contribute(scene, "c", "1", delivered)


def test_result_reaches_each_of_many_clients(scene: Scenario) -> None:
    scene.checks_rejections = False
    clients = [f"c{number}" for number in range(1100)]
    for client_id in clients:
        scene.open(client_id, **EXACTLY)
    for client_id in clients:
        last = contribute(scene, client_id, f"of {client_id}", [(0, 2)])
    assert last.delivered == ((0, 2),)
    assert all(contribute(scene, each, f"of {each}", []).delivered == ((0, 2),) for each in clients)
