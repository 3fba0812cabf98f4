"""Worker process of the tests: calls scenarios received through its standard input, a socket."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import traceback

from tests.distribute.several_workers import receive, send


def main():
    with socket.socket(fileno=os.dup(0)) as link:
        while (asked := receive(link)) is not None:
            environment, module, name, args = asked
            os.environ.update(environment)
            try:
                found = True, getattr(importlib.import_module(module), name)(*args)
            except Exception as error:
                found = False, (type(error).__name__, str(error), traceback.format_exc())
            gc.collect()  # closes strategies of this scenario before the next starts
            send(link, found)


main()
