"""Random torch programs, each from one number, with inputs on which the answer is beyond doubt.

A program is a list of calls of the framework over tensors: data, not source, so that it can be shrunk; `text` is the
same as Python. While one is made, every line is run twice, in the program's own types and with every float as f64,
and a line stays only where the two agree well within gate B (`tune.tolerance`): what is ill-conditioned would say
nothing about a compiler. What decides on values (comparisons, argmax, rounding) stays where no rounding error of its
operands could decide otherwise.
"""

from __future__ import annotations

import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from weft.ir.types import DType
from weft.tune.tolerance import TOLERANCES, gate_b

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LAYOUTS = ("dense", "transposed", "strided", "expanded", "channels-last", "offset")
OURS = {
    torch.float64: DType.F64, torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16,
    torch.int64: DType.I64, torch.int32: DType.I32, torch.int16: DType.I16, torch.int8: DType.I8,
    torch.uint8: DType.U8, torch.bool: DType.BOOL,
}  # fmt: skip
LARGEST = 40_000
"""Elements of a value."""
HIGHEST = 300.0
"""Magnitude of floats: far from the overflow of f16."""
SAFETY = 4.0
"""A line stays where so many times its error would still pass gate B."""
JITTER = 16.0
"""Errors by which operands of a decision are moved to see whether it stands."""
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, -1.0)


@dataclass(frozen=True)
class Ref:
    """The value of an input (negative: ~k is input k) or of a line."""

    at: int

    @property
    def name(self) -> str:
        """As the text has it."""
        return f"v{self.at}" if self.at >= 0 else f"x{~self.at}"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Input:
    """One tensor that the program is given, or a weight of its module."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    layout: str = "dense"
    weight: bool = False
    below: int = 0
    """Integers lie in [0, below), as indices do; 0: small ones of both signs."""
    scale: float = 1.0
    special: bool = False
    """Some elements are NaN, infinite or a zero."""
    same: int = -1
    """The position of another input that is the same tensor; -1: none is."""


@dataclass(frozen=True)
class Line:
    """A call, by its dotted name, of which item `item` is kept (-1: it gives one tensor)."""

    call: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    item: int = -1


@dataclass(frozen=True)
class Program:
    """See the module."""

    seed: int
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[Ref, ...]

    @property
    def text(self) -> str:
        """As Python, for people."""
        given = []
        for k, x in enumerate(self.inputs):
            said = ["weight" if x.weight else "input", str(list(x.shape)), str(x.dtype), x.layout]
            said += [f"below {x.below}"] * (x.below > 0) + ["NaN and infinities"] * x.special
            given.append(f"# x{k}: {' '.join(said) if x.same < 0 else f'the same tensor as x{x.same}'}")
        body = [f"v{k} = {line_text(line)}" for k, line in enumerate(self.lines)]
        return "\n".join([*given, *body, f"return {', '.join(r.name for r in self.outputs)}"])


def _say(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({''.join(f'{_say(y)}, ' for y in x)})"
    return repr(x)


def line_text(line: Line) -> str:
    """The call as Python."""
    said = [_say(x) for x in line.args] + [f"{k}={_say(v)}" for k, v in line.kwargs]
    return f"{line.call}({', '.join(said)})" + (f"[{line.item}]" if line.item >= 0 else "")


LOADED_BYTES = 16


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **how: Any
) -> torch.Tensor:
    """The framework's, of operands that its kernels for GPUs can load.

    They load 16 bytes at a time and check that badly: f32 three elements behind the beginning of its memory, or at an
    odd stride between batches, is a misaligned access, after which nobody in the process can use the GPU.
    """
    return F.scaled_dot_product_attention(loadable(q), loadable(k), loadable(v), mask, **how)


def loadable(t: torch.Tensor) -> torch.Tensor:
    """t, or a dense copy where that matters; by offset and strides, which are the same while a program is traced."""
    steps = (s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)
    whole = all(x * t.element_size() % LOADED_BYTES == 0 for x in (t.storage_offset(), *steps))
    return t if whole else t.clone(memory_format=torch.contiguous_format)


_ROOTS: dict[str, Any] = {
    "torch": torch, "F": F, "operator": operator, "programs": SimpleNamespace(attention=attention),
}  # fmt: skip


def function(name: str) -> Callable[..., Any]:
    """What a dotted name stands for."""
    root, *path = name.split(".")
    found: Callable[..., Any] = reduce(getattr, path, _ROOTS[root])
    return found


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, tuple):
        return tuple(_mapped(y, change) for y in x)
    if isinstance(x, list):
        return [_mapped(y, change) for y in x]
    return change(x)


def refs(line: Line) -> list[Ref]:
    """The values that a line reads."""
    found: list[Ref] = []

    def see(x: Any) -> Any:
        if isinstance(x, Ref):
            found.append(x)
        return x

    _mapped([*line.args, *(v for _, v in line.kwargs)], see)
    return found


CREATORS = frozenset({"torch.arange"})
"""Functions that make a tensor out of nothing: they are told where."""
FIRST_INPUT = Ref(~0)


def evaluate(line: Line, value: Callable[[Ref], torch.Tensor], *, wide: bool) -> torch.Tensor:
    """The value of one line; `wide`: every float type that it names is f64."""

    def change(x: Any) -> Any:
        if isinstance(x, Ref):
            return value(x)
        return torch.float64 if wide and isinstance(x, torch.dtype) and x.is_floating_point else x

    args = [_mapped(x, change) for x in line.args]
    kwargs = {k: _mapped(v, change) for k, v in line.kwargs}
    if line.call in CREATORS:
        kwargs["device"] = value(FIRST_INPUT).device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a program does is its own affair
        found = function(line.call)(*args, **kwargs)
    found = found if line.item < 0 else found[line.item]
    assert isinstance(found, torch.Tensor)
    return found


def run(program: Program, given: Sequence[torch.Tensor], *, wide: bool = False) -> tuple[torch.Tensor, ...]:
    """Outputs of the framework's own operators, line by line."""
    values: list[torch.Tensor] = []

    def value(ref: Ref) -> torch.Tensor:
        return values[ref.at] if ref.at >= 0 else given[~ref.at]

    for line in program.lines:
        found = evaluate(line, value, wide=wide)
        values.append(found)
    return tuple(value(r) for r in program.outputs)


class Module(torch.nn.Module):
    """A program as a module: weights are buffers, the other inputs its arguments in order."""

    def __init__(self, program: Program, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._program = program
        for k, x in enumerate(program.inputs):
            if x.weight:
                self.register_buffer(f"x{k}", given[k])

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(given)
        whole = [getattr(self, f"x{k}") if x.weight else next(rest) for k, x in enumerate(self._program.inputs)]
        return run(self._program, whole)


def arguments(program: Program, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a module of the program is called with."""
    return [t for x, t in zip(program.inputs, given, strict=True) if not x.weight]


# --- inputs -------------------------------------------------------------------------------------------------


def draw(program: Program, device: str = "cpu") -> list[torch.Tensor]:
    """The inputs, each from its own number, in their layouts."""
    found: list[torch.Tensor] = []
    for x in program.inputs:
        found.append(found[x.same] if x.same >= 0 else draw_one(x, device))
    return found


def draw_one(x: Input, device: str = "cpu") -> torch.Tensor:
    """One input; the same values on every device."""
    g = torch.Generator().manual_seed(x.seed)
    if x.dtype is torch.bool:
        values = torch.randint(0, 2, x.shape, generator=g).bool()
    elif x.dtype.is_floating_point:
        values = (torch.randn(x.shape, generator=g, dtype=torch.float64) * x.scale).to(x.dtype)
        if x.special and values.numel():
            at = torch.randint(0, values.numel(), (min(3, values.numel()),), generator=g)
            picked = torch.randint(0, len(SPECIAL), at.shape, generator=g)
            values.view(-1)[at] = torch.tensor(SPECIAL)[picked].to(x.dtype)
    else:
        low, high = (0, x.below) if x.below else (0 if x.dtype is torch.uint8 else -5, 6)
        values = torch.randint(low, high, x.shape, generator=g).to(x.dtype)
    return laid_out(values.to(device), x.layout)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides; an expanded one holds the first of each along its first long dimension."""
    rank = values.ndim
    if layout == "transposed" and rank > 1:
        return values.permute(*reversed(range(rank))).contiguous().permute(*reversed(range(rank)))
    if layout == "strided" and rank:
        room = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 1), 7)
        room[..., 1::2] = values
        return room[..., 1::2]
    if layout == "expanded" and any(n > 1 for n in values.shape):
        axis = next(k for k, n in enumerate(values.shape) if n > 1)
        return values.narrow(axis, 0, 1).expand(values.shape)
    if layout == "channels-last" and rank == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "offset":
        room = values.new_full((values.numel() + 3,), 7)
        room[3:] = values.reshape(-1)
        return room[3:].view(values.shape)
    return values


# --- soundness: what a line must be to stay -----------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A value while a program is made."""

    own: torch.Tensor
    wide: torch.Tensor
    exact: bool
    """No rounding has touched it: the same bits whoever computes it."""
    kind: DType
    """The coarsest float type on the way here, else its own."""

    @property
    def error(self) -> float:
        """The largest absolute error of the program's own types, not less than half a unit of the largest value."""
        finite = self.wide[torch.isfinite(self.wide)]
        if self.exact or not finite.numel() or not self.own.is_floating_point():
            return 0.0
        wrong = (self.own.double() - self.wide)[torch.isfinite(self.wide)]
        return max(float(wrong.abs().max()), TOLERANCES[self.kind].unit * float(finite.abs().max()))


MOVES = frozenset(
    [
        "torch.permute",
        "torch.transpose",
        "torch.reshape",
        "torch.Tensor.expand",
        "torch.cat",
        "torch.stack",
        "torch.flip",
        "torch.roll",
        "torch.narrow",
        "torch.select",
        "torch.unsqueeze",
        "torch.squeeze",
        "torch.Tensor.contiguous",
        "torch.Tensor.repeat",
        "torch.gather",
        "torch.index_select",
        "F.pad",
        "torch.Tensor.__getitem__",
        "torch.chunk",
        "torch.unbind",
        "torch.split",
        "torch.where",
        "torch.tril",
        "torch.triu",
        "torch.relu",
        "torch.abs",
        "torch.neg",
        "torch.maximum",
        "torch.minimum",
        "torch.amax",
        "torch.amin",
        "F.max_pool2d",
        "torch.clamp",
        "F.embedding",
        "torch.masked_fill",
        "torch.take_along_dim",
        "torch.diagonal",
        "torch.Tensor.unfold",
        "torch.clone",
        "torch.movedim",
        "torch.repeat_interleave",
        "F.pixel_shuffle",
        "torch.sort",
        "torch.max",
        "torch.min",
        "torch.scatter",
        "torch.Tensor.to",
        "torch.select_scatter",
        "torch.slice_scatter",
        "torch.index_fill",
        "F.leaky_relu",
        "torch.cummax",
        "torch.zeros_like",
        "torch.full_like",
        "F.hardtanh",
        "torch.flatten",
        "F.interpolate",
    ]
)
"""Calls that round nothing (`torch.Tensor.to`, `torch.clamp`, ... are looked at more closely)."""
ROUNDING_ARGUMENTS = frozenset(
    {"torch.clamp", "F.leaky_relu", "F.hardtanh", "torch.full_like", "F.interpolate", "F.pad", "torch.masked_fill"}
)
DECISIONS = frozenset(
    [
        "torch.argmax",
        "torch.argmin",
        "torch.lt",
        "torch.gt",
        "torch.le",
        "torch.ge",
        "torch.eq",
        "torch.ne",
        "torch.floor",
        "torch.round",
        "torch.ceil",
        "torch.trunc",
        "torch.sign",
        "torch.topk",
        "torch.argsort",
        "torch.fmod",
        "torch.remainder",
        "torch.floor_divide",
        "torch.frac",
        "torch.isnan",
    ]
)
COARSENESS = {DType.F64: 0, DType.F32: 1, DType.F16: 2, DType.BF16: 3}


def coarsest(kinds: Sequence[DType]) -> DType | None:
    """Of the float types among them."""
    floats = [k for k in kinds if k in COARSENESS]
    return max(floats, key=COARSENESS.__getitem__, default=None)


def judged(line: Line, value: Callable[[Ref], Value]) -> Value | None:
    """What a line gives where that is beyond doubt."""
    operands = [value(r) for r in refs(line)]
    try:
        own = evaluate(line, lambda r: value(r).own, wide=False)
        wide = evaluate(line, lambda r: value(r).wide, wide=True)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None
    if own.dtype not in OURS or own.layout is not torch.strided or own.numel() > LARGEST or own.ndim > 6:
        return None
    if own.shape != wide.shape or own.is_floating_point() != wide.is_floating_point():
        return None
    kind = coarsest([OURS[own.dtype], *(v.kind for v in operands)]) or OURS[own.dtype]
    exact = _rounds_nothing(line, own, wide, operands)
    decides = line.call in DECISIONS or (
        not own.is_floating_point() and any(v.own.is_floating_point() for v in operands)
    )
    if decides and not _stands(line, value, wide):
        return None
    if not own.is_floating_point():
        return Value(own, wide, True, kind) if torch.equal(own, wide) else None
    finite = torch.isfinite(wide)
    if not bool(finite.all()) and all(bool(torch.isfinite(v.wide).all()) for v in operands):
        return None
    if bool((wide[finite].abs() > HIGHEST).any()):
        return None
    worse = torch.where(finite, wide + SAFETY * (own.double() - wide), own.double())
    if not exact and not gate_b(kind, got=worse.numpy(), want=wide.numpy()).ok:
        return None
    return Value(own, wide, exact, kind)


def _rounds_nothing(line: Line, own: torch.Tensor, wide: torch.Tensor, operands: Sequence[Value]) -> bool:
    if line.call not in MOVES or not all(v.exact for v in operands):
        return False
    return bool(((own.double() == wide.double()) | (torch.isnan(own.double()) & torch.isnan(wide.double()))).all())


def _stands(line: Line, value: Callable[[Ref], Value], wide: torch.Tensor) -> bool:
    """Whether no error of the operands could decide otherwise."""
    if all(value(r).exact for r in refs(line)):
        return True
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)

        def moved(ref: Ref, g: torch.Generator = g) -> torch.Tensor:
            v = value(ref)
            if v.exact or not v.wide.is_floating_point():
                return v.wide
            way = torch.randint(0, 2, v.wide.shape, generator=g, dtype=torch.float64) * 2 - 1
            return v.wide + way * JITTER * v.error

        found = evaluate(line, moved, wide=True)
        if line.call in ("torch.fmod", "torch.remainder", "torch.topk", "torch.frac") and found.is_floating_point():
            bound = 4 * JITTER * max(value(r).error for r in refs(line))
            if not bool(((found - wide).abs() <= bound).all()):
                return False
        elif not torch.equal(found, wide):
            return False
    return True


def traced(program: Program, given: Sequence[torch.Tensor]) -> list[Value] | None:
    """The value of every line where all are beyond doubt."""
    ends = [_given(t) for t in given]
    values: list[Value] = []

    def value(ref: Ref) -> Value:
        return values[ref.at] if ref.at >= 0 else ends[~ref.at]

    for line in program.lines:
        found = judged(line, value)
        if found is None:
            return None
        values.append(found)
    return values


def kinds_of_outputs(program: Program, given: Sequence[torch.Tensor]) -> list[DType]:
    """The coarsest float type on the way to each output: what its tolerance goes by."""
    found = traced(program, given)
    if found is None:
        raise ValueError("a program whose answer is in doubt")
    ends = [_given(t) for t in given]
    return [(found[r.at] if r.at >= 0 else ends[~r.at]).kind for r in program.outputs]


def _given(t: torch.Tensor) -> Value:
    return Value(t, t.double() if t.is_floating_point() else t, True, OURS[t.dtype])


# --- making -------------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 32, 33)


class Maker:
    """A program while it grows."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.inputs: list[Input] = []
        self.given: list[Value] = []
        self.lines: list[Line] = []
        self.values: list[Value] = []
        self.main = self.rng.choices(FLOATS, (6, 3, 3, 1))[0]

    # --- values ---

    def value(self, ref: Ref) -> Value:
        return self.values[ref.at] if ref.at >= 0 else self.given[~ref.at]

    def of(self, ref: Ref) -> torch.Tensor:
        return self.value(ref).own

    def new(self, shape: Sequence[int], dtype: torch.dtype | None = None, **more: Any) -> Ref:
        """A further input."""
        layout = self.rng.choice(LAYOUTS) if self.rng.random() < 0.5 else "dense"
        kind = dtype or self.main
        made = Input(tuple(shape), kind, self.rng.getrandbits(40), **{"layout": layout, **more})
        alike = [k for k, x in enumerate(self.inputs) if replace(x, seed=made.seed, layout=layout) == made]
        if alike and not made.weight and self.rng.random() < 0.3:
            made = replace(made, same=alike[0])
        self.inputs.append(made)
        self.given.append(self.given[made.same] if made.same >= 0 else _given(draw_one(made)))
        return Ref(~(len(self.inputs) - 1))

    def weight(self, shape: Sequence[int], dtype: torch.dtype, fan_in: int) -> Ref:
        """A weight, or as often as not in ten an argument, of a product with so many terms."""
        constant = self.rng.random() < 0.7
        layout = "dense" if self.rng.random() < 0.8 else self.rng.choice(("transposed", "channels-last", "strided"))
        return self.new(shape, dtype, scale=1 / math.sqrt(max(fan_in, 1)), weight=constant, layout=layout)

    def refs(self) -> list[Ref]:
        return [
            *(Ref(k) for k in range(len(self.values))),
            *(Ref(~k) for k, x in enumerate(self.inputs) if not x.weight),
        ]

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> Ref | None:
        """One of the values, the later the likelier."""
        found = [r for r in self.refs() if fits(self.of(r))]
        if not found:
            return None
        recent = [r for r in found if r.at >= max(0, len(self.values) - 3)]
        return self.rng.choice(recent if recent and self.rng.random() < 0.7 else found)

    def floating(self, rank: int | None = None, least: int = 0) -> Ref | None:
        return self.pick(lambda t: t.is_floating_point() and t.ndim >= least and (rank is None or t.ndim == rank))

    def axis(self, t: torch.Tensor, *, negative: bool = True) -> int:
        k = self.rng.randrange(t.ndim)
        return k - t.ndim if negative and self.rng.random() < 0.5 else k

    def add(self, call: str, *args: Any, item: int = -1, **kwargs: Any) -> Ref | None:
        """Append a line where its value is beyond doubt."""
        line = Line(call, args, tuple(kwargs.items()), item)
        found = judged(line, self.value)
        if found is None:
            return None
        self.lines.append(line)
        self.values.append(found)
        return Ref(len(self.values) - 1)

    def partner(self, x: Ref) -> Ref:
        """Something that broadcasts against x: another value, or a new input."""
        shape = tuple(self.of(x).shape)

        def fits(t: torch.Tensor) -> bool:
            return t.ndim <= len(shape) and all(a in (1, b) for a, b in zip(t.shape[::-1], shape[::-1], strict=False))

        known = [r for r in self.refs() if fits(self.of(r)) and self.of(r).dtype is not torch.bool]
        if known and self.rng.random() < 0.5:
            return self.rng.choice(known)
        cut = self.rng.randint(0, len(shape)) if self.rng.random() < 0.4 else 0
        own = [1 if self.rng.random() < 0.3 else n for n in shape[cut:]]
        dtype = self.of(x).dtype
        if self.rng.random() < 0.15:
            dtype = self.rng.choice(FLOATS[:3] + INTEGERS[:3])
        return self.new(own, dtype if dtype is not torch.bool else self.main, weight=self.rng.random() < 0.4)

    def scalar(self) -> float | int:
        return self.rng.choice((0.5, -1.25, 2, 3.0, 0.1, -1, 1.0, 7))


Step = Callable[[Maker], object]


def _unary(m: Maker) -> object:
    x = m.floating()
    if x is None:
        return None
    name = m.rng.choice(
        [
            "torch.relu",
            "torch.sigmoid",
            "torch.tanh",
            "F.gelu",
            "F.silu",
            "torch.exp",
            "torch.abs",
            "torch.neg",
            "F.hardswish",
            "F.softplus",
            "F.elu",
            "F.leaky_relu",
            "torch.sin",
            "torch.cos",
            "torch.erf",
            "torch.square",
            "F.mish",
            "F.hardsigmoid",
            "torch.expm1",
            "torch.atan",
            "F.relu6",
            "F.selu",
            "F.softsign",
            "torch.sinh",
            "F.logsigmoid",
            "torch.clone",
            "F.tanhshrink",
            "F.celu",
        ]
    )
    if name == "F.gelu" and m.rng.random() < 0.5:
        return m.add(name, x, approximate="tanh")
    return m.add(name, x)


def _positive(m: Maker) -> object:
    x = m.floating()
    y = x and m.add("torch.add", m.add("torch.abs", x) or x, m.rng.choice((0.5, 1.0)))
    if y is None:
        return None
    return m.add(
        m.rng.choice(["torch.sqrt", "torch.rsqrt", "torch.log", "torch.reciprocal", "torch.log2", "torch.log1p"]), y
    )


def _clamp(m: Maker) -> object:
    x = m.pick(lambda t: t.dtype is not torch.bool)
    low, high = m.rng.choice(((-1, 1), (0, 2), (-0.5, 0.25), (None, 1), (0, None)))
    if x is None:
        return None
    if not m.of(x).is_floating_point():
        low, high = (None if v is None else int(v) for v in (low, high))
    return m.add("torch.clamp", x, low, high)


def _binary(m: Maker) -> object:
    x = m.pick(lambda t: t.dtype is not torch.bool)
    if x is None:
        return None
    name = m.rng.choice(
        ["torch.add", "torch.sub", "torch.mul", "torch.maximum", "torch.minimum", "torch.mul", "torch.add"]
    )
    if m.rng.random() < 0.25 and name not in ("torch.maximum", "torch.minimum"):
        return m.add(name, x, m.scalar())
    y = x if m.rng.random() < 0.1 else m.partner(x)
    if name in ("torch.add", "torch.sub") and m.rng.random() < 0.2:
        return m.add(name, x, y, alpha=2)
    return m.add(name, *((x, y) if m.rng.random() < 0.5 else (y, x)))


def _divide(m: Maker) -> object:
    x = m.floating()
    if x is None:
        return None
    below = m.add("torch.abs", m.partner(x))
    below = below and m.add("torch.add", below, 1)
    return below and m.add("torch.div", x, below)


def _ternary(m: Maker) -> object:
    x = m.floating()
    if x is None:
        return None
    name = m.rng.choice(("torch.addcmul", "torch.lerp"))
    if name == "torch.lerp":
        y = m.new(m.of(x).shape, m.of(x).dtype)
        return m.add(name, x, y, m.rng.choice((0.25, 0.7)))
    return m.add(name, x, m.partner(x), m.partner(x), value=0.5)


def _compare(m: Maker) -> object:
    x = m.pick(lambda t: t.dtype is not torch.bool)
    if x is None:
        return None
    name = m.rng.choice(["torch.lt", "torch.gt", "torch.le", "torch.ge", "torch.eq", "torch.ne"])
    return m.add(name, x, m.scalar() if m.rng.random() < 0.5 else m.partner(x))


def _logic(m: Maker) -> object:
    x = m.pick(lambda t: t.dtype is torch.bool)
    if x is None:
        return None
    if m.rng.random() < 0.3:
        return m.add(m.rng.choice(("torch.logical_not", "torch.bitwise_not")), x)
    y = m.pick(lambda t: t.dtype is torch.bool and t.shape == m.of(x).shape) or x
    name = m.rng.choice(
        ["torch.logical_and", "torch.logical_or", "torch.logical_xor", "torch.bitwise_or", "torch.bitwise_xor"]
    )
    return m.add(name, x, y)


def _where(m: Maker) -> object:
    c = m.pick(lambda t: t.dtype is torch.bool)
    if c is None:
        return _compare(m)
    x = m.pick(lambda t: t.is_floating_point() and t.shape == m.of(c).shape)
    if x is None:
        x = m.new(m.of(c).shape)
    if m.rng.random() < 0.3:
        return m.add("torch.masked_fill", x, c, m.scalar())
    return m.add("torch.where", c, x, m.scalar() if m.rng.random() < 0.3 else m.partner(x))


def _integer(m: Maker) -> object:
    x = m.pick(lambda t: not t.is_floating_point() and t.dtype is not torch.bool)
    if x is None:
        return m.new(_shape(m), m.rng.choice(INTEGERS))
    kind = m.rng.randrange(5)
    if kind == 0:
        return m.add(
            m.rng.choice(("torch.remainder", "torch.floor_divide", "torch.fmod")), x, m.rng.choice((3, 2, 7, -3))
        )
    if kind == 1:
        return m.add(
            m.rng.choice(("torch.bitwise_and", "torch.bitwise_or", "torch.bitwise_xor")), x, m.rng.choice((1, 6, 3))
        )
    if kind == 2:
        return m.add(m.rng.choice(("torch.abs", "torch.neg", "torch.square", "torch.bitwise_not")), x)
    if kind == 3:
        return m.add(m.rng.choice(("torch.bitwise_left_shift", "torch.bitwise_right_shift")), x, m.rng.choice((1, 2)))
    return m.add("torch.mul", x, m.rng.choice((2, 3, -1)))


def _cast(m: Maker) -> object:
    x = m.pick()
    if x is None:
        return None
    t = m.of(x)
    wanted = m.rng.choice((*FLOATS, *FLOATS[:3], *INTEGERS, torch.bool))
    small = not t.numel() or (float(t.min()) >= 0 and float(t.max()) < 120)
    if t.is_floating_point() and not wanted.is_floating_point and wanted is not torch.bool:
        if not bool(torch.isfinite(t).all()):
            return None  # what an integer then is, is the processor's affair
        if wanted not in (torch.int64, torch.int32) and not small:
            return None
        # a cast cuts off: it is a decision as much as a floor is
        cut = m.add("torch.trunc", x)
        return cut and m.add("torch.Tensor.to", cut, wanted)
    return m.add("torch.Tensor.to", x, wanted)


def _round(m: Maker) -> object:
    x = m.floating()
    return x and m.add(m.rng.choice(["torch.floor", "torch.round", "torch.ceil", "torch.trunc", "torch.sign"]), x)


def _reduce(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0)
    if x is None:
        return None
    t = m.of(x)
    if t.dtype is torch.bool:
        return m.add(m.rng.choice(("torch.any", "torch.all")), x, dim=m.axis(t), keepdim=m.rng.random() < 0.5)
    dims = tuple(sorted(m.rng.sample(range(t.ndim), m.rng.randint(1, min(t.ndim, 3)))))
    keep = m.rng.random() < 0.5
    if not t.is_floating_point():
        name = m.rng.choice(("torch.sum", "torch.amax", "torch.amin"))
        return m.add(name, x, dim=dims, keepdim=keep)
    name = m.rng.choice(
        [
            "torch.sum",
            "torch.mean",
            "torch.amax",
            "torch.amin",
            "torch.var",
            "torch.std",
            "torch.logsumexp",
            "torch.mean",
            "torch.sum",
            "torch.linalg.vector_norm",
            "torch.prod",
            "torch.argmax",
            "torch.argmin",
            "torch.max",
            "torch.min",
            "torch.var_mean",
        ]
    )
    if name in ("torch.argmax", "torch.argmin", "torch.prod"):
        return m.add(name, x, dim=m.axis(t), keepdim=keep)
    if name in ("torch.max", "torch.min"):
        return m.add(name, x, dim=m.axis(t), keepdim=keep, item=0)
    if name == "torch.linalg.vector_norm":
        return m.add(name, x, 2, dims, keep)
    if name == "torch.var_mean":
        return m.add(name, x, dim=dims, correction=1, keepdim=keep, item=m.rng.randrange(2))
    if name in ("torch.var", "torch.std"):
        return m.add(name, x, dim=dims, correction=m.rng.choice((0, 1)), keepdim=keep)
    return m.add(name, x, dim=dims, keepdim=keep)


def _scan(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0 and t.dtype is not torch.bool)
    return x and m.add("torch.cumsum", x, m.axis(m.of(x)))


def _norm(m: Maker) -> object:
    x = m.floating(least=1)
    if x is None:
        return None
    t = m.of(x)
    kind = m.rng.choice(
        ("softmax", "softmax", "log_softmax", "layer", "rms", "group", "batch", "instance", "normalize")
    )
    if kind in ("softmax", "log_softmax"):
        return m.add(f"F.{kind}", x, dim=m.axis(t))
    if kind == "normalize":
        return m.add("F.normalize", x, dim=m.axis(t))
    if kind in ("layer", "rms"):
        shape = tuple(t.shape[-m.rng.randint(1, min(2, t.ndim)) :])
        w = m.new(shape, t.dtype, weight=m.rng.random() < 0.8, layout="dense") if m.rng.random() < 0.8 else None
        if kind == "rms":
            return m.add("F.rms_norm", x, shape, w, 1e-5)
        b = m.new(shape, t.dtype, weight=True, layout="dense") if w is not None and m.rng.random() < 0.8 else None
        return m.add("F.layer_norm", x, shape, w, b, 1e-5)
    if t.ndim < 3 or not t.shape[1]:
        return None
    channels = t.shape[1]
    w, b = (m.new((channels,), t.dtype, weight=True, layout="dense") for _ in range(2))
    if kind == "group":
        groups = m.rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
        return m.add("F.group_norm", x, groups, w, b)
    if kind == "instance":
        return m.add("F.instance_norm", x, None, None, w, b)
    mean = m.new((channels,), t.dtype, weight=True, layout="dense")
    square = m.add("torch.square", m.new((channels,), t.dtype, weight=True, layout="dense"))
    var = square and m.add("torch.add", square, 0.5)
    return var and m.add("F.batch_norm", x, mean, var, w, b, False)


def _product(m: Maker) -> object:
    x = m.floating(least=1)
    if x is None:
        return None
    t = m.of(x)
    k, dtype = t.shape[-1], t.dtype
    n = m.rng.choice((1, 3, 5, 8, 16, 24, 33))
    kind = m.rng.choice(("linear", "linear", "linear", "matmul", "turned", "einsum", "addmm", "self", "left", "outer"))
    if kind == "linear":
        bias = m.new((n,), dtype, weight=True, layout="dense") if m.rng.random() < 0.6 else None
        return m.add("F.linear", x, m.weight((n, k), dtype, k), bias)
    if kind == "matmul":
        batch = tuple(t.shape[:-2]) if m.rng.random() < 0.5 else ()
        return m.add("torch.matmul", x, m.weight((*batch, k, n) if t.ndim > 1 or n > 1 else (k,), dtype, k))
    if kind == "left" and t.ndim > 1:
        return m.add("torch.matmul", m.weight((n, t.shape[-2]), dtype, t.shape[-2]), x)
    if kind == "turned" and t.ndim > 1:
        y = m.add("torch.transpose", x, -1, -2)
        return y and m.add("torch.matmul", y, m.weight((*t.shape[:-2], t.shape[-2], n), dtype, t.shape[-2]))
    if kind == "einsum" and t.ndim == 3:
        form, shape = m.rng.choice(
            (("abc,dc->abd", (n, k)), ("abc,adc->abd", (t.shape[0], n, k)), ("abc,cd->dab", (k, n)))
        )
        return m.add("torch.einsum", form, x, m.weight(shape, dtype, k))
    if kind == "addmm" and t.ndim == 2:
        b = m.new((t.shape[0], n) if m.rng.random() < 0.5 else (n,), dtype)
        return m.add("torch.addmm", b, x, m.weight((k, n), dtype, k), beta=0.5, alpha=2)
    if kind == "self" and t.ndim > 1:
        y = m.add("torch.mul", x, 1 / math.sqrt(max(k, 1)))
        z = y and m.add("torch.transpose", y, -1, -2)
        return z and m.add("torch.matmul", x, z)
    if kind == "outer" and t.ndim == 1:
        return m.add("torch.outer", x, m.new((n,), dtype))
    return None


def _attention(m: Maker) -> object:
    x = m.pick(lambda t: t.is_floating_point() and t.ndim in (3, 4) and t.shape[-1] % 2 == 0 and 0 < t.shape[-1] <= 64)
    if x is None:
        return None
    t = m.of(x)
    if t.ndim == 3:
        heads = m.rng.choice((1, 2))
        x = m.add("torch.reshape", x, (t.shape[0], t.shape[1], heads, t.shape[2] // heads))
        x = x and m.add("torch.transpose", x, 1, 2)
        if x is None:
            return None
        t = m.of(x)
    keys = t.shape[-2] if m.rng.random() < 0.5 else m.rng.choice((1, 5, 16, 19))
    k = x if m.rng.random() < 0.2 else m.new((*t.shape[:2], keys, t.shape[3]), t.dtype)
    keys = m.of(k).shape[2]
    v = m.new((*t.shape[:2], keys, m.rng.choice((t.shape[3], 8))), t.dtype)
    way = m.rng.randrange(4)
    if way == 0 and keys == t.shape[2]:
        return m.add("programs.attention", x, k, v, is_causal=True)
    if way == 1:
        mask = m.new((t.shape[2], keys), t.dtype, layout="dense")
        return m.add("programs.attention", x, k, v, mask)
    if way == 2:
        return m.add("programs.attention", x, k, v, scale=0.3)
    return m.add("programs.attention", x, k, v)


def _conv(m: Maker) -> object:
    x = m.pick(lambda t: t.is_floating_point() and t.ndim in (3, 4, 5) and 0 < t.shape[1] <= 64 and t.numel() <= 20_000)
    if x is None:
        x = m.new(
            (m.rng.choice((1, 2)), m.rng.choice((1, 3, 4, 8, 16)), m.rng.choice((5, 8, 12)), m.rng.choice((5, 8, 13)))
        )
    t = m.of(x)
    dims, c = t.ndim - 2, t.shape[1]
    kernel = tuple(min(m.rng.choice((1, 2, 3, 3, 5)), max(n, 1)) for n in t.shape[2:])
    groups = m.rng.choice([g for g in (1, 1, 2, c) if c % g == 0])
    n = m.rng.choice((1, 3, 4, 8, 16))
    n = max(groups, n // groups * groups)
    stride, padding = tuple(m.rng.choice((1, 1, 2)) for _ in kernel), tuple(m.rng.randint(0, k // 2) for k in kernel)
    if m.rng.random() < 0.15:
        w = m.weight((c, n // groups, *kernel), t.dtype, c // groups * math.prod(kernel))
        b = m.new((n,), t.dtype, weight=True, layout="dense") if m.rng.random() < 0.5 else None
        return m.add(f"F.conv_transpose{dims}d", x, w, b, stride=stride, padding=padding, groups=groups)
    dilation = tuple(m.rng.choice((1, 1, 1, 2)) for _ in kernel)
    w = m.weight((n, c // groups, *kernel), t.dtype, c // groups * math.prod(kernel))
    b = m.new((n,), t.dtype, weight=True, layout="dense") if m.rng.random() < 0.6 else None
    return m.add(f"F.conv{dims}d", x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups)


def _image(m: Maker) -> object:
    x = m.floating(rank=4)
    if x is None or min(m.of(x).shape) < 1:
        return None
    kind = m.rng.randrange(7)
    if kind == 0:
        return m.add("F.max_pool2d", x, m.rng.choice((2, 3)), m.rng.choice((1, 2)), m.rng.choice((0, 1)))
    if kind == 1:
        pad = m.rng.choice((0, 1))
        return m.add("F.avg_pool2d", x, m.rng.choice((2, 3)), m.rng.choice((1, 2)), pad, m.rng.random() < 0.5, False)
    if kind == 2:
        return m.add("F.adaptive_avg_pool2d", x, m.rng.choice((1, 2, (3, 2))))
    if kind == 3:
        return m.add("F.interpolate", x, scale_factor=2.0, mode="nearest")
    if kind == 4:
        return m.add(
            "F.interpolate", x, size=(m.rng.choice((5, 9)), 7), mode="bilinear", align_corners=m.rng.random() < 0.5
        )
    if kind == 5:
        return m.add("F.pixel_shuffle", x, 2)
    return m.add("torch.Tensor.contiguous", x, memory_format=torch.channels_last)


def _pad(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 1)
    if x is None:
        return None
    widths = tuple(m.rng.choice((0, 1, 2)) for _ in range(2 * m.rng.randint(1, min(2, m.of(x).ndim - 1))))
    mode = m.rng.choice(("constant", "constant", "reflect", "replicate"))
    if mode == "constant":
        return m.add("F.pad", x, (*widths[:-1], m.rng.choice((widths[-1], -1))), value=m.rng.choice((0.0, 1.5, -2.0)))
    return m.add("F.pad", x, widths, mode=mode) if m.of(x).ndim == len(widths) // 2 + 2 else None


def _view(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0)
    if x is None:
        return None
    t = m.of(x)
    kind = m.rng.randrange(14)
    if kind == 0:
        return m.add("torch.permute", x, tuple(m.rng.sample(range(t.ndim), t.ndim)))
    if kind == 1:
        return m.add("torch.transpose", x, m.axis(t), m.axis(t))
    if kind == 2:
        return m.add("torch.reshape", x, _factored(m, t.numel()))
    if kind == 3:
        return m.add("torch.unsqueeze", x, m.axis(t))
    if kind == 4:
        return m.add("torch.squeeze", x)
    if kind == 5:
        return m.add("torch.flip", x, (m.axis(t),))
    if kind == 6:
        return m.add("torch.roll", x, m.rng.choice((1, -2, 3)), m.axis(t))
    if kind == 7:
        return m.add("torch.Tensor.expand", m.add("torch.unsqueeze", x, 0) or x, (3, *t.shape))
    if kind == 8:
        return m.add("torch.select", x, m.axis(t), m.rng.choice((0, -1)))
    if kind == 9 and t.ndim > 1:
        return m.add("torch.flatten", x, m.rng.randrange(t.ndim - 1), -1)
    if kind == 10 and t.ndim > 1:
        return m.add("torch.diagonal", x, m.rng.choice((0, 1)), 0, 1)
    if kind == 11:
        k = m.axis(t, negative=False)
        return m.add("torch.Tensor.unfold", x, k, min(3, t.shape[k]), m.rng.choice((1, 2)))
    if kind == 12:
        return m.add("torch.Tensor.contiguous", x)
    index = tuple(
        m.rng.choice((slice(None), slice(None), slice(1, None), slice(None, None, 2), slice(-3, -1), 0))
        for _ in t.shape
    )
    return m.add("torch.Tensor.__getitem__", x, index)


def _part(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0)
    if x is None:
        return None
    t = m.of(x)
    k = m.axis(t)
    kind = m.rng.randrange(4)
    if kind == 0:
        return m.add("torch.chunk", x, 2, k, item=m.rng.choice((0, 1)))
    if kind == 1:
        return m.add("torch.split", x, max(1, t.shape[k] // 3), k, item=m.rng.choice((0, 1)))
    if kind == 2:
        return m.add("torch.unbind", x, k, item=0)
    return m.add("torch.narrow", x, k, t.shape[k] // 3, t.shape[k] - t.shape[k] // 3)


def _join(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0)
    if x is None:
        return None
    t = m.of(x)
    k = m.axis(t, negative=False)

    def fits(o: torch.Tensor) -> bool:
        return o.ndim == t.ndim and all(a == b for d, (a, b) in enumerate(zip(o.shape, t.shape, strict=True)) if d != k)

    others = [r for r in m.refs() if fits(m.of(r))]
    picked = [x, *(m.rng.choice(others) for _ in range(m.rng.randint(1, 3)))]
    m.rng.shuffle(picked)
    if m.rng.random() < 0.25:
        return m.add("torch.stack", [x, x, *(r for r in picked if m.of(r).shape == t.shape)], dim=k)
    return m.add("torch.cat", picked, dim=k - t.ndim if m.rng.random() < 0.5 else k)


def _index(m: Maker) -> object:
    x = m.pick(lambda t: t.ndim > 0 and min(t.shape) > 0)
    if x is None:
        return None
    t = m.of(x)
    k = m.axis(t)
    n = t.shape[k]
    dtype = m.rng.choice((torch.int64, torch.int64, torch.int32))
    flat = m.new((m.rng.choice((1, 3, 6)),), dtype, below=n, weight=m.rng.random() < 0.3, layout="dense")
    kind = m.rng.randrange(8)
    if kind == 0:
        return m.add("torch.index_select", x, k, flat)
    if kind == 1 and t.is_floating_point() and t.ndim == 2:
        index = m.new((2, 5), torch.int64, below=t.shape[0])
        return m.add("F.embedding", index, x)
    if kind == 2:
        shape = tuple(
            m.rng.randint(1, s) if d != k % t.ndim else m.rng.choice((1, n, 5)) for d, s in enumerate(t.shape)
        )
        return m.add("torch.gather", x, k, m.new(shape, torch.int64, below=n))
    if kind == 3:
        where = tuple(slice(None) for _ in range(k % t.ndim))
        return m.add("torch.Tensor.__getitem__", x, (*where, flat))
    if kind == 4:
        return m.add("torch.repeat_interleave", x, 2, k)
    if kind == 5 and t.ndim > 1:
        return m.add(m.rng.choice(("torch.tril", "torch.triu")), x, m.rng.choice((0, 1, -1)))
    if kind == 6:
        return m.add(
            "torch.select_scatter", x, m.new((*t.shape[: k % t.ndim], *t.shape[k % t.ndim + 1 :]), t.dtype), k, 0
        )
    return m.add("torch.Tensor.repeat", x, tuple(m.rng.choice((1, 1, 2)) for _ in t.shape))


def _sorted(m: Maker) -> object:
    x = m.floating(least=1)
    if x is None:
        return None
    return m.add("torch.sort", x, m.axis(m.of(x)), m.rng.random() < 0.5, item=0)


def _made(m: Maker) -> object:
    x = m.floating(least=1)
    if x is None:
        return None
    y = m.add(m.rng.choice(("torch.zeros_like", "torch.ones_like")), x)
    return y and m.add("torch.add", x, y)


def _steps(m: Maker) -> object:
    """Positions along an axis, as an encoding has them."""
    x = m.floating(least=1)
    if x is None:
        return None
    n = m.of(x).shape[-1]
    y = m.add("torch.arange", n, dtype=m.of(x).dtype)
    y = y and m.add("torch.mul", y, 0.125)
    return y and m.add("torch.add", x, y)


def _rare(m: Maker) -> object:
    """What few models have, and every compiler must pass on rightly."""
    x = m.floating(least=1)
    if x is None:
        return None
    t = m.of(x)
    k = m.axis(t)
    way = m.rng.randrange(18)
    if way == 0:
        base = m.add("torch.abs", x)
        base = base and m.add("torch.add", base, 0.25)
        return base and m.add("torch.pow", base, m.rng.choice((2, 0.5, -1, 1.5, 3)))
    if way == 1:
        return m.add(m.rng.choice(("torch.atan2", "torch.copysign", "torch.hypot", "torch.logaddexp")), x, m.partner(x))
    if way == 2:
        return m.add("torch.cumprod", x, k)
    if way == 3:
        return m.add(m.rng.choice(("torch.cummax", "torch.cummin")), x, k, item=0)
    if way == 4:
        return m.add("torch.topk", x, max(1, t.shape[k] // 2), k, item=0)
    if way == 5:
        return m.add(m.rng.choice(("torch.nan_to_num", "torch.frac", "torch.exp2", "torch.sinc", "torch.isnan")), x)
    if way == 6:
        return m.add(m.rng.choice(("torch.mean", "torch.sum", "torch.max", "torch.min", "torch.std")), x)
    if way == 7:
        return m.add("F.glu", x, k)
    if way == 8:
        channels = t.shape[1] if t.ndim > 1 else 1
        return m.add("F.prelu", x, m.new((m.rng.choice((1, max(channels, 1))),), t.dtype, weight=True, layout="dense"))
    if way == 9:
        return m.add("F.cosine_similarity", x, m.new(t.shape, t.dtype), dim=k)
    if way == 10 and t.ndim == 4:
        return m.add("F.unfold", x, m.rng.choice((2, 3)), 1, m.rng.choice((0, 1)), m.rng.choice((1, 2)))
    if way == 11 and t.ndim == 3:
        y = m.weight((t.shape[0], t.shape[2], 5), t.dtype, t.shape[2])
        return m.add("torch.baddbmm", m.new((t.shape[0], 1, 5), t.dtype), x, y, beta=0.5, alpha=1.5)
    if way == 12 and t.shape[k]:
        index = m.new(t.shape, torch.int64, below=t.shape[k], layout="dense")
        if m.rng.random() < 0.5:
            return m.add("torch.take_along_dim", x, index, k)
        return m.add("torch.scatter_add", x, k, index, m.new(t.shape, t.dtype))
    if way == 13 and t.shape[k]:
        index = m.new((3,), torch.int64, below=t.shape[k], layout="dense")
        shape = [3 if d == k % t.ndim else n for d, n in enumerate(t.shape)]
        return m.add("torch.index_add", x, k, index, m.new(shape, t.dtype))
    if way == 14:
        hot = m.add("F.one_hot", m.new((4, 3), torch.int64, below=7), 7)
        return hot and m.add("torch.Tensor.to", hot, t.dtype)
    if way == 15 and t.ndim >= 2:
        return m.add("torch.einsum", "...ab,...ab->...a", x, m.new(t.shape, t.dtype))
    if way == 16:
        return m.add("torch.logcumsumexp", x, k)
    return m.add("torch.movedim", x, k, m.axis(t))


STEPS: dict[Step, int] = {
    _unary: 8, _positive: 2, _clamp: 2, _binary: 9, _divide: 2, _ternary: 1, _compare: 3, _logic: 2, _where: 4,
    _integer: 3, _cast: 4, _round: 1, _reduce: 7, _scan: 1, _norm: 6, _product: 8, _attention: 2, _conv: 5, _image: 4,
    _pad: 3, _view: 8, _part: 4, _join: 4, _index: 5, _sorted: 1, _made: 1, _steps: 1, _rare: 9,
}  # fmt: skip


def _shape(m: Maker) -> tuple[int, ...]:
    rank = m.rng.choices((0, 1, 2, 3, 4, 5), (1, 3, 6, 8, 8, 1))[0]
    empty = m.rng.random() < 0.02
    shape = [0 if empty and m.rng.random() < 0.4 else m.rng.choice(SIZES) for _ in range(rank)]
    while math.prod(shape) > LARGEST // 4:
        shape[m.rng.randrange(rank)] = m.rng.choice((1, 2, 3))
    return tuple(shape)


def _factored(m: Maker, size: int) -> tuple[int, ...]:
    """A shape of that many elements."""
    found: list[Any]
    found, rest = [], max(size, 1)
    while rest > 1 and len(found) < 4:
        f = m.rng.choice([f for f in range(1, min(rest, 40) + 1) if rest % f == 0])
        found.append(f)
        rest //= f
    found.append(rest)
    m.rng.shuffle(found)
    if size == 0:
        found[m.rng.randrange(len(found))] = 0
    if size and m.rng.random() < 0.3:
        found[m.rng.randrange(len(found))] = -1
    return tuple(found)


def make(seed: int) -> Program:
    """The program of that number. It has at least one line."""
    m = Maker(seed)
    # the framework's own generator is not used: the same number gives the same program whatever ran before
    special = m.rng.random() < 0.1
    for _ in range(m.rng.choice((1, 2, 2, 3))):
        m.new(_shape(m), special=special)
    if m.rng.random() < 0.3:
        m.new(_shape(m), m.rng.choice((*INTEGERS, torch.bool)))
    wanted = m.rng.choice((3, 5, 8, 12, 16, 22, 30))
    steps, weights = list(STEPS), list(STEPS.values())
    for _ in range(20 * wanted):
        if len(m.lines) >= wanted:
            break
        m.rng.choices(steps, weights)[0](m)
    if not m.lines:
        m.add("torch.add", Ref(~0), 1)
    read = {r.at for line in m.lines for r in refs(line)}
    ends = [Ref(k) for k in range(len(m.lines)) if k not in read][-m.rng.choice((1, 2, 3, 4)) :]
    ends += [m.rng.choice(m.refs()) for _ in range(m.rng.choice((0, 0, 0, 1, 2)))]
    m.rng.shuffle(ends)
    return without_dead(Program(seed, tuple(m.inputs), tuple(m.lines), tuple(ends)))


def without_dead(program: Program) -> Program:
    """Without lines and inputs that no output needs."""
    needed: set[int] = {r.at for r in program.outputs}
    for k in reversed(range(len(program.lines))):
        if k in needed:
            needed |= {r.at for r in refs(program.lines[k])}
    same = [program.inputs[~k].same for k in needed if k < 0]
    needed |= {~s for s in same if s >= 0}
    lines = [k for k in range(len(program.lines)) if k in needed]
    inputs = [k for k in range(len(program.inputs)) if ~k in needed]
    if not any(not program.inputs[k].weight for k in inputs):  # a module is called with something
        inputs = sorted({*inputs, next(k for k, x in enumerate(program.inputs) if not x.weight)})
    place = {k: n for n, k in enumerate(lines)} | {~k: ~n for n, k in enumerate(inputs)}
    return _renumbered(program, [program.inputs[k] for k in inputs], [program.lines[k] for k in lines], place)


def _renumbered(program: Program, inputs: Sequence[Input], lines: Sequence[Line], place: dict[int, int]) -> Program:
    def change(x: Any) -> Any:
        return Ref(place[x.at]) if isinstance(x, Ref) else x

    moved = tuple(
        replace(x, args=_mapped(x.args, change), kwargs=tuple((k, _mapped(v, change)) for k, v in x.kwargs))
        for x in lines
    )
    kept = tuple(x if x.same < 0 else replace(x, same=~place[~x.same]) for x in inputs)
    return Program(program.seed, kept, moved, tuple(Ref(place[r.at]) for r in program.outputs))


# --- shrinking ----------------------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool], *, tries: int = 200) -> Program:
    """A smaller program that fails as well; `fails` is asked at most `tries` times, of sound programs alone."""
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(program):
            if left <= 0:
                break
            if _size(candidate) >= _size(program) or not is_sound(candidate):
                continue
            left -= 1
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def is_sound(program: Program) -> bool:
    """Whether the answer is beyond doubt."""
    return traced(program, draw(program)) is not None


def _size(program: Program) -> tuple[int, int, int, int]:
    plain = sum(x.layout != "dense" for x in program.inputs)
    return len(program.lines), len(program.outputs), len(program.inputs), plain


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the least first."""
    for k in range(len(program.lines)):
        yield without_dead(replace(program, outputs=(Ref(k),)))
    for r in program.outputs:
        if len(program.outputs) > 1:
            yield without_dead(replace(program, outputs=(r,)))
    for k in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield without_dead(replace(program, outputs=(*program.outputs[:k], *program.outputs[k + 1 :])))
    values = traced(program, draw(program)) or []
    for k in reversed(range(len(values))):
        if any(r.at == k for r in program.outputs) and len(program.outputs) == 1:
            continue  # an output that is an input says nothing
        own = values[k].own
        index = not own.is_floating_point() and own.dtype is not torch.bool and own.numel() > 0
        made = Input(
            tuple(own.shape), own.dtype, 1000 + k, below=int(own.max()) + 1 if index and int(own.min()) >= 0 else 0
        )
        fresh = Ref(~len(program.inputs))
        yield _instead(replace(program, inputs=(*program.inputs, made)), k, fresh)
        for r in refs(program.lines[k]):
            other = values[r.at].own if r.at >= 0 else draw(program)[~r.at]
            if other.shape == own.shape and other.dtype == own.dtype:
                yield _instead(program, k, r)
    for k, x in enumerate(program.inputs):
        if x.layout != "dense":
            dense = replace(x, layout="dense")
            yield replace(program, inputs=(*program.inputs[:k], dense, *program.inputs[k + 1 :]))


def _instead(program: Program, line: int, ref: Ref) -> Program:
    """Who reads the line reads `ref`."""

    def change(x: Any) -> Any:
        return ref if isinstance(x, Ref) and x.at == line else x

    lines = tuple(
        replace(x, args=_mapped(x.args, change), kwargs=tuple((k, _mapped(v, change)) for k, v in x.kwargs))
        for x in program.lines
    )
    return without_dead(replace(program, lines=lines, outputs=tuple(change(r) for r in program.outputs)))


__all__ = [
    "Input",
    "Line",
    "Module",
    "Program",
    "Ref",
    "arguments",
    "draw",
    "is_sound",
    "make",
    "run",
    "shrink",
    "traced",
]
