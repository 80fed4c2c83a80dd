"""Fits the constants of the cost models to the recorded kernels, and asks how well they hold for other networks.

    python -m benchmarks.model_fit [FAMILY...]

Every constant is one of a module that ranks kernels: `weft.device.cuda.blocks` (products),
`weft.generate.cuda.loops.pointwise`, and the models of the templates `tma`, `depthwise` and `halo`; each has a unit
of time or bytes and a cause. Per model: the figures with the constants as they stand, with constants fitted to all
networks, and for each network (at both batch sizes) with constants fitted to the others, all from the same first
guesses. Needs scipy, and a quarter of an hour for all.
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
from types import ModuleType

import numpy as np
from scipy.optimize import least_squares

from benchmarks.data.measured import Case, Table, Timed, load_table, problem_of
from benchmarks.data.recorded import kernels_of_then
from benchmarks.model_quality import LATER, NOTICED, RECORDED, TYPES, family, quantile
from weft.device.cuda import blocks
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

BLOCKS = {
    "START": 100.0, "END": 500.0, "LATENCY": 900.0, "EXPOSED": 0.05, "CHAIN.group": 150.0, "CHAIN.mma": 100.0,
    "MMA": 16.0, "ISSUE.rows": 0.06, "ISSUE.columns": 0.06, "ISSUE.taps": 0.12, "ISSUE.elements": 1.5,
    "ISSUE_WEIGHTS": 0.06,
    "ELEMENTS": 300.0, "ELEMENT": 50.0, "ELEMENT_OF_TABLES": 100.0, "ITEM": 60.0, "ITEM_OPERAND": 50.0, "RESULT": 2.0,
    "PLAIN": 1.0, "SPECIAL": 10.0, "CLUSTER_RANK": 200.0, "CLUSTER_BYTES": 10.0, "MEETING": 2000.0,
    "MEETING_BYTES": 8.0,
}  # fmt: skip
"""Constants of products, and what the notes and the data sheets would make them."""
SIMT = {"RATE.simt": 250.0, "CHAIN.simt": 200.0, "SIMT_READ": 2.0, "SIMT_EXPOSED": 0.3}
"""The same of products on CUDA cores alone."""
POINTWISE = {
    "BLOCK": 150.0, "RESULT": 5.0, "VALUE": 3.0, "SPECIAL": 20.0, "TAP": 3.0, "APART": 20.0, "THREAD_SLOTS": 20.0,
    "RESULT_SLOTS": 5.0, "VALUE_SLOTS": 1.5, "SPECIAL_SLOTS": 2.0, "TAP_SLOTS": 3.0, "SHARED_SLOTS": 5.0,
    "TILE": 1000.0, "GATHER": 400.0, "PORT_BYTES": 64.0, "SCATTERED": 0.3, "SCATTERED_TILE": 0.3, "SECTORS": 0.3,
    "MEMORY": 1.0, "SHOWN": 0.1, "IN_STEP": 1.0,
}  # fmt: skip
"""Of elementwise kernels."""
TMA = {
    "PORT": 50.0, "BUSY": 0.9, "START": 950.0, "LATENCY": 950.0, "AGAIN": 60.0, "FIELD": 100.0, "LATE": 300.0,
    "VECTOR": 60.0, "STEPS": 8.0, "SPECIALS": 40.0, "CLIPPED": 800.0, "DIVIDED": 320.0, "EXACT": 80.0, "RESULT": 0.93,
    "PLAIN": 3.3, "SPECIAL": 5.0, "DIVIDED_SLOTS": 20.0, "EXACT_SLOTS": 10.0, "STORE": 32.0, "HALF": 2.0,
    "SINGLE": 32.0, "CLUSTER": 300.0, "RANK": 470.0, "EXCHANGE": 28.0, "STRANGERS": 1.15, "EXPOSED": 0.14,
}  # fmt: skip
"""Those of products through TMA."""
DEPTHWISE = {
    "BLOCK": 100.0, "RESULT": 3.0, "STEP": 8.0, "SPECIAL": 15.0, "CLIPPED": 40.0, "OPERAND": 20.0, "VECTOR": 3.0,
    "FIELD": 0.66, "WEIGHT": 10.0, "RESULT_SLOTS": 5.0, "STEP_SLOTS": 2.0, "SPECIAL_SLOTS": 5.0, "CLIPPED_SLOTS": 40.0,
    "TAP_SLOTS": 1.0, "VECTOR_SLOTS": 5.0, "WEIGHT_SLOTS": 5.0, "THREAD_SLOTS": 20.0, "PORT_BYTES": 50.0,
    "ACROSS": 3.0, "SHOWN": 0.2, "IN_STEP": 0.3,
}  # fmt: skip
HALO = {
    "LAUNCH": 1000.0, "BLOCK": 100.0, "ELEMENT": 60.0, "PORT": 26.0, "SHARED_WEIGHTS": 0.4, "TENSOR": 1.7,
    "LONE": 0.65, "SEVERAL": 0.85, "FRAGMENTS": 100.0, "STEP": 36.0, "PRODUCT": 8.0, "FIRST": 0.5, "TURN": 1.3,
    "END": 500.0, "RESULT": 5.0, "PLAIN": 3.0, "SPECIAL": 6.0, "CLIPPED": 40.0, "OPERAND": 8.0, "RESULT_SLOTS": 3.0,
    "PLAIN_SLOTS": 2.0, "SPECIAL_SLOTS": 4.0, "CLIPPED_SLOTS": 25.0, "STORED": 32.0, "SINGLE": 0.5, "CLUSTER": 1500.0,
    "RANK": 40.0, "EXCHANGE": 64.0, "ALONE": 600.0,
}  # fmt: skip
SEARCHES = (
    *("candy",) * 2, *("segformer_b0",) * 2, *("resnet50",) * 2, *("bert_base",) * 2, *("yolox_nano",) * 2,
    *("inception_v3",) * 2, *("yolov4",) * 2, *("vit_b16",) * 2, *("vgg16",) * 3, *("efficientvit_b1",) * 2,
)  # fmt: skip
"""What the searches of the later table, which are numbered there, were for: batch 1, then 16 (one was interrupted)."""
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
    """Predicted microseconds with the module's constants of the moment."""


def network_of(case: Case) -> str:
    """Of both batch sizes."""
    return SEARCHES[int(case.network)] if case.network.isdigit() else case.network


def product_kernels(table: Table, templates: Sequence[str] = ("mma", "wgmma")) -> list[Kernel]:
    """Those of templates that `blocks` ranks."""
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


def read(module: ModuleType, names: Iterable[str]) -> list[float]:
    """The constants of a module; `A.b` is entry b of dictionary A."""
    found = []
    for name in names:
        head, _, key = name.partition(".")
        value = getattr(module, head)
        found.append(float(value[key] if key else value))
    return found


def write(module: ModuleType, names: Iterable[str], values: Iterable[float]) -> None:
    """Set them."""
    for name, value in zip(names, values, strict=True):
        head, _, key = name.partition(".")
        if key:
            getattr(module, head)[key] = float(value)
        else:
            setattr(module, head, float(value))


def fitted(module: ModuleType, guesses: Mapping[str, float], kernels: Sequence[Kernel]) -> list[float]:
    """Constants with the least errors of logarithms, large ones counting less than their square."""
    names, now = list(guesses), read(module, guesses)
    start = np.log(list(guesses.values()))
    us = np.log([k.us for k in kernels])
    _, group = np.unique([k.case for k in kernels], return_inverse=True)
    sizes = np.bincount(group)
    pull = PRIOR * math.sqrt(len(kernels) / 50)

    def errors(at: np.ndarray) -> np.ndarray:
        write(module, names, np.exp(at))
        error = np.log([k.model() for k in kernels]) - us
        shared = np.bincount(group, error) / sizes
        return np.concatenate([error, WITHIN * (error - shared[group]), pull * (at - start)])

    try:
        found = least_squares(errors, start, loss="soft_l1", f_scale=0.15, max_nfev=25).x
    finally:
        write(module, names, now)
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


def report(name: str, module: ModuleType, guesses: Mapping[str, float], kernels: Sequence[Kernel]) -> None:
    """Print the three rows of a model, and the constants of a fit to all."""
    names, now = list(guesses), read(module, guesses)
    print(f"{name}: {len(kernels)} kernels")
    print("  as they stand:     ", figures(kernels, [k.model() for k in kernels]))
    everything = fitted(module, guesses, kernels)
    write(module, names, everything)
    print("  fitted to all:     ", figures(kernels, [k.model() for k in kernels]))
    write(module, names, now)
    predicted = [0.0] * len(kernels)
    for network in sorted({k.network for k in kernels}):
        write(module, names, fitted(module, guesses, [k for k in kernels if k.network != network]))
        for i, k in enumerate(kernels):
            if k.network == network:
                predicted[i] = k.model()
        write(module, names, now)
    print("  network left out:  ", figures(kernels, predicted))
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
        "products": (blocks, BLOCKS, lambda: of(product_kernels, 0, 1, 2)),
        "simt": (blocks, SIMT, lambda: of(partial(product_kernels, templates=("simt",)), 2)),
        "pointwise": (pointwise, POINTWISE, lambda: of(pointwise_kernels, 0, 1, 2)),
        "tma": (tma_cost, TMA, lambda: of(partial(template_kernels, template="tma"), 1, 2)),
        "depthwise": (depthwise, DEPTHWISE, lambda: of(partial(template_kernels, template="depthwise"), 1)),
        "halo": (halo_choose, HALO, lambda: of(partial(template_kernels, template="halo"), 1, 2)),
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_fit", description=__doc__)
    parser.add_argument("family", nargs="*", choices=[*families, []], help="default: all")
    for name in parser.parse_args(arguments).family or families:
        module, guesses, kernels = families[name]
        with kernels_of_then() if name == "depthwise" else nullcontext():  # its model looks at ends by itself
            report(name, module, guesses, kernels())


if __name__ == "__main__":
    main()
