"""Fits the constants of the cost models to the recorded kernels, and asks how well they hold for other networks.

    python -m benchmarks.model_fit

Every constant is one of `weft.device.cuda.blocks` (products) or `weft.generate.cuda.pointwise`; each has a unit of time
or bytes and a cause. Per model: the figures with the constants as they stand, with constants fitted to all networks,
and for each network with constants fitted to the others, all from the same first guesses. Needs scipy.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from scipy.optimize import least_squares

from benchmarks.measured import Table, load_table, problem_of
from benchmarks.model_quality import NOTICED, RECORDED, family, quantile
from weft.device.cuda import blocks
from weft.generate.cuda import pointwise
from weft.generate.cuda.forms import Form
from weft.generate.cuda.templates import cost
from weft.generate.cuda.templates.mma import Shape
from weft.generate.cuda.templates.product import product
from weft.ir.declined import Declined

BLOCKS = {
    "START": 100.0, "END": 500.0, "LATENCY": 900.0, "EXPOSED": 0.05, "CHAIN.group": 150.0, "CHAIN.mma": 100.0,
    "MMA": 16.0, "ISSUE.rows": 0.06, "ISSUE.columns": 0.06, "ISSUE.taps": 0.12, "ISSUE.elements": 1.5,
    "ISSUE_WEIGHTS": 0.06,
    "ELEMENTS": 300.0, "ELEMENT": 50.0, "ELEMENT_OF_TABLES": 100.0, "ITEM": 60.0, "ITEM_OPERAND": 50.0, "RESULT": 2.0,
    "PLAIN": 1.0, "SPECIAL": 10.0, "CLUSTER_RANK": 200.0, "CLUSTER_BYTES": 10.0, "MEETING": 2000.0,
    "MEETING_BYTES": 8.0,
}  # fmt: skip
"""Constants of products, and what the notes and the data sheets would make them."""
POINTWISE = {
    "BLOCK": 150.0, "RESULT": 5.0, "VALUE": 3.0, "SPECIAL": 20.0, "TAP": 3.0, "APART": 20.0, "THREAD_SLOTS": 20.0,
    "RESULT_SLOTS": 5.0, "VALUE_SLOTS": 1.5, "SPECIAL_SLOTS": 2.0, "TAP_SLOTS": 3.0, "SHARED_SLOTS": 5.0,
    "TILE": 1000.0, "GATHER": 400.0, "PORT_BYTES": 64.0, "SCATTERED": 0.3, "SCATTERED_TILE": 0.3, "SECTORS": 0.3,
    "MEMORY": 1.0, "SHOWN": 0.1, "IN_STEP": 1.0,
}  # fmt: skip
"""The same of elementwise kernels."""
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


def product_kernels(table: Table) -> list[Kernel]:
    """Those of the mma and wgmma templates."""
    found = []
    for number, case in enumerate(table.cases):
        chosen = [k for k in case.kernels if dict(k.schedule.params).get("template") in ("mma", "wgmma")]
        p = product(problem_of(case.text)) if chosen else Declined("no such kernel")
        if isinstance(p, Declined):
            continue
        sizes = cost.sizes_of(p)
        for k in chosen:
            shape = Shape.of(k.schedule)

            def model(sizes: blocks.Sizes = sizes, shape: Shape = shape) -> float:
                return cost.cycles(sizes, shape, table.facts) / table.facts.clock_ghz / 1e3

            found.append(Kernel(number, case.network, k.us, model))
    return found


def pointwise_kernels(table: Table) -> list[Kernel]:
    """Those of elementwise problems and windows."""
    found = []
    for number, case in enumerate(table.cases):
        problem = problem_of(case.text)
        if family(problem) not in ("pointwise", "window"):
            continue
        work = pointwise.work_of(problem)
        for k in case.kernels:
            if k.schedule.generator == "cuda":
                form = Form.of(k.schedule)

                def model(work: pointwise.Work = work, form: Form = form) -> float:
                    return pointwise.cycles(work, form, table.facts) / table.facts.clock_ghz / 1e3

                found.append(Kernel(number, case.network, k.us, model))
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


def main() -> None:
    """Fit both models."""
    table = load_table(RECORDED)
    report("products", blocks, BLOCKS, product_kernels(table))
    report("pointwise", pointwise, POINTWISE, pointwise_kernels(table))


if __name__ == "__main__":
    main()
