"""A cache that others can write to is neither read nor written; one that cannot be kept costs one line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.slow import few

import weft
from weft import private
from weft.device import files, stored, toolchain
from weft.device.files import is_trusted
from weft.device.toolchain import HostCompiler, find_compiler
from weft.options import default_cache_dir
from weft.pipeline import warm
from weft.private import weakness
from weft.tune import store
from weft.tune.store import FILE_NAME, Database

pytestmark = pytest.mark.usefixtures("compilers_at_work")

TEXT = 'extern "C" int answer() { return 42; }'


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def compiler() -> Any:
    found = find_compiler()
    assert isinstance(found, HostCompiler)
    return found


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o702, 0o770])
def test_a_directory_that_others_write(cache: Any, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_own_group", lambda gid: False)
    assert weakness(cache) == weakness(cache / "not" / "made") == ""
    cache.chmod(mode)
    for path in (cache, cache / "plans", cache / "not" / "made"):
        assert f"mode {mode:04o}" in weakness(path) and str(cache) in weakness(path)


def test_every_level_counts(cache: Any) -> None:
    deep = cache / "a" / "b"
    deep.mkdir(parents=True)
    cache.chmod(0o777)
    assert str(cache) in weakness(deep)
    cache.chmod(0o1777)  # as /tmp: what is there stays its owner's
    assert weakness(deep) == ""
    deep.parent.chmod(0o722)
    assert str(deep.parent) in weakness(deep)


def test_files_count_too(cache: Any) -> None:
    file = cache / "plan.json"
    file.write_text("{}")
    assert weakness(file) == ""
    file.chmod(0o666)
    assert "0666" in weakness(file)
    file.chmod(0o1666)  # the sticky bit of a file protects nothing
    assert weakness(file)


def test_links_are_followed_and_checked_themselves(cache: Any, tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (cache / "link").symlink_to(open_folder)
    assert str(open_folder) in weakness(cache / "link" / "objects")
    (open_folder / "link").symlink_to(cache)
    assert str(open_folder) in weakness(open_folder / "link"), "whoever writes there may turn the link"


def test_other_owners(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = cache.stat().st_uid
    if owner == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert "belongs to another user" in weakness(cache)


def test_the_private_group_of_a_user_is_no_stranger(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.chmod(0o770)
    monkeypatch.setattr(private, "_own_group", lambda gid: True)
    assert weakness(cache) == ""
    cache.chmod(0o772)
    assert weakness(cache)


def test_the_options_give_no_such_cache_and_say_so_once(cache: Any) -> None:
    assert weft.Options(cache_dir=cache).cache == cache
    cache.chmod(0o777)
    with warnings.catch_warnings(record=True, action="always") as told:
        assert weft.Options(cache_dir=cache).cache is None
        assert weft.Options(cache_dir=cache).cache is None
    (warning,) = told
    assert "nothing is kept" in str(warning.message) and "chmod go-w" in str(warning.message)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_dir({}) is None
    assert default_cache_dir({"HOME": "/home/x"}) == Path("/home/x/.cache/weft")
    for name in ("HOME", "WEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(private, "_told", set())
    with pytest.warns(UserWarning, match="nothing is kept: neither WEFT_CACHE_DIR nor HOME is set"):
        assert weft.Options().cache is None


def planted(cache: Any, compiler: Any, mode: Any) -> Any:
    """An object that a stranger put where Weft would look for it."""
    key = hashlib.sha256((compiler.identity(()) + "\0" + TEXT).encode()).hexdigest()
    home = cache / "objects" / key[:2] / f"{key}.so"
    home.parent.mkdir(parents=True)
    home.write_bytes(b"evil")
    home.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(b"evil").hexdigest(), "log": ""}))
    home.chmod(mode)
    return home


def test_a_planted_object_is_not_taken(cache: Any, compiler: Any) -> None:
    home = planted(cache, compiler, 0o600)
    assert compiler.compile(TEXT, cache_dir=cache).path == home  # its owner's own
    home.chmod(0o666)
    with pytest.warns(UserWarning, match="0666"):
        made = compiler.compile(TEXT, cache_dir=cache)
    assert made.path.read_bytes() != b"evil"


def test_neither_is_one_in_a_folder_that_others_write(cache: Any, compiler: Any) -> None:
    home = planted(cache, compiler, 0o600)
    home.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="0777"):
        made = compiler.compile(TEXT, cache_dir=cache)
    assert made.path != home and home.read_bytes() == b"evil"


def test_facts_plans_trust_and_measurements_are_not_read(cache: Any) -> None:
    facts = cache / "facts" / "a.json"
    stored.keep(facts, "text")
    assert stored.load(facts) == "text"
    (cache / "trusted").mkdir()
    (cache / "trusted" / "d").write_bytes(b"")
    assert is_trusted(cache, "d")
    with Database.open(cache) as database:
        assert database.stats().backend == "sqlite"
    plan = warm._file(cache, "key")
    files.publish(plan, b"{}")
    for path in (facts, cache / "trusted" / "d", plan, cache / FILE_NAME):
        path.chmod(0o666)
    for taken in (lambda: stored.load(facts), lambda: warm.recall(cache, "key", 0), lambda: is_trusted(cache, "d")):
        private._told.clear()
        with pytest.warns(UserWarning, match="0666"):
            assert not taken()
    private._told.clear()
    with pytest.warns(UserWarning, match="0666"):
        database = Database.open(cache)
    assert database.stats().backend == "memory"
    database.close()


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 3 + 1


def compiled_right(options: Any) -> Any:
    x = torch.arange(-8.0, 8.0)
    with warnings.catch_warnings(record=True, action="always") as told:
        y = weft.compile(Small(), (x,), options=options)(x)
    torch.testing.assert_close(y, torch.relu(x) * 3 + 1)
    return [str(w.message) for w in told if str(w.message).startswith("Weft goes on without its cache")]


def test_a_compilation_with_an_open_cache(cache: Any) -> None:
    cache.chmod(0o777)
    (line,) = compiled_right(weft.Options(cache_dir=cache, budget_s=0))
    assert str(cache) in line
    assert not list(cache.iterdir())


@pytest.mark.parametrize("code", few([errno.ENOSPC, errno.EROFS], 1), ids=["full", "read-only"])
def test_a_compilation_with_a_disk_that_keeps_nothing(cache: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(site: Any, path: Any = None) -> None:
        if path is None or path.is_relative_to(cache):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fault", fail)
    monkeypatch.setattr(store, "fault", fail)
    (line,) = compiled_right(weft.Options(cache_dir=cache, budget_s=60))
    assert os.strerror(code) in line
    assert not list(cache.iterdir())


def test_a_full_disk_for_temporary_files_is_named(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(weft.WeftError, match="W311") as caught:
        compiler.compile(TEXT)
    assert "No space left" in caught.value.__notes__[0]


def test_orphaned_folders_are_swept(tmp_path: Path) -> None:
    old, new, foreign = (tmp_path / name for name in ("weft-cc-old", "weft-cc-new", "other-cc-old"))
    for folder in (old, new, foreign):
        (folder / "inside").mkdir(parents=True)
        (folder / "inside" / "k.s").write_text("x")
    (tmp_path / "weft-cc-file").write_text("x")
    (tmp_path / "weft-cc-link").symlink_to(foreign)
    ago = time.time() - 2 * toolchain._ORPHANED_S
    for path in (old, foreign, tmp_path / "weft-cc-file"):
        os.utime(path, (ago, ago))
    os.utime(tmp_path / "weft-cc-link", (ago, ago), follow_symlinks=False)
    toolchain._sweep(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other-cc-old", "weft-cc-file", "weft-cc-link", "weft-cc-new"]
    assert (foreign / "inside" / "k.s").exists()


def test_folders_of_others_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weft-cc-theirs"
    folder.mkdir()
    os.utime(folder, (0, 0))
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    toolchain._sweep(str(tmp_path))
    assert folder.exists()


@pytest.mark.slow
def test_the_command_says_it_on_one_line(cache: Any, tmp_path: Path) -> None:
    cache.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "weft", "db", "stats"],
        env={**os.environ, "WEFT_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("weft: warning: Weft goes on without its cache, nothing is kept: others can write to")
