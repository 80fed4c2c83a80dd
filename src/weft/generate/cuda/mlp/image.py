"""Weights and vectors of a chain as one image in memory, and the kernel that makes it once.

For `mma` the weights of a layer lie as lanes hold their fragments: [k / 16][n / 16][lane][8]. For warpgroups they lie
in panels of 64 rows of the sum as [n][64], 128 bytes a row, with the 128-byte swizzle. Both are padded with zeros to
multiples of 16. Vectors are f32. The first product's rows and the last one's columns may be in another order, so that a
lane reads and writes neighbouring columns (`column`).

Source: note on fused MLPs, sections 2.2 and 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.generate.cuda.intrinsics.prelude import load, storage
from weft.generate.cuda.mlp.match import Chain, InputMatrix, Layer, Source, padded
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter
from weft.generate.expr.ctype import literal
from weft.generate.expr.integer import Int, behind, integer, summed
from weft.ir.graph import NodeId
from weft.ir.types import DType
from weft.kernels.source import Pointer

PANEL = 64
"""Rows of the sum in one panel; a panel of a layer is what is streamed at once."""


def column(position: Int | str, neighbours: int) -> Int:
    """C text: the column in memory that stands at a position; `neighbours` columns of a lane lie side by side.

    Position 8c + 2q + i is held by lane q of four: its pairs i of v/2 neighbouring chunks c become v columns.
    """
    p = Int(integer(position).tight)
    if neighbours == 8:
        return Int((p / 32 * 32 + p % 8 / 2 * 8 + p % 32 / 8 * 2 + p % 2).tight)
    if neighbours == 4:
        return Int((p / 16 * 16 + p % 8 / 2 * 4 + p % 16 / 8 * 2 + p % 2).tight)
    return p


def neighbours_of(width: int, *, free: bool) -> int:
    """Columns that a lane reads or writes at once; `free`: the order of columns may be chosen."""
    if free and width % 32 == 0:
        return 8
    if free and width % 16 == 0:
        return 4
    return 2 if width % 2 == 0 else 1


def vector_width(matrix: InputMatrix, *, free: bool) -> int:
    """The same of a matrix in memory, as far as its rows are aligned."""
    if matrix.width > 1 and matrix.steps[1] != 1:
        return 1
    found = neighbours_of(matrix.width, free=free)
    while any(at % min(found, 16 // matrix.dtype.itemsize) for at in (matrix.steps[0], matrix.offset)):
        found //= 2
    return found


def vector_width_beside(p: Chain, node: NodeId) -> int:
    """Neighbouring columns that a lane reads of what a value that stands beside others is made of."""
    made = p.before[node]
    operands = {p.value(o) for s in made for o in p.graph.nodes[s].inputs}
    return min(vector_width(p.inputs[v], free=True) for v in p.inputs if v == node or v in operands)


@dataclass(frozen=True, slots=True)
class Image:
    """Offsets are in bytes."""

    p: Chain
    group: bool
    """Panels for warpgroups, or fragments."""
    read: int
    """Neighbouring columns of x that a lane reads."""
    written: int
    """The same of the result."""
    layers: tuple[int, ...]
    """Where each layer begins."""
    vectors: tuple[tuple[int, NodeId], ...]
    """(part, vector) in the order of their places."""
    places: tuple[int, ...]
    weight_bytes: int
    bytes: int
    columns: int = 0
    """Of a layer's result that are one piece of the image, of whole panels; 0: all."""
    halved: frozenset[int] = frozenset()
    """Parts whose weights and vectors are stored as halves."""
    prescaled: frozenset[int] = frozenset()
    """Parts whose result is 2 * `prescale` times what it is; the next part's vectors are `prescale` times theirs."""
    prescale: float = 1.0

    @staticmethod
    def of(p: Chain, *, group: bool, columns: int = 0) -> Image:
        """The image of a chain."""
        last = len(p.layers)
        before = {v for kept in p.kept for v in kept}
        operands = {p.value(o) for at in range(1, last + 1) for s in p.steps[at] for o in p.graph.nodes[s].inputs}
        lefts = [v for x in p.layers[1:] for v in x.left if v not in x.beside]
        shared = any(v in operands or v in lefts or p.layers[0].left.count(v) > 1 for v in (p.x, *p.kept[0]))
        ends = {p.value(o) for s in p.steps[last] for o in p.graph.nodes[s].inputs}
        read = vector_width(p.inputs[p.x], free=not shared)
        written = neighbours_of(p.layers[-1].n, free=not ends & before)
        while any(at % min(written, 16 // p.dtype.itemsize) for e in p.ends_of(last) for at in (e.step, e.offset)):
            written //= 2
        at = 0
        layers = []
        for layer in p.layers:
            layers.append(at)
            at += layer_bytes(layer, group=group, columns=columns)
        weights = at
        vectors = []
        places = []
        for part, steps in enumerate(p.steps):
            for node in dict.fromkeys(o for s in steps for o in p.graph.nodes[s].inputs if o in p.vectors):
                vectors.append((part, node))
                places.append(at)
                at += 4 * whole(p.graph.type_of(node).size // p.rows, columns)
        size = -(-at // 16) * 16
        return Image(p, group, read, written, tuple(layers), tuple(vectors), tuple(places), weights, size, columns)

    def place(self, part: int, node: NodeId) -> int:
        """Where a vector begins."""
        return self.places[self.vectors.index((part, node))]

    def order(self, part: int) -> int:
        """Neighbouring columns of a lane in the results of a part."""
        return self.read if part == 0 else self.written if part == len(self.p.layers) else 2


def pieces(n: int, columns: int) -> tuple[int, int]:
    """(number, columns of each) of the pieces of n columns of which none has more than `columns`; 0: one piece."""
    if columns == 0 or padded(n) <= columns:
        return 1, padded(n)
    count = -(-n // columns)
    return count, -(-n // (32 * count)) * 32


def whole(n: int, columns: int) -> int:
    """Columns of all pieces."""
    count, each = pieces(n, columns)
    return count * each


def layer_bytes(layer: Layer, *, group: bool, columns: int = 0) -> int:
    """Of a layer in the image."""
    k = -(-layer.depth // PANEL) * PANEL if group or columns else layer.depth
    return 2 * k * whole(layer.n, columns)


def pack(image: Image, masters: DType | None = None) -> tuple[DeviceRole, tuple[int, ...]]:
    """(the role that makes the image, inputs that it reads); a thread makes one element.

    `masters`: inputs lie in memory in that type, and are rounded to that of the products first.
    """
    p = image.p
    sources = [x.weight for x in p.layers] + [p.vectors[v] for _, v in image.vectors]
    inputs = sorted({s.index for s in sources if s.kind == "input"})
    arrays = "".join(
        _array(p, i, d) for i, d in dict.fromkeys((s.index, s.dtype) for s in sources if s.kind != "input")
    )
    lines = ["u32 i = role.block_x() * 256u + role.thread();"]
    total = 0
    for at, layer in enumerate(p.layers):
        count = layer_bytes(layer, group=image.group, columns=image.columns) // 2
        lines += _weight(image, at, count, masters)
        total += count
    for (part, node), place in zip(image.vectors, image.places, strict=True):
        width = p.graph.type_of(node).size // p.rows
        source = p.vectors[node]
        n, size = column("i", image.order(part)), whole(width, image.columns)
        memory = _memory(source, masters)
        value = load(memory, behind(_pointer(source, masters), n * source.steps[1] + source.offset))
        if memory is not source.dtype and source.dtype is not DType.F32:
            kind = source.dtype.value
            value = f"w_unpack_{kind}(w_narrow2_{kind}({value}, 0.0f)).x"
        factor = image.prescale if part - 1 in image.prescaled else 0.5 if part in image.halved else 1.0
        value = f"(float){value}" if factor == 1.0 else f"{literal(factor, DType.F32)} * (float){value}"
        lines.append(
            f"if (i < {size}u) {{ float v = 0.0f; if ({n} < {width}) v = {value};"
            f" ((float*)({Int('(char*)pk') + place}))[i] = v; return; }}\ni -= {size}u;"
        )
        total += size
    role = DeviceRole(
        threads=256,
        body="\n".join(lines),
        parameters=(
            *(Parameter(f"in{i}", Pointer("in", i)) for i in inputs),
            Parameter("pk", Pointer("packed", 0), WRITTEN),
        ),
        grid=(-(-total // 256), 1, 1),
        globals=arrays,
        name="pack",
        bounded=False,
        pdl=False,
    )
    return role, tuple(inputs)


def _weight(image: Image, at: int, count: int, masters: DType | None) -> list[str]:
    """Statements: element i of a layer, or on to the next."""
    layer = image.p.layers[at]
    parts, n = pieces(layer.n, image.columns)
    i = Int("i")
    piece, start = (i / (count // parts) * n, i % (count // parts)) if parts > 1 else (Int("0"), i)
    if image.group:
        # row n of 128 bytes holds chunks of 8 elements, exchanged within 8 rows
        how = "// panels of 64 of the sum, rows of 128 bytes, swizzled as wgmma reads them"
        inner = start % (64 * n)
        position_n = piece + inner / 64
        position_k = start / (64 * n) * 64 + Int(f"(({inner / 8 % 8}) ^ ({inner / 64 % 8}))") * 8 + i % 8
    else:
        how = "// fragments as mma.sync holds them, two neighbouring tiles of 8 columns side by side"
        position_n = summed(piece, start / 256 % (n // 16) * 16, i % 8 / 4 * 8, i % 256 / 32)
        position_k = summed(start / (16 * n) * 16, i % 4 / 2 * 8, i % 32 / 8 * 2, i % 2)
    first, last = at == 0, at == len(image.p.layers) - 1
    w = layer.weight
    value = f"({_pointer(w, masters)})[{summed(Int('k') * w.steps[0], Int('n') * w.steps[1], w.offset)}]"
    if _memory(w, masters) is not w.dtype:
        value = f"(u16)w_narrow2_{w.dtype.value}({value}, 0.0f)"
    if at + 1 in image.halved:
        kind = w.dtype.value
        value = f"(u16)w_narrow2_{kind}(0.5f * w_unpack_{kind}({value}).x, 0.0f)"
    return [
        how,
        f"if (i < {count}u) {{ const u32 pn = {position_n}, pk_ = {position_k};",
        f"const u32 n = {column('pn', image.written if last else 2)};",
        f"const u32 k = {column('pk_', image.read) if first and len(layer.left) == 1 else _row('pk_', image, layer)};",
        f"u16 v = 0; if (n < {layer.n} && k < {layer.k}) v = {value};",
        f"((u16*)({Int('(char*)pk') + image.layers[at]}))[i] = v; return; }}",
        f"i -= {count}u;",
    ]


def _row(position: str, image: Image, layer: Layer) -> str:
    """C text: the row of a weight at a position; past all rows where there is none."""
    text = f"{layer.k}u"
    at, row = layer.depth, layer.k
    for node, width in zip(reversed(layer.left), reversed(layer.widths), strict=True):
        at, row = at - padded(width), row - width
        own = vector_width_beside(image.p, node) if node in layer.beside else 2
        own = image.read if node == image.p.first and node not in layer.beside and layer == image.p.layers[0] else own
        here = Int(f"{position} - {at}u" if at else position)
        place = column(here, own) if own > 2 else here
        found = f"{place} + {row}u" if row else place
        text = f"({here} < {padded(width) if own > 2 else width}u ? {found} : {text})"
    return text


def _pointer(source: Source, masters: DType | None) -> str:
    return f"(const {storage(_memory(source, masters))}*){'in' if source.kind == 'input' else 'kc'}{source.index}"


def _memory(source: Source, masters: DType | None) -> DType:
    """In which type a source lies in memory."""
    return masters if masters is not None and source.kind == "input" else source.dtype


def _array(p: Chain, node: NodeId, dtype: DType) -> str:
    """A short constant of the graph as an array in the text, bits exactly as in memory."""
    data = np.ravel(np.asarray(p.graph.constant(node)))
    if dtype is DType.BF16:
        items = [str(x) for x in (data.astype(np.float32).view(np.uint32) >> 16).tolist()]
    elif dtype is DType.F16:
        items = [str(x) for x in data.view(np.uint16).tolist()]
    else:
        items = [literal(x, dtype) for x in data.tolist()]
    return f"__device__ __align__(16) const {storage(dtype)} kc{node}[] = {{{','.join(items)}}};\n"
