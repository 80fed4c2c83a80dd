"""The text of attention by warpgroups; see `tma` for what it does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.generate.contraction.values import Expr
from weft.generate.cuda.attention.band import Band
from weft.generate.cuda.attention.load import (
    block_offset,
    dims_offset,
    each,
    expression,
    source_of,
    value_at,
)
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.results import logarithm
from weft.generate.cuda.attention.tma_check import Check, checked
from weft.generate.cuda.attention.tma_maps import PANEL, ROWS, Mapped, panels
from weft.generate.cuda.attention.tma_shapes import AttentionTmaConfig, k_bytes, padded, q_bytes, tiles, v_bytes
from weft.generate.cuda.gemm.common.epilogue import wide_store
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.intrinsics.ring import Ring, initialised, prefetched, prologue
from weft.generate.cuda.role.role import PDL
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value
from weft.generate.expr.integer import Int, behind, integer, summed
from weft.ir.types import DType

_QUAD_MAX = "x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), {})));"
_QUAD_SUM = "x += __uint_as_float(w_shfl_word(__float_as_uint(x), {}));"
_ARRIVE = "if (lane == 0) w_bar_arrive(sb + {});"
_WORD = {DType.BOOL: "u16", DType.F16: "u32", DType.BF16: "u32", DType.F32: "float2"}
"""C type of two neighbours in memory."""
_HUGE = "4096.0f"
"""Exponents of two from which on the rounding of their maximum may show in a sum of results of bf16."""
_NEAR_BYTES = 24 << 20
"""Keys and values that CTAs under way together read: so much stays in the L2 cache. In no cost profile: a text follows
from its problem and its schedule, whatever device it is for."""


class Kernel:
    """One shape of one attention."""

    def __init__(
        self, p: Attention, s: AttentionTmaConfig, maps: tuple[Mapped, Mapped, Mapped], band: Band | None
    ) -> None:
        self.p, self.s, self.band = p, s, band
        self.q, self.k, self.v = maps
        self.count = tiles(p, s)
        self.repeats, self.rows = divided(p, s, band)
        self.high = -(-self.rows // s.bm)
        self.skips = _check(p, s, band)
        self.check = None if p.finite else self.skips
        self.total = p.blocks * self.repeats * self.high
        self.kind = p.dtype.value
        self.columns = padded(p.head)
        scale = band.scale if band is not None else p.scale
        self.plain = scale > 0
        self.log = logarithm(p, "top[h]", scale or 1.0, "x")
        # scores in registers times this are exponents of two
        self.factor = literal(float(np.float32(math.log2(math.e) * (scale or 1.0))), DType.F32)

    @staticmethod
    def counts(p: Attention, s: AttentionTmaConfig, band: Band | None) -> list[int]:
        """Steps of every tile of rows of one pair of keys and values."""
        repeats, rows = divided(p, s, band)
        check = _check(p, s, band)
        high = -(-rows // s.bm)
        return [tiles(p, s) if check is None else check.needed(i) for i in range(high)] * repeats

    @property
    def checks(self) -> bool:
        """Whether tiles are skipped and somebody must look for what is not finite there."""
        return self.check is not None

    @property
    def state_bytes(self) -> int:
        """Memory that is zero between calls."""
        return self.check.state_bytes(self.p.blocks) if self.check is not None else 0

    def lines(self) -> list[str]:
        """The body of the kernel."""
        p, s = self.p, self.s
        k, v = k_bytes(p, s), v_bytes(p, s)
        readers = 4 if s.split_keys else 4 * s.consumers
        found = [
            (
                f"enum {{ KEYS = {q_bytes(p, s)}, VALUES = KEYS + {s.stages * k}, BARS = VALUES + {s.stages * v},"
                f" FULLK = BARS, EMPTYK = FULLK + {8 * s.stages}, FULLV = EMPTYK + {8 * s.stages},"
                f" EMPTYV = FULLV + {8 * s.stages}, FULLQ = EMPTYV + {8 * s.stages}, EMPTYQ = FULLQ + 8,"
                " TURN = EMPTYQ + 8, KNOWN = TURN + 24, READ = KNOWN + 8, MET = READ + 8, BAD = MET + 8,"
                " OTHERS = BAD + 96 };"
            ),
            "const u32 sb = w_shared(sm);",
            "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
            "// rings of keys and values: full barriers count TMA's bytes, empty ones the warps that have read a tile",
            prologue(
                initialised(readers, self._ring("K"), self._ring("V")),
                f"w_bar_init(sb + FULLQ, 1); w_bar_init(sb + EMPTYQ, {4 * s.consumers});",
                f"for (int i = 0; i < {s.consumers}; ++i) w_bar_init(sb + TURN + 8 * i, 4);",
                f"w_bar_init(sb + KNOWN, 3); w_bar_init(sb + READ, {4 * s.consumers});",
                # nothing waits at MET: it keeps the machine code of kernels that were measured
                f"w_bar_init(sb + MET, {max(1, 4 * s.consumers - 4)});",
            ),
            "role.sync();",
            f"if (warp >= {4 * s.consumers}) {{",
            "// producer warpgroup: one thread asks TMA for queries, keys and values",
            "role.dealloc_registers();" if s.split is not None else "",
            *self._copies(),
            *(self.check.lines(self._loop()) if self.check is not None else []),
            "} else {",
            "// consumer warpgroups: scores and results by wgmma, softmax in registers between them",
            "role.alloc_registers();" if s.split is not None else "",
            *self._multiplies(),
            "}",
        ]
        return [x for x in found if x]

    def _loop(self) -> str:
        """Head of the loop over the tiles of a block: declares z, m0, queries' tile and `count` of keys' tiles."""
        s, near = self.s, self._near()
        per = near * self.repeats * self.high
        some = str(near)
        if self.p.blocks % near:
            some = f"({self.p.blocks} - band * {near} < {near} ? {self.p.blocks % near} : {near})"
        wide = f"({some} * {self.repeats})" if self.repeats > 1 else some
        tile, inner, rest = Int("tile"), Int("in"), Int("rest")
        walk = "for (int tile = role.block_x(), once = 1; once; once = 0) {"
        if s.persistent_ctas and s.persistent_ctas < self.total:
            reverse = "(round & 1 ? (int)(role.blocks_x() - 1 - role.block_x()) : (int)role.block_x())"
            walk = (
                f"#pragma unroll 1\nfor (int round = 0; round * (int)role.blocks_x() < {self.total}; ++round) {{"
                f" const int tile = round * (int)role.blocks_x() + {reverse if self.skips else '(int)role.block_x()'};"
                f" if (tile >= {self.total}) continue;"
            )
        return (
            f"{walk} const int band = {tile / per}, in = {tile % per},"
            f" tq = {integer(self.high - 1) - inner / wide}, rest = {inner % wide},"
            f" z = {Int('band') * near + rest / self.repeats}, copy = {rest % self.repeats},"
            f" m0 = {Int('copy') * self.rows + Int('tq') * s.bm}; (void)z; (void)copy; (void)m0;"
            f" {self._counted()} (void)count;"
        )

    def _counted(self) -> str:
        """Declares how many tiles of keys a block needs."""
        if self.skips is not None:
            return f"const int count = {self.skips.need('tq')};"
        # a loop of one step would be merged with what is before and behind it, which takes more registers
        return f"const int count = {f'w_unknown({self.count})' if self.count == 2 else self.count};"

    def _near(self) -> int:
        """Pairs of keys and values whose tiles are under way together, those with most keys first."""
        if self.skips is None:
            return 1
        each_ = self.p.keys * (self.p.qk + self.p.head) * self.p.dtype.itemsize
        return max(1, min(self.p.blocks, _NEAR_BYTES // each_))

    def _copies(self) -> list[str]:
        """The thread that asks TMA."""
        p, s, base = self.p, self.s, Int("sb")
        q = [
            f"{{ const int m = {Int('m0') + g * ROWS}; (void)m;"
            f" {self.q.copy('mq', f'{base + (g * panels(p.qk) + j) * ROWS * 2 * PANEL}', 'sb + FULLQ', j * PANEL)} }}"
            for g in range(s.bm // ROWS)
            for j in range(panels(p.qk))
        ]
        panel = [str(Int("to") + j * s.bn * 2 * PANEL) for j in range(max(panels(p.qk), panels(p.head)))]
        k = [self.k.copy("mk", panel[j], "bar", j * PANEL) for j in range(panels(p.qk))]
        v = [self.v.copy("mv", panel[j], "bar", j * PANEL) for j in range(panels(p.head))]

        def tile(name: str, at: str, size: int, copies: list[str]) -> str:
            ring = self._ring(name)
            return (
                f"{{ const u32 bar = {ring.filled_at()}, to = sb + {at} + slot * {size};"
                f" {ring.await_read('slot', 'phase ^ 1')} w_bar_expect(bar, {size}u);"
                f" {' '.join(copies)} }}"
            )

        return [
            f"if (warp == {4 * s.consumers}) {{",
            f"if (lane == 0) {{ {prefetched('mq', 'mk', 'mv')} }}",
            PDL,
            "__syncwarp(); role.pdl_wait(); role.pdl_trigger();",
            "if (lane == 0) { u32 it = 0, job = 0;",
            self._loop(),
            f"w_bar_wait(sb + EMPTYQ, job & 1 ^ 1); ++job; w_bar_expect(sb + FULLQ, {q_bytes(p, s)}u);",
            *q,
            "#pragma unroll 1\nfor (int i = count - 1; i >= 0; --i, ++it) {",
            f"const int n = i * {s.bn}; const u32 {self._place}; (void)n;",
            tile("K", "KEYS", k_bytes(p, s), k),
            tile("V", "VALUES", v_bytes(p, s), v),
            "}\n}\n}\n} else {" + (" role.pdl_wait(); role.pdl_trigger(); }" if self.check is None else ""),
        ]

    def _multiplies(self) -> list[str]:
        """The consumer warpgroups."""
        p, s = self.p, self.s
        own = Int("0") if s.split_keys else Int("group") * ROWS
        rows = own * (panels(p.qk) * 2 * PANEL)
        turn = ", turn = 0" if s.pingpong and s.consumers > 1 else ""
        return [
            "role.pdl_wait(); role.pdl_trigger();",
            f"const int group = warp >> 2, row = {summed(own, Int('(warp & 3)') * 16, '(lane >> 2)')};",
            f"const u64 dq = w_operand_at({Int('sb') + (0 if s.split_keys else f'(u32)({rows})')}, 16, 1024, 1);",
            f"u32 it = {'group' if s.split_keys else '0'}, job = 0{turn};",
            self._loop(),
            f"float o[{self.columns // 2}], s[{s.bn // 2}], top[2], total[2]; u32 w[{s.bn // 16}][4];",
            f"{each('j', self.columns // 2)} o[j] = 0.0f;",
            "top[0] = top[1] = -__builtin_inff(); total[0] = total[1] = 0.0f;",
            *self._rows(),
            "w_bar_wait(sb + FULLQ, job & 1); ++job;",
            "if (group < count) {" if s.split_keys else "",
            *self._first_tile(),
            *self._next_tiles(),
            "" if s.split_keys else _ARRIVE.format("EMPTYQ"),
            *self._last_results(),
            *(["}", *self._meet()] if s.split_keys else []),
            *self._store(),
            "}\n}" if s.split_keys else "}",
        ]

    def _ring(self, name: str) -> Ring:
        """The ring of keys (K) or values (V)."""
        return Ring(self.s.stages, f"sb + FULL{name}", f"sb + EMPTY{name}")

    @property
    def _place(self) -> str:
        """Where tile `it` is: C text of declarations."""
        ring = self._ring("K")
        return f"slot = {ring.slot()}, phase = {ring.parity()}"

    def _first_tile(self) -> list[str]:
        """Weights of the tile that comes first: the last of the keys, where masks are."""
        step, group = self.s.step, " - group" if self.s.split_keys else ""
        return [
            f"{{ const int i = count - 1{group}; (void)i;",
            f"const u32 {self._place};",
            self._ring("K").await_filled("slot", "phase"),
            *self._scores("slot"),
            "w_group_wait<0>(); w_hold(s);",
            self._ring("K").release("slot"),
            *self._masked(),
            *self._weights(first=True),
            *self._packed(),
            f"if (i >= {step}) {self._keys_are_there(f'it + {step}')}",
            "}",
        ]

    def _next_tiles(self) -> list[str]:
        """Per tile the scores of it and the results of the one before, and beside these the weights of it."""
        s = self.s
        step, group = s.step, " - group" if s.split_keys else ""
        pingpong = s.pingpong and s.consumers > 1
        mine = "// ping-pong: warpgroups issue products in turn\n" if pingpong else ""
        mine += "w_bar_wait(sb + TURN + 8 * group, (group == 0 ? turn + 1 : turn) & 1); ++turn;" if pingpong else ""
        theirs = _ARRIVE.format(f"TURN + 8 * (group + 1 == {s.consumers} ? 0 : group + 1)") if pingpong else ""
        head = f"for (int i = count - {1 + step}{group}; i >= 0; i -= {step}, it += {step}) {{"
        return [
            "// the scores of a tile run beside the results of the one before, its softmax beside those",
            f"#pragma unroll 1\n{head}",
            f"const u32 {self._place}, next = {self._ring('K').slot(Int('it') + step)};",
            mine,
            *self._scores("next"),
            *self._results("slot", "phase"),
            theirs,
            "w_group_wait<1>(); w_hold(s);",
            self._ring("K").release("next"),
            *self._masked(),
            *self._weights(first=False),
            # the wait that a loop ends with keeps the assembler from computing weights behind the one for products
            "w_hold(s);",
            f"if (i >= {step}) {self._keys_are_there(f'it + {2 * step}')}",
            "w_group_wait<0>(); w_hold(o);",
            self._ring("V").release("slot"),
            f"{each('j', self.columns // 2)} o[j] *= old[j >> 1 & 1];",
            *self._packed(),
            "}",
        ]

    def _last_results(self) -> list[str]:
        """The weights of the last tile times its values."""
        return [
            f"{{ const u32 {self._place}; ++it;",
            "w_group_begin();",
            *self._results("slot", "phase"),
            "w_group_wait<0>(); w_hold(o);",
            self._ring("V").release("slot"),
            "}",
        ]

    def _meet(self) -> list[str]:
        """Results of warpgroups that shared keys: the first one takes those of the others, in their order."""
        s, n = self.s, self.columns // 2
        at = f"(float*)(sm + OTHERS) + (group - 1) * {128 * (n + 4)} + (t & 127)"
        low = "x == -__builtin_inff() ? 0.0f : x"
        return [
            "// warpgroups that shared the keys of a row: the first one takes the results of the others, in order",
            "if (group > 0) {",
            f"float* const to = {at};",
            f"{each('j', n)} to[j * 128] = o[j];",
            f"{each('h', 2)} {{ to[{n} * 128 + h * 128] = top[h]; to[{n + 2} * 128 + h * 128] = total[h]; }}",
            f"role.named_barrier(0, {128 * s.consumers});",
            *(["if (lane == 0) w_bar_arrive(sb + READ);"] if self.check is not None else []),
            "} else {",
            f"role.named_barrier(0, {128 * s.consumers});",
            f"{each('g', s.consumers - 1)} {{",
            f"const float* const from = (const float*)(sm + OTHERS) + g * {128 * (n + 4)} + t; float mine[2], its[2];",
            f"{each('h', 2)} {{ const float y = from[{n} * 128 + h * 128], x = w_max_f32(top[h], y), low = {low};",
            f"mine[h] = w_exp2((top[h] - low) * {self.factor}); its[h] = w_exp2((y - low) * {self.factor});",
            f"total[h] = total[h] * mine[h] + from[{n + 2} * 128 + h * 128] * its[h]; top[h] = x; }}",
            f"{each('j', n)} o[j] = o[j] * mine[j >> 1 & 1] + from[j * 128] * its[j >> 1 & 1];",
            "}",
        ]

    def _rows(self) -> list[str]:
        """What masks and scores need of this thread's rows: the last keys they see, and where they begin in memory."""
        p, s = self.p, self.s
        lines = []
        ragged = p.keys % s.bn != 0
        own = Int("0") if s.split_keys else Int("group") * ROWS
        if self.band is not None:
            b = self.band
            wraps = b.queries != self.rows
            position = f"(m0 + row + 8 * h) % {b.queries}" if wraps else f"tq * {s.bm} + row + 8 * h"
            first = str(summed(Int("tq") * s.bm, own, b.shift + 1))
            if wraps:  # rows of another copy of the queries may stand in the tile
                start = ("m0" + own) % b.queries
                first = f"{start} + {ROWS} > {b.queries} ? 0 : {start + (b.shift + 1)}"
            lines += [
                "int limit[2];",
                (
                    f"{each('h', 2)} {{ const int x = {position}{f' + {b.shift}' if b.shift else ''};"
                    f" limit[h] = x < {p.keys - 1} ? x : {p.keys - 1}; }}"
                ),
                f"const int seen = {first}, full = seen < {s.bn} ? 0 : (seen < {p.keys} ? seen : {p.keys}) / {s.bn};",
            ]
        elif ragged:
            lines.append(f"const int limit[2] = {{{p.keys - 1}, {p.keys - 1}}}, full = {p.keys // s.bn};")
        for i, y in enumerate([] if self.plain else p.score.leaves):
            assert y.view is not None
            place = block_offset(p, y) + dims_offset(p, y.view, p.rows, "m")
            lines += [
                f"int s{i}[2];",
                (
                    f"{each('h', 2)} {{ const int r = m0 + row + 8 * h, m = r < {p.m} ? r : {p.m - 1};"
                    f" (void)m; s{i}[h] = {place}; }}"
                ),
            ]
        return lines

    def _keys_are_there(self, tile: str) -> str:
        """Statement: wait for the keys of a tile by its number."""
        ring = self._ring("K")
        return ring.await_filled(ring.slot(tile), ring.parity(tile))

    def _scores(self, slot: str) -> list[str]:
        """s = q kᵀ of this warpgroup's rows, issued."""
        p, s = self.p, self.s
        steps = padded(p.qk) // 16
        q = f"dq + (kk / 4 * {ROWS * 2 * PANEL // 16} + kk % 4 * 2)"
        k = f"dk + (kk / 4 * {s.bn * 2 * PANEL // 16} + kk % 4 * 2)"
        return [
            f"{{ const u64 dk = w_operand_at(sb + KEYS + {slot} * {k_bytes(p, s)}, 16, 1024, 1);",
            "w_group_begin();",
            f"{each('kk', steps)} w_product_{self.kind}_00(s, {q}, {k}, kk);",
            "w_group_commit(); }",
        ]

    def _results(self, slot: str, phase: str) -> list[str]:
        """o += weights times values, issued."""
        p, s = self.p, self.s
        return [
            f"{{ {self._ring('V').await_filled(slot, phase)}",
            (f"const u64 dv = w_operand_at(sb + VALUES + {slot} * {v_bytes(p, s)}, {s.bn * 2 * PANEL}, 1024, 1);"),
            "w_group_begin();",
            f"{each('q', s.bn // 16)} w_weighted_{self.kind}(o, w[q], dv + q * 128);",
            "w_group_commit(); }",
        ]

    def _masked(self) -> list[str]:
        """The expression over the products; -inf for keys that a row does not see or that do not exist."""
        p, s = self.p, self.s
        lines = []
        at = f"const int at = i * {s.bn} + j * 8 + (lane & 3) * 2 + e;"
        if not self.plain:
            pairs = [y for y in p.score.leaves if self._paired(y)]
            lines += [
                f"{each('j', s.bn // 8)}\n{each('h', 2)} {{",
                *(self._pair(y) for y in pairs),
                f"{each('e', 2)} {{ {at}",
                f"const int n = at < {p.keys} ? at : {p.keys - 1}; (void)n;",
                *self._expression(pairs),
                "}\n}",
            ]
        if self.band is not None or p.keys % s.bn:
            lines += [
                "// keys that a row does not see, or that do not exist",
                "if (i >= full) {",
                f"{each('j', s.bn // 8)}\n{each('h', 2)}\n{each('e', 2)} {{ {at}",
                "if (at > limit[h]) s[4 * j + 2 * h + e] = -__builtin_inff(); }\n}",
            ]
        return lines

    def _paired(self, y: Expr) -> bool:
        """Whether two neighbouring keys of a leaf are one aligned word."""
        assert y.view is not None
        steps = (x for n, x in zip(y.view.shape[:-1], y.view.strides[:-1], strict=True) if n > 1)
        even = self.p.keys % 2 == 0 and y.view.offset % 2 == 0 and all(x % 2 == 0 for x in steps)
        return y.kind == "input" and y.dtype in _WORD and y.view.strides[-1] == 1 and even

    def _pair(self, y: Expr) -> str:
        """Declares the word of a leaf that holds a pair of keys."""
        i = self.p.score.leaves.index(y)
        at = f"i * {self.s.bn} + j * 8 + (lane & 3) * 2"
        place = f"s{i}[h] + ({at} < {self.p.keys} ? {at} : {self.p.keys - 2})"
        word = _WORD[y.dtype]
        return f"const {word} w{i} = *(const {word}*)((const {storage(y.dtype)}*){source_of(y)} + {place});"

    def _expression(self, pairs: Sequence[Expr]) -> list[str]:
        lines = []
        values: dict[int, Value] = {}
        for i, y in enumerate(self.p.score.leaves):
            assert y.view is not None
            place = Int(f"s{i}[h]") + Int("n") * y.view.strides[-1]
            base = "0" if y.kind == "iota" else f"(const {storage(y.dtype)}*){source_of(y)}"
            text = _half(y.dtype, f"w{i}") if y in pairs else value_at(y, base, place)
            lines.append(f"const {c_type(y.dtype)} y{i} = {text};")
            values[id(y)] = Value(f"y{i}", y.dtype)
        for y in self.p.score.parts():
            if y.kind == "scores":
                values[id(y)] = Value("s[4 * j + 2 * h + e]", DType.F32)
        statements, value = expression(self.p.score, values)
        return [*lines, *statements, f"s[4 * j + 2 * h + e] = (float){value.name};"]

    def _weights(self, *, first: bool) -> list[str]:
        """s = exp(s - maximum so far) and its sum; `old` brings what was before to that scale.

        One multiply-add per weight subtracts the maximum times the factor. That product is rounded, alike for a whole
        row, so it cancels unless it is huge; f16 has no such products, other scores are looked at.
        """
        n = self.s.bn // 8
        one = "s[4 * j + 2 * h + e]"
        exact = f"w_exp2(({one} - low[h]) * {self.factor})"
        quick = f"w_exp2(fmaf({one}, {self.factor}, -base[h]))"

        def loop(weight: str) -> str:
            return f"{each('j', n)}\n{each('h', 2)}\n{each('e', 2)} {{ {one} = {weight}; sums[h][e] += {one}; }}"

        lines = [
            "// online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row",
            "float most[2][2], sums[2][2];",
            f"{each('h', 2)}\n{each('e', 2)} {{ most[h][e] = s[2 * h + e]; sums[h][e] = 0.0f; }}",
            f"{each('j', n)}\n{each('h', 2)}\n{each('e', 2)} most[h][e] = w_max_f32(most[h][e], {one});",
            "" if first else "float old[2];",
            f"float low[2]{', base[2]' if self.plain else ''};",
            f"{each('h', 2)} {{",
            "float x = w_max_f32(most[h][0], most[h][1]);",
            _QUAD_MAX.format(1),
            _QUAD_MAX.format(2),
            "" if first else "x = w_max_f32(x, top[h]);",
            "low[h] = x == -__builtin_inff() ? 0.0f : x;",  # a row of -inf alone keeps zeros
            "" if first else f"old[h] = w_exp2((top[h] - low[h]) * {self.factor});",
            f"base[h] = low[h] * {self.factor};" if self.plain else "",
            "top[h] = x;\n}",
        ]
        if not self.plain:
            lines.append(loop(exact))
        elif self.p.dtype is DType.F16:
            lines.append(loop(quick))
        else:
            far = f"w_any_lane(fabsf(base[0]) > {_HUGE} || fabsf(base[1]) > {_HUGE})"
            lines.append(f"if ({far}) {{\n{loop(exact)}\n}} else {{\n{loop(quick)}\n}}")
        before = "" if first else "total[h] * old[h] + "
        return [*lines, f"{each('h', 2)} total[h] = {before}(sums[h][0] + sums[h][1]);"]

    def _packed(self) -> list[str]:
        """Weights as left operands: columns 2q and 2q + 1 of eight, of a row and of the one 8 below."""
        return [
            "// sums of products are, rounded, the left operand of the next product as they stand",
            f"{each('q', self.s.bn // 16)}\n{each('e', 4)}",
            f"w[q][e] = w_narrow2_{self.kind}(s[8 * q + 2 * e], s[8 * q + 2 * e + 1]);",
        ]

    def _store(self) -> list[str]:
        """Results over sums: four neighbouring lanes exchange so that each has eight columns."""
        p = self.p
        width = out_width(p)
        kind = storage(p.out_dtype)
        z, m = dims_offset(p, p.out, p.z, "z"), dims_offset(p, p.out, p.rows, "m")
        place = summed(z, m, Int("c") * p.out.strides[-1], p.out.offset)
        wide = -(-self.columns // 32)
        inside = f"m < {p.m}" + (f" && c < {p.head}" if p.head != wide * 32 else "")
        step = p.out.strides[-1]
        pieces = []
        for e in range(0, 8, width):
            guard = f"if ({Int('c') + e} < {p.head}) " if p.head % 8 else ""
            to = f"y + {e * step}" if e else "y"
            pieces.append(
                f"{guard}{{ {' '.join(wide_store([f'v[{e + i}]' for i in range(width)], p.out_dtype, to))} }}"
            )
        take = " ".join(
            f"v[{2 * c + e}] = o[{(4 * Int('j') + c) * 4 + (2 * Int('h') + e)}] * all;"
            for c in range(4)
            for e in range(2)
        )
        if self.columns % 32:
            take = (
                f"{each('c', 4)}\n{each('e', 2)} v[2 * c + e] = 4 * j + c < {self.columns // 8}"
                f" ? o[(4 * j + c < {self.columns // 8} ? 4 * j + c : 0) * 4 + 2 * h + e] * all : 0.0f;"
            )
        bad = self.check.applied() if self.check is not None else []
        return [
            *(self.check.awaited() if self.check is not None else []),
            "// epilogue: four neighbouring lanes exchange, so that each stores 8 neighbours",
            f"{each('h', 2)} {{",
            "float x = total[h];",
            _QUAD_SUM.format(1),
            _QUAD_SUM.format(2),
            f"{{ const int m = m0 + row + 8 * h; if ((lane & 3) == 0 && m < {p.m}) {self.log} }}" if self.log else "",
            "if (x == 0.0f) x = 1.0f;" if p.safe else "",
            "const float all = 1.0f / x;",
            "const int m = m0 + row + 8 * h;",
            f"{each('j', wide)} {{ float v[8];",
            take,
            "w_quad(v, lane);",
            "const int c = j * 32 + (lane & 3) * 8;",
            f"if ({inside}) {{",
            *bad,
            f"{kind}* const y = {behind(f'({kind}*)out{p.outputs[0]}', place)};",
            *pieces,
            "}\n}\n}",
            *(self.check.released() if self.check is not None else []),
        ]


def _half(dtype: DType, word: str) -> str:
    """Element `e` of a word of two."""
    if dtype is DType.BOOL:
        return f"({word} >> 8 * e & 255) != 0"
    if dtype is DType.F32:
        return f"(e ? {word}.y : {word}.x)"
    return f"(e ? w_unpack_{dtype.value}({word}).y : w_unpack_{dtype.value}({word}).x)"


def divided(p: Attention, s: AttentionTmaConfig, band: Band | None) -> tuple[int, int]:
    """Copies of the queries among the rows of a pair, and rows of one, where tiles of rows respect them."""
    if band is not None and (band.repeats == 1 or band.queries % s.bm == 0):
        return band.repeats, band.queries
    return 1, p.m


def _check(p: Attention, s: AttentionTmaConfig, band: Band | None) -> Check | None:
    """What skipping tiles of keys takes; None where none are skipped."""
    repeats, rows = divided(p, s, band)
    high = -(-rows // s.bm)
    if band is None or rows != band.queries or tiles(p, s) == 1 or high == 1:
        return None
    return checked(p, s, repeats, high, band.shift)


def out_width(p: Attention) -> int:
    """Neighbouring columns that are stored at once."""
    steps = [s for n, s in zip(p.out.shape[:-1], p.out.strides[:-1], strict=True) if n > 1]
    for width in (8, 4, 2):
        by = min(width, 16 // p.out_dtype.itemsize)
        if p.out.strides[-1] == 1 and p.head % width == 0 and all(x % by == 0 for x in (*steps, p.out.offset)):
            return width
    return 1
