"""Draw docs/benchmarks.svg: two workloads of benchmarks/RESULTS.md as bars.

Run by `make docs`; a test asserts that the committed chart is up to date.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"

#: Workload in RESULTS.md, title of its panel, and the contenders shown with their labels.
PANELS = [
    (
        "service, 9.6 MB batches",
        "Batches of 9.6 MB from one worker process to the training process",
        {
            "headrace, shared memory": "Headrace, shared memory",
            "headrace, tcp": "Headrace, TCP",
            "tf.data service, compression=None": "tf.data service, uncompressed",
            "grain mp_prefetch, 1 worker": "Grain, 1 worker process",
            "tf.data service, default": "tf.data service, default",
            "torch DataLoader, 1 worker": "torch DataLoader, 1 worker",
        },
    ),
    (
        "JPEG, decode + resize",
        "JPEG decoding and resizing on one host, without a service",
        {
            "headrace": "Headrace",
            "grain, 2 threads": "Grain, 2 threads",
            "torch DataLoader, 2 workers": "torch DataLoader, 2 workers",
            "tf.data": "tf.data",
        },
    ),
]

WIDTH, LABELS, BAR, STEP = 760, 220, 16, 24
INK, QUIET, OWN, OTHER = "#1b2a38", "#5b6b78", "#1f78b4", "#b6c2cc"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def rates() -> dict[tuple[str, str], str]:
    """Return the median rate, as text with its unit, by workload and contender."""
    rows = [line.split("|") for line in RESULTS.read_text().splitlines() if line.startswith("| ")]
    return {(row[1].strip(), row[2].strip()): row[3].strip() for row in rows[1:]}


def text(x: float, y: float, content: str, size: float, fill: str, more: str = "") -> str:
    """Return an SVG text element; `more` contains further attributes."""
    font = f"{FONT} font-size='{size}' fill='{fill}'{more}"
    return f"<text x='{x:g}' y='{y:g}' {font}>{escape(content)}</text>"


def panel(top: int, title: str, bars: dict[str, str]) -> list[str]:
    """Return the SVG elements of one panel, a bar for each contender.

    Args:
        top: Distance from the top of the picture, in pixels.
        title: Title above the bars.
        bars: Rates with their unit, "12.76 GB/s", by label.
    """
    values = {label: float(rate.split()[0]) for label, rate in bars.items()}
    scale = (WIDTH - LABELS - 120) / max(values.values())
    parts = [text(20, top + 18, title, 14, INK, " font-weight='bold'")]
    for number, (label, rate) in enumerate(bars.items()):
        y = top + 32 + number * STEP
        width = values[label] * scale
        fill = OWN if label.startswith("Headrace") else OTHER
        parts += [
            text(LABELS - 10, y + 12.5, label, 12.5, INK, " text-anchor='end'"),
            f"<rect x='{LABELS}' y='{y}' width='{width:.1f}' height='{BAR}' rx='2' fill='{fill}'/>",
            text(LABELS + width + 8, y + 12.5, rate, 12.5, QUIET),
        ]
    return parts


def draw() -> str:
    """Return the chart as SVG text."""
    measured = rates()
    parts, top = [], 12
    for workload, title, contenders in PANELS:
        bars = {label: measured[workload, name] for name, label in contenders.items()}
        parts += panel(top, title, bars)
        top += 32 + len(bars) * STEP + 20
    caption = (
        "Median rates on 2 cores, higher is better; all workloads are in benchmarks/RESULTS.md"
    )
    parts.append(text(20, top + 4, caption, 12, QUIET))
    height = top + 20
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        *parts,
        "</svg>",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
