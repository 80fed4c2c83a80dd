"""ATen calls of backward passes that torch does not take apart itself."""

from __future__ import annotations

from collections.abc import Mapping

from weft.fission.pool_gradient import taps_behind
from weft.frontends.torch.call import ABSENT, Call, Handler, NotTakenError
from weft.frontends.torch.indexing import added
from weft.ir.attrs import PadAttrs
from weft.ir.graph import NodeId, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType

_FRAMEWORKS = "gradient of a weight with many taps"


def convolution_backward(c: Call) -> tuple[NodeId, ...]:
    """Gradients of input, weight and bias; the framework computes what no rule takes."""
    dy, x, w = c.ref("grad_output"), c.ref("input"), c.ref("weight")
    k = c.rank(w) - 2
    strides, pads, dilations = (c.ints(n, k) for n in ("stride", "padding", "dilation"))
    groups, transposed = c.integer("groups"), c.flag("transposed")
    found = [ABSENT, ABSENT, ABSENT]
    if c.rank(x) != k + 2 or min(c.type(n).size for n in (dy, x, w)) == 0:
        c.decline("no batch, or nothing in it")
    left: set[int] = set()
    shared: dict[str, int | tuple[int, ...]] = {
        "strides": strides,
        "pads": pads,
        "dilations": dilations,
        "groups": groups,
    }
    if 0 in c.used:
        try:
            found[0] = c.one("conv_data_gradient", dy, w, sizes=c.shape(x)[2:], transposed=transposed, **shared)
        except NotTakenError:
            left.add(0)
    if 1 in c.used:
        try:
            found[1] = c.one("conv_weight_gradient", dy, x, kernel=c.shape(w)[2:], transposed=transposed, **shared)
        except NotTakenError:
            left.add(1)
    if 2 in c.used:
        found[2] = c.one("conv_bias_gradient", dy)
    if left:
        mask = [n in left for n in range(3)]
        theirs = c.leave(frozenset(left), _FRAMEWORKS, output_mask=mask)
        found = [theirs[n] if n in left else found[n] for n in range(3)]
    return tuple(found)


def max_pool_backward(k: int) -> Handler:
    """The gradient at the positions of the maxima, or at their tap numbers where a rule of ours made the positions."""

    def handler(c: Call) -> NodeId:
        dy, at = c.ref("grad_output"), c.ref("indices")
        where: dict[str, int | tuple[int, ...]] = {
            "sizes": c.shape(c.ref("self"))[-k:],
            "kernel": c.ints("kernel_size", k),
            "strides": c.ints("stride", k) if c.has("stride") and c.arguments["stride"] else c.ints("kernel_size", k),
            "pads": c.ints("padding", k),
            "dilations": c.ints("dilation", k),
            "ceil": c.flag("ceil_mode"),
        }
        taps = taps_behind(c.b, at, **where)
        if taps is None:
            return c.one("max_pool_gradient", dy, at, **where)
        return c.one("max_pool_taps_gradient", dy, taps, **where)

    return handler


def avg_pool2d_backward(c: Call) -> NodeId:
    """The gradient, shared by the elements of each window."""
    return c.one(
        "avg_pool_gradient",
        c.ref("grad_output"),
        sizes=c.shape(c.ref("self"))[-2:],
        kernel=c.ints("kernel_size", 2),
        strides=c.ints("stride", 2) if c.has("stride") and c.arguments["stride"] else c.ints("kernel_size", 2),
        pads=c.ints("padding", 2),
        count_include_pad=c.flag("count_include_pad"),
        divisor=c.integer("divisor_override") if c.has("divisor_override") else 0,
        ceil=c.flag("ceil_mode"),
    )


def adaptive_avg_pool2d_backward(c: Call) -> NodeId:
    """The gradient, shared by the elements of each window."""
    return c.one("adaptive_avg_pool_gradient", c.ref("grad_output"), sizes=c.shape(c.ref("self"))[-2:])


def embedding_dense_backward(c: Call) -> NodeId:
    """Sums of the rows of each index, of small tables; the framework sorts the indices of others."""
    if c.flag("scale_grad_by_freq"):
        c.decline("scaled by how often an index occurs")
    b, index, size, pad = c.b, c.ref("indices"), c.integer("num_weights"), c.integer("padding_idx")
    count = c.type(index).size
    rows = b.reshape(c.ref("grad_output"), (count, c.out.shape[1]))
    index = b.cast(b.reshape(index, (count,)), DType.I64)
    if 0 <= pad < size:
        nowhere = b.apply(Prim.EQ, index, b.scalar(pad, DType.I64))
        index = b.apply(Prim.SELECT, nowhere, b.scalar(-1, DType.I64), index)
    return b.cast(c.one("scatter_sum", rows, index, size=size), c.out.dtype)


def resize_backward(kind: str, k: int, antialias: bool = False) -> Handler:
    """The gradient of a resize of the last k dimensions; `kind`: nearest, exact (nearest, too), linear or cubic."""

    def handler(c: Call) -> NodeId:
        dy, sizes = c.ref("grad_output"), c.ints("input_size")
        names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[k]
        ratios = [m / n for m, n in zip(c.shape(dy)[-k:], sizes[-k:], strict=True)]
        scales = [c.real(n) if c.has(n) else r for n, r in zip(names, ratios, strict=True)]
        text = ",".join(repr(float(s)) for s in (1.0, 1.0, *scales))
        if kind in ("nearest", "exact"):
            return c.one("resize_nearest_gradient", dy, sizes=sizes, scales_text=text, exact=kind == "exact")
        mode = "align_corners" if c.flag("align_corners") else "half_pixel"
        cubic = {"cubic_coeff": -0.5 if antialias else -0.75} if kind == "cubic" else {}
        how: dict[str, OriginParam] = {"coordinate_mode": mode, "antialias": antialias, **cubic}
        return c.one(f"resize_{kind}_gradient", dy, sizes=sizes, scales_text=text, **how)

    return handler


def scatter(add: bool) -> Handler:
    """scatter and scatter_add of one element in each row, and sums of few; others are written in an order: opaque."""

    def handler(c: Call) -> NodeId:
        x, index = c.ref("self"), c.ref("index")
        axis = c.axis(c.integer("dim"), c.rank(x))
        if add and c.rank(x) == c.rank(index) and c.shape(index)[axis] != 1 and c.type(index).size:
            shape = c.shape(index)
            src = c.b.slice(c.ref("src"), (0,) * len(shape), shape, (1,) * len(shape))
            total = c.one("scatter_sum", src, index, size=c.shape(x)[axis], axis=axis)
            behind = [n - m for n, m in zip(c.shape(x), c.shape(total), strict=True)]
            if any(behind):
                attrs = PadAttrs((0,) * len(behind), tuple(behind), "constant", 0.0)
                total = c.b.add(Prim.PAD, total, attrs=attrs)
            return added(c, x, total)
        if "value" in c.arguments:
            src = c.b.broadcast(c.as_node(c.arguments["value"], c.out.dtype), c.shape(index))
        else:
            src = c.ref("src")
        return c.one("scatter_one", x, index, src, axis=axis, add=add)

    return handler


TABLE: Mapping[str, Handler] = {
    "aten.convolution_backward.default": convolution_backward,
    **{f"aten.max_pool{k}d_with_indices_backward.default": max_pool_backward(k) for k in (2, 3)},
    "aten.avg_pool2d_backward.default": avg_pool2d_backward,
    "aten._adaptive_avg_pool2d_backward.default": adaptive_avg_pool2d_backward,
    "aten.embedding_dense_backward.default": embedding_dense_backward,
    **{f"aten.upsample_{name}_backward.default": resize_backward(kind, k) for name, kind, k in (
        ("nearest1d", "nearest", 1), ("nearest2d", "nearest", 2), ("nearest3d", "nearest", 3),
        ("linear1d", "linear", 1), ("bilinear2d", "linear", 2), ("trilinear3d", "linear", 3),
        ("bicubic2d", "cubic", 2),
    )},
    **{f"aten._upsample_nearest_exact{k}d_backward.default": resize_backward("exact", k) for k in (1, 2, 3)},
    "aten._upsample_bilinear2d_aa_backward.default": resize_backward("linear", 2, True),
    "aten._upsample_bicubic2d_aa_backward.default": resize_backward("cubic", 2, True),
    "aten.scatter.src": scatter(False),
    "aten.scatter.value": scatter(False),
    "aten.scatter_add.default": scatter(True),
}  # fmt: skip
"""Handlers by overload."""
