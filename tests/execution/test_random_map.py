"""`random_map` and `rejection_resample`: random numbers that follow from elements."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidElementError, UserFunctionError
from headrace.service import LocalCluster, ShardingPolicy, distribute

from .battery import assert_restores_everywhere

Dataset = hr.Dataset


def noised(x, rng):
    return int(x) * 1000 + int(rng.integers(1000))


def nested(x):
    return Dataset.range(int(x) % 4 + 1).map(lambda y: y + 10 * int(x))


def some(x):
    return bool(x % 3)


def values(dataset):
    return [np.asarray(x).tolist() for x in dataset]


def test_numbers_do_not_depend_on_threads_or_chunk_sizes():
    def make(threads=None):
        return Dataset.range(300).random_map(noised, threads, seed=7)

    expected = values(make())
    assert values(make(3)) == expected
    assert values(make().take(7)) == expected[:7]
    assert sorted(values(Dataset.range(300).random_map(noised, 3, False, seed=7))) == expected
    assert len({x % 1000 for x in expected}) > 200


def test_each_epoch_and_each_seed_has_its_own_numbers():
    dataset = Dataset.range(50).random_map(noised, seed=7)
    again = Dataset.range(50).random_map(noised, seed=7)
    other = Dataset.range(50).random_map(noised, seed=8)
    first, second, repeated = values(dataset), values(dataset), values(again.repeat(2))
    assert first != second
    assert repeated[:50] == first
    assert repeated[50:] != first
    assert values(other) != first


def test_two_steps_without_seeds_draw_different_numbers():
    dataset = (
        Dataset.range(50)
        .random_map(lambda x, rng: (x, rng.random()))
        .random_map(lambda x, noise, rng: noise != rng.random())
    )
    assert all(dataset)
    assert values(dataset.with_options(hr.Options(seed=3)))


def test_seed_of_the_options_determines_the_numbers():
    def make():
        return Dataset.range(50).random_map(noised).with_options(hr.Options(seed=3))

    assert values(make()) == values(make())


def test_generators_are_uniform_and_independent_of_each_other():
    drawn = np.array(
        list(Dataset.range(4000).random_map(lambda x, rng: rng.random(2), seed=1)), float
    )
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.05
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.05
    assert len(np.unique(drawn)) == 8000


def test_a_function_may_read_the_same_dataset_while_it_is_called():
    def outer(x, rng):
        before = rng.random()
        if len(running) < 2:
            running.append(x)
            list(dataset)
        return before, rng.random()

    running = []
    dataset = Dataset.range(3).random_map(outer, seed=2)
    pairs = Dataset.range(3).random_map(lambda x, rng: (rng.random(), rng.random()), seed=2)
    assert values(dataset) == values(pairs)


def test_threads_use_different_generators():
    barrier = threading.Barrier(2, timeout=20)

    def fn(x, rng):
        barrier.wait()
        numbers = [rng.random() for _ in range(100)]
        barrier.wait()
        return np.array(numbers)

    expected = Dataset.range(2).random_map(lambda x, rng: rng.random(100), seed=3)
    assert values(Dataset.range(2).random_map(fn, 2, seed=3)) == values(expected)


def test_tuples_are_unpacked_before_the_generator():
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3, 6))
    assert values(pairs.random_map(lambda a, b, rng: a + b)) == [3, 5, 7]


def test_an_error_shows_the_element_without_the_word():
    def fails(x, rng):
        raise ValueError("no")

    for threads in (None, 2):
        iterator = iter(Dataset.range(3).random_map(fails, threads))
        with pytest.raises(UserFunctionError) as caught, iterator:
            next(iterator)
        text = str(caught.value)
        assert "fails" in text.splitlines()[0]
        assert "random_map" in text
        assert text.splitlines()[1] == "The element: 0"


def test_a_function_of_one_argument_is_rejected_where_it_is_written():
    with pytest.raises(TypeError, match=r"fn.*generator.*lambda"):
        Dataset.range(3).random_map(lambda x: x)
    with pytest.raises(TypeError, match="seed"):
        Dataset.range(3).random_map(noised, seed="x")


def test_a_function_that_would_be_elementwise_gets_a_generator():
    # Its arithmetic could also be applied to the columns of elements and words.
    with pytest.raises(UserFunctionError, match="unsupported operand"):
        list(Dataset.range(1000).random_map(lambda x, rng: x + rng))


PLANS = {
    "range": lambda: Dataset.range(30).random_map(noised, 2, seed=3),
    "options": lambda: Dataset.range(30).random_map(noised).with_options(hr.Options(seed=3)),
    "shuffle": lambda: Dataset.range(30).filter(some).shuffle(5, 1).random_map(noised, seed=3),
    "repeat": lambda: Dataset.range(9).filter(some).random_map(noised, seed=3).repeat(3),
    "shuffle, repeat": lambda: (
        Dataset.range(20).filter(some).shuffle(7, 2).random_map(noised, seed=3).repeat(2)
    ),
    "flat_map": lambda: Dataset.range(9).flat_map(nested).random_map(noised, seed=3),
    "interleave": lambda: Dataset.range(9).interleave(nested, 3).random_map(noised, seed=3),
    "interleave, shuffle, repeat": lambda: (
        Dataset.range(9).interleave(nested, 3).shuffle(7, 2).random_map(noised, seed=3).repeat(2)
    ),
    "repeats": lambda: (
        Dataset.range(6)
        .interleave(nested, 3)
        .repeat(2)
        .random_map(noised)
        .shuffle(5)
        .repeat(2)
        .with_options(hr.Options(seed=5))
    ),
    "nested": lambda: (
        Dataset.range(9)
        .flat_map(lambda x: Dataset.range(3).random_map(noised))
        .with_options(hr.Options(seed=5))
    ),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(20))).random_map(noised, seed=3),
    "zip": lambda: Dataset.zip(Dataset.range(9), Dataset.range(9)).random_map(
        lambda a, b, rng: noised(a, rng), seed=3
    ),
    "resample": lambda: (
        Dataset.range(200)
        .rejection_resample(lambda x: x % 10 == 0, [0.5, 0.5], [0.9, 0.1], seed=3)
        .map(lambda label, x: x)
    ),
}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster


@pytest.mark.parametrize("name", PLANS)
def test_workers_draw_the_numbers_of_one_process(cluster, name):
    expected = values(PLANS[name]())

    def read(mode, **options):
        return values(PLANS[name]().apply(distribute(mode, cluster.target, **options)))

    assert read(ShardingPolicy.DYNAMIC, ordered=True) == expected
    assert sorted(read(ShardingPolicy.DYNAMIC)) == sorted(expected)
    assert sorted(read(ShardingPolicy.OFF)) == sorted(expected * 2)


def test_ordered_reading_of_random_batches_of_several_files_is_refused(cluster):
    dataset = Dataset.range(9).interleave(nested, 3).batch(4)
    dataset = dataset.random_map(lambda batch, rng: rng.permutation(batch))
    with pytest.raises(FailedPreconditionError, match=r"random_map .*move it before"):
        dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))


# --- rejection_resample ---------------------------------------------------------------------------

INITIAL = (0.7, 0.2, 0.1)
CLASSES = np.random.default_rng(0).choice(3, size=20000, p=INITIAL)


@pytest.mark.parametrize("initial", [None, INITIAL])
@pytest.mark.parametrize("target", [(1 / 3, 1 / 3, 1 / 3), (0.1, 0.1, 0.8), (0, 0.5, 0.5)])
def test_resampled_classes_have_the_target_distribution(initial, target):
    data = Dataset.from_tensor_slices((CLASSES, np.arange(len(CLASSES))))
    elements = list(data.rejection_resample(lambda label, n: label, target, initial, seed=1))
    labels, numbers = [int(label) for label, _ in elements], [int(n) for _, (_, n) in elements]
    assert numbers == sorted(set(numbers))
    assert (CLASSES[numbers] == labels).all()
    found = np.bincount(labels, minlength=3) / len(labels)
    assert np.abs(found - target).max() < 0.03
    # As many elements as rejection allows: no element of the rarest class is dropped.
    expected = len(CLASSES) * min(i / t for i, t in zip(INITIAL, target, strict=True) if t)
    assert abs(len(labels) / expected - 1) < 0.06


@pytest.mark.parametrize("initial", [None, INITIAL])
def test_resampling_continues_from_every_state(initial):
    def make():
        data = Dataset.from_tensor_slices(CLASSES[:60])
        return data.rejection_resample(lambda label: label, [0.2, 0.3, 0.5], initial).repeat(2)

    assert_restores_everywhere(make)


@pytest.mark.parametrize("initial", [None, [0.5, 0.5]])
def test_a_state_of_resampling_needs_the_same_distributions(initial):
    def resampled(target):
        return iter(Dataset.range(9).rejection_resample(lambda x: x % 2, target, initial, seed=1))

    state = resampled([0.5, 0.5]).get_state()
    resampled([0.5, 0.5]).set_state(state)
    with pytest.raises(FailedPreconditionError, match="its arguments have changed"):
        resampled([0.6, 0.4]).set_state(state)


def test_resampling_in_order_has_the_elements_of_one_process(cluster):
    def make():
        data = Dataset.from_tensor_slices(CLASSES[:300])
        return data.rejection_resample(lambda label: label, [0.2, 0.3, 0.5], seed=1)

    remote = make().apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))
    assert list(remote) == list(make())


@pytest.mark.parametrize(
    ("target", "initial", "message"),
    [
        ([0.5, 0.6], None, "target_dist.*sum to 1"),
        ([1.5, -0.5], None, "target_dist.*at least 0"),
        ([[1.0]], None, "target_dist.*list of probabilities"),
        ([0.5, 0.5], [0.2, 0.3, 0.5], "initial_dist.*2 classes.*has 3"),
        ([0.5, 0.5], [1, 0], "initial_dist.*0 for class 1"),
    ],
)
def test_wrong_distributions_are_rejected(target, initial, message):
    with pytest.raises(ValueError, match=message):
        Dataset.range(3).rejection_resample(int, target, initial)


def test_an_invalid_class_names_the_function_and_the_classes():
    dataset = Dataset.range(3).rejection_resample(lambda x: x, [0.5, 0.5])
    with pytest.raises(InvalidElementError, match=r"rejection_resample.*from 0 to 1.*returned"):
        list(dataset)


def test_an_error_of_the_class_function_names_it():
    def no_class(x):
        raise KeyError("no")

    for initial in (None, [0.5, 0.5]):
        dataset = Dataset.range(3).rejection_resample(no_class, [0.5, 0.5], initial)
        with pytest.raises(UserFunctionError, match=r"no_class.*rejection_resample") as caught:
            next(iter(dataset))
        assert "resampling.py" not in str(caught.value)
