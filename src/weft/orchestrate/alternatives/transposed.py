"""Transposed convolutions as convolutions of the input: kernels of convolutions take them, with what follows.

Along one dimension with stride s, dilation d and low padding p, result y is a sum over taps t of x[i] w[t] with
i s + t d - p = y. Results y = s q + r - e of one phase r read x[q + j] with j = (r - e + p - t d) / s for those taps
where that is whole: a convolution of step 1. If all phases read the same j for some shift e, phases become channels of
one convolution; otherwise each is a convolution of its own. No tap is added, so values that are not finite go where
they go in the original. Source: index arithmetic; known as sub-pixel convolution (Shi et al. 2016, arXiv:1609.05158).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.passes.compose_casts import FIRST_TO_LAST, turns_to_first
from weft.ir.prims import Prim
from weft.ir.types import Array
from weft.orchestrate.alternatives.pixels import image_of, is_product
from weft.orchestrate.alternatives.union import Maker

MAX_PHASES = 16
"""Phases of all dimensions together."""
LARGE_WINDOW = 9
"""Taps from which on the gradient of a convolution with strides may be several convolutions though its weight changes.
A library took 527 us for the three of 3 x 3 taps in a step of ResNet-50 (64 images, an NVIDIA H200), for 45 GFLOP."""
WHOLE = 16
"""Channels of 16 bits, and multiples of them, that kernels of products take as they lie."""


@dataclass(frozen=True, slots=True)
class _Taps:
    """One phase of one dimension: which weights it takes, ascending by the place that they read."""

    weights: tuple[int, ...]
    first: int
    """j of the first."""
    step: int
    """Between neighbours; 1 for a single one."""

    @property
    def last(self) -> int:
        """j of the last."""
        return self.first + self.step * (len(self.weights) - 1)


@dataclass(frozen=True, slots=True)
class _Dim:
    """The phases of one dimension."""

    phases: tuple[_Taps, ...]
    shift: int
    """Results that come before the first, of phase 0."""
    count: int
    """Results of each phase."""
    together: bool
    """All phases read the same places."""

    def pads(self, size: int) -> tuple[int, int]:
        """Fewest zeros before and behind an input of `size` for a phase; negative: it leaves input out."""
        return -max(t.first for t in self.phases), self.count + min(t.last for t in self.phases) - size


def convolve_instead(m: Maker) -> None:
    """transposed conv(x, w) → convolutions of x with parts of w, whose results are put side by side.

    Conditions: one or two spatial dimensions, a constant weight, a tap in every phase, no part of the input cut off.
    """
    for i, node in enumerate(m.graph.nodes):
        attrs = node.attrs
        if isinstance(attrs, a.ConvAttrs) and attrs.transposed and m.room and node.type.size:
            _replace(m, i, attrs)


def convolve_gradients(m: Maker) -> None:
    """transposed conv(x, w) → conv(x, w turned): the gradient of a convolution's input by a library's forward kernels.

    The weight's channels change places, and its taps their order; of a training step it is made anew each time, with
    what is summed as neighbours in memory: kernels read it as the right operand of a product.

    Conditions: one or two spatial dimensions, stride 1 or a large window, one group, a weight that is no constant, no
    part of the input cut off; more than one tap (see `pixels`).
    """
    for i, node in enumerate(m.graph.nodes):
        c = node.attrs
        if not isinstance(c, a.ConvAttrs) or not c.transposed or not m.room or not node.type.size:
            continue
        x, w = node.inputs
        if c.groups > 1 or m.graph.nodes[w].prim is Prim.CONSTANT or is_product(m, i, c):
            continue
        large = math.prod(m.graph.type_of(w).shape[2:]) >= LARGE_WINDOW and math.prod(c.strides) <= MAX_PHASES
        if (max(c.strides) == 1 or large) and (dims := _dims(m, i, c)):
            dims = [replace(d, together=False) if len(d.phases) > 1 else d for d in dims]
            phases = itertools.product(*(range(len(d.phases)) for d in dims))
            m.stands_for(_joined(m, i, c, [_turned(m, x, w, dims, chosen) for chosen in phases], dims), i)


def weights_channels_last(m: Maker) -> None:
    """conv(x, w) → the same with a weight that lies channels-last, for kernels that sum along memory.

    Conditions: two spatial dimensions, one group, more than one tap, 16 bits, whole vectors of channels; a weight that
    is no constant and lies otherwise.
    """
    for i, node in enumerate(m.graph.nodes):
        c = node.attrs
        if not isinstance(c, a.ConvAttrs) or c.transposed or c.groups > 1 or not m.room or len(c.strides) != 2:
            continue
        x, w = node.inputs
        weight = m.graph.nodes[w]
        lies = weight.prim is Prim.CONSTANT or turns_to_first(weight)
        _, channels, *taps = weight.type.shape
        if not lies and channels % WHOLE == 0 and math.prod(taps) > 1 and node.type.dtype.itemsize == 2:
            turned = image_of(m.b, m.b.transpose(w, FIRST_TO_LAST))
            m.stands_for(m.b.add(Prim.CONV, x, turned, attrs=c), i)


def _turned(m: Maker, x: NodeId, w: NodeId, dims: Sequence[_Dim], chosen: Sequence[int]) -> NodeId:
    """The convolution of one phase of each dimension, with a weight that is computed."""
    turned = m.b.transpose(w, (1, *range(2, 2 + len(dims)), 0))
    for axis, (d, at) in enumerate(zip(dims, chosen, strict=True)):
        taken = d.phases[at].weights
        if taken != tuple(range(m.b.type_of(turned).shape[1 + axis])):
            places = m.b.constant(np.array(taken, dtype=np.int64))
            turned = m.b.add(Prim.GATHER, turned, places, attrs=a.GatherAttrs(1 + axis))
    turned = image_of(m.b, turned)
    return m.b.add(Prim.CONV, x, turned, attrs=_of_phases(m, x, 1, dims, chosen))


def _replace(m: Maker, i: NodeId, c: a.ConvAttrs) -> None:
    node, x = m.graph.nodes[i], m.graph.nodes[i].inputs[0]
    if m.graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT or math.prod(c.strides) > MAX_PHASES:
        return
    weight, dims = m.graph.constant(node.inputs[1]), _dims(m, i, c)
    if not dims:
        return
    separate = itertools.product(*(range(1 if d.together else len(d.phases)) for d in dims))
    parts = [_part(m, x, weight, c.groups, dims, chosen) for chosen in separate]
    m.stands_for(_joined(m, i, c, parts, dims), i)


def _joined(m: Maker, i: NodeId, c: a.ConvAttrs, parts: Sequence[NodeId], dims: Sequence[_Dim]) -> NodeId:
    """The results of all phases where the transposed convolution has them."""
    if max(c.strides) == 1:
        return parts[0]
    whole, shape = _interleaved(m, parts, dims, c.groups), m.graph.type_of(i).shape
    # also where it takes all: a reshape is no primitive of its own, so it stands for nothing
    cut = a.SliceAttrs((0, 0, *(d.shift for d in dims)), shape, (1,) * len(shape))
    return m.b.add(Prim.SLICE, whole, attrs=cut)


def _dims(m: Maker, i: NodeId, c: a.ConvAttrs) -> list[_Dim]:
    """The phases of each dimension; empty if there are more than two, one has no tap, or input is cut off."""
    node, spatial = m.graph.nodes[i], len(c.strides)
    sizes, taps = (m.graph.type_of(operand).shape[2:] for operand in node.inputs)
    if spatial > 2:
        return []
    found = [_dim(c, axis, taps[axis], node.type.shape[axis + 2]) for axis in range(spatial)]
    dims = [d for d in found if d is not None]
    cut = len(dims) < spatial or any(min(d.pads(size)) < 0 for d, size in zip(dims, sizes, strict=True))
    return [] if cut else dims


def _of_phases(m: Maker, x: NodeId, groups: int, dims: Sequence[_Dim], chosen: Sequence[int]) -> a.ConvAttrs:
    """How the convolution of these phases reads its input."""
    phases = [d.phases[at] for d, at in zip(dims, chosen, strict=True)]
    read = list(zip(dims, phases, m.graph.type_of(x).shape[2:], strict=True))
    lo, hi = tuple(-p.first for p in phases), tuple(d.count + p.last - size for d, p, size in read)
    return a.ConvAttrs((1,) * len(dims), lo, hi, tuple(p.step for p in phases), groups)


def _dim(c: a.ConvAttrs, axis: int, taps: int, results: int) -> _Dim | None:
    """The phases of a dimension, together if some shift allows that; None if one has no tap."""
    s, d, p = c.strides[axis], c.dilations[axis], c.pads_lo[axis]
    for shift in range(s):
        phases = [_phase([(r - shift + p - t * d, t) for t in range(taps)], s) for r in range(s)]
        have = [t for t in phases if t is not None]
        if len(have) < s:
            return None
        if len({(t.first, t.step, len(t.weights)) for t in have}) == 1:
            return _Dim(tuple(have), shift, -(-(results + shift) // s), True)
    have = [t for r in range(s) if (t := _phase([(r + p - t * d, t) for t in range(taps)], s)) is not None]
    return _Dim(tuple(have), 0, -(-results // s), False)


def _phase(places: Sequence[tuple[int, int]], stride: int) -> _Taps | None:
    """Of (place in strides, tap) those that are whole; None if none is."""
    found = sorted((place // stride, tap) for place, tap in places if place % stride == 0)
    if not found:
        return None
    step = found[1][0] - found[0][0] if len(found) > 1 else 1
    return _Taps(tuple(tap for _, tap in found), found[0][0], step)


def _part(m: Maker, x: NodeId, weight: Array, groups: int, dims: Sequence[_Dim], chosen: tuple[int, ...]) -> NodeId:
    """The convolution of some phases: (n, groups x phases together x channels, results of a phase)."""
    ins, channels = weight.shape[0] // groups, weight.shape[1]
    together = [range(len(d.phases)) if d.together else (at,) for d, at in zip(dims, chosen, strict=True)]
    blocks = []
    for phases in itertools.product(*together):
        taps = [d.phases[r].weights for d, r in zip(dims, phases, strict=True)]
        blocks.append(weight[np.ix_(range(weight.shape[0]), range(channels), *taps)])
    kernel = blocks[0].shape[2:]
    made = np.stack(blocks).reshape(len(blocks), groups, ins, channels, *kernel)
    order = (1, 0, 3, 2, *range(4, 4 + len(dims)))
    made = made.transpose(order).reshape(groups * len(blocks) * channels, ins, *kernel)
    constant = m.b.constant(np.ascontiguousarray(made), m.graph.type_of(x).dtype)
    return m.b.add(Prim.CONV, x, constant, attrs=_of_phases(m, x, groups, dims, chosen))


def _interleaved(m: Maker, parts: Sequence[NodeId], dims: Sequence[_Dim], groups: int) -> NodeId:
    """The results of all phases in their places: (n, channels, phases x results of each)."""
    b, count = m.b, len(dims)
    y = parts[0] if len(parts) == 1 else b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1))
    n, channels, *results = b.type_of(y).shape
    apart = [f"phases {i}" for i, d in enumerate(dims) if not d.together]
    together = [f"phases {i}" for i, d in enumerate(dims) if d.together]
    places = [f"results {i}" for i in range(count)]
    axes = ("n", *apart, "groups", *together, "channels", *places)
    sizes = {f"phases {i}": len(d.phases) for i, d in enumerate(dims)} | dict(zip(places, results, strict=True))
    sizes |= {"n": n, "groups": groups, "channels": channels // groups // math.prod(len(d.phases) for d in dims)}
    wanted = ["n", "groups", "channels", *(f"{what} {i}" for i in range(count) for what in ("results", "phases"))]
    y = b.transpose(b.reshape(y, [sizes[x] for x in axes]), [axes.index(x) for x in wanted])
    whole = (len(d.phases) * size for d, size in zip(dims, results, strict=True))
    return b.reshape(y, (n, groups * sizes["channels"], *whole))
