"""Several worker processes: their input, values, variables and states."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from headrace.distribute import InputOptions
from tests.distribute import scenarios
from tests.distribute.several_workers import Workers

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def workers():
    found = Workers(3)
    yield found
    found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function that writes files with the given numbers of lines: 10 * file + line."""

    def write(*counts):
        folder = tmp_path_factory.mktemp("files")
        for index, count in enumerate(counts):
            lines = "".join(f"{10 * index + line}\n" for line in range(count))
            (folder / f"{index}.txt").write_text(lines)
        return [str(folder / f"{index}.txt") for index in range(len(counts))]

    return write


def flat(steps):
    return [row for step in steps for value in step for row in value]


@pytest.mark.catalogue("1.1.14")
def test_each_worker_has_its_replicas_and_all_share_one_seed(workers):
    found = workers.run(scenarios.who_is_there, 2)
    assert [each[:2] for each in found] == [(6, 0), (6, 2), (6, 4)]
    assert found[2][2] == "hr.distribute.InputContext(input pipeline id 2, total: 3)"
    assert len({each[3] for each in found}) == 1
    assert {each[3] for each in workers.run(scenarios.who_is_there, 2)} != {found[0][3]}


# --- input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["DATA", "AUTO"])
def test_by_data_each_worker_uses_its_part_of_every_batch(workers, files, policy):
    (name,) = files(12)
    source = [name] if policy == "DATA" else 12
    first, second = workers.run(scenarios.steps, source, 4, policy, count=2)
    expected = [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]
    if policy == "DATA":
        expected = [[[row % 12 for row in part] for part in parts] for parts in expected]
    assert (first, second) == tuple([[part] for part in parts] for parts in expected)


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
def test_by_file_each_worker_reads_its_own(workers, files, policy):
    first, second = workers.run(scenarios.steps, files(6, 6), 4, policy, count=2)
    assert first == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert second == [[[10, 11]], [[12, 13]], [[14]], [[15]]]


def test_with_off_each_worker_process_reads_all(workers):
    for each in workers.run(scenarios.steps, 12, 8, "OFF", count=2):
        assert each == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]], [[10, 11]]]


@pytest.mark.catalogue("3.10.12", "3.10.13")
def test_an_uneven_last_batch_leaves_one_worker_without_rows(workers):
    first, second = workers.run(scenarios.steps, 9, 2, "AUTO", count=2)
    assert first == [[[0]], [[2]], [[4]], [[6]], [[8]]]
    assert second == [[[1]], [[3]], [[5]], [[7]], [[]]]
    dropped = workers.run(scenarios.steps, 9, 2, "AUTO", 1, None, True, count=2)
    assert [len(steps) for steps in dropped] == [4, 4]


@pytest.mark.catalogue("3.10.12", "3.10.13", "3.10.35", "3.10.36")
def test_two_workers_of_two_replicas_share_a_batch_in_turn(workers):
    first, second = workers.run(scenarios.steps, 15, 4, "AUTO", 2, count=2)
    assert first == [[[0], [2]], [[4], [6]], [[8], [10]], [[12], [14]]]
    assert second == [[[1], [3]], [[5], [7]], [[9], [11]], [[13], []]]


def test_files_of_different_lengths_end_together_for_all_workers(workers, files):
    found = workers.run(scenarios.steps, files(2, 7, 4), 3, "FILE")
    assert [flat(steps) for steps in found] == [[0, 1], list(range(10, 17)), [20, 21, 22, 23]]
    assert len({len(steps) for steps in found}) == 1


@pytest.mark.catalogue("4.3.2")
def test_fewer_files_than_workers_raise_on_every_worker(workers, files):
    found = workers.errors(scenarios.steps, files(4, 4), 2, "FILE")
    assert {each.kind for each in found} == {"InvalidArgumentError"}
    assert all("2 files" in each.text and "3" in each.text for each in found)


@pytest.mark.catalogue("3.12.31", "3.12.32")
@pytest.mark.parametrize("policy", ["AUTO", "FILE", "OFF"])
def test_balanced_pieces_lose_no_row(workers, files, policy):
    balanced = InputOptions(split="balanced")
    source = files(5, 6) if policy == "FILE" else 11
    found = workers.run(scenarios.steps, source, 5, policy, 1, balanced, count=2)
    rows = sorted(flat(found[0]) + flat(found[1]))
    everything = [*range(5), *range(10, 16)] if policy == "FILE" else list(range(11))
    assert rows == (sorted(everything * 2) if policy == "OFF" else everything)
    assert len({len(steps) for steps in found}) == 1


def test_values_are_wrapped_and_lengths_are_unknown(workers):
    for spec, kind, cardinality in workers.run(scenarios.specs, count=2):
        assert spec == "PerReplicaSpec(ArraySpec(shape=(None,), dtype=int64))"
        assert (kind, cardinality) == ("PerReplica", 2)


@pytest.mark.catalogue("2.4.4", "3.10.7", "3.10.8")
def test_structures_and_strings_are_sharded(workers):
    first, second = workers.run(scenarios.mapped_to_dicts, count=2)
    assert first == [[([0], [b"0"]), ([2], [b"2"])], [([4], [b"4"]), ([], [])]]
    assert second == [[([1], [b"1"]), ([3], [b"3"])], [([], []), ([], [])]]


@pytest.mark.catalogue("2.5.5", "3.10.20", "3.10.35", "3.10.36", "3.14.6", "3.14.7")
def test_a_function_creates_a_separate_dataset_on_each_worker(workers):
    assert workers.run(scenarios.from_function, "repeated", count=2) == [10, 35]
    first, second = workers.run(scenarios.from_function, "partial", count=2)
    assert first == [[[0, 1, 2, 3]], [[8, 9, 10, 11]]]
    assert second == [[[4, 5, 6, 7]], [[12, 13]]]
    first, second = workers.run(scenarios.from_function, "different", count=2)
    assert first == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[]]]
    assert second == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8]]]
    found = workers.errors(scenarios.per_replica_mode, count=2)
    assert {each.kind for each in found} == {"NotImplementedError"}


def test_a_worker_without_any_data_gets_empty_steps(workers):
    first, second = workers.run(scenarios.from_a_generator, [0, 6], count=2)
    none = [[[], []], [[], []]]
    assert first == ([none, none], [("float32", (0, 2), (0,))] * 2)
    some = [[[0, 1], [2, 3]], [[4, 5], []]]
    assert second[0] == [some, some]
    assert workers.run(scenarios.from_a_generator, [0, 0, 2], count=3)[1][0] == [[[[], []]]] * 2


def test_empty_steps_have_the_workers_own_classes(workers):
    found = workers.run(scenarios.of_a_class_within_a_function, [0, 3], count=2)
    assert found == [[0, 0], [4, 2]]


@pytest.mark.catalogue("2.4.3", "4.3.6")
def test_all_ways_of_reading_end_at_the_same_step(workers):
    found = workers.run(scenarios.ways_to_the_end, count=2)
    assert found[0] == [[[0]], [[1]], [[]], [[]], "end", "end"]
    assert found[1] == [[[0]], [[1]], [[2]], [[3]], "end", "end"]


@pytest.mark.catalogue("3.12.15")
@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_shards_shuffled_without_a_seed_are_disjoint_and_complete(workers, files, policy):
    names = files(5, 4, 6, 3) if policy == "FILE" else None
    epochs = list(zip(*workers.run(scenarios.shuffled, policy, names, 2, count=2), strict=True))
    whole = [10 * f + i for f, n in enumerate((5, 4, 6, 3)) for i in range(n)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == (whole if names else list(range(48)))
    assert epochs[0] != epochs[1]
    again = workers.run(scenarios.shuffled, policy, names, 1, count=2)
    assert again[0][0] != epochs[0][0]


def test_copies_that_are_shuffled_without_a_seed_differ(workers):
    first, second = workers.run(scenarios.shuffled, "OFF", None, 1, count=2)
    assert first != second
    assert sorted(first[0]) == sorted(second[0]) == list(range(48))


def test_iterators_may_be_interleaved_with_reductions(workers):
    first, second = workers.run(scenarios.two_iterators_in_turn, count=2)
    assert [a - b for a, b in zip(first, second, strict=True)] == [-4] * 3 + [0] * 7
    assert sum(second) == sum(range(40)) + (2 + 3) + (6 + 7) + (10 + 11)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.catalogue("3.14.9-14")
def test_reductions_are_over_the_replicas_of_all_workers(workers):
    found = workers.run(scenarios.reductions, count=2)
    # Replicas 0 to 3 have 1, 2, 3, 4; rows are ranges of 0, 1, 2, 3; tables are multiples 1 to 4.
    assert found[0] == found[1]
    assert found[0] == {
        "sum": 10.0,
        "mean": 2.5,
        "ints": 1.5,
        "rows": 0 + 0 + 1 + 3,
        "weighted": 4 / 6,
        "both": 6.25,
        "last": [3.75, 8.75],
        "nested": {"a": 10.0, "b": [6]},
        "bools": 3,
        "gather": [0, 0, 1, 0, 1, 2],
        "names": [b"r0", b"r1", b"r2", b"r3"],
        "one": [2.0, 2.0],
        "plain": 3.0,
    }


@pytest.mark.catalogue("1.2.1", "1.2.3", "3.14.4", "3.14.5", "3.30.11-14")
@pytest.mark.parametrize("here", [1, 2])
def test_collectives_include_the_replicas_of_all_workers(workers, here):
    everywhere = 3 * here
    total = sum(range(everywhere))
    gathered = [number for number in range(everywhere) for _ in range(number + 1)]
    for found in workers.run(scenarios.on_replicas, here):
        assert found == [(total, [everywhere], gathered, total, everywhere)] * here


@pytest.mark.catalogue("3.15.11-14")
def test_mismatched_values_raise_on_all_workers_which_continue(workers):
    for texts, total in workers.run(scenarios.shapes_that_differ, count=2):
        assert "(3, 3), (2, 3)" in texts[0]
        assert "(3, 3), (2, 3)" in texts[1]
        assert total == 2.0


def test_sums_are_bitwise_identical_on_all_workers(workers):
    found = workers.run(scenarios.large_sums)
    assert found[0] == found[1] == found[2]
    rngs = [np.random.default_rng(rank) for rank in range(3)]
    large = [rng.standard_normal((3 << 20) + 7).astype(np.float32) for rng in rngs]
    assert found[0]["large"][1] == ((large[0] + large[1]) + large[2]).tobytes()
    assert found[0]["empty"] == ("<f8", b"")


def test_arrays_of_every_dtype_are_sent(workers):
    found = workers.run(scenarios.sent_as_they_are, count=2)
    assert found[0] == found[1]
    assert found[0][:3] == [[1, 2]] * 3
    assert found[0][4:6] == [["1", "2"], [b"1", b"2"]]


@pytest.mark.catalogue("2.1.6")
def test_values_from_a_function_are_requested_for_local_replicas(workers):
    assert workers.run(scenarios.values_from_function, count=2) == [
        [(0, 1), (4, 4)],
        [(2, 3), (4, 4)],
    ]


# --- variables -----------------------------------------------------------------------------------


@pytest.mark.catalogue("2.1.7")
@pytest.mark.parametrize(
    ("aggregation", "added", "assigned"),
    [
        ("NONE", [2.0, 3.0], [1.0, 2.0]),
        ("SUM", [4.0, 4.0], [3.0, 3.0]),
        ("MEAN", [2.5, 2.5], [1.5, 1.5]),
        ("ONLY_FIRST_REPLICA", [2.0, 2.0], [1.0, 1.0]),
    ],
)
def test_writes_of_replicas_are_aggregated_over_all_workers(workers, aggregation, added, assigned):
    """The table of one process with two replicas; the initial value is that of worker 0."""
    assert workers.run(scenarios.written, aggregation, "assign_add", count=2) == added
    assert workers.run(scenarios.written, aggregation, "assign", count=2) == assigned


@pytest.mark.parametrize(
    ("aggregation", "rows"),
    [
        ("SUM", [1, 1, 2, 3, 3]),
        ("MEAN", [0.25, 0.25, 0.5, 0.75, 0.75]),
        ("ONLY_FIRST_REPLICA", [1, 0, 0, 0, 0]),
    ],
)
def test_row_changes_of_all_workers_are_applied_as_one(workers, aggregation, rows):
    assert workers.run(scenarios.rows_changed, aggregation, count=2) == [rows, rows]


@pytest.mark.parametrize(
    ("aggregation", "kind", "expected"),
    [
        ("SUM", float, (3.0, 10.0, 10.0)),
        ("SUM", int, (3.0, 10.0, 10.0)),
        ("MEAN", float, (3.0, 2.5, 10.0)),
        ("ONLY_FIRST_REPLICA", float, (3.0, 1.0, 10.0)),
    ],
)
def test_on_read_values_of_all_workers_are_aggregated(workers, aggregation, kind, expected):
    assert workers.run(scenarios.read, aggregation, kind, count=2) == [expected] * 2


def test_variables_of_different_shapes_raise_on_all_workers(workers):
    for error in workers.errors(scenarios.different_variables, count=2):
        assert error.kind == "FailedPreconditionError"
        assert "shape (2,)" in error.text
        assert "shape (3,)" in error.text


def test_a_random_initial_value_is_the_same_on_all_replicas_of_all_workers(workers):
    first, second = workers.run(scenarios.made_on_replicas, count=2)
    assert first[0] == first[1] == second[0] == second[1]


# --- states --------------------------------------------------------------------------------------


@pytest.mark.catalogue("3.12.34")
@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [(p, b, a) for p in ("DATA", "FILE") for b, a in ((2, 3), (3, 2), (3, 1), (1, 2), (3, 3))],
)
@pytest.mark.parametrize("split", ["ceil", "balanced"])
def test_another_number_of_workers_resumes_from_a_state(
    workers, files, policy, before, after, split
):
    counts = (9, 8, 7, 6)
    names = files(*counts) if policy == "FILE" else None
    options = InputOptions(split=split)
    asked = names, policy, 5, options
    first = workers.run(scenarios.saved_after, 2, *asked, count=before)
    states = {state for _, state in first}
    assert len(states) == 1
    (state,) = states
    second = workers.run(scenarios.rest_from, state, *asked, count=after)
    seen = [row for rows, _ in (*first, *second) for row in rows]
    whole = [10 * f + i for f, n in enumerate(counts) for i in range(n)] if names else range(37)
    assert sorted(seen) == list(whole)
    if policy == "FILE":
        assert len(json.loads(state)["distributed"]["streams"]) == before


def test_the_number_of_workers_may_change_repeatedly(workers, files):
    names = files(9, 8, 7, 6, 5)
    asked = names, "FILE", 4, InputOptions()
    found = workers.run(scenarios.saved_after, 1, *asked, count=2)
    seen, state = [row for rows, _ in found for row in rows], found[0][1]
    for count in (3, 1, 2, 3):
        found = workers.run(scenarios.rest_from, state, *asked, 1, 1, count=count)
        seen += [row for rows, _ in found for row in rows]
        assert len({state for _, state in found}) == 1
        state = found[0][1]
    found = workers.run(scenarios.rest_from, state, *asked, count=2)
    seen += [row for rows, _ in found for row in rows]
    assert sorted(seen) == [10 * f + i for f, n in enumerate((9, 8, 7, 6, 5)) for i in range(n)]


def test_copies_resume_from_their_positions_on_any_number_of_workers(workers):
    asked = None, "OFF", 5, InputOptions()
    first = workers.run(scenarios.saved_after, 3, *asked, count=2)
    (begun,) = {tuple(rows) for rows, _ in first}
    for count in (2, 1, 3):
        for rest, _ in workers.run(scenarios.rest_from, first[0][1], *asked, count=count):
            assert [*begun, *rest] == list(range(37)), count


def test_datasets_from_a_function_resume_on_the_same_number_of_workers(workers):
    found = workers.run(scenarios.function_state, None, count=2)
    assert [rows for rows, _ in found] == [[[0]], [[1]]]
    rest = workers.run(scenarios.function_state, found[0][1], count=2)
    assert [steps[0] for steps, _ in rest] == [[[2]], [[3]]]
    for error in workers.errors(scenarios.function_state, found[0][1], count=3):
        assert error.kind == "FailedPreconditionError"
        assert "2 datasets" in error.text


def test_strategies_are_independent_of_each_other(workers):
    found = workers.run(scenarios.two_strategies_at_once, count=2)
    assert found == [[2.0, 6.0, 8.0]] * 2


def test_all_workers_save_and_the_first_one_writes(workers, tmp_path):
    first, *others = workers.run(scenarios.save_many_times, str(tmp_path))
    assert first[:2] == [[10.0] * 4] * 2
    assert first[3] == 2
    assert others == [first] * len(others)
    assert len([*tmp_path.glob("one.*")]) == 2, "a manifest and one file"
