"""The text of `chain`: up through all layers and down again, a warp's rows in registers; and of the image of weights.

The image of a layer is [k / 16][n / 8][k / 8 % 2] blocks of 8 by 8, then come all biases as f32. So weights for some
sixteens of K are one piece, and those for some of N are a piece for each sixteen of K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.role.role import DeviceRole
from weft.generate.cuda.training.activation import Activation
from weft.generate.cuda.training.entry import read, written
from weft.generate.cuda.training.network import Network
from weft.generate.expr.integer import Int, summed

_BEHIND = 1024
"""Bytes behind the last value that may be read."""
PANEL = 8
"""Sixteens of the summed columns in a panel of streamed weights."""


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """How `chain` is run."""

    tiles: int
    """Tiles of 16 rows that a warp takes at once."""
    warps: int
    """Of a CTA."""
    min_ctas: int
    """CTAs of a multiprocessor."""
    slots: int
    """Panels of streamed weights in shared memory; 0: all weights stay there."""
    inside: bool = False
    """Values stay in shared memory too, and the sums over rows are those of the CTA."""
    early: bool = True
    """What a layer's activation left is read before the product that it is multiplied with."""

    @property
    def named(self) -> str:
        """What names of kernels are made of, by which texts of today are those of earlier versions."""
        told = (f"{_NAMED.get(f.name, f.name)}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{type(self).__name__}({', '.join(told)})"


_NAMED = {"min_ctas": "resident"}
"""Fields by what names of kernels call them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets in bytes: of weights and biases in the image, and of values within a tile's record."""

    weights: tuple[int, ...]
    vectors: tuple[int, ...]
    image_bytes: int
    packed: int
    """Numbers in the image."""
    kept: tuple[int, ...]
    """The input of each layer."""
    preactivations: tuple[int, ...]
    """Of each layer, where its activation keeps them; else 0."""
    gradients: tuple[int, ...]
    """Of the pre-activations of each layer."""
    record: int
    home: Mapping[int, int] = field(default_factory=dict)
    """Where values are read again, in a network with skips."""
    own: Mapping[int, int] = field(default_factory=dict)
    """Of layers whose result takes in another value: what their activation gave, where its derivative reads that."""
    pending: Mapping[int, int] = field(default_factory=dict)
    """Of values that several read: their gradient, as far as it is known."""

    @staticmethod
    def of(net: Network, *, parameters: bool) -> Plan:
        """The offsets of a network; `parameters`: their gradients are wanted."""
        at = 0
        weights, vectors = [], []
        for i in range(net.depth):
            weights.append(at)
            at += 2 * net.depth_of(i) * net.width(i + 1)
        packed = at // 2
        for i in range(net.depth):
            vectors.append(at)
            at += 4 * net.width(i + 1)
            packed += net.width(i + 1)
        size, at = at, 0
        kept, preactivations, gradients = [], [], []
        for i in range(net.depth):
            kept.append(at)
            at += 32 * net.depth_of(i)
        for i in range(net.depth):
            keeps = i < net.depth - 1 and net.acts[i].keeps == 2
            preactivations.append(at if keeps else 0)
            at += 32 * net.width(i + 1) if keeps else 0
        for i in range(net.depth):
            gradients.append(at)
            at += 32 * net.width(i + 1) if parameters else 0
        found = Plan(
            tuple(weights), tuple(vectors), size, packed, tuple(kept), tuple(preactivations), tuple(gradients), at
        )
        return found if net.plain else found._with_skips(net)

    def _with_skips(self, net: Network) -> Plan:
        """Places of what is read again."""
        at = self.record
        home: dict[int, int] = {}
        own: dict[int, int] = {}
        pending: dict[int, int] = {}
        added = [x.value for layer in range(net.depth) if (x := net.adds(layer)) is not None]
        for value in range(net.depth):
            found = [s for s in net.segments(value) if s.value == value]
            if found:
                home[value] = self.kept[value] + 512 * found[0].first
            else:
                home[value] = at
                at += 32 * net.width(value)
        for value in (v for v in dict.fromkeys(added) if v not in home):
            home[value] = at
            at += 32 * net.width(value)
        for layer in range(net.depth - 1):
            x = net.adds(layer)
            if x is not None and not x.before and net.acts[layer].keeps == 1:
                own[layer] = at
                at += 32 * net.width(layer + 1)
        for value in range(1 - max(1, len(net.parts)), net.depth):
            shares = sum(net.reads(layer).count(value) for layer in range(net.depth) if layer != value or value == 0)
            if value in added or shares > (value <= 0):
                pending[value] = at
                at += 32 * net.width(value)
        return replace(self, record=at, home=home, own=own, pending=pending)

    @property
    def vector_bytes(self) -> int:
        """Of all biases."""
        return self.image_bytes - self.vectors[0]


@dataclass(frozen=True, slots=True)
class Item:
    """Rows from sixteen m on and columns from n on of the gradient of a layer's weights."""

    layer: int
    m: int
    n: int
    kind: tuple[int, int, bool]
    """How many sixteens, and whether the bias is summed too."""

    @property
    def registers(self) -> int:
        """Of a lane."""
        rows, columns, bias = self.kind
        return rows * columns * 8 + (4 * rows if bias else 0)


def items_inside(net: Network) -> list[Item]:
    """Two by two sixteens each, whether there are so many or not."""
    return [
        Item(layer, m, n, (2, 2, True))
        for layer in range(net.depth)
        for m in range(0, net.width(layer + 1) // 16, 2)
        for n in range(0, net.depth_of(layer) // 16, 2)
    ]


@dataclass(frozen=True, slots=True)
class Panel:
    """Sixteens [first, last) of the columns that a product sums over, in pieces of the image."""

    first: int
    last: int
    offset: int
    pieces: int
    step: int
    """Bytes from one piece to the next."""
    size: int
    """Bytes of a piece."""


def panels(net: Network, plan: Plan, layer: int, *, up: bool) -> list[Panel]:
    """What a product of a layer reads, in order."""
    k, n = net.width(layer) // 16, net.width(layer + 1) // 16
    count = k if up else n
    found = []
    for first in range(0, count, panel_share(count)):
        last = min(count, first + panel_share(count))
        base = plan.weights[layer]
        if up:
            found.append(Panel(first, last, base + first * n * 512, 1, 0, (last - first) * n * 512))
        else:
            found.append(Panel(first, last, base + first * 512, k, n * 512, (last - first) * 512))
    return found


def panel_share(count: int) -> int:
    """Sixteens of each panel of so many."""
    return -(-count // -(-count // PANEL))


def panel_bytes(net: Network) -> int:
    """Of the largest panel."""
    widths = [net.width(i) // 16 for i in range(net.depth + 1)]
    pairs = list(pairwise(widths))
    return 512 * max(max(panel_share(k) * n, panel_share(n) * k) for k, n in pairs)


def pack(net: Network, plan: Plan) -> DeviceRole:
    """What makes the image from all parameters in order; a thread makes one number."""
    kind = storage(net.masters or net.dtype)
    narrow = f"(u16)w_narrow2_{net.dtype.value}({{0}}, 0.0f)" if net.masters else "{0}"
    lines = [
        "role.pdl_wait(); role.pdl_trigger();",
        "char* const image = (char*)image_;",
        "u32 i = role.block_x() * 256u + role.thread();",
    ]
    number = 0
    biases: list[tuple[int, str]] = []
    for layer in range(net.depth):
        weight, bias = net.slices_of(layer)
        rows, columns = weight.shape
        count, eights = net.depth_of(layer) * net.width(layer + 1), net.width(layer + 1) // 8
        value = narrow.format(f"((const {kind}*)p{number})[{Int('n') * columns + 'k'}]")
        block = Int("block")
        position = block / (2 * eights) * 16 + block % 2 * 8 + Int("i") % 8
        eight = f"{block / 2 % eights * 8 + Int('i') % 64 / 8}"
        if not net.plain:
            lines.append(f"if (i < {count}u) {{ const u32 block = i / 64, k_ = {position};")
            lines += [
                f"const u32 n = {eight}, k = {_column(net, layer, 'k_')};",
                f"u16 v = 0; if (n < {rows} && k < {columns}) v = {value};",
                f"((u16*)({Int('image') + plan.weights[layer]}))[i] = v; return; }}\ni -= {count}u;",
            ]
            biases.append(_bias(net, plan, layer, number, narrow, kind))
            number += 1 if bias is None else 2
            continue
        lines += [
            f"if (i < {count}u) {{",
            f"const u32 block = i / 64, n = {eight};",
            f"const u32 k = {position};",
            f"u16 v = 0; if (n < {rows} && k < {columns}) v = {value};",
            f"((u16*)({Int('image') + plan.weights[layer]}))[i] = v; return; }}\ni -= {count}u;",
        ]
        biases.append(_bias(net, plan, layer, number, narrow, kind))
        number += 1 if bias is None else 2
    for width, statement in biases:
        lines.append(f"if (i < {width}u) {{ {statement} return; }}\ni -= {width}u;")
    return DeviceRole(
        threads=256,
        body="\n".join(lines),
        parameters=(*read(*(f"p{i}" for i in range(number))), *written("image_")),
        grid=(-(-plan.packed // 256), 1, 1),
        name="pack",
    )


def table_of(name: str, rows: Sequence[tuple[int, ...]]) -> str:
    """C text: an array of numbers."""
    numbers = ",".join(str(v) for row in rows for v in row)
    return f"__device__ __align__(16) const int {name}[] = {{{numbers}}};\n"


def _bias(net: Network, plan: Plan, layer: int, number: int, narrow: str, kind: str) -> tuple[int, str]:
    """(numbers in the image, statement that makes one) of a bias."""
    bias = net.slices_of(layer)[1]
    value = "0.0f"
    if bias is not None:
        held = narrow.format(f"((const {kind}*)p{number + 1})[i]")
        value = f"i < {bias.size} ? w_unpack_{net.dtype.value}({held}).x : 0.0f"
    return net.width(layer + 1), f"((float*)(image + {plan.vectors[layer]}))[i] = {value};"


def _column(net: Network, layer: int, position: str) -> str:
    """C text: the column of a weight at a position; past all columns where there is none."""
    text = f"{net.slices_of(layer)[0].shape[1]}u"
    for s in reversed(net.segments(layer)):
        inside = f"{position} - {16 * s.first}u"
        text = f"({inside} < {s.width}u ? {inside} + {s.column}u : {text})"
    return text


@dataclass(frozen=True, slots=True)
class Chain:
    """The kernel."""

    net: Network
    plan: Plan
    acts: dict[Activation, str]
    shape: ChainConfig
    inputs: bool
    """Whether the gradient of x is wanted."""
    parameters: bool

    @property
    def shared_bytes(self) -> int:
        """Of a CTA."""
        s = self.shape
        if s.inside:
            return self.plan.image_bytes + s.warps * s.tiles * self.plan.record + _BEHIND
        return s.slots * self._panel_bytes() + self.plan.vector_bytes if s.slots else self.plan.image_bytes

    def _panel_bytes(self) -> int:
        return panel_bytes(self.net)

    @property
    def results(self) -> int:
        """Of a warp, where sums are added inside."""
        return -(-len(items_inside(self.net)) // self.shape.warps)

    def role(self, stem: str, ctas: int) -> DeviceRole:
        """Of a text whose names begin with `stem`, for so many CTAs at most."""
        net, plan, s = self.net, self.plan, self.shape
        x = storage(net.input_dtype)
        threads, table = 32 * s.warps, f"{stem}_chain_at"
        head = "for (w_rows turn = role.block_x(); turn < turns; turn += role.blocks_x()) {"
        if s.inside:
            place = [f"const bool live = true; const w_rows row0 = (turn * {s.warps} + warp) * {16 * s.tiles};"]
            turns = f"(tiles + {s.warps - 1}) / {s.warps}"
        elif s.slots:
            live = "const bool live = turn * {0} + warp < tiles; const w_rows tile = live ? turn * {0} + warp : 0;"
            place = [live.format(s.warps), f"const w_rows row0 = live ? tile * {16 * s.tiles} : rows;"]
            turns = f"(tiles + {s.warps - 1}) / {s.warps}"
        else:
            head = f"for (w_rows tile = first; tile < tiles; tile += (w_rows)role.blocks_x() * {s.warps}) {{"
            place = [f"const bool live = true; const w_rows row0 = tile * {16 * s.tiles};"]
            turns = "tiles"
        room = "tile" if self.parameters else "first"  # without sums over rows only this warp reads what it keeps
        lines = [
            "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
            "role.pdl_wait(); role.pdl_trigger();",
            "const char* const image = (const char*)image_;",
            "const u32 base = w_shared(sm);",
            f"const w_rows rows = (w_rows)(u64)rows_, tiles = (rows + {16 * s.tiles - 1}) / {16 * s.tiles};",
            f"const w_rows turns = {turns}; (void)turns;",
            *self._weights(table, threads),
            f"const {x}* const x = (const {x}*)x_; const u16* const dy = (const u16*)dy_;",
            "const w_rows first = (w_rows)role.block_x() + (w_rows)warp * role.blocks_x(); (void)first;",
            *self._begin(table),
            f"#pragma unroll 1\n{head}",
            *place,
            f"const w_rows record = {plan.record};",
            (
                f"char* const kept = (char*)sm + {plan.image_bytes} + warp * {s.tiles * plan.record};"
                if s.inside
                else f"char* const kept = (char*)kept_ + {Int(room) * s.tiles} * record;"
            ),
            *self._up(),
            *self._down(),
            *self._sums(),
            "}",
            *self._end(),
        ]
        return DeviceRole(
            threads=threads,
            body="\n".join(lines),
            parameters=(*read("x_", "dy_", "image_"), *written("kept_", "dx_"), *read("rows_")),
            grid=(ctas, 1, 1),
            globals=self._table(table),
            name="chain",
            min_ctas_per_sm=s.min_ctas,
            shared_bytes=self.shared_bytes,
        )

    def _order(self) -> list[Panel]:
        """All panels of a turn."""
        net, last = self.net, self.net.depth - 1
        up = [p for i in range(last + bool(self._whole)) for p in panels(net, self.plan, i, up=True)]
        down = range(last, -1 if self.inputs else 0, -1)
        return up + [p for i in down for p in panels(net, self.plan, i, up=False)]

    @property
    def _whole(self) -> bool:
        """Whether the pre-activation of the last layer is needed."""
        return self.net.acts[-1].keeps != 0

    def _begin(self, table: str) -> list[str]:
        """Sums of the CTA, where they are added inside."""
        if not self.shape.inside:
            return []
        p = self.results
        item = f"{table}[3 * (i * {self.shape.warps} + warp)"
        return [
            f"float sums[{p}][2][4][4], biases[{p}][2][4]; int left[{p}], right[{p}], used[{p}];",
            f"#pragma unroll\nfor (int i = 0; i < {p}; ++i) {{",
            f"left[i] = {item}], right[i] = {item} + 1], used[i] = {item} + 2]; w_zero<4, 2>(sums[i]);",
            "#pragma unroll\nfor (int e = 0; e < 8; ++e) biases[i][e / 4][e % 4] = 0.0f;\n}",
        ]

    def _sums(self) -> list[str]:
        s = self.shape
        if not s.inside:
            return []
        place = f"base + {self.plan.image_bytes}u, {self.plan.record}u"
        call = f"w_shared_sums<{self.results}, {s.warps * s.tiles}>"
        return ["role.sync();", f"{call}(sums, biases, {place}, left, right, used, lane);", "role.sync();"]

    def _end(self) -> list[str]:
        s = self.shape
        if not s.inside:
            return []
        size = 32 * items_inside(self.net)[0].registers
        return [
            # the sums of all CTAs lie side by side
            "const int most = role.blocks_x();",
            f"float* const to = (float*)kept_ + ((w_rows)warp * most + role.block_x()) * {size};",
            f"w_put_sums<{self.results}>(to, sums, biases, used, (w_rows)most * {s.warps * size}, lane);",
        ]

    def _table(self, name: str) -> str:
        """What the text looks up: places of the CTA's sums, or the panels of a turn."""
        if self.shape.inside:
            plan = self.plan
            rows = [
                (plan.gradients[x.layer] + 512 * x.m, plan.kept[x.layer] + 512 * x.n, 1 + (x.n == 0))
                for x in items_inside(self.net)
            ]
            rows += [(0, 0, 0)] * (self.results * self.shape.warps - len(rows))
            return table_of(name, rows)
        if not self.shape.slots:
            return ""
        return table_of(name, [(p.offset, p.pieces, p.step, p.size // 16) for p in self._order()])

    def _weights(self, table: str, threads: int) -> list[str]:
        """The image into shared memory, or its biases and the start of the ring."""
        plan, slots = self.plan, self.shape.slots
        start = plan.vectors[0] if slots else 0
        to = slots * self._panel_bytes() if slots else 0
        copy = f"w_copy16({summed('base', to, '16 * i')}, {summed('image', start, '16 * i')});"
        lines = [f"for (int i = t; i < {(plan.image_bytes - start) // 16}; i += {threads}) {copy}", "w_commit();"]
        if not slots:
            return [*lines, "w_arrived<0>(); role.sync();"]
        order = self._order()
        return [
            *lines,
            "const w_rows mine = (turns - role.block_x() + role.blocks_x() - 1) / role.blocks_x();",
            f"w_rows left = mine * {len(order)}; int asked = 0, to_ask = 0, slot = 0;",
            "auto ask = [&]() {",
            "if (left > 0) {",
            f"const int* const p = {table} + 4 * asked; const int size = p[3], count = p[1] * size;",
            f"const u32 to = base + to_ask * {self._panel_bytes()}u; const char* const from = image + p[0];",
            f"for (int i = t; i < count; i += {threads})",
            "w_copy16(to + 16 * i, from + (long long)(i / size) * p[2] + i % size * 16);",
            f"--left; if (++asked == {len(order)}) asked = 0;",
            f"if (++to_ask == {slots}) to_ask = 0;",
            "}\nw_commit();\n};",
            f"for (int i = 0; i < {slots - 1}; ++i) ask();",
            f"w_arrived<{slots - 1}>(); role.sync();",  # the biases are there
        ]

    def _vectors(self, layer: int, turn: str = "") -> str:
        at = self.plan.vectors[layer]
        if self.shape.slots:
            at += self.shape.slots * self._panel_bytes() - self.plan.vectors[0]
        return f"(const float*)(sm + {at}{turn})"

    def _product(self, layer: int, left: str, *, up: bool, turn: str = "") -> list[str]:
        """d += left times the weights of a layer, or their transposed."""
        k, n = self.net.width(layer) // 16, self.net.width(layer + 1) // 16
        name = "w_up" if up else "w_down"
        if not self.shape.slots:
            last = k if up else n
            place = f"{Int('base') + f'{self.plan.weights[layer]}u'}{turn}"
            return [f"{name}<{k}, {n}, {self.shape.tiles}, 0, {last}>(d, {left}, {place}, lane);"]
        lines = []
        slots = self.shape.slots
        for p in panels(self.net, self.plan, layer, up=up):
            place = f"base + slot * {panel_bytes(self.net)}u"
            lines += [
                # all warps have read the slot that is asked for next
                f"w_arrived<{slots - 2}>(); role.sync(); ask();",
                f"{name}<{k}, {n}, {self.shape.tiles}, {p.first}, {p.last}>(d, {left}, {place}, lane);",
                f"if (++slot == {slots}) slot = 0;",
            ]
        return lines

    def _array(self, name: str, width: int) -> str:
        return f"u32 {name}[{self.shape.tiles}][{width // 16}][4];"

    def _alike(self) -> list[tuple[int, int]]:
        """(first, number) of layers but the last in order; those that are alike are one loop."""
        net = self.net

        def form(i: int) -> object:
            return net.acts[i], net.widths[i : i + 2]

        found: list[tuple[int, int]] = []
        for i in range(net.depth - 1):
            square = net.width(i) == net.width(i + 1)
            if found and square and form(found[-1][0]) == form(i):
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((i, 1))
        return found

    def _up(self) -> list[str]:
        net, plan, tiles = self.net, self.plan, self.shape.tiles
        lines = [
            self._array("h0", net.width(0)),
            f"w_read_rows<{net.widths[0]}, {net.widths[0]}, true>(h0, x, row0, rows, lane);",
            f"w_keep_all<{tiles}, {net.width(0) // 16}>({Int('kept') + plan.kept[0]}, h0, record, lane, live);",
        ]
        for first, count in self._alike():
            name, size = f"h{first + count}", net.width(first + count)
            lines.append(self._array(name, size))
            if count == 1:
                lines += self._layer(first, name, f"h{first}", "", "", "")
                continue
            move = f"w_move<{tiles}, {size // 16}>"
            lines += [
                f"{move}({name}, h{first});",
                f"#pragma unroll 1\nfor (int l = 0; l < {count}; ++l) {{ {self._array('u', size)}",
                *self._layer(
                    first, "u", name, f" + l * {2 * size * size}", f" + l * {4 * size}", f" + l * {32 * size}"
                ),
                f"{move}({name}, u); }}",
            ]
        return lines

    def _layer(self, layer: int, to: str, left: str, turn: str, vector: str, step: str) -> list[str]:
        n, tiles = self.net.width(layer + 1) // 16, self.shape.tiles
        act = self.acts[self.net.acts[layer]]
        kept = ", ".join(
            f"{Int('kept') + at[i]}{step}" for at, i in ((self.plan.kept, layer + 1), (self.plan.preactivations, layer))
        )
        return [
            f"{{ float d[{tiles}][{2 * n}][4]; w_begin<{n}, {tiles}>(d, {self._vectors(layer, vector)}, lane);",
            *self._product(layer, left, up=True, turn=turn),
            *self._bounded(layer + 1),
            f"w_layer<{act}, {n}, {tiles}>({to}, d, {kept}, record, lane, live); }}",
        ]

    def _down(self) -> list[str]:
        net, tiles = self.net, self.shape.tiles
        last = net.depth - 1
        n = net.width(last + 1) // 16
        lines = [
            self._array(f"g{last}", net.width(last + 1)),
            f"w_read_rows<{net.widths[-1]}, {net.widths[-1]}, true>(g{last}, dy, row0, rows, lane);",
        ]
        if self._whole:
            lines += [
                f"{{ float d[{tiles}][{2 * n}][4]; w_begin<{n}, {tiles}>(d, {self._vectors(last)}, lane);",
                *self._product(last, f"h{last}", up=True),
                *self._bounded(last + 1),
                f"w_last<{self.acts[net.acts[last]]}, {n}, {tiles}>(g{last}, d); }}",
            ]
        lines += self._keep(last, f"g{last}")
        layer = last
        runs = {first + count - 1: count for first, count in self._alike()}
        while layer > 0:
            # of layers alike all but the first have the layer below alike too
            loop = runs.get(layer, 1) - 1
            if loop > 1:
                size, to = net.width(layer), layer - loop
                step = f" - l * {32 * size}"
                move = f"w_move<{tiles}, {size // 16}>"
                lines += [
                    self._array(f"g{to}", size),
                    f"{move}(g{to}, g{layer});",
                    f"#pragma unroll 1\nfor (int l = 0; l < {loop}; ++l) {{ {self._array('u', size)}",
                    *self._below(layer, "u", f"g{to}", f" - l * {2 * size * size}", step),
                    *self._keep(layer - 1, "u", step),
                    f"{move}(g{to}, u); }}",
                ]
                layer = to
                continue
            lines += [
                self._array(f"g{layer - 1}", net.width(layer)),
                *self._below(layer, f"g{layer - 1}", f"g{layer}"),
                *self._keep(layer - 1, f"g{layer - 1}"),
            ]
            layer -= 1
        if self.inputs:
            x, k = storage(net.input_dtype), net.width(0) // 16
            lines += [
                f"{{ float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);",
                *self._product(0, "g0", up=False),
                f"w_input<{net.columns}, {net.columns}, true, {k}, {x}, {tiles}>(({x}*)dx_, d, row0, rows, lane); }}",
            ]
        return lines

    def _bounded(self, value: int) -> list[str]:
        """Zeros in d behind the columns of a value."""
        width = self.net.widths[value]
        return [f"w_bound<{width}>(d, lane);"] if width % 16 else []

    def _keep(self, layer: int, name: str, step: str = "") -> list[str]:
        if not self.parameters:
            return []
        size = self.net.width(layer + 1) // 16
        place = f"{Int('kept') + self.plan.gradients[layer]}{step}"
        return [f"w_keep_all<{self.shape.tiles}, {size}>({place}, {name}, record, lane, live);"]

    def _below(self, layer: int, to: str, gradient: str, turn: str = "", step: str = "") -> list[str]:
        """From the gradient of a layer's pre-activation to that of the layer below."""
        act = self.net.acts[layer - 1]
        value = self.plan.preactivations[layer - 1] if act.keeps == 2 else self.plan.kept[layer]
        k, tiles = self.net.width(layer) // 16, self.shape.tiles
        kind, kept = f"{self.acts[act]}, {k}, {tiles}", f"{Int('kept') + value}{step}, record"
        return [
            f"{{ w_early<{kind}> early; early.read({kept}, lane);",
            f"float d[{tiles}][{2 * k}][4]; w_zero<{2 * k}, {tiles}>(d);",
            *self._product(layer, gradient, up=False, turn=turn),
            *self._bounded(layer),
            f"w_below<{kind}>({to}, d, early, {kept}, lane); }}",
        ]
