"""Tests of the resolver for processes of torchrun."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from headrace.cluster.torchrun import exchange_addresses
from headrace.distribute import TorchrunClusterResolver
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.transport.address import find_stable_port
from tests.cluster.alone import on_loopback_alone


@pytest.fixture(scope="module")
def torch():
    """The torch package, with the resources that it opens once and keeps."""
    import torch.distributed  # noqa: PLC0415 - seconds to load

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach()
    )
    return torch


@pytest.fixture
def world(monkeypatch):
    """Set the environment variables of a rank."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        monkeypatch.delenv(name)

    def write(rank, size, **others):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in others.items():
            monkeypatch.setenv(name, str(value))

    return write


class DictStore:
    """A store in memory, possibly with entries of an earlier start."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def exchange_all(store, addresses, seconds=30.0):
    """Let all ranks exchange their addresses; return the result of each."""
    found = {}

    def run(rank):
        found[rank] = exchange_addresses(
            store, rank, len(addresses), addresses[rank], seconds=seconds
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(addresses))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(addresses))]


def test_each_rank_finds_all_addresses_in_rank_order():
    addresses = ["a:1", "b:2", "[::1]:3"]
    assert exchange_all(DictStore(), addresses) == [addresses] * 3


def test_store_entries_from_before_a_restart_are_ignored():
    store = DictStore()
    exchange_all(store, ["a:1", "b:2", "c:3"])
    # One rank keeps its port, one changes it, and one rank is removed.
    assert exchange_all(store, ["a:1", "d:4"]) == [["a:1", "d:4"]] * 2
    assert exchange_all(store, ["e:5", "b:2", "c:3"]) == [["e:5", "b:2", "c:3"]] * 3


def test_missing_rank_is_named():
    with pytest.raises(
        UnavailableError, match=r"no addresses of all 3 ranks of torchrun after 0.05 s: rank 1, 2 "
    ):
        exchange_addresses(DictStore(), 0, 3, "a:1", seconds=0.05)
    with pytest.raises(UnavailableError, match="rank 0 has not registered its address"):
        exchange_addresses(DictStore(), 1, 3, "a:1", seconds=0.05)


def test_single_process_is_a_worker_without_a_store(world):
    world(0, 1)
    resolver = TorchrunClusterResolver(port=2222)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cluster_spec().as_dict() == {"worker": ["127.0.0.1:2222"]}
    assert resolver.master() == "127.0.0.1:2222"
    assert TorchrunClusterResolver(host="here").master().startswith("here:")


def test_local_rank_is_from_torchrun_or_derived_from_the_rank(world):
    world(5, 8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1)
    resolver = TorchrunClusterResolver()
    assert (resolver.local_rank, resolver.group_rank) == (1, 1)
    world(6, 8, LOCAL_WORLD_SIZE=4)
    resolver = TorchrunClusterResolver()
    assert (resolver.local_rank, resolver.group_rank) == (2, 1)
    world(0, 1)
    resolver = TorchrunClusterResolver()
    assert (resolver.local_rank, resolver.group_rank) == (0, 0)
    world(3, 8)  # unknown which ranks share a machine
    resolver = TorchrunClusterResolver()
    with pytest.raises(FailedPreconditionError, match="LOCAL_RANK is not set"):
        print(resolver.local_rank)
    with pytest.raises(FailedPreconditionError, match="GROUP_RANK is not set"):
        print(resolver.group_rank)


def test_missing_variables_are_an_error_that_names_torchrun(world, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(FailedPreconditionError, match=r"RANK is not set.*started by torchrun"):
        TorchrunClusterResolver()
    world(0, 2, LOCAL_WORLD_SIZE=1)
    with pytest.raises(FailedPreconditionError, match="MASTER_ADDR is not set"):
        TorchrunClusterResolver().cluster_spec()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), ("x", 2), (0, "two"), (-1, 2), (0, 0)])
def test_rank_outside_the_world_is_refused(world, rank, size):
    world(rank, size)
    with pytest.raises(InvalidArgumentError, match=r"RANK|WORLD_SIZE"):
        TorchrunClusterResolver()


def test_invalid_arguments_are_named(world):
    world(0, 1)
    with pytest.raises(ValueError, match="`port` must be at most 65535"):
        TorchrunClusterResolver(port=70000)
    with pytest.raises(ValueError, match="`host` must not be empty"):
        TorchrunClusterResolver(host="")
    with pytest.raises(ValueError, match="`timeout` must be more than 0"):
        TorchrunClusterResolver(timeout=0)


def test_rank_0_serves_the_store_without_an_agent(world, torch):
    port = find_stable_port()
    resolvers = []
    for rank in range(2):
        # It is unknown which ranks share a machine.
        world(rank, 2, MASTER_ADDR="localhost", MASTER_PORT=port)
        resolvers.append(TorchrunClusterResolver(timeout=30.0))
    found = {}
    threads = [
        threading.Thread(target=lambda each=each: found.update({each.task_id: each.cluster_spec()}))
        for each in resolvers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0].num_tasks("worker") == 2
    assert [resolver.master() for resolver in resolvers] == found[0].job_tasks("worker")
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    listening = {words[1] for words in sockets if words[3] == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    # As init_process_group in rank 0.
    shared = torch.distributed.TCPStore("localhost", port, is_master=True, multi_tenant=True)
    assert shared.check(["headrace/cluster"])


def test_unreachable_store_is_named(world, torch):
    port = find_stable_port()
    world(1, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(UnavailableError, match=f"the store at 127.0.0.1:{port} .MASTER_ADDR"):
        TorchrunClusterResolver(timeout=1.0).cluster_spec()


_SCRIPT = """
import json, os, sys
import headrace as hr
resolver = hr.distribute.TorchrunClusterResolver(timeout=60)
spec = resolver.cluster_spec()
# The group of torch's own goes over the same store.
import torch
torch.distributed.init_process_group("gloo")
ranks = torch.ones(1)
torch.distributed.all_reduce(ranks)
torch.distributed.destroy_process_group()
words = [resolver.task_id, resolver.local_rank, spec.as_dict(), resolver.master(), ranks.item()]
path = os.path.join(sys.argv[1], f"{resolver.task_id}.json")
with open(path, "w") as file:
    json.dump(words, file)
"""


@pytest.mark.heavy
def test_torchrun_processes_find_each_other_and_torch_works(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = on_loopback_alone([*launcher, str(script), str(tmp_path)])
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["0.json", "1.json"], words
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    spec = found[0][2]
    assert len(set(spec["worker"])) == 2
    assert all(address.startswith("127.0.0.1:") for address in spec["worker"])
    assert found == [[rank, rank, spec, spec["worker"][rank], 2.0] for rank in range(2)]
