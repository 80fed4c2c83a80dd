"""Faults in the assembly of fused and persistent kernels: every one is caught by their results on the host."""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.generate.cuda import fusing
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import TMA_PROBLEM, fma, lc_is_right, lc_memory, meet, tma_role
from tests.generate.cuda.tensor_emulator import Buffer
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.role import fused
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import Parameter, RoleSource
from weft.kernels.colocation import FusedSource, WorkCounter

FACTS = GpuFacts()
SMALL = replace(FACTS, sms=6)
"""A GPU with more multiprocessors than the latency-critical kernel has CTAs."""
SECONDS = 60


@cache
def ordered() -> list[RoleSource]:
    """Stages that read what others wrote before them."""
    x, y, z = (Parameter(n, p.argument, "float*") for n, p in zip("xyz", 2 * fusing.IN_OUT, strict=False))
    y, z = replace(y, argument=replace(x.argument, index=1)), replace(z, argument=replace(x.argument, index=2))  # type: ignore[type-var]
    first = "y[role.block_x() * 32u + role.thread()] += x[role.block_x() * 32u + role.thread()];"
    second = "z[role.block_x() * 32u + role.thread()] += y[(role.block_x() * 32u + role.thread()) * 5u % 224u];"
    return [
        replace(fma(7, 32), roles=(replace(fma(7, 32).roles[0], body=first, parameters=(x, y)),)),
        replace(fma(4, 32), roles=(replace(fma(4, 32).roles[0], body=second, parameters=(y, z)),)),
    ]


BESIDE = [fma(12, 64, (4, 3, 1)), meet(5, 64)]
PARTED = [meet(6, 50, (2, 3, 1))]
FOLDED = [fma(6, 192)]


def source(kind: str, entry: str) -> FusedSource:
    if kind == "ordered":
        made = persistent(ordered(), ctas=3, entry=entry)
    elif kind == "idle":
        lc = tma_role(bm=128, bn=256, box=(1, 1, 128), consumers=2, stages=2)
        found = fused.shapes(lc, FOLDED, FACTS)
        made = fused.fuse(lc, FOLDED, next(s for s in found if (s.place, s.replicas) == ("idle", 1)), entry=entry)
    elif kind == "filling":
        lc = tma_role(persistent_ctas=2)
        shape = next(s for s in fused.shapes(lc, BESIDE, SMALL) if s.fill_grid and s.replicas == 2)
        made = fused.fuse(lc, BESIDE, shape, entry=entry, facts=SMALL)
    else:
        be = {"beside": BESIDE, "parted": PARTED}[kind]
        shape = next(s for s in fused.shapes(tma_role(), be, FACTS) if s.replicas == 1)
        made = fused.fuse(tma_role(), be, shape, entry=entry)
    assert isinstance(made, FusedSource), made
    return made


def found(kind: str, made: FusedSource, kernels: FusedKernels) -> str:
    """What is wrong with a kernel; "" for a right one."""
    if kind == "ordered":
        return _ordered(made, kernels)
    be = {"beside": BESIDE, "parted": PARTED, "idle": FOLDED, "filling": BESIDE}[kind]
    gang, grid = (made.grid[0], 0) if kind == "filling" else (2, 4)
    registers = 168 if kind == "idle" else 0
    memory = [fusing.of(x) for x in be]
    total = sum(made.stages)
    counter = Counter(WorkCounter.start(made.stages, 0))
    for seed in range(60):
        # some launches leave blocks for later ones, and some limits are reached while LC runs
        counter.set("limit", min(total, 1 + 3 * seed))
        lc = lc_memory(TMA_PROBLEM)
        given = {0: lc, **dict(enumerate(memory, 1))}
        error = kernels.run(
            made, given, counter, gang=gang, grid=grid, seed=3 * seed + 1, registers=registers, rounds=100_000
        )
        now = counter.now
        if error:
            return error
        if not lc_is_right(TMA_PROBLEM, lc):
            return "the latency-critical result"
        if now.finished != (now.ticket if now.end - now.ticket > 0 else now.end):
            return f"blocks that were drawn and not finished: {now}"
        if now.finished == total:
            break
    if counter.now.finished != total:
        return f"blocks that are lost: {counter.now}"
    for one, m in zip(be, memory, strict=True):
        wanted = fusing.meet_alone(one) if one.roles[0].early_return else fusing.fma_alone(one)
        if not np.array_equal(fusing.result(m), wanted) or not all(b.intact() for b in m.buffers):
            return "a best-effort result"
    # with work without end a launch ends with its latency-critical role
    counter = Counter(WorkCounter.start(made.stages, 1 << 30))
    given = {0: lc_memory(TMA_PROBLEM), **{k: fusing.of(x) for k, x in enumerate(be, 1)}}
    return kernels.run(made, given, counter, gang=gang, grid=grid, seed=5, registers=registers, rounds=6000)


def _ordered(made: FusedSource, kernels: FusedKernels) -> str:
    for seed in range(1, 13):
        memory = Memory()
        for n in (224, 224, 128):
            memory["in"].append(Buffer(4 * n, 0))
        x = np.arange(1, 225, dtype=np.float32)
        memory["in"][0].data.view(np.float32)[:] = x
        y, z = np.zeros(224, np.float32), np.zeros(128, np.float32)
        for _ in range(4):
            y += x
            z += y[np.arange(128) * 5 % 224]
        counter = Counter(WorkCounter.start(made.stages, 0))
        for limit in (5, 7, 20, 44):
            counter.set("limit", limit)
            error = kernels.run(made, {1: memory, 2: memory}, counter, gang=3, seed=seed + limit, rounds=20_000)
            if error or counter.now.finished != limit:
                return error or f"a limit of {limit}: {counter.now}"
        got = [b.data.view(np.float32) for b in memory["in"][1:]]
        if not (np.array_equal(got[0], y) and np.array_equal(got[1], z) and all(b.intact() for b in memory.buffers)):
            return "stages out of order"
    return ""


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text, f"the assembly has no {old!r} any more"
        return text.replace(old, new)

    return change


def first(pattern: str, new: str, count: int = 1) -> Callable[[str], str]:
    def change(text: str) -> str:
        changed, n = re.subn(pattern, new, text, count=count)
        assert n, f"the assembly has nothing like {pattern!r} any more"
        return changed

    return change


MUTANTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "the draw is met by too few threads": ("beside", swap("w_barrier<2, 64>(); }", "w_barrier<2, 32>(); }")),
    "the draw is met by too many threads": ("beside", swap("w_barrier<2, 64>(); }", "w_barrier<2, 96>(); }")),
    "nobody waits for the draw": ("beside", swap("w_barrier<2, 64>(); }", "}")),
    "nobody waits for the end of a block": ("beside", swap("w_barrier<2, 64>();\nif (thread", "if (thread")),
    "LC's barrier counts all threads": ("beside", swap("w_in_cta<0u, 160u, 1,", "w_in_cta<0u, 224u, 1,")),
    "LC's barrier has BE's number": ("beside", swap("w_in_cta<0u, 160u, 1,", "w_in_cta<0u, 160u, 2,")),
    "BE's blocks meet at LC's barrier": ("beside", first(r"w_be1::frame<160u, 3>", "w_be1::frame<160u, 1>", 0)),
    "threads are counted from the CTA's first": ("beside", first(r"frame<160u, 3>\(block\)", "frame<0u, 3>(block)", 0)),
    "a wrong modulus": ("beside", swap("block : block % X", "block : block % (X + 1)")),
    "a wrong row": ("beside", swap("block / X :", "block / Y :")),
    "one block too many": ("ordered", swap("h.drew = (int)(end - ticket) > 0;", "h.drew = (int)(end - ticket) >= 0;")),
    "one block too few": (
        "ordered",
        swap("return {h.stage, ticket - h.begin};", "return {h.stage, ticket - h.begin + 1u};"),
    ),
    "a stage of one block less": ("ordered", swap("stage == 0u ? 7u", "stage == 0u ? 6u")),
    "a draw by every thread": ("beside", swap("if (thread == 0) drawn", "drawn")),
    "a count by every thread": (
        "beside",
        swap("if (thread == 0) w_finish", "w_count_ended<w_stages>(w_job, hand); w_finish"),
    ),
    "nothing is counted": ("beside", swap("if (thread == 0) w_finish<w_stages>(w_job, hand);", "")),
    "shared memory over LC's": ("beside", first(r"w_memory \+ \d+, be1", "w_memory + 1024, be1")),
    "shared memory over the draw": ("parted", first(r"w_memory \+ (\d+), be0", r"w_memory + \1 + 48, be0")),
    "more registers than there are": ("idle", first(r"::w_more_registers<\d+>", "::w_more_registers<240>")),
    "registers moved the wrong way": ("idle", first(r"::w_fewer_registers<\d+>", "::w_fewer_registers<176>")),
    "BE's first thread is LC's": ("idle", swap("threadIdx.x - 288u", "threadIdx.x - 256u")),
    "parts of a block are skipped": ("idle", swap("at += 96u", "at += 192u")),
    "a draw in vain is not forgotten": (
        "ordered",
        swap("(unsigned long long)end << 32 | goal", "(unsigned long long)ticket << 32 | goal"),
    ),
    "the limit is passed": ("ordered", swap("(int)(limit - open) < 0 ? limit : open", "open")),
    "a stage is not waited for": ("ordered", swap("(int)(limit - open) < 0 ? limit : open", "limit")),
    "a stage opens too early": ("ordered", swap("n) + n != h.open", "n) + n + 1u != h.open")),
    "a stage never opens": ("ordered", swap("w_publish(&work->open, h.open + JOB::blocks(next));", "")),
    "the same stage opens again": ("ordered", swap("w_poke(&work->stage, next);", "")),
    "grants are not told apart": ("ordered", swap("!h.knows || end != h.end", "!h.knows")),
    "LC's end is not seen": ("beside", swap("w_seen(ended) >= WARPS", "w_seen(ended) > 1000u")),
    "LC's end is not told": ("beside", swap("w_warp_ended(ended);", "")),
    "LC's warps are miscounted": ("beside", swap("<w_stages, 1u, ", "<w_stages, 6u, ")),
    "the count of ended warps is not cleared": ("beside", swap("if (threadIdx.x == 0) *ended = 0u;", "")),
    "one block too many, drawn ahead": (
        "beside",
        swap("asked && (int)(end - ticket) > 0", "asked && (int)(end - ticket) >= 0"),
    ),
    "a block drawn ahead takes the place of the one that runs": ("beside", swap("turn ^= 1u;\n", "")),
    "nobody draws once more": ("beside", swap("again == W_AGAIN", "again == W_NONE")),
    "a draw into the place that others read": ("beside", swap("{ turn ^= 1u; if", "{ if")),
    "blocks that are not counted at the end": (
        "beside",
        swap("  w_count_ended<JOB>(work, h);\n  return none;", "  return none;"),
    ),
    "CTAs are not told of LC's end": ("filling", swap("w_tell(&w_job->lc_ended);", "{}")),
    "the end of the next launch's LC is waited for": ("filling", swap("/ ROLES + 1ull)", "/ ROLES + 2ull)")),
    "CTAs behind LC's wait for it": ("filling", first(r"blockIdx.x < \d+u \? 0u : 1u", "0u")),
    "LC counts the CTAs behind it": ("filling", first(r"w_told\(\d+u\)", "w_told(6u)")),
    "threads that leave are not there any more": ("parted", first(r" w_be0::frame<160u, 3>::leave\(\);", "")),
    "threads beyond the block run": ("parted", swap("if (thread < 50u)", "")),
    "a question is asked once": (
        "parted",
        swap(
            "    const bool r = base::any(x);\n    if constexpr (LEAVES) base::any(true);",
            "    const bool r = base::any(x);",
        ),
    ),
    "those that left ask once": (
        "parted",
        swap("while (base::any(false) || base::any(false)) {", "while (base::any(false)) {"),
    ),
}
SOUND = ("beside", "parted", "idle", "ordered", "filling")


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> tuple[dict[str, FusedSource], FusedKernels]:
    every: dict[str, FusedSource] = {kind: source(kind, f"sound{k}") for k, kind in enumerate(SOUND)}
    for number, (name, (kind, change)) in enumerate(MUTANTS.items()):
        sound = source(kind, f"mutant{number}")
        every[name] = replace(sound, text=change(sound.text))
    return every, FusedKernels(asked(request, every))


def apart(kind: str, name: str, kernels: tuple[dict[str, FusedSource], FusedKernels]) -> str:
    """`found` in a process of its own, which a fault may take down or keep from ending."""
    every, library = kernels
    near, far = multiprocessing.Pipe(duplex=False)

    def one() -> None:
        faulthandler.disable()
        far.send(found(kind, every[name], library))

    process = multiprocessing.get_context("fork").Process(target=one)
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return "it does not end"
    return near.recv() if near.poll() else "it crashes"


@pytest.mark.parametrize("kind", few(SOUND, 2))
def test_sound_kernels_are_accepted(kind: str, kernels: tuple[dict[str, FusedSource], FusedKernels]) -> None:
    assert apart(kind, kind, kernels) == ""


@pytest.mark.parametrize("name", few(MUTANTS, 4))
def test_every_fault_is_caught(name: str, kernels: tuple[dict[str, FusedSource], FusedKernels]) -> None:
    assert apart(MUTANTS[name][0], name, kernels) != ""
