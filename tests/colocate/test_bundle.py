"""Co-location bundles: what is read is what was written, by this user, and nothing outside of the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.colocate.recorded import samples

from weft.colocate import bundle as b
from weft.colocate.job import JobError
from weft.errors import ArtifactError

JOB = 'name = "work"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\nprogress = "p.json"\n'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "0.npz").write_bytes(b"0")
    (folder / "n.onnx").write_bytes(b"a network")
    (folder / "mine.toml").write_text(JOB)
    return folder / "mine.toml"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(folder: Path, job: Path, cache: Path | None, **changes: object) -> str:
    save = {b.PLAN: lambda path: path.write_bytes(b"plan"), b.JOB_PLAN: lambda path: path.write_bytes(b"job")}
    given: dict[str, object] = {"model": "net", "target_ns": 500_000, "samples": samples(), "save": save}
    return b.write_bundle(folder, job=job, trust_dir=cache, **{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path, job: Path, cache: Path) -> Path:
    write(tmp_path / "net.colocate", job, cache)
    return tmp_path / "net.colocate"


def test_there_and_back(made: Path, cache: Path) -> None:
    assert b.is_bundle(made)
    found = b.read_bundle(made, cache_dir=cache)
    assert (found.model, found.target_ns, found.job.name) == ("net", 500_000, "work")
    assert found.samples == samples() and found.plan.read_bytes() == b"plan"
    assert found.budgeted is None and found.job_plan.read_bytes() == b"job"
    assert found.job_folder == made / "job" and (made / "job" / "job.toml").read_text() == JOB
    assert (made / "job" / "in" / "0.npz").read_bytes() == b"0"
    assert not [x for x in made.parent.iterdir() if x.name.startswith(".")], "nothing is left beside it"


def test_one_with_a_plan_under_a_budget(tmp_path: Path, job: Path, cache: Path) -> None:
    save = {name: lambda path: path.write_bytes(b"x") for name in (b.PLAN, b.BUDGETED)}
    write(tmp_path / "two", job, cache, save=save)
    found = b.read_bundle(tmp_path / "two", cache_dir=cache)
    assert found.budgeted == tmp_path / "two" / b.BUDGETED


def test_what_the_job_reads_and_writes_may_change(made: Path, cache: Path) -> None:
    (made / "job" / "p.json.states").mkdir()
    (made / "job" / "p.json.states" / "3.state").write_bytes(b"s")
    (made / "job" / ".p.json.123").write_text("half")
    (made / "job" / "in" / "1.npz").write_bytes(b"1")
    (made / "job" / "out").mkdir()
    (made / "job" / "out" / "0.npz").write_bytes(b"r")
    (made / "job" / "p.json").write_text("{}")
    b.read_bundle(made, cache_dir=cache)


def test_somebody_else_s_is_code_and_wants_its_digest(tmp_path: Path, job: Path, cache: Path) -> None:
    digest = write(tmp_path / "theirs", job, None)
    with pytest.raises(ArtifactError, match="holds a job, which is code, and is not trusted") as found:
        b.read_bundle(tmp_path / "theirs", cache_dir=cache)
    assert digest in str(found.value)
    assert b.read_bundle(tmp_path / "theirs", trust=[digest]).digest == digest
    with pytest.raises(ArtifactError, match="not trusted"):
        b.read_bundle(tmp_path / "theirs", trust=["0" * 64], cache_dir=cache)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "plan": (lambda x: (x / b.PLAN).write_bytes(b"other"), "'plan.weft' is not what was written"),
    "job": (lambda x: (x / "job" / "n.onnx").write_bytes(b"other"), "'job/n.onnx' is not what was written"),
    "samples": (lambda x: (x / b.SAMPLES).write_text("{}"), "'samples.json' is not what was written"),
    "gone": (lambda x: (x / b.JOB_PLAN).unlink(), "'job.weft' is gone"),
    "added": (lambda x: (x / "job" / "more.py").write_text(""), "'job/more.py' was added"),
    "manifest": (lambda x: (x / b.MANIFEST).write_bytes((x / b.MANIFEST).read_bytes() + b" "), "not trusted"),
    "no manifest": (lambda x: (x / b.MANIFEST).unlink(), "is no co-location bundle"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_was_changed_is_refused_by_name(how: str, made: Path, cache: Path) -> None:
    change, said = CHANGES[how]
    change(made)
    with pytest.raises(ArtifactError, match=said):
        b.read_bundle(made, cache_dir=cache)


MANIFESTS: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "format": (lambda d: d.update(format=2), "is of format 2, this version reads 1"),
    "target": (lambda d: d.update(target_ns=0), "cannot be read"),
    "no model": (lambda d: d.pop("model"), "cannot be read"),
    "files": (lambda d: d.update(files=["x"]), "cannot be read"),
    "outside": (lambda d: d["files"].update({"../x": "0"}), "leads out of the folder"),  # type: ignore[attr-defined]
    "absolute": (lambda d: d["files"].update({"/x": "0"}), "leads out of the folder"),  # type: ignore[attr-defined]
    "missing": (lambda d: d["files"].pop("plan.weft"), "a file is missing"),  # type: ignore[attr-defined]
    "model": (lambda d: d.update(model="nobody"), "its samples are of another model or job"),
}


@pytest.mark.parametrize("how", MANIFESTS)
def test_a_manifest_that_cannot_be(how: str, made: Path) -> None:
    change, said = MANIFESTS[how]
    data = json.loads((made / b.MANIFEST).read_text())
    change(data)
    (made / b.MANIFEST).write_text(json.dumps(data))
    digest = hashlib.sha256((made / b.MANIFEST).read_bytes()).hexdigest()
    with pytest.raises(ArtifactError, match=said):
        b.read_bundle(made, trust=[digest])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', "1" * 10_000])
def test_a_manifest_that_is_none(text: str, made: Path) -> None:
    (made / b.MANIFEST).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(ArtifactError, match="cannot be read"):
        b.read_bundle(made, trust=[digest])


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, job: Path, cache: Path, made: Path) -> None:
    with pytest.raises(ArtifactError, match="there is something of this name"):
        write(made, job, cache)
    with pytest.raises(ArtifactError, match="cannot be written"):
        write(tmp_path / "no folder" / "x", job, cache)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="No space left"):
        write(tmp_path / "full", job, cache, save={b.PLAN: full})
    assert {x.name for x in tmp_path.iterdir()} == {"job", "cache", "net.colocate"}


def test_of_the_plan_alone_the_job_is_not_looked_at(made: Path, cache: Path) -> None:
    (made / "job" / "more.py").write_text("")
    plan, digest = b.read_plan(made, cache_dir=cache)
    assert plan == made / b.PLAN and digest == hashlib.sha256((made / b.MANIFEST).read_bytes()).hexdigest()
    (made / b.PLAN).write_bytes(b"other")
    with pytest.raises(ArtifactError, match=r"'plan.weft' is not what was written"):
        b.read_plan(made, cache_dir=cache)
    with pytest.raises(ArtifactError, match="not trusted"):
        b.read_plan(made)


def test_what_python_keeps_is_not_copied_and_not_taken(tmp_path: Path, job: Path, cache: Path) -> None:
    (job.parent / "__pycache__").mkdir()
    (job.parent / "__pycache__" / "m.cpython-311.pyc").write_bytes(b"code")
    write(tmp_path / "x", job, cache)
    assert not (tmp_path / "x" / "job" / "__pycache__").exists()
    b.read_bundle(tmp_path / "x", cache_dir=cache)
    (tmp_path / "x" / "job" / "__pycache__").mkdir()
    (tmp_path / "x" / "job" / "__pycache__" / "m.cpython-311.pyc").write_bytes(b"other code")
    with pytest.raises(ArtifactError, match=r"'job/__pycache__/m.cpython-311.pyc' was added"):
        b.read_bundle(tmp_path / "x", cache_dir=cache)


def test_inputs_and_results_are_not_counted(tmp_path: Path, job: Path, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(b, "MOST_FILES", 6)
    write(tmp_path / "x", job, cache)
    (tmp_path / "x" / "job" / "out").mkdir()
    for k in range(20):
        (tmp_path / "x" / "job" / "in" / f"{k}.npz").touch()
        (tmp_path / "x" / "job" / "out" / f"{k}.npz").touch()
    b.read_bundle(tmp_path / "x", cache_dir=cache)


def test_a_bundle_does_not_hold_itself(job: Path, cache: Path) -> None:
    with pytest.raises(ArtifactError, match="lies in the job's folder"):
        write(job.parent / "x", job, cache)
    assert not (job.parent / "x").exists()


def test_links_are_not_followed(tmp_path: Path, job: Path, cache: Path, made: Path) -> None:
    (made / "job" / "link").symlink_to("/etc")
    with pytest.raises(JobError, match="is a link"):
        b.read_bundle(made, cache_dir=cache)
    (job.parent / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(JobError, match="is a link"):
        write(tmp_path / "linked", job, cache)


def test_other_folders_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert not any(b.is_bundle(tmp_path / x) for x in ("empty", "file", "nothing"))
