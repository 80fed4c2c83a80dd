"""Depthwise convolutions as a training step has them: with a weight that changes, and both gradients."""

from __future__ import annotations

from tests.generate.cuda.products import BF16, LAST, ROW

from weft.fission import apply
from weft.fission.conv_gradient import conv_data_gradient
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

Sizes = tuple[int, int, int, int]
"""Images, channels, rows and columns of a convolution's image."""


def results(of: Sizes, k: int, stride: int, pad: int, dilation: int) -> Sizes:
    """Sizes of a convolution's result."""
    n, c, *image = of
    high, wide = ((size + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for size in image)
    return n, c, high, wide


def forward(
    of: Sizes, k: int, stride: int = 1, pad: int = 0, dilation: int = 1, *, dtype: DType = BF16, lies: Format = LAST,
    relu: bool = False,
) -> Problem:  # fmt: skip
    """conv(x), or relu6 of it, with a weight that is no constant."""
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, of)), b.input(TensorType(dtype, (of[1], 1, k, k)))
    attrs = a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (dilation, dilation), of[1])
    y = b.add(Prim.CONV, x, w, attrs=attrs)
    if relu:
        y = b.apply(Prim.MIN, b.apply(Prim.MAX, y, 0.0), 6.0)
    return _problem(b, y, (lies, ROW), lies)


def data_gradient(
    of: Sizes, k: int, stride: int = 1, pad: int = 0, dilation: int = 1, *, dtype: DType = BF16, lies: Format = LAST,
    relu: bool = False, constant: bool = False,
) -> Problem:  # fmt: skip
    """Gradient of a convolution's image; with `relu` zero where a further input, in f32, is not within (0, 6)."""
    b = GraphBuilder()
    dy = b.input(TensorType(dtype, results(of, k, stride, pad, dilation)))
    w = b.input(TensorType(dtype, (of[1], 1, k, k)), is_weight=constant)
    strides, pads, dilations = (stride, stride), (pad, pad), (dilation, dilation)
    y = conv_data_gradient(b, dy, w, sizes=of[2:], strides=strides, pads=pads, dilations=dilations, groups=of[1])
    assert not isinstance(y, Declined), y.reason
    formats = [lies, ROW]
    if relu:
        given = b.input(TensorType(DType.F32, of))
        out = b.apply(Prim.OR, b.apply(Prim.LE, given, 0.0), b.apply(Prim.GE, given, 6.0))
        y = b.cast(b.apply(Prim.SELECT, out, b.apply(Prim.MUL, b.cast(y, DType.F32), 0.0), b.cast(y, DType.F32)), dtype)
        formats.append(lies)
    return _problem(b, y, tuple(formats), lies)


def weight_gradient(
    of: Sizes, k: int, stride: int = 1, pad: int = 0, dilation: int = 1, *, dtype: DType = BF16, lies: Format = LAST
) -> Problem:
    """Gradient of a convolution's weight, as a plan cuts the operator out: a column for each tap."""
    b = GraphBuilder()
    dy, x = b.input(TensorType(dtype, results(of, k, stride, pad, dilation))), b.input(TensorType(dtype, of))
    params: dict[str, OriginParam] = {"kernel": (k, k), "strides": (stride, stride), "pads": (pad, pad)}
    params |= {"dilations": (dilation, dilation), "groups": of[1], "transposed": False}
    made = apply(b, "conv_weight_gradient", [dy, x], params)
    assert not isinstance(made, Declined), made.reason
    graph = b.build(made)
    (whole,) = (c for c in enumerate_candidates(graph).candidates if c.kind is Kind.ORIGIN)
    return extract(graph, whole, (lies, lies), (ROW,)).problem


def _problem(b: GraphBuilder, y: NodeId, formats: tuple[Format, ...], lies: Format) -> Problem:
    graph = b.build([y])
    return Problem(graph, f"{graph} {[f.value for f in formats]} {lies.value}", formats, (lies,))
