"""Optimizer handles: arguments, learning rates, clipping, and non-finite gradients."""

from __future__ import annotations

import inspect
import pickle

import ml_dtypes
import msgspec
import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.parameter_server.gradients import global_norm, is_finite
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from tests.parameter_server.small_cluster import cluster

F = np.float32
COMMON = {
    *("clipnorm", "clipvalue", "global_clipnorm", "name", "non_finite", "shared", "rule"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency"),
}


def test_arguments_and_defaults_are_those_of_keras():
    def defaults(kind):
        # `**shared` are arguments of the base class.
        own = inspect.signature(kind).parameters
        parameters = {**inspect.signature(hr.optimizers.Optimizer).parameters, **own}
        return {
            name: parameter.default for name, parameter in parameters.items() if name not in COMMON
        }

    assert defaults(hr.optimizers.SGD) == {
        "learning_rate": 0.01, "momentum": 0.0, "nesterov": False, "weight_decay": None,
    }  # fmt: skip
    assert defaults(hr.optimizers.Adagrad) == {
        "learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7,
        "weight_decay": None,
    }  # fmt: skip
    assert defaults(hr.optimizers.RMSprop) == {
        "learning_rate": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False,
        "weight_decay": None,
    }  # fmt: skip
    assert defaults(hr.optimizers.Adam) == {
        "learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False,
        "weight_decay": None,
    }  # fmt: skip
    assert defaults(hr.optimizers.AdamW) == {
        "learning_rate": 0.001, "weight_decay": 0.004, "beta_1": 0.9, "beta_2": 0.999,
        "epsilon": 1e-7, "amsgrad": False,
    }  # fmt: skip
    assert defaults(hr.optimizers.Ftrl) == {
        "learning_rate": 0.001, "learning_rate_power": -0.5, "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0, "beta": 0.0, "weight_decay": None,
    }  # fmt: skip
    assert defaults(hr.optimizers.Adadelta) == {
        "learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7, "weight_decay": None,
    }  # fmt: skip
    for kind in (hr.optimizers.Adamax, hr.optimizers.Nadam):
        assert defaults(kind) == {
            "learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7,
            "weight_decay": None,
        }  # fmt: skip
    assert defaults(hr.optimizers.Lion) == {
        "learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.99, "weight_decay": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda o: o.SGD(-0.1), ValueError, "`learning_rate` must be at least 0, and finite"),
        (lambda o: o.SGD(float("nan")), ValueError, "`learning_rate` must be at least 0"),
        (lambda o: o.SGD("0.1"), TypeError, "`learning_rate` must be a number, but got '0.1'"),
        (lambda o: o.SGD(momentum=1.5), ValueError, "`momentum` must be at least 0 and at most 1"),
        (lambda o: o.SGD(nesterov=1), TypeError, "`nesterov` must be a bool"),
        (lambda o: o.SGD(clipnorm=-1), ValueError, "`clipnorm` must be at least 0"),
        (lambda o: o.SGD(clipnorm=1, clipvalue=1), ValueError, "only one of `clipnorm`, `clipval"),
        (lambda o: o.SGD(non_finite="drop"), ValueError, "`non_finite` must be one of raise, sk"),
        (lambda o: o.SGD(name=""), ValueError, "`name` must not be empty"),
        (lambda o: o.SGD(weight_decay=-1), ValueError, "`weight_decay` must be at least 0"),
        (lambda o: o.Adam(beta_1=1.0), ValueError, "`beta_1` must be less than 1"),
        (lambda o: o.Adam(beta_2=-0.1), ValueError, "`beta_2` must be at least 0 and at most 1"),
        (lambda o: o.AdamW(weight_decay=None), TypeError, "`weight_decay` must be a number"),
        (lambda o: o.Adagrad(epsilon=-1), ValueError, "`epsilon` must be at least 0"),
        (lambda o: o.RowWiseAdagrad(initial_accumulator_value=-1), ValueError, "initial_accumul"),
        (lambda o: o.Adadelta(rho=2), ValueError, "`rho` must be at least 0 and at most 1"),
        (lambda o: o.Adamax(beta_1=1.0), ValueError, "`beta_1` must be less than 1"),
        (lambda o: o.Nadam(beta_2=1.0), ValueError, "`beta_2` must be less than 1"),
        (lambda o: o.Lion(beta_1=0.0), ValueError, "`beta_1` must be more than 0"),
        (lambda o: o.SGD(use_ema=1), TypeError, "`use_ema` must be a bool"),
        (lambda o: o.Adam(ema_momentum=1.1), ValueError, "`ema_momentum` must be at least 0 and"),
        (lambda o: o.Lion(ema_overwrite_frequency=0), ValueError, "`ema_overwrite_frequency` must"),
        (lambda o: o.RMSprop(rho=2), ValueError, "`rho` must be at least 0 and at most 1"),
        (lambda o: o.Ftrl(learning_rate_power=0.1), ValueError, "`learning_rate_power` must be"),
        (lambda o: o.Ftrl(l1_regularization_strength=-1), ValueError, "`l1_regularization_stren"),
    ],
)
def test_invalid_optimizer_arguments_are_rejected(make, error, message):
    with pytest.raises(error, match=message):
        make(hr.optimizers)


def test_an_optimizer_pickles_with_its_rule_and_schedule():
    schedule = hr.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = hr.optimizers.Adam(schedule, amsgrad=True, clipnorm=2.0, name="mine")
    again = pickle.loads(pickle.dumps(optimizer))
    assert vars(again) == vars(optimizer)
    assert repr(again) == repr(optimizer)


def test_rules_with_numpy_numbers_can_be_sent():
    rule = hr.optimizers.Adam(beta_1=np.float32(0.5), epsilon=np.float64(1e-3), amsgrad=True).rule
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=type(rule)) == rule
    assert (rule.beta_1, rule.amsgrad) == (0.5, True)


def test_learning_rates_are_numbers_or_functions_of_the_step():
    assert hr.optimizers.SGD(np.float32(0.5)).rate(3) == 0.5
    assert hr.optimizers.SGD(lambda step: 1 / (step + 1)).rate(3) == 0.25
    with pytest.raises(ValueError, match="the learning rate of step 2 must be finite, but is inf"):
        hr.optimizers.SGD(lambda step: float("inf")).rate(2)


@pytest.mark.catalogue("2.7.7")
def test_clipnorm_is_per_variable_and_global_clipnorm_over_all():
    gradients = [F([3, 4]), F([0.3, 0.4])]
    one = hr.optimizers.SGD(clipnorm=1.0).prepare(["a", "b"], gradients)
    np.testing.assert_allclose(one[0], [0.6, 0.8], rtol=1e-6)
    assert one[1].tolist() == gradients[1].tolist()
    both = hr.optimizers.SGD(global_clipnorm=1.0).prepare(["a", "b"], gradients)
    assert global_norm(both) == pytest.approx(1.0)
    np.testing.assert_allclose(both[0] / both[1], 10, rtol=1e-5)
    value = hr.optimizers.SGD(clipvalue=0.35).prepare(["a", "b"], gradients)
    assert value[0].tolist() == F([0.35, 0.35]).tolist()
    assert value[1].tolist() == F([0.3, 0.35]).tolist()
    assert all(part.dtype == F for part in (*one, *both, *value))


def test_small_gradients_are_not_clipped():
    gradients = [F([0.1]), F([[0.2]])]
    for clip in ("clipnorm", "global_clipnorm", "clipvalue"):
        prepared = hr.optimizers.SGD(**{clip: 5.0}).prepare(["a", "b"], gradients)
        assert [part.tobytes() for part in prepared] == [part.tobytes() for part in gradients]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_are_rejected_skipped_or_applied(wrong):
    gradients = [F([1, 2]), F([[0, 1], [wrong, 3]])]
    with pytest.raises(
        InvalidArgumentError, match=r"gradient of b has 1 of 4 elements .* first at \[1, 0\]: "
    ):
        hr.optimizers.SGD().prepare(["a", "b"], gradients)
    assert hr.optimizers.SGD(non_finite="skip").prepare(["a", "b"], gradients) is None
    assert len(hr.optimizers.SGD(non_finite="apply").prepare(["a", "b"], gradients)) == 2
    assert hr.optimizers.SGD(non_finite="skip").prepare(["a"], gradients[:1]) is not None


def test_large_values_with_infinite_squares_are_finite():
    assert is_finite(F([1e38, -1e38]))
    assert is_finite(np.float64([1e308]))
    assert is_finite(np.float16([60000.0]))
    assert is_finite(np.zeros((0, 3), F))
    assert not is_finite(F([[1e38, np.inf]]))


def test_clipping_keeps_the_dtype():
    gradients = [np.array([3.0, 4.0], kind) for kind in (F, np.float64, ml_dtypes.bfloat16)]
    for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
        clipped = hr.optimizers.SGD(**{clip: 0.5}).prepare(["a"] * 3, gradients)
        assert [part.dtype for part in clipped] == [part.dtype for part in gradients]
        assert all(part.max() <= 0.5 for part in clipped)


def test_large_gradients_are_clipped_to_their_norm():
    (clipped,) = hr.optimizers.SGD(clipnorm=1.0).prepare(["a"], [F([3e30, 4e30])])
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
    assert global_norm([np.full(200_000, 1e300)]) == np.inf


class Target:
    def push_gradients(self, optimizer, pairs):
        self.pushed = (optimizer, pairs)
        return 7


def test_gradients_are_pushed_by_the_first_variable():
    target, optimizer = Target(), hr.optimizers.SGD()
    assert optimizer.apply_gradients(zip([None, F([1])], [Target(), target], strict=True)) == 7
    assert target.pushed == (optimizer, [(F([1]), target)])


def test_steps_without_gradients_or_server_variables_are_rejected():
    with pytest.raises(ValueError, match="none of 1 variables has a gradient"):
        hr.optimizers.SGD().apply_gradients([(None, Target())])
    with pytest.raises(TypeError, match=r"but got a ndarray; create it in the scope.*assign_sub"):
        hr.optimizers.SGD().apply_gradients([(F([1]), F([1]))])


def test_variables_are_excluded_from_weight_decay_by_handle_and_by_pattern():
    with cluster(2) as strategy:
        with strategy.scope():
            weights, bias, scale = (
                hr.Variable(np.ones(4, F), name=name) for name in ("w", "dense/bias", "scale")
            )
        optimizer = hr.optimizers.SGD(0.5, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=[scale], var_names=["bias", "^norm"])
        zeros = np.zeros(4, F)
        optimizer.apply_gradients([(zeros, each) for each in (weights, bias, scale)])
        assert optimizer.iterations == 1
        values = [each.read().tolist() for each in (weights, bias, scale)]
        assert values == [[0.75] * 4, [1] * 4, [1] * 4]
        again = pickle.loads(pickle.dumps(optimizer))
        again.exclude_from_weight_decay()
        again.apply_gradients([(zeros, bias)])
        assert bias.read().tolist() == [0.75] * 4


@pytest.mark.parametrize("shards", [1, 2])
def test_an_optimizer_continues_from_assigned_slots_and_steps(shards):
    with cluster(2, FixedShardsPartitioner(shards)) as strategy:
        with strategy.scope():
            v, w = hr.Variable(np.zeros(4, F), name="v"), hr.Variable(np.zeros(4, F), name="w")
        first, second = hr.optimizers.Adam(0.1, name="a"), hr.optimizers.Adam(0.1, name="b")
        gradient = np.arange(4, dtype=F)
        for _ in range(3):
            first.apply_gradients([(gradient, v)])
        w.assign(v.read())
        for name in ("momentum", "velocity"):
            w.set_slot(second, name, v.read_slot(first, name))
            assert np.array_equal(w.read_slot(second, name), v.read_slot(first, name))
        second.counter_in(strategy.cluster).advance(strategy.cluster, 3)
        assert second.iterations == 3
        assert first.apply_gradients([(gradient, v)]) == second.apply_gradients([(gradient, w)])
        assert np.array_equal(v.read(), w.read())
        with pytest.raises(InvalidArgumentError, match=r"slot 'b/momentum' .* shape"):
            w.set_slot(second, "momentum", np.zeros((4, 1), F))


@pytest.mark.parametrize("shards", [1, 2])
def test_moving_averages_overwrite_the_values_every_n_steps(shards):
    with cluster(2, FixedShardsPartitioner(shards)) as strategy:
        with strategy.scope():
            v = hr.Variable(np.zeros((4, 2), F), name="v")
            late = hr.Variable(F(8), name="late")
        sgd = hr.optimizers.SGD(
            1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3, name="sgd"
        )
        with pytest.raises(
            NotFoundError, match="shard 0 of the variable v has no slot 'sgd/average'"
        ):
            v.read_slot(sgd, "average")
        ones = np.ones((4, 2), F)
        for value, average in ((-1, -1), (-2, -1.5), (-2.25, -2.25)):
            sgd.apply_gradients([(ones, v)])
            assert (v.read() == value).all()
            assert (v.read_slot(sgd, "average") == average).all()
        sgd.apply_gradients([(ones, v), (F(1), late)])
        assert late.read_slot(sgd, "average") == 7, (
            "the first step of this variable, not of the optimizer"
        )


def test_moving_averages_reject_sparse_gradients_before_any_update():
    with cluster(2) as strategy:
        with strategy.scope():
            v = hr.Variable(np.zeros((4, 2), F), name="v")
            table = hr.EmbeddingTable(2, name="table")
        sgd = hr.optimizers.SGD(1.0, use_ema=True, name="sgd")
        rows = hr.IndexedSlices(np.ones((1, 2), F), [1])
        for target in (v, table):
            with pytest.raises(InvalidArgumentError, match=f"gradient of {target.name} is sparse"):
                sgd.apply_gradients([(rows, target)])
        assert (v.read() == 0).all()
        assert sgd.iterations == 0
