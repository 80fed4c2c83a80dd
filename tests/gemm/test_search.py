"""The space of configurations, the few that are chosen of it, the search with a tuner that invents times, dry runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from tests.gemm.crossed import crossed, spread
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import DeviceError, NoTemplateError
from weft.gemm.epilogue import epilogue
from weft.gemm.search import KEEP, SearchResult, chosen, dry_run, feasible, refusal, rejected, search
from weft.gemm.spec import LAYOUTS, Gemm, Search, thirteen, typed
from weft.generate.cuda import templates
from weft.generate.cuda.space import pruned, space
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource
from weft.tune.tuner import ProblemTrial

H200 = profile("h200")
ODD = ((77, 33, 45), (129, 255, 1001), (1000, 1000, 1000), (1, 257, 512), (8, 4096, 264), (3, 5, 7))


def estimate(trial: ProblemTrial, number: int) -> Measurement:
    """A time that knows nothing of the model; every seventh kernel is wrong."""
    schedule = trial.kernels[number][0]
    bad = number % 7 == 6
    us = 5.0 + sum(map(ord, str(schedule))) % 97
    samples = () if bad else (us, us * 1.001, us * 0.999)
    verdict = Verdict.WRONG if bad else Verdict.OK
    return Measurement(trial.problem.key, schedule, verdict, samples, "off by 3" if bad else "")


class Tuner:
    """Stands in for `weft.tune.tuner.Tuner`: takes trials, gives outcomes."""

    def __init__(self) -> None:
        self.trials: list[ProblemTrial] = []

    def measure(self, trials: Iterable[ProblemTrial]) -> Iterator[Measurement]:
        for trial in trials:
            self.trials.append(trial)
            yield from (estimate(trial, k) for k in range(len(trial.kernels)))


# -- the space


@pytest.mark.parametrize("layout", few(LAYOUTS, 1))
def test_no_size_layout_or_type_is_refused_and_what_is_chosen_has_kernels(layout: str) -> None:
    for (m, n, k), dtype in zip(ODD, [DType.F16, DType.F32, DType.BF16] * 2, strict=True):
        for facts in (H200, profile("a100"), replace(H200, tf32=True)):
            g = Gemm(m, n, k, layout=layout, dtype=dtype)
            problem = g.problem()
            ranked = feasible(g, problem, facts)
            assert len({s for _, s in ranked}) == len(ranked)
            assert [us for us, _ in ranked] == sorted(us for us, _ in ranked)
            assert all(0 < us < math.inf for us, _ in ranked)
            for _, schedule in (*ranked[:2], ranked[-1], *ranked[:: max(1, len(ranked) // 4)]):
                assert isinstance(templates.emit(problem, schedule), CudaSource), (g.name, schedule)


def test_thousands_of_configurations_become_sixteen_of_different_kinds() -> None:
    g = Gemm(512, 512, 8192, layout="nt")
    problem = g.problem()
    ranked = feasible(g, problem, H200)
    assert len(ranked) > 3000
    few = pruned(problem, H200, ranked, 16)
    assert len(few) == len(set(few)) == 16
    assert few[0][1] == templates.schedules(problem, H200)[0]  # type: ignore[index]
    tiles = {(s.param("template"), s.param("bm"), s.param("bn"), s.param("split")) for _, s in few}
    assert len(tiles) >= 8
    assert {"tma", "wgmma"} <= {s.param("template") for _, s in few}
    assert sum(us <= 2 * few[0][0] for us, _ in few) >= 8


@pytest.mark.slow
def test_every_one_of_the_thirteen_shapes_has_sixteen() -> None:
    for g in thirteen(Gemm(layout="nt")):
        problem = g.problem()
        assert len(chosen(g, problem, H200, feasible(g, problem, H200), 99)) == KEEP


def test_t_and_the_limit_bound_what_is_measured() -> None:
    g = Gemm(256, 256, 256)
    problem = g.problem()
    ranked = feasible(g, problem, H200)
    assert len(chosen(replace(g, most=5), problem, H200, ranked, 99)) == 5
    every = replace(g, search=Search.EXHAUSTIVE)
    assert chosen(every, problem, H200, ranked, 40) == ranked[:40]
    assert chosen(replace(every, most=7), problem, H200, ranked, 40) == ranked[:7]


def test_what_no_template_takes_is_an_error_in_words() -> None:
    old = replace(H200, capability=75)
    assert isinstance(space(Gemm().problem(), old), Declined)
    with pytest.raises(NoTemplateError, match=r"gemm M=1024_N=1024_K=1024_nn_f16.*7\.5"):
        search(Gemm(), old, Tuner().measure, limit=9)


# -- the search


def test_a_search_takes_the_fastest_of_what_was_right() -> None:
    tuner = Tuner()
    found = search(Gemm(256, 256, 512, layout="nt"), H200, tuner.measure, limit=9)
    assert found.best is not None
    right = [o for o in found.outcomes if o.state == "ok"]
    assert found.best.median_us <= min(o.median_us for o in right) * 1.02
    assert [o.note for o in found.outcomes if o.state == "wrong"] == ["off by 3"] * 2
    assert rejected(found) == [("wrong", 2)]
    assert isinstance(found.kernel, CudaSource)
    assert found.kernel.schedule == found.best.schedule
    assert len(tuner.trials) == 1
    assert found.tflops == pytest.approx(2 * 256 * 256 * 512 / found.best.median_us / 1e6)


def test_an_exhaustive_search_goes_by_chunks() -> None:
    tuner = Tuner()
    found = search(Gemm(256, 256, 512, search=Search.EXHAUSTIVE), H200, tuner.measure, limit=70)
    assert [len(t.kernels) for t in tuner.trials] == [32, 32, 6]
    assert len(found.outcomes) == 70
    assert found.best is not None
    assert found.best.median_us <= min(o.median_us for o in found.outcomes) * 1.02


def test_a_search_in_which_nothing_is_right_has_no_best() -> None:
    def measure(trials: Iterable[ProblemTrial]) -> Iterator[Measurement]:
        for t in trials:
            for s, _, _ in t.kernels:
                yield Measurement(t.problem.key, s, Verdict.HANG, error="no end")

    found = search(Gemm(64, 64, 64), H200, measure, limit=9)
    assert found.best is None
    assert found.kernel is None
    assert rejected(found) == [("hang", len(found.outcomes))]
    assert found.tflops == 0.0


# -- without a GPU


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    return found


def test_a_dry_run_compiles_the_best_few_for_both_architectures(nvrtc: Nvrtc) -> None:
    found = dry_run(Gemm(128, 128, 256, layout="nt", epilogue=epilogue("bias_relu")), nvrtc, limit=9)
    assert list(found) == ["sm_90a", "sm_80"]
    for one in found.values():
        assert not one.measured
        states = [o.state for o in one.outcomes]
        assert states.count("compiled") == 3
        assert one.best is one.outcomes[states.index("compiled")]
        assert all(o.registers > 0 for o in one.outcomes if o.state == "compiled")
        assert len(one.outcomes) == KEEP


def test_a_dry_run_without_a_compiler_says_so() -> None:
    with pytest.raises(DeviceError, match=r"a dry run compiles, and there is no NVRTC: none here"):
        dry_run(Gemm(), Declined("none here"), limit=9)


def test_what_the_compiler_refuses_and_what_spills_is_refused(nvrtc: Nvrtc) -> None:
    g = Gemm(128, 128, 128)
    source = templates.emit(g.problem(), feasible(g, g.problem(), H200)[0][1])
    assert isinstance(source, CudaSource)
    (bad,) = nvrtc.compile_many([CompileJob("int x = ;", "sm_90a")])
    assert "failed" in refusal(bad, source, H200)
    made = nvrtc.compile(source.text, arch="sm_90a")
    assert refusal(made, source, H200) == ""
    spilling = tuple((name, replace(r, spill_stores=400, spill_loads=400)) for name, r in made.resources)
    assert "spilled" in refusal(replace(made, resources=spilling), source, H200)


@pytest.mark.slow
def test_every_pair_of_layout_type_epilogue_and_odd_size_compiles_for_both(nvrtc: Nvrtc) -> None:
    jobs, sources = [], []
    for number, x in enumerate(spread()):
        for facts in (H200, profile("a100")):
            made = x.kernels(facts, 4)
            source = made[number % len(made)]
            jobs.append(CompileJob(source.text, facts.arch, source.flags, source.max_registers))
            sources.append((x, source, facts))
    found = {dict(source.schedule.params)["template"] for _, source, _ in sources}
    assert found >= {"tma", "wgmma", "mma", "simt", "gemv"}
    for cubin, (x, source, facts) in zip(nvrtc.compile_many(jobs, threads=2), sources, strict=True):
        assert isinstance(cubin, CompiledCubin), x
        assert refusal(cubin, source, facts) == "", (x, source.schedule)


def test_the_few_hold_every_pair() -> None:
    assert len(crossed()) == len(set(crossed())) == 6 * 4 * (4 * 4 + 3 * 2)
    assert len(spread()) <= 44
    assert {(x.kind, x.layout) for x in spread()} == {(x.kind, x.layout) for x in crossed()}
    assert {(x.epilogue, x.size) for x in spread()} == {(x.epilogue, x.size) for x in crossed()}


def test_found_is_told_by_its_schedule() -> None:
    found = search(Gemm(64, 64, 64), H200, Tuner().measure, limit=9)
    assert isinstance(found, SearchResult)
    assert {o.template for o in found.outcomes} <= {"tma", "wgmma", "mma", "gemv"}


@pytest.mark.parametrize("types", ["e4m3", "e5m2", "e4m3_e5m2", "e5m2_e4m3"])
def test_products_of_8_bit_floats_lie_along_the_sum(types: str) -> None:
    g = typed(Gemm(512, 512, 512, layout="nt", epilogue=epilogue("bias_gelu")), types)
    for facts, wanted in ((H200, {"tma", "mma"}), (profile("a100"), {"mma"})):
        ranked = feasible(g, g.problem(), facts)
        assert {str(s.param("template")) for _, s in ranked} == wanted
    assert feasible(replace(g, layout="nn", constant=True), replace(g, layout="nn", constant=True).problem(), H200)
    for bad, side in (
        (replace(g, layout="nn"), "right"),
        (replace(g, layout="tn"), "left"),
        (replace(g, k=520), "left"),
    ):
        with pytest.raises(NoTemplateError, match=f"a {side} operand of 8 bits"):
            feasible(bad, bad.problem(), H200)


def test_products_of_bytes_lie_along_the_sum() -> None:
    g = typed(Gemm(512, 512, 512, layout="nt", epilogue=epilogue("bias_gelu")), "i8")
    for facts, wanted in ((H200, {"tma", "mma"}), (profile("a100"), {"mma"})):
        assert {str(s.param("template")) for _, s in feasible(g, g.problem(), facts)} == wanted
    repacked = replace(g, layout="nn", constant=True)
    assert feasible(repacked, repacked.problem(), H200)
    crossing = replace(g, layout="nn")
    with pytest.raises(NoTemplateError, match="a right operand of 8 bits that does not lie in vectors of 16"):
        feasible(crossing, crossing.problem(), H200)


def test_fast_sums_are_configurations_of_their_own() -> None:
    g = typed(Gemm(512, 512, 512, layout="nt"), "e4m3")
    slow = {s for _, s in feasible(g, g.problem(), H200) if s.param("template") == "tma"}
    fast = {s for _, s in feasible(g, g.problem(), replace(H200, fast_f8=True)) if s.param("template") == "tma"}
    assert slow
    assert fast
    assert not slow & fast
