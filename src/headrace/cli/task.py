"""`headrace server`: a worker or a parameter server of a cluster, until it is stopped."""

from __future__ import annotations

import enum
import os
from typing import Annotated

import typer

from headrace.arguments import check_int
from headrace.cli.commands import (
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
            "--type", help="What it is; ps: a parameter server. By default as TF_CONFIG says."
        ),
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(
            min=0, help="Its number among those of its type; by default as TF_CONFIG says."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Where to listen, in place of the host in its address: 0.0.0.0, say, where that "
            "is a name that only others know.",
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Be a worker that announces itself to the coordinator that listens there; "
            "TF_CONFIG is not read.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Where a worker with --coordinator listens; 0 takes a free one.")
    ] = 0,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Import it first, by its name or as a file FOLDER/NAME.py; once for each.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Run it in a process of its own, which is started again when it crashes.",
        ),
    ] = False,
    keys: Keys = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    with_parent: ParentOption = False,
) -> None:
    """Run a worker or a parameter server of a cluster until Ctrl-C or SIGTERM.

    The variable TF_CONFIG names the cluster: {"cluster": {"worker": ["host1:2222"], "ps":
    ["host2:2222"]}}. It may name the task, too: {"task": {"type": "ps", "index": 0}}.

    With --coordinator it is a worker that comes while the program runs, and may leave again.
    """
    with convert_argument_errors(_OPTIONS):
        if coordinator is None:
            if port:
                raise ValueError("`port` goes with --coordinator; TF_CONFIG says it for all others")
            spec, job_name, task_index = _find_task(task_type, index)
        else:
            if task_type is TaskType.PS:
                raise ValueError(
                    "--coordinator is for workers: the strategy knows the parameter servers from "
                    "its cluster, so --type ps reads TF_CONFIG"
                )
            place, port = _listen_address(host, port, restart)
            spec, job_name, task_index = ClusterSpec({WORKER: {index or 0: place}}), task_type, None
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
        run_server(role, server, lambda: server.target, options=_OPTIONS, with_parent=with_parent)


def _find_task(
    task_type: TaskType | None, index: int | None
) -> tuple[ClusterSpec, str | None, int | None]:
    """Return the cluster in TF_CONFIG, and the task of this process."""
    found = TFConfigClusterResolver(task_type, index)
    spec = found.cluster_spec()
    if not spec:
        raise InvalidArgumentError(
            'TF_CONFIG names no tasks; set it, as in TF_CONFIG=\'{"cluster": {"worker": '
            '["host1:2222"], "ps": ["host2:2222"]}}\''
        )
    # A number in the variable applies only to the type of the task there.
    is_there = task_type is None or task_type == TFConfigClusterResolver().task_type
    return spec, found.task_type, found.task_id if index is not None or is_there else None


def _listen_address(host: str | None, port: int, restart: bool) -> tuple[str, int]:
    """Return the host and port at which a worker that registers itself listens.

    A worker that is restarted must keep its address: at another one it is another worker to a
    coordinator.
    """
    check_int("port", port, minimum=0, maximum=65535)
    host = "127.0.0.1" if host is None else host
    if restart and not port:
        port = addresses.find_stable_port(host)
    return addresses.join(host, port), port
