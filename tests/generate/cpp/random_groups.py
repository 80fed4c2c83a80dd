"""Random groups for the C++ generator: the shared random graphs, widened by what only kernels must get right."""

from __future__ import annotations

import numpy as np
from tests.ir.random_graphs import STEPS, _Maker

from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 18, 31, 33)


class _Widened(_Maker):
    """Also windows, reflect and edge pads, gathers, arg reductions, norms; larger and odder shapes."""

    def unary(self, x: int) -> int:
        if self.dtype.is_float:
            return super().unary(x)
        return self.builder.add(Prim.NEG if self.rng.random() < 0.5 else Prim.ABS, x)

    def window(self, x: int) -> int:
        shape = self.shape(x)
        rank = len(shape)
        if rank < 1:
            return x
        k = int(self.rng.integers(1, min(rank, 2) + 1))
        if any(n < 2 for n in shape[-k:]):
            return x
        kernel = tuple(int(self.rng.integers(1, min(n, 5) + 1)) for n in shape[-k:])
        pads = tuple(int(self.rng.integers(0, kk // 2 + 1)) for kk in kernel)
        strides = tuple(int(s) for s in self.rng.integers(1, 3, k))
        pairs = zip(kernel, shape[-k:], strict=True)
        dilations = tuple(int(self.rng.choice([1, 1, 2])) if kk * 2 <= n else 1 for kk, n in pairs)
        prim = Prim.WINDOW_MAX if self.rng.random() < 0.5 else Prim.WINDOW_SUM
        return self.builder.add(prim, x, attrs=a.WindowAttrs(kernel, strides, pads, pads, dilations))

    def mirror(self, x: int) -> int:
        shape = self.shape(x)
        mode: a.PadMode = "reflect" if self.rng.random() < 0.5 else "edge"
        lo, hi = (tuple(int(self.rng.integers(0, min(3, n))) if n > 1 else 0 for n in shape) for _ in range(2))
        return self.builder.add(Prim.PAD, x, attrs=a.PadAttrs(lo, hi, mode))

    def gather(self, x: int) -> int:
        shape = self.shape(x)
        if not shape:
            return x
        axis = int(self.rng.integers(len(shape)))
        rank = int(self.rng.integers(0, 3))
        data = self.rng.integers(-1, shape[axis] + 1, tuple(self.rng.integers(1, 5, rank)))  # also outside: clamped
        dtype = np.int64 if self.rng.random() < 0.5 else np.int32
        i = self.builder.constant(np.asarray(np.clip(data, 0, shape[axis] - 1)).astype(dtype))
        return self.builder.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(axis))

    def take_along(self, x: int) -> int:
        shape = self.shape(x)
        if not shape:
            return x
        axis = int(self.rng.integers(len(shape)))
        order = self.builder.add(Prim.ARGMAX, x, attrs=a.ArgAttrs(axis))
        return self.builder.add(Prim.TAKE_ALONG, x, order, attrs=a.GatherAttrs(axis))

    def arg(self, x: int) -> int:
        shape = self.shape(x)
        if not shape:
            return x
        prim = Prim.ARGMAX if self.rng.random() < 0.5 else Prim.ARGMIN
        y = self.builder.add(prim, x, attrs=a.ArgAttrs(int(self.rng.integers(len(shape)))))
        return self.builder.cast(y, self.dtype)

    def iota(self, x: int) -> int:
        shape = self.shape(x)
        if not shape:
            return x
        i = self.builder.iota(shape, int(self.rng.integers(len(shape))), self.dtype)
        return self.builder.add(Prim.ADD, x, i)

    def softmax(self, x: int) -> int:
        shape, b = self.shape(x), self.builder
        if not shape:
            return x
        axes = [int(self.rng.integers(len(shape)))]
        e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, axes)))
        return b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, axes))

    def norm(self, x: int) -> int:
        shape, b = self.shape(x), self.builder
        axes = [k for k in range(len(shape)) if self.rng.random() < 0.5]
        n = float(np.prod([shape[k] for k in axes], initial=1.0))
        d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, axes), n))
        var = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), axes), n)
        return b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, var, 1.0)))

    def split(self, x: int) -> int:
        """A reshape that cuts a dimension in two."""
        shape = list(self.shape(x))
        if len(shape) >= 5:
            return x
        for k, n in enumerate(shape):
            for f in (2, 3):
                if n % f == 0 and n > f and self.rng.random() < 0.6:
                    pair = [f, n // f] if self.rng.random() < 0.5 else [n // f, f]
                    return self.builder.reshape(x, (*shape[:k], *pair, *shape[k + 1 :]))
        return x


MORE = ("window", "mirror", "gather", "take_along", "arg", "iota", "softmax", "norm", "norm", "split", "pad")
KINDS = (*(s for s in STEPS if s != "matmul"), *MORE)
EXACT = (
    "binary", "select", "reduce", "broadcast", "reshape", "transpose", "slice", "concat", "pad", "window", "mirror",
    "gather", "take_along", "arg", "iota", "split",
)  # fmt: skip


def random_problem(seed: int, dtype: DType = DType.F32, *, num_steps: int = 9) -> Problem | None:
    """A problem with random formats; None when chance gave a graph without work."""
    make = _Widened(seed, dtype, constants=True)
    rng = make.rng
    for k in range(int(rng.integers(1, 3))):
        rank = int(rng.choice([1, 2, 3, 4, 4]))
        shape = [int(rng.choice(SIZES)) for _ in range(rank)]
        while np.prod(shape) > 20_000:
            shape[int(rng.integers(rank))] = int(rng.integers(1, 4))
        make.pool.append(make.builder.input(TensorType(dtype, tuple(shape)), f"x{k}"))
    kinds = KINDS if dtype.is_float else EXACT
    for _ in range(int(rng.integers(1, num_steps + 1))):
        node = getattr(make, kinds[rng.integers(len(kinds))])(make.pick())
        if make.builder.type_of(node).size <= 30_000 and len(make.shape(node)) <= 6:
            make.pool.append(node)
    wanted = [make.pool[-1], *(make.pick() for _ in range(int(rng.integers(0, 2))))]
    draft = make.builder.build(wanted)
    free = (Category.SOURCE, Category.VIEW, Category.BROADCAST)
    outputs = list(dict.fromkeys(n for n in wanted if CATEGORY[draft.nodes[n].prim] not in free))
    if not outputs:
        return None
    graph: Graph = make.builder.build(outputs)

    def pick(shape: tuple[int, ...]) -> Format:
        return Format.LAST if len(shape) == 4 and rng.random() < 0.5 else Format.ROW

    return Problem(
        graph,
        f"random-{seed}-{dtype.value}",
        tuple(pick(graph.type_of(n).shape) for n in graph.inputs),
        tuple(pick(graph.type_of(n).shape) for n in graph.outputs),
    )
