"""Where a problem stands in a table of measurements, and which schedules count as one kind there."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from weft.costmodel.tiles import Sizes
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

if TYPE_CHECKING:
    from weft.generate.cuda.gemm.common.product import Product  # its package imports this one

_BLOCK = ("bm", "bn", "wm", "wn", "wk", "split", "cluster")
_FIELDS = {
    "tma": ("bm", "bn", "consumers", "pingpong", "min_ctas", "split", "halo_stages", "taps_per_stage"),
    "mma": _BLOCK,
    "wgmma": _BLOCK,
    "simt": _BLOCK,
    "halo": ("bn", "split", "wk", "wide"),
    "gemv": ("cols", "slices", "warps"),
    "swap_ab": ("bn", "split"),
}
"""What makes kinds of a template; what follows from sizes and shared memory (stages, boxes, blocks) does not."""
_GATHERS = frozenset({Prim.GATHER, Prim.TAKE_ALONG})
_LATER = ("multicast", "stream_k", "coop_fixup", "store")
"""What came to templates after the first measurements: a schedule with one of these is a kind of its own, and counts as
the kind without where nothing is known of it."""
_LOOPS = ("threads", "vector", "items", "tile", "corners", "whole")
"""The same of elementwise kernels."""


class Place(NamedTuple):
    """A kind of problem, and its sizes."""

    key: str
    """Equal for problems whose times may be compared."""
    point: tuple[int, ...]
    """Rounded binary logarithms of sizes."""


def product_place(p: Product, sizes: Sizes) -> Place | None:
    """Of a product or convolution; None where nothing was learned from measurements: groups, integers."""
    if p.c.groups > 1 or p.bytes is not None:
        return None
    numbers = "half" if p.dtype.itemsize == 2 else p.multiplied
    along = "nk" if p.w_load == "packed" else p.w_load  # repacked once, it lies like that
    taps = " taps" if p.c.kernel != (1, 1) else ""
    stride = " strided" if p.c.strides != (1, 1) else ""
    ends = (sizes.operands > 0) + (sizes.special > 0)
    return Place(f"product {numbers} {p.a_load} {along}{taps}{stride}", (*map(_log, (p.m, p.n, p.k, p.z)), int(ends)))


def loops_place(problem: Problem) -> Place | None:
    """Of an elementwise problem; None for reductions and windows, whose order no table has made better."""
    graph = problem.graph
    if any(CATEGORY[n.prim] in (Category.REDUCE, Category.LINEAR, Category.WINDOW) for n in graph.nodes):
        return None
    outputs = [graph.type_of(n) for n in graph.outputs]
    key = f"pointwise {min(t.dtype.itemsize for t in outputs)}" + " turns" * _turns(problem)
    key += " gathers" * any(n.prim in _GATHERS for n in graph.nodes)
    plain, special = _steps(graph)
    sizes = max(t.size for t in outputs), sum(graph.type_of(n).nbytes for n in graph.inputs)
    return Place(key, (*map(_log, (*sizes, plain + 1)), round(3 * math.sqrt(math.log2(special + 1)))))


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
    template = known.get("template")
    names = _LOOPS if template is None else _FIELDS.get(str(template), ())
    values = (f"{name}={int(v)}" for name in names if isinstance(v := known.get(name, 0), int))
    later = [f"{name}={int(v)}" for name in _LATER if isinstance(v := known.get(name, 0), int) and v]
    return " ".join([str(template or "loops"), *values, *(["+", *later] if later else [])])


def base_of(kind: str) -> str:
    """The kind without what came later."""
    return kind.partition(" + ")[0]


def _log(size: int) -> int:
    return round(math.log2(max(1, size)))
