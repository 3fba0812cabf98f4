"""Areas of the benchmarks: the sections of RESULTS.md, in order."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AREAS", "Area"]


@dataclass(frozen=True, kw_only=True)
class Area:
    """One section of RESULTS.md.

    Attributes:
        name: Name of the area, and of its chart.
        title: Heading of the section.
        summary: What is measured, in one or two sentences.
        benchmarks: Names of modules in this package, in the order of the page.
        headlines: Names of the workloads that the overview chart shows.
    """

    name: str
    title: str
    summary: str
    benchmarks: tuple[str, ...]
    headlines: tuple[str, ...] = ()


AREAS = (
    Area(
        name="pipelines",
        title="Pipelines in one process",
        summary=(
            "Datasets of cheap elements in memory, so that the cost per element of the library "
            "dominates: shuffling, mapping, interleaving, windows and packing."
        ),
        benchmarks=(
            "small_rows",
            "scalar_map",
            "interleave",
            "nested_datasets",
            "windows",
            "packing",
            "autotune",
        ),
        headlines=(
            "small rows",
            "scalar map, a branch",
            "interleave 4, blocks of 1, single elements",
            "interleave 4 datasets of 20, blocks of 1, batches of 256",
            "windows of 32 rows of an array, shift 1",
            "pack into rows of 2048, best_fit",
        ),
    ),
    Area(
        name="files",
        title="Reading and decoding files",
        summary=(
            "Files in the page cache of one host: small records, tables and photographs. Decoding "
            "photographs is limited by the JPEG library, which all contenders share."
        ),
        benchmarks=("tfrecord", "file_sources", "jpeg"),
        headlines=(
            "TFRecord, batch(256)",
            "Parquet, batches of 65,536 rows",
            "tar samples of 8 KB",
            "JPEG, decode + resize",
        ),
    ),
    Area(
        name="service",
        title="Data service",
        summary=(
            "Elements from one worker process to a consumer on the same host, through shared "
            "memory or TCP."
        ),
        benchmarks=(
            "service_scalars",
            "service_elements",
            "service_batches",
            "service_limits",
            "service_jpeg",
            "python_bound",
            "trainers",
        ),
        headlines=(
            "service, scalars in batches of 1024",
            "service, 64 KiB elements",
            "service, 1 MiB elements",
            "service, JPEG, decode + resize",
        ),
    ),
    Area(
        name="delivery",
        title="Delivery guarantees, order and recovery",
        summary=(
            "The cost of guarantees, compared with Headrace without them, and waits after a "
            "process is killed. No peer offers these guarantees."
        ),
        benchmarks=(
            "exactly_once",
            "exactly_once_bytes",
            "ordered",
            "ordered_shuffled",
            "coordinated_reads",
            "worker_kills",
            "latencies",
        ),
        headlines=(
            "exactly once, shuffle",
            "exactly once, JPEG files",
            "ordered, whole batches",
            "coordinated reads, log-normal lengths",
        ),
    ),
    Area(
        name="frameworks",
        title="JAX, PyTorch and Keras",
        summary="The cost of passing batches to a training framework and of a training step in it.",
        benchmarks=("adapters_jax", "adapters_torch", "distributed_input", "keras_fit"),
        headlines=(
            "JAX, batches on one device",
            "distributed_no_op",
            "distributed_millisecond",
            "Keras fit",
        ),
    ),
    Area(
        name="utilisation",
        title="Accelerator utilisation",
        summary=(
            "Share of the time in which an accelerator computes, if the input is prepared on the "
            "cores of its host. Its steps are simulated, as in MLPerf Storage. Contenders run one "
            "after another, not in turns, because their buffers fill between rounds."
        ),
        benchmarks=("accelerator",),
        headlines=("accelerator, images",),
    ),
    Area(
        name="parameter_servers",
        title="Parameter servers",
        summary=(
            "Training steps on two workers and two parameter servers, and the operations of a "
            "server compared with the same arithmetic in one process."
        ),
        benchmarks=("parameter_server_steps", "dense_variable", "parameter_store"),
        headlines=("embedding steps", "empty functions", "64 MB pushed, SGD"),
    ),
    Area(
        name="scale",
        title="Scale of the dispatcher",
        summary=(
            "The load of one dispatcher that serves many workers and clients without work. Without "
            "sockets, requests are function calls in the dispatcher's process."
        ),
        benchmarks=("dispatcher",),
    ),
)
