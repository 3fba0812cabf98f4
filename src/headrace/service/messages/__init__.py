"""What clients, workers and the dispatcher say to each other.

Every request may be repeated: names are chosen by the one who asks (`token`, `client_id`,
`worker_id`, request numbers), so a repeated request finds what the first one made. A request names
the type of its reply (`serving.call.Question`). Nothing here has behaviour.

    datasets     clients and workers -> dispatcher     plans, and what is known of datasets
    iterations   clients -> dispatcher                 open, be heard, settle, close
    places       clients -> dispatcher                 where all of an iteration stand
    terms        how a job is read, as all who join it ask for alike
    status       clients -> dispatcher
    workers      workers -> dispatcher                 come, be heard, go
    tasks        workers -> dispatcher                 what a task is, its units, its end
    saves        clients and workers -> dispatcher     datasets that workers write to files
    elements     clients -> workers
    activity     what heartbeats say of the work

*Units* are what a DYNAMIC iteration deals: positions of the plan, numbered from 0 over all passes.
A range of units is (start, stop). Units "in dealt order" are numbered from 0 in the order in which
they were dealt to one task: a task that was dealt (10, 13) and (40, 42) has its unit 41 as 4.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace.service.messages.activity import (
    FOR_CLIENTS,
    FOR_UNITS,
    StageSeconds,
    TaskActivity,
    TrainerActivity,
)
from headrace.service.messages.datasets import (
    PLAN_PART_BYTES,
    DatasetDescription,
    DatasetRegistered,
    GetDataset,
    GetPlan,
    PlanBytes,
    PlanReceived,
    PutPlan,
    RegisterDataset,
)
from headrace.service.messages.elements import (
    NO_ORIGINS,
    WORD,
    ElementOrigins,
    Elements,
    GetElements,
    RoundProgress,
    Skipped,
)
from headrace.service.messages.iterations import (
    ClientHeartbeat,
    ClientUpdate,
    CloseIteration,
    IterationOpened,
    LostUnits,
    OpenIteration,
    ReportUnreachable,
    SettleTask,
    TaskAddress,
)
from headrace.service.messages.places import GatherPlace, PlaceGathered
from headrace.service.messages.saves import (
    BeginSave,
    GetSave,
    SavedFile,
    SaveFiles,
    SaveOrder,
    SaveUpdate,
)
from headrace.service.messages.status import (
    ClientStatus,
    DispatcherStatus,
    GetStatus,
    IterationStatus,
    JobStatus,
    LostWorker,
    StageStatus,
    TaskStatus,
    WorkerStatus,
)
from headrace.service.messages.tasks import (
    DropClient,
    FailTask,
    FinishTask,
    GetSplit,
    GetTask,
    HandBack,
    SplitGranted,
    TaskDefinition,
)
from headrace.service.messages.terms import Terms
from headrace.service.messages.workers import (
    RegisterWorker,
    WorkerHeartbeat,
    WorkerLeaving,
    WorkerLeft,
    WorkerRegistered,
    WorkerUpdate,
)
from headrace.serving.call import Done, Ping

__all__ = [
    "FOR_CLIENTS",
    "FOR_UNITS",
    "NO_ORIGINS",
    "PLAN_PART_BYTES",
    "WORD",
    "BeginSave",
    "ClientHeartbeat",
    "ClientStatus",
    "ClientUpdate",
    "CloseIteration",
    "DatasetDescription",
    "DatasetRegistered",
    "DispatcherReply",
    "DispatcherRequest",
    "DispatcherStatus",
    "Done",
    "DropClient",
    "ElementOrigins",
    "Elements",
    "FailTask",
    "FinishTask",
    "GatherPlace",
    "GetDataset",
    "GetElements",
    "GetPlan",
    "GetSave",
    "GetSplit",
    "GetStatus",
    "GetTask",
    "HandBack",
    "IterationOpened",
    "IterationStatus",
    "JobStatus",
    "LostUnits",
    "LostWorker",
    "OpenIteration",
    "Ping",
    "PlaceGathered",
    "PlanBytes",
    "PlanReceived",
    "PutPlan",
    "RegisterDataset",
    "RegisterWorker",
    "ReportUnreachable",
    "RoundProgress",
    "SaveFiles",
    "SaveOrder",
    "SaveUpdate",
    "SavedFile",
    "SettleTask",
    "Skipped",
    "SplitGranted",
    "StageSeconds",
    "StageStatus",
    "TaskActivity",
    "TaskAddress",
    "TaskDefinition",
    "TaskStatus",
    "Terms",
    "TrainerActivity",
    "WorkerHeartbeat",
    "WorkerLeaving",
    "WorkerLeft",
    "WorkerRegistered",
    "WorkerReply",
    "WorkerRequest",
    "WorkerStatus",
    "WorkerUpdate",
]

DispatcherRequest: TypeAlias = (
    Ping
    | RegisterDataset
    | PutPlan
    | GetDataset
    | OpenIteration
    | ClientHeartbeat
    | SettleTask
    | CloseIteration
    | ReportUnreachable
    | GatherPlace
    | GetStatus
    | RegisterWorker
    | WorkerHeartbeat
    | WorkerLeaving
    | WorkerLeft
    | GetTask
    | GetPlan
    | GetSplit
    | FinishTask
    | FailTask
    | HandBack
    | DropClient
    | BeginSave
    | GetSave
    | SaveFiles
)
DispatcherReply: TypeAlias = (
    Done
    | DatasetRegistered
    | PlanReceived
    | DatasetDescription
    | IterationOpened
    | ClientUpdate
    | DispatcherStatus
    | WorkerRegistered
    | WorkerUpdate
    | TaskDefinition
    | PlanBytes
    | SplitGranted
    | SaveUpdate
    | PlaceGathered
)
WorkerRequest: TypeAlias = Ping | GetElements
WorkerReply: TypeAlias = Done | Elements
