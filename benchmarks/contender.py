"""Program of one contender's process: build, check, warm up, then timed rounds on request.

Started by `measure` as `python -m benchmarks.contender BENCHMARK WORKLOAD CONTENDER INPUTS`; reads
a JSON command per line and replies with a line of JSON. With only BENCHMARK and INPUTS it writes
the benchmark's input files.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from benchmarks.cpu_time import cpu_seconds
from benchmarks.workload import Check, Consume, Contender, Elements, Pipeline, Workload

__all__ = ["Rounds", "drain", "drain_measured", "main"]

#: Optional imports of a framework that no contender uses. They are a third of its import.
_UNUSED = {"tensorflow": ("jax", "matplotlib")}

#: The clock is read once per stride of elements; bounds of the duration of a stride, in seconds.
_MIN_STRIDE_SECONDS, _MAX_STRIDE_SECONDS = 0.002, 0.02


def main(arguments: list[str]) -> int:
    """Serve one contender until a stop command arrives, or write the inputs of a benchmark."""
    benchmark = importlib.import_module(f"benchmarks.{arguments[0]}")
    if len(arguments) == 2:
        benchmark.write_inputs(Path(arguments[1]))
        return 0
    _, workload_name, contender_name, inputs = arguments
    workload = next(w for w in benchmark.WORKLOADS if w.name == workload_name)
    contender = next(c for c in workload.contenders if c.name == contender_name)
    with _replies() as replies, ExitStack() as stack:
        _serve(workload, contender, Path(inputs), stack, replies)
    return 0


def _serve(
    workload: Workload, contender: Contender, inputs: Path, stack: ExitStack, replies: TextIO
) -> None:
    rounds: Rounds | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any]
        try:
            if command["do"] == "stop":
                break
            if command["do"] == "build":
                missing = [m for m in contender.needs if importlib.util.find_spec(m) is None]
                if missing:
                    answer = {"missing": missing}
                else:
                    for module in contender.needs:
                        sys.modules.update(dict.fromkeys(_UNUSED.get(module, ())))
                    rounds = Rounds(
                        contender.build(inputs, stack),
                        contender.consume or workload.consume,
                        workload.reopen,
                        self_timed=workload.self_timed,
                    )
                    rounds.check(contender.check or workload.check)
                    answer = rounds.run(command["seconds"], ramp=0.0)
            elif rounds is None:
                answer = {"failed": "received a round command before a build command"}
            else:
                answer = rounds.run(command["seconds"], command["ramp"])
        except Exception as error:
            # Shown as "failed: ..." in the table.
            answer = {"failed": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    if rounds is not None:
        rounds.close()


class Rounds:
    """The timed rounds of one pipeline.

    Args:
        pipeline: Opens an iterator. An exhausted iterator is reopened, which is timed as well.
        consume: Uses an element and returns its number of items; None counts elements.
        reopen: Whether each round opens a fresh iterator or continues the one that was checked.
        self_timed: Whether elements are pairs of a number of items and the seconds they took.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        consume: Consume | None,
        reopen: bool,
        *,
        self_timed: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._consume = consume
        self._reopen = reopen
        self._own_clock = self_timed
        self._elements: Elements | None = None
        self._first = 0.0

    def check(self, check: Check) -> None:
        """Check the elements of a fresh iterator, including the first."""
        first, elements = self._open()
        check(chain([first], elements))

    def run(self, seconds: float, ramp: float) -> dict[str, float]:
        """Time one round.

        Args:
            seconds: Seconds to time.
            ramp: Seconds to read before the clock starts, to drain buffers that were filled between
                rounds.

        Returns:
            `first` (seconds from opening the iterator to its first element), `items`, `seconds`,
            `rate`, and `cpu` (seconds of processor time per item).
        """
        gc.collect()
        if self._reopen or self._elements is None:
            self.close()
            element, elements = self._open()
            if self._consume is not None:
                self._consume(element)
            del element
        else:
            elements = self._elements
        if not self._own_clock:
            _, _, elements = drain(self._pipeline, elements, self._consume, ramp)
        used = cpu_seconds()
        if self._own_clock:
            items, took, self._elements = drain_measured(self._pipeline, elements, seconds)
        else:
            items, took, self._elements = drain(self._pipeline, elements, self._consume, seconds)
        used = cpu_seconds() - used
        if self._reopen:
            del elements
            self.close()
        return {
            "first": self._first,
            "items": items,
            "seconds": took,
            "rate": items / took,
            "cpu": used / items,
        }

    def close(self) -> None:
        """Close the current iterator. Idempotent."""
        elements, self._elements = self._elements, None
        _close(elements)

    def _open(self) -> tuple[Any, Elements]:
        began = time.perf_counter()
        self._elements = elements = self._pipeline()
        element = next(elements)
        self._first = time.perf_counter() - began
        return element, elements


def drain(
    pipeline: Pipeline, elements: Elements, consume: Consume | None, seconds: float
) -> tuple[int, float, Elements]:
    """Read epochs for about `seconds`; return the number of items, the time and the iterator.

    Raises:
        ValueError: If an epoch has no elements.
    """
    items, stride, fresh = 0, 1, False
    start = now = time.perf_counter()
    while now - start < seconds:
        seen = 0
        if consume is None:
            for _ in islice(elements, stride):
                seen += 1
            items += seen
        else:
            for element in islice(elements, stride):
                seen += 1
                items += consume(element)
        before, now = now, time.perf_counter()
        if seen < stride:
            if fresh and seen == 0:
                raise ValueError("an epoch has no elements")
            _close(elements)
            elements, fresh = pipeline(), True
            now = time.perf_counter()
            continue
        fresh = False
        if now - before < _MIN_STRIDE_SECONDS:
            stride *= 2
        elif now - before > _MAX_STRIDE_SECONDS:
            stride = max(1, stride // 2)
    return items, now - start, elements


def drain_measured(
    pipeline: Pipeline, elements: Elements, seconds: float
) -> tuple[int, float, Elements]:
    """Read elements with their own measurements, for about `seconds` and at least one.

    Returns:
        The sums of their items and of their seconds, and the iterator.

    Raises:
        ValueError: If an epoch has no elements.
    """
    items, took, fresh = 0, 0.0, False
    end = time.perf_counter() + seconds
    while True:
        for count, lasted in elements:
            items += count
            took += lasted
            fresh = False
            if time.perf_counter() >= end:
                return items, took, elements
        if fresh:
            raise ValueError("an epoch has no elements")
        _close(elements)
        elements, fresh = pipeline(), True


def _close(elements: Elements | None) -> None:
    close = getattr(elements, "close", None)
    if close is not None:
        close()


@contextmanager
def _replies() -> Iterator[TextIO]:
    # Frameworks print to standard output, so replies use a duplicate of its descriptor.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(descriptor, "w") as stream:
        yield stream


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    if "tensorflow" in sys.modules:
        os._exit(status)  # All is closed; the interpreter would take seconds to unload TensorFlow.
    sys.exit(status)
