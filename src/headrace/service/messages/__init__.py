"""Messages between clients, workers and the dispatcher.

Every request may be repeated: the sender chooses the ids (`token`, `client_id`, `worker_id`,
request numbers), so that a repeated request finds the result of the first one. A request declares
the type of its reply (`serving.rpc.TypedRequest`). Messages have no behaviour.

    datasets     clients and workers -> dispatcher     plans, and descriptions of datasets
    iterations   clients -> dispatcher                 open, heartbeat, report, close
    checkpoints  clients -> dispatcher                 a common position of all clients
    job_options  options that all clients of a job share
    status       clients -> dispatcher                 status of the service
    workers      workers -> dispatcher                 register, heartbeat, drain, unregister
    tasks        workers -> dispatcher                 definition of a task, its splits, its end
    saves        clients and workers -> dispatcher     datasets that workers write to files
    elements     clients -> workers
    activity     counters in heartbeats

*Splits* are what a DYNAMIC iteration assigns: parts of the plan, numbered from 0 over all epochs. A
range of splits is (start, stop). Splits "in assignment order" are numbered from 0 in the order in
which one task received them: in a task that was assigned (10, 13) and (40, 42), split 41 has number
4.
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
    MAX_PLAN_STEPS,
    MAX_STEP_NAME,
    PLAN_CHUNK_BYTES,
    DatasetDescription,
    GetDataset,
    GetPlan,
    GetPlanReply,
    PlanStep,
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
from headrace.serving.rpc import Done, Ping

__all__ = [
    "MAX_PLAN_STEPS",
    "MAX_STEP_NAME",
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
    "PlanStep",
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
