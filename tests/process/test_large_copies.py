from __future__ import annotations

import platform
from pathlib import Path

import pytest

from headrace.process.parent_link import LAST_LEVEL_CACHE_SIZE, large_copy_tunables
from headrace.service.local_worker import worker_command


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    path = tmp_path / "size"
    path.write_text("32768K\n")
    return path


def test_copies_of_a_quarter_of_the_cache_bypass_it(cache):
    threshold = 8 << 20
    assert large_copy_tunables({"A": "1"}, cache) == {
        "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={threshold:#x}"
    }


def test_tunables_of_the_user_are_not_changed(cache):
    assert large_copy_tunables({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}, cache) == {}


@pytest.mark.parametrize("words", ["", "much"])
def test_unknown_cache_size_sets_nothing(cache, words):
    cache.write_text(words)
    assert large_copy_tunables({}, cache) == {}
    cache.unlink()
    assert large_copy_tunables({}, cache) == {}


def test_other_processors_are_not_tuned(cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert large_copy_tunables({}, cache) == {}


def test_worker_process_receives_the_tunables(monkeypatch: pytest.MonkeyPatch):
    if not LAST_LEVEL_CACHE_SIZE.exists():
        pytest.skip("the kernel does not say how large the outer cache is")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    told = large_copy_tunables({})
    assert told.items() <= worker_command({}, {}).environment.items()
    own = {"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}
    assert own.items() <= worker_command({}, own).environment.items()
    monkeypatch.setenv("GLIBC_TUNABLES", own["GLIBC_TUNABLES"])
    assert own.items() <= worker_command({}, {}).environment.items()
