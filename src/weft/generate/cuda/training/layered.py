"""Training of networks whose layers are too wide for registers: a kernel for each product of a layer.

Forward, a layer is a product with bias and activation behind it. It leaves its result in memory and, where the
derivative of the activation reads them, its sums, both rounded to 16 bits: backward recomputes nothing. Backward, with
dz the gradient of a layer's sums,

    dz of the layer below = (dz W) act'(what is kept)        the derivative behind the product
    dW = dz^T h                                              over all rows, divided among blocks in a fixed order
    db = sums of the columns of dz                           shares of the rows, added in their order

so that equal inputs give equal bits. All products are problems of the templates for products. In memory columns are
padded to eights with zeros of weights: what an activation makes of them is multiplied by zeros.

Source: note on fused MLPs, section 4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from weft.generate.cuda.templates import tma
from weft.generate.cuda.templates.mlp_text import mlp_header
from weft.generate.cuda.templates.prelude import prelude, storage
from weft.generate.cuda.templates.product import product
from weft.generate.cuda.templates.tma_end import sum_rows
from weft.generate.cuda.templates.tma_shape import Shape
from weft.generate.cuda.training.gradient import Entry, training_header
from weft.generate.cuda.training.network import ALIGNMENT, Network
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

WIDEST, WIDEST_INPUT = 512, 4096
"""Columns of layers, and of the input."""
SLICES = 4
"""Shares of the rows for sums of columns, times multiprocessors."""
_LINE = 128
_THREADS = 256

Role = Literal["forward", "below", "input", "weights"]


def padded(columns: int) -> int:
    """Columns as they lie in memory."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Product:
    """One kernel, with inputs and outputs of its problem in this order.

    forward: input of the layer, weights, bias if there is one -> sums if they are kept, result;
    below: dz, turned weights, what is kept of the layer below if anything -> dz of the layer below;
    input: dz of the first layer, turned weights -> gradient of x;
    weights: dz, input of the layer -> gradient of the weights.
    """

    role: Role
    layer: int
    problem: Problem


def refused(net: Network, rows: int = 1) -> Declined | None:
    """Why a network is not trained like this."""
    if not net.plain:
        return Declined("skips beside weights that no kernel holds")
    for act in net.acts:
        declined = act.no_gradient()
        if declined is not None:
            return declined
    if max(net.widths[1:]) > WIDEST:
        return Declined(f"a layer of {max(net.widths[1:])} columns; gradients are for {WIDEST} at most")
    if net.widths[0] > WIDEST_INPUT:
        return Declined(f"an input of {net.widths[0]} columns; gradients are for {WIDEST_INPUT} at most")
    if rows * padded(max(net.widths)) >= 1 << 31:
        return Declined(f"{rows} rows of {max(net.widths)} columns, which are too many to be trained at once")
    return None


def takes(net: Network) -> bool:
    """Whether the input is copied, to be rounded or padded, before the first product reads it."""
    return net.given is not net.dtype or net.widths[0] % ALIGNMENT != 0


def forward(net: Network, rows: int) -> list[Product]:
    """The products of the forward pass, by layer."""
    return [Product("forward", layer, _forward(net, rows, layer)) for layer in range(net.depth)]


def backward(net: Network, rows: int, *, inputs: bool, parameters: bool, dtype: DType) -> list[Product]:
    """The products of the backward pass in the order in which they are run; `dtype`: of the parameters' gradients."""
    found = []
    for layer in range(net.depth - 1, -1, -1):
        if parameters:
            found.append(Product("weights", layer, _weights(net, rows, layer, dtype)))
        if layer > 0:
            found.append(Product("below", layer, _below(net, rows, layer)))
        elif inputs:
            found.append(Product("input", layer, _input(net, rows)))
    return found


def _columns(net: Network, value: int) -> int:
    """Of a value in memory: the result has no padding."""
    return net.widths[value] if value == net.depth else padded(net.widths[value])


def _problem(b: GraphBuilder, outputs: list[NodeId]) -> Problem:
    graph = b.build(outputs)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(outputs))


def _forward(net: Network, rows: int, layer: int) -> Problem:
    k, n = _columns(net, layer), _columns(net, layer + 1)
    b = GraphBuilder()
    h = b.input(TensorType(net.dtype, (rows, k)))
    w = b.input(TensorType(net.dtype, (n, k)))
    z = b.add(Prim.MATMUL, h, b.transpose(w, (1, 0)))
    if net.biases[layer]:
        z = b.apply(Prim.ADD, z, b.input(TensorType(net.dtype, (n,))))
    act = net.acts[layer]
    y = act.apply(b, z)
    return _problem(b, [z, y] if act.keeps == 2 else [y])


def _below(net: Network, rows: int, layer: int) -> Problem:
    n, k = padded(net.widths[layer + 1]), padded(net.widths[layer])
    b = GraphBuilder()
    dz = b.input(TensorType(net.dtype, (rows, n)))
    turned = b.input(TensorType(net.dtype, (k, n)))
    g = b.add(Prim.MATMUL, dz, b.transpose(turned, (1, 0)))
    act = net.acts[layer - 1]
    if act.keeps:
        kept = b.input(TensorType(net.dtype, (rows, k)))
        wide = net.dtype if act.whole else DType.F32  # fewer steps leave more registers for what is read ahead
        g = b.cast(act.slope(b, b.cast(g, wide), b.cast(kept, wide)), net.dtype)
    return _problem(b, [g])


def _input(net: Network, rows: int) -> Problem:
    n, k = padded(net.widths[1]), net.widths[0]
    b = GraphBuilder()
    dz = b.input(TensorType(net.dtype, (rows, n)))
    turned = b.input(TensorType(net.dtype, (k, n)))
    return _problem(b, [b.cast(b.add(Prim.MATMUL, dz, b.transpose(turned, (1, 0))), net.given)])


def _weights(net: Network, rows: int, layer: int, dtype: DType) -> Problem:
    n, k = padded(net.widths[layer + 1]), padded(net.widths[layer])
    b = GraphBuilder()
    dz = b.input(TensorType(net.dtype, (rows, n)))
    h = b.input(TensorType(net.dtype, (rows, k)))
    return _problem(b, [b.cast(b.add(Prim.MATMUL, b.transpose(dz, (1, 0)), h), dtype)])


def with_sums(p: Product, schedule: Schedule) -> tuple[CudaSource, int] | Declined:
    """The kernel of a product that also sums its result over rows, and how many rows of sums it leaves.

    These, of float32 and as wide as the result, are one more output.
    """
    if schedule.param("template") != "tma":
        return Declined("the copy engine's template sums columns")
    matched = product(p.problem)
    if isinstance(matched, Declined):
        return matched
    entry = f"k{hashlib.sha256(f'{p.problem.key}|{schedule}|sums'.encode()).hexdigest()[:16]}"
    matched = replace(matched, column_sums=True)
    source = tma.emit(matched, schedule, entry)
    return source if isinstance(source, Declined) else (source, sum_rows(matched, Shape.of(schedule)))


@dataclass(frozen=True, slots=True)
class Image:
    """Offsets in bytes of each layer's weights, as (out, in) and turned, and of its bias; columns are padded."""

    weights: tuple[int, ...]
    turned: tuple[int, ...]
    biases: tuple[int, ...]
    bytes: int

    @staticmethod
    def of(net: Network) -> Image:
        """Of a network."""
        places: list[list[int]] = [[], [], []]
        at = 0
        for layer in range(net.depth):
            k, n = padded(net.widths[layer]), padded(net.widths[layer + 1])
            for place, size in zip(places, (k * n, k * n, n), strict=True):
                place.append(at)
                at += -(-2 * size // _LINE) * _LINE
        return Image(tuple(places[0]), tuple(places[1]), tuple(places[2]), at)


@dataclass(frozen=True, slots=True)
class Layered:
    """What stands beside the products, for any number of rows. Entries take addresses, and numbers as if they were.

    pack(each parameter, image), take(x, input of the first layer, rows), ending(dy, what the last activation keeps, dz,
    rows), columns(dz, partial, rows, padded columns, 0): a block for each share of the rows, which with a 1 at the end
    are sums of rows already, in float32; total(partial of all layers, gradients of the parameters, shares).
    """

    text: str
    pack: Entry
    take: Entry
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
    seed = hashlib.sha256(f"{net}|{dtype}|{sms}".encode()).hexdigest()[:16]
    names = {what: f"k{seed}_{what}" for what in ("pack", "take", "ending", "columns", "total")}
    image, act = Image.of(net), net.acts[-1]
    partial, floats = [], 0
    for width in net.widths[1:]:
        partial.append(floats)
        floats += padded(width)
    packing, blocks = _pack(net, image, names["pack"])
    last, x = net.widths[-1], storage(net.given)
    parts = [
        prelude(),
        mlp_header(),
        training_header(net.dtype),
        _header().replace("W_KIND", net.dtype.value),
        act.text("Last", net.dtype),
        packing,
        _each(names["take"], "const void* x_, void* h_, const void* rows_"),
        f"w_take<{net.widths[0]}, {padded(net.widths[0])}>((const {x}*)x_, (u16*)h_, {_LOOP}); }}\n",
        _each(names["ending"], "const void* dy_, const void* kept_, void* dz_, const void* rows_"),
        f"w_ending<Last, {last}, {padded(last)}>((const u16*)dy_, (const u16*)kept_, (u16*)dz_, {_LOOP}); }}\n",
        _column_sums(net, names["columns"]),
        _total(net, partial, names["total"], dtype),
    ]
    return Layered(
        "".join(parts),
        Entry(names["pack"], _THREADS, blocks),
        Entry(names["take"], _THREADS, 8 * sms),
        Entry(names["ending"], _THREADS, 8 * sms),
        Entry(names["columns"], _THREADS, SLICES * sms),
        Entry(names["total"], _THREADS, sum(-(-w // 32) for w in net.widths[1:])),
        image,
        tuple(partial),
        floats,
    )


_LOOP = "(u32)(u64)rows_, blockIdx.x * 256u + threadIdx.x, gridDim.x * 256u"


def _each(name: str, parameters: str) -> str:
    return f'extern "C" __global__ void __launch_bounds__({_THREADS}) {name}({parameters}) {{\nw_wait(); w_release();\n'


def _pack(net: Network, image: Image, name: str) -> tuple[str, int]:
    """(kernel that makes the image, its blocks): a block for each tile of weights, and one for each bias."""
    kind = storage(net.masters or net.dtype)
    lines = [
        _each(name, f"{', '.join(f'const void* p{i}' for i in range(len(net.places())))}, void* image_"),
        "__shared__ u16 held[32][33];",
        "char* const image = (char*)image_; int b = blockIdx.x; const int t = threadIdx.x;",
    ]
    blocks = number = 0
    for layer in range(net.depth):
        n, k = net.widths[layer + 1], net.widths[layer]
        np, kp = padded(n), padded(k)
        tiles = -(-np // 32) * -(-kp // 32)
        places = f"(u16*)(image + {image.weights[layer]}), (u16*)(image + {image.turned[layer]})"
        lines += [
            f"if (b < {tiles}) {{",
            f"w_images<{n}, {k}, {np}, {kp}>((const {kind}*)p{number}, {places}, b, held, t); return; }}",
            f"b -= {tiles};",
        ]
        blocks, number = blocks + tiles, number + 1
        if net.biases[layer]:
            lines += [
                "if (b == 0) {",
                f"for (int i = t; i < {np}; i += {_THREADS}) {{ u16 v = 0;",
                f"if (i < {n}) v = w_short(((const {kind}*)p{number})[i]);",
                f"((u16*)(image + {image.biases[layer]}))[i] = v; }} return; }}\n--b;",
            ]
            blocks, number = blocks + 1, number + 1
    return "\n".join((*lines, "}\n")), blocks


def _column_sums(net: Network, name: str) -> str:
    lines = [
        _each(name, "const void* dz_, void* partial_, const void* rows_, const void* columns_, const void* sums_"),
        f"__shared__ float held[{_THREADS * 8}];",
        "const w_rows rows = (w_rows)(u64)rows_; const int columns = (int)(u64)columns_;",
        "const w_rows first = rows * blockIdx.x / gridDim.x, last = rows * (blockIdx.x + 1) / gridDim.x;",
        "float* const out = (float*)partial_ + (w_rows)blockIdx.x * columns;",
    ]
    for columns in sorted({padded(w) for w in net.widths[1:]}):
        rest = "out, first, last, held, threadIdx.x);"
        lines += [
            f"if (columns == {columns}) {{ if (sums_) w_column_sums<{columns}>((const float*)dz_, {rest}",
            f"else w_column_sums<{columns}>((const u16*)dz_, {rest} }}",
        ]
    return "\n".join((*lines, "}\n"))


def _total(net: Network, partial: list[int], name: str, dtype: DType) -> str:
    """A warp of a block adds an eighth of the shares of 32 columns; the first one adds the eighths."""
    kind = storage(dtype)
    value = "s" if dtype is DType.F32 else f"(u16)w_narrow2_{dtype.value}(s, 0.0f)"
    lines = [
        _each(name, "const void* partial_, void* out_, const void* shares_"),
        "__shared__ float eighths[8][32];",
        "const int shares = (int)(u64)shares_, lane = threadIdx.x % 32, part = threadIdx.x / 32;",
        "int b = blockIdx.x, to = -1, step = 0; const float* from = 0;",
    ]
    for layer, width in enumerate(net.widths[1:]):
        _, bias = net.place(layer)
        place = f"{bias.offset} + b * 32 + lane" if bias else "-1"
        lines += [
            f"if (b >= 0 && b < {-(-width // 32)}) {{ step = {padded(width)};",
            f"from = (const float*)partial_ + (w_rows)shares * {partial[layer]} + b * 32 + lane;",
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
        "__syncthreads();",
        "if (part == 0 && to >= 0) {",
        "#pragma unroll",
        "for (int p = 1; p < 8; ++p) s += eighths[p][lane];",
        f"(({kind}*)out_)[to] = {value};",
        "}",
    ]
    return "\n".join((*lines, "}\n"))
