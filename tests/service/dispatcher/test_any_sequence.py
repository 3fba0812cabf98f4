"""Random sequences of requests, losses and restarts keep the invariants of the state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.errors import HeadraceError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.element_sets import END_ORDINAL
from headrace.service.modes.distributed_save.records import TaskFiles
from headrace.service.modes.distributed_save.requests import ReportDirectory
from headrace.service.ranges import (
    Ranges,
    intersect,
    locate_in_stream,
    subtract,
    total_length,
    union,
)
from headrace.versions import Versions
from tests.service.dispatcher.scenario import (
    DYNAMIC,
    OFF,
    Scenario,
    list_open_saves,
    opening,
    registration,
    saving,
)

WORKERS = st.sampled_from(["u", "v", "w"])
ADDRESSES = st.sampled_from(["host:1", "host:2", "host:3"])
CLIENTS = st.sampled_from(["a", "b", "c"])
DATASETS = st.sampled_from(["1000", "1001", "mine"])
TASKS = st.integers(4000, 4030)
SAVES = st.sampled_from(["0" * 16, "1" * 16])
SPLITS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda each: (each[0], sum(each))),
    max_size=3,
).map(tuple)

ROUNDS = st.sampled_from([None, None, 0, 4])
ORDINALS = st.sampled_from(
    [((0, 2),), ((1, 3), (5, END_ORDINAL)), ((4, END_ORDINAL),), ((0, END_ORDINAL),), ((2, 9),)]
)
PARTIAL_SPLITS = st.dictionaries(st.integers(0, 11), ORDINALS, max_size=3).map(
    lambda parts: tuple(sorted(parts.items()))
)

#: Start position of an iteration, or group of its job; mostly neither.
START_POSITIONS = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries(
        {
            "first_split": st.integers(0, 3),
            "delivered": SPLITS,
            "partial_splits": PARTIAL_SPLITS,
            "start_position_id": st.sampled_from(["one", "two"]),
            "exclusive_reason": st.sampled_from(["", "a step"]),
        }
    ),
    st.fixed_dictionaries({"group": st.just("group"), "group_options": st.sampled_from("xy")}),
)

#: Not repeated: time or another report may change the reply.
_UNREPEATED = (
    messages.ReportUnreachable,
    messages.CloseIteration,
    messages.GetStatus,
    messages.ContributeCheckpoint,
)


class AnySequence(RuleBasedStateMachine):
    """Valid and invalid requests in random order."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scenario(gc_timeout=20.0, client_timeout=30.0, keeps_journal=True)
        self.scene.register(num_splits=12, fingerprint="0", has_element_ids=True)

    def ask(self, request: messages.DispatcherRequest) -> None:
        with contextlib.suppress(HeadraceError, ValueError):
            reply = self.scene.ask(request)
            num_events = len(self.scene.events)
            if not isinstance(request, _UNREPEATED):
                assert self.scene.ask(request) == reply, "a repeated request got another reply"
            assert len(self.scene.events) == num_events, "a repeated request produced events"

    @rule(
        token=st.integers(0, 5),
        positions=st.sampled_from([None, 5, 0, -1, 13]),
        fingerprint=st.sampled_from(["0", "1"]),
        dataset_id=st.sampled_from([None, "mine"]),
    )
    def register(
        self, token: int, positions: int | None, fingerprint: str, dataset_id: str | None
    ) -> None:
        self.ask(
            registration(
                positions, token=f"t{token}", fingerprint=fingerprint, dataset_id=dataset_id
            )
        )

    @rule(worker_id=WORKERS, address=ADDRESSES, tags=st.sampled_from([(), ("x",)]))
    def add_worker(self, worker_id: str, address: str, tags: tuple[str, ...]) -> None:
        self.ask(messages.RegisterWorker(worker_id=worker_id, address=address, tags=tags))

    @rule(worker_id=WORKERS)
    def drain_worker(self, worker_id: str) -> None:
        self.ask(messages.DrainWorker(worker_id=worker_id))

    @rule(worker_id=WORKERS)
    def unregister_worker(self, worker_id: str) -> None:
        self.ask(messages.UnregisterWorker(worker_id=worker_id))

    @rule(
        client_id=CLIENTS,
        dataset_id=DATASETS,
        mode=st.sampled_from([OFF, DYNAMIC]),
        job_name=st.sampled_from([None, "j", "k"]),
        epoch=st.sampled_from([(), (0,), (1,), (0, 1)]),
        is_shared=st.sampled_from([False, False, True]),
        consumer=st.sampled_from([(None, None), (None, None), (2, 0), (2, 1), (1, 0)]),
        visitation=st.sampled_from([None, "exactly_once", "exactly_once"]),
        start_position=START_POSITIONS,
    )
    def open(
        self,
        client_id: str,
        dataset_id: str,
        mode: int,
        job_name: str | None,
        epoch: tuple[int, ...],
        is_shared: bool,
        consumer: tuple[int | None, int | None],
        visitation: str | None,
        start_position: dict[str, Any],
    ) -> None:
        self.ask(
            opening(
                client_id,
                dataset_id,
                processing_mode=mode,
                job_name=job_name,
                epoch=epoch,
                cross_trainer_cache=is_shared,
                num_consumers=consumer[0],
                consumer_index=consumer[1],
                visitation=visitation if mode == DYNAMIC else None,
                **start_position,
            )
        )

    @rule(
        client_id=CLIENTS,
        token=st.sampled_from("xyz"),
        delivered=SPLITS,
        partial_splits=PARTIAL_SPLITS,
    )
    def contribute_checkpoint(
        self, client_id: str, token: str, delivered: Any, partial_splits: Any
    ) -> None:
        request = messages.ContributeCheckpoint(
            client_id=client_id, token=token, delivered=delivered, partial_splits=partial_splits
        )
        self.ask(request)

    @rule(client_id=CLIENTS, horizon=st.sampled_from([0, 0, 3, 10]))
    def heartbeat(self, client_id: str, horizon: int) -> None:
        self.ask(messages.ClientHeartbeat(client_id=client_id, horizon=horizon))

    @rule(
        client_id=CLIENTS, task_id=TASKS, received=SPLITS, partially_received=SPLITS, rounds=ROUNDS
    )
    def report_delivery(
        self,
        client_id: str,
        task_id: int,
        received: Ranges,
        partially_received: Ranges,
        rounds: int | None,
    ) -> None:
        self.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=task_id,
                delivered=received,
                partially_delivered=partially_received,
                rounds=rounds,
            )
        )

    @rule(data=st.data())
    def report_on_lost_task(self, data: st.DataObject) -> None:
        """Let a client report on a lost task, with splits that were assigned to it."""
        waiting = [
            (client_id, task)
            for task in self.scene.state.tasks.values()
            for client_id in sorted(task.awaiting_reports)
        ]
        if waiting:
            client_id, task = data.draw(st.sampled_from(waiting))
            start = data.draw(st.integers(0, task.assigned.num_assigned))
            middle = data.draw(st.integers(start, task.assigned.num_assigned))
            stop = data.draw(st.integers(middle, task.assigned.num_assigned))
            received, partially_received = (
                tuple(each for each in [(start, end)] if start < end) for end in (middle, stop)
            )
            iteration = self.scene.state.iterations[task.iteration_id]
            is_coordinated = iteration.mode_state is not None
            self.ask(
                messages.ReportDelivery(
                    client_id=client_id,
                    task_id=task.task_id,
                    delivered=received,
                    partially_delivered=partially_received,
                    rounds=data.draw(st.integers(0, 9)) if is_coordinated else None,
                    partial_splits=tuple(
                        each
                        for each in data.draw(PARTIAL_SPLITS)
                        if each[0] < task.assigned.num_assigned
                    ),
                    consumed=data.draw(st.booleans()),
                )
            )

    @rule(client_id=CLIENTS)
    def close(self, client_id: str) -> None:
        self.ask(messages.CloseIteration(client_id=client_id))

    @rule(client_id=CLIENTS, task_id=TASKS, refused=st.booleans())
    def report_unreachable(self, client_id: str, task_id: int, refused: bool) -> None:
        self.ask(
            messages.ReportUnreachable(
                client_id=client_id, task_id=task_id, connection_refused=refused
            )
        )

    @rule(worker_id=WORKERS, tasks=st.lists(TASKS, max_size=3))
    def worker_heartbeat(self, worker_id: str, tasks: list[int]) -> None:
        self.ask(messages.WorkerHeartbeat(worker_id=worker_id, tasks=tuple(tasks)))

    @rule(data=st.data())
    def send_worker_request(self, data: st.DataObject) -> None:
        """Let the worker of a task request or return splits, report, finish or fail."""
        tasks = self.scene.state.tasks
        if not tasks:
            return
        task = tasks[data.draw(st.sampled_from(sorted(tasks)))]
        task_fields = {"worker_id": task.worker_id, **self.scene.task_fields(task.task_id)}
        kind = data.draw(st.integers(0, 7))
        if kind == 7:
            client_id = data.draw(CLIENTS)
            splits, lost = data.draw(SPLITS), data.draw(SPLITS)
            self.ask(
                messages.ReportDepartedClient(
                    client_id=client_id, unacknowledged=splits, possibly_lost=lost, **task_fields
                )
            )
        elif kind < 4:
            self.ask(
                self.scene.split_request(
                    task.task_id,
                    max_splits=data.draw(st.integers(1, 9)),
                    num_done=data.draw(
                        st.integers(task.assigned.num_done, task.assigned.num_assigned)
                    ),
                )
            )
        elif kind == 4:
            self.ask(messages.ReturnSplits(splits=data.draw(SPLITS), **task_fields))
        elif kind == 5:
            num_assigned = data.draw(st.none() | st.integers(0, task.assigned.num_assigned))
            self.ask(messages.FinishTask(num_assigned=num_assigned, **task_fields))
        else:
            self.ask(messages.FailTask(reason="bug", **task_fields))

    @rule(data=st.data())
    def report_departed_client(self, data: st.DataObject) -> None:
        """Let a worker report the unacknowledged elements of a departed client."""
        waiting = [
            (client_id, task)
            for task in self.scene.state.tasks.values()
            for client_id in sorted(task.unconfirmed_clients)
        ]
        if waiting:
            client_id, task = data.draw(st.sampled_from(waiting))
            bounds = sorted(data.draw(st.integers(0, task.assigned.num_assigned)) for _ in range(3))
            splits, lost = (
                tuple(each for each in [pair] if pair[0] < pair[1])
                for pair in ((bounds[0], bounds[1]), (bounds[1], bounds[2]))
            )
            task_fields = {"worker_id": task.worker_id, **self.scene.task_fields(task.task_id)}
            drawn = [data.draw(PARTIAL_SPLITS) for _ in range(2)]
            partial_splits, consumed = (
                tuple(each for each in one if each[0] < task.assigned.num_assigned) for one in drawn
            )
            self.ask(
                messages.ReportDepartedClient(
                    client_id=client_id,
                    unacknowledged=splits,
                    possibly_lost=lost,
                    partially_unacknowledged=partial_splits,
                    partially_acknowledged=consumed,
                    **task_fields,
                )
            )

    @rule(
        worker_id=WORKERS,
        task_id=TASKS,
        number=st.integers(0, 3),
        kind=st.sampled_from([messages.FinishTask, messages.FailTask, messages.GetSplit]),
    )
    def send_request_on_any_task(
        self, worker_id: str, task_id: int, number: int, kind: Callable[..., Any]
    ) -> None:
        fields: dict[type, dict[str, Any]] = {
            messages.FailTask: {"reason": ""},
            messages.GetSplit: {"assignment_number": number, "max_splits": 5, "num_done": 0},
        }
        other = fields.get(kind, {})  # type: ignore[call-overload]
        self.ask(kind(worker_id=worker_id, **self.scene.task_fields(task_id), **other))

    @rule(save=SAVES, dataset_id=DATASETS, path=st.sampled_from(["/p", "/q"]))
    def start_save(self, save: str, dataset_id: str, path: str) -> None:
        self.ask(saving(save, dataset_id=dataset_id, path=path))

    @rule(save=SAVES)
    def get_save_status(self, save: str) -> None:
        self.ask(messages.GetSaveStatus(save_id=save))

    @rule(save=SAVES, fails=st.booleans())
    def report_save_directory(self, save: str, fails: bool) -> None:
        """Let the server report on the directory of a save, sometimes a failure."""
        (found,) = [each for each in list_open_saves(self.scene) if each.save_id == save] or [None]
        if found is None:
            return
        error = "no such disk" if fails and not found.error else ""
        outcome = "failed" if error else "opened" if not found.is_open else "closed"
        if outcome != "closed" or found.is_finished:
            self.ask(ReportDirectory(save_id=save, outcome=outcome, error=error))  # type: ignore[arg-type]

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Let the worker of a save commit files."""
        tasks = self.scene.state.tasks
        if not tasks:
            return
        task = tasks[data.draw(st.sampled_from(sorted(tasks)))]
        files = data.draw(st.integers(0, 2))
        known = task.mode_state if isinstance(task.mode_state, TaskFiles) else TaskFiles()
        message = messages.CommitFiles(
            worker_id=task.worker_id,
            report_number=max(0, known.num_reports - data.draw(st.integers(0, 1))),
            files=tuple(
                messages.SavedFile(known.num_files + index, 1, 10, "{}") for index in range(files)
            ),
            num_done=data.draw(st.integers(0, task.assigned.num_assigned)),
            **self.scene.task_fields(task.task_id),
        )
        self.ask(message)

    @rule(worker_id=WORKERS, task_id=TASKS)
    def get_task(self, worker_id: str, task_id: int) -> None:
        self.ask(messages.GetTask(worker_id=worker_id, task_id=task_id))

    @rule()
    def status(self) -> None:
        self.ask(messages.GetStatus())

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.scene.tick(seconds)
        assert self.scene.tick() == [], "a tick left maintenance undone"

    @rule(seconds=st.sampled_from([1.0, 15.0, 1e6]))
    def pause(self, seconds: float) -> None:
        known = dict(self.scene.state.workers), dict(self.scene.state.clients)
        assert self.scene.pause(seconds) == []
        assert known == (self.scene.state.workers, self.scene.state.clients)

    @rule()
    def restart(self) -> None:
        self.scene.restart()

    @invariant()
    def invariants_hold(self) -> None:
        self.scene.check()

    def teardown(self) -> None:
        """Check that a split was returned before it was assigned a second time.

        Splits that a client reported as received, even in part, are never returned later.
        """
        exactly_once = {
            event.job_id
            for event in self.scene.events
            if isinstance(event, events.JobCreated) and event.options.visitation == "exactly_once"
        }
        # Their splits are returned in part; `invariants.validate` checks them in each step.
        exactly_once = {
            event.iteration_id
            for event in self.scene.events
            if isinstance(event, events.IterationCreated) and event.job_id in exactly_once
        }
        exactly_once_tasks = {
            event.task_id
            for event in self.scene.events
            if isinstance(event, events.TaskCreated) and event.iteration_id in exactly_once
        }
        checked = [
            event
            for event in self.scene.events
            if getattr(event, "task_id", None) not in exactly_once_tasks
        ]
        partially_received: dict[int, Ranges] = {}
        worker_by_task: dict[int, str] = {}
        unavailable: set[int] = set()
        for event in checked:
            if isinstance(event, events.TaskCreated):
                worker_by_task[event.task_id] = event.worker_id
            elif isinstance(event, events.WorkerLost | events.WorkerLeft):
                unavailable.update(
                    task for task, each in worker_by_task.items() if each == event.worker_id
                )
            elif isinstance(event, events.TaskFailed):
                unavailable.add(event.task_id)
            elif isinstance(event, events.DeliveryReported):
                received = (*event.delivered, *event.partially_delivered)
                partially_received[event.task_id] = union(
                    (*partially_received.get(event.task_id, ()), *received)
                )
            elif isinstance(event, events.SplitsReturned) and event.task_id in unavailable:
                assert not intersect(event.splits, partially_received.get(event.task_id, ()))
        returned: dict[int, Ranges] = {}
        next_split: dict[int, int] = {}
        runs: dict[int, list[tuple[int, int]]] = {}
        iteration_by_task: dict[int, int] = {}
        for event in checked:
            if isinstance(event, events.TaskCreated):
                iteration_by_task[event.task_id] = event.iteration_id
            elif isinstance(event, events.SplitsAssigned):
                iteration = iteration_by_task[event.task_id]
                assigned = ((event.start, event.stop),)
                indices = returned.get(iteration, ())
                if event.start < next_split.get(iteration, 0):
                    assert not subtract(assigned, indices), "a split was assigned twice"
                    returned[iteration] = subtract(indices, assigned)
                else:
                    assert event.start == next_split.get(iteration, 0), "a split was skipped"
                    next_split[iteration] = event.stop
                runs.setdefault(event.task_id, []).append((event.start, event.stop))
            elif isinstance(
                event,
                events.SplitsReturned | events.SplitsReassigned | events.DepartedClientReported,
            ):
                iteration = iteration_by_task[event.task_id]
                splits_returned = (
                    event.returned
                    if isinstance(event, events.DepartedClientReported)
                    else event.splits
                )
                indices = locate_in_stream(runs.get(event.task_id, ()), 0, splits_returned)
                assert total_length(indices) == total_length(splits_returned)
                returned[iteration] = union((*returned.get(iteration, ()), *indices))


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- random requests -------------------------------------------------------------------------

_INTEGERS = st.one_of(st.integers(-2, 3), st.integers(3990, 4010), st.integers(-(1 << 63), 1 << 63))
_STRINGS = st.one_of(st.sampled_from(["", "u", "v", "c", "1000", "host:1", "run-"]), st.text())
_OPTIONS = st.builds(
    messages.JobOptions,
    processing_mode=_INTEGERS,
    target_workers=_STRINGS,
    num_consumers=st.one_of(st.none(), _INTEGERS),
    cross_trainer_cache=st.booleans(),
    visitation=st.one_of(st.none(), _STRINGS),
    ordered=st.booleans(),
    remainder=_STRINGS,
    cost_fn_id=_STRINGS,
    cost_fn_digest=st.binary(max_size=40),
    partition_mode=_STRINGS,
    num_splits=st.one_of(st.none(), _INTEGERS),
)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    messages.JobOptions: _OPTIONS,
    Versions: st.builds(Versions, headrace=_STRINGS, python=st.sampled_from(["", "3.11", "3.12"])),
    int: _INTEGERS,
    str: _STRINGS,
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    tuple[messages.SavedFile, ...]: st.lists(
        st.builds(messages.SavedFile, _INTEGERS, _INTEGERS, _INTEGERS, _STRINGS), max_size=2
    ).map(tuple),
    int | None: st.one_of(st.none(), _INTEGERS),
    str | None: st.one_of(st.none(), _STRINGS),
    tuple[int, ...]: st.lists(_INTEGERS, max_size=4).map(tuple),
    tuple[str, ...]: st.lists(_STRINGS, max_size=3).map(tuple),
    tuple[tuple[int, tuple[tuple[int, int], ...]], ...]: st.dictionaries(
        _INTEGERS, st.lists(st.tuples(_INTEGERS, _INTEGERS), max_size=3).map(tuple), max_size=3
    ).map(lambda parts: tuple(parts.items())),
    tuple[tuple[str, str], ...]: st.lists(st.tuples(_STRINGS, _STRINGS), max_size=2).map(tuple),
    tuple[tuple[int, int], ...]: st.lists(st.tuples(_INTEGERS, _INTEGERS), max_size=4).map(tuple),
    tuple[messages.PlanStep, ...]: st.lists(
        st.builds(messages.PlanStep, _STRINGS, st.lists(_INTEGERS, max_size=2).map(tuple)),
        max_size=3,
    ).map(tuple),
    float: st.floats(),
    tuple[messages.TaskActivity, ...]: st.lists(
        st.builds(
            messages.TaskActivity,
            task_id=_INTEGERS,
            elements=_INTEGERS,
            bytes=_INTEGERS,
            buffered_batches=_INTEGERS,
            buffered_bytes=_INTEGERS,
            waiting_for=_STRINGS,
            client_wait_seconds=st.floats(),
            split_wait_seconds=st.floats(),
            steps=st.lists(
                st.builds(messages.StepSeconds, step=_STRINGS, seconds=st.floats()), max_size=3
            ).map(tuple),
            trainers=st.lists(
                st.builds(messages.TrainerActivity, trainer_id=_STRINGS, delivered=_INTEGERS),
                max_size=2,
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
}
_KINDS = sorted(messages.DispatcherRequest.__args__, key=lambda kind: kind.__name__)  # type: ignore[attr-defined]


@st.composite
def any_request(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(_KINDS))
    fields = {field.name: draw(_VALUES[field.type]) for field in msgspec.structs.fields(kind)}
    return kind(**fields)


@settings(max_examples=150, deadline=None)
@given(requests=st.lists(any_request(), max_size=20), proper=st.booleans())
def test_requests_with_random_content_keep_invariants(requests: list[Any], proper: bool) -> None:
    """Invalid requests raise documented errors, and accepted ones keep the invariants."""
    scene = Scenario()
    scene.register(10)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, job_name="job")
    scene.split(4000, max_splits=4)
    for request in requests:
        if proper and hasattr(request, "task_token"):
            request = msgspec.structs.replace(
                request, worker_id="v", task_id=4000, task_token=scene.state.task_token(4000)
            )
        with contextlib.suppress(HeadraceError, ValueError):
            scene.ask(request)
        scene.check()
    encoded = msgspec.msgpack.encode(scene.events)
    assert msgspec.msgpack.decode(encoded, type=list[events.AnyEvent]) == scene.events
    scene.tick(12.0)
    scene.check()
    scene.ask(messages.GetStatus())
