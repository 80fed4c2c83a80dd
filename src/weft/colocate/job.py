"""`job.toml`: a best-effort job for `weft colocate`, read with nothing believed; and its progress, saved and resumed.

    name = "mriq"
    kind = "kernels"                    # kernels, network or process
    stages = ["mriq/kernel.toml"]       # kernels: the kernel.toml of each stage
    # model = "resnet50.onnx"           # network: an ONNX file
    # inputs = "images"                 #   a folder of .npz files, one an inference
    # outputs = "results"               #   where results go; may be left out
    # file = "train.py"                 # process: a Python file
    # function = "unit"                 #   what in it does a unit of work
    # segment_us = 200                  #   longest part that cannot be paused, alone; left out: any time
    # save_s = 60                       #   seconds of work between two saves of its state
    # hang_s = 30                       #   a part that takes longer is killed, and the process started again
    passes = 10                         # times through, or units of a process; left out: without end
    memory = "4GiB"                     # most device memory; left out: what the model leaves
    prefers = "compute"                 # tensor, compute, memory, latency or neutral
    progress = "mriq.progress.json"     # left out: progress is not kept

Paths are relative to the file, and stay in its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import cast

from weft.errors import ArtifactError, UserError
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.scheduling import KINDS, PREFERS, JobKind, JobProgress, JobSpec, Prefers

MOST_BYTES = 1 << 20
"""Of a job.toml, and of a file of progress."""
MOST_STAGES = 256
MOST_TEXT = 4096
_MOST_COUNT = 10**15
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_OWN: Mapping[str, frozenset[str]] = {
    "kernels": frozenset({"stages"}),
    "network": frozenset({"model", "inputs", "outputs"}),
    "process": frozenset({"file", "function", "segment_us", "save_s", "hang_s"}),
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "kernels": ("stages",), "network": ("model", "inputs"), "process": ("file",),
}  # fmt: skip
_COMMON = frozenset({"name", "kind", "passes", "memory", "prefers", "progress"})


class JobError(UserError):
    """A job.toml, or a job's progress, that cannot be taken."""

    code = "W018"
    template = "{key}: {problem}"
    todo = "{remedy}"


def read_job(path: Path) -> JobSpec:
    """Read a job.toml. What it names need not exist yet but its stages, model, inputs and file.

    Raises:
        JobError: it cannot be read, or a key or value cannot be taken [W018].
    """
    text = _text(path, "a job.toml")
    spec = parse_job(text, path.name)
    named = (("stages", spec.stages), ("model", (spec.model,)), ("inputs", (spec.inputs,)), ("file", (spec.file,)))
    for key, names in named:
        for name in filter(None, names):
            target = path.parent / name
            if not (target.is_dir() if key == "inputs" else target.is_file()):
                what = "folder" if key == "inputs" else "file"
                raise _bad(path.name, key, f"no such {what}: {name!r}", "paths are relative to the job.toml")
            if not target.resolve().is_relative_to(path.parent.resolve()):
                raise _bad(path.name, key, f"{name!r} leads out of the folder", "put it beside the job.toml")
    return spec


def parse_job(text: str, where: str = "job.toml") -> JobSpec:
    """As `read_job`, of the text itself; files are not looked for.

    Raises:
        JobError: as there [W018].
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(where, "text", f"no TOML: {str(error)[:200]}", "https://toml.io has the syntax") from None
    reader = _Reader(where, raw)
    kind = reader.one_of("kind", KINDS, None)
    known = _COMMON | _OWN[kind]
    for key in raw:
        if key not in known:
            whose = next((k for k, keys in _OWN.items() if key in keys), None)
            problem = f"is of a job of kind {whose!r}, this is one of {kind!r}" if whose else "no such key"
            raise _bad(where, key[:80], problem, f"known are {', '.join(sorted(known))}")
    for key in _NEEDED[kind]:
        if key not in raw:
            raise _bad(where, key, "is missing", f"a job of kind {kind!r} needs it")
    return JobSpec(
        name=reader.name("name"),
        kind=cast("JobKind", kind),
        stages=reader.paths("stages"),
        model=reader.path("model"),
        inputs=reader.path("inputs"),
        outputs=reader.path("outputs"),
        file=reader.path("file"),
        function=reader.identifier("function", "unit") if kind == "process" else "",
        segment_us=reader.positive("segment_us", 0.0, 1e7),
        save_s=reader.positive("save_s", 60.0 if kind == "process" else 0.0, 1e6),
        hang_s=reader.positive("hang_s", 30.0 if kind == "process" else 0.0, 1e6),
        passes=reader.count("passes"),
        memory_bytes=reader.size("memory"),
        prefers=cast("Prefers", reader.one_of("prefers", PREFERS, "neutral")),
        progress=reader.path("progress"),
    )


class _Reader:
    """Values of a table by key, each of its type."""

    def __init__(self, where: str, raw: Mapping[str, object]) -> None:
        self.where, self.raw = where, raw

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise _bad(self.where, key, "is no text", f'write {key} = "..."')
        if len(value) > MOST_TEXT or not value.isprintable():
            raise _bad(self.where, key, f"is longer than {MOST_TEXT}, or not printable", "write a shorter, plain text")
        return value

    def name(self, key: str) -> str:
        if key not in self.raw:
            raise _bad(self.where, key, "is missing", "every job has a name")
        value = self.text(key, self.raw[key])
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}", value):
            raise _bad(self.where, key, f"{value[:80]!r} is no name", "letters, digits and _ . + -, up to 80")
        return value

    def one_of(self, key: str, of: tuple[str, ...], default: str | None) -> str:
        value = self.raw.get(key, default)
        if value is None:
            raise _bad(self.where, key, "is missing", f"one of {', '.join(of)}")
        if not isinstance(value, str) or value not in of:
            raise _bad(self.where, key, f"{str(value)[:80]!r} is none of {', '.join(of)}", "write one of these")
        return value

    def path(self, key: str) -> str:
        return self.inside(key, self.raw[key]) if key in self.raw else ""

    def inside(self, key: str, value: object) -> str:
        text = self.text(key, value)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or "\\" in text or path == PurePosixPath():
            raise _bad(self.where, key, f"{text[:80]!r} leads out of the folder", "give a path below the job.toml")
        return text

    def identifier(self, key: str, default: str) -> str:
        value = self.text(key, self.raw.get(key, default))
        if not value.isidentifier():
            raise _bad(self.where, key, f"{value[:80]!r} is no name of a function", f'write {key} = "{default}"')
        return value

    def paths(self, key: str) -> tuple[str, ...]:
        value = self.raw.get(key, ())
        if key not in self.raw:
            return ()
        if not isinstance(value, list) or not value:
            raise _bad(self.where, key, "is no list with an element", f'write {key} = ["..."]')
        if len(value) > MOST_STAGES:
            raise _bad(self.where, key, f"{len(value)} elements", f"at most {MOST_STAGES} are taken")
        return tuple(self.inside(key, v) for v in value)

    def count(self, key: str) -> int:
        value = self.raw.get(key, 0)
        if key in self.raw and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_COUNT):
            raise _bad(self.where, key, f"{str(value)[:80]} is no number of passes", "a whole number, 1 or more")
        return cast("int", value)

    def positive(self, key: str, default: float, most: float) -> float:
        if key not in self.raw:
            return default
        value = self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _bad(self.where, key, "is no number", f"write {key} = {default or most:g}")
        if not (math.isfinite(value) and 0 < value <= most):
            raise _bad(self.where, key, f"is {value}", f"above 0, up to {most:g}")
        return float(value)

    def size(self, key: str) -> int:
        if key not in self.raw:
            return 0
        found = re.fullmatch(r"([0-9]{1,15}) ?([KMG]iB|B)?", self.text(key, self.raw[key]))
        size = int(found[1]) * _UNITS[found[2] or ""] if found else 0
        if not 0 < size <= 1 << 50:
            raise _bad(self.where, key, f"{str(self.raw[key])[:80]!r} is no size", 'write e.g. memory = "4GiB"')
        return size


def digest(spec: JobSpec) -> str:
    """Names what a job does: progress is of no other one. Where that is saved, and the memory it may take, are free."""
    every = cast("Mapping[str, object]", to_json(spec))
    own = {k: v for k, v in every.items() if k not in ("progress", "memory_bytes")}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:32]


def save_progress(path: Path, progress: JobProgress) -> None:
    """Write it, whole or not at all: a crash meanwhile leaves what was there.

    Raises:
        ArtifactError: it cannot be written [W401].
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump({"format": 1, "progress": to_json(progress)}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ArtifactError(
            where=path.name, problem=f"progress cannot be written: {error.strerror}", remedy="choose another place"
        ) from None


def resume(path: Path, spec: JobSpec) -> JobProgress:
    """Where a job goes on: at its begin, where nothing was saved.

    Raises:
        JobError: what was saved is of another job, or unreadable [W018].
    """
    own = digest(spec)
    if not path.exists():
        return JobProgress(own, 0, 0, 0)
    remedy = "remove the file to begin anew"
    try:
        data = json.loads(_text(path, "a file of progress"))
        if not isinstance(data, dict) or data.get("format") != 1:
            raise ValueError
        found = from_json(JobProgress, data.get("progress"))
    except (ValueError, RecursionError, ArtifactError):
        raise _bad(path.name, "progress", "what was saved cannot be read", remedy) from None
    if found.job != own:
        raise _bad(path.name, "progress", "it is of another job, or of this one before it was changed", remedy)
    if spec.stages and found.stage >= len(spec.stages):
        raise _bad(path.name, "progress", f"stage {found.stage} of {len(spec.stages)}", remedy)
    return found


def _text(path: Path, what: str) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _bad(path.name, "path", f"more than {MOST_BYTES >> 20} MiB", f"name {what}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or 'no text in UTF-8'}"
        raise _bad(path.name, "path", problem, f"name {what}") from None


def _bad(where: str, key: str, problem: str, remedy: str) -> JobError:
    return JobError(where=where, key=key, problem=problem, remedy=remedy)
