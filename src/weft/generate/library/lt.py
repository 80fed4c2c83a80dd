"""Products by several algorithms of cuBLASLt, each a schedule of its own: which apply, and their calls.

    activation(x · w + bias + residual)      bias, residual and activation (relu, GELU with tanh) each optional

A problem is taken where its operands are views of inputs whose matrices lie in order, or a constant, which is laid out
along the sum once. The algorithms are the heuristic's first few whose sums have one order (see `lt_call`). A product
that is soon over is left to generated kernels: see `is_contender`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from weft.costmodel.profile import costs_of
from weft.device.cuda.cublaslt import IN_ORDER, Activation, LtProduct
from weft.errors import DeviceError
from weft.generate.library.algorithm import FORM, MOST_WORKSPACE, TARGET, Algorithm, identity
from weft.generate.library.fused import activation_of, channel_bias, is_weight, only_product
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Ref, Schedule

if TYPE_CHECKING:
    import torch

    from weft.device.cuda.facts import GpuFacts
    from weft.generate.library.lt_call import Library

ALGORITHMS = 4
"""Schedules of one problem."""
ASKED = 10
"""Algorithms that the heuristic is asked for: some are the same, or add up in no fixed order."""
_COMPUTE = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "f32"}


@dataclass(frozen=True, slots=True)
class Match:
    """A problem as one product."""

    x: NodeId
    w: NodeId
    constant: bool
    """`w` is a matrix known at link time."""
    bias: NodeId | None
    residual: NodeId | None
    activation: Activation


def lt_schedules(problem: Problem, facts: GpuFacts) -> list[Schedule]:
    """The library's best few algorithms for a problem, best first; none where it is no contender, or not there."""
    from weft.generate.library.lt_call import library

    found = library()
    if isinstance(found, Declined) or found.gpu != identity(facts.name, facts.capability, facts.sms):
        return []
    match = match_product(problem)
    if isinstance(match, Declined):
        return []
    product = _asked(problem, match, tf32=facts.tf32)
    if isinstance(product, Declined) or not is_contender(product, facts):
        return []
    return [
        Schedule("library", tuple(sorted([("algorithm", number), ("form", FORM), *x.params().items()])))
        for number, x in enumerate(algorithms(found, product))
    ]


def algorithms(found: Library, product: LtProduct) -> list[Algorithm]:
    """The heuristic's first few for a product that differ and have one order of their sums."""
    from weft.generate.library.lt_call import ALIGNMENT

    with found.lock:
        try:
            offered = found.lt.algorithms(
                product, ASKED, workspace=MOST_WORKSPACE, schemes=IN_ORDER, alignment=ALIGNMENT
            )
            kept = {x.data: x for x in reversed(offered) if x.in_order and x.workspace <= MOST_WORKSPACE}
        except DeviceError:
            return []  # the framework's own call remains
    made = [
        Algorithm(product.dtype, product.activation, x.data.hex(), found.lt.version, found.gpu, x.workspace)
        for x in sorted(kept.values(), key=lambda x: x.number)
    ]
    return made[:ALGORITHMS]


def is_contender(p: LtProduct, facts: GpuFacts) -> bool:
    """Whether a product is so large that the library comes near generated kernels."""
    size = 4 if p.dtype in ("f32", "tf32") else 2
    left, right = (p.batch if x else 1 for x in p.strides)
    moved = size * (left * p.m * p.k + right * p.k * p.n + p.batch * p.m * p.n * (1 + p.residual))
    work = 2.0 * p.batch * p.m * p.n * p.k
    return takes_long(work, p.dtype, moved, facts)


def takes_long(flops: float, dtype: str, moved: int, facts: GpuFacts) -> bool:
    """Whether arithmetic or bytes take so long that a library's algorithms are worth measuring."""
    c = costs_of(facts).library
    arithmetic_us = flops / dict(facts.achieved_flops)[dtype] * 1e6
    return arithmetic_us >= c.arithmetic_us or moved / facts.bandwidth_at(moved) / 1e3 >= c.traffic_us


def lt_product(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """The call by the algorithm that the schedule names."""
    match = match_product(problem)
    if isinstance(match, Declined):
        return match
    given = dict(schedule.params)
    words = {name: str(given[name]) for name in ("compute", "data", "version", "gpu")}
    chosen = Algorithm(**words, activation=match.activation, workspace=int(cast("int", given["workspace"])))
    graph = problem.graph
    p = Program(graph)
    w = _along_the_sum(p, match.w) if match.constant else p.value(match.w)
    x = p.value(match.x)
    columns = graph.type_of(match.w).shape[-1]
    bias = None if match.bias is None else p.call("aten.reshape.default", p.value(match.bias), (columns,))
    residual = None if match.residual is None else p.value(match.residual)
    made = p.call(TARGET, x, w, bias, residual, **dict(chosen.keywords))  # type: ignore[arg-type]
    p.bind(graph.outputs[0], made)
    if made.kind != "tmp":
        return Declined("a product of constants")
    return replace(p.finish(schedule), out_variant=True)


def _along_the_sum(p: Program, w: NodeId) -> Ref:
    """A constant matrix whose columns lie one after the other."""
    transposed = p.call("aten.permute.default", p.value(w), (1, 0))
    dense = p.call("aten.clone.default", transposed, memory_format="format:contiguous")
    return p.call("aten.permute.default", dense, (1, 0))


def match_product(problem: Problem) -> Match | Declined:
    """A problem as one product with what the library does to its result, or why it is none."""
    graph = problem.graph
    made = only_product(graph)
    if isinstance(made, Declined):
        return made
    n = graph.nodes[made]
    x, w = n.inputs
    if n.type.dtype not in _COMPUTE or {graph.type_of(x).dtype, graph.type_of(w).dtype} != {n.type.dtype}:
        return Declined("not a product of floats of one type")
    if 0 in n.type.shape or 0 in graph.type_of(w).shape or n.type.rank < 2:
        return Declined("a product without elements, or of none")
    if problem.output_formats != (Format.ROW,):
        return Declined("a result that is not row-major")
    tail = _tail(problem, made)
    if isinstance(tail, Declined):
        return tail
    return Match(x, w, is_weight(graph, w) and graph.type_of(w).rank == 2, *tail)


def _tail(problem: Problem, product: NodeId) -> tuple[NodeId | None, NodeId | None, Activation] | Declined:
    """Bias, residual and activation behind a product."""
    graph = problem.graph
    users, at, end = graph.users(), product, graph.outputs[0]
    bias: NodeId | None = None
    residual: NodeId | None = None
    columns = graph.type_of(product).shape[-1]
    while graph.nodes[end].prim is Prim.RESHAPE and end != at:
        end = graph.nodes[end].inputs[0]
    while at != end:
        after = users[at][0]
        n = graph.nodes[after]
        if n.prim is Prim.RESHAPE and len(users[at]) == 1:
            at = after
            continue
        if n.prim is not Prim.ADD or len(users[at]) > 1:
            break
        other = n.inputs[1] if n.inputs[0] == at else n.inputs[0]
        along = channel_bias(graph, other, columns, graph.type_of(at).rank - 1)
        if along is not None and is_weight(graph, along) and bias is None:
            bias = along
        elif residual is None and other != at and _is_dense(problem, other):
            residual = other
        else:
            return Declined("something else is added to the product")
        at = after
    if at == end:
        return bias, residual, ""
    name, _, variant = activation_of(graph, at, end) or ("", (), None)
    if name == "relu":
        return bias, residual, "relu"
    if name == "gelu" and variant == "tanh":
        return bias, residual, "gelu_tanh"
    return Declined("what follows the product is no bias + residual + relu or tanh-GELU")


def _is_dense(problem: Problem, node: NodeId) -> bool:
    """Whether a value is a row-major input, in another shape perhaps."""
    graph = problem.graph
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node in graph.inputs and problem.input_formats[graph.inputs.index(node)] is Format.ROW


def _asked(problem: Problem, match: Match, *, tf32: bool) -> LtProduct | Declined:
    """What the library is asked for: the same function of the operands' strides that a call uses."""
    from weft.generate.library.lt_call import product_of

    graph = problem.graph
    x, w = _view(problem, match.x), _dense(graph, match.w) if match.constant else _view(problem, match.w)
    if x is None or w is None:
        return Declined("an operand that is computed, or copied, inside")
    compute = _COMPUTE[graph.type_of(match.x).dtype]
    return product_of(
        x,
        w,
        "tf32" if tf32 and compute == "f32" else compute,
        bias=match.bias is not None,
        residual=match.residual is not None,
        activation=match.activation,
    )


def _dense(graph: Graph, node: NodeId) -> torch.Tensor:
    import torch

    from weft.generate.library.execute import TORCH_DTYPE

    t = graph.type_of(node)
    return torch.empty(t.shape[::-1], dtype=TORCH_DTYPE[t.dtype], device="meta").t()


def _view(problem: Problem, node: NodeId) -> torch.Tensor | None:
    """An input seen through changes of shape, without memory; None where they need a copy, or more is computed."""
    import torch

    from weft.generate.library.execute import TORCH_DTYPE

    graph = problem.graph
    n = graph.nodes[node]
    if n.prim is Prim.INPUT:
        strides = problem.input_formats[graph.inputs.index(node)].strides(n.type.shape)
        return torch.empty_strided(n.type.shape, strides, dtype=TORCH_DTYPE[n.type.dtype], device="meta")
    if n.prim not in (Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST):
        return None
    seen = _view(problem, n.inputs[0])
    if seen is None:
        return None
    if n.prim is Prim.TRANSPOSE:
        return seen.permute(cast("a.TransposeAttrs", n.attrs).perm)
    if n.prim is Prim.BROADCAST:
        return seen.expand(n.type.shape)
    try:
        return seen.view(n.type.shape)
    except (RuntimeError, ValueError):  # torch 2.11 raises the second for tensors without memory
        return None
