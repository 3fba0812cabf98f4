"""Iterations that begin at a saved place: what came before is dealt to nobody."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.element_sets import END_ORDINAL
from tests.service.dispatcher.scenario import EXACTLY, Scenario

PLACE: dict[str, Any] = {
    "first_split": 3,
    "delivered": ((5, 7), (9, 10)),
    "partial_splits": ((8, ((0, 2), (4, END_ORDINAL))),),
    "start_position_id": "place",
    "seed": 7,
}


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Twelve units, and a worker."""
    scene.register(12, has_element_ids=True)
    scene.add_worker("v")
    return scene


def dealt(scene: Scenario, task_id: int = 4000) -> list[tuple[int, int, Any]]:
    """Deal all that is left to a task; return the units, and which ordinals of those in part."""
    found: list[tuple[int, int, Any]] = []
    task = scene.state.tasks[task_id]
    while True:
        granted = scene.ask(
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
        if granted.start == granted.stop:
            return found
        found.append((granted.start, granted.stop, granted.ordinals))


def test_only_what_was_not_delivered_is_dealt(scene: Scenario) -> None:
    opened = scene.open("c", **EXACTLY, **PLACE)
    assert opened.seed == 7
    scene.check()
    scene.restart()
    units = dealt(scene)
    whole = {unit for start, stop, rows in units if not rows for unit in range(start, stop)}
    assert whole == {3, 4, 7, 10, 11}
    assert [each for each in units if each[2]] == [(8, 9, ((2, 4),))]


def test_all_clients_of_a_job_begin_at_the_same_place(scene: Scenario) -> None:
    scene.open("c", **EXACTLY, **PLACE)
    scene.open("d", **EXACTLY, **PLACE)
    with pytest.raises(FailedPreconditionError, match="another saved state"):
        scene.open("e", **EXACTLY, **{**PLACE, "start_position_id": "elsewhere"})
    with pytest.raises(FailedPreconditionError, match="go on from the start"):
        scene.open("e", **EXACTLY)
    scene.open("f", **{**EXACTLY, "job_name": "fresh"})
    with pytest.raises(FailedPreconditionError, match="read from the start"):
        scene.open("e", **{**EXACTLY, **PLACE, "job_name": "fresh"})
    scene.check()


@pytest.mark.parametrize(
    "place",
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
def test_a_place_that_makes_no_sense_is_refused(scene: Scenario, place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`delivered` and `parts`"):
        scene.open("c", **EXACTLY, **{**PLACE, **place})


def test_a_place_of_another_dataset_or_without_origins_is_refused(scene: Scenario) -> None:
    with pytest.raises(FailedPreconditionError, match=r"up to 20 were delivered, and .* 12"):
        scene.open("c", **EXACTLY, **{**PLACE, "delivered": ((15, 20),), "partial_splits": ()})
    with pytest.raises(FailedPreconditionError, match="exactly_once"):
        scene.open("c", **{**EXACTLY, **PLACE, "visitation": "at_most_once"})


def test_who_reads_alone_goes_on_from_a_place_after_another_one_has_gone(scene: Scenario) -> None:
    alone = {
        **EXACTLY,
        "ordered": True,
        "partition_mode": "ordered",
        "num_splits": 12,
        "exclusive_reason": "order",
    }
    scene.open("c", **alone)
    dealt(scene)
    with pytest.raises(FailedPreconditionError, match="is read from the start"):
        scene.open("d", **alone, first_split=5, start_position_id="place")
    scene.close("c")
    opened = scene.open("d", **alone, first_split=5, start_position_id="place")
    scene.check()
    assert scene.state.iterations[opened.iteration_id].pool.next_split == 5


def test_who_shares_a_job_does_not_begin_it_again(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    dealt(scene)
    scene.close("c")
    with pytest.raises(FailedPreconditionError, match="read from the start"):
        scene.open("d", **EXACTLY, **PLACE)


def test_who_comes_to_what_is_read_already_hears_so_from_wherever_it_would_go_on(
    scene: Scenario,
) -> None:
    scene.open("c", **EXACTLY, **PLACE)
    dealt(scene)
    scene.finish("v", 4000, num_done=scene.state.tasks[4000].assigned.num_assigned)
    assert scene.heartbeat("c").finished
    assert scene.open("d", **EXACTLY).finished
    assert scene.open("e", **EXACTLY, **{**PLACE, "start_position_id": "elsewhere"}).finished


def test_nobody_goes_on_in_order_from_the_start_where_another_one_has_gone(
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
    with pytest.raises(FailedPreconditionError, match="begun in order by client c, which is gone"):
        scene.open("d", **alone)


# --- groups -------------------------------------------------------------------------------------


def consumer(scene: Scenario, name: str, **fields: Any) -> Any:
    terms = {**EXACTLY, "job_name": name, "group": "train", "group_options": "two", **fields}
    return scene.open(f"client of {name} {scene.now}", **terms)


def test_jobs_of_a_group_draw_from_one_seed_in_each_pass(scene: Scenario) -> None:
    first = consumer(scene, "one", seed=1, epoch=(0,))
    second = consumer(scene, "two", seed=2, epoch=(0,))
    later = consumer(scene, "one", seed=3, epoch=(1,))
    placed = consumer(scene, "three", seed=4, epoch=(1,), first_split=3, start_position_id="place")
    assert first.seed == second.seed != later.seed
    assert placed.seed == 4
    scene.restart()
    assert consumer(scene, "four", seed=5, epoch=(0,)).seed == first.seed
    scene.check()


def test_the_seed_of_a_pass_of_a_group_is_the_same_for_ever(scene: Scenario) -> None:
    # States that consumers saved name it, and another one of them may yet begin the pass.
    assert consumer(scene, "one", epoch=(0,)).seed == 2_306_747_959_675_709


def test_jobs_of_a_group_agree_on_their_terms(scene: Scenario) -> None:
    consumer(scene, "one")
    with pytest.raises(AlreadyExistsError, match="<two>; got <three>"):
        consumer(scene, "two", group_options="three")


def test_consumers_with_another_dataset_hear_which_step_differs(scene: Scenario) -> None:
    consumer(scene, "one", group_options="two, dataset 1\nrange 7\nmap f 8")
    with pytest.raises(AlreadyExistsError, match=r"dataset 2>: of the dataset, step 2 is batch"):
        consumer(scene, "two", group_options="two, dataset 2\nrange 7\nbatch 9")
    with pytest.raises(AlreadyExistsError, match=r"step 2, map f, has other arguments"):
        consumer(scene, "two", group_options="two, dataset 3\nrange 7\nmap f 9")
    with pytest.raises(AlreadyExistsError, match=r"step 2 is none"):
        consumer(scene, "two", group_options="two, dataset 4\nrange 7")


def test_the_name_of_a_group_is_no_other_job(scene: Scenario) -> None:
    consumer(scene, "one")
    with pytest.raises(AlreadyExistsError, match=r"'train' .* set `num_consumers`"):
        scene.open("forgetful", **{**EXACTLY, "job_name": "train"})
    scene.open("other", **EXACTLY)
    with pytest.raises(AlreadyExistsError, match="'job' is read without `num_consumers`"):
        consumer(scene, "two", group="job")
    scene.check()


def test_one_client_at_a_time_is_a_consumer(scene: Scenario) -> None:
    turn = {"ordered": True, "exclusive_reason": "reading in order"}
    scene.open("c", **{**EXACTLY, **turn, "group": "train", "job_name": "one"})
    wanted = {**EXACTLY, **turn, "group": "train", "job_name": "one"}
    with pytest.raises(FailedPreconditionError, match=r"read by client c: .* `consumer_index`"):
        scene.open("d", **wanted)
    scene.close("c")
    with pytest.raises(FailedPreconditionError, match=r"client c, which is gone: .*`set_state`"):
        scene.open("d", **wanted)
    scene.open("d", **wanted, first_split=3, start_position_id="place")
    scene.check()


# --- the place of all -----------------------------------------------------------------------------


def gather(scene: Scenario, client_id: str, token: str, delivered: Any, parts: Any = ()) -> Any:
    said = messages.ContributeCheckpoint(
        client_id=client_id, token=token, delivered=tuple(delivered), partial_splits=tuple(parts)
    )
    return scene.ask(said)


def test_all_clients_hear_where_they_stand_together_once_each_has_said_it(scene: Scenario) -> None:
    for client_id in "cde":
        scene.open(client_id, **EXACTLY)
    assert gather(scene, "c", "1", [(0, 2)], [(5, ((0, 3),))]).missing_clients == ("d", "e")
    assert gather(scene, "d", "2", [(4, 5)], [(6, ((1, 2),))]).missing_clients == ("e",)
    whole = gather(scene, "e", "3", [(2, 3)], [(5, ((3, END_ORDINAL),)), (6, ((0, 1),))])
    assert whole.missing_clients == ()
    assert whole.delivered == ((0, 3), (4, 6))
    assert whole.partial_splits == ((6, ((0, 2),)),)
    assert gather(scene, "c", "1", []) == whole
    assert gather(scene, "d", "2", []) == whole
    # The next time each says it again.
    assert gather(scene, "d", "4", [(0, 1)]).missing_clients == ("c", "e")


def test_who_asks_no_more_counts_as_missing(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.open("d", **EXACTLY)
    gather(scene, "c", "1", [(0, 2)])
    scene.now += 6.0
    assert gather(scene, "d", "2", [(2, 3)]).missing_clients == ("c",)
    assert gather(scene, "c", "3", [(3, 4)]).delivered == ((2, 4),)


def test_where_a_client_has_left_the_place_of_all_is_not_known(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    scene.open("d", **EXACTLY)
    scene.close("d")
    with pytest.raises(FailedPreconditionError, match="1 of 2 clients that read epoch"):
        gather(scene, "c", "1", [])
    with pytest.raises(NotFoundError):
        gather(scene, "d", "1", [])


@pytest.mark.parametrize("said", [[(40, 50)], [(5, 3)], [(4, 6), (5, 8)]])
def test_what_a_client_cannot_have_is_no_place(scene: Scenario, said: Any) -> None:
    scene.open("c", **EXACTLY)
    with pytest.raises((ValueError, FailedPreconditionError), match="delivered"):
        gather(scene, "c", "1", said)


def test_all_of_a_crowd_hear_the_answer(scene: Scenario) -> None:
    scene.compares = False
    crowd = [f"c{number}" for number in range(1100)]
    for client_id in crowd:
        scene.open(client_id, **EXACTLY)
    for client_id in crowd:
        last = gather(scene, client_id, f"of {client_id}", [(0, 2)])
    assert last.delivered == ((0, 2),)
    assert all(gather(scene, each, f"of {each}", []).delivered == ((0, 2),) for each in crowd)
