"""Keras; the tests are in files that run once on each back end.

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
    # Back ends ask an adapter for different iterators, at different times.
    "keras_on_a_back_end": {
        "test_an_epoch_is_a_pass_with_its_last_partial_batch",
        "test_no_batch_comes_twice_in_a_pass_and_building_the_model_costs_none",
        "test_without_end_an_epoch_has_the_steps_that_fit_is_given_and_one_pass_goes_on",
        "test_steps_say_the_number_where_the_dataset_does_not_know_it",
        "test_fit_evaluate_and_predict_have_a_pass_each_and_may_alternate",
        "test_training_learns_and_evaluation_measures_every_row",
        "test_predictions_are_those_of_the_rows_in_their_order",
        "test_inputs_and_labels_may_be_dicts_and_tuples",
        "test_a_state_that_a_callback_takes_says_which_batches_were_trained_on",
        "test_training_goes_on_from_a_state_at_an_end_that_nobody_knew",
        "test_a_state_before_the_first_step_counts_no_batch_of_which_the_model_was_built",
        "test_class_weight_of_fit_weighs_the_training_batches_alone",
        "test_arguments_that_keras_ignores_beside_a_dataset_are_refused",
        "test_an_endless_dataset_needs_a_number_of_steps",
    },
}
"""By file: the tests that run on JAX, where not all do."""

NOT_ON_JAX = {
    "test_a_killed_worker_loses_no_step_and_repeats_none",
    "test_a_model_without_tables_has_plain_files",
    *(name for name in names_of_tests(HERE / "keras_models_pickled.py") if "torch" in name),
}

# These tests kill a training worker, as a test of `keras_on_parameter_servers` does. Each starts
# several processes that import Keras.
SLOW = {
    "test_a_killed_worker_loses_no_step_and_repeats_none",
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
    """Return a function that runs the tests of a group on a back end, once, and what they found."""

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
