"""Fits the constants of the cost models to the recorded kernels, and asks how well they hold for other networks.

    python -m benchmarks.model_fit [FAMILY...]

Every constant is one of a section of the device's profile (`weft.costmodel.constants`); each has a unit of time or
bytes and a cause. Per section: the figures with the constants as they stand, with constants fitted to all networks, and
for each network (at both batch sizes) with constants fitted to the others, all from the same first guesses. Nothing is
written: what is worth it is taken over into the profile by hand. Needs scipy, and a quarter of an hour for all.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from benchmarks.data.measured import Case, Table, Timed, load_table, problem_of
from benchmarks.data.recorded import kernels_of_then
from benchmarks.model_quality import LATER, NOTICED, RECORDED, TYPES, family, quantile
from weft.costmodel.profile import CostProfile, costs_of, instead
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import cost as tma_cost
from weft.generate.cuda.gemm.tma import shape as tma_shape
from weft.generate.cuda.loops import pointwise
from weft.generate.cuda.loops.forms import Form
from weft.ir.declined import Declined
from weft.kernels.source import Schedule

TILES = {
    "start": 100.0, "end": 500.0, "latency": 900.0, "exposed": 0.05, "chain.group": 150.0, "chain.mma": 100.0,
    "mma": 16.0, "issue.rows": 0.06, "issue.columns": 0.06, "issue.taps": 0.12, "issue.elements": 1.5,
    "issue_weights": 0.06,
    "elements": 300.0, "element": 50.0, "element_of_tables": 100.0, "item": 60.0, "item_operand": 50.0, "result": 2.0,
    "plain": 1.0, "special": 10.0, "cluster_rank": 200.0, "cluster_bytes": 10.0, "meeting": 2000.0,
    "meeting_bytes": 8.0,
}  # fmt: skip
"""Constants of products, and what the notes and the data sheets would make them."""
SIMT = {"rate.simt": 250.0, "chain.simt": 200.0, "simt_read": 2.0, "simt_exposed": 0.3}
"""The same of products on CUDA cores alone."""
POINTWISE = {
    "block": 150.0, "result": 5.0, "value": 3.0, "special": 20.0, "tap": 3.0, "apart": 20.0, "thread_slots": 20.0,
    "result_slots": 5.0, "value_slots": 1.5, "special_slots": 2.0, "tap_slots": 3.0, "shared_slots": 5.0,
    "tile": 1000.0, "gather": 400.0, "port_bytes": 64.0, "scattered": 0.3, "scattered_tile": 0.3, "sectors": 0.3,
    "memory": 1.0, "shown": 0.1, "in_step": 1.0,
}  # fmt: skip
"""Of elementwise kernels."""
TMA = {
    "port": 50.0, "busy": 0.9, "start": 950.0, "latency": 950.0, "again": 60.0, "field": 100.0, "late": 300.0,
    "vector": 60.0, "steps": 8.0, "specials": 40.0, "clipped": 800.0, "divided": 320.0, "exact": 80.0, "result": 0.93,
    "plain": 3.3, "special": 5.0, "divided_slots": 20.0, "exact_slots": 10.0, "store": 32.0, "half": 2.0,
    "single": 32.0, "cluster": 300.0, "rank": 470.0, "exchange": 28.0, "strangers": 1.15, "exposed": 0.14,
}  # fmt: skip
"""Those of products through TMA."""
DEPTHWISE = {
    "block": 100.0, "result": 3.0, "step": 8.0, "special": 15.0, "clipped": 40.0, "operand": 20.0, "vector": 3.0,
    "field": 0.66, "weight": 10.0, "result_slots": 5.0, "step_slots": 2.0, "special_slots": 5.0, "clipped_slots": 40.0,
    "tap_slots": 1.0, "vector_slots": 5.0, "weight_slots": 5.0, "thread_slots": 20.0, "port_bytes": 50.0,
    "across": 3.0, "shown": 0.2, "in_step": 0.3,
}  # fmt: skip
HALO = {
    "launch": 1000.0, "block": 100.0, "element": 60.0, "port": 26.0, "shared_weights": 0.4, "tensor": 1.7,
    "lone": 0.65, "several": 0.85, "fragments": 100.0, "step": 36.0, "product": 8.0, "first": 0.5, "turn": 1.3,
    "end": 500.0, "result": 5.0, "plain": 3.0, "special": 6.0, "clipped": 40.0, "operand": 8.0, "result_slots": 3.0,
    "plain_slots": 2.0, "special_slots": 4.0, "clipped_slots": 25.0, "stored": 32.0, "single": 0.5, "cluster": 1500.0,
    "rank": 40.0, "exchange": 64.0, "alone": 600.0,
}  # fmt: skip
SEARCHES = (
    *("candy",) * 2, *("segformer_b0",) * 2, *("resnet50",) * 2, *("bert_base",) * 2, *("yolox_nano",) * 2,
    *("inception_v3",) * 2, *("yolov4",) * 2, *("vit_b16",) * 2, *("vgg16",) * 3, *("efficientvit_b1",) * 2,
)  # fmt: skip
"""What the searches of the later table, which are numbered there, were for: batch 1, then 16 (one was interrupted)."""
H200 = GpuFacts()
"""What all tables were measured on."""
CASES = 10**5
"""More than a table has."""
WITHIN = 2.0
"""Weight of errors between kernels of one problem over those that all of them share."""
PRIOR = 0.05
"""Pull towards the first guesses, which keeps constants that the data do not determine."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One measured kernel and its model."""

    case: int
    network: str
    us: float
    model: Callable[[], float]
    """Predicted microseconds with the constants of the moment."""


def network_of(case: Case) -> str:
    """Of both batch sizes."""
    return SEARCHES[int(case.network)] if case.network.isdigit() else case.network


def product_kernels(table: Table, templates: Sequence[str] = ("mma", "wgmma")) -> list[Kernel]:
    """Those of templates that `costmodel.tiles` ranks."""
    found = []
    for number, case in enumerate(table.cases):
        chosen = _of(case, *templates)
        p = product(problem_of(case.text), tf32="simt" not in templates) if chosen else Declined("no such kernel")
        if isinstance(p, Declined):
            continue
        sizes = cost.sizes_of(p)
        for k in chosen:
            model = partial(cost.cycles, sizes, mma.MmaConfig.of(k.schedule), table.facts)
            found.append(Kernel(number, network_of(case), k.us, partial(_us, model, table.facts)))
    return found


def template_kernels(table: Table, template: str) -> list[Kernel]:
    """Those of one of the templates `tma`, `depthwise` and `halo`."""
    found = []
    for number, case in enumerate(table.cases):
        chosen = _of(case, template)
        p = product(problem_of(case.text), tf32=True) if chosen else Declined("no such kernel")
        if isinstance(p, Declined):
            continue
        for k in chosen:
            model = _model(p, k.schedule, template, table.facts)
            if model is not None:
                found.append(Kernel(number, network_of(case), k.us, partial(_us, model, table.facts)))
    return found


def _of(case: Case, *templates: str) -> list[Timed]:
    return [k for k in case.kernels if dict(k.schedule.params).get("template") in templates]


def _us(cycles: Callable[[], float], facts: GpuFacts) -> float:
    return cycles() / facts.clock_ghz / 1e3


def _model(p: Product, schedule: Schedule, template: str, facts: GpuFacts) -> Callable[[], float] | None:
    """Cycles of a schedule; None for what the template does not take (any more)."""
    if template == "tma":
        case = tma_choose.case_of(p, facts)
        return None if case is None else partial(tma_cost.cycles, case, tma_shape.TmaConfig.of(schedule), facts)
    if template == "halo":
        w = halo.window(p)
        if isinstance(w, Declined):
            return None
        g = halo.Geometry(w, halo.HaloConfig.of(schedule))
        model = partial(halo_choose.cycles, g, facts, halo_choose.end_of(p))
        return model if model() < math.inf else None
    turned = depthwise.normal(p)
    return (
        None
        if isinstance(turned, Declined)
        else partial(depthwise.cycles, turned, depthwise.DepthwiseConfig.of(schedule), facts)
    )


def pointwise_kernels(table: Table) -> list[Kernel]:
    """Those of elementwise problems and windows."""
    found = []
    for number, case in enumerate(table.cases):
        problem = problem_of(case.text)
        if family(problem) not in ("pointwise", "window"):
            continue
        work = pointwise.work_of(problem)
        for k in case.kernels:
            if k.schedule.generator == "cuda" and not dict(k.schedule.params).get("template"):
                model = partial(pointwise.cycles, work, Form.of(k.schedule), table.facts)
                found.append(Kernel(number, network_of(case), k.us, partial(_us, model, table.facts)))
    return found


def read(section: object, names: Iterable[str]) -> list[float]:
    """Constants of a section; `a.b` is entry b of table a."""
    found = []
    for name in names:
        head, _, key = name.partition(".")
        value = getattr(section, head)
        found.append(float(value[key] if key else value))
    return found


def changed(profile: CostProfile, section: str, names: Iterable[str], values: Iterable[float]) -> CostProfile:
    """The profile with these constants of a section."""
    now = getattr(profile, section)
    for name, value in zip(names, values, strict=True):
        head, _, key = name.partition(".")
        new = {**getattr(now, head), key: float(value)} if key else float(value)
        now = replace(now, **{head: new})
    return replace(profile, **{section: now})


def fitted(section: str, guesses: Mapping[str, float], kernels: Sequence[Kernel]) -> list[float]:
    """Constants with the least errors of logarithms, large ones counting less than their square."""
    names = list(guesses)
    start = np.log(list(guesses.values()))
    us = np.log([k.us for k in kernels])
    _, group = np.unique([k.case for k in kernels], return_inverse=True)
    sizes = np.bincount(group)
    pull = PRIOR * math.sqrt(len(kernels) / 50)

    def errors(at: np.ndarray) -> np.ndarray:
        with instead(changed(costs_of(H200), section, names, np.exp(at))):
            error = np.log([k.model() for k in kernels]) - us
        shared = np.bincount(group, error) / sizes
        return np.concatenate([error, WITHIN * (error - shared[group]), pull * (at - start)])

    found = least_squares(errors, start, loss="soft_l1", f_scale=0.15, max_nfev=25).x
    return [float(x) for x in np.exp(found)]


def figures(kernels: Sequence[Kernel], predicted: Sequence[float]) -> str:
    """Pairs in order, regret of the first, and how far predictions are off their median ratio."""
    by_case: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for k, p in zip(kernels, predicted, strict=True):
        by_case[k.case].append((p, k.us))
    right, regret = [], []
    for pairs in by_case.values():
        regret.append(min(pairs)[1] / min(us for _, us in pairs) - 1)
        for i, (p, us) in enumerate(pairs):
            right += [(p < q) == (us < vs) for q, vs in pairs[:i] if abs(math.log(us / vs)) > NOTICED]
    logs = [math.log(k.us / p) for k, p in zip(kernels, predicted, strict=True)]
    off = [abs(x - statistics.median(logs)) for x in logs]
    return (
        f"pairs in order {100 * statistics.mean(right):.1f} % of {len(right)}, "
        f"regret of first {100 * statistics.mean(regret):.1f} %, "
        f"median factor off {math.exp(statistics.median(off)):.3f}, p90 {math.exp(quantile(off, 0.9)):.2f}"
    )


def report(section: str, guesses: Mapping[str, float], kernels: Sequence[Kernel]) -> None:
    """Print the three rows of a model, and the constants of a fit to all."""
    profile = costs_of(H200)
    names, now = list(guesses), read(getattr(profile, section), guesses)

    def predicted(some: Sequence[Kernel], fit: Sequence[float]) -> list[float]:
        with instead(changed(profile, section, names, fit)):
            return [k.model() for k in some]

    print(f"{section}: {len(kernels)} kernels")
    print("  as they stand:     ", figures(kernels, predicted(kernels, now)))
    everything = fitted(section, guesses, kernels)
    print("  fitted to all:     ", figures(kernels, predicted(kernels, everything)))
    left_out: dict[int, float] = {}
    for network in sorted({k.network for k in kernels}):
        fit = fitted(section, guesses, [k for k in kernels if k.network != network])
        own = [i for i, k in enumerate(kernels) if k.network == network]
        left_out |= zip(own, predicted([kernels[i] for i in own], fit), strict=True)
    print("  network left out:  ", figures(kernels, [left_out[i] for i in range(len(kernels))]))
    print("  " + ", ".join(f"{n} {a:.3g} -> {b:.3g}" for n, a, b in zip(names, now, everything, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the models of some families, or all."""
    tables = [load_table(RECORDED), load_table(LATER), load_table(TYPES)]

    def of(kernels: Callable[[Table], list[Kernel]], *numbers: int) -> list[Kernel]:
        """Those of the tables with these numbers, each table's by the kernels of its time."""
        found: list[Kernel] = []
        for number in numbers:
            with nullcontext() if number == 2 else kernels_of_then():
                found += [replace(k, case=k.case + number * CASES) for k in kernels(tables[number])]
        return found

    families = {
        "products": ("tiles", TILES, lambda: of(product_kernels, 0, 1, 2)),
        "simt": ("tiles", SIMT, lambda: of(partial(product_kernels, templates=("simt",)), 2)),
        "pointwise": ("pointwise", POINTWISE, lambda: of(pointwise_kernels, 0, 1, 2)),
        "tma": ("tma", TMA, lambda: of(partial(template_kernels, template="tma"), 1, 2)),
        "depthwise": ("depthwise", DEPTHWISE, lambda: of(partial(template_kernels, template="depthwise"), 1)),
        "halo": ("halo", HALO, lambda: of(partial(template_kernels, template="halo"), 1, 2)),
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_fit", description=__doc__)
    parser.add_argument("family", nargs="*", choices=[*families, []], help="default: all")
    for name in parser.parse_args(arguments).family or families:
        section, guesses, kernels = families[name]
        with kernels_of_then() if name == "depthwise" else nullcontext():  # its model looks at ends by itself
            report(section, guesses, kernels())


if __name__ == "__main__":
    main()
