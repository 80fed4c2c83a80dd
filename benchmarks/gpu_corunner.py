"""Whole plans beside best-effort work: a persistent co-runner under a budget of each SM, and its peers.

    python -m benchmarks.gpu_corunner --prepare DIR [--only resnet50/b1,...] [--budget 20]      compile the plans
    python -m benchmarks.gpu_corunner --plans DIR [--only resnet50/b1/ffma,...] [--seconds 540] [--out FILE|-]
    python -m benchmarks.gpu_corunner --plans DIR --first [--only resnet50/b1,...]              the first query
    python -m benchmarks.gpu_corunner --plans DIR --steps [--only resnet50/b1,...]              which steps grow
    python -m benchmarks.gpu_corunner --dry                                                     compile, without a GPU

Plans of resnet50, bert_base, vit_b16, inception_v3 and vgg16 in f16, batch 1 and 16, made under `--sm-budget` and
without one; `DIR` holds what was tuned and chosen, and `--plans` finds it there. Queries run back to back, each timed
by events, on the same buffers in every way. A round takes all ways of a model and a kind of work in another order,
between two of the model beside nothing (A/A) and one of the plan without a budget; there are `--rounds` of them.

Ways (`--ways`): a co-runner of one CTA on each SM (`128`: its threads; `-duty96`: in 96 of 256 parts of its time;
`-duty96-sync`: all CTAs in the same part of it; `-sms66`: on half of the SMs); sizes over the limit once more with the
duty that keeps it. Peers by the same plan: `short` blocks on the stream of lowest priority, `green36` (best-effort work
on 36 SMs by a green context), `serial50` (a launch of half the query's time behind each), `slices2` (2 ms in turn).
`-plain` behind a peer: by the plan without a budget.

Work: multiply-adds, exponentials, reads of memory, a histogram (`benchmarks/co_runner/units.cu`), counted exactly. `be`
is its rate over that of the same work alone on the whole GPU, at its best; `added` is the model's rate over its own
alone plus `be`; `chosen` marks the co-runner that adds most with p99 at most 1.08 times that alone at batch 1, and p50
at most 1.10 times at batch 16. Results of the model are compared with those alone after each round, bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch

from benchmarks.co_runner.beside import Served, alone, in_turns, quietly, with_co_runner, with_short_blocks
from benchmarks.co_runner.first import STEPS, trial
from benchmarks.co_runner.machine import Gpu
from benchmarks.co_runner.plans import BUDGET, Posed, compiled, posed, recorded
from benchmarks.co_runner.rows import (
    LIMITS,
    WAYS,
    Sample,
    Way,
    beside,
    clocks,
    fitted,
    groups,
    marked,
    over,
    quantile,
    spread,
)
from benchmarks.co_runner.steps import diagnose
from benchmarks.co_runner.units import FULL_THREADS, KINDS, USUAL, co_runner, plain, unit_of
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.colocate.gpu import LANES, fits, whole_sm
from weft.device.cuda.api import CudaError
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.partition import Partition, partitioned
from weft.errors import OptionError
from weft.generate.cuda.role.persistent import needs
from weft.ir.declined import Declined
from weft.kernels.colocation import left_beside
from weft.options import parse_text
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

SUITE = "colocate-guests"
STEPS_SUITE = "colocate-steps"
QUERIES_MS, LEAST_QUERIES, MOST_QUERIES = 40.0, 200, 600
LEAST_OF_A_BATCH = 100
"""Queries of a round above batch 1, which is judged by its median."""
PERIODS = 4
"""Of a query, in each of which a co-runner whose CTAs work at the same time does its share."""
SHORT_GRID = 64
"""Short blocks of a launch, for each SM."""
GREEN_CTAS = 8
"""CTAs of 256 threads on each SM of the part that has best-effort work."""


@final
class Model:
    """A model's plans, recorded where each way needs them."""

    def __init__(self, gpu: Gpu, model: Posed, budget: SmBudget, folder: Path, seconds: float, held: ExitStack) -> None:
        self.gpu, self.model, self.budget, self._parts = gpu, model, budget, ExitStack()
        self._green: dict[tuple[int, bool], tuple[Served, torch.cuda.Stream, int] | Declined] = {}
        self.served: dict[bool, Served] = {}
        self.found: dict[bool, CudaExecutable] = {}
        held.callback(self.close)
        for p in (False, True):
            self.found[p] = compiled(model, None if p else budget, folder, seconds)
        lanes = [gpu.high, *(gpu.stream(gpu.greatest) for _ in range(LANES - 1))]
        for p in (False, True):
            self.served[p] = self._on(lanes, plain=p)

    def _on(self, lanes: Sequence[torch.cuda.Stream], *, plain: bool) -> Served:
        executable = recorded(self.found[plain], lanes, self.gpu.facts, None if plain else self.budget)
        wanted = self.served[plain].wanted if plain in self.served else ()
        return Served(executable, lanes[0], self.model.inputs, wanted)

    def close(self) -> None:
        """Give the plans back, then the parts of the GPU, whose streams the framework has noted for their memory."""
        torch.cuda.synchronize()
        self._green.clear()
        self.served.clear()
        self.found.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self._parts.close()

    def green(self, rest: int, *, plain: bool) -> tuple[Served, torch.cuda.Stream, int] | Declined:
        """The plan on all but `rest` multiprocessors, the stream of these and their number."""
        if (rest, plain) not in self._green:
            self._green[rest, plain] = self._partitioned(rest, plain=plain)
        return self._green[rest, plain]

    def _partitioned(self, rest: int, *, plain: bool) -> tuple[Served, torch.cuda.Stream, int] | Declined:
        sms = self.gpu.facts.sms - rest
        if (why := fits(self.found[plain], self.gpu.facts, sms)) is not None:
            return why
        parts = self._parts.enter_context(partitioned(sms))
        if not isinstance(parts, Partition):
            return parts
        handles = [parts.first.stream(priority=self.gpu.greatest) for _ in range(LANES)]
        lanes = [torch.cuda.ExternalStream(x) for x in handles]  # type: ignore[no-untyped-call]
        low = torch.cuda.ExternalStream(parts.rest.stream(priority=self.gpu.least))  # type: ignore[no-untyped-call]
        return self._on(lanes, plain=plain), low, parts.rest.sms


def budget_of(text: str) -> SmBudget:
    """A budget of each SM. Raises ValueError: it is none."""
    try:
        found = parse_text("sm_budget", "SmBudget", text)
    except OptionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, SmBudget) or found.problem():
        raise ValueError(f"{text}: no budget of an SM")
    return found


def round_of(model: Model, kind: str, way: Way, count: int, query_us: float) -> Sample | Declined:
    """A round of so many queries in one way. Declined: the way is impossible here."""
    gpu, batch, served = model.gpu, model.model.batch, model.served[way.plain]
    sms = gpu.facts.sms
    if way.kind == "co-runner":
        work = gpu.co_runner(unit_of(kind, way.number, batch), sms)
        left = left_beside(whole_sm(gpu.facts), model.budget)
        fit = left if isinstance(left, Declined) else left_beside(left, work.takes)
        if isinstance(fit, Declined):
            return fit
        return with_co_runner(gpu, served, work, way, count)
    if way.kind == "green":
        found = model.green(way.number, plain=way.plain)
        if isinstance(found, Declined):
            return found
        served, low, rest = found
        work = gpu.co_runner(unit_of(kind, FULL_THREADS, batch), GREEN_CTAS * rest)
        return with_co_runner(gpu, served, work, way, count, low)
    if way.kind == "short":
        return with_short_blocks(
            gpu, served, gpu.plain(unit_of(kind, FULL_THREADS, 1, short=True), SHORT_GRID * sms), count
        )
    unit = unit_of(kind, FULL_THREADS, 1, short=True)
    slice_us = way.number / 100 * query_us if way.kind == "serial" else way.number * 1e3
    blocks = max(sms, round(gpu.full(kind, batch) * slice_us / unit.work))
    together = 1 if way.kind == "serial" else max(1, round(slice_us / query_us))
    return in_turns(served, gpu.plain(unit, blocks), count, together)


@final
class Tried:
    """Samples of a model beside one kind of work in every way, and beside nothing before and behind each round."""

    def __init__(self, model: Model, kind: str, count: int, query_us: float) -> None:
        self._model, self._kind, self._count, self._query_us = model, kind, count, query_us
        self.first, self.second, self.bare = Sample(), Sample(), Sample()
        self.found: dict[Way, Sample] = {}
        self.why: dict[Way, tuple[str, str]] = {}
        """Ways without samples: what is said in the row, and the reason."""
        self.done: dict[Way, int] = {}
        """Rounds that each way was in."""

    def rounds(self, ways: Sequence[Way], rounds: int, end: float) -> None:
        """So many rounds of further ways; none but the first begins behind `end`."""
        self.found |= {w: Sample() for w in ways}
        self.done |= dict.fromkeys(ways, 0)
        gpu, served = self._model.gpu, self._model.served
        for number in range(rounds if ways else 0):
            if number and time.perf_counter() > end:
                break
            order = list(ways)
            random.Random(number).shuffle(order)
            self.first.add(quietly(lambda: alone(served[False], self._count), gpu))
            for way in order:
                if way not in self.why:
                    self._one(way)
                self.done[way] += 1
            self.bare.add(quietly(lambda: alone(served[True], self._count), gpu))
            self.second.add(quietly(lambda: alone(served[False], self._count), gpu))

    def _one(self, way: Way) -> None:
        try:
            made = measured(self._model, self._kind, way, self._count, self._query_us)
        except CudaError:
            raise  # nothing that follows could be trusted
        except (TimeoutError, ValueError) as error:
            self.why[way] = "failed", str(error)
            return
        if isinstance(made, Declined):
            self.why[way] = "declined", made.reason
        else:
            self.found[way].add(made)


def group_rows(model: Model, kind: str, ways: Sequence[Way], rounds: int, end: float) -> Iterator[Row]:
    """Rows of a model beside one kind of work; a way that fails has a row that says why."""
    gpu, batch = model.gpu, model.model.batch
    name = f"{model.model.name}/b{batch}"
    warm = alone(model.served[False], 100)
    query_us = quantile(warm.us, 0.5)
    count = int(min(MOST_QUERIES, max(LEAST_QUERIES if batch == 1 else LEAST_OF_A_BATCH, QUERIES_MS * 1e3 / query_us)))
    full = gpu.full(kind, batch)
    gpu.period_ns = round(query_us * 1e3 / PERIODS)
    tried = Tried(model, kind, count, query_us)
    tried.rounds(ways, rounds, end)
    name_of, _ = LIMITS[batch]
    ratios = {w: over(s, tried.first)[name_of] for w, s in tried.found.items() if s.us}
    ways = [*ways, *(w for w in fitted(ratios, batch) if w not in ways)]
    tried.rounds([w for w in ways if w not in tried.found], rounds, end)
    first, second, bare, found, why = tried.first, tried.second, tried.bare, tried.found, tried.why
    own = {
        w: gpu.rate(gpu.co_runner(unit_of(kind, w.number, batch), gpu.facts.sms), 4.0, w)
        for w in ways
        if w.kind == "co-runner"
    }
    both = Sample()
    for sample in (first, second):
        both.add(sample)
    done = max(tried.done.values(), default=0)
    yield {
        "record": "case", "suite": SUITE, "case": f"{name}/nothing", "way": "nothing", "rounds": done,
        "sm_budget": str(model.budget), "lc_us": spread(both), "again": over(second, first), "plain_us": spread(bare),
        "price": round(quantile(both.us, 0.5) / quantile(bare.us, 0.5), 4), "queries": len(both.us),
        "steps": len(model.found[False].plan.steps), "plain_steps": len(model.found[True].plan.steps), **clocks(both),
    }  # fmt: skip
    for way in ways:
        base: Row = {"record": "case", "suite": SUITE, "case": f"{name}/{kind}/{way}", "rounds": tried.done[way]}
        if way in why:
            reason, said = why[way]
            yield {**base, "way": way.kind, reason: said[:300]}
            continue
        more: Row = {"be_full_rate": round(full, 1)}
        if way.kind == "co-runner":
            unit = unit_of(kind, way.number, batch)
            more |= {"be_own": round(own[way] / full, 4), "block_us": round(gpu.facts.sms * unit.work / own[way], 2)}
        yield {**base, **beside(way, found[way], both, bare, full), **more}


def measured(model: Model, kind: str, way: Way, count: int, query_us: float) -> Sample | Declined:
    """A round with clock and power."""
    declined: list[Declined] = []

    def work() -> Sample:
        made = round_of(model, kind, way, count, query_us)
        if isinstance(made, Declined):
            declined.append(made)
            return Sample()
        return made

    found = quietly(work, model.gpu)
    return declined[0] if declined else found


def first_rows(model: Model, kind: str, trials: int) -> Iterator[Row]:
    """The first query beside a co-runner of 128 threads and beside nothing, with steps before it on and off."""
    gpu, name = model.gpu, f"{model.model.name}/b{model.model.batch}"
    base = alone(model.served[False], LEAST_QUERIES)
    work = gpu.co_runner(unit_of(kind, 128, model.model.batch), gpu.facts.sms)
    steady = with_co_runner(gpu, model.served[False], work, Way.of("128"), LEAST_QUERIES)
    for where, beside_it, usual in (("nothing", None, base), (kind, work, steady)):
        for text, steps in STEPS.items():
            found = [trial(gpu, model.found[False], gpu.facts, model.budget, steps, beside_it) for _ in range(trials)]
            middle = [quantile([t.us[k] for t in found], 0.5) for k in range(len(found[0].us))]
            yield {
                "record": "case", "suite": SUITE, "case": f"{name}/first/{where}/{text}", "way": "first",
                "trials": trials, "us": [round(x, 2) for x in middle], "usual_us": spread(usual)["p50"],
                "first_over_usual": round(middle[0] / quantile(usual.us, 0.5), 3),
                "second_over_usual": round(middle[1] / quantile(usual.us, 0.5), 3),
                "host_us": round(quantile([t.host_us for t in found], 0.5), 1),
                "blocked": sum(t.blocked for t in found),
            }  # fmt: skip


def step_rows(model: Model, held: ExitStack) -> Iterator[Row]:
    """What of a co-runner's presence makes the model's queries longer, and which steps."""
    gpu, name = model.gpu, f"{model.model.name}/b{model.model.batch}"
    rows = diagnose(gpu, gpu.nvrtc, model.found[False], model.model.inputs, model.budget, model.model.batch, held)
    for row in rows:
        what = row["guest"].replace("/", "-") if row["way"] == "presence" else f"{row['step']}"
        again = f"-{row['entry']}" if "entry" in row else ""
        yield {"record": "case", "suite": STEPS_SUITE, "case": f"{name}/{row['way']}/{what}{again}", **row}


def dry(budget: SmBudget) -> int:
    """Compile all work for an H200 and compare with what a plan leaves; the number that does not fit."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_corunner: {nvrtc.reason}")
    facts, bad = GpuFacts(), 0
    left = left_beside(whole_sm(facts), budget)
    if isinstance(left, Declined):
        sys.exit(f"benchmarks.gpu_corunner: {left.reason}")
    for kind in KINDS:
        for unit in [*(unit_of(kind, n, b) for n in (64, 128, 256) for b in (1, 16)),
                     unit_of(kind, FULL_THREADS, 1, short=True)]:  # fmt: skip
            source = co_runner(unit, facts.sms, facts)
            own = nvrtc.compile(source.text, arch="sm_90a", flags=source.flags).of(source.entry)
            takes = needs(source, own.registers, own.shared_bytes, 1, facts)
            fit = left_beside(left, takes)
            alone_ = plain(unit, facts.sms)
            other = nvrtc.compile(alone_.text, arch="sm_90a", flags=alone_.flags).of(alone_.launches[0].entry)
            said = fit.reason if isinstance(fit, Declined) else f"takes {takes}, plain {other.registers} registers"
            print(f"{kind}/{unit.threads} x {unit.turns}: {said}; {own.spill_stores} spills", flush=True)
            bad += isinstance(fit, Declined) or own.spill_stores > 0
    return bad


def prepare(
    names: Sequence[tuple[str, int]], budgets: Sequence[SmBudget | None], folder: Path, seconds: float, left: Left
) -> None:
    """Compile all plans into a folder, each under all of these budgets, None: without one."""
    for name, batch in names:
        if left.over(f"{name}/b{batch}"):
            continue
        model = posed(name, batch)
        for own in budgets:
            compiled(model, own, folder, seconds)
        del model
        torch.cuda.empty_cache()


def add(record: Record | None, row: Row) -> None:
    """A row, recorded or printed."""
    if record is None:
        print(row, flush=True)
    else:
        record.add(row)
        if "failed" in row:
            record.failed.append(str(row["case"]))


def mark(record: Record, model: str, batch: int, kind: str) -> None:
    """The chosen co-runner among all rows of a model and a kind of work."""
    own = [x for x in record.cases if str(x["case"]).startswith(f"{model}/b{batch}/{kind}/")]
    for row in marked(own, batch):
        record.add(row)


def known(record: Record | None, case: str) -> bool:
    """Whether a case has a row of this commit, or of these sources, that did not fail."""
    row = None if record is None else record.before().get(case)
    if row is None or record is None or "failed" in row:
        return False
    name = "src" if "src" in row else "commit"
    return row.get(name) == record.head[name]


def steps_known(record: Record | None, name: str) -> bool:
    """Whether the steps of a model have rows of these sources."""
    rows = () if record is None else record.cases
    return any(str(x["case"]).startswith(f"{name}/") and x.get("src") == record.head["src"] for x in rows if record)


def measure(chosen: argparse.Namespace, budget: SmBudget, record: Record | None, left: Left) -> None:
    """All that was asked for and has no row yet."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_corunner: {nvrtc.reason}")
    asked = groups(chosen.only, [] if chosen.first or chosen.steps else chosen.ways, chosen.kinds)
    if chosen.first or chosen.steps:
        asked = {g: [] for g in groups(chosen.only, WAYS[:1], chosen.kinds[:1])}
    torch.zeros(1, device="cuda")
    with primary_context():
        facts = gpu_facts(None, calibrate=False)
        for name, batch in dict.fromkeys((m, b) for m, b, _ in asked):
            own = {k: w for (m, b, k), w in asked.items() if (m, b) == (name, batch)}
            if not chosen.again and not (chosen.first or chosen.steps):
                own = {k: [x for x in w if not known(record, f"{name}/b{batch}/{k}/{x}")] for k, w in own.items()}
            if not any(own.values()) and not (chosen.first or chosen.steps):
                continue
            if chosen.steps and chosen.left and steps_known(record, f"{name}/b{batch}"):
                continue
            if left.over(f"{name}/b{batch}"):
                continue
            with ExitStack() as held:
                gpu = Gpu(facts, nvrtc, held)
                model = Model(gpu, posed(name, batch), budget, chosen.plans, chosen.budget, held)
                for row in step_rows(model, held) if chosen.steps else ():
                    add(record, row)
                for kind, ways in own.items() if not chosen.steps else ():
                    if left.over(f"{name}/b{batch}/{kind}"):
                        continue
                    rows = first_rows(model, kind, chosen.rounds) if chosen.first else group_rows(
                        model, kind, ways, chosen.rounds, left.until)  # fmt: skip
                    for row in rows if chosen.first or ways else ():
                        add(record, row)
                    if record is not None and not chosen.first:
                        mark(record, name, batch, kind)
                del model


def _ways(text: str) -> list[Way]:
    return [Way.of(x) for x in text.split(",") if x]


def _kinds(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(KINDS):
        raise ValueError(f"no work {sorted(unknown)[0]!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, or measure and record; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile the plans into this folder")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="the folder that they were compiled into")
    parser.add_argument("--only", default="", help="cases, or parts of them between slashes, by commas")
    parser.add_argument("--ways", type=_ways, default=list(WAYS), help="by commas; see above")
    parser.add_argument("--kinds", type=_kinds, default=list(USUAL), help="of work, by commas; `dense`, too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; trials of --first")
    parser.add_argument("--first", action="store_true", help="the first query in place of the tables")
    parser.add_argument("--steps", action="store_true", help="which steps grow beside a co-runner that only naps")
    parser.add_argument("--again", action="store_true", help="cases that have a row of this commit, too")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--sm-budget", default=BUDGET, help="what a plan may take of each SM")
    parser.add_argument("--seconds", type=float, default=540.0, help="no group of cases is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90a")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    try:
        budget = budget_of(chosen.sm_budget)
    except ValueError as error:
        parser.error(str(error))
    chosen.only = [x for x in chosen.only.split(",") if x]
    asked = groups(chosen.only, chosen.ways, chosen.kinds) or (
        {} if not chosen.only else groups(chosen.only, WAYS, KINDS)
    )
    if chosen.rounds < 1:
        parser.error("--rounds: at least 1")
    if chosen.only and not asked:
        parser.error(f"--only {','.join(chosen.only)}: no case is named so")
    if chosen.dry:
        sys.exit(1 if dry(budget) else 0)
    if (chosen.prepare is None) == (chosen.plans is None):
        parser.error("one of --prepare, --plans and --dry is needed")
    if chosen.prepare is not None:
        names = list(dict.fromkeys((m, b) for m, b, _ in asked))
        left = Left(None, end, only=chosen.left)
        prepare(names, (budget, None), chosen.prepare, chosen.budget, left)
        left.close()
        return
    with ExitStack() as ends:
        record = None
        if chosen.out:
            record = Record(
                folder_of_gpu(),
                STEPS_SUITE if chosen.steps else SUITE,
                path=None if str(chosen.out) == "-" else chosen.out,
            )
        left = Left(record, end, only=chosen.left)
        ends.callback(left.close)
        measure(chosen, budget, record, left)


if __name__ == "__main__":
    main()
