"""Loops of stages as variables of threads: probing what a stage reads and writes, merging loops, choosing lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.generate.cuda.loops.body import CudaBody
from weft.generate.expr import Value
from weft.generate.loopnest.body import Access
from weft.generate.loopnest.index import Index, Var, index_of, inner_coefficient
from weft.generate.loopnest.memory import Buffer
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import Key, Layout, Stage
from weft.ir.graph import Graph, NodeId
from weft.ir.types import DType

TOO_BIG = 4000
"""Values that one element may need before the group counts as unreasonable."""


class Oversized(Exception):  # noqa: N818 - turned into a Declined
    """The kernel would compute too many values; the group is better split."""


@dataclass(slots=True)
class Probe:
    """What one element of some stages touches."""

    accesses: list[Access] = field(default_factory=list)
    conditions: list[tuple[Index, int]] = field(default_factory=list)
    joints: list[tuple[Index, int]] = field(default_factory=list)
    fixed: list[Index] = field(default_factory=list)
    count: int = 0

    def substitute(self, values: Mapping[Var, Index]) -> None:
        """Replace variables everywhere."""
        self.accesses = [Access(x.address.substitute(values), x.itemsize, x.write) for x in self.accesses]
        self.conditions = [(i.substitute(values), n) for i, n in self.conditions]
        self.joints = [(i.substitute(values), n) for i, n in self.joints]
        self.fixed = [i.substitute(values) for i in self.fixed]


@dataclass(frozen=True, slots=True)
class Scene:
    """A segment as seen from inside: what is readable, where results go, which loops each stage has."""

    graph: Graph
    layout: Layout
    readable: Mapping[NodeId, Buffer]
    targets: Mapping[NodeId, Buffer]
    """Buffers of the roots that are stored."""


def probe(scene: Scene, stages: Sequence[Stage], at: Sequence[dict[Key, Index]]) -> Probe:
    """Go through the stages once, writing text that is thrown away."""
    body = CudaBody(scene.graph, scene.readable, Nest())
    body._levels = Known()  # every variable is known everywhere
    for stage, where in zip(stages, at, strict=True):
        emit_element(scene, body, stage, where, lambda root, dtype: Value("r", dtype))
        for root in stage.roots:
            body.busy.add(root)
        body.busy.clear()
    if body.count > TOO_BIG:
        raise Oversized
    return Probe(body.accesses, body.conditions, body.joints, body.fixed, body.count)


class Known(dict[str, int]):
    """Every variable is known everywhere."""

    def __missing__(self, key: str) -> int:
        return 0


def emit_element(
    scene: Scene,
    body: CudaBody,
    stage: Stage,
    at: dict[Key, Index],
    reduced: Callable[[NodeId, DType], Value],
) -> None:
    """One element of a stage, reductions being whatever `reduced` says."""
    graph, layout = scene.graph, scene.layout
    for root in stage.pre:
        elementwise_root(scene, body, root, layout.coord(root, at))
    zeroed = {**at, **dict.fromkeys(stage.reduced, Index())}
    for root in stage.reductions:
        operand = graph.nodes[root].inputs[0]
        body.value(operand, layout.coord(operand, at))
    for root in stage.reductions:
        coord = layout.result_coord(root, zeroed)
        value = reduced(root, graph.type_of(root).dtype)
        body.remember(root, coord, value)
        if root in scene.targets:
            body.store(scene.targets[root], coord, value)
    for root in stage.post:
        elementwise_root(scene, body, root, layout.coord(root, zeroed))


def elementwise_root(scene: Scene, body: CudaBody, root: NodeId, coord: tuple[Index, ...]) -> Value:
    """Compute a root, remember it and, if it has a buffer, store it."""
    value = body.value(root, coord).value
    body.remember(root, coord, value)
    if root in scene.targets:
        body.store(scene.targets[root], coord, value)
    return value


def merge(group: list[Var], at: Sequence[dict[Key, Index]], seen: Probe) -> None:
    """Make one loop of two wherever every address steps through both as through one."""
    merged = True
    while merged:
        merged = False
        tests = [i for i, _ in seen.conditions] + seen.fixed
        for outer in group:
            for inner in group:
                if outer is inner or min(outer.size, inner.size) < 2:
                    continue
                if not all(
                    (c := x.address.coefficient(inner)) is not None and x.address.coefficient(outer) == c * inner.size
                    for x in seen.accesses
                ) or any(x.coefficient(v) != 0 for x in tests for v in (outer, inner)):
                    continue
                both = Var(f"{outer.name}_{inner.name}", outer.size * inner.size)
                values = {outer: index_of(both) // inner.size, inner: index_of(both) % inner.size}
                for one in at:
                    one.update({key: index.substitute(values) for key, index in one.items()})
                seen.substitute(values)
                group[group.index(outer)] = both
                group.remove(inner)
                merged = True
                break
            if merged:
                break


def order(group: list[Var], seen: Probe) -> None:
    """Slowest first, by the strides of the largest accesses (writes first)."""

    def weight(access: Access) -> int:
        return math.prod(v.size for v in access.address.variables) * (2 if access.write else 1)

    most = max((weight(x) for x in seen.accesses), default=0)
    main = [x.address for x in seen.accesses if weight(x) == most]
    group.sort(key=lambda v: max((abs(inner_coefficient(x, v) or 0) for x in main), default=0), reverse=True)


def best_lane(candidates: Sequence[Var], seen: Probe) -> Var | None:
    """The loop along which most bytes are neighbours."""
    best: Var | None = None
    best_score = -math.inf
    reach = [math.prod(v.size for v in x.address.variables) for x in seen.accesses]
    volume = max(reach, default=1)
    for var in candidates:
        if var.size < 2:
            continue
        score, contiguous = 0.0, False
        for access, elements in zip(seen.accesses, reach, strict=True):
            c = inner_coefficient(access.address, var)
            weight = access.itemsize * (2 if access.write else 1) * elements / max(volume, 1)
            contiguous |= c == 1
            score += weight * {1: 1.0, 0: 0.25, 2: 0.25, None: -0.6}.get(c, -0.5)
        if contiguous and score > best_score:
            best, best_score = var, score
    return best


def cuts(var: Var, conditions: Sequence[tuple[Index, int]]) -> list[int]:
    """Where tests in `var` alone change their outcome."""
    points: set[int] = set()
    for index, n in conditions:
        c = index.coefficient(var)
        if not c or index.variables != {var}:
            continue
        lo, hi = (index + Index(0, ((var, -c),))).bounds
        if c < 0:  # mirror: -c * var + ... counts from the other end
            c, lo, hi = -c, n - 1 - hi, n - 1 - lo
        points |= {-(lo // c), (n - 1 - hi) // c + 1, (-1 - hi) // c + 1, -((lo - n) // c)}
    return sorted(p for p in points if 0 < p < var.size)


def lanes_of(var: Var | None, seen: Probe, max_bytes: int, most: int) -> int:
    """How many neighbours along `var` one thread takes: a power of two that divides it."""
    if var is None:
        return 1
    sizes = [x.itemsize for x in seen.accesses if inner_coefficient(x.address, var) == 1]
    if not sizes:
        return 1
    lanes = max(1, min(most, max_bytes // min(sizes)))
    while lanes > 1 and var.size % lanes:
        lanes //= 2
    return lanes


def digits(variables: Sequence[Var], position: str, innermost: int) -> list[str]:
    """Declarations of loop variables as digits of a linear position; the last counts vectors of `innermost` lanes."""
    lines = []
    stride = 1
    for k, var in reversed(list(enumerate(variables))):
        size = var.size // innermost if k == len(variables) - 1 else var.size
        if size > 1:
            divided = f"{position} / {stride}u" if stride > 1 else position
            lines.append(f"const w_index {var.name} = {divided}{f' % {size}u' if k else ''};")
        stride *= size
    return lines


def no_reduction(root: NodeId, dtype: DType) -> Value:
    """For `emit_element` over a stage that has none."""
    raise AssertionError((root, dtype))
