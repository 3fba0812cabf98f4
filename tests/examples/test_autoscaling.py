"""The autoscaling example, with a shorter stable period of the policy."""

from __future__ import annotations

from functools import partialmethod

import pytest

from examples import autoscaling
from headrace.service.dispatcher.worker_scaling import ScalingPolicy


@pytest.mark.system
@pytest.mark.timeout(300)
def test_the_example_scales_out_and_in(monkeypatch, capsys):
    monkeypatch.setattr(
        ScalingPolicy, "__init__", partialmethod(ScalingPolicy.__init__, stable_seconds=4.0)
    )
    assert autoscaling.run(max_workers=2) > 0
    lines = capsys.readouterr().out.splitlines()
    workers = [line.count("#") for line in lines]
    assert workers[0] == workers[-1] == 1
    assert max(workers) == 2
