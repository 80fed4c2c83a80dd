"""Predicted against measured durations beside a best-effort job, and what both jobs do with a joule.

    python -m benchmarks.gpu_colocate --prepare DIR --suite policies        compile the plans
    python -m benchmarks.colocate_predictors --plans DIR [--only resnet50/b1/mriq] [--out FILE|-]
    python -m benchmarks.colocate_predictors --plans DIR --clocks 1980,1500 --set-clock "nvidia-smi -lgc {mhz}" ...

Every second size fits a model, and the sizes between them are predicted:

* `solo`: the job's persistent kernel alone over so many blocks, by `fit_solo`.
* `fused`: a query whose fused steps may draw so many blocks, by `fit_pair` over the work that it did in fact.
* `variant`: queries by each plan variant, back to back; `Online` predicts each 20 of them before it has seen them.
* `clock`: the same at another clock of the SMs, the first 20 before a query was seen there. The clock is set by the
  command that is given, and by nothing else; without one the row has what the clock did by itself.
* `power`: `exclusive` and `weft` on the same arrivals at half the peak load: energy by the driver's own counter (NVML),
  queries and seconds of BE work to a joule, watts, and the clock.

Errors are relative, of held-out points alone. Aims: 2 % (solo), 3 % (fused), 5 % (variant) in the mean.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_colocate import SUITES, Pair, spec_of, wanted
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.colocate.compare import cell_of
from weft.colocate.durations import CLOCK_BUCKET_MHZ, Online, clock_bucket, fit_pair, fit_solo
from weft.colocate.gpu import GpuSession
from weft.colocate.kernel_job import CoRunner, KernelJob
from weft.colocate.live import Machine
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policy import PolicyError
from weft.colocate.recording import back_to_back
from weft.device.cuda.dispatch import Queue
from weft.kernels.samples import SampleRecord

AIMS = {"solo": 0.02, "fused": 0.03, "variant": 0.05, "clock": 0.05}
"""Mean errors, at most."""
SIZES = 12
ROUNDS = 15
WINDOW = 20
"""Queries that are predicted at once."""
QUERIES = 400
LOAD = 0.5
Point = tuple[float, float]


def halves(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points that fit, the first and the last among them, and those that are predicted."""
    ordered = sorted(points)
    held_out = ordered[1:-1:2]
    return [p for p in ordered if p not in held_out], held_out


def row_of(kind: str, case: str, pairs: Sequence[Point], **more: object) -> Row:
    """Of (predicted, measured) pairs."""
    errors = [abs(p / m - 1) for p, m in pairs]
    return {
        "record": "case", "suite": "colocate-predictors", "case": f"{case}/{kind}", "kind": kind,
        "mean_error": round(statistics.fmean(errors), 5), "p95_error": round(float(np.quantile(errors, 0.95)), 5),
        "aim": AIMS[kind], "reached": statistics.fmean(errors) <= AIMS[kind], "held_out": len(pairs),
        "points": [[round(p, 3), round(m, 3)] for p, m in pairs[:40]], **more,
    }  # fmt: skip


def solo_row(case: str, us: Callable[[int], float], sizes: Sequence[int], resident: int) -> Row:
    """`us`: time of so many blocks alone."""
    fitted, held_out = halves([(float(n), us(n)) for n in sizes])
    model = fit_solo(fitted, resident)
    return row_of("solo", case, [(model.us(n), t) for n, t in held_out], fitted=len(fitted))


def fused_row(case: str, drawn: Callable[[int], Point], sizes: Sequence[int]) -> Row:
    """`drawn`: of so many blocks at most, the BE work in a query over LC's time, and the time."""
    fitted, held_out = halves([drawn(n) for n in sizes])
    model = fit_pair(fitted)
    return row_of("fused", case, [(model.us(f), t) for f, t in held_out], fitted=len(fitted))


def predicted(online: Online, us: Sequence[float], mhz: Sequence[int]) -> list[Point]:
    """Medians of windows as they were predicted in front of each, and as they came."""
    found = []
    for at in range(0, len(us) - WINDOW + 1, WINDOW):
        window, clocks = us[at : at + WINDOW], mhz[at : at + WINDOW]
        found.append((online.predict_us(clock_mhz=statistics.median(clocks)), statistics.median(window)))
        for t, clock in zip(window, clocks, strict=True):
            online.observe(t, clock_mhz=clock)
    return found


Phases = Sequence[tuple[Sequence[float], Sequence[int]]]
"""Times of queries, and the clock at the end of each."""


def variant_rows(case: str, prior_us: float, margin_us: float, prior_mhz: int, phases: Phases) -> Iterator[Row]:
    """Of one variant at the clock as it is, and at each further one."""
    online = Online(prior_us, margin_us, clock_mhz=prior_mhz)
    (first, clocks), *others = phases
    yield row_of("variant", case, predicted(online, first, clocks), clock_mhz=round(statistics.median(clocks)))
    before = statistics.median(clocks)
    for us, mhz in others:
        now = statistics.median(mhz)
        moved = clock_bucket(now) != clock_bucket(before)
        at = f"{case}/{now:.0f}MHz"
        if not moved:
            yield {"record": "case", "suite": "colocate-predictors", "case": f"{at}/clock", "kind": "clock",
                   "declined": f"the clock stayed within {CLOCK_BUCKET_MHZ} MHz"}  # fmt: skip
            continue
        found = predicted(online, us, mhz)
        yield row_of("clock", at, found, clock_mhz=round(now), first_error=round(abs(found[0][0] / found[0][1] - 1), 5))


def power_row(case: str, p: Prepared, run: Callable[[Prepared], Outcome], joules: Callable[[], float]) -> Row:
    """A policy's run, and the energy that the GPU took meanwhile."""
    before, begun = joules(), time.perf_counter()
    out = run(p)
    energy, seconds = joules() - before, time.perf_counter() - begun
    row: Row = {
        "record": "case", "suite": "colocate-predictors", "case": f"{case}/{p.policy}/power", "kind": "power",
        "policy": p.policy,
    }  # fmt: skip
    if not energy > 0:
        return row | {"declined": "the driver does not say how much energy the GPU took"}
    clocks = [x for x in out.clock_mhz if x > 0]
    ended = len(out.queries) - len(out.refused)
    return row | {
        "joules": round(energy, 3), "watts": round(energy / seconds, 2), "queries_per_joule": round(ended / energy, 4),
        "be_ms_per_joule": round(out.work_us / 1e3 / energy, 5),
        "work_ms_per_joule": round((out.work_us + ended * p.model.solo.at(0.5)) / 1e3 / energy, 5),
        "clock_mhz": round(statistics.median(clocks)) if clocks else 0,
    }  # fmt: skip


# -- on a GPU


def timed_us(device: Queue, stream: int, work: Callable[[], object], after: Callable[[], object]) -> float:
    """Of what is put on a stream, by events; `after` is done behind it."""
    first, last = device.event(), device.event()
    device.record(first, stream)
    work()
    device.mark(last, stream, since=first)
    after()
    device.finish(stream)
    while not device.happened(last):
        device.sleep(10_000)
    found = device.apart_ns(last) / 1e3
    device.give_back([first, last])
    return found


def limited(job: KernelJob, device: Queue, stream: int, launch: Callable[[], object], blocks: int) -> Point:
    """Blocks that ended in a launch that may draw so many, and its time."""
    before = job.ended_blocks
    if blocks:
        job.begin(stream, most_blocks=blocks)

    def after() -> None:
        job.stop(stream)
        job.snapshot(stream)

    us = timed_us(device, stream, launch, after)
    job.read()
    return float(job.ended_blocks - before), us


def medians(once: Callable[[], Point]) -> Point:
    """Of several rounds, the first one left out."""
    found = [once() for _ in range(ROUNDS + 1)][1:]
    return statistics.median(x for x, _ in found), statistics.median(t for _, t in found)


def kernel_rows(case: str, session: GpuSession, job: KernelJob, record: SampleRecord, sms: int) -> Iterator[Row]:
    """`solo` of the job, and `fused` of the largest variant with fused steps."""
    stream, made = session.low.cuda_stream, session._drawn(job, session._drawing, sms)
    assert isinstance(made, CoRunner)
    graph, device = job.recorded(made.launch, stream), session.device

    def alone(blocks: int) -> float:
        return medians(lambda: limited(job, device, stream, lambda: device.launch(graph, stream), blocks))[1]

    yield solo_row(case, alone, sizes(job.pass_blocks), made.ctas * made.chunk)
    try:
        p = session.settled(prepare(record, "aker", session.name, job.name, 1 << 40))
    except PolicyError as error:
        reason = str(error.details["reason"])[:300]
        yield {"record": "case", "suite": "colocate-predictors", "case": f"{case}/fused", "kind": "fused",
               "declined": reason}  # fmt: skip
        return
    lane = session._lane_of_point(p, p.points[-1])
    lane = session._there(p.points[-1].variant.name, lane)
    lc_us, block_us = record.models[0].solo.at(0.5), record.jobs[0].block_us

    def drawn(blocks: int) -> Point:
        found, us = medians(lambda: limited(job, device, lane.stream, lane.launch, blocks))
        return found * block_us / lc_us, us

    most = round(medians(lambda: limited(job, device, lane.stream, lane.launch, job.pass_blocks))[0])
    yield fused_row(case, drawn, [0, *sizes(max(most, SIZES))])


def sizes(most: int) -> list[int]:
    """Numbers of blocks up to the most."""
    return sorted({max(1, round(most * k / SIZES)) for k in range(1, SIZES + 1)})


def phases(machine: Machine, model: str, variant: int, clocks: Sequence[int], set_clock: str) -> Phases:
    """Queries back to back at the clock as it is, and at each that is set."""
    found = [back_to_back(machine, model, variant, QUERIES)]
    for mhz in clocks:
        subprocess.run(shlex.split(set_clock.format(mhz=mhz)), check=True, stdout=subprocess.DEVNULL)
        time.sleep(1.0)
        found.append(back_to_back(machine, model, variant, QUERIES))
    return found


def session_rows(case: str, session: GpuSession, record: SampleRecord, joules: Callable[[], float],
                 clocks: Sequence[int], set_clock: str, seed: int) -> Iterator[Row]:  # fmt: skip
    """`variant`, `clock` and `power`."""
    name, job = session.name, record.jobs[0].name
    names = [m.name for m in record.modes]
    machine = session.machine(names)
    for number, mode in enumerate(["alone", *names]):
        lc = record.models[0].solo if number == 0 else record.modes[number - 1].lc
        mhz = record.models[0].clock_mhz if number == 0 else record.modes[number - 1].clock_mhz
        found = phases(machine, name, number, clocks, set_clock)
        machine.close_job()
        yield from variant_rows(f"{case}/{mode}", lc.at(0.5), lc.at(0.99) - lc.at(0.5), mhz or 1980, found)
    machine.give_back()
    cell = cell_of(record, name, job, qos_ms=None, load=LOAD, of_peak=True, process="poisson", trace=None,
                   queries=10 * QUERIES, seed=seed)  # fmt: skip
    for policy in ("exclusive", "weft"):
        p = session.settled(prepare(record, policy, name, "" if policy == "exclusive" else job, cell.target_ns))
        yield power_row(case, p, lambda x: session.run(x, cell.arrivals), joules)


def measured(pair: Pair, chosen: argparse.Namespace) -> Iterator[Row]:
    """All rows of a model and a job of kernels."""
    from benchmarks.co_runner.plans import compiled, posed
    from weft.colocate.gpu import BUDGET, Plans
    from weft.device.cuda.driver import primary_context
    from weft.device.cuda.facts import gpu_facts
    from weft.device.cuda.nvml import joules_of

    torch.zeros(1, device="cuda")
    joules = joules_of(str(torch.cuda.get_device_properties(0).uuid))
    with primary_context(), ExitStack() as held:
        facts, model = gpu_facts(None, calibrate=False), posed(pair.model, pair.batch)
        plans = [compiled(model, b, chosen.plans, chosen.budget) for b in (None, BUDGET)]
        for plan in plans:
            for static, given in zip(plan.static_inputs, model.inputs, strict=True):
                static.copy_(given)
        session = GpuSession(f"{pair.model}/b{pair.batch}", Plans(*plans), facts, held=held)
        spec, folder = spec_of(pair.job)
        job = KernelJob(spec, folder, facts=facts, held=held)
        session.add_job(job)
        record, _ = session.record(("co-runner 128", "green36"), commit="", driver=facts.driver, fuse_s=chosen.fuse)
        case = str(pair)
        yield from kernel_rows(case, session, job, record, facts.sms)
        yield from session_rows(case, session, record, joules, chosen.clocks, chosen.set_clock, chosen.seed)
        if wrong := job.check():
            raise ValueError(wrong)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, metavar="DIR", help="of `benchmarks.gpu_colocate --prepare`")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--fuse", type=float, default=20.0, help="seconds to look for fused steps")
    parser.add_argument("--only", default="resnet50/b1/mriq", help="models, batches or jobs, whole parts of a case")
    parser.add_argument("--clocks", default="", help="of the SMs, in MHz, by commas")
    parser.add_argument("--set-clock", default="", help="command that sets a clock, with {mhz} in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="no pair is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: say what would be measured")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    pairs = [p for p in SUITES["policies"] if wanted(p, [x for x in chosen.only.split(",") if x])]
    if not pairs:
        parser.error(f"--only {chosen.only}: no pair of the suite `policies` is named so")
    chosen.clocks = [int(x) for x in chosen.clocks.split(",") if x]
    if chosen.clocks and "{mhz}" not in chosen.set_clock:
        parser.error("--clocks needs --set-clock with {mhz} in it")
    if chosen.dry:
        print("\n".join(map(str, pairs)))
        return
    if chosen.plans is None:
        parser.error("--plans DIR has the plans that are measured")
    path = None if chosen.out is None or str(chosen.out) == "-" else chosen.out
    record = Record(folder_of_gpu(), "colocate-predictors", path=path) if chosen.out else None
    failed, left = False, Left(record, end, only=chosen.left)
    for pair in pairs:
        if left.over(str(pair)):
            continue
        try:
            for row in measured(pair, chosen):
                print(row, flush=True)
                if record is not None:
                    record.add(row)
        except (PolicyError, ValueError) as error:  # the GPU still answers
            failed = True
            print(f"benchmarks.colocate_predictors: {pair}: {error}", file=sys.stderr)
    sys.exit(left.status(failed or (record is not None and record.failed)))


if __name__ == "__main__":
    main()
