"""Latency-critical roles in clusters: their threads meet across CTAs, and best-effort ones do not take part."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.generate.cpp.test_groups import NAMED
from tests.generate.cuda import fusing
from tests.generate.cuda.attentions import plain
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import fma, lc_is_right, lc_memory, meet
from tests.generate.cuda.loops.test_groups import norm
from tests.generate.cuda.products import product
from tests.slow import asked, few
from tools.sanitize_products import blocks, tma

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.attention.shapes import SplitAttentionConfig
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.role import fused
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.colocation import FusedSource, FusionShape, WorkCounter
from weft.kernels.source import CudaSource, Schedule

FACTS = GpuFacts()
BE = [fma(12, 64), meet(7, 50)]
SMALL, FEW = product((70, 264), (40, 264), turn_right=True), product((12, 264), (72, 264), turn_right=True)
KINDS: dict[str, tuple[Problem, Schedule]] = {
    "tma, sums over a cluster": (SMALL, tma(64, 32, split=2)),
    "tma, multicast": (product((130, 136), (40, 136), turn_right=True), tma(64, 32, multicast=1)),
    "tma, multicast two by two": (product((130, 136), (128, 136), turn_right=True), tma(64, 32, multicast=3)),
    "mma, sums over a cluster": (product((40, 264), (24, 264), turn_right=True), blocks(32, 32, 1, 4, cluster=True)),
    "swap-AB, sums over a cluster": (FEW, SwapAbConfig(16, 64, 2, 4).schedule()),
    "attention, keys shared by a cluster": (
        plain((2,), 20, 100, 64),
        SplitAttentionConfig(1, 1, 2, 16, 2, 2).schedule(),
    ),
    "norm, rows over a cluster": (norm(2, 1037), Form(threads=128, per_row=128, cluster=2).schedule()),
    "norm, columns over a cluster": (norm(24, 500, columns=True), Form(threads=128, columns=2, cluster=4).schedule()),
    "norm in one pass, rows over a cluster": (
        norm(3, 4100),
        Form(threads=128, per_row=128, cluster=4, single_pass=True).schedule(),
    ),
    "norm in one pass, columns over a cluster": (
        norm(24, 500, columns=True),
        Form(threads=64, columns=1, cluster=4, single_pass=True).schedule(),
    ),
    "norm of groups in one pass": (
        NAMED["group-norm/last"](),
        Form(threads=64, columns=2, cluster=2, single_pass=True).schedule(),
    ),
}


@cache
def made() -> dict[str, tuple[RoleSource, CudaSource, FusedSource]]:
    found = {}
    for number, (name, (problem, schedule)) in enumerate(KINDS.items()):
        lc, alone = CudaGenerator().roles(problem, schedule), CudaGenerator().emit(problem, schedule)
        assert isinstance(lc, RoleSource) and isinstance(alone, CudaSource), (name, lc)
        shape = next(
            s
            for s in fused.shapes(lc, BE, FACTS)
            # without a bound the assembler spills norms for the sake of more CTAs
            if s.replicas == 1 + number % 2 and (s.min_ctas_per_sm > 0 or "norm" not in name)
        )
        source = fused.fuse(lc, BE, shape, entry=f"k{number}", facts=FACTS)
        assert isinstance(source, FusedSource), source
        found[name] = lc, alone, source
    return found


SUMS = "tma, sums over a cluster"
NORM = "norm in one pass, rows over a cluster"


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> FusedKernels:
    return FusedKernels([x for _, alone, source in asked(request, made(), SUMS, NORM) for x in (alone, source)])


def wrong(name: str, source: FusedSource, kernels: FusedKernels, library: FusedKernels) -> str:
    """What is wrong with a kernel: its own results, and those of LC against the kernel that it was, in `library`."""
    problem, _ = KINDS[name]
    alone = made()[name][1]
    memory, total = [fusing.of(x) for x in BE], sum(source.stages)
    counter = Counter(WorkCounter.start(source.stages, total))
    hosts: list[Memory] = []
    for launch in range(20):
        lc = lc_memory(problem, alone)
        hosts.append(lc)
        assert library.run_alone(alone, lc) == ""
        by_itself = [b.data.copy() for b in lc["out"]]
        assert "attention" in name or "norm" in name or lc_is_right(problem, lc)
        for b in lc["out"]:
            b.data[:] = fusing.POISON
        given = {0: lc, **dict(enumerate(memory, 1))}
        if error := kernels.run(source, given, counter, seed=launch + 1, rounds=100_000):
            return error
        if any(not np.array_equal(b.data, w) for b, w in zip(lc["out"], by_itself, strict=True)):
            return "the latency-critical result"
        if counter.now.finished == total:
            break
    if not all(b.intact() for m in (*hosts, *memory) for b in m.buffers) or counter.now.finished != total:
        return f"blocks are lost, or a guard zone was written: {counter.now}"
    wanted = [fusing.meet_alone(x) if x.roles[0].early_return else fusing.fma_alone(x) for x in BE]
    return (
        "" if all(np.array_equal(fusing.result(m), w) for m, w in zip(memory, wanted, strict=True)) else "BE's result"
    )


@pytest.mark.parametrize("name", few(KINDS, 2))
def test_roles_in_clusters_compute_what_they_do_alone(name: str, kernels: FusedKernels) -> None:
    lc, _, source = made()[name]
    assert source.cluster == lc.roles[0].cluster != (1, 1, 1)
    assert wrong(name, source, kernels, kernels) == ""


@pytest.mark.parametrize("name", few(KINDS, 2))
def test_they_compile(name: str) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    source = made()[name][2]
    compiled = nvrtc.compile(source.text, arch="sm_90a", flags=source.flags)
    found = compiled.of(source.entry)
    assert fused.judge(source, found, FACTS) is None and compiled.warnings == ()
    assert source.text.count("barrier.cluster.arrive.release.aligned") == 2, "the header's own, and where all begin"


def first(pattern: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        changed, n = re.subn(pattern, new, text, count=1)
        assert n, f"the assembly has nothing like {pattern!r} any more"
        return changed

    return change


MUTANTS: dict[str, Callable[[str], str]] = {
    "LC meets where all threads do": first(r"W_FN void w_cluster_sync\(\) \{ W_DYNAMIC.*\n", ""),
    "more warps are waited for": first(r"w_cluster_begin<(\d+)u, ", r"w_cluster_begin<7u + \1u, "),
    "a cluster of another size": first(r"w_cluster_begin<(\d+)u, 2u>", r"w_cluster_begin<\1u, 4u>"),
    "LC does not meet": first(r"w_cluster_sync\(\) \{ W_DYNAMIC.*\n", "w_cluster_sync() {}\n"),
    "the barriers lie behind the memory": first(r"(w_cluster_begin<.*>\(w_whole \+ )", r"\g<1>16 + "),
}


def test_functions_of_a_header_ask_the_role_how_a_cluster_meets() -> None:
    _, alone, source = made()["norm in one pass, rows over a cluster"]
    assert "role.cluster" not in alone.text and "w_cluster_wait();" in alone.text, "a kernel of its own is what it was"
    assert "if constexpr (CLUSTER > 1) role.cluster_wait();" in source.text and "w_cluster_wait();" not in source.text
    declarations = [x for x in source.text.splitlines() if "w_cluster_meet<4u, 4u>" in x]
    assert len(declarations) == 3, "the frame, and the two functions that LC's own text names"
    for name in ("sync", "wait"):
        assert f"static W_FN void cluster_{name}() {{ W_DYNAMIC(w_memory);" in declarations[0]
    for _, _, other in (x for kind, x in made().items() if "one pass" not in kind):
        assert "cluster_wait() { W_DYNAMIC" not in other.text


def test_headers_that_can_and_cannot_ask() -> None:
    function = "template <class Role> W_FN void w_f(const Role role) {{ {} }}\n"
    for call in ("sync", "wait"):
        found = fused.by_role(function.format(f"w_cluster_{call}();"))
        assert found == function.format(f"role.cluster_{call}();")
    plain = "W_FN void w_cluster_sync() { asm(); }\nW_FN void w_cluster_wait() { asm(); }\n"
    assert fused.by_role(plain) == plain, "what defines them"
    for header in (
        "W_FN void w_f() { w_cluster_sync(); }\n",
        function.format("w_cluster_leave();"),
        function.format("w_cluster_arrive();"),
        function.format("w_cluster_sync();") + "W_FN void w_g(int n) { w_cluster_wait(); }\n",
        "#define W_MEET w_cluster_sync()\n",
    ):
        declined = fused.by_role(header)
        assert isinstance(declined, Declined) and "functions of a header" in declined.reason


@pytest.fixture(scope="module")
def mutants(request: pytest.FixtureRequest) -> tuple[dict[str, FusedSource], FusedKernels]:
    found = mutated(made()[SUMS][2], MUTANTS, "m")
    return found, FusedKernels(asked(request, found))


def mutated(sound: FusedSource, changes: dict[str, Callable[[str], str]], entry: str) -> dict[str, FusedSource]:
    """The kernel with each of the faults, each under an entry of its own."""
    return {
        name: replace(sound, text=change(sound.text).replace(f" {sound.entry}(", f" {entry}{k}("), entry=f"{entry}{k}")
        for k, (name, change) in enumerate(changes.items())
    }


NORM_MUTANTS: dict[str, Callable[[str], str]] = {
    "the header meets where all threads do": first(r"role\.cluster_sync\(\)", "w_cluster_sync()"),
    "the header waits where all threads do": first(r"role\.cluster_wait\(\)", "w_cluster_wait()"),
    "the header does not meet": first(r"(void cluster_sync\(\) )\{.*?\}", r"\1{}"),
}


@pytest.fixture(scope="module")
def norm_mutants(request: pytest.FixtureRequest) -> tuple[dict[str, FusedSource], FusedKernels]:
    changed = mutated(made()[NORM][2], NORM_MUTANTS, "n")
    return changed, FusedKernels(asked(request, changed))


@pytest.mark.parametrize("name", few(NORM_MUTANTS, 1))
def test_faults_in_how_a_header_meets_are_caught(
    name: str, norm_mutants: tuple[dict[str, FusedSource], FusedKernels], kernels: FusedKernels
) -> None:
    found, library = norm_mutants
    assert wrong(NORM, found[name], library, kernels) != ""


@pytest.mark.parametrize("name", few(MUTANTS, 2))
def test_faults_in_how_they_meet_are_caught(
    name: str, mutants: tuple[dict[str, FusedSource], FusedKernels], kernels: FusedKernels
) -> None:
    found, library = mutants
    assert wrong(SUMS, found[name], library, kernels) != ""


def test_what_is_declined_of_clusters() -> None:
    lc = made()[SUMS][0]
    shape = replace(next(iter(fused.shapes(lc, BE, FACTS))), fill_grid=True)
    filled = fused.fuse(lc, BE, shape, facts=FACTS)
    assert isinstance(filled, Declined) and "its grid is not filled" in filled.reason
    header = "W_FN void w_fold() { w_cluster_sync(); }\n"
    inside = fused.fuse(replace(lc, headers=(*lc.headers, header)), BE, replace(shape, fill_grid=False))
    assert isinstance(inside, Declined) and "functions of a header" in inside.reason
    late = fused.fuse(lc, BE, FusionShape("extra", 128, fused.first_barrier(lc.roles[0]), 232208))
    assert isinstance(late, Declined) and "bytes of shared memory" in late.reason
