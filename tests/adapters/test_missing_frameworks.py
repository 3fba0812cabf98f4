"""Errors of adapters whose framework is not installed: the package and how to install it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{missing!r}] = None
import headrace as hr
{adapter} = hr.{adapter}
loaded = {{name for name, module in sys.modules.items() if module}}
assert not {{"grain", "jax", "keras", "torch"}} & loaded
try:
    {adapter}.{name}
except hr.errors.MissingDependencyError as error:
    print(error)
try:
    {adapter}.missing_name_message
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("missing", "adapter", "name", "message"),
    [
        ("grain", "grain", "iter_dataset", "pip install 'headrace[grain]'"),
        ("jax", "jax", "device_iterator", "pip install 'headrace[jax]'"),
        ("keras", "keras", "dataset", "pip install 'headrace[keras]'"),
        ("tensorboard", "keras", "TensorBoard", "requires the package tensorboard"),
        (
            "torch",
            "keras",
            "distribute",
            'set the environment variable KERAS_BACKEND to "jax" or "torch"',
        ),
        (
            "tensorflow",
            "keras",
            "distribute",
            'set the environment variable KERAS_BACKEND to "jax" or "torch"',
        ),
    ],
)
def test_a_missing_framework_is_named(missing: str, adapter: str, name: str, message: str) -> None:
    program = PROGRAM.format(missing=missing, adapter=adapter, name=name)
    back_end = missing if missing in ("tensorflow", "torch") else "jax"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": back_end},
        capture_output=True,
        text=True,
    )
    error, attribute_error = done.stdout.splitlines()
    assert message in error, done.stderr
    assert "missing_name_message" in attribute_error


def test_unsupported_back_ends_reject_strategies_and_pickling() -> None:
    # Also a model that is made in the scope in which Keras is imported.
    program = """
import headrace as hr
with hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    import keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
from headrace.adapters.keras_training.model_pickling import dump_model, load_objects
for refuse in (
    lambda: model.fit([[1.0]], [[1.0]]), lambda: dump_model(model), lambda: load_objects(b"")
):
    try:
        refuse()
    except hr.errors.FailedPreconditionError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("back end 'numpy'") == 3, done.stderr
    assert 'KERAS_BACKEND to "jax" or "torch" before Keras is imported' in done.stdout
