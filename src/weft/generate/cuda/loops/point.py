"""Elementwise stages: every thread computes a few vectors of neighbouring results."""

from __future__ import annotations

from collections.abc import Sequence

from weft.generate.cuda.loops.body import TileKey
from weft.generate.cuda.loops.corners import corners, emit_corners
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.lanes import (
    Probe,
    Scene,
    best_lane,
    cuts,
    digits,
    emit_element,
    lanes_of,
    merge,
    no_reduction,
    order,
    probe,
)
from weft.generate.cuda.loops.launch import Draft
from weft.generate.cuda.loops.stages import Part
from weft.generate.cuda.loops.tile import Tiled, emit_tiled, tiled
from weft.generate.loopnest.index import Index, Var, index_of
from weft.generate.loopnest.plan import Key, Stage

MOST_LANES = 8
"""Neighbours that one thread computes at once."""
MOST_WHOLE = 16
"""Elements of an innermost loop that a thread takes all of."""
MOST_UNROLLED = 32
"""Elements of such a thread."""
MAX_RANGES = 12
"""Ranges of CTAs into which the edges of joins cut a stage."""


def parts_of(scene: Scene, stage: Stage, form: Form, prefix: str) -> list[Part | Tiled]:
    """Parts of one elementwise stage; none if it has no element."""
    sizes = scene.layout.sizes
    variables = [Var(f"{prefix}{k}", sizes[key]) for k, key in enumerate(stage.free)]
    if any(v.size == 0 for v in variables):
        return []
    at = {key: index_of(v) for key, v in zip(stage.free, variables, strict=True)}
    seen = probe(scene, [stage], [at])
    merge(variables, [at], seen)
    return _pieces(scene, stage, form, variables, at, seen)


def _pieces(
    scene: Scene, stage: Stage, form: Form, variables: list[Var], at: dict[Key, Index], seen: Probe
) -> list[Part | Tiled]:
    whole = _whole(stage, variables, at, seen) if form.whole else None
    if whole is not None:
        return [whole]
    for var in variables:
        points = cuts(var, seen.joints)
        if not 0 < len(points) <= MAX_RANGES:
            continue
        found: list[Part | Tiled] = []
        for number, (first, end) in enumerate(zip([0, *points], [*points, var.size], strict=True)):
            piece = Var(f"{var.name}_{'abcdefghijklm'[number]}", end - first)
            moved = {k: i.substitute({var: index_of(piece) + first}) for k, i in at.items()}
            inner = [piece if v is var else v for v in variables]
            again = probe(scene, [stage], [moved])
            merge(inner, [moved], again)
            found += _pieces(scene, stage, form, inner, moved, again)
        return found
    order(variables, seen)
    lane = best_lane(variables, seen)
    if lane is None:
        return [Part(stage, tuple(variables), 1, at)]
    through = tiled(stage, variables, lane, at, seen, form) if form.tile else None
    if through is not None:
        return [through]
    variables = [*(v for v in variables if v is not lane), lane]
    lanes = lanes_of(lane, seen, form.vector, MOST_LANES)
    most = min(MOST_LANES, form.vector // min(x.itemsize for x in seen.accesses))
    if len(variables) == 1 and lanes < most <= lane.size // 4:
        return _with_rest(stage, lane, at, most)
    return [Part(stage, tuple(variables), lanes, at)]


def _whole(stage: Stage, variables: list[Var], at: dict[Key, Index], seen: Probe) -> Part | None:
    """All of a short loop that the result runs along, for one or more neighbours along the loop around it."""
    writes = [x.address for x in seen.accesses if x.write]
    short = [v for v in variables if v.size <= MOST_WHOLE and all(x.coefficient(v) == 1 for x in writes)]
    if len(short) != 1 or not cuts(short[0], seen.joints):
        return None
    inner = short[0]
    around = [v for v in variables if all(x.coefficient(v) == inner.size for x in writes)]
    if len(around) != 1:
        return None
    lanes = next(k for k in (4, 2, 1) if inner.size * k <= MOST_UNROLLED and around[0].size % k == 0)
    return Part(stage, (*(v for v in variables if v not in (inner, around[0])), around[0]), lanes, at, inner)


def _with_rest(stage: Stage, lane: Var, at: dict[Key, Index], lanes: int) -> list[Part | Tiled]:
    """Whole vectors, and single elements for what is left."""
    whole = lane.size // lanes * lanes
    parts: list[Part | Tiled] = []
    for name, first, size, width in (("a", 0, whole, lanes), ("b", whole, lane.size - whole, 1)):
        piece = Var(f"{lane.name}_{name}", size)
        moved = {k: i.substitute({lane: index_of(piece) + first}) for k, i in at.items()}
        parts.append(Part(stage, (piece,), width, moved))
    return parts


def emit_parts(
    draft: Draft, scene: Scene, parts: Sequence[Part | Tiled], form: Form, tiles: dict[int, list[TileKey]]
) -> None:
    """All parts, each in its own range of blocks. `tiles`: what the first pass found to go through shared memory."""
    for number, part in enumerate(parts):
        first = draft.blocks
        draft.blocks += part.blocks if isinstance(part, Tiled) else -(-part.vectors // (form.threads * form.items))
        tests = [f"role.block_x() >= {first}u"] if first else []
        tests += [f"role.block_x() < {draft.blocks}u"] if part is not parts[-1] else []
        with draft.body.block(f"if ({' && '.join(tests)})" if tests else ""):
            block = f"(role.block_x() - {first}u)" if first else "role.block_x()"
            if isinstance(part, Tiled):
                draft.nest.put(f"const w_index t = {block};")
                emit_tiled(draft, scene, part, tiles.setdefault(number, []))
                continue
            along = corners(scene, part, form.items) if form.corners else None
            if along is not None:
                draft.nest.put(f"const w_index t = {block} * (w_index){form.threads} + role.thread();")
                even = part.vectors % (form.threads * form.items) == 0
                with draft.body.block("" if even else f"if (t < {part.vectors // form.items}u)"):
                    emit_corners(draft, scene, part, form.items, along, eager=form.eager)
                continue
            each = form.threads if part.shares(form.items) else form.threads * form.items
            draft.nest.put(f"const w_index t = {block} * (w_index){each} + role.thread();")
            _emit_part(draft, scene, part, form)


def _emit_part(draft: Draft, scene: Scene, part: Part, form: Form) -> None:
    body, nest = draft.body, draft.nest
    exact = part.vectors % (form.threads * form.items) == 0
    if form.items == 1:
        with body.block("" if exact else f"if (t < {part.vectors}u)"):
            _emit_vector(draft, scene, part, "t", "")
            body.flush()
        return
    if part.shares(form.items):
        with body.block("" if exact else f"if (t < {part.vectors // form.items}u)"):
            _emit_vector(draft, scene, part, "t", "", form.items)
            body.flush()
        return
    stores = []
    for u in range(form.items):
        position = draft.name("t")
        nest.put(f"const w_index {position}_ = t + {u * form.threads}u;")
        nest.put(f"const w_index {position} = w_least({position}_, {part.vectors - 1});")
        _emit_vector(draft, scene, part, position, f"_{u}")
        stores.append((body.pending, "" if exact else f"{position}_ < {part.vectors}u"))
        body.pending = []
    for pending, guard in stores:  # after all loads, so that those of all vectors are on their way together
        body.pending = pending
        body.flush(guard)


def _emit_vector(draft: Draft, scene: Scene, part: Part, position: str, suffix: str, items: int = 1) -> None:
    """The elements of one vector, or of `items` vectors at equal distances along the innermost loop."""
    body = draft.body
    renamed = {v: Var(v.name + suffix, v.size) for v in part.variables}
    lane = renamed[part.variables[-1]] if part.variables else None
    counter = {v: v for v in renamed.values()}
    if lane is not None:
        counter[lane] = Var(lane.name, lane.size // part.lanes // items)
    for line in digits(list(renamed.values()), position, part.lanes * items):
        draft.nest.put(line)
    for var in counter.values():
        body.bind(var, draft.nest.level)
    for k in range(part.lanes * items):
        values = {v: index_of(counter[w]) for v, w in renamed.items()}
        if lane is not None:
            item, inside = divmod(k, part.lanes)
            distance = lane.size // items
            values[part.variables[-1]] = values[part.variables[-1]] * part.lanes + (item * distance + inside)
        for c in range(part.inner.size if part.inner is not None else 1):
            if part.inner is not None:
                values[part.inner] = Index(c)
            at = {key: index.substitute(values) for key, index in part.at.items()}
            emit_element(scene, body, part.stage, at, no_reduction)
