"""Shared window delivery: requests and times in, replies out; also for random sequences."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CancelledError, InvalidArgumentError, UserFunctionError
from headrace.service.messages import GetElements, GetElementsReply, SkippedElements
from headrace.service.modes.cross_trainer_cache.shared_window import SharedWindowDelivery
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.result_batch import BatchReply, ResultBatch


def skipped_by(answer: Any) -> int:
    return answer.mode_data.count if isinstance(answer.mode_data, SkippedElements) else 0


class Trainers:
    """Clients that read in turn from a simulated producer."""

    def __init__(self, window: int = 1 << 20, *, sizes: int = 1, max_elements: int = 0) -> None:
        self.shared: SharedWindowDelivery[str] = SharedWindowDelivery(
            BufferLimits(window_bytes=window)
        )
        self.max_elements = max_elements
        self.made = 0
        self.per_portion = sizes
        self._numbers: dict[str, int] = defaultdict(int)
        self._may_make = True
        self.got: list[tuple[str, BatchReply]] = []

    def ask(self, client: str, trainer: str | None = None, max_elements: int | None = None) -> None:
        """Request the next elements and acknowledge all earlier ones."""
        number = self._numbers[client]
        self._numbers[client] += 1
        message = GetElements(
            task_id=1,
            task_token="token",
            client_id=client,
            request_number=number,
            acknowledged=number,
            max_elements=self.max_elements if max_elements is None else max_elements,
            trainer_id=trainer or client,
        )
        self.got += self.shared.request_received(client, message, now=0.0)

    def make(self) -> bool:
        """Produce a batch if there is room; return whether one was produced."""
        if not self.shared.has_room:
            return False
        self.add(self.per_portion)
        return True

    def add(self, count: int, size: int | None = None) -> None:
        first, self.made = self.made, self.made + count
        self.got += self.shared.add_batch(
            ResultBatch(
                first_element=first,
                num_elements=count,
                size=count if size is None else size,
                done_from=first,
                done_to=self.made,
                delivered_end=self.made,
            )
        )

    def read(
        self, client: str, trainer: str | None = None, max_elements: int | None = None
    ) -> BatchReply:
        """Return the next reply to a client."""
        self.ask(client, trainer, max_elements)
        while not any(receiver == client for receiver, _ in self.got):
            assert self.make(), f"{client} waits, and nothing may be made"
        index = next(n for n, (receiver, _) in enumerate(self.got) if receiver == client)
        return self.got.pop(index)[1]

    def read_elements(self, client: str, count: int, trainer: str | None = None) -> list[int]:
        """Return the numbers of the next elements, at least `count`."""
        numbers: list[int] = []
        while len(numbers) < count:
            content = self.read(client, trainer)
            assert isinstance(content, ResultBatch)
            numbers += range(content.first_element, content.first_element + content.num_elements)
        return numbers


def test_one_trainer_reads_in_order() -> None:
    assert Trainers().read_elements("a", 10) == list(range(10))


def test_ten_trainers_each_read_all_elements_once() -> None:
    trainers = Trainers()
    assert [trainers.read_elements(f"t{n}", 10) for n in range(10)] == [list(range(10))] * 10
    assert trainers.made == 10


def test_nothing_is_produced_before_the_fastest_trainer_requests_it() -> None:
    trainers = Trainers()
    trainers.read_elements("fast", 5)
    assert trainers.made == 5
    assert not trainers.make()
    trainers.read_elements("slow", 5)
    assert trainers.made == 5
    assert not trainers.make()


def test_slow_trainers_skip_evicted_elements_and_learn_the_number() -> None:
    trainers = Trainers(window=5)
    assert trainers.read_elements("slow", 1) == [0]
    assert trainers.read_elements("fast", 20) == list(range(20))

    content = trainers.read("slow")

    assert isinstance(content, ResultBatch)
    assert (content.first_element, skipped_by(content)) == (15, 14)
    assert {each.trainer_id: each.skipped for each in trainers.shared.trainer_activity()} == {
        "slow": 14,
        "fast": 0,
    }
    trainers.read_elements("fast", 80)
    content = trainers.read("slow")
    assert isinstance(content, ResultBatch)
    assert (content.first_element, skipped_by(content)) == (95, 79)
    content = trainers.read("slow")
    assert isinstance(content, ResultBatch)
    assert (content.first_element, skipped_by(content)) == (96, 0)


def test_a_late_trainer_starts_at_the_oldest_element_without_skips() -> None:
    trainers = Trainers(window=5)
    trainers.read_elements("first", 100)
    content = trainers.read("late")
    assert isinstance(content, ResultBatch)
    assert (content.first_element, skipped_by(content)) == (95, 0)


def test_trainers_advance_a_window_of_one_element_in_turn() -> None:
    trainers = Trainers(window=1)
    for number in range(20):
        for name in ("a", "b"):
            content = trainers.read(name)
            assert isinstance(content, ResultBatch)
            assert (content.first_element, skipped_by(content)) == (number, 0)


def test_clients_of_one_trainer_share_its_position() -> None:
    trainers = Trainers()
    assert trainers.read_elements("a", 10, trainer="t") == list(range(10))
    assert trainers.read_elements("b", 10, trainer="t") == list(range(10, 20))
    assert trainers.read_elements("c", 20, trainer="other") == list(range(20))


def test_a_returning_trainer_resumes_at_its_position() -> None:
    trainers = Trainers()
    trainers.read_elements("before", 7, trainer="t")
    trainers.shared.remove_client("before")
    assert trainers.read_elements("after", 3, trainer="t") == [7, 8, 9]


def test_a_repeated_request_gets_the_same_reply() -> None:
    shared: SharedWindowDelivery[str] = SharedWindowDelivery()
    message = GetElements(
        task_id=1, task_token="", client_id="a", request_number=0, acknowledged=0, trainer_id="t"
    )
    assert shared.request_received("once", message, now=0.0) == []
    ((_, content),) = shared.add_batch(ResultBatch(first_element=0, num_elements=1, size=1))
    assert shared.request_received("again", message, now=1.0) == [("again", content)]


def test_unacknowledged_batches_of_a_client_are_bounded_in_bytes() -> None:
    shared: SharedWindowDelivery[str] = SharedWindowDelivery(BufferLimits(client_bytes=100))
    for number in range(3):
        message = GetElements(
            task_id=1,
            task_token="",
            client_id="a",
            request_number=number,
            acknowledged=0,
            trainer_id="t",
        )
        shared.request_received(f"a{number}", message, now=0.0)
    replies = [
        client
        for n in range(3)
        for client, _ in shared.add_batch(ResultBatch(first_element=n, num_elements=1, size=90))
    ]
    assert replies == ["a0", "a1"]
    assert not shared.has_room


def test_a_request_for_few_elements_gets_part_of_a_batch() -> None:
    trainers = Trainers(sizes=8)
    assert trainers.read_elements("a", 8) == list(range(8))
    parts = [trainers.read("b", max_elements=3) for _ in range(4)]
    assert [
        (each.first_element, each.num_elements) for each in parts if isinstance(each, ResultBatch)
    ] == [
        (0, 3),
        (3, 3),
        (6, 2),
        (8, 3),
    ]
    assert [each.row_range for each in parts if isinstance(each, ResultBatch)] == [
        (0, 3),
        (3, 6),
        (6, 8),
        (0, 3),
    ]
    # A split is complete with its last part.
    assert [each.num_splits for each in parts if isinstance(each, ResultBatch)] == [0, 0, 8, 0]


def test_an_error_goes_to_one_client_and_the_next_element_to_all() -> None:
    trainers = Trainers()
    trainers.ask("a")
    trainers.ask("b")
    trainers.got += trainers.shared.add_batch(
        ResultBatch(first_element=0, error=UserFunctionError("bad"))
    )
    ((client, content),) = trainers.got
    assert client == "a"
    assert isinstance(content, ResultBatch)
    assert str(content.error) == "bad"
    trainers.got.clear()
    trainers.ask("a")
    trainers.add(1)
    assert sorted(client for client, _ in trainers.got) == ["a", "b"]


def test_an_element_larger_than_the_window_is_an_error_that_names_both_sizes() -> None:
    trainers = Trainers(window=10)
    trainers.ask("a")
    trainers.add(1, size=11)
    ((_, content),) = trainers.got
    assert isinstance(content, ResultBatch)
    assert isinstance(content.error, InvalidArgumentError)
    assert (
        "element size is larger than cache size in bytes. "
        "Got element size: 11 and cache size: 10" in str(content.error)
    )
    trainers.got.clear()
    trainers.ask("a")
    trainers.add(1, size=10)
    assert [client for client, _ in trainers.got] == ["a"]


def test_the_end_of_data_is_an_error_for_each_trainer() -> None:
    trainers = Trainers()
    trainers.read_elements("a", 3)
    trainers.ask("a")
    trainers.shared.note_outcome(failed=False, drained=False)
    trainers.got += trainers.shared.note_exhausted()
    ((_, content),) = trainers.got
    assert isinstance(content, ResultBatch)
    assert "it reached the end of sequence" in str(content.error)
    trainers.got.clear()
    assert trainers.read_elements("b", 3) == [0, 1, 2]
    assert not trainers.shared.can_finish
    content = trainers.read("b")
    assert isinstance(content, ResultBatch)
    assert isinstance(content.error, InvalidArgumentError)
    for name in ("a", "b"):
        trainers.ask(name)
    assert trainers.shared.can_finish
    answers = dict(trainers.shared.note_finished())
    assert answers.keys() == {"a", "b"}
    assert all(isinstance(each, GetElementsReply) and each.end_of_task for each in answers.values())


def test_a_draining_task_delivers_the_remaining_elements_without_error() -> None:
    trainers = Trainers()
    trainers.read_elements("fast", 3)
    trainers.read_elements("slow", 1)
    trainers.shared.note_outcome(failed=False, drained=True)
    assert trainers.shared.note_exhausted() == []
    trainers.ask("fast")
    assert not trainers.shared.can_finish
    assert trainers.read_elements("slow", 2) == [1, 2]
    trainers.ask("slow")
    assert trainers.got == []
    assert trainers.shared.is_fully_acknowledged
    assert {client for client, _ in trainers.shared.note_finished()} == {"fast", "slow"}


def test_a_task_finishes_without_waiting_for_a_departed_trainer() -> None:
    trainers = Trainers()
    trainers.read_elements("stays", 3)
    trainers.read_elements("leaves", 1)
    trainers.shared.note_outcome(failed=False, drained=True)
    trainers.shared.note_exhausted()
    trainers.ask("stays")
    assert not trainers.shared.can_finish
    trainers.shared.remove_client("leaves")
    assert trainers.shared.can_finish


def test_every_trainer_receives_the_error_of_a_failed_task() -> None:
    trainers = Trainers()
    trainers.ask("a")
    trainers.ask("b")
    trainers.got += trainers.shared.add_batch(
        ResultBatch(first_element=0, error=UserFunctionError("cannot open"))
    )
    trainers.shared.note_outcome(failed=True, drained=False)
    trainers.got += trainers.shared.note_exhausted()
    errors = [str(each.error) for _, each in trainers.got if isinstance(each, ResultBatch)]
    assert errors == ["cannot open"] * 2


def test_departed_clients_and_requests_without_trainer_are_rejected() -> None:
    trainers = Trainers()
    trainers.ask("a")
    error = CancelledError("deleted")
    answers, output = trainers.shared.cancel(error)
    assert answers == [("a", error)]
    assert output.delivered_splits == ()
    trainers.ask("b")
    assert trainers.got == [("b", error)]
    without_trainer = GetElements(
        task_id=1, task_token="", client_id="c", request_number=0, acknowledged=0
    )
    ((_, content),) = trainers.shared.request_received("c", without_trainer, now=0.0)
    assert isinstance(content, InvalidArgumentError)


def test_dropped_batches_of_a_silent_client_are_reported_as_skipped() -> None:
    shared: SharedWindowDelivery[str] = SharedWindowDelivery(BufferLimits(client_timeout=10.0))

    def send_request(number: int, acknowledged: int, now: float) -> list[tuple[str, BatchReply]]:
        message = GetElements(
            task_id=1,
            task_token="",
            client_id="a",
            request_number=number,
            acknowledged=acknowledged,
            trainer_id="t",
        )
        return shared.request_received("a", message, now)

    send_request(0, 0, 0.0)
    shared.add_batch(ResultBatch(first_element=0, num_elements=2, size=1))
    assert shared.drop_expired(11.0) == ([], 2)
    assert send_request(0, 0, 12.0) == []
    ((_, content),) = shared.add_batch(ResultBatch(first_element=2, num_elements=1, size=1))
    assert isinstance(content, ResultBatch)
    assert (content.first_element, skipped_by(content)) == (2, 2)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=120
    ),
    window=st.integers(1, 30),
    sizes=st.integers(1, 4),
)
@settings(max_examples=150)
def test_any_readers_get_ascending_elements_once_and_every_gap_reported(
    steps: list[tuple[int, int, bool]], window: int, sizes: int
) -> None:
    trainers = Trainers(window=max(window, sizes), sizes=sizes)
    reported: dict[str, list[ResultBatch]] = defaultdict(list)
    waiting_clients: set[str] = set()
    for client, max_elements, makes in steps:
        name = f"client{client}"
        if name not in waiting_clients:
            waiting_clients.add(name)
            trainers.ask(name, f"trainer{client // 2}", max_elements=max_elements)
        if makes:
            trainers.make()
        for receiver, content in trainers.got:
            assert isinstance(content, ResultBatch)
            reported[receiver].append(content)
            waiting_clients.discard(receiver)
        trainers.got.clear()
        elements, size = trainers.shared.window_usage
        assert size <= max(window, sizes)
        assert elements <= trainers.made
    replies: dict[str, list[ResultBatch]] = defaultdict(list)
    for client in range(4):
        replies[f"trainer{client // 2}"] += reported[f"client{client}"]
    for activity in trainers.shared.trainer_activity():
        batches = sorted(replies[activity.trainer_id], key=lambda each: each.first_element)
        ends = [each.first_element + each.num_elements for each in batches]
        gaps = [each.first_element - end for end, each in zip(ends, batches[1:], strict=False)]
        assert all(gap >= 0 for gap in gaps), "each element once"
        assert sum(gaps) == sum(skipped_by(each) for each in batches), "each gap is reported"
        assert activity.delivered == sum(each.num_elements for each in batches)
        assert activity.lag >= 0
