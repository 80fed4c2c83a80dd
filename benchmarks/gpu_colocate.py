"""Models with latency targets beside best-effort jobs on a GPU, under every policy, beside the simulation of each run.

    python -m benchmarks.gpu_colocate --prepare DIR [--only resnet50/b1,...] [--budget 20]      compile the plans
    python -m benchmarks.gpu_colocate --plans DIR --suite policies [--only ...] [--out FILE|-]
    python -m benchmarks.gpu_colocate --dry                                                     what would be measured

Plans of `benchmarks.co_runner.plans` (f16), jobs of `benchmarks/best_effort`, and networks as jobs: `resnet50-b16` is
resnet50 at batch 16 over a folder of drawn inputs, its results copied to the host, and compared with those alone when
all runs are over. Of a model and a job the samples are taken first, as `weft colocate prepare` does; then each policy
runs on the same seeded Poisson arrivals, `exclusive` first. A row has p50, p95 and p99 against the target, what the job
got over the whole GPU (`be`), the harness's own figures (send delay, decision, distance from Lindley's recursion), and
under `simulated` what the simulator says with the same samples. A run is void where its send delay is over 20 us at
p99, and says so.

Suites: `policies` (two models, two jobs, 0.3, 0.5 and 0.8 of the peak load, target 5 solo times, all policies but
`streams`), `batch1` (five models, four jobs of kernels and two networks, 0.3 and 0.5 of the service rate, targets 1.10
and 1.25 times p99 of `exclusive` on the same arrivals, `timeslice` and `weft`), `bursts` (resnet50 at batch 1 beside
`mriq`: gamma arrivals with a coefficient of variation of 3 and spikes of ten times the rate at 0.3 and 0.5 of the peak
load, and 1.5 times the peak load with queries refused as they come; late queries beside those of `exclusive`),
`end-to-end` (five models at batch 16,
twelve jobs, 0.8 of the peak load, target 5 solo times, `serial`, `priority`, `timeslice`, `green:36` and `weft`), `mps`
(ten of these cells with the job in another process; where the machine has no MPS it says why, and measures nothing).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.best_effort import jobs
from benchmarks.co_runner.plans import compiled, posed
from benchmarks.gpu_corunner import known, prepare
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from benchmarks.models import FURTHER, NETWORKS
from weft.colocate.compare import CarryOut, Cell, Settle, cell_of, run, simulated_all
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import JobError
from weft.colocate.kernel_job import KernelJob
from weft.colocate.kernel_process import as_process
from weft.colocate.policies import NAMES
from weft.colocate.policy import PolicyError
from weft.colocate.process_job import ProcessJob
from weft.colocate.staged_plan import network_job
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.mps import started
from weft.errors import KernelDeclinedError
from weft.ir.declined import Declined
from weft.kernels.policy_run import PolicyRun
from weft.kernels.samples import SampleRecord, write
from weft.kernels.scheduling import JobSpec
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

FIVE = ("resnet50", "bert_base", "vit_b16", "inception_v3", "vgg16")
TWELVE = ("mriq", "mri_fhd", "cp", "cutcp", "fft", "sgemm", "lbm", "tpacf", "stencil", "histo", "sad", "spmv")
TWO = ("resnet50-b16", "bert_base-b16")
"""Networks as jobs."""
FILES = 4
"""Of inputs of a network."""
PEERS = ("serial", "priority", "timeslice", "green:36")
ALL = tuple(n for n in NAMES if n not in ("exclusive", "mps", "streams"))
"""Policies that run on a GPU: `mps` needs other processes. By `streams` each kernel of a query waits for one of the
job: a run would take minutes; it is in `weft colocate run`."""
FUSES = frozenset(("tacker", "aker", "weft"))
"""Policies whose variants may have fused steps."""
TARGETS = (1.10, 1.25)
"""Of `batch1`, over p99 of `exclusive`."""
QUERIES = 3_300
FIGURES = ("p50_ms", "p95_ms", "p99_ms", "be")


@dataclass(frozen=True, slots=True)
class Pair:
    """A model at a batch and a job, with what is measured of them."""

    model: str
    batch: int
    job: str
    loads: tuple[float, ...]
    of_peak: bool
    policies: tuple[str, ...]
    relative: bool = False
    """Targets are `TARGETS` times p99 of `exclusive`; else 5 solo times."""
    arrivals: str = "poisson"
    """The process."""
    admit: bool = False
    """Queries that would miss the target are refused as they come."""

    def __str__(self) -> str:
        process = "" if self.arrivals == "poisson" else f"/{self.arrivals}"
        return f"{self.model}/b{self.batch}/{self.job}{process}{'/admit' if self.admit else ''}"


SUITES: dict[str, tuple[Pair, ...]] = {
    "policies": tuple(
        Pair(m, b, j, (0.3, 0.5, 0.8), True, (*ALL, "green:36"))
        for m, b in (("resnet50", 1), ("vit_b16", 16))
        for j in ("mriq", "stencil")
    ),
    "batch1": tuple(
        Pair(m, 1, j, (0.3, 0.5), False, ("timeslice", "weft"), True)
        for m in FIVE
        for j in ("mriq", "cp", "stencil", "histo", *TWO)
    ),
    "bursts": tuple(
        Pair(
            "resnet50", 1, "mriq", loads, True, (*PEERS[:1], "tally", "green:36", "weft"), arrivals=process, admit=admit
        )
        for process, loads, admit in (
            ("gamma:3", (0.3, 0.5), False),
            ("spikes:10", (0.3, 0.5), False),
            ("poisson", (1.5,), True),
        )
    ),
    "mps": tuple(Pair(m, 16, j, (0.8,), True, ("mps",)) for m in FIVE for j in ("mriq", "stencil")),
    "end-to-end": tuple(Pair(m, 16, j, (0.8,), True, (*PEERS, "weft")) for m in FIVE for j in TWELVE),
}


def wanted(pair: Pair, only: Sequence[str]) -> bool:
    """Whether a pair was asked for: whole parts between slashes; none: all."""
    return not only or any(f"/{x}/" in f"/{pair}/" for x in only)


def spec_of(name: str) -> tuple[JobSpec, Path]:
    """A job of `benchmarks/best_effort`, without end, and its folder."""
    found = jobs.load(name)
    return JobSpec(name, "kernels", stages=tuple(s.manifest.path.name for s in found.stages)), jobs.ROOT / name


def network_of(job: str) -> tuple[str, int] | None:
    """Name and batch of a network that is a job; None: it is a job of kernels."""
    found = re.fullmatch(r"(?P<name>\w+)-b(?P<batch>[1-9][0-9]*)", job)
    return (found["name"], int(found["batch"])) if found is not None else None


def compiled_for(pairs: Sequence[Pair]) -> list[tuple[tuple[str, int], tuple[SmBudget | None, ...]]]:
    """What is compiled: every model under a budget and without one, every network that is a job without one."""
    models = dict.fromkeys((p.model, p.batch) for p in pairs)
    networks = dict.fromkeys(n for p in pairs if (n := network_of(p.job)) is not None and n not in models)
    return [(m, (BUDGET, None)) for m in models] + [(n, (None,)) for n in networks]


def network_folder(job: str, folder: Path) -> JobSpec:
    """Write inputs of a network as a job, each drawn with another seed, into a folder; what the job is."""
    name, batch = network_of(job) or ("", 0)
    kind = NETWORKS.get(name) or FURTHER[name]
    (folder / "in").mkdir()
    for k in range(FILES):
        given = [x.half() if x.is_floating_point() else x for x in kind.inputs(batch, k)]
        np.savez(folder / "in" / f"{k}.npz", *(x.numpy() for x in given))
    return JobSpec(job, "network", model=f"{name}.onnx", inputs="in", outputs="out")


def figures(made: PolicyRun) -> Row:
    """What a table has of a run."""
    found = {f"p{q * 100:g}_ms": round(made.latency.quantile_us(q) / 1e3, 4) for q in (0.5, 0.95, 0.99)}
    return {**found, "be": round(made.be_throughput, 4)}


def row_of(suite: str, case: str, made: PolicyRun, sim: PolicyRun) -> Row:
    """A run, and the simulation of it."""
    row: Row = {
        "record": "case", "suite": suite, "case": case, "policy": made.policy, **figures(made),
        "target_ms": round(made.target_us / 1e3, 4), "kept": made.kept, "over_exclusive": round(made.over_exclusive, 4),
        "system": round(made.system_throughput, 4), "load": made.load, "rate_hz": round(made.rate_hz, 1),
        "queries": made.latency.queries, "late": made.latency.violations,
        "send_delay_us": round(made.latency.send_delay_us, 2), "arrivals": made.arrivals_digest,
        "variants": {v.name: v.queries for v in made.variants if v.queries}, "simulated": figures(sim),
    }  # fmt: skip
    if made.refused or sim.refused:
        row |= {"refused": made.refused, "simulated_refused": sim.refused}
    if made.decision_us is not None:
        row["decision_us"] = round(made.decision_us, 2)
    if made.off_lindley_us is not None:
        row["off_lindley_us"] = round(made.off_lindley_us, 2)
    return {**row, "void": made.latency.void} if made.latency.void else row


def cell_rows(
    suite: str, pair: Pair, record: SampleRecord, load: float, carry_out: CarryOut, *, queries: int, seed: int,
    known: Callable[[str], bool] = lambda _: False, settle: Settle = lambda p: p,
) -> Iterator[Row]:  # fmt: skip
    """Rows of one load: `exclusive`, then every policy to each target; where one cannot run, why not.

    A simulation has the variants that ran.
    """
    name = record.models[0].name
    first = cell_of(
        record, name, pair.job, qos_ms=None, load=load, of_peak=pair.of_peak, process=pair.arrivals, trace=None,
        queries=queries, seed=seed, admit=pair.admit,
    )  # fmt: skip
    alone = run(record, "exclusive", first, carry_out=carry_out)
    yield row_of(suite, f"{pair}/{load:g}/exclusive", alone, run(record, "exclusive", first))
    cells: list[tuple[str, Cell]] = [("", first)]
    if pair.relative:
        cells = [(f"{x:g}/", replace(first, target_ns=round(x * alone.p99_us * 1e3))) for x in TARGETS]
    for text, cell in cells:
        for policy in pair.policies:
            case = f"{pair}/{load:g}/{text}{policy}"
            if known(case):
                continue
            try:
                made = run(record, policy, cell, exclusive=alone, carry_out=carry_out, settle=settle)
            except PolicyError as error:
                reason = str(error.details["reason"])[:300]
                yield {"record": "case", "suite": suite, "case": case, "policy": policy, "declined": reason}
                continue
            sim = run(record, policy, cell, exclusive=alone, carry_out=simulated_all, settle=settle)
            yield row_of(suite, case, made, sim)


def peers_of(rows: Sequence[Row], pair: Pair, load: float) -> Row | None:
    """What Weft's row says besides: the job's rate under each peer that kept the target, and the ratio to the best."""
    own = {str(r["policy"]): r for r in rows if str(r["case"]).startswith(f"{pair}/{load:g}/") and "be" in r}
    mine = own.get("weft")
    if mine is None:
        return None
    peers = {n: float(str(r["be"])) for n, r in own.items() if n not in ("weft", "exclusive") and r["kept"]}
    best = max(peers.values(), default=0.0)
    ratio: dict[str, Any] = {"ratio": round(float(str(mine["be"])) / best, 4)} if best > 0 else {}
    return {**mine, "peers_be": peers, **ratio}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured how."""

    suite: str
    plans: Path
    budget: float
    queries: int
    seed: int
    again: bool
    record: Record | None
    left: Left
    """When nothing more is begun, and what was not."""
    samples: Path | None = None
    """A folder into which the samples of each pair are written."""
    fuse_s: float = 0.0
    """In which fused steps of a pair are looked for."""

    @property
    def mps(self) -> bool:
        """This process and the job's are clients of MPS."""
        return self.suite == "colocate-mps"

    def known(self, case: str) -> bool:
        """Whether a case has a row of this commit, or of these sources, that did not fail."""
        return not self.again and known(self.record, case)

    def loads(self, pair: Pair) -> list[float]:
        """Those of which a row is missing."""
        behind = f"{TARGETS[-1]:g}/" if pair.relative else ""
        return [x for x in pair.loads if not self.known(f"{pair}/{x:g}/{behind}{pair.policies[-1]}")]

    def add(self, row: Row) -> None:
        """Keep or print a row."""
        if self.record is None:
            print(row, flush=True)
        else:
            self.record.add(row)


@contextlib.contextmanager
def job_of(name: str, session: GpuSession, facts: GpuFacts, asked: Asked) -> Iterator[Callable[[], str]]:
    """A job of a session; what it gives says what is wrong behind all runs, empty: nothing is."""
    with ExitStack() as held:
        if asked.mps:
            spec, folder = spec_of(name)
            place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weft-job-"))) / name
            shutil.copytree(folder, place)
            (place / "job.toml").write_text(f'name = "{name}"\nkind = "kernels"\nstages = {list(spec.stages)}\n')
            process = ProcessJob(as_process(spec, place / "job.toml", place), place, held=held)
            session.add_job(process)
            yield lambda: process.failure
            return
        if (network := network_of(name)) is None:
            spec, folder = spec_of(name)
            job = KernelJob(spec, folder, facts=facts, held=held)
            session.add_job(job)
            yield job.check
            return
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weft-network-")))
        own = posed(*network)
        plan = compiled(own, None, asked.plans, asked.budget)
        for static, given in zip(plan.static_inputs, own.inputs, strict=True):
            static.copy_(given)
        spec = network_folder(name, place)
        made = network_job(spec, place, plan, device=session.device, stream=session.low, held=held)
        session.add_job(made)

        def wrong() -> str:
            made.finish()
            return wrong_results(plan, place)

        yield wrong


def wrong_results(plan: CudaExecutable, folder: Path) -> str:
    """What of the results that were written is not what the plan gives alone; empty: all are the same bits."""
    for path in sorted((folder / "out").glob("*.npz")):
        with np.load(folder / "in" / path.name) as given, np.load(path) as found:
            alone = plan(*(torch.from_numpy(given[n]).to(plan.device) for n in given.files))
            pairs = zip((found[n] for n in found.files), alone, strict=True)
            if not all(np.array_equal(x, y.cpu().numpy()) for x, y in pairs):
                return f"results of {path.name} are others than alone"
    return ""


def measured(pairs: Sequence[Pair], asked: Asked) -> list[str]:
    """All pairs of one model, with its plans recorded once; those that failed, and why."""
    left = {p: loads for p in pairs if (loads := asked.loads(p))}
    if not left:
        return []
    facts, failed = gpu_facts(None, calibrate=False), []
    with ExitStack() as held:
        model = posed(pairs[0].model, pairs[0].batch)
        plans = [compiled(model, b, asked.plans, asked.budget) for b in (None, BUDGET)]
        for plan in plans:
            for static, given in zip(plan.static_inputs, model.inputs, strict=True):
                static.copy_(given)
        session = GpuSession(f"{model.name}/b{model.batch}", Plans(*plans), facts, held=held, mps=asked.mps)
        for pair, loads in left.items():
            if asked.left.over(str(pair)):
                continue
            try:
                _pair(pair, loads, session, facts, asked)
            except (PolicyError, KernelDeclinedError, JobError, ValueError) as error:  # the GPU still answers
                failed.append(f"{pair}: {error}")
    gc.collect()
    torch.cuda.empty_cache()
    return failed


def _pair(pair: Pair, loads: Sequence[float], session: GpuSession, facts: GpuFacts, asked: Asked) -> None:
    with job_of(pair.job, session, facts, asked) as check:
        commit = "" if asked.record is None else str(asked.record.head["commit"])
        modes = [m for m in session.modes if m != "streams" and ("priority" in pair.policies or m != "priority")]
        fuse_s = asked.fuse_s if FUSES.intersection(pair.policies) else 0.0
        samples, refused = session.record(modes, commit=commit, driver=facts.driver, fuse_s=fuse_s)
        for name, why in refused.items():
            print(f"{pair}, {name}: {why}", flush=True)
        if asked.samples is not None:
            asked.samples.mkdir(parents=True, exist_ok=True)
            (asked.samples / f"{str(pair).replace('/', '-')}.json").write_text(write(samples), encoding="utf-8")
        for load in loads:
            if asked.left.over(f"{pair}/{load:g}"):
                continue
            rows = []
            for row in cell_rows(
                asked.suite, pair, samples, load, lambda p, c: session.run(p[0], c.arrivals, admit=c.admit),
                queries=asked.queries, seed=asked.seed, known=asked.known, settle=session.settled,
            ):  # fmt: skip
                rows.append(row)
                asked.add(row)
            if not pair.relative and (more := peers_of(rows, pair, load)) is not None:
                asked.add(more)
        if wrong := check():
            raise ValueError(wrong)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, or measure and record; the exit status is 1 where a pair fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile the plans into this folder")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="the folder that they were compiled into")
    parser.add_argument("--suite", choices=tuple(SUITES), default="policies")
    parser.add_argument("--only", default="", help="models, batches or jobs, whole parts of a case, by commas")
    parser.add_argument("--queries", type=int, default=QUERIES, help="of a run")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals")
    parser.add_argument("--again", action="store_true", help="cases that have a row of this commit, too")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--fuse", type=float, default=20.0, help="seconds to look for fused steps of a pair")
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing is begun after so many")
    parser.add_argument("--samples", type=Path, metavar="DIR", help="keep the samples of each pair, for simulations")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: say what would be measured")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    only = [x for x in chosen.only.split(",") if x]
    pairs = [p for p in SUITES[chosen.suite] if wanted(p, only)]
    if not pairs:
        parser.error(f"--only {chosen.only}: no pair of {chosen.suite} is named so")
    if chosen.dry:
        runs = sum(len(p.loads) * (1 + len(p.policies) * (len(TARGETS) if p.relative else 1)) for p in pairs)
        print("\n".join(map(str, pairs)))
        print(f"{len(pairs)} pairs, {runs} runs of {chosen.queries} queries")
        return
    if chosen.prepare is not None:
        left = Left(None, end, only=chosen.left)
        for at, budgets in compiled_for(pairs):
            prepare([at], budgets, chosen.prepare, chosen.budget, left)
        left.close()
        return
    if chosen.plans is None:
        parser.error("--prepare DIR compiles plans, --plans DIR measures them")
    suite = f"colocate-{chosen.suite}"
    failed: list[str] = []
    with ExitStack() as ends:
        if chosen.suite == "mps" and isinstance(why := started(ends), Declined):
            sys.exit(f"benchmarks.gpu_colocate: mps is in no table: {why.reason}")
        torch.zeros(1, device="cuda")
        ends.enter_context(primary_context())
        record = None
        if chosen.out:
            path = None if str(chosen.out) == "-" else chosen.out
            record = Record(folder_of_gpu(), suite, path=path)
        asked = Asked(
            suite,
            chosen.plans,
            chosen.budget,
            chosen.queries,
            chosen.seed,
            chosen.again,
            record,
            left := Left(record, end, only=chosen.left),
            chosen.samples,
            chosen.fuse,
        )
        for at in dict.fromkeys((p.model, p.batch) for p in pairs):
            failed += measured([p for p in pairs if (p.model, p.batch) == at], asked)
    for text in failed:
        print(f"benchmarks.gpu_colocate: {text}", file=sys.stderr)
    sys.exit(left.status(failed or (record is not None and record.failed)))


if __name__ == "__main__":
    main()
