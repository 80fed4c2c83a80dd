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

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import ArtifactError
from weft.ir.declined import Declined
from weft.kernels.codec import code_sha256, kernel_sha256
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Schedule
from weft.options import Options
from weft.tune import aliases, store
from weft.tune.cuda_site import CudaSite
from weft.tune.store import FILE_NAME, Database
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


def test_a_row_under_an_earlier_text_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database.open(None)
    told = Schedule("cuda", (("tile", 8),))
    old = Measurement("p", told, Verdict.OK, (1.0, 2.0), kernel="1" * 64)
    database.commit(old, Fixed())
    assert database.lookup("p", told, "2" * 64, Fixed()) is None
    monkeypatch.setattr(store, "former", {"2" * 64: ("0" * 64, "1" * 64)}.get)
    assert database.lookup("p", told, "2" * 64, Fixed()) == replace(old, kernel="2" * 64)
    assert database.lookup("p", Schedule("cuda"), "2" * 64, Fixed()) is None
    assert database.lookup("p", told, "2" * 64, Fixed("elsewhere")) is None


def test_the_table_in_the_package_is_one() -> None:
    text = (Path(aliases.__file__).parent / aliases.FILE).read_text()
    assert aliases.to_json(aliases.from_json(text)) == text and len(text) < 200_000
    assert aliases.former("0" * 64) == ()


NAMES = st.integers(0, 9).map(lambda k: f"{k}" * 64)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, tuple[str, int]]]:
    """Of each commit its kernels: by place the text's identity and the machine code."""
    code = draw(st.dictionaries(NAMES, st.integers(0, 3), min_size=10, max_size=10))
    kernels = st.dictionaries(st.integers(0, 3), NAMES.map(lambda n: (n, code.get(n, 0))))
    return draw(st.lists(kernels, min_size=1, max_size=5))  # type: ignore[arg-type]


@given(histories())
def test_tables_lead_to_texts_with_the_same_code_that_are_there(history: list[dict[str, tuple[str, int]]]) -> None:
    table: dict[str, str] = {}
    code = {name: c for kernels in history for name, c in kernels.values()}
    for old, new in pairwise(history):
        before, present = ({name for name, _ in kernels.values()} for kernels in (old, new))
        pairs = {old[k][0]: new[k][0] for k in old.keys() & new.keys() if old[k][1] == new[k][1]}
        changed = {a: b for a, b in pairs.items() if a not in present}
        table = aliases.joined(table, changed, before, present)
        assert all(code[a] == code[b] and b in present and a not in present for a, b in table.items())
        assert changed.items() <= table.items()
        assert aliases.from_json(aliases.to_json(table)) == table


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format":2,"kernels":{}}', '{"format":1}', '{"format":1,"kernels":{"x":["y"]}}',
     json.dumps({"format": 1, "kernels": {"1" * 64: ["1" * 64]}}), '{"format":1,"kernels":{"' + "1" * 64 + '":[3]}}'],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="malformed table of earlier kernels"):
        aliases.from_json(text)
