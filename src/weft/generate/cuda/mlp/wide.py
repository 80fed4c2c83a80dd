"""Fully connected networks whose layers are too wide, or whose weights are too many, for the mlp template.

Each warp (warpgroup on Hopper) owns a tile of rows, as there; but a layer is computed a piece of its columns at a time,
values wait in shared memory and all weights come through a ring. x may have any number of columns if the first layer
alone reads it: it then comes in panels too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.cuda.mlp import beside as mlp_beside
from weft.generate.cuda.mlp import image as mlp_image
from weft.generate.cuda.mlp.activation import activation_functions, unfused
from weft.generate.cuda.mlp.image import PANEL, Image, pieces
from weft.generate.cuda.mlp.match import Chain, chain
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.generate.cuda.mlp.text import instruction, mlp_header
from weft.generate.cuda.mlp.wide_text import SharedValues, WideKernel, passes
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

_MOST, _STAGES, _FEWEST = 3, 8, 4
_OWN = {True: 46, False: 58}
"""Registers of a thread besides operands and sums; by whether warpgroups multiply."""
_MOST_HELD = 248
_EXACT = 32
_CONVERTED = 256
"""Columns of x that are converted at once."""


@dataclass(frozen=True, slots=True)
class MlpWideConfig(Parameters):
    """Parameters of the template."""

    group: bool
    """Warpgroups multiply (sm_90a), or warps."""
    warps: int
    """Of a block."""
    stages: int
    """Panels of weights in shared memory."""
    columns: int
    """Of a layer's result at a time, at most."""
    persistent_ctas: int
    """CTAs of a persistent grid: each takes one tile after the other."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="mlp_wide")

    @property
    def owners(self) -> int:
        """Warps or warpgroups of a block."""
        return self.warps // 4 if self.group else self.warps

    @property
    def rows(self) -> int:
        """Of a block's tile."""
        return self.owners * (64 if self.group else 16)


def schedules(p: Chain, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """A few shapes, the most promising first."""
    found: list[tuple[float, int, MlpWideConfig]] = []
    for shape in _candidates(facts):
        kernel = _kernel(p, shape)
        most = min(_MOST_HELD, facts.registers_per_sm // (32 * shape.warps))
        if isinstance(kernel, Declined) or registers(p, shape, kernel) > most:
            continue
        room = facts.shared_per_block - (kernel.shared_bytes - shape.stages * (kernel.slot + 16))
        shape = replace(shape, stages=min(_STAGES, room // (kernel.slot + 16)))
        if shape.stages >= _FEWEST:
            found.append((cycles(p, shape, facts), len(found), shape))
    found.sort()
    kept: list[MlpWideConfig] = []
    for _, _, shape in found:
        if len(kept) < _MOST and all((x.warps, x.columns) != (shape.warps, shape.columns) for x in kept):
            kept.append(shape)
    return [s.schedule() for s in kept] or Declined("values of a chain do not fit into shared memory and registers")


def _candidates(facts: GpuFacts) -> list[MlpWideConfig]:
    group = facts.capability == 90
    return [MlpWideConfig(group, w, 3, c, facts.sms) for w in (4, 8, 12) for c in ((128, 64) if group else (64, 128))]


def _in_panels(p: Chain, shape: MlpWideConfig) -> bool:
    """Whether x comes in panels: it does not fit into registers, or would not while it is converted."""
    if not p.plain_input and p.layers[0].depth > _CONVERTED and passes(p):
        return True
    return p.layers[0].depth // 4 + shape.columns // 2 + _OWN[shape.group] > _MOST_HELD


def _kernel(p: Chain, shape: MlpWideConfig) -> WideKernel | Declined:
    in_panels = _in_panels(p, shape)
    if in_panels and (not passes(p) or len(p.layers[0].left) > 1):
        return Declined(f"{p.layers[0].k} columns of input that several layers read")
    image = Image.of(p, group=shape.group, columns=shape.columns)
    inner = MlpConfig(shape.group, 1, shape.warps, shape.stages, 0, 1, shape.persistent_ctas)
    return WideKernel(p, inner, image, SharedValues.of(p, shape.columns), shape.columns, in_panels)


def registers(p: Chain, shape: MlpWideConfig, kernel: WideKernel) -> int:
    """Rough number of registers of a thread."""
    found = 0
    for at, layer in enumerate(p.layers):
        depth = 2 * PANEL if at == 0 and kernel.panels_of_x else layer.depth
        found = max(found, depth // 4 + pieces(layer.n, shape.columns)[1] // 2)
    # functions to the last bit, for a result in f32, need many
    steps = {p.graph.nodes[s].prim for s in p.steps[-1]}
    exact = p.graph.type_of(p.out).dtype is DType.F32 and bool(steps & set(TRANSCENDENTAL))
    return found + _OWN[shape.group] + (16 if kernel.panels_of_x else 0) + (_EXACT if exact else 0)


def cycles(p: Chain, shape: MlpWideConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel."""
    c = costs_of(facts).mlp
    pingpong = -(-p.rows // (shape.rows * facts.sms))
    matrix = bytes_ = special = 0.0
    for at, layer in enumerate(p.layers, start=1):
        count, columns = pieces(layer.n, shape.columns)
        matrix += shape.rows * layer.depth * count * columns / 2048
        bytes_ += 2.0 * layer.depth * count * columns
        steps, plain, functions = unfused(p, at)
        slots = c.result_slots + len(steps) + plain
        slots += c.special_slots * (sum(x in TRANSCENDENTAL for x in steps) + functions)
        special += shape.rows * layer.n * slots / 128
    matrix /= 1.0 if shape.group else c.warp_rate
    overlapped = max(matrix, special) + min(matrix, special) / (1 if shape.owners == 1 else shape.owners)
    return pingpong * max(overlapped, bytes_ / c.port_bytes)


def roles(problem: Problem, schedule: Schedule, masters: DType | None = None) -> RoleSource | Declined:
    """A chain whose layers are made a piece of their columns at a time; `masters` as of `kernel.emit`."""
    p = chain(problem)
    if isinstance(p, Declined):
        return p
    s = MlpWideConfig.of(schedule)
    kernel = _kernel(p, s)
    if isinstance(kernel, Declined):
        return kernel
    packing, weights = mlp_image.pack(kernel.image, masters)
    widths = sorted({pieces(x.n, s.columns)[1] for x in p.layers}) if s.group else []
    headers = [
        prelude(),
        mlp_header(),
        activation_functions(p),
        tma_header() if s.group else "",
        *(instruction(p.dtype, n) for n in widths),
    ]
    role = DeviceRole(
        threads=32 * s.warps,
        body="\n".join(kernel.lines()),
        parameters=mlp_beside.parameters(p),
        grid=(min(s.persistent_ctas, -(-p.rows // s.rows)), 1, 1),
        min_ctas_per_sm=1,
        shared_bytes=kernel.shared_bytes,
    )
    return RoleSource(
        schedule=schedule,
        headers=tuple(headers),
        roles=(role,),
        pack=(packing,),
        pack_first=True,
        packed_bytes=(kernel.image.bytes,),
        replaces_weights=weights,
        capability=90 if s.group else 80,
        exact_arch=s.group,
    )
