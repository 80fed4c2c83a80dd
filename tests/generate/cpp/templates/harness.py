"""Builds and runs kernels of the templates between guard zones; compares them with float64 and a sequential f32 sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from tests.typed import narrow

from weft.device.launch import NativeKernel, pointer_array
from weft.device.toolchain import HostCompiler, find_compiler
from weft.generate.cpp import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource, Schedule

ROW, LAST = Format.ROW, Format.LAST
GUARD = 256


@dataclass(frozen=True)
class Facts:
    simd_bytes: int = 64
    threads: int = 2


def f32(*shape: int) -> TensorType:
    return TensorType(DType.F32, shape)


@cache
def compiler() -> HostCompiler:
    found = find_compiler()
    assert not isinstance(found, Declined), found
    return found


@cache
def object_of(text: str, entry: str, flags: tuple[str, ...]) -> NativeKernel:
    return NativeKernel(Path(compiler().compile(text, flags).path), entry)


def problem(
    b: GraphBuilder, outputs: list[NodeId], ins: list[Format] | None = None, outs: list[Format] | None = None
) -> Problem:
    graph = b.build(outputs)
    return Problem(graph, "test", tuple(ins or [ROW] * len(graph.inputs)), tuple(outs or [ROW] * len(graph.outputs)))


def conv(
    b: GraphBuilder,
    x: NodeId,
    oc: int,
    k: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (1, 1),
    lo: tuple[int, ...] = (0, 0),
    hi: tuple[int, ...] | None = None,
    dilations: tuple[int, ...] = (1, 1),
    groups: int = 1,
) -> NodeId:
    w = b.input(f32(oc, b.type_of(x).shape[1] // groups, *k), is_weight=True)
    attrs = a.ConvAttrs(strides, lo, lo if hi is None else hi, dilations, groups)
    return b.add(Prim.CONV, x, w, attrs=attrs)


class Buffer:
    """A 64-byte aligned array between zones of 0xFF, which read as NaN."""

    def __init__(self, count: int, *, fill: int = 0xFF) -> None:
        raw = np.full(count * 4 + 2 * GUARD + 64, 0xFF, np.uint8)
        start = GUARD + (-(raw.ctypes.data + GUARD)) % 64
        self.raw, self.start, self.stop = raw, start, start + count * 4
        self.data = raw[start : self.stop].view(np.float32)
        self.data.view(np.uint8)[:] = fill
        self.address = raw.ctypes.data + start

    def intact(self) -> bool:
        return bool((self.raw[: self.start] == 0xFF).all() and (self.raw[self.stop :] == 0xFF).all())


def to_memory(x: np.ndarray, format: Format) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(format.order(x.ndim))).reshape(-1)


def from_memory(flat: np.ndarray, shape: tuple[int, ...], format: Format) -> np.ndarray:
    order = format.order(len(shape))
    return flat.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def run(p: Problem, source: KernelSource, inputs: list[np.ndarray], repeat: int = 2) -> list[np.ndarray]:
    kernel = object_of(source.text, source.entry, source.flags)
    g = p.graph
    ins = [Buffer(x.size) for x in inputs]
    for buffer, x, f in zip(ins, inputs, p.input_formats, strict=True):
        buffer.data[:] = to_memory(x, f)
    before = [bytes(buffer.data) for buffer in ins]
    packed = [Buffer(n // 4) for n in source.packed_bytes]
    addresses = [buffer.address for buffer in ins]
    if packed:
        kernel.pack(pointer_array(addresses), pointer_array([x.address for x in packed]))
    for i in source.replaces_weights:
        addresses[i] = 0
    bits: list[list[bytes]] = []
    outs: list[Buffer] = []
    for _ in range(repeat):
        work = Buffer(source.workspace_bytes // 4)
        outs = [Buffer(g.type_of(o).size) for o in g.outputs]
        kernel(
            pointer_array(addresses),
            pointer_array([o.address for o in outs]),
            work.address,
            pointer_array([x.address for x in packed]),
        )
        assert all(x.intact() for x in [*ins, *outs, *packed, work]), "a guard zone was written"
        bits.append([bytes(o.data) for o in outs])
    assert all(x == bits[0] for x in bits), "results differ from run to run"
    assert [bytes(buffer.data) for buffer in ins] == before, "an input was modified"
    return [
        from_memory(o.data.copy(), g.type_of(n).shape, f)
        for o, n, f in zip(outs, g.outputs, p.output_formats, strict=True)
    ]


def sequential_error(g: Graph, inputs: list[np.ndarray]) -> float:
    """RMS error of the contraction summed in f32, one term after the other."""
    at = next(i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR)
    node = g.nodes[at]
    x, w = (np.asarray(v, np.float32) for v in evaluate(replace(g, outputs=node.inputs), inputs))
    if node.prim is Prim.MATMUL:
        left, right = x, w
    else:
        left, right = _columns(x, w, narrow(a.ConvAttrs, node.attrs), node.type.shape)
    total = np.zeros(
        (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]), np.float32
    )
    for k in range(left.shape[-1]):
        total += left[..., :, k, None] * right[..., None, k, :]
    exact = left.astype(np.float64) @ right.astype(np.float64)
    return float(np.sqrt(np.mean((total - exact) ** 2)))


def _columns(x: np.ndarray, w: np.ndarray, c: a.ConvAttrs, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(n, groups, pixels, taps) and (groups, taps, channels)."""
    x = np.pad(x, ((0, 0), (0, 0), *zip(c.pads_lo, c.pads_hi, strict=True)))
    n, spatial, g = shape[0], shape[2:], c.groups
    ic = x.shape[1] // g
    out = []
    for tap in np.ndindex(*w.shape[2:]):
        at = tuple(
            slice(t * d, t * d + (size - 1) * s + 1, s)
            for t, d, s, size in zip(tap, c.dilations, c.strides, spatial, strict=True)
        )
        out.append(x[(slice(None), slice(None), *at)].reshape(n, g, ic, -1))
    left = np.stack(out, axis=3).transpose(0, 1, 4, 2, 3).reshape(n, g, -1, ic * len(out))
    right = w.reshape(g, w.shape[0] // g, -1).transpose(0, 2, 1)
    return left, right


def random_inputs(g: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(g.type_of(i).shape).astype(np.float32) for i in g.inputs]


def check(p: Problem, *, facts: Facts = Facts(), most: int = 2, gain: float = 1.0, only: str = "") -> list[Schedule]:
    """Every one of the first `most` schedules (of algorithm `only`) is right; `gain`: slope of the epilogue."""
    found = templates.schedules(p, facts)
    assert not isinstance(found, Declined), found.reason
    wanted = [s for s in found if not only or s.param("algorithm") == only][:most]
    assert wanted, f"no schedule of {only}"
    inputs = random_inputs(p.graph)
    exact = evaluate(p.graph, inputs, precise=True)
    limit = sequential_error(p.graph, inputs)
    for schedule in wanted:
        source = templates.emit(p, schedule)
        assert isinstance(source, KernelSource), source
        for got, want in zip(run(p, source, inputs), exact, strict=True):
            rms = float(np.sqrt(np.mean((got - want) ** 2)))
            floor = 2**-23 * float(np.sqrt(np.mean(np.square(want, dtype=np.float64))))
            assert rms <= 2 * gain * limit + floor, (str(schedule), rms, limit, floor)
    return wanted
