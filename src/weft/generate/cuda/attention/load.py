"""q, k and v on their way to shared memory, and the C expressions of places and values that attention needs.

Operands that lie in memory in chunks of 16 bytes are copied asynchronously; what must be computed first (a bias), has
another type or lies otherwise goes through registers, several chunks of a thread at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.generate.contraction.values import Expr, View
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.shapes import padded, row_bytes
from weft.generate.cuda.gemm.common.product import index_parts
from weft.generate.cuda.intrinsics.prelude import load, storage
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int, behind, summed
from weft.ir.types import DType

_RAW = 8
"""Chunks that one thread holds between loads and stores."""


def each(name: str, count: int) -> str:
    """Head of an unrolled loop."""
    return f"#pragma unroll\nfor (int {name} = 0; {name} < {count}; ++{name})"


def dims_offset(p: Attention, view: View, positions: Sequence[int], index: str) -> Int:
    """The part of an offset that some dimensions of rows make, from their joint `index`."""
    return summed(*(part * step for part, step in index_parts(p.dims, view.strides, positions, index)))


def block_offset(p: Attention, leaf: Expr) -> Int:
    """Offset of a leaf in the block's part z of it."""
    assert leaf.view is not None
    return dims_offset(p, leaf.view, p.z, "z") + leaf.view.offset


def source_of(leaf: Expr) -> str:
    """Name of the array of a leaf."""
    return f"in{leaf.index}" if leaf.kind == "input" else f"kc{leaf.index}"


def value_at(leaf: Expr, base: Int | str, place: Int) -> str:
    """C expression of one element; `base` is a typed pointer, or an offset for what only counts."""
    if leaf.kind == "iota":
        return f"({c_type(leaf.dtype)})({base + place})"
    return load(leaf.dtype, str(base + place))


def expression(x: Expr, known: Mapping[int, Value]) -> tuple[list[str], Value]:
    """Statements that compute an expression over what has values already (by identity), and its value."""
    lines: list[str] = []
    found = dict(known)

    def value(y: Expr) -> Value:
        if id(y) not in found:
            found[id(y)] = computed(y)
        return found[id(y)]

    def computed(y: Expr) -> Value:
        if y.kind == "number":
            number = bool(y.number) if y.dtype is DType.BOOL else y.number
            return Value(literal(number, y.dtype), y.dtype, constant=float(y.number))
        text, _ = elementwise(y.prim, [value(z) for z in y.args], y.dtype)
        name = f"e{len(lines)}"
        lines.append(f"const {c_type(y.dtype)} {name} = {text};")
        return Value(name, y.dtype)

    result = value(x)
    return lines, result


def constant_arrays(p: Attention) -> str:
    """Constants of several elements as arrays, bits exactly as in memory."""
    text = ""
    leaves = {x.index: x for e in (p.q, p.k, p.v, p.score) for x in e.leaves if x.kind == "constant"}
    for node, leaf in leaves.items():
        data = np.ravel(np.asarray(p.problem.graph.constant(node)))
        if leaf.dtype is DType.BF16:
            items = [str(x) for x in (data.astype(np.float32).view(np.uint32) >> 16).tolist()]
        elif leaf.dtype is DType.F16:
            items = [str(x) for x in data.view(np.uint16).tolist()]
        elif leaf.dtype is DType.BOOL:
            items = [str(int(x)) for x in data]
        else:
            items = [literal(x, leaf.dtype) for x in data.tolist()]
        text += f"__device__ __align__(16) const {storage(leaf.dtype)} kc{node}[] = {{{','.join(items)}}};\n"
    return text


@dataclass(frozen=True, slots=True)
class Operand:
    """q, k or v as it lies in shared memory: `rows` of which `limit` exist, `width` columns."""

    name: str
    expr: Expr
    rows: int
    limit: int
    width: int
    pitch: int
    """Bytes from row to row."""
    keyed: bool
    """True: rows are keys; False: rows of q."""
    dtype: DType

    @staticmethod
    def of(p: Attention, name: str, expr: Expr, rows: int, width: int) -> Operand:
        """`rows` of an operand of attention."""
        keyed = name != "q"
        return Operand(name, expr, rows, p.keys if keyed else p.m, width, row_bytes(p, width), keyed, p.dtype)

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.rows * self.pitch

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """In a row."""
        return padded(self.width) // self.chunk

    def in_chunks(self, leaf: Expr) -> bool:
        """Whether the elements of a chunk are 16 aligned bytes of a leaf."""
        assert leaf.view is not None
        steps = [s for n, s in zip(leaf.view.shape[:-1], leaf.view.strides[:-1], strict=True) if n > 1]
        alike = leaf.dtype.itemsize == self.dtype.itemsize and leaf.dtype.is_float
        dense = leaf.kind == "input" and alike and leaf.view.strides[-1] == 1
        return dense and self.width % self.chunk == 0 and all(s % self.chunk == 0 for s in (*steps, leaf.view.offset))


def fill(p: Attention, x: Operand, threads: int) -> str:
    """The lambda fill_<name>(first, to): rows first.. into shared memory at `to`; what is missing becomes zeros."""
    total = x.rows * x.chunks
    copied = x.expr.kind == "input" and x.expr.dtype is p.dtype and x.in_chunks(x.expr)
    body = _copied(p, x, total, threads) if copied else _computed(p, x, total, threads)
    at = Int("x")
    place = f"[&](int x, int& r, int& c) {{ r = {at / x.chunks}; c = {at % x.chunks * x.chunk}; }}"
    return f"auto fill_{x.name} = [&](int first, u32 to) {{\nauto place = {place};\n{body}\n}};"


def _row(p: Attention, x: Operand, leaf: Expr) -> Int:
    assert leaf.view is not None
    if x.keyed:
        return Int("(first + r)") * leaf.view.strides[-2]
    return dims_offset(p, leaf.view, p.rows, "(first + r)")


def _inside(x: Operand) -> str:
    return f"first + r < {x.limit}" + (f" && c < {x.width}" if padded(x.width) - x.width >= x.chunk else "")


def _copied(p: Attention, x: Operand, total: int, threads: int) -> str:
    leaf, kind = x.expr, storage(x.dtype)
    return (
        f"const {kind}* const base = {behind(f'(const {kind}*){source_of(leaf)}', block_offset(p, leaf))};\n"
        f"#pragma unroll\nfor (int x = t; x < {total}; x += {threads}) {{ int r, c; place(x, r, c);\n"
        f"const bool inside = {_inside(x)};\n"
        f"const {kind}* const from = base + (inside ? {_row(p, x, leaf) + 'c'} : 0);\n"
        f"w_copy16(to + (u32)(r * {x.pitch} + c * {x.dtype.itemsize}), from, inside ? 16u : 0u);\n}}"
    )


def _computed(p: Attention, x: Operand, total: int, threads: int) -> str:
    leaves = x.expr.leaves
    wide = [y for y in leaves if x.in_chunks(y)]
    same = _same_chunk(p, x, wide, threads)
    unroll = max(1, min(-(-total // threads), _RAW // max(1, len(wide) - len(same))))
    base: dict[int, Int] = {}
    lines = []
    for i, y in enumerate(leaves):
        base[id(y)] = block_offset(p, y) if y.kind == "iota" else Int(f"l{i}")
        if y.kind != "iota":
            kind = storage(y.dtype)
            place = behind(f"(const {kind}*){source_of(y)}", block_offset(p, y))
            lines.append(f"const {kind}* const l{i} = {place};")
    for y in wide:
        name = base[id(y)]
        if y in same:
            column = Int("t") % x.chunks * x.chunk
            inside = f"if ({column} < {x.width}) " if padded(x.width) - x.width >= x.chunk else ""
            read = f"*(const uint4*)({name + column});"
            lines.append(f"uint4 {name}w = make_uint4(0, 0, 0, 0); {inside}{name}w = {read}")
        else:
            lines.append(f"uint4 {name}w[{unroll}];")
    lines.append(f"for (int x0 = t; x0 < {total}; x0 += {threads * unroll}) {{")
    at = f"const int x = x0 + u * {threads}; int r, c; place(x, r, c);"
    at += f" const bool inside = x < {total} && {_inside(x)};"
    rows = [y for y in wide if y not in same]
    if rows:
        lines.append(f"{each('u', unroll)} {{ {at}")
        for y in rows:
            chunk = f"*(const uint4*)({summed(base[id(y)], _row(p, x, y), 'c')})"
            lines.append(f"{base[id(y)]}w[u] = make_uint4(0, 0, 0, 0); if (inside) {base[id(y)]}w[u] = {chunk};")
        lines.append("}")
    lines += [f"{each('u', unroll)} {{ {at}", f"if (x < {total}) {{ float v[{x.chunk}];"]
    lines.append(f"{each('e', x.chunk)} v[e] = 0.0f;")
    words = {id(y): f"{base[id(y)]}w{'' if y in same else '[u]'}" for y in wide}
    lines += ["if (inside) {", *_elements(p, x, leaves, words, base), "}"]
    packed = ", ".join(f"w_narrow2_{p.dtype.value}(v[{i}], v[{i + 1}])" for i in range(0, 8, 2))
    if x.dtype is DType.F32:
        packed = ", ".join(f"__float_as_uint(v[{i}])" for i in range(4))
    lines.append(f"w_store16(to + (u32)(r * {x.pitch} + c * {x.dtype.itemsize}), make_uint4({packed}));\n}}\n}}\n}}")
    return "\n".join(lines)


def _same_chunk(p: Attention, x: Operand, wide: Sequence[Expr], threads: int) -> list[Expr]:
    """Leaves that are the same for all rows, where a thread stays in its column: it reads one chunk of each."""
    if threads % x.chunks:
        return []
    return [y for y in wide if _row(p, x, y).text == "0"]


def _elements(
    p: Attention, x: Operand, leaves: Sequence[Expr], words: Mapping[int, str], base: Mapping[int, Int]
) -> list[str]:
    """The operand's expression at the columns of a chunk from c on, into v; `words` names the chunks of some leaves."""
    lines = []
    for y in leaves:
        if id(y) not in words:
            continue
        name = base[id(y)]
        lines.append(f"float {name}v[{x.chunk}];")
        for i, f in enumerate("xyzw"):
            if y.dtype is DType.F32:
                lines.append(f"{name}v[{i}] = __uint_as_float({words[id(y)]}.{f});")
                continue
            pair = f"const float2 h = w_unpack_{y.dtype.value}({words[id(y)]}.{f});"
            lines.append(f"{{ {pair} {name}v[{2 * i}] = h.x; {name}v[{2 * i + 1}] = h.y; }}")
    guard = f" if (c + e < {x.width})" if x.width % x.chunk else ""
    lines.append(f"{each('e', x.chunk)}{guard} {{")
    values: dict[int, Value] = {}
    for i, y in enumerate(leaves):
        assert y.view is not None
        if id(y) in words:
            values[id(y)] = Value(f"{base[id(y)]}v[e]", y.dtype)
            continue
        place = _row(p, x, y) + Int("(c + e)") * y.view.strides[-1]
        lines.append(f"const {c_type(y.dtype)} y{i} = {value_at(y, base[id(y)], place)};")
        values[id(y)] = Value(f"y{i}", y.dtype)
    text, value = expression(x.expr, values)
    return [*lines, *text, f"v[e] = (float){value.name};", "}"]
