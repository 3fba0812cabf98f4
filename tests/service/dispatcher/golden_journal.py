"""Scenarios whose events and states are stored in `journal_format_3.json`.

    python -m tests.service.dispatcher.golden_journal

adds the scenarios that the file does not contain. Existing entries never change, just as journaled
events do not: a scenario that produces other events gets another name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.modes.distributed_save.records import files_of
from headrace.service.modes.distributed_save.requests import ReportDirectory
from tests.service.dispatcher.scenario import DYNAMIC, STARTED, Scenario, registration, saving

__all__ = ["GOLDEN", "SCENARIOS", "dynamic", "load_golden"]

GOLDEN = Path(__file__).parent / "journal_format_3.json"
SAVE, FAILED_SAVE = "0" * 16, "1" * 16
EXACTLY: dict[str, Any] = {"processing_mode": DYNAMIC, "visitation": "exactly_once"}


def dynamic() -> Scenario:
    """Splits that are assigned, returned, partially received and lost; workers that come and go."""
    scene = Scenario()
    scene.register(num_splits=1000)
    for worker_id in ("v", "w", "x"):
        scene.add_worker(worker_id, tags=("COLOCATED",) if worker_id == "w" else ())
    scene.open("c", processing_mode=DYNAMIC, job_name="job", epoch=(0, 3), seed=-5)
    for number in range(5):
        scene.split(4000, max_splits=20, num_done=number)
        scene.split(4001, max_splits=2)
    scene.drain_worker("v")
    scene.return_splits("v", 4000, (10, 12), (50, 70))
    scene.finish("v", 4000)
    scene.unregister_worker("v")
    scene.report_delivery("c", 4000, (5, 40), partially_delivered=((5, 45),))
    scene.fail("w", 4001, "no memory")
    scene.report_delivery("c", 4001, partially_delivered=((0, 10),))
    scene.lose("x")
    scene.open("d")
    scene.finish("w", 4003)
    scene.close("d")
    return scene


def exactly_once() -> Scenario:
    """Exactly-once delivery: one of two clients departs, and a split kills workers."""
    scene = Scenario()
    scene.register(6, has_element_ids=True)
    scene.add_worker("v")
    for client_id in "ab":
        scene.open(client_id, job_name="exactly_once", **EXACTLY)
    scene.split(4000, max_splits=2)
    scene.split(4000, max_splits=2)
    report_delivery(scene, "b", 4000, (0, 1), partial_splits=((1, ((0, 4),)),), consumed=True)
    scene.close("b")
    report_departed_client(
        scene,
        "b",
        4000,
        partially_unacknowledged=((1, ((4, 6),)),),
        partially_acknowledged=((1, ((0, 4),)),),
    )
    scene.add_worker("w")
    scene.lose("v")
    report_delivery(scene, "a", 4000, (2, 3), partial_splits=((1, ((6, 9),)),))
    report_delivery(scene, "a", 4000, (2, 3), partial_splits=((1, ((6, 8),)),), consumed=True)
    worker_id = "w"
    for number in range(40):
        (iteration,) = scene.state.iterations.values()
        if iteration.pool.abandoned:
            break
        (task,) = scene.state.running_tasks(iteration)
        scene.get_split(task.task_id, max_splits=1, num_done=0)
        scene.add_worker(f"u{number}")
        scene.lose(worker_id)
        report_delivery(scene, "a", task.task_id)
        worker_id = f"u{number}"
    return scene


def ordered() -> Scenario:
    """Ordered reading of a group from a start position, with a straggler."""
    scene = Scenario()
    scene.register(9, has_element_ids=True)
    for worker_id in "vw":
        scene.add_worker(worker_id)
    scene.open(
        "c",
        job_name="ordered",
        ordered=True,
        partition_mode="ordered",
        num_splits=8,
        group="consumers",
        group_options="num_consumers=2",
        first_split=2,
        delivered=((4, 5),),
        partial_splits=((5, ((0, 2),)),),
        start_position_id="position",
        exclusive_reason="ordered reading",
        **EXACTLY,
    )
    scene.split(4000, max_splits=1)
    for _ in range(6):
        scene.get_split(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    for _ in range(40):
        for worker_id in "vw":
            scene.worker_heartbeat(worker_id)
        scene.heartbeat("c")
        scene.tick(0.5)
    scene.get_split(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    scene.get_split(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    return scene


def coordinated_reads() -> Scenario:
    """Coordinated reads with a cost function, and a lost worker."""
    scene = Scenario()
    scene.register(num_splits=100, cardinality=-1)
    scene.add_worker("v")
    scene.put_plan(b"cost function")
    for index, client_id in enumerate("ab"):
        scene.open(
            client_id,
            job_name="rounds",
            processing_mode=DYNAMIC,
            num_consumers=2,
            consumer_index=index,
            remainder="pad",
            cost_fn_id="fingerprint",
            cost_fn_digest=hashlib.sha256(b"cost function").digest(),
        )
    for horizon in (10, 20):
        scene.ask(messages.ClientHeartbeat(client_id="a", horizon=horizon))
    scene.split(4000, max_splits=6)
    scene.add_worker("w")
    scene.lose("v")
    for client_id, rounds in (("a", 5), ("b", 3)):
        scene.ask(
            messages.ReportDelivery(
                client_id=client_id,
                task_id=4000,
                delivered=((0, rounds),),
                partially_delivered=((rounds, rounds + 1),),
                rounds=rounds,
            )
        )
    return scene


def saves() -> Scenario:
    """Two saves: one finishes, one fails."""
    scene = Scenario(keeps_journal=True, worker_timeout=1e9)
    scene.register(num_splits=8)
    scene.add_worker("v")
    for save, path in ((SAVE, "/data/one"), (FAILED_SAVE, "/data/two")):
        scene.ask(saving(save, path=path))
        report_directory(scene, save, "opened")
    task = scene.state.tasks[4000]
    while task.assigned.num_assigned < 8:
        scene.split(4000, max_splits=8)
        file = messages.SavedFile(
            number=files_of(task.mode_state).num_files, elements=4, bytes=800, schema="{}"
        )
        fields = {
            "worker_id": "v",
            "report_number": files_of(task.mode_state).num_reports,
            **scene.task_fields(4000),
        }
        scene.ask(
            messages.CommitFiles(files=(file,), num_done=task.assigned.num_assigned, **fields)
        )
    scene.finish("v", 4000)
    report_directory(scene, SAVE, "closed")
    report_directory(scene, FAILED_SAVE, "failed", error="no space left", error_class="OSError")
    report_directory(scene, FAILED_SAVE, "closed")
    return scene


def static() -> Scenario:
    """Static sharding over a fixed list of workers, and stable copies; one copy is lost."""
    scene = Scenario()
    scene.events = [STARTED, events.SlotsConfigured(patterns=("v:1", "w:1"))]
    scene.restart()
    scene.register()
    for worker_id in "vw":
        scene.add_worker(worker_id)
    scene.open("a", job_name="shards", processing_mode=ShardingPolicy.DATA)
    scene.open("b", job_name="copies")
    for _ in range(70):
        for worker_id in "vw":
            scene.worker_heartbeat(worker_id)
        for client_id in "ab":
            scene.heartbeat(client_id)
        scene.ask(messages.ReportUnreachable(client_id="b", task_id=4002, connection_refused=False))
        scene.tick(1.0)
    scene.drain_worker("w")
    scene.finish("w", 4003, cut_short=True)
    return scene


def garbage_collection() -> Scenario:
    """Garbage collection of unused records; a pinned dataset stays."""
    scene = Scenario(gc_timeout=20.0, dataset_timeout=30.0, client_timeout=40.0)
    scene.register(num_splits=None, anonymous=True)
    scene.register(num_splits=4, anonymous=True, fingerprint="pinned")
    pin = registration(4, token="pin", fingerprint="pinned", dataset_id="1001")
    scene.ask(pin)
    scene.put_plan(b"without dataset")
    scene.add_worker("v")
    scene.open("c", "1001", processing_mode=DYNAMIC, job_name="finished")
    scene.open("d", "1001", job_name="discarded")
    scene.open("e", "1001", processing_mode=DYNAMIC, job_name="lost")
    scene.open("f", "1001", processing_mode=DYNAMIC, job_name="lost")
    scene.split(4000), scene.split(4000)
    scene.finish("v", 4000, num_done=4)
    scene.split(4002, max_splits=2)
    for client_id in "cdf":
        scene.close(client_id)
    scene.report_departed_client("f", 4002, (0, 1), lost=((1, 2),))
    for _ in range(60):
        scene.worker_heartbeat("v")
        scene.heartbeat("e")
        scene.tick(1.0)
    scene.add_worker("w")
    scene.lose("v")
    scene.report_delivery("e", 4002)
    event = events.TasksForgotten(iteration_id=2002, task_ids=(4002,))
    scene.events += scene.dispatcher._apply([event], scene.now)
    scene.open("g", "1001")
    scene.close("g")
    return scene


def report_delivery(
    scene: Scenario,
    client_id: str,
    task_id: int,
    *splits: Any,
    partial_splits: Any = (),
    consumed: bool = False,
) -> None:
    """Report the elements that a client received or consumed."""
    scene.ask(
        messages.ReportDelivery(
            client_id=client_id,
            task_id=task_id,
            delivered=splits,
            partial_splits=partial_splits,
            consumed=consumed,
        )
    )


def report_departed_client(scene: Scenario, client_id: str, task_id: int, **fields: Any) -> None:
    """Let a worker report the elements sent to a departed client."""
    worker_id = scene.state.tasks[task_id].worker_id
    ids = {"worker_id": worker_id, "client_id": client_id, **scene.task_fields(task_id)}
    scene.ask(
        messages.ReportDepartedClient(
            **{"unacknowledged": (), "possibly_lost": (), **ids, **fields}
        )
    )


def report_directory(scene: Scenario, save: str, outcome: str, **fields: Any) -> None:
    """Report the outcome of an operation on the directory of a save."""
    scene.ask(ReportDirectory(save_id=save, outcome=outcome, **fields))  # type: ignore[arg-type]


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "dynamic": dynamic,
    "exactly_once": exactly_once,
    "ordered": ordered,
    "coordinated_reads": coordinated_reads,
    "saves": saves,
    "static": static,
    "garbage_collection": garbage_collection,
}


def load_golden() -> dict[str, tuple[bytes, bytes]]:
    """Return the encoded events and state of each golden journal."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return {
        name: (base64.b64decode(each["events"]), base64.b64decode(each["state"]))
        for name, each in golden.items()
    }


def write_golden() -> None:
    golden = load_golden()
    for name, make_scenario in SCENARIOS.items():
        if name not in golden:
            scene = make_scenario()
            scene.check()
            golden[name] = tuple(map(msgspec.msgpack.encode, (scene.events, scene.state)))
    encoded = {
        name: {
            "events": base64.b64encode(events_).decode(),
            "state": base64.b64encode(state).decode(),
        }
        for name, (events_, state) in golden.items()
    }
    GOLDEN.write_text(json.dumps(encoded, indent=1) + "\n")


if __name__ == "__main__":
    write_golden()
