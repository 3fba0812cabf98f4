"""A parameter server as a program: python -m tests.parameter_server.served INDEX PORT."""

from __future__ import annotations

import sys

from headrace.parameter_server.server import ParameterServer

if __name__ == "__main__":
    with ParameterServer(int(sys.argv[1]), port=int(sys.argv[2])) as server:
        print(server.address, flush=True)
        sys.stdin.read()
