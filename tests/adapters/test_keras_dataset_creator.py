"""`hr.keras.DatasetCreator` in `fit`, `evaluate` and `predict`, without a strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_devices import names_of_tests, once, outcomes

FILE = Path(__file__).parent / "keras_dataset_creator_on_a_back_end.py"

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("back_end", ["jax", "torch"])
@pytest.mark.parametrize("name", names_of_tests(FILE))
def test_on(back_end: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = once(
        tmp_path_factory,
        f"{FILE.stem}_{back_end}",
        lambda folder: outcomes(FILE, folder, KERAS_BACKEND=back_end, JAX_PLATFORMS="cpu"),
    )
    assert found.get(name, str(found)) == ""
