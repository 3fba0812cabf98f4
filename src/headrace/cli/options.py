"""Options that several commands have alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Keys", "MetricsHost", "MetricsPort", "WithParent"]

Keys = Annotated[
    Path | None,
    typer.Option(envvar="HEADRACE_KEYS", help="Directory made by `headrace keys new`."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Serve /metrics, /healthz and /readyz there, over HTTP; 0 takes a free one."),
]
MetricsHost = Annotated[
    str, typer.Option(help="Whom these are for; the default is this machine alone.")
]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True)]
