"""`headrace dispatcher` and `headrace worker`: servers that run until they are stopped."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Protocol

import typer

from headrace import metrics
from headrace.cli.failures import wrong_arguments
from headrace.cli.signals import STOP_SIGNALS, Signals
from headrace.cli.supervise import run_children
from headrace.errors import CancelledError
from headrace.process.parent import say_leaving, say_ready
from headrace.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
from headrace.service.dispatcher.journal import FORMAT
from headrace.service.local_worker import WORKER_ENVIRONMENT
from headrace.service.worker.server import DRAIN_SECONDS
from headrace.transport.security import Security

__all__ = ["OPTIONS", "run_dispatcher", "run_worker"]

Port = Annotated[int, typer.Option(help="Where to listen; 0 takes a free one.")]
Host = Annotated[str, typer.Option(help="Whom to listen for; the default is this machine alone.")]
Keys = Annotated[
    Path | None,
    typer.Option(envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Serve Prometheus metrics there, for this machine alone."),
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
    "dispatcher_address": "--dispatcher",
    "worker_address": "--worker-address",
    "heartbeat_interval_ms": "--heartbeat-interval",
    "dispatcher_timeout_ms": "--dispatcher-timeout",
    "data_transfer_protocol": "--data-transfer-protocol",
    "worker_tags": "--tag",
    "preload": "--preload",
    "security": "--keys",
}
"""The option for each field of the servers' configurations."""


class RunningServer(Protocol):
    """What both servers can do."""

    def start(self) -> None:
        """Listen, and return when the server can be used."""

    def stop(self) -> None:
        """Stop listening and join all threads; ends a `start` that waits."""


def run_dispatcher(
    port: Annotated[
        int,
        typer.Option(
            envvar="HEADRACE_PORT",
            help="Where to listen; 0 takes a free one.",
        ),
    ] = 5050,
    host: Host = "127.0.0.1",
    work_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADRACE_WORK_DIR",
            help="Directory of the journal, on a disk of this machine; used with --fault-tolerant.",
        ),
    ] = None,
    fault_tolerant: Annotated[
        bool,
        typer.Option(help="Keep every fact in --work-dir, and go on from there when restarted."),
    ] = False,
    worker_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Silence in milliseconds after which a worker counts as lost, and its work goes "
            "to others; 10000 (10 s) by default.",
        ),
    ] = None,
    client_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Silence in milliseconds after which a program that reads counts as gone, and "
            "what it did not use goes to others; longer than any of its pauses; 300000 "
            "(5 minutes) by default.",
        ),
    ] = None,
    job_gc_timeout: Annotated[
        int | None,
        typer.Option(
            min=-1,
            metavar="MS",
            help="How many milliseconds a reading is kept that no program reads; 300000 "
            "(5 minutes) by default; -1: for ever.",
        ),
    ] = None,
    job_gc_check_interval: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds between looks for what nobody needs; 1000 (1 s) by default.",
        ),
    ] = None,
    gc_dynamic_sharding_jobs: Annotated[
        bool,
        typer.Option(
            help="Give up named DYNAMIC jobs as well after --job-gc-timeout; who opens one again "
            "reads it from its start."
        ),
    ] = False,
    max_plan_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            help="What the datasets that are kept may take together, with arrays in them; "
            "4294967296 (4 GiB) by default.",
        ),
    ] = None,
    worker_address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="A worker of the fixed list that the policies FILE, DATA, FILE_OR_DATA and HINT "
            "share a dataset among; give it once for each, in order. Without a port, or with "
            '"HOST:%port%", any port of that host.',
        ),
    ] = None,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Run a dispatcher until Ctrl-C or SIGTERM."""
    with wrong_arguments(OPTIONS):
        _check_ports("--metrics-port", metrics_port)
        if fault_tolerant and work_dir is None:
            raise ValueError(
                "--fault-tolerant needs --work-dir: the directory in which the dispatcher keeps "
                "its journal"
            )
        if work_dir is not None and not fault_tolerant:
            print(
                "headrace: nothing is kept in --work-dir without --fault-tolerant",
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
            security=None if keys is None else Security.load(keys, "server"),
        )
    if work_dir is not None and fault_tolerant:
        _say_what_is_kept(work_dir)
    server = DispatchServer(config, start=False)
    _serve("dispatcher", server, lambda: server.target, metrics_port)


def run_worker(
    dispatcher: Annotated[
        str,
        typer.Option(
            envvar="HEADRACE_DISPATCHER", metavar="HOST:PORT", help="The dispatcher to work for."
        ),
    ],
    processes: Annotated[
        int, typer.Option(help="Worker processes to run, each a worker of its own.")
    ] = 1,
    port: Port = 0,
    host: Host = "127.0.0.1",
    worker_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help='Where clients find this worker; "%port%" in it stands for the port.',
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="A word that describes the worker; once for each.")
    ] = None,
    data_transfer_protocol: Annotated[
        str | None, typer.Option(help="shm, tcp or local; the best by default.")
    ] = None,
    dispatcher_timeout: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="How many milliseconds to wait for a dispatcher that is away; 3600000 (an hour) "
            "by default.",
        ),
    ] = None,
    heartbeat_interval: Annotated[
        int | None,
        typer.Option(
            metavar="MS",
            help="Milliseconds between signs of life to the dispatcher; by default what it asks "
            "for (500, or a quarter of its --worker-timeout).",
        ),
    ] = None,
    preload: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Import it first; once for each.")
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long Ctrl-C or SIGTERM lets it deliver what it has; a second one stops it.",
        ),
    ] = DRAIN_SECONDS,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Run one worker, or several in processes of their own, until Ctrl-C or SIGTERM.

    It then takes no more work and delivers what it has; a second Ctrl-C or SIGTERM stops it at
    once. With --processes, a process that crashes is started again.

    With --processes N and a --port, the workers listen at that port and the N - 1 after it.
    """
    with wrong_arguments(OPTIONS):
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
            data_transfer_protocol=data_transfer_protocol,
            worker_tags=tag,
            preload=tuple(preload or ()),
            security=None if keys is None else Security.load(keys, "server"),
        )
    if processes == 1:
        for module in config.preload:
            _import(module)
        server = WorkerServer(config, start=False)
        _serve(
            "worker",
            server,
            lambda: server.address,
            metrics_port,
            with_parent=with_parent,
            drain=lambda: server.drain(drain_timeout),
        )
        return
    arguments = [*_worker_arguments(config, keys), "--drain-timeout", str(drain_timeout)]
    commands = []
    for number in range(processes):
        ports = ["--port", str(port and port + number)]
        if metrics_port is not None:
            ports += ["--metrics-port", str(metrics_port and metrics_port + number)]
        commands.append([*arguments, *ports])
    environment = {**WORKER_ENVIRONMENT, **os.environ}
    failed = run_children(commands, environment=environment, patience=drain_timeout)
    if failed:
        raise typer.Exit(1)
    _say(f"{processes} workers stopped")


def _say_what_is_kept(work_dir: Path) -> None:
    """Say whether there is anything to go on from: a name that is mistyped is a new directory."""
    if (work_dir / FORMAT.file_name).exists():
        _say(f"going on from the journal in {work_dir}")
    else:
        _say(f"no journal in {work_dir}: a new one begins there")


def _worker_arguments(config: WorkerConfig, keys: Path | None) -> list[str]:
    """Write the configuration of one of several workers as the arguments of a command."""
    arguments = ["worker", "--with-parent", "--host", config.host]
    options = {
        "--dispatcher": config.dispatcher_address,
        "--worker-address": config.worker_address,
        "--data-transfer-protocol": config.data_transfer_protocol,
        "--dispatcher-timeout": config.dispatcher_timeout_ms,
        "--heartbeat-interval": config.heartbeat_interval_ms,
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


def _serve(
    role: str,
    server: RunningServer,
    address: Callable[[], str],
    metrics_port: int | None,
    *,
    with_parent: bool = False,
    drain: Callable[[], None] | None = None,
) -> None:
    """Start the server, say where it is, wait for Ctrl-C or SIGTERM, stop it.

    A server that can be drained is, until it is done or a second signal comes. `start` may wait
    long for a peer, so it runs beside the main thread, which can stop it.
    """
    parent = [sys.stdin] if with_parent else []
    # Python's own handlers are back while the server stops: a second Ctrl-C does not wait.
    with ExitStack() as stack, Signals() as signals:
        start = _Start(server, signals)
        stack.callback(start.thread.join)
        stack.callback(start.call_off)
        start.thread.start()
        reported = False
        while not STOP_SIGNALS & signals.wait(closing=parent):
            if start.error is not None:
                # Some of what the configuration says can only be judged when it is used.
                with wrong_arguments(OPTIONS):
                    raise start.error
            if start.done and not reported:
                reported = True
                if metrics_port is not None:
                    metrics_at = stack.enter_context(metrics.expose(metrics_port))
                    _say(f"metrics at http://127.0.0.1:{metrics_at}/metrics")
                _say(f"{role} ready at {address()}")
                if with_parent:
                    say_ready(address())
        if with_parent:
            say_leaving()
        if drain is not None and start.done:
            _say(f"{role} delivers what it has; a second signal stops it at once")
            _drain(drain, signals)
    if start.error is not None and not isinstance(start.error, CancelledError):
        raise start.error
    _say(f"{role} stopped")


def _say(words: str) -> None:
    """Print a line in one piece: the processes of a command write to one place."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _drain(drain: Callable[[], None], signals: Signals) -> None:
    """Drain on a thread of its own until that is done, or another signal comes."""
    done = threading.Event()

    def run() -> None:
        try:
            drain()
        finally:
            done.set()
            signals.wake()

    thread = threading.Thread(target=run, name="headrace-drain", daemon=True)
    thread.start()
    # Whoever started us is not watched any more: that it is gone was the first signal perhaps.
    while not done.is_set() and not STOP_SIGNALS & signals.wait():
        pass


class _Start:
    """A server's `start` on a thread of its own; wakes the main thread when it is done."""

    def __init__(self, server: RunningServer, signals: Signals) -> None:
        self._server = server
        self._signals = signals
        self.done = False
        self.error: Exception | None = None
        self._is_called_off = False
        self.thread = threading.Thread(target=self._run, name="headrace-start", daemon=True)

    def _run(self) -> None:
        try:
            self._server.start()
            self.done = True
        except Exception as error:
            # One that was stopped before this thread got so far cannot be started: no failure.
            if not self._is_called_off:
                self.error = error
        self._signals.wake()

    def call_off(self) -> None:
        """Stop the server, whether it has started, is starting, or was about to."""
        self._is_called_off = True
        self._server.stop()


def _check_ports(option: str, first: int | None, processes: int = 1) -> None:
    if first is None:
        return
    if not 0 <= first <= 65535:
        raise ValueError(f"{option} {first} must be between 0 and 65535")
    if first + processes - 1 > 65535:
        raise ValueError(f"{option} {first} leaves no room for {processes} processes")


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise typer.BadParameter(
            f"--preload {module}: {error}; is its folder in PYTHONPATH?"
        ) from error
