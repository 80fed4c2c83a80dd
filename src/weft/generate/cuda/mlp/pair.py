"""Fully connected networks of few rows: two blocks of a cluster share a tile, each has half of every layer's columns.

A tile of 64 rows keeps one multiprocessor busy for as long as its products take. Two of them take half as long, and
each streams half of the weights. What one block computes is half of the left operand of both: it stays in registers,
and goes to the other block's shared memory as fragments, thread by thread, with the bytes counted by a barrier there.
The products of a block's own half run meanwhile.

Source: note on fused MLPs, section 3, "Small batch"; PTX ISA 8.x, `st.async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.intrinsics.prelude import prelude, storage, tma_header
from weft.generate.cuda.intrinsics.ring import initialised, prologue
from weft.generate.cuda.mlp import image as mlp_image
from weft.generate.cuda.mlp.activation import activation_functions
from weft.generate.cuda.mlp.beside import each
from weft.generate.cuda.mlp.image import PANEL, Image
from weft.generate.cuda.mlp.match import Chain, chain, last_use
from weft.generate.cuda.mlp.shapes import WIDEST, MlpConfig
from weft.generate.cuda.mlp.text import Kernel, chosen, halved, instruction, mlp_header
from weft.generate.cuda.role.role import PDL, WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import Pointer, Schedule

ROWS = 64
THREADS = 128
MOST_LAYERS = 16
"""All are written out."""
_FEWEST = 4
_MOST = 12
"""Panels in shared memory."""
_BARRIERS = 16 * _MOST + 16


@dataclass(frozen=True, slots=True)
class MlpPairConfig(Parameters):
    """Parameters of the template."""

    stages: int
    """Halves of panels of weights in shared memory."""
    persistent_ctas: int
    """CTAs of a persistent grid, two for each tile."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="mlp_pair")


def schedules(p: Chain, facts: GpuFacts) -> Sequence[Schedule]:
    """One where a chain of wide layers is taken and both blocks of every tile find a multiprocessor; else none.

    Its shared memory leaves room for a block of the next kernel, which begins while this one runs: on an NVIDIA H200
    4 x 256 of 4096 rows take 8.1 us so, and 9.2 with all the memory; 4 x 128 take longer than by one block a tile.
    """
    tiles = -(-p.rows // ROWS)
    if facts.capability != 90 or 2 * tiles > facts.sms or why_not(p) or p.layers[0].n < WIDEST:
        return []
    image = Image.of(p, group=True)
    room = facts.shared_per_sm // 2 - facts.shared_reserved - _shared(p, image, 0)
    stages = min(_MOST, sum(-(-x.depth // PANEL) for x in p.layers), room // _slot(p))
    return [MlpPairConfig(stages, 2 * tiles).schedule()] if stages >= _FEWEST else []


def why_not(p: Chain) -> str:
    """Why the template does not take a chain; empty if it does."""
    first, *rest = p.layers
    if len(p.inputs) > 1 or not p.inputs[p.x].dense or len(p.ends) > 1:
        return "several inputs or results, or columns of one"
    if len(p.layers) > MOST_LAYERS or not rest:
        return f"{len(p.layers)} layers"
    if any(x.n % (2 * PANEL) or x.n > WIDEST for x in p.layers):
        return "columns that are no two halves of panels"
    if len({x.n for x in p.layers[:-1]}) > 1:
        return "layers of several widths"
    if first.k > WIDEST or any(len(x.left) != 1 for x in p.layers):
        return "values beside each other"
    uses = last_use(p)
    again = any(uses[v] != at + 1 for at, kept in enumerate(p.kept) for v in kept)
    beside = any(p.value(o) in p.kept[part - 1] for part, steps in enumerate(p.steps) if part for s in steps
                 for o in p.graph.nodes[s].inputs)  # fmt: skip
    if again or beside or p.kept[-1] or any(p.kept[at] != x.left for at, x in enumerate(p.layers)):
        return "values that are read again"
    return ""


def _slot(p: Chain) -> int:
    return PANEL * max(x.n for x in p.layers)


def _mail(p: Chain) -> int:
    """Bytes of half of a tile's values."""
    return ROWS * p.layers[0].n


def _shared(p: Chain, image: Image, stages: int) -> int:
    return stages * _slot(p) + image.bytes - image.weight_bytes + 2 * _mail(p) + _BARRIERS


@dataclass(frozen=True, slots=True)
class PairKernel(Kernel):
    """One kernel; `lines` is the body of its entry. Its chain has half of the columns of every layer."""

    def _columns(self, part: int) -> str:
        return f"j * 8 + 2 * q + side * {self.p.layers[part - 1].n}" if part else "j * 8 + 2 * q"

    def _row(self, width: int) -> str:
        return f"out + (u64)r * {2 * width} + side * {width}"

    @property
    def _vectors_at(self) -> int:
        return self.s.stages * _slot(self.image.p)

    def lines(self) -> list[str]:
        """From the weights in memory to the result."""
        p = self.p
        x, out = (storage(p.graph.type_of(v).dtype) for v in (p.x, p.out))
        first = p.layers[0].left[0]
        lines = [
            "const int t = role.thread(), lane = t & 31, warp = t >> 5, q = lane & 3, g = lane >> 2;",
            "const int side = role.block_x() & 1;",
            f"const {x}* const x = (const {x}*)in0;",
            f"{out}* const out = ({out}*)out0;",
            "const u64 weights = w_descriptor(w_shared(sm));",
            *self._weights(),
            PDL,
            "role.pdl_wait(); role.pdl_trigger();",
            *self._load(),
            f"u32 h{first}[1][{-(-p.layers[0].k // 16)}][4];",
            f"u32 theirs[1][{self.image.p.layers[0].n // 32}][4], mails = 0;",
            "#pragma unroll 1",
            f"for (int tile = role.block_x() >> 1; tile < {-(-p.rows // ROWS)}; tile += role.blocks_x() >> 1) {{",
            f"const int row0 = tile * {ROWS} + warp * 16;",
            f"load(row0, h{first});",
        ]
        for part in range(1, len(p.layers) + 1):
            lines += self._layer(part)
        return [*lines, "}"]

    def _weights(self) -> list[str]:
        """The start of the ring of panels; barriers of both blocks are there before one sends."""
        p, s, full = self.p, self.s, self.image.p
        vectors = self.image.bytes - self.image.weight_bytes
        slot, ring = _slot(full), self._vectors_at
        panels = self._halves()
        units = -(-p.rows // ROWS)
        places = [chosen("at_asked", [place[side] for place, _ in panels]) for side in range(2)]
        return [
            f"const u32 box = w_shared(sm) + {ring + vectors}u, mail = box + {2 * _mail(full)}u;",
            f"const u32 full = mail + 16u, empty = full + {8 * s.stages}u;",
            prologue(
                initialised(4, self._ring),
                "w_bar_init(mail, 1); w_bar_init(mail + 8, 1);",
                then=f"w_bar_expect(mail, {_mail(full)}); w_bar_expect(mail + 8, {_mail(full)});",
            ),
            f"const u32 total = (({units}u - 1 - (role.block_x() >> 1)) / (role.blocks_x() >> 1) + 1)",
            f"* {len(panels)}u;",
            "u32 asked = 0, at_asked = 0, slot_asked = 0, turn_asked = 0, slot = 0, parity = 0;",
            "auto ask = [&]() {",
            "if (asked < total) {",
            f"const u32 size = {chosen('at_asked', [size for _, size in panels])};",
            f"const u32 place = side ? {places[1]} : {places[0]};",
            f"if (turn_asked) {self._ring.await_read('slot_asked', '(turn_asked - 1) & 1')}",
            f"w_bar_expect({self._ring.filled_at('slot_asked')}, size);",
            f"w_bulk(w_shared(sm) + slot_asked * {slot}u, (const char*)pk + place, size, full + 8 * slot_asked);",
            f"++asked; if (++at_asked == {len(panels)}) at_asked = 0;",
            self._ring.advance("slot_asked", "++turn_asked"),
            "}\n};",
            f"if (t == 0) for (int i = 0; i < {s.stages}; ++i) ask();",
            (
                f"for (int i = t; i < {vectors // 16}; i += {THREADS})"
                f" w_copy16(w_shared(sm) + {ring} + 16 * i, (const char*)pk + {self.image.weight_bytes} + 16 * i);"
            ),
            "w_commit(); w_arrived<0>();",
            "role.sync(); __syncwarp(); w_cluster_sync();",
        ]

    def _halves(self) -> list[tuple[tuple[int, int], int]]:
        """((offset for either block), bytes) in the order of reading: behind the first layer its own half first."""
        found = []
        for at, layer in enumerate(self.image.p.layers):
            size, count = 2 * PANEL * layer.n, -(-layer.depth // PANEL)
            begin = self.image.layers[at]
            for i in range(count):
                order = [(i + side * count // 2) % count if at else i for side in range(2)]
                found.append(((begin + order[0] * size, begin + order[1] * size + size // 2), size // 2))
        return found

    def _layer(self, part: int) -> list[str]:
        p = self.p
        chunks = p.layers[part - 1].n // 8
        lines = [f"float d{part}[1][{4 * chunks}];", *self._begin(part, chunks, self._bias(part))]
        lines += self._products(part)
        lines += [f"u32 h{node}[1][{chunks // 2}][4];" for node in p.kept[part]]
        lines.append(f"{each('m', 1)} {{")
        lines += self._keep(part, each("j", chunks)) if p.kept[part] else []
        lines += [x for end in p.ends_of(part) for x in self._store(end)]
        lines.append("}")
        return [*lines, *self._send(part)] if part < len(p.layers) else lines

    def _send(self, part: int) -> list[str]:
        """A layer's values to the same threads of the other block."""
        (node,) = self.p.kept[part]
        slices = self.p.layers[part - 1].n // 16
        value = ", ".join(f"h{node}[0][k][{e}]" for e in range(4))
        return [
            "// to the other CTA of the cluster, by distributed shared memory; its barrier counts the bytes",
            f"{{ const u32 to = box + (mails & 1) * {_mail(self.image.p)}u + t * 16u, bar = mail + 8 * (mails & 1);",
            f"{each('k', slices)} w_mail_send(to + k * {16 * THREADS}u, make_uint4({value}), bar, side ^ 1); }}",
        ]

    def _receive(self) -> list[str]:
        """The other half of the last layer's values; a box is free for the next but one as soon as it is read."""
        size = _mail(self.image.p)
        words = ", ".join(f"theirs[0][k][{e}] = v.{c}" for e, c in enumerate("xyzw"))
        place = f"{self._boxes} + at * {size} + k * {16 * THREADS} + t * 16"
        return [
            "{ const u32 at = mails & 1;",
            "w_mail_wait(mail + 8 * at, (mails >> 1) & 1);",
            f"if (t == 0) w_bar_expect(mail + 8 * at, {size}u);",
            f"{each('k', size // (16 * THREADS))} {{",
            f"const uint4 v = *(const uint4*)(sm + {place}); {words}; }}",
            "++mails; }",
        ]

    @property
    def _boxes(self) -> int:
        return self._vectors_at + self.image.bytes - self.image.weight_bytes

    def _products(self, part: int) -> list[str]:
        """Those of the block's own half, then of the other's."""
        p = self.p
        layer = p.layers[part - 1]
        steps = layer.depth // 16
        own = steps if part == 1 else steps // 2
        add = "1" if self._bias(part) is not None else "k"
        lines = ["{"]
        for i, first in enumerate(range(0, steps, PANEL // 16)):
            last = min(steps, first + PANEL // 16)
            if first == own:
                lines += self._receive()
            left = f"h{layer.left[0]}[0][k]" if first < own else f"theirs[0][k - {own}]"
            call = f"w_wgmma_{p.dtype.value}(d{part}[0], {left}, w_behind(w, k % 4 * 32), {add});"
            lines += [*self._panel(), "w_group_begin();"]
            lines += [f"#pragma unroll\nfor (int k = {first}; k < {last}; ++k) {call}", "w_group_commit(); }"]
            lines += ["w_group_wait<1>();", self._panel_read()] if i else []
            lines += self._next_panel(i == 0)
        lines += ["w_group_wait<0>();", self._panel_read(), "}"]
        operands = [(f"h{layer.left[0]}", own), *([("theirs", steps - own)] if part > 1 else [])]
        for name, count in operands:
            lines.append(f"{each('k', count)}\n{each('e', 4)} w_read_until({name}[0][k][e]);")
        return [*lines, f"{each('e', layer.n // 2)} w_hold(d{part}[0][e]);"]

    def _panel(self) -> list[str]:
        return [
            self._ring.await_filled("slot", "parity"),
            f"{{ const u64 w = w_behind(weights, slot * {_slot(self.image.p)}u);",
        ]

    @staticmethod
    def _panel_read() -> str:
        return f"{Kernel._panel_read()} if (t == 0) ask();\n__syncwarp();"


def roles(problem: Problem, schedule: Schedule, masters: DType | None = None) -> RoleSource | Declined:
    """A chain of which two blocks have half of the columns each; `masters` as of `kernel.emit`."""
    p = chain(problem)
    if isinstance(p, Declined):
        return p
    if reason := why_not(p):
        return Declined(f"not for two CTAs: {reason}")
    s = MlpPairConfig.of(schedule)
    inner = MlpConfig(True, 1, 4, s.stages, 0, 1, s.persistent_ctas)
    image = halved(p, inner, Image.of(p, group=True))
    half = replace(p, layers=tuple(replace(x, n=x.n // 2) for x in p.layers))
    packing, weights = mlp_image.pack(image, masters)
    widths = sorted({x.n for x in half.layers})
    role = DeviceRole(
        threads=THREADS,
        body="\n".join(PairKernel(half, inner, image).lines()),
        parameters=(
            Parameter("in0", Pointer("in", p.inputs[p.x].index)),
            Parameter("pk", Pointer("packed", 0)),
            Parameter("out0", Pointer("out", 0), WRITTEN),
        ),
        grid=(s.persistent_ctas, 1, 1),
        min_ctas_per_sm=1,
        shared_bytes=_shared(p, image, s.stages),
        cluster=(2, 1, 1),
    )
    return RoleSource(
        schedule=schedule,
        headers=(
            prelude(),
            mlp_header(),
            activation_functions(p),
            tma_header(),
            *(instruction(p.dtype, n) for n in widths),
        ),
        roles=(role,),
        pack=(packing,),
        pack_first=True,
        packed_bytes=(image.bytes,),
        replaces_weights=weights,
        capability=90,
        exact_arch=True,
    )
