"""Gradients of a fully connected network as three kernels.

1. `chain`: a warp takes tiles of rows from the input up, as the forward pass does, and from the gradient of the result
   down to that of the input, in registers. What the sums over rows need, the inputs of all layers and the gradients of
   their sums, it leaves in memory as fragments; nothing is kept between the forward pass and this.
2. `sums`: gradients of weights and biases as products over rows, a share of all rows per block, in f32.
3. `finish`: the shares, added in their order. No atomic additions: equal inputs give equal bits.

Source: note on fused MLPs, section 4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates.mlp_match import padded
from weft.generate.cuda.templates.mlp_text import mlp_header
from weft.generate.cuda.templates.prelude import prelude, storage
from weft.generate.cuda.training.activation import Activation
from weft.generate.cuda.training.network import Network
from weft.ir.declined import Declined
from weft.ir.types import DType

_WARPS, _STAGES, _TILE = 4, 4, 4
"""Of `sums`: warps of a block, tiles of rows on their way, sixteens of columns that a warp adds up."""
_WIDEST_TILES = 128
"""Columns of all tiles of a warp where those are several."""
_ONES = {DType.F16: "0x3c003c00u", DType.BF16: "0x3f803f80u"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of a text."""

    name: str
    threads: int
    blocks: int
    """At most; fewer do where there is less to do."""
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How `chain` is run."""

    tiles: int
    """Tiles of 16 rows that a warp takes at once."""
    warps: int
    """Of a block."""
    resident: int
    """Blocks of a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Entries take addresses, and numbers as if they were addresses.

    chain(x, gradient of the result, parameters, kept, gradient of x, rows), sums(kept, partial, tiles, more),
    finish(partial, gradients of the parameters). `more` adds to what the sums of earlier rows left in `partial`.
    """

    text: str
    chain: Entry
    sums: Entry
    finish: Entry
    record: int
    """Bytes of `kept` for a tile of 16 rows."""
    tiles: int
    """Tiles that a warp takes at once: `kept` is rounded up to that."""
    partial_bytes: int

    def kept_bytes(self, rows: int) -> int:
        """Of `kept` for so many rows; without gradients of parameters a warp has room for what it works on."""
        at_once = self.chain.blocks * self.chain.threads // 32 * self.tiles
        return self.record * (self.count(rows) if self.partial_bytes else min(self.count(rows), at_once))

    def count(self, rows: int) -> int:
        """Tiles of so many rows."""
        return -(-rows // (16 * self.tiles)) * self.tiles


@dataclass(frozen=True, slots=True)
class _Item:
    """Rows [m, m + 16 M) and columns [n, n + 16 N) of the gradient of a layer's weights."""

    layer: int
    m: int
    n: int
    kind: tuple[int, int, bool]
    """Sixteens M and N, and whether the bias is summed too."""

    @property
    def registers(self) -> int:
        """Of a lane."""
        rows, columns, bias = self.kind
        return rows * columns * 8 + (4 * rows if bias else 0)


@cache
def _header() -> str:
    return Path(__file__).with_name("weft_cuda_training.h").read_text(encoding="utf-8")


def gradient(
    net: Network,
    facts: GpuFacts,
    shape: Shape | None = None,
    *,
    inputs: bool = True,
    parameters: bool = True,
    dtype: DType = DType.F32,
) -> Gradient | Declined:
    """The kernels of a network for a device; `dtype` is that of the gradients of the parameters.

    `shape` is one of `shapes`, the first if it is not given.

    Declined: weights that do not fit into shared memory, or a device before compute capability 8.0.
    """
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; gradients need 8.0")
    plan = _Plan.of(net, parameters=parameters)
    if plan.shared_bytes > facts.shared_per_block:
        return Declined(f"weights of {plan.shared_bytes >> 10} KiB do not fit into shared memory together")
    if shape is None:
        found = shapes(net, facts, parameters=parameters)
        if not found:
            return Declined(f"{max(net.widths)} columns need too many registers")
        shape = found[0]
    tiles, warps, resident = shape.tiles, shape.warps, shape.resident
    items = _items(net)
    slices = max(1, -(-3 * facts.sms // len(items)))
    seed = hashlib.sha256(f"{net}|{inputs}{parameters}{dtype}{shape}{slices}".encode()).hexdigest()[:16]
    names = {what: f"k{seed}_{what}" for what in ("chain", "sums", "finish")}
    acts = {act: f"Act{i}" for i, act in enumerate(dict.fromkeys(net.acts))}
    parts = [
        prelude(),
        mlp_header(),
        f"#undef W_ONES\n#define W_ONES {_ONES[net.dtype]}\n",
        _header().replace("W_KIND", net.dtype.value),
        *(act.text(name, net.dtype) for act, name in acts.items()),
        _Chain(net, plan, acts, tiles, warps, resident, inputs=inputs).text(names["chain"]),
    ]
    shared = partial = 0
    if parameters:
        parts += [_sums(plan, items, slices, names["sums"]), _finish(net, items, slices, names["finish"], dtype)]
        shared = max(_WARPS * _STAGES * (x.kind[0] + x.kind[1]) * 512 for x in items)
        partial = 128 * slices * sum(x.registers for x in items)
    total = 32 * sum(x.registers for x in items)
    return Gradient(
        "".join(parts),
        Entry(names["chain"], 32 * warps, resident * facts.sms, plan.shared_bytes),
        Entry(names["sums"], 32 * _WARPS, slices * len(items), shared),
        Entry(names["finish"], 256, -(-total // 256)),
        plan.record,
        tiles,
        partial,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Offsets in bytes: of weights and biases in shared memory, and of values within a tile's record."""

    weights: tuple[int, ...]
    vectors: tuple[int, ...]
    shared_bytes: int
    kept: tuple[int, ...]
    """The input of each layer."""
    sums: tuple[int, ...]
    """Of each layer, where its activation keeps them; else 0."""
    gradients: tuple[int, ...]
    """Of the sums of each layer."""
    record: int

    @staticmethod
    def of(net: Network, *, parameters: bool) -> _Plan:
        at = 0
        weights, vectors = [], []
        for i in range(net.depth):
            weights.append(at)
            at += 2 * net.width(i) * net.width(i + 1)
        for i in range(net.depth):
            vectors.append(at)
            at += 4 * net.width(i + 1)
        shared, at = at, 0
        kept, sums, gradients = [], [], []
        for i in range(net.depth):
            kept.append(at)
            at += 32 * net.width(i)
        for i in range(net.depth):
            sums.append(at if i < net.depth - 1 and net.acts[i].keeps == 2 else 0)
            at += 32 * net.width(i + 1) if sums[-1] else 0
        for i in range(net.depth):
            gradients.append(at)
            at += 32 * net.width(i + 1) if parameters else 0
        return _Plan(tuple(weights), tuple(vectors), shared, tuple(kept), tuple(sums), tuple(gradients), at)


def shapes(net: Network, facts: GpuFacts, *, parameters: bool = True) -> list[Shape]:
    """Ways to run `chain` that are worth measuring, the most promising first; none where weights do not fit."""
    shared = _Plan.of(net, parameters=parameters).shared_bytes
    widest = max(net.width(i) for i in range(net.depth + 1))
    found = []
    for tiles in (1, 2, 4):
        if tiles > 1 and widest * tiles > _WIDEST_TILES:
            continue
        early = widest // 4 if widest * tiles <= 128 else 0
        registers = 48 + tiles * (widest // 2 + widest // 4 + early)
        for resident, warps in ((2, 12), (1, 16), (1, 12), (1, 8), (1, 4)):
            room = facts.registers_per_sm // (32 * warps * resident)
            fits = resident * (shared + facts.shared_reserved) <= facts.shared_per_sm
            if fits and shared <= facts.shared_per_block and min(registers, 255) <= room:
                found.append(Shape(tiles, warps, resident))
                break
    return found


def _items(net: Network) -> list[_Item]:
    found = []
    for layer in range(net.depth):
        rows, columns = net.width(layer + 1) // 16, net.width(layer) // 16
        for m in range(0, rows, _TILE):
            for n in range(0, columns, _TILE):
                kind = min(_TILE, rows - m), min(_TILE, columns - n), n == 0 and net.biases[layer]
                found.append(_Item(layer, m, n, kind))
    return sorted(found, key=lambda x: x.kind, reverse=True)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The text of `chain`."""

    net: Network
    plan: _Plan
    acts: dict[Activation, str]
    tiles: int
    warps: int
    resident: int
    inputs: bool

    def text(self, entry: str) -> str:
        net, plan = self.net, self.plan
        x = storage(net.given)
        threads, keeps = 32 * self.warps, plan.gradients[0] != plan.record
        lines = [
            f'extern "C" __global__ void __launch_bounds__({threads}, {self.resident}) {entry}(',
            "const void* x_, const void* dy_, const void* w_, void* kept_, void* dx_, const void* rows_) {",
            "W_DYNAMIC(sm);",
            "const int t = threadIdx.x, lane = t & 31, warp = t >> 5;",
            "w_wait(); w_release();",
            "const u16* const w = (const u16*)w_;",
            *self._weights(threads),
            "__syncthreads();",
            "const u32 base = w_shared(sm);",
            f"const w_rows rows = (w_rows)(u64)rows_, tiles = (rows + {16 * self.tiles - 1}) / {16 * self.tiles};",
            f"const {x}* const x = (const {x}*)x_; const u16* const dy = (const u16*)dy_;",
            "const w_rows first = (w_rows)blockIdx.x + (w_rows)warp * gridDim.x;",
            "#pragma unroll 1",
            f"for (w_rows tile = first; tile < tiles; tile += (w_rows)gridDim.x * {self.warps}) {{",
            f"const w_rows row0 = tile * {16 * self.tiles}, record = {plan.record};",
            # without sums over rows only this warp reads what it keeps
            f"char* const kept = (char*)kept_ + {'tile' if keeps else 'first'} * {self.tiles} * record;",
            *self._up(),
            *self._down(keeps=keeps),
            "}\n}\n",
        ]
        return "\n".join(lines)

    def _weights(self, threads: int) -> list[str]:
        lines = []
        for i in range(self.net.depth):
            k, n = self.net.widths[i], self.net.widths[i + 1]
            weight, bias = self.net.place(i)
            lines.append(f"w_blocks<{k}, {n}>(sm + {self.plan.weights[i]}, w + {weight.offset}, t, {threads});")
            if bias is not None:
                lines.append(f"w_vector<{n}>(sm + {self.plan.vectors[i]}, w + {bias.offset}, t, {threads});")
            else:
                zero = f"((float*)(sm + {self.plan.vectors[i]}))[i] = 0.0f;"
                lines.append(f"for (int i = t; i < {padded(n)}; i += {threads}) {zero}")
        return lines

    def _array(self, name: str, width: int) -> str:
        return f"u32 {name}[{self.tiles}][{width // 16}][4];"

    def _sizes(self, layer: int) -> str:
        return f"{self.net.width(layer) // 16}, {self.net.width(layer + 1) // 16}, {self.tiles}"

    def _alike(self) -> list[tuple[int, int]]:
        """(first, number) of layers but the last in order; those that are alike are one loop."""
        net = self.net

        def form(i: int) -> object:
            return net.width(i), net.width(i + 1), net.acts[i], net.biases[i], net.widths[i : i + 2]

        found: list[tuple[int, int]] = []
        for i in range(net.depth - 1):
            square = net.width(i) == net.width(i + 1)
            if found and square and form(found[-1][0]) == form(i):
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((i, 1))
        return found

    def _up(self) -> list[str]:
        net, plan, tiles = self.net, self.plan, self.tiles
        lines = [
            self._array("h0", net.width(0)),
            f"w_read_rows<{net.widths[0]}>(h0, x, row0, rows, lane);",
            f"w_keep_all<{tiles}, {net.width(0) // 16}>(kept + {plan.kept[0]}, h0, record, lane);",
        ]
        if net.depth == 1:
            return lines
        for first, count in self._alike():
            name = f"h{first + count}"
            lines.append(self._array(name, net.width(first + count)))
            call = f"w_layer<{self.acts[net.acts[first]]}, {self._sizes(first)}>"
            places = [
                f"base + {plan.weights[first]}u",
                f"(const float*)(sm + {plan.vectors[first]}",
                f"kept + {plan.kept[first + 1]}",
                f"kept + {plan.sums[first]}",
            ]
            if count == 1:
                lines.append(
                    f"{call}({name}, h{first}, {places[0]}, {places[1]}), {places[2]}, {places[3]}, record, lane);"
                )
                continue
            size = net.width(first)
            step = [2 * size * size, 4 * size, 32 * size, 32 * size]
            at = [f"{p} + l * {s}" for p, s in zip(places, step, strict=True)]
            move = f"w_move<{tiles}, {size // 16}>"
            lines += [
                f"{move}({name}, h{first});",
                f"#pragma unroll 1\nfor (int l = 0; l < {count}; ++l) {{ {self._array('u', size)}",
                f"{call}(u, {name}, {at[0]}, {at[1]}), {at[2]}, {at[3]}, record, lane);",
                f"{move}({name}, u); }}",
            ]
        return lines

    def _down(self, *, keeps: bool) -> list[str]:
        net, plan, tiles = self.net, self.plan, self.tiles
        last = net.depth - 1
        vector = f"(const float*)(sm + {plan.vectors[last]})"
        lines = [
            self._array(f"g{last}", net.width(last + 1)),
            f"w_read_rows<{net.widths[-1]}>(g{last}, dy, row0, rows, lane);",
            (
                f"w_last<{self.acts[net.acts[last]]}, {self._sizes(last)}>"
                f"(g{last}, h{last}, base + {plan.weights[last]}u, {vector}, lane);"
            ),
        ]

        def keep(layer: int, name: str, step: str = "") -> list[str]:
            if not keeps:
                return []
            size = net.width(layer + 1) // 16
            return [f"w_keep_all<{tiles}, {size}>(kept + {plan.gradients[layer]}{step}, {name}, record, lane);"]

        lines += keep(last, f"g{last}")
        layer = last
        runs = {first + count - 1: count for first, count in self._alike()}
        while layer > 0:
            # below layer - 1 and those alike, all but the first of which have the layer below alike too
            loop = runs.get(layer, 1) - 1
            if loop > 1:
                size, to = net.width(layer), layer - loop
                step = 32 * size
                lines += [
                    self._array(f"g{to}", size),
                    f"w_move<{tiles}, {size // 16}>(g{to}, g{layer});",
                    f"#pragma unroll 1\nfor (int l = 0; l < {loop}; ++l) {{ {self._array('u', size)}",
                    self._below(layer, "u", f"g{to}", f" - l * {2 * size * size}", f" - l * {step}"),
                    *keep(layer - 1, "u", f" - l * {step}"),
                    f"w_move<{tiles}, {size // 16}>(g{to}, u); }}",
                ]
                layer = to
                continue
            lines += [
                self._array(f"g{layer - 1}", net.width(layer)),
                self._below(layer, f"g{layer - 1}", f"g{layer}"),
                *keep(layer - 1, f"g{layer - 1}"),
            ]
            layer -= 1
        if self.inputs:
            x = storage(net.given)
            lines.append(
                f"w_input<{net.widths[0]}, {self._sizes(0).rsplit(', ', 1)[0]}, {x}, {tiles}>"
                f"(({x}*)dx_, g0, base + {plan.weights[0]}u, row0, rows, lane);"
            )
        return lines

    def _below(self, layer: int, to: str, gradient: str, turn: str = "", step: str = "") -> str:
        act = self.net.acts[layer - 1]
        value = self.plan.sums[layer - 1] if act.keeps == 2 else self.plan.kept[layer]
        return (
            f"w_below<{self.acts[act]}, {self._sizes(layer)}>({to}, {gradient},"
            f" base + {self.plan.weights[layer]}u{turn}, kept + {value}{step}, record, lane);"
        )


def _kinds(items: list[_Item]) -> list[tuple[tuple[int, int, bool], int, int]]:
    """(kind, first item, past the last)."""
    found: list[tuple[tuple[int, int, bool], int, int]] = []
    for i, item in enumerate(items):
        if found and found[-1][0] == item.kind:
            found[-1] = (item.kind, found[-1][1], i + 1)
        else:
            found.append((item.kind, i, i + 1))
    return found


def _starts(items: list[_Item], slices: int) -> list[int]:
    """Where the partial sums of each kind begin, in floats."""
    found = []
    at = 0
    for _, first, last in _kinds(items):
        found.append(at)
        at += (last - first) * slices * items[first].registers * 32
    return found


def _sums(plan: _Plan, items: list[_Item], slices: int, entry: str) -> str:
    table = [(plan.gradients[x.layer] + 512 * x.m, plan.kept[x.layer] + 512 * x.n) for x in items]
    numbers = ",".join(f"{a},{b}" for a, b in table)
    lines = [
        f"__device__ __align__(16) const int {entry}_at[] = {{{numbers}}};",
        f'extern "C" __global__ void __launch_bounds__({32 * _WARPS}, 2) {entry}(',
        "const void* kept_, void* partial_, const void* tiles_, const void* more_) {",
        "W_DYNAMIC(sm);",
        "w_wait(); w_release();",
        "const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;",
        f"const int item = blockIdx.x / {slices}, slice = blockIdx.x % {slices};",
        f"const w_rows tiles = (w_rows)(u64)tiles_, part = slice * {_WARPS} + warp;",
        f"const w_rows first = tiles * part / {slices * _WARPS}, last = tiles * (part + 1) / {slices * _WARPS};",
        f"const int left = {entry}_at[2 * item], right = {entry}_at[2 * item + 1];",
        "const bool more = more_ != 0;",
    ]
    for (kind, first, last), start in zip(_kinds(items), _starts(items, slices), strict=True):
        size = items[first].registers * 32
        to = f"(float*)partial_ + {start}u + ((item - {first}) * {slices} + slice) * {size}u"
        m, n, bias = kind
        lines += [
            f"if (item >= {first} && item < {last})",
            f"w_row_sums<{m}, {n}, {str(bias).lower()}, {_STAGES}>((const char*)kept_, {plan.record}, left, right,",
            f"first, last, {to}, more, sm, warp, {_WARPS}, lane);",
        ]
    return "\n".join((*lines, "}\n"))


def _finish(net: Network, items: list[_Item], slices: int, entry: str, dtype: DType) -> str:
    kind = storage(dtype)
    rows = []
    for x in items:
        weight, bias = net.place(x.layer)
        k, n = weight.shape[1], weight.shape[0]
        rows.append((weight.offset, bias.offset if bias else 0, n, k, 16 * x.m, 16 * x.n))
    table = ",".join(str(v) for row in rows for v in row)
    value = "s" if dtype is DType.F32 else f"(u16)w_narrow2_{dtype.value}(s, 0.0f)"
    lines = [
        f"__device__ __align__(16) const int {entry}_at[] = {{{table}}};",
        f'extern "C" __global__ void __launch_bounds__(256) {entry}(const void* partial_, void* out_) {{',
        "w_wait(); w_release();",
        "int i = blockIdx.x * 256 + threadIdx.x;",
        f"{kind}* const out = ({kind}*)out_;",
    ]
    for (form, first, last), start in zip(_kinds(items), _starts(items, slices), strict=True):
        m, n, biased = form
        size = items[first].registers * 32
        products = m * n * 8
        lines += [
            f"if (i < {(last - first) * size}) {{",
            f"const int item = i / {size}, at = i % {size}, lane = at % 32, r = at / 32;",
            f"const float* const from = (const float*)partial_ + {start}u + item * {slices * size}u + at;",
            "float s = 0.0f;",
            f"#pragma unroll 8\nfor (int p = 0; p < {slices}; ++p) s += from[(long long)p * {size}];",
            f"const int* const of = {entry}_at + ({first} + item) * 6;",
            "const int g = lane >> 2, q = lane & 3;",
            f"if (r < {products}) {{",
            f"const int row = of[4] + r / {8 * n} * 16 + r % 4 / 2 * 8 + g;",
            f"const int column = of[5] + r / 4 % {2 * n} * 8 + 2 * q + r % 2;",
            f"if (row < of[2] && column < of[3]) out[of[0] + row * of[3] + column] = {value};",
            "} else {",
            f"const int b = r - {products}, row = of[4] + b / 4 * 16 + b % 4 / 2 * 8 + g;",
            f"if (q == 0 && b % 2 == 0 && row < of[2]) out[of[1] + row] = {value};" if biased else "",
            "}\nreturn; }",
            f"i -= {(last - first) * size};",
        ]
    return "\n".join((*lines, "}\n"))
