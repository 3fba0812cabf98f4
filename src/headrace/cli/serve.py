"""`headrace dispatcher` and `headrace worker`: servers that run until they are stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from headrace.cli.commands import (
    IgnoreSignalsOption,
    Keys,
    MetricsHost,
    MetricsPort,
    ParentOption,
    convert_argument_errors,
)
from headrace.cli.run_server import print_line, run_children, run_server
from headrace.process.child import NO_ACCELERATORS
from headrace.process.parent_link import exit_when_hung, large_copy_tunables
from headrace.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
from headrace.service.config import DeploymentMode, TransferProtocol, default_cache_bytes
from headrace.service.dispatcher.core import FORMAT
from headrace.service.worker.preloading import preload
from headrace.service.worker.server import DRAIN_SECONDS
from headrace.transport.security import Security

__all__ = ["OPTIONS", "import_modules", "run_dispatcher", "run_worker"]

Port = Annotated[int, typer.Option(help="Port to listen at; 0 picks a free port.")]
Host = Annotated[
    str,
    typer.Option(help="Address to listen at; the default is reachable from this machine only."),
]

OPTIONS = {
    "port": "--port",
    "host": "--host",
    "work_dir": "--work-dir",
    "fault_tolerant_mode": "--fault-tolerant",
    "worker_addresses": "--worker-address",
    "worker_timeout_ms": "--worker-timeout",
    "client_timeout_ms": "--client-timeout",
    "job_gc_timeout_ms": "--job-gc-timeout",
    "job_gc_check_interval_ms": "--job-gc-check-interval",
    "gc_dynamic_sharding_jobs": "--gc-dynamic-sharding-jobs",
    "max_plan_bytes": "--max-plan-bytes",
    "deployment_mode": "--deployment-mode",
    "worker_max_concurrent_snapshots": "--worker-max-concurrent-snapshots",
    "dispatcher_address": "--dispatcher",
    "worker_address": "--worker-address",
    "heartbeat_interval_ms": "--heartbeat-interval",
    "hang_timeout_ms": "--hang-timeout",
    "dispatcher_timeout_ms": "--dispatcher-timeout",
    "data_transfer_protocol": "--data-transfer-protocol",
    "worker_tags": "--tag",
    "cross_trainer_cache_size_bytes": "--cross-trainer-cache-bytes",
    "preload": "--preload",
    "security": "--keys",
    "metrics_port": "--metrics-port",
    "metrics_host": "--metrics-host",
}
"""Option for each field of the servers' configurations."""


def run_dispatcher(
    port: Annotated[
        int,
        typer.Option(
            envvar="HEADRACE_PORT",
            help="Port to listen at; 0 picks a free port.",
        ),
    ] = 5050,
    host: Host = "127.0.0.1",
    work_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_WORK_DIR",
            help="Directory of the journal, on a local disk; used with --fault-tolerant.",
        ),
    ] = None,
    fault_tolerant: Annotated[
        bool,
        typer.Option(help="Journal all state in --work-dir, and resume from it after a restart."),
    ] = False,
    worker_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds without a heartbeat after which a worker is lost and its splits "
            "are reassigned; 10000 (10 s) by default.",
        ),
    ] = None,
    client_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds without a heartbeat after which a client is expired and the "
            "elements that it did not consume are reassigned; must exceed the longest pause of a "
            "client; 300000 (5 minutes) by default.",
        ),
    ] = None,
    job_gc_timeout: Annotated[
        int | None,
        typer.Option(
            min=-1,
            metavar="MS",
            help="Milliseconds without a client after which a job is removed; 300000 (5 minutes) "
            "by default; -1: never.",
        ),
    ] = None,
    job_gc_check_interval: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds between garbage collections; 1000 (1 s) by default.",
        ),
    ] = None,
    gc_dynamic_sharding_jobs: Annotated[
        bool,
        typer.Option(
            help="Also remove named DYNAMIC jobs after --job-gc-timeout; a client that opens one "
            "again reads it from the start."
        ),
    ] = False,
    max_plan_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Maximum total size of the registered datasets, including their arrays; "
            "4294967296 (4 GiB) by default.",
        ),
    ] = None,
    worker_address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Worker in the fixed list among which the policies FILE, DATA, FILE_OR_DATA and "
            "HINT shard a dataset; repeat it for each worker, in order. Without a port, or with "
            '"HOST:%port%", it matches any port of that host.',
        ),
    ] = None,
    deployment_mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help='Workers to read from with static sharding and target_workers="AUTO": '
            "COLOCATED, those in the client's process; REMOTE, all. By default those in the "
            "client's process if there are any, else all.",
        ),
    ] = None,
    worker_max_concurrent_snapshots: Annotated[
        int,
        typer.Option(help="Maximum saves that a worker writes at the same time; 0 means 3."),
    ] = 0,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    with_parent: ParentOption = False,
    ignore_signals: IgnoreSignalsOption = False,
) -> None:
    """Run a dispatcher until Ctrl-C or SIGTERM."""
    with convert_argument_errors(OPTIONS):
        _check_ports("--metrics-port", metrics_port)
        if fault_tolerant and work_dir is None:
            raise ValueError(
                "--fault-tolerant requires --work-dir, the directory of the dispatcher's journal"
            )
        if work_dir is not None and not fault_tolerant:
            print(
                "headrace: --work-dir is unused without --fault-tolerant; no journal is written",
                file=sys.stderr,
                flush=True,
            )
        config = DispatcherConfig(
            port=port,
            host=host,
            work_dir=work_dir,
            fault_tolerant_mode=fault_tolerant,
            worker_addresses=worker_address or None,
            job_gc_check_interval_ms=job_gc_check_interval,
            job_gc_timeout_ms=job_gc_timeout,
            worker_timeout_ms=worker_timeout,
            client_timeout_ms=client_timeout,
            gc_dynamic_sharding_jobs=gc_dynamic_sharding_jobs,
            max_plan_bytes=max_plan_bytes,
            deployment_mode=cast("DeploymentMode | None", deployment_mode),  # validated there
            worker_max_concurrent_snapshots=worker_max_concurrent_snapshots,
            security=None if keys is None else Security.load(keys, "server"),
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
    journal = _describe_work_dir(work_dir) if work_dir is not None and fault_tolerant else None
    server = DispatchServer(config, start=False)
    run_server(
        "dispatcher",
        server,
        lambda: server.target,
        options=OPTIONS,
        on_started=journal,
        with_parent=with_parent,
        ignore_signals=ignore_signals,
    )


def run_worker(
    dispatcher: Annotated[
        str,
        typer.Option(
            envvar="HEADRACE_DISPATCHER", metavar="HOST:PORT", help="Address of the dispatcher."
        ),
    ],
    processes: Annotated[
        int, typer.Option(help="Number of worker processes; each is a separate worker.")
    ] = 1,
    port: Port = 0,
    host: Host = "127.0.0.1",
    worker_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help='Address at which clients reach this worker; "%port%" is replaced by the port.',
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Tag of the worker; repeat the option for several.")
    ] = None,
    data_transfer_protocol: Annotated[
        str | None, typer.Option(help="shm, tcp or local; by default the fastest that works.")
    ] = None,
    dispatcher_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds to wait for an unreachable dispatcher; 3600000 (1 hour) by default.",
        ),
    ] = None,
    heartbeat_interval: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds between heartbeats to the dispatcher; by default as the dispatcher "
            "requests (500, or a quarter of its --worker-timeout).",
        ),
    ] = None,
    hang_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds that one call of a function, or one wait of a source for data, may "
            "take before an error is logged and, with --processes, the process is replaced; "
            "600000 by default; 0: no limit.",
        ),
    ] = None,
    cross_trainer_cache_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="Maximum size of the cross-trainer cache of each job; by default 10 GiB, or a "
            "quarter of the machine's memory if that is less.",
        ),
    ] = None,
    preload_: Annotated[
        list[str] | None,
        typer.Option(
            "--preload",
            metavar="MODULE",
            help="Module to import first, by name or as a file FOLDER/NAME.py; repeat for several.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Maximum time to deliver buffered elements after Ctrl-C or SIGTERM; a second "
            "signal stops the worker at once.",
        ),
    ] = DRAIN_SECONDS,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    with_parent: ParentOption = False,
    ignore_signals: IgnoreSignalsOption = False,
) -> None:
    """Run one worker, or several in separate processes, until Ctrl-C or SIGTERM.

    The worker then drains: it accepts no new splits and delivers its buffered elements. A second
    Ctrl-C or SIGTERM stops it at once. With --processes, a process that crashes is restarted.

    With --processes and --port, the workers listen at that port and the ones after it.
    """
    with convert_argument_errors(OPTIONS):
        if processes < 1:
            raise ValueError(f"--processes {processes} must be at least 1")
        _check_ports("--port", port, processes)
        _check_ports("--metrics-port", metrics_port, processes)
        config = WorkerConfig(
            dispatcher,
            worker_address=worker_address,
            port=port,
            host=host,
            dispatcher_timeout_ms=dispatcher_timeout,
            heartbeat_interval_ms=heartbeat_interval,
            hang_timeout_ms=hang_timeout,
            data_transfer_protocol=cast("TransferProtocol | None", data_transfer_protocol),
            worker_tags=tag,
            cross_trainer_cache_size_bytes=(
                default_cache_bytes(processes)
                if cross_trainer_cache_bytes is None
                else cross_trainer_cache_bytes
            ),
            preload=tuple(preload_ or ()),
            security=None if keys is None else Security.load(keys, "server"),
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
    if processes == 1:
        import_modules(config.preload)
        if with_parent and config.hang_timeout:
            exit_when_hung(config.hang_timeout)
        server = WorkerServer(config, start=False)
        run_server(
            "worker",
            server,
            lambda: server.address,
            options=OPTIONS,
            with_parent=with_parent,
            ignore_signals=ignore_signals,
            drain=lambda: server.drain(drain_timeout),
        )
        return
    arguments = [*_worker_arguments(config, keys), "--drain-timeout", str(drain_timeout)]
    commands = []
    for number in range(processes):
        ports = ["--port", str(port and port + number)]
        if metrics_port is not None:
            ports += ["--metrics-port", str(metrics_port and metrics_port + number)]
            ports += ["--metrics-host", metrics_host]
        commands.append([*arguments, *ports])
    environment = {**NO_ACCELERATORS, **large_copy_tunables(os.environ), **os.environ}
    failed = run_children(commands, environment=environment, drain_timeout=drain_timeout)
    if failed:
        raise typer.Exit(1)
    print_line(f"{processes} workers stopped")


def _describe_work_dir(work_dir: Path) -> str:
    """Describe the existing contents of a work_dir: a mistyped name is a new directory."""
    if (work_dir / FORMAT.file_name).exists():
        return f"resuming from the journal in {work_dir}"
    return f"no journal in {work_dir}: starting a new one"


def _worker_arguments(config: WorkerConfig, keys: Path | None) -> list[str]:
    """Return the configuration of one of several workers as command-line arguments."""
    arguments = ["worker", "--with-parent", "--host", config.host]
    options = {
        "--dispatcher": config.dispatcher_address,
        "--worker-address": config.worker_address,
        "--data-transfer-protocol": config.data_transfer_protocol,
        "--dispatcher-timeout": config.dispatcher_timeout_ms,
        "--heartbeat-interval": config.heartbeat_interval_ms,
        "--hang-timeout": config.hang_timeout_ms,
        "--cross-trainer-cache-bytes": config.cross_trainer_cache_size_bytes,
        "--keys": keys,
    }
    for option, value in options.items():
        if value is not None:
            arguments += [option, str(value)]
    repeated: dict[str, Sequence[str]] = {
        "--tag": config.worker_tags or (),
        "--preload": config.preload,
    }
    for option, values in repeated.items():
        for value in values:
            arguments += [option, value]
    return arguments


def _check_ports(option: str, first: int | None, processes: int = 1) -> None:
    if first is None:
        return
    if not 0 <= first <= 65535:
        raise ValueError(f"{option} {first} must be between 0 and 65535")
    if first + processes - 1 > 65535:
        raise ValueError(
            f"{option} {first} must be at most {65536 - processes} with {processes} processes"
        )


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of `--preload`.

    Raises:
        typer.BadParameter: If one of them cannot be imported.
    """
    for module in modules:
        try:
            preload(module)
        except ImportError as error:
            raise typer.BadParameter(
                f"--preload {module}: {error}; is its directory in PYTHONPATH?"
            ) from error
