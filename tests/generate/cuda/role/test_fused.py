"""Several roles in one CTA: what can be fused, its text, and its results on the host, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.generate.cuda import fusing
from tests.generate.cuda.attentions import plain
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import SMALL_TILES, TMA_PROBLEM, fma, lc_is_right, lc_memory, meet, tma_role
from tests.generate.cuda.gemm.test_grouped import group
from tests.generate.cuda.products import convolution, product
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.resources import Resources
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.role import fused
from weft.generate.cuda.role.role import RegisterSplit, RoleSource
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.colocation import BYTES, FusedSource, FusionShape, RoleRegisters, WorkCounter, left_beside
from weft.kernels.source import CudaSource
from weft.sm_budget import SmBudget

FACTS = GpuFacts()


def only(be: RoleSource, **changes: Any) -> RoleSource:
    return replace(be, roles=(replace(be.roles[0], **changes),))


def first_shape(lc: RoleSource, be: list[RoleSource], place: str = "extra", replicas: int = 1) -> FusionShape:
    return next(s for s in fused.shapes(lc, be, FACTS) if s.place == place and s.replicas == replicas)


def made(lc: RoleSource, be: list[RoleSource], shape: FusionShape, entry: str = "fused") -> FusedSource:
    source = fused.fuse(lc, be, shape, entry=entry)
    assert isinstance(source, FusedSource), source
    return source


@cache
def wide_tma() -> RoleSource:
    """Tiles whose warpgroups move registers."""
    return tma_role(product((512, 512), (512, 512), turn_right=True), bm=128, bn=256, box=(1, 1, 128), consumers=2)


# ---- contracts


def test_a_counter_is_read_as_it_was_written() -> None:
    counter = WorkCounter(7, 9, 100, 50, 1, 6, 0, 128, 64, 0, 1 << 33, 12, 5, 6)
    assert len(counter.pack()) == BYTES and WorkCounter.unpack(counter.pack()) == counter
    assert WorkCounter.start([0, 5, 3], 4) == WorkCounter(limit=4, open=5, stage=1)
    for stages, limit in (([1 << 31], 0), ([-1], 0), ([1], -1)):
        with pytest.raises(ValueError, match="are possible"):
            WorkCounter.start(stages, limit)
    with pytest.raises(ValueError, match="63 bytes"):
        WorkCounter.unpack(bytes(63))


def test_words_of_a_counter_lie_where_they_are_written() -> None:
    for name in WorkCounter.__slots__:
        at = WorkCounter.offset(name)
        data = bytearray(BYTES)
        data[at : at + 4] = (77).to_bytes(4, "little")
        assert WorkCounter.unpack(bytes(data)) == replace(WorkCounter.unpack(bytes(BYTES)), **{name: 77})


def test_a_budget_says_what_is_short() -> None:
    whole = SmBudget(65536, 228 * 1024, 2048, 32)
    left = left_beside(whole, SmBudget(16384, 25600, 256, 1))
    assert left == SmBudget(49152, 228 * 1024 - 25600, 1792, 31)
    wrong = left_beside(whole, SmBudget(65537, 0, 2049, 0))
    assert isinstance(wrong, Declined) and "65537 registers of 65536, 2049 threads of 2048" in wrong.reason
    with pytest.raises(ValueError, match="less than nothing"):
        SmBudget(-1, 0, 0, 0)


# ---- what cannot be


@pytest.mark.parametrize(
    ("lc", "be", "reason"),
    [
        ({"early_return": True}, {}, "leave before barriers"),
        ({"threads": 40}, {}, "no whole warps"),
        ({}, {"cluster": (2, 1, 1)}, "best-effort role of clusters"),
        ({}, {"co_resident": 2}, "spin on each other"),
        ({}, {"registers": RegisterSplit(40, 232)}, "moves registers itself"),
        ({}, {"grid": (1 << 20, 1 << 11, 1)}, "less than 2^31 are counted"),
        ({}, {"body": "W_SHARED float s[4]; s[0] = x[0]; y[0] = s[0];"}, "static shared memory"),
        ({}, {"threads": 1200}, "block of 1200 threads"),
        ({}, {"body": "role.sync();", "early_return": True, "named_barriers": 1}, "leave named barriers"),
    ],
)
def test_roles_that_cannot_share_a_cta(lc: dict[str, object], be: dict[str, object], reason: str) -> None:
    lc_source, be_source = only(tma_role(), **lc), only(fma(9), **be)
    assert fused.shapes(lc_source, [be_source], FACTS) == []
    source = fused.fuse(lc_source, [be_source], FusionShape("extra", 128, 2, 65536))
    assert isinstance(source, Declined) and reason in source.reason


def test_sources_of_several_launches_are_fused_one_by_one() -> None:
    lc = tma_role()
    two = replace(lc, roles=(lc.roles[0], lc.roles[0]))
    source = fused.fuse(two, [fma(9)], FusionShape("extra", 128, 2, 65536))
    assert isinstance(source, Declined) and "2 launches" in source.reason


@pytest.mark.slow
def test_the_longest_of_several_launches_is_fused() -> None:
    """A product whose rows begin at odd addresses: its operand is copied first, by a launch as it is."""
    problem, be = product((70, 101), (40, 101), weight=False, turn_right=True), [fma(9, 64)]
    lc = CudaGenerator().roles(problem, SMALL_TILES.schedule())
    alone = CudaGenerator().emit(problem, SMALL_TILES.schedule())
    assert isinstance(lc, RoleSource) and isinstance(alone, CudaSource)
    assert [role.name for role in lc.launched] == ["copy", ""]
    assert [x.entry.endswith("_copy") for x in alone.launches] == [True, False]
    assert fused.shapes(lc, be, FACTS) == [], "as a whole it is declined"
    with pytest.raises(ValueError, match="launch 2 of 2"):
        fused.of_launch(lc, 2)
    source = made(one := fused.of_launch(lc, 1), be, first_shape(one, be))
    first = replace(alone, launches=alone.launches[:1])
    kernels, counter, memory = FusedKernels([alone, source]), Counter(WorkCounter.start((9,), 9)), fusing.of(be[0])
    for launch in range(20):
        at = lc_memory(problem, alone)
        assert kernels.run_alone(first, at) == ""
        assert not lc_is_right(problem, at), "the product has not run"
        assert kernels.run(source, {0: at, 1: memory}, counter, gang=2, seed=launch + 1) == ""
        assert lc_is_right(problem, at)
        if counter.now.finished == 9:
            break
    np.testing.assert_array_equal(fusing.result(memory), expected(be[0]))


def test_indices_of_two_widths_are_not_mixed() -> None:
    wide = replace(fma(9), headers=("#define W_WIDE\n", *fma(9).headers))
    source = fused.fuse(tma_role(), [wide], first_shape(tma_role(), [fma(9)]))
    assert isinstance(source, Declined) and "64 bits" in source.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 100}, "whole warps"),
        ({"replicas": 0}, "whole warps"),
        ({"threads": 64}, "blocks of 96 threads that meet"),
        ({"threads": 896}, "1056 threads in a CTA"),
        ({"replicas": 8}, "18 named barriers"),
        ({"place": "idle"}, "96 threads of 0 idle ones"),
        ({"barrier": 1}, "those below 2 are taken"),
        ({"barrier": 15}, "17 named barriers"),
        ({"shared_offset": 1024}, "behind"),
        ({"shared_offset": 230001}, "aligned to"),
        ({"shared_offset": 232448 - 384}, "bytes of shared memory"),
        ({"registers": RoleRegisters(24, 200, 80)}, "by all warpgroups or by none"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, object], reason: str) -> None:
    lc, be = tma_role(), [meet(9)]
    shape = replace(first_shape(lc, be), **changes)  # type: ignore[arg-type]
    source = fused.fuse(lc, be, shape)
    assert isinstance(source, Declined) and reason in source.reason, source


@pytest.mark.parametrize(
    ("registers", "reason"),
    [
        (None, "the latency-critical role moves them"),
        (RoleRegisters(104, 208, 104), "66560 registers of the 64512"),
        (RoleRegisters(20, 200, 20), "multiples of 8"),
        (RoleRegisters(44, 200, 44), "multiples of 8"),
        (RoleRegisters(24, 264, 24), "multiples of 8"),
    ],
)
def test_registers_are_proved_to_be_there(registers: RoleRegisters | None, reason: str) -> None:
    lc, be = wide_tma(), [fma(9)]
    shape = replace(first_shape(lc, be, "idle"), registers=registers)
    source = fused.fuse(lc, be, shape)
    assert isinstance(source, Declined) and reason in source.reason, source


def test_every_shape_that_is_offered_is_fused() -> None:
    for lc in (tma_role(), wide_tma()):
        for be in ([fma(9)], [meet(9)], [fma(9), meet(5, 50)]):
            found = fused.shapes(lc, be, FACTS)
            assert found
            for shape in found:
                source = made(lc, be, shape)
                launch = fused.launch_registers(source.threads, shape.min_ctas_per_sm, FACTS)
                assert source.registers_asked <= launch * source.threads
                assert bool(source.registers_asked) == (lc is wide_tma())


def test_a_compiled_kernel_is_judged_by_the_assemblers_report() -> None:
    lc, be = wide_tma(), [fma(9)]
    source = made(lc, be, first_shape(lc, be, "idle"))
    fits = Resources(registers=168, barriers=3)
    assert fused.judge(source, fits, FACTS) is None
    for changes, lc_spills, reason in (
        ({"registers": 160}, None, "the launch has 61440"),
        ({"shared_bytes": 200000}, None, "shared memory"),
        ({"barriers": 17}, None, "17 barriers"),
        ({"spill_stores": 4, "spill_loads": 4}, None, "8 bytes of registers spilled per thread"),
        ({"spill_stores": 4}, 4, "latency-critical role spills 4 bytes"),
        ({"spill_stores": 64, "spill_loads": 64}, 0, "by best-effort roles"),
    ):
        wrong = fused.judge(source, replace(fits, **changes), FACTS, lc_spills)
        assert wrong is not None and reason in wrong.reason
    assert fused.judge(source, replace(fits, spill_stores=32, spill_loads=32), FACTS, 0) is None


# ---- the text


def test_headers_stand_once() -> None:
    lc, be = tma_role(), fma(9)
    pieces = replace(be, headers=tuple(fusing.prelude_pieces()))
    text = made(lc, [pieces], first_shape(lc, [be])).text
    for once in ("struct w_solo {", "template <class T> struct w_slot", "w_mma_f16(float", "struct w_work {"):
        assert text.count(once) == 1, once
    other = made(replace(lc, headers=(*fusing.prelude_pieces(), *lc.headers)), [be], first_shape(lc, [be])).text
    assert other.count("struct w_solo {") == 1


def test_pointers_of_several_stages_promise_nothing() -> None:
    lc = tma_role()
    one, two = ([fma(9)], [fma(9), fma(5)])
    assert "const float* __restrict__ be0_x" in made(lc, one, first_shape(lc, one)).text
    text = made(lc, two, first_shape(lc, two)).text
    assert "const float* be0_x" in text and "const float* be1_x" in text and "__restrict__ be" not in text


@pytest.mark.parametrize("place", ["extra", "idle"])
def test_parameters_say_whose_they_are(place: str) -> None:
    lc = wide_tma() if place == "idle" else tma_role()
    be = [fma(9, 96), meet(5)]
    shapes = [s for s in fused.shapes(lc, be, FACTS) if s.place == place]
    source = made(lc, be, shapes[0])
    assert [p.role for p in source.parameters] == [0] * len(lc.roles[0].parameters) + [1, 1, 2, 2, -1]
    assert source.stages == (9, 5) and source.lc.threads == lc.roles[0].threads
    (role,) = source.be
    assert role.first_thread == source.lc.threads - (96 if place == "idle" else 0)
    assert not {*role.barriers} & {*source.lc.barriers} and min(role.barriers) > 1
    assert role.shared_offset >= lc.roles[0].shared_bytes


# ---- results, on the host


CASES: dict[str, tuple[list[RoleSource], int]] = {
    "arithmetic": ([fma(11)], 1),
    "arithmetic in two dimensions": ([fma(12, 64, (4, 3, 1))], 1),
    "threads that meet and leave": ([meet(9)], 1),
    "a block that is no whole warps": ([meet(7, 50)], 1),
    "two stages": ([fma(11), meet(5)], 1),
    "two stages and an empty one, two roles": ([fma(11), fma(0), meet(5, 64)], 2),
    "a block in parts": ([fma(6, 192)], 1),
}


@cache
def sources() -> dict[str, FusedSource]:
    found = {}
    for number, (name, (be, replicas)) in enumerate(CASES.items()):
        shape = first_shape(tma_role(), be, replicas=replicas)
        if name == "a block in parts":
            shape = replace(shape, threads=64)
        found[name] = made(tma_role(), be, shape, f"k{number}")
    return found


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> FusedKernels:
    return FusedKernels(asked(request, sources()))


def launch_until_done(
    kernels: FusedKernels, source: FusedSource, be: list[RoleSource], counter: Counter, seed: int, most: int = 200
) -> tuple[list[Memory], int]:
    """Memory of the BE roles after as many launches as the limit takes; LC is checked after each."""
    memory = [fusing.of(x) for x in be]
    for launches in range(1, most):
        lc = lc_memory(TMA_PROBLEM)
        error = kernels.run(source, {0: lc, **dict(enumerate(memory, 1))}, counter, gang=2, seed=seed + launches)
        assert not error, error
        assert lc_is_right(TMA_PROBLEM, lc)
        if counter.now.finished == counter.now.limit:
            return memory, launches
    raise AssertionError(f"{counter.now} after {most} launches")


def expected(be: RoleSource) -> np.ndarray:
    return fusing.meet_alone(be) if be.roles[0].early_return else fusing.fma_alone(be)


@pytest.mark.parametrize("name", few(CASES, 4))
@pytest.mark.parametrize("seed", few([1, 77], 1))
def test_roles_in_one_cta_compute_what_they_do_alone(name: str, seed: int, kernels: FusedKernels) -> None:
    (be, _), source = CASES[name], sources()[name]
    counter = Counter(WorkCounter.start(source.stages, sum(source.stages)))
    memory, _ = launch_until_done(kernels, source, be, counter, seed)
    for one, m in zip(be, memory, strict=True):
        if sum(np.prod(one.roles[0].grid, keepdims=True)):
            np.testing.assert_array_equal(fusing.result(m), expected(one))
        assert all(b.intact() for b in m.buffers)
    assert counter.buffer.intact() and counter.now.finished == sum(source.stages)


@pytest.mark.slow
@pytest.mark.parametrize("fill", few([True, False], 1))
def test_blocks_that_are_drawn_in_time(fill: bool) -> None:
    """A block that would end behind LC is left for later; what is not known is tried."""
    be, facts = [fma(90)], replace(FACTS, sms=6)
    shape = next(s for s in fused.shapes(tma_role(), be, facts) if s.fill_grid == fill and s.replicas == 1)
    source = fused.fuse(tma_role(), be, replace(shape, in_time=True), facts=facts)
    assert isinstance(source, FusedSource)
    kernels = FusedKernels([source])
    memory = fusing.of(be[0])

    def launched(counter: Counter, seed: int) -> int:
        before = counter.now.finished
        assert (
            kernels.run(source, {0: lc_memory(TMA_PROBLEM), 1: memory}, counter, gang=source.grid[0], seed=seed) == ""
        )
        return counter.now.finished - before

    def known(counter: Counter, lc_clocks: int, be_clocks: int) -> None:
        counter.set("lc_clocks", lc_clocks)
        counter.set("be_clocks", be_clocks)

    counter = Counter(WorkCounter.start(source.stages, 60))
    assert launched(counter, 1) > 0 and counter.now.lc_clocks > 0 and counter.now.be_clocks > 0, "nothing was known"
    known(counter, 10, 1 << 20)
    assert launched(counter, 2) == 0, "every block would be too late"
    assert counter.now.be_clocks == (1 << 20) - (1 << 17), "what nobody tries is forgotten by and by"
    known(counter, 1 << 30, 1)
    for seed in range(3, 60):
        if counter.now.finished == 60:
            break
        known(counter, 1 << 30, 1)
        launched(counter, seed)
    counter.set("limit", 90)
    for seed in range(60, 99):
        counter.set("lc_clocks", 0)
        launched(counter, seed)
    assert counter.now.finished == 90 and all(b.intact() for b in memory.buffers)
    np.testing.assert_array_equal(fusing.result(memory), expected(be[0]))


RANGES: dict[str, RoleSource] = {
    **{f"{n} of arithmetic": fma(n, 32) for n in (0, 1, 131, 132, 133, 1009)},
    **{f"{n} that meet and leave": meet(n, 40) for n in (1, 131, 133)},
}
"""Virtual grids around the number of multiprocessors, and a prime."""


@pytest.fixture(scope="module")
def of_ranges(request: pytest.FixtureRequest) -> tuple[dict[str, FusedSource], FusedKernels]:
    lc = tma_role()
    found = {
        name: made(lc, [be], first_shape(lc, [be]), f"range{number}")
        for number, (name, be) in enumerate(RANGES.items())
    }
    return found, FusedKernels(asked(request, found))


@pytest.mark.parametrize("name", few(RANGES, 3))
def test_ranges_of_blocks(name: str, of_ranges: tuple[dict[str, FusedSource], FusedKernels]) -> None:
    """All blocks once, in launches whose limits split the grid."""
    found, library = of_ranges
    source, be = found[name], RANGES[name]
    (blocks,) = source.stages
    counter, memory = Counter(WorkCounter.start(source.stages, 0)), fusing.of(be)
    for launch in range(400):
        counter.set("limit", min(blocks, 1 + 40 * launch))
        lc = lc_memory(TMA_PROBLEM)
        assert library.run(source, {0: lc, 1: memory}, counter, gang=2, seed=launch + 3) == ""
        assert lc_is_right(TMA_PROBLEM, lc)
        if counter.now.finished == blocks:
            break
    assert counter.now.finished == blocks and all(b.intact() for b in memory.buffers)
    if blocks:
        np.testing.assert_array_equal(fusing.result(memory), expected(be))


KINDS: dict[str, tuple[Problem, str]] = {
    "mma": (product((50, 40), (72, 40), turn_right=True), "mma"),
    "convolution by mma": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True), "mma"),
    "warpgroups": (product((70, 264), (40, 264), turn_right=True), "wgmma"),
    "tma, packed weights": (product((70, 136), (136, 40)), "tma"),
    "swap-AB": (product((12, 264), (72, 264), turn_right=True), "swap_ab"),
    "gemv": (product((3, 520), (12, 520), turn_right=True), "gemv"),
    "halo": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True), "halo"),
    "depthwise": (convolution(2, 24, 9, 11, 24, 3, 2, 1, groups=24, residual=True), "depthwise"),
    "grouped": (group(lambda m: m.linear(70, 40, 64), lambda m: m.linear(33, 72, 40, end="bias")), "grouped"),
    "grouped, tma": (group(*[lambda m: m.linear(70, 96, 64, turned=True)] * 2), "grouped_tma"),
    "attention, tma": (plain((2,), 70, 100, 64), "attention_tma"),
    "attention": (plain((2,), 70, 100, 64), "attention"),
}
"""Problems whose results on whole numbers are exact, but attention."""


Kinds = tuple[dict[str, tuple[RoleSource, CudaSource, FusedSource]], FusedKernels]


@pytest.fixture(scope="module")
def of_kinds(request: pytest.FixtureRequest) -> Kinds:
    found = {}
    be = [fma(40, 64), meet(9, 50)]
    for number, (name, (problem, template)) in enumerate(KINDS.items()):
        every = [
            s
            for facts in (FACTS, replace(FACTS, capability=80))
            if not isinstance(offered := CudaGenerator().schedules(problem, facts), Declined)
            for s in offered
            if dict(s.params)["template"] == template
        ]
        lc, schedule = next(
            (lc, s)
            for s in every
            if isinstance(lc := CudaGenerator().roles(problem, s), RoleSource) and fused.shapes(lc, be, FACTS)
        )
        alone = CudaGenerator().emit(problem, schedule)
        assert isinstance(alone, CudaSource)
        found[name] = lc, alone, made(lc, be, first_shape(lc, be), f"kind{number}")
    return found, FusedKernels([x for _, alone, fused_ in asked(request, found) for x in (alone, fused_)])


@pytest.mark.parametrize("name", few(KINDS, 4))
def test_kinds_of_latency_critical_kernels(name: str, of_kinds: Kinds) -> None:
    """What each writes beside best-effort roles is what it writes alone, and both are right."""
    problem, _ = KINDS[name]
    found, library = of_kinds
    role, alone, source = found[name]
    be = [fma(40, 64), meet(9, 50)]
    memory = [fusing.of(x) for x in be]
    counter = Counter(WorkCounter.start(source.stages, 49))
    for launch in range(60):
        lc = lc_memory(problem, alone)
        error = library.run_alone(alone, lc)  # and repacks the weights
        assert not error, error
        assert "attention" in name or lc_is_right(problem, lc)
        by_itself = [b.data.copy() for b in lc["out"]]
        for b in lc["out"]:
            b.data[:] = fusing.POISON
        # static shared memory is that of one CTA in the emulation
        static = "__shared__" in role.roles[0].body + role.roles[0].globals
        gang = 2 if source.grid[0] % 2 == 0 and not static else 1
        error = library.run(source, {0: lc, **dict(enumerate(memory, 1))}, counter, gang=gang, seed=launch + 1)
        assert not error, error
        for b, wanted in zip(lc["out"], by_itself, strict=True):
            np.testing.assert_array_equal(b.data, wanted)
        assert all(b.intact() for b in lc.buffers)
        if counter.now.finished == 49:
            break
    assert counter.now.finished == 49
    for one, m in zip(be, memory, strict=True):
        np.testing.assert_array_equal(fusing.result(m), expected(one))


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("place", ["extra", "idle"])
def test_compiles_without_spills(place: str, arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    lc = wide_tma() if place == "idle" else tma_role(TMA_PROBLEM, bm=128, bn=128, box=(1, 1, 128), consumers=2)
    be = [fma(9), meet(9)]
    shape = first_shape(lc, be, place)
    source = made(lc, be, shape)
    compiled = nvrtc.compile(source.text, arch=arch, cache_dir=tmp_path)
    found = compiled.of("fused")
    assert fused.judge(source, found, FACTS) is None and compiled.warnings == ()
    assert found.barriers == max(source.be[0].barriers) + 1, "numbers of barriers stand in the instructions"


def test_without_best_effort_the_kernel_is_that_of_the_latency_critical_role_alone() -> None:
    lc = tma_role()
    shape = first_shape(lc, [fma(9)])
    source = made(lc, [], shape)
    assert source.stages == () and source.be == () and "w_best_effort_0" not in source.text
    assert lc.roles[0].body in source.text
