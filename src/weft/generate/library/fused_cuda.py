"""Products with what follows them as one call of cuDNN or cuBLASLt, and attention by each of the framework's kernels.

What follows the product is recognised as in `fused`: the same fission rule on an input of the same type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from weft.generate.library.attention_call import TARGET
from weft.generate.library.fused import Tail, is_weight, only_product, plain_convolution
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CallValue, LibraryCall, Ref, Schedule

CUDNN_MASKED = -65504.0
FLASH_MULTIPLE = 8
"""Elements; the framework pads other heads, which costs copies."""
ATTENTION_BACKENDS = ("flash", "efficient", "cudnn")
_TYPES = (DType.F16, DType.BF16, DType.F32)


def cudnn_conv(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """CONV (+ bias)(+ residual)(+ relu) on cuDNN: `cudnn_convolution`, `_relu` and `_add_relu`.

    By the algorithm that its heuristic names: which one is fastest may be found otherwise in the next process.
    """
    graph = problem.graph
    made = plain_convolution(graph, _TYPES, "convolution of floats")
    if isinstance(made, Declined):
        return made
    n = graph.nodes[made]
    at, (x, w) = cast("a.ConvAttrs", n.attrs), n.inputs
    tail = Tail(graph, made, 1)
    name = tail.activation[0]
    if not tail.matched or name not in ("none", "relu"):
        return Declined("what follows the convolution is no bias + residual + relu")
    if name == "none" and (tail.bias is not None or tail.residual is not None):
        return Declined("cuDNN adds a bias or a residual only before a relu")
    p = Program(graph)
    last = problem.input_formats[graph.inputs.index(x)] is Format.LAST
    layout = "format:channels_last" if last else "format:contiguous"
    weight = p.call("aten.clone.default", p.value(w), memory_format=layout)
    bias = None if tail.bias is None else p.call("aten.reshape.default", p.value(tail.bias), (n.type.shape[1],))
    data = p.value(x)
    common: tuple[CallValue, ...] = (at.strides, at.pads_lo, at.dilations, at.groups)
    if name == "none":
        out = p.call(
            "aten.cudnn_convolution.default", data, weight, at.pads_lo, at.strides, at.dilations, at.groups,
            False, True, False,
        )  # fmt: skip
    elif tail.residual is None:
        out = p.call("aten.cudnn_convolution_relu.default", data, weight, bias, *common)
    else:
        other = p.value(tail.residual)
        out = p.call("aten.cudnn_convolution_add_relu.default", data, weight, other, 1.0, bias, *common)
    p.bind(graph.outputs[0], out)
    return p.finish(schedule, problem)


def cublaslt_linear(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """MATMUL with a constant right operand (+ bias)(+ relu or tanh-GELU) as one cuBLASLt call."""
    graph = problem.graph
    made = only_product(graph)
    if isinstance(made, Declined):
        return made
    n = graph.nodes[made]
    x, w = n.inputs
    if n.type.dtype not in _TYPES or n.type.rank != 2 or not is_weight(graph, w):
        return Declined("not a 2-d product of floats with a constant right operand")
    if 0 in n.type.shape or 0 in graph.type_of(w).shape:
        return Declined("a product without elements, or of none")
    tail = Tail(graph, made, 1, rows=True)
    if not tail.matched:
        return Declined("what follows the product is no bias + residual + activation")
    p = Program(graph)
    columns_first = p.call("aten.permute.default", p.value(w), (1, 0))
    dense = p.call("aten.clone.default", columns_first, memory_format="format:contiguous")
    weight = p.call("aten.permute.default", dense, (1, 0))
    bias = None if tail.bias is None else p.call("aten.reshape.default", p.value(tail.bias), (n.type.shape[1],))
    data, (name, _, algorithm) = p.value(x), tail.activation
    if tail.residual is not None:
        if name != "none" or tail.bias is not None:
            return Declined("cuBLASLt adds a residual only to a bare product")
        other = p.value(tail.residual)
        if graph.type_of(tail.residual).shape != n.type.shape:
            other = p.call("aten.reshape.default", other, n.type.shape)
        out = p.call("aten.addmm.default", other, data, weight)
    elif name == "none":
        out = (
            p.call("aten.mm.default", data, weight)
            if bias is None
            else p.call("aten.addmm.default", bias, data, weight)
        )
    elif name == "relu" or (name == "gelu" and algorithm == "tanh"):
        if bias is None:
            return Declined("cuBLASLt's activation comes with a bias")
        out = p.call("aten._addmm_activation.default", bias, data, weight, use_gelu=name == "gelu")
    else:
        return Declined(f"cuBLASLt has no {name}")
    p.bind(graph.outputs[0], out)
    return p.finish(schedule, problem if graph.type_of(graph.outputs[0]).shape == n.type.shape else None)


def attention(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """One source operator `sdpa` by a chosen kernel of the framework, which is asked whether it would take it."""
    graph = problem.graph
    params = dict(problem.origin_params)
    operands = problem.origin_operand_nodes
    if problem.origin_rule != "sdpa" or len(graph.outputs) != 1 or -1 in operands[:3]:
        return Declined("no attention")
    if min(operands) < -1:
        return Declined("an operand of the attention was changed by the clean-ups")
    if bool(params.get("enable_gqa", False)) or graph.type_of(operands[0]).rank != 4:
        return Declined("grouped heads, or not four dimensions")
    if params.get("softcap", 0.0) or params.get("causal_offset", 0):
        return Declined("the framework's attention has neither a cap on scores nor an offset of its diagonal")
    if any(0 in graph.type_of(i).shape for i in operands[:3]):
        return Declined("attention without elements, or over none")
    p = Program(graph)
    q, k, v = (p.value(i) for i in operands[:3])
    causal = bool(params.get("causal", False))
    scale = params.get("scale", 0.0)
    factor = float(cast("float", scale)) if scale else None
    backend = str(schedule.param("backend"))
    if backend != "efficient" and graph.type_of(operands[0]).dtype not in (DType.F16, DType.BF16):
        return Declined(f"{backend} attention takes floats of 16 bits only")
    bias: Ref | Declined | None = None
    if len(operands) > 3 and operands[3] >= 0:
        if causal:
            return Declined("the framework's attention is causal or has a mask, never both")
        if backend == "flash":
            return Declined("flash attention takes no mask")
        bias = _bias(p, operands, full=backend == "efficient")
    if isinstance(bias, Declined):
        return bias
    if backend == "flash" and any(graph.type_of(i).shape[-1] % FLASH_MULTIPLE for i in operands[:3]):
        return Declined(f"flash attention takes heads of multiples of {FLASH_MULTIPLE}")
    out = p.call(TARGET, backend, q, k, v, bias, causal, factor)
    p.bind(graph.outputs[0], out)
    if len(p.used_inputs()) < len(graph.inputs):
        return Declined("an operand of the attention was changed by the clean-ups")
    return p.finish(schedule)


def _bias(p: Program, operands: Sequence[NodeId], *, full: bool) -> Ref | Declined:
    """The mask as numbers that are added to the scores, of the queries' type and in four dimensions.

    These kernels read it by the queries' type, whatever its own is. `full`: broadcast to the scores, in rows of
    multiples of 16 bytes; else ones stay where it is broadcast, and what is masked gets the number that the framework
    gives cuDNN, which makes NaN of a tile of negative infinities.
    """
    wanted, mask = p.graph.type_of(operands[0]), p.graph.type_of(operands[3])
    scores = (*wanted.shape[:3], p.graph.type_of(operands[1]).shape[2])
    shape = (1,) * (4 - mask.rank) + mask.shape
    if any(n not in (1, m) for n, m in zip(shape, scores, strict=True)):
        return Declined(f"a mask of {mask} for scores of {scores}")
    bias = p.value(operands[3])
    if mask.dtype is DType.BOOL:
        added = p.call("aten.where.Scalar", bias, 0.0, -math.inf if full else CUDNN_MASKED)
        bias = p.call("aten._to_copy.default", added, dtype=f"dtype:{wanted.dtype.value}")
    elif mask.dtype is not wanted.dtype:
        return Declined(f"a mask of {mask.dtype.value} for queries of {wanted.dtype.value}")
    if mask.rank < 4:
        bias = p.call("aten.reshape.default", bias, shape)
    if not full:
        return bias
    if shape[3] != scores[3] or scores[3] * wanted.dtype.itemsize % 16:
        return Declined("efficient attention reads masks in rows of multiples of 16 bytes")
    return p.call("aten.expand.default", bias, scores)
