"""The text of the mlp_wide template: layers of up to 512 columns, a piece of a layer's columns at a time.

The left operand of a layer lies in registers, the sums of a piece too; what comes out goes to shared memory, in
fragments that only the thread that wrote them reads again: values are exchanged by nobody, shared memory stands for
registers that there are not. Weights come panel by panel through a ring, in the order of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.gemm.common.epilogue import wide_load, wide_store
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.intrinsics.ring import initialised, prologue
from weft.generate.cuda.mlp import beside as mlp_beside
from weft.generate.cuda.mlp.beside import each
from weft.generate.cuda.mlp.image import PANEL, pieces, whole
from weft.generate.cuda.mlp.image import column as column_of
from weft.generate.cuda.mlp.match import Chain, End, last_use, padded
from weft.generate.cuda.mlp.runs import runs
from weft.generate.cuda.mlp.text import Kernel, chosen
from weft.generate.cuda.role.role import PDL
from weft.generate.expr.elementwise import Value
from weft.generate.expr.integer import Int, summed
from weft.ir.graph import NodeId

BARS = 16
"""Bytes of the two barriers of a stage."""


@dataclass(frozen=True, slots=True)
class SharedValues:
    """Where values lie in shared memory, in fragments of 16 columns."""

    first: dict[NodeId, int]
    count: int

    @staticmethod
    def of(p: Chain, columns: int) -> SharedValues:
        """Places of all values that a later part reads; a value may take the place of one that is read no more."""
        uses, home = last_use(p), _homes(p)
        end: dict[NodeId, int] = {}
        for node, part in uses.items():
            end[home[node]] = max(end.get(home[node], 0), part)
        busy: dict[NodeId, tuple[int, int]] = {}
        first: dict[NodeId, int] = {}
        total = 0
        for part, kept in enumerate(p.kept):
            read = _read(p, part)
            busy = {v: x for v, x in busy.items() if end[v] > part or (end[v] == part and v in read)}
            for node in (v for v in kept if home[v] == v and not _passes(p, v, uses)):
                size = whole(p.width(node), columns) // 16
                same = next((v for v, x in busy.items() if end[v] == part and x[1] == size), None)
                at = busy.pop(same)[0] if same is not None else _gap(list(busy.values()), size)
                first[node], busy[node] = at, (at, size)
                total = max(total, at + size)
        return SharedValues({v: first[h] for v, h in home.items() if h in first}, total)


def _homes(p: Chain) -> dict[NodeId, NodeId]:
    """Kept value -> the one in whose place it lies: layers of a loop leave theirs where they read the last one's."""
    home = {v: v for kept in p.kept for v in kept}
    for start, count in runs(p):
        left = p.layers[start - 1].left[0]
        for part in range(start, start + count):
            home.update(dict.fromkeys(p.kept[part], home[left]))
    return home


def _read(p: Chain, part: int) -> set[NodeId]:
    """Values that the steps of a part read."""
    home = _homes(p)
    found = {p.value(o) for s in p.steps[part] for o in p.graph.nodes[s].inputs}
    return {home[v] for v in found if v in home}


def _passes(p: Chain, node: NodeId, uses: dict[NodeId, int]) -> bool:
    """Whether a value is read as the first left operand alone: it is in registers then."""
    return node in p.kept[0] and uses[node] == 1 and node not in _read(p, 1)


def passes(p: Chain) -> bool:
    """Whether the first left operand is read by nothing else."""
    return all(_passes(p, v, last_use(p)) for v in p.kept[0])


def _gap(busy: list[tuple[int, int]], size: int) -> int:
    at = 0
    for start, count in sorted(busy):
        if start - at >= size:
            return at
        at = max(at, start + count)
    return at


@dataclass(frozen=True, slots=True)
class WideKernel(Kernel):
    """One kernel; `lines` is the body of its entry."""

    shared_values: SharedValues
    columns: int
    panels_of_x: bool
    """Whether x comes in panels."""

    @property
    def slot(self) -> int:
        """Bytes of a panel, at most."""
        return 2 * PANEL * max(pieces(x.n, self.columns)[1] for x in self.p.layers)

    @property
    def values_bytes(self) -> int:
        """Of values in shared memory."""
        return 16 * self.s.threads * self.shared_values.count

    @property
    def ring(self) -> int:
        """Where panels begin; products of warpgroups want a multiple of 1024."""
        return self.values_bytes

    @property
    def _vectors_at(self) -> int:
        return self.ring + self.s.stages * self.slot

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        vectors = self.image.bytes - self.image.weight_bytes
        return self._vectors_at + vectors + (BARS * self.s.stages if self.s.group else 0)

    def lines(self) -> list[str]:
        """From the weights in memory to the result."""
        p, s = self.p, self.s
        owner, inside = ("warp >> 2", Int("(warp & 3)") * 16) if s.group else ("warp", Int("0"))
        units = -(-p.rows // s.rows)
        lines = [
            "const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;",
            f"const int owner = {owner};",
            f"const {storage(self._x)}* const x = (const {storage(self._x)}*)in0;",
            f"{storage(self._out)}* const out = ({storage(self._out)}*)out0;",
            "(void)q; (void)g; (void)lane;",
            "// panels of weights come through a ring, in the order in which they are read",
            *self._weights(),
            PDL,
            "role.pdl_wait(); role.pdl_trigger();",
            *(self._load_panel() if self.panels_of_x else self._load()),
            "#pragma unroll 1",
            f"for (int turn = role.block_x(); turn < {-(-units // s.owners)}; turn += role.blocks_x()) {{",
            f"const int row0 = {(Int('turn') * s.owners + 'owner') * s.rows + inside};",
            *mlp_beside.near(p, 1, self._tall),
        ]
        alike = dict(runs(p))
        part = 1
        while part <= len(p.layers):
            layer = self._layer(part)
            if part in alike:
                layer = [f"#pragma unroll 1\nfor (int l = 0; l < {alike[part]}; ++l)", *layer]
            lines += layer
            part += alike.get(part, 1)
        return [*lines, "}"]

    def _weights(self) -> list[str]:
        """Vectors into shared memory, and the start of the ring."""
        image, s = self.image, self.s
        vectors = image.bytes - image.weight_bytes
        panels = [
            2 * PANEL * columns
            for layer in self.p.layers
            for count, columns in [pieces(layer.n, self.columns)]
            for _ in range(count * -(-layer.depth // PANEL))
        ]
        pingpong = -(-self.p.rows // (s.rows * s.owners))
        lines = [
            f"for (int i = t; i < {vectors // 16}; i += {s.threads})",
            f"w_copy16(w_shared(sm) + {self._vectors_at} + 16 * i, (const char*)pk + {image.weight_bytes} + 16 * i);",
            f"const u32 total = (({pingpong}u - 1 - role.block_x()) / role.blocks_x() + 1) * {len(panels)}u;",
            "u32 asked = 0, place = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;",
            "(void)turn_asked; (void)parity;",
        ]
        step = [
            f"++asked; place += size; if (++at_asked == {len(panels)}) {{ at_asked = 0; place = 0; }}",
            self._ring.advance("slot_asked", "++turn_asked"),
        ]
        size = f"const u32 size = {chosen('at_asked', panels)};"
        to = summed("w_shared(sm)", self.ring, f"slot_asked * {self.slot}u")
        if not s.group:
            return [
                *lines,
                "w_commit();",
                "auto ask = [&]() {\nif (asked < total) {",
                size,
                f"for (u32 i = 16 * t; i < size; i += {16 * s.threads})",
                f"w_copy16({to + 'i'}, (const char*)pk + place + i);",
                *step,
                "}\nw_commit();\n};",
                f"for (int i = 0; i < {s.stages - 1}; ++i) ask();",
                f"w_arrived<{s.stages - 1}>(); role.sync();",  # the vectors are there
            ]
        bars = self._vectors_at + vectors
        return [
            f"const u32 full = w_shared(sm) + {bars}u, empty = full + {8 * s.stages}u;",
            *lines,
            "w_commit(); w_arrived<0>();",
            prologue(initialised(s.warps, self._ring)),
            "role.sync();",
            "auto ask = [&]() {\nif (asked < total) {",
            size,
            f"if (turn_asked) {self._ring.await_read('slot_asked', '(turn_asked - 1) & 1')}",
            f"w_bar_expect({self._ring.filled_at('slot_asked')}, size);",
            f"w_bulk({to}, (const char*)pk + place, size, {self._ring.filled_at('slot_asked')});",
            *step,
            "}\n};",
            f"if (t == 0) for (int i = 0; i < {s.stages // 2}; ++i) ask();",
        ]

    def _load_panel(self) -> list[str]:
        """The lambda load(row, panel, to): four fragments of x, zeros behind its last column."""
        p, v = self.p, self.image.read
        k, size, group = p.width(p.x), self._x.itemsize, max(1, v // 2)
        matrix = p.inputs[p.x]
        row = summed("x", Int(f"(u64)(r < {p.rows} ? r : {p.rows - 1})") * matrix.steps[0], matrix.offset)
        lines = [
            "auto load = [&](int row, int panel, u32 (&to)[4][4]) {",
            f"{each('half', 2)} {{",
            "const int r = row + half * 8 + g;",
            f"const {storage(self._x)}* const from = {row};",
            f"{each('c', 8 // group)} {{ const int column = panel * {PANEL} + c * {8 * group} + q * {2 * group};",
            f"float v[{2 * group}];",
        ]
        if v == 1:
            value = f"w_unpack_{self._x.value}(from[column + e]).x" if size == 2 else "from[column + e]"
            lines.append(f"{each('e', 2)} v[e] = column + e < {k} ? {value} : 0.0f;")
        else:
            lines += [f"{each('e', 2 * group)} v[e] = 0.0f;", f"if (column < {k}) {{"]
            per = min(v, 16 // size)
            for i in range(0, v, per):
                lines += [f"{{ float part[{per}];", *wide_load("w", self._x, per, summed("from", "column", i), "part")]
                lines.append(f"{each('e', per)} v[{i + Int('e')}] = part[e]; }}")
            lines.append("}")
        for i in range(group):
            lines.append(f"{{ const int i = {Int('c') * group + i}, j = panel * 8 + i;")
            lines += self._vector_loads(0)
            x = [Value(f"v[{2 * i + e}]", self._x) for e in range(2)]
            text, found = self._expressions(0, {p.x: x}, (self._first,))
            ends = [self._inside(found[self._first][e].name, k, e) for e in range(2)]
            lines += [*text, f"to[i / 2][i % 2 * 2 + half] = w_narrow2_{p.dtype.value}({ends[0]}, {ends[1]});\n}}"]
        return [*lines, "}\n}\n};"]

    def _inside(self, value: str, width: int, e: int) -> str:
        """Zero in columns that are none."""
        return value if width % PANEL == 0 else f"({summed('j * 8', '2 * q', e)} < {width} ? {value} : 0.0f)"

    def _at(self, node: NodeId, fragment: str) -> str:
        """A fragment of a value in shared memory."""
        start = self.shared_values.first[node] * 16 * self.s.threads
        own = Int(f"({Int(fragment) * self.s.threads + 't'})") * 16
        return f"*(uint4*)({summed('sm', start, own)})"

    def _layer(self, part: int) -> list[str]:
        """One product, piece by piece, and what is behind it."""
        p, s = self.p, self.s
        layer = p.layers[part - 1]
        count, columns = pieces(layer.n, self.columns)
        lines = [f"{{  // layer {part}, {columns} columns at a time"]
        if not (part == 1 and self.panels_of_x):
            lines += self._operand_of(part)
        head = f"#pragma unroll 1\nfor (int c = 0; c < {count}; ++c) {{" if count > 1 else "{ const int c = 0;"
        lines += [head, f"float d[{columns // 2}];" if s.group else f"float d[{columns // 8}][4];"]
        lines += self._first_sums(part, columns)
        if part == 1 and self.panels_of_x:
            lines += self._panels_from_memory(columns)
        else:
            lines += self._panel_products(part, columns)
        lines += self._results(part, columns) if p.kept[part] else []
        lines += [x for end in p.ends_of(part) for x in self._written(end, columns)]
        return [*lines, "}\n}"]

    def _operand_of(self, part: int) -> list[str]:
        """The left operand into registers."""
        layer = self.p.layers[part - 1]
        lines = [f"u32 a[1][{layer.depth // 16}][4];"]
        if part == 1 and len(layer.left) == 1:
            lines.append("load(row0, a);")
            if self._first in self.shared_values.first:
                value = "make_uint4(a[0][k][0], a[0][k][1], a[0][k][2], a[0][k][3])"
                lines.append(f"{each('k', layer.depth // 16)} {self._at(self._first, 'k')} = {value};")
            return lines
        start = 0
        if part == 1:
            lines.append(f"u32 x0[1][{padded(self.p.width(self.p.x)) // 16}][4]; load(row0, x0);")
        for node, width in zip(layer.left, layer.widths, strict=True):
            k = start + Int("k")
            if node in layer.beside:
                row = mlp_beside.row_of(self.p, "0", self._tall)
                lines += mlp_beside.fragments(self.p, node, row, "a[0]", self._operand, start)
                start += padded(width) // 16
                continue
            if part == 1:
                lines.append(f"{each('k', padded(width) // 16)}\n{each('e', 4)} a[0][{k}][e] = x0[0][k][e];")
                if node in self.shared_values.first:
                    value = "make_uint4(x0[0][k][0], x0[0][k][1], x0[0][k][2], x0[0][k][3])"
                    lines.append(f"{each('k', padded(width) // 16)} {self._at(node, 'k')} = {value};")
                start += padded(width) // 16
                continue
            lines.append(
                f"{each('k', padded(width) // 16)} {{ const uint4 w = {self._at(node, 'k')};"
                f" a[0][{k}][0] = w.x; a[0][{k}][1] = w.y; a[0][{k}][2] = w.z; a[0][{k}][3] = w.w; }}"
            )
            start += padded(width) // 16
        return lines

    def _d(self, part: int, m: str, j: str, e: str) -> str:  # noqa: ARG002 - sums are those of a piece
        return f"d[{4 * Int('i') + Int(e)}]" if self.s.group else f"d[i][{e}]"

    def _first_sums(self, part: int, columns: int) -> list[str]:
        """Sums are the bias, or zero."""
        bias = self._bias(part)
        if bias is None and self.s.group:
            return []  # the first product overwrites
        lines = [f"{each('i', columns // 8)} {{ const int j = {Int('c') * (columns // 8) + 'i'}; (void)j;"]
        value = ["0.0f", "0.0f"]
        if bias is not None:
            place = self._vectors_at - self.image.weight_bytes + self.image.place(part, bias)
            at = summed("sm", place, self._vector_turn(part), "(j * 8 + 2 * q) * 4")
            lines.append(f"const float2 b = *(const float2*)({at});")
            value = ["b.x", "b.y"]
        return [*lines, *(f"{self._d(part, '0', 'j', str(e))} = {value[e % 2]};" for e in range(4)), "}"]

    def _vector_turn(self, part: int) -> Int:
        own = [node for at, node in self.image.vectors if at == part]
        size = sum(4 * whole(self.p.graph.type_of(v).size // self.p.rows, self.columns) for v in own)
        return self._turn(part, size)

    def _multiplied(self, part: int, first: int | str, count: int, columns: int, left: str) -> list[str]:
        """Products with fragments of a panel from fragment `first` of the sum on; `left` has its number as k."""
        kind, ring = self.p.dtype.value, summed("w_shared(sm)", self.ring, f"slot * {self.slot}u")
        if self.s.group:
            add = Int("1") if self._bias(part) is not None else first + Int("k")
            return [
                f"{{ const u32 w = {ring};",
                f"{each('k', count)} w_wgmma_{kind}(d, {left}, w_descriptor(w + k * 32), {add});\n}}",
            ]
        pairs = columns // 16
        return [
            f"{each('k', count)}\n{each('i', pairs)} {{",
            f"const uint4 w = *(const uint4*)({summed('sm', self.ring, f'slot * {self.slot}')}",
            f"+ ({(Int('k') * pairs + 'i') * 32 + 'lane'}) * 16);",
            f"w_mma_{kind}(d[2 * i], {left}, w.x, w.y); w_mma_{kind}(d[2 * i + 1], {left}, w.z, w.w);",
            "}",
        ]

    def _panel_products(self, part: int, columns: int) -> list[str]:
        """The sums of a piece, panel by panel; the left operand is in registers."""
        s, depth = self.s, self.p.layers[part - 1].depth // 16
        step = self._ring.advance()
        lines: list[str] = ["{"]
        for i, first in enumerate(range(0, depth, PANEL // 16)):
            count = min(PANEL // 16, depth - first)
            calls = self._multiplied(part, first, count, columns, f"a[0][{first + Int('k')}]")
            if not s.group:
                lines += [f"w_arrived<{s.stages - 2}>(); role.sync(); ask();", *calls, step]
                continue
            lines += [
                "if (t == 0) ask();\n__syncwarp();",
                f"{self._ring.await_filled('slot', 'parity')} w_group_begin();",
                *calls,
                "w_group_commit();",
            ]
            if i:
                lines.append(f"w_group_wait<1>(); {self._panel_read()}")
            lines += [f"{'u32 ' if i == 0 else ''}before = slot;", step]
        return [*lines, *(self._last_panel() if s.group else []), "}"]

    def _last_panel(self) -> list[str]:
        return [f"w_group_wait<0>(); {self._panel_read()}", self._hold()]

    def _hold(self) -> str:
        return "#pragma unroll\nfor (int e = 0; e < (int)(sizeof d / 4); ++e) w_hold(d[e]);"

    def _panels_from_memory(self, columns: int) -> list[str]:
        """The same where fragments of x are read panel by panel; the next one's while this one is multiplied."""
        s, depth = self.s, self.p.layers[0].depth
        count = -(-depth // PANEL)
        step = self._ring.advance()
        calls = self._multiplied(1, "panel", PANEL // 16, columns, "a[k]")  # not 0 behind the first panel
        lines = [
            "u32 following[4][4]; load(row0, 0, following);",
            f"#pragma unroll 1\nfor (int panel = 0; panel < {count}; ++panel) {{ u32 a[4][4];",
            f"{each('k', 4)}\n{each('e', 4)} a[k][e] = following[k][e];",
        ]
        ahead = f"if (panel + 1 < {count}) load(row0, panel + 1, following);"
        if not s.group:
            return [*lines, f"w_arrived<{s.stages - 2}>(); role.sync(); ask();", ahead, *calls, step, "}"]
        return [
            *lines,
            "if (t == 0) ask();\n__syncwarp();",
            f"{self._ring.await_filled('slot', 'parity')} w_group_begin();",
            *calls,
            "w_group_commit();",
            ahead,
            "__syncwarp(); w_group_wait<0>();",
            # products read these registers until now: what is loaded meanwhile must not lie in them
            f'#ifndef W_EMULATED\n{each("k", 4)}\n{each("e", 4)} asm volatile("" ::"r"(a[k][e]));\n#endif',
            f"__syncwarp(); {self._ring.release('slot')}",
            self._hold(),
            step,
            "}",
        ]

    def _words(self, part: int) -> tuple[list[str], dict[NodeId, list[Value]]]:
        """Fragments of earlier values that a part reads at column pair `pair`, and their two columns."""
        p = self.p
        read = {p.value(o) for s in p.steps[part] for o in p.graph.nodes[s].inputs}
        lines: list[str] = []
        found: dict[NodeId, list[Value]] = {}
        for node in (v for kept in p.kept[:part] for v in kept if v in read):
            lines.append(f"const uint4 f{node} = {self._at(node, 'j0 / 2')};")
            found[node] = [Value(f"k{node}.{f}", p.dtype) for f in "xy"]
        return lines, found

    def _beside(self, part: int) -> tuple[list[str], dict[NodeId, list[Value]]]:
        nodes = self.p.read(part)
        if not nodes:
            return [], {}
        order = self.image.written if part == len(self.p.layers) else 2
        column, row = column_of(Int("j") * 8 + 2 * Int("q"), order), mlp_beside.row_of(self.p, "0", self._tall)
        return mlp_beside.pairs(self.p, nodes, row, column, whole=False)

    def _unpacked(self, nodes: list[NodeId]) -> list[str]:
        kind = self.p.dtype.value
        word = "i % 2 ? (half ? f{0}.w : f{0}.z) : (half ? f{0}.y : f{0}.x)"
        return [f"const float2 k{v} = w_unpack_{kind}({word.format(v)});" for v in nodes]

    def _results(self, part: int, columns: int) -> list[str]:
        """Kept values of a piece, two chunks of 8 columns at a time."""
        p = self.p
        width = p.layers[part - 1].n
        words, found = self._words(part)
        text_beside, beside = self._beside(part)
        kept = p.kept[part]
        j0 = Int("c") * (columns // 8) + 2 * Int("pair")
        lines = [f"{each('pair', columns // 16)} {{ const int j0 = {j0};", *words]
        lines += [f"u32 o{node}[4];" for node in kept]
        lines += [
            f"{each('b', 2)} {{ const int i = 2 * pair + b, j = j0 + b;",
            *self._vector_loads(part),
            f"{each('half', 2)} {{",
            *self._unpacked(list(found)),
            *text_beside,
        ]
        found |= beside
        relus = {node: z for node in kept if (z := self._relu(part, node)) is not None}
        wanted = [relus.get(node, node) for node in kept]
        text, values = self._expressions(part, {**self._known(part, "0"), **found}, wanted)
        lines += text
        for node, source in zip(kept, wanted, strict=True):
            ends = [self._edge(values[source][e].name, width, e) for e in range(2)]
            name = "relu2" if node in relus else "narrow2"
            lines.append(f"o{node}[b * 2 + half] = w_{name}_{p.dtype.value}({ends[0]}, {ends[1]});")
        lines.append("}\n}")
        for node in kept:
            lines.append(f"{self._at(node, 'j0 / 2')} = make_uint4(o{node}[0], o{node}[1], o{node}[2], o{node}[3]);")
        return [*lines, "}"]

    def _edge(self, value: str, width: int, e: int) -> str:
        """Zero in columns that are none: what multiplies a zero weight must be finite."""
        return value if width % 16 == 0 else f"({summed('j * 8', '2 * q', e)} < {width} ? {value} : 0.0f)"

    def _written(self, end: End, columns: int) -> list[str]:
        """A result, as wide as a lane's columns lie side by side."""
        p, part = self.p, end.part
        v = mlp_beside.neighbours_at(p, end, self.image.written)
        width, dtype = p.layers[part - 1].n, p.graph.type_of(end.node).dtype
        group = max(1, v // 2)
        to = mlp_beside.place(p, end, self._row(width))
        words, found = self._words(part)
        text_beside, beside = self._beside(part)
        lines = [
            f"{each('cc', columns // (8 * group))} {{ float y[2][{2 * group}];",
            f"const int column = c * {columns} + cc * {8 * group};",
            f"{each('b', group)} {{ const int i = {Int('cc') * group + 'b'}, j = {Int('c') * (columns // 8) + 'i'};",
            "const int j0 = j & ~1; (void)j0;",
            *self._vector_loads(part),
            *words,
            f"{each('half', 2)} {{",
            *self._unpacked(list(found)),
            *text_beside,
        ]
        found |= beside
        text, values = self._expressions(part, {**self._known(part, "0"), **found}, (end.node,))
        lines += [*text, *(f"y[half][{2 * Int('b') + e}] = {values[end.node][e].name};" for e in range(2)), "}\n}"]
        lines += [
            f"{each('half', 2)} {{ const int r = row0 + half * 8 + g;",
            f"if (r < {p.rows} && column < {width}) {{ {storage(dtype)}* const to = {to} + column;",
        ]
        if v > 1:
            guard = f"if (column + 2 * q < {width}) {{" if group == 1 and width % 8 else "{"
            lines += [guard, *wide_store([f"y[half][{i}]" for i in range(v)], dtype, f"to + q * {v}"), "}"]
        else:
            for e in range(2):
                store = wide_store([f"y[half][{e}]"], dtype, summed("to", "2 * q", e))
                lines += [f"if ({summed('column', '2 * q', e)} < {width}) {{", *store, "}"]
        return [*lines, "}\n}\n}"]
