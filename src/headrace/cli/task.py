"""`headrace server`: a worker or a parameter server of a cluster, until it is stopped."""

from __future__ import annotations

import enum
import os
from typing import Annotated

import typer

from headrace.cli.failures import wrong_arguments
from headrace.cli.running import run_server, say
from headrace.cli.serve import Keys, WithParent, import_modules
from headrace.cli.supervise import run_children
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.deploy.server import Server
from headrace.errors import InvalidArgumentError
from headrace.transport.security import Security

__all__ = ["run_task"]

_OPTIONS = {
    "job_name": "--type",
    "task_index": "--index",
    "host": "--host",
    "security": "--keys",
}
"""The option for each argument of a server."""


class TaskType(enum.StrEnum):
    """Tasks that listen."""

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
    with_parent: WithParent = False,
) -> None:
    """Run a worker or a parameter server of a cluster until Ctrl-C or SIGTERM.

    The variable TF_CONFIG names the cluster: {"cluster": {"worker": ["host1:2222"], "ps":
    ["host2:2222"]}}. It may name the task, too: {"task": {"type": "ps", "index": 0}}.
    """
    with wrong_arguments(_OPTIONS):
        found = TFConfigClusterResolver(task_type, index)
        spec = found.cluster_spec()
        if not spec:
            raise InvalidArgumentError(
                'TF_CONFIG names no tasks; set it, as in TF_CONFIG=\'{"cluster": {"worker": '
                '["host1:2222"], "ps": ["host2:2222"]}}\''
            )
        job_name = found.task_type
        # A number in the variable is of the task there, and of no other type.
        is_there = task_type is None or task_type == TFConfigClusterResolver().task_type
        task_index = found.task_id if index is not None or is_there else None
        security = None if keys is None else Security.load(keys, "server")
        server = Server(spec, job_name, task_index, start=False, security=security, host=host)
    role = f"{server.job_name} {server.task_index}"
    if restart:
        arguments = ["server", "--with-parent", "--type", server.job_name]
        arguments += ["--index", str(server.task_index)]
        for option, text in (("--host", host), ("--keys", keys)):
            arguments += [] if text is None else [option, str(text)]
        for module in preload or ():
            arguments += ["--preload", module]
        failed = run_children([arguments], environment=os.environ)
        if failed:
            raise typer.Exit(1)
        say(f"{role} stopped")
        return
    import_modules(preload or ())
    run_server(role, server, lambda: server.target, options=_OPTIONS, with_parent=with_parent)
