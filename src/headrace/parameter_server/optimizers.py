"""Optimizers: handles with numbers, as Keras has them. What they change is on the servers.

Arguments, defaults and formulas are those of Keras 3, but for what belongs to a training loop
(`loss_scale_factor`, `gradient_accumulation_steps`).
"""

from __future__ import annotations

import sys
from typing import Unpack

from headrace.arguments import check_flag
from headrace.parameter_server import schedules
from headrace.parameter_server.gradients import NonFinite
from headrace.parameter_server.in_background import InBackground
from headrace.parameter_server.operations import (
    AdadeltaRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    FtrlRule,
    LionRule,
    NadamRule,
    OptimizerRule,
    RMSpropRule,
    RowWiseAdagradRule,
    SgdRule,
)
from headrace.parameter_server.optimizer import Averaging, Optimizer, Rate, check_number

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


class SGD(Optimizer):
    """Gradient descent, with momentum.

    >>> import headrace as hr
    >>> hr.optimizers.SGD(0.1, momentum=0.9).rule
    SgdRule(momentum=0.9)

    Args:
        learning_rate: A number, or a function of the step.
        momentum: Between 0 and 1.
        nesterov: Whether to look ahead.
        weight_decay: Fraction of a value that each step takes off, times the learning rate.
        clipnorm: Largest norm of the gradient of one variable.
        clipvalue: Largest element of a gradient.
        global_clipnorm: Largest norm of all gradients of a step together.
        name: Of its slots on the servers.
        non_finite: "raise", "skip" or "apply".
        **averaging: `use_ema`, `ema_momentum` and `ema_overwrite_frequency`: running averages of
            variables, in a slot "average" that `variable.read_slot` returns.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        check_number("momentum", momentum, maximum=1.0)
        check_flag("nesterov", nesterov, or_none=False)
        rule = SgdRule(momentum=float(momentum), nesterov=bool(nesterov), weight_decay=weight_decay)
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class Adagrad(Optimizer):
    """Adagrad: the more an element was changed, the less it changes.

    Args:
        learning_rate: A number, or a function of the step.
        initial_accumulator_value: What sums of squares begin with.
        epsilon: Added to them.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        super().__init__(
            self._rule(initial_accumulator_value, epsilon, weight_decay),
            learning_rate,
            clipnorm,
            clipvalue,
            global_clipnorm,
            name,
            non_finite,
            **averaging,
        )

    @staticmethod
    def _rule(accumulator: float, epsilon: float, decay: float | None) -> OptimizerRule:
        check_number("initial_accumulator_value", accumulator)
        check_number("epsilon", epsilon)
        return AdagradRule(
            initial_accumulator_value=accumulator, epsilon=epsilon, weight_decay=decay
        )


class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum a row, of the mean of its squares: a slot of 1 in place of `dim`.

    Arguments are those of `Adagrad`.
    """

    @staticmethod
    def _rule(accumulator: float, epsilon: float, decay: float | None) -> OptimizerRule:
        check_number("initial_accumulator_value", accumulator)
        check_number("epsilon", epsilon)
        return RowWiseAdagradRule(
            initial_accumulator_value=accumulator, epsilon=epsilon, weight_decay=decay
        )


class Adadelta(Optimizer):
    """Adadelta: steps are scaled by the root mean square of earlier steps.

    Args:
        learning_rate: A number, or a function of the step.
        rho: How long squares are remembered.
        epsilon: Added to the mean squares.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        check_number("rho", rho, maximum=1.0)
        check_number("epsilon", epsilon)
        rule = AdadeltaRule(rho=rho, epsilon=epsilon, weight_decay=weight_decay)
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class RMSprop(Optimizer):
    """RMSprop: steps are divided by a running root mean square of the gradients.

    Args:
        learning_rate: A number, or a function of the step.
        rho: How long squares are remembered.
        momentum: Of the steps; 0: none.
        epsilon: Added to the mean square.
        centered: Whether the mean gradient's square is taken off it.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        check_number("rho", rho, maximum=1.0)
        check_number("momentum", momentum)
        check_number("epsilon", epsilon)
        check_flag("centered", centered, or_none=False)
        rule = RMSpropRule(
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            centered=bool(centered),
            weight_decay=weight_decay,
        )
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class Adam(Optimizer):
    """Adam: running averages of gradients and of their squares.

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: How long gradients are remembered.
        beta_2: How long squares are remembered.
        epsilon: Added to the root of the squares.
        amsgrad: Whether the largest average of squares so far counts.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        check_flag("amsgrad", amsgrad, or_none=False)
        rule = AdamRule(
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=bool(amsgrad),
            weight_decay=weight_decay,
        )
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class AdamW(Adam):
    """Adam with decay of weights, apart from the gradient.

    Args:
        learning_rate: A number, or a function of the step.
        weight_decay: Fraction of a value that each step takes off, times the learning rate.
        beta_1: As for `Adam`, and so are the rest.
        beta_2: See there.
        epsilon: See there.
        amsgrad: See there.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        check_number("weight_decay", weight_decay)
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            weight_decay,
            clipnorm,
            clipvalue,
            global_clipnorm,
            name,
            non_finite=non_finite,
            **averaging,
        )


class Adamax(Optimizer):
    """Adamax: Adam with the largest recent gradient in place of the mean square.

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: How long gradients are remembered.
        beta_2: How fast the largest gradient decays.
        epsilon: Added to the divisor.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        rule = AdamaxRule(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=weight_decay)
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class Nadam(Optimizer):
    """Nadam: Adam with Nesterov momentum.

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: How long gradients are remembered.
        beta_2: How long squares are remembered.
        epsilon: Added to the divisor.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        _check_betas(beta_1, beta_2)
        check_number("epsilon", epsilon)
        rule = NadamRule(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, weight_decay=weight_decay)
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class Lion(Optimizer):
    """Lion: every element changes by the learning rate, in a direction that has momentum.

    Args:
        learning_rate: A number, or a function of the step.
        beta_1: How much of the direction is momentum; more than 0.
        beta_2: How long gradients are remembered.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
    ) -> None:
        check_number("beta_1", beta_1, maximum=1.0)
        if beta_1 == 0:
            raise ValueError("`beta_1` must be more than 0, but got 0: there would be no momentum")
        check_number("beta_2", beta_2, maximum=1.0)
        rule = LionRule(beta_1=beta_1, beta_2=beta_2, weight_decay=weight_decay)
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


class Ftrl(Optimizer):
    """Follow the regularized leader: sparse weights from many features.

    Args:
        learning_rate: A number, or a function of the step.
        learning_rate_power: At most 0; how steps shrink. -0.5: by the root of the squares' sum.
        initial_accumulator_value: What sums of squares begin with.
        l1_regularization_strength: At least 0; what makes weights 0.
        l2_regularization_strength: At least 0; what makes weights small.
        l2_shrinkage_regularization_strength: At least 0; added to the gradient.
        beta: Of the paper.
        weight_decay: As for `SGD`, and so are the rest.
        clipnorm: See there.
        clipvalue: See there.
        global_clipnorm: See there.
        name: See there.
        non_finite: See there.
        **averaging: See there.
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
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
        *,
        non_finite: NonFinite = "raise",
        **averaging: Unpack[Averaging],
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
            weight_decay=weight_decay,
        )
        super().__init__(
            rule, learning_rate, clipnorm, clipvalue, global_clipnorm, name, non_finite, **averaging
        )


def _check_betas(beta_1: float, beta_2: float) -> None:
    for argument, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
        check_number(argument, beta, maximum=1.0)
        if beta == 1:
            raise ValueError(f"`{argument}` must be less than 1, but got {beta}")
