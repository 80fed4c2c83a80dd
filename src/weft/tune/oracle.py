"""The reference of a problem: its graph on whole tensors through torch, in float64 and in its own precision.

`evaluate(..., Mode.PRECISE)` keeps every float in float64, whatever its element type: the oracle. It is checked
against `weft.ir.reference` over every primitive by the tests, so that two independent readings of the semantics
agree before either judges a kernel.

`Mode.NATIVE` rounds after each primitive to the node's own type, f16 and bf16 arithmetic being done in float32.

`Mode.PLAIN` is NATIVE with the error of a *left-to-right* evaluation put in: BLAS sums in blocks and is more
precise than an honest sequential loop, so as a yardstick it would reject one. To each sum, window sum, product of
matrices or convolution over K terms, Gaussian noise of `0.31 * sqrt(K) * u` times the RMS of the result is added
(that formula holds within 8 % for K = 16..16,384), and to each function that is not rounded exactly, noise of its
ULP bound. The noise then passes through the rest of the graph as real rounding errors would. One such evaluation
costs one float32 run of the problem, where a true left-to-right simulation of a convolution would cost minutes.

What the semantics leave undefined (integer division by zero, casts of NaN to integers, shifts out of range) marks
every value that depends on it, and such outputs are not judged on that input set.
"""

# ruff: noqa: ARG001 - every evaluator of the table has the same signature

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from weft.generate.library.execute import TORCH_DTYPE
from weft.generate.library.opaque_aten import has_float64, input_dtypes, run_aten
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, Node
from weft.ir.opaque import embedding_table
from weft.ir.prims import COMPARISONS, Prim
from weft.ir.types import FLOAT8, DType
from weft.tune.bulk import split
from weft.tune.shifts import asks_for_empty_rows
from weft.tune.tolerance import FLIPS_COMPARE, FLIPS_STEP, FLOAT8_SUM, ORDER_FACTOR, TOLERANCES, ULPS

T = torch.Tensor


class Mode(Enum):
    """How floats are held; see the module."""

    PRECISE = auto()
    NATIVE = auto()
    PLAIN = auto()


@dataclass(slots=True)
class _State:
    mode: Mode
    noise: torch.Generator
    undecided: float = 0.0
    """Units by which operands of comparisons are off."""
    overflow: float = 1.0
    """Times the largest 16-bit float: what is beyond it becomes infinite."""
    padded: bool = True
    """Infinite weights are multiplied with the zeros of a convolution's padding."""
    undefined: bool = False
    """Set by a primitive that met an undefined case."""
    call: tuple[str, tuple[int, ...]] = ("", ())
    """Payload and operands of the last call of a framework's operator; its results are nodes one after another."""
    results: Sequence[T] = ()

    def count(self, start: int, end: int) -> T:
        """Whole numbers from `start` to before `end`."""
        return torch.arange(start, end, device=self.noise.device)

    def held(self, dtype: DType) -> torch.dtype:
        """The torch type that holds values of this element type."""
        if not dtype.is_float:
            return TORCH_DTYPE[dtype]
        return torch.float64 if self.mode is Mode.PRECISE or dtype is DType.F64 else torch.float32

    def rounded(self, x: T, dtype: DType) -> T:
        """Rounded once to the element type, in the type that holds it."""
        held = self.held(dtype)
        if self.mode is not Mode.PRECISE and dtype.is_float and dtype.itemsize < 4:
            return _overflown(x, narrowed(x, dtype).to(held), dtype, self.overflow)
        return x if x.dtype == held else x.to(held)


Eval = Callable[[_State, Node, list[T]], T]


def narrowed(x: T, dtype: DType) -> T:
    """In an element type; casts to e4m3 saturate in any version of torch."""
    limit = FLOAT8[dtype].greatest if dtype is DType.F8E4M3 else math.inf
    return (x.clamp(-limit, limit) if limit < math.inf else x).to(TORCH_DTYPE[dtype])


def _overflown(x: T, rounded: T, dtype: DType, overflow: float) -> T:
    """`rounded`, as if values overflowed at another multiple of the largest number of a 16-bit float."""
    if overflow == 1.0 or dtype.itemsize == 1:  # 8-bit floats saturate
        return rounded
    largest = torch.finfo(TORCH_DTYPE[dtype]).max
    if overflow < 1.0:
        return torch.where(x.abs() > overflow * largest, torch.copysign(torch.full_like(x, math.inf), x), rounded)
    spared = torch.isinf(rounded) & (x.abs() <= overflow * largest)
    return torch.where(spared, torch.copysign(torch.full_like(x, largest), x), rounded)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Outputs of one run of the graph."""

    outputs: tuple[T, ...]
    """Row-major, in the types of `_State.held`."""
    undefined: tuple[bool, ...]
    """Outputs that depend on an undefined case."""
    exact: tuple[bool, ...]
    """Outputs that any order of evaluation must give bit for bit; only found in PRECISE mode."""


def evaluate(
    graph: Graph,
    inputs: Sequence[T],
    mode: Mode,
    *,
    seed: int,
    exactness: bool = True,
    device: torch.device | str = "cpu",
    undecided: float = 0.0,
    scaled: Collection[int] = (),
    overflow: float = 1.0,
    padded: bool = True,
    calls: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Evaluation | Declined:
    """Run a graph. `inputs` have the graph's own element types and shapes; `seed` is that of the noise of PLAIN.

    `undecided`: units of rounding of their RMS by which operands of comparisons are off in PLAIN, evenly spread.
    `scaled`: differences of which a right kernel may take a multiple, that of each operand by itself (the exponents of
    powers of two): off by a unit of both operands in PLAIN, evenly spread.

    `overflow`: f16 and bf16 overflow at so many times their largest number; not in PRECISE, where nothing is rounded.
    `padded`: infinite and NaN weights of a convolution are multiplied with the zeros of its padding.

    `exactness`: find out which outputs are exact (PRECISE mode only; without it none is). `device`: that of the inputs;
    everything is computed there. On a GPU the caller sees to it that products of f32 are products of f32. `check` is
    called before each primitive: what it raises ends the run.

    `calls`: operators of our own that are written out in float64 are called. Their kernels are right for finite
    operands alone.

    Declined: the graph has opaque primitives, which have no meaning outside their framework.
    Cost: one run of each primitive through torch; intermediate values are dropped after their last use.
    """
    if any(n.prim is Prim.OPAQUE and not (calls and _is_own(graph, n)) for n in graph.nodes):
        return Declined("an opaque primitive has no reference")
    state = _State(mode, torch.Generator(device).manual_seed(seed), undecided, overflow, padded)
    live = _live(graph)
    uses = [0] * len(graph)
    for i in live:
        for j in graph.nodes[i].inputs:
            uses[j] += 1
    for i in graph.outputs:
        uses[i] += 1
    results = set(graph.outputs)
    late = _read_late(graph) if mode is Mode.PRECISE and torch.device(device).type == "cpu" else frozenset()
    values: dict[int, T] = {}
    undefined: dict[int, bool] = {}
    exact: dict[int, bool] = {}
    for i in live:
        check()
        node = graph.nodes[i]
        state.undefined = False
        if node.prim is Prim.CONSTANT and i not in results:
            continue  # in the reference's type where it is read: all weights at once may be too much
        for j in node.inputs:
            if j not in values:
                values[j] = _weight(graph, j, state, device)
                undefined[j], exact[j] = False, True
        operands = [values[j] for j in node.inputs]
        if isinstance(node.attrs, a.InputAttrs):
            given = inputs[node.attrs.index]
            values[i] = given if i in late else given.to(state.held(node.type.dtype))
        elif isinstance(node.attrs, a.ConstantAttrs):
            values[i] = _weight(graph, i, state, device)
        else:
            if state.undecided and mode is Mode.PLAIN and node.prim in COMPARISONS:
                operands = [_shaken(state, graph, j, x) for j, x in zip(node.inputs, operands, strict=True)]
            values[i] = state.rounded(TABLE[node.prim](state, node, operands), node.type.dtype)
            if mode is Mode.PLAIN and node.type.dtype.is_float:
                values[i] = _noisy(state, node, operands, values[i], _of_float8(graph, node))
                if i in scaled:
                    values[i] = _scaled(state, node, operands, values[i])
        undefined[i] = state.undefined or any(undefined[j] for j in node.inputs)
        if mode is Mode.PRECISE and exactness:
            exact[i] = all(exact[j] for j in node.inputs) and _is_exact(node, operands, values[i])
        for j in node.inputs:
            uses[j] -= 1
            if uses[j] == 0:
                values.pop(j)
    return Evaluation(
        tuple(values[i] for i in graph.outputs),
        tuple(undefined[i] for i in graph.outputs),
        tuple(exact.get(i, False) for i in graph.outputs),
    )


def _weight(graph: Graph, i: int, state: _State, device: torch.device | str) -> T:
    return torch.tensor(graph.constant(i)).to(device).to(state.held(graph.type_of(i).dtype))


LATE = 1 << 22
"""Elements from which on an input is taken to float64 in parts that stay in a core's cache, where it is read."""


def _read_late(graph: Graph) -> frozenset[int]:
    """Large inputs that are read as matrices on the right of products, or as tables, alone."""
    found = {i for i in graph.inputs if graph.type_of(i).size >= LATE and graph.type_of(i).dtype.is_float}
    found -= set(graph.outputs)
    for node in graph.nodes if found else ():
        for place, i in enumerate(node.inputs):
            table = node.prim is Prim.GATHER and place == 0
            matrix = node.prim is Prim.MATMUL and place == 1 and len(graph.type_of(i).shape) == 2
            if not (table or matrix):
                found.discard(i)
    return frozenset(found)


def _live(graph: Graph) -> list[int]:
    needed = set(graph.outputs)
    for i in range(len(graph) - 1, -1, -1):
        if i in needed:
            needed.update(graph.nodes[i].inputs)
    return sorted(needed)


# --- where order cannot matter ------------------------------------------------------------------------------

_ROUNDED_ONCE = frozenset({Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.SQRT, Prim.CAST, Prim.IOTA})
_SUMS = frozenset({Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.WINDOW_SUM, Prim.SCAN, Prim.MATMUL, Prim.CONV})


def _is_exact(node: Node, operands: Sequence[T], value: T) -> bool:
    """Every order of evaluation gives this value: representable results, sums below the width of the mantissa."""
    dtype = node.type.dtype
    if not dtype.is_float or node.prim in (Prim.INPUT, Prim.CONSTANT):
        return True
    if node.prim in ULPS or node.prim is Prim.OPAQUE:
        return False
    if node.prim in _ROUNDED_ONCE:
        return _representable(value, dtype)
    if node.prim not in _SUMS:
        return True  # moves or selects values
    if _scans(node, "linear"):
        return False
    mantissa = -math.log2(TOLERANCES[dtype.accumulator].unit)
    bound = float(terms(node, operands))
    for x in operands:
        largest = _largest(x)
        q = next((q for q in (0, 4, 8) if math.isfinite(largest) and _integral(x, q, largest)), None)
        if q is None:
            return False
        if node.prim is Prim.REDUCE_PROD or _scans(node, "prod"):
            largest = largest ** terms(node, operands) if largest <= 16 else math.inf
        bound *= max(largest, 1.0) * 2.0**q
    return bound < 2.0**mantissa and _representable(value, dtype)


def _pieces(x: T) -> Iterable[T]:
    """A tensor's elements in parts that stay in a core's cache (see `tune.bulk`); what is broadcast, once."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return split(x)


def _representable(value: T, dtype: DType) -> bool:
    """Does the element type hold every value? NaN is none: its bits are anyone's."""
    # a copy even in f64: on a GPU torch takes a tensor to equal itself, NaN and all
    return all(torch.equal(p, p.to(TORCH_DTYPE[dtype], copy=True).to(p.dtype)) for p in _pieces(value))


def _largest(x: T) -> float:
    """The largest magnitude, NaN or infinite where a value is; 0 of nothing."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high)) if float(low) == float(low) else math.nan


def _integral(x: T, q: int, largest: float) -> bool:
    """Whether all are whole multiples of 2^-q; they are finite."""
    # through integers rather than `round`, which wakes the thread team for every piece
    whole = torch.int32 if largest * 2.0**q < 2.0**31 else torch.int64
    scaled = (p * 2.0**q if q else p for p in _pieces(x))
    return all(torch.equal(p, p.to(whole).to(p.dtype)) for p in scaled)


def terms(node: Node, operands: Sequence[T]) -> int:
    """K: how many terms each element of a sum, window, product or convolution adds up (1 for other primitives)."""
    if isinstance(node.attrs, a.ReduceAttrs):
        return math.prod(operands[0].shape[x] for x in node.attrs.axes)
    if isinstance(node.attrs, a.ScanAttrs):
        return int(operands[0].shape[node.attrs.axis])
    if isinstance(node.attrs, a.WindowAttrs):
        return math.prod(node.attrs.kernel)
    if isinstance(node.attrs, a.ConvAttrs):
        w = operands[1].shape
        return math.prod(w[2:]) * (w[0] // node.attrs.groups if node.attrs.transposed else w[1])
    return int(operands[0].shape[-1]) if node.prim is Prim.MATMUL else 1


def _scans(node: Node, kind: a.ScanKind) -> bool:
    return isinstance(node.attrs, a.ScanAttrs) and node.attrs.kind == kind


def rms(x: T) -> float:
    """Root of the mean square of the finite elements, in float64; 0 without any."""
    square, count = 0.0, 0
    for piece in split(x):
        values = piece.double()
        part = float(torch.linalg.vector_norm(values))
        if not math.isfinite(part):
            values = values[torch.isfinite(values)]
            part = float(torch.linalg.vector_norm(values))
        square, count = square + part * part, count + values.numel()
    return math.sqrt(square / count) if count else 0.0


def _of_float8(graph: Graph, node: Node) -> bool:
    """A product whose operands hold values of 8-bit floats, which tensor cores add up in less than f32."""
    return node.prim in (Prim.MATMUL, Prim.CONV) and all(_from_float8(graph, i) for i in node.inputs)


def _from_float8(graph: Graph, i: int) -> bool:
    while graph.nodes[i].prim in _RENAMING or graph.nodes[i].prim is Prim.CAST:
        if graph.type_of(i).dtype.is_float8:
            return True
        i = graph.nodes[i].inputs[0]
    return graph.type_of(i).dtype.is_float8


_RENAMING = frozenset({Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST, Prim.SLICE})


def _shaken(state: _State, graph: Graph, i: int, x: T) -> T:
    """An operand of a comparison, off by some units of the coarsest type that it came through."""
    unit = TOLERANCES[graph.type_of(i).dtype].unit
    while graph.nodes[i].prim in _RENAMING or graph.nodes[i].prim is Prim.CAST:
        i = graph.nodes[i].inputs[0]
        unit = max(unit, TOLERANCES[graph.type_of(i).dtype].unit)
    if not unit or graph.nodes[i].prim is Prim.CONSTANT or not x.is_floating_point():
        return x
    noise = torch.rand(x.shape, generator=state.noise, dtype=x.dtype, device=x.device).mul_(2).sub_(1)
    return noise.mul_(state.undecided * unit * rms(x)).add_(x)


def _scaled(state: _State, node: Node, operands: Sequence[T], value: T) -> T:
    """A difference whose operands were rounded once more each, as multiples of them are."""
    unit = TOLERANCES[node.type.dtype.accumulator].unit
    noise = torch.rand(value.shape, generator=state.noise, dtype=value.dtype, device=value.device).mul_(2).sub_(1)
    noisy = state.rounded(noise.mul_(operands[0].abs() + operands[1].abs()).mul_(unit).add_(value), node.type.dtype)
    return torch.where(torch.isfinite(noisy), noisy, value)


def _noisy(state: _State, node: Node, operands: Sequence[T], value: T, float8: bool) -> T:
    unit = TOLERANCES[node.type.dtype.accumulator].unit
    noise: T
    if node.prim in _SUMS and value.numel():
        k = terms(node, operands)
        if k < 2:
            return value
        size = ORDER_FACTOR * math.sqrt(k) * unit + (FLOAT8_SUM if float8 else 0.0)
        noise = torch.randn(value.shape, generator=state.noise, dtype=value.dtype, device=value.device)
        if node.prim is Prim.REDUCE_PROD or _scans(node, "prod"):
            noise = noise.mul_(value).mul_(size)
        elif _scans(node, "linear"):
            # what cancels, and what a factor shrinks, was as large as this before
            noise = noise.mul_(_scan(state, node, [x.abs() for x in operands])).mul_(size)
        else:
            # a sum that cancels has partial sums far larger than itself
            walk = 0.5 * math.sqrt(k) * math.prod(rms(x) for x in operands)
            noise = noise.mul_(size * max(rms(value), walk))
    elif node.prim in ULPS and value.numel():
        uniform = torch.rand(value.shape, generator=state.noise, dtype=value.dtype, device=value.device).mul_(2).sub_(1)
        noise = uniform.mul_(value).mul_(ULPS[node.prim] * unit)
    else:
        return value
    noisy = state.rounded(noise.add_(value), node.type.dtype)
    finite = torch.isfinite(value)
    return noisy if bool(finite.all()) else torch.where(finite, noisy, value)


# --- where rounding decides ---------------------------------------------------------------------------------

_STEPS = frozenset(
    {Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.SIGN, Prim.ARGMAX, Prim.ARGMIN, Prim.MOD, Prim.FMOD}
)
_ROUNDING = frozenset(ULPS) | _ROUNDED_ONCE | _SUMS | {Prim.OPAQUE}


def decisions(graph: Graph) -> tuple[tuple[bool, float], ...]:
    """Per output: is it free of rounding (so compared exactly), and the share of elements that may flip.

    A comparison, step function or cast to integer of a *rounded* value may fall either way near its threshold,
    but not one that asks whether anything is in a row of a softmax.
    """
    settled = asks_for_empty_rows(graph)
    rounded = [False] * len(graph)
    share = [0.0] * len(graph)
    for i, node in enumerate(graph.nodes):
        before = any(rounded[j] for j in node.inputs)
        own = 0.0
        if before and node.prim in COMPARISONS and i not in settled:
            own = FLIPS_COMPARE
        to_integer = isinstance(node.attrs, a.CastAttrs) and not node.attrs.dtype.is_float
        if before and (node.prim in _STEPS or to_integer):
            own = FLIPS_STEP
        share[i] = max([own, *(share[j] for j in node.inputs)])
        is_float = node.type.dtype.is_float
        rounded[i] = is_float and (before or (node.prim in _ROUNDING and not _is_free(node)))
    return tuple((not rounded[i], share[i]) for i in graph.outputs)


def _is_free(node: Node) -> bool:
    """An IOTA is counted, not rounded, up to the width of the mantissa."""
    return isinstance(node.attrs, a.IotaAttrs) and max(node.attrs.shape, default=0) <= 2**8


# --- the table ----------------------------------------------------------------------------------------------


def _unary(function: Callable[[T], T]) -> Eval:
    return lambda s, n, x: function(x[0])


def _binary(function: Callable[[T, T], T]) -> Eval:
    return lambda s, n, x: function(x[0], x[1])


def _attrs(kind: type, node: Node) -> a.Attrs:
    if not isinstance(node.attrs, kind):
        raise TypeError(f"{node.prim.value} with {type(node.attrs).__name__}")
    return node.attrs


def _not(s: _State, n: Node, x: list[T]) -> T:
    return ~x[0]


def _cast(s: _State, n: Node, x: list[T]) -> T:
    dtype = n.type.dtype
    source = x[0]
    if dtype is DType.BOOL:
        return source != 0
    if source.is_floating_point() and dtype.is_integer:
        info = torch.iinfo(TORCH_DTYPE[dtype])
        whole = source.trunc()
        inside = (whole >= info.min) & (whole <= (info.max if info.bits < 64 else 2.0**63 - 1024))
        if not bool(inside.all()):
            s.undefined = True
            whole = torch.where(inside, whole, torch.zeros_like(whole))
        return whole.to(torch.int64).to(TORCH_DTYPE[dtype])
    return source.to(s.held(dtype))


def _safe_divisor(s: _State, divisor: T) -> T:
    if divisor.is_floating_point():
        return divisor
    zero = divisor == 0
    if bool(zero.any()):
        s.undefined = True
        return torch.where(zero, torch.ones_like(divisor), divisor)
    return divisor


def _div(s: _State, n: Node, x: list[T]) -> T:
    if x[0].is_floating_point():
        return x[0] / x[1]
    d = _safe_divisor(s, x[1])
    least = x[0] == torch.iinfo(d.dtype).min
    if bool((least & (d == -1)).any()):  # the quotient does not fit, and the instruction traps
        minus = d == -1
        quotient = torch.div(x[0], torch.where(minus, torch.ones_like(d), d), rounding_mode="trunc")
        return torch.where(minus, -x[0], quotient)
    return torch.div(x[0], d, rounding_mode="trunc")


def _mod(s: _State, n: Node, x: list[T]) -> T:
    return torch.remainder(x[0], _safe_divisor(s, x[1]))


def _fmod(s: _State, n: Node, x: list[T]) -> T:
    return torch.fmod(x[0], _safe_divisor(s, x[1]))


def _pow(s: _State, n: Node, x: list[T]) -> T:
    if not x[0].is_floating_point() and bool((x[1] < 0).any()):
        s.undefined = True
        return torch.pow(x[0], x[1].clamp(min=0))
    return torch.pow(x[0], x[1])


def _shift(left: bool) -> Eval:
    def run(s: _State, n: Node, x: list[T]) -> T:
        bits = torch.iinfo(x[0].dtype).bits
        inside = (x[1] >= 0) & (x[1] < bits)
        if not bool(inside.all()):
            s.undefined = True
        by = torch.where(inside, x[1], torch.zeros_like(x[1]))
        return torch.bitwise_left_shift(x[0], by) if left else torch.bitwise_right_shift(x[0], by)

    return run


def _max(x: T, y: T) -> T:
    return x | y if x.dtype == torch.bool else torch.maximum(x, y)


def _min(x: T, y: T) -> T:
    return x & y if x.dtype == torch.bool else torch.minimum(x, y)


def _broadcast(s: _State, n: Node, x: list[T]) -> T:
    return x[0].expand(n.type.shape)


def _reshape(s: _State, n: Node, x: list[T]) -> T:
    return x[0].reshape(n.type.shape)


def _transpose(s: _State, n: Node, x: list[T]) -> T:
    return x[0].permute(cast("a.TransposeAttrs", _attrs(a.TransposeAttrs, n)).perm)


def _slice(s: _State, n: Node, x: list[T]) -> T:
    attrs = cast("a.SliceAttrs", _attrs(a.SliceAttrs, n))
    out = x[0]
    for dim, (start, size, step) in enumerate(zip(attrs.starts, attrs.sizes, attrs.steps, strict=True)):
        if (start, size, step) != (0, out.shape[dim], 1):
            index = s.count(0, size) * step + start
            out = out.index_select(dim, index)
    return out


def _concat(s: _State, n: Node, x: list[T]) -> T:
    return torch.cat(x, dim=cast("a.ConcatAttrs", _attrs(a.ConcatAttrs, n)).axis)


def _pad(s: _State, n: Node, x: list[T]) -> T:
    p = cast("a.PadAttrs", _attrs(a.PadAttrs, n))
    out = x[0]
    if p.mode == "constant":
        flat = [k for lo, hi in zip(reversed(p.lo), reversed(p.hi), strict=True) for k in (lo, hi)]
        value: float | bool = p.value
        if not out.is_floating_point():
            value = bool(p.value) if out.dtype == torch.bool else int(p.value)
        else:
            value = float(torch.tensor(p.value, dtype=TORCH_DTYPE[n.type.dtype]).double())
        return F.pad(out, flat, value=value) if flat else out
    for dim, (lo, hi) in enumerate(zip(p.lo, p.hi, strict=True)):
        if lo == hi == 0:
            continue  # nothing to add along this dimension
        size = out.shape[dim]
        index = s.count(-lo, size + hi)
        if p.mode == "edge":
            index = index.clamp(0, size - 1)
        else:
            index = index.abs()
            index = torch.where(index >= size, 2 * (size - 1) - index, index)
        out = out.index_select(dim, index)
    return out


def _gather(s: _State, n: Node, x: list[T]) -> T:
    axis = cast("a.GatherAttrs", _attrs(a.GatherAttrs, n)).axis
    data, index = x
    if index.numel() == 0:
        return data.new_zeros(n.type.shape)
    flat = index.reshape(-1).to(torch.int64).clamp(0, data.shape[axis] - 1)
    return data.index_select(axis, flat).reshape(n.type.shape)


def _take_along(s: _State, n: Node, x: list[T]) -> T:
    axis = cast("a.GatherAttrs", _attrs(a.GatherAttrs, n)).axis
    data, index = x
    if index.numel() == 0:
        return data.new_zeros(n.type.shape)
    return torch.gather(data, axis, index.to(torch.int64).clamp(0, data.shape[axis] - 1))


def _iota(s: _State, n: Node, x: list[T]) -> T:
    attrs = cast("a.IotaAttrs", _attrs(a.IotaAttrs, n))
    shape = [1] * len(attrs.shape)
    shape[attrs.axis] = attrs.shape[attrs.axis]
    counted = s.count(0, attrs.shape[attrs.axis])
    return counted.to(s.held(attrs.dtype)).reshape(shape).expand(attrs.shape)


def _least(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _reduce_sum(s: _State, n: Node, x: list[T]) -> T:
    axes = cast("a.ReduceAttrs", _attrs(a.ReduceAttrs, n)).axes
    return x[0].sum(dim=axes, keepdim=True, dtype=x[0].dtype) if axes else x[0]


def _reduce_prod(s: _State, n: Node, x: list[T]) -> T:
    out = x[0]
    for axis in cast("a.ReduceAttrs", _attrs(a.ReduceAttrs, n)).axes:
        out = out.prod(dim=axis, keepdim=True, dtype=out.dtype)
    return out


def _extreme(largest: bool) -> Eval:
    def run(s: _State, n: Node, x: list[T]) -> T:
        axes = cast("a.ReduceAttrs", _attrs(a.ReduceAttrs, n)).axes
        if not axes:
            return x[0]
        if x[0].numel() == 0:
            fill = (_least if largest else _greatest)(x[0].dtype)
            return torch.full(n.type.shape, fill, dtype=x[0].dtype, device=x[0].device)
        return torch.amax(x[0], axes, keepdim=True) if largest else torch.amin(x[0], axes, keepdim=True)

    return run


def _arg(largest: bool) -> Eval:
    def run(s: _State, n: Node, x: list[T]) -> T:
        axis = cast("a.ArgAttrs", _attrs(a.ArgAttrs, n)).axis
        data = x[0]
        if data.dtype == torch.bool:
            data = data.to(torch.int8)
        best = data.amax(axis, keepdim=True) if largest else data.amin(axis, keepdim=True)
        hit = data == best
        if data.is_floating_point():
            hit = hit | torch.isnan(data)  # the extreme is NaN where there is one, and equals nothing
            hit = torch.where(torch.isnan(best), torch.isnan(data), hit)
        size = data.shape[axis]
        shape = [1] * data.dim()
        shape[axis] = size
        position = s.count(0, size).reshape(shape).expand(data.shape)
        return torch.where(hit, position, torch.full_like(position, size)).amin(axis, keepdim=True)

    return run


def _windows(s: _State, n: Node, x: T, fill: float, join: Callable[[T, T], T]) -> T:
    """Windows are joined one dimension at a time: both sums and maxima separate."""
    w = cast("a.WindowAttrs", _attrs(a.WindowAttrs, n))
    k = len(w.kernel)
    flat = [p for lo, hi in zip(reversed(w.pads_lo), reversed(w.pads_hi), strict=True) for p in (lo, hi)]
    out = F.pad(x, flat, value=fill) if any(flat) else x
    for j in range(k):
        dim = x.dim() - k + j
        size, stride, step = n.type.shape[dim], w.strides[j], w.dilations[j]
        total: T | None = None
        for tap in range(w.kernel[j]):
            start = tap * step
            part = out.narrow(dim, start, (size - 1) * stride + 1) if size else out.narrow(dim, 0, 0)
            part = part[(slice(None),) * dim + (slice(None, None, stride),)]
            total = part if total is None else join(total, part)
        out = total if total is not None else out
    return out


def _window_sum(s: _State, n: Node, x: list[T]) -> T:
    return _windows(s, n, x[0], 0, torch.add)


def _window_max(s: _State, n: Node, x: list[T]) -> T:
    return _windows(s, n, x[0], _least(x[0].dtype), torch.maximum)


def _operands(x: list[T]) -> list[T]:
    """Of a product, as the tensor cores read them where TF32 is allowed.

    The framework rounds in some shapes only; what a kernel may do must not depend on that.
    """
    if x[0].is_cuda and x[0].dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return [truncated_to_tf32(y) for y in x]
    return x


def truncated_to_tf32(x: T) -> T:
    """f32 -> f32 of any shape without the 13 lowest bits, which tensor cores do not read."""
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def _matmul(s: _State, n: Node, x: list[T]) -> T:
    if x[0].shape[-1] == 0:
        return x[0].new_zeros(n.type.shape)
    if x[0].dtype != x[1].dtype:
        return _product_in_parts(x[0], x[1])
    if x[0].is_floating_point() or x[0].is_cpu:
        return torch.matmul(*_operands(x))
    # GPUs have no product of integer matrices: float64 where it is exact, else the CPU's
    if math.prod(float(y.abs().max()) for y in x) * x[0].shape[-1] < 2.0**53:
        return torch.matmul(x[0].double(), x[1].double()).to(torch.int64).to(x[0].dtype)
    return torch.matmul(x[0].cpu(), x[1].cpu()).to(x[0].device)


def _product_in_parts(x: T, y: T) -> T:
    """(..., m, k) of float64 times (k, n) of a narrower type, see `LATE`.

    Columns at a time where there are more of them than rows: with rows the whole product would be added to for each
    part.
    """
    k, n = y.shape
    if n > k:
        step = max(1, (LATE >> 2) // k)
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
        held = torch.empty(k * min(step, n), dtype=x.dtype)
        for at in range(0, n, step):
            out[..., at : at + step] = torch.matmul(x, _widened(y[:, at : at + step], held))
        return out
    step = max(1, (LATE >> 4) // n)
    out = torch.zeros((*x.shape[:-1], n), dtype=x.dtype)
    held = torch.empty(n * min(step, k), dtype=x.dtype)
    for at in range(0, k, step):
        out += torch.matmul(x[..., at : at + step], _widened(y[at : at + step], held))
    return out


def _widened(part: T, held: T) -> T:
    """In the memory of `held`, by one thread.

    Threads that wait for each other at every part took 6 ms for each on a busy machine, where one takes 0.2 ms.
    """
    out = held[: part.numel()].view(part.shape)
    if part.dtype is torch.bfloat16 or part.element_size() == 1:  # of no type of NumPy's
        return out.copy_(part)
    np.copyto(out.numpy(), part.numpy())
    return out


_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_T = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _conv(s: _State, n: Node, x: list[T]) -> T:
    c = cast("a.ConvAttrs", _attrs(a.ConvAttrs, n))
    data, weight = _operands(x)
    if not data.is_floating_point():
        # torch has no integer convolution; products of split halves would be exact, float64 is where it fits
        largest = float(data.abs().max() if data.numel() else 0) * float(weight.abs().max() if weight.numel() else 0)
        if largest * terms(n, x) >= 2.0**53:
            s.undefined = True
        exact = _conv(s, n, [data.double(), weight.double()])
        return exact.to(torch.int64).to(data.dtype)
    if n.type.size == 0 or 0 in data.shape or 0 in weight.shape:
        return data.new_zeros(n.type.shape)
    k = len(c.strides)
    meets = not c.transposed and any(c.pads_lo + c.pads_hi) and not torch.isfinite(weight).all()
    if meets and not s.padded:
        return _without_padding(c, data, weight, n.type.shape)
    if not c.transposed and weight.shape[1] == 1 and data.dtype == torch.float64:
        return _depthwise(n, c, data, weight)
    if not c.transposed:
        if data.dtype == torch.float64 and data.is_cpu and (rows := _strip(c, data, weight, n.type.shape)):
            return _in_strips(c, data, weight, n.type.shape, rows)
        if c.pads_lo == c.pads_hi and not meets:
            return _CONV[k - 1](data, weight, None, c.strides, c.pads_lo, c.dilations, c.groups)
        flat = [p for lo, hi in zip(reversed(c.pads_lo), reversed(c.pads_hi), strict=True) for p in (lo, hi)]
        return _CONV[k - 1](F.pad(data, flat), weight, None, c.strides, 0, c.dilations, c.groups)
    out = _CONV_T[k - 1](data, weight, None, c.strides, 0, 0, c.groups, c.dilations)
    for j in range(k):
        dim, size = 2 + j, n.type.shape[2 + j]
        beyond = c.pads_lo[j] + size - out.shape[dim]
        if beyond > 0:
            flat = [0, 0] * (k - 1 - j) + [0, beyond]
            out = F.pad(out, flat)
        out = out.narrow(dim, c.pads_lo[j], size)
    return out


def _without_padding(c: a.ConvAttrs, data: T, weight: T, shape: tuple[int, ...]) -> T:
    """One product per tap with what lies inside the operand.

    Whether an infinite weight is multiplied with the zeros of the padding differs between a framework's own kernels.
    """
    k = len(c.strides)
    out = data.new_zeros(shape)
    for tap in itertools.product(*(range(t) for t in weight.shape[2:])):
        part, place, factor = data, out, weight
        for j, (t, step) in enumerate(zip(tap, c.strides, strict=True)):
            start = t * c.dilations[j] - c.pads_lo[j]
            lo = max(0, -(start // step))
            hi = min(shape[2 + j], (data.shape[2 + j] - 1 - start) // step + 1)
            if lo >= hi:
                break
            inside = (slice(None),) * (2 + j)
            part = part[(*inside, slice(start + lo * step, start + (hi - 1) * step + 1, step))]
            place = place.narrow(2 + j, lo, hi - lo)
            factor = factor.narrow(2 + j, t, 1)
        else:
            place += _CONV[k - 1](part, factor, None, 1, 0, 1, c.groups)
    return out


WINDOWS, STRIP = 16 << 20, 8 << 20
"""Bytes of windows from which on a convolution is done in strips, and of those of a strip: the framework writes them
all down before it multiplies them, and what fits no cache is three times as slow."""


def _strip(c: a.ConvAttrs, data: T, weight: T, shape: tuple[int, ...]) -> int:
    """Rows of the result that are done at a time; 0: all at once is as good."""
    if len(c.strides) != 2 or data.shape[0] != 1 or c.groups != 1:
        return 0
    row = math.prod(weight.shape[1:]) * shape[3] * 8
    rows = max(1, max(STRIP, weight.numel() * 8) // max(row, 1))
    return 0 if row * shape[2] < WINDOWS or 2 * rows > shape[2] else rows


def _in_strips(c: a.ConvAttrs, data: T, weight: T, shape: tuple[int, ...], rows: int) -> T:
    flat = [p for lo, hi in zip(reversed(c.pads_lo), reversed(c.pads_hi), strict=True) for p in (lo, hi)]
    padded = F.pad(data, flat) if any(flat) else data
    out = data.new_empty(shape)
    high = (weight.shape[2] - 1) * c.dilations[0] + 1
    for start in range(0, shape[2], rows):
        count = min(rows, shape[2] - start)
        part = padded.narrow(2, start * c.strides[0], (count - 1) * c.strides[0] + high)
        out.narrow(2, start, count).copy_(F.conv2d(part, weight, None, c.strides, 0, c.dilations))
    return out


def _depthwise(n: Node, c: a.ConvAttrs, data: T, weight: T) -> T:
    """One product per tap: in float64 the framework would take the groups one by one."""
    flat = [p for lo, hi in zip(reversed(c.pads_lo), reversed(c.pads_hi), strict=True) for p in (lo, hi)]
    padded = F.pad(data, flat) if any(flat) else data
    per_group = weight.shape[0] // c.groups
    if per_group > 1:
        padded = padded.repeat_interleave(per_group, dim=1)
    sizes = n.type.shape[2:]
    out = data.new_zeros(n.type.shape)
    for tap in itertools.product(*(range(t) for t in weight.shape[2:])):
        starts = [t * d for t, d in zip(tap, c.dilations, strict=True)]
        part = padded
        for j, start in enumerate(starts):
            last = start + (sizes[j] - 1) * c.strides[j] + 1
            part = part.narrow(2 + j, start, last - start)[
                (slice(None),) * (2 + j) + (slice(None, None, c.strides[j]),)
            ]
        factor = weight.select(1, 0)
        for position in tap:
            factor = factor.select(1, position)
        out.addcmul_(part, factor.reshape(1, -1, *[1] * len(sizes)))
    return out


def moved(node: Node, x: T) -> T:
    """What a primitive that only moves elements makes of any tensor of its operand's shape."""
    return TABLE[node.prim](_State(Mode.NATIVE, torch.Generator(x.device)), node, [x])


def _scan(s: _State, n: Node, x: list[T]) -> T:
    at = n.attrs
    if not isinstance(at, a.ScanAttrs):
        raise TypeError(f"{n.prim.value} with {type(at).__name__}")
    moved = [v.movedim(at.axis, 0) for v in x]
    if at.reverse:
        moved = [v.flip(0) for v in moved]
    terms = moved[-1]
    out = torch.empty_like(terms)
    state = torch.full_like(terms[0], at.kind == "prod") if len(terms) else terms
    if at.kind == "linear":
        s.undefined |= any(bool(torch.isinf(v).any()) for v in (moved[0][1:], terms))
    for t in range(len(terms)):
        if at.exclusive:
            out[t] = state
        if at.kind == "sum":
            state = state + terms[t]
        elif at.kind == "prod":
            state = state * terms[t]
        else:
            state = torch.addcmul(terms[t], moved[0][t], state) if t else terms[t]
        if not at.exclusive:
            out[t] = state
    if at.kind == "linear":
        s.undefined |= bool((out.abs() > torch.finfo(TORCH_DTYPE[n.type.dtype.accumulator]).max).any())
    return (out.flip(0) if at.reverse else out).movedim(0, at.axis)


def _refuse(s: _State, n: Node, x: list[T]) -> T:
    raise TypeError(f"{n.prim.value} is not evaluated")


def calls_own(graph: Graph) -> bool:
    """Whether a graph has opaque primitives, all of which are results of operators that are written out in float64."""
    opaque = [n for n in graph.nodes if n.prim is Prim.OPAQUE]
    return bool(opaque) and all(_is_own(graph, n) for n in opaque)


def _is_own(graph: Graph, n: Node) -> bool:
    if not isinstance(n.attrs, a.OpaqueAttrs) or n.attrs.framework != "aten":
        return False
    sums = embedding_table(n.attrs) is not None  # the framework's own, which has no other meaning in float64
    return sums or has_float64(n.attrs.payload, [graph.type_of(i).shape for i in n.inputs])


def _called(s: _State, n: Node, x: list[T]) -> T:
    assert isinstance(n.attrs, a.OpaqueAttrs)
    if s.call != (call := (n.attrs.payload, n.inputs)):
        if s.mode is not Mode.PRECISE:  # what it rounds within depends on the types that it is given
            x = [y.to(TORCH_DTYPE[DType(t)]) for y, t in zip(x, input_dtypes(n.attrs.payload), strict=True)]
        s.call, s.results = call, run_aten(n.attrs.payload, x)
    return s.results[n.attrs.result].to(s.held(n.type.dtype))


def _sign(x: T) -> T:
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def _rsqrt(s: _State, n: Node, x: list[T]) -> T:
    return 1.0 / torch.sqrt(x[0])


TABLE: Mapping[Prim, Eval] = {
    Prim.INPUT: _refuse,
    Prim.CONSTANT: _refuse,
    Prim.OPAQUE: _called,
    Prim.NEG: _unary(torch.neg),
    Prim.ABS: _unary(torch.abs),
    Prim.SIGN: _unary(_sign),
    Prim.EXP: _unary(torch.exp),
    Prim.EXPM1: _unary(torch.expm1),
    Prim.LOG: _unary(torch.log),
    Prim.LOG1P: _unary(torch.log1p),
    Prim.SQRT: _unary(torch.sqrt),
    Prim.RSQRT: _rsqrt,
    Prim.RECIPROCAL: _unary(torch.reciprocal),
    Prim.ERF: _unary(torch.erf),
    Prim.TANH: _unary(torch.tanh),
    Prim.SIN: _unary(torch.sin),
    Prim.COS: _unary(torch.cos),
    Prim.TAN: _unary(torch.tan),
    Prim.ASIN: _unary(torch.asin),
    Prim.ACOS: _unary(torch.acos),
    Prim.ATAN: _unary(torch.atan),
    Prim.SINH: _unary(torch.sinh),
    Prim.COSH: _unary(torch.cosh),
    Prim.ASINH: _unary(torch.asinh),
    Prim.ACOSH: _unary(torch.acosh),
    Prim.ATANH: _unary(torch.atanh),
    Prim.FLOOR: _unary(torch.floor),
    Prim.CEIL: _unary(torch.ceil),
    Prim.TRUNC: _unary(torch.trunc),
    Prim.ROUND: _unary(torch.round),
    Prim.ISNAN: _unary(torch.isnan),
    Prim.ISINF: _unary(torch.isinf),
    Prim.NOT: _not,
    Prim.CAST: _cast,
    Prim.ADD: _binary(torch.add),
    Prim.SUB: _binary(torch.sub),
    Prim.MUL: _binary(torch.mul),
    Prim.DIV: _div,
    Prim.POW: _pow,
    Prim.MOD: _mod,
    Prim.FMOD: _fmod,
    Prim.ATAN2: _binary(torch.atan2),
    Prim.MAX: _binary(_max),
    Prim.MIN: _binary(_min),
    Prim.AND: _binary(torch.bitwise_and),
    Prim.OR: _binary(torch.bitwise_or),
    Prim.XOR: _binary(torch.bitwise_xor),
    Prim.SHL: _shift(left=True),
    Prim.SHR: _shift(left=False),
    Prim.EQ: _binary(torch.eq),
    Prim.NE: _binary(torch.ne),
    Prim.LT: _binary(torch.lt),
    Prim.LE: _binary(torch.le),
    Prim.GT: _binary(torch.gt),
    Prim.GE: _binary(torch.ge),
    Prim.SELECT: lambda s, n, x: torch.where(x[0], x[1], x[2]),
    Prim.BROADCAST: _broadcast,
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.PAD: _pad,
    Prim.GATHER: _gather,
    Prim.TAKE_ALONG: _take_along,
    Prim.IOTA: _iota,
    Prim.REDUCE_SUM: _reduce_sum,
    Prim.REDUCE_PROD: _reduce_prod,
    Prim.REDUCE_MAX: _extreme(largest=True),
    Prim.REDUCE_MIN: _extreme(largest=False),
    Prim.ARGMAX: _arg(largest=True),
    Prim.ARGMIN: _arg(largest=False),
    Prim.WINDOW_SUM: _window_sum,
    Prim.WINDOW_MAX: _window_max,
    Prim.SCAN: _scan,
    Prim.MATMUL: _matmul,
    Prim.CONV: _conv,
}
"""One torch expression per primitive; total over `Prim`."""
