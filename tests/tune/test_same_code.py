"""Kernels whose text changed and whose machine code did not: not measured again, by their rows and by aliases."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tune.cuda_fake import Act, FakeCudaTransport, source, trial

from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import ArtifactError
from weft.ir.declined import Declined
from weft.kernels.codec import code_sha256, kernel_sha256
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Schedule
from weft.options import Options
from weft.tune import aliases
from weft.tune.cuda_site import CudaSite, describe_gpu
from weft.tune.keys import Untimed
from weft.tune.store import FILE_NAME, Database
from weft.tune.timing import TimingPolicy
from weft.tune.tuner import Progress, Tuner

OPTIONS = Options(device="cuda")
TEXT = """// words
extern "C" __global__ void pack(const float* w, float* p) { p[threadIdx.x] = w[threadIdx.x] * 2.0f; }
extern "C" __global__ void run(const float* x, const float* p, float* y, float* work, unsigned* state) {
  y[threadIdx.x] = x[threadIdx.x] * p[threadIdx.x] * 0.5f;
}
"""
WORDS = TEXT.replace("// words", "// other\n// words").replace("work", "scratch")
CODE = TEXT.replace("0.5f;", "0.25f * 2.0f + 0.0f * work[0];")
OLD = Path(__file__).parent / "data" / "tuning-schema-2.sql"


@dataclass(frozen=True)
class Fixed:
    text: str = '{"gpu":"a GPU"}'


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip("no NVRTC")
    return found


def kernel(text: str, number: int = 0, act: Act = Act.OK) -> CudaSource:
    return replace(source(act, number), text=text)


def measured(
    kernels: list[CudaSource],
    database: Database,
    nvrtc: Nvrtc,
    *,
    timed: bool = True,
    **changes: frozenset[Verdict],
) -> tuple[list[Measurement], Progress, int]:
    """The outcomes, the last progress, and how many workers were started that measured something."""
    work = replace(trial([]), kernels=[(k.schedule, k, None) for k in kernels], timed=timed)
    seen: list[Progress] = []
    transport = FakeCudaTransport()
    with Tuner(OPTIONS, GpuFacts(), database, compiler=nvrtc, transport=transport, **changes) as tuner:  # type: ignore[arg-type]
        found = list(tuner.measure([work], progress=seen.append))
    return found, seen[-1], sum(m["op"] == "trial" for m in transport.messages)


def test_other_words_are_known_by_their_code_and_then_by_their_text(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open(None)
    (first,), progress, trials = measured([kernel(TEXT)], database, nvrtc)
    assert first.verdict is Verdict.OK and len(first.code) == 64 and trials == 1
    assert (progress.kernels, progress.lookups, progress.again) == (1, 0, 0)
    renamed = kernel(WORDS, 7)
    (second,), progress, trials = measured([renamed], database, nvrtc)
    assert second == replace(
        first, schedule=renamed.schedule, kernel=kernel_sha256(renamed), compile_s=second.compile_s
    )
    assert trials == 0 and (progress.kernels, progress.lookups, progress.again) == (0, 1, 0)
    monkeypatch.setattr(CudaSite, "build", lambda *_: pytest.fail("nothing is compiled"))
    (third,), progress, trials = measured([renamed], database, nvrtc)
    assert third == second and trials == 0 and progress.lookups == 1
    assert database.stats().rows == 2


def test_other_code_is_measured_once_more_and_counted(nvrtc: Nvrtc) -> None:
    database = Database.open(None)
    (first,), _, _ = measured([kernel(TEXT)], database, nvrtc)
    (second,), progress, trials = measured([kernel(CODE)], database, nvrtc)
    assert trials == 1 and (progress.kernels, progress.lookups, progress.again) == (1, 0, 1)
    assert second.code not in ("", first.code)
    (_,), progress, trials = measured([kernel(CODE, 1)], database, nvrtc)
    assert trials == 0 and progress.again == 0
    more = replace(kernel(WORDS), workspace_bytes=1 << 20)  # the same code, given other memory
    (_,), progress, trials = measured([more], database, nvrtc)
    assert trials == 1 and progress.again == 1


def test_a_refusal_is_taken_over_unless_it_is_to_be_tried_again(nvrtc: Nvrtc) -> None:
    database = Database.open(None)
    (first,), _, _ = measured([kernel(TEXT, act=Act.WRONG)], database, nvrtc)
    assert first.verdict is Verdict.WRONG
    (second,), progress, trials = measured([kernel(WORDS, act=Act.WRONG)], database, nvrtc)
    assert second.verdict is Verdict.WRONG and trials == 0 and not progress.rejected
    again = kernel(WORDS + "// more", act=Act.WRONG)
    _, progress, trials = measured([again], database, nvrtc, retry=frozenset({Verdict.WRONG}))
    assert trials == 1 and progress.rejected == {Verdict.WRONG: 1}


def test_what_is_only_verified_takes_what_was_timed_and_not_the_reverse(nvrtc: Nvrtc) -> None:
    database = Database.open(None)
    (first,), _, _ = measured([kernel(TEXT)], database, nvrtc, timed=False)
    assert first.verdict is Verdict.OK and not first.samples_us
    (second,), _, trials = measured([kernel(WORDS)], database, nvrtc)
    assert trials == 1 and second.samples_us
    (third,), _, trials = measured([kernel(WORDS + "// more")], database, nvrtc, timed=False)
    assert trials == 0 and third.samples_us == second.samples_us
    (fourth,), _, trials = measured([kernel(WORDS + "// more")], database, nvrtc)
    assert trials == 0 and fourth == third  # kept where it was timed


def test_code_is_that_of_launches_in_their_order() -> None:
    one = kernel(TEXT)
    digests = {"run": "a" * 64, "pack": "b" * 64}
    wanted = code_sha256(one, digests)
    called = replace(
        kernel("", 3), launches=(replace(one.launches[0], entry="x"),), pack=(replace(one.pack[0], entry="y"),),
        flags=("--fmad=false",), max_registers=64, capability=90, exact_arch=True,
    )  # fmt: skip
    assert code_sha256(called, {"x": "a" * 64, "y": "b" * 64}) == wanted
    assert code_sha256(called, {"x": "b" * 64, "y": "a" * 64}) != wanted
    others = [
        replace(one, launches=one.launches * 2), replace(one, state_bytes=32), replace(one, transforms=True),
        replace(one, launches=(replace(one.launches[0], grid=(2, 1, 1)),)), replace(one, pack=()),
    ]  # fmt: skip
    assert wanted not in {code_sha256(x, digests) for x in others}
    with pytest.raises(KeyError):
        code_sha256(one, {"run": "a" * 64})


def test_a_database_from_before_codes_stays_readable(tmp_path: Path) -> None:
    raw = sqlite3.connect(tmp_path / FILE_NAME)
    raw.executescript(OLD.read_text())
    raw.close()
    (tmp_path / FILE_NAME).chmod(0o600)
    tmp_path.chmod(0o700)
    with Database.open(tmp_path) as database:
        assert database.verify() == (4, 0) and not database.problems
        told = Schedule("cuda", (("tile", 8),))
        found = database.lookup("problem 1", told, "1" * 64, Fixed())
        assert found is not None and found.samples_us == (12.0, 13.0) and found.code == ""
        assert database.of_problem("problem 1", Fixed()).of_code("") is None
        new = replace(found, kernel="2" * 64, code="c" * 64)
        database.commit(new, Fixed())
    with Database.open(tmp_path) as database:
        assert database.verify() == (5, 0)
        rows = database.of_problem("problem 1", Fixed())
        by_code = rows.of_code("c" * 64)
        assert by_code is not None and by_code.measurement == new
        assert rows.has_other(told, "3" * 64) and not rows.has_other(told, "2" * 64)
        assert not rows.has_other(Schedule("cuda"), "3" * 64)


def gpu(arch: str) -> Fixed:
    """An environment, with a compiler's identity as `weft.tune.cuda_site` writes it."""
    return Fixed(json.dumps({"gpu": "a GPU", "compiler": f"13.0\x000\0--ptxas-options=-v {arch}"}))


def test_a_row_under_an_earlier_text_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    database, place = Database.open(None), gpu("sm_90a")
    told = Schedule("cuda", (("tile", 8),))
    old = Measurement("p", told, Verdict.OK, (1.0, 2.0), kernel="1" * 64)
    for where in (place, gpu("sm_90"), Fixed()):
        database.commit(old, where)
    assert database.lookup("p", told, "2" * 64, place) is None
    table = {"sm_80": {"3" * 64: ("1" * 64,)}, "sm_90a": {"2" * 64: ("0" * 64, "1" * 64)}}
    monkeypatch.setattr(aliases, "_former", lambda: table)
    aliases._compiled_for.cache_clear()
    assert database.lookup("p", told, "2" * 64, place) == replace(old, kernel="2" * 64)
    assert database.lookup("p", Schedule("cuda"), "2" * 64, place) is None
    assert database.lookup("p", told, "3" * 64, place) is None  # the same on another architecture
    assert database.lookup("p", told, "2" * 64, gpu("sm_90")) is None
    assert database.lookup("p", told, "2" * 64, Fixed()) is None
    aliases._compiled_for.cache_clear()


@pytest.mark.parametrize(("name", "arch"), [("a100", "sm_80"), ("h200", "sm_90a")])
def test_an_environment_names_what_it_compiles_for(nvrtc: Nvrtc, name: str, arch: str) -> None:
    place = describe_gpu(profile(name), nvrtc, seed=0, policy=TimingPolicy(), allow_tf32=False)
    for text in (place.text, Untimed(place, finite=False).text):
        assert aliases._named(text) == {arch}
    without = describe_gpu(profile(name), None, seed=0, policy=TimingPolicy(), allow_tf32=False)
    assert not aliases._named(without.text)


def test_a_row_of_the_commit_before_is_found_by_the_table_in_the_package() -> None:
    table = aliases.from_json((Path(aliases.__file__).parent / aliases.FILE).read_text())
    assert set(table) == {"sm_80", "sm_90a"}
    told, database = Schedule("cuda", (("tile", 8),)), Database.open(None)
    for arch, rows in table.items():
        new, olds = next(iter(rows.items()))
        old = Measurement("p", told, Verdict.OK, (1.0, 2.0), kernel=olds[-1])
        database.commit(old, gpu(arch))
        assert database.lookup("p", told, new, gpu(arch)) == replace(old, kernel=new)


def test_the_table_in_the_package_is_one() -> None:
    text = (Path(aliases.__file__).parent / aliases.FILE).read_text()
    assert aliases.to_json(aliases.from_json(text)) == text and len(text) < 500_000
    assert aliases.former("0" * 64, gpu("sm_90a").text) == ()


NAMES = st.integers(0, 9).map(lambda k: f"{k}" * 64)
ARCH = "sm_90a"
Commit = dict[int, tuple[str, int]]


@st.composite
def histories(draw: st.DrawFn) -> list[Commit]:
    """Of each commit its kernels: by place the text's identity and the machine code."""
    code = draw(st.dictionaries(NAMES, st.integers(0, 3), min_size=10, max_size=10))
    kernels = st.dictionaries(st.integers(0, 3), NAMES.map(lambda n: (n, code.get(n, 0))))
    return draw(st.lists(kernels, min_size=1, max_size=5))


def after(table: aliases.Table, old: Commit, new: Commit) -> aliases.Table:
    """The table after a change, or after a part of it."""
    before, present = ({ARCH: {name for name, _ in kernels.values()}} for kernels in (old, new))
    pairs = [(old[k], new[k]) for k in sorted(old.keys() & new.keys()) if old[k][0] != new[k][0]]
    same, other = ({ARCH: {(a, b) for (a, x), (b, y) in pairs if (x == y) is way}} for way in (True, False))
    return aliases.joined(table, same, other, before, present)


@given(histories(), st.integers(0, 3), st.booleans())
def test_tables_lead_to_texts_with_the_same_code(history: list[Commit], cut: int, turned: bool) -> None:
    table: aliases.Table = {}
    parted: aliases.Table = {}
    code = {name: c for kernels in history for name, c in kernels.values()}
    for old, new in pairwise(history):
        table = after(table, old, new)
        parts = [[{k: v for k, v in x.items() if (k < cut) is way} for x in (old, new)] for way in (True, False)]
        for one, two in reversed(parts) if turned else parts:
            parted = after(parted, one, two)
        for found in (table, parted):
            rows = found.get(ARCH, {})
            assert all(code[a] == code[b] and a != b for b, olds in rows.items() for a in olds)
            assert all(old[k][0] in rows[new[k][0]] for k in old.keys() & new.keys()
                       if old[k][1] == new[k][1] and old[k][0] != new[k][0])  # fmt: skip
            assert aliases.from_json(aliases.to_json(found)) == found


def test_what_followed_is_followed_on() -> None:
    a, b, c, d = (x * 64 for x in "abcd")
    known = aliases.joined({}, {ARCH: [(a, b)]}, {}, {ARCH: [a]}, {ARCH: [b]})
    assert known == {ARCH: {b: (a,)}}
    assert aliases.joined(known, {ARCH: [(b, c)]}, {}, {ARCH: [b]}, {ARCH: [c]}) == {ARCH: {c: (b, a)}}
    both = {ARCH: [(b, c), (b, d)]}
    assert aliases.joined(known, both, {}, {ARCH: [b]}, {ARCH: [c, d]}) == {ARCH: {c: (b, a), d: (b, a)}}
    first = aliases.joined(known, {ARCH: [(b, c)]}, {}, {ARCH: [b]}, {ARCH: [c]})
    assert aliases.joined(first, {ARCH: [(b, d)]}, {}, {ARCH: [b]}, {ARCH: [d]})[ARCH] == {c: (b, a), d: (b, a)}
    assert aliases.joined(known, {"sm_80": [(b, c)]}, {}, {}, {}) == {ARCH: {b: (a,)}, "sm_80": {c: (b,)}}
    assert aliases.joined(known, {}, {}, {}, {}) == known  # a part that looks at other kernels


def test_what_is_told_both_ways_is_not_taken_over() -> None:
    a, b, c, d = (x * 64 for x in "abcd")
    known = {ARCH: {c: (b, a), d: (a,)}}
    assert aliases.joined(known, {}, {ARCH: [(b, c)]}, {}, {}) == {ARCH: {d: (a,)}}
    assert aliases.joined({}, {ARCH: [(a, b)]}, {ARCH: [(a, b)]}, {}, {}) == {}
    assert aliases.joined({}, {ARCH: [(a, b)]}, {"sm_80": [(a, b)]}, {}, {}) == {ARCH: {b: (a,)}}
    assert aliases.joined({}, {ARCH: [(a, b)]}, {ARCH: [(a, c)]}, {}, {}) == {ARCH: {b: (a,)}}
    assert aliases.joined({}, {}, {ARCH: [(a, b)]}, {ARCH: [a]}, {ARCH: [b]}) == {}


def test_of_many_earlier_texts_the_newest_are_kept() -> None:
    names = [f"{k:064x}" for k in range(aliases.MOST + 3)]
    table: aliases.Table = {}
    for old, new in pairwise(names):
        table = aliases.joined(table, {ARCH: [(old, new)]}, {}, {ARCH: [old]}, {ARCH: [new]})
    assert table == {ARCH: {names[-1]: tuple(names[-2 : -2 - aliases.MOST : -1])}}


BAD: tuple[object, ...] = (
    {"sm_80": {"x": ["1" * 64]}}, {"sm_80": {"1" * 64: ["1" * 64]}}, {"sm_80": {"1" * 64: [3]}}, {"sm_80": ["1" * 64]},
    {"sm_80": {"1" * 64: []}}, {"sm_80": {"1" * 64: ["2" * 64] * 2}}, {"cpu": {"1" * 64: ["2" * 64]}},
)  # fmt: skip


def told(archs: object) -> str:
    """A file with these."""
    return json.dumps({"format": 2, "archs": archs})


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format":1,"archs":{}}', '{"format":2}', '{"format":2,"archs":[]}', *map(told, BAD)],
)
def test_a_table_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="malformed table of earlier kernels"):
        aliases.from_json(text)
