"""Threads that share rows of a reduction: how their partial results meet, always in one order.

Neighbours in a warp exchange by shuffles, warps through shared memory, blocks of a cluster through that of each other.
Where a block has many neighbouring rows, all partial results go through shared memory at once, and each sum is formed
by a few threads: a shuffle for each row of each thread would cost more than the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.generate.cuda.loops.launch import Draft
from weft.generate.expr import c_type
from weft.generate.loopnest.body import combine, identity
from weft.generate.loopnest.plan import ARGS
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

MAX_EXCHANGE = 40 * 1024
"""Bytes of shared memory for the exchange among threads that own neighbouring rows."""


@dataclass(slots=True)
class Accumulator:
    """Partial result of one reduction for one row of a thread."""

    root: NodeId
    lane: int
    name: str
    prim: Prim
    dtype: DType

    @property
    def at(self) -> str:
        """Name of the position, for ARGMAX and ARGMIN."""
        return f"{self.name}_at"

    @property
    def is_arg(self) -> bool:
        """Whether a position goes with the value."""
        return self.prim in ARGS

    def take(self, value: str, at: str) -> str:
        """Statement that takes one more value in."""
        if not self.is_arg:
            return f"{self.name} = {combine(self.prim, self.dtype, self.name, value)};"
        better = "w_above" if self.prim is Prim.ARGMAX else "w_below"
        test = f"{better}({value}, {at}, {self.name}, {self.at})"
        return f"if ({test}) {{ {self.name} = {value}; {self.at} = {at}; }}"


class Team:
    """The threads of a block or cluster, and the statements by which they exchange."""

    def __init__(self, draft: Draft, graph: Graph) -> None:
        self.draft, self.graph = draft, graph
        self.body, self.nest = draft.body, draft.nest
        self.across = 32
        """Threads of a block that share a row."""
        self.columns = 1
        """Neighbouring vectors of rows of a block, where neighbours in memory belong to different rows."""
        self.by_columns = False
        self.row_lanes = 1
        """Neighbouring rows of one thread."""
        self.width = 1
        """Vectors of rows of a block."""
        self.cluster = 1
        """Blocks that share their rows."""
        self.cross_cta = False
        """Whether these are any CTAs that reduce through global memory, not those of a cluster."""
        self._arrays: list[tuple[str, str]] = []

    def reset(self, total: Accumulator, *, declare: bool) -> None:
        """Statements that give a partial result its neutral value."""
        kind = f"{c_type(total.dtype)} " if declare else ""
        self.nest.put(f"{kind}{total.name} = {identity(total.prim, total.dtype)};")
        if total.is_arg:
            self.nest.put(f"{'w_i32 ' if declare else ''}{total.at} = 2147483647;")

    def exchange(self, totals: Sequence[Accumulator]) -> None:
        """All threads of a row get the sum of their parts."""
        if self.by_columns and self.across == 1 and self.cluster == 1:
            return  # there is one
        if self.through_memory([t.root for t in totals]):
            self._exchange_columns(totals)
            return
        side_by_side = self.columns if self.by_columns else 1
        low, high = (side_by_side, 32) if self.by_columns else (1, min(self.across, 32))
        for total in totals:
            if low < high:
                self.nest.put("#pragma unroll")
                self.nest.put(f"for (int o = {low}; o < {high}; o *= 2) {{ {self._shuffle(total)} }}")
        warps = self.draft.threads // 32 if self.by_columns else self.across // 32
        if warps > 1:
            self._exchange_warps(totals, warps, side_by_side)
        if self.cluster > 1:
            self._exchange_blocks(totals)

    def _sums_of(self) -> tuple[int, int, int]:
        """Sums of a block's rows, threads that form each of them, and the distance of rows in shared memory."""
        n = self.columns * self.row_lanes
        each = max(1, min(32, self.across, self.draft.threads // n))
        return n, each, n + max(4, 32 // each)

    def through_memory(self, roots: Sequence[NodeId]) -> bool:
        """Whether the partial results of neighbouring rows, a root per row, go through shared memory at once."""
        if not self.by_columns or self.row_lanes < 4 or self.across < 4:
            return False
        graph = self.graph
        n, each, pitch = self._sums_of()
        plain = all(
            graph.nodes[r].prim not in ARGS and c_type(graph.type_of(graph.nodes[r].inputs[0]).dtype) == "w_f32"
            for r in roots
        )
        memory = len(set(roots)) * self.across * pitch * 4
        return plain and self.draft.threads >= n and n * each % 32 == 0 and memory <= MAX_EXCHANGE

    def _exchange_arrays(self, count: int) -> list[tuple[str, str]]:
        """Shared arrays for the parts and the sums of so many roots; two barriers guard their reuse in a block."""
        n, _, pitch = self._sums_of()
        while len(self._arrays) < count:
            pair = self.draft.name("m"), self.draft.name("m")
            self.draft.shared.append(f"W_SHARED w_chunk<16> {pair[0]}[{self.across * pitch // 4}];")
            self.draft.shared.append(f"W_SHARED w_chunk<16> {pair[1]}[{n // 4}];")
            self._arrays.append(pair)
        if self.cluster == 1:
            return self._arrays[:count]
        sums = [self.draft.name("m") for _ in range(count)]  # other blocks may still read those of the exchange before
        self.draft.shared += [f"W_SHARED w_chunk<16> {name}[{n // 4}];" for name in sums]
        return [(left, name) for (left, _), name in zip(self._arrays, sums, strict=False)]

    def _exchange_columns(self, totals: Sequence[Accumulator]) -> None:
        """Each thread leaves its partial results; each sum of a block is then formed by a few threads."""
        lanes, put = self.row_lanes, self.nest.put
        n, each, pitch = self._sums_of()
        by_root = [totals[k : k + lanes] for k in range(0, len(totals), lanes)]
        arrays = self._exchange_arrays(len(by_root))
        for (left, _), group in zip(arrays, by_root, strict=True):
            for k in range(0, lanes, 4):
                q = self.draft.name("q_")
                put(f"const w_f32 {q}[4] = {{{', '.join(t.name for t in group[k : k + 4])}}};")
                put(f"w_stv<4>((w_f32*){left} + (y * {pitch}u + x * {lanes}u + {k}u), {q});")
        put("role.sync();")
        with self.body.block("" if each * n == self.draft.threads else f"if (role.thread() < {each * n}u)"):
            put(f"const w_index o_ = role.thread() / {each}u, g_ = role.thread() % {each}u;")
            for (left, _), group in zip(arrays, by_root, strict=True):
                t = group[0]
                self.reset(t, declare=False)
                put("#pragma unroll")
                step = t.take(f"((const w_f32*){left})[(g_ + w * {each}u) * {pitch}u + o_]", "")
                put(f"for (w_index w = 0u; w < {self.across // each}u; ++w) {{ {step} }}")
            if each > 1:
                put("#pragma unroll")
                steps = " ".join(self._shuffle(group[0]) for group in by_root)
                put(f"for (int o = 1; o < {each}; o *= 2) {{ {steps} }}")
            with self.body.block("if (g_ == 0u)"):
                for (_, joined), group in zip(arrays, by_root, strict=True):
                    put(f"((w_f32*){joined})[o_] = {group[0].name};")
        if self.cluster > 1:
            self._sum_cluster(n, arrays, by_root)
            arrays = self._arrays
        put("role.sync();")
        for (_, joined), group in zip(arrays, by_root, strict=False):
            for k in range(0, lanes, 4):
                q = self.draft.name("q_")
                put(f"w_f32 {q}[4];")
                put(f"w_ldv<4>((const w_f32*){joined} + (x * {lanes}u + {k}u), {q});")
                for i, t in enumerate(group[k : k + 4]):
                    put(f"{t.name} = {q}[{i}];")

    def _sum_cluster(self, n: int, arrays: Sequence[tuple[str, str]], by_root: Sequence[Sequence[Accumulator]]) -> None:
        """Sums of blocks to sums of the cluster, in the blocks' order."""
        put = self.nest.put
        put("w_cluster_sync();")
        with self.body.block(f"if (role.thread() < {n}u)"):
            for (_, joined), (_, final), group in zip(arrays, self._arrays, by_root, strict=False):
                t = group[0]
                self.reset(t, declare=False)
                put("#pragma unroll")
                word = f"w_bits<w_f32>(w_cluster_word((const unsigned*){joined} + role.thread(), c))"
                put(f"for (unsigned c = 0u; c < {self.cluster}u; ++c) {{ {t.take(word, '')} }}")
                put(f"((w_f32*){final})[role.thread()] = {t.name};")

    @staticmethod
    def _shuffle(total: Accumulator) -> str:
        kind = c_type(total.dtype)
        if not total.is_arg:
            return total.take(f"w_shfl({total.name}, o)", "")
        pair = f"const {kind} other = w_shfl({total.name}, o); const w_i32 there = w_shfl({total.at}, o);"
        return f"{pair} {total.take('other', 'there')}"

    def _exchange_warps(self, totals: Sequence[Accumulator], warps: int, beside: int) -> None:
        arrays = [self._shared(total, self.draft.threads // 32 * beside) for total in totals]
        slot = f"(role.thread() / 32u) * {beside}u + role.thread() % 32u"
        with self.body.block(f"if (role.thread() % 32u < {beside}u)"):
            for total, (values, positions) in zip(totals, arrays, strict=True):
                self.nest.put(f"{values}[{slot}] = {total.name};")
                if positions:
                    self.nest.put(f"{positions}[{slot}] = {total.at};")
        self.nest.put("role.sync();")
        first = "x" if self.by_columns else f"x * {warps}u" if self.width > 1 else "0u"
        for total, (values, positions) in zip(totals, arrays, strict=True):
            self.reset(total, declare=False)
            self.nest.put("#pragma unroll")
            where = f"[{first} + w * {beside}u]"
            step = total.take(values + where, positions + where if positions else "")
            self.nest.put(f"for (w_index w = 0u; w < {warps}u; ++w) {{ {step} }}")

    def _shared(self, total: Accumulator, count: int) -> tuple[str, str]:
        """Shared arrays for values and positions of their own: no second barrier guards their reuse."""
        values = self.draft.name("m")
        self.draft.shared.append(f"W_SHARED {c_type(total.dtype)} {values}[{count}];")
        if not total.is_arg:
            return values, ""
        positions = self.draft.name("m")
        self.draft.shared.append(f"W_SHARED w_i32 {positions}[{count}];")
        return values, positions

    def _exchange_blocks(self, totals: Sequence[Accumulator]) -> None:
        names = []
        for total in totals:
            values, positions = self.draft.name("m"), self.draft.name("m")
            self.draft.shared.append(f"W_SHARED w_slot<{c_type(total.dtype)}> {values};")
            self.nest.put(f"if (role.thread() == 0u) {values}.x = {total.name};")
            if total.is_arg:
                self.draft.shared.append(f"W_SHARED w_slot<w_i32> {positions};")
                self.nest.put(f"if (role.thread() == 0u) {positions}.x = {total.at};")
            names.append((values, positions))
        self.nest.put("w_cluster_sync();")
        for total, (values, positions) in zip(totals, names, strict=True):
            self.reset(total, declare=False)
            with self.body.block(f"for (w_index c = 0u; c < {self.cluster}u; ++c)"):
                self.nest.put(f"const {c_type(total.dtype)} other = w_remote(&{values}, c);")
                if total.is_arg:
                    self.nest.put(f"const w_i32 there = w_remote(&{positions}, c);")
                self.nest.put(total.take("other", "there"))
