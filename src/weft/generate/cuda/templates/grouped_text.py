"""Several kernels as one: a flat grid over the blocks of all, each of which runs the body of one of them.

A block asks a table of ranges, which stands in the text, whose it is. Kernels of equal text have one body, which is
given the arguments of the member that it works for. Every body stands in a namespace of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.generate.cuda.templates.grouped_match import Member
from weft.generate.cuda.templates.prelude import prelude
from weft.generate.cuda.templates.tma import header
from weft.ir.declined import Declined
from weft.kernels.source import (
    MOST_PARAMETER_BYTES,
    CudaSource,
    Inside,
    Launch,
    Number,
    Pointer,
    Schedule,
    TensorMap,
)

NAME = "w_member"
"""Entry of the kernels that are combined."""
_HEAD = 'extern "C" __global__ void __launch_bounds__('
_PLACES = {"blockIdx.x": "tile_x", "blockIdx.y": "tile_y", "blockIdx.z": "tile_z"}
_MAP = "const __grid_constant__ w_map"
_ALIGNED = 256


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
    def bounds(self) -> str:
        """Launch bounds as the text has them."""
        return _own(self.source).partition(_HEAD)[2].partition(")")[0]

    @property
    def count(self) -> int:
        """Blocks of one member."""
        return math.prod(self.grid)


def combined(
    schedule: Schedule,
    entry: str,
    found: Sequence[Member],
    sources: Sequence[CudaSource],
    lengths: Sequence[float],
    cluster: int = 1,
) -> CudaSource | Declined:
    """The kernel `entry` of all members, of which each has its own under the name `NAME`.

    `lengths` of a block's work in any unit: the longest begin first, so that what is waited for at the end is short.
    `cluster`: blocks of a cluster; 1: the kernels have none.
    """
    bodies: dict[str, _Body] = {}
    for number, source in enumerate(sources):
        if len(source.launches) > 1:
            return Declined("a product that takes two launches")
        if any(isinstance(x, Inside | Number) for x in source.launches[0].arguments):
            return Declined("an argument that is neither a buffer nor a tensor map")
        bodies.setdefault(source.sha256, _Body("", source)).members.append(number)
    ordered = sorted(bodies.values(), key=lambda b: -lengths[b.members[0]])
    if len({(b.bounds, b.source.launches[0].block) for b in ordered}) > 1:
        return Declined("products whose blocks differ in threads")
    for number, body in enumerate(ordered):
        body.text = _as_function(body.source, f"m{number}", f"{entry}_{number}_pack")
    return _whole(schedule, entry, found, ordered, cluster)


def _own(source: CudaSource) -> str:
    """A kernel's text without the headers that all share."""
    return source.text.removeprefix(prelude()).removeprefix(header())


def _as_function(source: CudaSource, space: str, pack: str) -> str:
    """A kernel's text without the headers: in a namespace, as the function `member` of its block's place; repacking."""
    before, kernel = _own(source).split(_HEAD, 1)
    kernel = kernel.partition(f") {NAME}(")[2]
    body, *packs = kernel.split(f'\nextern "C" __global__ void {NAME}_pack(')
    grid = source.launches[0].grid
    for place, name in (*_PLACES.items(), ("gridDim.x", f"{grid[0]}u")):
        body = body.replace(place, name)
    assert "blockIdx" not in body
    assert "gridDim" not in body
    body = body.replace(f"{_MAP} ", "const w_map& ")
    text = (
        f"namespace {space} {{\n{before}W_FN void member(const u32 tile_x, const u32 tile_y, const u32 tile_z, {body}}}"
    )
    for repack in packs:
        text += f'\nextern "C" __global__ void {pack}({repack.replace("{", f"{{ using namespace {space};", 1)}'
    return text


@dataclass(slots=True)
class _Memory:
    """What the whole kernel is given."""

    names: dict[Pointer | TensorMap, str] = field(default_factory=dict)
    """Argument of the launch -> name of the parameter."""
    packed: dict[tuple[int, int | None, int], int] = field(default_factory=dict)
    """(body, input, member where that is none) -> buffer of repacked weights."""
    packed_bytes: list[int] = field(default_factory=list)
    pack: list[Launch] = field(default_factory=list)
    workspace: int = 0
    state: int = 0

    def name(self, argument: Pointer | TensorMap) -> str:
        """The parameter of an argument."""
        if isinstance(argument, TensorMap):
            maps = sum(isinstance(x, TensorMap) for x in self.names)
            return self.names.setdefault(argument, f"map{maps}")
        prefix = {"in": "in", "out": "out", "packed": "pk"}.get(argument.kind, argument.kind)
        plain = prefix if argument.kind in ("work", "state") else f"{prefix}{argument.index}"
        return self.names.setdefault(argument, plain)

    def parameters(self) -> tuple[tuple[Pointer | TensorMap, str], ...]:
        """Arguments with the text of their parameters; maps first, since they are aligned."""
        maps = [(x, f"{_MAP} {name}") for x, name in self.names.items() if isinstance(x, TensorMap)]
        order = ("in", "packed", "out", "work", "state")
        pointers = sorted(
            (x for x in self.names if isinstance(x, Pointer)), key=lambda p: (order.index(p.kind), p.index)
        )
        read = [f"{'const ' if p.kind in ('in', 'packed') else ''}void* __restrict__ {self.names[p]}" for p in pointers]
        return (*maps, *zip(pointers, read, strict=True))


def _whole(
    schedule: Schedule, entry: str, found: Sequence[Member], bodies: Sequence[_Body], cluster: int
) -> CudaSource | Declined:
    memory = _Memory()
    texts, calls = [], []
    begin = 0
    for number, body in enumerate(bodies):
        texts.append(f"{body.text}\n")
        calls += _call(number, body, begin, entry, found, memory, cluster)
        begin += -(-body.count * len(body.members) // cluster) * cluster
    given = memory.parameters()
    copied = any(header() in b.source.text for b in bodies)
    kernel = [
        f"{_HEAD}{bodies[0].bounds}) {entry}({', '.join(text for _, text in given)}) {{",
        "const u32 block = blockIdx.x;",
        *calls,
        "w_wait(); w_release();",
        "}",
    ]
    launch = Launch(
        entry,
        (begin, 1, 1),
        bodies[0].source.launches[0].block,
        tuple(argument for argument, _ in given),
        max(b.source.launches[0].shared_bytes for b in bodies),
        (cluster, 1, 1),
    )
    if launch.parameter_bytes > MOST_PARAMETER_BYTES:
        return Declined(f"{launch.parameter_bytes} bytes of arguments; a kernel takes {MOST_PARAMETER_BYTES}")
    return CudaSource(
        schedule=schedule,
        text="".join([prelude(), header() if copied else "", *texts, "\n".join(kernel), "\n"]),
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
    if cluster > 1 and gy > 1:
        x, y = f"tile / {gy}u % {gx}u", f"tile % {gy}u"
    else:
        x, y = f"tile % {gx}u", f"tile / {gx}u % {gy}u"
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
        assert isinstance(p, Pointer | TensorMap)  # others were declined
        if isinstance(p, TensorMap):
            assert p.base.kind in ("in", "out")
            position = (member.inputs if p.base.kind == "in" else member.outputs)[p.base.index]
            texts.append(memory.name(replace(p, base=Pointer(p.base.kind, position))))
        elif p.kind == "work":
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
