"""Mean and variance of long rows by one pass over them, with one exchange among the blocks that share a row.

A warp sums x - s and (x - s)² about one of its own n elements s; with a, b those sums, its mean is s + a / n and its
squares about that are b - a² / n. As s is one of the elements, what remains of b is at least its n-th part, so that
cancellation costs at most n roundings, and hardly any where s is no outlier. Means m_i and squares q_i of parts with
n_i elements are joined by

    m = Σ n_i·m_i / Σ n_i,   q = Σ q_i + n_i·(m_i - m)²:

those of the warps by the first warp of a block, which puts the result into the shared memory of all blocks of its
cluster; those of the blocks by the first warp of each. What follows reads its operands before that exchange.

CTAs need not be a cluster: they may reduce *through global memory* (`Form.cross_cta`). Each leaves mean and squares of
its part in the state, two words that are written at once, and reads those of the others until none is 0: one way to the
L2 cache and one back, no fence, no counter. The last to have read sets them back. Nothing depends on blocks running at
once: a part that stays away, since its block has not started, is reduced by those who wait for it, with the same bits.

Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance: analysis and recommendations (1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from weft.generate.cuda.loops.exchange import Accumulator
from weft.generate.cuda.loops.forms import LEAST_CTAS
from weft.generate.cuda.loops.lanes import Scene, digits, elementwise_root
from weft.generate.cuda.loops.launch import Draft, Source
from weft.generate.cuda.loops.rows import Rows, Space
from weft.generate.cuda.loops.stages import Segment
from weft.generate.expr import c_type
from weft.generate.expr.ctype import storage_type
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.plan import Stage
from weft.ir.graph import Graph, NodeId
from weft.ir.moments import centred

WARP = 32
HALF_BYTES = 2
SQUARES = 1
"""Number of the stage of the squares, which follows that of the sum."""
SLOT_WORDS = 2
"""Words of what a block leaves for the others: mean and squares of its part of a row."""
MOST_TURNS = 64
MOST_ROOM = 208 << 10
"""Of a pass whose values wait in shared memory: turns, and bytes."""
UNROLLED = 8
"""Turns of the pass that are written out: their reads are on their way together."""
Held = tuple[int, NodeId, Coord]
"""A value that waits for a later stage: number of the space, node, coord."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a value of 16 bits waits: an element of a chunk of each turn."""

    array: str
    width: int
    kind: str
    lane: int


@cache
def moments_header() -> str:
    """Text of weft_cuda_moments.h."""
    return Path(__file__).with_name("weft_cuda_moments.h").read_text()


@cache
def meet_header() -> str:
    """Text of weft_cuda_cross_cta.h."""
    return Path(__file__).with_name("weft_cuda_cross_cta.h").read_text()


@final
class Moments(Rows):
    """Emits one segment; as `Rows` where it does not begin with a sum and the squares about its mean."""

    _pair: tuple[NodeId, NodeId] | None = None
    _slots = ""
    """What the blocks of this row leave for each other, and, `_left`, how many had read it."""
    _left = ""

    def __init__(self, source: Source, draft: Draft, scene: Scene, segment: Segment) -> None:
        super().__init__(source, draft, scene, segment)
        self._packs: dict[str, str] = {}
        """Per wide read the array in which what it read waits as it was."""
        self._packed: dict[Held, Packed] = {}
        self._opened: dict[str, str] = {}
        """Per such array the values of an element."""

    def _prepare(self) -> bool:
        if not super()._prepare():
            return False
        self._pair = self._find_pair()
        self.slices = self._pair is not None
        if self._pair is not None:
            self.unrolled = UNROLLED
        return True

    def _find_pair(self) -> tuple[NodeId, NodeId] | None:
        """Sum and squares, if the first two stages are these and the threads of a block can share them."""
        stages, graph = self.segment.stages, self.scene.graph
        if len(stages) < 2 or any(len(s.reductions) != 1 for s in stages[:2]) or stages[1].pre:
            return None
        if any(s.reductions for s in stages[2:]) or self.space_of[0] is not self.space_of[1]:
            return None
        total, squares = stages[0].reductions[0], stages[1].reductions[0]
        if centred(graph, squares) != total or c_type(graph.type_of(graph.nodes[total].inputs[0]).dtype) != "w_f32":
            return None
        if self.by_columns:
            fits = self.columns * self.row_lanes <= WARP and self.columns * self.across >= WARP
        else:
            fits = self.across >= max(WARP, min(self.form.threads, 256))  # a block has one row
        return (total, squares) if fits and self.space_of[0].vectors else None

    def _sharing(self, turns: int) -> int:
        if self._pair is None or min(self.form.cross_cta, turns) < LEAST_CTAS:
            return super()._sharing(turns)
        self.cross_cta = True
        vectors = self.space_of[0].vectors
        return -(-vectors // -(-vectors // min(self.form.cross_cta, turns)))  # none of equal slices is empty

    def _leave(self) -> None:
        if self._slots:
            count = self.cluster * self.columns * self.row_lanes
            self.nest.put(f"w_leave<{self.draft.threads}, {self.cluster}, {count}>(role, {self._slots}, {self._left});")
        super()._leave()

    def _shares_columns(self) -> bool:
        return self.by_columns if self._pair is not None else super()._shares_columns()

    def _goes_ahead(self, space: Space) -> bool:
        if self._pair is None or self.repeated:
            return super()._goes_ahead(space)
        if self.cross_cta and self.form.scatter:  # what the pass has not read
            return not all(self.segment.stages[k].reductions for k in space.stages)
        return not any(self.segment.stages[k].reductions for k in space.stages)

    def _read_ahead(self) -> None:
        if self._pair is None and self.repeated:
            self._read_row_values()  # of inputs only: the launch before this one need not have ended
        if self._pair is None or self.repeated:
            super()._read_ahead()

    def _stage(self, number: int, stage: Stage) -> None:
        if self._pair is not None and number <= SQUARES:
            if number == 0:
                self._moments()
            return
        super()._stage(number, stage)
        if not (stage.reductions or self.source.accesses.frozen):
            self._note_row_values()

    def _note_row_values(self) -> None:
        """What an element needs of its row: read before the exchange in the second pass."""
        own = {v.name for v in self.rows}
        found = {
            (node, coord)
            for node, coord in self.body.asked
            if node in self.scene.graph.inputs
            and all(v.name in own for i in coord for v in i.variables)
            and not any(True for i in coord for _ in i.loaded())
        }
        self.source.carried.setdefault(self.draft.suffix, {}).setdefault(-1, set()).update(found)

    def _read_row_values(self) -> None:
        for node, coord in sorted(self.source.carried.get(self.draft.suffix, {}).get(-1, ()), key=repr):
            self.body.value(node, coord)

    def _fits(self, space: Space, nodes: Sequence[NodeId], *, ahead: bool) -> bool:
        if not (self.cross_cta and self.form.smem_stash and all(self._is_half(n) for n in nodes)):
            return super()._fits(space, nodes, ahead=ahead)
        needed = len(nodes) * HALF_BYTES * space.trips * self.draft.threads
        return space.trips <= MOST_TURNS and needed <= MOST_ROOM

    def _registers(self, node: NodeId) -> float:
        return 0.5 if self.cross_cta and self._is_half(node) else 1

    def _is_half(self, node: NodeId) -> bool:
        dtype = self.scene.graph.type_of(node).dtype
        return dtype.is_float and dtype.itemsize == HALF_BYTES and node in self.scene.graph.inputs

    def _declare(self, which: int, node: NodeId, coord: Coord) -> None:
        if not (self.cross_cta and self._is_half(node)):
            super()._declare(which, node, coord)  # else with the first read

    def _hold(self, key: Held, name: str) -> None:
        if not (self.cross_cta and self._is_half(key[1])):
            super()._hold(key, name)
            return
        array, _, lane = name.rstrip("]").partition("[")
        if array not in self.body.chunks:
            super()._declare(*key)
            super()._hold(key, name)
            return
        address, width, dtype = self.body.chunks[array]
        if array not in self._packs:
            self._packs[array] = self.draft.name("h")
            self._make_room(self._packs[array], self.spaces[key[0]].trips, f"w_chunk<{width * HALF_BYTES}>", width)
            self.nest.put(f"{self._waits(array)} = *(const w_chunk<{width * HALF_BYTES}>*)({address});")
        self._packed[key] = Packed(self._packs[array], width, storage_type(dtype), int(lane))
        self.kept.add(key)

    def _make_room(self, name: str, turns: int, kind: str, width: int) -> None:
        """Declare an array of what was read: a thread's own, in registers or in shared memory."""
        if not self.form.smem_stash:
            self.nest.put(f"{kind} {name}[{turns}];", self.level)
            return
        start, threads = self.draft.smem_stash, self.draft.threads
        self.nest.put(f"{kind}* const {name} = ({kind}*)(sm + {start}u) + role.thread();", self.level)
        self.draft.smem_stash += turns * threads * width * HALF_BYTES

    def _waits(self, array: str) -> str:
        """An element of such an array."""
        return f"{self._packs[array]}[{f'u * {self.draft.threads}u' if self.form.smem_stash else 'u'}]"

    def _recall(self, number: int, space: Space) -> None:
        self._opened = {}
        super()._recall(number, space)

    def _waiting(self) -> list[Held]:
        return sorted(self.kept, key=repr) if self._packed else list(self.kept)

    def _held(self, key: Held) -> str:
        packed = self._packed.get(key)
        if packed is None:
            return super()._held(key)
        if packed.array not in self._opened:
            self._opened[packed.array] = name = self.draft.name("x")
            self.nest.put(f"w_f32 {name}[{packed.width}];")
            at = f"u * {self.draft.threads}u" if self.form.smem_stash else "u"
            self.nest.put(f"w_open<{packed.kind}>({packed.array}[{at}], {name});")
        return f"{self._opened[packed.array]}[{packed.lane}]"

    def _moments(self) -> None:
        graph, put = self.scene.graph, self.nest.put
        assert self._pair is not None
        operand = graph.nodes[self._pair[0]].inputs[0]
        if self.cross_cta:
            names = self._meet(operand)
        else:
            if self.cluster > 1:
                put("w_cluster_arrive();")
            sums, squared, shift, count = self._pass(operand)
            if not self.repeated:
                super()._read_ahead()
            self._read_row_values()
            names = self._exchange_moments(sums, squared, shift, count)
        for number, root in enumerate(self._pair):
            dtype = graph.type_of(graph.nodes[root].inputs[0]).dtype
            totals = [Accumulator(root, r, name, graph.nodes[root].prim, dtype) for r, name in enumerate(names[number])]
            self._results(number, self.segment.stages[number], totals)

    def _meet(self, operand: NodeId) -> tuple[list[str], list[str]]:
        """The pass over this block's part, and over those that stay away; names as `_exchange_moments` gives them."""
        put, rows, group = self.nest.put, self.row_lanes, f"role.block_x() / {self.cluster}u"
        beside = self.columns if self.by_columns else 1
        words = self.cluster * rows * beside * SLOT_WORDS
        slots, departed = (self.source.counters(self.groups * n) for n in (words, 1))
        desk, self._slots, self._left, total, squares = (self.draft.name(p) for p in "mmnst")
        self.draft.shared.append(f"W_SHARED w_desk<{self.draft.threads}, {rows}, {beside}, {self.cluster}> {desk};")
        put(f"unsigned* const {self._slots} = {slots} + ({group} * {words}u);")
        put(f"unsigned {self._left};")
        put(f"w_f32 {total}[{rows}], {squares}[{rows}];")
        space = self.space_of[0]
        sizes = f"{space.slice * space.lanes}u, {space.vectors * space.lanes}u"
        late = self._late_row_values(operand)
        with self.body.block(f"for (w_index part = rank; part != {self.cluster}u;)"):
            self.part = "part"
            sums, squared, shift, count = self._pass(operand)
            put("const w_index own = w_opaque(rank);")  # else its addresses would stay in registers throughout the loop
            self.part = "own"
            super()._read_ahead()
            self.part = "rank"
            given, about = self.draft.name("x"), self.draft.name("s")
            put(f"w_f32 {given}[{2 * rows}] = {{{', '.join([*sums, *squared])}}};")
            put(f"const w_f32 {about}[{rows}] = {{{', '.join(shift)}}};")
            put(f"w_publish(role, {desk}, {given}, {about}, {count}, part, {self._slots});")
            where = f"{desk}, part, rank, {self._slots}, {departed} + ({group}), {self._left}"
            put(f"part = w_meet<{sizes}>(role, {where}, {total}, {squares});")
        for line in late:
            put(line)
        return self._named(total), self._named(squares)

    def _late_row_values(self, operand: NodeId) -> list[str]:
        """Reads what elements need of their rows; gives the lines that widen it, for which no pass has to wait."""
        needed, lines, items = _inputs_of(self.scene.graph, operand), [], self.nest.stack[self.level].items
        for node, coord in sorted(self.source.carried.get(self.draft.suffix, {}).get(-1, ()), key=repr):
            before = len(items)
            array = self.body.value(node, coord).value.name.partition("[")[0]
            if len(items) == before + 2 and array in self.body.chunks and self._is_half(node) and node not in needed:
                declaration, _ = items[before:]
                del items[before:]
                address, width, dtype = self.body.chunks[array]
                held, size = self.draft.name("h"), width * HALF_BYTES
                self.nest.put(f"const w_chunk<{size}> {held} = *(const w_chunk<{size}>*)({address});", self.level)
                lines += [str(declaration), f"w_open<{storage_type(dtype)}>({held}, {array});"]
        return lines

    def _named(self, array: str) -> list[str]:
        """A name for each of an array's values."""
        names = [self.draft.name("s") for _ in range(self.row_lanes)]
        for r, name in enumerate(names):
            self.nest.put(f"const w_f32 {name} = {array}[{r}];")
        return names

    def _pass(self, operand: NodeId) -> tuple[list[str], list[str], list[str], str]:
        """Per row of a thread the sums about the shift, their squares, the shift; and the number of elements."""
        stage, space, put = self.segment.stages[0], self.space_of[0], self.nest.put
        lanes, rows = range(space.lanes), range(self.row_lanes)
        shift = [self.draft.name("s") for _ in rows]
        sums = {(r, k): (self.draft.name("s"), self.draft.name("s")) for r in rows for k in lanes}
        count = self.draft.name("n")
        for name in (*shift, count, *(x for pair in sums.values() for x in pair)):
            put(f"w_f32 {name} = 0.0f;")
        self._shift(operand, space, shift)
        with self._turns(space) as inside:
            self._recall(0, space)
            put(f"{count} += {f'{inside} ? {space.lanes}.0f : 0.0f' if inside else f'{space.lanes}.0f'};")
            for (r, k), (x, xx) in sums.items():
                for root in stage.pre:
                    at = self._place(0, r, k)
                    elementwise_root(self.scene, self.body, root, self.scene.layout.coord(root, at))
                value = self.body.value(operand, self._operand_place(operand, r, k)).value.name
                d, apart = self.draft.name("d"), f"{value} - {shift[r]}"
                put(f"const w_f32 {d} = {f'{inside} ? {apart} : 0.0f' if inside else apart};")
                put(f"{x} += {d};")
                put(f"{xx} += {d} * {d};")
            self._keep(0, space)
            self.body.flush(" && ".join(t for t in (self.live, inside) if t))
        for r in rows:
            for i in range(2):
                self._add_up([sums[r, k][i] for k in lanes])
        return [sums[r, 0][0] for r in rows], [sums[r, 0][1] for r in rows], shift, count

    def _shift(self, operand: NodeId, space: Space, shift: list[str]) -> None:
        """An element of the warp; where more digits matter, the middle one of three."""
        put = self.nest.put
        first = f"role.thread() / {WARP}u * {WARP // (self.columns if self.by_columns else 1)}u"
        first = f"{self.part} * {space.slice}u + {first}" if self.cluster > 1 else first
        found: list[list[str]] = [[] for _ in shift]
        for turn in [0] if self.source.approximate else [0, space.trips // 3, 2 * space.trips // 3]:
            names = [self.draft.name("s") for _ in shift]
            put(f"w_f32 {', '.join(names)};")
            with self.body.block(""):
                put(f"const w_index p_ = {first} + {turn * self.across}u;")
                put(f"const w_index p = p_ < {space.vectors}u ? p_ : {space.vectors - 1}u;")
                for line in digits(space.variables, "p", space.lanes):
                    put(line)
                self._bind(space.variables)
                for r, name in enumerate(names):
                    put(f"{name} = {self.body.value(operand, self._operand_place(operand, r, 0)).value.name};")
                    found[r].append(name)
        for name, values in zip(shift, found, strict=True):
            middle = f"w_middle({', '.join(values)})" if len(values) > 1 else values[0]
            put(f"{name} = {middle};")

    def _operand_place(self, operand: NodeId, r: int, k: int) -> Coord:
        return self.scene.layout.coord(operand, self._place(0, r, k))

    def _add_up(self, names: list[str]) -> None:
        """As a tree; the first has the result."""
        while len(names) > 1:
            half = (len(names) + 1) // 2
            for a, b in zip(names, names[half:], strict=False):
                self.nest.put(f"{a} += {b};")
            names = names[:half]

    def _exchange_moments(
        self, sums: list[str], squared: list[str], shift: list[str], count: str
    ) -> tuple[list[str], list[str]]:
        """Names of sum and squares of each row of a thread."""
        put, rows, beside = self.nest.put, self.row_lanes, self.columns if self.by_columns else 1
        warps, every = self.draft.threads // WARP, rows * beside
        words = 3 * warps * every + -(-2 * warps // 4) * 4 + 2 * every + 3 * self.cluster * every
        memory, given, about, total, squares = (self.draft.name(p) for p in "mxsst")
        self.draft.shared.append(f"W_SHARED w_chunk<16> {memory}[{-(-words // 4)}];")
        put(f"w_f32 {given}[{2 * rows}] = {{{', '.join([*sums, *squared])}}}, {total}[{rows}], {squares}[{rows}];")
        put(f"const w_f32 {about}[{rows}] = {{{', '.join(shift)}}};")
        sizes = f"{self.draft.threads}, {rows}, {beside}, {self.cluster}"
        rank = "rank" if self.cluster > 1 else "0u"
        put(f"w_moments<{sizes}>(role, {given}, {about}, {count}, {rank}, (w_f32*){memory}, {total}, {squares});")
        return self._named(total), self._named(squares)


def _inputs_of(graph: Graph, node: NodeId) -> set[NodeId]:
    """All that a node depends on."""
    found: set[NodeId] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += graph.nodes[n].inputs
    return found
