"""Problems that are attention, for the tests of its template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.fission.sdpa import sdpa
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

ROW = Format.ROW
F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def problem_of(b: GraphBuilder, y: NodeId) -> Problem:
    """All inputs and the result row-major."""
    graph = b.build([y])
    return Problem(graph, str(graph.nodes), (ROW,) * len(graph.inputs), (ROW,))


def plain(
    batch: Sequence[int],
    rows: int,
    keys: int,
    qk: int,
    head: int | None = None,
    *,
    dtype: DType = F16,
    mask: Sequence[int] | None = None,
    mask_dtype: DType = DType.BOOL,
    causal: bool = False,
    heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Problem:
    """sdpa of inputs (*batch, n, d); `heads` > 0: so many query heads share those of k and v."""
    b = GraphBuilder()
    many = (*batch[:-1], heads) if heads else tuple(batch)
    q = b.input(TensorType(dtype, (*many, rows, qk)))
    k = b.input(TensorType(dtype, (*batch, keys, qk)))
    v = b.input(TensorType(dtype, (*batch, keys, head or qk)))
    kinds = {"causal": causal, "enable_gqa": heads > 0, "scale": scale, "softcap": softcap}
    if mask is None:
        y = sdpa(b, q, k, v, **kinds)  # type: ignore[arg-type]
    else:
        y = sdpa(b, q, k, v, b.input(TensorType(mask_dtype, tuple(mask))), **kinds)  # type: ignore[arg-type]
    assert not isinstance(y, Declined), y.reason
    return problem_of(b, y)


@dataclass(frozen=True)
class Block:
    """Self-attention of a network: heads side by side in memory, before and after."""

    batch: int
    rows: int
    keys: int
    heads: int
    size: int
    dtype: DType = F16
    merged: bool = True
    """q, k and v are columns of one matrix; needs as many keys as rows."""
    bias: bool = True


def block(c: Block) -> Problem:
    """softmax(q kᵀ / √d) v as networks write it: 16-bit scores, softmax in f32, heads transposed in and out."""
    b = GraphBuilder()
    wide = c.heads * c.size
    if c.merged:
        assert c.rows == c.keys
        x = b.input(TensorType(c.dtype, (c.batch * c.rows, 3 * wide)))
        parts = [b.slice(x, (0, i * wide), (c.batch * c.rows, wide), (1, 1)) for i in range(3)]
    else:
        lengths = (c.rows, c.keys, c.keys)
        parts = [b.input(TensorType(c.dtype, (c.batch * n, wide))) for n in lengths]
    found = []
    for part, n in zip(parts, (c.rows, c.keys, c.keys), strict=True):
        y = b.reshape(part, (c.batch, n, wide))
        if c.bias:
            y = b.apply(Prim.ADD, y, b.input(TensorType(c.dtype, (wide,)), is_weight=True))
        found.append(b.reshape(y, (c.batch, n, c.heads, c.size)))
    q, v = (b.transpose(x, (0, 2, 1, 3)) for x in (found[0], found[2]))
    scores = b.add(Prim.MATMUL, q, b.transpose(found[1], (0, 2, 3, 1)))
    s = b.cast(b.apply(Prim.MUL, scores, c.size**-0.5), F32)
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, b.reduce(Prim.REDUCE_MAX, s, (3,))))
    weights = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (3,))), c.dtype)
    y = b.transpose(b.add(Prim.MATMUL, weights, v), (0, 2, 1, 3))
    return problem_of(b, y)


@dataclass(frozen=True)
class Heads:
    """Linear attention of an image: `parts` are concatenated along the channels, 3 * size of each head."""

    batch: int
    heads: tuple[int, ...]
    size: int
    height: int
    width: int
    dtype: DType = F16
    format: Format = Format.ROW
    inner: DType = F32


def linear(c: Heads) -> Problem:
    """((v | 1) relu(k)ᵀ) relu(q), the rows of v over the row of ones."""
    b = GraphBuilder()
    shape = (c.height, c.width)
    parts = [b.input(TensorType(c.dtype, (c.batch, n * 3 * c.size, *shape))) for n in c.heads]
    x = parts[0] if len(parts) == 1 else b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1))
    tokens, heads = c.height * c.width, sum(c.heads)
    x = b.reshape(x, (c.batch, heads, 3 * c.size, tokens))
    one = (c.batch, heads, c.size, tokens)
    q, k, v = (b.cast(b.slice(x, (0, 0, i * c.size, 0), one, (1,) * 4), c.inner) for i in range(3))
    q, k = (b.apply(Prim.MAX, y, 0.0) for y in (q, k))
    v = b.add(Prim.PAD, v, attrs=a.PadAttrs((0,) * 4, (0, 0, 1, 0), "constant", 1.0))
    y = b.add(Prim.MATMUL, b.add(Prim.MATMUL, v, b.transpose(k, (0, 1, 3, 2))), q)
    top = b.slice(y, (0,) * 4, one, (1,) * 4)
    below = b.slice(y, (0, 0, c.size, 0), (*one[:2], 1, tokens), (1,) * 4)
    y = b.cast(b.apply(Prim.DIV, top, b.apply(Prim.ADD, below, 1e-3)), c.dtype)
    graph = b.build([y])
    formats = (c.format,) * len(parts)
    return Problem(graph, f"{graph.nodes} {formats}", formats, (ROW,))
