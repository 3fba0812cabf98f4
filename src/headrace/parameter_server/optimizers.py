"""Optimizers: handles with hyperparameters, as in Keras. Variables and slots are on the servers.

Arguments, defaults and formulas are those of Keras 3, except those of a training loop
(`loss_scale_factor`, `gradient_accumulation_steps`).
"""

from __future__ import annotations

import sys
from typing import Unpack

from headrace.arguments import check_flag
from headrace.parameter_server import schedules
from headrace.parameter_server.optimizer import (
    InBackground,
    Optimizer,
    OptimizerOptions,
    OptimizerOptionsWithoutDecay,
    Rate,
    check_number,
)
from headrace.parameter_server.specs import (
    AdadeltaRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    FtrlRule,
    LionRule,
    NadamRule,
    RMSpropRule,
    RowWiseAdagradRule,
    SgdRule,
)

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "InBackground",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "RowWiseAdagrad",
    "schedules",
]


def __dir__() -> list[str]:
    return list(__all__)


class SGD(Optimizer):
    """Gradient descent, with momentum.

    >>> import headrace as hr
    >>> hr.optimizers.SGD(0.1, momentum=0.9).rule
    SgdRule(momentum=0.9)

    Args:
        learning_rate: A number, or a function of the step.
        momentum: Momentum, between 0 and 1.
        nesterov: Whether to use Nesterov momentum.
        **shared: Weight decay, clipping, `name`, `non_finite` and moving averages; see `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number("momentum", momentum, maximum=1.0)
        check_flag("nesterov", nesterov, or_none=False)
        rule = SgdRule(momentum=float(momentum), nesterov=bool(nesterov))
        super().__init__(rule, learning_rate, **shared)


class Adagrad(Optimizer):
    """Adagrad: the more an element was changed, the less it changes.

    >>> hr.optimizers.Adagrad(0.05, initial_accumulator_value=0.0, name="adagrad")
    Adagrad(learning_rate=0.05, name='adagrad')

    Args:
        learning_rate: A number, or a function of the step.
        initial_accumulator_value: Initial value of the sums of squares.
        epsilon: Constant added to them.
        **shared: See `Optimizer`.
    """

    _rule: type[AdagradRule] | type[RowWiseAdagradRule] = AdagradRule

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number("initial_accumulator_value", initial_accumulator_value)
        check_number("epsilon", epsilon)
        rule = self._rule(initial_accumulator_value=initial_accumulator_value, epsilon=epsilon)
        super().__init__(rule, learning_rate, **shared)


class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row, for the mean of its squares.

    The slot has one element per row instead of `dim`.

    Arguments are those of `Adagrad`.

    >>> optimizer = hr.optimizers.RowWiseAdagrad(0.05, name="tables")
    >>> isinstance(optimizer, hr.optimizers.Adagrad)
    True
    """

    _rule = RowWiseAdagradRule


class Adadelta(Optimizer):
    """Adadelta: steps are scaled by the root mean square of earlier steps.

    >>> hr.optimizers.Adadelta(1.0, rho=0.9, name="adadelta")
    Adadelta(learning_rate=1.0, name='adadelta')

    Args:
        learning_rate: A number, or a function of the step.
        rho: Decay rate of the mean squares.
        epsilon: Constant added to the mean squares.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number("rho", rho, maximum=1.0)
        check_number("epsilon", epsilon)
        super().__init__(AdadeltaRule(rho=rho, epsilon=epsilon), learning_rate, **shared)


class RMSprop(Optimizer):
    """RMSprop: steps are divided by a running root mean square of the gradients.

    >>> hr.optimizers.RMSprop(0.01, momentum=0.9, clipvalue=1.0, name="rmsprop")
    RMSprop(learning_rate=0.01, name='rmsprop')

    Args:
        learning_rate: A number, or a function of the step.
        rho: Decay rate of the mean square.
        momentum: Momentum of the steps; 0 disables it.
        epsilon: Constant added to the mean square.
        centered: Whether to subtract the square of the mean gradient.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number("rho", rho, maximum=1.0)
        check_number("momentum", momentum)
        check_number("epsilon", epsilon)
        check_flag("centered", centered, or_none=False)
        rule = RMSpropRule(rho=rho, momentum=momentum, epsilon=epsilon, centered=bool(centered))
        super().__init__(rule, learning_rate, **shared)


class Adam(Optimizer):
    """Adam: running averages of gradients and of their squares.

    >>> schedule = hr.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)
    >>> optimizer = hr.optimizers.Adam(schedule, beta_1=0.8, clipnorm=1.0)
    >>> optimizer.rate(0), optimizer.rate(10)
    (0.1, 0.05)

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: Decay rate of the average of gradients.
        beta_2: Decay rate of the average of squares.
        epsilon: Constant added to the root of the squares.
        amsgrad: Whether to use the largest average of squares so far.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        check_flag("amsgrad", amsgrad, or_none=False)
        rule = AdamRule(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=bool(amsgrad))
        super().__init__(rule, learning_rate, **shared)


class AdamW(Adam):
    """Adam with decoupled weight decay.

    >>> optimizer = hr.optimizers.AdamW(0.001, weight_decay=0.01)
    >>> optimizer.exclude_from_weight_decay(var_names=["bias"])
    >>> optimizer.rule_for("layer/bias") == optimizer.rule_for("layer/kernel")
    False

    Args:
        learning_rate: A number, or a function of the step.
        weight_decay: Fraction of a value that each step subtracts, times the learning rate.
        beta_1: See `Adam`.
        beta_2: See `Adam`.
        epsilon: See `Adam`.
        amsgrad: See `Adam`.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **shared: Unpack[OptimizerOptionsWithoutDecay],
    ) -> None:
        check_number("weight_decay", weight_decay)
        super().__init__(
            learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **shared
        )


class Adamax(Optimizer):
    """Adamax: Adam with the largest recent gradient instead of the mean square.

    >>> hr.optimizers.Adamax(0.002, beta_2=0.99, name="adamax")
    Adamax(learning_rate=0.002, name='adamax')

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: Decay rate of the average of gradients.
        beta_2: Decay rate of the largest gradient.
        epsilon: Constant added to the divisor.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        rule = AdamaxRule(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
        super().__init__(rule, learning_rate, **shared)


class Nadam(Optimizer):
    """Nadam: Adam with Nesterov momentum.

    >>> hr.optimizers.Nadam(0.002, use_ema=True, ema_momentum=0.99, name="nadam")
    Nadam(learning_rate=0.002, name='nadam')

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: Decay rate of the average of gradients.
        beta_2: Decay rate of the average of squares.
        epsilon: Constant added to the divisor.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        rule = NadamRule(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
        super().__init__(rule, learning_rate, **shared)


class Lion(Optimizer):
    """Lion: every element changes by the learning rate, with the sign of a momentum.

    >>> hr.optimizers.Lion(0.0001, weight_decay=0.1, name="lion")
    Lion(learning_rate=0.0001, name='lion')

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: Fraction of momentum in the direction; more than 0.
        beta_2: Decay rate of the average of gradients.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number("beta_1", beta_1, maximum=1.0)
        if beta_1 == 0:
            raise ValueError("`beta_1` must be more than 0, but got 0: there would be no momentum")
        check_number("beta_2", beta_2, maximum=1.0)
        super().__init__(LionRule(beta_1=beta_1, beta_2=beta_2), learning_rate, **shared)


class Ftrl(Optimizer):
    """Follow the regularized leader: sparse weights from many features.

    >>> hr.optimizers.Ftrl(0.1, l1_regularization_strength=0.001, name="ftrl")
    Ftrl(learning_rate=0.1, name='ftrl')

    Args:
        learning_rate: A number, or a function of the step.
        learning_rate_power: Exponent of the step size, at most 0; -0.5 divides by the root of the
            sum of squares.
        initial_accumulator_value: Initial value of the sums of squares.
        l1_regularization_strength: L1 penalty, which makes weights 0; at least 0.
        l2_regularization_strength: L2 penalty, which makes weights small; at least 0.
        l2_shrinkage_regularization_strength: L2 penalty added to the gradient; at least 0.
        beta: The constant beta of the FTRL paper.
        **shared: See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **shared: Unpack[OptimizerOptions],
    ) -> None:
        check_number(
            "learning_rate_power", learning_rate_power, minimum=-sys.float_info.max, maximum=0.0
        )
        check_number("initial_accumulator_value", initial_accumulator_value)
        check_number("l1_regularization_strength", l1_regularization_strength)
        check_number("l2_regularization_strength", l2_regularization_strength)
        check_number("l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength)
        check_number("beta", beta)
        rule = FtrlRule(
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=beta,
        )
        super().__init__(rule, learning_rate, **shared)


def _check_betas(beta_1: float, beta_2: float) -> None:
    for argument, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
        check_number(argument, beta, maximum=1.0)
        if beta == 1:
            raise ValueError(f"`{argument}` must be less than 1, but got {beta}")
