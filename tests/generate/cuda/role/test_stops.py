"""Roles that are told to stop while their kernel runs: no block is lost, none runs twice, and few begin afterwards."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.generate.cuda import fusing
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.fusing import TMA_PROBLEM, fma, lc_is_right, lc_memory, meet, tma_role
from tests.slow import few

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.role import fused
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import RoleSource
from weft.kernels.colocation import FusedSource, WorkCounter

FACTS = GpuFacts(sms=6)
GANG = 2
JOBS: dict[str, list[RoleSource]] = {
    "arithmetic": [fma(14, 64)],
    "meets and leaves": [meet(11, 64)],
    "two stages": [fma(7, 64), meet(4, 64)],
}
KINDS = {"alone": (1, False), "two roles": (2, False), "filling": (1, True)}
"""Roles in a CTA, and whether the grid is filled."""
AHEAD = 3
"""Blocks that a role may begin behind the stop: one that it draws having looked just before, one that is drawn, and one
that is drawn before it looks again."""
SHORT = "W_LONG_BLOCK = 8192"
LONG = "W_LONG_BLOCK = 0"
"""As if every block took long: a role looks at `stop` before it draws."""


@cache
def made() -> dict[tuple[str, str], FusedSource]:
    found: dict[tuple[str, str], FusedSource] = {}
    for name, be in JOBS.items():
        for kind, (replicas, fill) in KINDS.items():
            every = fused.shapes(tma_role(), be, FACTS)
            shape = next(s for s in every if (s.place, s.replicas, s.fill_grid) == ("extra", replicas, fill))
            source = fused.fuse(tma_role(), be, shape, entry=f"k{len(found)}", facts=FACTS)
            assert isinstance(source, FusedSource), source
            found[name, kind] = source
            assert SHORT in source.text
            entry = f"{source.entry}_long"
            text = source.text.replace(SHORT, LONG).replace(f" {source.entry}(", f" {entry}(")
            found[name, f"{kind}, long"] = replace(source, text=text, entry=entry)
    return found


def of_seed(seed: int) -> str:
    """The kind that is drained with a seed."""
    return "two roles" if seed % 2 else "alone"


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> FusedKernels:
    """Of what the selected tests ask for."""
    calls = [x.callspec.params for x in request.session.items if x.path == request.path and hasattr(x, "callspec")]
    names = {(p["name"], p["kind"] if "kind" in p else of_seed(p["seed"])) for p in calls}
    return FusedKernels([x for name, x in made().items() if name in names])


def right(be: list[RoleSource], memory: list[Memory]) -> bool:
    """Whether every block of every stage has run once: each adds to what is there."""
    wanted = [fusing.meet_alone(x) if x.roles[0].early_return else fusing.fma_alone(x) for x in be]
    return all(np.array_equal(fusing.result(m), w) for m, w in zip(memory, wanted, strict=True))


class Host:
    """Raises `stop` once so many blocks are drawn, and keeps what was drawn then."""

    def __init__(self, counter: Counter, after: int) -> None:
        self.counter, self.after, self.at = counter, after, -1

    def __call__(self) -> None:
        now = self.counter.now
        if self.at < 0 and drawn(now) >= self.after:
            self.counter.set("stop", 1)
            self.at = drawn(now)


def drawn(now: WorkCounter) -> int:
    return min(now.ticket, now.end)


def launch(
    kernels: FusedKernels, name: str, kind: str, memory: list[Memory], counter: Counter, after: int, seed: int
) -> Host:
    """One launch that is told to stop after so many blocks. LC, the count and the guard zones are looked at."""
    source, host, lc = made()[name, kind], Host(counter, after), lc_memory(TMA_PROBLEM)
    before = counter.now.finished
    gang = source.grid[0] if kind.startswith("filling") else GANG
    given = {0: lc, **dict(enumerate(memory, 1))}
    error = kernels.run(source, given, counter, gang=gang, seed=seed, host=host, rounds=100_000)
    assert not error, error
    assert lc_is_right(TMA_PROBLEM, lc)
    now = counter.now
    assert before <= now.finished == drawn(now), f"blocks that were drawn and have not ended: {now}"
    if host.at >= 0:
        assert now.finished <= host.at + AHEAD * gang * len(source.be), "blocks that began long after the stop"
    assert counter.buffer.intact() and all(b.intact() for m in memory for b in m.buffers)
    return host


EVERY = [*zip(JOBS, KINDS, strict=True), ("two stages", "two roles, long")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_stop_at_every_draw(name: str, kind: str, kernels: FusedKernels) -> None:
    """From each on the job goes on where it stopped, and all blocks run once."""
    be, source = JOBS[name], made()[name, kind]
    total, stopped = sum(source.stages), set()
    for after, attempt in itertools.product(range(total), range(3)):
        if after in stopped:
            continue
        memory, counter = [fusing.of(x) for x in be], Counter(WorkCounter.start(source.stages, total))
        for number in range(100):
            counter.set("stop", 0)
            wanted = after if after not in stopped else total + 1  # launches work until one comes to this draw
            if launch(kernels, name, kind, memory, counter, wanted, 100 * after + number + 7 * attempt).at >= 0:
                stopped.add(after)
            if counter.now.finished == total:
                break
        assert counter.now.finished == total and right(be, memory)
    assert stopped >= set(range(total - 3)), "a host that looks now and then may miss the very last"


RANDOM = list(itertools.product(JOBS, [*KINDS, "filling, long"], range(2)))


@pytest.mark.parametrize(("name", "kind", "seed"), few(RANDOM, 4, unpack=True))
def test_random_stops_and_refills(name: str, kind: str, seed: int, kernels: FusedKernels) -> None:
    """Each launch has a limit and a stop of its own; limits are only raised."""
    be, source, chance = JOBS[name], made()[name, kind], random.Random(seed)
    total = sum(source.stages)
    memory, counter, limit, stops = [fusing.of(x) for x in be], Counter(WorkCounter.start(source.stages, 0)), 0, 0
    for number in range(400):
        limit = min(total, limit + chance.randrange(5))
        counter.set("limit", limit)
        counter.set("stop", 0)
        after = counter.now.finished + chance.randrange(2)
        host = launch(kernels, name, kind, memory, counter, after, 1000 * seed + number)
        stops += host.at >= 0
        assert counter.now.finished <= limit
        if counter.now.finished == total:
            break
    assert counter.now.finished == total and stops >= 1 and right(be, memory)


@pytest.mark.parametrize(("name", "kind"), [("meets and leaves", "filling")])
def test_a_launch_takes_its_course_whatever_ran_before(name: str, kind: str, kernels: FusedKernels) -> None:
    """A test's data are its own: what a host sees, and when it looks, depends on the seed of the launch."""
    be, source = JOBS[name], made()[name, kind]
    seen = []
    for seed in (5, 6, 7, 5):
        counter = Counter(WorkCounter.start(source.stages, sum(source.stages)))
        host = launch(kernels, name, kind, [fusing.of(x) for x in be], counter, 2, seed)
        seen.append((host.at, counter.now, counter.clock_ns))
    assert seen[0] == seen[3] and len({at for at, _, _ in seen}) > 1


@cache
def drains() -> dict[str, FusedSource]:
    """Each job as a co-runner."""
    found = {name: persistent(be, ctas=2, entry=f"drain{n}") for n, (name, be) in enumerate(JOBS.items())}
    return {name: x for name, x in found.items() if isinstance(x, FusedSource)}


@cache
def draining(name: str) -> FusedKernels:
    return FusedKernels([drains()[name]])


@pytest.mark.parametrize(("name", "seed"), few(itertools.product(JOBS, range(3)), 2, unpack=True))
def test_what_an_opportune_ratio_leaves_is_run_by_the_co_runner(name: str, seed: int, kernels: FusedKernels) -> None:
    """A limit below the grid splits the job; it is raised while the fused kernel runs, and again for the co-runner."""
    be, source, chance = JOBS[name], made()[name, of_seed(seed)], random.Random(seed)
    total = sum(source.stages)
    first = chance.randrange(total)
    second = chance.randrange(first, total)
    counter, memory = Counter(WorkCounter.start(source.stages, first)), [fusing.of(x) for x in be]
    raised: list[int] = []

    def host() -> None:
        if not raised and drawn(counter.now) >= first // 2:
            raised.append(first)
            counter.set("limit", second)

    lc = lc_memory(TMA_PROBLEM)
    given = {0: lc, **dict(enumerate(memory, 1))}
    assert kernels.run(source, given, counter, gang=GANG, seed=seed + 1, host=host, rounds=100_000) == ""
    assert lc_is_right(TMA_PROBLEM, lc)
    inside = counter.now.finished
    assert inside == drawn(counter.now) <= (second if raised else first) < total, "no block above the limit"
    counter.set("limit", total)
    rest = drains()[name]
    assert draining(name).run(rest, given, counter, gang=2, seed=seed + 2, rounds=100_000) == ""
    assert counter.now.finished == total and right(be, memory)
    assert counter.buffer.intact() and all(b.intact() for m in memory for b in m.buffers)


def afterwards(source: FusedSource, kernels: FusedKernels) -> list[int]:
    """Blocks that ended after a stop, of launches that work when they are told to."""
    be, found = JOBS["arithmetic"], []
    for seed in range(1, 25):
        counter = Counter(WorkCounter.start(source.stages, sum(source.stages)))
        host = Host(counter, 3)
        given = {0: lc_memory(TMA_PROBLEM), 1: fusing.of(be[0])}
        assert kernels.run(source, given, counter, gang=GANG, seed=seed, host=host, rounds=100_000) == ""
        if host.at >= 0:
            found.append(counter.now.finished - host.at)
    return found


@pytest.mark.slow
def test_long_blocks_stop_earlier_and_a_role_that_does_not_look_is_seen() -> None:
    found = made()
    kernels = FusedKernels([found["arithmetic", kind] for kind in ("alone", "alone, long")])
    short, long = (afterwards(found["arithmetic", kind], kernels) for kind in ("alone", "alone, long"))
    assert len(long) >= 12 and sum(long) / len(long) < sum(short) / len(short)
    source = found["arithmetic", "alone"]
    text = source.text.replace("if (stop != 0) break;", "").replace("h.stopped || h.stop != 0", "false")
    assert max(afterwards(source, FusedKernels([replace(source, text=text)]))) > AHEAD * GANG >= max(short)
