"""Clean environments with the wheel, one per Python of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Environment", "find_pythons"]

_OLDEST = (3, 11)
_NEWEST = 20
_INSTALL_SECONDS = 900.0
_PROBE = "import sys; print(*sys.version_info[:2])"


def find_pythons() -> dict[str, Path]:
    """Return the interpreters of at least Python 3.11 on this machine, by version.

    Looks for `python3.11` and so on, with and without the suffix `t` (free-threaded), on PATH and
    among the versions of pyenv.
    """
    found: dict[str, Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(_OLDEST[1], _NEWEST):
        for suffix in ("", "t"):
            version = f"{_OLDEST[0]}.{minor}{suffix}"
            on_path = shutil.which(f"python{version}")
            candidates = [Path(on_path)] if on_path else []
            candidates += sorted(pyenv.glob(f"{_OLDEST[0]}.{minor}.*/bin/python{version}"))
            for candidate in candidates:
                if _runs(candidate, minor):
                    found[version] = candidate
                    break
    return found


def _runs(python: Path, minor: int) -> bool:
    """Return whether an interpreter starts, and has the version that its name says."""
    result = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.split() == [str(_OLDEST[0]), str(minor)]


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which only the wheel is installed.

    Attributes:
        version: Version of Python, such as "3.11".
        directory: Its directory.
    """

    version: str
    directory: Path

    @property
    def bin(self) -> Path:
        """Directory of its programs."""
        return self.directory / "bin"

    @classmethod
    def create(cls, version: str, python: Path, directory: Path, wheel: Path) -> Environment:
        """Create an environment; install the wheel with the newest dependencies, as pip does.

        Raises:
            CalledProcessError: If the installation fails; its output is shown.
        """
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([python, "-m", "venv", directory], check=True)
        environment = cls(version, directory)
        environment.install(str(wheel))
        return environment

    def install(self, *requirements: str) -> None:
        """Install packages."""
        subprocess.run(
            [self.bin / "python", "-m", "pip", "install", "--quiet", "--quiet",
             "--disable-pip-version-check", "--no-input", *requirements],
            check=True, timeout=_INSTALL_SECONDS,
        )  # fmt: skip

    def run(
        self, *arguments: str | Path, seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run its Python, outside the source tree and without variables that lead into it."""
        variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.bin / "python", *arguments],
            capture_output=True, text=True, check=False, timeout=seconds,
            cwd=self.directory, env=variables,
        )  # fmt: skip
