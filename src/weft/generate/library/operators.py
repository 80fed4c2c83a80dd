"""Whole source operators as one ATen call: keyed by the name of the fission rule that took them apart.

A row is a proposal: the candidate is verified against the primitives like any other. A row answers None
where ATen's operator means something else (other axes, other formula).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from weft.generate.library.attention_call import COMPOSED
from weft.generate.library.fused import channel_bias, is_weight, trailing_weight
from weft.generate.library.translate import Program, convolution, number_in
from weft.ir.declined import Declined
from weft.ir.graph import NodeId, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CallValue, LibraryCall, Ref, Schedule


class Operator:
    """One source operator inside a graph: operands by position, parameters by name."""

    def __init__(self, program: Program, operands: Sequence[NodeId], params: Iterable[tuple[str, OriginParam]]) -> None:
        self.program = program
        self.graph = program.graph
        self.operands = operands
        self._params = dict(params)
        self._read: set[str] = set()

    def has(self, position: int) -> bool:
        """True when an optional operand is present."""
        return position < len(self.operands) and self.operands[position] >= 0

    def node(self, position: int) -> NodeId:
        """The operand's node in the problem's graph."""
        return self.operands[position]

    def ref(self, position: int) -> Ref | None:
        """The operand's value; None where it is absent."""
        return self.program.value(self.operands[position]) if self.has(position) else None

    def param(self, name: str, default: OriginParam) -> OriginParam:
        """A keyword argument of the rule."""
        self._read.add(name)
        return self._params.get(name, default)

    def number(self, name: str, default: float) -> float:
        """A numeric keyword argument."""
        return float(cast("float", self.param(name, default)))

    def ints(self, name: str) -> tuple[int, ...]:
        """A tuple-valued keyword argument; empty if absent."""
        value = self.param(name, ())
        return value if isinstance(value, tuple) else (int(cast("int", value)),)

    def implied(self, *names: str) -> None:
        """These keyword arguments reach the call another way."""
        self._read.update(names)

    def unread(self) -> set[str]:
        """Keyword arguments that a row never looked at: its call cannot mean them."""
        return set(self._params) - self._read

    def affine(self, source: Callable[[NodeId], NodeId | None]) -> list[NodeId | None] | None:
        """Scale (operand 1) and shift (operand 2) of a normalisation, also where clean-ups changed or dropped them.

        Then the result still is `d · r · scale + shift` with r = rsqrt(..), and what is there of both is found there.
        An absent one does nothing. `source`: the weight that a factor or a summand repeats. None: not found.
        """
        given = [self.operands[k] if k < len(self.operands) else -1 for k in (1, 2)]
        if LOST not in given:
            return [node if node >= 0 else None for node in given]
        node = self.graph.outputs[0]
        if self.graph.nodes[node].prim is Prim.CAST:
            (node,) = self.graph.nodes[node].inputs
        found: dict[Prim, NodeId] = {}
        for prim in (Prim.ADD, Prim.MUL):
            n = self.graph.nodes[node]
            sources = [source(i) for i in n.inputs] if n.prim is prim else []
            # at batch 1 the reciprocal deviation has a scale's shape, too
            sources = [x if x is not None and is_weight(self.graph, x) else None for x in sources]
            if len(weights := [x for x in sources if x is not None]) == 1:
                found[prim] = weights[0]
                node = n.inputs[sources.index(None)]
        return [found.get(Prim.MUL), found.get(Prim.ADD)] if self._is_normalised(node) else None

    def _is_normalised(self, node: NodeId) -> bool:
        n = self.graph.nodes[self._behind_views(node)]
        return n.prim is Prim.MUL and Prim.RSQRT in (self.graph.nodes[self._behind_views(i)].prim for i in n.inputs)

    def _behind_views(self, node: NodeId) -> NodeId:
        while self.graph.nodes[node].prim in (Prim.BROADCAST, Prim.RESHAPE):
            (node,) = self.graph.nodes[node].inputs
        return node

    def weight(self, node: NodeId, shape: tuple[int, ...]) -> Ref:
        """A weight in this shape and in the type of the first operand."""
        ref, dtype = self.program.value(node), self.graph.type_of(self.node(0)).dtype
        if self.graph.type_of(node).shape != shape:
            ref = self.call("aten.reshape.default", ref, shape)
        if self.graph.type_of(node).dtype is not dtype:
            ref = self.program.call("aten._to_copy.default", ref, dtype=f"dtype:{dtype.value}")
        return ref

    def call(self, target: str, *args: CallValue, result: int = 0) -> Ref:
        """One step of the program."""
        return self.program.call(target, *args, result=result)

    def shape(self, position: int) -> tuple[int, ...]:
        """Shape of an operand."""
        return self.graph.type_of(self.operands[position]).shape


Row = Callable[[Operator], Ref | None]


def _unary(target: str, *params: tuple[str, float], fixed: Sequence[tuple[str, float]] = ()) -> Row:
    """A call of x and some numbers; parameters in `fixed` must have the one value that the call implies."""

    def row(o: Operator) -> Ref | None:
        if any(o.number(name, value) != value for name, value in fixed):
            return None
        return o.call(target, o.ref(0), *(o.number(name, default) for name, default in params))

    return row


def _softmax(target: str) -> Row:
    def row(o: Operator) -> Ref | None:
        axis = o.param("axis", -1)
        return o.call(target, o.ref(0), int(cast("int", axis)), False)

    return row


def _layer_norm(o: Operator) -> Ref | None:
    rank, axes = len(o.shape(0)), o.ints("axes")
    normal = tuple(sorted(x % rank for x in axes))
    if normal != tuple(range(rank - len(axes), rank)):
        return None
    shape = o.shape(0)[rank - len(axes) :]
    found = o.affine(lambda node: trailing_weight(o.graph, node, shape))
    if found is None or any(node is not None and o.graph.type_of(node).size != math.prod(shape) for node in found):
        return None
    affine = [None if node is None else o.weight(node, shape) for node in found]
    return o.call("aten.native_layer_norm.default", o.ref(0), shape, *affine, o.number("eps", 1e-5))


def _affine(o: Operator) -> list[Ref | None] | None:
    """Scale and shift of dimension 1 as ATen takes them, (channels,) of the type at hand; None: one is not found."""
    channels = o.shape(0)[1]
    found = o.affine(lambda node: channel_bias(o.graph, node, channels, 1))
    return None if found is None else [None if node is None else o.weight(node, (channels,)) for node in found]


def _group_norm(o: Operator) -> Ref | None:
    groups, eps = int(cast("int", o.param("groups", 1))), o.number("eps", 1e-5)
    if (affine := _affine(o)) is None:
        return None
    return o.call("aten.group_norm.default", o.ref(0), groups, *affine, eps, False)


def _instance_norm(o: Operator) -> Ref | None:
    eps = o.number("eps", 1e-5)
    if (affine := _affine(o)) is None:
        return None
    return o.call("aten.instance_norm.default", o.ref(0), *affine, None, None, True, 0.0, eps, False)


def _gelu(o: Operator) -> Ref | None:
    approximate = str(o.param("approximate", "none"))
    return o.program.call("aten.gelu.default", o.ref(0), approximate=approximate)


def _linear(o: Operator) -> Ref | None:
    return o.call("aten.linear.default", o.ref(0), o.ref(1), o.ref(2))


def _addmm(o: Operator) -> Ref | None:
    if o.number("alpha", 1) != 1 or o.number("beta", 1) != 1:
        return None
    return o.call("aten.addmm.default", o.ref(0), o.ref(1), o.ref(2))


def _conv(o: Operator) -> Ref | None:
    convs = [n for n in o.graph.nodes if n.prim is Prim.CONV]
    x, w = o.ref(0), o.ref(1)
    if len(convs) != 1 or x is None or w is None:
        return None
    o.implied("strides", "pads_lo", "pads_hi", "dilations", "groups")
    return convolution(o.program, convs[0], x, w, o.ref(2))


def _conv_weight_gradient(o: Operator) -> Ref | None:
    dy, x, kernel = o.ref(0), o.ref(1), o.ints("kernel")
    groups, transposed = int(o.number("groups", 1)), bool(o.param("transposed", False))
    small, large = (o.shape(1), o.shape(0)) if transposed else (o.shape(0), o.shape(1))
    # of the weight the operator looks at shape, type and place alone
    weight = o.call("aten.new_empty.default", dy, (small[1], large[1] // groups, *kernel))
    strides, pads, dilations = (o.ints(name) for name in ("strides", "pads", "dilations"))
    sizes = zip(small[2:], large[2:], kernel, strides, pads, dilations, strict=True)
    extra = tuple(n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) if transposed else 0 for m, n, k, s, p, d in sizes)
    return o.call(
        "aten.convolution_backward.default", dy, x, weight, None, strides, pads, dilations, transposed, extra, groups,
        (False, True, False), result=1,
    )  # fmt: skip


def _sdpa(o: Operator) -> Ref | None:
    scale = o.param("scale", 0.0)
    causal = bool(o.param("causal", False))
    grouped = bool(o.param("enable_gqa", False))
    if (o.has(3) and causal) or o.number("softcap", 0.0) or o.number("causal_offset", 0):
        return None
    if any(0 in o.shape(k) for k in range(3)):
        return None  # on a GPU the framework's gives no tensor at all
    return o.program.call(
        COMPOSED,
        o.ref(0), o.ref(1), o.ref(2), o.ref(3), 0.0, causal,
        scale=float(cast("float", scale)) if scale else None, enable_gqa=grouped,
    )  # fmt: skip


def _pool_plain(o: Operator) -> bool:
    """ATen's pools take two spatial axes and equal pads of at most half a window on both sides."""
    kernel, dilations = o.ints("kernel"), o.ints("dilations") or (1, 1)
    pads = o.ints("pads_lo")
    if len(o.shape(0)) != 4 or pads != o.ints("pads_hi"):
        return False
    return all(2 * p <= d * (k - 1) + 1 for p, k, d in zip(pads, kernel, dilations, strict=True))


def _max_pool(o: Operator) -> Ref | None:
    if not _pool_plain(o):
        return None
    args = (o.ints("kernel"), o.ints("strides"), o.ints("pads_lo"), o.ints("dilations") or 1)
    return o.call("aten.max_pool2d.default", o.ref(0), *args, bool(o.param("ceil", False)))


def _avg_pool(o: Operator) -> Ref | None:
    if not _pool_plain(o):
        return None
    divisor = int(cast("int", o.param("divisor", 0)))
    counted = bool(o.param("count_include_pad", False))
    if set(o.ints("dilations")) - {1}:
        return None
    args = (o.ints("kernel"), o.ints("strides"), o.ints("pads_lo"))
    return o.call("aten.avg_pool2d.default", o.ref(0), *args, bool(o.param("ceil", False)), counted, divisor or None)


def _adaptive(o: Operator) -> Ref | None:
    return o.call("aten.adaptive_avg_pool2d.default", o.ref(0), o.ints("output_size")) if len(o.shape(0)) == 4 else None


def _mean(o: Operator) -> Ref | None:
    return o.call("aten.mean.dim", o.ref(0), o.ints("axes"), bool(o.param("keepdims", True)))


def _resize_nearest(o: Operator) -> Ref | None:
    """Where every index is floor(i·n/m), which is what `upsample_nearest2d` takes."""
    shape, sizes = o.shape(0), o.ints("sizes")
    scales = [float(s) for s in str(o.param("scales_text", "")).split(",") if s]
    o.implied("roi_text", "extrapolation")
    modes = o.param("coordinate_mode", "half_pixel"), o.param("nearest_mode", "round_prefer_floor")
    fits = len(shape) == len(sizes) == 4 and shape[:2] == sizes[:2] and 0 not in shape + sizes
    even = all(s == m / n for s, m, n in zip(scales, sizes, shape, strict=bool(scales)))
    if not (fits and even) or modes != ("asymmetric", "floor"):
        return None
    return o.call("aten.upsample_nearest2d.default", o.ref(0), sizes[2:])


def resize_linear(o: Operator) -> Ref | None:
    """Where the coordinates are those of `upsample_bilinear2d`."""
    shape, sizes = o.shape(0), o.ints("sizes")
    mode = str(o.param("coordinate_mode", "half_pixel"))
    scales = [float(s) for s in str(o.param("scales_text", "")).split(",") if s]
    o.implied("roi_text", "extrapolation")
    plain = not o.param("antialias", False) and not o.param("exclude_outside", False)
    fits = len(shape) == 4 and shape[:2] == sizes[:2] and min(sizes[2:], default=0) > 1
    even = all(s == m / n for s, m, n in zip(scales, sizes, shape, strict=bool(scales)))
    if not (plain and fits and even) or mode not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return None
    return o.call("aten.upsample_bilinear2d.default", o.ref(0), sizes[2:], mode == "align_corners")


def _resize_linear(o: Operator) -> Ref | None:
    """With aligned corners ATen's weights differ from ours in the last digit."""
    return None if o.param("coordinate_mode", "half_pixel") == "align_corners" else resize_linear(o)


def _grid_sample(o: Operator) -> Ref | None:
    mode = {"linear": 0, "nearest": 1}[str(o.param("mode", "linear"))]
    padding = ("zeros", "border", "reflection").index(str(o.param("padding", "zeros")))
    aligned = bool(o.param("align_corners", False))
    x, grid = (o.graph.type_of(o.node(k)) for k in (0, 1))
    if len(x.shape) != 4 or x.dtype is not grid.dtype:
        return None
    return o.call("aten.grid_sampler_2d.default", o.ref(0), o.ref(1), mode, padding, aligned)


def _relu(o: Operator) -> Ref | None:
    return o.call("aten.relu.default", o.ref(0))


LOST = -2
"""In place of an operand that clean-ups changed."""
FOUND_AGAIN = frozenset({"group_norm", "instance_norm", "layer_norm"})
"""Rules whose rows find the operands again that clean-ups changed."""
TABLED = frozenset({"conv_weight_gradient", "resize_nearest", "resize_linear"})
"""Rules that make tables which their call does not read: what stands in them follows from the parameters."""
FINITE = frozenset({"conv_weight_gradient"})
"""Rules whose primitives make NaN of infinities elsewhere than the model's own operator: held to finite inputs."""
OPERATORS: Mapping[str, Row] = {
    "softmax": _softmax("aten._softmax.default"),
    "log_softmax": _softmax("aten._log_softmax.default"),
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "gelu": _gelu,
    "silu": _unary("aten.silu.default", fixed=(("alpha", 1.0),)),
    "mish": _unary("aten.mish.default"),
    "sigmoid": _unary("aten.sigmoid.default"),
    "hard_swish": _unary("aten.hardswish.default"),
    "softplus": _unary("aten.softplus.default", ("beta", 1.0), ("threshold", 20.0)),
    "elu": _unary("aten.elu.default", ("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    "leaky_relu": _unary("aten.leaky_relu.default", ("alpha", 0.01)),
    "linear": _linear,
    "addmm": _addmm,
    "conv": _conv,
    "conv_weight_gradient": _conv_weight_gradient,
    "sdpa": _sdpa,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive,
    "reduce_mean": _mean,
    "relu": _relu,
    "resize_nearest": _resize_nearest,
    "resize_linear": _resize_linear,
    "grid_sample": _grid_sample,
}


WIDENED: Mapping[Prim, str] = {Prim.ADD: "aten.add.Tensor", Prim.MUL: "aten.mul.Tensor"}
"""Primitives that the framework computes in f32 inside, of operands of 16 bits and one number."""


def widened(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """CAST(CAST(x) + number) or · in f32 → the framework's operator of x itself, which rounds once as well."""
    graph = problem.graph
    if len(graph.outputs) != 1:
        return Declined("several results")
    last = graph.nodes[graph.outputs[0]]
    n = graph.nodes[last.inputs[0]] if last.prim is Prim.CAST else last
    if n.prim not in WIDENED or n.type.dtype is not DType.F32 or last.type.dtype not in (DType.F16, DType.BF16):
        return Declined("no sum or product in f32 between 16 bits")
    for x, other in (n.inputs, n.inputs[::-1]):
        wide, value = graph.nodes[x], number_in(graph, other)
        if wide.prim is Prim.CAST and value is not None and wide.type.shape == n.type.shape:
            (source,) = wide.inputs
            if graph.type_of(source).dtype is last.type.dtype:
                p = Program(graph)
                number = p.call("weft.number", value, "dtype:f32")
                p.bind(graph.outputs[0], p.call(WIDENED[n.prim], p.value(source), number))
                return p.finish(schedule, problem)
    return Declined("no number")
