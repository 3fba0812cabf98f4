"""Strategies of JAX; the tests are in `jax_on_4_devices.py`, and run on 4 devices."""

from __future__ import annotations

from pathlib import Path

from tests.on_devices import names_of_tests, outcomes

FILE = Path(__file__).with_name("jax_on_4_devices.py")


def test_on_4_devices(tmp_path: Path) -> None:
    # One test for all, so that one process runs them, however many run tests.
    flags = "--xla_force_host_platform_device_count=4"
    found = outcomes(FILE, tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert found == dict.fromkeys(names_of_tests(FILE), "")
