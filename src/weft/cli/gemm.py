"""`weft gemm`: the fastest kernel for one product, or for a list of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Tokens = Annotated[
    list[str],
    typer.Argument(metavar="[TOKEN ...] | run [LIST]", help="e.g. MN=1024 K=2048 t=64, or `run problems.txt`"),
]


def gemm_command(
    tokens: Tokens = [],  # noqa: B006
    layout: Annotated[str, typer.Option(help="nn, nt, tn or tt: t for an operand whose transpose is in memory")] = "nn",
    dtype: Annotated[str, typer.Option(help="f16, bf16, f32, e4m3, e5m2, e4m3_e5m2, e5m2_e4m3 or i8")] = "f16",
    epilogue_text: Annotated[
        str, typer.Option("--epilogue", help="a name such as bias_relu, or an expression such as relu(acc + bias)")
    ] = "none",
    against: Annotated[
        str,
        typer.Option(
            help="cublas: compare with cuBLASLt's best of 16 algorithms; cutlass: with the best of ten kernels of"
            " CUTLASS, which nvcc builds first"
        ),
    ] = "",
    constant: Annotated[
        bool, typer.Option("--constant", help="the right operand is constant: it may be repacked once")
    ] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="products of f32 may round their operands to TF32")] = False,
    fast_f8: Annotated[
        bool, typer.Option("--fast-f8", help="sums of products of 8-bit floats may stay in the tensor cores")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="most configurations of an exhaustive search")] = 256,
    output: Annotated[Path, typer.Option("-o", "--output", help="where the folders go")] = Path("outputs"),
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
    dry: Annotated[
        bool, typer.Option("--dry-run", help="no GPU: list configurations, compile the best few for sm_80 and sm_90a")
    ] = False,
    format: Annotated[Literal["text", "json"], typer.Option(help="text for people, json for programs")] = "text",
) -> None:
    """Search the fastest kernel of a product of matrices, with what follows it, and write a folder about it.

    A token is letters of M, N, K, t and O, then = and a number. t: candidates at most; O: 0 Weft's templates, 1 the
    library, 2 exhaustive. Example: weft gemm MN=1024 K=2048 t=64 --layout nt --epilogue bias_gelu --against cublas.
    `weft gemm run LIST` takes a file with a problem per line; without LIST it takes thirteen well-known shapes.
    """
    from weft.cli.gemm_run import run

    run(
        tokens, layout, dtype, epilogue_text, against, limit, output, device, format, constant=constant, tf32=tf32,
        fast_f8=fast_f8, dry=dry,
    )  # fmt: skip
