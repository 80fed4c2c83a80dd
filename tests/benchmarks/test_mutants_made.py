"""Operators of mutants, and what means the same."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.generate.cuda.products import convolution, product
from tests.slow import few

from benchmarks import mutants
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.facts import CpuFacts
from weft.generate.cpp import CppGenerator
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, KernelSource, Launch, Pointer, Schedule
from weft.options import Options


def changed(operator: str, line: str) -> list[str]:
    return [line[: c.start] + c.new + line[c.end :] for c in mutants.OPERATORS[operator](line)]


@pytest.mark.parametrize(
    ("operator", "line", "found"),
    [
        ("off-by-one bound", "for (long i = 0; i < 7; i += 1) {", ["for (long i = 0; i < 6; i += 1) {"]),
        ("off-by-one bound", "r1 = (b + 1) * 3 < 5 ? (b + 1) * 3 : 5;", ["r1 = (b + 1) * 3 < 4 ? (b + 1) * 3 : 4;"]),
        ("wrong axis", "w_ld(in0 + i5 * 756 + i6 * 4);", ["w_ld(in0 + i5 * 4 + i6 * 756);"]),
        ("wrong axis", "w_ld(in0 + i5 * 0 + i6 * 4);", []),
        ("dropped term", "rv6 = w_plus(rv6, e13);", ["rv6 = rv6;", "rv6 = e13;"]),
        ("dropped term", "w_ld(v2 + i5 * 3 + i6);", ["w_ld(v2 + i6);"]),
        ("swapped operand", "const w_f32 e3 = (e1 - e2);", ["const w_f32 e3 = (e2 - e1);"]),
        ("lost tail", "if (x < 130) {", ["if (x < 128) {"]),
        ("lost tail", "if (x < 128) {", []),
        ("wrong constant", "const w_f32 e3 = (e2 + 0.5f);", ["const w_f32 e3 = (e2 + 0.625f);"]),
        ("wrong dtype", "const w_f32v e3 = (e2 * e1);", ["const w_f32v e3 = m_narrow((e2 * e1));"]),
        ("missing barrier", "#pragma omp barrier", [";"]),
        ("missing wait", "role.pdl_wait(); role.pdl_trigger();", ["; role.pdl_trigger();"]),
        ("missing barrier", "role.sync();", [";"]),
        ("missing wait", "w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1);", []),
    ],
)  # fmt: skip
def test_an_operator_changes_what_it_names(operator: str, line: str, found: list[str]) -> None:
    made = changed(operator, line)
    assert made[: len(found)] == found and (found or not made)


def test_mutants_of_a_number_are_always_the_same_and_of_every_operator() -> None:
    kernels = mutants.origins("cpu", CpuFacts(simd_bytes=64, threads=2), 0, most=1)
    drawn, again = (mutants.draw(kernels, 40, 0, "") for _ in range(2))
    assert [m.source for m in drawn] == [m.source for m in again]
    assert {m.operator for m in drawn} == set(mutants.OPERATORS) - {"missing wait"}
    for m in drawn:
        before, after = m.origin.source.text.split("\n"), m.source.text.split("\n")
        assert before[m.number].strip() == m.before and m.after in [x.strip() for x in after]
        assert m.before != m.after and m.before not in mutants.header_lines()


def test_a_difference_that_is_only_squared_means_the_same() -> None:
    kernels = mutants.origins("cpu", CpuFacts(simd_bytes=64, threads=2), 0, most=1)
    swapped = mutants.draw(kernels, 30, 0, "swapped operand")
    reasons = {m.after: mutants.known_equivalent(m) for m in swapped}
    assert "the difference is only squared" in reasons.values()
    assert "" in reasons.values()


def lost(origin: mutants.Origin, pattern: str, which: int) -> mutants.Mutant:
    """The kernel without one of its waits."""
    lines = origin.source.text.split("\n")
    at = [k for k, x in enumerate(lines) if x not in mutants.header_lines() and re.search(pattern, x)][which]
    found = re.search(pattern, lines[at])
    assert found is not None
    operator = "missing barrier" if "sync" in found[0] else "missing wait"
    return mutants.mutant(origin, operator, at, mutants.Change(*found.span(), ";"), 0)


@pytest.mark.parametrize(
    ("pattern", "which", "means_the_same"),
    few(
        [
            (r"w_arrived<0>\(\);", -1, True),  # every copy was waited for in the loop
            (r"w_arrived<[1-9]>\(\);", 0, False),
            (r"role\.sync\(\);", -1, False),  # the sums of other warps
        ],
        2,
        unpack=True,
    ),
)
def test_a_wait_is_needless_only_if_nobody_is_missed_where_everybody_is_late(
    pattern: str, which: int, means_the_same: bool
) -> None:
    case = product((50, 136), (136, 72))
    schedules = CudaGenerator().schedules(case, profile("h200"))
    assert not isinstance(schedules, Declined)
    first = next(s for s in schedules if dict(s.params)["template"] == "mma" and dict(s.params)["wk"] != 1)
    source = CudaGenerator().emit(case, first)
    assert isinstance(source, CudaSource)
    m = lost(mutants.Origin("linear", case, source), pattern, which)
    assert bool(mutants.needless(m)) is means_the_same


def test_a_launch_that_is_told_makes_dead_code_equal(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    text = """extern "C" __global__ void run(const float* x, float* y) {
if (threadIdx.x < 256u && blockIdx.x < 4u) y[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
}
"""
    launch = Launch("run", (4, 1, 1), (32, 1, 1), (Pointer("in"), Pointer("out")))
    options = Options(device="cuda", cache_dir=tmp_path, trial_timeout_s=60.0)
    bench = mutants.Bench("cuda", GpuFacts(), nvrtc, options, 1)
    source = CudaSource(Schedule("cuda"), text, (launch,))
    case = product((50, 136), (136, 72))
    found = []
    for old, new in (("256u", "255u"), ("4u", "3u")):
        at = 1, mutants.Change(text.split("\n")[1].index(old), text.split("\n")[1].index(old) + len(old), new)
        m = mutants.mutant(mutants.Origin("copy", case, source), "off-by-one bound", *at, 0)
        paths = [bench.build(x) for x in (m.origin.source, m.source)]
        assert mutants.code_of(paths[0]) != mutants.code_of(paths[1])
        found.append(mutants.same_code_where_known(bench, m))
    assert found == [True, False]


def test_what_a_journal_has_is_not_judged_again(tmp_path: Path) -> None:
    kernels = mutants.origins("cpu", CpuFacts(simd_bytes=64, threads=2), 0, most=1)[:8]
    drawn = mutants.draw(kernels, 3, 0, "off-by-one bound")
    journal = mutants.Journal(tmp_path / "journal.jsonl")
    journal.begin({"record": "environment", "device": "this"})
    drawn[0].outcome, drawn[0].note = "caught", "wrong"
    drawn[1].outcome, drawn[1].note = "survived", "ok"
    journal.keep(drawn[0], "")
    journal.keep(drawn[1], "a sound kernel was wrong")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    again = mutants.draw(kernels, 3, 0, "off-by-one bound")
    read = mutants.Journal(tmp_path / "journal.jsonl")
    read.begin({"record": "environment", "device": "that"})
    assert read.head["device"] == "this"
    assert [read.recall(m) for m in again] == [True, True, False]
    assert [(m.outcome, m.note) for m in again] == [("caught", "wrong"), ("survived", "ok"), ("", "")]


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("if (x2 < 5) {", "the sum is zero there: a row shorter than a vector has one part"),
        ("for (; x2 + 16 <= 40; x2 += 16) { rv1 = w_plus(rv1, e2); }\nif (x2 < 40) {", ""),
        ("rv1 = w_plus(rv1, e2);\nif (x2 < 5) {", ""),
        ("for (long i3 = 0; i3 < 4; i3 += 1) {", ""),
    ],
)
def test_the_first_part_of_a_sum_is_the_sum(between: str, reason: str) -> None:
    """Only where nothing was added before: without a loop, and without another sum, since it was set to zero."""
    before = "rv1 = w_select(w_first(n4), w_plus(rv1, e5), rv1);"
    after = "rv1 = w_select(w_first(n4), e5, rv1);"
    head = f"w_f32v rv1 = w_splat_f32(0.0f);\n{between}\n"
    source = SimpleNamespace(text=f"{head}{before}\n}}")
    origin = SimpleNamespace(source=source, problem=None, name="softmax")
    changed = mutants.Mutant(origin, "dropped term", head.count("\n"), before, after, source)  # type: ignore[arg-type]
    assert mutants._first_of_rest(changed) == bool(reason)


@pytest.mark.parametrize("high", [9, 10])
def test_a_row_that_lies_beside_the_image_in_all_its_tiles(high: int) -> None:
    """Of 9 rows the last tile of one row begins at row 7 and has its third beyond the image, of 10 inside."""
    graph = convolution(2, 24, high, 11, 24, 3, 2, 1, groups=24, dtype=DType.F32)
    facts = CpuFacts(simd_bytes=64, threads=2)
    found = CppGenerator().schedules(graph, facts)
    assert not isinstance(found, Declined)
    schedule = next(s for s in found if "depthwise" in str(s) and dict(s.params)["th"] == 2)
    source = CppGenerator().emit(graph, schedule)
    assert isinstance(source, KernelSource)
    origin = mutants.Origin("depthwise", graph, source)
    drawn = mutants.draw([origin], 2000, 0, "dropped term")
    lines = source.text.split("\n")
    beside = [m for m in drawn if mutants._beside_the_image(m)]
    asked = {next(x for x in reversed(lines[: m.number]) if x.startswith("if ((unsigned long)(h + ")) for m in beside}
    assert asked == ({f"if ((unsigned long)(h + 2) < {high}ul) {{"} if high == 9 else set())
    for m in beside:
        assert " tile_1_" in next(x for x in reversed(lines[: m.number]) if x.startswith("static "))
