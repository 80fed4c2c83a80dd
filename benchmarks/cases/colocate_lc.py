"""Latency-critical kernels of five networks at batch 16 in f16: what best-effort jobs are fused with.

They are data: the two costliest products or convolutions by warpgroups of each network's plan, with the times that
an H200 had them at (`benchmarks.data.latency_critical` makes the file from the networks). Loading traces, compiles and
measures nothing.

    kernel = lc_kernel("vgg16/conv3x3-64-224")
    source = hosts(kernel, facts, 1)[0]                   # a RoleSource: what `fuse` takes
    made = solo(source, "lc")                             # alone: launches, and sizes of what it keeps
    inputs = [device memory with drawn(b, seed) for b in kernel.inputs]
    bound = BoundCuda(made, cubin)
    bound.pack(kernel.weights(inputs), packed, stream)    # once; `packed`: buffers of made.packed_bytes
    bound.prepare(Addresses(inputs, outputs, packed, work, state))

The fused kernel takes the same `Addresses`: it reads the weights that `bound.pack` has repacked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.data.measured import Timed
from weft.device.cuda.facts import GpuFacts, profile
from weft.errors import ArtifactError
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.role.fused import lc_role
from weft.generate.cuda.role.role import RoleSource
from weft.generate.cuda.space import kind, space
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.attrs import InputAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, Node
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import TensorType
from weft.ir.work import node_flops
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json, schedule_from_json, schedule_to_json
from weft.kernels.formats import Format
from weft.kernels.source import Schedule
from weft.tune.wire import problem_from_json, problem_to_json

FORMAT = 1
FILE = Path(__file__).parents[1] / "data" / "nvidia-h200" / "latency-critical.json"
GPU = "h200"
"""Profile of the GPU whose times the file has."""
WARPGROUPS = frozenset({"tma", "wgmma"})
"""Templates of products and convolutions by wgmma."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An input or output of a kernel: dense, in device memory of its own."""

    type: TensorType
    format: Format
    """Order of its dimensions in memory; of weights as the framework has them."""
    is_weight: bool = False
    """Constant from call to call: what the packing launch may read."""
    scale: float = 1.0
    """Standard deviation of what is drawn for it."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class LcKernel:
    """A step of a network's plan."""

    name: str
    """As `resnet50/conv1x1-64-256-56`."""
    problem: Problem
    times: int
    """How often the network's plan has it."""
    timed: tuple[Timed, ...]
    """Kernels that an H200 ran, the fastest first; library calls among them."""
    schedules: Sequence[Schedule] = field(repr=False)
    """Generated kernels: those measured, the chooser's, then all others by the models' estimates."""
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    flops: int
    """Multiplications and additions of its product or convolution."""
    bytes: int
    """Of all inputs and outputs: the least traffic."""

    def weights(self, addresses: Sequence[int]) -> list[int]:
        """Addresses of the inputs as a packing launch takes them: 0 for what is no weight."""
        return [at if b.is_weight else 0 for at, b in zip(addresses, self.inputs, strict=True)]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of the file."""

    name: str
    problem: Problem
    times: int
    timed: tuple[Timed, ...]


def to_json(recorded: Sequence[Recorded]) -> str:
    """Of a file: a line for each kernel."""
    rows: list[Json] = [
        {
            "name": r.name,
            "times": r.times,
            "timed": [[schedule_to_json(t.schedule), round(t.us, 3)] for t in r.timed],
            "problem": problem_to_json(replace(r.problem, origin_rule="")),  # a schedule needs no operator
        }
        for r in recorded
    ]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{"format":{FORMAT},"gpu":"{GPU}","kernels":[\n{lines}\n]}}\n'


def from_json(text: str) -> tuple[Recorded, ...]:
    """Inverse of `to_json`.

    Raises:
        ArtifactError: not such a file [W401].
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or data["gpu"] != GPU:
            raise ValueError("another format, or another GPU")
        found = tuple(
            Recorded(
                str(row["name"]),
                problem_from_json(row["problem"]),
                int(row["times"]),
                tuple(Timed(schedule_from_json(s), float(us)) for s, us in row["timed"]),
            )
            for row in data["kernels"]
        )
        if len({r.name for r in found}) < len(found) or not all(r.timed for r in found):
            raise ValueError("a name twice, or a kernel without a time")
        return found
    except (ValueError, KeyError, TypeError) as error:
        remedy = "make it again with `python -m benchmarks.data.latency_critical`"
        raise ArtifactError(problem=f"malformed file of latency-critical kernels: {error}", remedy=remedy) from None


@cache
def recorded() -> dict[str, Recorded]:
    """The file, by name, in its order."""
    return {r.name: r for r in from_json(FILE.read_text(encoding="utf-8"))}


def lc_names() -> list[str]:
    """Names of the kernels, network by network, the costlier first."""
    return list(recorded())


def lc_kernel(name: str, facts: GpuFacts | None = None) -> LcKernel:
    """A kernel by name; its schedules are those for a GPU of these facts (without: for an H200).

    Raises:
        ValueError: there is none of that name.
    """
    if name not in recorded():
        raise ValueError(f"no latency-critical kernel {name!r}; there are {', '.join(lc_names())}")
    one = recorded()[name]
    graph = one.problem.graph
    linear = linear_node(graph)

    def read(node: int, form: Format) -> Buffer:
        attrs = graph.nodes[node].attrs
        assert isinstance(attrs, InputAttrs)
        return Buffer(graph.type_of(node), form, attrs.is_weight, _scale(linear, node, graph))

    return LcKernel(
        name,
        one.problem,
        one.times,
        one.timed,
        _ranked(one, facts or profile(GPU)),
        tuple(map(read, graph.inputs, one.problem.input_formats)),
        tuple(Buffer(graph.type_of(i), f) for i, f in zip(graph.outputs, one.problem.output_formats, strict=True)),
        node_flops(linear, graph),
        sum(graph.type_of(i).nbytes for i in (*graph.inputs, *graph.outputs)),
    )


def linear_node(graph: Graph) -> Node:
    """The one product or convolution of a graph.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = [n for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR]
    if len(found) != 1:
        raise ValueError(f"{len(found)} products and convolutions in one problem")
    return found[0]


def _scale(linear: Node, node: int, graph: Graph) -> float:
    """What a kernel is multiplied with is drawn so that its sums are as large as what it is multiplied by."""
    if node != linear.inputs[1]:
        return 1.0
    shape = graph.type_of(node).shape
    terms = shape[-2] if linear.prim is Prim.MATMUL else math.prod(shape[1:])
    return 1.0 / math.sqrt(terms)


def _ranked(one: Recorded, facts: GpuFacts) -> list[Schedule]:
    """Each generated kernel once."""
    offered = CudaGenerator().schedules(one.problem, facts)
    every = space(one.problem, facts)
    return list(
        dict.fromkeys(
            (
                *(t.schedule for t in one.timed if t.schedule.generator == "cuda"),
                *(() if isinstance(offered, Declined) else offered),
                *(() if isinstance(every, Declined) else (s for _, s in every)),
            )
        )
    )


def lc_source(kernel: LcKernel, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one of its kernels, or why they can have no best-effort role beside them.

    What is told apart: several launches, clusters and threads that leave are declined by name; `pack` of the result
    says that a packing launch runs once before (`solo(...)` has it, `BoundCuda.pack` runs it), `co_resident` of its
    role that its CTAs spin on each other, `workspace_bytes` and `state_bytes` what memory it wants besides.
    """
    source = CudaGenerator().roles(kernel.problem, schedule)
    if isinstance(source, Declined):
        return source
    role = lc_role(source)
    return role if isinstance(role, Declined) else source


def hosts(kernel: LcKernel, facts: GpuFacts, most: int, *, shared_bytes: int = 0, alike: int = 1) -> list[RoleSource]:
    """The first kernels by warpgroups that can be latency-critical roles.

    Args:
        kernel: which.
        facts: the GPU.
        most: so many at most.
        shared_bytes: what each leaves of the dynamic shared memory that a CTA may have.
        alike: so many of a kind at most, which differ in stages, for instance.
    """
    return list(_hosts(kernel, facts, most, shared_bytes, alike))


def _hosts(kernel: LcKernel, facts: GpuFacts, most: int, shared_bytes: int, alike: int) -> Iterator[RoleSource]:
    counts: dict[object, int] = {}
    for schedule in kernel.schedules:
        if sum(counts.values()) >= most:
            return
        of = kind(schedule)
        if dict(schedule.params).get("template") not in WARPGROUPS or counts.get(of, 0) >= alike:
            continue
        source = lc_source(kernel, schedule)
        if isinstance(source, Declined) or source.capability > facts.capability:
            continue
        if source.roles[0].shared_bytes + shared_bytes <= facts.shared_per_block:
            counts[of] = counts.get(of, 0) + 1
            yield source


def drawn(buffer: Buffer, seed: int) -> bytes:
    """Random normals of a buffer's type and scale, as they lie in memory; integers from 0 to 15."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (math.prod(buffer.type.shape),), TORCH_DTYPE[buffer.type.dtype]
    if not dtype.is_floating_point:
        values = torch.randint(0, 16, shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator) * buffer.scale
    return values.to(dtype).view(torch.uint8).numpy().tobytes()
