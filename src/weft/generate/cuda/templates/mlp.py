"""Small fully connected networks as one kernel: all layers of a tile of rows in registers, weights in shared memory.

A warp (a warpgroup on Hopper) owns 16 (64) rows from input to output; the sums of a layer, rounded to 16 bits, are the
left operand of the next without a shuffle. Weights are repacked once and stay in shared memory; those that do not fit
come panel by panel through a ring that all warpgroups of a block share. Sums begin with the bias, activations are
whatever elementwise steps the graph has, blocks are persistent over tiles.

Source: note on fused MLPs, sections 1 and 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates import mlp_beside, mlp_image, mlp_pair, mlp_wide
from weft.generate.cuda.templates.mlp_image import Image
from weft.generate.cuda.templates.mlp_match import chain, padded
from weft.generate.cuda.templates.mlp_shapes import Shape, shapes, shared_bytes
from weft.generate.cuda.templates.mlp_sums import prepared, sums_header
from weft.generate.cuda.templates.mlp_text import Kernel, instruction, mlp_header
from weft.generate.cuda.templates.prelude import prelude
from weft.generate.cuda.templates.tma import header as tma_header
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Launch, Schedule


def schedules(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """A few shapes, the most promising first; Declined for what is no chain, or too large for a kernel."""
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; chains of products need 8.0")
    p = chain(problem)
    if isinstance(p, Declined):
        return p
    narrow = [s.schedule() for s in shapes(p, facts)]
    return [*mlp_pair.schedules(p, facts), *narrow] if narrow else mlp_wide.schedules(p, facts)


def emit(problem: Problem, schedule: Schedule, masters: DType | None = None) -> CudaSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only.

    `masters`: weights and vectors are given in that type instead, float32 for one; packing rounds them.
    """
    if schedule.param("template") == "mlp_wide":
        return mlp_wide.emit(problem, schedule, masters)
    if schedule.param("template") == "mlp_pair":
        return mlp_pair.emit(problem, schedule, masters)
    p = chain(problem)
    if isinstance(p, Declined):
        return p
    s = Shape.of(schedule)
    image = prepared(p, s, Image.of(p, group=s.group))
    entry = f"k{hashlib.sha256(f'{problem.key}|{schedule}'.encode()).hexdigest()[:16]}"
    packing, pack, weights = mlp_image.pack(image, f"{entry}_pack", masters)
    head = (
        f'extern "C" __global__ void __launch_bounds__({s.threads}, {s.resident}) {entry}('
        f"{mlp_beside.arguments(p)}, const void* __restrict__ pk, {mlp_beside.results(p)}) {{"
    )
    widths = sorted({padded(layer.n) for layer in p.layers}) if s.group else []
    parts = [
        prelude(),
        mlp_header(),
        sums_header() if image.stretched or s.keep else "",
        tma_header() if s.stages else "",
        *(instruction(p.dtype, n) for n in widths),
        packing,
        "\n".join((head, *Kernel(p, s, image).lines(), "}\n")),
    ]
    units = -(-p.rows // s.rows)
    blocks = min(s.blocks, -(-units // s.owners) if s.stages else units)
    pointers = mlp_beside.pointers(p)
    return CudaSource(
        schedule=schedule,
        text="".join(parts),
        launches=(Launch(entry, (blocks, 1, 1), (s.threads, 1, 1), pointers, shared_bytes(image, s)),),
        pack=(pack,),
        packed_bytes=(image.bytes,),
        replaces_weights=weights,
        capability=90 if s.group else 80,
        exact_arch=s.group,
    )
