"""Rules of the simulation kernel and its network."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import UnavailableError
from headrace.service.messages import Done, Ping
from tests.simulation.cluster import Cluster
from tests.simulation.kernel import InvariantError, Process, Simulation, require_none
from tests.simulation.network import Conditions, Link, Network, Request

ADDRESS = "server:1"


class Scene:
    """A client and a server that replies to every request."""

    def __init__(self, seed: int = 1) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.server, self.client = Process(self.network, "server"), Process(self.network, "client")
        self.outcomes: list[Any] = []
        self.received: list[Request] = []
        self.server.start()
        self.client.start()
        self.listen()
        self.link = Link(
            self.network,
            self.client,
            ADDRESS,
            lambda number, message, content: self.outcomes.append(number),
            self.outcomes.append,
        )

    def listen(self) -> None:
        self.network.listen(self.server, ADDRESS, self.take, accepts_repeats=True)

    def take(self, request: Request) -> None:
        self.received.append(request)
        request.reply(Done())


def test_delayed_messages_of_one_connection_arrive_in_order() -> None:
    scene = Scene()
    scene.network.conditions = Conditions(late=0.5, lateness=2.0)
    numbers = [scene.link.send(Ping()) for _ in range(100)]
    scene.simulation.run(60.0)
    assert scene.outcomes == numbers


def test_a_crashed_server_refuses_and_a_restarted_one_is_reachable() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.server.crash()
    scene.simulation.run(1.0)
    scene.link.send(Ping())
    scene.simulation.run(2.0)
    assert [(type(each), each.refused) for each in scene.outcomes] == [(UnavailableError, True)] * 2
    scene.server.start()
    scene.listen()
    number = scene.link.send(Ping())
    scene.simulation.run(3.0)
    assert scene.outcomes[2:] == [number]


def test_an_idle_connection_that_breaks_is_reopened_silently() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.simulation.run(1.0)
    scene.network.reset(scene.client)
    scene.simulation.run(2.0)
    scene.link.send(Ping())
    scene.simulation.run(3.0)
    assert scene.outcomes == [1, 2]


def test_a_paused_server_answers_on_resuming_and_is_lost_after_the_timeout() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.simulation.run(1.0)
    scene.server.pause(5.0)
    scene.simulation.call_later(0.5, lambda: scene.link.send(Ping()))
    scene.simulation.run(5.9)
    assert scene.outcomes == [1]
    scene.simulation.run(8.0)
    assert scene.outcomes == [1, 2]
    scene.server.pause(30.0)
    scene.link.send(Ping())
    scene.simulation.run(21.0)
    assert not scene.outcomes[2].refused


def test_a_request_may_be_delivered_twice_and_is_answered_once() -> None:
    scene = Scene()
    scene.network.conditions = Conditions(twice=1.0)
    scene.link.send(Ping())
    scene.simulation.run(1.0)
    assert (len(scene.received), scene.outcomes) == (2, [1])


def test_a_paused_process_runs_its_events_later_and_a_crashed_one_never() -> None:
    scene = Scene()
    done: list[float] = []
    scene.client.call_later(1.0, lambda: done.append(scene.simulation.now))
    scene.client.pause(3.0)
    scene.simulation.run(5.0)
    assert done == [3.0]
    scene.client.call_later(1.0, lambda: done.append(scene.simulation.now))
    scene.client.crash()
    scene.client.start()
    scene.simulation.run(10.0)
    assert done == [3.0]


def test_a_seed_gives_the_same_run_each_time() -> None:
    traces = []
    for _ in range(2):
        cluster = Cluster.of_seed(5)
        cluster.run()
        traces.append(cluster.simulation.trace(last=100_000))
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50


def test_a_server_learns_of_a_lost_client_after_its_last_request() -> None:
    messages: list[Any] = []
    for seed in range(20):
        scene = Scene(seed)
        heard: list[Any] = []
        scene.network.listen(
            scene.server,
            ADDRESS,
            lambda request, heard=heard: heard.append(request.message),
            on_client_lost=heard.append,
        )
        scene.link.send(Ping())
        scene.simulation.run(1.0)
        connection = scene.link.connection
        scene.link.send(Ping())
        scene.client.crash()
        scene.simulation.run(2.0)
        assert heard[-1] is connection
        messages.append(heard)
    assert {len(heard) for heard in messages} == {2, 3}, (
        "a request in transit may be lost or arrive"
    )


def test_a_dropped_request_is_lost_with_its_connection() -> None:
    scene = Scene()
    scene.network.listen(scene.server, ADDRESS, Request.drop)
    scene.link.send(Ping())
    scene.simulation.run(1.0)
    assert [type(each) for each in scene.outcomes] == [UnavailableError]


def test_no_message_passes_a_partition_until_it_ends() -> None:
    scene = Scene()
    scene.network.partition(scene.client, scene.server, 5.0)
    scene.link.send(Ping())
    scene.simulation.run(4.9)
    assert scene.outcomes == scene.received == []
    scene.simulation.run(6.0)
    assert scene.outcomes == [1]


def test_an_error_reports_the_seed_the_scenario_and_the_trace() -> None:
    scene = Scene(seed=17)
    pause = {"pause": lambda: scene.server.pause(0.5)}
    scene.simulation.inject_faults(pause, mean_seconds=1.0, until=10.0)
    scene.simulation.run(20.0)
    reports = scene.simulation.report("why")
    with pytest.raises(InvariantError, match=r"no odd numbers: \[2, 3\]") as raised, reports:
        require_none([2, 3], "no odd numbers", of=[scene.server])
    seed, scenario, trace = raised.value.__notes__
    assert seed == "seed 17 at 20.000 s"
    assert scenario == "why"
    assert trace.count("server") == trace.count("\n") + 1, "only lines of that process"
    assert "resumes" in trace
    assert 3 < scene.simulation.fault_counts["pause"] < 30
