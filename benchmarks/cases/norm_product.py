"""A layer norm between two products on an NVIDIA GPU: shapes of networks, operands, and the check against float64."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.cases.norm import EPS, leaving, norm, normed, plain
from benchmarks.harness.gpu_time import median_us
from benchmarks.harness.kernel_cases import Kernel
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda.gemm.common.normed import PIECE
from weft.kernels.candidate import Problem

CHAINS = 24
TOLERANCE = 3e-3
"""Of the root mean square: f16 rounds to 5e-4, and the operand is rounded, too."""


class Case(NamedTuple):
    """Rows, length of a row, columns of the second product."""

    rows: int
    length: int
    columns: int
    act: bool = False
    stored: bool = False


CASES = {
    "vit1 qkv": Case(197, 768, 2304),
    "vit1 fc1": Case(197, 768, 3072, act=True),
    "bert1 qkv": Case(128, 768, 2304, stored=True),
    "bert1 fc1": Case(128, 768, 3072, act=True, stored=True),
    "vit16 qkv": Case(197 * 16, 768, 2304),
    "vit16 fc1": Case(197 * 16, 768, 3072, act=True),
    "bert16 qkv": Case(128 * 16, 768, 2304, stored=True),
    "bert16 fc1": Case(128 * 16, 768, 3072, act=True, stored=True),
    "segformer 1": Case(128 * 128, 32, 128),
    "segformer 2": Case(64 * 64, 64, 256),
    "segformer 3": Case(32 * 32, 160, 640),
    "segformer 4": Case(16 * 16, 256, 1024),
    "segformer16 1": Case(16 * 128 * 128, 32, 128),
    "segformer16 2": Case(16 * 64 * 64, 64, 256),
    "segformer16 3": Case(16 * 32 * 32, 160, 640),
}


def problems(c: Case) -> dict[str, Problem]:
    """What kernels are made of."""
    return {
        "first": leaving(c.rows, c.length, c.length, parts=False),
        "leave": leaving(c.rows, c.length, c.length),
        "norm": norm(c.rows, c.length),
        "second": plain(c.rows, c.length, c.columns, act=c.act),
        "parts": normed(c.rows, c.length, c.columns, "parts", act=c.act, stored=c.stored),
        "own": normed(c.rows, c.length, c.columns, "own", act=c.act, stored=c.stored),
    }


class Data:
    """Operands on the device, copies of the weights, and results in float64."""

    def __init__(self, c: Case) -> None:
        self.case = c
        generator = torch.Generator(device="cuda").manual_seed(int(time.time()))

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") * scale).half()

        k, n = c.length, c.columns
        self.a, self.residual = normal(c.rows, k), normal(1, c.rows, k)
        self.copies = max(2, min(CHAINS, -(-160_000_000 // (2 * k * (k + n)))))
        self.first = [(normal(k, k, scale=k**-0.5), normal(k)) for _ in range(self.copies)]
        self.vectors = (normal(k) + 1, normal(k))
        self.second = [(normal(k, n, scale=k**-0.5), normal(n)) for _ in range(self.copies)]
        self.x = self._first(0)
        self.y = self.norm_of(self.x)
        self.z = self._second(self.y)

    def _first(self, i: int) -> torch.Tensor:
        w, bias = self.first[i]
        return (self.a.double() @ w.double() + bias.double() + self.residual.double()).half()

    def norm_of(self, x: torch.Tensor) -> torch.Tensor:
        """Of values in f16, in float64, rounded as it is stored."""
        gamma, beta = (v.double() for v in self.vectors)
        return F.layer_norm(x.double(), x.shape[-1:], gamma, beta, EPS).half()

    def _second(self, y: torch.Tensor) -> torch.Tensor:
        w, bias = self.second[0]
        z = y.double() @ w.double() + bias.double()
        return F.gelu(z) if self.case.act else z

    def parts_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Mean and spread of the pieces of rows."""
        pieces = x.double().reshape(self.case.rows, -1, PIECE)
        mean = pieces.mean(-1, keepdim=True)
        return [mean.float(), (pieces - mean).square().sum(-1, keepdim=True).float()]

    def strange(self) -> torch.Tensor:
        """Rows that are hard to normalise: a large mean, no variance, NaN, infinity."""
        x = self.x.clone()
        x[0, 0] = 1000 + x[0, 0].sign()
        x[0, 1] = 3.25
        x[0, 2, 5] = math.nan
        x[0, 3, 7] = math.inf
        return x

    def operands(self, name: str, x: torch.Tensor, i: int) -> list[torch.Tensor]:
        """Inputs of a kernel in the order of its problem."""
        if name in ("first", "leave"):
            return [self.a, *self.first[i], self.residual]
        if name == "norm":
            return [x, *self.vectors]
        if name == "second":
            return [x, *self.second[i]]
        return [x, *self.vectors, *(self.given if name == "parts" else []), *self.second[i]]

    given: list[torch.Tensor]

    def results(self, name: str) -> list[torch.Tensor]:
        """Poisoned results of a kernel."""
        c = self.case
        x, z = (1, c.rows, c.length), (1, c.rows, c.columns)

        def empty(shape: Sequence[int], dtype: torch.dtype = torch.half) -> torch.Tensor:
            return torch.full(tuple(shape), math.nan, dtype=dtype, device="cuda")

        if name in ("first", "norm"):
            return [empty(x)]
        if name == "leave":
            piece = (c.rows, c.length // PIECE, 1)
            return [empty(x), empty(piece, torch.float), empty(piece, torch.float)]
        if name == "second":
            return [empty(z)]
        return [empty(z), empty(x)] if c.stored else [empty(z)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact result."""
    want = want.double().reshape(got.shape)
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


class Bound:
    """A kernel for each copy of the weights."""

    def __init__(self, k: Kernel, data: Data, name: str, x: torch.Tensor, outs: list[torch.Tensor]) -> None:
        s = k.source
        bound = BoundCuda(s, k.cubin.path)
        stream = torch.cuda.current_stream().cuda_stream
        work = torch.empty(max(s.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        state = torch.zeros(max(s.state_bytes, 1), dtype=torch.uint8, device="cuda")
        self.kept: list[object] = [bound, work, state, x, outs]
        self.ready: list[Callable[[int], None]] = []
        for i in range(data.copies if s.packed_bytes else 1):
            inputs = data.operands(name, x, i)
            packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in s.packed_bytes]
            at = [v.data_ptr() for v in inputs]
            places = [v.data_ptr() for v in packed]
            bound.pack(at, places, stream)
            out = [v.data_ptr() for v in outs]
            self.ready.append(bound.prepare(Addresses(at, out, places, work.data_ptr(), state.data_ptr())))
            self.kept += [inputs, packed]
        torch.cuda.synchronize()

    def __call__(self, i: int) -> None:
        self.ready[i % len(self.ready)](torch.cuda.current_stream().cuda_stream)


def timed(chain: Callable[[int], object]) -> float:
    """Microseconds of one chain of `CHAINS` in a graph."""
    count = 0

    def launch() -> None:
        nonlocal count
        chain(count)
        count += 1

    return median_us(launch, launches=CHAINS, rounds=15)


def checked(data: Data, name: str, k: Kernel) -> tuple[float, list[str]]:
    """Microseconds, and what is wrong."""
    wrong = []
    x = data.y if name == "second" else data.x
    data.given = data.parts_of(data.x)
    outs = data.results(name)
    one = Bound(k, data, name, x, outs)
    one(0)
    torch.cuda.synchronize()
    if name == "leave":
        wants = [data.x, *data.parts_of(outs[0])]
    else:
        wants = {"first": [data.x], "norm": [data.y], "second": [data.z]}.get(name, [data.z, data.y])
    for i, (got, want) in enumerate(zip(outs, wants, strict=False)):
        e = error(got, want)
        if not e <= (1e-5 if i and name == "leave" else TOLERANCE):
            wrong.append(f"result {i} errs by {e:.3g}")
    first = [v.clone() for v in outs]
    one(0)
    torch.cuda.synchronize()
    if any(not torch.equal(u, v) for u, v in zip(first, outs, strict=True)):
        wrong.append("other bits the second time")
    us = math.inf if wrong else timed(one)
    if name in ("parts", "own", "norm") and not wrong:
        strange = data.strange()
        data.given = data.parts_of(strange)
        outs = data.results(name)
        Bound(k, data, name, strange, outs)(0)
        torch.cuda.synchronize()
        y = data.norm_of(strange)
        want = y if name == "norm" else data._second(y)
        for row in (0, 1):
            e = error(outs[0][0, row], want[0, row])
            if not e <= 2 * TOLERANCE:
                wrong.append(f"row {row} errs by {e:.3g}")
        if not bool(outs[0][0, 2:4].isnan().all()) or bool(outs[0][0, 4:].isnan().any()):
            wrong.append("NaN is not where it belongs")
    return us, wrong
