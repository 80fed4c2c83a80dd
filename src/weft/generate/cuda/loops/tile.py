"""Elementwise stages whose input and output run along different axes: through a tile in shared memory.

A block owns a tile of `along` (contiguous in the output) times `across` (contiguous in some input). Threads first read
vectors along `across` into shared memory, then compute vectors along `along` from there. Rows of the tile are one word
longer than their content, so that neither direction meets the same bank too often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.generate.cuda.loops.body import TileKey, TileView
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.lanes import Probe, Scene, digits, emit_element, lanes_of, no_reduction
from weft.generate.cuda.loops.launch import Draft
from weft.generate.expr.ctype import c_type, storage_type
from weft.generate.loopnest.index import Index, Var, index_of
from weft.generate.loopnest.memory import Buffer
from weft.generate.loopnest.plan import Key, Stage

LEAST = 16
"""Smaller axes are not worth a tile."""
MOST_LANES = 8
MAX_TILES = 4
"""Inputs of one stage that go through shared memory."""


@dataclass(frozen=True, slots=True)
class Tiled:
    """A stage, its two axes and the loops outside."""

    stage: Stage
    outer: tuple[Var, ...]
    along: Var
    across: Var
    edge: int
    """Elements of the tile in either direction."""
    lanes: int
    """Neighbours along `along` that a thread stores."""
    loads: int
    """Neighbours along `across` that a thread loads."""
    at: dict[Key, Index]

    @property
    def blocks(self) -> int:
        """Tiles in all."""
        tiles = -(-self.along.size // self.edge) * -(-self.across.size // self.edge)
        return tiles * math.prod(v.size for v in self.outer)


def tiled(
    stage: Stage, variables: Sequence[Var], along: Var, at: dict[Key, Index], seen: Probe, form: Form
) -> Tiled | None:
    """The stage through tiles, where it has one input that strides along `along` and runs along another loop."""
    candidates = set()
    for access in seen.accesses:
        step = access.address.coefficient(along)
        if access.write or step in (0, 1):
            continue
        found = [v for v in variables if v is not along and access.address.coefficient(v) == 1]
        if step is None or step < 0 or len(found) != 1:
            return None
        candidates |= set(found)
    if len(candidates) != 1:
        return None
    across = candidates.pop()
    if min(along.size, across.size) < LEAST or any(
        x.write and x.address.coefficient(across) is None for x in seen.accesses
    ):
        return None
    item = max(x.itemsize for x in seen.accesses)
    outer = tuple(v for v in variables if v is not along and v is not across)
    return Tiled(
        stage,
        outer,
        along,
        across,
        32 if item >= 4 else 64,
        lanes_of(along, seen, form.vector, MOST_LANES),
        lanes_of(across, seen, form.vector, MOST_LANES),
        at,
    )


def emit_tiled(draft: Draft, scene: Scene, part: Tiled, known: list[TileKey]) -> None:
    """One tile per block. `known`: what the first pass found to go through tiles; filled by that pass."""
    body, put = draft.body, draft.nest.put
    # bounded by their axes: wherever they are used, a test has held
    down, right = Var("down", part.along.size // part.lanes), Var("right", part.across.size)
    tiles = [Var("ti", -(-part.along.size // part.edge)), Var("tj", -(-part.across.size // part.edge))]
    for line in digits([*part.outer, *tiles], "t", 1):
        put(line)
    for var in (*part.outer, *tiles):
        body.bind(var, draft.nest.level)
    corner = [_corner(tile, part.edge) for tile in tiles]
    buffers = {b.name: b for b in scene.readable.values()}
    item = min((buffers[name].dtype.itemsize for name, _, _ in known), default=4)
    view = TileView(down, right, part.lanes, part.edge + max(1, 4 // item), frozenset(part.outer))
    for key in known:
        view.arrays[key] = _fill(draft, part, buffers[key[0]], key, view.pitch, corner)
    put("role.sync();")
    per_row = part.edge // part.lanes
    count = part.edge * per_row
    put("#pragma unroll")
    with body.block(f"for (w_index s = role.thread(); s < {count}u; s += {draft.threads}u)"):
        put(f"const w_index tv = s % {per_row}u, tb = s / {per_row}u;")
        put(f"const w_index down = {_corner(tiles[0], per_row)}tv, right = {corner[1]}tb;")
        tests = _tests(part, f"down < {down.size}u", f"right < {right.size}u")
        with body.block(f"if ({tests})" if tests else ""):
            body.bind(down, draft.nest.level)
            body.bind(right, draft.nest.level)
            body.view = view
            for k in range(part.lanes):
                view.lane = k
                values = {part.along: index_of(down) * part.lanes + k, part.across: index_of(right)}
                at = {key: index.substitute(values) for key, index in part.at.items()}
                emit_element(scene, body, part.stage, at, no_reduction)
            body.view = None
            body.flush()
    known[:] = list(view.arrays)[:MAX_TILES]


def _corner(tile: Var, edge: int) -> str:
    """C text, with a plus behind it: where a tile of `edge` begins; "" where there is one."""
    return f"{index_of(tile).text()} * {edge}u + " if tile.size > 1 else ""


def _tests(part: Tiled, row: str, column: str) -> str:
    """Condition that a point of the tile exists; empty where all do."""
    pairs = ((row, part.along), (column, part.across))
    return " && ".join(test for test, var in pairs if var.size % part.edge)


def _fill(draft: Draft, part: Tiled, buffer: Buffer, key: TileKey, pitch: int, corner: Sequence[str]) -> str:
    """Read a tile of one input; returns its array."""
    put = draft.nest.put
    name = draft.name("m")
    _, base, step = key
    draft.shared.append(f"W_SHARED {storage_type(buffer.dtype)} {name}[{part.edge * pitch}];")
    loads = min(part.loads, 16 // buffer.dtype.itemsize)
    size = math.prod(d.size for d in buffer.digits)
    while any(c % loads for c in (size, step, base.const, *(c for _, c in base.terms))):
        loads //= 2
    per_row = part.edge // loads
    put("#pragma unroll")
    with draft.body.block(f"for (w_index s = role.thread(); s < {part.edge * per_row}u; s += {draft.threads}u)"):
        put(f"const w_index ta = s / {per_row}u, tb = s % {per_row}u * {loads}u;")
        tests = _tests(part, f"{corner[0]}ta < {part.along.size}u", f"{corner[1]}tb < {part.across.size}u")
        with draft.body.block(f"if ({tests})" if tests else ""):
            where = f"{buffer.name} + ({base.text()} + ({corner[0]}ta) * {step}u + {corner[1]}tb)"
            target = f"{name} + (ta * {pitch}u + tb"
            _move(put, buffer, where, target, loads)
    return name


def _move(put: Callable[[str], None], buffer: Buffer, where: str, target: str, loads: int) -> None:
    """Neighbours from memory into a tile, 16 and 32 bits as they are."""
    size, kind = buffer.dtype.itemsize, storage_type(buffer.dtype)
    if loads == 1 or size not in (2, 4):
        put(f"{c_type(buffer.dtype)} q[{loads}];")
        put(f"w_ldv<{loads}>({where}, q);" if loads > 1 else f"q[0] = w_ld({where});")
        for k in range(loads):
            put(f"w_st({target} + {k}u), q[{k}]);")
        return
    put(f"const w_chunk<{loads * size}> q = *(const w_chunk<{loads * size}>*)({where});")
    for k in range(loads):
        half = f"(unsigned short)(q.x[{k // 2}] >> {k % 2 * 16})"
        put(f"*({target} + {k}u)) = w_bits<{kind}>({half if size == 2 else f'q.x[{k}]'});")
