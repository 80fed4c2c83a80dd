"""Products of different sizes in one launch: a flat grid over the tiles of all members, one member to a block.

A block asks a table of ranges, which stands in the text, whose tile it has, and then runs that product's own kernel of
`mma`, with its sizes, operands and end as they are: members share the shape of their blocks and nothing else. Each may
have its sums divided among a number of blocks of its own. Products of equal text have one body, and choose pointers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from weft.device.cuda.blocks import together
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates import choose, cost, epilogue, mma
from weft.generate.cuda.templates.grouped_match import Member, members
from weft.generate.cuda.templates.prelude import prelude
from weft.generate.cuda.templates.product import Product
from weft.generate.shape import Parameters
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaArgument, CudaSource, Launch, Pointer, Schedule

TEMPLATES = ("grouped", "grouped_simt")
"""On tensor cores, and on CUDA cores."""
KEPT = 6
WORTH = 0.9
"""A group is measured where the model gives it less than this share of its members one after another."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_CLUSTERS = (2, 4, 8)
_STEPS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 1 << 20)
"""Steps of the sum that one block takes at most."""
_USUAL = ((32, 32, 16, 32), (32, 64, 32, 32), (64, 32, 32, 32), (64, 64, 32, 32), (128, 64, 64, 32), (128, 128, 64, 32))
"""Tiles, and those of their warps, that are tried beside what is best for a member alone."""
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Shape(Parameters):
    """Parameters of the template; as those of `mma.Shape`, with a split for each member."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    wk: int
    stages: int
    splits: tuple[int, ...]
    """Per member, in the order of `grouped_match.members`."""
    cluster: int = 1
    """Blocks of a cluster, which is what shares a sum then: splits are 1 or this. 1: sums meet in the workspace."""
    group: bool = False

    def schedule(self, *, tensor: bool = True) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=TEMPLATES[0 if tensor else 1])

    def of_member(self, number: int) -> mma.Shape:
        """The shape of one member's blocks."""
        split = self.splits[number]
        shared = self.cluster > 1 and split > 1
        return mma.Shape(self.bm, self.bn, self.bk, self.wm, self.wn, self.wk, self.stages, split, shared, self.group)


@lru_cache(maxsize=8)
def matched(problem: Problem, *, tf32: bool) -> tuple[Member, ...] | Declined:
    """`members`, asked once for several schedules."""
    return members(problem, tf32=tf32)


# ---- which shapes


def shapes(found: Sequence[Member], facts: GpuFacts) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first."""
    sizes = [cost.sizes_of(m.product) for m in found]
    clusters = [1]
    if facts.capability >= 90 and all(epilogue.plan(m.product).width % 4 == 0 for m in found):
        clusters += _CLUSTERS
    ranked: list[tuple[float, Shape]] = []
    for base in _bases(found, facts):
        blocks = [cost.block(p, base, facts) for p in sizes]
        if not all(b.fit for b in blocks):
            continue
        tried: set[tuple[int, tuple[int, ...]]] = set()
        for cluster, most in ((c, m) for c in clusters for m in _STEPS):
            splits = tuple(
                1 if p.dtype.is_integer else _split(b.steps, most, cluster) for b, p in zip(blocks, sizes, strict=True)
            )
            own = cluster if max(splits) > 1 else 1
            if (own, splits) in tried:
                continue
            tried.add((own, splits))
            shape = Shape(base.bm, base.bn, base.bk, base.wm, base.wn, base.wk, base.stages, splits, own, base.group)
            ranked.append((together(blocks, splits, own), shape))
    ranked.sort(key=lambda x: (x[0], x[1].stages))
    return _different(ranked)


def _different(ranked: list[tuple[float, Shape]]) -> list[tuple[float, Shape]]:
    """The best of each tile first."""
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for cycles, s in ranked[:200]:
        tile = (s.bm, s.bn, int(s.group))
        alike = seen.get(tile, 0)
        seen[tile] = alike + 1
        keyed.append((cycles * (1 + 0.15 * alike), cycles, s))
    keyed.sort(key=lambda x: x[0])
    return [(cycles, s) for _, cycles, s in keyed[:KEPT]]


def _bases(found: Sequence[Member], facts: GpuFacts) -> list[mma.Shape]:
    """Shapes that are good for a member alone, and usual ones; only those that every member takes."""
    every = [m.product for m in found]
    tensor, size = every[0].tensor, every[0].dtype.itemsize
    bases: dict[mma.Shape, None] = {}
    for p in every:
        for _, s in choose.shapes(p, facts):
            bases.setdefault(replace(s, split=1, cluster=False))
    for bm, bn, wm, wn in _USUAL:
        if tensor or wm * wn <= 1024:
            for bk in (64 // size, 128 // size):
                bases.setdefault(mma.Shape(bm, bn, bk, wm, wn, 1, 4, 1, False))
    return [s for s in bases if all(_takes(m, s) is None for m in every)]


def _takes(p: Product, s: mma.Shape) -> Declined | None:
    """Why a product has no kernel of this shape."""
    if s.group and (p.a_load == "columns" or p.w_load == "kn" or p.dtype.itemsize != 2):
        return Declined("warpgroup products of operands that do not lie along the sum")
    if not p.tensor and s.wm * s.wn > 2048 and p.a_load not in ("rows", "columns"):
        return Declined("addresses want registers too")
    if p.integers and s.wk > 1:
        return Declined("sums of integers by several warps")
    return None


def _split(steps: int, most: int, cluster: int) -> int:
    """Blocks to a sum, so that each takes at most so many steps, if that is possible; 1 or `cluster` where that is."""
    wanted = -(-steps // most)
    if cluster > 1:
        return cluster if wanted > 1 and steps >= 2 * cluster else 1
    return max((s for s in _SPLITS if s <= wanted and (s == 1 or steps >= 2 * s)), default=1)


def cycles(found: Sequence[Member], s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles of one shape."""
    every = [cost.sizes_of(m.product) for m in found]
    blocks = [cost.block(p, s.of_member(i), facts) for i, p in enumerate(every)]
    return together(blocks, s.splits, s.cluster)


# ---- the kernel


@dataclass(slots=True)
class _Body:
    """Members of equal text."""

    text: str
    """Globals, the function `member`, and kernels that repack."""
    source: CudaSource
    members: list[int] = field(default_factory=list)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of one member."""
        return self.source.launches[0].grid

    @property
    def count(self) -> int:
        """Blocks of one member."""
        return math.prod(self.grid)


def emit(problem: Problem, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `Shape.schedule`."""
    s = Shape.of(schedule)
    found = matched(problem, tf32=schedule.param("template") == TEMPLATES[0])
    if isinstance(found, Declined):
        return found
    if len(s.splits) != len(found):
        return Declined(f"{len(s.splits)} splits for {len(found)} products")
    if s.cluster > 1 and not {*s.splits} <= {1, s.cluster}:
        return Declined("sums that are shared by other blocks than those of a cluster")
    bodies: dict[str, _Body] = {}
    for number, member in enumerate(found):
        wrong = _takes(member.product, s.of_member(number))
        source = wrong or mma.emit(member.product, s.of_member(number).schedule("mma"), _NAME)
        if isinstance(source, Declined):
            return source
        bodies.setdefault(source.sha256, _Body("", source)).members.append(number)
    # long sums first: what begins last should be short
    ordered = sorted(bodies.values(), key=lambda b: -_steps(found[b.members[0]], s, b.members[0]))
    for number, body in enumerate(ordered):
        body.text = _as_function(body.source, f"m{number}", f"{entry}_{number}_pack")
    return _whole(schedule, entry, found, ordered, s.cluster)


_NAME = "w_member"
_HEAD = 'extern "C" __global__ void __launch_bounds__('
_PLACES = {"blockIdx.x": "tile_x", "blockIdx.y": "tile_y", "blockIdx.z": "tile_z"}


def _steps(m: Member, s: Shape, number: int) -> int:
    return -(-m.product.k // s.bk) // s.splits[number]


def _as_function(source: CudaSource, space: str, pack: str) -> str:
    """A kernel's text without the prelude: in a namespace, as the function `member` of its block's place; repacking."""
    rest = source.text.removeprefix(prelude())
    before, kernel = rest.split(_HEAD, 1)
    kernel = kernel.partition(f") {_NAME}(")[2]
    body, *packs = kernel.split(f'\nextern "C" __global__ void {_NAME}_pack(')
    for place, name in _PLACES.items():
        body = body.replace(place, name)
    assert "blockIdx" not in body
    text = (
        f"namespace {space} {{\n{before}W_FN void member(const u32 tile_x, const u32 tile_y, const u32 tile_z, {body}}}"
    )
    for repack in packs:
        text += f'\nextern "C" __global__ void {pack}({repack.replace("{", f"{{ using namespace {space};", 1)}'
    return text


@dataclass(slots=True)
class _Memory:
    """What the whole kernel is given."""

    pointers: dict[Pointer, str] = field(default_factory=dict)
    """Argument of the launch -> name of the parameter."""
    packed: dict[tuple[int, int | None, int], int] = field(default_factory=dict)
    """(body, input, member where that is none) -> buffer of repacked weights."""
    packed_bytes: list[int] = field(default_factory=list)
    pack: list[Launch] = field(default_factory=list)
    workspace: int = 0
    state: int = 0

    def name(self, pointer: Pointer) -> str:
        """The parameter of an argument."""
        prefix = {"in": "in", "out": "out", "packed": "pk"}.get(pointer.kind, pointer.kind)
        plain = prefix if pointer.kind in ("work", "state") else f"{prefix}{pointer.index}"
        return self.pointers.setdefault(pointer, plain)


def _whole(
    schedule: Schedule, entry: str, found: Sequence[Member], bodies: Sequence[_Body], cluster: int
) -> CudaSource:
    memory = _Memory()
    texts, calls = [], []
    begin = 0
    for number, body in enumerate(bodies):
        texts.append(f"{body.text}\n")
        calls += _call(number, body, begin, entry, found, memory, cluster)
        begin += -(-body.count * len(body.members) // cluster) * cluster
    one = bodies[0].source
    threads = one.launches[0].block[0]
    order = ("in", "packed", "out", "work", "state")
    pointers = sorted(memory.pointers, key=lambda p: (order.index(p.kind), p.index))
    parameters = ", ".join(
        f"{'const ' if p.kind in ('in', 'packed') else ''}void* __restrict__ {memory.pointers[p]}" for p in pointers
    )
    kernel = [
        f'extern "C" __global__ void __launch_bounds__({threads}) {entry}({parameters}) {{',
        "const u32 block = blockIdx.x;",
        *calls,
        "w_wait(); w_release();",
        "}",
    ]
    arguments: tuple[CudaArgument, ...] = tuple(pointers)
    launch = Launch(
        entry,
        (begin, 1, 1),
        (threads, 1, 1),
        arguments,
        max(b.source.launches[0].shared_bytes for b in bodies),
        (cluster, 1, 1),
    )
    return CudaSource(
        schedule=schedule,
        text=prelude() + "".join(texts) + "\n".join(kernel) + "\n",
        launches=(launch,),
        pack=tuple(memory.pack),
        workspace_bytes=memory.workspace,
        state_bytes=memory.state,
        packed_bytes=tuple(memory.packed_bytes),
        replaces_weights=_replaced(found, bodies),
        capability=max(b.source.capability for b in bodies),
        exact_arch=any(b.source.exact_arch for b in bodies),
    )


def _call(
    number: int, body: _Body, begin: int, entry: str, found: Sequence[Member], memory: _Memory, cluster: int
) -> list[str]:
    """Statements that run the tiles of all members of one text, which begin at the block `begin`.

    Blocks behind the last tile, which fill a cluster, find no member.
    """
    (gx, gy, gz), blocks = body.grid, body.count * len(body.members)
    given = [_given(number, body, i, entry, found, memory) for i in body.members]
    # the blocks of a cluster follow each other, and share a sum
    inner, outer = (gy, gx) if cluster > 1 and gy > 1 else (gx, gy)
    first, second = f"tile % {inner}u", f"tile / {inner}u % {outer}u"
    x, y = (second, first) if (inner, outer) != (gx, gy) else (first, second)
    arguments = [x if gx > 1 else "0u", y if gy > 1 else "0u", f"tile / {gx * gy}u" if gz > 1 else "0u"]
    arguments += [_selected(list(x)) for x in zip(*given, strict=True)]
    place = f"const u32 at = block - {begin}u, which = at / {body.count}u, tile = at % {body.count}u;"
    above = f"block >= {begin}u && " if begin else ""
    return [
        f"if ({above}block < {begin + blocks}u) {{ {place} (void)which; (void)tile;",
        f"m{number}::member({', '.join(arguments)});",
        "return; }",
    ]


def _selected(names: list[str]) -> str:
    """The argument of the member `which`."""
    if len(set(names)) == 1:
        return names[0]
    text = names[-1]
    for i in reversed(range(len(names) - 1)):
        text = f"which == {i}u ? {names[i]} : {text}"
    return f"({text})"


def _given(number: int, body: _Body, index: int, entry: str, found: Sequence[Member], memory: _Memory) -> list[str]:
    """The arguments of one member; notes what it needs."""
    member, source = found[index], body.source
    work, state = memory.workspace, memory.state
    memory.workspace += -(-source.workspace_bytes // _ALIGNED) * _ALIGNED
    memory.state += -(-source.state_bytes // _ALIGNED) * _ALIGNED
    texts = []
    for p in source.launches[0].arguments:
        assert isinstance(p, Pointer)
        if p.kind == "work":
            texts.append(f"(char*){memory.name(Pointer('work'))} + {work}ull")
        elif p.kind == "state":
            texts.append(f"(char*){memory.name(Pointer('state'))} + {state}ull")
        elif p.kind == "packed":
            at = _packed(number, index, f"{entry}_{number}_pack", member, source, memory)
            texts.append(memory.name(Pointer("packed", at)))
        else:
            position = (member.inputs if p.kind == "in" else member.outputs)[p.index]
            texts.append(memory.name(Pointer(p.kind, position)))
    return texts


def _packed(number: int, index: int, entry: str, member: Member, source: CudaSource, memory: _Memory) -> int:
    """The buffer of a member's repacked weights: members of one text and one weight share it."""
    (launch,) = source.pack
    arguments = [
        Pointer("in", member.inputs[p.index]) if isinstance(p, Pointer) and p.kind == "in" else p
        for p in launch.arguments
    ]
    weight = next((p.index for p in arguments if isinstance(p, Pointer) and p.kind == "in"), None)
    key = (number, weight, -1 if weight is not None else index)
    if key not in memory.packed:
        at = memory.packed[key] = len(memory.packed_bytes)
        memory.packed_bytes += source.packed_bytes
        own = tuple(Pointer("packed", at) if isinstance(p, Pointer) and p.kind == "packed" else p for p in arguments)
        memory.pack.append(replace(launch, entry=entry, arguments=own))
    return memory.packed[key]


def _replaced(found: Sequence[Member], bodies: Sequence[_Body]) -> tuple[int, ...]:
    """Inputs of the whole that no member reads any more."""
    gone: set[int] = set()
    read: set[int] = set()
    for body in bodies:
        for index in body.members:
            for k, position in enumerate(found[index].inputs):
                (gone if k in body.source.replaces_weights else read).add(position)
    return tuple(sorted(gone - read))
