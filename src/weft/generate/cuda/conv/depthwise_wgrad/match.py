"""The gradient of a depthwise convolution's weight: a problem as sizes, by the operator that its members are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from weft.ir.declined import Declined
from weft.ir.graph import OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

RULE = "conv_weight_gradient"
_TYPES = frozenset({DType.F16, DType.BF16, DType.F32})
_LIMIT = 1 << 31

Two = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """dw[c, k] = sum over images and positions p of dy[c, p] * x[c, stride * p + dilation * k - pad].

    Both operands lie channels-last, the result row-major; pairs are of rows and columns.
    """

    dtype: DType
    images: int
    channels: int
    image: Two
    results: Two
    kernel: Two
    strides: Two
    pads: Two
    dilations: Two
    dy: int
    """Position of the gradient of the convolution's result among the problem's inputs."""
    x: int
    """Position of the convolution's image."""

    @property
    def taps(self) -> int:
        """Of a channel."""
        return math.prod(self.kernel)

    @property
    def read_bytes(self) -> int:
        """Of both operands."""
        pixels = math.prod(self.image) + math.prod(self.results)
        return self.images * self.channels * pixels * self.dtype.itemsize


def weight_gradient(problem: Problem) -> WeightGradient | Declined:
    """The sizes, or why the template does not take the problem."""
    graph, params = problem.graph, dict(problem.origin_params)
    if problem.origin_rule != RULE:
        return Declined("not the gradient of a convolution's weight")
    operands = problem.origin_operand_nodes[:2]
    if len(operands) < 2 or len(graph.outputs) != 1 or len(graph.inputs) != len(set(operands)):
        return Declined("the gradient of a weight with something else")
    if min(operands) < 0 or any(graph.nodes[n].prim is not Prim.INPUT for n in operands):
        return Declined("the gradient of a weight from operands that are computed")
    (dy, x), out = (graph.type_of(n) for n in operands), graph.type_of(graph.outputs[0])
    groups, kernel = int(cast("int", params.get("groups", 1))), _pair(params["kernel"])
    channels = dy.shape[1]
    if dy.rank != 4 or kernel is None or params.get("transposed", False) or not groups == x.shape[1] == channels > 1:
        return Declined("not the gradient of a depthwise convolution's weight over images")
    taps = math.prod(kernel)
    shapes = ((channels, 1, *kernel), (channels, taps, 1, 1))  # what turns one into the other is no primitive
    if dy.dtype not in _TYPES or out.dtype is not dy.dtype or out.shape not in shapes:
        return Declined(f"the gradient of a weight as {out} from {dy}")
    if problem.output_formats != (Format.ROW,):
        return Declined("the gradient of a weight in another order")
    if set(problem.input_formats) != {Format.LAST}:
        return Declined("the gradient of a weight from operands that do not lie channels-last")
    strides, pads, dilations = (_pair(params[name]) for name in ("strides", "pads", "dilations"))
    if strides is None or pads is None or dilations is None or max(dy.size, x.size) >= _LIMIT:
        return Declined(f"the gradient of a weight from {x}")
    inputs = list(graph.inputs)
    return WeightGradient(
        dtype=dy.dtype,
        images=dy.shape[0],
        channels=channels,
        image=(x.shape[2], x.shape[3]),
        results=(dy.shape[2], dy.shape[3]),
        kernel=kernel,
        strides=strides,
        pads=pads,
        dilations=dilations,
        dy=inputs.index(operands[0]),
        x=inputs.index(operands[1]),
    )


def _pair(value: OriginParam) -> Two | None:
    return (int(value[0]), int(value[1])) if isinstance(value, tuple) and len(value) == 2 else None
