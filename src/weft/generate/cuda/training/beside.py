"""The kernels beside the products of a network that is trained a layer at a time, each a problem of its own.

All launches are made here, so that what a worker verifies is what a module launches.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.generate.cuda.training.entry import Entry
from weft.generate.cuda.training.layered import Layered, addressed, mark, padded, segments
from weft.generate.cuda.training.network import Network
from weft.generate.cuda.training.step import columns_of, posed
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaArgument, CudaSource, Launch, Left, Number, Pointer, Schedule

_CHUNK = 2048
"""Elements that a CTA of a kernel over rows takes."""
_ROWS_OF_A_SHARE = 32
_UNIT = 256
Posed = tuple[Problem, CudaSource]


def ctas_of(entry: Entry, rows: int, columns: int) -> int:
    """Of a kernel over rows of so many columns."""
    return grid_of(entry, -(-rows * columns // _CHUNK))


def grid_of(entry: Entry, ctas: int) -> int:
    """Blocks that are launched where there is work for so many."""
    return max(1, min(entry.max_ctas, ctas))


def shares_of(plan: Layered, rows: int) -> int:
    """Into which the rows are cut for sums of columns."""
    return max(1, min(plan.columns.max_ctas, rows // _ROWS_OF_A_SHARE))


def pack_posed(net: Network, plan: Layered) -> Posed:
    """From all parameters to the image of the weights: each layer's, the same transposed, its bias."""
    b = GraphBuilder()
    outputs: list[NodeId] = []
    left: list[Left] = []
    kind = net.masters or net.dtype
    parameters = 0
    for layer in range(net.depth):
        weight, vector = net.slices_of(layer)
        w = b.cast(b.input(TensorType(kind, weight.shape)), net.dtype)
        rows = padded(net.widths[layer + 1])
        parts = [(column, net.of(value)) for value, _, column in segments(net, layer)]
        read = [_padded(b, columns_of(b, w, at, width), rows, padded(width)) for at, width in parts]
        whole = b.add(Prim.CONCAT, *read, attrs=a.ConcatAttrs(1)) if len(read) > 1 else read[0]
        across = b.type_of(whole).shape[1]
        left.append(Left(len(left), plan.image.weights[layer], (across, 1)))
        left.append(Left(len(left), plan.image.transposed[layer], (rows, 1)))
        outputs += [whole, b.transpose(whole, (1, 0))]
        parameters += 1
        if vector is not None:
            bias = b.cast(b.input(TensorType(kind, vector.shape)), net.dtype)
            left.append(Left(len(left), plan.image.biases[layer], (1,)))
            outputs.append(_padded(b, bias, rows))
            parameters += 1
    arguments: tuple[CudaArgument, ...] = (*(Pointer("in", i) for i in range(parameters)), Pointer("work"))
    launch = _launch(plan.pack, plan.pack.max_ctas, *arguments)
    return posed(b, outputs, "image of weights"), _source(plan, "pack", (launch,), plan.image.bytes, tuple(left))


def join_posed(net: Network, plan: Layered, reads: tuple[int, ...], rows: int) -> Posed:
    """Values side by side, rounded, each padded."""
    b = GraphBuilder()
    held: dict[int, NodeId] = {}
    for v in addressed(reads):
        t = (
            TensorType(net.dtype, (rows, padded(net.of(v))))
            if v > 0
            else TensorType(net.input_dtype, (rows, net.columns))
        )
        held[v] = b.input(t)
    pieces = []
    for v in reads:
        start, width = (0, net.of(v)) if v > 0 else net.parts[-v] if net.parts else (0, net.columns)
        part = b.cast(columns_of(b, held[max(v, 0)], start, width), net.dtype)
        pieces.append(_padded(b, part, rows, padded(width)))
    joined = b.add(Prim.CONCAT, *pieces, attrs=a.ConcatAttrs(1)) if len(pieces) > 1 else pieces[0]
    entry = plan.joins[reads]
    ins = (Pointer("in", i) for i in range(len(held)))
    arguments: tuple[CudaArgument, ...] = (*ins, Pointer("out"), Number(rows))
    launch = _launch(entry, ctas_of(entry, rows, b.type_of(joined).shape[1]), *arguments)
    return posed(b, [joined], "values side by side"), _source(plan, "join", (launch,))


def ending_posed(net: Network, plan: Layered, rows: int) -> Posed:
    """From the gradient of the result to that of the last layer's pre-activation, padded."""
    b = GraphBuilder()
    act, columns = net.acts[-1], net.widths[-1]
    dz = b.input(TensorType(net.dtype, (rows, columns)))
    kept = mark(net, net.depth - 1)
    if kept is not None:
        wide = net.dtype if act.whole else DType.F32
        held = b.input(TensorType(net.dtype, (rows, columns)))
        dz = b.cast(act.slope(b, b.cast(dz, wide), b.cast(held, wide)), net.dtype)
    dz = _padded(b, dz, rows, padded(columns))
    read: CudaArgument = Number(0) if kept is None else Pointer("in", 1)
    ctas = ctas_of(plan.ending, rows, padded(columns))
    launch = _launch(plan.ending, ctas, Pointer("in"), read, Pointer("out"), Number(rows))
    return posed(b, [dz], "end of a backward pass"), _source(plan, "ending", (launch,))


def biases_posed(net: Network, plan: Layered, rows: int, summed: Mapping[int, int], dtype: DType) -> Posed:
    """Gradients of all biases, in `dtype`, from those of each layer's pre-activation, last layer first.

    `summed`: layer -> rows of what sums its rows already, in float32.
    """
    b = GraphBuilder()
    shares = shares_of(plan, rows)
    partial = -(-4 * shares * plan.partial_floats // _UNIT) * _UNIT
    launches: list[Launch] = []
    outputs: list[NodeId] = []
    left: list[Left] = []
    for layer in range(net.depth - 1, -1, -1):
        _, vector = net.slices_of(layer)
        if vector is None:
            continue
        columns, number = padded(net.widths[layer + 1]), len(outputs)
        count = summed.get(layer, rows)
        dz = b.input(TensorType(DType.F32 if layer in summed else net.dtype, (count, columns)))
        total = b.add(Prim.REDUCE_SUM, b.cast(dz, DType.F32), attrs=a.ReduceAttrs((0,)))
        width = net.widths[layer + 1]
        outputs.append(b.cast(b.reshape(columns_of(b, total, 0, width), (width,)), dtype))
        left.append(Left(number, partial + vector.offset * dtype.itemsize, (1,)))
        place = Pointer("work", 4 * shares * plan.partial[layer])
        ends = Pointer("in", number), place, Number(count), Number(columns), Number(int(layer in summed))
        launches.append(_launch(plan.columns, shares, *ends))
    ends_of = Pointer("work"), Pointer("work", partial), Number(shares)
    launches.append(_launch(plan.total, plan.total.max_ctas, *ends_of))
    size = partial + net.elements * dtype.itemsize
    return posed(b, outputs, "gradients of biases"), _source(plan, "biases", tuple(launches), size, tuple(left))


def _launch(entry: Entry, ctas: int, *arguments: CudaArgument) -> Launch:
    # every kernel waits, before it reads anything, until those before it have ended
    return Launch(entry.name, (grid_of(entry, ctas), 1, 1), (entry.threads, 1, 1), arguments)


def _source(
    plan: Layered, name: str, launches: tuple[Launch, ...], workspace: int = 0, left: tuple[Left, ...] = ()
) -> CudaSource:
    size = -(-workspace // _UNIT) * _UNIT
    return CudaSource(Schedule("training", (("name", name),)), plan.text, launches, workspace_bytes=size, left=left)


def _padded(b: GraphBuilder, x: NodeId, *shape: int) -> NodeId:
    """With zeros behind, up to a shape."""
    own = b.type_of(x).shape
    if own == shape:
        return x
    more = tuple(n - k for n, k in zip(shape, own, strict=True))
    return b.add(Prim.PAD, x, attrs=a.PadAttrs((0,) * len(own), more, "constant", 0.0))
