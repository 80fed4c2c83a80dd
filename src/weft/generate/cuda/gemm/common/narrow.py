"""Products of 8-bit integers on tensor cores: both operands are widened to i32 by the problem, the sums are i32.

The same for 8-bit floats, which are widened to f32 and summed in it.
A problem whose contraction reads nothing but widened inputs is matched as if these were wide in memory; what is loaded
are the bytes themselves. Sums travel through the registers and shared memory of the other templates as bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem

BYTES = frozenset({DType.I8, DType.U8})
FLOATS = frozenset({DType.F8E4M3, DType.F8E5M2})
SHORT = {DType.I8: "s8", DType.U8: "u8"}
"""Names of the instructions for integers."""
SUMS = """W_FN void w_add_bits(float& sum, float x) { sum = __int_as_float(__float_as_int(sum) + __float_as_int(x)); }
"""
"""The function that adds sums of integers that travel as bits."""
_RENAMING = frozenset({Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST, Prim.SLICE})
"""What may stand between an operand and the input that it is."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A problem without its widening casts, and the types in memory of the inputs that had one."""

    problem: Problem
    types: Mapping[int, DType]
    """By position among the inputs."""


def narrow(problem: Problem) -> Narrow | None:
    """The problem as one of i32, or None where its contraction is another."""
    return _narrow(problem, DType.I32, BYTES)


def narrow_floats(problem: Problem) -> Narrow | None:
    """The problem as one of f32 whose operands are 8-bit floats, or None where its contraction is another."""
    return _narrow(problem, DType.F32, FLOATS)


def _narrow(problem: Problem, wide: DType, types_: frozenset[DType]) -> Narrow | None:
    g = problem.graph
    products = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR]
    if len(products) != 1 or g.type_of(products[0]).dtype is not wide:
        return None
    paths = [_path(g, operand, types_) for operand in g.nodes[products[0]].inputs]
    ends = {path[-1] for path in paths if path}
    users, inside = g.users(), {*products, *(node for path in paths for node in path)}
    read_elsewhere = any(not inside.issuperset(users[node]) or node in g.outputs for path in paths for node in path)
    if len(ends) != len(paths) or read_elsewhere:
        return None
    types = {i: g.type_of(x).dtype for i, x in enumerate(g.inputs) if x in ends}
    casts = {node for path in paths for node in path if g.nodes[node].prim is Prim.CAST}
    graph = _as_wide(g, ends, casts, wide)
    return Narrow(Problem(graph, problem.key, problem.input_formats, problem.output_formats), types)


def _path(g: Graph, node: NodeId, types: frozenset[DType]) -> list[NodeId]:
    """From an operand to the input of 8 bits that it is, but for its type and the order of its elements; or nothing."""
    path = [node]
    while g.nodes[node].prim in _RENAMING or g.nodes[node].prim is Prim.CAST:
        node = g.nodes[node].inputs[0]
        path.append(node)
    casts = [x for x in path if g.nodes[x].prim is Prim.CAST]
    narrow_ = g.nodes[node].prim is Prim.INPUT and g.type_of(node).dtype in types
    return path if narrow_ and len(casts) == 1 else []


def _as_wide(g: Graph, inputs: set[NodeId], casts: set[NodeId], wide: DType) -> Graph:
    """The graph with these inputs in i32 or f32 and without the casts that widen them."""
    b = GraphBuilder()
    new: dict[NodeId, NodeId] = {}
    for i, node in enumerate(g.nodes):
        if isinstance(node.attrs, a.InputAttrs):
            type_ = TensorType(wide, node.type.shape) if i in inputs else node.type
            new[i] = b.input(type_, is_weight=node.attrs.is_weight)
        elif isinstance(node.attrs, a.ConstantAttrs):
            new[i] = b.adopt_constant(node.attrs.digest, g.constant(i), node.type)
        elif i in casts:
            new[i] = new[node.inputs[0]]
        else:
            new[i] = b.add(node.prim, *(new[j] for j in node.inputs), attrs=node.attrs)
    return b.build([new[o] for o in g.outputs])


def carried(sum_: str, *, integers: bool) -> str:
    """C text of a sum in a register of its own type as the float that the end of a tile works with."""
    return f"__int_as_float({sum_})" if integers else sum_


def added(to: str, x: str, *, integers: bool) -> str:
    """Statement: a part of a sum to another."""
    return f"w_add_bits({to}, {x});" if integers else f"{to} += {x};"


def instruction(kind: str, columns: int) -> str:
    """The function that multiplies 64 rows by 32 of the sum by `columns` on Hopper; tests bring their own.

    Sums are i32 in registers of their own type: to move them as bits would wait for products that are under way.
    Source: PTX ISA, wgmma.mma_async with integer operands.
    """
    return wgmma(f"w_product_{kind}_00", columns, f"{kind[:2]}.{kind[2:]}", k=32, sums="s32")


def functions(kind: str) -> str:
    """The function that adds a product of fragments to sums that are the bits of integers; tests bring their own.

    `kind` is `s8` or `u8` for the left operand, then for the right one.
    """
    left, right = kind[:2], kind[2:]
    return f"""#ifndef W_EMULATED
W_FN void w_mma_{kind}(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {{
  int s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = __float_as_int(d[i]);
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.{left}.{right}.s32"
               " {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"
               : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __int_as_float(s[i]);
}}
#endif
"""


def dot(kind: str) -> str:
    """The function that adds the product of 16 bytes of each operand; tests bring their own of 4."""
    left, right = ("s32" if x == "s8" else "u32" for x in (kind[:2], kind[2:]))
    words = "\n".join(f"  c = w_dot_word_{kind}(a.{f}, b.{f}, c);" for f in "xyzw")
    return f"""#ifndef W_EMULATED
W_FN int w_dot_word_{kind}(u32 a, u32 b, int c) {{
  int d;
  asm("dp4a.{left}.{right} %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}}
#endif
W_FN int w_dot_{kind}(uint4 a, uint4 b, int c) {{
{words}
  return c;
}}
"""
