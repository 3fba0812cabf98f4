"""The page with its data in one file, which opens without a server or a network.

Data cannot end the element that holds it, because `<` is written as an escape sequence of JSON. A
policy in the file lets only its own program and style sheet run, which are named by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import cache
from importlib import resources
from pathlib import Path

from headrace.cli.status_client import StatusClient
from headrace.dashboard.sampler import Sample, StatusSampler

__all__ = ["read_static", "render_report", "write_report"]

_STYLE = '<link rel="stylesheet" href="static/dashboard.css">'
_SCRIPT = '<script src="static/dashboard.js" defer></script>'
_HEAD_START = '<meta charset="utf-8">'
_ESCAPES = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


@cache
def read_static(name: str) -> str:
    """Return the text of a file of the page."""
    path = resources.files("headrace.dashboard").joinpath("static", name)
    return path.read_text(encoding="utf-8")


def render_report(sample: Sample, history: bytes, plans: bytes) -> str:
    """Return a report as HTML.

    Args:
        sample: Latest sample.
        history: Measurements, from `StatusSampler.history`.
        plans: Steps of plans, from `StatusSampler.plans`.
    """
    data = f'{{"status":{_text(sample.status)},"history":{_text(history)},"plans":{_text(plans)}}}'
    style, script = read_static("dashboard.css"), read_static("dashboard.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    page = read_static("index.html")
    for found, replacement in (
        (
            _HEAD_START,
            f'{_HEAD_START}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        (_STYLE, f"<style>{style}</style>"),
        (_SCRIPT, ""),
        (
            "</body>",
            f'<script type="application/json" id="report">{data.translate(_ESCAPES)}</script>\n'
            f"<script>{script}</script>\n</body>",
        ),
    ):
        before, separator, after = page.partition(found)
        if not separator:
            raise AssertionError(f"index.html lacks {found}")
        page = f"{before}{replacement}{after}"
    return page


def write_report(address: str, keys: Path | None, seconds: float, output: Path) -> None:
    """Sample a server for some seconds, and write a report.

    Args:
        address: Address of the server, as the user wrote it.
        keys: Directory of keys; None without keys.
        seconds: Seconds to measure.
        output: File to write; replaced if it exists.

    Raises:
        HeadraceError: If the server does not reply to the first request.
        OSError: If the file cannot be written.
    """
    with StatusClient(address, keys, _FIRST_TIMEOUT) as client:
        client.fetch()  # raises what a sampler would only record
    existed = output.exists()
    with output.open("a"):
        pass  # fails now, and not after measuring
    if not existed:
        output.unlink()
    sampler = StatusSampler(address, keys)
    try:
        end = time.monotonic() + seconds
        sample = sampler.sample_once()
        while (remaining := end - time.monotonic()) > 0:
            time.sleep(min(_INTERVAL, remaining))
            sample = sampler.sample_once()
        text = render_report(sample, sampler.history(), sampler.plans())
    finally:
        sampler.stop()
    output.write_text(text, encoding="utf-8")


_INTERVAL = 1.0
_FIRST_TIMEOUT = 5.0


def _text(data: bytes) -> str:
    return data.decode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
