"""What every kernel for a problem must do at least: bytes and products that no algorithm avoids.

Source: roofline; performance notes, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Node
from weft.ir.prims import Prim
from weft.ir.work import node_flops
from weft.kernels.candidate import Problem


@dataclass(frozen=True, slots=True)
class Work:
    """Compulsory traffic and arithmetic of one problem."""

    read_bytes: int
    """Distinct input bytes that any kernel for it must read."""
    written_bytes: int
    contraction_flops: int
    """That no known algorithm avoids: those of matrix products and, after the saving of Winograd's, convolutions."""


WINOGRAD_SAVING = 6.0
"""F(6x6, 3x3) needs 5.06 times fewer products than the definition; no library goes further."""


def compulsory_work(problem: Problem) -> Work:
    """What every kernel must do, whatever its algorithm.

    An input counts only if all of it is needed for the outputs: what is sliced, gathered or selected may be skipped.
    """
    graph = problem.graph
    needed = fully_needed(graph)
    reads = sum(graph.type_of(i).nbytes for i in graph.inputs if needed[i])
    written = sum(graph.type_of(o).nbytes for o in set(graph.outputs))
    flops = 0.0
    for i, node in enumerate(graph.nodes):
        if needed[i] and node.prim is Prim.MATMUL and node.type.dtype.is_float:
            flops += node_flops(node, graph)
        elif needed[i] and node.prim is Prim.CONV and node.type.dtype.is_float:
            flops += node_flops(node, graph) * _inside_share(graph, node) / WINOGRAD_SAVING
    return Work(reads, written, int(flops))


_PARTIAL = frozenset({Prim.SLICE, Prim.GATHER, Prim.TAKE_ALONG, Prim.OPAQUE})


def fully_needed(graph: Graph) -> list[bool]:
    """For each node whether every element of it is needed for the outputs."""
    needed = [False] * len(graph)
    for o in graph.outputs:
        needed[o] = True
    for i in reversed(range(len(graph))):
        node = graph.nodes[i]
        if needed[i] and node.type.size:
            for position, operand in enumerate(node.inputs):
                if _reads_all(graph, node, position):
                    needed[operand] = True
    return needed


def _reads_all(graph: Graph, node: Node, position: int) -> bool:
    if node.prim in _PARTIAL:
        return position == 1 and node.prim in (Prim.GATHER, Prim.TAKE_ALONG)
    if node.prim is Prim.SELECT:
        return position == 0
    if isinstance(node.attrs, a.ScanAttrs):  # not the first factor, nor the last element where it comes after all
        return not node.attrs.exclusive and (node.attrs.kind != "linear" or position == 1)
    if isinstance(node.attrs, a.WindowAttrs):
        w, spatial = node.attrs, graph.type_of(node.inputs[0]).shape[-len(node.attrs.kernel) :]
        return _windows_cover(spatial, w.kernel, w.strides, w.pads_lo, w.pads_hi, w.dilations)
    if isinstance(node.attrs, a.ConvAttrs) and position == 0:
        c = node.attrs
        kernel = graph.type_of(node.inputs[1]).shape[2:]
        spatial = graph.type_of(node.inputs[0]).shape[2:]
        return not c.transposed and _windows_cover(spatial, kernel, c.strides, c.pads_lo, c.pads_hi, c.dilations)
    if isinstance(node.attrs, a.ConvAttrs):
        return not any(node.attrs.pads_lo + node.attrs.pads_hi)  # a tap may meet nothing but padding
    return True


def _windows_cover(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    lo: tuple[int, ...],
    hi: tuple[int, ...],
    dilations: tuple[int, ...],
) -> bool:
    """True when every element lies in some window."""
    for n, k, s, p, q, d in zip(sizes, kernel, strides, lo, hi, dilations, strict=True):
        left_over = (n + p + q - (k - 1) * d - 1) % s
        if s > k or (d > 1 and s > 1) or left_over > q:
            return False
    return True


def _inside_share(graph: Graph, node: Node) -> float:
    """At least this share of a convolution's products is with the image and not with its padding."""
    c = cast("a.ConvAttrs", node.attrs)
    if c.transposed:
        return 0.0
    share = 1.0
    x, w = graph.type_of(node.inputs[0]).shape[2:], graph.type_of(node.inputs[1]).shape[2:]
    for n, k, s, p, q, d in zip(x, w, c.strides, c.pads_lo, c.pads_hi, c.dilations, strict=True):
        windows = (n + p + q - (k - 1) * d - 1) // s + 1
        inside = sum(0 <= o * s - p + t * d < n for o in range(windows) for t in range(k)) if windows < 4096 else 0
        share *= inside / max(1, windows * k)
    return share
