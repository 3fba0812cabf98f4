"""Write reference.json: results of Keras and PyTorch for the same gradients. Run manually.

KERAS_BACKEND=numpy python -m tests.parameter_server.write_reference
"""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import torch

from tests.parameter_server.optimizers_in_use import OPTIMIZERS, SCHEDULES, first_value, gradient

STEPS = 100


def of_keras(name: str, arguments: dict) -> list:
    variable = keras.Variable(first_value())
    optimizer = getattr(keras.optimizers, name)(**arguments)
    for step in range(STEPS):
        optimizer.apply_gradients([(gradient(step), variable)])
    return np.asarray(variable).ravel().tolist()


def of_torch(rows: list[list[int]]) -> list:
    variable = torch.nn.Parameter(torch.tensor(first_value()))
    optimizer = torch.optim.SparseAdam([variable], lr=0.01, eps=1e-7)
    for step in range(STEPS):
        which = rows[step % len(rows)]
        values = torch.tensor(gradient(step)[which])
        variable.grad = torch.sparse_coo_tensor(
            torch.tensor([which]), values, variable.shape, check_invariants=True
        )
        optimizer.step()
    return variable.detach().numpy().ravel().tolist()


def main() -> None:
    reference = {
        "dense": {key: of_keras(*case) for key, case in OPTIMIZERS.items()},
        "sparse_adam": of_torch([[0, 2], [1], [2, 3, 4], [0, 4]]),
        "schedules": {
            key: [
                float(getattr(keras.optimizers.schedules, name)(**arguments)(step))
                for step in range(0, 60, 3)
            ]
            for key, (name, arguments) in SCHEDULES.items()
        },
    }
    Path(__file__).with_name("reference.json").write_text(json.dumps(reference, indent=0) + "\n")


if __name__ == "__main__":
    main()
