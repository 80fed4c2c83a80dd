"""Several roles in one launch: a flat grid over the blocks of all, each of which runs one of them.

A block asks a table of ranges, which stands in the text, whose it is. Roles of equal text are one device function,
which is given the arguments of the member that it works for. Every function stands in a namespace of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.generate.cuda.role.assemble import bounds, frame_of, kernel, launch, note, shared
from weft.generate.cuda.role.role import READ, WRITTEN, DeviceRole, Dim3, Parameter, RoleSource
from weft.generate.expr.integer import Int
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

_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Member:
    """One of the roles, and where its inputs and outputs lie among those of the whole."""

    source: RoleSource
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    length: float
    """Of a block's work, in any unit: the longest begin first, so that what is waited for at the end is short."""


@dataclass(slots=True)
class _Body:
    """Members of equal text."""

    source: RoleSource
    members: list[int] = field(default_factory=list)

    @property
    def role(self) -> DeviceRole:
        """The only one that the source launches."""
        return self.source.roles[0]

    @property
    def grid(self) -> Dim3:
        """Blocks of one member, by dimension."""
        return self.role.grid

    @property
    def count(self) -> int:
        """Blocks of one member."""
        return math.prod(self.grid)


def side_by_side(schedule: Schedule, entry: str, found: Sequence[Member], cluster: int = 1) -> CudaSource | Declined:
    """The kernel `entry` of all members; `cluster`: blocks of a cluster; 1: the kernel has none."""
    bodies: dict[RoleSource, _Body] = {}
    for number, member in enumerate(found):
        if len(member.source.roles) > 1:
            return Declined("a product that takes two launches")
        role = member.source.roles[0]
        if role.co_resident > 1:
            return Declined("CTAs that spin on each other: beside others they may not be resident at once")
        if any(isinstance(p.argument, Inside | Number) for p in role.parameters):
            return Declined("an argument that is neither a buffer nor a tensor map")
        same = replace(member.source, schedule=schedule)  # what runs does not depend on which schedule asked for it
        bodies.setdefault(same, _Body(member.source)).members.append(number)
    ordered = sorted(bodies.values(), key=lambda b: -found[b.members[0]].length)
    if len({(bounds(b.role), b.role.threads) for b in ordered}) > 1:
        return Declined("products whose CTAs differ in threads")
    return _whole(schedule, entry, found, ordered, cluster)


def _function(body: _Body, number: int) -> str:
    """A role in a namespace: what it brings, and the function `member`, which is handed where it runs."""
    role = body.role
    frame, declared = frame_of(role, f"w_beside<{body.grid[0]}u>", "member")
    parameters = "".join(f", {p.declared(kernel=False)}" for p in role.parameters)
    return (
        f"namespace m{number} {{\n{role.globals}{declared}"
        f"typedef {frame} frame;\n"
        f"W_FN void member(const frame role{parameters}) {{\n{shared(role)}{role.body}\n}}\n"
        f"{''.join(x.globals for x in body.source.pack)}}}\n"
    )


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

    def parameters(self) -> tuple[Parameter, ...]:
        """Of the kernel; maps first, since they are aligned."""
        maps = [Parameter(name, x) for x, name in self.names.items() if isinstance(x, TensorMap)]
        order = ("in", "packed", "out", "work", "state")
        pointers = sorted(
            (x for x in self.names if isinstance(x, Pointer)), key=lambda p: (order.index(p.kind), p.index)
        )
        kinds = {kind: READ if kind in ("in", "packed") else WRITTEN for kind in order}
        return (*maps, *(Parameter(self.names[p], p, kinds[p.kind]) for p in pointers))


def _whole(
    schedule: Schedule, entry: str, found: Sequence[Member], bodies: Sequence[_Body], cluster: int
) -> CudaSource | Declined:
    memory = _Memory()
    texts, calls, functions = [], [], []
    begin = 0
    for number, body in enumerate(bodies):
        functions.append(_function(body, number))
        texts.append(functions[-1])
        calls += _call(number, body, begin, entry, found, memory, cluster)
        # members of one text repack by one kernel, whichever weights they have
        texts += [_repacking(x, number, entry) for x in body.source.pack]
        begin += -(-body.count * len(body.members) // cluster) * cluster
    whole = DeviceRole(
        threads=bodies[0].role.threads,
        body="\n".join(["const u32 block = role.block_x();", *calls, "role.pdl_wait(); role.pdl_trigger();"]),
        parameters=memory.parameters(),
        grid=(begin, 1, 1),
        min_ctas_per_sm=bodies[0].role.min_ctas_per_sm,
        cluster=(cluster, 1, 1),
    )
    # each member declares the shared memory itself, so the kernel does not
    launched = replace(launch(whole, entry), shared_bytes=max(b.role.shared_bytes for b in bodies))
    if launched.parameter_bytes > MOST_PARAMETER_BYTES:
        return Declined(f"{launched.parameter_bytes} bytes of arguments; a kernel takes {MOST_PARAMETER_BYTES}")
    headers = dict.fromkeys(x for b in bodies for x in b.source.headers)
    note(_as_role(schedule, whole, bodies, functions, tuple(headers), memory))
    return CudaSource(
        schedule=schedule,
        text="".join([*headers, *texts, kernel(whole, entry)]),
        launches=(launched,),
        pack=tuple(memory.pack),
        workspace_bytes=memory.workspace,
        state_bytes=memory.state,
        packed_bytes=tuple(memory.packed_bytes),
        replaces_weights=_replaced(found, bodies),
        capability=max(b.source.capability for b in bodies),
        exact_arch=any(b.source.exact_arch for b in bodies),
    )


def _as_role(
    schedule: Schedule,
    whole: DeviceRole,
    bodies: Sequence[_Body],
    functions: Sequence[str],
    headers: tuple[str, ...],
    memory: _Memory,
) -> RoleSource | Declined:
    """The whole as one role; what repacks for it is not: that belongs to the kernel."""
    if len({b.role.registers for b in bodies}) > 1:
        return Declined("products in one launch that move registers by different numbers")
    role = replace(
        whole,
        globals="".join(functions),
        shared_bytes=max(b.role.shared_bytes for b in bodies),
        named_barriers=max(b.role.named_barriers for b in bodies),
        registers=bodies[0].role.registers,
        idle_threads=min(b.role.idle_threads for b in bodies),
    )
    sources = [b.source for b in bodies]
    return RoleSource(
        schedule,
        headers,
        (role,),
        workspace_bytes=memory.workspace,
        state_bytes=memory.state,
        packed_bytes=tuple(memory.packed_bytes),
        capability=max(x.capability for x in sources),
        exact_arch=any(x.exact_arch for x in sources),
    )


def _repacking(role: DeviceRole, number: int, entry: str) -> str:
    """The kernel that repacks for the members of a text; it may name what stands in their namespace."""
    inside = replace(role, body=f"using namespace m{number};\n{role.body}", globals="", name="")
    return kernel(inside, _pack_entry(entry, number))


def _pack_entry(entry: str, number: int) -> str:
    return f"{entry}_{number}_pack"


def _call(
    number: int, body: _Body, begin: int, entry: str, found: Sequence[Member], memory: _Memory, cluster: int
) -> list[str]:
    """Statements that run the tiles of all members of one text, which begin at the block `begin`.

    Blocks behind the last tile, which fill a cluster, find no member.
    """
    (gx, gy, gz), blocks, tile = body.grid, body.count * len(body.members), Int("tile")
    given = [_given(number, body, i, entry, found, memory) for i in body.members]
    # the blocks of a cluster follow each other, and share a sum
    if cluster > 1 and gy > 1:
        x, y = tile / f"{gy}u" % f"{gx}u", tile % f"{gy}u"
    else:
        x, y = tile % f"{gx}u", tile / f"{gx}u" % f"{gy}u"
    here = [x if gx > 1 else "0u", y if gy > 1 else "0u", tile / f"{gx * gy}u" if gz > 1 else "0u"]
    arguments = [
        f"m{number}::frame({', '.join(map(str, here))})",
        *(_selected(list(x)) for x in zip(*given, strict=True)),
    ]
    at, count = Int("at"), f"{body.count}u"
    place = f"const u32 at = {Int('block') - f'{begin}u'}, which = {at / count}, tile = {at % count};"
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
    for parameter in body.role.parameters:
        p, kind = parameter.argument, parameter.type.removesuffix(" __restrict__")
        cast = "" if parameter.type in (READ, WRITTEN) else f"({kind})"
        assert isinstance(p, Pointer | TensorMap)  # others were declined
        if isinstance(p, TensorMap):
            assert p.base.kind in ("in", "out")
            position = (member.inputs if p.base.kind == "in" else member.outputs)[p.base.index]
            texts.append(memory.name(replace(p, base=Pointer(p.base.kind, position))))
        elif p.kind == "work":
            texts.append(f"{cast}((char*){memory.name(Pointer('work'))} + {work}ull)")
        elif p.kind == "state":
            texts.append(f"{cast}((char*){memory.name(Pointer('state'))} + {state}ull)")
        elif p.kind == "packed":
            at = _packed(number, index, _pack_entry(entry, number), member, source, memory)
            texts.append(cast + memory.name(Pointer("packed", at)))
        else:
            position = (member.inputs if p.kind == "in" else member.outputs)[p.index]
            texts.append(cast + memory.name(Pointer(p.kind, position)))
    return texts


def _packed(number: int, index: int, entry: str, member: Member, source: RoleSource, memory: _Memory) -> int:
    """The buffer of a member's repacked weights: members of one text and one weight share it."""
    (role,) = source.pack
    own = launch(role, entry)
    arguments = [
        Pointer("in", member.inputs[p.index]) if isinstance(p, Pointer) and p.kind == "in" else p for p in own.arguments
    ]
    weight = next((p.index for p in arguments if isinstance(p, Pointer) and p.kind == "in"), None)
    key = (number, weight, -1 if weight is not None else index)
    if key not in memory.packed:
        at = memory.packed[key] = len(memory.packed_bytes)
        memory.packed_bytes += source.packed_bytes
        placed = tuple(Pointer("packed", at) if isinstance(p, Pointer) and p.kind == "packed" else p for p in arguments)
        memory.pack.append(replace(own, arguments=placed))
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
