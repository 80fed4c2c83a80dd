"""Values that no row of a block sees still decide: zero times what is not finite is NaN, as it is without skipping.

Every block looks at the values of the keys that it is the first to see, and says in memory which columns hold something
that is not finite; at its end it reads what those blocks said that see more keys than it does. They come first in
the grid, so they run or have run. The last block of all that share keys and values leaves the memory zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.attention.load import block_offset, each
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.tma_shapes import AttentionTmaConfig, tiles
from weft.generate.expr.integer import Int, summed
from weft.ir.types import DType

_WARPS = 3
"""Those of the copying warpgroup that do not copy."""


@dataclass(frozen=True, slots=True)
class Check:
    """How many tiles of keys the blocks of a problem need, and who looks at their values."""

    p: Attention
    s: AttentionTmaConfig
    repeats: int
    high: int
    """Tiles of rows of one copy of the queries."""
    shift: int

    @property
    def words(self) -> int:
        """Flags of all columns."""
        return -(-self.p.head // 32)

    @property
    def per_pair(self) -> int:
        """Words in memory for one pair of keys and values: a counter, and what every block says."""
        return 1 + _WARPS * self.high * (1 + self.words)

    def state_bytes(self, pairs: int) -> int:
        """Memory that is zero between calls."""
        return 4 * pairs * self.per_pair

    def need(self, tile: str) -> str:
        """C text: tiles of keys of a tile of rows. The last sees all, so that somebody does."""
        count, bm, bn = tiles(self.p, self.s), self.s.bm, self.s.bn
        last = Int(tile) * bm + (bm - 1 + self.shift)
        all_ = f"{tile} == {self.high - 1} || {last / bn} >= {count}"
        return f"({all_} ? {count} : {last} < 0 ? 1 : {last / bn + 1})"

    def needed(self, tile: int) -> int:
        """The same as a number."""
        count = tiles(self.p, self.s)
        last = tile * self.s.bm + self.s.bm - 1 + self.shift
        return count if tile == self.high - 1 else min(count, max(0, last) // self.s.bn + 1)

    def lines(self, loop: str) -> list[str]:
        """What the warps do that neither copy nor multiply, up to the end of their branch."""
        s = self.s
        entry = 1 + self.words
        everyone = _WARPS * self.repeats * self.high
        swap = "w_shfl_word({}, 1 << b)"
        return [
            "// the values of keys that a mask hides: what is not finite there makes its column NaN",
            f"role.pdl_wait(); role.pdl_trigger(); const int part = warp - {4 * s.consumers + 1}; u32 job = 0;",
            loop,
            f"u32* const said = (u32*)st + z * {self.per_pair};",
            f"u32 bad[{self.words}];\n{each('w', self.words)} bad[w] = 0;",
            "if (tq > 0 && copy == 0) {",
            *self._scan(),
            f"{each('w', self.words)}\n{each('b', 5)} bad[w] |= {swap.format('bad[w]')};",
            f"u32* const mine = said + 1 + (tq * {_WARPS} + part) * {entry};",
            f"if (lane == 0) {{\n{each('w', self.words)} mine[1 + w] = bad[w];",
            "w_write_released(mine, 1); }",
            f"{each('w', self.words)} bad[w] = 0;",
            "}",
            f"for (int other = tq + 1 + lane; other < {self.high}; other += 32) {{",
            f"const u32* const its = said + 1 + (other * {_WARPS} + part) * {entry};",
            "while (!w_read_acquired(its)) {}",
            f"{each('w', self.words)} bad[w] |= w_fresh(its + 1 + w);",
            "}",
            f"{each('w', self.words)}\n{each('b', 5)} bad[w] |= {swap.format('bad[w]')};",
            "w_bar_wait(sb + READ, job & 1 ^ 1); ++job;",
            f"if (lane == 0) {{\n{each('w', self.words)}",
            f"((u32*)(sm + BAD))[part * {self.words} + w] = bad[w];",
            "w_bar_arrive(sb + KNOWN); }",
            f"u32 last = 0; if (lane == 0) last = w_last_arrival(said, {everyone}u);",
            f"{each('b', 5)} last |= {swap.format('last')};",
            f"if (last) for (int x = lane; x < {self.per_pair - 1}; x += 32) said[1 + x] = 0;",
            "}\n}",
        ]

    def _scan(self) -> list[str]:
        """Flags of the columns of the keys that this block is the first to see; a lane has eight columns."""
        p = self.p
        assert p.v.view is not None
        chunks = p.head // 8
        rows, lane = 32 // chunks, Int("lane")
        mask, one = (0x7C007C00, 0x04000400) if p.dtype is DType.F16 else (0x7F807F80, 0x00800080)
        fields = " ".join(f"f[{i}] |= (x.{c} & {mask:#x}u) + {one:#x}u;" for i, c in enumerate("xyzw"))
        at = summed("c * 8", block_offset(p, p.v), Int("n") * p.v.view.strides[-2])
        stop = f"{self.need('tq')} * {self.s.bn}"
        return [
            f"const int c = {lane % chunks}, stop = {stop} < {p.keys} ? {stop} : {p.keys}; u32 f[4] = {{0, 0, 0, 0}};",
            f"if (lane < {rows * chunks}) {{\n#pragma unroll 4",
            (
                f"for (int n = {self.need('(tq - 1)')} * {self.s.bn} + {Int('part') * rows + lane / chunks};"
                f" n < stop; n += {_WARPS * rows}) {{"
            ),
            f"const uint4 x = *(const uint4*)((const u16*)vs + ({at})); {fields} }}\n}}",
            "u32 bits = 0;",
            f"{each('k', 4)} bits |= (f[k] >> 15 & 1) << 2 * k | f[k] >> 31 << (2 * k + 1);",
            f"{each('w', self.words)} bad[w] = c >> 2 == w ? bits << (c & 3) * 8 : 0;",
        ]

    def awaited(self) -> list[str]:
        """Before results are stored: the flags are there."""
        return ["w_bar_wait(sb + KNOWN, job - 1 & 1);"]

    def applied(self) -> list[str]:
        """NaN in the columns of `v` from `c` on that are flagged."""
        parts = " | ".join(f"bad[{i * self.words + Int('(c >> 5)')}]" for i in range(_WARPS))
        return [
            f"const u32* const bad = (const u32*)(sm + BAD); const u32 flags = ({parts}) >> (c & 31) & 255u;",
            f'if (flags) {{\n{each("e", 8)} if (flags >> e & 1) v[e] = __builtin_nanf(""); }}',
        ]

    def released(self) -> list[str]:
        """All have read them."""
        return ["w_together(); if (lane == 0) w_bar_arrive(sb + READ);"]


def checked(p: Attention, s: AttentionTmaConfig, repeats: int, high: int, shift: int) -> Check | None:
    """The check of values that lie in chunks of 16 bytes; None for others."""
    view = p.v.view
    if view is None or p.head % 8 or p.head // 8 > 32:
        return None
    steps = [s for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    if any(x % 8 for x in (*steps, view.offset)) or (p.head > 1 and view.strides[-1] != 1):
        return None
    return Check(p, s, repeats, high, shift)
