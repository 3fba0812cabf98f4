"""`headrace keys`: who may talk to a service that others can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.transport.security import new_keys

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Keys for services that other machines can reach.")


@app.callback()
def _group() -> None:
    """Keep `new` a command of its own while it is the only one."""


@app.command("new")
def make_keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them; made if need be.")],
) -> None:
    """Make the keys of a server and of a first client, who is let in."""
    folder = new_keys(directory)
    print(f"keys written to {folder}")
    print("  start the dispatcher with --keys and this directory; keep it secret")
    print("  whoever talks to it needs client.key, client.key_secret and server.key")
    print("  to let another client in, put its public key into authorized_clients/")
