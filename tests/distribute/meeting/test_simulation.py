"""Workers and a hall over a network that loses, delays and repeats, from a seed."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from headrace.distribute.meeting.hall import ComeAgain, Contribution, Hall, Outcome
from headrace.errors import HeadraceError, UnavailableError
from headrace.serving.conversation import Window

MEETINGS = 30
AT_ONCE = 4


class Worker:
    """Comes to all meetings in turn, to some at once; repeats what a lost connection took."""

    def __init__(self, world, rank, rng):
        self.world, self.rank, self.rng = world, rank, rng
        self.window = Window()
        self.results = []
        self.failure = None
        self.connection = 0

    def act(self):
        if self.failure or not self.world.lives(self.rank):
            return
        if self.window.unanswered < AT_ONCE and self.window.ask_count < MEETINGS:
            self.send(self.window.ask())
            self.window.ask_count += 1
        if len(self.results) < MEETINGS:
            self.world.later(self.rng.expovariate(2.0), self.act)

    def send(self, number):
        self.world.to_hall(self.rank, self.connection, number, self.window.acknowledged)

    def lose_connection(self):
        self.connection += 1
        for number in self.window.to_repeat():
            self.send(number)

    def hear(self, connection, number, answer):
        if connection != self.connection or not self.world.lives(self.rank):
            return
        if isinstance(answer, ComeAgain):
            self.world.later(
                answer.seconds, lambda: self.window.awaits(number) and self.send(number)
            )
        elif isinstance(answer, HeadraceError):
            self.failure = self.failure or answer
        else:
            for taken, each in self.window.take(number, answer):
                assert taken == len(self.results)
                self.results.append(each.value)
                self.window.use_up(taken)


class World:
    def __init__(self, seed, workers):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events, self.order = [], itertools.count()
        self.hall = Hall([f"worker {rank}" for rank in range(workers)], lambda _, v: tuple(v))
        self.workers = [Worker(self, rank, self.rng) for rank in range(workers)]
        self.dead = set()
        for worker in self.workers:
            worker.window.ask_count = 0
            self.later(self.rng.random(), worker.act)

    def later(self, seconds, call):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), call))

    def lives(self, rank):
        return rank not in self.dead

    def to_hall(self, rank, connection, number, done):
        times = 1 + (self.rng.random() < 0.1)
        for _ in range(times):
            delay = self.rng.expovariate(20.0)
            self.later(delay, lambda: self.at_hall(rank, connection, number, done))

    def at_hall(self, rank, connection, number, done):
        if connection != self.workers[rank].connection or not self.lives(rank):
            return  # it was lost with its connection
        value = Contribution(f"meeting {number}", "all", (rank, number))
        self.answer(self.hall.contribute(rank, "life", number, done, value, self.now))

    def answer(self, dues):
        for rank, number, answer in dues:
            worker = self.workers[rank]
            self.later(
                self.rng.expovariate(20.0),
                lambda w=worker, c=worker.connection, n=number, a=answer: w.hear(c, n, a),
            )

    def break_connection(self, rank):
        # One with nothing under way does not notice, and counts as gone: the rule says so.
        if self.workers[rank].window.unanswered:
            self.answer(self.hall.gone(rank, self.now))
            self.workers[rank].lose_connection()

    def kill(self, rank):
        self.dead.add(rank)
        self.answer(self.hall.gone(rank, self.now))

    def run(self, seconds=300.0):
        while self.events and self.now < seconds:
            self.now, _, call = heapq.heappop(self.events)
            call()
        self.events.clear()

    def give_up(self):
        """Have whoever still waits wait no longer."""
        for worker in self.workers:
            if self.lives(worker.rank) and not worker.failure and worker.window.unanswered:
                number = worker.window.to_repeat()[0]
                self.answer(self.hall.give_up(number, 300.0, self.hall.lack(number, self.now)))
                self.run(600.0)


def expected(workers):
    return [tuple((rank, number) for rank in range(workers)) for number in range(MEETINGS)]


@pytest.mark.parametrize("seed", range(40))
def test_all_have_the_same_results_in_order_whatever_is_lost_delayed_or_repeated(seed):
    workers = 2 + seed % 3
    world = World(seed, workers)
    for _ in range(6):
        rank = world.rng.randrange(workers)
        world.later(world.rng.uniform(0, 15), lambda r=rank: world.break_connection(r))
    world.run()
    for worker in world.workers:
        assert worker.failure is None, (seed, worker.failure)
        assert worker.results == expected(workers), seed
    assert world.hall.kept <= AT_ONCE + 1


@pytest.mark.parametrize("seed", range(40))
def test_when_one_dies_all_others_hear_its_name_and_nobody_waits_for_ever(seed):
    workers = 2 + seed % 3
    world = World(1000 + seed, workers)
    victim = world.rng.randrange(workers)
    world.later(world.rng.uniform(0.5, 8), lambda: world.kill(victim))
    world.run()
    has_begun = world.hall.has_begun  # before, another process of it may come
    assert has_begun or all(worker.failure is None for worker in world.workers)
    world.give_up()
    for worker in world.workers:
        if worker.rank != victim:
            assert isinstance(worker.failure, UnavailableError), seed
            assert f"worker {victim}" in str(worker.failure), seed
        assert worker.results == expected(workers)[: len(worker.results)], seed
    assert all(isinstance(each, Outcome) for each in world.hall._results.values())
