"""A small plan of generated kernels for an H200, made by hand: two alike products and what stands between them."""

from __future__ import annotations

from functools import cache

import numpy as np
from tests.runtime.plans import step_of

from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind
from weft.kernels.plan import Plan, Step
from weft.kernels.source import CudaSource
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices

H200 = profile("h200")
PRODUCT = "tma"


@cache
def products() -> Graph:
    """tanh(x w) v, in f16."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (512, 256)))
    w, v = (b.constant(np.full((256, 256), value, np.float16)) for value in (0.5, 0.25))
    return b.build([b.add(Prim.MATMUL, b.apply(Prim.TANH, b.add(Prim.MATMUL, x, w)), v)])


@cache
def cuda_plan(template: str = PRODUCT) -> Plan:
    """Every primitive as its own kernel, products by a template."""
    graph, generator = products(), CudaGenerator()
    steps: dict[int, Step] = {}
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is not Kind.SINGLE:
            continue
        choice = format_choices(graph, candidate)[0]
        cut = extract(graph, candidate, choice.inputs, choice.outputs)
        offered = generator.schedules(cut.problem, H200)
        assert not isinstance(offered, Declined), offered
        schedules = [s for s in offered if dict(s.params).get("template") == template] or list(offered)
        source = generator.emit(cut.problem, schedules[0])
        assert isinstance(source, CudaSource), source
        steps[candidate.members] = step_of(candidate, cut, source)
    return Plan("by hand", tuple(steps[k] for k in sorted(steps)))
