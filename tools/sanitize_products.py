"""What `tools.sanitize` launches of products: one kernel for each way in which warps and blocks work together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.fission.quantize import matmul_integer
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import Gemm, typed
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

Case = tuple[Problem, Schedule | CudaSource | None]


def posed(b: GraphBuilder, y: NodeId, *formats: Format) -> Problem:
    """The cleaned graph of one result, with its text as its key; the last format is the result's."""
    graph = clean_up(b.build([y]), strict=False).graph
    return Problem(graph, f"{graph} {[f.value for f in formats]}", formats[:-1], formats[-1:])


def gemm(m: int, n: int, k: int, types: str = "f16", layout: str = "nt", text: str = "none") -> Problem:
    """A product as `weft gemm` poses it."""
    return typed(Gemm(m, n, k, layout=layout, epilogue=epilogue(text)), types).problem()


def tma(bm: int, bn: int, *, stages: int = 3, **changes: int | bool) -> Schedule:
    """A schedule of the tma template."""
    known = {"panel": 64, "consumers": 1, "pingpong": False, "split": 1, "persistent_ctas": 0, "min_ctas": 1} | changes
    return TmaConfig(bm=bm, bn=bn, stages=stages, box=(1, 1, bm), **known).schedule()  # type: ignore[arg-type]


def blocks(bm: int, bn: int, wk: int = 1, split: int = 1, template: str = "mma", *, cluster: bool = False) -> Schedule:
    """A schedule of the template without TMA."""
    return mma.MmaConfig(bm, bn, 64, 16, 16, wk, 3, split, cluster).schedule(template)


def integers() -> Problem:
    """Bytes times bytes, summed in i32."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.I8, (70, 160))), b.input(TensorType(DType.I8, (160, 48)), is_weight=True)
    y = matmul_integer(b, x, w)
    assert not isinstance(y, Declined), y
    return posed(b, y, *[Format.ROW] * 3)


def attention(rows: int, keys: int, size: int) -> Problem:
    """Softmax of q kᵀ times v, for two heads."""
    b = GraphBuilder()
    q, k, v = (b.input(TensorType(DType.F16, (2, n, size))) for n in (rows, keys, keys))
    s = b.cast(b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), DType.F32)
    s = b.apply(Prim.MUL, s, size**-0.5)
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, b.reduce(Prim.REDUCE_MAX, s, [2])))
    p = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [2])), DType.F16)
    return posed(b, b.add(Prim.MATMUL, p, v), *[Format.ROW] * 4)


def upsampled() -> Problem:
    """relu(convolution) of an image whose rows and columns are doubled, then reflected at the border."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (1, 32, 9, 9)))
    for axis in (2, 3):
        x = b.add(Prim.GATHER, x, b.constant((np.arange(18) // 2).astype(np.int64)), attrs=a.GatherAttrs(axis))
    x = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    w = b.input(TensorType(DType.F16, (24, 32, 3, 3)), is_weight=True)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    return posed(b, b.apply(Prim.MAX, y, 0.0), Format.LAST, Format.ROW, Format.LAST)


def products() -> Mapping[str, Case]:
    """Problems by label; without a schedule the generator's own first ones of every kind are launched."""
    return {
        "gemm, nn, bias and gelu": (gemm(200, 136, 328, layout="nn", text="bias_gelu"), tma(64, 64)),
        "gemm, tt, two warpgroups": (gemm(264, 136, 328, layout="tt"), tma(128, 64, consumers=2)),
        "gemm, warpgroups in turn": (
            gemm(264, 136, 328, text="bias_residual"),
            tma(64, 64, consumers=2, pingpong=True, persistent_ctas=3),
        ),
        "gemm, split over a cluster": (gemm(130, 72, 1032), tma(64, 64, split=4)),
        "gemm, even shares": (gemm(200, 136, 520, text="bias_relu"), tma(64, 64, stream_k=True, persistent_ctas=5)),
        "gemm, pair below": (gemm(300, 136, 264), tma(64, 64, multicast=1)),
        "gemm, two by two": (gemm(300, 264, 264), tma(64, 64, multicast=3)),
        "gemm, four below": (gemm(300, 136, 264), tma(64, 64, multicast=4)),
        "gemm, odd addresses": (gemm(129, 255, 1001), tma(64, 64)),
        "gemm, e4m3": (gemm(200, 136, 512, "e4m3"), tma(64, 64, two_level=1)),
        "gemm, e4m3 and e5m2, as halves": (gemm(70, 136, 256, "e4m3_e5m2"), blocks(32, 32)),
        "gemm, tf32": (gemm(200, 136, 328, "f32"), tma(64, 64)),
        "gemm, bf16 by mma, split": (gemm(70, 72, 1032, "bf16", "tn"), blocks(32, 32, 2, 4)),
        "gemm, mma, split over a cluster": (gemm(70, 72, 1032), blocks(32, 32, 1, 4, cluster=True)),
        "gemm, odd sizes by mma": (gemm(77, 33, 45, layout="tt"), blocks(32, 32)),
        "gemm, f32 as it lies": (gemm(132, 68, 264, "f32", "nn"), None),
        "gemm, few rows": (gemm(3, 200, 512), None),
        "gemm, bytes": (integers(), blocks(32, 32)),
        "attention": (attention(100, 200, 64), None),
        "upsampled 3x3": (upsampled(), None),
    }
