"""Optimizers, schedules and gradients used by tests."""

from __future__ import annotations

import numpy as np

OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.05}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd with decay": ("SGD", {"learning_rate": 0.05, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"learning_rate": 0.05}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.01}),
    "rmsprop with momentum": ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "rho": 0.8}),
    "centered rmsprop": ("RMSprop", {"learning_rate": 0.01, "centered": True, "momentum": 0.3}),
    "adam": ("Adam", {"learning_rate": 0.01}),
    "amsgrad": ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"learning_rate": 0.01}),
    "adadelta": ("Adadelta", {"learning_rate": 0.5, "epsilon": 1e-4}),
    "adamax": ("Adamax", {"learning_rate": 0.01}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "lion": ("Lion", {"learning_rate": 0.01}),
    "lion with decay": ("Lion", {"learning_rate": 0.01, "beta_1": 0.8, "weight_decay": 0.1}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1}),
    "ftrl with all": (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.7,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.1,
        },
    ),
    "clipped by value": ("SGD", {"learning_rate": 0.05, "clipvalue": 0.3}),
    "clipped by norm": ("SGD", {"learning_rate": 0.05, "clipnorm": 0.7}),
    "clipped by global norm": ("Adam", {"learning_rate": 0.01, "global_clipnorm": 0.7}),
}

SCHEDULES = {
    "exponential": (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.9},
    ),
    "staircase": (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.9, "staircase": True},
    ),
    "pieces": ("PiecewiseConstantDecay", {"boundaries": [6, 30], "values": [1.0, 0.5, 0.1]}),
    "polynomial": (
        "PolynomialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 20, "power": 2.0},
    ),
    "cycles": (
        "PolynomialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 20, "power": 0.5, "cycle": True},
    ),
    "inverse": (
        "InverseTimeDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5},
    ),
    "inverse staircase": (
        "InverseTimeDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5, "staircase": True},
    ),
    "cosine": ("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 40, "alpha": 0.1}),
    "warm cosine": (
        "CosineDecay",
        {
            "initial_learning_rate": 0.01,
            "decay_steps": 30,
            "warmup_target": 0.1,
            "warmup_steps": 9,
        },
    ),
    "cosine restarts": (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 10, "m_mul": 0.5, "alpha": 0.1},
    ),
    "even restarts": (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 7, "t_mul": 1.0, "m_mul": 0.8},
    ),
}

SHAPE = (5, 3)


def first_value() -> np.ndarray:
    return (np.arange(15).reshape(SHAPE) / 7 - 0.9).astype(np.float32)


def gradient(step: int) -> np.ndarray:
    return (np.sin(np.arange(15) * 1.7 + step * 0.61) + 0.2).reshape(SHAPE).astype(np.float32)
