"""Utilisation of an accelerator by training loops that wait for their input.

Real devices are measured by `accelerator_device`:

    python -m benchmarks.accelerator --device cuda --out FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.accelerator_device import DeviceError, run
from benchmarks.accelerator_inputs import TASKS

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Measure a real device; return 2 if there is none, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument(
        "--task", action="append", default=[], choices=[task.name for task in TASKS]
    )
    parser.add_argument("--seconds", type=float, default=165.0, help="limit of the whole run")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args(arguments)
    try:
        run(options.device, options.seconds, tuple(options.task), options.out)
    except DeviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
