"""Stories whose facts are kept as they were written: all kinds of facts are in them, told for ever.

    python -m tests.service.dispatcher.golden_journal

writes those stories that `journal_format_3.json` has not. What it has stays as it is, as facts in
journals do: a story that is no more what it was gets another name.
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

__all__ = ["GOLDEN", "STORIES", "a_day", "saved"]

GOLDEN = Path(__file__).parent / "journal_format_3.json"
SAVE, FAILED_SAVE = "0" * 16, "1" * 16
EXACTLY: dict[str, Any] = {"processing_mode": DYNAMIC, "visitation": "exactly_once"}


def a_day() -> Scenario:
    """Units that are dealt, handed back, received in part, and lost; workers that come and go."""
    scene = Scenario()
    scene.register(positions=1000)
    for worker_id in ("v", "w", "x"):
        scene.add_worker(worker_id, tags=("COLOCATED",) if worker_id == "w" else ())
    scene.open("c", processing_mode=DYNAMIC, job_name="job", epoch=(0, 3), seed=-5)
    for number in range(5):
        scene.split(4000, max_splits=20, num_done=number)
        scene.split(4001, max_splits=2)
    scene.leaving("v")
    scene.hand_back("v", 4000, (10, 12), (50, 70))
    scene.finish("v", 4000)
    scene.left("v")
    scene.settle("c", 4000, (5, 40), touched=((5, 45),))
    scene.fail("w", 4001, "no memory")
    scene.settle("c", 4001, touched=((0, 10),))
    scene.lose("x")
    scene.open("d")
    scene.finish("w", 4003)
    scene.close("d")
    return scene


def each_once() -> Scenario:
    """Elements that each come once, of two clients of which one goes; a unit that kills workers."""
    scene = Scenario()
    scene.register(6, has_element_ids=True)
    scene.add_worker("v")
    for client_id in "ab":
        scene.open(client_id, job_name="each once", **EXACTLY)
    scene.split(4000, max_splits=2)
    scene.split(4000, max_splits=2)
    settle(scene, "b", 4000, (0, 1), parts=((1, ((0, 4),)),), used=True)
    scene.close("b")
    drop(
        scene,
        "b",
        4000,
        partially_unacknowledged=((1, ((4, 6),)),),
        partially_acknowledged=((1, ((0, 4),)),),
    )
    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "a", 4000, (2, 3), parts=((1, ((6, 9),)),))
    settle(scene, "a", 4000, (2, 3), parts=((1, ((6, 8),)),), used=True)
    worker_id = "w"
    for number in range(40):
        (iteration,) = scene.state.iterations.values()
        if iteration.pool.abandoned:
            break
        (task,) = scene.state.running_tasks(iteration)
        scene.deal(task.task_id, max_splits=1, num_done=0)
        scene.add_worker(f"u{number}")
        scene.lose(worker_id)
        settle(scene, "a", task.task_id)
        worker_id = f"u{number}"
    return scene


def in_order() -> Scenario:
    """An ordered reading that begins at a place, of a group, where one of two workers is slow."""
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
        start_position_id="a place",
        exclusive_reason="the order",
        **EXACTLY,
    )
    scene.split(4000, max_splits=1)
    for _ in range(6):
        scene.deal(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    for _ in range(40):
        for worker_id in "vw":
            scene.beat(worker_id)
        scene.heartbeat("c")
        scene.tick(0.5)
    scene.deal(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    scene.deal(4001, max_splits=4, num_done=scene.state.tasks[4001].assigned.num_assigned)
    return scene


def in_rounds() -> Scenario:
    """Consumers that read rounds whose rows are dealt by cost, and a worker that is lost."""
    scene = Scenario()
    scene.register(positions=100, cardinality=-1)
    scene.add_worker("v")
    scene.put_plan(b"what a row costs")
    for index, client_id in enumerate("ab"):
        scene.open(
            client_id,
            job_name="rounds",
            processing_mode=DYNAMIC,
            num_consumers=2,
            consumer_index=index,
            remainder="pad",
            cost_fn_id="fingerprint",
            cost_fn_digest=hashlib.sha256(b"what a row costs").digest(),
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
    """Datasets that workers write into directories: one is finished, one cannot be written."""
    scene = Scenario(keeps_journal=True, worker_timeout=1e9)
    scene.register(positions=8)
    scene.add_worker("v")
    for save, path in ((SAVE, "/data/one"), (FAILED_SAVE, "/data/two")):
        scene.ask(saving(save, path=path))
        note(scene, save, "opened")
    task = scene.state.tasks[4000]
    while task.assigned.num_assigned < 8:
        scene.split(4000, max_splits=8)
        file = messages.SavedFile(
            number=files_of(task.mode_state).num_files, elements=4, bytes=800, form="{}"
        )
        said = {
            "worker_id": "v",
            "report_number": files_of(task.mode_state).num_reports,
            **scene.shown(4000),
        }
        scene.ask(messages.CommitFiles(files=(file,), num_done=task.assigned.num_assigned, **said))
    scene.finish("v", 4000)
    note(scene, SAVE, "closed")
    note(scene, FAILED_SAVE, "failed", error="no space left", error_class="OSError")
    note(scene, FAILED_SAVE, "closed")
    return scene


def shares() -> Scenario:
    """A fixed list of workers with a share each; copies that run for long, one that is given up."""
    scene = Scenario()
    scene.facts = [STARTED, events.SlotsConfigured(patterns=("v:1", "w:1"))]
    scene.restart()
    scene.register()
    for worker_id in "vw":
        scene.add_worker(worker_id)
    scene.open("a", job_name="shares", processing_mode=ShardingPolicy.DATA)
    scene.open("b", job_name="copies")
    for _ in range(70):
        for worker_id in "vw":
            scene.beat(worker_id)
        for client_id in "ab":
            scene.heartbeat(client_id)
        scene.ask(messages.ReportUnreachable(client_id="b", task_id=4002, connection_refused=False))
        scene.tick(1.0)
    scene.leaving("w")
    scene.finish("w", 4003, cut_short=True)
    return scene


def forgotten() -> Scenario:
    """What nobody uses any more leaves memory; a dataset that somebody has the id of stays."""
    scene = Scenario(gc_timeout=20.0, dataset_timeout=30.0, client_timeout=40.0)
    scene.register(positions=None, anonymous=True)
    scene.register(positions=4, anonymous=True, fingerprint="kept")
    kept = registration(4, token="mine", fingerprint="kept", dataset_id="1001")
    scene.ask(kept)
    scene.put_plan(b"of no dataset")
    scene.add_worker("v")
    scene.open("c", "1001", processing_mode=DYNAMIC, job_name="kept")
    scene.open("d", "1001", job_name="given up")
    scene.open("e", "1001", processing_mode=DYNAMIC, job_name="missing")
    scene.open("f", "1001", processing_mode=DYNAMIC, job_name="missing")
    scene.split(4000), scene.split(4000)
    scene.finish("v", 4000, num_done=4)
    scene.split(4002, max_splits=2)
    for client_id in "cdf":
        scene.close(client_id)
    scene.drop("f", 4002, (0, 1), lost=((1, 2),))
    for _ in range(60):
        scene.beat("v")
        scene.heartbeat("e")
        scene.tick(1.0)
    scene.add_worker("w")
    scene.lose("v")
    scene.settle("e", 4002)
    fact = events.TasksForgotten(iteration_id=2002, task_ids=(4002,))
    scene.facts += scene.dispatcher._apply([fact], scene.now)
    scene.open("g", "1001")
    scene.close("g")
    return scene


def settle(
    scene: Scenario, client_id: str, task_id: int, *units: Any, parts: Any = (), used: bool = False
) -> None:
    """Let a client say which elements it has of a task."""
    scene.ask(
        messages.ReportDelivery(
            client_id=client_id,
            task_id=task_id,
            delivered=units,
            partial_splits=parts,
            consumed=used,
        )
    )


def drop(scene: Scenario, client_id: str, task_id: int, **said: Any) -> None:
    """Let a task's worker say what a client that is gone was sent."""
    worker_id = scene.state.tasks[task_id].worker_id
    whose = {"worker_id": worker_id, "client_id": client_id, **scene.shown(task_id)}
    scene.ask(
        messages.ReportDepartedClient(
            **{"unacknowledged": (), "possibly_lost": (), **whose, **said}
        )
    )


def note(scene: Scenario, save: str, what: str, **fields: Any) -> None:
    """Let the shell say what became of a directory."""
    scene.ask(ReportDirectory(save_id=save, outcome=what, **fields))  # type: ignore[arg-type]


STORIES: dict[str, Callable[[], Scenario]] = {
    "a day": a_day,
    "each once": each_once,
    "ordered": in_order,
    "in rounds": in_rounds,
    "saves": saves,
    "shares": shares,
    "forgotten": forgotten,
}


def saved() -> dict[str, tuple[bytes, bytes]]:
    """Return the facts of each story that is kept, and the state after them, as they are kept."""
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return {
        name: (base64.b64decode(each["facts"]), base64.b64decode(each["snapshot"]))
        for name, each in kept.items()
    }


def _write() -> None:
    kept = saved()
    for name, tell in STORIES.items():
        if name not in kept:
            scene = tell()
            scene.check()
            kept[name] = tuple(map(msgspec.msgpack.encode, (scene.facts, scene.state)))
    text = {
        name: {
            "facts": base64.b64encode(facts).decode(),
            "snapshot": base64.b64encode(state).decode(),
        }
        for name, (facts, state) in kept.items()
    }
    GOLDEN.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    _write()
