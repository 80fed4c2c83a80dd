"""Operands that do not lie in chunks of 16 bytes are copied to rows of whole lines of memory first.

A launch of its own moves them into the workspace, where tensor maps can describe them: as many bytes as the operand has
twice, against a product that would find its elements one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.generate.cuda.gemm.common.product import ALoad, Product
from weft.generate.cuda.gemm.tma.operands import Operand, joined
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter
from weft.ir.declined import Declined
from weft.kernels.source import Pointer

_LINE = 128
_PIECE = 1024
"""Operands begin at multiples of so many bytes of the workspace."""
_THREADS = 256


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand in memory: rows of neighbours, steps in elements; and where it is copied to, in bytes."""

    index: int
    offset: int
    rows: int
    columns: int
    step: int
    size: int
    """Bytes of an element."""
    at: int

    @property
    def pitch(self) -> int:
        """Elements from row to row of the copy."""
        line = _LINE // self.size
        return -(-self.columns // line) * line

    @property
    def bytes(self) -> int:
        """Of the copy."""
        return -(-self.rows * self.pitch * self.size // _PIECE) * _PIECE

    @property
    def chunks(self) -> int:
        """Pieces of 16 bytes of a row of the copy that hold elements."""
        return -(-self.columns * self.size // 16)


@dataclass(frozen=True, slots=True)
class Aligned:
    """A product whose operands are copied: as it is afterwards, and what is copied."""

    product: Product
    left: Matrix | None
    right: Matrix | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What is copied."""
        return tuple(x for x in (self.left, self.right) if x is not None)

    @property
    def bytes(self) -> int:
        """Workspace of the copies."""
        return sum(x.bytes for x in self.matrices)

    def operand(self, o: Operand, of: Matrix | None, before: int) -> Operand:
        """The operand in the workspace, behind so many bytes of it."""
        if of is None or o.map is None:
            return o
        return replace(o, map=replace(o.map, base=Pointer("work", before + of.at)))


def aligned(p: Product) -> Aligned | Declined:
    """The product with its operands in rows of whole lines; Declined where they are no two matrices."""
    c = p.c
    if "elements" not in (p.a_load, p.w_load):
        return Declined("operands that 16-byte vectors fit as they are")
    if (
        not p.tensor
        or p.bytes
        or p.a_load == "taps"
        or c.a.kind != "input"
        or c.pack is not None
        or c.kernel != (1, 1)
        or p.z != 1
    ):
        return Declined("no product of two matrices of inputs")
    dims = joined(c.a_layout, c.dims, p.rows)
    if len(dims) > 1:
        return Declined("rows of several dimensions")
    step, size = dims[0][1] if dims else c.ic, p.dtype.itemsize
    left = right = None
    if p.a_load == "elements":
        load: ALoad
        if c.a_layout.channel == 1 and step >= c.ic:
            left = Matrix(c.a.index, c.a_layout.offset, p.m, c.ic, step, size, 0)
            steps = tuple(s // step * left.pitch for s in c.a_layout.dims)
            layout, load = replace(c.a_layout, dims=steps, offset=0), "rows"
        elif step == 1 and c.a_layout.channel >= p.m and size == 2:
            left = Matrix(c.a.index, c.a_layout.offset, c.ic, p.m, c.a_layout.channel, size, 0)
            layout, load = replace(c.a_layout, channel=left.pitch, offset=0), "columns"
        else:
            return Declined("a left operand whose neighbours are neither along M nor along K")
        p = replace(p, c=replace(c, a_layout=layout), a_load=load)
        c = p.c
    if p.w_load == "elements":
        at = left.bytes if left else 0
        if c.w.kind != "input":
            return Declined("a constant as the right operand")
        if c.w_k == 1 and c.w_layout.channel >= c.ic:
            right = Matrix(c.w.index, c.w_layout.offset, p.n, c.ic, c.w_layout.channel, size, at)
            p = replace(p, c=replace(c, w_layout=replace(c.w_layout, channel=right.pitch, offset=0)), w_load="nk")
        elif c.w_layout.channel == 1 and c.w_k >= p.n and size == 2:
            right = Matrix(c.w.index, c.w_layout.offset, c.ic, p.n, c.w_k, size, at)
            p = replace(p, c=replace(c, w_k=right.pitch, w_layout=replace(c.w_layout, offset=0)), w_load="kn")
        else:
            return Declined("a right operand whose neighbours are neither along N nor along K")
    return Aligned(p, left, right)


def copies(p: Product, matrices: Sequence[Matrix], before: int) -> DeviceRole:
    """The role that copies, into the workspace behind so many bytes of it: a thread for 16 bytes."""
    kind, total = storage(p.dtype), sum(x.rows * x.chunks for x in matrices)
    lines = ["role.pdl_wait(); role.pdl_trigger();", f"u32 i = role.block_x() * {_THREADS}u + role.thread();"]
    for i, x in enumerate(matrices):
        each = 16 // x.size
        lines.append(
            f"if (i < {x.rows * x.chunks}u) {{ const u32 row = i / {x.chunks}u, c = i % {x.chunks}u * {each}u;\n"
            f"const {kind}* const from = (const {kind}*)from{i} + {x.offset} + (long long)row * {x.step} + c;\n"
            f"alignas(16) {kind} v[{each}];\n"
            f"#pragma unroll\nfor (u32 e = 0; e < {each}u; ++e) v[e] = c + e < {x.columns}u ? from[e] : ({kind})0;\n"
            f"*(uint4*)(({kind}*)((char*)work + {x.at}) + (long long)row * {x.pitch} + c) = *(const uint4*)v;\n"
            "return; }\n"
            f"i -= {x.rows * x.chunks}u;"
        )
    return DeviceRole(
        threads=_THREADS,
        body="\n".join(lines),
        parameters=(
            *(Parameter(f"from{i}", Pointer("in", x.index)) for i, x in enumerate(matrices)),
            Parameter("work", Pointer("work", before), WRITTEN),
        ),
        grid=(-(-total // _THREADS), 1, 1),
        name="copy",
    )
