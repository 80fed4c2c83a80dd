"""Co-runners that draw chunks of blocks on a real GPU: every block once, and the bits of the job's own kernels."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from weft.colocate.contents import contents
from weft.colocate.job import parse_job
from weft.colocate.kernel_job import CoRunner, KernelJob
from weft.colocate.side import Buffer
from weft.device.cuda import streams
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter")
FOLDER = Path(__file__).parents[3] / "benchmarks" / "best_effort"
JOBS = {
    "mandelbrot": ("kernel",), "mriq": ("kernel",), "stencil": ("kernel",), "sgemm": ("kernel",),
    "histo": ("clear", "count"), "lbm": ("forth", "back"),
}  # fmt: skip
"""Blocks whose threads meet, or do not; stages that read each other."""
FORMS = ((2, 1, False), (1, 2, False), (2, 8, True), (4, 4, True), (2, 64, False), (1, 64, True))
"""CTAs of an SM, blocks in a chunk, whether the next is drawn ahead."""
PASSES = 3


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, stated: GpuFacts, tmp_path: Path) -> Iterator[KernelJob]:
    name: str = request.param
    shutil.copytree(FOLDER / name, tmp_path / name)
    stages = json.dumps([f"{name}/{x}.toml" for x in JOBS[name]])
    spec = parse_job(f'name = "{name}"\nkind = "kernels"\nstages = {stages}\n')
    with primary_context(), ExitStack() as held:
        yield KernelJob(spec, tmp_path, facts=stated, held=held)


@cache
def first(buffer: Buffer) -> bytes:
    """Of the jobs, which have some hundred megabytes in all, each once: drawn numbers take the host seconds."""
    return contents(buffer)


def fresh(job: KernelJob) -> None:
    """All buffers hold what they held at first."""
    for placed in job._placed.values():
        job._device.write(placed.address, first(placed.buffer))


def memory(job: KernelJob) -> dict[str, bytes]:
    return {name: job._device.read(p.address, p.buffer.nbytes) for name, p in job._placed.items()}


def plain(job: KernelJob, stream: streams.Stream, passes: int) -> dict[str, bytes]:
    """What its own kernels leave."""
    fresh(job)
    for _ in range(passes):
        job.put_pass(stream.handle)
    stream.synchronise()
    return memory(job)


def of(job: KernelJob, facts: GpuFacts, form: tuple[int, int, bool]) -> CoRunner:
    many, chunk, ahead = form
    made = job.co_runner(many * facts.sms, chunk=chunk, ahead=ahead)
    assert isinstance(made, CoRunner), made
    return made


def launch(job: KernelJob, made: CoRunner, stream: streams.Stream, most_blocks: int = 0) -> None:
    job.begin(stream.handle, most_blocks=most_blocks)
    made.launch(stream.handle)
    job.snapshot(stream.handle)


def test_any_chunks_in_any_pieces_give_the_bits_of_plain_passes(job: KernelJob, stated: GpuFacts) -> None:
    total, chance = PASSES * job.pass_blocks, random.Random(job.name)
    with closing(streams.Stream()) as low:
        want = plain(job, low, PASSES)
        for form in FORMS:
            fresh(job)
            made, before = of(job, stated, form), job.ended_blocks
            cuts = sorted(chance.sample(range(1, total), 6))
            for begin, end in zip([0, *cuts], [*cuts, total], strict=True):
                launch(job, made, low, end - begin)
                low.synchronise()
                job.read()
                assert job.stands and job.ended_blocks - before == end, form
            assert job.check() == "" and memory(job) == want, form


def test_a_stop_loses_nothing_and_doubles_nothing(job: KernelJob, stated: GpuFacts) -> None:
    """Of launches of every form, each stopped somewhere; the last one ends the pass."""
    with closing(streams.Stream()) as low, closing(streams.Stream()) as copies:
        fresh(job)
        for number, form in enumerate(FORMS):
            made = of(job, stated, form)
            launch(job, made, low)
            time.sleep(0.0005 * (1 + number % 3))
            job.stop(copies.handle)
            low.synchronise()
            job.read()
            assert job.stands and job.check() == "", form
        if rest := -job.ended_blocks % job.pass_blocks:
            launch(job, of(job, stated, FORMS[2]), low, rest)
            low.synchronise()
        assert job.check() == "" and job.ended_blocks % job.pass_blocks == 0
        got, passes = memory(job), job.ended_blocks // job.pass_blocks
        assert passes > 0 and got == plain(job, low, passes)
