"""Acknowledged operations are never lost without an error, under random faults.

`ReplicaState`, `StoreLeaders` and `ServerStates` are the real classes. The test replaces the
messages between the two servers: each arrives immediately or not at all. Servers may pause, end and
restart at any moment, and the network between them may fail.
"""

from __future__ import annotations

import random

import pytest

from headrace.parameter_server.messages import ExecuteOperations
from headrace.parameter_server.replica_state import ReplicaRole, ReplicaState, RequestDecision
from headrace.parameter_server.server_states import ServerStates, StoreLeaders


class Server:
    """One of two servers of store 0."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.other: Server
        self.is_paused = self.is_down = self.is_disconnected = False
        self.end()

    @property
    def is_available(self) -> bool:
        return not (self.is_paused or self.is_down)

    def end(self) -> None:
        self.state = ReplicaState()
        self.operations: set[int] = set()
        self.is_followed = False

    def reaches_other(self) -> bool:
        return self.other.is_available and not self.is_disconnected

    def discard(self) -> None:
        self.state.discard_state()
        self.operations, self.is_followed = set(), False

    def sync(self) -> None:
        """Make the other replica follow with all contents, as a leader does repeatedly."""
        if (
            self.state.role is not ReplicaRole.LEADER
            or self.is_followed
            or not self.reaches_other()
        ):
            return
        state, other = self.state, self.other
        if other.state.outranks(state.term, state.state_id) or not other.state.become_follower(
            state.term, state.state_id, state.position
        ):
            self.discard()
            return
        other.operations, other.is_followed = set(self.operations), False
        other.state.is_complete = self.is_followed = True

    def confirm_leadership(self) -> bool:
        """Return whether this replica leads; ask the other one first."""
        if self.is_followed:
            state = self.state
            if not self.reaches_other() or not self.other.state.is_following(
                state.term, state.state_id
            ):
                self.is_followed = False
                self.sync()
        return self.state.role is ReplicaRole.LEADER

    def start_empty(self, state_id: str) -> None:
        """Lead a store that starts empty, if the other replica agrees."""
        if self.state.role is not ReplicaRole.EMPTY and self.state.is_complete:
            return
        self.discard()
        if self.reaches_other() and self.other.state.become_follower(1, state_id):
            self.other.operations, self.other.is_followed = set(), False
            self.state.become_leader(state_id)
            self.sync()

    def execute(self, operation: int) -> bool:
        self.confirm_leadership()
        if self.state.role is not ReplicaRole.LEADER:
            return False
        self.operations.add(operation)
        self.state.advance_position(self.index, 1)
        if self.is_followed:
            self.other.operations.add(operation)
            self.other.state.position = self.state.position
        return True


class Client:
    """A client: what it knows, and the acknowledged operations that servers must have."""

    def __init__(self) -> None:
        self.states = ServerStates(2, "server {}".format)
        self.leaders = StoreLeaders(("0", "1"), 2)
        self.required: set[int] = set()
        self.state_id = ""

    def share_state(self, other: Client) -> None:
        """Share the known state with another client, as in a first message or a reply."""
        other.states.merge(self.states.acknowledged_states())
        if other.state_id in ("", self.state_id):
            other.state_id = self.state_id
            other.required |= self.required


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        first, second = self.servers = (Server(0), Server(1))
        first.other, second.other = second, first
        self.clients = [Client() for _ in range(3)]
        self.operations = self.num_states = self.acknowledged = self.outdated = 0

    def send_request(self, client: Client) -> None:
        """Send a request as `ServerCall` does, and check the reply against the known positions."""
        leaders, states = client.leaders, client.states
        target = leaders.find_server(0)
        server = self.servers[target]
        state_id = states.state_id(0)
        message = leaders.address_message(
            ExecuteOperations((), (), state_id), 0, states.acknowledged_position(0, state_id)
        )
        if not server.is_available or self.random.random() < 0.05:
            leaders.record_unavailable(0, target)
            return
        if server.state.role is ReplicaRole.LEADER:
            server.confirm_leadership()
        decision = server.state.decide(
            state_id,
            peer_unavailable=message.peer_unavailable,
            required_position=message.required_position,
        )
        if decision is RequestDecision.STATE_LOST:
            states.record_state(0, server.state.state_id)
            # The server reported the loss.
            client.state_id, client.required = server.state.state_id, set()
        elif decision in (RequestDecision.EXECUTE, RequestDecision.TAKE_OVER):
            if decision is RequestDecision.TAKE_OVER:
                server.is_followed = False
                server.sync()
            self.operations += 1
            if not server.execute(self.operations):
                leaders.record_not_leader(0, target, is_empty=True)
                return
            state = server.state
            leaders.record_reply(0, target)
            states.record_state(0, state.state_id, len(server.operations), state.position)
            assert client.state_id in ("", state.state_id)
            client.state_id = state.state_id
            client.required.add(self.operations)
            missing = client.required - server.operations
            assert not missing, f"acknowledged operations are missing without an error: {missing}"
            self.acknowledged += 1
        else:
            if decision is RequestDecision.STALE_STATE:
                server.discard()
                self.outdated += 1
            is_empty = decision is not RequestDecision.NOT_LEADER
            leaders.record_not_leader(0, target, is_empty=is_empty)
            if leaders.take_lead_request(0) is not None:
                self.num_states += 1
                if self.servers[0].is_available:
                    self.servers[0].start_empty(f"state {self.num_states}")

    def step(self) -> None:
        rng = self.random
        server = rng.choice(self.servers)
        match rng.choices(range(6), (40, 2, 2, 1, 6, 6))[0]:
            case 0:
                self.send_request(rng.choice(self.clients))
            case 1:
                server.is_paused = not server.is_paused
            case 2:
                server.is_down = not server.is_down
                if server.is_down:
                    server.is_paused = False
                    server.end()
            case 3:
                for each in self.servers:
                    each.is_disconnected = not each.is_disconnected
            case 4:
                one, other = rng.sample(self.clients, 2)
                one.share_state(other)
            case 5:
                if server.is_available:
                    server.sync()


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_acknowledged_writes_are_never_lost_silently(first_seed: int) -> None:
    acknowledged = outdated = 0
    for seed in range(first_seed, first_seed + 100):
        simulation = Simulation(seed)
        try:
            for _ in range(400):
                simulation.step()
        except AssertionError:
            print("seed", seed)
            raise
        acknowledged += simulation.acknowledged
        outdated += simulation.outdated
        # When all servers are available and connected, the store can be used again.
        for server in simulation.servers:
            server.is_paused = server.is_down = server.is_disconnected = False
        for _ in range(60):
            for server in simulation.servers:
                server.sync()
            for client in simulation.clients:
                simulation.send_request(client)
        for client in simulation.clients:
            acknowledged_before = simulation.acknowledged
            for _ in range(20):
                simulation.send_request(client)
            assert simulation.acknowledged > acknowledged_before + 10
    assert acknowledged > 1000
    assert outdated > 10
