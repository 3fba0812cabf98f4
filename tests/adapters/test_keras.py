"""The adapter of Keras; its tests are in `keras_on_a_back_end.py`, and run once for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.on_devices import names_of_tests, once, outcomes

FILE = Path(__file__).with_name("keras_on_a_back_end.py")
NAMES = {
    "torch": names_of_tests(FILE),
    # What differs between back ends is what they ask an adapter for, and when.
    "jax": [
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
    ],
}

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What the tests on a back end found, which run when the first is asked for."""

    @functools.cache
    def run(back_end: str) -> dict[str, str]:
        named = {"KERAS_BACKEND": back_end, "JAX_PLATFORMS": "cpu"}
        names = NAMES[back_end]
        found: dict[str, str] = once(
            tmp_path_factory,
            f"{FILE.stem}_{back_end}",
            lambda folder: outcomes(FILE, folder, names, **named),
        )
        return found

    return run


@pytest.mark.parametrize(
    ("back_end", "name"), [(back_end, name) for back_end in NAMES for name in NAMES[back_end]]
)
def test_on(back_end: str, name: str, found: Callable[[str], dict[str, str]]) -> None:
    assert found(back_end).get(name, str(found(back_end))) == ""
