"""Runs the Keras tests of the other files, once on each back end.

PyTorch is the back end of `make test`: these tests take about half as long on it as on JAX, which
compiles each model. Tests on JAX are slow (`tests/conftest.py`), and so are those named here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.on_devices import names_of_tests, once, outcomes_of

HERE = Path(__file__).parent
GROUPS = {
    "servers": [
        "keras_on_parameter_servers",
        "keras_embeddings_on_servers",
        "keras_tables_on_servers",
    ],
    "others": [
        "keras_in_scheduled_functions",
        "keras_in_strategies",
        "keras_on_mirrored_replicas",
        "keras_on_a_back_end",
        "keras_dataset_creator_on_a_back_end",
        "keras_sidecar_on_a_back_end",
        "keras_tensorboard_on_a_back_end",
        "keras_models_pickled",
    ],
}
"""Files whose tests run in one process: importing Keras takes longer than most of them."""

ON_JAX = {
    # Back ends request different iterators from an adapter, at different times.
    "keras_on_a_back_end": {
        "test_an_epoch_reads_the_dataset_once_with_its_last_partial_batch",
        "test_each_batch_is_read_once_per_epoch_although_one_builds_the_model",
        "test_epochs_of_an_infinite_dataset_continue_one_iteration",
        "test_steps_sets_the_epoch_length_if_the_cardinality_is_unknown",
        "test_fit_evaluate_and_predict_each_read_an_epoch_and_can_alternate",
        "test_training_learns_and_evaluation_measures_every_row",
        "test_predictions_have_the_order_of_the_rows",
        "test_inputs_and_labels_may_be_dicts_and_tuples",
        "test_a_state_taken_in_a_callback_follows_the_last_trained_batch",
        "test_training_resumes_from_a_state_at_an_unknown_end",
        "test_the_batch_that_built_the_model_is_not_counted_in_a_state",
        "test_class_weight_of_fit_applies_only_to_training_batches",
        "test_arguments_that_keras_would_ignore_are_rejected",
        "test_an_infinite_dataset_requires_a_number_of_steps",
    },
}
"""By file: the tests that run on JAX, for files of which only some do."""

NOT_ON_JAX = {
    "test_a_killed_worker_neither_loses_nor_repeats_a_step",
    "test_a_model_without_tables_has_plain_files",
    *(name for name in names_of_tests(HERE / "keras_models_pickled.py") if "torch" in name),
}

# These tests kill a training worker, as a test of `keras_on_parameter_servers` does. Each starts
# several processes that import Keras.
SLOW = {
    "test_a_killed_worker_neither_loses_nor_repeats_a_step",
    "test_a_killed_worker_counts_no_step_twice",
}

_SECONDS = 900

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(_SECONDS + 100)]


def cases() -> list[tuple[str, str, str, str]]:
    """Return group, back end, file and name of each test."""
    return [
        (group, back_end, file, name)
        for group, files in GROUPS.items()
        for back_end in ("torch", "jax")
        for file in files
        for name in names_of_tests(HERE / f"{file}.py")
        if back_end == "torch" or (name in ON_JAX.get(file, {name}) and name not in NOT_ON_JAX)
    ]


CASES = cases()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], dict[str, str]]:
    """Return a function that runs the tests of a group on a back end once and returns outcomes."""

    @functools.cache
    def run(group: str, back_end: str, is_slow: bool) -> dict[str, str]:
        named = {"KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"}
        tests = [
            f"{HERE / file}.py::{name}"
            for each, on, file, name in CASES
            if (each, on, name in SLOW) == (group, back_end, is_slow)
        ]
        found: dict[str, str] = once(
            tmp_path_factory,
            f"keras_{group}_{back_end}{'_slow' * is_slow}",
            lambda folder: outcomes_of(tests, folder, _SECONDS, **named),
        )
        return found

    return run


@pytest.mark.parametrize(
    ("group", "back_end", "file", "name"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[-1] in SLOW else []) for case in CASES],
)
def test_on(
    group: str,
    back_end: str,
    file: str,
    name: str,
    found: Callable[[str, str, bool], dict[str, str]],
) -> None:
    outcomes = found(group, back_end, name in SLOW)
    assert outcomes.get(f"{file}::{name}", str(outcomes)) == ""
