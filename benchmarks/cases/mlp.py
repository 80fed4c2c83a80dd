"""Fully connected networks for `benchmarks.gpu_mlp`: what they are, what bounds them, and why a kernel is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from weft.fission.arithmetic import tanh
from weft.fission.gelu import gelu
from weft.fission.relu import relu
from weft.fission.sigmoid import sigmoid, silu
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

MEMORY, TENSOR = 4.8e12, 989.4e12
"""Bytes and operations per second by the data sheet."""
SMS = 132
TENSOR_PER_CLOCK = 4096
"""Operations of a multiprocessor's tensor cores in 16 bits."""
SPECIAL_PER_CLOCK = 16
ISSUED_PER_CLOCK = 128
CLOCK_GHZ = TENSOR / (SMS * TENSOR_PER_CLOCK) / 1e9
"""At which the data sheet's rate is reached."""
L2_BYTES = 60 << 20
TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}


class Sin(nn.Module):
    """sin(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise."""
        return torch.sin(x)


@dataclass(frozen=True, slots=True)
class Activation:
    """One function, by torch and as a graph."""

    module: Callable[[], nn.Module]
    build: Callable[[GraphBuilder, NodeId], NodeId | Declined]
    special: int
    """Exponentials and the like of a value at least."""
    issued: float
    """Instructions for a value between two products, counted in the compiled kernels of 4 x 128 in bf16."""


ACTIVATIONS = {
    "relu": Activation(nn.ReLU, relu, 0, 1.5),
    "silu": Activation(nn.SiLU, silu, 1, 3.5),
    "gelu": Activation(nn.GELU, gelu, 1, 5.0),
    "tanh": Activation(nn.Tanh, tanh, 1, 2.5),
    "sigmoid": Activation(nn.Sigmoid, sigmoid, 1, 5.5),
    "sin": Activation(Sin, lambda b, x: b.apply(Prim.SIN, x), 0, 15.0),
    "none": Activation(nn.Identity, lambda _, x: x, 0, 1.5),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One network; sizes are counts."""

    log_rows: int
    width: int
    depth: int
    act: str = "relu"

    @property
    def name(self) -> str:
        """For people."""
        return f"2^{self.log_rows} rows, {self.depth} x {self.width} {self.act}"

    @property
    def rows(self) -> int:
        """Of input and output."""
        return 1 << self.log_rows

    @property
    def flops(self) -> float:
        """Of the products."""
        return 2.0 * self.rows * self.width**2 * self.depth

    @property
    def values(self) -> float:
        """Results of all layers."""
        return float(self.rows * self.width * self.depth)

    @property
    def bytes(self) -> float:
        """Of input and output."""
        return 4.0 * self.rows * self.width

    @property
    def hot(self) -> bool:
        """Whether input and output may stay in the L2 cache."""
        return self.bytes <= 2 * L2_BYTES

    @property
    def floors_us(self) -> dict[str, float]:
        """Microseconds that each resource takes by itself at the data sheet's rates, data in memory."""
        special = ACTIVATIONS[self.act].special * self.values / (SPECIAL_PER_CLOCK * SMS * CLOCK_GHZ * 1e3)
        return {"memory": self.bytes / MEMORY * 1e6, "products": self.flops / TENSOR * 1e6, "special": special}

    @property
    def floor_us(self) -> float:
        """The largest of them."""
        return max(self.floors_us.values())

    @property
    def bound_us(self) -> float:
        """What no kernel can beat: data may be in the L2 cache, and functions polynomials."""
        floors = self.floors_us
        return floors["products"] if self.hot else max(floors["products"], floors["memory"])


CASES = (
    *(Case(18, w, 4) for w in (64, 128, 256, 32, 192, 16)),
    *(Case(12, w, 4) for w in (64, 128, 256, 32, 16, 192)),
    *(Case(18, w, 4, act) for w in (128, 192, 256) for act in ("silu", "gelu", "tanh")),
    *(Case(20, w, 4) for w in (64, 128, 32, 16, 256, 192)),
    *(Case(18, w, 8) for w in (64, 128, 256, 32, 192, 16)),
    *(Case(18, w, 4) for w in (320, 384, 512)),
    *(Case(18, w, d) for d in (2, 16) for w in (64, 128, 256, 32)),
    *(Case(16, w, 4) for w in (64, 128, 256)),
    *(Case(14, w, 4) for w in (64, 128, 256)),
    *(Case(22, w, 4) for w in (64, 16, 32, 128)),
    *(Case(20, w, 8) for w in (32, 64)),
    *(Case(18, 128, 4, act) for act in ("sigmoid", "sin")),
    Case(12, 64, 8), Case(12, 128, 8), Case(12, 64, 16), Case(22, 256, 4),
)  # fmt: skip
"""The most telling first: time may run out."""
COMPILED = (
    *(Case(18, w, 4) for w in (64, 128, 256, 32, 192, 16)),
    *(Case(12, w, 4) for w in (64, 128, 256, 32, 16)),
    *(Case(18, 128, 4, act) for act in ("silu", "gelu", "tanh")),
    *(Case(20, w, 4) for w in (64, 128, 32, 16)),
    Case(18, 64, 8), Case(18, 512, 4),
)  # fmt: skip
"""Asked of torch.compile, which takes seconds each."""
AUTOTUNED = (
    Case(18, 64, 4), Case(18, 128, 4), Case(18, 256, 4), Case(12, 128, 4), Case(18, 32, 4), Case(12, 64, 4),
    Case(18, 192, 4), Case(18, 128, 4, "gelu"), Case(20, 64, 4), Case(12, 256, 4), Case(20, 16, 4), Case(20, 128, 4),
)  # fmt: skip
"""Asked of its slow mode, the first K of them."""


def problem_of(c: Case, dtype: DType) -> Problem:
    """The network as a problem of the generator: x, then weight (in, out) and bias of each layer."""
    b = GraphBuilder()
    h = b.input(TensorType(dtype, (c.rows, c.width)))
    for _ in range(c.depth):
        w = b.input(TensorType(dtype, (c.width, c.width)), is_weight=True)
        bias = b.input(TensorType(dtype, (c.width,)), is_weight=True)
        y = b.apply(Prim.ADD, b.add(Prim.MATMUL, h, w), bias)
        h = cast("NodeId", ACTIVATIONS[c.act].build(b, y))
    graph = b.build([h])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


def network(c: Case, dtype: DType) -> nn.Sequential:
    """The same as a module, on the device."""
    torch.manual_seed(c.width + c.depth)
    layers: list[nn.Module] = []
    for _ in range(c.depth):
        layer = nn.Linear(c.width, c.width)
        nn.init.normal_(layer.weight, std=1.4 / c.width**0.5)
        nn.init.normal_(layer.bias, std=0.1)
        layers += [layer, ACTIVATIONS[c.act].module()]
    return nn.Sequential(*layers).to("cuda", TORCH[dtype]).eval()


@dataclass(frozen=True, slots=True)
class Ran:
    """How the fastest kernel of a case ran."""

    us: float
    clock_ghz: float
    """Of the multiprocessors right behind it."""
    launch_us: float
    """Of a kernel that does nothing, in the same kind of graph."""
    group: bool
    """Warpgroups multiply, or warps."""
    tile_rows: int
    """Rows that one of them takes from input to output."""
    at_once: int
    """So many of a multiprocessor."""
    registers: int
    """Of a thread."""
    weight_bytes: int
    """Read by every block for every tile of its own: weights that do not stay in shared memory."""


def busy(c: Case, ran: Ran) -> dict[str, float]:
    """Share of the time that each resource works, at the clock that was seen."""
    clocks = SMS * ran.clock_ghz * 1e3 * ran.us
    act = ACTIVATIONS[c.act]
    return {
        "products": c.flops / TENSOR_PER_CLOCK / clocks,
        "special functions": act.special * c.values / SPECIAL_PER_CLOCK / clocks,
        "instructions between products": act.issued * c.values / ISSUED_PER_CLOCK / clocks,
        "L2 cache" if c.hot else "memory": c.bytes / MEMORY * 1e6 / ran.us,
    }


def why(c: Case, ran: Ran, *, below: float = 0.6) -> str:
    """What keeps a kernel from its floor, from what it has and what is measured; empty where its share is not below."""
    if c.floor_us / ran.us >= below:
        return ""
    said: list[tuple[float, str]] = []
    if ran.launch_us > 0.15 * ran.us:
        said.append((ran.launch_us / ran.us, f"a launch of nothing takes {ran.launch_us:.1f} of {ran.us:.1f} us"))
    tiles = -(-c.rows // ran.tile_rows)
    places = SMS * ran.at_once
    if tiles < SMS:
        said.append((1 - tiles / SMS, f"{tiles} tiles of {ran.tile_rows} rows for {SMS} multiprocessors, each a chain"))
    elif (even := tiles / (math.ceil(tiles / places) * places)) < 0.85:
        turns = math.ceil(tiles / places)
        said.append((1 - even, f"{turns} turn{'s' * (turns > 1)} of {places} tiles at once are {even:.0%} full"))
    if ran.clock_ghz < 0.95 * CLOCK_GHZ:
        said.append((1 - ran.clock_ghz / CLOCK_GHZ, f"clock {ran.clock_ghz:.2f} of {CLOCK_GHZ:.2f} GHz (power)"))
    shares = sorted(busy(c, ran).items(), key=lambda x: -x[1])
    most, second = shares[0], shares[1]
    if tiles >= SMS and most[1] + second[1] > 0.7:
        said.append((second[1], f"{most[0]} and {second[0]} overlap in part"))
    if ran.weight_bytes:
        said.append((0.1, f"{ran.weight_bytes >> 10} KB of weights come from the L2 cache for each turn"))
    threads = ran.at_once * (128 if ran.group else 32)
    if tiles >= SMS and threads * ran.registers > 0.6 * 65536 and most[1] < 0.75:
        what = "warpgroups" if ran.group else "warps"
        said.append((0.05, f"{ran.registers} registers of a thread: {ran.at_once} {what} hide each other's waiting"))
    if tiles >= SMS and most[1] < 0.6:
        layer = ran.us * ran.clock_ghz * 1e3 / (math.ceil(tiles / places) * c.depth)
        own = ran.at_once * ran.tile_rows * 2 * c.width**2 / TENSOR_PER_CLOCK
        said.append((0.01, f"a layer of {ran.at_once} tiles at once takes {layer:.0f} clocks, its products {own:.0f}"))
    at = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.05)
    ranked = [text for _, text in sorted(said, reverse=True)]
    return "; ".join([*ranked, *([f"busy: {at}"] if at else [])])
