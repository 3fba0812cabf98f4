"""Who may see the dashboard."""

from __future__ import annotations

import pytest

from headrace.dashboard.access import AccessPolicy


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8050", "127.0.0.1:8050", "127.1.2.3", "[::1]:8050", "[::1]",
     "LOCALHOST:1", "a.localhost:80"],
)  # fmt: skip
def test_names_of_the_loopback_interface_are_allowed(host: str):
    assert AccessPolicy().allows_host(host)


@pytest.mark.parametrize(
    "host",
    [None, "", "attacker.example", "attacker.example:8050", "127.0.0.1.attacker.example",
     "localhost.attacker.example", "10.0.0.1:8050", "[::2]:8050", "0.0.0.0:8050", "::", ":"],
)  # fmt: skip
def test_other_names_are_refused_without_a_token(host: str | None):
    assert not AccessPolicy().allows_host(host)


def test_other_names_are_allowed_with_a_token():
    assert AccessPolicy("secret").allows_host("trainer-7:8050")


@pytest.mark.parametrize("given", [None, "", "secre", "secret ", "SECRET", "sécret"])
def test_wrong_tokens_are_refused(given: str | None):
    assert not AccessPolicy("secret").allows_token(given)


def test_the_token_is_allowed():
    assert AccessPolicy("secret").allows_token("secret")


def test_dashboards_of_one_host_have_cookies_of_their_own():
    assert AccessPolicy("one").cookie != AccessPolicy("two").cookie
    assert "one" not in AccessPolicy("one").cookie


def test_no_token_is_needed_if_none_is_required():
    assert AccessPolicy().allows_token(None)
