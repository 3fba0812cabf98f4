"""A program that loads the models of `keras_models_sent.py` and compares their results.

    python keras_models_received.py FOLDER

It writes a JSON file with the problems of each model.
"""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from pathlib import Path

import keras
import numpy as np

from headrace.adapters.keras_training.model_pickling import dump_model, load_objects
from tests.adapters.keras_models_sent import description, fitted, values


def assign(model, arrays):
    for variable, array in zip(model.variables, arrays, strict=True):
        variable.assign(array)


def differences(here, there, what):
    """Yield the leaves of nested structures that are not close."""
    if isinstance(there, dict):
        if here.keys() != there.keys():
            yield f"{what}: {sorted(here)} for {sorted(there)}"
        for name in here.keys() & there.keys():
            yield from differences(here[name], there[name], f"{what}[{name!r}]")
    elif not np.allclose(here, there, rtol=1e-5, atol=1e-6, equal_nan=True):
        yield f"{what}: {here} for {there}"


def changed(here, there):
    return [f"{k}: {here[k]} for {there[k]}" for k in there if here[k] != there[k]]


def problems(record):
    """Return the differences from the model in the process that sent it."""
    x, y = record["x"], record["y"]
    model = load_objects(record["data"])
    found = [*record["problems"], *changed(description(model), record["description"])]
    if any(np.any(array) for array in values(model)):
        found.append("variables are not zeros")
    assign(model, record["values"])
    found += differences(model.predict(x, verbose=0), record["outputs"], "outputs")
    assign(model, record["values"])
    found += differences(fitted(model, x, y), record["losses"], "losses")
    if dump_model(model) != dump_model(model):
        found.append("dumped twice here, the bytes differ")

    model = load_objects(record["trained_data"])
    found += changed(description(model), record["trained_description"])
    found += unlike_fresh(model.optimizer, model.trainable_variables)
    assign(model, record["trained_values"])
    found += differences(model.evaluate(x, y, verbose=0), record["evaluated"], "evaluated")
    return found


def unlike_fresh(optimizer, variables):
    """Describe how an optimizer differs from a new one."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    numbers = []
    for each in (optimizer, fresh):
        numbers.append(
            [each.built, len(each.variables), float(keras.ops.convert_to_numpy(each.iterations))]
        )
        each.build(variables)
        numbers[-1] += [each.built, [v.shape for v in each.variables]]
    return [] if numbers[0] == numbers[1] else [f"optimizer: {numbers[0]} for {numbers[1]}"]


def main(folder: Path) -> None:
    records = pickle.loads((folder / "records.pickle").read_bytes())
    found = {}
    for name, record in records.items():
        try:
            found[name] = "\n".join(problems(record))
        except Exception:
            found[name] = traceback.format_exc()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
