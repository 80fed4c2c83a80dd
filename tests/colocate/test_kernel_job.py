"""A job of kernels placed on a GPU, without one: what is put where and in which order, and that no block is lost."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import benchmarks.best_effort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate import kernel_job
from weft.colocate import side as sides
from weft.colocate.contents import POISON, contents
from weft.colocate.job import JobError, digest, read_job, resume, save_progress
from weft.colocate.kernel_job import (
    MOST_AHEAD,
    PASSES_AT,
    PLACED_BYTES,
    CoRunner,
    CudaJobDevice,
    JobCount,
    KernelJob,
    counter_at,
    drawn,
    place_of,
)
from weft.colocate.pair_machine import GUARD
from weft.colocate.side import Buffer, Side
from weft.device.cuda import streams
from weft.device.cuda.api import cuda_error
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.dispatch import Queue
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.resources import Resources
from weft.errors import ArtifactError, DeviceError, KernelDeclinedError
from weft.generate.cuda.foreign.manifest import ManifestError
from weft.ir.declined import Declined
from weft.kernels.colocation import BYTES, WorkCounter
from weft.kernels.scheduling import JobProgress, JobSpec

H200 = profile("h200")
OURS = Path(benchmarks.best_effort.__path__[0])
MASK = (1 << 32) - 1
LOW, COPIES = 7, 9
"""Handles of streams."""


def told(said: str, text: str) -> None:
    """What is said, by a regular expression; empty: nothing is."""
    assert re.search(said, text) if said else text == "", text


def reason(found: object) -> str:
    return found.reason if isinstance(found, Declined) else ""


# -- a GPU that is a dictionary


@dataclass
class Bound:
    gpu: Gpu
    file: str
    entry: str
    given: dict[str, Any]

    def launch(self, stream: int) -> None:
        def run() -> None:
            self.gpu.log.append((self.entry, tuple(self.given["arguments"])))
            self.gpu.kernel(self)

        self.gpu.streams.setdefault(stream, deque()).append(run)


@dataclass
class Function:
    gpu: Gpu
    file: str
    entry: str
    prepared: list[tuple[int, Any]] = field(default_factory=list)
    attributes: Any = field(default_factory=lambda: SimpleNamespace(registers=32, shared_bytes=0))

    def prepare(self, shared_bytes: int, cluster: Any) -> None:
        self.prepared.append((shared_bytes, cluster))

    def require_co_resident(self, *given: Any) -> None:
        raise AssertionError(given)

    def bind(self, grid: Any, block: Any, arguments: Sequence[Any], **more: Any) -> Bound:
        found = {"grid": grid, "block": block, "arguments": arguments, **more}
        self.gpu.bound.append(Bound(self.gpu, self.file, self.entry, found))
        return self.gpu.bound[-1]


@dataclass
class Loaded:
    gpu: Gpu
    file: str
    variables: dict[str, int] = field(default_factory=dict)

    def function(self, entry: str) -> Function:
        return Function(self.gpu, self.file, entry)

    def variable(self, name: str) -> tuple[int, int]:
        if name not in self.variables:
            self.variables[name] = self.gpu.take(4096)
        return self.variables[name], self.gpu.variable_bytes


@dataclass
class Copied:
    gpu: Gpu
    address: int
    size: int
    data: bytes

    def copy(self, stream: int) -> None:
        def run() -> None:
            self.data = self.gpu.read(self.address, self.size)

        self.gpu.streams.setdefault(stream, deque()).append(run)

    def read(self) -> bytes:
        return self.data


class Gpu:
    """Memory by address, streams as queues that a test lets run, and kernels that only note that they ran."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails
        self.memory: dict[int, bytearray] = {}
        self.streams: dict[int, deque[Callable[[], None]]] = {}
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.bound: list[Bound] = []
        self.modules: list[Loaded] = []
        self.ends: list[str] = []
        self.graphs: list[list[Callable[[], None]]] = []
        self.queue: Queue | None = None
        self.kernel: Callable[[Bound], None] = lambda bound: None
        self.variable_bytes = 4096
        self.live = self.calls = 0
        self._next = 1 << 20

    def __call__(self, held: ExitStack) -> Gpu:
        self.held = held
        return self

    def _called(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fails:
            raise cuda_error("cuSomething", 2)

    def take(self, size: int) -> int:
        at, self._next = self._next, -(-(self._next + size) // 256) * 256 + 256
        self.memory[at] = bytearray([0xEE]) * size
        return at

    def given_back(self, what: str) -> None:
        self.live -= 1
        self.ends.append(what)

    def _holding(self, what: str) -> None:
        self.live += 1
        self.held.callback(self.given_back, what)

    # -- JobDevice

    def encode(self, *given: Any) -> bytes:
        return b"m" * 128

    def room(self, size: int) -> int:
        self._called()
        self._holding("memory")
        return self.take(size)

    def write(self, address: int, data: bytes) -> None:
        self._called()
        base = max(b for b in self.memory if b <= address)
        assert address - base + len(data) <= len(self.memory[base]), "behind what was taken"
        self.memory[base][address - base : address - base + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        base = max(b for b in self.memory if b <= address)
        return bytes(self.memory[base][address - base : address - base + size])

    def load(self, path: Path, *, prefer_shared: bool = True) -> Loaded:
        self._called()
        assert path.read_bytes()[:4] == b"\x7fELF"
        self._holding("module")
        self.modules.append(Loaded(self, path.stem))
        return self.modules[-1]

    def put(self, address: int, value: int, stream: int) -> None:
        def run() -> None:
            self.log.append(("put", (address, value)))
            self.write(address, value.to_bytes(4, "little"))

        self.streams.setdefault(stream, deque()).append(run)

    def recorded(self, work: Callable[[int], None], stream: int) -> int:
        """Captured: what is put on a stream while `work` puts it there does not run."""
        before = self.streams.get(stream, deque())
        self.streams[stream] = deque()
        work(stream)
        self._holding("graph")
        self.graphs.append(list(self.streams[stream]))
        self.streams[stream] = before
        return len(self.graphs) - 1

    def launch(self, graph: int, stream: int) -> None:
        self.log.append(("launch", (graph, stream)))
        self.streams.setdefault(stream, deque()).extend(self.graphs[graph])

    def through(self, queue: Queue) -> None:
        self.queue = queue

    def pinned(self, address: int, size: int) -> Copied:
        self._called()
        self._holding("pinned")
        return Copied(self, address, size, self.read(address, size))

    def wait(self) -> None:
        self.ends.append("waited")

    # -- for tests

    def run(self, *handles: int) -> None:
        for handle in handles:
            while self.streams.get(handle):
                self.streams[handle].popleft()()

    def counter(self, job: KernelJob) -> WorkCounter:
        return WorkCounter.unpack(self.read(job.counter, BYTES))

    def puts(self, job: KernelJob) -> list[tuple[str, int]]:
        """Words of the counter that were written, in order."""
        names = {WorkCounter.offset(n): n for n in WorkCounter.__slots__} | {PASSES_AT: "passes"}
        return [(names[x[0] - job.counter], x[1]) for what, x in self.log if what == "put"]


# -- best-effort roles on the host, as weft_cuda_fused.h has them


def signed(x: int) -> int:
    x &= MASK
    return x - (1 << 32) if x >> 31 else x


@dataclass
class Cta:
    chunk: int = 1
    """Blocks that it draws at once; of several the next are drawn while the last one runs."""
    blocks: deque[int] = field(default_factory=deque)
    """Of the chunk, that have not ended."""
    ahead: deque[int] = field(default_factory=deque)
    uncounted: int = 0
    over: bool = False


class Roles:
    """CTAs that draw from a counter, one step of one of them at a time, in a random order."""

    def __init__(
        self, stages: Sequence[int], counter: WorkCounter, seed: int, chunks: Sequence[int] = (1, 1, 1)
    ) -> None:
        self.stages, self.w, self.chance = stages, counter, random.Random(seed)
        self.ctas = [Cta(n) for n in chunks]
        self.drawn: list[int] = []
        self.ended: list[int] = []

    def set(self, **words: int) -> None:
        self.w = replace(self.w, **words)

    def step(self) -> bool:
        """Of one CTA; False: all are over."""
        there = [c for c in self.ctas if not c.over]
        if not there:
            return False
        one = self.chance.choice(there)
        if not one.blocks:
            one.blocks, one.ahead = one.ahead, deque()
            if not one.blocks:
                self._draw(one)
        elif len(one.blocks) == 1 < one.chunk and not one.ahead and not self.w.stop and self.chance.random() < 0.5:
            one.ahead = self._take(one.chunk)
        else:
            self.ended.append(one.blocks.popleft())
            one.uncounted += 1
            if not one.blocks and one.uncounted >= 8:
                self._count(one)
        return True

    def _take(self, many: int) -> deque[int]:
        """One addition: the blocks below the end, or none."""
        there, ticket = signed(self.w.end - self.w.ticket), self.w.ticket
        found = deque(ticket + k & MASK for k in range(min(many, max(0, there))))
        self.drawn.extend(found)
        self.set(ticket=ticket + many & MASK)
        return found

    def _count(self, one: Cta) -> None:
        n, one.uncounted = one.uncounted, 0
        self.set(finished=self.w.finished + n & MASK)
        if n and self.w.finished == self.w.open:
            stage = (self.w.stage + 1) % len(self.stages)
            self.set(stage=stage, open=self.w.open + self.stages[stage] & MASK)

    def _draw(self, one: Cta) -> None:
        w = self.w
        if w.stop:
            self._count(one)
            one.over = True
        elif signed(w.end - w.ticket) > 0:
            one.blocks = self._take(one.chunk)
        else:
            if self.chance.random() < 0.3:
                self._take(one.chunk)  # two have looked before one drew
            self._count(one)
            w = self.w
            goal = w.limit if signed(w.limit - w.open) < 0 else w.open
            if signed(goal - w.end) > 0:
                self.set(ticket=w.end, end=goal)
            else:
                one.over = signed(w.limit - w.end) <= 0


def walked(stages: Sequence[int], number: int) -> tuple[int, int, int]:
    """Place of a block by counting one after the other."""
    passes = stage = blocks = 0
    for _ in range(number):
        blocks += 1
        while blocks == stages[stage]:
            blocks, stage = 0, stage + 1
            if stage == len(stages):
                stage, passes = 0, passes + 1
    return passes, stage, blocks


STAGES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(STAGES, st.integers(0, 60), st.integers(0, 1 << 40))
def test_places_are_those_of_a_count(stages: list[int], number: int, passes: int) -> None:
    want = walked(stages, number)
    assert place_of(stages, number) == want
    far = place_of(stages, passes * sum(stages) + number)
    assert far == (passes + want[0], *want[1:])


@given(STAGES, st.integers(0, 1 << 34))
def test_a_counter_in_the_middle_is_that_of_a_job_that_came_there(stages: list[int], number: int) -> None:
    number -= number % sum(stages) if number > 200 else 0
    roles = Roles(stages, replace(counter_at(stages, number), limit=number + 23 & MASK), 1)
    while roles.step():
        pass
    want = replace(counter_at(stages, number + 23), limit=number + 23 & MASK)
    assert replace(roles.w, ticket=want.ticket) == want and drawn(roles.w) == number + 23 & MASK
    if not number:
        assert replace(WorkCounter.start(stages, 23), limit=0) == counter_at(stages, 0)


NEAR = st.sampled_from([0, 1 << 31, 1 << 32, 3 << 32, (1 << 45) + (1 << 31)])
"""Numbers around which the counter's words wrap, or change their sign."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(0, 40), st.integers(0, 12)),
        st.tuples(st.just("plain"), st.just(0), st.just(0)),
        st.tuples(st.just("unseen"), st.integers(0, 9), st.just(0)),
    ),
    max_size=8,
)


class Work:
    """A job's counter on a device, and the count of the host beside it."""

    def __init__(
        self, stages: Sequence[int], begin: int, passes: int, mixes: bool, seed: int, chunks: Sequence[int] = (1, 1, 1)
    ) -> None:
        self.stages, self.begin, self.seed, self.chunks = stages, begin, seed, chunks
        self.count = JobCount(stages, passes, begin=begin, mixes=mixes)
        self.device, self.passed = counter_at(stages, begin), 0
        self.ran: list[int] = []

    def draw(self, stop_after: int | None, most: int = 0, *, watched: bool = True) -> None:
        """One launch of a co-runner, stopped after so many steps."""
        words = self.count.begin(most)
        assert self.count.limit - self.count.ended <= MOST_AHEAD and not self.count.stands
        roles = Roles(self.stages, replace(self.device, stop=0, **words), self.seed + len(self.ran), self.chunks)
        was = len(self.ran)
        for number in itertools.count():
            if number == stop_after:
                roles.set(stop=self.count.mark)
            if not roles.step():
                break
            if watched and number % 5 == 0:
                self.count.see(roles.w, self.passed)
                self.watched(roles, was)
        assert sorted(roles.ended) == sorted(roles.drawn), "the roles of this test"
        self.device, self.ran = roles.w, self.ran + roles.drawn
        if most:
            assert len(roles.drawn) <= most

    def watched(self, roles: Roles, was: int) -> None:
        """What is said while blocks are under way: all before it have ended, and no more are counted than have."""
        sure = self.count.before - self.begin - was
        ended = {(x - self.begin - was) & MASK for x in roles.ended}
        assert ended >= set(range(sure)) and self.count.ended - self.begin <= was + len(ended)
        if self.count.stands:
            assert not any(c.blocks or c.ahead for c in roles.ctas)

    def seen(self) -> None:
        self.count.see(self.device, self.passed)
        assert self.count.stands and self.count.ended == self.count.before == self.begin + len(self.ran)
        assert self.ran == [n & MASK for n in range(self.begin, self.count.ended)], "each block once, and in order"
        passes, *where = walked(self.stages, self.begin % sum(self.stages) + len(self.ran))
        whole = self.begin // sum(self.stages) + passes + self.count.passed
        assert self.count.progress() == (whole, *where)


@settings(deadline=None, max_examples=150)
@given(
    STAGES, NEAR, st.integers(-30, 30), st.integers(0, 5), STEPS, st.booleans(), st.integers(0, 1 << 20),
    st.lists(st.sampled_from([1, 2, 3, 7, 40]), min_size=1, max_size=4),
)  # fmt: skip
def test_no_block_is_lost_or_doubled_whatever_is_begun_and_stopped(
    stages: list[int],
    near: int,
    off: int,
    passes: int,
    steps: list[tuple[str, int, int]],
    mixes: bool,
    seed: int,
    chunks: list[int],
) -> None:
    """Co-runners of chunks and single blocks, plain passes, limits and stops, wherever the counter's words wrap."""
    begin = max(0, near + off)
    own = passes and begin // sum(stages) + passes  # of the whole job
    work = Work(stages, begin, own, mixes, seed, chunks)
    old: list[tuple[WorkCounter, int]] = []
    for kind, first, most in steps:
        before = (work.count.ended, work.count.passed, work.count.progress())
        for snapshot in old:
            work.count.see(*snapshot)
        assert (work.count.ended, work.count.passed, work.count.progress()) == before, "older ones change nothing"
        if kind == "plain":
            middle = work.count.ended % sum(stages)
            declined = work.count.begin_pass()
            left = own * sum(stages) - work.count.ended - work.passed * sum(stages)
            assert (declined is not None) == ((bool(middle) and not mixes) or (bool(own) and left < sum(stages)))
            assert work.count.passed == work.passed, "one that was begun has not ended"
            work.passed += declined is None
        else:
            if kind == "unseen":
                work.draw(first, watched=False)
            work.draw(first, most if work.count.stands else 0)
        old.append((work.device, work.passed))
        work.seen()
    assert work.count.check(work.device, work.passed) == ""
    work.seen()
    if own:
        assert not work.count.is_done or work.count.ended == (own - work.passed) * sum(stages)
        work.draw(None)
        work.seen()
        assert work.count.is_done and begin + len(work.ran) + work.passed * sum(stages) == own * sum(stages)
        work.draw(None)
        work.seen()
        assert work.count.begin_pass() == Declined("less than a whole pass is left")


@pytest.mark.parametrize("seed", range(4))
def test_what_was_granted_is_forgotten_where_the_limit_falls(seed: int) -> None:
    work = Work([20], 0, 0, True, seed)
    work.draw(12)
    work.seen()
    assert signed(work.device.end - work.device.ticket) > 2, "stopped within what was granted"
    work.draw(None, 2)
    work.seen()
    few = Work([10], 0, 3, True, seed)
    few.draw(9)
    few.seen()
    assert few.count.begin_pass() is None and few.count.begin_pass() is None
    few.passed = 2
    few.draw(None)
    few.seen()
    assert len(few.ran) == 10 and few.count.is_done


def test_limits_stay_below_a_difference_that_changes_its_sign() -> None:
    endless = JobCount([5, 6])
    assert endless.begin()["limit"] == (1 << 31) - 1
    endless.see(replace(counter_at([5, 6], 0), finished=1000, ticket=1005, end=1009), 0)
    assert not endless.is_low and endless.extend() == 1000 + (1 << 31) - 1 and endless.limit == 1000 + MOST_AHEAD
    begun = (1 << 33) - 100
    late = JobCount([7], begin=begun)
    assert late.begin()["limit"] == (begun + MOST_AHEAD) & MASK
    late.see(WorkCounter(finished=(begun + 500) & MASK, end=begun + 600 & MASK, ticket=begun + 505 & MASK), 0)
    assert late.ended == begun + 500 and late.before == begun + 500 - (begun + 500) % 7
    few = JobCount([1000], 3_000_000, begin=2_999_999_000)
    assert few.begin()["limit"] == 3_000_000_000 & MASK and not few.is_done
    many = JobCount([1 << 30], 8)
    assert many.begin()["limit"] == MOST_AHEAD
    many.see(WorkCounter(finished=1 << 30, end=1 << 30, ticket=1 << 30), 0)
    assert many.is_low and many.extend() == (1 << 30) + MOST_AHEAD and not many.is_low


def test_a_stop_is_known_by_the_number_of_its_launch() -> None:
    count = JobCount([10])
    count.begin()
    first = WorkCounter(end=10, ticket=4, limit=count.limit, open=10, finished=4, stop=count.mark)

    def seen(counter: WorkCounter) -> tuple[bool, int, int]:
        count.see(counter, 0)
        return count.stands, count.ended, count.before

    assert seen(first) == (True, 4, 4)
    count.begin()
    assert seen(first) == (False, 4, 4), "that is the stop of the launch before"
    own = replace(first, limit=count.limit & MASK, ticket=7, stop=count.mark)
    assert seen(replace(own, finished=6)) == (False, 6, 4), "a block is under way"
    assert seen(replace(own, finished=7)) == (True, 7, 7)
    count.begin()
    stop = replace(own, finished=7, stop=count.mark)
    assert seen(stop) == (False, 7, 7), "of another limit"
    assert seen(replace(stop, limit=count.limit & MASK)) == (True, 7, 7)


def test_an_older_snapshot_takes_no_plain_pass_back_and_adds_none() -> None:
    count, at = JobCount([10]), counter_at([10], 0)
    for number in (1, 2, 3):
        assert count.begin_pass() is None
        count.see(at, number - 1)
        assert count.passed == number - 1
    for passed, want in ((2, 2), (0, 2), (1, 2), (3, 3), (4, 3)):
        count.see(at, passed)
        assert count.passed == want and count.progress() == (want, 0, 0)
    few = JobCount([10], 1)
    few.begin()
    early = WorkCounter(end=10, ticket=4, limit=10, open=10, finished=4, stop=few.mark)
    few.see(early, 0)
    few.begin()
    few.see(early, 0)
    assert not few.stands and few.limit == 10, "of the same limit, and of the launch before"
    count._launch = MASK
    assert count.mark == 1, "a number of 32 bits that is never 0"
    count.begin()
    with pytest.raises(ValueError, match="was not seen to stand still"):
        count.begin(3)


@pytest.mark.parametrize(("counter", "passed", "said"), [
    (WorkCounter(end=10, ticket=5, limit=100, open=10, finished=4), 0, "5 blocks were drawn, 4 have ended"),
    (WorkCounter(end=9, ticket=12, limit=100, open=10, finished=8), 0, "9 blocks were drawn, 8 have ended"),
    (WorkCounter(end=102, ticket=102, limit=100, open=110, finished=102), 0, "102 blocks have ended: .* 2 and 100 "),
    (WorkCounter(end=1, ticket=1, limit=100, open=10, finished=1), 0, "1 blocks have ended: .* between 2 and 100 "),
    (WorkCounter(end=10, ticket=5, limit=100, open=10, finished=5), 1, "1 plain passes have ended, 0 were begun"),
    (WorkCounter(end=10, ticket=5, limit=100, open=20, finished=5), 0, "stage 0 is open up to 20, not 0 up to 10"),
    (WorkCounter(end=12, ticket=12, limit=100, open=15, finished=12, stage=1), 0, ""),
])  # fmt: skip
def test_what_is_wrong_with_a_counter(counter: WorkCounter, passed: int, said: str) -> None:
    count = JobCount([10, 5], begin=2)
    count.begin(98)
    told(said, count.check(counter, passed))


# -- jobs of two stages, compiled


SCALE = """source = "scale.cu"
entry = "scale"
grid = [4]
block = [64]
[[parameters]]
name = "x"
type = "float"
kind = "input"
shape = [256]
init = "normal"
seed = 5
[[parameters]]
name = "t"
type = "float"
kind = "output"
shape = [256]
[[constants]]
name = "table"
type = "float"
shape = [4]
init = "uniform"
seed = 9
"""
SCALE_SOURCE = """__constant__ float table[4];
__global__ void scale(const float* x, float* t) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  t[i] = x[i] * table[i & 3];
}
"""
ADD = """source = "add.cu"
entry = "add"
grid = [3, 1, 2]
block = [32]
[[parameters]]
name = "t"
type = "float"
kind = "input"
shape = [192]
init = "zeros"
[[parameters]]
name = "z"
type = "float"
kind = "inout"
shape = [192]
init = "arange"
[[parameters]]
name = "step"
type = "float"
kind = "scalar"
value = 0.5
"""
ADD_SOURCE = """__global__ void add(const float* t, float* z, float step) {
  const int i = (blockIdx.z * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  z[i] += t[i] * step;
}
"""
FILES = {"scale.toml": SCALE, "scale.cu": SCALE_SOURCE, "add.toml": ADD, "add.cu": ADD_SOURCE}


@cache
def compiled(job: ConfinedJob) -> ConfinedResult | Declined:
    (found,) = compile_confined([job])
    return found


def compiler(jobs: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
    return [compiled(job) for job in jobs]


@cache
def read_once(path: Path, text: str, name: str, facts: GpuFacts, small: bool) -> Side:
    return sides.side(path, name, facts, small=small, changes={})


def side_of(path: Path, name: str, facts: GpuFacts, *, small: bool, changes: object) -> Side:
    """Each kernel is read once: what reads it has other tests."""
    assert changes == {}
    return read_once(path, path.read_text() if path.is_file() else "", name, facts, small)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if isinstance(nvrtc := find_nvrtc(), Declined):
        pytest.skip(nvrtc.reason)
    home = tmp_path_factory.mktemp("job")
    for name, text in FILES.items():
        (home / name).write_text(text)
    stages = '["scale.toml", "add.toml"]'
    (home / "job.toml").write_text(f'name = "two"\nkind = "kernels"\nstages = {stages}\npasses = 3\n')
    return home


ENDLESS = JobSpec("two", "kernels", ("scale.toml", "add.toml"))
Made = Callable[..., KernelJob]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Places a job, until the end of the test."""
    monkeypatch.setattr(kernel_job, "side", side_of)
    with ExitStack() as until_the_end:

        def place(folder: Path, gpu: Gpu, spec: JobSpec = ENDLESS, **more: Any) -> KernelJob:
            given = {"facts": H200, "held": until_the_end, "device": gpu, "compiler": compiler, **more}
            return KernelJob(spec, folder, **given)

        yield place


def test_buffers_and_constants_hold_what_the_files_say(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    assert (job.name, job.stages, job.pass_blocks, job.mixes) == ("two", (4, 6), 10, False)
    x, t = job.addresses[0].inputs[0], job.addresses[0].outputs[0]
    z = job.addresses[1].outputs[0]
    assert job.addresses[1].inputs == [t], "stages that name a buffer share it"
    wanted = {
        x: contents(Buffer("x", 1024, "normal", "f4", 5)), t: bytes([POISON]) * 1024,
        z: contents(Buffer("z", 768, "arange", "f4")),
    }  # fmt: skip
    for address, data in wanted.items():
        assert gpu.read(address, len(data)) == data
        assert gpu.read(address - len(GUARD), len(GUARD)) == gpu.read(address + len(data), len(GUARD)) == GUARD
    table = contents(Buffer("table", 16, "uniform", "f4", 9))
    scale, add = gpu.modules
    assert gpu.read(scale.variables["table"], 16) == table and not add.variables
    assert isinstance(job.co_runner(8), CoRunner)
    ((name, address),) = gpu.modules[2].variables.items()
    assert gpu.read(address, 16) == table and "w_be0" in name and "table" in name
    further = Loaded(gpu, "of a plan")
    job.fill(further, ["a symbol"])
    assert gpu.read(further.variables["a symbol"], 16) == table
    for wrong in ([], [""], ["a", "b"]):
        with pytest.raises(KernelDeclinedError, match="names other constants"):
            job.fill(further, wrong)
    gpu.variable_bytes = 15
    with pytest.raises(KernelDeclinedError, match="table: 15 bytes, and 16 are to be filled in"):
        job.fill(further, ["b"])


def test_stages_of_one_text_have_constants_of_their_own(made: Made, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scale.cu").write_text(SCALE_SOURCE)
    tables = []
    for name, seed in (("a.toml", 9), ("b.toml", 10)):
        (tmp_path / name).write_text(SCALE.replace("seed = 9", f"seed = {seed}"))
        tables.append(contents(Buffer("table", 16, "uniform", "f4", seed)))
    gpu = Gpu()
    job = made(tmp_path, gpu, JobSpec("twice", "kernels", ("a.toml", "b.toml")))
    assert job.mixes, "each pass writes what the one before it wrote"
    assert [gpu.read(m.variables["table"], 16) for m in gpu.modules] == tables
    assert isinstance(job.co_runner(1), CoRunner)
    found = {name: gpu.read(at, 16) for name, at in gpu.modules[2].variables.items()}
    assert [x for _, x in sorted(found.items())] == tables and all(f"w_be{i}" in n for i, n in enumerate(sorted(found)))


def test_launches_their_order_and_their_arguments(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    (x,), (t,), (z,) = job.addresses[0].inputs, job.addresses[0].outputs, job.addresses[1].outputs
    scale, add = job.plain()
    assert (scale.title, scale.blocks, add.blocks) == ("scale of scale.cu", 4, 6)
    assert [(b.given["grid"], b.given["block"], b.given["shared_bytes"]) for b in gpu.bound] == [
        ((4, 1, 1), (64, 1, 1), 0), ((3, 1, 2), (32, 1, 1), 0),
    ]  # fmt: skip
    own = job.co_runner(264)
    assert isinstance(own, CoRunner) and (own.ctas, own.threads) == (264, 64)
    assert gpu.bound[2].given["grid"] == (264, 1, 1) and not gpu.bound[2].given["dependent"]
    assert (own.takes.ctas, own.takes.threads) == (2, 128), "two of each multiprocessor"
    assert own.takes.registers and own.takes.registers % (2 * 64 * 8) == 0
    assert own.takes.shared_bytes and own.takes.shared_bytes % 256 == 0
    assert job.run_pass(LOW) is None
    job.begin(LOW)
    own.launch(LOW)
    job.snapshot(LOW)
    add.launch(LOW)
    assert gpu.log == [], "nothing is waited for"
    gpu.run(LOW)
    kernels = [x for x in gpu.log if x[0] != "put"]
    assert [(what.rpartition("add")[1] or what.rpartition("scale")[1] or what) for what, _ in kernels] == [
        "scale", "add", "w_co_runner", "add",
    ]  # fmt: skip
    half = int.from_bytes(b"\0\0\0\x3f", "little")
    assert [given for _, given in kernels[:2]] == [(x, t), (t, z, half)]
    assert kernels[2][1] == (x, t, t, z, half, job.counter)
    assert [what for what, _ in gpu.log].index("put") == 2, "a pass is counted behind its last kernel"
    assert job.ended_passes == 0
    job.read()
    assert job.ended_passes == 1 and job.progress() == JobProgress(digest(ENDLESS), 1, 0, 0)


def test_the_counter_at_the_begin_when_it_goes_on_and_at_the_stop(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    assert gpu.counter(job) == WorkCounter(open=4) and job.counter % 16 == 0
    job.begin(LOW, duty=128, period_ns=100_000, sms=66)
    gpu.run(LOW)
    begun = WorkCounter(limit=MOST_AHEAD, open=4, duty=128, sms=66, period=100_000)
    assert gpu.counter(job) == begun
    assert [name for name, _ in gpu.puts(job)] == ["limit", "duty", "sms", "period", "stop"]
    job.stop(COPIES)
    gpu.run(COPIES)
    assert gpu.counter(job) == replace(begun, stop=2)
    roles = Roles(job.stages, replace(begun, stop=0), 3)
    while roles.step():
        if len(roles.drawn) == 27:
            roles.set(stop=2)
    gpu.write(job.counter, roles.w.pack())
    assert job.read().finished == 0, "of the last snapshot"
    job.snapshot(LOW)
    gpu.run(LOW)
    assert job.read() == roles.w and job.stands and job.ended_blocks == len(roles.drawn) >= 27
    passes, stage, blocks = walked(job.stages, len(roles.drawn))
    assert job.progress() == JobProgress(digest(ENDLESS), passes, stage, blocks)
    assert job.check() == ""
    gpu.log.clear()
    job.begin(LOW)
    gpu.run(LOW)
    now = gpu.counter(job)
    assert now == replace(roles.w, stop=0, limit=len(roles.drawn) + MOST_AHEAD, duty=256, sms=0, period=0)
    job.extend(COPIES)
    assert not gpu.streams.get(COPIES), "far from its limit nothing is put"
    for wrong in ({"duty": 257}, {"duty": -1}, {"period_ns": 1 << 32}, {"sms": -1}, {"most_blocks": -1}):
        with pytest.raises(ValueError, match="a duty of"):
            job.begin(LOW, **wrong)


def simulated(gpu: Gpu, job: KernelJob, seed: int) -> Callable[[Bound], None]:
    """Co-runners that draw, and look at the stream of copies after each step."""

    def kernel(bound: Bound) -> None:
        if bound.entry != kernel_job.ENTRY:
            return
        roles = Roles(job.stages, gpu.counter(job), seed)
        while True:
            gpu.write(job.counter, roles.w.pack())
            if len(roles.drawn) >= 17:
                gpu.run(COPIES)
                roles.w = gpu.counter(job)
            if not roles.step():
                break

    return kernel


def test_a_job_of_some_passes_is_stopped_saved_resumed_and_done(made: Made, folder: Path, tmp_path: Path) -> None:
    spec, at = read_job(folder / "job.toml"), tmp_path / "progress.json"
    assert spec.passes == 3
    rounds = 0
    while True:
        gpu = Gpu()
        with ExitStack() as held:
            job = made(folder, gpu, spec, held=held, progress=resume(at, spec))
            before = job.progress()
            gpu.kernel = simulated(gpu, job, rounds)
            own = job.co_runner(4)
            assert isinstance(own, CoRunner)
            job.begin(LOW)
            own.launch(LOW)
            job.snapshot(LOW)
            job.stop(COPIES)
            gpu.run(LOW)
            job.read()
            assert job.stands and job.check() == ""
            done = 10 * before.passes + sum(job.stages[: before.stage]) + before.blocks + job.ended_blocks
            assert job.progress() == JobProgress(digest(spec), *walked(job.stages, done))
            assert (done == 30) == job.is_done
            save_progress(at, job.progress())
            rounds += 1
            if job.is_done:
                assert job.run_pass(LOW) == Declined("less than a whole pass is left")
                break
    assert rounds >= 2 and (resume(at, spec).passes, resume(at, spec).stage) == (3, 0)


def test_plain_passes_stand_between_passes_where_one_reads_what_another_wrote(made: Made, folder: Path) -> None:
    gpu, spec = Gpu(), replace(ENDLESS, passes=3)
    job = made(folder, gpu, spec)
    assert job.run_pass(LOW) is None
    job.begin(LOW, most_blocks=6)
    own = job.co_runner(2)
    assert isinstance(own, CoRunner)
    gpu.kernel = simulated(gpu, job, 1)
    own.launch(LOW)
    job.snapshot(LOW)
    gpu.run(LOW)
    assert job.progress().passes == 0 and isinstance(job.run_pass(LOW), Declined), "nothing was read"
    job.read()
    assert job.stands and job.progress() == JobProgress(digest(spec), 1, 1, 2)
    declined = job.run_pass(LOW)
    assert isinstance(declined, Declined) and "reads what the one before it wrote" in declined.reason
    job.begin(LOW, most_blocks=job.pass_blocks - 6)
    own.launch(LOW)
    gpu.run(LOW)
    assert job.check() == "" and job.progress() == JobProgress(digest(spec), 2, 0, 0)
    assert job.run_pass(LOW) is None
    assert job.run_pass(LOW) == Declined("less than a whole pass is left")
    gpu.run(LOW)
    assert job.check() == "" and job.is_done and job.ended_blocks == 10 and job.ended_passes == 2


def test_co_runners_are_made_once_and_declined_by_name(made: Made, folder: Path) -> None:
    gpu, asked = Gpu(), list[ConfinedJob]()

    def noting(jobs: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        asked.extend(jobs)
        return compiler(jobs)

    job = made(folder, gpu, compiler=noting)
    first = job.co_runner(132)
    assert job.co_runner(132) is first and job.co_runner(132, threads=64) is first
    assert isinstance(first, CoRunner) and first.takes.ctas == 1
    other, narrow = job.co_runner(1), job.co_runner(132, threads=32)
    assert isinstance(other, CoRunner) and isinstance(narrow, CoRunner) and narrow.threads == 32
    assert len(asked) == 4 and len(gpu.modules) == 4, "two plain ones, and two numbers of threads"
    few, many = job.co_runner(132, chunk=2), job.co_runner(264, chunk=16, ahead=True)
    assert isinstance(few, CoRunner) and isinstance(many, CoRunner) and job.co_runner(132, chunk=2) is few
    assert [(x.chunk, x.ahead) for x in (first, few, many)] == [(1, False), (2, False), (16, True)]
    assert [b.given["arguments"][:2] for b in gpu.bound[-2:]] == [[2, 0], [16, 1]], "arguments, and not text"
    assert len(asked) == 5 and len(gpu.modules) == 5 and "ahead of chunks" in reason(job.co_runner(1, ahead=True))
    for ctas, threads, said in (
        (0, 0, "0 CTAs of 64 threads"), (8, 48, "whole warps"), (8, 2048, "up to 1024 threads"),
        (132 * 33, 0, r"4356 CTAs of 64 threads: 4224 stay at once"),
    ):  # fmt: skip
        told(said, reason(job.co_runner(ctas, threads=threads)))
    tight = replace(H200, shared_per_block=16)
    told("bytes of shared memory in a CTA; 16 are possible", reason(made(folder, Gpu(), facts=tight).co_runner(1)))


@pytest.mark.parametrize(("own", "said"), [
    (Resources(registers=255), "over the register file"),
    (Resources(registers=32, spill_stores=40, spill_loads=40), "80 bytes of registers spilled"),
    (Resources(registers=32, spill_stores=32, spill_loads=32), ""),
    (Declined("x.cu(3): error: no such thing\nmore"), "does not compile for sm_90a: .*no such thing"),
])  # fmt: skip
def test_a_co_runner_is_judged_as_it_was_compiled(
    made: Made, folder: Path, own: Resources | Declined, said: str
) -> None:
    gpu, times = Gpu(), list[int]()

    def judged(jobs: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        found = compiler(jobs)
        if jobs[0].names[0] != kernel_job.ENTRY:
            return found
        times.append(len(jobs))
        (result,) = found
        assert isinstance(result, ConfinedResult)
        return [own if isinstance(own, Declined) else replace(result, resources=((result.names[0], own),))]

    job = made(folder, gpu, compiler=judged)
    modules = len(gpu.modules)
    for _ in range(2):
        found = job.co_runner(8, threads=1024)
        told(said, reason(found))
        assert isinstance(found, CoRunner) == (said == "")
    assert times == [1] and len(gpu.modules) == modules + (said == "")


def test_guards_and_lost_blocks_are_found(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    assert job.check() == ""
    z = job.addresses[1].outputs[0]
    gpu.write(z + 768, b"\x77")
    assert job.check() == "byte 0 of the guard behind buffer be_z was overwritten"
    gpu.write(z + 768, GUARD)
    gpu.write(z - 3, b"\x77")
    assert job.check() == "byte 253 of the guard in front of buffer be_z was overwritten"
    gpu.write(z - len(GUARD), GUARD)
    job.begin(LOW)
    gpu.run(LOW)
    gpu.write(job.counter, replace(gpu.counter(job), end=4, ticket=3, finished=2).pack())
    assert job.check().startswith("3 blocks were drawn, 2 have ended")
    assert not job.stands


# -- what is refused, and leaves nothing


def test_what_fails_leaves_nothing_allocated(
    made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as held:
        whole = Gpu()
        job = made(folder, whole, held=held)
        assert isinstance(job.co_runner(4), CoRunner) and whole.live and len(list(tmp_path.iterdir())) == 1
        calls = whole.calls
    assert whole.live == 0 and list(tmp_path.iterdir()) == []
    assert whole.ends[0] == "waited" and whole.ends.count("module") == 3, "told to stop first, and waited for"
    assert whole.counter(job).stop == job._count.mark
    for fails in range(calls):
        gpu = Gpu(fails)
        with ExitStack() as held:
            with pytest.raises(DeviceError, match="cuSomething"):
                made(folder, gpu, held=held).co_runner(4)
            built = "waited" not in gpu.ends and gpu.live > 0
            assert built or gpu.live == 0
            assert built or list(tmp_path.iterdir()) == []
        assert gpu.live == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"stages": ("../job/scale.toml", "../elsewhere.toml")}, JobError, "'../elsewhere.toml' leads out of the folder"),
    ({"stages": ("/etc/hostname",)}, JobError, "leads out of the folder"),
    ({"stages": ("none.toml",)}, ManifestError, "no such file"),
    ({"kind": "process", "file": "a.py", "function": "unit"}, JobError, "a job of kind 'process', not of kernels"),
    ({"memory_bytes": 4000}, JobError, r"memory: its buffers take 4432 bytes, it may have 4000"),
])  # fmt: skip
def test_jobs_that_are_refused(
    made: Made, folder: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    gpu = Gpu()
    stages = tuple(x.replace("../job/", f"../{folder.name}/") for x in change.get("stages", ENDLESS.stages))
    with pytest.raises(error, match=said):
        made(folder, gpu, replace(ENDLESS, **{**change, "stages": stages}))
    assert gpu.calls == 0
    if "memory_bytes" in change:
        assert made(folder, Gpu(), replace(ENDLESS, memory_bytes=4432)).pass_blocks == 10


def test_a_link_that_leads_out_of_the_folder_is_refused(made: Made, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scale.toml").symlink_to(folder / "scale.toml")
    with pytest.raises(JobError, match=r"'scale\.toml' leads out of the folder"):
        made(tmp_path, Gpu(), replace(ENDLESS, stages=("scale.toml",)))


@pytest.mark.parametrize(("where", "said"), [
    ((0, 2, 0), "block 0 of stage 2; the stages have 4, 6"), ((0, 1, 6), "block 6 of stage 1"),
    ((3, 0, 1), "behind the last of 3 passes"), ((3, 0, 0), ""), ((2, 1, 5), ""),
])  # fmt: skip
def test_progress_is_that_of_this_job(made: Made, folder: Path, where: tuple[int, int, int], said: str) -> None:
    spec = replace(ENDLESS, passes=3)
    progress = JobProgress(digest(spec), *where)
    with pytest.raises(JobError, match="of another job"):
        made(folder, Gpu(), spec, progress=replace(progress, job="another"))
    if said:
        with pytest.raises(JobError, match=said):
            made(folder, Gpu(), spec, progress=progress)
        return
    gpu = Gpu()
    job = made(folder, gpu, spec, progress=progress)
    assert job.progress() == progress and job.ended_blocks == 0 and job.is_done == (where[0] == 3)
    number = 10 * where[0] + 4 * where[1] + where[2]
    assert gpu.counter(job) == counter_at(job.stages, number)


def test_kernels_that_are_no_job_are_refused(made: Made, folder: Path, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    one = JobSpec("one", "kernels", ("add.toml",))
    stated = ADD.replace("[[parameters]]", 'state = ["seen"]\n[[parameters]]', 1)
    (tmp_path / "add.toml").write_text(stated)
    (tmp_path / "add.cu").write_text("__device__ int seen;\n" + ADD_SOURCE.replace("z[i] +=", "seen = i; z[i] +="))
    with pytest.raises(KernelDeclinedError, match="keeps seen from launch to launch"):
        made(tmp_path, Gpu(), one)
    (tmp_path / "add.toml").write_text(ADD)
    (tmp_path / "add.cu").write_text(ADD_SOURCE)
    job = made(tmp_path, Gpu(), one)
    assert job.mixes, "blocks of one stage by whatever way"
    (side,) = job.sides
    newer = replace(side, source=replace(side.source, capability=90))
    with pytest.raises(KernelDeclinedError, match=r"needs compute capability 9\.0; this is"):
        kernel_job._stage_blocks([newer], profile("a100"))
    with pytest.raises(KernelDeclinedError, match=r"add: it does not compile for sm_90a: .*error: none here"):
        made(tmp_path, Gpu(), one, compiler=lambda jobs: [Declined("a note\nx: error: none here")] * len(jobs))
    (tmp_path / "add.toml").write_text(ADD.replace('init = "arange"', 'init = "file"\nfile = "z.bin"'))
    (tmp_path / "z.bin").write_bytes(b"z" * 768)
    gpu = Gpu()

    def gone(jobs: Sequence[ConfinedJob]) -> list[ConfinedResult | Declined]:
        (tmp_path / "z.bin").unlink()
        return compiler(jobs)

    with pytest.raises(ArtifactError, match="its file: No such file"):
        made(tmp_path, gpu, one, compiler=gone)
    assert gpu.live == 0 and gpu.calls > 0


def test_which_jobs_read_what_the_pass_before_wrote(folder: Path) -> None:
    add = side_of(folder / "add.toml", "be0", H200, small=False, changes={})

    def carries(*stages: Sequence[tuple[str, str, str]]) -> bool:
        found = []
        for number, buffers in enumerate(stages):
            counts: Counter[str] = Counter()
            memory = {}
            for kind, name, init in buffers:
                memory[kind, counts[kind]] = Buffer(f"be{number}_{name}", 4, init, "f4")
                counts[kind] += 1
            found.append(replace(add, name=f"be{number}", memory=memory))
        return kernel_job._carries(found, sides.shared_memory(tuple(found))[1])

    first = ("in", "x", "normal"), ("out", "t", "poison")
    assert not carries(first, [("in", "t", "zeros"), ("out", "y", "poison")])
    assert carries(first, [("in", "t", "zeros"), ("out", "x", "poison")]), "the next pass reads it"
    assert carries(first, [("in", "t", "zeros"), ("out", "y", "zeros")]), "added to"
    assert not carries([("out", "t", "poison")], [("out", "t", "zeros")]), "added to what the pass itself has written"


@pytest.mark.parametrize("name", ["mriq", "product"])
def test_jobs_of_the_benchmarks_and_products(made: Made, name: str, tmp_path: Path) -> None:
    if isinstance(nvrtc := find_nvrtc(), Declined):
        pytest.skip(nvrtc.reason)
    if name == "product":
        (tmp_path / "kernel.toml").write_text('product = "MN=256 K=64"\n')
    else:
        for file in (OURS / name).iterdir():
            if file.is_file():
                (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "job.toml").write_text(f'name = "{name}"\nkind = "kernels"\nstages = ["kernel.toml"]\n')
    gpu = Gpu()
    facts = H200 if name == "mriq" else profile("a100")
    spec = read_job(tmp_path / "job.toml")
    job = made(tmp_path, gpu, spec, facts=facts, small=True)
    own = job.co_runner(facts.sms)
    assert isinstance(own, CoRunner) and own.takes.ctas == 1
    assert job.run_pass(LOW) is None
    gpu.kernel = simulated(gpu, job, 0)
    job.begin(LOW, most_blocks=job.pass_blocks)
    own.launch(LOW)
    gpu.run(LOW)
    assert job.check() == "" and job.ended_blocks == job.pass_blocks and job.progress().passes == 2
    (kernel, *_), (persistent,) = (
        [given for what, given in gpu.log if what != "put" and (what == kernel_job.ENTRY) == own]
        for own in (False, True)
    )
    assert persistent == (*kernel, job.counter)


def test_by_a_queue_a_pass_is_one_graph_that_was_captured_once(made: Made, folder: Path) -> None:
    gpu = Gpu()
    job = made(folder, gpu)
    job.through(cast("Queue", gpu))
    assert gpu.queue is cast("Queue", gpu), "words and copies, too"
    own = job.co_runner(264)
    assert isinstance(own, CoRunner)
    graph = job.recorded(own.launch, LOW)
    assert [job.run_pass(s) for s in (LOW, LOW, COPIES)] == [None] * 3
    gpu.launch(graph, LOW)
    assert [x for what, x in gpu.log if what == "launch"] == [(1, LOW), (1, LOW), (2, COPIES), (graph, LOW)]
    gpu.log.clear()
    gpu.run(LOW)
    plain = ["scale", "add", "put"]
    assert [what.rpartition("add")[1] or what.rpartition("scale")[1] or what for what, _ in gpu.log] == [
        *plain, *plain, "w_co_runner",
    ]  # fmt: skip
    assert job.recorded(own.launch, LOW) == graph


# -- the real device, by the calls that it makes


class Recorded:
    """What a queue is asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.log.append((name, given))


def test_calls_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    memory = bytearray(b"0123456789abcdef")
    host = (ctypes.c_char * 64)()

    class Api:
        class CUfunction_attribute:
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

        @staticmethod
        def CUstream(handle: int) -> tuple[str, int]:
            return ("stream", handle)

        def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
            def called(*arguments: Any) -> tuple[Any, ...]:
                calls.append((name, arguments))
                if name == "cuMemcpyDtoH":
                    arguments[0][:] = memory[: arguments[2]]
                answers = {"cuMemAlloc": 4096, "cuMemHostAlloc": ctypes.addressof(host)}
                return (0, answers[name]) if name in answers else (0,)

            called.__name__ = name
            return called

    api = Api()
    monkeypatch.setattr(kernel_job, "driver_api", lambda: api)
    monkeypatch.setattr(streams, "driver_api", lambda: api)
    with ExitStack() as held:
        device = CudaJobDevice(held)
        assert device.room(100) == 4096
        device.write(4096, b"abc")
        assert calls[-1] == ("cuStreamSynchronize", (("stream", 0),)), "it is there before anything is launched"
        device.put(4100, 5, 77)
        assert calls[-1] == ("cuStreamWriteValue32", (("stream", 77), 4100, 5, 0))
        seen = device.pinned(4096, 16)
        assert seen.read() == bytes(memory)
        seen.copy(78)
        assert calls[-1] == ("cuMemcpyDtoHAsync", (ctypes.addressof(host), 4096, 16, ("stream", 78)))
        device.wait()
        assert calls[-1] == ("cuCtxSynchronize", ())
        queue = Recorded()
        device.through(cast("Queue", queue))
        calls.clear()
        device.put(4100, 6, 77)
        seen.copy(78)
        device.wait()
        assert queue.log == [("write", (4100, 6, 77)), ("copy", (ctypes.addressof(host), 4096, 16, 78)), ("drain", ())]
        assert calls == [("cuCtxSynchronize", ())]

        class Failed(Recorded):
            def drain(self) -> None:
                raise cuda_error("cuGraphLaunch", 2)

        device.through(cast("Queue", Failed()))
        device.write(4096, b"stop")
        assert ("cuMemcpyHtoD", (4096, b"stop", 4)) in calls, "a job is told to stop whatever has failed"
        calls.clear()
    assert [name for name, _ in calls] == ["cuMemFreeHost", "cuMemFree"]

    class Module:
        def __init__(self, path: Path) -> None:
            calls.append(("load", (path,)))

        def function(self, entry: str) -> Any:
            return SimpleNamespace(entry=entry)

        def variable(self, name: str) -> tuple[int, int]:
            return 64, 8

        def unload(self) -> None:
            calls.append(("unload", ()))

    preferred: list[str] = []
    monkeypatch.setattr(kernel_job, "Module", Module)
    monkeypatch.setattr(kernel_job, "prefer_shared", lambda function: preferred.append(function.entry))
    calls.clear()
    with ExitStack() as held:
        loaded = CudaJobDevice(held).load(tmp_path)
        loaded.function("k")
        assert preferred == ["k"] and loaded.variable("x") == (64, 8)
    assert [name for name, _ in calls] == ["load", "unload"]
    assert PLACED_BYTES >= PASSES_AT + 4
