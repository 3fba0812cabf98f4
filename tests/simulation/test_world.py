"""The world that a simulation runs in keeps its own rules."""

from __future__ import annotations

from typing import Any

from headrace.errors import UnavailableError
from headrace.service.messages import Done, Ping
from tests.simulation.network import Link, Network, Peer, Request, Weather
from tests.simulation.run import run
from tests.simulation.scenario import scenario_of
from tests.simulation.world import World

ADDRESS = "server:1"


class Scene:
    """A client and a server that answers everything."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.server, self.client = Peer(self.network, "server"), Peer(self.network, "client")
        self.heard: list[Any] = []
        self.taken: list[Request] = []
        self.server.begin()
        self.client.begin()
        self.listen()
        self.link = Link(
            self.network,
            self.client,
            ADDRESS,
            lambda ticket, message, content: self.heard.append(ticket),
            self.heard.append,
        )

    def listen(self) -> None:
        self.network.listen(self.server, ADDRESS, self.take, repeats=True)

    def take(self, request: Request) -> None:
        self.taken.append(request)
        request.reply(Done())


def test_what_is_sent_over_one_connection_arrives_in_order_however_late() -> None:
    scene = Scene()
    scene.network.weather = Weather(late=0.5, lateness=2.0)
    tickets = [scene.link.send(Ping()) for _ in range(100)]
    scene.world.run(60.0)
    assert scene.heard == tickets


def test_a_dead_server_refuses_and_one_that_lives_again_is_reached_again() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.server.die()
    scene.world.run(1.0)
    scene.link.send(Ping())
    scene.world.run(2.0)
    assert [(type(each), each.refused) for each in scene.heard] == [(UnavailableError, True)] * 2
    scene.server.begin()
    scene.listen()
    ticket = scene.link.send(Ping())
    scene.world.run(3.0)
    assert scene.heard[2:] == [ticket]


def test_a_connection_that_breaks_while_nothing_is_asked_is_made_again_without_a_word() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.world.run(1.0)
    scene.network.reset(scene.client)
    scene.world.run(2.0)
    scene.link.send(Ping())
    scene.world.run(3.0)
    assert scene.heard == [1, 2]


def test_a_paused_server_answers_when_it_goes_on_and_is_given_up_after_long_silence() -> None:
    scene = Scene()
    scene.link.send(Ping())
    scene.world.run(1.0)
    scene.server.pause(5.0)
    scene.world.at(0.5, lambda: scene.link.send(Ping()))
    scene.world.run(5.9)
    assert scene.heard == [1]
    scene.world.run(8.0)
    assert scene.heard == [1, 2]
    scene.server.pause(30.0)
    scene.link.send(Ping())
    scene.world.run(21.0)
    assert not scene.heard[2].refused


def test_a_request_may_be_taken_twice_and_is_answered_once() -> None:
    scene = Scene()
    scene.network.weather = Weather(twice=1.0)
    scene.link.send(Ping())
    scene.world.run(1.0)
    assert (len(scene.taken), scene.heard) == (2, [1])


def test_a_paused_process_does_later_what_a_dead_one_never_does() -> None:
    scene = Scene()
    done: list[float] = []
    scene.client.later(1.0, lambda: done.append(scene.world.now))
    scene.client.pause(3.0)
    scene.world.run(5.0)
    assert done == [3.0]
    scene.client.later(1.0, lambda: done.append(scene.world.now))
    scene.client.die()
    scene.client.begin()
    scene.world.run(10.0)
    assert done == [3.0]


def test_a_seed_tells_the_same_story_each_time() -> None:
    stories = [run(scenario_of(5)).world.story(last=100_000) for _ in range(2)]
    assert stories[0] == stories[1]
    assert len(stories[0]) > 50
