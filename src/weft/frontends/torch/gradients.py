"""ATen calls of backward passes that torch does not take apart itself."""

from __future__ import annotations

from collections.abc import Mapping

from weft.frontends.torch.call import ABSENT, Call, Handler, NotTakenError
from weft.ir.graph import NodeId

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


def max_pool2d_backward(c: Call) -> NodeId:
    """The gradient at the positions of the maxima."""
    sizes = c.shape(c.ref("self"))[-2:]
    return c.one(
        "max_pool_gradient",
        c.ref("grad_output"),
        c.ref("indices"),
        sizes=sizes,
        kernel=c.ints("kernel_size", 2),
        strides=c.ints("stride", 2) if c.has("stride") and c.arguments["stride"] else c.ints("kernel_size", 2),
        pads=c.ints("padding", 2),
        dilations=c.ints("dilation", 2),
        ceil=c.flag("ceil_mode"),
    )


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


def scatter(add: bool) -> Handler:
    """scatter and scatter_add of one element in each row; more than one are written in an order, and go opaque."""

    def handler(c: Call) -> NodeId:
        x, index = c.ref("self"), c.ref("index")
        axis = c.axis(c.integer("dim"), c.rank(x))
        if "value" in c.arguments:
            src = c.b.broadcast(c.as_node(c.arguments["value"], c.out.dtype), c.shape(index))
        else:
            src = c.ref("src")
        return c.one("scatter_one", x, index, src, axis=axis, add=add)

    return handler


TABLE: Mapping[str, Handler] = {
    "aten.convolution_backward.default": convolution_backward,
    "aten.max_pool2d_with_indices_backward.default": max_pool2d_backward,
    "aten.avg_pool2d_backward.default": avg_pool2d_backward,
    "aten._adaptive_avg_pool2d_backward.default": adaptive_avg_pool2d_backward,
    "aten.scatter.src": scatter(False),
    "aten.scatter.value": scatter(False),
    "aten.scatter_add.default": scatter(True),
}
"""Handlers by overload."""
