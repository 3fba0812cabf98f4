"""`headrace dashboard` and `headrace report`: the status of a server as a web page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.commands import Keys
from headrace.cli.inspect import Address
from headrace.cli.run_server import run_server
from headrace.cli.status_client import StatusClient

__all__ = ["run_dashboard", "write_report"]

_FIRST_TIMEOUT = 5.0
"""Seconds that the server may take for its first reply."""


def run_dashboard(
    address: Address,
    port: Annotated[int, typer.Option(help="Port of the page; 0 picks a free port.")] = 8050,
    host: Annotated[
        str,
        typer.Option(
            help="Address of the page; the default is reachable from this machine only. For "
            "another address, the printed URL contains a token that browsers need."
        ),
    ] = "127.0.0.1",
    keys: Keys = None,
) -> None:
    """Serve a web page that shows a dispatcher, coordinator or parameter server.

    It shows jobs and their progress, workers, who waits for whom, the time spent in each step, and
    the last hour; for a coordinator also its functions and parameter servers.
    """
    try:
        from headrace.dashboard.server import Dashboard  # noqa: PLC0415 - optional dependency
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        print(
            f"headrace: the dashboard needs {missing}: pip install 'headrace[dashboard]'",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error
    with StatusClient(address, keys, _FIRST_TIMEOUT) as client:
        client.fetch()  # raises what the page would only show, such as a wrong address
    dashboard = Dashboard(address, host=host, port=port, keys=keys)
    run_server("dashboard", dashboard, lambda: dashboard.url)


def write_report(
    address: Address,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; replaced if it exists.")
    ],
    seconds: Annotated[float, typer.Option(help="Seconds to measure.")] = 10.0,
    keys: Keys = None,
) -> None:
    """Write the page of `headrace dashboard` to a file, which opens without a network.

    The file contains the names of jobs, functions and hosts, but no elements.
    """
    # Here, because the dashboard is above the commands in the import layers.
    from headrace.dashboard import report  # noqa: PLC0415

    if not seconds >= 0:
        raise typer.BadParameter(f"--seconds {seconds:g} must not be negative")
    report.write_report(address, keys, seconds, output)
    print(f"report written to {output}")
