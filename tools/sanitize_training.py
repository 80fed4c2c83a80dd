"""What `tools.sanitize` launches of training: kernels of gradients, a whole network's and a layer's at a time.

These kernels are no problems: they take addresses, and numbers as if they were addresses. So each case is a text with
named buffers and what is launched on them, in the order and with the blocks that `weft.nn` has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tools.sanitize_products import Case
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.training import Activation, Added, ChainConfig, Gradient, Network, forward_problem, gradient
from weft.generate.cuda.training import layered as layers
from weft.generate.cuda.training.entry import Entry
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

Argument = int | str | tuple[str, int]
"""A number, the name of a buffer, or that and bytes behind its start."""


@dataclass(frozen=True, slots=True)
class Step:
    """A launch."""

    entry: Entry
    blocks: int
    """At most as many as the entry has are launched."""
    arguments: tuple[Argument, ...]

    @property
    def grid(self) -> tuple[int, int, int]:
        """As `weft.nn` launches it."""
        return max(1, min(self.entry.max_ctas, self.blocks)), 1, 1


@dataclass(frozen=True, slots=True)
class Training:
    """Kernels of one text, one after the other."""

    text: str
    buffers: Mapping[str, TensorType | int]
    """Random values of a type, or so many bytes."""
    steps: tuple[Step, ...]

    @property
    def entries(self) -> list[str]:
        """Names."""
        return sorted({step.entry.name for step in self.steps})


class Started(Protocol):
    """`weft.device.cuda.driver.Function`."""

    def prepare(self, shared_bytes: int) -> None:
        """Allow so much dynamic shared memory."""
        ...

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[int],
        *,
        shared_bytes: int,
        dependent: bool,
        stream: int,
    ) -> None:
        """Put it on a stream."""
        ...


def run(case: Training, addresses: Mapping[str, int], function: Callable[[str], Started], stream: int) -> None:
    """All steps in order, with the buffers at these addresses."""
    for step in case.steps:
        found = function(step.entry.name)
        found.prepare(step.entry.shared_bytes)
        found.launch(
            step.grid,
            (step.entry.threads, 1, 1),
            [_word(x, addresses) for x in step.arguments],
            shared_bytes=step.entry.shared_bytes,
            dependent=True,
            stream=stream,
        )


def _word(x: Argument, addresses: Mapping[str, int]) -> int:
    if isinstance(x, int):
        return x
    name, behind = (x, 0) if isinstance(x, str) else x
    return addresses[name] + behind


RELU, SILU, NONE = Activation("relu"), Activation("silu"), Activation()


def network(widths: tuple[int, ...], act: Activation, *, given: DType = DType.BF16) -> Network:
    """Layers of equal activations but for the last one."""
    depth = len(widths) - 1
    return Network(widths, (act,) * (depth - 1) + (NONE,), (True,) * depth, DType.BF16, given)


NARROW = network((5, 24, 40, 3), SILU, given=DType.F32)


LAYERED = Network((37, 264, 300, 9), (SILU, RELU, SILU), (True,) * 3, DType.F16, DType.F32, DType.F32)


def skipping() -> Network:
    """Two given values, one read again, and a residual."""
    return Network(
        (16, 32, 32, 32, 8), (SILU, SILU, SILU, NONE), (True,) * 4, DType.BF16, DType.F32,
        sources=((0,), (1, -1), (2,), (3, 0)), added=(None, None, Added(2, before=False), None),
        parts=((0, 16), (16, 9)), row=25,
    )  # fmt: skip


def gradients(net: Network, rows: int, shape: ChainConfig, facts: GpuFacts, *, chunk: int = 1 << 30) -> Training:
    """Backward of a whole network as `weft.nn` runs it, `chunk` rows at a time."""
    g = gradient(net, facts, shape)
    assert isinstance(g, Gradient), g
    places = [f"p{i}" for i in range(len(net.slices()))]
    buffers: dict[str, TensorType | int] = {
        name: TensorType(net.masters or net.dtype, p.shape) for name, p in zip(places, net.slices(), strict=True)
    }
    row = net.input_dtype.itemsize * net.columns
    kept = 0 if g.inside else -(-g.kept_bytes(min(chunk, rows)) // 256) * 256
    buffers |= {
        "x": TensorType(net.input_dtype, (rows, net.columns)),
        "dy": TensorType(net.dtype, (rows, net.widths[-1])),
        "image": g.image_bytes,
        "dx": rows * row,
        "scratch": kept + g.partial_bytes,
        "gradients": 4 * net.elements,
    }
    steps = [Step(g.pack, g.pack.max_ctas, (*places, "image"))]
    shares = g.shares
    for start in range(0, rows, chunk):
        count = min(chunk, rows - start)
        groups = g.count(count) // g.tiles
        blocks = -(-groups * 32 // g.chain.threads) if g.inside else groups
        shares = max(1, min(g.chain.max_ctas, blocks)) if g.inside else shares
        x, dy, dx = ("x", start * row), ("dy", start * 2 * net.widths[-1]), ("dx", start * row)
        steps.append(Step(g.chain, blocks, (x, dy, "image", "scratch", dx, count)))
        if not g.inside:
            buffers_of = "scratch", ("scratch", kept), g.count(count), int(start > 0)
            steps.append(Step(g.wgrad, g.wgrad.max_ctas, buffers_of))
    steps.append(Step(g.finish, g.finish.max_ctas, (("scratch", kept), "gradients", shares)))
    return Training(g.text, buffers, tuple(steps))


def beside(net: Network, rows: int, facts: GpuFacts) -> Training:
    """What stands beside the products of training by layers; there are sums of rows for all but the last."""
    plan = layers.layered(net, facts.sms)
    places = [f"p{i}" for i in range(len(net.slices()))]
    buffers: dict[str, TensorType | int] = {
        name: TensorType(net.masters or net.dtype, p.shape) for name, p in zip(places, net.slices(), strict=True)
    }
    last = layers.padded(net.widths[-1])
    shares = min(plan.columns.max_ctas, 5)
    buffers |= {
        "image": plan.image.bytes,
        "x": TensorType(net.input_dtype, (rows, net.columns)),
        "dy": TensorType(net.dtype, (rows, net.widths[-1])),
        "kept": TensorType(net.dtype, (rows, net.widths[-1])),
        "dz": 2 * rows * last,
        "partial": 4 * plan.partial_floats * shares,
        "gradients": 4 * net.elements,
    }
    steps = [Step(plan.pack, plan.pack.max_ctas, (*places, "image"))]
    for number, (reads, entry) in enumerate(plan.joins.items()):
        columns = sum(layers.padded(net.of(v)) for v in reads)
        for v in reads:
            if v > 0:
                buffers[f"h{v}"] = TensorType(net.dtype, (rows, layers.padded(net.of(v))))
        buffers[f"joined{number}"] = 2 * rows * columns
        held = [f"h{v}" if v > 0 else "x" for v in layers.addressed(reads)]
        steps.append(Step(entry, -(-rows * columns // 2048), (*held, f"joined{number}", rows)))
    steps.append(Step(plan.ending, -(-rows * last // 2048), ("dy", "kept", "dz", rows)))
    for layer, width in enumerate(net.widths[1:]):
        columns = layers.padded(width)
        summed = int(layer < net.depth - 1)
        if summed:
            buffers[f"sums{layer}"] = TensorType(DType.F32, (rows, columns))
        of = f"sums{layer}" if summed else "dz"
        partial = ("partial", 4 * shares * plan.partial[layer])
        steps.append(Step(plan.columns, shares, (of, partial, rows, columns, summed)))
    steps.append(Step(plan.total, plan.total.max_ctas, ("partial", "gradients", shares)))
    return Training(plan.text, buffers, tuple(steps))


def trainings(facts: GpuFacts) -> Mapping[str, Training]:
    """Everything that is no problem, by label."""
    wide = network((40, 256, 144, 24), RELU)
    return {
        "training, in two parts": gradients(NARROW, 75, ChainConfig(1, 4, 1, 0), facts, chunk=48),
        "training, two tiles of a warp": gradients(NARROW, 75, ChainConfig(2, 4, 1, 0), facts),
        "training, sums inside": gradients(NARROW, 300, ChainConfig(1, 8, 1, 0, inside=True), facts),
        "training, streamed": gradients(wide, 50, ChainConfig(1, 8, 1, 4), facts),
        "training, skips": gradients(skipping(), 45, ChainConfig(1, 4, 1, 0), facts),
        "training, skips, sums inside": gradients(skipping(), 150, ChainConfig(1, 8, 1, 0, inside=True), facts),
        "training, beside the layers": beside(LAYERED, 70, facts),
        "training, beside the layers, skips": beside(skipping(), 33, facts),
    }


def layered(facts: GpuFacts) -> Mapping[str, Case]:
    """The products of a network that is trained a layer at a time; forward with skips in one kernel."""
    net, rows = network((37, 264, 136, 9), SILU), 130
    found: dict[str, Case] = {"training, forward": (forward_problem(skipping(), 150), None)}
    for p in (layers.forward(net, rows)[1], *layers.backward(net, rows, inputs=True, parameters=True, dtype=DType.F32)):
        if p.layer == 1 or p.role == "input":
            found[f"training, layer's {p.role}"] = (p.problem, None)
        if p.layer == 1 and p.role == "below":
            found["training, layer's below, with sums"] = with_sums(p, facts)
    return found


def with_sums(p: layers.Product, facts: GpuFacts) -> Case:
    """A product below that also sums its columns, which its problem has as one more output."""
    schedules = templates.schedules(p.problem, facts)
    assert not isinstance(schedules, Declined), schedules.reason
    found = [x for s in schedules if not isinstance(x := layers.with_column_sums(p, s), Declined)]
    assert found
    source, count = found[0]
    g = p.problem.graph
    extra = GraphBuilder()
    for i in g.inputs:
        extra.input(g.type_of(i))
    rows, columns = g.type_of(g.outputs[0]).shape
    outputs = [
        extra.broadcast(extra.scalar(0.0, t), shape)
        for t, shape in ((DType.BF16, (rows, columns)), (DType.F32, (count, columns)))
    ]
    graph = extra.build(outputs)
    row = Format.ROW
    return Problem(graph, source.sha256, (row,) * len(graph.inputs), (row, row)), source


def contents(t: TensorType | int, values: Callable[[TensorType, np.random.Generator], bytes]) -> bytes:
    """What a buffer holds before the first launch."""
    return bytes(t) if isinstance(t, int) else values(t, np.random.default_rng(0))
