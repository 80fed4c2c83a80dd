"""Gradients of a fully connected network as three kernels, and one that prepares the weights.

0. `pack`, when weights have changed: their image in blocks.
1. `chain`: a warp takes tiles of rows from the input up, as the forward pass does, and from the gradient of the result
   down to that of the input, in registers. What `wgrad` needs, the inputs of all layers and the gradients of
   their pre-activations, it leaves in memory as fragments; nothing is kept between the forward pass and this.
   Weights lie in shared memory; where they do not fit they come in panels through a ring, for all warps of a CTA.
2. `wgrad`: gradients of weights and biases as products over rows, a share of all rows per CTA, in f32.
3. `finish`: the shares, added in their order. No atomic additions: equal inputs give equal bits.

Source: note on fused MLPs, section 4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.mlp.text import mlp_header
from weft.generate.cuda.role.role import DeviceRole
from weft.generate.cuda.training.activation import Activation
from weft.generate.cuda.training.chain import Chain, ChainConfig, Item, Plan, items_inside, pack, panel_bytes, table_of
from weft.generate.cuda.training.entry import Entry, kernels, read, written
from weft.generate.cuda.training.network import Network
from weft.generate.cuda.training.skips import DEEPEST, SkipChain
from weft.generate.cuda.training.skips import panel_bytes as panel_bytes_of_skips
from weft.generate.expr.integer import Int
from weft.ir.declined import Declined
from weft.ir.types import DType

_WARPS, _STAGES, _TILE = 4, 4, 4
"""Of `wgrad`: warps of a CTA, tiles of rows on their way, sixteens of columns that a warp adds up."""
_WIDEST_TILES = 128
"""Columns of all tiles of a warp where those are several."""
_WIDEST, _WIDEST_SMALL, _SMALL = 272, 512, 1 << 16
"""Columns for which registers suffice; and for which they nearly do, where weights are no more than so many bytes."""
_MORE = 40
"""Registers for a tile of a network with skips that are not counted otherwise."""
_SLOTS = 4
"""Panels of weights in shared memory where they are streamed."""
_INSIDE = tuple(ChainConfig(tiles, warps, 1, 0, inside=True) for tiles, warps in ((1, 16), (2, 8), (1, 12), (1, 8)))
_ONES = {DType.F16: "0x3c003c00u", DType.BF16: "0x3f803f80u"}


@dataclass(frozen=True, slots=True)
class Gradient:
    """Entries take addresses, and numbers as if they were addresses.

    pack(each parameter, image), chain(x, gradient of the result, image, kept, gradient of x, rows),
    wgrad(kept, partial, tiles, more), finish(partial, gradients of the parameters, shares). `more` adds to the partial
    sums that earlier rows left in `partial`. Where CTAs add inside there is no `wgrad`, and `kept` is `partial`.
    """

    text: str
    pack: Entry
    chain: Entry
    wgrad: Entry
    """Partial sums of the gradients of weights and biases."""
    finish: Entry
    record: int
    """Bytes of `kept` for a tile of 16 rows."""
    tiles: int
    """Tiles that a warp takes at once: `kept` is rounded up to that."""
    partial_bytes: int
    image_bytes: int
    inside: bool = False
    """Whether the CTAs of `chain` add the sums themselves."""
    shares: int = 1
    """Of all rows, at most: what `finish` adds."""

    def kept_bytes(self, rows: int) -> int:
        """Of `kept` for so many rows; without gradients of parameters a warp has room for what it works on."""
        at_once = self.chain.max_ctas * self.chain.threads // 32 * self.tiles
        return self.record * (self.count(rows) if self.partial_bytes else min(self.count(rows), at_once))

    def count(self, rows: int) -> int:
        """Tiles of so many rows."""
        return -(-rows // (16 * self.tiles)) * self.tiles


@cache
def _header() -> str:
    return Path(__file__).with_name("weft_cuda_training.h").read_text(encoding="utf-8")


def training_header(dtype: DType, *, early: bool = False) -> str:
    """The functions of the kernels of gradients, for values of that type; and of the headers behind it."""
    meant = {"W_ONES": _ONES[dtype], "W_EARLY": int(early)} | {
        f"W_{name.upper()}": f"w_{name}_{dtype.value}" for name in ("mma", "narrow2", "unpack")
    }
    return "".join(f"#undef {name}\n#define {name} {text}\n" for name, text in meant.items()) + _header()


@cache
def skips_header() -> str:
    """What networks with skips want besides."""
    return Path(__file__).with_name("weft_cuda_skips.h").read_text(encoding="utf-8")


def _chain(
    net: Network, plan: Plan, acts: dict[Activation, str], shape: ChainConfig, *, inputs: bool, parameters: bool
) -> Chain:
    kind = Chain if net.plain else SkipChain
    return kind(net, plan, acts, shape, inputs=inputs, parameters=parameters)


def _panel_bytes(net: Network) -> int:
    return panel_bytes(net) if net.plain else panel_bytes_of_skips(net)


def _sixteens(net: Network) -> list[list[tuple[int, int]]]:
    """(column of the weight, how many) that each sixteen of what a layer reads is."""
    found = []
    for layer in range(net.depth):
        own = []
        for s in net.segments(layer):
            own += [(s.column + at, min(16, s.width - at)) for at in range(0, s.width, 16)]
        found.append([*own, *([(0, 0)] if len(own) % 2 else [])])  # items may be two wide
    return found


def _place_of(net: Network, table: str) -> str:
    """Statement: where the sum at a row and a column of an item belongs."""
    if net.plain:
        return "if (row < of[2] && column < of[3]) to = of[0] + row * of[3] + column;"
    return (
        f"const int* const at_ = {table} + 2 * (of[6] + column / 16);"
        " if (row < of[2] && column % 16 < at_[1]) to = of[0] + row * of[3] + at_[0] + column % 16;"
    )


def gradient(
    net: Network,
    facts: GpuFacts,
    shape: ChainConfig | None = None,
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
    for act in net.acts:
        refused = act.no_gradient()
        if refused is not None:
            return refused
    if not net.plain and net.depth > DEEPEST:
        return Declined(f"{net.depth} layers with skips; gradients are for {DEEPEST} at most")
    plan = Plan.of(net, parameters=parameters)
    if shape is None:
        found = shapes(net, facts, parameters=parameters)
        if not found:
            return Declined(f"{max(net.widths)} columns need more registers or shared memory than there are")
        shape = found[0]
    items = items_inside(net) if shape.inside else _items(net)
    slices = facts.sms if shape.inside else _slices(items, facts.sms)
    seed = hashlib.sha256(f"{net.identity}|{inputs}{parameters}{dtype}{shape.named}{slices}".encode()).hexdigest()[:16]
    stem = f"k{seed}"
    acts = {act: f"Act{i}" for i, act in enumerate(dict.fromkeys(net.acts))}
    chain = _chain(net, plan, acts, shape, inputs=inputs, parameters=parameters)
    headers = [
        prelude(),
        mlp_header(),
        training_header(net.dtype, early=shape.early and not shape.inside),
        "" if net.plain else skips_header(),
        *(act.text(name, net.dtype) for act, name in acts.items()),
    ]
    packing, rows = pack(net, plan), chain.role(stem, shape.min_ctas * facts.sms)
    wgrad, finish = _wgrad(plan, items, slices, stem), _finish(net, items, stem, dtype)
    summing = (finish,) if shape.inside else (wgrad, finish) if parameters else ()
    return Gradient(
        "".join((*headers, kernels((packing, rows, *summing), stem))),
        Entry.of(packing, stem),
        Entry.of(rows, stem),
        Entry.of(wgrad, stem),
        Entry.of(finish, stem),
        plan.record,
        shape.tiles,
        128 * slices * sum(x.registers for x in items) if summing else 0,
        plan.image_bytes,
        shape.inside,
        slices,
    )


def shapes(net: Network, facts: GpuFacts, *, parameters: bool = True) -> list[ChainConfig]:
    """Ways to run `chain` that are worth measuring, the most promising first; none where nothing fits."""
    plan = Plan.of(net, parameters=parameters)
    widest = max(net.width(i) for i in range(1 - max(1, len(net.parts)), net.depth + 1))
    if widest > (_WIDEST_SMALL if plan.image_bytes <= _SMALL else _WIDEST):
        return []
    found = []
    more = 0 if net.plain else _MORE
    for tiles in (1, 2, 4):
        if tiles > 1 and widest * tiles > _WIDEST_TILES:
            continue
        early = widest // 4 if widest * tiles <= 128 else 0
        registers = 48 + tiles * (widest // 2 + widest // 4 + early + more)
        for min_ctas, warps in ((2, 12), (1, 16), (1, 12), (1, 8), (1, 4)):
            room = facts.registers_per_sm // (32 * warps * min_ctas)
            fits = min_ctas * (plan.image_bytes + facts.shared_reserved) <= facts.shared_per_sm
            if fits and plan.image_bytes <= facts.shared_per_block and min(registers, 255) <= room:
                found.append(ChainConfig(tiles, warps, min_ctas, 0))
                break
    if found and found[0].warps < 12 and 48 + widest // 2 + widest // 4 + more <= facts.registers_per_sm // (32 * 12):
        found.append(ChainConfig(1, 12, 1, 0, early=False))
    inside = [x for x in _INSIDE if parameters and _fits_inside(net, plan, x, facts)]
    if found:
        return [*found, *inside[:2]]
    for tiles, warps in ((1, 16), (2, 8), (1, 12), (1, 8)):
        registers = 56 + tiles * (widest // 2 + widest // 4)
        registers = max(registers, min(255, registers + more))
        slots = min(_SLOTS, (facts.shared_per_block - plan.vector_bytes) // _panel_bytes(net))
        few = widest * tiles <= _WIDEST_TILES or tiles == 1
        if slots >= 2 and few and registers <= min(255, facts.registers_per_sm // (32 * warps)):
            found.append(ChainConfig(tiles, warps, 1, slots))
    return found[:2]


def _fits_inside(net: Network, plan: Plan, shape: ChainConfig, facts: GpuFacts) -> bool:
    """Whether values of a CTA's rows fit beside the weights, and its sums into registers."""
    chain = _chain(net, plan, {}, shape, inputs=True, parameters=True)
    widest = max(net.width(i) for i in range(1 - max(1, len(net.parts)), net.depth + 1))
    more = 0 if net.plain else _MORE
    registers = 56 + shape.tiles * (widest // 2 + widest // 4 + more) + 43 * chain.results
    room = min(255, facts.registers_per_sm // (32 * shape.warps))
    return chain.shared_bytes <= facts.shared_per_block and registers <= room


def _items(net: Network) -> list[Item]:
    found = []
    for layer in range(net.depth):
        rows, columns = net.width(layer + 1) // 16, net.depth_of(layer) // 16
        for m in range(0, rows, _TILE):
            for n in range(0, columns, _TILE):
                kind = min(_TILE, rows - m), min(_TILE, columns - n), n == 0 and net.biases[layer]
                found.append(Item(layer, m, n, kind))
    return sorted(found, key=lambda x: x.kind, reverse=True)


def _kinds(items: list[Item]) -> list[tuple[tuple[int, int, bool], int, int]]:
    """(kind, first item, past the last)."""
    found: list[tuple[tuple[int, int, bool], int, int]] = []
    for i, item in enumerate(items):
        if found and found[-1][0] == item.kind:
            found[-1] = (item.kind, found[-1][1], i + 1)
        else:
            found.append((item.kind, i, i + 1))
    return found


def _starts(items: list[Item], slices: int) -> list[int]:
    """Where the partial sums of each kind begin, in floats."""
    found = []
    at = 0
    for _, first, last in _kinds(items):
        found.append(at)
        at += (last - first) * slices * items[first].registers * 32
    return found


def _quads(items: list[Item]) -> list[tuple[int, int, int, int]]:
    """Items of which four make a square, each of 4 by 4 sixteens: one CTA adds them up."""
    at = {(x.layer, x.m, x.n): i for i, x in enumerate(items) if x.kind[:2] == (_TILE, _TILE)}
    found = []
    for layer, m, n in at:
        four = [at.get((layer, m + i, n + j), -1) for i in (0, _TILE) for j in (0, _TILE)]
        if m % (2 * _TILE) == n % (2 * _TILE) == 0 and -1 not in four:
            found.append((four[0], four[1], four[2], four[3]))
    return sorted(found)


def _wgrad(plan: Plan, items: list[Item], slices: int, stem: str) -> DeviceRole:
    places_at, items_of = f"{stem}_sums_at", f"{stem}_sums_of"
    quads = _quads(items)
    inside = {i for four in quads for i in four}
    singles = [i for i in range(len(items)) if i not in inside]
    warps = _warps(items)
    places: list[tuple[int, int, int, int]] = []
    for (_, first, last), start in zip(_kinds(items), _starts(items, slices), strict=True):
        for i in range(first, last):
            x, size = items[i], items[i].registers * 32
            left, right = plan.gradients[x.layer] + 512 * x.m, plan.kept[x.layer] + 512 * x.n
            places.append((left, right, start + (i - first) * slices * size, size))
    lines = [
        "role.pdl_wait(); role.pdl_trigger();",
        "const int lane = role.thread() & 31, warp = role.thread() >> 5;",
        f"const int number = role.block_x() / {slices}, slice = role.block_x() % {slices};",
        f"const int item = {f'{items_of}[4 * number + (warp & 3)]' if quads else 'number'};",
        "const w_rows tiles = (w_rows)(u64)tiles_;",
        f"const int left = {places_at}[4 * item], right = {places_at}[4 * item + 1];",
        f"float* const to = (float*)partial_ + {places_at}[4 * item + 2] + slice * {places_at}[4 * item + 3];",
        "const bool more = more_ != 0; const char* const kept = (const char*)kept_;",
    ]
    if quads:
        biased = [any(items[i].kind[2] for i in four) for four in quads]
        for bias in sorted(set(biased)):
            numbers = [i for i, x in enumerate(biased) if x is bias]
            chosen = " || ".join(f"number == {i}" for i in numbers)
            starts = ", ".join(f"{places_at}[4 * {items_of}[4 * number]{more}]" for more in ("", " + 1"))
            lines += [
                f"if ({chosen})",
                f"w_quad_sums<{str(bias).lower()}, {_STAGES}>(role, kept, {plan.record}, {starts},",
                f"tiles * slice / {slices}, tiles * (slice + 1) / {slices}, to, {places_at}[4 * item + 3] == 144 * 32,",
                "more, sm, role.thread());",
            ]
    lines += [
        f"const w_rows part = slice * {warps} + warp;",
        f"const w_rows first = tiles * part / {slices * warps}, last = tiles * (part + 1) / {slices * warps};",
    ]
    for kind, first, last in _kinds(items):
        if all(i in inside for i in range(first, last)):
            continue
        m, n, bias = kind
        lines += [
            f"if ({f'number >= {len(quads)} && ' if quads else ''}item >= {first} && item < {last})",
            f"w_row_sums<{m}, {n}, {str(bias).lower()}, {_STAGES}>(role, kept, {plan.record}, left, right,",
            f"first, last, to, more, sm, warp, {warps}, lane);",
        ]
    tables = table_of(places_at, places)
    if quads:
        tables += table_of(items_of, [*quads, *((i, i, i, i) for i in singles)])
    return DeviceRole(
        threads=32 * warps,
        body="\n".join(lines),
        parameters=(*read("kept_"), *written("partial_"), *read("tiles_", "more_")),
        grid=(slices * (len(items) - 3 * len(quads)), 1, 1),
        globals=tables,
        name="sums",
        min_ctas_per_sm=1 if quads else 2,
        shared_bytes=_shared(items),
    )


def _warps(items: list[Item]) -> int:
    """Of a CTA of `wgrad`."""
    return 2 * _WARPS if _quads(items) else _WARPS


def _slices(items: list[Item], sms: int) -> int:
    """Shares of the rows: so many that all CTAs run at once."""
    quads = len(_quads(items))
    if quads:  # one CTA on a multiprocessor; a square takes as long as four items by themselves
        return max(1, int(sms / (quads + (len(items) - 4 * quads) / 4)))
    return max(1, 2 * sms // len(items))


def _shared(items: list[Item]) -> int:
    """Bytes of a CTA of `wgrad`."""
    singles = max(_warps(items) * _STAGES * (x.kind[0] + x.kind[1]) * 512 for x in items)
    return max(singles, 4 * 16 * 512 * _STAGES if _quads(items) else 0)


def _finish(net: Network, items: list[Item], stem: str, dtype: DType) -> DeviceRole:
    """A warp of a CTA adds an eighth of the shares of 32 results; the first one adds the eighths."""
    kind = storage(dtype)
    rows = []
    for x in items:
        weight, bias = net.slices_of(x.layer)
        k, n = weight.shape[1], weight.shape[0]
        at = bias.offset if bias and x.n == 0 else -1
        first = sum(len(of) for of in _sixteens(net)[: x.layer])
        rows.append((weight.offset, at, n, k, 16 * x.m, 16 * x.n, *([] if net.plain else [first])))
    places_at, sixteens_of = f"{stem}_finish_at", f"{stem}_finish_of"
    value = "s" if dtype is DType.F32 else f"(u16)w_narrow2_{dtype.value}(s, 0.0f)"
    lines = [
        "const int shares = (int)(u64)shares_;",
        "role.pdl_wait(); role.pdl_trigger();",
        "int i = role.block_x() * 32 + role.thread() % 32; const int part = role.thread() / 32;",
        f"{kind}* const out = ({kind}*)out_;",
        "const float* from = 0; w_rows step = 0; int to = -1;",
    ]
    at = 0
    for form, first, last in _kinds(items):
        start = f"{at}ll * shares" if at else 0
        at += (last - first) * 32 * items[first].registers
        m, n, biased = form
        size = items[first].registers * 32
        products = m * n * 8
        lines += [
            f"if (i >= 0 && i < {(last - first) * size}) {{",
            f"const int item = i / {size}, at = i % {size}, lane = at % 32, r = at / 32;",
            f"from = {Int('(const float*)partial_') + start} + (long long)item * shares * {size} + at; step = {size};",
            f"const int* const of = {places_at} + {(first + Int('item')) * (6 if net.plain else 7)};",
            "const int g = lane >> 2, q = lane & 3;",
            f"if (r < {products}) {{",
            f"const int row = of[4] + r / {8 * n} * 16 + r % 4 / 2 * 8 + g;",
            f"const int column = of[5] + r / 4 % {2 * n} * 8 + 2 * q + r % 2;",
            _place_of(net, sixteens_of),
            "} else {",
            f"const int b = r - {products}, row = of[4] + b / 4 * 16 + b % 4 / 2 * 8 + g;",
            "if (q == 0 && b % 2 == 0 && of[1] >= 0 && row < of[2]) to = of[1] + row;" if biased else "",
            "}\n}",
            f"i -= {(last - first) * size};",
        ]
    lines += [
        "__shared__ float eighths[8][32];",
        "float s = 0.0f;",
        "const int end = shares * (part + 1) / 8;",
        "if (to >= 0)",
        "#pragma unroll 8",
        "for (int p = shares * part / 8; p < end; ++p) s += from[p * step];",
        "eighths[part][role.thread() % 32] = s;",
        "role.sync();",
        "if (part == 0 && to >= 0) {",
        "#pragma unroll",
        "for (int p = 1; p < 8; ++p) s += eighths[p][role.thread()];",
        f"out[to] = {value};",
        "}",
    ]
    tables = table_of(places_at, rows)
    if not net.plain:
        tables += table_of(sixteens_of, [x for of in _sixteens(net) for x in of])
    return DeviceRole(
        threads=256,
        body="\n".join(lines),
        parameters=(*read("partial_"), *written("out_"), *read("shares_")),
        grid=(sum(x.registers for x in items), 1, 1),
        globals=tables,
        name="finish",
    )
