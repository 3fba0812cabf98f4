"""Learning-rate schedules, compared with Keras."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from tests.parameter_server.optimizers_in_use import SCHEDULES

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())["schedules"]


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules_match_keras(case):
    name, arguments = SCHEDULES[case]
    schedule = getattr(hr.optimizers.schedules, name)(**arguments)
    rates = [schedule(step) for step in range(0, 60, 3)]
    np.testing.assert_allclose(rates, REFERENCE[case], rtol=1e-5, atol=1e-8)
    assert all(type(rate) is float for rate in rates)


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules_can_be_pickled_and_compared(case):
    name, arguments = SCHEDULES[case]
    schedule = getattr(hr.optimizers.schedules, name)(**arguments)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.ExponentialDecay(0.1, 0, 0.5), "`decay_steps` must be more than 0, but got 0"),
        (lambda s: s.CosineDecay(0.1, -1), "`decay_steps` must be more than 0"),
        (lambda s: s.PolynomialDecay(0.1, 0), "`decay_steps` must be more than 0"),
        (lambda s: s.InverseTimeDecay(0.1, 0, 1), "`decay_steps` must be more than 0"),
        (lambda s: s.PiecewiseConstantDecay([1], [1]), "must be 1 less than that of `values`"),
        (lambda s: s.PiecewiseConstantDecay([2, 1], [1, 2, 3]), "`boundaries` must be increasing"),
    ],
)
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make(hr.optimizers.schedules)
