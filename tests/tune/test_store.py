from __future__ import annotations

import errno
import json
import multiprocessing
import os
import sqlite3
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tune.records import KERNEL, environment, measurement
from tests.typed import narrow

from weft.kernels.measurement import Verdict
from weft.kernels.source import Schedule
from weft.tune import store
from weft.tune.cuda_site import HASHED_PARTS as CUDA_PARTS
from weft.tune.keys import GPU_WORDS, HASHED_PARTS, PACKAGE, PLAN_PARTS, canonical, digest, source_hash, timing_key
from weft.tune.store import (
    FILE_NAME,
    SITES,
    Database,
    Row,
    SegmentBackend,
    SqliteBackend,
    file_system_type,
    read_row,
    wal_is_safe,
)

ENV = environment()


@pytest.fixture(params=["sqlite", "segments"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "segments":
        monkeypatch.setattr(store, "file_system_type", lambda path, mounts: "nfs4")
    return tmp_path / "cache"


def test_what_is_committed_is_found_again(folder: Path) -> None:
    wanted = [measurement(n, s) for n in range(4) for s in range(3)]
    with Database.open(folder) as db:
        db.commit(wanted, ENV)
        assert not db.problems
    with Database.open(folder) as db:
        for m in wanted:
            assert db.lookup(m.problem_key, m.schedule, KERNEL, ENV) == m
        assert len(db.lookup_all("problem 2 'ünïcode'")) == 3
        assert db.stats().rows == 12 and db.stats().problems == 4 and db.stats().verdicts == {"ok": 12}
        assert db.verify() == (12, 0)


def test_another_environment_is_a_miss(folder: Path) -> None:
    with Database.open(folder) as db:
        m = measurement(1)
        db.commit(m, ENV)
        for other in (
            environment(seed=1),
            environment(name="another CPU"),
            replace(ENV, torch="0"),
            replace(ENV, sources=""),
        ):
            assert db.lookup(m.problem_key, m.schedule, KERNEL, other) is None
        assert db.lookup(m.problem_key + " ", m.schedule, KERNEL, ENV) is None
        assert db.lookup(m.problem_key, Schedule("cpp"), KERNEL, ENV) is None
        assert db.lookup_all(m.problem_key, environment(seed=1)) == ()


def test_the_newest_counts_and_commits_are_idempotent(folder: Path) -> None:
    with Database.open(folder) as db:
        old, new = measurement(1), replace(measurement(1), samples_us=(1.0, 2.0))
        db.commit(old, ENV, trial="a")
        db.commit(new, ENV, trial="b")
        db.commit(old, ENV, trial="a")
        assert db.stats().rows == 2
        assert db.lookup(old.problem_key, old.schedule, KERNEL, ENV) == new
        assert db.lookup_all(old.problem_key) == (new,)


def test_prune_keeps_the_newest_of_this_environment(folder: Path) -> None:
    with Database.open(folder) as db:
        db.commit(measurement(1), ENV, trial="a")
        db.commit(replace(measurement(1), samples_us=(1.0,)), ENV, trial="b")
        db.commit(measurement(2), environment(seed=9))
        assert db.prune() == 1
        assert db.stats().rows == 2
        assert db.prune(ENV) == 1
        found = db.lookup(measurement(1).problem_key, measurement(1).schedule, KERNEL, ENV)
        assert found is not None and found.samples_us == (1.0,)
        assert db.stats().rows == 1


def test_a_hit_needs_the_whole_text(tmp_path: Path) -> None:
    """A row whose hash points at another problem's text is no hit."""
    with Database.open(tmp_path) as db:
        m = measurement(1)
        db.commit(m, ENV)
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    body = json.loads(raw.execute("SELECT body FROM trials").fetchone()[0])
    body["measurement"]["problem_key"] = "another problem"
    text = canonical(body)
    raw.execute("UPDATE trials SET body = ?, sha256 = ?", (text, digest(text)))
    raw.commit()
    raw.close()
    with Database.open(tmp_path) as db:
        assert db.lookup(m.problem_key, m.schedule, KERNEL, ENV) is None
        assert db.lookup_all("another problem") == ()
        assert db.stats().quarantined == 1


def test_a_damaged_row_goes_to_quarantine_and_the_rest_is_used(tmp_path: Path) -> None:
    with Database.open(tmp_path) as db:
        db.commit([measurement(1, s) for s in range(3)], ENV)
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    raw.execute("UPDATE trials SET body = replace(body, '11.0', '01.0') WHERE rowid = 2")
    raw.commit()
    raw.close()
    with Database.open(tmp_path) as db:
        assert len(db.lookup_all(measurement(1).problem_key)) == 2
        assert db.stats().quarantined == 1 and db.stats().rows == 2
        assert any("quarantine" in p for p in db.problems)
    with Database.open(tmp_path) as db:
        assert not db.problems and len(db.lookup_all(measurement(1).problem_key)) == 2


def test_a_torn_tail_of_a_segment_is_dropped(tmp_path: Path) -> None:
    segments = SegmentBackend(tmp_path)
    rows = [store.Record(measurement(n), ENV.text, 1.0, 0).to_row("t") for n in range(3)]
    segments.append(rows[:2])
    segments.append(rows[2:])
    (path,) = tmp_path.glob("*.seg")
    data = path.read_bytes()
    for cut in range(len(data) - 1, len(data) - 60, -7):
        path.write_bytes(data[:cut])
        assert list(SegmentBackend(tmp_path).rows(None)) == rows[:2]
    path.write_bytes(data)
    assert list(SegmentBackend(tmp_path).rows(None)) == rows


def test_segments_of_several_writers_are_merged(tmp_path: Path) -> None:
    first, second = SegmentBackend(tmp_path), SegmentBackend(tmp_path)
    rows = [store.Record(measurement(n), ENV.text, 1.0, 0).to_row("t") for n in range(4)]
    first.append(rows[:3])
    second.append(rows[2:])
    assert sorted(r.body for r in first.rows(None)) == sorted(r.body for r in rows)


def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 1000)
    with Database.open(tmp_path) as db:
        db.commit(measurement(1), ENV)
        assert db.stats().backend == "sqlite" and db.stats().rows == 1
        assert any("damaged" in p for p in db.problems)
    assert len(list(tmp_path.glob(f"{FILE_NAME}.corrupt-*"))) == 1


def test_a_newer_schema_is_left_alone(tmp_path: Path) -> None:
    with Database.open(tmp_path) as db:
        db.commit(measurement(1), ENV)
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.warns(UserWarning, match="measurements are not kept: .*schema 99"):
        opened = Database.open(tmp_path)
    with opened as db:
        assert db.stats().backend == "memory" and any("schema 99" in p for p in db.problems)
        db.commit(measurement(2), ENV)
        assert db.lookup(measurement(2).problem_key, measurement(2).schedule, KERNEL, ENV) is not None
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.fixture
def no_fault() -> Iterator[None]:
    yield
    store.fault = None


ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT)


@pytest.mark.usefixtures("no_fault")
@pytest.mark.parametrize("code", ERRORS, ids=lambda c: errno.errorcode[c])
@pytest.mark.parametrize("site", SITES)
def test_a_disk_that_cannot_be_written_costs_persistence_only(folder: Path, site: str, code: int) -> None:
    reached = 0

    def fail(at: str) -> None:
        nonlocal reached
        if at == site:
            reached += 1
            raise OSError(code, os.strerror(code))

    if site == "set-aside":
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(b"garbage" * 999)
    store.fault = fail
    with warnings.catch_warnings(record=True, action="always") as told, Database.open(folder) as db:
        for n in range(3):
            db.commit([measurement(n, 0), measurement(n, 1)], ENV)
        if site == "quarantine":
            bad = Row("0", digest(measurement(0).problem_key), "t", "{}", "0")
            if db._backend is not None:
                db._backend.append([bad])
        if site == "prune":
            db.prune()
        for n in range(3):
            for s in range(2):
                assert db.lookup(measurement(n).problem_key, measurement(n, s).schedule, KERNEL, ENV) == measurement(
                    n, s
                )
        applies = {
            "sqlite": set(SITES) - {"append"},
            "segments": set(SITES) - {"schema", "begin", "insert", "quarantine", "set-aside"},
        }
        name = "segments" if store.file_system_type(folder, "") else "sqlite"
        assert (reached > 0) == (site in applies[name])
        if reached:
            assert db.stats().backend == "memory"
            assert any(os.strerror(code) in p for p in db.problems)
        assert [os.strerror(code) in str(w.message) for w in told] == [True] * (reached > 0)  # one line
    store.fault = None
    with Database.open(folder) as db:  # nothing half-written is left
        assert all(read_row(r.to_row("t")) is not None for r in db.records())
        db.commit(measurement(9), ENV)
        assert db.lookup(measurement(9).problem_key, measurement(9).schedule, KERNEL, ENV) == measurement(9)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.warns(UserWarning, match="without its cache"):
        opened = Database.open(tmp_path / "file" / "cache")
    with opened as db:
        db.commit(measurement(1), ENV)
        assert db.lookup(measurement(1).problem_key, measurement(1).schedule, KERNEL, ENV) == measurement(1)
        assert len(db.problems) == 1 and db.stats().backend == "memory"


def test_the_cache_is_private(tmp_path: Path) -> None:
    with Database.open(tmp_path / "cache") as db:
        db.commit(measurement(1), ENV)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / FILE_NAME).stat().st_mode & 0o777 == 0o600


def _write(folder: Path, writer: int, count: int) -> None:
    with Database.open(folder) as db:
        for n in range(count):
            db.commit(measurement(n, writer), ENV)
        if db._memory or db.problems:
            os._exit(1)


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, w, 25)) for w in range(8)]
    for p in writers:
        p.start()
    for p in writers:
        p.join(60)
    assert [p.exitcode for p in writers] == [0] * 8
    with Database.open(tmp_path) as db:
        assert db.verify() == (200, 0)


def test_a_connection_does_not_cross_a_fork(tmp_path: Path) -> None:
    with Database.open(tmp_path) as db:
        db.commit(measurement(1), ENV)
        child = multiprocessing.get_context("fork").Process(target=lambda: db.commit(measurement(2), ENV))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        db.commit(measurement(3), ENV)
        assert db.verify() == (3, 0)


def test_journal_mode_follows_the_version_of_sqlite(tmp_path: Path) -> None:
    safe = {(3, 51, 3): True, (3, 52, 0): True, (3, 50, 7): True, (3, 44, 6): True}
    unsafe = {(3, 40, 1): False, (3, 51, 2): False, (3, 50, 6): False, (3, 45, 0): False, (3, 44, 5): False}
    for version, expected in (safe | unsafe).items():
        assert wal_is_safe(version) is expected
    with Database.open(tmp_path) as db:
        db.commit(measurement(1), ENV)
        (mode,) = narrow(SqliteBackend, db._backend)._db.execute("PRAGMA journal_mode").fetchone()
    assert mode == ("wal" if wal_is_safe(sqlite3.sqlite_version_info) else "truncate")


def test_file_system_types() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\ntmpfs /home/me/t\\040mp tmpfs rw 0 0\n"
    assert file_system_type(Path("/home/me/.cache"), mounts) == "nfs4"
    assert file_system_type(Path("/home/me/t mp/x"), mounts) == "tmpfs"
    assert file_system_type(Path("/homeless"), mounts) == "ext4"
    assert file_system_type(Path("/x"), "") == ""


def test_keys_tell_everything_apart() -> None:
    m = measurement(1)
    texts = {
        timing_key("a", m.schedule, KERNEL, ENV.text),
        timing_key("b", m.schedule, KERNEL, ENV.text),
        timing_key("a", Schedule("cpp"), KERNEL, ENV.text),
        timing_key("a", Schedule("cpp", (("t", 1),)), KERNEL, ENV.text),
        timing_key("a", Schedule("cpp", (("t", True),)), KERNEL, ENV.text),
        timing_key("a", Schedule("cpp", (("t", 1.0),)), KERNEL, ENV.text),
        timing_key("a", m.schedule, KERNEL, environment(seed=2).text),
        timing_key("a", m.schedule, KERNEL, replace(ENV, cache="warm").text),
        timing_key("a", m.schedule, KERNEL, replace(ENV, protocol=99).text),
        timing_key("a", m.schedule, "6" * 64, ENV.text),
    }
    assert len(texts) == 10


def test_the_source_hash_follows_the_sources(tmp_path: Path) -> None:
    (tmp_path / "ir").mkdir()
    (tmp_path / "ir" / "x.py").write_text("1")
    first = source_hash(tmp_path, ("ir",))
    source_hash.cache_clear()
    (tmp_path / "ir" / "x.py").write_text("2")
    assert source_hash(tmp_path, ("ir",)) != first


@pytest.mark.parametrize("name", ["generate/cuda/x.py", "generate/library/fused_cuda.py", "generate/gpu.py"])
def test_a_cpu_does_not_mind_sources_for_gpus(tmp_path: Path, name: str) -> None:
    (tmp_path / "generate" / "cuda").mkdir(parents=True)
    (tmp_path / "generate" / "library").mkdir()
    (tmp_path / "generate" / "cpp.py").write_text("1")
    first = source_hash(tmp_path, ("generate",), without=GPU_WORDS)
    source_hash.cache_clear()
    (tmp_path / name).write_text("new")
    assert source_hash(tmp_path, ("generate",), without=GPU_WORDS) == first
    assert source_hash(tmp_path, ("generate",)) != first
    source_hash.cache_clear()
    (tmp_path / "generate" / "cpp.py").write_text("2")
    assert source_hash(tmp_path, ("generate",), without=GPU_WORDS) != first


def test_every_part_that_is_hashed_exists() -> None:
    assert [p for p in (*HASHED_PARTS, *PLAN_PARTS) if not (PACKAGE / p).exists()] == []


GENERATORS = ("generate/cpp", "generate/cuda", "generate/expr", "fission", "orchestrate", "frontends", "ir/graph.py")


@pytest.mark.parametrize("parts", [HASHED_PARTS, CUDA_PARTS], ids=["cpu", "gpu"])
def test_what_writes_kernels_is_not_part_of_the_key_and_what_measures_is(parts: tuple[str, ...]) -> None:
    assert [p for p in parts if any(p == g or p.startswith(g + "/") for g in GENERATORS)] == []
    assert {"tune/verify.py", "tune/oracle.py", "tune/inputs.py", "tune/tolerance.py", "tune/worker.py"} <= set(parts)
    assert [p for p in parts if not (PACKAGE / p).is_file()] == []


def test_a_row_with_keys_of_another_version_is_passed_over_and_pruned(folder: Path) -> None:
    with Database.open(folder) as db:
        new = store.Record(measurement(1), ENV.text, 1.0, 0).to_row("new")
        body = json.loads(new.body)
        del body["version"], body["measurement"]["kernel"]
        text = canonical(body)
        assert db._backend is not None
        db._backend.append([Row("0" * 64, new.problem, "old", text, digest(text)), new])
        assert db.lookup_all(measurement(1).problem_key) == (measurement(1),)
        assert db.verify() == (1, 0) and not db.problems
        assert db.prune() == 1 and db.stats().rows == 1


def test_a_file_of_the_earlier_schema_is_taken_over(tmp_path: Path) -> None:
    with Database.open(tmp_path) as db:
        db.commit(measurement(1), ENV)
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    raw.execute("PRAGMA user_version = 1")
    raw.close()
    with Database.open(tmp_path) as db:
        assert not db.problems and db.stats().backend == "sqlite"
        db.commit(measurement(2), ENV)
    with Database.open(tmp_path) as db:
        assert db.verify() == (2, 0)
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    assert raw.execute("PRAGMA user_version").fetchone() == (store.SCHEMA_VERSION,)
    raw.close()


def test_every_verdict_survives(tmp_path: Path) -> None:
    with Database.open(tmp_path) as db:
        for k, v in enumerate(Verdict):
            m = replace(measurement(1, k, v), error="why\n\x00\u202e", rmse=1e300)
            db.commit(m, ENV, kills={m.schedule: 2})
            record = db.lookup_record(m.problem_key, m.schedule, KERNEL, ENV)
            assert record is not None and record.measurement == m and record.kills == 2
