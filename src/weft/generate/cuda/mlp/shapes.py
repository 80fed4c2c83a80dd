"""Which shapes of the mlp template to measure: a model of cycles ranks them.

A warp (or warpgroup) owns tiles of rows from input to output. A multiprocessor is bound by its matrix instructions, its
reads of weights from shared memory, the arithmetic between products, or its share of memory traffic; a tile by itself
by latencies. The constants are those of the device's profile; measuring decides.

Source: note on fused MLPs, sections 2.4 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.costmodel.constants import Mlp
from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.mlp.activation import unfused
from weft.generate.cuda.mlp.image import PANEL, Image
from weft.generate.cuda.mlp.match import Chain, last_use, padded
from weft.generate.parameters import Parameters
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.source import Schedule

MOST = 4
WIDEST = 256
"""Columns of a layer; the mlp_wide template takes more."""
_MOST_AHEAD = 184
"""Registers of a thread up to which the next tile of x is asked for early."""
_MOST_AHEAD_FLOWING = 220
"""The same where a thread may have more."""
_MOST_TURNS = 4
"""Warpgroups that wait for each other."""
_MOST_FLOWING = 12
"""Layers that are written out."""
_SPARED = 8
"""Registers that are counted too many there."""
_REGISTERS = 65536
"""Of a multiprocessor."""
_NEAR = 1.7
"""Shapes that are modelled slower than so many times the best are not measured."""
_SPECIAL = {Prim.TANH: 2.0, Prim.ERF: 2.0}
"""Special-function operations of one transcendental step where it is not one."""
_MOST_HELD = {True: 252, False: 236}
"""Shapes that need more would spill; by whether warpgroups multiply."""
_AHEAD = 2
"""Panels that are on their way while one is multiplied."""
_STAGES = 5
"""Of those, the one that is multiplied, and those that a slower warpgroup still reads."""


@dataclass(frozen=True, slots=True)
class MlpConfig(Parameters):
    """Parameters of the template."""

    group: bool
    """Warpgroups multiply (sm_90a), or warps."""
    tiles: int
    """Tiles of 16 rows (64 of a warpgroup) at once."""
    warps: int
    """Of a block."""
    stages: int
    """Panels of streamed weights in shared memory; 0: all weights stay there."""
    fixed: int
    """Layers whose weights stay in shared memory while others are streamed."""
    min_ctas: int
    """CTAs per multiprocessor, of the launch bounds."""
    persistent_ctas: int
    """CTAs of a persistent grid: each takes one tile after the other."""
    pingpong: bool = False
    """Ping-pong: warpgroups issue products one after the other; one has its activation while another multiplies."""
    flow: int = 0
    """Products begin as soon as so many 16 columns of their left operand are there; 0: when all are."""
    pace: int = 0
    """Of those parts of a product as many may be under way: else the compiler makes the operand first; 0: all."""
    near: bool = False
    """The tile after the next comes into the L2 cache while the next is loaded."""
    early: bool = False
    """Sums of more than 128 columns begin with the bias, too; else it comes behind."""
    keep: bool = False
    """Results are the last to leave the L2 cache, x the first: who comes next reads results."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="mlp")

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def owners(self) -> int:
        """Warps or warpgroups of a block."""
        return self.warps // 4 if self.group else self.warps

    @property
    def rows(self) -> int:
        """Rows of an owner's tile."""
        return (64 if self.group else 16) * self.tiles


def registers(p: Chain, shape: MlpConfig) -> int:
    """Rough number of registers of a thread."""
    ahead = padded(p.width(p.x)) // 4 if prefetched(p, shape) else 0
    return _held(p, shape) + shape.tiles * ahead


def _held(p: Chain, shape: MlpConfig) -> int:
    """Without those of the next tile of x."""
    uses = last_use(p)
    most = 0
    for at, layer in enumerate(p.layers, start=1):
        alive = {v for part, kept in enumerate(p.kept) for v in kept if part < at <= uses[v]}
        held = sum(padded(p.width(v)) for v in (*alive, *layer.beside)) / 4
        most = max(most, int(held + padded(layer.n) / 2 + 4))
        if shape.flow and at > 1:  # the last layer's sums shrink twice as fast as what they become grows
            beside = held - sum(padded(w) for w in layer.widths) / 4
            most = max(most, int(beside + (padded(layer.n) + padded(p.layers[at - 2].n)) / 2 + 8))
    return shape.tiles * most + (36 if shape.group else 48)


def prefetched(p: Chain, shape: MlpConfig) -> bool:
    """Whether the next tile of x is loaded before this one is multiplied."""
    ahead = shape.tiles * padded(p.width(p.x)) // 4
    most = _MOST_AHEAD_FLOWING if shape.flow and shape.threads <= 256 else _MOST_AHEAD
    fits = not _tight(p, shape) or (_held(p, shape) + ahead) * shape.threads <= _REGISTERS
    return p.plain_input and p.width(p.x) % 2 == 0 and fits and _held(p, shape) + ahead <= most


def last_asks(shape: MlpConfig) -> bool:
    """Whether the last warpgroup asks for panels: with turns, all others have read what it has read."""
    return shape.stages > 0 and shape.pingpong and not shape.flow


def panels_ahead(shape: MlpConfig) -> int:
    """Panels that are on their way while one is multiplied; more where no other warpgroup still reads old ones."""
    if last_asks(shape):
        return shape.stages - 2
    return min(4, shape.stages - 2) if shape.owners == 1 else _AHEAD


def _tight(p: Chain, shape: MlpConfig) -> bool:
    """Whether 128 registers do where a few more are counted: between products with special functions they do."""
    return shape.group and shape.threads == 512 and not shape.flow and _all_special(p)


def _all_special(p: Chain) -> bool:
    """Whether a special function stands between any two products."""
    return all(any(p.graph.nodes[s].prim in TRANSCENDENTAL for s in steps) for steps in p.steps[1:-1])


def slot_bytes(image: Image) -> int:
    """The largest panel."""
    return 2 * PANEL * max(padded(x.n) for x in image.p.layers)


def shared_bytes(image: Image, shape: MlpConfig) -> int:
    """Dynamic shared memory of a block."""
    if not shape.stages:
        return image.bytes
    vectors = image.bytes - image.weight_bytes
    return fixed_bytes(image, shape) + shape.stages * slot_bytes(image) + vectors + 16 * shape.stages


def fixed_bytes(image: Image, shape: MlpConfig) -> int:
    """Of the layers that stay while others are streamed."""
    return image.layers[shape.fixed] if shape.fixed else 0


def shapes(p: Chain, facts: GpuFacts) -> list[MlpConfig]:
    """The most promising first."""
    found: list[tuple[float, int, MlpConfig]] = []
    if max(max(x.n, *x.widths) for x in p.layers) > WIDEST:
        return []
    for shape, image in _candidates(p, facts):
        if shared_bytes(image, shape) > facts.shared_per_block:
            continue
        counted = registers(p, shape) - (_SPARED if _tight(p, shape) else 0)
        if counted > _MOST_HELD[shape.group] or counted * shape.threads > facts.registers_per_sm:
            continue
        wanted = -(-p.rows // (shape.rows * shape.owners * facts.sms))
        at_once = max(1, min(wanted, resident_ctas(image, shape, facts), _most_resident_ctas(shape)))
        shape = replace(shape, min_ctas=at_once, persistent_ctas=at_once * facts.sms)
        found.append((cycles(image, shape, facts), len(found), shape))
    found.sort()
    near = [s for c, _, s in found if c <= _NEAR * found[0][0]]
    best: list[MlpConfig] = []
    warps, plain, pingpong, flow = (
        [s for s in near if (s.group, s.pingpong, s.flow > 0) == kind]
        for kind in ((False, False, False), (True, False, False), (True, True, False), (True, False, True))
    )
    best = [*pingpong[:1], *flow[:1]]
    best += _unlike(plain)[: MOST - 1 - len(best)]
    best += _unlike(warps)[: max(1, MOST // 2 - len(best))]
    ranked = [s for s in near if s in best]
    waiting = sorted((s for s in ranked if _waits(p, s, facts)), key=lambda s: s.flow == 0)
    ways = [replace(s, near=True) for s in waiting[:1]]
    staying = sorted((s for s in ranked if s.group), key=lambda s: s.flow == 0) if _stays(p, facts) else []
    ways += [replace(s, keep=True) for s in staying[:1]]
    return [*ranked[:1], *ways, *ranked[1:], *_early(p, ranked)]


def _early(p: Chain, ranked: list[MlpConfig]) -> list[MlpConfig]:
    """Sums that begin with the bias, where special functions stand between wide products; it is measured.

    On an NVIDIA H200: 2 to 9 % at 192 and 256 columns; ReLU's kernels have no registers for that.
    """
    wide = p.dtype is DType.BF16 and _all_special(p) and _widest(p) > 2 * PANEL
    return [replace(s, early=True) for s in ranked if s.pingpong][:1] if wide else []


def _stays(p: Chain, facts: GpuFacts) -> bool:
    """Whether results stay in the L2 cache if x does not."""
    c = costs_of(facts).mlp
    moved = p.graph.type_of(p.x).nbytes + p.stored_bytes
    return p.plain_input and moved > c.moved * facts.l2_bytes and p.stored_bytes <= c.kept * facts.l2_bytes


def _waits(p: Chain, shape: MlpConfig, facts: GpuFacts) -> bool:
    """Whether memory takes longer than products, for a shape of which one more tile can be on its way.

    On an NVIDIA H200: 7 to 14 % then, where products begin with the first columns; nothing where data stay near.
    """
    product = sum(2.0 * p.rows * x.k * x.n for x in p.layers) / (4096 * facts.sms * facts.clock_ghz * 1e9)
    size = p.graph.type_of(p.x).nbytes + p.graph.type_of(p.out).nbytes
    moved = size / ((facts.peak_bandwidth or costs_of(facts).roofline.bandwidth) * 1e9)
    pingpong = p.rows / (shape.rows * shape.owners * shape.persistent_ctas)
    one = shape.group and shape.tiles == 1 and not shape.stages and not shape.pingpong
    return one and moved > product and size > 2 * facts.l2_bytes and pingpong > 3 and prefetched(p, shape)


def _unlike(ranked: list[MlpConfig]) -> list[MlpConfig]:
    """Those that differ from the best first."""
    other = [s for s in ranked[1:] if _at_once(s) != _at_once(ranked[0])]
    return [*ranked[:1], *other, *(s for s in ranked[1:] if s not in other)]


def _most_resident_ctas(shape: MlpConfig) -> int:
    """CTAs of a multiprocessor; beyond four warpgroups, those that multiply and compute at once gain nothing."""
    return max(1, 4 // shape.owners) if shape.flow else 32


def _at_once(shape: MlpConfig) -> tuple[int, int]:
    """What shapes differ in that are worth measuring both."""
    return shape.tiles, shape.owners * shape.min_ctas


def _candidates(p: Chain, facts: GpuFacts) -> list[tuple[MlpConfig, Image]]:
    found = []
    fragments = Image.of(p, group=False)
    for warps in (4, 8, 12, 16):
        found += [(MlpConfig(False, tiles, warps, 0, 0, 1, 1), fragments) for tiles in (1, 2)]
    if facts.capability != 90:
        return found
    panels = Image.of(p, group=True)
    for owners in (1, 2, 3, 4, 6, 8):
        if panels.bytes <= facts.shared_per_block:
            shape = MlpConfig(True, 1, 4 * owners, 0, 0, 1, 1)
        else:
            room = facts.shared_per_block - (panels.bytes - panels.weight_bytes) - 256
            stages = min(8, room // slot_bytes(panels))
            fixed = sum(x <= room - _STAGES * slot_bytes(panels) for x in panels.layers[1:])
            if stages < _STAGES:
                continue
            shape = MlpConfig(True, 1, 4 * owners, _STAGES if fixed else stages, fixed, 1, 1)
        found += [(s, panels) for s in _overlaps(p, shape)]
    return found


def _overlaps(p: Chain, shape: MlpConfig) -> list[MlpConfig]:
    """The ways in which products and what is between them overlap.

    Measured on an NVIDIA H200: ping-pong pays where weights are streamed, and beginning with the first columns where
    layers are narrow, or weights are streamed and there is little between products; else three warpgroups that know
    nothing of each other are fastest.
    """
    found = [shape]
    most = max(-(-x.depth // PANEL) for x in p.layers)
    if 1 < shape.owners <= _MOST_TURNS and shape.stages - _AHEAD >= most:
        found.append(replace(shape, pingpong=True))
    flows = _widest(p) <= PANEL or (shape.stages > 0 and not _all_special(p))
    if flows and len(p.layers) <= _MOST_FLOWING and 2 <= shape.owners <= _MOST_TURNS:
        found.append(replace(shape, flow=1, pace=1 if _widest(p) <= PANEL else 2))
    return found


def _widest(p: Chain) -> int:
    return max(padded(x.n) for x in p.layers)


def resident_ctas(image: Image, shape: MlpConfig, facts: GpuFacts) -> int:
    """CTAs of one multiprocessor that find room at once."""
    own = -(-registers(image.p, shape) // 8) * 8 * shape.threads
    by_shared = facts.shared_per_sm // (shared_bytes(image, shape) + facts.shared_reserved)
    return max(1, min(facts.threads_per_sm // shape.threads, facts.registers_per_sm // own, by_shared))


def _special(p: Chain, steps: list[Prim]) -> float:
    """Operations of the special-function unit for an element of a layer; in bf16 one tanh is all of an activation."""
    found = [x for x in steps if x in TRANSCENDENTAL]
    if p.dtype is DType.BF16:
        return float(sum(x in (Prim.TANH, Prim.ERF, Prim.EXP) for x in found) or len(found))
    return sum(_SPECIAL.get(x, 1.0) for x in found)


def _apart(p: Chain, shape: MlpConfig, c: Mlp) -> float:
    """Share of the shorter of products and what is between them that does not overlap with the longer."""
    if shape.flow:
        return c.apart["flow" if _widest(p) <= PANEL else "flow_wide"]
    return c.apart["pingpong" if shape.pingpong else "group" if shape.group else "warp"]


def cycles(image: Image, shape: MlpConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel."""
    p, costs = image.p, costs_of(facts)
    c = costs.mlp
    units = -(-p.rows // shape.rows)
    busiest = -(-units // facts.sms)
    at_once = shape.owners * shape.min_ctas
    matrix = reads = arithmetic = special = latency = 0.0
    for at, layer in enumerate(p.layers, start=1):
        k, n = layer.depth, padded(layer.n)
        matrix += shape.rows * k * n / 2048
        reads += 0 if shape.group else k * n * 2 / 128
        steps, plain, functions = unfused(p, at)
        plain += sum(x not in TRANSCENDENTAL for x in steps)
        arithmetic += shape.rows * n * (1.0 + plain) / 128
        special += shape.rows * n * (_special(p, steps) + functions) / costs.roofline.sfu_per_clock
        latency += c.layer + c.layer_columns * n / 16
    matrix /= 1.0 if shape.group else c.warp_rate
    width = sum(p.rows * g.width * g.dtype.itemsize for g in p.inputs.values()) + p.stored_bytes
    memory = width * facts.clock_ghz * 1e9 / (facts.peak_bandwidth or costs.roofline.bandwidth) / 1e9 / c.memory
    between = max(arithmetic, special)
    throughput = max(matrix, reads, between) + _apart(p, shape, c) * min(matrix, between)
    quarters = 1 if shape.group else 4  # of the multiprocessor, of which a warp has one
    alone = quarters * (matrix + arithmetic + special) + latency
    weights = min(image.bytes, facts.shared_per_block) / c.weights_bytes + c.weights
    streamed = 0.0
    if shape.stages:
        each = image.weight_bytes - fixed_bytes(image, shape)
        streamed = -(-units // shape.owners // facts.sms) * each / c.port_bytes
    return weights + max(busiest * throughput, -(-busiest // at_once) * alone, memory, streamed)
