"""Best-effort kernels: manifests, compiled for both architectures, small sizes on the host against the references."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.best_effort import jobs
from benchmarks.best_effort.jobs import Stage, difference, expected, load, sampled
from benchmarks.best_effort.references import OPERATIONS
from tests.benchmarks.on_host import Memory, launch, run
from tests.slow import few

from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.foreign import read as foreign
from weft.generate.cuda.foreign.manifest import ManifestError
from weft.ir.declined import Declined

ALL = jobs.names()
STAGES = [pytest.param(s, id=f"{n}-{s.name}") for n in ALL for s in load(n).stages]


def test_every_job_has_a_reference() -> None:
    assert set(ALL) == set(OPERATIONS)
    for name, operation in OPERATIONS.items():
        assert {*operation.axes, *operation.whole} <= load(name).written, "a result is something that a stage writes"


@pytest.mark.parametrize("arch", few(["sm_90a", "sm_80"], 1))
@pytest.mark.parametrize("stage", STAGES)
def test_it_compiles_without_spills(stage: Stage, arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    made = nvrtc.compile(stage.text, arch=arch, cache_dir=tmp_path)
    used = made.of(stage.manifest.entry)
    assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0)
    assert made.warnings == ()
    threads = stage.manifest.threads
    assert 64 <= threads <= 512 and threads % 32 == 0
    assert used.registers * threads <= 65536 and used.shared_bytes + stage.manifest.dynamic_shared_bytes <= 48 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_it_becomes_a_role(stage: Stage) -> None:
    """Unedited, and with barriers as they are: no thread of ours leaves before one."""
    found = foreign.read(stage.manifest)
    assert not isinstance(found, Declined), found.reason
    assert found.form == 0 and found.role.grid == stage.manifest.grid


@pytest.mark.parametrize("name", few(ALL, 5))
def test_it_agrees_with_its_reference_on_the_host(name: str) -> None:
    job, operation = load(name, small=True), OPERATIONS[name]
    before = job.buffers()
    after = run(job, before=before)
    counts = {before[n].shape[axis] for n, axis in operation.axes.items()}
    rows = np.arange(min(counts))
    wanted = expected(job, operation, rows, before)
    assert set(wanted) == {*operation.axes, *operation.whole}
    for result, want in wanted.items():
        axis = operation.axes.get(result)
        got = after[result] if axis is None else np.take(after[result], rows, axis)
        assert not (found := difference(got, want, job.rtol)), f"{result}: {found}"
        assert axis is None or len(np.unique(want)) > 1, "the case is not trivial"


@pytest.mark.parametrize("name", few(ALL, 5))
def test_neither_the_order_of_blocks_nor_that_of_threads_changes_a_bit(name: str) -> None:
    job = load(name, small=True)
    first, other = run(job), run(job, seed=7, backwards=True)
    assert all(s.manifest.exact for s in job.stages)
    for buffer in job.written:
        assert (first[buffer].view(np.uint8) == other[buffer].view(np.uint8)).all(), buffer


MOST_BYTES = 300 << 20
"""Of a job that is made at its full size here."""


def _bytes(name: str) -> int:
    return sum({p.buffer: data.nbytes for s in load(name).stages for p, data in s.pointers}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ALL if _bytes(n) < MOST_BYTES and len(load(n).stages) == 1])
def test_some_blocks_of_the_full_size_are_right(name: str) -> None:
    """The first, the last and one between them: every index is of the size that the GPU sees."""
    job, operation = load(name), OPERATIONS[name]
    (stage,) = job.stages
    before, blocks = job.buffers(), math.prod(stage.manifest.grid)
    memory = Memory(before)
    launch(stage, memory, sorted({0, blocks // 2 + 1, blocks - 1}))
    for result, axis in operation.axes.items():
        got = memory.read(result)
        written = (got.view(np.uint8).reshape(*got.shape, -1) != jobs.POISON).any(axis=-1)
        others = tuple(i for i in range(got.ndim) if i != axis)
        rows = np.flatnonzero(written.any(axis=others))
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, 9).astype(int))]
        assert rows[0] == 0 and rows[-1] == got.shape[axis] - 1
        want = expected(job, operation, rows, before)[result]
        there = np.take(written, rows, axis)
        mixed = np.where(there, np.take(got, rows, axis), want)  # what these blocks do not compute is not asked
        assert there.sum() >= 9 and not (found := difference(mixed, want, job.rtol)), found


BARRIER = "__syncthreads();"
MEETINGS = [(n, k) for n in ALL for k in range(load(n).stages[0].manifest.source.read_text().count(BARRIER))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), MEETINGS)
def test_no_barrier_can_be_left_out(name: str, number: int) -> None:
    """Some order of threads shows each: what the two tests above run is what needs them."""
    job = load(name, small=True)

    def without(text: str) -> str:
        parts = text.split(BARRIER)
        return BARRIER.join(parts[: number + 1]) + BARRIER.join(["", *parts[number + 1 :]]).removeprefix(BARRIER)

    assert without(job.stages[0].text).count(BARRIER) == job.stages[0].text.count(BARRIER) - 1
    before = job.buffers()
    sound = run(job, before=before)
    for backwards in (False, True):
        broken = run(job, before=before, backwards=backwards, changed=without)
        if any((sound[b].view(np.uint8) != broken[b].view(np.uint8)).any() for b in job.written):
            return
    pytest.fail("the threads never notice")


@pytest.mark.parametrize("name", ALL)
def test_some_rows_of_a_reference_are_those_of_the_whole(name: str) -> None:
    job, operation = load(name, small=True), OPERATIONS[name]
    before = job.buffers()
    count = min(before[n].shape[axis] for n, axis in operation.axes.items())
    some = np.unique([0, count // 3, count // 2, count - 1])
    whole, part = expected(job, operation, np.arange(count), before), expected(job, operation, some, before)
    for result, axis in operation.axes.items():
        np.testing.assert_allclose(part[result], np.take(whole[result], some, axis), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_full_sizes_are_whole(name: str) -> None:
    """Both sizes have the same stages and parameters, and the full one fits a GPU many times."""
    for stage, small in zip(load(name).stages, load(name, small=True).stages, strict=True):
        told = [[(p.name, p.type, p.kind, p.buffer) for p in s.manifest.parameters] for s in (stage, small)]
        assert told[0] == told[1]
        sizes = [sum(data.nbytes for _, data in s.pointers) for s in (stage, small)]
        assert sizes[1] < min(sizes[0], 1 << 20) and sizes[0] < 4 << 30
        assert stage.about["operation"] and stage.about["work"] and stage.about["limited_by"]


def test_times_of_jobs_are_meant_to_be_between_a_fifth_of_a_millisecond_and_two() -> None:
    for name in ALL:
        assert 180 <= max(float(s.about["estimate_us"]) for s in load(name).stages) <= 2000, name


def test_a_sample_has_both_ends_and_no_row_twice() -> None:
    x = np.zeros((1000, 3), np.float32)
    rows = sampled(jobs.Operation(lambda v, r: {}, {"x": 0}, sample=10), {"x": x})
    assert len(rows) == 10 and rows[0] == 0 and rows[-1] == 999 and (np.diff(rows) > 0).all()
    assert (sampled(jobs.Operation(lambda v, r: {}, {"x": 1}, sample=10), {"x": x}) == [0, 1, 2]).all()


def test_differences_are_found() -> None:
    want = np.array([1.0, -2.0, 0.0])
    assert difference(want.astype(np.float32), want, 1e-6) == ""
    assert difference(want + np.array([0, 0, 1e-4]), want, 1e-5).startswith("1 of 3 differ, first at (2,)")
    assert "1 of 3" in difference(np.array([1.0, np.nan, 0.0]), want, 1.0)
    assert difference(np.array([1, 2]), np.array([1, 3]), 0) and not difference(np.array([1, 2]), np.array([1, 2]), 0)
    assert difference(np.zeros(2), np.zeros(3), 1e-3) == "shape (2,), expected (3,)"


MANIFEST = """
source = "k.cu"
entry = "k"
grid = [1, 1, 1]
block = [64, 1, 1]
stage = {stage}
[[parameters]]
name = "x"
type = "{type}"
kind = "input"
shape = [3, 2]
init = "{init}"
seed = 5
"""


def job_of(folder: Path, *texts: str) -> jobs.Job:
    (folder / "k.cu").write_text("")
    for k, text in enumerate(texts):
        (folder / f"{k}.toml").write_text(text)
    return jobs.read(folder)


def manifest(stage: int = 0, type: str = "float", init: str = "normal") -> str:
    text = MANIFEST.format(stage=stage, type=type, init=init)
    return text if init in ("normal", "uniform") else text.replace("seed = 5\n", "")


def test_stages_are_numbered_and_agree_on_buffers(tmp_path: Path) -> None:
    assert len(job_of(tmp_path, manifest(1), manifest(0)).stages) == 2
    with pytest.raises(ValueError, match=r"stages \[0, 2\]; they are numbered from 0"):
        job_of(tmp_path, manifest(2), manifest(0))
    with pytest.raises(ValueError, match=r"buffer x is float2 \[3, 2\]; an earlier stage has float \[3, 2\]"):
        job_of(tmp_path, manifest(0), manifest(1, "float2"))
    with pytest.raises(ManifestError, match=r"1\.toml.*init"):
        job_of(tmp_path, manifest(0), manifest(1, init="ones"))


def test_what_is_drawn_hangs_on_the_manifest_alone(tmp_path: Path) -> None:
    def made(type: str, init: str, more: str = "") -> jobs.Array:
        return job_of(tmp_path, manifest(0, type, init) + more).buffers()["x"]

    chance = np.random.default_rng(5)
    assert (made("float", "normal") == chance.standard_normal((3, 2), np.float32)).all()
    assert (made("float4", "uniform", "low = 1.0\nhigh = 3.0") == np.random.default_rng(5).random((3, 2, 4), np.float32)
            * np.float32(2) + np.float32(1)).all()  # fmt: skip
    bytes_ = made("unsigned char", "uniform", "low = 3\nhigh = 7")
    assert bytes_.dtype == np.uint8 and (bytes_ == np.random.default_rng(5).integers(3, 7, (3, 2), np.uint8)).all()
    assert made("unsigned", "uniform").dtype == np.uint32 and made("unsigned long long", "uniform").max() > 1 << 40
    assert made("int", "arange").tolist() == [[0, 1], [2, 3], [4, 5]] and not made("uint4", "zeros").any()
    assert made("uint4", "zeros").shape == (3, 2, 4)
    (tmp_path / "x.bin").write_bytes(np.arange(6, dtype="<f4").tobytes())
    assert made("float", "file", 'file = "x.bin"').tolist() == [[0, 1], [2, 3], [4, 5]]
    output = job_of(tmp_path, manifest().replace('"input"', '"output"').split("init")[0]).buffers()["x"]
    assert (output.view(np.uint8) == jobs.POISON).all(), "nobody fills an output"


def test_scalars_are_passed_by_their_bits() -> None:
    (stage,) = load("sgemm").stages
    bits = {p.name: jobs.word(p) for p in stage.manifest.parameters if p.kind == "scalar"}
    assert bits == {"n": 8192, "k": 128, "alpha": 0x3F400000, "beta": 0x3F000000}
    wide = replace(stage.manifest.parameters[-1], type="float4", values=(1.0, 2.0, 3.0, 4.0))
    with pytest.raises(ValueError, match="beta: float4 has more than the eight bytes"):
        jobs.word(wide)


def test_an_unknown_job_is_named() -> None:
    with pytest.raises(ValueError, match="there is no job 'nope'"):
        load("nope")
