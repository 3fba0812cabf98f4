"""Training steps of the accelerator benchmark on a real device: residual MLPs in PyTorch and JAX.

The samples of a task become rows: patches of 16 x 16 pixels of images, patches of 8^3 of volumes,
and embedded tokens. Residual blocks of two matrix products follow, and a step of SGD on the mean
square of the output. `depth`, the number of blocks, sets the duration of a step.
"""
# ruff: noqa: PLC0415  (each function imports its own framework)

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.accelerator_inputs import VOCABULARY

__all__ = ["Step", "Wait", "ideal_seconds", "jax_step", "torch_step"]

Step = Callable[[Any], Any]
"""Starts the training step on a batch of samples; returns what `Wait` waits for."""

Wait = Callable[[Any], None]
"""Waits for the end of a step."""

_RATE = 1e-4

#: Features of a row on an accelerator, by task. On CPUs all are small.
_WIDTHS = {"images": 768, "volumes": 1024, "tokens": 256}
_CPU_WIDTH = 16

_PATCHES = {"images": (16, 16), "volumes": (8, 8, 8)}


def torch_step(task: str, device: str, depth: int) -> tuple[Step, Wait]:
    """Return the step of a PyTorch model, in bfloat16 on CUDA, and its wait."""
    import torch
    from torch.nn.functional import embedding, gelu

    on_cuda = device == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    first, blocks = _parameters(task, _WIDTHS[task] if on_cuda else _CPU_WIDTH, depth)
    weights = [
        torch.tensor(array, device=device, dtype=dtype, requires_grad=True)
        for array in (first, *(matrix for block in blocks for matrix in block))
    ]
    optimizer = torch.optim.SGD(weights, lr=_RATE)

    def step(samples: Any) -> Any:
        rows = (
            embedding(samples, weights[0])
            if task == "tokens"
            else _patches(task, samples.to(dtype)) @ weights[0]
        )
        for up, down in zip(weights[1::2], weights[2::2], strict=True):
            rows = rows + gelu(rows @ up) @ down
        loss = rows.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not on_cuda:
            return loss
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(done: Any) -> None:
        if on_cuda:
            done.synchronize()

    return step, wait


def jax_step(task: str, device: str, depth: int) -> tuple[Step, Wait]:
    """Return the step of the same model in JAX, and its wait."""
    import jax
    import jax.numpy as jnp

    on_cuda = device == "cuda"
    dtype = jnp.bfloat16 if on_cuda else jnp.float32
    first, blocks = _parameters(task, _WIDTHS[task] if on_cuda else _CPU_WIDTH, depth)
    stacked = [np.stack([block[index] for block in blocks]) for index in (0, 1)]
    weights = [jnp.asarray(array, dtype) for array in (first, *stacked)]

    def loss(weights: Any, samples: Any) -> Any:
        first, ups, downs = weights
        rows = first[samples] if task == "tokens" else _patches(task, samples.astype(dtype)) @ first

        def block(rows: Any, pair: Any) -> Any:
            return rows + jax.nn.gelu(rows @ pair[0]) @ pair[1], None

        rows, _ = jax.lax.scan(block, rows, (ups, downs))
        return jnp.square(rows).mean()

    def update(weights: Any, samples: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, samples)
        return value, jax.tree.map(lambda w, g: w - _RATE * g.astype(w.dtype), weights, gradients)

    compiled = jax.jit(update, donate_argnums=0)

    def step(samples: Any) -> Any:
        nonlocal weights
        value, weights = compiled(weights, samples)
        return value

    return step, lambda value: value.block_until_ready()


def ideal_seconds(step: Step, wait: Wait, samples: Any, seconds: float = 0.5) -> float:
    """Return the seconds per step if the samples are always there: the device is never idle."""
    for _ in range(3):  # compiles, allocates
        wait(step(samples))
    began, steps, before = time.perf_counter(), 0, None
    while steps < 5 or time.perf_counter() - began < seconds:
        done = step(samples)
        if before is not None:
            wait(before)
        before, steps = done, steps + 1
    wait(before)
    return (time.perf_counter() - began) / steps


def _parameters(task: str, width: int, depth: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the first matrix, and those of each block."""
    generator = np.random.default_rng(0)
    inputs = {"images": 16 * 16 * 3, "volumes": 8**3, "tokens": VOCABULARY}[task]

    def matrix(rows: int, columns: int) -> Any:
        return generator.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5 * 8)

    blocks = [(matrix(width, 4 * width), matrix(4 * width, width)) for _ in range(depth)]
    return matrix(inputs, width), blocks


def _patches(task: str, samples: Any) -> Any:
    """Return samples as rows of patches, of shape (batch, patches, values); any array library."""
    sides = _PATCHES[task]
    axes = len(sides)
    split = [samples.shape[0]]
    for axis, side in enumerate(sides, start=1):
        split += [samples.shape[axis] // side, side]
    counts, rest = range(1, 2 * axes, 2), range(2, 2 * axes + 1, 2)
    channels = samples.shape[axes + 1 :]
    values = samples.reshape((*split, *channels))
    order = (0, *counts, *rest, *range(2 * axes + 1, len(values.shape)))
    values = values.permute(order) if hasattr(values, "permute") else values.transpose(order)
    patches = int(np.prod([split[axis] for axis in counts]))
    return values.reshape((samples.shape[0], patches, -1))
