"""Programs of others that listen at every address, run where there is none but loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_SECONDS = 150.0

#: In a network of its own loopback is down at first.
_WITH_LOOPBACK = """
import fcntl, os, socket, struct, sys
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    request = struct.pack("16sh14x", b"lo", 0)
    flags, = struct.unpack("16xh14x", fcntl.ioctl(asked, SIOCGIFFLAGS, request))
    fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def on_loopback_alone(arguments: Sequence[str]) -> str:
    """Run a Python program; return what it wrote.

    It has a network of its own with nothing but loopback, where the system grants one to it.
    """
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    is_granted = (
        shutil.which("unshare") is not None
        and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    )
    before = [*alone, sys.executable, "-c", _WITH_LOOPBACK] if is_granted else [sys.executable]
    # Launchers leave folders behind. A short name: Ray's sockets are in there, too.
    with tempfile.TemporaryDirectory(prefix="alone-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [*before, *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "RAY_TMPDIR": folder},
        )
    return done.stdout + done.stderr
