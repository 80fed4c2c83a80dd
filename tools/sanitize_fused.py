"""What `tools.sanitize` launches of kernels that hold more than a product: groups, norms, layers, attention, pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from benchmarks.cases.norm import leaving, normed

from tools.sanitize_products import Case, blocks, gemm, posed, tma
from weft.fission.gelu import gelu
from weft.fission.quantize import quantize_linear
from weft.fission.sdpa import sdpa
from weft.generate.cuda.attention import shapes as attention_shapes
from weft.generate.cuda.attention import tma_shapes as attention_tma_shapes
from weft.generate.cuda.conv.groups.kernel import GroupConfig
from weft.generate.cuda.conv.squeeze_excite.kernel import SqueezeConfig
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.gemm.swap_ab import kernel as few
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp import shapes as mlp_shapes
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Schedule

ROW, LAST = Format.ROW, Format.LAST
F16, BF16, F32, I8, U8, I32 = DType.F16, DType.BF16, DType.F32, DType.I8, DType.U8, DType.I32


def rows(b: GraphBuilder, *outputs: NodeId) -> Problem:
    """Results as they are, everything row-major."""
    graph = b.build(list(outputs))
    return Problem(graph, str(graph), (ROW,) * len(graph.inputs), (ROW,) * len(outputs))


def linear(b: GraphBuilder, x: NodeId, columns: int, *, bias: bool = True) -> NodeId:
    """x @ w + bias."""
    t = b.type_of(x)
    y = b.add(Prim.MATMUL, x, b.input(TensorType(t.dtype, (t.shape[-1], columns)), is_weight=True))
    return b.apply(Prim.ADD, y, b.input(TensorType(t.dtype, (columns,)), is_weight=True)) if bias else y


def relu(b: GraphBuilder, x: NodeId) -> NodeId:
    """The larger of x and 0."""
    return b.apply(Prim.MAX, x, 0.0)


# ---- several products in one launch


def group(*sizes: tuple[int, int, int], dtype: DType = F16) -> Problem:
    """Products m x n x k of their own operands; every second one ends in relu."""
    b = GraphBuilder()
    found = []
    for i, (m, n, k) in enumerate(sizes):
        y = linear(b, b.input(TensorType(dtype, (m, k))), n)
        found.append(relu(b, y) if i % 2 else y)
    return rows(b, *found)


def heads(length: int, count: int, size: int, depth: int, *, turned: bool) -> Problem:
    """Queries, keys (perhaps turned) and values by heads: slices of the columns of one product."""
    b = GraphBuilder()
    wide = count * size
    y = linear(b, b.input(TensorType(F16, (length, depth))), 3 * wide)
    parts = [b.slice(y, (0, i * wide), (length, wide), (1, 1)) for i in range(3)]
    found = [b.transpose(b.reshape(x, (1, length, count, size)), (0, 2, 1, 3)) for x in parts]
    return rows(b, found[0], b.transpose(found[1], (0, 1, 3, 2)) if turned else found[1], found[2])


def members(bm: int, bn: int, *splits: int, cluster: int = 1) -> Schedule:
    """A shape of products in one launch, by fragments."""
    return grouped.GroupedConfig(bm, bn, 32, 16, 16, 1, 3, splits, cluster).schedule()


def copied(
    *shapes: tuple[int, int], consumers: int = 1, splits: tuple[int, ...] = (), persistent_ctas: int = 0
) -> Schedule:
    """Tiles of products in one launch, by TMA."""
    each = splits or (1,) * len(shapes)
    found = [
        TmaConfig(bm, bn, 64, 3, consumers, False, split, (1, 1, bm), persistent_ctas, 1)
        for (bm, bn), split in zip(shapes, each, strict=True)
    ]
    return grouped_tma.GroupedTmaConfig(tuple(found)).schedule()


def groups() -> Mapping[str, Case]:
    """Products in one launch."""
    sizes = (70, 40, 264), (33, 72, 136), (129, 24, 520)
    return {
        "grouped, fragments": (group(*sizes), members(32, 32, 2, 1, 4)),
        "grouped, clusters": (group(*sizes), members(32, 32, 4, 1, 4, cluster=4)),
        "grouped, CUDA cores": (
            group((33, 40, 72), (17, 20, 36), dtype=F32),
            grouped.GroupedConfig(32, 32, 16, 16, 16, 1, 3, (2, 1), 2).schedule(tensor=False),
        ),
        "grouped, by TMA": (group(*sizes), copied((64, 32), (64, 64), (64, 32), persistent_ctas=2)),
        "grouped, by TMA, clusters": (
            group(*sizes), copied((64, 32), (64, 64), (64, 32), splits=(2, 1, 2)),
        ),
        "grouped, q, k and v": (heads(48, 3, 16, 72, turned=True), members(32, 32, 1, 1, 1)),
        "grouped, q, k and v by TMA": (
            heads(50, 3, 16, 72, turned=False), copied(*(((64, 64),) * 3)),
        ),
    }  # fmt: skip


# ---- one product


def scaled(m: int, n: int, k: int, left: DType, out: DType) -> Problem:
    """Bytes times bytes, times scales of rows and columns; of type `out`."""
    b = GraphBuilder()
    x, w = b.input(TensorType(left, (m, k))), b.input(TensorType(I8, (n, k)), is_weight=True)
    y = b.add(Prim.MATMUL, b.cast(x, I32), b.transpose(b.cast(w, I32), (1, 0)))
    if out is I32:
        return rows(b, y)
    y = b.cast(y, F32)
    for shape in ((m, 1), (1, n)):
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, shape)))
    if out is not I8:
        return rows(b, b.cast(y, out))
    narrow = quantize_linear(b, y, b.scalar(64.0, F32), b.scalar(3, I8))
    assert not isinstance(narrow, Declined), narrow
    return rows(b, narrow)


def one_product() -> Mapping[str, Case]:
    """Few rows, norms on the load, bytes by warpgroups, results by TMA, results turned."""
    wide = {"consumers": 2, "store": 64, "persistent_ctas": 2}
    return {
        "swapped, split": (gemm(9, 72, 520, "bf16"), few.SwapAbConfig(16, 64, 2, 4).schedule()),
        "swapped, nn, two warpgroups": (gemm(20, 200, 200, layout="nn"), few.SwapAbConfig(24, 128, 3, 1).schedule()),
        "swapped, constant": (layer(13, 136, 264), few.SwapAbConfig(16, 64, 4, 2).schedule()),
        "swapped, two by two": (gemm(100, 200, 264), few.SwapAbConfig(40, 64, 3, 1, 3).schedule()),
        "swapped, four by two, constant": (layer(100, 256, 264), few.SwapAbConfig(24, 64, 3, 1, 6).schedule()),
        "together, a tile by two": (gemm(100, 90, 264), tma(64, 64, stream_k=True, coop_fixup=True, persistent_ctas=8)),
        "together, a tile by three": (
            gemm(60, 96, 456), tma(64, 96, stream_k=True, coop_fixup=True, persistent_ctas=3)
        ),
        "together, pairs below": (
            gemm(150, 90, 264), tma(64, 64, stream_k=True, coop_fixup=True, persistent_ctas=16, multicast=1)
        ),
        "normed, fragments in a cluster": (
            normed(50, 160, 72, "own", BF16, stored=True), blocks(32, 32, 1, 2, cluster=True)
        ),
        "normed, sums divided": (normed(33, 264, 40, "own", stored=True), blocks(32, 32, 2, 2)),
        "normed, pieces, in order": (normed(150, 160, 200, "parts", stored=True), tma(128, 96, consumers=2)),
        "normed, one stage, in turn": (
            normed(300, 32, 136, "own", BF16, stored=True),
            tma(64, 64, stages=2, consumers=2, pingpong=True, persistent_ctas=2),
        ),
        "normed, root mean square": (normed(70, 48, 40, "rms", stored=True), tma(64, 64, stages=2)),
        "leaving sums of pieces": (leaving(150, 160, 96), tma(128, 64, consumers=2)),
        "leaving sums of pieces, in turn": (
            leaving(300, 256, 160), tma(64, 64, consumers=2, pingpong=True, persistent_ctas=2)
        ),
        "bytes, sums over a cluster": (scaled(70, 72, 1040, I8, I32), tma(64, 64, split=4)),
        "bytes, scaled": (scaled(200, 72, 400, I8, BF16), tma(192, 64, consumers=3)),
        "bytes, both signs, to bytes": (scaled(250, 136, 1040, U8, I8), tma(64, 64, stream_k=True, persistent_ctas=5)),
        "boxes, fragments": (gemm(300, 200, 136, layout="nn"), tma(128, 128, **wide)),
        "boxes, woven": (gemm(300, 96, 136), tma(64, 64, interleaved=True, store=64, persistent_ctas=2)),
        "boxes, of 32": (gemm(150, 104, 72, "bf16"), tma(64, 96, store=32, persistent_ctas=2)),
        "boxes, bias, in turn": (
            gemm(200, 72, 200, text="bias"), tma(64, 64, consumers=2, pingpong=True, persistent_ctas=3, store=64)
        ),
        "turned, heads by fragments": (parted(50, (0, 2, 1, 3)), blocks(32, 32)),
        "turned, heads by TMA": (parted(50, (0, 2, 1, 3)), tma(64, 64)),
        "turned, keys by fragments": (parted(48, (0, 2, 3, 1)), blocks(32, 32)),
    }  # fmt: skip


def parted(length: int, order: tuple[int, ...]) -> Problem:
    """A product whose columns become three heads of 16, and axes (batch, rows, heads, columns) in that order."""
    b = GraphBuilder()
    y = linear(b, b.input(TensorType(F16, (2 * length, 72))), 3 * 16)
    return rows(b, b.transpose(b.reshape(y, (2, length, 3, 16)), order))


def layer(m: int, n: int, k: int) -> Problem:
    """gelu(x @ constant + bias)."""
    b = GraphBuilder()
    y = gelu(b, linear(b, b.input(TensorType(F16, (m, k))), n))
    assert isinstance(y, int), y
    return rows(b, y)


# ---- layers


def field(length: int, width: int, position: int = 21, direction: int = 9) -> Problem:
    """A radiance field: colour and density of positions and directions, the position again in the middle."""
    b = GraphBuilder()
    x, seen = b.input(TensorType(F16, (length, position))), b.input(TensorType(F16, (length, direction)))
    h = relu(b, linear(b, relu(b, linear(b, x, width)), width))
    h = relu(b, linear(b, b.add(Prim.CONCAT, h, x, attrs=a.ConcatAttrs(1)), width))
    density = linear(b, h, 1)
    h = relu(b, linear(b, b.add(Prim.CONCAT, h, seen, attrs=a.ConcatAttrs(1)), width))
    return rows(b, linear(b, h, 3), density)


def chain(length: int, *widths: int, act: Callable[..., object] = relu, dtype: DType = F16) -> Problem:
    """Layers of any widths with one activation."""
    b = GraphBuilder()
    h = b.input(TensorType(dtype, (length, widths[0])))
    for width in widths[1:]:
        h = cast("NodeId", act(b, linear(b, h, width)))
    return rows(b, h)


def layers() -> Mapping[str, Case]:
    """Chains of products."""
    shape, wide = mlp_shapes.MlpConfig, mlp_wide.MlpWideConfig
    small = chain(300, 24, 64, 64, 64, 8)
    return {
        "layers, warps": (small, shape(False, 1, 2, 0, 0, 1, 3).schedule()),
        "layers, warpgroups in turn": (small, shape(True, 1, 8, 0, 0, 1, 2, pingpong=True).schedule()),
        "layers, streamed": (small, shape(True, 1, 8, 6, 0, 1, 1).schedule()),
        "layers, streamed, flowing": (small, shape(True, 1, 8, 6, 0, 1, 1, flow=1, pace=1).schedule()),
        "layers, sums begin with the bias, in turn": (
            chain(140, 128, 160, 192, 136, act=gelu, dtype=BF16),
            shape(True, 1, 8, 6, 0, 1, 1, pingpong=True, early=True).schedule(),
        ),
        "layers, results stay": (chain(300, 64, 64, 64), shape(True, 1, 4, 0, 0, 1, 2, keep=True).schedule()),
        "layers, two blocks a tile": (chain(150, 256, 256, 256, 256), mlp_pair.MlpPairConfig(6, 4).schedule()),
        "layers, wide, warps": (chain(70, 40, 272, 300, 24), wide(False, 2, 4, 64, 2).schedule()),
        "layers, wide, warpgroups": (chain(140, 600, 272, 300, 24), wide(True, 8, 4, 64, 2).schedule()),
        "layers, two inputs and results, warps": (field(150, 48), shape(False, 1, 2, 0, 0, 1, 2).schedule()),
        "layers, two inputs and results, warpgroups": (field(150, 48), shape(True, 1, 4, 0, 0, 1, 2).schedule()),
        "layers, two inputs and results, wide": (field(70, 272), wide(True, 4, 4, 64, 1).schedule()),
    }


# ---- attention


def attention(
    length: int, keys: int, size: int, *, causal: bool = False, masked: bool = False, dtype: DType = F16
) -> Problem:
    """Scaled dot-product attention of two heads."""
    b = GraphBuilder()
    q, k, v = (b.input(TensorType(dtype, (1, 2, n, size))) for n in (length, keys, keys))
    mask = [b.input(TensorType(dtype, (1, 2, length, keys)))] if masked else []
    y = sdpa(b, q, k, v, *mask, causal=causal)
    assert not isinstance(y, Declined), y
    return rows(b, y)


def attentions() -> Mapping[str, Case]:
    """Attention by warpgroups in every order, by others, and linear attention."""
    shape = attention_tma_shapes.AttentionTmaConfig
    b = GraphBuilder()
    count, size, tokens = 3, 16, 77
    one = (1, count, size, tokens)
    x = b.reshape(b.input(TensorType(F16, (1, count * 3 * size, 7, 11))), (1, count, 3 * size, tokens))
    q, k, v = (b.cast(b.slice(x, (0, 0, i * size, 0), one, (1,) * 4), F32) for i in range(3))
    v = b.add(Prim.PAD, v, attrs=a.PadAttrs((0,) * 4, (0, 0, 1, 0), "constant", 1.0))
    y = b.add(Prim.MATMUL, v, b.transpose(relu(b, k), (0, 1, 3, 2)))
    y = b.add(Prim.MATMUL, y, relu(b, q))
    below = b.slice(y, (0, 0, size, 0), (1, count, 1, tokens), (1,) * 4)
    share = b.apply(Prim.DIV, b.slice(y, (0,) * 4, one, (1,) * 4), b.apply(Prim.ADD, below, 1e-3))
    return {
        "attention, warpgroups in turn": (attention(200, 150, 40), shape(2, False, 48, 2, True, 1, 0).schedule()),
        "attention, warpgroups share keys": (attention(70, 200, 64), shape(2, True, 48, 4, False, 1, 0).schedule()),
        "attention, three share keys, causal": (
            attention(100, 130, 64, causal=True, dtype=BF16), shape(3, True, 32, 6, False, 1, 0).schedule(),
        ),
        "attention, blocks go on": (attention(150, 100, 64), shape(1, False, 64, 2, False, 1, 2).schedule()),
        "attention, bias": (attention(70, 104, 64, masked=True), shape(1, False, 64, 2, False, 1, 0).schedule()),
        "attention, keys shared by a cluster": (
            attention(20, 300, 64), attention_shapes.SplitAttentionConfig(1, 1, 2, 16, 2, 4).schedule(),
        ),
        "attention, tf32": (
            attention(70, 90, 32, dtype=F32), attention_shapes.AttentionConfig(2, 2, 2, 16, 2).schedule(tf32=True),
        ),
        "attention, linear": (rows(b, b.cast(share, F16)), None),
    }  # fmt: skip


# ---- images


def pair(channels: int, between: int, out: int, size: int) -> Problem:
    """relu(1x1(relu(3x3))), by channel where `between` is 0; channels last."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (1, channels, size, size)))
    formats = [LAST]
    for n, kernel, grouped_ in ((between or channels, 3, 0 if between else channels), (out, 1, 0)):
        depth = b.type_of(x).shape[1]
        w = b.input(TensorType(F16, (n, 1 if grouped_ else depth, kernel, kernel)), is_weight=True)
        border = (kernel // 2, kernel // 2)
        x = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), border, border, (1, 1), max(grouped_, 1)))
        bias = b.input(TensorType(F16, (n,)), is_weight=True)
        x = relu(b, b.apply(Prim.ADD, x, b.reshape(bias, (n, 1, 1))))
        formats += [ROW, ROW]
    return posed(b, x, *formats, LAST)


def pooled() -> Problem:
    """The maximum of 3 x 3 in steps of two of relu(convolution)."""
    b = GraphBuilder()
    x, w = b.input(TensorType(F16, (1, 24, 19, 17))), b.input(TensorType(F16, (40, 24, 3, 3)), is_weight=True)
    y = relu(b, b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))))
    y = b.add(Prim.WINDOW_MAX, y, attrs=a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)))
    return posed(b, y, LAST, ROW, LAST)


def pyramid() -> Problem:
    """An image beside its maxima of 5 x 5 and 9 x 9."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (1, 24, 13, 11)))
    borders = [(r, r) for r in (2, 4)]
    found = [b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((2 * r[0] + 1,) * 2, (1, 1), r, r, (1, 1))) for r in borders]
    return posed(b, b.add(Prim.CONCAT, x, *found, attrs=a.ConcatAttrs(1)), LAST, LAST)


def shown() -> Problem:
    """relu(instance norm) of an image with reflected borders."""
    b = GraphBuilder()
    x = b.cast(b.input(TensorType(F16, (1, 32, 9, 11))), F32)
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), 99.0))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), (2, 3)), 99.0)
    y = b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))
    y = b.add(Prim.PAD, b.cast(relu(b, y), F16), attrs=a.PadAttrs((0, 0, 1, 2), (0, 0, 2, 1), "reflect"))
    return posed(b, y, LAST, LAST)


def images() -> Mapping[str, Case]:
    """Two kernels' work in one, and blocks that meet through memory; without a schedule the generator's own first."""
    form = Form(threads=64, columns=2, single_pass=True, scatter=True)
    return {
        "images, norm whose blocks meet": (shown(), replace(form, cross_cta=3).schedule()),
        "images, norm that waits in shared memory": (
            shown(), replace(form, columns=1, cross_cta=2, smem_stash=True).schedule()
        ),
        "images, norm in parts": (shown(), replace(form, num_splits=3, spread=8).schedule()),
        "images, norm by clusters": (shown(), replace(form, cluster=2).schedule()),
        "images, depthwise and 1x1": (pair(72, 0, 40, 7), None),
        "images, 3x3 and 1x1": (
            pair(16, 32, 120, 9), stacked.StackedConfig(4, 4, 16, 16, 16, 1, 32, 16, 16, 2).schedule(),
        ),
        "images, 3x3 and its maxima": (pooled(), None),
        "images, maxima of several sizes": (pyramid(), None),
    }  # fmt: skip


# ---- convolutions in groups, squeeze-excite, scans


def in_groups(channels: int, groups: int, size: int, kernel: int) -> Problem:
    """relu(convolution of as many groups + bias), channels last."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (1, channels, size, size)))
    w = b.input(TensorType(F16, (channels, channels // groups, kernel, kernel)), is_weight=True)
    border = (kernel // 2, kernel // 2)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), border, border, (1, 1), groups))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(F16, (channels,)), is_weight=True), (channels, 1, 1)))
    return posed(b, relu(b, y), LAST, ROW, ROW, LAST)


def squeezed(n: int, channels: int, hidden: int) -> Problem:
    """x * sigmoid(W2 relu(W1 mean(x) + b1) + b2) of images of 5 x 6."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (n, channels, 5, 6)))
    total = b.add(Prim.REDUCE_SUM, b.cast(x, F32), attrs=a.ReduceAttrs((2, 3)))
    y = b.cast(b.apply(Prim.MUL, total, 1 / 30), F16)
    for i, (out, depth) in enumerate(((hidden, channels), (channels, hidden))):
        w = b.input(TensorType(F16, (out, depth, 1, 1)), is_weight=True)
        y = b.add(Prim.CONV, y, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))
        y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(F16, (out,)), is_weight=True), (1, out, 1, 1)))
        y = y if i else relu(b, y)
    e = b.apply(Prim.EXP, b.apply(Prim.NEG, b.cast(y, F32)))
    gate = b.cast(b.apply(Prim.DIV, 1.0, b.apply(Prim.ADD, e, 1.0)), F16)
    graph = b.build([b.apply(Prim.MUL, x, gate)])
    return Problem(graph, str(graph), (LAST, *[ROW] * 4), (LAST,))


def summed(shape: tuple[int, int], kind: a.ScanKind) -> Problem:
    """A scan of the last axis."""
    b = GraphBuilder()
    xs = [b.input(TensorType(F32, shape)) for _ in range(1 + (kind == "linear"))]
    return rows(b, b.add(Prim.SCAN, *xs, attrs=a.ScanAttrs(1, kind)))


def channelwise() -> Mapping[str, Case]:
    """Groups of channels by fragments, by rings of taps, split; squeeze-excite alone and in clusters; scans of rows."""
    group = GroupConfig(4, 5, 1, 16, 24, 1, 9, 1, 1, cluster=False)
    return {
        "groups of channels": (in_groups(72, 3, 9, 3), group.schedule()),
        "groups of channels, split over a cluster": (
            in_groups(128, 2, 7, 3), GroupConfig(7, 7, 1, 64, 32, 2, 3, 2, 2, cluster=True).schedule(),
        ),
        "groups of channels, split": (
            in_groups(48, 2, 8, 5), GroupConfig(4, 8, 2, 32, 24, 1, 5, 3, 2, cluster=False).schedule(),
        ),
        "squeeze-excite": (squeezed(2, 48, 8), SqueezeConfig(1, 256, keep=True).schedule()),
        "squeeze-excite, cluster": (squeezed(1, 72, 9), SqueezeConfig(4, 256, keep=False).schedule()),
        "scan of rows": (summed((5, 700), "linear"), None),
        "scan of columns": (summed((70, 37), "sum"), None),
    }  # fmt: skip


def fused() -> Mapping[str, Case]:
    """Problems by label; without a schedule the generator's own first ones of every kind are launched."""
    return {**groups(), **one_product(), **layers(), **attentions(), **images(), **channelwise()}
