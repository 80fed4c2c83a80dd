"""The tuning database: every trial that was ever committed, on local SQLite, network segments or in memory.

Rules (each has a test):

* A row is canonical JSON and its SHA-256. A row that does not verify goes to `quarantine`, is counted and never used.
* A hit needs the text of the key to be equal, not only its hash. The key names the kernel by its content, so a
  measurement is found again after any change that leaves the kernel and the measuring as they were.
* A row holds the digest of the machine code that ran, where that is known (rows of earlier versions have none, and
  stay what they were). A kernel whose text changed is found again by it once it is compiled, under any schedule, and
  before that where `weft.tune.aliases` has its earlier text.
* Rows with keys of another version are passed over, and go when the database is pruned.
* Rows of other kinds (`Database.keep`: pairs of kernels) lie beside those of kernels: under a problem that is none, and
  with a version that is none, so that who does not know them passes over them.
* One commit per trial of a problem; the same key and trial id twice is no change. A kill costs what was in flight.
* SQLite with `synchronous=NORMAL`, 5 s of patience, `BEGIN IMMEDIATE`, one connection per process, never across fork.
  WAL only with SQLite 3.51.3, 3.50.7 or 3.44.6 and later in their lines: earlier ones can lose committed pages when
  a writer meets a checkpointer (sqlite.org/wal.html, section 11). Otherwise `journal_mode=TRUNCATE`.
* On network file systems each process appends to a segment file of its own (length, SHA-256, JSON); readers merge
  them and drop a torn tail.
* A file that SQLite calls damaged is renamed `*.corrupt-<time>`, its readable rows are copied into a new one.
* A directory that cannot be written (full, read-only, forbidden, over quota) costs persistence, nothing else:
  measuring goes on with what is kept in memory, and `Database.problems` says so.

All writes of the database happen in this module; `fault` injects errors at each of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self, cast, final

from weft.device.files import demand_private, private_directory, read_private
from weft.errors import ArtifactError
from weft.kernels.codec import Json, schedule_from_json, schedule_to_json
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.private import nothing_kept
from weft.tune.aliases import former
from weft.tune.keys import KEY_VERSION, Described, canonical, digest, timing_key

SCHEMA_VERSION = 2
FILE_NAME = "tuning.sqlite3"
SEGMENT_FOLDER = "tuning-segments"
NETWORK_TYPES = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "glusterfs", "9p", "ncpfs",
        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "virtiofs",
    }
)  # fmt: skip
SITES = ("mkdir", "open", "schema", "begin", "insert", "commit", "quarantine", "set-aside", "append", "prune")
"""Every place at which this module writes."""

_BESIDE = ("-journal", "-wal", "-shm")
"""Endings of the files that SQLite keeps beside a database."""

fault: Callable[[str], None] | None = None
"""Test hook: called with a site before the write; may raise OSError."""


def _check(site: str) -> None:
    if fault is not None:
        fault(site)


@dataclass(frozen=True, slots=True)
class Row:
    """One committed trial as it is kept."""

    key: str
    """SHA-256 of the key's text."""
    problem: str
    """SHA-256 of the problem's key."""
    trial: str
    body: str
    """Canonical JSON."""
    sha256: str
    """Of the body."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What `weft db` shows."""

    backend: str
    """`sqlite`, `segments` or `memory`."""
    path: str
    rows: int
    problems: int
    """Distinct problems."""
    verdicts: Mapping[str, int]
    quarantined: int
    size_bytes: int
    notes: tuple[str, ...]
    others: Mapping[str, int] = field(default_factory=dict)
    """Rows of other kinds, by kind."""


def _to_json(m: Measurement) -> Json:
    return {
        "problem_key": m.problem_key,
        "schedule": schedule_to_json(m.schedule),
        "verdict": m.verdict.value,
        "samples_us": list(m.samples_us),
        "error": m.error[:4000],
        "rmse": min(m.rmse, 1e300),
        "compile_s": m.compile_s,
        "bound_us": m.bound_us,
        "kernel": m.kernel,
        **({"code": m.code} if m.code else {}),
    }


def _from_json(data: Json) -> Measurement:
    r = cast("Mapping[str, Json]", data)
    return Measurement(
        problem_key=str(r["problem_key"]),
        schedule=schedule_from_json(r["schedule"]),
        verdict=Verdict(str(r["verdict"])),
        samples_us=tuple(float(x) for x in cast("Sequence[float]", r["samples_us"])),
        error=str(r["error"]),
        rmse=float(cast("float", r["rmse"])),
        compile_s=float(cast("float", r["compile_s"])),
        bound_us=float(cast("float", r["bound_us"])),
        kernel=str(r["kernel"]),
        code=str(r.get("code", "")),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """A measurement and what it was measured in."""

    measurement: Measurement
    environment: str
    """Canonical text."""
    started: float
    """Seconds since the epoch."""
    kills: int
    """Workers that the kernel has killed."""

    def to_row(self, trial: str) -> Row:
        """As it is kept."""
        key = _key_text(self.measurement, self.environment)
        content: Json = {
            "version": KEY_VERSION,
            "key": key,
            "environment": self.environment,
            "started": self.started,
            "kills": self.kills,
            "measurement": _to_json(self.measurement),
        }
        body = canonical(content)
        return Row(digest(key), digest(self.measurement.problem_key), trial, body, digest(body))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of one problem in one environment."""

    records: tuple[Record, ...] = ()
    """Oldest first."""

    def of(self, schedule: Schedule, kernel: str) -> Record | None:
        """The newest record of a kernel, under its text or an earlier one that has the same machine code."""
        told = canonical(schedule_to_json(schedule))
        return next(
            (
                replace(r, measurement=replace(r.measurement, kernel=kernel))
                for r in reversed(self.records)
                if (r.measurement.kernel == kernel or r.measurement.kernel in former(kernel, r.environment))
                and canonical(schedule_to_json(r.measurement.schedule)) == told
            ),
            None,
        )

    def of_code(self, code: str) -> Record | None:
        """The newest record of a kernel with this machine code, whatever its text and schedule were."""
        return next((r for r in reversed(self.records) if code and r.measurement.code == code), None)

    def has_other(self, schedule: Schedule, kernel: str) -> bool:
        """Whether there are records with this schedule, and all are of other texts."""
        texts = {r.measurement.kernel for r in self.records if r.measurement.schedule == schedule}
        return bool(texts) and kernel not in texts


def _key_text(m: Measurement, environment: str) -> str:
    return timing_key(m.problem_key, m.schedule, m.kernel, environment)


def read_row(row: Row) -> Record | None:
    """The record in a row; None for one that does not verify."""
    try:
        if digest(row.body) != row.sha256:
            return None
        r = json.loads(row.body)
        record = Record(_from_json(r["measurement"]), str(r["environment"]), float(r["started"]), int(r["kills"]))
        key = _key_text(record.measurement, record.environment)
        if key != r["key"] or digest(key) != row.key or digest(record.measurement.problem_key) != row.problem:
            return None
        return record
    except (ValueError, KeyError, TypeError, AttributeError, ArtifactError, RecursionError):
        return None


def is_of_other_version(row: Row) -> bool:
    """Is this a sound row with keys of another version than this one makes?"""
    try:
        if digest(row.body) != row.sha256:
            return False
        return bool(json.loads(row.body).get("version", 1) != KEY_VERSION)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False


def row_of_kind(kind: str, key: str, content: Json, trial: str) -> Row:
    """A row that is no measurement of one kernel. `key`: canonical text."""
    body = canonical({"version": f"{kind}-{KEY_VERSION}", "kind": kind, "key": key, "content": content})
    return Row(digest(key), problem_of_kind(kind), trial, body, digest(body))


def problem_of_kind(kind: str) -> str:
    """What stands in place of the problem's digest, so that rows of a kind are found without reading the others."""
    return digest(f"rows of kind {kind}")


def read_kind(row: Row) -> tuple[str, str, Json] | None:
    """(kind, key, content) of a sound row of another kind, of this version; None for all others."""
    try:
        if digest(row.body) != row.sha256:
            return None
        r = json.loads(row.body)
        kind, key = str(r["kind"]), str(r["key"])
        if r["version"] != f"{kind}-{KEY_VERSION}" or digest(key) != row.key or row.problem != problem_of_kind(kind):
            return None
        return kind, key, cast("Json", r["content"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class Backend(Protocol):
    """Where rows are kept."""

    name: str

    def append(self, rows: Sequence[Row]) -> None:
        """Commit rows together. OSError or sqlite3.Error: nothing of them is kept."""
        ...

    def rows(self, problem: str | None) -> Iterator[Row]:
        """Rows of one problem (or all), oldest first."""
        ...

    def quarantine(self, row: Row) -> None:
        """Move a row that does not verify out of the way."""
        ...

    def quarantined(self) -> int:
        """Rows that were moved there."""
        ...

    def prune(self, keep: Callable[[Row], bool]) -> int:
        """Remove rows; the number removed."""
        ...

    def size_bytes(self) -> int:
        """Bytes on disk."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


def wal_is_safe(version: tuple[int, ...]) -> bool:
    """Is this SQLite free of the WAL-reset race?"""
    return version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)


_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS trials (key TEXT NOT NULL, problem TEXT NOT NULL, trial TEXT NOT NULL,
    body TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (key, trial))""",
    "CREATE INDEX IF NOT EXISTS trials_problem ON trials (problem)",
    "CREATE TABLE IF NOT EXISTS quarantine (key, problem, trial, body, sha256, at REAL)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_BUSY_OR_DISK = frozenset(
    {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH,
    }
)  # fmt: skip


def _is_busy(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return (int(code or 0) & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_corruption(error: sqlite3.Error) -> bool:
    """Does the error say that the file is damaged (rather than busy, full or forbidden)?"""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError)
    return (int(code) & 0xFF) not in _BUSY_OR_DISK


@final
class SqliteBackend:
    """Rows in a SQLite file on a local disk."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        """Open or create.

        Raises:
            OSError: the directory or file cannot be made.
            sqlite3.Error: the file is damaged, busy or not ours.
            ArtifactError: written by a newer schema.
        """
        self._path = path
        private_directory(path.parent)
        for suffix in ("", *_BESIDE):  # the files themselves, and what SQLite would replay into them
            demand_private(path.with_name(path.name + suffix))
        _check("open")
        self._pid = os.getpid()
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=5.0, isolation_level=None)
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA cell_size_check = ON")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not 0 <= version <= SCHEMA_VERSION:
                raise ArtifactError(
                    problem=f"the tuning database has schema {version}, this Weft knows {SCHEMA_VERSION}",
                    remedy="use another WEFT_CACHE_DIR, or the Weft that wrote it",
                )
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("quick_check failed")
            mode = "WAL" if wal_is_safe(sqlite3.sqlite_version_info) else "TRUNCATE"
            db.execute(f"PRAGMA journal_mode = {mode}")
            db.execute("PRAGMA synchronous = NORMAL")
            if version != SCHEMA_VERSION:  # new, or from an earlier Weft, whose tables are the same
                _check("schema")
                db.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute("COMMIT")
            db.execute("SELECT key, problem, trial, body, sha256 FROM trials LIMIT 1").fetchall()
        except BaseException:
            db.close()
            raise
        self._path.chmod(0o600)
        return db

    def _here(self) -> sqlite3.Connection:
        if os.getpid() != self._pid:  # a connection must not cross a fork
            self._pid = os.getpid()
            self._db = self._connect()
        return self._db

    def append(self, rows: Sequence[Row]) -> None:
        """See `Backend`."""
        db = self._here()
        _check("begin")
        db.execute("BEGIN IMMEDIATE")
        try:
            for r in rows:
                _check("insert")
                values = (r.key, r.problem, r.trial, r.body, r.sha256)
                db.execute("INSERT OR IGNORE INTO trials VALUES (?, ?, ?, ?, ?)", values)
            _check("commit")
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def rows(self, problem: str | None) -> Iterator[Row]:
        """See `Backend`."""
        where, values = ("WHERE problem = ?", (problem,)) if problem is not None else ("", ())
        query = f"SELECT key, problem, trial, body, sha256 FROM trials {where} ORDER BY rowid"
        for found in self._here().execute(query, values).fetchall():
            if all(isinstance(x, str) for x in found):
                yield Row(*found)
            else:
                yield Row(*(str(x) for x in found))  # a damaged row: its hash will not fit

    def quarantine(self, row: Row) -> None:
        """See `Backend`."""
        db = self._here()
        _check("quarantine")
        db.execute("BEGIN IMMEDIATE")
        try:
            values = (row.key, row.problem, row.trial, row.body, row.sha256, time.time())
            db.execute("INSERT INTO quarantine VALUES (?, ?, ?, ?, ?, ?)", values)
            db.execute("DELETE FROM trials WHERE key = ? AND trial = ?", (row.key, row.trial))
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def quarantined(self) -> int:
        """See `Backend`."""
        return int(self._here().execute("SELECT count(*) FROM quarantine").fetchone()[0])

    def prune(self, keep: Callable[[Row], bool]) -> int:
        """See `Backend`."""
        db = self._here()
        doomed = [r for r in self.rows(None) if not keep(r)]
        _check("prune")
        db.execute("BEGIN IMMEDIATE")
        try:
            for r in doomed:
                db.execute("DELETE FROM trials WHERE key = ? AND trial = ?", (r.key, r.trial))
            db.execute("DELETE FROM quarantine")
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        with contextlib.suppress(sqlite3.Error):  # another process may be reading
            db.execute("VACUUM")
        return len(doomed)

    def size_bytes(self) -> int:
        """See `Backend`."""
        return self._path.stat().st_size if self._path.exists() else 0

    def close(self) -> None:
        """See `Backend`."""
        if os.getpid() == self._pid:
            self._db.close()


def set_aside(path: Path) -> tuple[Path, list[Row]]:
    """Rename a damaged database and read what can be read of it.

    Raises:
        OSError: it cannot be renamed.
    """
    _check("set-aside")
    target = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
    path.rename(target)
    for suffix in _BESIDE:
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    rows: list[Row] = []
    try:
        db = sqlite3.connect(target.resolve().as_uri() + "?mode=ro", uri=True, timeout=1.0)
    except sqlite3.Error:
        return target, rows
    with contextlib.closing(db), contextlib.suppress(sqlite3.Error, OverflowError, ValueError):
        for found in db.execute("SELECT key, problem, trial, body, sha256 FROM trials"):
            row = Row(*(str(x) for x in found))
            if read_row(row) is not None or read_kind(row) is not None:
                rows.append(row)
    return target, rows


@final
class SegmentBackend:
    """Rows in append-only files, one per writing process: for file systems whose locks cannot be trusted."""

    name = "segments"
    _HEAD = struct.Struct(">I32s")
    _MAX_BODY = 64 * 1024 * 1024

    def __init__(self, folder: Path) -> None:
        """Open. OSError: the folder cannot be made."""
        private_directory(folder)
        _check("open")
        self._folder = folder
        self._own = folder / f"{os.getpid()}-{secrets.token_hex(8)}.seg"
        self._damaged = 0

    def append(self, rows: Sequence[Row]) -> None:
        """See `Backend`. The segment is cut back to what it was if the disk fills up half-way."""
        data = bytearray()
        for r in rows:
            body = canonical([r.key, r.problem, r.trial, r.body, r.sha256]).encode()
            data += self._HEAD.pack(len(body), hashlib.sha256(body).digest()) + body
        _check("append")
        handle = os.open(self._own, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            before = os.fstat(handle).st_size
            try:
                view = memoryview(bytes(data))
                while view:
                    view = view[os.write(handle, view) :]
                _check("commit")
                os.fsync(handle)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)

    def rows(self, problem: str | None) -> Iterator[Row]:
        """See `Backend`. Duplicates of a key and trial are given once."""
        seen: set[tuple[str, str]] = set()
        self._damaged = 0
        for path in sorted(self._folder.glob("*.seg")):
            for row in self._segment(path):
                if (problem is None or row.problem == problem) and (row.key, row.trial) not in seen:
                    seen.add((row.key, row.trial))
                    yield row

    def _segment(self, path: Path) -> Iterator[Row]:
        try:
            data = read_private(path)
        except OSError:
            self._damaged += 1
            return
        at = 0
        while at + self._HEAD.size <= len(data):
            size, expected = self._HEAD.unpack_from(data, at)
            body = data[at + self._HEAD.size : at + self._HEAD.size + size]
            if size > self._MAX_BODY or len(body) < size:
                break  # a torn tail, or a length that was damaged: nothing after it can be found
            if hashlib.sha256(body).digest() == expected:
                try:
                    yield Row(*(str(x) for x in json.loads(body)))
                except (ValueError, TypeError):
                    self._damaged += 1
            else:
                self._damaged += 1
            at += self._HEAD.size + size
        self._damaged += at < len(data)

    def quarantine(self, row: Row) -> None:  # noqa: ARG002 - nothing to move
        """See `Backend`. Segments are never rewritten: a bad row is passed over by every reader."""
        self._damaged += 1

    def quarantined(self) -> int:
        """See `Backend`."""
        sum(1 for _ in self.rows(None))
        return self._damaged

    def prune(self, keep: Callable[[Row], bool]) -> int:
        """See `Backend`. Only this process's segment may be rewritten; the others belong to their writers."""
        rows = list(self._segment(self._own)) if self._own.exists() else []
        kept = [r for r in rows if keep(r)]
        _check("prune")
        if len(kept) < len(rows):
            self._own.unlink()
            if kept:
                self.append(kept)
        return len(rows) - len(kept)

    def size_bytes(self) -> int:
        """See `Backend`."""
        return sum(p.stat().st_size for p in self._folder.glob("*.seg"))

    def close(self) -> None:
        """See `Backend`."""


def file_system_type(path: Path, mounts: str) -> str:
    """Type of the file system that holds `path`, from the text of /proc/self/mounts; empty if unknown."""
    best, found = -1, ""
    target = str(path.absolute())
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue  # not an entry
        mount = words[1].replace("\\040", " ")
        inside = mount == "/" or target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, found = len(mount), words[2]
    return found


@dataclass(slots=True)
class Database:
    """What was measured. Reading and committing never raise for the state of the disk; `problems` tells."""

    path: Path | None
    _backend: Backend | None
    problems: list[str] = field(default_factory=list)
    """One line per thing that went wrong with the files."""
    _memory: dict[tuple[str, str], Row] = field(default_factory=dict)
    """Rows that could not be written."""
    _read_only: bool = False
    _count: int = 0
    _session: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def open(cls, cache_dir: Path | None) -> Database:
        """Open or create the database of a cache directory; None: in memory only."""
        if cache_dir is None:
            return cls(None, None)
        database = cls(cache_dir, None)
        database._open()
        return database

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files; what could not be written is lost."""
        if self._backend is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                self._backend.close()
            self._backend = None

    def _open(self) -> None:
        if self.path is None:
            return
        try:
            _check("mkdir")
            private_directory(self.path)
            mounts = ""
            with contextlib.suppress(OSError):
                mounts = Path("/proc/self/mounts").read_text(errors="replace")
            if file_system_type(self.path, mounts) in NETWORK_TYPES:
                self._backend = SegmentBackend(self.path / SEGMENT_FOLDER)
                return
            self._open_sqlite(self.path / FILE_NAME)
        except (OSError, ArtifactError, sqlite3.Error) as error:
            self._give_up(error)

    def _open_sqlite(self, file: Path) -> None:
        try:
            self._backend = SqliteBackend(file)
        except sqlite3.Error as error:
            if not is_corruption(error):
                raise
            self._replace(file, error)

    def _replace(self, file: Path, error: sqlite3.Error) -> None:
        """Start a new file in place of a damaged one, with what can be read of it."""
        self.close()
        target, rows = set_aside(file)
        self.problems.append(f"{file.name} is damaged ({error}); kept as {target.name}, {len(rows)} rows copied out")
        self._backend = SqliteBackend(file)
        if rows:
            self._backend.append(rows)

    def _give_up(self, error: BaseException, *, keep_reading: bool = False) -> None:
        """Write no more; what was read so far stays readable if only writing failed."""
        self._read_only = True
        if not keep_reading:
            self.close()
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.problems.append(f"the tuning database cannot be written: {text}; results stay in memory")
        if self.path is not None:
            nothing_kept(self.path, text, "measurements are not kept")

    def _guard(self, error: sqlite3.Error | OSError, *, writing: bool) -> bool:
        """React to a failed access; True: worth trying once more."""
        if isinstance(error, sqlite3.Error):
            if _is_busy(error):
                return True  # others are writing; what waits in memory goes with the next commit
            if is_corruption(error) and isinstance(self._backend, SqliteBackend) and self.path is not None:
                try:
                    self._replace(self.path / FILE_NAME, error)
                    return True
                except (OSError, sqlite3.Error, ArtifactError) as again:
                    self._give_up(again)
                    return False
        self._give_up(error, keep_reading=writing)
        return False

    def commit(
        self,
        measurements: Measurement | Sequence[Measurement],
        environment: Described,
        *,
        trial: str | None = None,
        kills: Mapping[Schedule, int] | None = None,
    ) -> None:
        """Keep measurements, all or none. The same `trial` id with the same key again is no change."""
        many = [measurements] if isinstance(measurements, Measurement) else list(measurements)
        self._count += 1
        trial = trial or f"{self._session}-{self._count}"
        now, text = time.time(), environment.text
        self._write([Record(m, text, now, (kills or {}).get(m.schedule, 0)).to_row(trial) for m in many])

    def keep(self, kind: str, entries: Sequence[tuple[str, Json]]) -> None:
        """Keep rows of another kind, (key, content) each, all or none; the newest of a key counts."""
        self._count += 1
        trial = f"{self._session}-{self._count}"
        self._write([row_of_kind(kind, key, content, trial) for key, content in entries])

    def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._memory.setdefault((row.key, row.trial), row)
        for _ in range(2):
            if self._backend is None or self._read_only:
                break  # nothing to write to
            try:
                self._backend.append(list(self._memory.values()))
                self._memory.clear()
                return
            except (OSError, sqlite3.Error) as error:
                if not self._guard(error, writing=True):
                    break  # memory it is

    def _rows(self, problem: str | None) -> Iterator[Record]:
        """Verified records, oldest first; rows that do not verify are moved to quarantine."""
        bad: list[Row] = []
        for row in self._found(problem):
            record = read_row(row)
            if record is not None:
                yield record
            elif not is_of_other_version(row):
                bad.append(row)  # never used
        for row in bad:
            self._quarantine(row)

    def _found(self, problem: str | None) -> list[Row]:
        """All rows as they are, oldest first."""
        found: list[Row] = []
        for _ in range(2):
            if self._backend is None:
                break  # only memory
            try:
                found = list(self._backend.rows(problem))
                break
            except (OSError, sqlite3.Error) as error:
                if not self._guard(error, writing=False):
                    break  # only memory
        return found + [r for r in self._memory.values() if problem is None or r.problem == problem]

    def of_kind(self, kind: str) -> dict[str, Json]:
        """The newest content of each key of a kind; rows that do not verify are moved to quarantine."""
        found: dict[str, Json] = {}
        for row in self._found(problem_of_kind(kind)):
            read = read_kind(row)
            if read is not None and read[0] == kind:
                found.pop(read[1], None)  # in the order in which they were kept
                found[read[1]] = read[2]
            elif read is None and not is_of_other_version(row):
                self._quarantine(row)
        return found

    def _quarantine(self, row: Row) -> None:
        if self._backend is None or self._read_only:
            return
        self.problems.append(f"a damaged row was moved to quarantine ({row.key[:12]})")
        try:
            self._backend.quarantine(row)
        except (OSError, sqlite3.Error) as error:
            self._guard(error, writing=True)

    def lookup(self, problem_key: str, schedule: Schedule, kernel: str, environment: Described) -> Measurement | None:
        """The newest measurement of exactly this kernel in exactly this environment (see `timing_key`)."""
        record = self.lookup_record(problem_key, schedule, kernel, environment)
        return record.measurement if record is not None else None

    def lookup_record(self, problem_key: str, schedule: Schedule, kernel: str, environment: Described) -> Record | None:
        """The same with what the row says besides."""
        return self.of_problem(problem_key, environment).of(schedule, kernel)

    def of_problem(self, problem_key: str, environment: Described) -> Recorded:
        """All that is known of a problem in an environment, read once."""
        rows = self._rows(digest(problem_key))
        text = environment.text
        return Recorded(tuple(r for r in rows if r.environment == text and r.measurement.problem_key == problem_key))

    def lookup_all(self, problem_key: str, environment: Described | None = None) -> tuple[Measurement, ...]:
        """The newest measurement of every kernel of a problem, in one environment or in any."""
        newest: dict[str, Measurement] = {}
        text = environment.text if environment is not None else None
        for record in self._rows(digest(problem_key)):
            if record.measurement.problem_key == problem_key and text in (None, record.environment):
                newest[_key_text(record.measurement, record.environment)] = record.measurement
        return tuple(newest.values())

    def records(self) -> Iterable[Record]:
        """Everything that verifies."""
        return list(self._rows(None))

    def stats(self) -> Stats:
        """Counts; reads everything."""
        records = list(self._rows(None))
        verdicts: dict[str, int] = {}
        for r in records:
            verdicts[r.measurement.verdict.value] = verdicts.get(r.measurement.verdict.value, 0) + 1
        quarantined, size = 0, 0
        backend = self._backend
        if backend is not None:
            with contextlib.suppress(OSError, sqlite3.Error):
                quarantined, size = backend.quarantined(), backend.size_bytes()
        problems = len({r.measurement.problem_key for r in records})
        name = backend.name if backend is not None and not self._read_only else "memory"
        path = str(self.path) if self.path is not None else ""
        others = Counter(read[0] for row in self._found(None) if (read := read_kind(row)) is not None)
        return Stats(
            name, path, len(records), problems, verdicts, quarantined, size, tuple(self.problems), dict(others)
        )

    def verify(self) -> tuple[int, int]:
        """Read every row: (good, bad). Bad ones are moved to quarantine."""
        before = self.stats().quarantined
        good = sum(1 for _ in self._rows(None)) + sum(read_kind(row) is not None for row in self._found(None))
        return good, self.stats().quarantined - before

    def prune(self, environment: Described | None = None) -> int:
        """Remove all but the newest row of each key, rows of other versions and the quarantine.

        Args:
            environment: if given, rows of other environments go too; rows of other kinds have none and stay.
        """
        if self._backend is None or self._read_only:
            return 0
        newest = {}
        try:
            for row in self._backend.rows(None):
                newest[row.key] = row.trial
        except (OSError, sqlite3.Error) as error:
            self._guard(error, writing=False)
            return 0
        text = environment.text if environment is not None else None

        def keep(row: Row) -> bool:
            if newest.get(row.key) != row.trial:
                return False
            record = read_row(row)
            return read_kind(row) is not None if record is None else text in (None, record.environment)

        try:
            return self._backend.prune(keep)
        except (OSError, sqlite3.Error) as error:
            self._guard(error, writing=True)
            return 0
