"""Keras objects in functions that a coordinator schedules; run on each back end by `test_keras`."""

from __future__ import annotations

import itertools
import time

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IS_JAX = keras.backend.backend() == "jax"
ROWS = 60
X = np.random.default_rng(3).random((ROWS, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2, processes=False) as cluster:
        yield cluster


@pytest.fixture
def make_coordinator(cluster):
    made = []

    def make(threads_per_worker=None, **settings):
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, **settings)
        made.append(hr.coordinator.ClusterCoordinator(strategy, None, threads_per_worker))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close()
        coordinator.strategy.close()


def make_model():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dense(1),
        ]
    )


def make_gradients(model):
    """Return a function of a batch that returns loss, outputs and gradients of a model."""
    if not IS_JAX:

        def on_torch(x, y):
            model.zero_grad()
            outputs = model(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, outputs))
            loss.backward()
            return loss, outputs, [each.value.grad for each in model.trainable_variables]

        return on_torch
    import jax  # noqa: PLC0415 - where it is the back end

    def loss_of(weights, state, x, y):
        outputs, state = model.stateless_call(weights, state, x, training=True)
        return keras.ops.mean(keras.losses.mean_squared_error(y, outputs)), (outputs, state)

    compiled = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    def on_jax(x, y):
        weights = [each.value for each in model.trainable_variables]
        state = [each.value for each in model.non_trainable_variables]
        (loss, (outputs, state)), gradients = compiled(weights, state, x, y)
        for variable, value in zip(model.non_trainable_variables, state, strict=True):
            variable.assign(value)
        return loss, outputs, gradients

    return on_jax


def make_step(model, optimizer, metrics):
    gradients_of = make_gradients(model)

    def step(x, y):
        loss, outputs, gradients = gradients_of(x, y)
        optimizer.apply(gradients, model.trainable_variables)
        for metric in metrics:
            metric.update_state(y, outputs)
        return float(keras.ops.convert_to_numpy(loss))

    return step


def batches(size=10):
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, ROWS, size)]


def made(strategy, optimizer=keras.optimizers.SGD, rate=0.1):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = make_model()
        return model, optimizer(rate), keras.metrics.MeanAbsoluteError(f"error{next(NUMBERS)}")


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_a_loop_trains_as_in_one_process(make_coordinator, optimizer):
    keras.utils.set_random_seed(5)
    alone, rule = make_model(), optimizer(0.1)
    error = keras.metrics.MeanAbsoluteError()
    step = make_step(alone, rule, [error])
    losses = [step(x, y) for x, y in batches() * 2]

    coordinator = make_coordinator(staleness=0)
    model, applies, metric = made(coordinator.strategy, optimizer)
    scheduled = make_step(model, applies, [metric])
    values = [coordinator.schedule(scheduled, args=batch) for batch in batches() * 2]
    found = coordinator.fetch(values)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for one, other in zip(alone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
    assert float(metric.result()) == pytest.approx(float(error.result()), rel=1e-4)
    assert int(np.asarray(applies.iterations)) == 12

    # The same weights can be trained with fit, and functions see the changes.
    model.compile(applies, "mse")
    model.fit(X, Y, batch_size=10, verbose=0)
    assert int(np.asarray(applies.iterations)) == 18
    before = model.get_weights()
    found = coordinator.schedule(lambda: [np.asarray(w) for w in model.get_weights()]).fetch()
    for one, other in zip(before, found, strict=True):
        np.testing.assert_array_equal(other, one)


def test_steps_within_a_function_read_the_writes_of_earlier_steps(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    model, optimizer, metric = made(coordinator.strategy)
    again, _, _ = made(coordinator.strategy)
    one = make_step(model, optimizer, [metric])
    other = make_step(again, keras.optimizers.SGD(0.1, name="other"), [])

    def all_steps(data):
        for x, y in data:
            other(x, y)

    for x, y in batches():
        coordinator.schedule(one, args=(x, y))
    coordinator.schedule(all_steps, args=(batches(),))
    coordinator.join()
    for first, second in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-5)


def test_metrics_of_all_workers_add_up_and_reset(make_coordinator):
    coordinator = make_coordinator()
    with coordinator.strategy.scope():
        mean = keras.metrics.Mean(name="values")

    def count(value):
        mean.update_state(value)
        mean.update_state(value)
        return float(mean.result())

    for _ in range(2):
        values = [coordinator.schedule(count, args=(float(n),)) for n in range(40)]
        assert coordinator.fetch(values) == [
            float(n) for n in range(40)
        ]  # a separate one for each call
        assert float(mean.result()) == 19.5
        assert float(mean.count.value) == 80
        mean.reset_state()
        assert float(mean.result()) == 0


def test_the_end_of_the_data_loses_no_metric(make_coordinator):
    coordinator = make_coordinator()
    with coordinator.strategy.scope():
        seen = keras.metrics.Sum(name="seen")
    data = hr.Dataset.range(1, 8)
    shared = coordinator.create_shared_dataset(data)

    def count():
        for _ in range(3):
            seen.update_state(float(next(shared)))

    coordinator.run_epoch(count)
    assert float(seen.result()) == 28


def test_learning_rates_and_weights_set_by_the_coordinator_apply(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    with coordinator.strategy.scope():
        variable = keras.Variable(np.zeros(3, "f4"), name="values")
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate.value))
        optimizer.apply([np.ones(3, "f4")], [variable])
        return rate, keras.ops.convert_to_numpy(variable.value).tolist()

    assert coordinator.schedule(step).fetch() == (1.0, [-1.0] * 3)
    optimizer.learning_rate = 0.5
    variable.assign(np.full(3, 2.0))
    assert coordinator.schedule(step).fetch() == (0.5, [1.5] * 3)
    assert keras.ops.convert_to_numpy(variable.value).tolist() == [1.5] * 3

    def add(value):
        variable.assign_add(keras.ops.ones(3) * value)

    for number in range(10):
        coordinator.schedule(add, args=(float(number),))
    coordinator.join()
    assert keras.ops.convert_to_numpy(variable.value).tolist() == [46.5] * 3


def test_each_optimizer_counts_its_own_steps(make_coordinator):
    coordinator = make_coordinator()
    with coordinator.strategy.scope():
        variable = keras.Variable(np.zeros(3, "f4"))
        first, second = keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1)

    def step():
        first.apply([np.ones(3, "f4")], [variable])
        second.apply([np.ones(3, "f4")], [variable])
        second.apply([np.ones(3, "f4")], [variable])
        return int(keras.ops.convert_to_numpy(second.iterations.value))

    counts = []
    for _ in range(2):  # other tests have used the servers, so it does not start at 0
        last = coordinator.schedule(step).fetch()
        counts.append([int(first.iterations.value), int(second.iterations.value)])
        assert counts[-1][1] == last
    assert np.diff(counts, axis=0).tolist() == [[1, 2]]


def test_another_coordinator_of_the_strategy_continues_training(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    model, optimizer, metric = made(coordinator.strategy)
    step = make_step(model, optimizer, [metric])
    coordinator.schedule(step, args=batches()[0]).fetch()
    coordinator.close()
    before = model.get_weights()
    with hr.coordinator.ClusterCoordinator(coordinator.strategy) as another:
        another.schedule(step, args=batches()[1]).fetch()
        assert float(metric.count.value) == 20
        assert not np.array_equal(before[0], model.get_weights()[0])


def test_a_round_is_a_step_of_all_of_its_batches(make_coordinator):
    coordinator = make_coordinator(mode="sync", round_size=2)
    with coordinator.strategy.scope():
        variable = keras.Variable(np.zeros(2, "f4"))
        statistic = keras.Variable(np.zeros(2, "f4"), trainable=False)
        optimizer = keras.optimizers.SGD(1.0)
        mean = keras.metrics.Mean(f"mean{next(NUMBERS)}")

    def step(number):
        optimizer.apply([np.full(2, number, "f4")], [variable])
        statistic.assign_add(np.full(2, number, "f4"))
        mean.update_state(number)

    for number in (1.0, 3.0, 4.0, 8.0):
        coordinator.schedule(step, args=(number,))
    coordinator.join()
    assert keras.ops.convert_to_numpy(variable.value).tolist() == [-8.0, -8.0]
    assert keras.ops.convert_to_numpy(statistic.value).tolist() == [8.0, 8.0]
    assert float(mean.result()) == 4.0


def test_optimizer_slots_continue_in_functions_and_files(make_coordinator, tmp_path):
    def rule():
        return keras.optimizers.Adagrad(0.1)  # no other test uses its slots on these servers

    keras.utils.set_random_seed(5)
    alone = make_model()
    alone.compile(rule(), "mse")
    alone.fit(X, Y, batch_size=ROWS, epochs=2, verbose=0)
    alone.save(tmp_path / "first.keras")
    alone.fit(X, Y, batch_size=ROWS, epochs=2, verbose=0)

    coordinator = make_coordinator(staleness=0)
    with coordinator.strategy.scope():
        model = keras.models.load_model(tmp_path / "first.keras")
    step = make_step(model, model.optimizer, [])
    for _ in range(2):
        coordinator.schedule(step, args=(X, Y)).fetch()
    for one, other in zip(alone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
    model.save(tmp_path / "second.keras")
    again = keras.models.load_model(tmp_path / "second.keras")
    assert int(again.optimizer.iterations.value) == 4
    for each in (alone, again):
        each.fit(X, Y, batch_size=ROWS, verbose=0)
    for one, other in zip(alone.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"model\.save"):
        hr.Checkpoint(optimizer=model.optimizer).save(tmp_path / "checkpoint")

    trained = rule()
    weight = keras.Variable(np.zeros(1, "f4"))
    trained.apply([keras.ops.ones(1)], [weight])
    with pytest.raises(FailedPreconditionError, match=r"model\.compile\(optimizer\)"):
        coordinator.schedule(lambda: trained.apply([np.ones(1, "f4")], [weight]))


def test_freezing_a_layer_applies_to_new_functions(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    model, _, _ = made(coordinator.strategy)

    def make_count():
        return lambda: len(model.trainable_variables)

    assert coordinator.schedule(make_count()).fetch() == 6
    model.layers[0].trainable = False
    assert coordinator.schedule(make_count()).fetch() == 4


def test_values_of_this_program_replace_those_of_an_earlier_one(make_coordinator):
    for value in (1.0, 2.0):
        strategy = make_coordinator(staleness=0).strategy
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="again")])
        model.compile("sgd", "mse")
        model.set_weights([np.full((1, 1), value), np.zeros(1)])
        loss = model.evaluate(np.ones((4, 1)), np.zeros((4, 1)), verbose=0)
        assert loss == pytest.approx(value**2)
        assert model.get_weights()[0].tolist() == [[value]]


def test_layers_and_variables_in_functions_belong_to_the_model(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    model, optimizer, _ = made(coordinator.strategy)
    variables = model.trainable_variables
    last = model.layers[-1]

    def step():
        gradients = [np.ones(each.shape, "f4") for each in variables]
        optimizer.apply(gradients, variables)
        return np.asarray(keras.ops.convert_to_numpy(last(np.zeros((1, 5), "f4"))))

    first = coordinator.schedule(step).fetch()
    second = coordinator.schedule(step).fetch()
    np.testing.assert_allclose(second, first - 0.1, rtol=1e-5)
    np.testing.assert_allclose(model.layers[-1].bias.value.tolist(), second[0], rtol=1e-5)


def test_models_that_share_layers_are_one_copy_on_a_worker(make_coordinator):
    coordinator = make_coordinator(staleness=0)
    with coordinator.strategy.scope():
        first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        second = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        inputs = keras.Input((4,))
        both = keras.Model(inputs, second(first(inputs)))
        optimizer, seen = keras.optimizers.SGD(0.1), keras.metrics.Sum(f"seen{next(NUMBERS)}")
    layer = first.layers[0]

    def step():
        seen.update_state(1.0)
        before = keras.ops.convert_to_numpy(layer.bias.value)
        optimizer.apply([np.ones(each.shape, "f4") for each in first.weights], first.weights)
        seen.update_state(1.0)
        models = [first.layers[0], both.layers[1].layers[0], layer]
        return [before - keras.ops.convert_to_numpy(each.bias.value) for each in models]

    for change in coordinator.schedule(step).fetch():
        np.testing.assert_allclose(change, 0.1, rtol=1e-5)
    assert float(seen.result()) == 2


@pytest.mark.parametrize("reads_again", [True, False])
def test_a_step_of_another_model_loses_no_assignment(make_coordinator, reads_again):
    coordinator = make_coordinator(staleness=0)
    with coordinator.strategy.scope():
        weight = keras.Variable(np.zeros(2, "f4"))
        statistic = keras.Variable(np.zeros(2, "f4"), trainable=False)
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        statistic.assign_add(np.ones(2, "f4"))
        optimizer.apply([np.ones(2, "f4")], [weight])
        if reads_again:
            statistic.assign_add(np.ones(2, "f4"))

    for _ in range(3):
        coordinator.schedule(step)
    coordinator.join()
    expected = 6.0 if reads_again else 3.0
    assert keras.ops.convert_to_numpy(statistic.value).tolist() == [expected] * 2


def test_functions_can_use_module_classes_of_the_program(make_coordinator):
    torch = pytest.importorskip("torch")

    def add():
        return float(keras.ops.convert_to_numpy(keras.ops.add(1.0, float(torch.ones(())))))

    assert make_coordinator().schedule(add).fetch() == 2.0


def test_dropout_draws_other_masks_on_each_worker(make_coordinator):
    coordinator = make_coordinator()
    with coordinator.strategy.scope():
        drop = keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5, seed=1)])

    def mask():
        return keras.ops.convert_to_numpy(drop(np.ones((1, 50), "f4"), training=True))

    masks = coordinator.fetch([coordinator.schedule(mask) for _ in range(12)])
    assert len({each.tobytes() for each in masks}) == 12


def test_a_killed_worker_counts_no_step_twice():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            variable = keras.Variable(np.zeros(1, "f4"), name="steps")
            seen = keras.metrics.Sum(name="seen")
            optimizer = keras.optimizers.SGD(1.0)
        coordinator = hr.coordinator.ClusterCoordinator(strategy)

        def step(number):
            optimizer.apply([-np.ones(1, "f4")], [variable])
            time.sleep(0.01)
            seen.update_state(number)

        for number in range(150):
            coordinator.schedule(step, args=(float(number),))
        while int(np.asarray(optimizer.iterations)) < 30:
            coordinator.done()
        cluster.kill("worker", 0)
        coordinator.join()
        assert float(seen.result()) == sum(range(150))
        assert keras.ops.convert_to_numpy(variable.value).tolist() == [150.0]
        coordinator.close()
        strategy.close()


# --- errors ---------------------------------------------------------------------------------------


def test_a_model_of_no_strategy_is_rejected_in_functions(make_coordinator):
    coordinator = make_coordinator()
    model = make_model()
    with pytest.raises(FailedPreconditionError, match=r"hr\.keras\.distribute\(model, strategy\)"):
        coordinator.schedule(lambda: model(X))
    hr.keras.distribute(model, coordinator.strategy)
    expected = keras.ops.convert_to_numpy(model(X[:2]))
    found = coordinator.schedule(lambda: keras.ops.convert_to_numpy(model(X[:2]))).fetch()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with coordinator.strategy.scope():
        without_shape = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(FailedPreconditionError, match="is not built"):
        coordinator.schedule(lambda: without_shape(X))


def test_unsupported_uses_in_functions_raise(make_coordinator):
    coordinator = make_coordinator()
    strategy = coordinator.strategy
    model, optimizer, metric = made(strategy)
    weights = model.trainable_variables

    def stateless():
        values = [each.value for each in weights]
        optimizer.stateless_apply([], values, values)

    def without_variables():
        optimizer.apply([np.ones(each.shape, "f4") for each in weights])

    def own_variable():
        optimizer.apply([np.ones(1, "f4")], [keras.Variable(np.zeros(1, "f4"))])

    def swapped():
        optimizer.apply(weights, [np.ones(each.shape, "f4") for each in weights])

    cases = [
        (swapped, "in this order"),
        (lambda: model.fit(X, Y), "call model.fit in the coordinator"),
        (stateless, "return the gradients"),
        (without_variables, "pass the variables too"),
        (own_variable, "is not on the parameter servers"),
        (lambda: metric.variables[0], r"metric\.result\(\)"),
    ]
    if IS_JAX:
        import jax  # noqa: PLC0415 - where it is the back end

        cases.append((lambda: jax.jit(lambda x: model(x))(X), r"model\.stateless_call"))
    for function, message in cases:
        with pytest.raises(Exception, match=message):
            coordinator.schedule(function).fetch()
        with pytest.raises(Exception, match=message):
            coordinator.join()
    with strategy.scope():
        lamb = keras.optimizers.Lamb(0.1)
    with pytest.raises(FailedPreconditionError, match="Lamb"):
        coordinator.schedule(lambda: lamb.apply([], []))


def test_workers_with_several_threads_are_rejected(make_coordinator):
    coordinator = make_coordinator(threads_per_worker=2)
    model, _, _ = made(coordinator.strategy)
    with pytest.raises(FailedPreconditionError, match="threads_per_worker=1"):
        coordinator.schedule(lambda: np.asarray(model(X))).fetch()
    with pytest.raises(FailedPreconditionError, match="threads_per_worker=1"):
        coordinator.join()
