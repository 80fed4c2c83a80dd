"""The text of the mlp template: loads of x, the layers one after the other, stores; all of a tile in registers.

The sums of two chunks of 8 columns are, rounded to 16 bits, the left operand of 16 rows of the next product: lane
4g + q holds rows g and g + 8 and columns 2q and 2q + 1 of each chunk. So no value of a tile ever leaves its warp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.generate.cuda.gemm.common.epilogue import wide_load, wide_store
from weft.generate.cuda.intrinsics.approx import FUNCTIONS, JUMPS, NARROW
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.intrinsics.ring import Ring, initialised, prologue
from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.generate.cuda.mlp import beside as mlp_beside
from weft.generate.cuda.mlp.activation import activation_at
from weft.generate.cuda.mlp.beside import PERIODIC, each
from weft.generate.cuda.mlp.image import PANEL, Image, layer_bytes
from weft.generate.cuda.mlp.image import column as column_of
from weft.generate.cuda.mlp.match import Chain, End, Layer, last_use, padded
from weft.generate.cuda.mlp.runs import Run, runs
from weft.generate.cuda.mlp.shapes import MlpConfig, fixed_bytes, last_asks, panels_ahead, prefetched, slot_bytes
from weft.generate.cuda.role.role import PDL
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int, summed
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_EARLY = 128
"""Columns up to which sums begin with the bias: it is read while the last layer's sums are still there."""
_EARLY_WIDE = 256
"""The same of shapes that say so."""
PAIR = "w_threads<256>()"
"""Threads of a named barrier of two ping-pong warpgroups."""
PRESCALED = "w_mlp_gelu_stretched({})"
_WORDS = {8: "uint4", 4: "uint2", 2: "u32"}


@cache
def mlp_header() -> str:
    """Text of weft_cuda_mlp.h."""
    return Path(__file__).with_name("weft_cuda_mlp.h").read_text(encoding="utf-8")


def instruction(dtype: DType, columns: int) -> str:
    """The function that multiplies 64 rows in registers by a panel's 16 rows; tests bring their own."""
    kind = dtype.value
    return wgmma(f"w_wgmma_{kind}", columns, f"{kind}.{kind}", left_in_registers=True, mn_major=(False,))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel; `lines` is the body of its entry."""

    p: Chain
    s: MlpConfig
    image: Image

    def lines(self) -> list[str]:
        """From the weights in memory to the result."""
        p, s = self.p, self.s
        owner = "warp >> 2" if s.group else "warp"
        inside = Int("(warp & 3)") * 16 if s.group else Int("0")
        units = -(-p.rows // s.rows)
        lines = [
            "const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;",
            f"const int owner = {owner};",
            f"const {storage(p.graph.type_of(p.x).dtype)}* const x = (const {storage(self._x)}*)in0;",
            f"{storage(self._out)}* const out = ({storage(self._out)}*)out0;",
            "(void)q; (void)g;",
            *(["const u64 weights = w_descriptor(w_shared(sm));"] if s.group else []),
            *self._weights(),
            PDL,
            "role.pdl_wait(); role.pdl_trigger();",
        ]
        early = prefetched(p, s)
        steps = -(-p.width(p.x) // 16)
        if s.pingpong:
            lines.append("// ping-pong: the products of one warpgroup run beside the activations of another")
            lines.append(f"if (owner == {s.owners - 1}) role.named_barrier_arrive(0, {PAIR});")
        lines += [*self._load(), f"u32 h{self._first}[{s.tiles}][{steps}][4];"]
        if s.stages or s.pingpong:
            pingpong = -(-units // s.owners)
            head = f"for (int turn = role.block_x(); turn < {pingpong}; turn += role.blocks_x()) {{"
            head += f"\nconst int tile = {Int('turn') * s.owners + 'owner'};"
            following = Int("(turn + (int)role.blocks_x())") * s.owners + "owner"
            begin = Int("(int)role.block_x()") * s.owners + "owner"
        else:
            head = f"for (int tile = role.block_x() + owner * role.blocks_x(); tile < {units};"
            head += f" tile += {Int('role.blocks_x()') * s.owners}) {{"
            following = "tile" + Int("(int)role.blocks_x()") * s.owners
            begin = "(int)role.block_x()" + Int("owner") * "(int)role.blocks_x()"
        row = Int("tile") * s.rows + inside
        name = f"h{self._first}"
        late = not early and self._late
        if early:
            lines += [f"u32 ahead[{s.tiles}][{steps}][4];", f"load({begin * s.rows + inside}, ahead);"]
        if late:
            lines.append(f"load({begin * s.rows + inside}, {name});")
        lines += ["#pragma unroll 1", head, f"const int row0 = {row};", *mlp_beside.near(p, s.tiles, self._tall)]
        if early:
            copy = f"{name}[m][k][e] = ahead[m][k][e];"
            lines += [f"{each('m', s.tiles)}\n{each('k', steps)}\n{each('e', 4)} {copy}"]
            lines += [f"load({following * s.rows + inside}, ahead);"]
            if s.near:
                later = "tile" + Int(str(2 * s.owners)) * "(int)role.blocks_x()"
                lines += self._fetch(later * s.rows + inside)
        elif late:
            lines += [f"const int next0 = {following * s.rows + inside};", *self._fetch(Int("next0"))]
        else:
            lines.append(f"load(row0, {name});")
        alike = dict(self._alike)
        part = 1
        while part <= len(p.layers):
            if part in alike:
                head = f"#pragma unroll 1\nfor (int l = 0; l < {alike[part]}; ++l) {{"
                lines += [head, *self._layer(part), "}"]
            else:
                lines += self._layer(part)
            part += alike.get(part, 1)
        return [*lines, "}", *([f"if (owner == 0) role.named_barrier(0, {PAIR});"] if s.pingpong else [])]

    @property
    def _late(self) -> bool:
        """Whether the next tile of x is loaded behind the last product: its registers are free, and stores follow."""
        p, s = self.p, self.s
        busiest = -(-p.rows // (s.rows * s.owners * s.persistent_ctas))
        return (
            s.group and s.stages > 0 and p.plain_input and p.width(p.x) % 8 == 0 and busiest > 1
            and last_use(p)[p.first] == 1 and len(p.layers) > 1 and p.inputs[p.x].dense
        )  # fmt: skip

    def _fetch(self, first: Int) -> list[str]:
        """A later tile of a warp, from that row on, comes into the L2 cache: its 16 rows lie side by side."""
        p = self.p
        matrix = p.inputs[p.x]
        row = matrix.steps[0] * self._x.itemsize
        return [
            f"{{ const int near0 = {first}; if (near0 + 16 <= {p.rows})",
            f"for (int i = lane; i < {-(-16 * row // 128)}; i += 32)",
            f"w_prefetch((const char*)({'x' + Int('(u64)near0') * matrix.steps[0]}) + i * 128); }}",
        ]

    @property
    def _alike(self) -> tuple[Run, ...]:
        """Layers of one loop; those that flow into each other are written out."""
        return () if self.s.flow else runs(self.p, self.s.fixed)

    def _flows(self, part: int) -> bool:
        """Whether a product begins with the first columns of its left operand that are there."""
        p, s = self.p, self.s
        if not s.flow or not 1 < part <= len(p.layers) or p.ends_of(part - 1):
            return False
        return len(p.kept[part - 1]) == 1 and p.kept[part - 1] == p.layers[part - 1].left

    def _turn(self, part: int, step: int) -> Int:
        """What is added to a place for the layers of a loop."""
        return Int("l") * step if part in dict(self._alike) else Int("0")

    def _name(self, node: NodeId) -> str:
        """The array of a kept value: layers of a loop leave theirs where they read the last one's."""
        for first, count in self._alike:
            if any(node in self.p.kept[part] for part in range(first, first + count)):
                return self._name(self.p.layers[first - 1].left[0])
        return f"h{node}"

    @property
    def _x(self) -> DType:
        return self.p.graph.type_of(self.p.x).dtype

    @property
    def _out(self) -> DType:
        return self.p.graph.type_of(self.p.out).dtype

    @property
    def _first(self) -> NodeId:
        return self.p.first

    @property
    def _tall(self) -> int:
        """Rows from one tile of an owner to its next."""
        return 64 if self.s.group else 16

    def _weights(self) -> list[str]:
        """The image into shared memory, or the start of the ring of its panels."""
        image, s = self.image, self.s
        if not s.stages:
            lines = [
                (
                    f"for (int i = t; i < {image.bytes // 16}; i += {s.threads})"
                    " w_copy16(w_shared(sm) + 16 * i, (const char*)pk + 16 * i);"
                ),
                "w_commit(); w_arrived<0>();",
            ]
            return [*lines, *(["w_async_fence();"] if s.group else []), "role.sync();"]
        slot = slot_bytes(image)
        vectors = image.bytes - image.weight_bytes
        fixed = fixed_bytes(image, s)
        ring = fixed + s.stages * slot
        panels = self._panels()
        start = panels[0][2]
        units = -(-self.p.rows // (s.rows * s.owners))
        bars = f"w_shared(sm) + {ring + vectors}u"
        return [
            "// a ring of panels of weights: full barriers count bytes, empty ones the warps that have read a panel",
            f"const u32 full = {bars}, empty = full + {8 * s.stages}u;",
            (
                f"for (int i = t; i < {vectors // 16}; i += {s.threads})"
                f" w_copy16(w_shared(sm) + {ring} + 16 * i, {Int('(const char*)pk') + image.weight_bytes} + 16 * i);"
            ),
            f"for (int i = t; i < {fixed // 16}; i += {s.threads})",
            "w_copy16(w_shared(sm) + 16 * i, (const char*)pk + 16 * i);",
            "w_commit(); w_arrived<0>(); w_async_fence();",
            prologue(initialised(s.warps, self._ring)),
            "role.sync();",
            # of all panels of all turns of this block, the next one to be asked for, and the one that is read
            f"const u32 total = (({units}u - 1 - role.block_x()) / role.blocks_x() + 1) * {len(panels)}u;",
            f"u32 asked = 0, place = {start}, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;",
            "auto ask = [&]() {",
            "if (asked < total) {",
            f"const u32 size = {chosen('at_asked', [size for *_, size in panels])};",
            f"if (turn_asked) {self._ring.await_read('slot_asked', '(turn_asked - 1) & 1')}",
            f"w_bar_expect({self._ring.filled_at('slot_asked')}, size);",
            f"w_bulk({summed('w_shared(sm)', fixed, f'slot_asked * {slot}u')},",
            f"(const char*)pk + place, size, {self._ring.filled_at('slot_asked')});",
            f"++asked; place += size; if (++at_asked == {len(panels)}) {{ at_asked = 0, place = {start}; }}",
            self._ring.advance("slot_asked", "++turn_asked"),
            "}\n};",
            f"if (t == {self._asking}) for (int i = 0; i < {panels_ahead(s)}; ++i) ask();",
        ]

    @property
    def _ring(self) -> Ring:
        """The ring of panels."""
        return Ring(self.s.stages, "full", "empty")

    def _panels(self) -> list[tuple[int, int, int, int]]:
        """(layer, panel, offset, bytes) in the order of reading."""
        found = []
        for at, layer in enumerate(self.p.layers):
            size = 2 * PANEL * padded(layer.n)
            if at < self.s.fixed:
                continue
            found += [(at, i, self.image.layers[at] + i * size, size) for i in range(-(-layer.depth // PANEL))]
        return found

    def _load(self) -> list[str]:
        """The lambda load(row, to): the left operand of the first product, from x."""
        p, s = self.p, self.s
        k, v = p.width(p.x), self.image.read
        matrix = p.inputs[p.x]
        chunks, c = padded(k) // 8, Int("c")
        first = f"(u64)(r < {p.rows} ? r : {p.rows - 1})"
        lines = [
            f"auto load = [&](int row, u32 (&to)[{s.tiles}][{chunks // 2}][4]) {{",
            f"{each('m', s.tiles)}\n{each('half', 2)} {{",
            f"const int r = row + m * {64 if s.group else 16} + half * 8 + g;",
            f"const {storage(self._x)}* const from = {summed('x', Int(first) * matrix.steps[0], matrix.offset)};",
        ]
        group = max(1, v // 2)
        size = self._x.itemsize
        lines.append(f"{each('c', chunks // group)} {{")
        if p.plain_input and v > 1:
            guard = f"if (c * 8 + 2 * q < {k}) " if group == 1 and k % 16 else ""
            start = summed("from", c * (8 * group), Int("q") * (2 * group))
            value = f"w_load_once({start})" if s.keep and v == 8 else f"*(const {_WORDS[v]}*)({start})"
            lines.append(f"{_WORDS[v]} w{' = 0' if guard else ''}; {guard}w = {value};")
            words = ["w"] if v == 2 else [f"w.{f}" for f in "xyzw"[:group]]
            for i, word in enumerate(words):
                lines.append(f"{mlp_beside.word_of('to[m]', c * group + i)} = {word};")
            return [*lines, "}\n}\n};"]
        lines.append(f"float v[{2 * group}];")
        if v > 1:
            start = summed("from", c * (8 * group), Int("q") * (2 * group))
            partial = group == 1 and k % 16 != 0
            if partial:
                lines += ["v[0] = v[1] = 0.0f;", f"if (c * 8 + 2 * q < {k}) {{"]
            per = min(v, 16 // size)
            for i in range(0, v, per):
                lines += [f"{{ float part[{per}];", *wide_load("w", self._x, per, start + i, "part")]
                lines.append(f"{each('e', per)} v[{i + Int('e')}] = part[e]; }}")
            if partial:
                lines.append("}")
        else:
            for e in range(2):
                place = summed("c * 8", "2 * q", e)
                value = f"w_unpack_{self._x.value}(from[{place}]).x" if size == 2 else f"from[{place}]"
                lines.append(f"v[{e}] = 0.0f; if ({place} < {k}) v[{e}] = {value};")
        for i in range(group):
            lines.append(f"{{ const int j = {c * group + i};")
            lines += self._vector_loads(0)
            x = [Value(f"v[{2 * i + e}]", self._x) for e in range(2)]
            text, found = self._expressions(0, {p.x: x}, (self._first,))
            lines += text
            ends = [self._masked(found[self._first][e].name, k, e) for e in range(2)]
            lines.append(f"to[m][j / 2][j % 2 * 2 + half] = w_narrow2_{p.dtype.value}({ends[0]}, {ends[1]});\n}}")
        return [*lines, "}\n}\n};"]

    def _masked(self, value: str, width: int, e: int) -> str:
        """Zero in columns that are none: what multiplies a zero weight must be finite."""
        if width % 16 == 0:
            return value
        return f"(j * 8 + 7 < {width} || {summed('j * 8', '2 * q', e)} < {width} ? {value} : 0.0f)"

    def _vector_loads(self, part: int) -> list[str]:
        lines = []
        ring = self._vectors_at - self.image.weight_bytes
        folded = self._bias(part)
        for at, node in self.image.vectors:
            if at != part or folded == node:
                continue
            place = summed("sm", self.image.place(part, node) + ring, self._vector_turn(part))
            source = place + Int(f"({self._columns(part)})") * 4
            lines.append(f"const float2 b{node} = *(const float2*)({source}); (void)b{node};")
        return lines

    def _columns(self, part: int) -> str:  # noqa: ARG002 - of other kernels
        """The columns of a lane in chunk j, counted in the result of a part."""
        return "j * 8 + 2 * q"

    def _row(self, width: int) -> str:
        """Where this block's columns of row r of the result begin."""
        return str("out" + Int("(u64)r") * width)

    @property
    def _vectors_at(self) -> int:
        """Where vectors begin in shared memory."""
        s = self.s
        return fixed_bytes(self.image, s) + s.stages * slot_bytes(self.image) if s.stages else self.image.weight_bytes

    def _vector_turn(self, part: int) -> Int:
        own = [node for at, node in self.image.vectors if at == part]
        return self._turn(part, sum(4 * padded(self.p.graph.type_of(v).size // self.p.rows) for v in own))

    def _bias(self, part: int) -> NodeId | None:
        """A vector that is added to the product alone: the sums begin with it."""
        sum_ = self._sum(part)
        if sum_ is None:
            return None
        vector = next(o for o in self.p.graph.nodes[sum_].inputs if o in self.p.vectors)
        readers = [s for s in self.p.steps[part] if vector in self.p.graph.nodes[s].inputs]
        narrow = self.p.layers[part - 1].n * self.s.tiles <= (_EARLY_WIDE if self.s.early else _EARLY)
        return vector if readers == [sum_] and narrow else None

    def _sum(self, part: int) -> NodeId | None:
        """The addition of a vector to a product that nothing else reads."""
        if part == 0:
            return None
        p = self.p
        product = p.layers[part - 1].node
        readers = [s for steps in p.steps for s in steps if product in map(p.value, p.graph.nodes[s].inputs)]
        multiplied = any(product in layer.left for layer in p.layers)
        if len(readers) != 1 or readers[0] not in p.steps[part] or multiplied or any(e.node == product for e in p.ends):
            return None
        node = p.graph.nodes[readers[0]]
        other = [o for o in node.inputs if p.value(o) != product]
        plain = node.prim is Prim.ADD and len(other) == 1 and other[0] in p.vectors and node.type.dtype.is_float
        return readers[0] if plain else None

    def _layer(self, part: int) -> list[str]:
        """One product, and what is behind it."""
        p, s = self.p, self.s
        layer = p.layers[part - 1]
        chunks = padded(layer.n) // 8
        bias = self._bias(part)
        lines = [f"// layer {part}: the sums of one layer are, rounded, the left operand of the next as they stand"]
        lines += [f"float d{part}[{s.tiles}][{4 * chunks}];" if s.group else f"float d{part}[{s.tiles}][{chunks}][4];"]
        if layer.beside:
            lines = [*mlp_beside.operands_of(p, layer, s.tiles, self._tall, self._operand), *lines]
        lines += self._begin(part, chunks, bias)
        if self._flows(part):
            lines += self._flow(part)
        else:
            lines += self._products(part) if s.group else self._fragments(part)
        for node in p.kept[part]:
            if self._name(node) == f"h{node}":
                lines.append(f"u32 h{node}[{s.tiles}][{chunks // 2}][4];")
        if self._flows(part + 1):
            return lines
        if part == len(p.layers) and self._late and not prefetched(p, s):
            lines.append(f"load(next0, h{self._first});")
        lines += [f"{each('m', s.tiles)} {{"]
        lines += self._keep(part, each("j", chunks)) if p.kept[part] else []
        lines += [x for end in p.ends_of(part) for x in self._store(end)]
        return [*lines, "}"]

    def _begin(self, part: int, chunks: int, bias: NodeId | None) -> list[str]:
        """Sums are the bias, or zero."""
        ring = self._vectors_at - self.image.weight_bytes
        value = ["0.0f", "0.0f"]
        lines = [f"{each('j', chunks)} {{"]
        if bias is not None:
            place = summed("sm", self.image.place(part, bias) + ring, self._vector_turn(part))
            lines.append(f"const float2 b = *(const float2*)({place + Int(f'({self._columns(part)})') * 4});")
            value = ["b.x", "b.y"]
        elif self.s.group:
            return []  # the first product overwrites
        lines.append(f"{each('m', self.s.tiles)} {{")
        lines += [f"{self._d(part, 'm', 'j', str(e))} = {value[e % 2]};" for e in range(4)]
        return [*lines, "}\n}"]

    def _d(self, part: int, m: str, j: str, e: str) -> str:
        return f"d{part}[{m}][{4 * Int(j) + Int(e)}]" if self.s.group else f"d{part}[{m}][{j}][{e}]"

    def _fragments(self, part: int) -> list[str]:
        """Products of one warp."""
        p, s = self.p, self.s
        layer = p.layers[part - 1]
        pairs = padded(layer.n) // 16
        kind = p.dtype.value
        size = layer_bytes(layer, group=False)
        place = summed("sm", self.image.layers[part - 1], self._turn(part, size))
        lines = []
        for head, left in self._steps(layer, 0, layer.depth // 16):
            lines += [
                f"{head}\n{each('j', pairs)} {{",
                f"const uint4 w = *(const uint4*)({place} + ({(Int('k') * pairs + 'j') * 32 + 'lane'}) * 16);",
                f"{each('m', s.tiles)} {{ w_mma_{kind}(d{part}[m][2 * j], {left}, w.x, w.y);",
                f"w_mma_{kind}(d{part}[m][2 * j + 1], {left}, w.z, w.w); }}",
                "}",
            ]
        return lines

    def _steps(self, layer: Layer, first: int, last: int) -> list[tuple[str, str]]:
        """(head of a loop over k, left operand at k) for the fragments [first, last) of a layer."""
        found = []
        start = 0
        for node, width in zip(layer.left, layer.widths, strict=True):
            end = start + padded(width) // 16
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                head = f"#pragma unroll\nfor (int k = {begin}; k < {stop}; ++k)"
                name = mlp_beside.name_of(layer, node) if node in layer.beside else self._name(node)
                found.append((head, f"{name}[m][{Int('k') - start}]"))
            start = end
        return found

    def _products(self, part: int) -> list[str]:
        """Products of one warpgroup."""
        p, s = self.p, self.s
        layer = p.layers[part - 1]
        kind = p.dtype.value
        count = layer.depth // 16
        add = "1" if self._bias(part) is not None else "k"
        size = 128 * padded(layer.n)
        lines: list[str] = []

        def calls(first: int, last: int, at: str) -> list[str]:
            found = []
            for head, left in self._steps(layer, first, last):
                call = f"w_wgmma_{kind}(d{part}[m], {left}, w_behind({at}), {add});"
                found.append(f"{head}\n{each('m', s.tiles)} {call}")
            return found

        take = give = ""
        if s.pingpong:
            # ping-pong: the products of one warpgroup run while the other has its activations
            take = f"role.named_barrier(owner, {PAIR}); "
            give = f" role.named_barrier_arrive((owner + 1) % {s.owners}, {PAIR});"
        lines += self._read(part) if s.pingpong else []  # all of the left operand is there before the turn
        if not s.stages or part <= s.fixed:
            place = self.image.layers[part - 1] + self._turn(part, layer_bytes(layer, group=True))
            at = f"weights, {summed(place, Int('k') / 4 * size, Int('k') % 4 * 32)}"
            lines += [f"{take}w_group_begin();", *calls(0, count, at), f"w_group_commit();{give} w_group_wait<0>();"]
        else:
            panels = -(-layer.depth // PANEL)
            for i in range(panels):
                first, last = i * 4, min(count, i * 4 + 4)
                lines += [*([take] if i == 0 else []), *self._panel(), "w_group_begin();"]
                lines += [
                    *calls(first, last, "w, k % 4 * 32"),
                    f"w_group_commit();{give if i == panels - 1 else ''} }}",
                ]
                lines += ["w_group_wait<1>();", self._panel_read()] if i else []
                lines += self._next_panel(i == 0)
            lines += ["w_group_wait<0>();", self._panel_read()]
            lines = ["{", *lines, "}"]
        return [*lines, *self._done(part)]

    def _done(self, part: int) -> list[str]:
        """Products are complete: until now they read their left operands, and nobody read the sums."""
        layer, tiles = self.p.layers[part - 1], each("m", self.s.tiles)
        return [*self._read(part), f"{tiles}\n{each('e', padded(layer.n) // 2)} w_hold(d{part}[m][e]);"]

    def _read(self, part: int) -> list[str]:
        """The left operand is there, and still there."""
        layer, tiles = self.p.layers[part - 1], each("m", self.s.tiles)
        steps = self._steps(layer, 0, layer.depth // 16)
        return [f"{head}\n{tiles}\n{each('e', 4)} w_read_until({left}[e]);" for head, left in steps]

    def _known(self, part: int, m: str) -> dict[NodeId, list[Value]]:
        """Values at chunk j and row `half` that a part may read: its product, and what earlier parts keep."""
        p = self.p
        sums = [self._d(part, m, "j", str(2 * Int("half") + e)) for e in range(2)]
        found = {p.layers[part - 1].node: [Value(x, p.dtype) for x in sums]}
        sum_ = self._sum(part)
        if sum_ is not None and self._bias(part) is not None:
            found[sum_] = found[p.layers[part - 1].node]
        return found

    def _earlier(self, part: int) -> tuple[list[str], dict[NodeId, list[Value]]]:
        p = self.p
        read = {p.value(o) for s in p.steps[part] for o in p.graph.nodes[s].inputs}
        lines: list[str] = []
        found: dict[NodeId, list[Value]] = {}
        for at in range(part):
            for node in p.kept[at]:
                if node in read:
                    word = f"{self._name(node)}[m][j / 2][j % 2 * 2 + half]"
                    lines.append(f"const float2 k{node} = w_unpack_{p.dtype.value}({word});")
                    found[node] = [Value(f"k{node}.{f}", p.dtype) for f in "xy"]
        text, beside = self._beside(part)
        return [*lines, *text], {**beside, **found}

    def _beside(self, part: int) -> tuple[list[str], dict[NodeId, list[Value]]]:
        """What the steps of a part read from memory, at chunk j and row `half`."""
        p = self.p
        nodes = p.read(part)
        if not nodes:
            return [], {}
        column = column_of(Int("j") * 8 + 2 * Int("q"), self.image.order(part))
        row = mlp_beside.row_of(p, "m", self._tall)
        text, found = mlp_beside.pairs(p, nodes, row, column, whole=p.layers[part - 1].n % 16 == 0)
        return text, found

    def _flow(self, part: int) -> list[str]:
        """The values that the last part keeps, and after every few columns of them their share of the product."""
        s, layer = self.s, self.p.layers[part - 1]
        steps, size = layer.depth // 16, 128 * padded(layer.n)
        hold = "\n".join(self._done(part))
        if not s.stages or part <= s.fixed:
            at = f"weights, {summed(self.image.layers[part - 1], Int('k') / 4 * size, Int('k') % 4 * 32)}"
            end = "w_group_wait<0>();" if s.pace else "w_group_commit(); w_group_wait<0>();"
            return [*self._parts(part, 0, steps, at), end, hold]
        lines = ["{"]
        for i, first in enumerate(range(0, steps, PANEL // 16)):
            last = min(steps, first + PANEL // 16)
            lines += [*self._panel(), *self._parts(part, first, last, "w, k % 4 * 32"), "}"]
            under_way = min(s.pace, -(-(last - first) // s.flow)) if s.pace else 1
            lines += [] if s.pace else ["w_group_commit();"]
            lines += [f"w_group_wait<{under_way}>();", self._panel_read()] if i else []
            lines += self._next_panel(i == 0)
        return [*lines, "w_group_wait<0>();", self._panel_read(), "}", hold]

    def _parts(self, part: int, first: int, last: int, at: str) -> list[str]:
        """Fragments [first, last) of a left operand as they are made, and their products with what lies at `at`."""
        p, s = self.p, self.s
        (left,) = p.layers[part - 1].left
        add = "1" if self._bias(part) is not None else "k"
        chunks = f"for (int j = 2 * k0; j < {_least('2 * k0', 2 * s.flow, 2 * first, 2 * last)}; ++j)"
        return [
            f"#pragma unroll\nfor (int k0 = {first}; k0 < {last}; k0 += {s.flow}) {{",
            f"{each('m', s.tiles)} {{",
            *self._keep(part - 1, f"#pragma unroll\n{chunks}"),
            "}",
            "w_group_begin();",
            f"#pragma unroll\nfor (int k = k0; k < {_least('k0', s.flow, first, last)}; ++k)",
            f"{each('m', s.tiles)}",
            f"w_wgmma_{p.dtype.value}(d{part}[m], {self._name(left)}[m][k], w_behind({at}), {add});",
            *([f"w_group_commit(); w_group_wait<{s.pace}>();"] if s.pace else []),
            "}",
        ]

    def _panel(self) -> list[str]:
        """Ask for a later panel, wait for the next one: it lies at `w`."""
        slot = slot_bytes(self.image)
        return [
            f"if (t == {self._asking}) ask();",
            "__syncwarp();",
            self._ring.await_filled("slot", "parity"),
            f"{{ const u64 w = w_behind(weights, {summed(fixed_bytes(self.image, self.s), f'slot * {slot}u')});",
        ]

    def _next_panel(self, first: bool) -> list[str]:
        return [
            f"{'u32 ' if first else ''}before = slot;",
            self._ring.advance(),
        ]

    @staticmethod
    def _panel_read() -> str:
        """The panel `before` may be overwritten."""
        return f"__syncwarp(); {Ring(0, 'full', 'empty').release('before')}"

    @property
    def _asking(self) -> int:
        """The thread that asks for panels."""
        return self.s.threads - 128 if last_asks(self.s) else 0

    def _keep(self, part: int, head: str) -> list[str]:
        """Kept values, chunk by chunk of those that the loop `head` names."""
        p = self.p
        earlier, found = self._earlier(part)
        width = p.layers[part - 1].n
        lines = [f"{head} {{", *self._vector_loads(part), f"{each('half', 2)} {{", *earlier]
        ends = [self._ending(part, node, p.dtype) for node in p.kept[part]]
        wanted = [source for source, _ in ends]
        text, values = self._expressions(part, {**self._known(part, "m"), **found}, wanted)
        lines += text
        for node, (source, name) in zip(p.kept[part], ends, strict=True):
            pair = ", ".join(self._masked(values[source][e].name, width, e) for e in range(2))
            lines.append(f"{self._name(node)}[m][j / 2][j % 2 * 2 + half] = w_{name}_{p.dtype.value}({pair});")
        return [*lines, "}\n}"]

    def _ending(self, part: int, node: NodeId, dtype: DType) -> tuple[NodeId, str]:
        """(what is narrowed, the function that does it by pairs): ReLU is part of that."""
        relu = self._relu(part, node)
        if relu is not None:
            return relu, "relu2"
        return self._narrowed(part, node, dtype), "narrow2"

    def _relu(self, part: int, node: NodeId) -> NodeId | None:
        """What a kept value is the positive part of: narrowing does that by the way."""
        n = self.p.graph.nodes[node]
        if n.prim is not Prim.MAX or node not in self.p.steps[part]:
            return None
        zero = [o for o in n.inputs if self.p.numbers.get(o) == 0.0]
        other = [self.p.value(o) for o in n.inputs if o not in self.p.numbers]
        return other[0] if len(zero) == 1 and len(other) == 1 and other[0] not in self.p.vectors else None

    def _narrowed(self, part: int, node: NodeId, dtype: DType) -> NodeId:
        """What a value is the rounding of, where that is done on its way to `dtype` anyway."""
        n = self.p.graph.nodes[node]
        if n.prim is not Prim.CAST or node not in self.p.steps[part] or n.type.dtype is not dtype:
            return node
        source = self.p.value(n.inputs[0])
        wide = self.p.graph.type_of(source).dtype is DType.F32 and dtype in NARROW
        return source if wide and source in self.p.steps[part] else node

    def _store(self, end: End) -> list[str]:
        """A result, as wide as a lane's columns lie side by side."""
        p, part, out = self.p, end.part, end.node
        v = mlp_beside.neighbours_at(p, end, self.image.written)
        width = p.layers[part - 1].n
        group = max(1, v // 2)
        chunks = -(-width // (8 * group)) * group if v > 2 else -(-width // 8)
        earlier, found = self._earlier(part)
        step = 4 if self.s.group else 1
        dtype = p.graph.type_of(out).dtype
        lines = [
            f"{each('c', chunks // group)} {{ float y[2][{2 * group}];",
            f"{each('i', group)} {{ const int j = {Int('c') * group + 'i'};",
            *self._vector_loads(part),
            f"{each('half', 2)} {{",
            *earlier,
        ]
        wide = v > 1 and dtype in NARROW and dtype is p.dtype
        to = mlp_beside.place(p, end, self._row(width))
        last, name = self._ending(part, out, dtype) if wide else (self._narrowed(part, out, dtype), "narrow2")
        text, values = self._expressions(part, {**self._known(part, "m"), **found}, (last,))
        lines += [*text, *(f"y[half][{2 * Int('i') + e}] = {values[last][e].name};" for e in range(2)), "}\n}"]
        lines.append(f"{each('half', 2)} {{ const int r = row0 + m * {16 * step} + half * 8 + g;")
        lines.append(f"if (r < {p.rows}) {{ {storage(dtype)}* const to = {to} + c * {8 * group};")
        if v > 1:
            guard = f"if (c * 8 + 2 * q < {width}) {{" if group == 1 and width % 8 else "{"
            names = [f"y[half][{i}]" for i in range(v)]
            lines += [guard, *self._stored(names, dtype, f"to + q * {v}", name), "}"]
        else:
            for e in range(2):
                lines += [f"if ({summed('c * 8', '2 * q', e)} < {width}) {{", *_single(f"y[half][{e}]", dtype, e), "}"]
        return [*lines, "}\n}\n}"]

    def _stored(self, values: list[str], dtype: DType, to: str, narrow: str) -> list[str]:
        """Statements: neighbouring values to memory at once; halves by that function of a pair."""
        v = len(values)
        if dtype not in NARROW or (narrow == "narrow2" and not (self.s.keep and v == 8)):
            return wide_store(values, dtype, to)
        pairs = [f"w_{narrow}_{dtype.value}({values[i]}, {values[i + 1]})" for i in range(0, v, 2)]
        words = pairs[0] if v == 2 else f"make_{_WORDS[v]}({', '.join(pairs)})"
        return [f"w_store_kept({to}, {words});" if self.s.keep and v == 8 else f"*({_WORDS[v]}*)({to}) = {words};"]

    def _expressions(
        self, part: int, known: Mapping[NodeId, list[Value]], wanted: tuple[NodeId, ...] | list[NodeId]
    ) -> tuple[list[str], dict[NodeId, list[Value]]]:
        """Statements for two neighbouring columns, and the values by node."""
        p = self.p
        found = dict(known)
        lines: list[str] = []
        need = self._needed(part, set(known), wanted)
        for node in p.steps[part]:
            if node in found or node not in need:
                continue
            record = p.graph.nodes[node]
            special = self._special(part, node)
            pair = []
            for e in range(2):
                name = f"e{node}_{e}"
                if special is not None:
                    text = special[0].format(*(self._operand(o, e, found).name for o in special[1]))
                else:
                    operands = [self._operand(o, e, found) for o in record.inputs]
                    text = elementwise(record.prim, operands, record.type.dtype)[0]
                lines.append(f"const {c_type(record.type.dtype)} {name} = {text};")
                pair.append(Value(name, record.type.dtype))
            found[node] = pair
        return lines, found

    def _needed(self, part: int, known: set[NodeId], wanted: tuple[NodeId, ...] | list[NodeId]) -> set[NodeId]:
        p = self.p
        need: set[NodeId] = set()
        waiting = list(wanted)
        own = set(p.steps[part])
        while waiting:
            v = waiting.pop()
            if v in need or v in known or v not in own:
                continue
            need.add(v)
            special = self._special(part, v)
            waiting += [p.value(o) for o in (special[1] if special else p.graph.nodes[v].inputs)]
        return need

    def _operand(self, node: NodeId, e: int, found: Mapping[NodeId, list[Value]]) -> Value:
        p = self.p
        if node in p.numbers:
            number, dtype = p.numbers[node], p.graph.type_of(node).dtype
            return Value(literal(bool(number) if dtype is DType.BOOL else number, dtype), dtype, constant=float(number))
        if node in p.vectors:
            return Value(f"b{node}.{'xy'[e]}", p.graph.type_of(node).dtype)
        return found[p.value(node)][e]

    def _special(self, part: int, node: NodeId) -> tuple[str, tuple[NodeId, ...]] | None:
        """(text, operands) of a step that has a form of its own; rough ones are exact enough for 16 bits.

        Values with the 8 bits of bf16 are made of one tanh of the machine, which errs by 2^-11 of its result: a quarter
        of what rounding does to values near 1. Probabilities are not: small ones keep their digits.
        """
        p = self.p
        record = p.graph.nodes[node]
        if c_type(record.type.dtype) != "w_f32":
            return None
        if part in self.image.halved | self.image.prescaled and (form := self._of_half(part, node)) is not None:
            return form
        if record.prim in PERIODIC and self._ends_narrow(part):
            return PERIODIC[record.prim], record.inputs
        approximate = self._approximate_steps(part)
        fused = activation_at(p, node) if approximate else None
        if fused is not None and fused.steps & approximate and fused.steps <= set(p.steps[part]):
            return fused.text, (fused.operand,)
        short = p.dtype is DType.BF16 and self._ends_short(part)
        if record.prim is Prim.MUL and short and approximate:
            return self._gated(node, approximate)
        if node not in approximate:
            return None
        if record.prim is Prim.TANH:
            return f"w_mlp_tanh_{p.dtype.value}({{0}})", record.inputs
        if record.prim is Prim.ADD:
            erf = self._erf_of(node)
            name = "w_mlp_one_plus_erf" if short else "w_rough_one_plus_erf"
            return (f"{name}({{0}})", p.graph.nodes[erf].inputs) if erf is not None else None
        if record.prim is Prim.DIV:
            exponential = self._share_of(record.inputs[1])
            if exponential is not None and short and record.inputs[0] not in p.numbers:
                return "w_mlp_share_short({0}, {1})", (record.inputs[0], *p.graph.nodes[exponential].inputs)
            if exponential is not None:
                return "w_mlp_share({0}, {1})", record.inputs
        constant = record.inputs[-1] in p.numbers
        return (FUNCTIONS[record.prim], record.inputs) if record.prim in FUNCTIONS and not constant else None

    def _gated(self, node: NodeId, approximate: frozenset[NodeId]) -> tuple[str, tuple[NodeId, ...]] | None:
        """A value times 1 + erf of a multiple of another one."""
        gate = self._gate(node, approximate)
        if gate is None:
            return None
        value, rest, factor = gate
        return f"w_mlp_gated({{0}}, {{1}}, {literal(factor, DType.F32)})", (value, rest)

    def _gate(self, node: NodeId, approximate: frozenset[NodeId]) -> tuple[NodeId, NodeId, float] | None:
        """(the value, the other one, the factor)."""
        p = self.p
        inputs = p.graph.nodes[node].inputs
        for value, other in (inputs, inputs[::-1]):
            erf = self._erf_of(p.value(other)) if p.value(other) in approximate else None
            readers = [s for steps in p.steps for s in steps if p.value(other) in map(p.value, p.graph.nodes[s].inputs)]
            if erf is None or readers != [node] or value in p.numbers:
                continue
            of = p.value(p.graph.nodes[erf].inputs[0])
            scaled = p.graph.nodes[of]
            numbers = [o for o in scaled.inputs if o in p.numbers]
            if scaled.prim is Prim.MUL and len(numbers) == 1:
                rest = next(o for o in scaled.inputs if o not in p.numbers)
                return value, rest, p.numbers[numbers[0]]
        return None

    def gelu_factor(self, part: int) -> float | None:
        """The factor of erf's argument where a part with halves for sums is GELU of them and nothing else."""
        wanted = [
            self._narrowed(part, v, self.p.dtype) for v in (*self.p.kept[part], *(e.node for e in self.p.ends_of(part)))
        ]
        node = wanted[0]
        form = self._of_half(part, node) if len(set(wanted)) == 1 else None
        found = self._gate(node, self._approximate_steps(part)) if form is not None and "gelu" in form[0] else None
        return None if found is None else found[2]

    def _of_half(self, part: int, node: NodeId) -> tuple[str, tuple[NodeId, ...]] | None:
        """A whole activation of the sums of a part, which are there as halves."""
        p = self.p
        record = p.graph.nodes[node]
        z = self._sum(part)
        z = p.layers[part - 1].node if z is None else z
        approximate = self._approximate_steps(part)
        if record.prim is Prim.DIV and node in approximate and self._wide(record.inputs[0]) == z:
            exponential = self._share_of(record.inputs[1])
            negative = None if exponential is None else p.graph.nodes[p.value(p.graph.nodes[exponential].inputs[0])]
            if negative is not None and negative.prim is Prim.NEG and self._wide(negative.inputs[0]) == z:
                return "w_mlp_silu_of_half({0})", (z,)
        if record.prim is Prim.MUL and (gate := self._gate(node, approximate)) is not None:
            value, rest, factor = gate
            half = p.graph.nodes[p.value(value)]
            if (
                half.prim is Prim.MUL
                and self._wide(rest) == z
                and {0.5, z} == {p.numbers[o] if o in p.numbers else self._wide(o) for o in half.inputs}
            ):
                return self._gelu(part, f"w_mlp_gelu_of_half({{0}}, {literal(factor, DType.F32)})"), (z,)
        return None

    def _gelu(self, part: int, text: str) -> str:
        """GELU of a part's sums: of halves, or where those or its result are pre-scaled."""
        into, out = part - 1 in self.image.prescaled, part in self.image.prescaled
        if not into and not out:
            return text
        if out:
            return PRESCALED.format("{0}" if into else f"{literal(self.image.prescale, DType.F32)} * {{0}}")
        return f"{literal(0.5 / self.image.prescale, DType.F32)} * {PRESCALED.format('{0}')}"

    def _wide(self, node: NodeId) -> NodeId:
        """What a value is, but for its type: sums are never rounded."""
        node = self.p.value(node)
        record = self.p.graph.nodes[node]
        widened = record.prim is Prim.CAST and record.type.dtype is DType.F32
        return self.p.value(record.inputs[0]) if widened else node

    def halvable(self, part: int) -> bool:
        """Whether a part, were its sums halves, reads them in whole activations only."""
        p = self.p
        if p.dtype is not DType.BF16 or not self._ends_short(part):
            return False
        total = self._sum(part)
        product = p.layers[part - 1].node
        z = product if total is None else total
        own = {node for at, node in self.image.vectors if at == part}
        folded = set() if total is None else {o for o in p.graph.nodes[total].inputs if o in p.vectors}
        wanted = [self._narrowed(part, v, p.dtype) for v in (*p.kept[part], *(e.node for e in p.ends_of(part)))]
        if own != folded or any(z in kept for kept in p.kept) or z in wanted:
            return False
        need = self._needed(part, {product, z}, wanted)
        forms = {v for v in need if self._of_half(part, v) is not None}
        return bool(forms) and not any(self._wide(o) == z for v in need - forms for o in p.graph.nodes[v].inputs)

    def _ends_narrow(self, part: int) -> bool:
        """Whether all that a part stores has 16 bits."""
        return all(self.p.graph.type_of(e.node).dtype in NARROW for e in self.p.ends_of(part))

    def _ends_short(self, part: int) -> bool:
        """The same of bf16."""
        return all(self.p.graph.type_of(e.node).dtype is DType.BF16 for e in self.p.ends_of(part))

    def _share_of(self, node: NodeId) -> NodeId | None:
        """The exponential of a value that is 1 + an exponential."""
        return self._one_plus(self.p.value(node), Prim.EXP)

    def _erf_of(self, node: NodeId) -> NodeId | None:
        """The same for erf, where nothing else reads that: without the 1 a small result errs more."""
        p = self.p
        erf = self._one_plus(node, Prim.ERF)
        if erf is None:
            return None
        readers = [s for steps in p.steps for s in steps if erf in map(p.value, p.graph.nodes[s].inputs)]
        return erf if readers == [node] else None

    def _one_plus(self, node: NodeId, prim: Prim) -> NodeId | None:
        p = self.p
        record = p.graph.nodes[node]
        if record.prim is not Prim.ADD or not any(p.numbers.get(o) == 1.0 for o in record.inputs):
            return None
        return next((p.value(o) for o in record.inputs if p.graph.nodes[p.value(o)].prim is prim), None)

    def _approximate_steps(self, part: int) -> frozenset[NodeId]:
        """Steps of a part that may use the machine's own functions: all its results have 16 bits, nothing jumps."""
        p = self.p
        if not self._ends_narrow(part):
            return frozenset()
        touched: set[NodeId] = set()
        approximate: set[NodeId] = set()
        for node in p.steps[part]:
            record = p.graph.nodes[node]
            into = isinstance(record.attrs, a.CastAttrs) and not record.attrs.dtype.is_float
            if any(p.value(o) in touched for o in record.inputs):
                if record.prim in JUMPS or into:
                    return frozenset()
                touched.add(node)
            if record.prim in FUNCTIONS or record.prim is Prim.TANH or self._erf_of(node) is not None:
                approximate.add(node)
                touched.add(node)
        return frozenset(approximate)


def _least(start: str, step: int, first: int, last: int) -> str:
    """C text: a step further, or the end."""
    return (
        f"{start} + {step}"
        if (last - first) % step == 0
        else f"({start} + {step} < {last} ? {start} + {step} : {last})"
    )


def halved(p: Chain, s: MlpConfig, image: Image) -> Image:
    """The image with halves where that saves a multiplication of each sum; exact: bf16 has the range of f32."""
    every = frozenset(range(1, len(p.layers) + 1))
    trial = Kernel(p, s, replace(image, halved=every))
    return replace(image, halved=frozenset(part for part in every if trial.halvable(part)))


def _single(value: str, dtype: DType, e: int) -> list[str]:
    return wide_store([value], dtype, summed("to", "2 * q", e))


def chosen(index: str, values: list[int]) -> str:
    """C text of one of a few numbers."""
    text = f"{values[-1]}u"
    for i in range(len(values) - 2, -1, -1):
        if values[i] != values[i + 1]:
            text = f"{index} <= {i}u ? {values[i]}u : ({text})"
    return text
