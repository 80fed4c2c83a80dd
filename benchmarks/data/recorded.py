"""What kernels of the recorded tables did that today's do not, so that the models can be judged by them.

The later table was measured at commit 3715adc. Its kernels of f16 divided exactly by constants behind products, and
used exact functions there wherever the graph compares anything; kernels since then do neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from weft.generate.contraction.match import Contraction
from weft.generate.cuda import predict
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.intrinsics.approx import FUNCTIONS, JUMPS, may_approximate
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.orchestrate import estimate_cuda

COMPARISONS = frozenset({Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE})


def exact(c: Contraction) -> tuple[int, int, int]:
    """`epilogue.exact` of then."""
    rough = c.graph is not None and not any(s.prim in JUMPS for s in c.body) and may_approximate(c.graph)
    clipped, divided, others = 0, 0, 0
    for step in c.body:
        if step.prim not in FUNCTIONS or step.dtype is not DType.F32:
            continue
        first, last = (epilogue.scalar(c, c.body[s]) if s >= 0 else None for s in (step.args[0], step.args[-1]))
        if step.prim is Prim.DIV and last is not None:
            clipped += abs(math.frexp(last.constant or 0.0)[0]) != 0.5
        elif not rough:
            divided += step.prim is Prim.DIV and first is None
            others += step.prim is not Prim.DIV
    return clipped, divided, others


def exact_ends(graph: Graph) -> tuple[bool, bool]:
    """`estimate_cuda._exact_ends` of then."""
    wide = any(graph.type_of(o).dtype.itemsize > 2 for o in graph.outputs)
    return wide or any(n.prim in COMPARISONS for n in graph.nodes), True


@contextmanager
def kernels_of_then() -> Iterator[None]:
    """The models speak of the kernels of the later table."""
    predict.forget()
    with patch.object(epilogue, "exact", exact), patch.object(estimate_cuda, "_exact_ends", exact_ends):
        yield
    predict.forget()
