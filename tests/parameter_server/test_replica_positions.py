"""Acknowledged operations are never missing without an error, under random faults.

Seats, leaders and lives are the real classes. The test replaces the messages between the two
servers: each arrives at once or not at all. Servers pause, end and restart at any moment, and the
network between them may fail.
"""

from __future__ import annotations

import random

import pytest

from headrace.parameter_server.messages import ExecuteOperations
from headrace.parameter_server.replica_state import ReplicaRole, ReplicaState, RequestDecision
from headrace.parameter_server.server_states import ServerStates, StoreLeaders


class Server:
    """One of two servers of store 0."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.other: Server
        self.is_paused = self.is_down = self.is_cut = False
        self.end()

    @property
    def answers(self) -> bool:
        return not (self.is_paused or self.is_down)

    def end(self) -> None:
        self.seat = ReplicaState()
        self.has: set[int] = set()
        self.is_followed = False

    def reaches_other(self) -> bool:
        return self.other.answers and not self.is_cut

    def give_up(self) -> None:
        self.seat.discard_state()
        self.has, self.is_followed = set(), False

    def mend(self) -> None:
        """Have the other seat follow, and get all, as a leading seat tries again and again."""
        if self.seat.role is not ReplicaRole.LEADER or self.is_followed or not self.reaches_other():
            return
        seat, other = self.seat, self.other
        if other.seat.outranks(seat.term, seat.state_id) or not other.seat.become_follower(
            seat.term, seat.state_id, seat.position
        ):
            self.give_up()
            return
        other.has, other.is_followed = set(self.has), False
        other.seat.is_complete = self.is_followed = True

    def in_touch(self) -> bool:
        """Ask the other seat whether this one leads; False: it does not."""
        if self.is_followed:
            seat = self.seat
            if not self.reaches_other() or not self.other.seat.is_following(
                seat.term, seat.state_id
            ):
                self.is_followed = False
                self.mend()
        return self.seat.role is ReplicaRole.LEADER

    def begin(self, life: str) -> None:
        """Begin new contents, if the other seat agrees."""
        if self.seat.role is not ReplicaRole.EMPTY and self.seat.is_complete:
            return
        self.give_up()
        if self.reaches_other() and self.other.seat.become_follower(1, life):
            self.other.has, self.other.is_followed = set(), False
            self.seat.become_leader(life)
            self.mend()

    def carry_out(self, operation: int) -> bool:
        self.in_touch()
        if self.seat.role is not ReplicaRole.LEADER:
            return False
        self.has.add(operation)
        self.seat.advance_position(self.place, 1)
        if self.is_followed:
            self.other.has.add(operation)
            self.other.seat.position = self.seat.position
        return True


class Client:
    """Whoever asks: what it knows, and which operations it must find."""

    def __init__(self) -> None:
        self.lives = ServerStates(2, "server {}".format)
        self.leaders = StoreLeaders(("0", "1"), 2)
        self.must: set[int] = set()
        self.life = ""

    def tell(self, other: Client) -> None:
        """Say what is known, with a greeting or an answer."""
        other.lives.merge(self.lives.acknowledged_states())
        if other.life in ("", self.life):
            other.life = self.life
            other.must |= self.must


class Storm:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        first, second = self.servers = (Server(0), Server(1))
        first.other, second.other = second, first
        self.clients = [Client() for _ in range(3)]
        self.operations = self.lives = self.acknowledged = self.outdated = 0

    def ask(self, client: Client) -> None:
        """Send a request as `WorkerCall` does, and check the reply against the known positions."""
        leaders, lives = client.leaders, client.lives
        asked = leaders.find_server(0)
        server = self.servers[asked]
        life = lives.state_id(0)
        message = leaders.address_message(
            ExecuteOperations((), (), life), 0, lives.acknowledged_position(0, life)
        )
        if not server.answers or self.random.random() < 0.05:
            leaders.record_unavailable(0, asked)
            return
        if server.seat.role is ReplicaRole.LEADER:
            server.in_touch()
        admission = server.seat.decide(
            life,
            peer_unavailable=message.peer_unavailable,
            required_position=message.required_position,
        )
        if admission is RequestDecision.STATE_LOST:
            lives.record_state(0, server.seat.state_id)
            client.life, client.must = server.seat.state_id, set()  # the server reported the loss
        elif admission in (RequestDecision.EXECUTE, RequestDecision.TAKE_OVER):
            if admission is RequestDecision.TAKE_OVER:
                server.is_followed = False
                server.mend()
            self.operations += 1
            if not server.carry_out(self.operations):
                leaders.record_not_leader(0, asked, is_empty=True)
                return
            seat = server.seat
            leaders.record_reply(0, asked)
            lives.record_state(0, seat.state_id, len(server.has), seat.position)
            assert client.life in ("", seat.state_id)
            client.life = seat.state_id
            client.must.add(self.operations)
            missing = client.must - server.has
            assert not missing, f"acknowledged, and served without an error: {missing}"
            self.acknowledged += 1
        else:
            if admission is RequestDecision.STALE_STATE:
                server.give_up()
                self.outdated += 1
            is_vacant = admission is not RequestDecision.NOT_LEADER
            leaders.record_not_leader(0, asked, is_empty=is_vacant)
            if leaders.take_lead_request(0) is not None:
                self.lives += 1
                if self.servers[0].answers:
                    self.servers[0].begin(f"life {self.lives}")

    def happen(self) -> None:
        chance = self.random
        server = chance.choice(self.servers)
        match chance.choices(range(6), (40, 2, 2, 1, 6, 6))[0]:
            case 0:
                self.ask(chance.choice(self.clients))
            case 1:
                server.is_paused = not server.is_paused
            case 2:
                server.is_down = not server.is_down
                if server.is_down:
                    server.is_paused = False
                    server.end()
            case 3:
                for each in self.servers:
                    each.is_cut = not each.is_cut
            case 4:
                one, other = chance.sample(self.clients, 2)
                one.tell(other)
            case 5:
                if server.answers:
                    server.mend()


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_what_was_acknowledged_is_never_missing_without_an_error(first_seed: int) -> None:
    acknowledged = outdated = 0
    for seed in range(first_seed, first_seed + 100):
        storm = Storm(seed)
        try:
            for _ in range(400):
                storm.happen()
        except AssertionError:
            print("seed", seed)
            raise
        acknowledged += storm.acknowledged
        outdated += storm.outdated
        # When all are there and reach each other, the store can be used again.
        for server in storm.servers:
            server.is_paused = server.is_down = server.is_cut = False
        for _ in range(60):
            for server in storm.servers:
                server.mend()
            for client in storm.clients:
                storm.ask(client)
        for client in storm.clients:
            carried_out = storm.acknowledged
            for _ in range(20):
                storm.ask(client)
            assert storm.acknowledged > carried_out + 10
    assert acknowledged > 1000
    assert outdated > 10
