"""Neighbouring results of a resize share what they read: a thread goes along the axis and keeps what it has.

The results of one row of a resized image are sums of two columns each, gathered by indices that come from memory. What
a column is made of (two reads, sums with weights) is computed when the index changes, so that four results cost about
three columns instead of eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from weft.generate.cuda.loops.body import CudaBody
from weft.generate.cuda.loops.lanes import Known, Scene, digits, emit_element, no_reduction
from weft.generate.cuda.loops.launch import Draft
from weft.generate.cuda.loops.stages import Part
from weft.generate.expr import Value, c_type
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.index import Index, Loaded, Var, index_of
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import Key
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim

Noted = dict[NodeId, list[Coord]]


@dataclass(frozen=True, slots=True)
class Corners:
    """Gathers of one value along one loop."""

    gathers: tuple[NodeId, ...]
    source: NodeId
    axis: int
    var: Var


def corners(scene: Scene, part: Part, items: int) -> Corners | None:
    """Up to two gathers, of the same value that is itself gathered, by indices that depend on one outer loop alone."""
    noted, nested = _note(scene, part, [dict(part.at)])
    graph = scene.graph
    records = [graph.nodes[n] for n in noted]
    if not nested or not 1 <= len(noted) <= 2 or any(r.prim is not Prim.GATHER for r in records):
        return None
    sources = {(r.inputs[0], cast("a.GatherAttrs", r.attrs).axis) for r in records}
    indices = [graph.type_of(r.inputs[1]) for r in records]
    if len(sources) > 1 or any(t.rank != 1 for t in indices) or any(len(p) != 1 for p in noted.values()):
        return None
    source, axis = next(iter(sources))
    coords = [p[0] for p in noted.values()]
    on = {v for p in coords for v in p[axis].variables}
    var = next(iter(on)) if len(on) == 1 else None
    if var is None or var not in part.variables[:-1] or var.size % items:
        return None
    elsewhere = {v for p in coords for d, i in enumerate(p) if d != axis for v in i.variables}
    return Corners(tuple(noted), source, axis, var) if var not in elsewhere else None


def _note(scene: Scene, part: Part, at: Sequence[dict[Key, Index]]) -> tuple[Noted, bool]:
    """Outermost gathers of some elements and where they read; whether gathers read gathers."""
    body = CudaBody(scene.graph, scene.readable, Nest())
    body._levels = Known()
    body.noted = {}
    for one in at:
        emit_element(scene, body, part.stage, one, no_reduction)
    return body.noted, body.nested


def emit_corners(draft: Draft, scene: Scene, part: Part, items: int, found: Corners, *, eager: bool = False) -> None:
    """The vectors of one thread, which stand beside each other along the loop of the gathers.

    `eager`: the last gather of every other vector is computed in any case and first: no read waits for another.
    """
    body, nest = draft.body, draft.nest
    lane = part.variables[-1]
    counter = {v: v for v in part.variables}
    counter[found.var] = Var(found.var.name, found.var.size // items)
    for line in digits(list(counter.values()), "t", part.lanes):
        nest.put(line)
    counter[lane] = Var(lane.name, lane.size // part.lanes)
    for var in counter.values():
        body.bind(var, nest.level)
    kind = c_type(scene.graph.type_of(found.source).dtype)
    size = scene.graph.type_of(found.source).shape[found.axis]
    slots = [(draft.name("held"), draft.name("key")) for _ in found.gathers]
    for held, key in slots:
        nest.put(f"{kind} {held}[{part.lanes}];")
        nest.put(f"w_index {key};")
    coords = []
    for item in range(items):
        at = []
        for k in range(part.lanes):
            values = {v: index_of(c) for v, c in counter.items()}
            values[found.var] = values[found.var] * items + item
            values[lane] = values[lane] * part.lanes + k
            at.append({key: index.substitute(values) for key, index in part.at.items()})
        noted, _ = _note(scene, part, at)
        coords.append((at, noted))
        for node in found.gathers:  # all indices are read before anything is stored
            _index(body, found, node, noted[node], size)
    ahead = {}
    last = len(found.gathers) - 1
    for item, (_, noted) in enumerate(coords if eager and last else ()):
        if item % 2:
            ahead[item] = _ahead(body, found, noted[found.gathers[last]], _index_of(body, found, last, noted, size))
    for item, (at, noted) in enumerate(coords):
        for number, node in enumerate(found.gathers):
            if number == last and item in ahead:
                held, key = slots[number]
                for k, name in enumerate(ahead[item]):
                    nest.put(f"{held}[{k}] = {name};")
                nest.put(f"{key} = {_index(body, found, node, noted[node], size)};")
                for k, coord in enumerate(noted[node]):
                    body.remember(node, coord, Value(f"{held}[{k}]", scene.graph.type_of(node).dtype))
                continue
            _column(body, found, node, noted[node], (slots[number], slots[(number + 1) % len(slots)]), size, item)
            for k, coord in enumerate(noted[node]):
                value = Value(f"{slots[number][0]}[{k}]", scene.graph.type_of(node).dtype)
                body.remember(node, coord, value)
        for one in at:
            emit_element(scene, body, part.stage, one, no_reduction)
        body.flush()


def _index_of(body: CudaBody, found: Corners, number: int, noted: Noted, size: int) -> Index:
    node = found.gathers[number]
    return body.run_time(body.graph.nodes[node].inputs[1], (noted[node][0][found.axis],), size)


def _ahead(body: CudaBody, found: Corners, coords: Sequence[Coord], at: Index) -> list[str]:
    """Names of a column's values, which are computed now."""
    where = [tuple(at if d == found.axis else i for d, i in enumerate(coord)) for coord in coords]
    return [body.value(found.source, coord).value.name for coord in where]


def _index(body: CudaBody, found: Corners, node: NodeId, coords: Sequence[Coord], size: int) -> str:
    return body.run_time(body.graph.nodes[node].inputs[1], (coords[0][found.axis],), size).text()


def _column(
    body: CudaBody,
    found: Corners,
    node: NodeId,
    coords: Sequence[Coord],
    slots: tuple[tuple[str, str], tuple[str, str]],
    size: int,
    item: int,
) -> None:
    """What a gather reads: as it is, or what the other one has, or computed."""
    (held, key), (other, others) = slots
    index = _index(body, found, node, coords, size)
    first = item == 0  # nothing is there yet: the reads of all columns are on their way together
    with body.block("" if first else f"if ({index} != {key})"):
        if other != held and not first:
            with body.block(f"if ({index} == {others})"):
                for k in range(len(coords)):
                    body.nest.put(f"{held}[{k}] = {other}[{k}];")
        with body.block("else" if other != held and not first else ""):
            name = f"{held}_{item}"
            body.nest.put(f"const w_index {name} = {index};")
            body.know(name)
            at = Index(0, ((Loaded(name, size, lanes=False, depends=frozenset()), 1),))
            for k, lane_place in enumerate(coords):
                where = tuple(at if d == found.axis else i for d, i in enumerate(lane_place))
                body.nest.put(f"{held}[{k}] = {body.value(found.source, where).value.name};")
        body.nest.put(f"{key} = {index};")
