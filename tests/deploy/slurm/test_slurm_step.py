"""Roles, hosts and ports of ranks; wrong uses of `headrace up`; the sample scripts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.deploy.slurm_step import SlurmStep, find_node_host
from headrace.errors import FailedPreconditionError
from headrace.transport import address as addresses

SAMPLES = Path(__file__).parents[3] / "deploy" / "slurm"
VARIABLES = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "node1",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}


def make_step(rank=0, num_ranks=6, num_ps=2):
    return SlurmStep(job_id=41, step_id=2, rank=rank, num_ranks=num_ranks, num_ps=num_ps)


def test_ranks_are_chief_then_parameter_servers_then_workers():
    tasks = [make_step(rank).task for rank in range(6)]
    assert tasks == [
        ("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("worker", 2),
    ]  # fmt: skip


def test_workers_are_shared_evenly_among_worker_ranks():
    for total, shares in [(0, [1, 1, 1]), (3, [1, 1, 1]), (4, [2, 1, 1]), (8, [3, 3, 2])]:
        assert [make_step(rank).share(total) for rank in (3, 4, 5)] == shares


def test_cluster_lists_addresses_in_the_order_of_ranks():
    others = {rank: f"n{rank}:1" for rank in range(1, 6)}
    assert make_step().cluster("n0:1", others) == {
        "chief": ["n0:1"],
        "ps": ["n1:1", "n2:1"],
        "worker": ["n3:1", "n4:1", "n5:1"],
    }


def test_directory_is_per_job_and_step_where_the_job_was_submitted(tmp_path):
    step = make_step()
    assert step.directory(tmp_path) == tmp_path / "41.2"
    submitted = {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert step.directory(None, submitted) == tmp_path / ".headrace" / "41.2"
    assert step.directory(None, {}) == Path.home() / ".headrace" / "41.2"


def test_ranks_choose_different_ports_that_stay_the_same():
    ports = [make_step(rank).find_port("127.0.0.1") for rank in range(6)]
    assert len(set(ports)) == 6
    assert all(20_000 <= port < 32_000 for port in ports)


def test_node_host_is_the_route_to_the_launcher_if_the_name_is_unknown():
    assert find_node_host(VARIABLES | {"SLURMD_NODENAME": "no-such-node.invalid"}) == "127.0.0.1"
    # A node name of loopback is no address for other nodes.
    assert find_node_host(VARIABLES | {"SLURMD_NODENAME": "localhost"}) == "127.0.0.1"
    with pytest.raises(FailedPreconditionError, match="set it with --host"):
        find_node_host({})


def test_node_host_is_the_address_of_the_node_name(monkeypatch):
    monkeypatch.setattr(addresses, "resolve", lambda host, port: f"10.1.2.3:{port}")
    monkeypatch.setattr(addresses, "is_local_host", lambda host: host == "10.1.2.3")
    assert find_node_host(VARIABLES) == "10.1.2.3"


@pytest.mark.parametrize(
    ("options", "changes", "status", "message"),
    [
        ([], {"SLURM_STEP_ID": None}, 1, "must be started by srun"),
        (["--ps", "2"], {}, 2, "--ps 2 requires at least 4 tasks"),
        ([], {"SLURM_STEP_NUM_TASKS": "1"}, 2, "--ps 0 requires at least 2 tasks"),
        ([], {"SLURM_PROCID": "3"}, 2, "SLURM_PROCID=3 must be less than the 3 tasks"),
        (["--ps", "-1"], {}, 2, "--ps"),
        (["--timeout", "1"], {}, 2, "--timeout"),
        (["--run-dir", "FILE"], {}, 1, "cannot create"),
    ],
)
def test_wrong_use_names_the_fault_and_the_fix(options, changes, status, message, tmp_path):
    (tmp_path / "file").touch()
    options = [each.replace("FILE", f"{tmp_path}/file") for each in options]
    result = CliRunner().invoke(app, ["up", *options], env=VARIABLES | changes)
    assert result.exit_code == status
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["headrace.sbatch", "heterogeneous.sbatch"])
def test_sample_uses_existing_options(name):
    text = (SAMPLES / name).read_text().replace("\\\n", " ")
    [command] = re.findall(r"headrace up (.*)", text.split("exec srun")[1])
    known = {option for each in get_command(app).commands["up"].params for option in each.opts}
    used = {word for word in shlex.split(command) if word.startswith("--")}
    assert used - {"--"} <= known
    assert '-- "$@"' in command
