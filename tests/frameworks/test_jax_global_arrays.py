"""Global arrays of JAX; the tests are in `jax_global_arrays_on_8_devices.py`, and run on 8 "
"devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_devices import names_of_tests, once, outcomes

FILE = Path(__file__).with_name("jax_global_arrays_on_8_devices.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    flags = "--xla_force_host_platform_device_count=8"
    named = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found: dict[str, str] = once(
        tmp_path_factory, FILE.stem, lambda folder: outcomes(FILE, folder, **named)
    )
    return found


@pytest.mark.parametrize("name", names_of_tests(FILE))
def test_on_8_devices(name: str, found: dict[str, str]) -> None:
    assert found.get(name, str(found)) == ""
