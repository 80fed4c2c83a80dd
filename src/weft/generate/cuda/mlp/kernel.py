"""Small fully connected networks as one kernel: all layers of a tile of rows in registers, weights in shared memory.

A warp (a warpgroup on Hopper) owns 16 (64) rows from input to output; the sums of a layer, rounded to 16 bits, are the
left operand of the next without a shuffle. Weights are repacked once and stay in shared memory; those that do not fit
come panel by panel through a ring that all warpgroups of a block share. Sums begin with the bias, activations are
whatever elementwise steps the graph has, blocks are persistent over tiles.

Source: note on fused MLPs, sections 1 and 2.
"""

from __future__ import annotations

from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.cuda.mlp import beside as mlp_beside
from weft.generate.cuda.mlp import image as mlp_image
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.mlp.activation import activation_functions
from weft.generate.cuda.mlp.image import Image
from weft.generate.cuda.mlp.match import chain, padded
from weft.generate.cuda.mlp.prescale import prepared, prescale_header
from weft.generate.cuda.mlp.shapes import MlpConfig, shared_bytes
from weft.generate.cuda.mlp.text import Kernel, instruction, mlp_header
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule
from weft.kernels.stored_names import entry_name


def emit(problem: Problem, schedule: Schedule, masters: DType | None = None) -> CudaSource | Declined:
    """The kernel of a schedule of the templates of `mlp.template`; depends on its arguments only.

    `masters`: weights and vectors are given in that type instead, float32 for one; packing rounds them.
    """
    made = _ROLES[str(schedule.param("template"))](problem, schedule, masters)
    if isinstance(made, Declined):
        return made
    return solo(made, entry_name(problem.key, schedule))


def roles(problem: Problem, schedule: Schedule, masters: DType | None = None) -> RoleSource | Declined:
    """A chain of which every warp, or warpgroup, has rows of its own."""
    p = chain(problem)
    if isinstance(p, Declined):
        return p
    s = MlpConfig.of(schedule)
    image = prepared(p, s, Image.of(p, group=s.group))
    packing, weights = mlp_image.pack(image, masters)
    widths = sorted({padded(layer.n) for layer in p.layers}) if s.group else []
    headers = [
        prelude(),
        mlp_header(),
        prescale_header() if image.prescaled or s.keep else "",
        activation_functions(p),
        tma_header() if s.stages else "",
        *(instruction(p.dtype, n) for n in widths),
    ]
    units = -(-p.rows // s.rows)
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(Kernel(p, s, image).lines()),
        parameters=mlp_beside.parameters(p),
        grid=(min(s.persistent_ctas, -(-units // s.owners) if s.stages else units), 1, 1),
        min_ctas_per_sm=s.min_ctas,
        shared_bytes=shared_bytes(image, s),
        named_barriers=s.owners if s.pingpong else 0,
    )
    return RoleSource(
        schedule=schedule,
        headers=tuple(headers),
        roles=(role,),
        pack=(packing,),
        pack_first=True,
        packed_bytes=(image.bytes,),
        replaces_weights=weights,
        capability=90 if s.group else 80,
        exact_arch=s.group,
    )


_ROLES = {"mlp": roles, "mlp_pair": mlp_pair.roles, "mlp_wide": mlp_wide.roles}
