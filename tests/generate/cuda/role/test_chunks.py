"""Co-runners that draw chunks of blocks: every block once, whoever draws single ones, and stops that are bounded."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests import goldens
from tests.generate.cuda import fusing
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import fma, meet
from tests.generate.cuda.role.test_persistent import chain
from tests.generate.cuda.tensor_emulator import Buffer
from tests.slow import few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.fused import persistent_header
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource, WorkCounter
from weft.kernels.source import Number

CTAS = 3
TILE = """float* const tile = (float*)sm;
const unsigned t = role.thread(), i = role.block_x() * {threads}u + t;
tile[t] = x[i];
role.sync();
y[i] += tile[{threads}u - 1u - t];"""
"""Shared memory that the next block writes while this one is read, unless all have met in between."""


def tile(blocks: int, threads: int = 64) -> RoleSource:
    """Blocks whose threads share memory, and do not leave."""
    role = DeviceRole(
        threads, TILE.format(threads=threads), fusing.IN_OUT, (blocks, 1, 1),
        shared_bytes=4 * threads, shared_alignment=16,
    )  # fmt: skip
    return RoleSource(fusing.NONE, (prelude(),), (role,))


def tile_alone(be: RoleSource) -> np.ndarray:
    role = be.roles[0]
    x = (np.arange(role.grid[0] * role.threads) % 1999 - 250).astype(np.float32)
    return x.reshape(role.grid[0], role.threads)[:, ::-1].reshape(-1).copy().view(np.uint32)


JOBS: dict[str, tuple[RoleSource, Callable[[RoleSource], np.ndarray], int]] = {
    "arithmetic": (fma(133, 32), fusing.fma_alone, 0),
    "meets and leaves": (meet(131, 40), fusing.meet_alone, 0),
    "shares memory": (tile(61), tile_alone, 0),
    "in fewer threads": (fma(50, 96), fusing.fma_alone, 32),
    "one block": (fma(1, 32), fusing.fma_alone, 0),
    "none": (fma(0, 32), fusing.fma_alone, 0),
}
FORMS = ((2, False), (3, True), (8, False), (8, True), (64, False), (64, True))
"""Chunks, and whether the next is drawn ahead."""


def made(be: Sequence[RoleSource], chunk: int, ahead: bool, **fields: Any) -> FusedSource:
    source = persistent(be, **{"ctas": CTAS, "chunk": chunk, "ahead": ahead, **fields})
    assert isinstance(source, FusedSource), source
    return source


def form(name: str, chunk: int, ahead: bool, **fields: Any) -> FusedSource:
    be, _, threads = JOBS[name]
    return made([be], chunk, ahead, entry=f"c{list(JOBS).index(name)}", threads=threads, **fields)


GUIDED = "h.asked = h.left >= most * two ? most : h.left < 2u * two ? 1u : h.left / two;"


def greedy(source: FusedSource) -> FusedSource:
    """One that always asks for whole chunks, so that many reach beyond the end of a grant."""
    assert source.text.count(GUIDED) == 1
    text = source.text.replace(GUIDED, "h.asked = most;").replace(f" {source.entry}(", f" {source.entry}_greedy(")
    return replace(source, text=text, entry=f"{source.entry}_greedy")


MIXED = [fma(37, 64), tile(23, 64), meet(11, 64)]
"""Stages of every kind: what meets between blocks, and what does not."""


@pytest.fixture(scope="module")
def kernels() -> FusedKernels:
    """Each text once: chunks are arguments."""
    single = persistent(MIXED, ctas=CTAS, entry="single")
    assert isinstance(single, FusedSource)
    texts = [
        *(form(name, 8, True) for name in JOBS), made(chain(), 4, False, entry="chain"),
        made(MIXED, 4, True, entry="mixed"), made([fma(133, 32)], 8, True, entry="staying", stays=True),
    ]  # fmt: skip
    return FusedKernels([single, *texts, *map(greedy, texts)])


def right(name: str, memory: Memory) -> bool:
    be, wanted, _ = JOBS[name]
    if be.roles[0].grid[0] == 0:
        return not memory["out"][0].data.any()
    return np.array_equal(fusing.result(memory), wanted(be))


def drawn(now: WorkCounter) -> int:
    return min(now.ticket, now.end)


ALL = [(name, *f) for name in JOBS for f in FORMS]


@pytest.mark.parametrize(("name", "chunk", "ahead"), few(ALL, 12, unpack=True))
def test_every_block_runs_once(name: str, chunk: int, ahead: bool, kernels: FusedKernels) -> None:
    be, (blocks,) = JOBS[name][0], form(name, chunk, ahead).stages
    guided = form(name, chunk, ahead)
    for seed, source in enumerate([guided, guided, greedy(guided), greedy(guided)]):
        counter, memory = Counter(WorkCounter.start(source.stages, blocks)), fusing.of(be)
        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=seed, rounds=100_000) == ""
        now = counter.now
        assert now.finished == drawn(now) == blocks and right(name, memory)
        assert now.ticket - now.end <= 2 * CTAS * chunk, "draws in vain, one of each CTA behind each grant"
        assert all(b.intact() for b in memory.buffers) and counter.buffer.intact()


@pytest.mark.parametrize(("name", "chunk", "ahead"), few([x for x in ALL if x[0] != "none"], 6, unpack=True))
def test_random_limits_and_stops(name: str, chunk: int, ahead: bool, kernels: FusedKernels) -> None:
    """Each launch has a limit and a stop of its own, and another chunk; behind a stop each CTA draws once at most."""
    be, (blocks,), chance = JOBS[name][0], form(name, 2, False).stages, random.Random(f"{name}{chunk}{ahead}")
    memory, counter, limit = fusing.of(be), Counter(WorkCounter.start((blocks,), 0)), 0
    for number in range(400):
        limit = min(blocks, limit + chance.randrange(5 * chunk))
        counter.set("limit", limit)
        counter.set("stop", 0)
        after, at = counter.now.finished + chance.randrange(3 * chunk), list[int]()

        def host(after: int = after, at: list[int] = at) -> None:
            if not at and drawn(counter.now) >= after:
                counter.set("stop", 1)
                at.append(drawn(counter.now))

        source = form(name, *chance.choice([(chunk, ahead), (2, False), (chunk, True)]))
        source = greedy(source) if chance.randrange(2) else source
        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=number, host=host, rounds=100_000) == ""
        now = counter.now
        assert now.finished == drawn(now) <= limit, "a chunk that is drawn is run to its end"
        if at:
            assert now.finished <= at[0] + CTAS * chunk
        if now.finished == blocks:
            break
    assert counter.now.finished == blocks and right(name, memory)


@pytest.mark.parametrize(("chunk", "ahead"), few(FORMS, 3, unpack=True))
def test_a_stage_begins_when_all_of_the_one_before_is_written(chunk: int, ahead: bool, kernels: FusedKernels) -> None:
    source = made(chain(), chunk, ahead, entry="chain")
    memory, rounds = Memory(), 3
    for n in (288, 288, 160):
        memory["in"].append(Buffer(4 * n, 0))
    x = np.arange(288, dtype=np.float32)
    memory["in"][0].data.view(np.float32)[:] = x
    y, z = np.zeros(288, np.float32), np.zeros(160, np.float32)
    for _ in range(rounds):
        y += 2 * x
        z += y[(np.arange(160) * 7 + 11) % 288]
        y[:32] += 1
    for seed in range(4):
        memory["in"][1].data[:] = 0
        memory["in"][2].data[:] = 0
        counter = Counter(WorkCounter.start(source.stages, 15 * rounds))
        form = greedy(source) if seed % 2 else source
        assert kernels.run(form, dict.fromkeys((1, 2, 3), memory), counter, gang=CTAS, seed=seed) == ""
        np.testing.assert_array_equal(memory["in"][1].data.view(np.float32), y)
        np.testing.assert_array_equal(memory["in"][2].data.view(np.float32), z)
        assert counter.now.finished == 15 * rounds and counter.now.stage == 0


def test_chunks_and_single_blocks_in_turn(kernels: FusedKernels) -> None:
    """Launches of both go on where the other stopped, whatever the one before drew in vain."""
    single = persistent(MIXED, ctas=CTAS, entry="single")
    assert isinstance(single, FusedSource)
    total = sum(single.stages)
    for seed in range(4):
        chance, limit = random.Random(seed), 0
        memory = {k: fusing.of(be) for k, be in enumerate(MIXED, 1)}
        counter = Counter(WorkCounter.start(single.stages, 0))
        while counter.now.finished < total:
            limit = min(total, limit + chance.randrange(1, 20))
            counter.set("limit", limit)
            several = made(MIXED, *chance.choice(FORMS), entry="mixed")
            source = chance.choice([single, several, greedy(several)])
            assert kernels.run(source, memory, counter, gang=CTAS, seed=seed + limit, rounds=100_000) == ""
            assert counter.now.finished == drawn(counter.now) == limit
        wanted = (fusing.fma_alone(MIXED[0]), tile_alone(MIXED[1]), fusing.meet_alone(MIXED[2]))
        for got, want in zip(memory.values(), wanted, strict=True):
            np.testing.assert_array_equal(fusing.result(got), want)


@pytest.mark.parametrize(("chunk", "ahead"), [(2, False), (8, True)])
def test_a_limit_that_is_raised_while_it_runs_refills(chunk: int, ahead: bool, kernels: FusedKernels) -> None:
    source, be = made([fma(133, 32)], chunk, ahead, entry="staying", stays=True), fma(133, 32)
    for seed in range(1, 5):
        counter, memory = Counter(WorkCounter.start(source.stages, 3)), fusing.of(be)
        form = greedy(source) if seed % 2 else source

        def host(counter: Counter = counter) -> None:
            now = counter.now
            if now.finished >= now.limit - 1 and now.limit < 133:
                counter.set("limit", min(133, now.limit + 17))
            elif now.finished == 133:
                counter.set("stop", 1)

        assert kernels.run(form, {1: memory}, counter, gang=CTAS, seed=seed, host=host) == ""
        np.testing.assert_array_equal(fusing.result(memory), fusing.fma_alone(be))


@pytest.mark.parametrize(("field", "value"), [("sms", 1), ("ctas", 1), ("duty", 64), ("duty", 1)])
def test_a_throttled_co_runner_draws_single_blocks(field: str, value: int, kernels: FusedKernels) -> None:
    source, be = form("arithmetic", 8, True), JOBS["arithmetic"][0]
    counter, memory, seen = Counter(WorkCounter.start(source.stages, 133)), fusing.of(be), list[int]()
    counter.set(field, value)
    assert kernels.run(
        source, {1: memory}, counter, gang=CTAS, seed=4, host=lambda: seen.append(counter.now.ticket)
    ) == ""  # fmt: skip
    assert right("arithmetic", memory) and counter.now.finished == 133
    assert counter.now.ticket <= 133 + CTAS, "no chunk was drawn in vain"


def test_a_throttle_acts_while_chunks_run(kernels: FusedKernels) -> None:
    """Of one CTA that goes on, and one that is told to rest for good and then to stop."""
    source, be = form("arithmetic", 8, True), JOBS["arithmetic"][0]
    counter, memory, naps = Counter(WorkCounter.start(source.stages, 133)), fusing.of(be), list[int]()

    def host() -> None:
        if drawn(counter.now) >= 40:
            counter.set("duty", 0)
            naps.append(counter.now.finished)
        if len(naps) == 400:
            counter.set("stop", 1)

    assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=5, host=host) == ""
    now = counter.now
    assert 40 <= now.finished == drawn(now) <= naps[0] + 8 * 3 * CTAS < 133, "no more than was drawn or about to be"
    assert naps[-1] == naps[200] == now.finished, "all that ended was counted before the nap"


def test_one_text_for_all_chunks_and_numbers_of_ctas() -> None:
    be = [fma(9)]
    one, other = made(be, 2, False, ctas=1), made(be, 64, True, ctas=1056)
    plain = persistent(be, ctas=4)
    assert isinstance(plain, FusedSource) and one.text == other.text != plain.text
    own = [[p.argument for p in s.parameters if isinstance(p.argument, Number)] for s in (one, other)]
    assert own == [[Number(2), Number(0)], [Number(64), Number(1)]]
    assert persistent_header() in plain.text and persistent_header(chunks=True) in one.text
    assert "w_drawn_chunk" not in plain.text and plain == persistent(be, ctas=4, chunk=1, ahead=False)


def test_the_loops_are_the_golden_ones() -> None:
    """Of single blocks and of chunks, and the kernels that call them."""
    single = persistent(MIXED, ctas=CTAS)
    assert isinstance(single, FusedSource)
    texts = [x.text[x.text.index("W_FN void w_best_effort_0") :] for x in (single, made(MIXED, 4, True))]
    goldens.check("cuda/co_runner_loops.cu", "\n".join(texts))


BARRIERS = re.compile(r"^(?:if \((stage == \du(?: \|\| stage == \du)*)\) )?w_barrier<0, \d+>\(\);$", re.M)


@pytest.mark.parametrize(("be", "said"), [
    ([fma(9)], []), ([meet(9)], []), ([tile(9)], [""]), ([fma(9, 64), tile(9), meet(9, 64)], ["stage == 1u"]),
    ([tile(9), fma(9, 64), tile(8)], ["stage == 0u || stage == 2u"]),
])  # fmt: skip
def test_threads_meet_between_blocks_only_where_they_must(be: list[RoleSource], said: list[str]) -> None:
    text = made(be, 4, False).text
    loop = text[text.index("W_FN void w_best_effort_0") :]
    inner = loop[loop.index("w_before") : loop.index("w_next_chunk")]
    assert BARRIERS.findall(inner) == said


@pytest.mark.parametrize(("fields", "reason"), [
    ({"chunk": 0}, "chunks of 0 blocks of 3 CTAs: 1 to 16777216"), ({"chunk": -2}, "chunks of -2"),
    ({"chunk": 1 << 23}, "chunks of 8388608 blocks"), ({"chunk": 1, "ahead": True}, "ahead of chunks of 1 block"),
])  # fmt: skip
def test_what_is_declined(fields: dict[str, int], reason: str) -> None:
    source = persistent([fma(3)], **{"ctas": CTAS, **fields})  # type: ignore[arg-type]
    assert isinstance(source, Declined) and reason in source.reason


def test_it_declines_shared_memory_that_is_not_there() -> None:
    tight = replace(GpuFacts(), shared_per_block=100)
    assert isinstance(persistent([fma(3)], ctas=1, facts=tight), FusedSource)
    found = persistent([fma(3)], ctas=1, chunk=2, facts=tight)
    assert isinstance(found, Declined) and "128 bytes of shared memory" in found.reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_without_spills(arch: str) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    found = nvrtc.compile(made(MIXED, 4, True, ctas=132).text, arch=arch).of("co_runner")
    assert found.spill_stores == found.spill_loads == 0 and found.registers <= 64


@cache
def broken(name: str, old: str, new: str) -> FusedKernels:
    source = greedy(form(name, 8, True))
    assert source.text.count(old) == 1, old
    return FusedKernels([replace(source, text=source.text.replace(old, new))])


FAULTS = {
    "a chunk beyond the end": ("d.block + (asked < there ? asked : there)", "d.block + asked"),
    "a block of a chunk too few": ("if (++block == ", "if (++block + 1u >= "),
    "a chunk counted as one": ("h.uncounted += blocks;", "h.uncounted += 1u;"),
    "drawn as one": ("(unsigned long long)h.asked << 32", "1ull << 32"),
    "forgotten": ("if (h.asked == 0) return", "if (h.asked != 0x80000000u) return"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    kernels, be = broken("arithmetic", *FAULTS[fault]), JOBS["arithmetic"][0]
    source = greedy(form("arithmetic", 8, True))
    for seed in range(1, 4):
        counter, memory = Counter(WorkCounter.start(source.stages, 133)), fusing.of(be)
        counter.set("limit", 100)
        error = kernels.run(source, {1: memory}, counter, gang=CTAS, seed=seed, rounds=20_000)
        ended = fusing.result(memory).reshape(133, 32)[:100].reshape(-1)
        wrong = not np.array_equal(ended, fusing.fma_alone(be)[: 100 * 32]) or fusing.result(memory)[100 * 32 :].any()
        if error or wrong or counter.now.finished != 100:
            return
    raise AssertionError("nothing is seen")


def test_a_missing_barrier_between_blocks_is_seen() -> None:
    be, source = JOBS["shares memory"][0], form("shares memory", 8, False)
    loop = source.text.index("if (++block == w_seen")
    text = source.text[:loop] + source.text[loop:].replace("w_barrier<0, 64>();", "", 1)
    kernels = FusedKernels([replace(source, text=text)])
    for seed in range(1, 9):
        counter, memory = Counter(WorkCounter.start(source.stages, 61)), fusing.of(be)
        assert kernels.run(source, {1: memory}, counter, gang=CTAS, seed=seed) == ""
        if not right("shares memory", memory):
            return
    raise AssertionError("nothing is seen")
