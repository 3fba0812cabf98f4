"""Keras optimizers on parameter servers: the same values as in Keras, or an error."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import pickle
import re

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.adapters.keras_training.server_optimizers import (
    SERVER_OPTIMIZERS,
    WHOLE_VARIABLE_OPTIMIZERS,
    check_optimizer,
    has_weight_decay,
    server_optimizer,
)
from headrace.errors import FailedPreconditionError
from headrace.parameter_server import schedules as server_schedules
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from headrace.parameter_server.rules import slots_for_rule
from tests.parameter_server.small_cluster import cluster

pytestmark = [
    pytest.mark.heavy,
    # A warning that Keras itself causes with PyTorch tensors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

F = np.float32
STEPS = 35  # after the last change of a schedule
SHAPE = (6, 5)
keras_optimizers = keras.optimizers
keras_schedules = keras.optimizers.schedules

SCHEDULES = {
    "exponential": keras_schedules.ExponentialDecay(0.05, 10, 0.9),
    "stairs": keras_schedules.ExponentialDecay(0.05, 10, 0.9, staircase=True),
    "pieces": keras_schedules.PiecewiseConstantDecay([6, 30], [0.05, 0.02, 0.01]),
    "polynomial": keras_schedules.PolynomialDecay(0.05, 20, power=2.0, cycle=True),
    "inverse": keras_schedules.InverseTimeDecay(0.05, 10, 0.5),
    "cosine": keras_schedules.CosineDecay(0.01, 40, alpha=0.1, warmup_target=0.05, warmup_steps=9),
    "restarts": keras_schedules.CosineDecayRestarts(0.05, 10, m_mul=0.8, alpha=0.1),
    "even restarts": keras_schedules.CosineDecayRestarts(0.05, 7, t_mul=1.0),
}

VARIANTS = {
    "SGD": [
        {"learning_rate": 0.05},
        {"learning_rate": 0.05, "momentum": 0.9},
        {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    ],
    "Adagrad": [{"learning_rate": 0.05}, {"initial_accumulator_value": 0.5, "epsilon": 1e-3}],
    "Adadelta": [{"learning_rate": 0.5, "epsilon": 1e-4}, {"learning_rate": 1.0, "rho": 0.8}],
    "RMSprop": [
        {"learning_rate": 0.01},
        {"learning_rate": 0.01, "momentum": 0.5, "rho": 0.8},
        {"learning_rate": 0.01, "centered": True},
        {"learning_rate": 0.01, "centered": True, "momentum": 0.3},
    ],
    "Adam": [
        {"learning_rate": 0.01},
        {"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3},
        {"learning_rate": 0.01, "amsgrad": True},
    ],
    "AdamW": [{"learning_rate": 0.01}, {"learning_rate": 0.01, "amsgrad": True}],
    "Adamax": [{"learning_rate": 0.01}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3}],
    "Nadam": [{"learning_rate": 0.01}, {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3}],
    "Lion": [{"learning_rate": 0.01}, {"learning_rate": 0.01, "beta_1": 0.5, "beta_2": 0.8}],
    "Ftrl": [
        {"learning_rate": 0.1},
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.7,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.1,
        },
    ],
}
COMMON = [
    {"weight_decay": 0.05, "clipnorm": 0.7, "learning_rate": SCHEDULES["exponential"]},
    {"weight_decay": 0.1, "clipvalue": 0.3, "use_ema": True, "ema_momentum": 0.9},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 7},
    {"global_clipnorm": 0.7, "learning_rate": SCHEDULES["inverse"]},
]
CASES = [
    (kind, {**variants[0], **more})
    for kind, variants in VARIANTS.items()
    for more in [{}, *variants[1:], *COMMON]
]


def shown(value):
    if isinstance(value, dict):
        return ",".join(f"{name}={shown(each)}" for name, each in value.items()) or "as it is"
    return type(value).__name__ if callable(value) else str(value)


def keras_variables():
    random = np.random.default_rng(1)
    shapes = {"kernel": SHAPE, "bias": SHAPE[1:]}
    return {
        name: keras.Variable(random.normal(size=shape).astype(F), name=name)
        for name, shape in shapes.items()
    }


def gradients_of(variables):
    random = np.random.default_rng(2)
    for _ in range(STEPS):
        yield [random.normal(size=each.shape).astype(F) for each in variables.values()]


def train_by_keras(optimizer, variables):
    for gradients in gradients_of(variables):
        optimizer.apply_gradients(
            zip(map(keras.ops.array, gradients), variables.values(), strict=True)
        )


def train_on_servers(converted, placed):
    for gradients in gradients_of(placed):
        converted.apply_gradients(list(zip(gradients, placed.values(), strict=True)))


def placed_like(variables, strategy):
    with strategy.scope():
        return {name: hr.Variable(values_of(each), name=name) for name, each in variables.items()}


def values_of(variable):
    return np.array(keras.ops.convert_to_numpy(variable.value))


def assert_close(found, expected, within=1e-5):
    """Compare arrays; the difference is taken as a fraction of the largest value."""
    assert found.dtype == expected.dtype
    assert np.abs(found - expected).max() <= within * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=shown)
def test_steps_on_servers_equal_those_of_keras(kind, arguments):
    optimizer = getattr(keras_optimizers, kind)(**arguments)
    sent = pickle.dumps(server_optimizer(optimizer, "o"))
    variables = keras_variables()
    found = []
    for shards in (1, 2):
        converted = pickle.loads(sent)
        assert type(converted) is getattr(hr.optimizers, kind)
        assert converted.non_finite == "apply"
        with cluster(2, FixedShardsPartitioner(shards)) as strategy:
            placed = placed_like(variables, strategy)
            assert {len(each.shards) for each in placed.values()} == {shards}
            train_on_servers(converted, placed)
            assert converted.iterations == STEPS
            values = [each.read() for each in placed.values()]
            if optimizer.use_ema:
                values += [each.read_slot(converted, "average") for each in placed.values()]
            found.append(values)
    train_by_keras(optimizer, variables)
    expected = [values_of(each) for each in variables.values()]
    if optimizer.use_ema:
        optimizer.finalize_variable_values(list(variables.values()))
        expected += [values_of(each) for each in variables.values()]
    for values in found:
        for one, other in zip(values, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_keras_are_evaluated_without_keras(name):
    schedule = SCHEDULES[name]
    converted = server_optimizer(keras_optimizers.SGD(schedule), "o")
    assert type(converted.learning_rate).__module__ == server_schedules.__name__
    steps = [0, 1, 6, 7, 8, 9, 10, 11, 28, 29, 30, 31, 49, 50, 69, 70, 71, 100]
    rates = [converted.rate(step) for step in steps]
    np.testing.assert_allclose(rates, [float(schedule(step)) for step in steps], rtol=2e-5)


class InverseRoot(keras_schedules.LearningRateSchedule):
    """A schedule of a user."""

    def __call__(self, step):
        return 0.1 * (keras.ops.cast(step, "float32") + 1) ** -0.5


class HalfDecay(keras_schedules.ExponentialDecay):
    """A schedule of Keras that a user changed."""

    def __call__(self, step):
        return 0.5 * super().__call__(step)


@pytest.mark.parametrize("schedule", [InverseRoot(), HalfDecay(0.1, 10, 0.5)], ids=shown)
def test_schedules_of_users_are_called_with_the_step(schedule):
    converted = server_optimizer(keras_optimizers.SGD(schedule), "o")
    for step in (0, 3, 50):
        assert converted.rate(step) == float(schedule(step))


def test_a_learning_rate_is_its_current_value_or_the_result_of_a_function():
    optimizer = keras_optimizers.SGD(0.5)
    optimizer.learning_rate = 0.25
    assert server_optimizer(optimizer, "o").learning_rate == 0.25
    rates = [0.5, 0.125]
    converted = server_optimizer(keras_optimizers.SGD(lambda: rates.pop()), "o")
    assert [converted.rate(7), converted.rate(7)] == [0.125, 0.5]


@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_variables_excluded_from_weight_decay_are_excluded_on_servers(by):
    optimizer, variables = keras_optimizers.AdamW(0.01, weight_decay=0.5), keras_variables()
    chosen = {"var_list": [variables["bias"]], "var_names": ["bi.s"]}[by]
    optimizer.exclude_from_weight_decay(**{by: chosen})
    assert [has_weight_decay(optimizer, each) for each in variables.values()] == [True, False]
    converted = server_optimizer(optimizer, "o")
    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        placed = placed_like(variables, strategy)
        converted.exclude_from_weight_decay(
            [
                placed[name]
                for name, each in variables.items()
                if not has_weight_decay(optimizer, each)
            ]
        )
        train_on_servers(converted, placed)
        train_by_keras(optimizer, variables)
        for name, each in variables.items():
            assert_close(placed[name].read(), values_of(each))
    assert not has_weight_decay(keras_optimizers.SGD(0.1), variables["kernel"])


def test_loss_scale_wrappers_skip_steps_with_infinite_gradients():
    inner = keras_optimizers.Adam(0.125, clipnorm=2.0, weight_decay=0.1)
    inner.exclude_from_weight_decay(var_names=["bias"])
    variables = keras_variables()
    wrapper = keras_optimizers.LossScaleOptimizer(inner)
    converted = server_optimizer(wrapper, "o")
    assert isinstance(converted, hr.optimizers.Adam)
    assert (converted.non_finite, converted.learning_rate) == ("skip", 0.125)
    assert converted.clipnorm == 2.0
    assert [has_weight_decay(wrapper, each) for each in variables.values()] == [True, False]
    with cluster(1) as strategy:
        placed = placed_like(variables, strategy)
        before = placed["bias"].read()
        gradient = np.full(5, np.inf, F)
        converted.apply_gradients([(gradient, placed["bias"])])
        assert (placed["bias"].read() == before).all()
        assert converted.iterations == 0


def test_the_loss_scale_factor_and_bounds_of_0_change_nothing():
    optimizer = keras_optimizers.SGD(0.1, loss_scale_factor=8.0, clipnorm=0.0)
    converted = server_optimizer(optimizer, "o")
    assert (converted.clipnorm, converted.non_finite) == (None, "apply")


class Renamed(keras_optimizers.Adam):
    """A subclass that keeps the rule."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = "mine"


class SignSGD(keras_optimizers.SGD):
    """A subclass with another rule."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.sign(gradient) * learning_rate)


class Custom(keras_optimizers.Optimizer):
    """An optimizer of a user."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class TwiceApplied(keras_optimizers.LossScaleOptimizer):
    """A wrapper with another rule."""

    def apply(self, grads, trainable_variables=None):
        super().apply([2 * grad for grad in grads], trainable_variables)


def test_subclasses_that_keep_the_rule_are_converted():
    converted = server_optimizer(Renamed(0.5, beta_1=0.5), "o")
    assert type(converted) is hr.optimizers.Adam
    assert (converted.learning_rate, converted.rule.beta_1) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda o, name=name: getattr(o, name)(), f"{name}: its rule needs a whole variable")
            for name in WHOLE_VARIABLE_OPTIMIZERS
        ),
        (lambda o: o.ScheduleFreeAdamW(), "ScheduleFreeAdamW: its slots start as copies"),
        (
            lambda o: o.MultiOptimizer(lambda v: o.SGD()),
            "MultiOptimizer: they train all variables of a",
        ),
        (lambda o: SignSGD(0.1), "SignSGD: it overrides update_step"),
        (lambda o: Custom(0.1), "Custom: it overrides update_step"),
        (lambda o: TwiceApplied(o.SGD(0.1)), "TwiceApplied: it overrides apply"),
        (lambda o: o.LossScaleOptimizer(SignSGD(0.1)), "SignSGD: it overrides update_step"),
        (lambda o: o.Adam(gradient_accumulation_steps=4), "gradient_accumulation_steps=4"),
    ],
)
def test_unsupported_optimizers_are_rejected_and_supported_ones_listed(make, words):
    optimizer = make(keras_optimizers)
    for refuse in (check_optimizer, lambda each: server_optimizer(each, "o")):
        with pytest.raises(FailedPreconditionError, match=re.escape(words)) as raised:
            refuse(optimizer)
        assert ", ".join(SERVER_OPTIMIZERS) in str(raised.value)


def test_every_optimizer_of_keras_is_supported_or_rejected_by_name():
    kinds = {
        name: each
        for name, each in vars(keras_optimizers).items()
        if isinstance(each, type) and issubclass(each, keras_optimizers.Optimizer)
    }
    wrappers = {"Optimizer", "LossScaleOptimizer"}
    refused = {*WHOLE_VARIABLE_OPTIMIZERS, "MultiOptimizer", "ScheduleFreeAdamW"}
    assert kinds.keys() <= wrappers | refused | set(SERVER_OPTIMIZERS)
    assert set(SERVER_OPTIMIZERS) == VARIANTS.keys()


def test_optimizers_of_keras_have_the_slots_of_the_servers_under_their_names():
    # `optimizer_on_servers` finds them by these names.
    variable = keras.Variable(np.ones(SHAPE, F), name="w")
    for kind, variants in VARIANTS.items():
        for arguments in variants:
            optimizer = getattr(keras_optimizers, kind)(**arguments, use_ema=True)
            optimizer.build([variable])
            slots = [slot.name for slot in slots_for_rule(server_optimizer(optimizer, "o").rule)]
            wanted = {f"{variable.path}_{name}".replace("/", "_") for name in (*slots, "average")}
            assert wanted <= {each.name for each in optimizer.variables}, kind


def test_values_that_are_no_keras_optimizer_raise_type_error():
    with pytest.raises(
        TypeError, match="must be an optimizer of Keras, but got a value of type SG"
    ):
        server_optimizer(hr.optimizers.SGD(0.1), "o")
