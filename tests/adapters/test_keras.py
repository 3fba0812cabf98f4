"""Keras; the tests are in files that run once on each back end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.on_devices import names_of_tests, once, outcomes

HERE = Path(__file__).parent
DATASETS, STRATEGIES = HERE / "keras_on_a_back_end.py", HERE / "keras_in_strategies.py"
SERVERS = HERE / "keras_on_parameter_servers.py"
EMBEDDINGS = HERE / "keras_embeddings_on_servers.py"
FUNCTIONS = HERE / "keras_in_scheduled_functions.py"
TABLES = HERE / "keras_tables_on_servers.py"
REPLICAS = HERE / "keras_on_mirrored_replicas.py"
NAMES = {
    (DATASETS, "torch"): names_of_tests(DATASETS),
    # What differs between back ends is what they ask an adapter for, and when.
    (DATASETS, "jax"): [
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
    ],
    (STRATEGIES, "torch"): names_of_tests(STRATEGIES),
    (STRATEGIES, "jax"): names_of_tests(STRATEGIES),
    (REPLICAS, "torch"): names_of_tests(REPLICAS),
    (REPLICAS, "jax"): names_of_tests(REPLICAS),
    (SERVERS, "torch"): names_of_tests(SERVERS),
    (SERVERS, "jax"): names_of_tests(SERVERS),
    (FUNCTIONS, "torch"): names_of_tests(FUNCTIONS),
    (FUNCTIONS, "jax"): names_of_tests(FUNCTIONS),
    (EMBEDDINGS, "torch"): names_of_tests(EMBEDDINGS),
    (EMBEDDINGS, "jax"): names_of_tests(EMBEDDINGS),
    (TABLES, "torch"): names_of_tests(TABLES),
    (TABLES, "jax"): [
        name for name in names_of_tests(TABLES) if "killed" not in name and "plain" not in name
    ],
}

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], dict[str, str]]:
    """What the tests of a file found on a back end; they run when the first is asked for."""

    @functools.cache
    def run(file: Path, back_end: str) -> dict[str, str]:
        named = {"KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"}
        names = NAMES[file, back_end]
        found: dict[str, str] = once(
            tmp_path_factory,
            f"{file.stem}_{back_end}",
            lambda folder: outcomes(file, folder, names, **named),
        )
        return found

    return run


@pytest.mark.parametrize(
    ("file", "back_end", "name"),
    [(*where, name) for where, names in NAMES.items() for name in names],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_on(
    file: Path, back_end: str, name: str, found: Callable[[Path, str], dict[str, str]]
) -> None:
    outcome = found(file, back_end)
    assert outcome.get(name, str(outcome)) == ""
