"""Whole networks as best-effort work beside latency-critical models, and the same networks in every peer's way.

    python -m benchmarks.gpu_network_corunner --prepare DIR [--only resnet50/b1,...] [--budget 20]  compile the plans
    python -m benchmarks.gpu_network_corunner --plans DIR [--only resnet50/b1/bert_base,...] [--out FILE|-]
    python -m benchmarks.gpu_network_corunner --dry                       what would be measured, without a GPU

resnet50 and vit_b16 at batch 1 and 16 beside bert_base, segformer_b0 and a decoder of four layers (llama_4), all at
batch 8, in f16. A case is `resnet50/b1/bert_base/8/stages-ctas1`; every plan is made under its share of an SM and
without one. Queries run back to back on a stream of the highest priority, each timed by events; a round takes all ways
in another order, between two of the model beside nothing (A/A) and one of its plan without a budget.

Ways (`--ways`): `stages` by `weft.colocate.network` (`-ctas1`: at most so many of its CTAs on an SM; `-duty50`:
launched in so many per cent of the time), and its peers by the plans without a budget: `priority` (the network's whole
graphs on the stream of lowest priority), `slices2` (2 ms in turn on one stream), `green36` (36 SMs by a green context).

`be` is the network's rate over its own alone on the whole GPU by its plan without a budget, back to back; `added` is
the model's rate over its own alone plus `be`. In front of each round the network's results are compared with those of
its plan alone, bit by bit, while queries run; the model's after each round.
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

from benchmarks.co_runner.beside import Served, alone, quietly
from benchmarks.co_runner.machine import Gpu
from benchmarks.co_runner.networks import WAYS, Given, Network, NetworkWay, asked, in_slices, row, with_network
from benchmarks.co_runner.plans import Posed, compiled, posed
from benchmarks.co_runner.rows import Sample, clocks, over, quantile, spread
from benchmarks.gpu_corunner import Model, add, known
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from benchmarks.models import FURTHER, NETWORKS
from weft.colocate.budgets import Budgets, budget_of, budgets, limited
from weft.colocate.gpu import LANES, fits
from weft.device.cuda.api import CudaError
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import gpu_facts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.record import GpuFacts
from weft.errors import OptionError
from weft.ir.declined import Declined
from weft.runtime.budgeted import Budgeted
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease

SUITE = "colocate-networks"
QUERIES_MS, LEAST_QUERIES, MOST_QUERIES = 80.0, 100, 500
AHEAD = 3
"""Inferences of a peer that are on its stream at most."""
BATCHES = 2


@final
class BestEffort:
    """A network's plans, recorded where each way needs them."""

    def __init__(self, gpu: Gpu, network: Posed, model: Model, shares: Budgets, chosen: argparse.Namespace) -> None:
        self._gpu, self._network, self._model, self._chosen = gpu, network, model, chosen
        self.found = {
            p: compiled(network, None if p else shares.best_effort, chosen.plans, chosen.budget) for p in (False, True)
        }
        kind = NETWORKS.get(network.name) or FURTHER[network.name]
        more = [kind.inputs(network.batch, seed) for seed in range(1, BATCHES)]
        self._batches: list[Given] = [network.inputs]
        self._batches += [tuple(x.half().cuda() if x.is_floating_point() else x.cuda() for x in y) for y in more]
        self._made: dict[tuple[str, int], Network | Declined] = {}
        whole = self.of(NetworkWay.of("priority"))
        assert isinstance(whole, Network)
        self.inference_us = whole.back_to_back_us()

    def of(self, way: NetworkWay) -> Network | Declined:
        """The network as a way needs it."""
        key = ("stages", way.number) if way.kind == "stages" else ("green" if way.kind == "green" else "", way.number)
        if way.kind == "slices":
            key = "", 0
        if key not in self._made:
            self._made[key] = self._recorded(way)
        return self._made[key]

    def _recorded(self, way: NetworkWay) -> Network | Declined:
        gpu, plain = self._gpu, self.found[True]
        if way.kind == "stages":
            linked = self.found[False].linked
            facts = gpu.facts.within(budget_of(linked, "network"))
            try:
                linked = limited(linked, gpu.facts, way.number) if way.number else linked
            except OptionError as error:
                return Declined(str(error).splitlines()[0])
            made = CudaExecutable(
                linked,
                device=plain.device,
                lease=Lease(plain.device, [gpu.low]),
                budgeted=Budgeted(facts),
                stage_kernels=self._chosen.stage_kernels,
            )
            return Network(made, gpu.low, self._batches, self._chosen.most_queued)
        if way.kind == "green":
            return self._on_a_part(way)
        lanes = [gpu.low, *(gpu.stream(gpu.least) for _ in range(LANES - 1))]
        made = CudaExecutable(plain.linked, device=plain.device, lease=Lease(plain.device, lanes))
        return Network(made, lanes[0], self._batches, AHEAD * sum(x.kernels for x in made.stages))

    def _on_a_part(self, way: NetworkWay) -> Network | Declined:
        """On some multiprocessors, by the plan without a budget, or if it has a call by the one within."""
        part = on_a_part(self._model, way)
        if isinstance(part, Declined):
            return part
        _, low, sms = part
        found, budgeted = self.found[True], None
        if fits(found, self._gpu.facts, sms) is not None:
            found = self.found[False]
            budgeted = Budgeted(self._gpu.facts.within(budget_of(found.linked, "network")))
            if (why := fits(found, self._gpu.facts, sms)) is not None:
                return why
        # one stream: other lanes would be on all SMs
        made = CudaExecutable(
            found.linked,
            device=found.device,
            lease=Lease(found.device, [low]),
            budgeted=budgeted,
            stage_kernels=1 << 20,
        )
        return Network(made, low, self._batches, AHEAD * sum(x.kernels for x in made.stages))

    def close(self) -> None:
        """Give the plans back."""
        torch.cuda.synchronize()
        self._made.clear()
        self.found.clear()
        gc.collect()
        torch.cuda.empty_cache()


def on_a_part(model: Model, way: NetworkWay) -> tuple[Served, torch.cuda.Stream, int] | Declined:
    """The model on all but a network's SMs, by the plan without a budget, or if it has a call by that within."""
    found = model.green(way.number, plain=True)
    return model.green(way.number, plain=False) if isinstance(found, Declined) else found


def round_of(model: Model, network: BestEffort, way: NetworkWay, count: int, query_us: float) -> Sample | Declined:
    """A round of so many queries in one way, its stop's seconds among `stop_s`."""
    made = network.of(way)
    if isinstance(made, Declined):
        return made
    served = model.served[way.plain]
    if way.kind == "green":
        part = on_a_part(model, way)
        if isinstance(part, Declined):
            return part
        served = part[0]
    if way.kind == "slices":
        return in_slices(served, made, count, way.number * 1e3, query_us)
    found, stop_s = with_network(served, made, count, way.duty)
    STOPS.setdefault(str(way), []).append(stop_s)
    return found


STOPS: dict[str, list[float]] = {}
"""Seconds of the stops behind the rounds of a way, of the group under way."""


def group_rows(
    model: Model, network: BestEffort, case: str, ways: Sequence[NetworkWay], rounds: int, end: float
) -> Iterator[Row]:
    """Rows of a model beside one network; a way that fails has a row that says why."""
    gpu = model.gpu
    STOPS.clear()
    query_us = quantile(alone(model.served[False], 100).us, 0.5)
    count = int(min(MOST_QUERIES, max(LEAST_QUERIES, QUERIES_MS * 1e3 / query_us)))
    first, second, bare = Sample(), Sample(), Sample()
    found = {w: Sample() for w in ways}
    why: dict[NetworkWay, tuple[str, str]] = {}
    done = 0
    for number in range(rounds):
        if number and time.perf_counter() > end:
            break
        order = list(ways)
        random.Random(number).shuffle(order)
        first.add(quietly(lambda: alone(model.served[False], count), gpu))
        for way in order:
            if way in why:
                continue
            declined: list[Declined] = []

            def work(way: NetworkWay = way, declined: list[Declined] = declined) -> Sample:
                made = round_of(model, network, way, count, query_us)
                if isinstance(made, Declined):
                    declined.append(made)
                    return Sample()
                return made

            try:
                sample = quietly(work, gpu)
            except CudaError:
                raise  # nothing that follows could be trusted
            except (TimeoutError, ValueError) as error:
                why[way] = "failed", str(error)
                continue
            if declined:
                why[way] = "declined", declined[0].reason
            else:
                found[way].add(sample)
        bare.add(quietly(lambda: alone(model.served[True], count), gpu))
        second.add(quietly(lambda: alone(model.served[False], count), gpu))
        done += 1
    both = Sample()
    for sample in (first, second):
        both.add(sample)
    within = network.of(NetworkWay.of("stages"))
    assert isinstance(within, Network)
    yield {
        "record": "case", "suite": SUITE, "case": f"{case}/nothing", "way": "nothing", "rounds": done,
        "sm_budget": str(model.budget), "be_budget": network.found[False].linked.facts["sm_budget"],
        "lc_us": spread(both), "again": over(second, first), "plain_us": spread(bare),
        "price": round(quantile(both.us, 0.5) / quantile(bare.us, 0.5), 4), "queries": len(both.us),
        "inference_us": round(network.inference_us, 1), "budgeted_inference_us": round(within.back_to_back_us(), 1),
        "be_kernels": sum(within.executable.stages[k].kernels for k in range(len(within.stage_us))), **clocks(both),
    }  # fmt: skip
    for way in ways:
        base: Row = {"record": "case", "suite": SUITE, "case": f"{case}/{way}", "rounds": done}
        if way in why:
            reason, said = why[way]
            yield {**base, "way": way.kind, reason: said[:300]}
            continue
        made = network.of(way)
        more: Row = {}
        if isinstance(made, Network):
            more = {"be_own": round(network.inference_us / made.back_to_back_us(), 4), "stages": len(made.stage_us)}
        if str(way) in STOPS:
            more["stop_us"] = round(max(STOPS[str(way)]) * 1e6)
        yield {**base, **row(way, found[way], both, bare, network.inference_us), **more}


def shares_of(facts: GpuFacts, chosen: argparse.Namespace) -> Budgets:
    """What the model and the network take of each SM."""
    return budgets(facts, ctas=chosen.ctas, registers=chosen.registers, threads=chosen.threads)


Group = tuple[str, int, str, int]


def prepare(groups: Sequence[Group], chosen: argparse.Namespace, left: Left) -> None:
    """Compile all plans into a folder."""
    shares = shares_of(gpu_facts(None, calibrate=False), chosen)
    every = [((m, b), shares.latency_critical) for m, b, _, _ in groups]
    every += [((n, b), shares.best_effort) for _, _, n, b in groups]
    for (name, batch), budget in dict.fromkeys(every):
        if left.over(f"{name}/{batch}"):
            continue
        model = posed(name, batch)
        for own in (budget, None):
            compiled(model, own, chosen.prepare, chosen.budget)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def measure(
    groups: dict[Group, list[NetworkWay]], chosen: argparse.Namespace, record: Record | None, left: Left
) -> None:
    """All that was asked for and has no row yet."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_network_corunner: {nvrtc.reason}")
    torch.zeros(1, device="cuda")
    with primary_context():
        facts = gpu_facts(None, calibrate=False)
        shares = shares_of(facts, chosen)
        for name, batch in dict.fromkeys((m, b) for m, b, _, _ in groups):
            own = {f"{m}/b{b}/{n}/{k}": (n, k, w) for (m, b, n, k), w in groups.items() if (m, b) == (name, batch)}
            if not chosen.again:
                own = {c: (n, k, [x for x in w if not known(record, f"{c}/{x}")]) for c, (n, k, w) in own.items()}
            own = {c: x for c, x in own.items() if x[2]}
            if not own:
                continue
            if left.over(f"{name}/b{batch}"):
                continue
            with ExitStack() as held:
                gpu = Gpu(facts, nvrtc, held)
                lc = posed(name, batch)
                model = Model(gpu, lc, shares.latency_critical, chosen.plans, chosen.budget, held)
                for case, (other, its, ways) in own.items():
                    if left.over(case):
                        continue
                    network = BestEffort(gpu, posed(other, its), model, shares, chosen)
                    try:
                        for line in group_rows(model, network, case, ways, chosen.rounds, left.until):
                            add(record, line)
                    finally:
                        network.close()
                    del network
                del model


def dry(groups: dict[Group, list[NetworkWay]], chosen: argparse.Namespace) -> None:
    """What would be measured on an H200."""
    shares = shares_of(profile("h200"), chosen)
    print(f"model: {shares.latency_critical}; network: {shares.best_effort}")
    for (m, b, n, k), ways in groups.items():
        print(f"{m}/b{b}/{n}/{k}: {', '.join(map(str, ways))}")


def _ways(text: str) -> list[NetworkWay]:
    return [NetworkWay.of(x) for x in text.split(",") if x]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, or measure and record; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile the plans into this folder")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="the folder that they were compiled into")
    parser.add_argument("--only", default="", help="cases, or parts of them between slashes, by commas")
    parser.add_argument("--ways", type=_ways, default=list(WAYS), help="by commas; see above")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="cases that have a row of this commit, too")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--registers", type=int, default=16384, help="of an SM, the network's")
    parser.add_argument("--threads", type=int, default=512, help="of an SM, the network's")
    parser.add_argument("--ctas", type=int, default=1, help="of an SM, the network's; they decide its shared memory")
    parser.add_argument("--stage-kernels", type=int, default=8, help="kernels that are launched together")
    parser.add_argument("--most-queued", type=int, default=24, help="kernels that are queued at most")
    parser.add_argument("--seconds", type=float, default=540.0, help="no group of cases is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: say what would be measured")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    groups = asked([x for x in chosen.only.split(",") if x], chosen.ways)
    for name in ("rounds", "stage_kernels", "most_queued"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    try:
        shares_of(profile("h200"), chosen)
    except OptionError as error:
        parser.error(str(error).splitlines()[0])
    if not groups:
        parser.error(f"--only {chosen.only}: no case is named so")
    if chosen.dry:
        dry(groups, chosen)
        return
    if (chosen.prepare is None) == (chosen.plans is None):
        parser.error("one of --prepare, --plans and --dry is needed")
    if chosen.prepare is not None:
        left = Left(None, end, only=chosen.left)
        prepare(list(groups), chosen, left)
        left.close()
        return
    with ExitStack() as ends:
        record = None
        if chosen.out:
            record = Record(folder_of_gpu(), SUITE, path=None if str(chosen.out) == "-" else chosen.out)
        left = Left(record, end, only=chosen.left)
        ends.callback(left.close)
        measure(groups, chosen, record, left)


if __name__ == "__main__":
    main()
