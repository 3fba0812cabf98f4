"""Runs the cases of `hr.ray.DataCluster`."""

from __future__ import annotations

import re

import pytest

from tests.ray.local_ray import run_cases


@pytest.mark.heavy
@pytest.mark.system
@pytest.mark.timeout(520)
def test_data_cluster_on_a_local_ray_cluster():
    printed = run_cases("data_cluster_cases.py")
    assert re.search(r"^\d+ passed in", printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.system
@pytest.mark.timeout(520)
def test_data_cluster_survives_killed_processes():
    printed = run_cases("data_cluster_faults.py")
    assert re.search(r"^\d+ passed in", printed, re.MULTILINE), printed


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.system
@pytest.mark.timeout(520)
def test_programs_of_the_guides_run_on_a_local_ray_cluster():
    printed = run_cases("page_cases.py")
    assert re.search(r"^\d+ passed in", printed, re.MULTILINE), printed
