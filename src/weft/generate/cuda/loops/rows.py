"""Chains of reductions over common rows: who owns a row, what stays in registers, how partial results meet.

A *row* is one value of the free loops. `across` threads share it; a block owns `width` vectors of rows. Where the
rows' elements are contiguous in memory, the threads of a row are neighbours (`columns` = 1); where neighbouring rows
are contiguous (channels-last), `columns` threads stand beside each other and every thread owns `lanes` rows.
Elements keep their thread through all stages over the same loops, so what a later stage reads again (loaded values,
costly intermediates) waits in registers. Partial results are combined in a fixed order: bits do not vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from weft.generate.cuda.loops.exchange import Accumulator, Team
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.lanes import (
    Probe,
    Scene,
    best_lane,
    digits,
    elementwise_root,
    lanes_of,
    merge,
    order,
    probe,
)
from weft.generate.cuda.loops.launch import Draft, Source
from weft.generate.cuda.loops.point import MOST_LANES
from weft.generate.cuda.loops.stages import Segment
from weft.generate.expr import Value, c_type
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.index import Index, Var, index_of
from weft.generate.loopnest.plan import Key, Stage, reduced_axes
from weft.ir.graph import NodeId
from weft.ir.types import DType

MAX_CARRIED = 64
"""Registers of a thread for values that wait for a later stage; half of what it has, in large blocks."""
BATCH = 4
"""Turns of a loop whose reads are on their way together."""
MAX_AHEAD = 32
"""Registers of a thread for what an elementwise stage reads before the reductions that it waits for."""
MAX_TURNS = 16
"""Turns of a loop over elements that are written out."""
FULL = 132 * 1024
"""Threads that keep a large GPU busy."""
SHORT = 16
"""Elements of rows that lie side by side, of which a thread has all where there are rows for so many threads."""


@dataclass(slots=True)
class Space:
    """The loops of some stages inside a row."""

    keys: frozenset[Key]
    variables: list[Var]
    lanes: int = 1
    trips: int = 1
    """Vectors that a thread goes through."""
    split: int = 1
    """Blocks among which the vectors of a row are divided."""
    slice: int = 0
    """Vectors of a block, where those follow each other."""
    stages: list[int] = field(default_factory=list)

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return math.prod(v.size for v in self.variables) // self.lanes


class Rows(Team):
    """Emits one segment into a draft."""

    def __init__(self, source: Source, draft: Draft, scene: Scene, segment: Segment) -> None:
        super().__init__(draft, scene.graph)
        self.source, self.scene, self.segment = source, scene, segment
        self.form = source.form
        self.slices = False
        """Whether a block of a cluster owns elements that follow each other, not every so many."""
        self.part = "rank"
        """Number of the slice of a row that a loop goes over."""
        self.unrolled = BATCH
        """Turns of a loop that are written out although nothing of them is kept."""

    # loops

    def _prepare(self) -> bool:
        """Choose loops and owners; False when there is nothing to do."""
        sizes = self.scene.layout.sizes
        keys = self.segment.rows or ()
        self.rows = [Var(f"i{k}", sizes[key]) for k, key in enumerate(keys)]
        row_at = {key: index_of(v) for key, v in zip(keys, self.rows, strict=True)}
        self.spaces: list[Space] = []
        self.space_of: list[Space] = []
        self.at: list[dict[Key, Index]] = []
        by_space: list[dict[Key, Index]] = []
        for number, stage in enumerate(self.segment.stages):
            inner = [k for k in [*stage.free, *stage.reduced] if k not in row_at]
            space = next((s for s in self.spaces if s.keys == frozenset(inner)), None)
            if space is None:
                space = Space(
                    frozenset(inner), [Var(f"j{len(self.spaces)}_{k}", sizes[x]) for k, x in enumerate(inner)]
                )
                self.spaces.append(space)
                by_space.append(row_at | {x: index_of(v) for x, v in zip(inner, space.variables, strict=True)})
            space.stages.append(number)
            self.space_of.append(space)
            self.at.append(by_space[self.spaces.index(space)])
        if any(v.size == 0 for v in self.rows):
            return False
        if all(v.size for s in self.spaces for v in s.variables):
            seen = probe(self.scene, self.segment.stages, self.at)
            merge(self.rows, by_space, seen)
            for space in self.spaces:
                merge(space.variables, by_space, seen)
            self._choose(seen)
        else:
            self.row_lanes, self.columns, self.across, self.by_columns = 1, 1, 32, False
        return True

    def _choose(self, seen: Probe) -> None:
        """Lanes, and how many threads share a row."""
        form = self.form
        order(self.rows, seen)
        for space in self.spaces:
            order(space.variables, seen)
        largest = max(self.spaces, key=lambda s: s.vectors)
        lane = best_lane([*self.rows, *largest.variables], seen)
        self.row_lanes, self.columns = 1, 1
        self.by_columns = lane is not None and lane in self.rows
        count = math.prod(v.size for v in self.rows)
        if lane is not None and self.by_columns:
            self.rows = [*(v for v in self.rows if v is not lane), lane]
            self.row_lanes = lanes_of(lane, seen, form.vector, MOST_LANES)
            if largest.vectors <= SHORT and count // self.row_lanes >= FULL and _is_plain(form):
                self.columns, self.across = max(32, form.threads), 1  # a thread has whole rows: nothing is exchanged
                return
            item = min(x.itemsize for x in seen.accesses)
            wanted = form.columns or max(4, 128 // (self.row_lanes * item))
            self.columns = min(_power(wanted), 32, _power(count // self.row_lanes))
            self.across = max(1, form.threads // self.columns)
            while self.across > 1 and self.across * self.columns > 32 and self.across >= 2 * largest.vectors:
                self.across //= 2
            return
        for space in self.spaces:
            inner = best_lane(space.variables, seen)
            if inner is not None:
                space.variables = [*(v for v in space.variables if v is not inner), inner]
                space.lanes = lanes_of(inner, seen, form.vector, MOST_LANES)
        beside = self._interleaved(lane, seen)
        if beside is not None and lane is not None:
            self.by_columns = True
            self.rows = [*(v for v in self.rows if v is not beside), beside]
            item = min(x.itemsize for x in seen.accesses)
            wanted = form.columns or max(1, 128 // (lane.size * item))
            self.columns = min(_power(wanted), 32, _power(beside.size))
            self.across = max(1, form.threads // self.columns)
            return
        self.across = form.per_row or self._across(count, largest)

    def _interleaved(self, lane: Var | None, seen: Probe) -> Var | None:
        """The loop over rows of which short runs alternate in memory, e.g. groups of channels where those lie last."""
        if lane is None or lane.size * max(x.itemsize for x in seen.accesses) > 64:
            return None
        if not any(lane in s.variables and any(v is not lane and v.size > 1 for v in s.variables) for s in self.spaces):
            return None  # a run is a whole row: rows follow each other, they do not alternate
        large = [x.address for x in seen.accesses if lane in x.address.variables]
        most = max(math.prod(v.size for v in x.variables) for x in large)
        main = [x for x in large if math.prod(v.size for v in x.variables) == most]
        found = [v for v in self.rows if v.size > 1 and all(x.coefficient(v) == lane.size for x in main)]
        return found[0] if len(found) == 1 and all(x.coefficient(lane) == 1 for x in main) else None

    def _across(self, count: int, largest: Space) -> int:
        """Threads per row: about eight elements each, more where rows are few."""
        threads = 1
        elements = largest.vectors * largest.lanes
        while (
            threads < 1024
            and threads < largest.vectors
            and (threads * 16 < elements or (count * threads < FULL and threads * 8 < elements))
        ):
            threads *= 2
        return threads

    def _owners(self) -> None:
        """Blocks, and the declarations that say which rows and which part of them a thread has."""
        form, draft, put = self.form, self.draft, self.nest.put
        vectors = math.prod(v.size for v in self.rows) // self.row_lanes
        self.vectors = vectors
        turns = max(-(-s.vectors // max(self.across, 1)) for s in self.spaces)
        self.repeated = False
        self.cluster = self._sharing(turns)
        self.split = 1
        """Blocks that share the rows of a block."""
        if self.by_columns:
            draft.threads = max(32, self.columns * self.across)
            self.across = draft.threads // self.columns
            self.width = self.columns
            put(f"const w_index y = role.thread() / {self.columns}u, x = role.thread() % {self.columns}u;")
        else:
            threads = max(self.across, min(form.threads, 256))
            while threads > max(32, self.across) and vectors * self.across < threads * 132:
                threads //= 2
            draft.threads = threads = max(threads, 32)
            self.width = threads // self.across
            if self.width > 1:
                put(f"const w_index y = role.thread() % {self.across}u, x = role.thread() / {self.across}u;")
            else:
                put("const w_index y = role.thread();")
        if self.width > 1 and not self._shares_columns():
            self.cluster = 1
        groups = -(-vectors // self.width)
        self.groups = groups
        if form.spread and self.cluster == 1:
            self._divide(max(1, form.spread // groups), turns)
        draft.cluster = 1 if self.cross_cta else self.cluster
        draft.blocks = groups * self.cluster * self.split
        block = "role.block_x()"
        if self.repeated:  # what was read last is read first: it may still be in the cache
            put(f"const w_index block = {draft.blocks - 1}u - role.block_x();")
            block = "block"
        self.member = "y"
        if self.cluster > 1:
            put(
                f"const w_index rank = {f'role.block_x() % {self.cluster}u' if self.cross_cta else 'w_cluster_rank()'};"
            )
            put(f"const w_index member = rank * {self.across}u + y;")
            block, self.member = f"role.block_x() / {self.cluster}u", "member"
        if self.split > 1:
            put(f"const w_index share = {block} % {self.split}u, group = {block} / {self.split}u;")
            block = "group"
        x = " + x" if self.width > 1 else ""
        scale = f" * {self.width}u" if self.width > 1 else ""
        self.live = ""
        if vectors % self.width:
            put(f"const w_index row_ = {block}{scale}{x};")
            put(f"const bool live = row_ < {vectors}u;")
            put(f"const w_index row = live ? row_ : {vectors - 1}u;")
            self.live = "live"
        else:
            put(f"const w_index row = {block}{scale}{x};")
        for line in digits(self.rows, "row", self.row_lanes):
            put(line)
        self._bind(self.rows)
        for space in self.spaces:
            space.trips = -(-space.vectors // (self.across * self.cluster * space.split))
            reducing = any(self.segment.stages[k].reductions for k in space.stages)
            space.trips = space.trips if reducing or self.cross_cta else _whole(space.trips)
            space.slice = -(-space.vectors // self.cluster) if self.cross_cta else space.trips * self.across

    def _sharing(self, turns: int) -> int:
        """Blocks that share the rows of a block, given the turns of one block alone."""
        return min(self.form.cluster, _power(turns)) if self.by_columns or self.across >= 128 else 1

    def _shares_columns(self) -> bool:
        """Whether blocks of a cluster can exchange what they have of several rows."""
        reductions = [stage.reductions for stage in self.segment.stages if stage.reductions]
        return self.by_columns and all(self.through_memory(roots) for roots in reductions)

    def _divide(self, blocks: int, turns: int) -> None:
        """Several blocks for the same rows: of one reduction, or of what follows short ones that all of them repeat."""
        if len(self.segment.stages) == 1:
            self.split = self.spaces[0].split = min(blocks, turns)
            return
        reducing = {id(self.space_of[k]) for k, stage in enumerate(self.segment.stages) if stage.reductions}
        longest = max((s.vectors for s in self.spaces if id(s) in reducing), default=0)
        others = [s for s in self.spaces if id(s) not in reducing and s.vectors > longest]
        if others and len(others) + len(reducing) == len(self.spaces):
            self.split = -(-turns // _whole(-(-turns // min(blocks, turns))))
            self.repeated = self.split > 1
            for space in others:
                space.split = self.split

    def _bind(self, variables: Sequence[Var]) -> None:
        for var in variables:
            self.body.bind(var, self.nest.level)

    def _lane_values(self, variables: Sequence[Var], lanes: int, k: int) -> dict[Var, Index]:
        """The innermost variable counts vectors: its value at lane k."""
        if not variables or lanes == 1:
            return {}
        last = variables[-1]
        return {last: index_of(Var(last.name, last.size // lanes)) * lanes + k}

    # text

    def emit(self) -> None:
        """Write the whole segment."""
        if not self._prepare():
            return
        with self.body.block("") as level:
            self.level = level
            self._owners()
            self._plan_carried()
            self._read_ahead()
            for number, stage in enumerate(self.segment.stages):
                self._stage(number, stage)
            self._leave()

    def _leave(self) -> None:
        """No block leaves while others read its memory."""
        if self.cluster > 1 and not self.slices:
            self.nest.put("w_cluster_sync();")

    def _plan_carried(self) -> None:
        """Arrays for what several stages over the same loops ask for: loaded values and costly intermediates."""
        self.arrays: dict[tuple[int, NodeId, Coord], str] = {}
        self.kept: set[tuple[int, NodeId, Coord]] = set()
        asked = self.source.carried.get(self.draft.suffix, {})
        for which, space in enumerate(self.spaces):
            wanted: dict[tuple[NodeId, Coord], int] = {}
            for number in space.stages:
                for key in asked.get(number, ()):
                    wanted[key] = wanted.get(key, 0) + 1
            ahead = self._goes_ahead(space)
            keys = sorted((k for k, n in wanted.items() if n > 1 or (ahead and k[0] in self.scene.readable)), key=repr)
            if not self._fits(space, [node for node, _ in keys], ahead=ahead):
                continue
            for node, coord in keys:
                name = self.draft.name("h")
                self.arrays[which, node, coord] = name
                self._declare(which, node, coord)

    def _fits(self, space: Space, nodes: Sequence[NodeId], *, ahead: bool) -> bool:
        """Whether there is room for these values of all turns."""
        registers = sum(self._registers(node) for node in nodes) * space.trips
        if ahead and registers > MAX_AHEAD:
            return False
        return space.trips <= MAX_TURNS and registers <= min(MAX_CARRIED, 32768 // self.draft.threads)

    def _registers(self, _node: NodeId) -> float:
        """What one value takes that waits for a later stage."""
        return 1

    def _declare(self, which: int, node: NodeId, coord: Coord) -> None:
        """An array for a value of each turn."""
        kind, turns = c_type(self.scene.graph.type_of(node).dtype), self.spaces[which].trips
        self.nest.put(f"{kind} {self.arrays[which, node, coord]}[{turns}];", self.level)

    def _hold(self, key: tuple[int, NodeId, Coord], name: str) -> None:
        """Let a value wait for a later stage."""
        self.nest.put(f"{self.arrays[key]}[u] = {name};")
        self.kept.add(key)

    def _held(self, key: tuple[int, NodeId, Coord]) -> str:
        """Name of a value that has waited."""
        return f"{self.arrays[key]}[u]"

    def _goes_ahead(self, _space: Space) -> bool:
        """Whether what the stages of a space read is read before the reductions that they wait for."""
        return self.repeated

    def _read_ahead(self) -> None:
        """What the stages of a divided row read is on its way while the reductions before them go on."""
        inputs = set(self.scene.graph.inputs)
        asked: list[tuple[bool, int, Space, int, list[tuple[int, NodeId, Coord]]]] = []
        for which, space in enumerate(self.spaces):
            mine = [k for k in self.arrays if k[0] == which and k not in self.kept]
            keys = [k for k in mine if k[1] in self.scene.readable and not _at_run_time(k[2])]
            if keys and self._goes_ahead(space):
                late = any(k[1] not in inputs for k in keys)  # what the launch before this one stores
                asked.append((late, space.split, space, which, keys))
        for *_, space, _which, keys in sorted(asked, key=lambda x: (x[0], x[1], x[3])):
            with self._turns(space):
                for key in keys:
                    self._hold(key, self.body.value(key[1], key[2]).value.name)

    def _place(self, number: int, r: int, k: int) -> dict[Key, Index]:
        """Loops of a stage at row lane r and element lane k."""
        space = self.space_of[number]
        values = self._lane_values(self.rows, self.row_lanes, r) | self._lane_values(space.variables, space.lanes, k)
        return {key: i.substitute(values) for key, i in self.at[number].items()} if values else self.at[number]

    @contextmanager
    def _turns(self, space: Space, batch: int = 0) -> Iterator[str]:
        """The loop over a thread's vectors of a row, or over `batch` of them from the loop of `c` on.

        Gives the condition that the vector exists. Where only some turns lack one, they go through the last vector once
        more, so that all loads can be on their way together.
        """
        which = self.spaces.index(space)
        step = self.across * (1 if self.slices else self.cluster)
        held = any(key[0] == which for key in self.arrays)
        count = batch or space.trips
        unroll = "" if (held and not self.form.smem_stash) or count <= self.unrolled else " 4"
        with self.body.block(f'_Pragma("unroll{unroll}") for (w_index u = 0u; u < {count}u; ++u)'):
            turn = f"c * {batch}u + u" if batch else "u"
            position = f"(share * {space.trips}u + {turn})" if space.split > 1 else f"({turn})" if batch else turn
            sliced = self.slices and self.cluster > 1
            position = f"(rank * {space.trips}u + {turn})" if sliced else position
            turns = -(-space.trips // count) * count
            even = space.vectors == self.across * self.cluster * turns * space.split
            clamped = not even and (turns > 1 or self.cross_cta)
            name = "p_" if clamped else "p"
            inside = f"p_ < {space.vectors}u" if clamped else ""
            if self.cross_cta:
                self.nest.put(f"const w_index o_ = ({turn}) * {self.across}u + y;")
                self.nest.put(f"const w_index {name} = {self.part} * {space.slice}u + o_;")
                # so many turns are all there in all blocks
                full = min(space.slice, space.vectors - (self.cluster - 1) * space.slice) // self.across
                if clamped:
                    inside = (
                        f"(({turn}) < {full}u || (o_ < {space.slice}u && {inside}))"
                        if full > 0
                        else (f"o_ < {space.slice}u && {inside}")
                    )
            else:
                self.nest.put(f"const w_index {name} = {position} * {step}u + {'y' if sliced else self.member};")
            if clamped:
                self.nest.put(f"const w_index p = {inside} ? p_ : {space.vectors - 1}u;")
            with self.body.block("" if even or clamped else f"if (p < {space.vectors}u)"):
                for line in digits(space.variables, "p", space.lanes):
                    self.nest.put(line)
                self._bind(space.variables)
                yield inside

    def _stage(self, number: int, stage: Stage) -> None:
        space = self.space_of[number]
        partial = {
            (root, r, k): self._accumulator(root, r)
            for root in stage.reductions
            for r in range(self.row_lanes)
            for k in range(space.lanes)
        }
        ahead = [] if stage.reductions else self._batched(number, space)
        if space.vectors and ahead:
            self._in_batches(number, stage, ahead)
        elif space.vectors:
            with self._turns(space) as inside:
                self._recall(number, space)
                for r in range(self.row_lanes):
                    for k in range(space.lanes):
                        at, mine = self._place(number, r, k), {x: partial[x, r, k] for x in stage.reductions}
                        self._element(stage, at, mine, inside)
                self._keep(number, space)
                self.body.flush(" && ".join(t for t in (self.live, inside) if t))
                if self.cross_cta:
                    self.nest.put("w_in_turn();")
        if stage.reductions:
            for root in stage.reductions:
                for r in range(self.row_lanes):
                    self._join([partial[root, r, k] for k in range(space.lanes)])
            self._finish(
                number, stage, [partial[root, r, 0] for root in stage.reductions for r in range(self.row_lanes)]
            )

    def _batched(self, number: int, space: Space) -> list[tuple[int, NodeId, Coord]]:
        """What an elementwise stage of many turns reads, if a few turns of it fit in registers."""
        which = self.spaces.index(space)
        if space.trips == 1 or any(key[0] == which for key in self.arrays):
            return []
        asked = self.source.carried.get(self.draft.suffix, {}).get(number, set())
        keys = [(which, *key) for key in asked if key[0] in self.scene.readable]
        order = sorted(keys, key=lambda k: (_at_run_time(k[2]), repr(k)))  # indices before what they are indices of
        return order if len(keys) * min(BATCH, space.trips) <= MAX_CARRIED else []

    def _in_batches(self, number: int, stage: Stage, ahead: list[tuple[int, NodeId, Coord]]) -> None:
        """A few turns at a time: first all reads, then all results."""
        space = self.space_of[number]
        batch = min(BATCH, space.trips)
        with self.body.block(f'_Pragma("unroll 1") for (w_index c = 0u; c < {-(-space.trips // batch)}u; ++c)'):
            for key in ahead:
                self.arrays[key] = self.draft.name("h")
                kind = c_type(self.scene.graph.type_of(key[1]).dtype)
                self.nest.put(f"{kind} {self.arrays[key]}[{batch}];")
            for late in (False, True):
                keys = [key for key in ahead if _at_run_time(key[2]) is late]
                if not keys:
                    continue
                with self._turns(space, batch):
                    self._recall(number, space)
                    for key in keys:
                        self.body.declare(key[2])
                        self.nest.put(f"{self.arrays[key]}[u] = {self.body.value(key[1], key[2]).value.name};")
                self.kept |= set(keys)
            with self._turns(space, batch) as inside:
                self._recall(number, space)
                for r in range(self.row_lanes):
                    for k in range(space.lanes):
                        self._element(stage, self._place(number, r, k), {}, inside)
                self.body.flush(" && ".join(t for t in (self.live, inside) if t))
                if self.cross_cta:
                    self.nest.put("w_in_turn();")
        for key in ahead:
            del self.arrays[key]
        self.kept -= set(ahead)

    def _recall(self, number: int, space: Space) -> None:
        """What waits in registers is known at this element."""
        which = self.spaces.index(space)
        self.body.asked = set()
        for key in self._waiting():
            w, node, coord = key
            if w == which:
                self.body.remember(node, coord, Value(self._held(key), self.scene.graph.type_of(node).dtype))
        if self.source.accesses.frozen:
            return
        for earlier in space.stages[: space.stages.index(number)]:  # the first pass: as if every root waited
            for root in self.segment.stages[earlier].pre:
                for r in range(self.row_lanes):
                    for k in range(space.lanes):
                        coord = self.scene.layout.coord(root, self._place(earlier, r, k))
                        self.body.remember(root, coord, Value("h", self.scene.graph.type_of(root).dtype))

    def _waiting(self) -> Iterable[tuple[int, NodeId, Coord]]:
        """What waits for a later stage."""
        return self.kept

    def _keep(self, number: int, space: Space) -> None:
        """Put into registers what later stages ask for; in the first pass, note what is asked for."""
        which = self.spaces.index(space)
        for w, node, coord in self.arrays:
            if w != which or (w, node, coord) in self.kept:
                continue
            found = self.body.known(node, coord)
            if found is not None:
                self._hold((w, node, coord), found.value.name)
        if self.source.accesses.frozen:
            return
        mine = {r for s in space.stages for r in self.segment.stages[s].pre}
        own = {v.name for v in space.variables}
        kept = {
            (node, coord)
            for node, coord in self.body.asked
            if (node in self.scene.readable or node in mine) and any(v.name in own for i in coord for v in i.variables)
        }
        self.source.carried.setdefault(self.draft.suffix, {})[number] = kept

    def _element(self, stage: Stage, at: dict[Key, Index], partial: dict[NodeId, Accumulator], inside: str) -> None:
        graph, layout, body = self.scene.graph, self.scene.layout, self.body
        for root in stage.pre:
            elementwise_root(self.scene, body, root, layout.coord(root, at))
        for root, total in partial.items():
            operand = graph.nodes[root].inputs[0]
            coord = layout.coord(operand, at)
            value = body.value(operand, coord).value
            position = f"(w_i32)({coord[reduced_axes(graph, root)[0]].text()})" if total.is_arg else ""
            self.nest.put(f"{f'if ({inside}) ' if inside else ''}{total.take(value.name, position)}")

    # partial results

    def _accumulator(self, root: NodeId, lane: int) -> Accumulator:
        record = self.scene.graph.nodes[root]
        dtype = self.scene.graph.type_of(record.inputs[0]).dtype
        total = Accumulator(root, lane, self.draft.name("s"), record.prim, dtype)
        self.reset(total, declare=True)
        return total

    def _join(self, totals: list[Accumulator]) -> None:
        """Lanes of a thread, as a tree; the first has the result."""
        while len(totals) > 1:
            half = (len(totals) + 1) // 2
            for a, b in zip(totals, totals[half:], strict=False):
                self.nest.put(a.take(b.name, b.at))
            totals = totals[:half]

    def _finish(self, number: int, stage: Stage, totals: list[Accumulator]) -> None:
        self.exchange(totals)
        if self.split == 1 or self.repeated:
            self._results(number, stage, totals)
            return
        count = self.vectors * self.row_lanes
        arrays = {}
        for total in totals:
            if total.root not in arrays:
                arrays[total.root] = (
                    self.source.allocate(self.split * count, total.dtype.accumulator),
                    self.source.allocate(self.split * count, DType.I32) if total.is_arg else "",
                )
        with self.body.block(f"if ({self._one()})"):
            for total in totals:
                values, positions = arrays[total.root]
                where = self._partial("share", count, total.lane)
                self.nest.put(f"w_st({values} + {where}, {total.name});")
                if positions:
                    self.nest.put(f"w_st({positions} + {where}, {total.at});")
        counter = self.source.counters(self.groups)
        self.nest.put("w_fence();")
        self.nest.put("role.sync();")
        arrived = f"role.thread() == 0u && w_last_arrival({counter} + group, {self.split}u)"
        with self.body.block(f"if (role.any({arrived}))"):
            for total in totals:
                self.reset(total, declare=False)
            with self.body.block(f"for (w_index s = y; s < {self.split}u; s += {self.across}u)"):
                for total in totals:
                    values, positions = arrays[total.root]
                    where = self._partial("s", count, total.lane)
                    at = f"w_fresh({positions} + {where})" if positions else ""
                    self.nest.put(total.take(f"w_fresh({values} + {where})", at))
            self.exchange(totals)
            self._results(number, stage, totals)

    def _partial(self, share: str, count: int, lane: int) -> str:
        row = f"row * {self.row_lanes}u + {lane}u" if self.row_lanes > 1 else "row"
        return f"{share} * {count}u + {row}"

    def _one(self) -> str:
        """Condition that holds for one thread of each row."""
        first = f"{self.member} == 0u" if self.across * self.cluster > 1 else ""
        if self.repeated:
            first = " && ".join(["share == 0u", *([first] if first else [])])
        return " && ".join(t for t in (first, self.live) if t) or "true"

    def _results(self, number: int, stage: Stage, totals: list[Accumulator]) -> None:
        """Every thread of a row knows the results; one stores them."""
        scene, body = self.scene, self.body
        for total in totals:
            at = self._place(number, total.lane, 0) | dict.fromkeys(stage.reduced, Index())
            coord = scene.layout.result_coord(total.root, at)
            name = f"((w_i64){total.at})" if total.is_arg else total.name
            value = Value(name, scene.graph.type_of(total.root).dtype)
            body.remember(total.root, coord, value)
            if total.root in scene.targets:
                body.store(scene.targets[total.root], coord, value)
        for root in stage.post:
            for r in range(self.row_lanes):
                at = self._place(number, r, 0) | dict.fromkeys(stage.reduced, Index())
                elementwise_root(scene, body, root, scene.layout.coord(root, at))
        body.flush(self._one())


def _whole(turns: int) -> int:
    """So many turns or a few more, in whole batches."""
    return turns if turns <= BATCH else -(-turns // BATCH) * BATCH


def _at_run_time(coord: Coord) -> bool:
    """Whether an index has to be read first."""
    return any(True for index in coord for _ in index.loaded())


def _is_plain(form: Form) -> bool:
    """Whether the rules decide how threads share rows, and no other blocks do."""
    alone = form.cluster == form.cross_cta == 1 and not form.spread and not form.single_pass
    return alone and not (form.columns or form.per_row)


def _power(n: int) -> int:
    """The largest power of two that is not above n (at least 1)."""
    return 1 << max(n, 1).bit_length() - 1
