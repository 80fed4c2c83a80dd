"""Matrix products of well-known transformers: our template beside MKL and oneDNN (through PyTorch) and ONNX Runtime.

    python -m lab.cpp_products [--threads 2] [--seconds 0.3] [--keep 4] [--only bert]

fp32, constant weights, a bias and possibly GELU behind the product in all of them. Each row gives the least time of
many runs, all candidates in turn, so that a busy machine hits them alike. `share` is of the measured multiply-add peak.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.cpp_conv import Ours, in_session, least, peak_flops
from weft.device.facts import CpuFacts, cpu_facts
from weft.device.toolchain import HostCompiler, find_compiler
from weft.generate.cpp import templates
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource


@dataclass(frozen=True)
class Product:
    """x[m, k] @ w[n, k].T + bias, then GELU by the error function where asked."""

    m: int
    k: int
    n: int
    gelu: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}" + " gelu" * self.gelu


NETWORKS: dict[str, tuple[Product, ...]] = {
    "bert": (Product(128, 768, 768), Product(128, 768, 2304), Product(128, 768, 3072, True), Product(128, 3072, 768)),
    "vit": (Product(197, 768, 768), Product(197, 768, 2304), Product(197, 768, 3072, True), Product(197, 3072, 768)),
    "gpt2": (Product(64, 768, 768), Product(64, 768, 2304), Product(64, 768, 3072, True), Product(64, 3072, 768)),
    "swin": (Product(784, 192, 576), Product(784, 192, 768, True), Product(784, 768, 192), Product(196, 1536, 384)),
}  # fmt: skip


def problem_of(product: Product) -> Problem:
    """The weight lies transposed, as a linear layer has it."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (product.m, product.k)))
    w = b.input(TensorType(DType.F32, (product.n, product.k)), is_weight=True)
    bias = b.input(TensorType(DType.F32, (product.n,)), is_weight=True)
    y = b.apply(Prim.ADD, b.add(Prim.MATMUL, x, b.transpose(w, (1, 0))), bias)
    if product.gelu:
        erf = b.apply(Prim.ERF, b.apply(Prim.MUL, y, 0.5**0.5))
        y = b.apply(Prim.MUL, b.apply(Prim.MUL, y, 0.5), b.apply(Prim.ADD, erf, 1.0))
    return Problem(b.build([y]), str(product), (Format.ROW,) * 3, (Format.ROW,))


def libraries(product: Product, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> dict[str, Callable[[], object]]:
    """MKL, its packed form, and oneDNN with packed weights."""
    import torch

    xt, wt, bt = torch.tensor(x), torch.tensor(w), torch.tensor(bias)

    def post(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(y) if product.gelu else y

    onednn = torch.ops.mkldnn._reorder_linear_weight(wt, product.m)
    name = "gelu" if product.gelu else "none"
    found: dict[str, Callable[[], object]] = {
        "mkl": lambda: post(torch.nn.functional.linear(xt, wt, bt)),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(xt, onednn, bt, name, [], "none" if product.gelu else ""),
    }
    if hasattr(torch.ops.mkl, "_mkl_linear"):
        packed = torch.ops.mkl._mkl_reorder_linear_weight(wt, product.m)
        found["packed"] = lambda: post(torch.ops.mkl._mkl_linear(xt, packed, wt, bt, product.m))
    return found


def ort(product: Product, x: np.ndarray, w: np.ndarray, bias: np.ndarray, threads: int) -> Callable[[], object]:
    """A session with the product, its bias and activation."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["p" if product.gelu else "y"])]
    if product.gelu:
        nodes.append(helper.make_node("Gelu", ["p"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [product.m, product.n])],
        [numpy_helper.from_array(np.ascontiguousarray(w.T), "w"), numpy_helper.from_array(bias, "b")],
    )
    return in_session(graph, {"x": x}, threads, opset=20)


def row(product: Product, facts: CpuFacts, compiler: HostCompiler, cache: Path, seconds: float, keep: int) -> str:
    """Measure one product: microseconds of each, GFLOP/s of the best of ours, and its schedule."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((product.m, product.k)).astype(np.float32)
    w = (rng.standard_normal((product.n, product.k)) / product.k**0.5).astype(np.float32)
    bias = rng.standard_normal(product.n).astype(np.float32)
    problem = problem_of(product)
    found = templates.schedules(problem, facts)
    if isinstance(found, Declined):
        return f"{product!s:22} declined: {found.reason}"
    ours = []
    for schedule in found[:keep]:
        source = templates.emit(problem, schedule)
        assert isinstance(source, KernelSource), source
        ours.append(Ours(compiler, cache, source, [x, w, bias], product.m * product.n))
    others = {**libraries(product, x, w, bias), "ORT": ort(product, x, w, bias, facts.threads)}
    times = least([*ours, *others.values()], seconds)
    mine, theirs = times[: len(ours)], times[len(ours) :]
    best = min(mine)
    text = "".join(f" {name} {t * 1e6:7.0f}" for name, t in zip(others, theirs, strict=True))
    each = " ".join(f"{t * 1e6:.0f}" for t in mine)
    params = " ".join(f"{k}={v}" for k, v in found[mine.index(best)].params if k not in ("algorithm", "template"))
    return f"{product!s:22} ours {best * 1e6:7.0f} ({product.flops / best / 1e9:4.0f} GFLOP/s){text}  [{each}] {params}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.3, help="per candidate")
    parser.add_argument("--keep", type=int, default=4, help="schedules of ours per product")
    parser.add_argument("--only", default="", help="a network, or several with commas")
    args = parser.parse_args(arguments)
    compiler = find_compiler()
    if isinstance(compiler, Declined):
        raise SystemExit(compiler.reason)
    with tempfile.TemporaryDirectory() as folder:
        facts = cpu_facts(Path(folder))
        if args.threads:
            facts = replace(facts, threads=args.threads)
        torch.set_num_threads(facts.threads)
        peak = peak_flops(compiler, facts.threads)
        print(f"{facts.name}: {facts.threads} threads, {facts.simd_bytes * 8}-bit, peak {peak / 1e9:.0f} GFLOP/s")
        for name in args.only.split(",") if args.only else NETWORKS:
            for product in NETWORKS[name]:
                print(f"{name:6} {row(product, facts, compiler, Path(folder), args.seconds, args.keep)}", flush=True)


if __name__ == "__main__":
    main()
