from __future__ import annotations

import re
import shutil
import stat

from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.transport.security import Security


def test_new_keys_can_be_loaded_for_both_roles(tmp_path):
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "keys")])
    assert result.exit_code == 0, result.output
    server = Security.load(tmp_path / "keys", "server")
    client = Security.load(tmp_path / "keys", "client")
    assert client.server_key == server.public_key


def test_files_named_in_the_output_suffice_for_each_role(tmp_path):
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "keys")])
    for role, line in (("server", "dispatcher and workers"), ("client", "clients")):
        needed = re.search(rf"^  {line} need (.*?)(?:;|$)", result.output, re.MULTILINE)
        folder = tmp_path / role
        folder.mkdir()
        for name in re.split(", | and ", needed[1]):
            source = tmp_path / "keys" / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        assert Security.load(folder, role).public_key


def test_secret_keys_are_readable_by_their_owner_only(tmp_path):
    CliRunner().invoke(app, ["keys", "new", str(tmp_path)])
    secrets = sorted(tmp_path.glob("*_secret"))
    assert len(secrets) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}


def test_existing_keys_are_not_overwritten(tmp_path):
    CliRunner().invoke(app, ["keys", "new", str(tmp_path)])
    before = (tmp_path / "server.key").read_text()
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path)])
    assert result.exit_code == 1
    assert "exists" in result.stderr
    assert "Traceback" not in result.output
    assert (tmp_path / "server.key").read_text() == before
