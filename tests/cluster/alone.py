"""Runs third-party programs that listen at every address in a network with loopback only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_SECONDS = 150.0

HOST = "10.123.0.1"
"""Second address of the loopback interface in that network, for which servers require keys."""

#: Loopback is down at first in a new network namespace.
_WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8913, 0x8914, 0x8916, 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    request = struct.pack("16sh14x", b"lo", 0)
    flags, = struct.unpack("16xh14x", fcntl.ioctl(asked, SIOCGIFFLAGS, request))
    fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    host = struct.pack("16shH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("HOST"))
    fcntl.ioctl(asked, SIOCSIFADDR, host)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
""".replace("HOST", HOST)


def on_loopback_alone(arguments: Sequence[str], seconds: float = _SECONDS) -> str:
    """Run a Python program; return what it wrote.

    It runs in a network namespace with loopback only, if the system permits one.

    Args:
        arguments: Arguments of the interpreter.
        seconds: Seconds after which the program is killed.
    """
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    is_granted = (
        shutil.which("unshare") is not None
        and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    )
    before = [*alone, sys.executable, "-c", _WITH_LOOPBACK] if is_granted else [sys.executable]
    # Launchers leave folders behind. The name is short, since Ray's sockets are in the folder, too.
    with tempfile.TemporaryDirectory(prefix="alone-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [*before, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "RAY_TMPDIR": folder},
        )
    return done.stdout + done.stderr
