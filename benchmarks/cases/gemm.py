"""Products that `benchmarks.gpu_gemm_lt` measures, by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.gemm.epilogue import epilogue
from weft.gemm.spec import LAYOUTS, Gemm, thirteen, typed
from weft.ir.types import DType

HALF = (DType.F16, DType.BF16)
SQUARES = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
ODD = ((1000, 1000, 1000), (968, 1376, 2616), (4096, 4352, 4096), (7384, 7384, 7384), (1001, 1003, 1005))
LOGITS = ((128, 50257, 768), (1024, 50257, 768), (16, 50257, 4096))
SKINNY = tuple(
    (m, n, k)
    for m in (1, 8, 16, 64, 128)
    for n, k in ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336))
)
SOME = ((32, 4096, 4096), (256, 4096, 4096), (512, 4096, 11008))
DEEP = ((512, 512, 8192), (256, 256, 16384), (1024, 1024, 8192))
BLOCKS = ((2048, 768, 3072), (2048, 3072, 768), (3152, 3072, 768), (4096, 4096, 1024), (8192, 1024, 1024))
NOT_FUSED = ("bias_silu", "bias_gelu", "bias_gate")
FUSED = ("bias", "bias_relu", "bias_gelu_tanh", "bias_residual")


def _cases(sizes: Iterable[tuple[int, int, int]], layout: str, dtype: DType, text: str = "none") -> Iterable[Gemm]:
    return (Gemm(m, n, k, layout=layout, dtype=dtype, epilogue=epilogue(text)) for m, n, k in sizes)


def _squares(*sizes: int) -> list[tuple[int, int, int]]:
    return [(n, n, n) for n in sizes]


def _plain(dtype: DType) -> list[Gemm]:
    found = [replace(g, dtype=dtype, layout="nn") for g in thirteen(Gemm())]
    found += _cases(_squares(*SQUARES), "nt", dtype)
    found += _cases((*ODD, *LOGITS, *DEEP, *SOME, *BLOCKS), "nt", dtype)
    return found + list(_cases(SKINNY, "nt", dtype))


FLOAT8 = (
    *((n, n, n, "e4m3") for n in (1024, 2048, 4096, 8192)),
    *((m, n, k, "e4m3") for m, n, k in ((4096, 14336, 4096), (2048, 3072, 768), (512, 4096, 4096), (512, 512, 8192))),
    *((m, n, k, "e4m3") for m, n, k in ((128, 11008, 4096), (16, 4096, 4096))),
    (2048, 2048, 2048, "e4m3_e5m2"),
    (4096, 4096, 1024, "e5m2_e4m3"),
)


def _float8(cases: Iterable[tuple[int, int, int, str]], *, fast: bool) -> Iterable[Gemm]:
    return (typed(Gemm(m, n, k, layout="nt", fast=fast), types) for m, n, k, types in cases)


GROUPS: Mapping[str, tuple[Gemm, ...]] = {
    **{dtype.value: tuple(_plain(dtype)) for dtype in HALF},
    "layouts": tuple(
        g
        for layout in LAYOUTS
        for g in _cases(
            [(1024, 1024, 1024), (4096, 4096, 4096), (968, 1376, 2616), (16, 4096, 4096)], layout, DType.F16
        )
    ),
    "epilogues": tuple(
        g for text in NOT_FUSED for g in _cases((*BLOCKS, (1024, 1024, 1024), (16, 4096, 4096)), "nt", DType.F16, text)
    ),
    "fused": tuple(
        g for text in FUSED for g in _cases((BLOCKS[0], BLOCKS[1], (16, 4096, 4096)), "nt", DType.F16, text)
    ),
    "exhaustive": tuple(
        _cases(
            (
                *_squares(512, 1024, 1536, 2048, 4096),
                *((512, 256, 640), (512, 3072, 768), (512, 768, 3072), (968, 1376, 2616), (512, 512, 8192)),
                *((1, 4096, 4096), (16, 4096, 4096), (64, 11008, 4096), (128, 4096, 11008), (128, 50257, 768)),
                *(BLOCKS[0], BLOCKS[1], BLOCKS[2], BLOCKS[4], (1001, 1003, 1005)),
            ),
            "nt",
            DType.F16,
        )
    ),
    "f32": tuple(
        _cases((*_squares(512, 1024, 1536, 2048, 4096), (968, 1376, 2616), (512, 512, 8192)), "nn", DType.F32)
    ),
    "fp8": tuple(_float8(FLOAT8, fast=False)),
    "fp8_fast": tuple(_float8(FLOAT8[1:10:3], fast=True)),
    "tf32": tuple(
        _cases((*_squares(512, 1024, 1536, 2048, 4096), (968, 1376, 2616), (512, 512, 8192), *BLOCKS), "nt", DType.F32)
    ),
}
"""`f16` and `bf16`: the same products; `exhaustive`: for `--every`; `epilogues`: what cuBLASLt does not fuse; `f32`:
without TF32, `tf32`: with it; `fp8`: both sides move sums to f32, `fp8_fast`: neither."""
