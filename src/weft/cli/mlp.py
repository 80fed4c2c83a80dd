"""`weft mlp`: one fully connected network, fused and by its peers, forward or forward and backward."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def mlp_command(
    widths: Annotated[str, typer.Option(help="columns of the input and of each layer's result, comma separated")],
    rows: Annotated[int, typer.Option(min=1, help="rows of the input")] = 1 << 20,
    activation: Annotated[
        str, typer.Option(help="behind every layer but the last: relu, silu, sin, ...; or a list, one for each layer")
    ] = "relu",
    dtype: Annotated[
        Literal["bf16", "f16", "f32"], typer.Option(help="of input and parameters; f32: under autocast to bf16")
    ] = "bf16",
    against: Annotated[str, typer.Option(help="comma separated: eager, compile, cublas")] = "eager",
    backward: Annotated[bool, typer.Option("--backward", help="also gradients of input and parameters")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="replay each from a CUDA graph: what the device takes")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds of a few calls")] = 9,
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu")] = "cuda",
    format: Annotated[
        Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")
    ] = "text",
) -> None:
    """Time a fully connected network as one kernel against its peers.

    Example: weft mlp --widths 64,64,64,64 --activation relu --rows 1048576 --against eager,compile,cublas. `cublas` is
    one library call per layer, with bias and ReLU inside where the activation is that. Times are those of calls from
    Python, or of CUDA graphs, medians; errors are norms against float64 on the first rows.
    """
    from weft.cli.mlp_run import run

    run(widths, rows, activation, dtype, against, device, format, backward=backward, graph=graph, rounds=rounds)
