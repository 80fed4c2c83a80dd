"""job.toml: what is taken, and that nothing in it is believed; progress that is saved and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate import job as j
from weft.errors import ArtifactError
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.scheduling import JobProgress, JobSpec

MRIQ = 'name = "mriq"\nkind = "kernels"\nstages = ["mriq/kernel.toml", "b.toml"]\n'


def test_a_job_of_kernels() -> None:
    found = j.parse_job(MRIQ + 'passes = 10\nmemory = "4GiB"\nprefers = "compute"\nprogress = "p.json"\n')
    wanted = JobSpec(
        "mriq", "kernels", ("mriq/kernel.toml", "b.toml"), passes=10, memory_bytes=4 << 30, prefers="compute",
        progress="p.json",
    )  # fmt: skip
    assert found == wanted
    assert from_json(JobSpec, json.loads(json.dumps(to_json(found)))) == found


def test_jobs_of_networks_and_processes() -> None:
    network = j.parse_job('name="n"\nkind="network"\nmodel="a.onnx"\ninputs="images"\n')
    assert (network.model, network.inputs, network.outputs, network.passes) == ("a.onnx", "images", "", 0)
    process = j.parse_job('name="p"\nkind="process"\nfile="t.py"\nsegment_us=150\nsave_s=5\n')
    assert (process.file, process.function, process.segment_us) == ("t.py", "unit", 150.0)
    assert (process.save_s, process.hang_s) == (5.0, 30.0)
    assert j.parse_job('name="p"\nkind="process"\nfile="t.py"\nfunction="step"\n').function == "step"
    assert (network.file, network.function, network.save_s, network.hang_s) == ("", "", 0.0, 0.0)


@pytest.mark.parametrize(("text", "said"), [
    ("name = ", "no TOML"), ("[" * 5000, "no TOML"), ('kind="kernels"\nstages=["a"]', "name: is missing"),
    ('name="x"', "kind: is missing"), ('name="x"\nkind="magic"', "kind: 'magic' is none of"),
    ('name="x"\nkind=3', "kind: '3' is none of"), ('name="../x"\nkind="process"\nfile="a"', "is no name"),
    ('name=""\nkind="process"\nfile="a"', "name: is no text"), (MRIQ + "color = 1", "color: no such key"),
    (MRIQ + 'model = "a"', "model: is of a job of kind 'network'"), ('name="x"\nkind="kernels"', "stages: is missing"),
    ('name="x"\nkind="kernels"\nstages=[]', "no list with an element"),
    ('name="x"\nkind="kernels"\nstages="a"', "no list with an element"),
    ('name="x"\nkind="kernels"\nstages=[1]', "stages: is no text"),
    ('name="x"\nkind="kernels"\nstages=["/etc/passwd"]', "leads out"),
    ('name="x"\nkind="kernels"\nstages=["a/../../b"]', "leads out"),
    ('name="x"\nkind="kernels"\nstages=["a\\\\b"]', "leads out"),
    ('name="x"\nkind="kernels"\nstages=["."]', "leads out"),
    ('name="x"\nkind="network"\nmodel="m"', "inputs: is missing"), ('name="x"\nkind="process"', "file: is missing"),
    ('name="x"\nkind="process"\nfile="a\\u0007"', "not printable"),
    ('name="x"\nkind="process"\nfile="../a.py"', "leads out"), ('name="x"\nkind="process"\nfile=["a"]', "is no text"),
    ('name="x"\nkind="process"\nfile="a"\nfunction="a.b"', "no name of a function"),
    ('name="x"\nkind="process"\nfile="a"\nhang_s=0', "is 0"),
    ('name="x"\nkind="process"\ncommand=["a"]', "command: no such key"),
    (MRIQ + 'function = "unit"', "function: is of a job of kind 'process'"),
    (MRIQ + "passes = 0", "no number of passes"), (MRIQ + "passes = true", "no number of passes"),
    (MRIQ + "passes = 1.5", "no number of passes"), (MRIQ + "passes = -1", "no number of passes"),
    (MRIQ + 'memory = "lots"', "is no size"), (MRIQ + 'memory = "0"', "is no size"),
    (MRIQ + "memory = 5", "is no text"),
    (MRIQ + 'memory = "9999999GiB"', "is no size"), (MRIQ + 'prefers = "all"', "prefers: 'all' is none of"),
    ('name="x"\nkind="process"\nfile="a"\nsegment_us="1"', "is no number"),
    ('name="x"\nkind="process"\nfile="a"\nsegment_us=0', "is 0"),
    ('name="x"\nkind="process"\nfile="a"\nsegment_us=nan', "is nan"),
    ('name="x"\nkind="process"\nfile="a"\nsegment_us=true', "is no number"),
])  # fmt: skip
def test_what_cannot_be_taken_is_named(text: str, said: str) -> None:
    with pytest.raises(j.JobError) as refused:
        j.parse_job(text, "x.toml")
    assert said in str(refused.value) and str(refused.value).startswith("x.toml: ") and "[W018]" in str(refused.value)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(j.JobError, match="257 elements"):
        j.parse_job(f'name="x"\nkind="kernels"\nstages={json.dumps(["a"] * 257)}')


VALUES = st.one_of(st.text(max_size=8), st.integers(), st.lists(st.text(max_size=4), max_size=3))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["name", "kind", "stages", "passes", "memory", "file", "x"]), VALUES))
def test_anything_is_taken_or_refused_with_a_code(raw: dict[str, object]) -> None:
    text = "".join(f"{k} = {json.dumps(v)}\n" for k, v in raw.items())
    try:
        found = j.parse_job(text)
    except j.JobError:
        return
    assert found.name == raw["name"] and found.kind == raw["kind"]


def test_files_are_looked_for_beside_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('name="x"\nkind="kernels"\nstages=["k.toml"]\n')
    with pytest.raises(j.JobError, match="no such file: 'k"):
        j.read_job(path)
    (tmp_path / "k.toml").write_text("")
    assert j.read_job(path).stages == ("k.toml",)
    (tmp_path / "k.toml").unlink()
    (tmp_path / "k.toml").symlink_to("/etc/hostname" if Path("/etc/hostname").exists() else "/etc/passwd")
    with pytest.raises(j.JobError, match="leads out of the folder"):
        j.read_job(path)
    path.write_text('name="x"\nkind="network"\nmodel="m.onnx"\ninputs="images"\n')
    (tmp_path / "m.onnx").write_text("")
    with pytest.raises(j.JobError, match="no such folder: 'images'"):
        j.read_job(path)
    (tmp_path / "images").mkdir()
    assert j.read_job(path).inputs == "images"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(j.JobError, match="cannot be read"):
        j.read_job(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff")
    with pytest.raises(j.JobError, match="no text in UTF-8"):
        j.read_job(tmp_path / "b.toml")
    monkeypatch.setattr(j, "MOST_BYTES", 3)
    (tmp_path / "l.toml").write_text("name")
    with pytest.raises(j.JobError, match="more than"):
        j.read_job(tmp_path / "l.toml")


def test_progress_is_resumed_exactly(tmp_path: Path) -> None:
    spec, path = j.parse_job(MRIQ), tmp_path / "p.json"
    begin = j.resume(path, spec)
    assert (begin.passes, begin.stage, begin.blocks) == (0, 0, 0)
    j.save_progress(path, replace(begin, passes=3, stage=1, blocks=17))
    assert j.resume(path, spec) == replace(begin, passes=3, stage=1, blocks=17)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_progress_of_another_job_is_refused(tmp_path: Path) -> None:
    spec, path = j.parse_job(MRIQ), tmp_path / "p.json"
    j.save_progress(path, j.resume(path, spec))
    with pytest.raises(j.JobError, match="of another job"):
        j.resume(path, replace(spec, passes=2))
    again = j.resume(path, replace(spec, memory_bytes=5, progress="elsewhere"))  # these change nothing that is done
    assert again == j.resume(path, spec)
    j.save_progress(path, JobProgress(j.digest(spec), 0, 2, 0))
    with pytest.raises(j.JobError, match="stage 2 of 2"):
        j.resume(path, spec)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "progress": 3}', "[" * 10_000,
    '{"format": 1, "progress": {"job": "x", "passes": -1, "stage": 0, "blocks": 0}}',
    '{"format": 1, "progress": {"job": "x", "passes": "1", "stage": 0, "blocks": 0}}'])  # fmt: skip
def test_progress_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(j.JobError, match="what was saved cannot be read"):
        j.resume(tmp_path / "p", j.parse_job(MRIQ))


def test_progress_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="progress cannot be written"):
        j.save_progress(tmp_path / "no" / "p", JobProgress("x", 0, 0, 0))
