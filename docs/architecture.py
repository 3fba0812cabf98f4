"""Draw docs/architecture.svg: the processes of a data service and the path of an element.

Run by `make docs`; a test asserts that the committed picture is up to date.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, QUIET, DATA = "#1b2a38", "#5b6b78", "#1f78b4"
FILLS = {"client": "#e8f1fa", "dispatcher": "#fbf3e0", "worker": "#e9f6ec", "plain": "#ffffff"}
FONT = "font-family='Helvetica, Arial, sans-serif'"


def box(x: int, y: int, w: int, h: int, title: str, lines: list[str], fill: str) -> str:
    parts = [
        f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='8' fill='{FILLS[fill]}' "
        f"stroke='{INK}' stroke-width='1.2'/>",
        f"<text x='{x + 14}' y='{y + 24}' {FONT} font-size='15' font-weight='bold' "
        f"fill='{INK}'>{escape(title)}</text>",
    ]
    parts += [
        f"<text x='{x + 14}' y='{y + 46 + 18 * i}' {FONT} font-size='12.5' "
        f"fill='{QUIET}'>{escape(line)}</text>"
        for i, line in enumerate(lines)
    ]
    return "\n".join(parts)


def arrow(
    x1: int, y1: int, x2: int, y2: int, label: str, at: tuple[int, int], *, data: bool = False
) -> str:
    colour, width = (DATA, 3) if data else (QUIET, 1.4)
    head = "data" if data else "head"
    dash = "" if data else " stroke-dasharray='5 4'"
    return (
        f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{colour}' "
        f"stroke-width='{width}'{dash} marker-end='url(#{head})'/>\n"
        f"<text x='{at[0]}' y='{at[1]}' {FONT} font-size='12' fill='{colour}'>"
        f"{escape(label)}</text>"
    )


def marker(name: str, colour: str) -> str:
    return (
        f"<marker id='{name}' markerUnits='userSpaceOnUse' markerWidth='12' markerHeight='12' "
        f"refX='10' refY='5' orient='auto'><path d='M0,0 L10,5 L0,10 z' fill='{colour}'/></marker>"
    )


def draw() -> str:
    """Return the picture as SVG text."""
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' width='920' height='430' "
        "viewBox='0 0 920 430'>",
        f"<defs>{marker('data', DATA)}{marker('head', QUIET)}</defs>",
        "<rect width='920' height='430' fill='white'/>",
        box(20, 20, 250, 110, "training process", [
            "Dataset: a plan with methods",
            "rewrites: canonical form of the plan",
            "service/client: a remote Source",
        ], "client"),
        box(335, 20, 250, 110, "dispatcher", [
            "decide, journal, apply, reply",
            "assigns ranges of splits",
            "never unpickles a plan",
        ], "dispatcher"),
        box(335, 200, 250, 130, "worker process 1 .. n", [
            "execution: iterators over chunks,",
            "any Python functions",
            "element/wire: header + raw buffers",
            "FIFO delivery to clients",
        ], "worker"),
        box(670, 200, 230, 130, "sources", [
            "files: TFRecord, text, ...",
            "arrays, generators",
            "local paths and fsspec URLs",
            "readable from any index",
        ], "plain"),
        box(20, 215, 250, 100, "training loop", [
            "for batch in dataset: ...",
            "NumPy arrays, writable",
            "JAX, PyTorch, Keras, NumPy",
        ], "client"),
        arrow(670, 265, 588, 265, "chunks", (607, 255), data=True),
        arrow(335, 265, 273, 265, "", (0, 0), data=True),
        arrow(145, 130, 145, 212, "", (0, 0)),
        arrow(270, 60, 332, 60, "plan", (286, 52)),
        arrow(332, 100, 273, 100, "tasks", (284, 118)),
        arrow(440, 130, 440, 197, "plan, splits", (362, 168)),
        arrow(500, 197, 500, 133, "heartbeats, progress", (508, 168)),
        f"<text x='152' y='178' {FONT} font-size='12' fill='{QUIET}'>iter(dataset)</text>",
        f"<text x='20' y='372' {FONT} font-size='13' fill='{DATA}'>"
        "solid: elements, through shared memory on one host, otherwise ZeroMQ (with CURVE keys); "
        "never through the dispatcher, never pickled</text>",
        f"<text x='20' y='396' {FONT} font-size='13' fill='{QUIET}'>"
        "dashed: requests of a few hundred bytes; the dispatcher journals before it replies</text>",
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
