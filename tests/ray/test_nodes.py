"""Tests of node addresses, keys and errors, without a Ray cluster."""

from __future__ import annotations

import pickle
import sys

import pytest

from headrace.errors import FailedPreconditionError
from headrace.ray import nodes


def test_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FailedPreconditionError, match=r"pip install 'headrace\[ray\]'"):
        nodes.import_ray()


@pytest.mark.parametrize("version", ["2.9.3", "1.13.0"])
def test_old_version_of_ray_is_rejected(version):
    with pytest.raises(FailedPreconditionError, match=rf"requires ray>=2\.10, .* {version} "):
        nodes.check_version(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.60.0", "3.0.0.dev0"])
def test_supported_version_of_ray_is_accepted(version):
    nodes.check_version(version)


def test_secret_keys_are_neither_printed_nor_in_a_pickled_client():
    keys = nodes.ClusterKeys.create()
    client = keys.client("some-actor")
    for secret in (keys.server_secret, keys.client_secret):
        assert secret not in repr(keys)
        assert secret not in repr(client)
        assert secret.encode() not in pickle.dumps(client)
    assert b"some-actor" in pickle.dumps(client)
    with pytest.raises(TypeError, match="secret keys are not pickled"):
        pickle.dumps(keys.client())


def test_server_accepts_the_client_and_other_servers():
    keys = nodes.ClusterKeys.create()
    assert keys.client().server_key == keys.server().public_key
    assert keys.server().authorized_clients == {keys.client().public_key}
    assert keys.server().as_client().server_key == keys.server().public_key
