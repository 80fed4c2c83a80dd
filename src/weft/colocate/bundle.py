"""A co-location bundle: a folder from which `weft serve` serves a model beside a best-effort job.

    NAME/bundle.json     what it is, and a digest of each file that is code or was measured
    NAME/plan.weft       the model's plan
    NAME/budgeted.weft   the same under a budget of an SM, beside which co-runners run; may be missing
    NAME/job.weft        the plan of a job that is a network
    NAME/samples.json    what `weft colocate prepare` measured of both on this GPU
    NAME/job/job.toml    the job, with all that it names in its folder: its progress and results go there

A job is code. As with a saved plan, a bundle is taken if this user wrote it, or its digest is given.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from weft.colocate.job import JobError, read_job
from weft.device.files import is_trusted, record_trust
from weft.errors import ArtifactError
from weft.kernels.samples import SampleRecord, read, write
from weft.kernels.scheduling import JobSpec

FORMAT = 1
MANIFEST, SAMPLES, JOB, JOB_FILE = "bundle.json", "samples.json", "job", "job.toml"
PLAN, BUDGETED, JOB_PLAN = "plan.weft", "budgeted.weft", "job.weft"
MOST_MANIFEST = 4 << 20
MOST_SAMPLES = 256 << 20
MOST_FILES = 10_000
"""Of a bundle, but for inputs and results."""
MOST_COPIED = 1_000_000
"""Of a job's folder, inputs and results too."""
_CACHES = "__pycache__"
"""Not copied: what Python makes of a job's files. In a bundle there is none (`process_worker`): it would be code."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Bundle:
    """One that was read: its files are those that were written, and this user trusts them."""

    folder: Path
    model: str
    """As the samples call it."""
    target_ns: int
    """From a query's arrival to its answer."""
    samples: SampleRecord
    job: JobSpec
    digest: str

    @property
    def plan(self) -> Path:
        """The model's plan."""
        return self.folder / PLAN

    @property
    def budgeted(self) -> Path | None:
        """Under a budget of an SM, if there is one."""
        path = self.folder / BUDGETED
        return path if path.is_file() else None

    @property
    def job_plan(self) -> Path:
        """Of a job that is a network."""
        return self.folder / JOB_PLAN

    @property
    def job_folder(self) -> Path:
        """Where the job.toml lies."""
        return self.folder / JOB


def is_bundle(path: Path) -> bool:
    """Whether it is a folder with a manifest; what is in it is another question."""
    return path.is_dir() and (path / MANIFEST).is_file()


def write_bundle(
    folder: Path, *, model: str, target_ns: int, samples: SampleRecord, job: Path,
    save: Mapping[str, Callable[[Path], object]], trust_dir: Path | None,
) -> str:  # fmt: skip
    """Write it, whole or not at all; its digest, which is also recorded as trusted.

    Args:
        folder: which there is not yet.
        model: its name in the samples.
        target_ns: of its queries.
        samples: of the model and of one job.
        job: the job.toml; its folder is copied.
        save: what writes the plans to files: `PLAN`, and `BUDGETED` and `JOB_PLAN` if there are such.
        trust_dir: the cache directory; None: `read_bundle` asks for the digest.

    Raises:
        ArtifactError: there is something of this name, or it cannot be written [W401].
        JobError: the job's folder has a link, or too many files [W018].
    """
    if folder.exists():
        raise _refuse(folder, "there is something of this name", "choose another one, or remove it")
    if folder.resolve().is_relative_to(job.parent.resolve()):
        raise _refuse(folder, "lies in the job's folder, which it is to hold a copy of", "choose another place")
    spec = read_job(job)
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _refuse(folder, f"cannot be written: {error.strerror}", "choose another place") from None
    try:
        for name, put in save.items():
            put(beside / name)
        (beside / SAMPLES).write_text(write(samples), encoding="utf-8")
        for path in _files(job.parent, copied=True):
            target = beside / JOB / path.relative_to(job.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        if job.name != JOB_FILE:
            (beside / JOB / job.name).replace(beside / JOB / JOB_FILE)
        head = json.dumps(
            {"format": FORMAT, "model": model, "target_ns": target_ns, "files": _digests(beside, spec)}, sort_keys=True
        ).encode()
        (beside / MANIFEST).write_bytes(head)
        beside.replace(folder)
    except OSError as error:
        raise _refuse(folder, f"cannot be written: {error.strerror}", "choose another place") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    digest = hashlib.sha256(head).hexdigest()
    record_trust(trust_dir, digest)
    return digest


def read_bundle(folder: Path, *, trust: Sequence[str] = (), cache_dir: Path | None = None) -> Bundle:
    """Read it, and look whether all its files are those that were written.

    Args:
        folder: of the bundle.
        trust: digests of bundles that somebody else wrote.
        cache_dir: where this user's are recorded.

    Raises:
        ArtifactError: damaged, of another format, not trusted, or its samples are of other ones [W401].
        JobError: the job.toml cannot be taken [W018].
    """
    digest, model, target_ns, files = _trusted(folder, trust, cache_dir)
    spec = read_job(folder / JOB / JOB_FILE)
    there = _digests(folder, spec)
    for name in sorted({*files, *there}):
        if files.get(name) != there.get(name):
            how = "was added" if name not in files else "is gone" if name not in there else "is not what was written"
            raise _refuse(folder, f"{name[:200]!r} {how}", _AGAIN)
    try:
        if (folder / SAMPLES).stat().st_size > MOST_SAMPLES:
            raise ValueError
        samples = read(json.loads((folder / SAMPLES).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"its samples cannot be read: {str(error)[:120]}"
        raise _refuse(folder, problem, _AGAIN) from None
    if model not in {m.name for m in samples.models} or spec.name not in {j.name for j in samples.jobs}:
        raise _refuse(folder, "its samples are of another model or job", _AGAIN)
    return Bundle(folder, model, target_ns, samples, spec, digest)


def read_plan(folder: Path, *, trust: Sequence[str] = (), cache_dir: Path | None = None) -> tuple[Path, str]:
    """The model's plan alone, and the bundle's digest: of the job nothing is looked at.

    Raises:
        ArtifactError: as `read_bundle` [W401].
    """
    digest, _, _, files = _trusted(folder, trust, cache_dir)
    if _sha256(folder, PLAN) != files[PLAN]:
        raise _refuse(folder, f"{PLAN!r} is not what was written", _AGAIN)
    return folder / PLAN, digest


def _trusted(folder: Path, trust: Sequence[str], cache_dir: Path | None) -> tuple[str, str, int, Mapping[str, str]]:
    """Digest, model, target and digests of the files of a bundle whose manifest is trusted."""
    head = _head(folder)
    digest = hashlib.sha256(head).hexdigest()
    if digest not in trust and not is_trusted(cache_dir, digest):
        remedy = f'if you know where it comes from, give trust="{digest}", on the command line --trust'
        raise _refuse(folder, "holds a job, which is code, and is not trusted", remedy)
    return (digest, *_told(folder, head))


_AGAIN = "prepare it again with `weft colocate prepare --bundle`"


def _head(folder: Path) -> bytes:
    try:
        if (folder / MANIFEST).stat().st_size > MOST_MANIFEST:
            raise _refuse(folder, f"its {MANIFEST} has more than {MOST_MANIFEST >> 20} MiB", _AGAIN)
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise _refuse(folder, f"is no co-location bundle: {MANIFEST}: {error.strerror}", _AGAIN) from None


def _told(folder: Path, head: bytes) -> tuple[str, int, Mapping[str, str]]:
    """Model, target and digests of the files, of a manifest that is trusted but may be of another version."""
    try:
        data = json.loads(head)
        found = data["format"], data["model"], data["target_ns"], data["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refuse(folder, f"its {MANIFEST} cannot be read", _AGAIN) from None
    version, model, target_ns, files = found
    if version != FORMAT:
        raise _refuse(folder, f"is of format {str(version)[:20]}, this version reads {FORMAT}", _AGAIN)
    if not isinstance(model, str) or not isinstance(target_ns, int) or target_ns <= 0 or not isinstance(files, dict):
        raise _refuse(folder, f"its {MANIFEST} cannot be read", _AGAIN)
    for name, digest in files.items():
        parts = PurePosixPath(name).parts
        if not isinstance(digest, str) or not parts or name.startswith("/") or ".." in parts:
            raise _refuse(folder, f"{name[:80]!r} leads out of the folder", _AGAIN)
    if not {PLAN, SAMPLES, f"{JOB}/{JOB_FILE}"} <= files.keys():
        raise _refuse(folder, "a file is missing", _AGAIN)
    return model, target_ns, cast("Mapping[str, str]", files)


def _digests(folder: Path, spec: JobSpec) -> dict[str, str]:
    """Of all files but the manifest, and what the job reads and writes while it runs."""
    job = folder / JOB
    states = f"{spec.progress}.states" if spec.progress else ""
    free = {job / x for x in (spec.inputs, spec.outputs, spec.progress, states) if x}
    saved = job / spec.progress
    saving = f".{saved.name}." if spec.progress else ""

    def is_free(path: Path) -> bool:
        return path in free or bool(
            saving and path.parent == (job / spec.progress).parent and path.name.startswith(saving)
        )

    return {
        name: _sha256(folder, name)
        for path in _files(folder, is_free)
        if (name := path.relative_to(folder).as_posix()) != MANIFEST
    }


def _files(folder: Path, is_free: Callable[[Path], bool] = lambda _: False, *, copied: bool = False) -> Iterator[Path]:
    """All of a folder, in order, but for what is free, and what Python keeps of a copied folder.

    Raises:
        JobError: a link, or something that is no file; or too many [W018].
    """
    most, count = MOST_COPIED if copied else MOST_FILES, 0
    for root, folders, names in os.walk(folder):
        kept = [n for n in sorted(folders) if not is_free(Path(root) / n) and not (copied and n == _CACHES)]
        folders[:] = kept
        for name in [*kept, *sorted(names)]:
            path = Path(root) / name
            if is_free(path):
                continue
            if path.is_symlink() or not (path.is_file() or name in kept):
                raise _bad(path.name, "is a link, or no file", "a bundle holds files alone: put a copy there")
            if name in kept:
                continue
            count += 1
            if count > most:
                raise _bad(folder.name, f"holds more than {most} files", "keep what the job does not need apart")
            yield path


def _sha256(folder: Path, name: str) -> str:
    """ArtifactError where it cannot be read."""
    found = hashlib.sha256()
    try:
        with (folder / name).open("rb") as file:
            while data := file.read(_CHUNK):
                found.update(data)
    except OSError as error:
        raise _refuse(folder, f"{name[:200]!r} cannot be read: {error.strerror}", _AGAIN) from None
    return found.hexdigest()


def _bad(where: str, problem: str, remedy: str) -> JobError:
    return JobError(where=where, key="folder", problem=problem, remedy=remedy)


def _refuse(folder: Path, problem: str, remedy: str) -> ArtifactError:
    return ArtifactError(where=folder.name, problem=problem, remedy=remedy)
