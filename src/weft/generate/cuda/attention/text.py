"""The text of the attention kernel; see `kernel` for what it does."""

from __future__ import annotations

import math

import numpy as np

from weft.generate.cuda.attention import cores
from weft.generate.cuda.attention.load import (
    Operand,
    block_offset,
    dims_offset,
    each,
    expression,
    fill,
    source_of,
    value_at,
)
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.results import logarithm
from weft.generate.cuda.attention.shapes import SUM_PAD, AttentionConfig, overlapped, padded, q_in_registers, tiles
from weft.generate.cuda.gemm.common.epilogue import wide_store
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value
from weft.generate.expr.integer import Int, behind, summed
from weft.ir.types import DType

_QUAD_MAX = "x = w_max_f32(x, __uint_as_float(w_shfl_word(__float_as_uint(x), {})));"
_QUAD_SUM = "x += __uint_as_float(w_shfl_word(__float_as_uint(x), {}));"


class Kernel:
    """One shape of one attention."""

    def __init__(self, p: Attention, s: AttentionConfig) -> None:
        self.p, self.s = p, s
        self.count = tiles(p, s)
        self.ring = self.count > s.stages
        self.start = Int("0" if s.kv_splits == 1 else "from")
        self.ahead = s.stages - 1 if self.ring else s.stages
        # with all tiles in shared memory warps need not wait for each other again
        self.free = not self.ring and self.count > 2
        self.q = Operand.of(p, "q", p.q, s.bm, p.qk)
        self.k = Operand.of(p, "k", p.k, s.bn, p.qk)
        self.v = Operand.of(p, "v", p.v, s.bn, p.head)
        self.stage = self.k.bytes + self.v.bytes
        self.tensor = p.tensor
        self.q_in_registers = q_in_registers(p)
        # matrix instructions take 32 bytes of each row
        self.steps = padded(p.qk) * p.dtype.itemsize // 32
        self.kind = "tf32" if p.tf32 else p.dtype.value
        self.columns = padded(p.head) // 8
        # scores in registers times this are exponents of two
        self.factor = literal(float(np.float32(math.log2(math.e) * (p.scale or 1.0))), DType.F32)
        # One multiply-add per weight is enough where scores stay below 2^17, as products of f16 do: above, the rounding
        # of the maximum times the factor would show.
        self.fast = p.dtype is DType.F16 and p.scale > 0

    def _base(self, top: str) -> str:
        """What `_weight` subtracts; a row of -inf alone keeps zeros."""
        return f"{top} == -__builtin_inff() ? 0.0f : {top}{f' * {self.factor}' if self.fast else ''}"

    def _weight(self, score: str) -> str:
        """exp(score - maximum), where `base` is made of the maximum."""
        if self.fast:
            return f"w_exp2(fmaf({score}, {self.factor}, -base))"
        return f"w_exp2(({score} - base) * {self.factor})"

    def lines(self) -> list[str]:
        """The body of the kernel."""
        p, s = self.p, self.s
        mt = -(-p.m // s.bm)
        found = [
            "const u32 sb = w_shared(sm);",
            "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
            self._place(mt),
            f"const int row0 = {Int('warp') / s.wk * (16 * s.mi)}, key0 = {Int('warp') % s.wk * s.nb};",
            "(void)z; (void)m0; (void)key0;",
            *(fill(p, x, s.threads) for x in (self.q, self.k, self.v)),
            f"float o[{s.mi}][{self.columns}][4], top[{s.mi}][2], total[{s.mi}][2];",
            f"{each('a', s.mi)} {{\n{each('j', self.columns)}\n{each('e', 4)} o[a][j][e] = 0.0f;",
            "top[a][0] = top[a][1] = -__builtin_inff(); total[a][0] = total[a][1] = 0.0f;\n}",
            "role.pdl_wait(); role.pdl_trigger();",
            *self._first_copies(),
            *self._score_rows(),
        ]
        if self.q_in_registers:
            found.append(f"u32 fq[{s.mi}][{self.steps}][4];")
        if self.free:
            found += ["w_arrived<0>(); role.sync();", self._load_q()]
        found += self._overlapped() if overlapped(p, s) else self._loop()
        found += [*self._meet(), *(self._store() if s.kv_splits == 1 else [*self._joined(), *self._store_part()])]
        return [x for x in found if x]

    def _place(self, mt: int) -> str:
        """Declares where the block's rows are, and from which key on it works."""
        s, block = self.s, Int("role.block_x()")
        tile = block / s.kv_splits
        own = f" rank = {block % s.kv_splits}, from = rank * {self.count * s.bn}," if s.kv_splits > 1 else ""
        return f"const int{own} z = {tile / mt}, m0 = {tile % mt * s.bm};"

    def _loop(self) -> list[str]:
        """All tiles, one after the other."""
        if self.count > 1:
            return [f"#pragma unroll 1\nfor (int i = 0; i < {self.count}; ++i) {{", *self._step(), "}"]
        return ["{ const int i = 0; (void)i;", *self._step(), "}"]

    def _overlapped(self) -> list[str]:
        """The same without a loop: the first product of the next tile stands in front of the softmax of this one."""
        s = self.s
        lines = [f"float even[{s.mi}][{s.nb // 8}][4], odd[{s.mi}][{s.nb // 8}][4];"]

        def at(i: int, *parts: str) -> list[str]:
            scores = f"float (&s)[{s.mi}][{s.nb // 8}][4] = {'odd' if i % 2 else 'even'};"
            here = f"const u32 here = sb + {self.q.bytes + i * self.stage}u;"
            return [
                f"{{ {scores} {here} const int n0 = {self.start + i * s.bn + 'key0'}; (void)here; (void)n0;",
                *parts,
                "}",
            ]

        for i in range(self.count):
            if i == 0:
                lines += at(i, *self._products())
            if i + 1 < self.count:
                lines += at(i + 1, *self._products())
            lines += at(i, *self._scores(), *self._exponentials(), *self._weighted())
        return lines

    @property
    def weights_at(self) -> int:
        """Where the weights of all warps lie in shared memory, on CUDA cores."""
        return self.q.bytes + self.s.stages * self.stage

    def _first_copies(self) -> list[str]:
        """q and the first tiles; the groups of copies are q with k 0, v 0, k 1, v 1, ..."""
        lines = [
            "// groups of copies: queries with the first keys, their values, the next keys, ...",
            "fill_q(m0, sb);",
        ]
        for i in range(min(self.ahead, self.count)):
            at = self.q.bytes + i * self.stage
            lines.append(f"fill_k({self.start + i * self.s.bn}, sb + {at}u); w_commit();")
            lines.append(f"fill_v({self.start + i * self.s.bn}, sb + {at + self.k.bytes}u); w_commit();")
        return lines

    def _arrived(self, values: bool) -> str:
        """Wait for the keys or the values of tile i; in a ring for both."""
        if self.ring:
            return "" if values else f"w_arrived<{2 * self.ahead - 2}>();\nrole.sync();"
        last = 2 * self.count - 1 - values
        waits = " else ".join(f"if (i == {i}) w_arrived<{last - 2 * i}>();" for i in range(self.count))
        return f"{waits}\nrole.sync();"

    def _score_rows(self) -> list[str]:
        """Where this thread's rows begin in what the scores read besides the product."""
        lines = []
        for i, y in enumerate([] if self.p.scale else self.p.score.leaves):
            assert y.view is not None
            place = block_offset(self.p, y) + dims_offset(self.p, y.view, self.p.rows, "m")
            row = "const int r = m0 + row0 + a * 16 + (lane >> 2) + h * 8"
            lines += [
                f"int s{i}[{self.s.mi}][2];",
                f"{each('a', self.s.mi)}\n{each('h', 2)} {{",
                f"{row}, m = r < {self.p.m} ? r : {self.p.m - 1}; (void)m;\ns{i}[a][h] = {place};\n}}",
            ]
        return lines

    def _step(self) -> list[str]:
        """One tile of keys."""
        p, s = self.p, self.s
        lines: list[str] = []
        if not self.free:
            lines.append(self._arrived(values=False))
            lines.append(self._load_q() if self.count == 1 else f"if (i == 0) {{\n{self._load_q()}\n}}")
        place = f"sb + {self.q.bytes}u + (u32)(i * {self.stage})"
        if self.ring:
            place = f"sb + {self.q.bytes}u + (u32)(i % {s.stages} * {self.stage})"
            more, ahead = f"if (i + {self.ahead} < {self.count})", self.start + Int(f"(i + {self.ahead})") * s.bn
            lines += [
                f"const u32 next = sb + {self.q.bytes}u + (u32)((i + {self.ahead}) % {s.stages} * {self.stage});",
                f"{more} fill_k({ahead}, next);\nw_commit();",
                f"{more} fill_v({ahead}, next + {self.k.bytes}u);\nw_commit();",
            ]
        some = "{" if s.wk == 1 else f"if (n0 < {p.keys}) {{"  # warps may have no keys left
        between = [] if self.free or self.ring else ["}", self._arrived(values=True), some]
        return [
            *lines,
            f"const u32 here = {place};",
            f"const int n0 = {self.start + Int('i') * s.bn + 'key0'};",
            f"float s[{s.mi}][{s.nb // 8}][4];",
            some,
            *(self._products() if self.tensor else cores.products(p, s, self.q, self.k)),
            *self._scores(),
            *self._exponentials(),
            *between,
            *(self._weighted() if self.tensor else cores.weighted(p, s, self.weights_at, self.k, self.v)),
            "}",
        ]

    def _load_q(self) -> str:
        """q into registers, where it stays there."""
        if not self.q_in_registers:
            return ""
        return f"{each('a', self.s.mi)}\n{each('kk', self.steps)} {self._read_q('fq[a][kk]')}"

    def _read_q(self, to: str) -> str:
        row = "row0 + a * 16 + (lane & 15)"
        return self._rounded(
            to, f"w_matrices({to}, sb + (u32)(({row}) * {self.q.pitch} + kk * 32 + (lane >> 4) * 16));"
        )

    def _rounded(self, name: str, read: str) -> str:
        """A statement that reads a fragment, which TF32 rounds."""
        return f"{{ {read} w_round_tf32({name}); }}" if self.p.tf32 else read

    def _products(self) -> list[str]:
        """s = q kᵀ of this warp's rows and keys."""
        s = self.s
        mma = f"w_mma_{self.kind}"
        at = f"here + (u32)(({{}}) * {self.k.pitch} + kk * 32 + ((lane >> 3) & 1) * 16)"
        row = "key0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)"
        kk = "kk" if self.q_in_registers else "0"
        again = "" if self.q_in_registers else f"u32 fq[{s.mi}][1][4];\n{each('a', s.mi)} {self._read_q('fq[a][0]')}"
        return [
            f"{each('a', s.mi)}\n{each('j', s.nb // 8)}\n{each('e', 4)} s[a][j][e] = 0.0f;",
            f"{each('kk', self.steps)} {{",
            again,
            f"{each('j', s.nb // 16)} {{ u32 f[4];",
            self._rounded("f", f"w_matrices(f, {at.format(row)});"),
            f"{each('a', s.mi)} {{",
            f"{mma}(s[a][2 * j], fq[a][{kk}], f[0], f[1]);",
            f"{mma}(s[a][2 * j + 1], fq[a][{kk}], f[2], f[3]);",
            "}\n}\n}",
        ]

    def _scores(self) -> list[str]:
        """The expression over the products; -inf for keys that do not exist."""
        p, s = self.p, self.s
        ragged = p.keys != self.count * s.bn * s.kv_splits
        if p.scale and not ragged:
            return []
        return [
            f"{each('j', s.nb // 8)}\n{each('e', 4)} {{",
            "const int at = n0 + j * 8 + (lane & 3) * 2 + (e & 1);",
            f"const int n = at < {p.keys} ? at : {p.keys - 1}; (void)n;" if not p.scale else "",
            f"{each('a', s.mi)} {{",
            *([] if p.scale else self._score()),
            f"if (at >= {p.keys}) s[a][j][e] = -__builtin_inff();" if ragged else "",
            "}\n}",
        ]

    def _score(self) -> list[str]:
        lines = []
        values: dict[int, Value] = {}
        for i, y in enumerate(self.p.score.leaves):
            assert y.view is not None
            place = Int(f"s{i}[a][e >> 1]") + Int("n") * y.view.strides[-1]
            base = "0" if y.kind == "iota" else f"(const {storage(y.dtype)}*){source_of(y)}"
            lines.append(f"const {c_type(y.dtype)} y{i} = {value_at(y, base, place)};")
            values[id(y)] = Value(f"y{i}", y.dtype)
        for y in self.p.score.parts():
            if y.kind == "scores":
                values[id(y)] = Value("s[a][j][e]", DType.F32)
        text, value = expression(self.p.score, values)
        return [*lines, *text, f"s[a][j][e] = (float){value.name};"]

    def _exponentials(self) -> list[str]:
        """s = exp(s - maximum so far), o and total on that scale. A row of -inf alone stays 0."""
        s = self.s
        pairs = "x = w_max_f32(x, s[a][j][2 * h]); x = w_max_f32(x, s[a][j][2 * h + 1]);"
        lines = [
            "// online softmax: exponentials on the scale of a row's maximum so far; four lanes share a row",
            f"{each('a', s.mi)}\n{each('h', 2)} {{",
            "float x = s[a][0][2 * h];",
            f"{each('j', s.nb // 8)} {{ {pairs} }}",
            _QUAD_MAX.format(1),
            _QUAD_MAX.format(2),
        ]
        if self.count > 1:
            lines.append("x = w_max_f32(x, top[a][h]);")
        lines.append(f"const float base = {self._base('x')};")
        if self.count > 1:
            lines += [
                "if (!(x == top[a][h])) {  // rare after the first tiles",
                f"const float old = {self._weight('top[a][h]')};",
                "total[a][h] *= old;",
                f"{each('j', self.columns)} {{ o[a][j][2 * h] *= old; o[a][j][2 * h + 1] *= old; }}",
                "}",
            ]
        return [
            *lines,
            "top[a][h] = x;",
            f"{each('j', s.nb // 8)}\n{each('e', 2)} {{",
            f"s[a][j][2 * h + e] = {self._weight('s[a][j][2 * h + e]')};",
            "total[a][h] += s[a][j][2 * h + e];",
            "}\n}",
        ]

    def _weighted(self) -> list[str]:
        """o += exponentials, rounded to the operands' type, times v."""
        s, kind = self.s, self.kind
        if self.p.tf32:
            return self._weighted_tf32()
        tiles_ = [2 * Int("q") + i // 2 for i in range(4)]
        pairs = [(f"s[a][{at}][{i % 2 * 2}]", f"s[a][{at}][{i % 2 * 2 + 1}]") for i, at in enumerate(tiles_)]
        words = [f"w[a][{i}] = w_narrow2_{kind}({lo}, {hi});" for i, (lo, hi) in enumerate(pairs)]
        row = "key0 + q * 16 + (lane & 15)"
        at = f"here + {self.k.bytes}u + (u32)(({row}) * {self.v.pitch} + j * 32 + (lane >> 4) * 16)"
        return [
            "// sums of products are, rounded, the left operand of the next product as they stand",
            f"{each('q', s.nb // 16)} {{ u32 w[{s.mi}][4];",
            f"{each('a', s.mi)} {{",
            *words,
            "}",
            f"{each('j', self.columns // 2)} {{ u32 f[4];",
            f"w_matrices_transposed(f, {at});",
            f"{each('a', s.mi)} {{",
            f"w_mma_{kind}(o[a][2 * j], w[a], f[0], f[1]);",
            f"w_mma_{kind}(o[a][2 * j + 1], w[a], f[2], f[3]);",
            "}\n}\n}",
        ]

    def _weighted_tf32(self) -> list[str]:
        """The same. Scores are fragments as they stand if keys 2q and 2q + 1 of eight are taken as rows q and q + 4."""
        s = self.s
        words = " ".join(f"w[a][{i}] = __float_as_uint(s[a][q][{e}]);" for i, e in enumerate((0, 2, 1, 3)))
        at = f"sm + (here - sb) + {self.k.bytes} + (key0 + q * 8 + (lane & 3) * 2) * {self.v.pitch}"
        return [
            f"{each('q', s.nb // 8)} {{ u32 w[{s.mi}][4];",
            f"{each('a', s.mi)} {{ {words} w_round_tf32(w[a]); }}",
            f"const float* const from = (const float*)({at}) + (lane >> 2);",
            f"{each('j', self.columns)} {{",
            f"const u32 lo = w_tf32(from[j * 8]), hi = w_tf32(from[{self.v.pitch // 4} + j * 8]);",
            f"{each('a', s.mi)} w_mma_tf32(o[a][j], w[a], lo, hi);",
            "}\n}",
        ]

    def _meet(self) -> list[str]:
        """Results, sums and maxima of all warps in shared memory."""
        s = self.s
        row = padded(self.p.head) + SUM_PAD
        to = f"sums + r * {row} + j * 8 + (lane & 3) * 2"
        if not self.tensor:  # a thread's columns are four neighbours of every sixteen
            to = f"sums + r * {row} + j / 2 * 16 + (lane & 3) * 4 + j % 2 * 2"
        return [
            "// warps that shared the keys of a row meet in shared memory",
            "w_arrived<0>(); role.sync();",
            "float* const sums = (float*)sm;",
            f"float* const tops = sums + {s.wk * s.bm * row}, * const totals = tops + {s.wk * s.bm};",
            "(void)tops;",
            f"{each('a', s.mi)}\n{each('h', 2)} {{",
            "float x = total[a][h];",
            _QUAD_SUM.format(1),
            _QUAD_SUM.format(2),
            f"const int r = {Int('warp') % s.wk * s.bm + 'row0'} + a * 16 + (lane >> 2) + h * 8;",
            "if ((lane & 3) == 0) { totals[r] = x; tops[r] = top[a][h]; }",
            f"{each('j', self.columns)} *(float2*)({to}) = make_float2(o[a][j][2 * h], o[a][j][2 * h + 1]);",
            "}",
            "role.sync();",
        ]

    def _store(self) -> list[str]:
        """The output: results over sums, those of the warps of a row on the scale of its maximum."""
        p, s = self.p, self.s
        row = padded(p.head) + SUM_PAD
        width = self._out_width()
        across = p.head // width
        if s.wk == 1:
            joined = ["all = totals[r];", f"{each('e', width)} v[e] = sums[r * {row} + c + e];"]
        else:
            part = f"sums[(y * {s.bm} + r) * {row} + c + e]"
            joined = [
                "float top = tops[r];",
                f"{each('y', s.wk)} top = w_max_f32(top, tops[y * {s.bm} + r]);",
                f"const float base = {self._base('top')};",
                "all = 0.0f;",
                f"{each('e', width)} v[e] = 0.0f;",
                f"{each('y', s.wk)} {{",
                f"const float f = {self._weight(f'tops[y * {s.bm} + r]')};",
                f"all = fmaf(totals[y * {s.bm} + r], f, all);",
                f"{each('e', width)} v[e] = fmaf({part}, f, v[e]);",
                "}",
            ]
        kind = storage(p.out_dtype)
        z, m = dims_offset(p, p.out, p.z, "z"), dims_offset(p, p.out, p.rows, "m")
        place = summed(z, m, Int("c") * p.out.strides[-1], p.out.offset)
        return [
            f"for (int x = t; x < {s.bm * across}; x += {s.threads}) {{",
            f"const int r = {Int('x') / across}, c = {Int('x') % across * width}, m = m0 + r;",
            f"if (m < {p.m}) {{ float v[{width}], all;",
            *joined,
            *self._log_of("" if s.wk > 1 else "const float top = tops[r];"),
            "if (all == 0.0f) all = 1.0f;" if p.safe else "",
            "all = 1.0f / all;",
            f"{each('e', width)} v[e] *= all;",
            f"{kind}* const y = {behind(f'({kind}*)out{p.outputs[0]}', place)};",
            *wide_store([f"v[{i}]" for i in range(width)], p.out_dtype, "y"),
            "}\n}",
        ]

    def _joined(self) -> list[str]:
        """Sums of the block's warps on one scale, and per row its maximum and sum, for the other blocks."""
        s = self.s
        row = padded(self.p.head) + SUM_PAD
        across = padded(self.p.head) // 4
        part = f"sums + (y * {s.bm} + r) * {row} + c"
        add = " ".join(f"v.{f} = fmaf(u.{f}, f, v.{f});" for f in "xyzw")
        return [
            f"float* const ends = totals + {s.wk * s.bm};",
            f"for (int x = t; x < {s.bm * across}; x += {s.threads}) {{",
            f"const int r = x / {across}, c = x % {across} * 4;",
            "float top = tops[r], all = 0.0f; float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);",
            f"{each('y', s.wk)} top = w_max_f32(top, tops[y * {s.bm} + r]);",
            f"const float base = {self._base('top')};",
            f"{each('y', s.wk)} {{",
            f"const float f = {self._weight(f'tops[y * {s.bm} + r]')}; const float4 u = *(const float4*)({part});",
            f"all = fmaf(totals[y * {s.bm} + r], f, all); {add} }}",
            f"*(float4*)(sums + r * {row} + c) = v;",
            "if (c == 0) *(float4*)(ends + 4 * r) = make_float4(top, all, 0.0f, 0.0f);",
            "}",
            "w_together(); w_cluster_sync();",
        ]

    def _store_part(self) -> list[str]:
        """This block's share of the output: results of all blocks of the cluster, in their order, over sums."""
        p, s = self.p, self.s
        row = padded(p.head) + SUM_PAD
        across = p.head // 4
        kind = storage(p.out_dtype)
        z, m = dims_offset(p, p.out, p.z, "z"), dims_offset(p, p.out, p.rows, "m")
        place = summed(z, m, Int("c") * p.out.strides[-1], p.out.offset)
        add = " ".join(f"v[{i}] = fmaf(u.{f}, f, v[{i}]);" for i, f in enumerate("xyzw"))
        return [
            "// keys split over a cluster: each CTA finishes its share, in order, through distributed shared memory",
            f"for (int x = rank * {s.threads} + t; x < {s.bm * across}; x += {s.threads * s.kv_splits}) {{",
            f"const int r = x / {across}, c = x % {across} * 4, m = m0 + r;",
            f"if (m < {p.m}) {{ float v[4], all = 0.0f, top = -__builtin_inff(); float4 e[{s.kv_splits}];",
            f"{each('y', s.kv_splits)} {{ e[y] = w_read_cluster(w_shared(ends + 4 * r), y);",
            "top = w_max_f32(top, e[y].x); }",
            f"const float base = {self._base('top')};",
            f"{each('i', 4)} v[i] = 0.0f;",
            f"{each('y', s.kv_splits)} {{",
            f"const float f = {self._weight('e[y].x')};",
            f"const float4 u = w_read_cluster(w_shared(sums + r * {row} + c), y);",
            f"all = fmaf(e[y].y, f, all); {add} }}",
            *self._log_of(""),
            "if (all == 0.0f) all = 1.0f;" if p.safe else "",
            "all = 1.0f / all;",
            f"{each('i', 4)} v[i] *= all;",
            f"{kind}* const y = {behind(f'({kind}*)out{p.outputs[0]}', place)};",
            *wide_store([f"v[{i}]" for i in range(4)], p.out_dtype, "y"),
            "}\n}",
            "w_together(); w_cluster_leave();",
        ]

    def _log_of(self, declared: str) -> list[str]:
        """The logarithm of a row's sum `all`, if it is a result, by the thread of the row's first columns."""
        stored = logarithm(self.p, "top", self.p.scale or 1.0, "all")
        return ["if (c == 0) {", declared, stored, "}"] if stored else []

    def _out_width(self) -> int:
        """Neighbouring columns that are stored at once."""
        view = self.p.out
        steps = [s for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
        for width in (8, 4, 2):
            by = min(width, 16 // self.p.out_dtype.itemsize)
            if view.strides[-1] == 1 and self.p.head % width == 0 and all(x % by == 0 for x in (*steps, view.offset)):
                return width
        return 1
