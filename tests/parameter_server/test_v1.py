"""Programs without a coordinator that share variables by name."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, DeadlineExceededError
from tests.parameter_server.program_of_v1 import REPLICAS
from tests.parameter_server.small_cluster import servers, until

ROOT = Path(__file__).parents[2]
WORKERS = 2


@contextmanager
def strategy_of(started, task_type="worker", task_id=0, *, chief=False, **options):
    jobs = {"ps": [server.address for server in started], "worker": ["a:1", "b:1", "c:1"]}
    if chief:
        jobs["chief"] = ["d:1"]
    spec = hr.distribute.ClusterSpec(jobs)
    resolver = hr.distribute.SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    strategy = hr.distribute.v1.ParameterServerStrategy(resolver, **options)
    yield strategy
    strategy.close()


@pytest.mark.catalogue("2.14.6", "2.15.2", "2.15.6", "3.8.7", "3.8.8")
@pytest.mark.system
def test_aggregations_write_once_per_program():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with servers(2) as started:
        addresses = ",".join(server.address for server in started)
        tasks = [("worker", number) for number in range(WORKERS)] + [("chief", 0)]
        programs = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.parameter_server.program_of_v1", addresses,
                 str(WORKERS), kind, str(number)],
                stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env,
            )
            for kind, number in tasks
        ]  # fmt: skip
        found = [program.communicate(timeout=120)[0].strip() for program in programs]
    programs_in_all = WORKERS + 1
    summed = 10.0 + programs_in_all * REPLICAS
    first = 30.0 + programs_in_all
    row = [-float(programs_in_all)] * 2
    assert found == [f"{summed} {first} {row} {programs_in_all}"] * programs_in_all


@pytest.mark.catalogue("2.15.1", "2.15.7")
def test_other_programs_wait_for_the_values_of_the_chief(caplog, monkeypatch):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.0)
    caplog.set_level(logging.WARNING, "headrace.parameter_server.v1")
    with (
        servers(2) as started,
        strategy_of(started, task_id=0) as chief,
        strategy_of(started, task_id=1) as other,
    ):
        assert (chief.is_chief, other.is_chief) == (True, False)

        def make():
            with other.scope():
                return hr.Variable(np.zeros(3), name="v")

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(make)
            until(lambda: caplog.records)
            with chief.scope():
                first = hr.Variable(np.arange(3.0), name="v")
            made = waiting.result(30)
        assert made.read().tolist() == [0, 1, 2]
        made.assign_add(np.ones(3))
        assert first.read().tolist() == [1, 2, 3]
        assert "waited" in caplog.text
        assert "'v'" in caplog.text


@pytest.mark.catalogue("2.15.1")
def test_other_shapes_and_dtypes_for_a_name_are_rejected():
    with servers(1) as started:
        with strategy_of(started, "chief", chief=True) as chief, chief.scope():
            hr.Variable(np.zeros(3, np.float32), name="v")
            hr.EmbeddingTable(4, name="t")
        with strategy_of(started, chief=True) as other, other.scope():
            for value in (np.zeros(4, np.float32), np.zeros(3, np.float64)):
                with pytest.raises(AlreadyExistsError, match="same variables"):
                    hr.Variable(value, name="v")
            with pytest.raises(AlreadyExistsError, match="another name"):
                hr.EmbeddingTable(5, name="t")


@pytest.mark.catalogue("2.15.7")
def test_waiting_for_the_chief_times_out():
    with (
        servers(1) as started,
        strategy_of(started, task_id=2, server_timeout=0.2) as other,
        other.scope(),
        pytest.raises(DeadlineExceededError, match=r"'v'.*chief"),
    ):
        hr.Variable(0.0, name="v")


@pytest.mark.catalogue("2.15.6", "2.15.8", "3.8.1", "3.8.11", "3.8.12")
def test_datasets_are_distributed_to_this_program():
    options = {"task_id": 1, "chief": True, "replicas": 2}
    with servers(1) as started, strategy_of(started, **options) as strategy:
        seen = []

        def dataset_fn(context):
            seen.append(
                (
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                )
            )
            return hr.Dataset.range(4).batch(1)

        next(iter(strategy.distribute_datasets_from_function(dataset_fn)))
        assert seen == [(4, 2, 2)]
        whole = strategy.distribute_dataset(hr.Dataset.range(4).batch(4))
        assert [value.tolist() for value in next(iter(whole)).values] == [[0, 1], [2, 3]]


@pytest.mark.catalogue("2.15.4")
def test_the_resolver_must_name_the_task():
    spec = hr.distribute.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
    for kind, number in ((None, None), ("ps", 0), ("worker", None)):
        resolver = hr.distribute.SimpleClusterResolver(spec, task_type=kind, task_id=number)
        with pytest.raises(ValueError, match="must name the task of this program"):
            hr.distribute.v1.ParameterServerStrategy(resolver)
    no_ps = hr.distribute.SimpleClusterResolver(
        hr.distribute.ClusterSpec({"worker": ["b:1"]}), task_type="worker", task_id=0
    )
    with pytest.raises(ValueError, match="ps"):
        hr.distribute.v1.ParameterServerStrategy(no_ps)
