"""Training of networks whose layers are too wide for registers: a kernel for each product of a layer.

Forward, a layer is a product with bias and activation behind it. It leaves its result in memory and, where the
derivative of the activation reads it, its pre-activation, both rounded to 16 bits: backward recomputes nothing.
Backward, with dz the gradient of a layer's pre-activation,

    dz of the layer below = (dz W) act'(what is kept)        the derivative behind the product
    dW = dz^T h                                              over all rows, divided among CTAs in a fixed order
    db = sums of the columns of dz                           shares of the rows, added in their order

so that equal inputs give equal bits. All products are problems of the templates for products. In memory columns are
padded to eights with zeros of weights: what an activation makes of them is multiplied by zeros.

With skips, what a layer reads side by side is joined in memory before its product, each value at a multiple of eight
columns; a value that is added comes in behind the product. Backward nothing is joined: each value that a layer reads
has the gradient dz W[:, its columns], and the product that comes last takes in what other readers gave, in 16 bits, and
the derivative.

Source: note on fused MLPs, section 4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from weft.generate.cuda.gemm.common.product import product
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.end import sum_rows
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.mlp.text import mlp_header
from weft.generate.cuda.role.role import DeviceRole, Parameter
from weft.generate.cuda.training.entry import Entry, kernels, read, written
from weft.generate.cuda.training.gradient import training_header
from weft.generate.cuda.training.network import ALIGNMENT, Network
from weft.generate.expr.integer import Int
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaArgument, CudaSource, Left, Pointer, Schedule
from weft.kernels.stored_names import entry_name

WIDEST, WIDEST_INPUT = 512, 4096
"""Columns of layers, and of the input."""
SLICES = 4
"""Shares of the rows for sums of columns, times multiprocessors."""
_LINE = 128
_THREADS = 256

Role = Literal["forward", "below", "share", "input", "weights"]


class Ref(NamedTuple):
    """A tensor of rows.

    input: x as it is; joined: the values `of` side by side, each padded; value: a result; act: a layer's result before
    a value was added to it; preactivation: z of a layer; dz: the gradient of that; gradient: that of a value;
    share: what some readers of a value give to it.
    """

    kind: Literal["input", "joined", "value", "act", "preactivation", "dz", "gradient", "share"]
    of: tuple[int, ...] = ()


def padded(columns: int) -> int:
    """Columns as they lie in memory."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Product:
    """One kernel, with inputs and outputs of its problem in this order.

    forward: input of the layer, weights, bias if there is one, what is added if anything -> `results`; below: dz,
    transposed weights, `addends`, what is kept of the layer of `value` if anything -> dz of that layer, and the
    gradient of `value` where that is added to another;
    share: dz, transposed weights, `addends` -> what they sum up to of the gradient of `value`;
    input: the same -> the gradient of what is given;
    weights: dz, input of the layer -> gradient of the weights.
    """

    role: Role
    layer: int
    problem: Problem
    value: int = 0
    """Whose gradient it is."""
    row: int = 0
    """Of the transposed weights, where the columns of that value begin."""
    addends: tuple[Ref, ...] = ()
    spent: tuple[Ref, ...] = ()
    """What nothing reads afterwards."""


def refused(net: Network, rows: int = 1) -> Declined | None:
    """Why a network is not trained like this."""
    declined = None if net.plain else _skips_refused(net)
    if declined is not None:
        return declined
    for act in net.acts:
        declined = act.no_gradient()
        if declined is not None:
            return declined
    if max(net.widths[1:]) > WIDEST:
        return Declined(f"a layer of {max(net.widths[1:])} columns; gradients are for {WIDEST} at most")
    if net.columns > WIDEST_INPUT:
        return Declined(f"an input of {net.columns} columns; gradients are for {WIDEST_INPUT} at most")
    widest = max(*net.widths, net.columns, *(_reads(net, layer) for layer in range(net.depth)))
    if rows * padded(widest) >= 1 << 31:
        return Declined(f"{rows} rows of {widest} columns, which are too many to be trained at once")
    return None


def _skips_refused(net: Network) -> Declined | None:
    """What has no place in the order of products."""
    readers = {v: layer for layer in range(net.depth - 1, -1, -1) for v in net.reads(layer)}
    for layer in range(net.depth):
        added = net.adds(layer)
        if added is None:
            continue
        columns = net.widths[layer + 1]
        if (added.value <= 0 or layer == net.depth - 1) and columns % ALIGNMENT:
            return Declined(f"a sum of {columns} columns, which are no multiple of {ALIGNMENT}, in a network by layers")
        if readers.get(added.value, net.depth) > layer:
            return Declined("a value that is added before a layer reads it, in a network by layers")
    if any(v not in readers for v in range(1 - max(1, len(net.parts)), net.depth)):
        return Declined("a value that no layer reads")
    return None


def operand(net: Network, reads: tuple[int, ...]) -> Ref:
    """What values are in memory as the left side of a product."""
    if len(reads) == 1 and reads[0] > 0:
        return Ref("value", reads)
    whole = reads == (0,) and not net.parts
    return (
        Ref("input") if whole and net.input_dtype is net.dtype and net.of(0) % ALIGNMENT == 0 else Ref("joined", reads)
    )


def joins(net: Network) -> list[tuple[int, ...]]:
    """Values that are copied side by side, rounded and padded, before a product reads them."""
    found = []
    for layer in range(net.depth):
        found.append(net.reads(layer))
        added = net.adds(layer)
        found += [(added.value,)] if added is not None else []
    return [r for r in dict.fromkeys(found) if operand(net, r).kind == "joined"]


def results(net: Network, layer: int) -> list[Ref]:
    """What the product of a layer leaves: what its derivative reads, and the value."""
    act, added = net.acts[layer], net.adds(layer)
    found = [Ref("preactivation", (layer,))] if act.keeps == 2 else []
    if act.keeps == 1 and added is not None and not added.before:
        found.append(Ref("act", (layer,)))
    return [*found, Ref("value", (layer + 1,))]


def mark(net: Network, layer: int) -> Ref | None:
    """What the derivative of a layer's activation reads."""
    return results(net, layer)[0] if net.acts[layer].keeps else None


def kept(net: Network) -> list[Ref]:
    """What the backward pass reads of the forward pass, besides x as it is."""
    found = [r for i in range(net.depth) for r in (operand(net, net.reads(i)), mark(net, i)) if r is not None]
    return [r for r in dict.fromkeys(found) if r.kind != "input"]


def segments(net: Network, layer: int) -> list[tuple[int, int, int]]:
    """(value, its first column in what the layer reads as it lies in memory, in the layer's weights)."""
    found = []
    at = column = 0
    for v in net.reads(layer):
        found.append((v, at, column))
        at, column = at + padded(net.of(v)), column + net.of(v)
    return found


def _reads(net: Network, layer: int) -> int:
    """Columns that a layer reads as they lie in memory."""
    return sum(padded(net.of(v)) for v in net.reads(layer))


def forward(net: Network, rows: int) -> list[Product]:
    """The products of the forward pass, by layer."""
    last: dict[Ref, int] = {}
    for layer in range(net.depth):
        added = net.adds(layer)
        for reads in (net.reads(layer), *([] if added is None else [(added.value,)])):
            last |= dict.fromkeys((operand(net, reads), *(Ref("value", (v,)) for v in reads if v > 0)), layer)
        last |= dict.fromkeys(results(net, layer), layer)
    held = {*kept(net), Ref("input"), Ref("value", (net.depth,))}
    found = []
    for layer in range(net.depth):
        spent = tuple(r for r, at in last.items() if at == layer and r not in held)
        found.append(Product("forward", layer, _forward(net, rows, layer), spent=spent))
    return found


def backward(net: Network, rows: int, *, inputs: bool, parameters: bool, dtype: DType) -> list[Product]:
    """The products of the backward pass in the order in which they are run; `dtype`: of the parameters' gradients."""
    found: list[Product] = []
    shares: dict[int, tuple[Ref, ...]] = {}
    first = {v: layer for layer in range(net.depth - 1, -1, -1) for v in net.reads(layer)}
    for layer in range(net.depth - 1, -1, -1):
        added = net.adds(layer)
        if added is not None:
            shares[added.value] = (*shares.get(added.value, ()), _passed(net, layer))
        if parameters:
            found.append(Product("weights", layer, _weights(net, rows, layer, dtype)))
        for value, row, _ in segments(net, layer):
            if value <= 0 and not inputs:
                continue
            last = first[value] == layer
            addends = shares.pop(value, ())
            role: Role = "share" if not last else "below" if value > 0 else "input"
            problem = _below(net, rows, layer, value, len(addends), role)
            found.append(Product(role, layer, problem, value, row, addends))
            shares |= {} if last else {value: (Ref("share", (value,)),)}
    read = {r: i for i, p in enumerate(found) for r in (Ref("dz", (p.layer,)), *p.addends)}
    return [replace(p, spent=tuple(r for r, at in read.items() if at == i)) for i, p in enumerate(found)]


def _passed(net: Network, layer: int) -> Ref:
    """What a value that is added to a layer has for its gradient from there."""
    added = net.adds(layer)
    assert added is not None
    if added.before:
        return Ref("dz", (layer,))
    return Ref("gradient", (layer + 1,)) if net.acts[layer].keeps or layer == net.depth - 1 else Ref("dz", (layer,))


def traffic(net: Network, rows: int) -> int:
    """Bytes of rows that the products of a step move for the gradients of the parameters, each tensor once."""
    columns = 0
    for layer in range(net.depth):
        k, n, act = _reads(net, layer), padded(net.widths[layer + 1]), net.acts[layer]
        # forward, gradient of the weights, gradient below with what the derivative reads
        columns += (k + n * max(1, act.keeps)) + (k + n) + ((k + n) + n * min(1, act.keeps) if layer else 0)
    return net.dtype.itemsize * rows * columns


def _columns(net: Network, value: int) -> int:
    """Of a value in memory: the result has no padding."""
    return net.widths[value] if value == net.depth else padded(net.widths[value])


def _problem(b: GraphBuilder, outputs: list[NodeId]) -> Problem:
    graph = b.build(outputs)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(outputs))


def _forward(net: Network, rows: int, layer: int) -> Problem:
    k, n = _reads(net, layer), _columns(net, layer + 1)
    b = GraphBuilder()
    h = b.input(TensorType(net.dtype, (rows, k)))
    w = b.input(TensorType(net.dtype, (n, k)))
    z = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
    if net.biases[layer]:
        z = b.apply(Prim.ADD, z, b.input(TensorType(net.dtype, (n,))))
    z = _bounded(b, z, net.widths[layer + 1])
    added = net.adds(layer)
    more = None if added is None else b.input(TensorType(net.dtype, (rows, n)))
    if added is not None and more is not None and added.before:
        z = b.apply(Prim.ADD, z, more)
    y = a = net.acts[layer].apply(b, z)
    if added is not None and more is not None and not added.before:
        y = b.apply(Prim.ADD, a, more)
    left = {"preactivation": z, "act": a, "value": y}
    return _problem(b, [left[r.kind] for r in results(net, layer)])


def _bounded(b: GraphBuilder, x: NodeId, width: int) -> NodeId:
    """Zeros behind the columns of a value: what is multiplied with weights that are zeros must be finite."""
    shape = b.type_of(x).shape
    if shape[1] == width:
        return x
    real = b.constant(np.arange(shape[1]) < width)
    zero = b.broadcast(b.scalar(0.0, b.type_of(x).dtype), shape)
    return b.add(Prim.SELECT, b.broadcast(real, shape), x, zero)


def _below(
    net: Network, rows: int, layer: int, value: int, addends: int, role: Role, *, column_sums: bool = False
) -> Problem:
    n, k = padded(net.widths[layer + 1]), padded(net.of(value)) if value > 0 else net.of(value)
    b = GraphBuilder()
    dz = b.input(TensorType(net.dtype, (rows, n)))
    transposed = b.input(TensorType(net.dtype, (k, n)))
    g = b.add(Prim.MATMUL, dz, b.transpose(transposed, (1, 0)))
    for _ in range(addends):
        g = b.apply(Prim.ADD, g, b.input(TensorType(net.dtype, (rows, k))))
    g = _bounded(b, g, net.of(value))
    if role == "input" and not net.parts:
        return _problem(b, [b.cast(g, net.input_dtype)])
    if role != "below":
        return _problem(b, [g])
    act, added, whole = net.acts[value - 1], net.adds(value - 1), g
    if act.keeps:
        held = b.input(TensorType(net.dtype, (rows, k)))
        wide = net.dtype if act.whole else DType.F32  # fewer steps leave more registers for what is read ahead
        g = b.cast(act.slope(b, b.cast(g, wide), b.cast(held, wide)), net.dtype)
    outputs = [g, whole] if act.keeps and added is not None and not added.before else [g]
    if column_sums:
        outputs.append(b.add(Prim.REDUCE_SUM, b.cast(g, DType.F32), attrs=a.ReduceAttrs((0,))))
    return _problem(b, outputs)


def _weights(net: Network, rows: int, layer: int, dtype: DType) -> Problem:
    n, k = padded(net.widths[layer + 1]), _reads(net, layer)
    b = GraphBuilder()
    dz = b.input(TensorType(net.dtype, (rows, n)))
    h = b.input(TensorType(net.dtype, (rows, k)))
    return _problem(b, [b.cast(b.add(Prim.MATMUL, b.transpose(dz, (1, 0)), h), dtype)])


def with_column_sums(p: Product, schedule: Schedule) -> tuple[CudaSource, int] | Declined:
    """The kernel of a product that also sums its result over rows, and how many rows of sums it leaves.

    These, of float32 and as wide as the result, are one more output.
    """
    if schedule.param("template") != "tma":
        return Declined("the tma template sums columns")
    matched = product(p.problem)
    if isinstance(matched, Declined):
        return matched
    entry = entry_name(p.problem.key, schedule, "sums")
    matched = replace(matched, column_sums=True)
    source = tma.emit(matched, schedule, entry)
    return source if isinstance(source, Declined) else (source, sum_rows(matched, TmaConfig.of(schedule)))


def summed(net: Network, p: Product, source: CudaSource, rows: int) -> tuple[Problem, CudaSource]:
    """A kernel of `with_column_sums` as a problem: its last output are the sums of all rows, whose shares it leaves."""
    types = [p.problem.graph.type_of(i) for i in p.problem.graph.inputs]
    problem = _below(net, types[0].shape[0], p.layer, p.value, len(p.addends), p.role, column_sums=True)
    last, at = len(problem.graph.outputs) - 1, -(-source.workspace_bytes // _LINE) * _LINE
    columns = problem.graph.type_of(problem.graph.outputs[last]).shape[1]

    def placed(x: CudaArgument) -> CudaArgument:
        return Pointer("work", at) if x == Pointer("out", last) else x

    launches = tuple(replace(x, arguments=tuple(map(placed, x.arguments))) for x in source.launches)
    size = at + -(-4 * rows * columns // _LINE) * _LINE
    left = Left(last, at, (columns, 1), terms=rows, step=columns)
    return problem, replace(source, launches=launches, workspace_bytes=size, left=(left,))


@dataclass(frozen=True, slots=True)
class Image:
    """Offsets in bytes of each layer's weights, as (out, in) and transposed, and of its bias.

    Columns are padded, those of each value that a layer reads by themselves.
    """

    weights: tuple[int, ...]
    transposed: tuple[int, ...]
    biases: tuple[int, ...]
    bytes: int

    @staticmethod
    def of(net: Network) -> Image:
        """Of a network."""
        places: list[list[int]] = [[], [], []]
        at = 0
        for layer in range(net.depth):
            k, n = _reads(net, layer), padded(net.widths[layer + 1])
            for place, size in zip(places, (k * n, k * n, n), strict=True):
                place.append(at)
                at += -(-2 * size // _LINE) * _LINE
        return Image(tuple(places[0]), tuple(places[1]), tuple(places[2]), at)


@dataclass(frozen=True, slots=True)
class Layered:
    """What stands beside the products, for any number of rows. Entries take addresses, and numbers as if they were.

    pack(each parameter, image), joins[values](x if one of them is given, the others, they side by side, rows),
    ending(dy, what the last activation keeps, dz, rows), columns(dz, partial, rows, padded columns, 0): a CTA for
    each share of the rows, which with a 1 at the end are sums of rows already, in float32; total(partial of all layers,
    gradients of the parameters, shares).
    """

    text: str
    pack: Entry
    joins: dict[tuple[int, ...], Entry]
    ending: Entry
    columns: Entry
    total: Entry
    image: Image
    partial: tuple[int, ...]
    """Where a layer's sums of columns begin, in floats, times the number of shares."""
    partial_floats: int
    """Of a share."""


@cache
def _header() -> str:
    return Path(__file__).with_name("weft_cuda_layered.h").read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def layered(net: Network, sms: int, dtype: DType = DType.F32) -> Layered:
    """The kernels of a network for a device of so many multiprocessors."""
    seed = hashlib.sha256(f"{net.identity}|{dtype}|{sms}".encode()).hexdigest()[:16]
    stem, image, act = f"k{seed}", Image.of(net), net.acts[-1]
    partial, floats = [], 0
    for width in net.widths[1:]:
        partial.append(floats)
        floats += padded(width)
    pack = _pack(net, image)
    side = {reads: _join(net, reads, f"join{i}", 8 * sms) for i, reads in enumerate(joins(net))}
    others = _ending(net, 8 * sms), _column_sums(net, SLICES * sms), _total(net, partial, dtype)
    headers = prelude(), mlp_header(), training_header(net.dtype), _header(), act.text("Last", net.dtype)
    ending, columns, total = (Entry.of(role, stem) for role in others)
    return Layered(
        "".join((*headers, kernels((pack, *side.values(), *others), stem))),
        Entry.of(pack, stem),
        {reads: Entry.of(role, stem) for reads, role in side.items()},
        ending,
        columns,
        total,
        image,
        tuple(partial),
        floats,
    )


def _role(name: str, parameters: tuple[Parameter, ...], lines: list[str], ctas: int) -> DeviceRole:
    body = "\n".join(("role.pdl_wait(); role.pdl_trigger();", *lines))
    return DeviceRole(threads=_THREADS, body=body, parameters=parameters, grid=(ctas, 1, 1), name=name)


def addressed(reads: tuple[int, ...]) -> list[int]:
    """The values whose addresses a kernel that joins takes: 0 for x, whichever of its parts are read."""
    return [*([0] if any(v <= 0 for v in reads) else []), *dict.fromkeys(v for v in reads if v > 0)]


def _ending(net: Network, ctas: int) -> DeviceRole:
    """A thread makes eight columns of a row at a time."""
    last = net.widths[-1]
    lines = [
        f"w_ending<Last, {last}, {padded(last)}>((const u16*)dy_, (const u16*)kept_, (u16*)dz_,",
        "(u32)(u64)rows_, role.block_x() * 256u + role.thread(), role.blocks_x() * 256u);",
    ]
    return _role("ending", (*read("dy_", "kept_"), *written("dz_"), *read("rows_")), lines, ctas)


def _join(net: Network, reads: tuple[int, ...], name: str, ctas: int) -> DeviceRole:
    """A thread copies eight columns of a row at a time."""
    held = addressed(reads)
    columns = sum(padded(net.of(v)) for v in reads)
    lines = [
        f"const u32 count = (u32)(u64)rows_ * {columns // ALIGNMENT}u;",
        "for (u32 i = role.block_x() * 256u + role.thread(); i < count; i += role.blocks_x() * 256u) {",
        f"const w_rows r = i / {columns // ALIGNMENT}u; const int c = (int)(i % {columns // ALIGNMENT}u) * 8;",
        "uint4 v = make_uint4(0u, 0u, 0u, 0u);",
    ]
    at = 0
    for v in reads:
        start, width = (0, net.of(v)) if v > 0 else net.parts[-v] if net.parts else (0, net.columns)
        row, kind = (padded(width), "u16") if v > 0 else (net.columns, storage(net.input_dtype))
        whole = row % ALIGNMENT == 0 == start % ALIGNMENT and start + padded(width) <= row
        aligned = 8 if whole else 2 if (row | start | width) % 2 == 0 else 1
        lines += [
            f"if (c >= {at} && c < {at + padded(width)})",
            f"v = w_eight<{width}, {aligned}>((const {kind}*)v{max(v, 0)} + r * {row} + {start}, c - {at});",
        ]
        at += padded(width)
    lines.append(f"*(uint4*)((u16*)h_ + r * {columns} + c) = v; }}")
    return _role(name, (*read(*(f"v{v}" for v in held)), *written("h_"), *read("rows_")), lines, ctas)


def _pack(net: Network, image: Image) -> DeviceRole:
    """What makes the image: a CTA for each tile of weights, and one for each bias."""
    kind = storage(net.masters or net.dtype)
    lines = [
        "__shared__ u16 held[32][33];",
        "char* const image = (char*)image_; int b = role.block_x(); const int t = role.thread();",
    ]
    ctas = number = 0
    for layer in range(net.depth):
        n, across = net.widths[layer + 1], _reads(net, layer)
        np, columns = padded(n), sum(net.of(v) for v in net.reads(layer))
        for value, at, column in segments(net, layer):
            k, kp = net.of(value), padded(net.of(value))
            tiles = -(-np // 32) * -(-kp // 32)
            plain, transposed = image.weights[layer] + 2 * at, image.transposed[layer] + 2 * at * np
            shape = f"{n}, {k}, {np}, {kp}, {columns}, {across}"
            lines += [
                f"if (b < {tiles}) {{ w_images<{shape}>(role, {Int(f'(const {kind}*)p{number}') + column},",
                f"(u16*)({Int('image') + plain}), (u16*)({Int('image') + transposed}), b, held, t); return; }}",
                f"b -= {tiles};",
            ]
            ctas += tiles
        number += 1
        if net.biases[layer]:
            lines += [
                "if (b == 0) {",
                f"for (int i = t; i < {np}; i += {_THREADS}) {{ u16 v = 0;",
                f"if (i < {n}) v = w_short(((const {kind}*)p{number})[i]);",
                f"((u16*)(image + {image.biases[layer]}))[i] = v; }} return; }}\n--b;",
            ]
            ctas, number = ctas + 1, number + 1
    return _role("pack", (*read(*(f"p{i}" for i in range(number))), *written("image_")), lines, ctas)


def _column_sums(net: Network, ctas: int) -> DeviceRole:
    lines = [
        f"__shared__ float held[{_THREADS * 8}];",
        "const w_rows rows = (w_rows)(u64)rows_; const int columns = (int)(u64)columns_;",
        "const w_rows first = rows * role.block_x() / role.blocks_x();",
        "const w_rows last = rows * (role.block_x() + 1) / role.blocks_x();",
        "float* const out = (float*)partial_ + (w_rows)role.block_x() * columns;",
    ]
    for columns in sorted({padded(w) for w in net.widths[1:]}):
        rest = "out, first, last, held, role.thread());"
        lines += [
            f"if (columns == {columns}) {{ if (sums_) w_column_sums<{columns}>(role, (const float*)dz_, {rest}",
            f"else w_column_sums<{columns}>(role, (const u16*)dz_, {rest} }}",
        ]
    parameters = *read("dz_"), *written("partial_"), *read("rows_", "columns_", "sums_")
    return _role("columns", parameters, lines, ctas)


def _total(net: Network, partial: list[int], dtype: DType) -> DeviceRole:
    """A warp of a CTA adds an eighth of the shares of 32 columns; the first one adds the eighths."""
    kind = storage(dtype)
    value = "s" if dtype is DType.F32 else f"(u16)w_narrow2_{dtype.value}(s, 0.0f)"
    lines = [
        "__shared__ float eighths[8][32];",
        "const int shares = (int)(u64)shares_, lane = role.thread() % 32, part = role.thread() / 32;",
        "int b = role.block_x(), to = -1, step = 0; const float* from = 0;",
    ]
    for layer, width in enumerate(net.widths[1:]):
        _, bias = net.slices_of(layer)
        place = bias.offset + Int("b") * 32 + "lane" if bias else "-1"
        lines += [
            f"if (b >= 0 && b < {-(-width // 32)}) {{ step = {padded(width)};",
            f"from = {Int('(const float*)partial_') + Int('(w_rows)shares') * partial[layer]} + b * 32 + lane;",
            f"if (b * 32 + lane < {width}) to = {place}; }}",
            f"b -= {-(-width // 32)};",
        ]
    lines += [
        "float s = 0.0f;",
        "const int end = shares * (part + 1) / 8;",
        "if (to >= 0)",
        "#pragma unroll 8",
        "for (int p = shares * part / 8; p < end; ++p) s += from[(w_rows)p * step];",
        "eighths[part][lane] = s;",
        "role.sync();",
        "if (part == 0 && to >= 0) {",
        "#pragma unroll",
        "for (int p = 1; p < 8; ++p) s += eighths[p][lane];",
        f"(({kind}*)out_)[to] = {value};",
        "}",
    ]
    ctas = sum(-(-w // 32) for w in net.widths[1:])
    return _role("total", (*read("partial_"), *written("out_"), *read("shares_")), lines, ctas)
