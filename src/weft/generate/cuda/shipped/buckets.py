"""The bucket of a table of measurements that a problem belongs to, and which schedules count as one kind there."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from weft.costmodel.tiles import Sizes
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.table import NAMED
from weft.generate.cuda.template import Kinds
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

_GATHERS = frozenset({Prim.GATHER, Prim.TAKE_ALONG})
_LOOPS = ("threads", "vector", "items", "tile", "corners", "whole")
"""What makes kinds of elementwise kernels; of templates the table says it."""


class Bucket(NamedTuple):
    """A kind of problem, and its sizes."""

    key: str
    """Equal for problems whose times may be compared."""
    point: tuple[int, ...]
    """Rounded binary logarithms of sizes."""


def product_bucket(p: Product, sizes: Sizes) -> Bucket | None:
    """Of a product or convolution; None where nothing was learned from measurements: groups, integers."""
    if p.c.groups > 1 or p.bytes is not None:
        return None
    numbers = "half" if p.dtype.itemsize == 2 else p.multiplied
    along = "nk" if p.w_load == "packed" else p.w_load  # repacked once, it lies like that
    taps = " taps" if p.c.kernel != (1, 1) else ""
    stride = " strided" if p.c.strides != (1, 1) else ""
    ends = (sizes.operands > 0) + (sizes.special > 0)
    return Bucket(f"product {numbers} {p.a_load} {along}{taps}{stride}", (*map(_log, (p.m, p.n, p.k, p.z)), int(ends)))


def loops_bucket(problem: Problem) -> Bucket | None:
    """Of an elementwise problem; None for reductions and windows, whose order no table has made better."""
    graph = problem.graph
    if any(CATEGORY[n.prim] in (Category.REDUCE, Category.LINEAR, Category.WINDOW) for n in graph.nodes):
        return None
    outputs = [graph.type_of(n) for n in graph.outputs]
    key = f"pointwise {min(t.dtype.itemsize for t in outputs)}" + " turns" * _turns(problem)
    key += " gathers" * any(n.prim in _GATHERS for n in graph.nodes)
    plain, special = _steps(graph)
    sizes = max(t.size for t in outputs), sum(graph.type_of(n).nbytes for n in graph.inputs)
    return Bucket(key, (*map(_log, (*sizes, plain + 1)), round(3 * math.sqrt(math.log2(special + 1)))))


def _steps(graph: Graph) -> tuple[int, int]:
    """Elementwise steps and transcendental ones on the longest way."""
    found: list[tuple[int, int]] = []
    for node in graph.nodes:
        plain, special = (max((found[j][k] for j in node.inputs), default=0) for k in range(2))
        if node.prim in TRANSCENDENTAL:
            special += 1
        elif node.prim not in FREE and CATEGORY[node.prim] is Category.ELEMENTWISE:
            plain += 1
        found.append((plain, special))
    return max(found[n][0] for n in graph.outputs), max(found[n][1] for n in graph.outputs)


def _turns(problem: Problem) -> bool:
    """Whether images are read and written in different orders, or the last axis becomes another one."""
    graph = problem.graph
    moved = (n.attrs.perm for n in graph.nodes if isinstance(n.attrs, a.TransposeAttrs))
    values = [*zip(graph.inputs, problem.input_formats, strict=True)]
    values += zip(graph.outputs, problem.output_formats, strict=True)
    large = ((graph.type_of(n), f) for n, f in values)
    orders = {f for t, f in large if t.rank >= 3 and t.shape[1] > 1 and t.size > t.shape[0] * t.shape[1]}
    return len(orders) > 1 or any(perm[-1] != len(perm) - 1 for perm in moved)


@lru_cache(maxsize=4096)
def kind_of(schedule: Schedule) -> str:
    """What a table calls a schedule; for templates that it does not know, the template's name."""
    known = dict(schedule.params)
    name = known.get("template")
    template = NAMED.get(str(name))
    kinds = Kinds(shipped=_LOOPS) if name is None else template.kinds if template is not None else Kinds()
    values = (f"{x}={int(v)}" for x in kinds.shipped if isinstance(v := known.get(x, 0), int))
    later = [f"{x}={int(v)}" for x in kinds.later if isinstance(v := known.get(x, 0), int) and v]
    return " ".join([str(name or "loops"), *values, *(["+", *later] if later else [])])


def base_of(kind: str) -> str:
    """The kind without what came later."""
    return kind.partition(" + ")[0]


def _log(size: int) -> int:
    return round(math.log2(max(1, size)))
