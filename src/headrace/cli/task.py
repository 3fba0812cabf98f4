"""`headrace server`: a worker or a parameter server of a cluster, until it is stopped."""

from __future__ import annotations

import enum
import os
from typing import Annotated

import typer

from headrace.arguments import check_int
from headrace.cli.commands import (
    IgnoreSignalsOption,
    Keys,
    MetricsHost,
    MetricsPort,
    ParentOption,
    convert_argument_errors,
)
from headrace.cli.run_server import print_line, run_children, run_server
from headrace.cli.serve import import_modules
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.cluster.spec import WORKER, ClusterSpec
from headrace.deploy.server import Server
from headrace.errors import InvalidArgumentError
from headrace.process.parent_link import bind_forked_children
from headrace.transport import address as addresses
from headrace.transport.security import Security

__all__ = ["run_task"]

_OPTIONS = {
    "job_name": "--type",
    "task_index": "--index",
    "host": "--host",
    "security": "--keys",
    "coordinator": "--coordinator",
    "port": "--port",
    "metrics_port": "--metrics-port",
    "metrics_host": "--metrics-host",
}
"""Option for each argument of a server."""


class TaskType(enum.StrEnum):
    """Types of tasks that listen."""

    WORKER = "worker"
    PS = "ps"


def run_task(
    task_type: Annotated[
        TaskType | None,
        typer.Option(
            "--type", help="Type of the task; ps: parameter server. By default from TF_CONFIG."
        ),
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(min=0, help="Index among the tasks of its type; by default from TF_CONFIG."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address to listen at instead of the host in TF_CONFIG: 0.0.0.0, for example, if "
            "this machine cannot resolve that host name.",
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Run a worker that registers with the coordinator at this address; TF_CONFIG is "
            "not read.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port of a worker with --coordinator; 0 picks a free port.")
    ] = 0,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module to import first, by name or as a file FOLDER/NAME.py; repeat for several.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Run the task in a child process that is restarted if it crashes.",
        ),
    ] = False,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    with_parent: ParentOption = False,
    ignore_signals: IgnoreSignalsOption = False,
) -> None:
    """Run a worker or a parameter server of a cluster until Ctrl-C or SIGTERM.

    The environment variable TF_CONFIG defines the cluster: {"cluster": {"worker":
    ["host1:2222"], "ps": ["host2:2222"]}}. It may also define the task: {"task": {"type": "ps",
    "index": 0}}.

    With --coordinator, the worker joins a running program, and may leave at any time.
    """
    with convert_argument_errors(_OPTIONS):
        if coordinator is None:
            if port:
                raise ValueError(
                    "`port` requires --coordinator; without it, TF_CONFIG sets the port"
                )
            spec, job_name, task_index = _find_task(task_type, index)
        else:
            if task_type is TaskType.PS:
                raise ValueError(
                    "--type ps cannot be used with --coordinator: the strategy finds parameter "
                    "servers in its cluster, so they read TF_CONFIG"
                )
            address, port = _listen_address(host, port, restart)
            spec = ClusterSpec({WORKER: {index or 0: address}})
            job_name, task_index = task_type, None
        server = Server(
            spec,
            job_name,
            task_index,
            start=False,
            security=None if keys is None else Security.load(keys, "server"),
            host=host,
            coordinator=coordinator,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
    role = f"{server.job_name} {server.task_index}"
    if restart:
        arguments = ["server", "--with-parent", "--type", server.job_name]
        arguments += ["--index", str(server.task_index)]
        options = {
            "--host": host,
            "--keys": keys,
            "--coordinator": coordinator,
            "--port": port or None,
            "--metrics-port": metrics_port,
            "--metrics-host": None if metrics_port is None else metrics_host,
        }
        for option, value in options.items():
            arguments += [] if value is None else [option, str(value)]
        for module in preload or ():
            arguments += ["--preload", module]
        failed = run_children([arguments], environment=os.environ)
        if failed:
            raise typer.Exit(1)
        print_line(f"{role} stopped")
        return
    import_modules(preload or ())
    with bind_forked_children():
        run_server(
            role,
            server,
            lambda: server.target,
            options=_OPTIONS,
            with_parent=with_parent,
            ignore_signals=ignore_signals,
        )


def _find_task(
    task_type: TaskType | None, index: int | None
) -> tuple[ClusterSpec, str | None, int | None]:
    """Return the cluster in TF_CONFIG, and the task of this process."""
    resolver = TFConfigClusterResolver(task_type, index)
    spec = resolver.cluster_spec()
    if not spec:
        raise InvalidArgumentError(
            'TF_CONFIG defines no tasks; set it, as in TF_CONFIG=\'{"cluster": {"worker": '
            '["host1:2222"], "ps": ["host2:2222"]}}\''
        )
    # An index in TF_CONFIG applies only to the task type in TF_CONFIG.
    is_same_type = task_type is None or task_type == TFConfigClusterResolver().task_type
    return spec, resolver.task_type, resolver.task_id if index is not None or is_same_type else None


def _listen_address(host: str | None, port: int, restart: bool) -> tuple[str, int]:
    """Return the host and port at which a worker that registers itself listens.

    A restarted worker must keep its address: the coordinator takes a new address for a new worker.
    """
    check_int("port", port, minimum=0, maximum=65535)
    host = "127.0.0.1" if host is None else host
    if restart and not port:
        port = addresses.find_stable_port(host)
    return addresses.join(host, port), port
