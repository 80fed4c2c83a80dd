"""Several maximum pools over one image, and what joins them: one kernel that reads the image once.

A block has an image's plane of a few channels in shared memory. For some rows of it, it takes maxima down the columns,
one for each size of window, and along the rows of these after that: k + k comparisons for a window of k x k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.generate.expr.ctype import storage_type
from weft.generate.expr.integer import Int, summed
from weft.generate.loopnest.plan import live_nodes
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Pointer, Schedule

CHUNK = 16
"""Bytes of neighbouring channels that a thread takes."""
MOST_SHARED = 48 * 1024
WARP = 32
MAX_RADIUS = 8
MAX_THREADS = 512
MAX_ELEMENTS = 1 << 30


@dataclass(frozen=True, slots=True)
class Pools:
    """Pools of sizes 2·radius + 1, and per output the pieces of its channels: a pool's number, or -1 for the image."""

    dtype: DType
    shape: tuple[int, int, int, int]
    radii: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        """Groups of channels."""
        return self.shape[1] * self.dtype.itemsize // CHUNK

    def shared_bytes(self, rows: int) -> int:
        """Of a block that has so many rows."""
        _, _, height, width = self.shape
        return CHUNK * width * (height + rows * len(self.radii))


@cache
def pools_header() -> str:
    """Text of weft_cuda_pools.h."""
    return Path(__file__).with_name("weft_cuda_pools.h").read_text()


def pools(problem: Problem) -> Pools | Declined:
    """What the template takes: windows that leave the size as it is, channels-last, at least two sizes."""
    graph = problem.graph
    live = live_nodes(graph)
    inputs = [n for n in live if graph.nodes[n].prim is Prim.INPUT]
    windows = [n for n in live if graph.nodes[n].prim is Prim.WINDOW_MAX]
    if len(inputs) != 1 or len(windows) < 2 or len(inputs) + len(windows) + _joins(graph, live) != len(live):
        return Declined("not several maximum pools of one image")
    t = graph.type_of(inputs[0])
    formats = (*problem.input_formats, *problem.output_formats)
    if t.rank != 4 or any(f is not Format.LAST for f in formats) or t.dtype not in (DType.F16, DType.BF16, DType.F32):
        return Declined("maximum pools of images that do not lie channels-last")
    radii = [_radius(graph, n, inputs[0]) for n in windows]
    pieces = {inputs[0]: -1} | {n: k for k, n in enumerate(windows)}
    outputs = []
    for n in graph.outputs:
        parts = graph.nodes[n].inputs if graph.nodes[n].prim is Prim.CONCAT else (n,)
        outputs.append(tuple(pieces.get(p, -2) for p in parts))
    if any(-2 in o for o in outputs) or None in radii:
        return Declined("maximum pools with something else")
    shape = cast("tuple[int, int, int, int]", t.shape)
    found = Pools(t.dtype, shape, tuple(r for r in radii if r is not None), tuple(outputs))
    if shape[1] * t.dtype.itemsize % CHUNK or t.size == 0 or t.size * len(windows) >= MAX_ELEMENTS:
        return Declined("channels that are no whole vectors")
    if found.shared_bytes(1) > MOST_SHARED:
        return Declined("a plane over the shared memory of a CTA")
    return found


def _joins(graph: Graph, live: list[NodeId]) -> int:
    return sum(
        n in graph.outputs
        and graph.nodes[n].prim is Prim.CONCAT
        and cast("a.ConcatAttrs", graph.nodes[n].attrs).axis == 1
        for n in live
    )


def _radius(graph: Graph, node: NodeId, image: NodeId) -> int | None:
    w = cast("a.WindowAttrs", graph.nodes[node].attrs)
    k = w.kernel[0]
    good = (
        graph.nodes[node].inputs == (image,)
        and w.kernel == (k, k)
        and k % 2 == 1
        and k // 2 <= MAX_RADIUS
        and set(w.strides) == set(w.dilations) == {1}
        and set(w.pads_lo) == set(w.pads_hi) == {k // 2}
    )
    return k // 2 if good else None


def schedules(problem: Problem, facts: GpuFacts) -> list[Schedule]:
    """Rows of a block such that blocks fill the machine once, half or twice; none where the template does not apply."""
    p = pools(problem)
    if isinstance(p, Declined):
        return []
    images, _, height, _ = p.shape
    planes = images * p.chunks
    found = []
    for blocks in (facts.sms, facts.sms // 2, 2 * facts.sms):
        groups = min(height, max(1, round(blocks / planes)))
        rows = -(-height // groups)
        while p.shared_bytes(rows) > MOST_SHARED:
            rows -= 1
        found.append(Schedule("cuda", (("rows", rows), ("template", "pools"))))
    return list(dict.fromkeys(found))


def roles(problem: Problem, schedule: Schedule, headers: Sequence[str]) -> RoleSource | Declined:
    """The role; `headers`: what all kernels begin with."""
    p = pools(problem)
    if isinstance(p, Declined):
        return p
    rows = cast("int", schedule.param("rows"))
    images, channels, height, width = p.shape
    lanes, parts, here, count = CHUNK // p.dtype.itemsize, -(-height // rows), rows * width, len(p.radii)
    each = -(-here // WARP) * WARP  # a warp has one size of window
    threads = min(MAX_THREADS, -(-max(height * width, count * each) // WARP) * WARP)
    kind = storage_type(p.dtype)

    def stores(piece: int, value: str, position: str) -> str:
        """Into every output that has the piece."""
        lines = []
        for k, pieces in enumerate(p.outputs):
            stride = len(pieces) * channels
            for at in (i for i, x in enumerate(pieces) if x == piece):
                where = summed(f"({position}) * {stride}u", f"{at * channels}u" if at else 0, f"chunk * {lanes}u")
                lines.append(f"*(w_chunk<16>*)(out{k} + ({where})) = {value};")
        return " ".join(lines)

    def steps(line: Callable[[int], Int | str], at: str, size: int, stride: int) -> list[str]:
        return [f"w_greatest<{kind}, {r}, {stride}>({line(i)}, {at}, {size})" for i, r in enumerate(p.radii)]

    def branches(lines: list[str]) -> str:
        return "\n".join(
            f"    {'else ' if i else ''}{f'if (i == {i}u) ' if i < count - 1 else ''}{{ {line} }}"
            for i, line in enumerate(lines)
        )

    turn = f"""  for (unsigned q = role.thread(); q < {count * each}u; q += {threads}u) {{
    const unsigned i = q / {each}u, p = q % {each}u, y = {Int("p") / f"{width}u"}, x = {Int("p") % f"{width}u"};
    if (p >= {here}u || first + y >= {height}u) continue;
"""
    down = [
        f"down[{f'{i * here}u + p' if i else 'p'}] = {s};"
        for i, s in enumerate(steps(lambda _: "plane + x", "(int)(first + y)", height, width))
    ]
    along = [
        f"const w_chunk<16> c = {s}; {stores(i, 'c', f'(image * {height}u + first + y) * {width}u + x')}"
        for i, s in enumerate(steps(lambda i: summed("down", i * here, f"y * {width}u"), "(int)x", width, 1))
    ]
    position = f"image * {height * width}u + p"
    copy = stores(-1, "c", position)
    mine = f"if (p >= first * {width}u && p < (first + {rows}u) * {width}u) {{ {copy} }}" if copy else ""
    block = Int("role.block_x()")
    body = f"""\
  W_SHARED w_chunk<16> plane[{height * width}];
  W_SHARED w_chunk<16> down[{count * here}];
  const unsigned part = {block % f"{parts}u"}, chunk = {block / f"{parts}u" % f"{p.chunks}u"};
  const unsigned image = {block / f"{parts * p.chunks}u"}, first = {Int("part") * f"{rows}u"};
  role.pdl_wait();
  role.pdl_trigger();
#pragma unroll 4
  for (unsigned p = role.thread(); p < {height * width}u; p += {threads}u) {{
    const w_chunk<16> c = *(const w_chunk<16>*)(in0 + (({position}) * {channels}u + chunk * {lanes}u));
    plane[p] = c;
    {mine}
  }}
  role.sync();
{turn}{branches(down)}
  }}
  role.sync();
{turn}{branches(along)}
  }}"""
    outs = (Parameter(f"out{k}", Pointer("out", k), f"{kind}* __restrict__") for k in range(len(p.outputs)))
    role = DeviceRole(
        threads=threads,
        body=body,
        parameters=(Parameter("in0", Pointer("in", 0), f"const {kind}*"), *outs),
        grid=(images * p.chunks * parts, 1, 1),
    )
    return RoleSource(schedule, (*headers, pools_header()), (role,))
