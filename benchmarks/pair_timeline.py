"""When the roles of a fused kernel ran on one multiprocessor: recorded on a GPU, for `weft report` and `weft pairs`.

    python -m benchmarks.pair_timeline [--lc vgg16/conv3x3-64-224] [--be mriq] [--hosts 5] [--launches 3] [--sm N]
        [--cache DIR] [--database DIR] [-o FILE]

The kernel is the best of the pair in the tuning database (`python -m benchmarks.gpu_pairs` puts it there), else the
first that runs, in a form that records its spans (`weft.generate.cuda.role.fused.fuse` with `spans`). LC's results
are compared with those of LC alone. The timeline is kept in the tuning database, and written to FILE as JSON, which
`weft pairs --timeline FILE` takes over on another machine. `--dry` compiles that form for an H200, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu_pairs import Bench, Candidate, Job, Lc, Loader, candidates, job_of, lc_of, refusal, registers_of
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.streams import device_memory, fill, read_back, write
from weft.errors import DeviceError
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.role.fused import fuse
from weft.ir.declined import Declined
from weft.kernels.colocation import BYTES, FusedSource, WorkCounter
from weft.kernels.sm_timeline import SmTimeline, raw_spans, timeline, timeline_to_json, trace_bytes
from weft.options import Options
from weft.tune.pairs import fused_digest, keep_timeline, known
from weft.tune.store import Database

SPANS = 1 << 15
"""For which there is room."""


def chosen_kernel(every: Sequence[Candidate], database: Database, loader: Loader, lc: Lc, facts: GpuFacts) -> Candidate:
    """The best of the pair that the database knows, else the first that runs.

    Raises:
        ValueError: none runs.
    """
    of = {fused_digest(c.made): c for c in every}
    there = [r for r in known(database) if r.key.kernel in of and r.compared and not r.declined]
    if there:
        return of[max(there, key=lambda r: r.ratio).key.kernel]
    for one in every:
        if not refusal(loader, lc.sources[one.lc], one, facts):
            return one
    raise ValueError("no shape runs")


def recording(loader: Loader, lc: Lc, job: Job, one: Candidate, facts: GpuFacts) -> FusedSource:
    """The form of a kernel that records.

    Raises:
        ValueError: there is none, or it does not run.
    """
    source = lc.sources[one.lc]
    found = fuse(source, job.sources, one.shape, facts=facts, spans=SPANS)
    if isinstance(found, Declined):
        raise ValueError(found.reason)  # noqa: TRY004 - it is the pair
    if reason := refusal(loader, source, Candidate(one.lc, one.shape, found), facts):
        raise ValueError(f"the form that records does not run: {reason}")
    return found


def record(bench: Bench, job: Job, one: Candidate, launches: int, sm: int | None) -> SmTimeline:
    """So many launches of LC with the whole job to draw from.

    Raises:
        ValueError: LC's results differ from those alone, or nothing was recorded.
    """
    made = recording(bench.loader, bench.lc, job, one, bench.facts)
    with ExitStack() as held:
        _, _, _, at, _ = bench._job(job, held)
        size = BYTES + trace_bytes(SPANS)
        counter = held.enter_context(device_memory(size))
        cubin = bench.loader.compiled(made.text, made.flags)
        bench.loader.fill(cubin, ("w_be{}",), job.stages)
        bound = BoundFused(made, cubin.path, driver=bench.loader.driver)
        fused = bench.in_order(one.lc, bound.prepare([bench.at[one.lc], *at], counter))
        outputs = bench.memory[len(bench.lc.inputs) :]
        bench.gpu.run([bench.alone[one.lc]])
        wanted = [bench.gpu.keep(m) for m in outputs]
        for warm in (True, False):
            for m in outputs:
                bench.gpu.restore(m, m.before)
            fill(counter, 0, size)
            write(counter, WorkCounter.start(made.stages, sum(made.stages)).pack())
            bench.gpu.run([fused] * (1 if warm else launches))
        for k, (m, kept) in enumerate(zip(outputs, wanted, strict=True)):
            if (differs := bench.gpu.differs(m, kept)) >= 0:
                raise ValueError(f"latency-critical result {k} differs from byte {differs} on")
        found, left_out = raw_spans(read_back(counter + BYTES, size - BYTES))
    kernel = fused_digest(one.made)
    return timeline(found, left_out, lc=bench.lc.name, be=job.name, gpu=bench.facts.name, kernel=kernel, sm=sm)


def dry(lc_text: str, job: Job, hosts: int, cache: Path | None) -> None:
    """Compile the form that records for an H200.

    Raises:
        ValueError: no shape runs.
    """
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise DeviceError(problem=nvrtc.reason)
    facts = profile("h200")
    with ExitStack() as held, Database.open(None) as empty:
        loader = Loader(nvrtc, "sm_90a", held, cache)
        lc = lc_of(lc_text, facts, hosts, job.shared_bytes, contents=False)
        every = candidates(lc, range(len(lc.sources)), job, facts, registers_of(loader, job))
        made = recording(loader, lc, job, chosen_kernel(every, empty, loader, lc, facts), facts)
        print(f"{lc_text}/{job.name}: {loader.compiled(made.text, made.flags).of(made.entry)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, keep and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lc", default="vgg16/conv3x3-64-224", help="kernel by name or product MxNxK")
    parser.add_argument("--be", default="mriq", help="job of benchmarks/best_effort")
    parser.add_argument("--hosts", type=int, default=5, help="configurations of LC")
    parser.add_argument("--launches", type=int, default=3, help="of LC, one after the other")
    parser.add_argument("--sm", type=int, help="number of the multiprocessor; the one that ran most without")
    parser.add_argument("--cache", type=Path, help="folder in which cubins are kept")
    parser.add_argument("--database", type=Path, default=Options.from_environment(os.environ).cache)
    parser.add_argument("-o", "--output", type=Path, help="also write it as JSON")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90a")
    given = parser.parse_args(arguments)
    try:
        job = job_of(given.be)
        if given.dry:
            dry(given.lc, job, given.hosts, given.cache)
            return
        nvrtc = find_nvrtc()
        if isinstance(nvrtc, Declined):
            raise DeviceError(problem=nvrtc.reason)
        with primary_context(), ExitStack() as held:
            facts = gpu_facts(None, calibrate=False)
            database = held.enter_context(Database.open(given.database))
            lc = lc_of(given.lc, facts, given.hosts, job.shared_bytes)
            loader = Loader(nvrtc, facts.arch, held, given.cache)
            bench = Bench(lc, facts, loader, 3, held, given.cache, database)
            every = candidates(lc, range(len(lc.sources)), job, facts, registers_of(loader, job))
            found = record(bench, job, chosen_kernel(every, database, loader, lc, facts), given.launches, given.sm)
            keep_timeline(database, found)
    except ValueError as error:
        sys.exit(f"benchmarks.pair_timeline: {error}")
    if given.output is not None:
        given.output.write_text(json.dumps(timeline_to_json(found)) + "\n", encoding="utf-8")
    lc_us, be_us = (found.busy_us(best_effort=x) for x in (False, True))
    told = {"lc": found.lc, "be": found.be, "sm": found.sm, "spans": len(found.spans), "us": round(found.us, 2)}
    print(json.dumps({**told, "lc_us": round(lc_us, 2), "be_us": round(be_us, 2), "left_out": found.left_out}))


if __name__ == "__main__":
    main()
