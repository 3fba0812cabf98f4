"""What clients, workers and the dispatcher say to each other.

Every request may be repeated: names are chosen by the one who asks (`token`, `client_id`,
`worker_id`, request numbers), so a repeated request finds what the first one made. A request names
the type of its reply (`serving.call.Question`). Nothing here has behaviour.

    datasets     clients and workers -> dispatcher     plans, and what is known of datasets
    iterations   clients -> dispatcher                 open, be heard, settle, close
    checkpoints  clients -> dispatcher                 where all of an iteration stand
    job_options  how a job is read, as all who join it ask for alike
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
    WAITING_FOR_CLIENTS,
    WAITING_FOR_SPLITS,
    StepSeconds,
    TaskActivity,
    TrainerActivity,
)
from headrace.service.messages.checkpoints import ContributeCheckpoint, ContributeCheckpointReply
from headrace.service.messages.datasets import (
    PLAN_CHUNK_BYTES,
    DatasetDescription,
    GetDataset,
    GetPlan,
    GetPlanReply,
    PutPlan,
    PutPlanReply,
    RegisterDataset,
    RegisterDatasetReply,
)
from headrace.service.messages.elements import (
    NO_ELEMENT_IDS,
    PROGRESS_REQUEST,
    ElementIds,
    GetElements,
    GetElementsReply,
    RoundProgress,
    SkippedElements,
)
from headrace.service.messages.iterations import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    CloseIteration,
    LostSplits,
    OpenIteration,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)
from headrace.service.messages.job_options import JobOptions
from headrace.service.messages.saves import (
    CommitFiles,
    GetSaveStatus,
    SaveDestination,
    SavedFile,
    SaveStatus,
    StartSave,
)
from headrace.service.messages.status import (
    ClientStatus,
    DispatcherStatus,
    GetStatus,
    IterationStatus,
    JobStatus,
    LostWorker,
    StepStatus,
    TaskStatus,
    WorkerStatus,
)
from headrace.service.messages.tasks import (
    FailTask,
    FinishTask,
    GetSplit,
    GetSplitReply,
    GetTask,
    ReportDepartedClient,
    ReturnSplits,
    TaskDefinition,
)
from headrace.service.messages.workers import (
    DrainWorker,
    RegisterWorker,
    RegisterWorkerReply,
    UnregisterWorker,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.serving.call import Done, Ping

__all__ = [
    "NO_ELEMENT_IDS",
    "PLAN_CHUNK_BYTES",
    "PROGRESS_REQUEST",
    "WAITING_FOR_CLIENTS",
    "WAITING_FOR_SPLITS",
    "ClientHeartbeat",
    "ClientHeartbeatReply",
    "ClientStatus",
    "CloseIteration",
    "CommitFiles",
    "ContributeCheckpoint",
    "ContributeCheckpointReply",
    "DatasetDescription",
    "DispatcherReply",
    "DispatcherRequest",
    "DispatcherStatus",
    "Done",
    "DrainWorker",
    "ElementIds",
    "FailTask",
    "FinishTask",
    "GetDataset",
    "GetElements",
    "GetElementsReply",
    "GetPlan",
    "GetPlanReply",
    "GetSaveStatus",
    "GetSplit",
    "GetSplitReply",
    "GetStatus",
    "GetTask",
    "IterationStatus",
    "JobOptions",
    "JobStatus",
    "LostSplits",
    "LostWorker",
    "OpenIteration",
    "OpenIterationReply",
    "Ping",
    "PutPlan",
    "PutPlanReply",
    "RegisterDataset",
    "RegisterDatasetReply",
    "RegisterWorker",
    "RegisterWorkerReply",
    "ReportDelivery",
    "ReportDepartedClient",
    "ReportUnreachable",
    "ReturnSplits",
    "RoundProgress",
    "SaveDestination",
    "SaveStatus",
    "SavedFile",
    "SkippedElements",
    "StartSave",
    "StepSeconds",
    "StepStatus",
    "TaskActivity",
    "TaskAddress",
    "TaskDefinition",
    "TaskStatus",
    "TrainerActivity",
    "UnregisterWorker",
    "WorkerHeartbeat",
    "WorkerHeartbeatReply",
    "WorkerReply",
    "WorkerRequest",
    "WorkerStatus",
]

DispatcherRequest: TypeAlias = (
    Ping
    | RegisterDataset
    | PutPlan
    | GetDataset
    | OpenIteration
    | ClientHeartbeat
    | ReportDelivery
    | CloseIteration
    | ReportUnreachable
    | ContributeCheckpoint
    | GetStatus
    | RegisterWorker
    | WorkerHeartbeat
    | DrainWorker
    | UnregisterWorker
    | GetTask
    | GetPlan
    | GetSplit
    | FinishTask
    | FailTask
    | ReturnSplits
    | ReportDepartedClient
    | StartSave
    | GetSaveStatus
    | CommitFiles
)
DispatcherReply: TypeAlias = (
    Done
    | RegisterDatasetReply
    | PutPlanReply
    | DatasetDescription
    | OpenIterationReply
    | ClientHeartbeatReply
    | DispatcherStatus
    | RegisterWorkerReply
    | WorkerHeartbeatReply
    | TaskDefinition
    | GetPlanReply
    | GetSplitReply
    | SaveStatus
    | ContributeCheckpointReply
)
WorkerRequest: TypeAlias = Ping | GetElements
WorkerReply: TypeAlias = Done | GetElementsReply
