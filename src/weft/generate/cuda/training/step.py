"""A backward pass as a problem, and the kernels of `gradient` for so many rows as a source that solves it.

The problem is what the gate judges the kernels by: the gradients of x and of the parameters as primitives, with the
roundings of a pass in the network's own type. Products over rows sum in float32, as the kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.training.entry import Entry
from weft.generate.cuda.training.gradient import Gradient
from weft.generate.cuda.training.network import Network
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaArgument, CudaSource, Inside, Launch, Left, Number, Pointer, Schedule

ALIGNED = 16
"""Bytes at which tensors of a caller begin."""
BASES = ("x", "dy", "image", "scratch", "grads", "dx")
"""What callers have by themselves, in this order."""
_UNIT = 256
"""Of what stands in one buffer."""


def posed(b: GraphBuilder, outputs: list[NodeId], name: str, *, finite: bool = True) -> Problem:
    """A graph as a problem of training: row-major, at any 16 bytes."""
    graph = b.build(outputs)
    formats = (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(graph.outputs)
    return Problem(graph, f"{name}\n{graph}", *formats, alignment=ALIGNED, finite=finite)


def gradient_problem(
    net: Network, rows: int, *, inputs: bool, parameters: bool, dtype: DType, result: bool = False
) -> Problem:
    """From x, the gradient of the result and the parameters to the gradients of x and of the parameters.

    That of x is there for `inputs`, one output for each part that the network reads; those of the parameters, in
    `dtype`, for `parameters`, in the order of `Network.slices`. `result`: that of the forward pass comes first.
    """
    b = GraphBuilder()
    x = b.input(TensorType(net.input_dtype, (rows, net.columns)))
    dy = b.input(TensorType(net.dtype, (rows, net.widths[-1])))
    values: dict[int, NodeId] = {}
    parts = net.parts or ((0, net.columns),)
    for i, (start, width) in enumerate(parts):
        values[-i] = b.cast(columns_of(b, x, start, width), net.dtype)
    kept: list[tuple[NodeId, NodeId, NodeId]] = []
    for layer, (bias, act) in enumerate(zip(net.biases, net.acts, strict=True)):
        weight, vector = net.slices_of(layer)
        w = b.cast(b.input(TensorType(net.masters or net.dtype, weight.shape), is_weight=True), net.dtype)
        h = _beside(b, [values[v] for v in net.reads(layer)])
        z = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
        if bias and vector is not None:
            master = b.input(TensorType(net.masters or net.dtype, vector.shape), is_weight=True)
            z = b.apply(Prim.ADD, z, b.cast(master, net.dtype))
        added = net.adds(layer)
        z = b.apply(Prim.ADD, z, values[added.value]) if added is not None and added.before else z
        y = act.apply(b, z)
        kept.append((h, w, z if act.keeps == 2 else y))
        y = b.apply(Prim.ADD, y, values[added.value]) if added is not None and not added.before else y
        values[layer + 1] = y
    found = _backward(b, net, dy, kept, inputs=inputs, parameters=parameters, dtype=dtype)
    return posed(b, [values[net.depth], *found] if result else found, "gradients")


def _backward(
    b: GraphBuilder,
    net: Network,
    dy: NodeId,
    kept: list[tuple[NodeId, NodeId, NodeId]],
    *,
    inputs: bool,
    parameters: bool,
    dtype: DType,
) -> list[NodeId]:
    gradients: dict[int, NodeId] = {net.depth: dy}

    def give(value: int, g: NodeId) -> None:
        gradients[value] = b.apply(Prim.ADD, gradients[value], g) if value in gradients else g

    found: list[list[NodeId]] = []
    for layer in range(net.depth - 1, -1, -1):
        act, added, (h, w, mark) = net.acts[layer], net.adds(layer), kept[layer]
        dz = gradients.pop(layer + 1)
        if added is not None and not added.before:
            give(added.value, dz)
        if act.keeps:
            wide = net.dtype if act.whole else DType.F32
            dz = b.cast(act.slope(b, b.cast(dz, wide), b.cast(mark, wide)), net.dtype)
        if added is not None and added.before:
            give(added.value, dz)
        found.append(_sums(b, net, layer, dz, h, dtype) if parameters else [])
        below = b.add(Prim.MATMUL, dz, w)
        at = 0
        for value in net.reads(layer):
            give(value, columns_of(b, below, at, net.of(value)))
            at += net.of(value)
    own = [b.cast(gradients[-i], net.input_dtype) for i in range(max(1, len(net.parts)))] if inputs else []
    return [*own, *(node for layer in reversed(found) for node in layer)]


def _sums(b: GraphBuilder, net: Network, layer: int, dz: NodeId, h: NodeId, dtype: DType) -> list[NodeId]:
    """Gradients of a layer's parameters: over all rows, in float32."""
    wide = b.cast(dz, DType.F32)
    # times one: behind arithmetic an operand is drawn as data, not as weights that are scaled by the length of the sum
    data = b.apply(Prim.MUL, b.cast(h, DType.F32), 1.0)
    found = [b.cast(b.add(Prim.MATMUL, b.transpose(wide, (1, 0)), data), dtype)]
    if net.biases[layer]:
        total = b.add(Prim.REDUCE_SUM, wide, attrs=a.ReduceAttrs((0,)))
        found.append(b.cast(b.reshape(total, (net.widths[layer + 1],)), dtype))
    return found


def _beside(b: GraphBuilder, values: list[NodeId]) -> NodeId:
    return b.add(Prim.CONCAT, *values, attrs=a.ConcatAttrs(1)) if len(values) > 1 else values[0]


def columns_of(b: GraphBuilder, x: NodeId, start: int, width: int) -> NodeId:
    """Some columns of a matrix."""
    rows, columns = b.type_of(x).shape
    if width == columns:
        return x
    return b.add(Prim.SLICE, x, attrs=a.SliceAttrs((0, start), (rows, width), (1, 1)))


@dataclass(frozen=True, slots=True)
class Step:
    """The kernels of gradients for so many rows, all launches in their order.

    Their arguments are x (input 0), the gradient of the result (input 1), the parameters (the inputs behind), the image
    of the weights (packed 0) and places in one workspace, of which callers may give the regions by themselves.
    """

    source: CudaSource
    scratch_bytes: int
    """Of the region at 0: values between kernels."""
    grads: int
    """Where the gradients of the parameters begin, as `Network.slices` has them."""
    dx: int
    """Where the gradient of x begins."""

    def located(self, argument: CudaArgument) -> tuple[int, int] | None:
        """(number of `BASES`, bytes behind it) of an argument; None for a number."""
        if isinstance(argument, Inside):
            return argument.base.index, argument.bytes
        if not isinstance(argument, Pointer):
            return None
        if argument.kind == "in":
            return argument.index, 0
        if argument.kind == "packed":
            return BASES.index("image"), 0
        at = argument.index
        if at < self.grads:
            return BASES.index("scratch"), at
        return (BASES.index("dx"), at - self.dx) if at >= self.dx else (BASES.index("grads"), at - self.grads)


def step(
    plan: Gradient, net: Network, rows: int, limit: int, *, inputs: bool, parameters: bool, dtype: DType, name: str
) -> Step:
    """For so many rows; `limit`: bytes of values between kernels, beyond which rows are taken in parts.

    `name` tells plans of one network apart.
    """
    unit = 16 * plan.tiles
    cut = parameters and not plan.inside
    chunk = max(unit, limit // plan.record * 16 // unit * unit) if cut else rows
    between = 0 if plan.inside and parameters else plan.kept_bytes(min(chunk, rows))
    partial = -(-between // _UNIT) * _UNIT
    scratch = partial + plan.partial_bytes
    grads = -(-scratch // _UNIT) * _UNIT
    dx = grads + -(-(net.elements * dtype.itemsize if parameters else 0) // _UNIT) * _UNIT
    end = dx + -(-(rows * net.columns * net.input_dtype.itemsize if inputs else 0) // _UNIT) * _UNIT
    x_row, dy_row = net.columns * net.input_dtype.itemsize, net.widths[-1] * net.dtype.itemsize
    launches: list[Launch] = []
    shares = plan.shares
    for start in range(0, rows, chunk):
        count = min(chunk, rows - start)
        groups = plan.count(count) // plan.tiles
        ctas = max(1, min(plan.chain.max_ctas, -(-groups * 32 // plan.chain.threads) if plan.inside else groups))
        shares = ctas if plan.inside else shares
        to: CudaArgument = Pointer("work", dx + start * x_row) if inputs else Number(0)
        ends = _within(0, start * x_row), _within(1, start * dy_row)
        launches.append(_launch(plan.chain, ctas, *ends, Pointer("packed"), Pointer("work"), to, Number(count)))
        if cut:
            ends_of = Pointer("work"), Pointer("work", partial), Number(plan.count(count)), Number(int(start > 0))
            launches.append(_launch(plan.wgrad, plan.wgrad.max_ctas, *ends_of))
    if parameters:
        launches.append(
            _launch(plan.finish, plan.finish.max_ctas, Pointer("work", partial), Pointer("work", grads), Number(shares))
        )
    weights = tuple(range(2, 2 + len(net.slices())))
    pack = _launch(plan.pack, plan.pack.max_ctas, *(Pointer("in", i) for i in weights), Pointer("packed"))
    source = CudaSource(
        Schedule("training", (("name", name),)),
        plan.text,
        tuple(launches),
        pack=(pack,),
        workspace_bytes=end,
        packed_bytes=(plan.image_bytes,),
        replaces_weights=weights,
        left=tuple(_left(net, grads, dx, inputs=inputs, parameters=parameters, dtype=dtype)),
    )
    return Step(source, scratch, grads, dx)


def _within(number: int, size: int) -> CudaArgument:
    return Inside(Pointer("in", number), size) if size else Pointer("in", number)


def _launch(entry: Entry, ctas: int, *arguments: CudaArgument) -> Launch:
    grid = max(1, min(entry.max_ctas, ctas)), 1, 1
    # every kernel of the text waits, before it reads anything, until those before it have ended
    return Launch(entry.name, grid, (entry.threads, 1, 1), arguments, entry.shared_bytes)


def _left(net: Network, grads: int, dx: int, *, inputs: bool, parameters: bool, dtype: DType) -> list[Left]:
    found: list[Left] = []
    if inputs:
        for start, _ in net.parts or ((0, net.columns),):
            found.append(Left(len(found), dx + start * net.input_dtype.itemsize, (net.columns, 1)))
    for one in net.slices() if parameters else ():
        strides = (*one.shape[1:], 1)
        found.append(Left(len(found), grads + one.offset * dtype.itemsize, strides))
    return found
