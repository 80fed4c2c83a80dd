"""Small graphs that lead to every entry of the tables of framework calls, in every element type.

The problems of a graph have every memory format of every input and output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.tune.cases import OTHERS, in_every_type, single_graphs

from weft import fission
from weft.device.cuda.facts import GpuFacts
from weft.device.facts import CpuFacts
from weft.generate.library import LibraryGenerator
from weft.generate.library.covered import GELU
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import formats_of
from weft.kernels.measurement import Verdict
from weft.kernels.source import LibraryCall
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.stored import stored_root
from weft.tune.verify import Finding, weight_positions

IMAGE, ROWS = (2, 8, 5, 6), (4, 10)
FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
_TWICE = {"sizes": (2, 8, 10, 12), "scales_text": "1.0,1.0,2.0,2.0"}
_PLAIN = {"strides": (1, 1), "pads_lo": (1, 1), "pads_hi": (1, 1), "dilations": (1, 1)}
_GRADIENT = {"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1)}
RULES: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "softmax": [([IMAGE], {"axis": 1}), ([ROWS], {"axis": -1})],
    "log_softmax": [([IMAGE], {"axis": 1}), ([ROWS], {"axis": 0})],
    "layer_norm": [([ROWS, (10,), (10,)], {"axes": (1,), "eps": 1e-5}), ([IMAGE], {"axes": (2, 3), "eps": 1e-5})],
    "group_norm": [([IMAGE, (8,), (8,)], {"groups": 4, "eps": 1e-5})],
    "instance_norm": [([IMAGE, (8,), (8,)], {"eps": 1e-5})],
    "gelu": [([IMAGE], {"approximate": "none"}), ([IMAGE], {"approximate": "tanh"}), ([ROWS], {})],
    **{
        rule: [([IMAGE], params), ([ROWS], params)]
        for rule, params in {
            "silu": {},
            "mish": {},
            "sigmoid": {},
            "hard_swish": {},
            "softplus": {"beta": 1.0, "threshold": 20.0},
            "elu": {"alpha": 0.7},
            "leaky_relu": {"alpha": 0.2},
            "relu": {},
        }.items()
    },
    "linear": [([ROWS, (7, 10), (7,)], {}), ([ROWS, (10, 10)], {})],
    "addmm": [([(4, 7), ROWS, (10, 7)], {})],
    "conv": [
        ([IMAGE, (4, 8, 3, 3), (4,)], {**_PLAIN, "groups": 1}),
        ([IMAGE, (8, 1, 3, 3)], {**_PLAIN, "groups": 8}),
        ([IMAGE, (4, 8, 2, 3)], {**_PLAIN, "pads_lo": (0, 1), "groups": 1}),
    ],
    "conv_weight_gradient": [
        ([(2, 4, 5, 6), IMAGE], {**_GRADIENT, "kernel": (3, 3), "pads": (1, 1)}),
        ([(2, 4, 3, 3), IMAGE], {**_GRADIENT, "kernel": (1, 1), "strides": (2, 2)}),
        ([(2, 4, 5, 5), (2, 3, 5, 5)], {**_GRADIENT, "kernel": (3, 3), "pads": (1, 1)}),
        ([(2, 8, 5, 6), IMAGE], {**_GRADIENT, "kernel": (3, 3), "pads": (1, 1), "groups": 8}),
        ([IMAGE, (2, 8, 2, 2)], {**_GRADIENT, "kernel": (2, 3), "strides": (2, 2), "pads": (0, 0), "transposed": True}),
    ],
    "sdpa": [
        ([(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)], {"causal": False}),
        ([(1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)], {"causal": True}),
        ([(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 1, 5, 6)], {"causal": False}),
        ([(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), TensorType(DType.BOOL, (5, 6))], {"causal": False}),
        ([(2, 4, 5, 7), (2, 2, 6, 7), (2, 2, 6, 7)], {"causal": False, "enable_gqa": True}),
    ],
    "max_pool": [([IMAGE], {**_PLAIN, "kernel": (3, 3), "strides": (2, 2)})],
    "avg_pool": [([IMAGE], {"kernel": (2, 2), "strides": (2, 2), "pads_lo": (0, 0), "pads_hi": (0, 0)})],
    "adaptive_avg_pool": [([IMAGE], {"output_size": (1, 1)})],
    "resize_nearest": [([IMAGE], {**_TWICE, "coordinate_mode": "asymmetric", "nearest_mode": "floor"})],
    "resize_linear": [
        ([IMAGE], {**_TWICE, "coordinate_mode": "half_pixel"}),
        ([IMAGE], {**_TWICE, "coordinate_mode": "pytorch_half_pixel"}),
    ],
    "grid_sample": [
        ([IMAGE, (IMAGE[0], 3, 5, 2)], {"mode": mode, "padding": padding, "align_corners": aligned})
        for mode in ("linear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for aligned in (False, True)
    ],
    "reduce_mean": [([IMAGE], {"axes": (2, 3), "keepdims": True}), ([IMAGE], {"axes": (1,), "keepdims": True})],
}
"""Rule -> operands (a shape, of the type at hand, or a whole type) and parameters."""

_WINDOW = a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
_IMAGES: dict[Prim, list[tuple[tuple[tuple[int, ...], ...], a.Attrs]]] = {
    Prim.SELECT: [((IMAGE, IMAGE, IMAGE), a.NO_ATTRS)],
    Prim.CAST: [((IMAGE,), a.CastAttrs(d)) for d in DType],
    Prim.TRANSPOSE: [((IMAGE,), a.TransposeAttrs((0, 2, 3, 1)))],
    Prim.SLICE: [((IMAGE,), a.SliceAttrs((1, 0, 4, 0), (1, 4, 2, 3), (1, 2, -2, 2)))],
    Prim.CONCAT: [((IMAGE, IMAGE), a.ConcatAttrs(1))],
    Prim.PAD: [
        ((IMAGE,), a.PadAttrs((0, 0, 1, 2), (0, 1, 0, 3), "constant", 1.0)),
        ((IMAGE,), a.PadAttrs((0, 0, 1, 2), (0, 0, 0, 3), "reflect")),
        ((IMAGE,), a.PadAttrs((0, 0, 1, 2), (0, 0, 0, 3), "edge")),
    ],
    Prim.GATHER: [((IMAGE, (3,)), a.GatherAttrs(1))],
    Prim.TAKE_ALONG: [((IMAGE, IMAGE), a.GatherAttrs(2))],
    **{
        p: [((IMAGE,), a.ReduceAttrs((2, 3))), ((IMAGE,), a.ReduceAttrs((1,)))]
        for p in (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN)
    },
    Prim.ARGMAX: [((IMAGE,), a.ArgAttrs(1))],
    Prim.ARGMIN: [((IMAGE,), a.ArgAttrs(1))],
    Prim.WINDOW_SUM: [((IMAGE,), _WINDOW)],
    Prim.WINDOW_MAX: [((IMAGE,), _WINDOW)],
    Prim.SCAN: [
        ((IMAGE,), a.ScanAttrs(1, "sum")),
        ((IMAGE,), a.ScanAttrs(3, "prod", exclusive=True)),
        ((IMAGE, IMAGE), a.ScanAttrs(2, "linear")),
        ((IMAGE, IMAGE), a.ScanAttrs(1, "linear", reverse=True)),
    ],
    Prim.MATMUL: [((IMAGE, (6, 4)), a.NO_ATTRS), ((ROWS, (10, 6)), a.NO_ATTRS), (((2, 4, 5), (2, 5, 3)), a.NO_ATTRS)],
    Prim.CONV: [((IMAGE, (4, 8, 3, 3)), a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))],
}  # fmt: skip


ODD = frozenset(
    {"primitives mod", "primitives fmod", "operator gelu", "operator sdpa", "operator resize_linear", "conv", "linear"}
)
"""The framework's own operators, and oneDNN's, that make NaN of an infinity, or of what overflows inside, elsewhere
than the primitives do: allowed on the inputs made for that, as it is for steps of plans."""
ODD_ON_GPU = ODD | {"primitives conv", "operator conv", "cudnn", "cublaslt", GELU}
"""cuDNN multiplies infinite weights with padding; cuBLASLt's relu makes 0 of NaN."""


def calls_of(problem: Problem, facts: GpuFacts | None = None) -> Iterator[LibraryCall]:
    """What the library says to a problem; `facts`: of a GPU, else it is a CPU."""
    maker = LibraryGenerator()
    schedules = maker.schedules(problem, facts or CpuFacts())
    for schedule in () if isinstance(schedules, Declined) else schedules:
        call = maker.emit(problem, schedule)
        if isinstance(call, LibraryCall):
            yield call


def is_right(entry: str, found: Finding, odd_entries: frozenset[str] = ODD) -> bool:
    """Whether a call of an entry passes."""
    odd = entry in odd_entries and found.verdict is Verdict.NAN_CLASS and found.error.startswith("adversarial")
    return found.verdict is Verdict.OK or odd


def primitives(prim: Prim) -> Iterator[Graph]:
    """Graphs of one primitive: those of `tests.tune.cases`, and some of images."""
    yield from single_graphs(prim) if _elementwise(prim) or prim in OTHERS else ()
    if prim in (Prim.ADD, Prim.MUL):
        yield from with_numbers(prim)
    cases = _IMAGES.get(prim, [])
    if _elementwise(prim) and not cases:
        cases = [((IMAGE,) * (ARITY[prim] or 0), a.NO_ATTRS)]
    yield from in_every_type(prim, cases)


def with_numbers(prim: Prim) -> Iterator[Graph]:
    """A sum or a product with one number on either side, which is no tensor of the device's."""
    for dtype, turned in itertools.product(
        [d for d in DType if d is not DType.BOOL and not d.is_float8], (True, False)
    ):
        b = GraphBuilder()
        x, number = b.input(TensorType(dtype, IMAGE)), b.broadcast(b.scalar(3, dtype), IMAGE)
        yield b.build([b.apply(prim, *((number, x) if turned else (x, number)))])


def _elementwise(prim: Prim) -> bool:
    return CATEGORY[prim] is Category.ELEMENTWISE


def operators(rule: str) -> Iterator[Graph]:
    """Graphs of one source operator, taken apart by its rule."""
    for (shapes, params), dtype in itertools.product(RULES[rule], FLOATS):
        b = GraphBuilder()
        ids = [b.input(s if isinstance(s, TensorType) else TensorType(dtype, s)) for s in shapes]
        absent = [-1] if rule == "sdpa" and len(ids) < 4 else []
        results = fission.apply(b, rule, [*ids, *absent], params)
        if isinstance(results, Declined):
            raise TypeError(f"{rule} of {dtype.value}: {results.reason}")
        yield b.build(results)


def products() -> Iterator[Graph]:
    """Products with constant weights and what the libraries' fused forms take behind them."""
    tails: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("relu", {}),
        ("gelu", {"approximate": "none"}),
        ("gelu", {"approximate": "tanh"}),
        ("silu", {}),
        ("sigmoid", {}),
        ("hard_swish", {}),
        ("leaky_relu", {"alpha": 0.2}),
    ]
    for dtype, conv, (rule, params), extra in itertools.product(
        FLOATS, (True, False), tails, ("", "bias", "residual", "both")
    ):
        b = GraphBuilder()
        x = b.input(TensorType(dtype, IMAGE if conv else ROWS))
        w = b.input(TensorType(dtype, (8, 8, 3, 3) if conv else (10, 8)), is_weight=True)
        if conv:
            y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))
        else:
            y = b.add(Prim.MATMUL, x, w)
        shape = b.type_of(y).shape
        if extra in ("bias", "both"):
            bias = b.input(TensorType(dtype, (8, 1, 1) if conv else (8,)), is_weight=True)
            y = b.apply(Prim.ADD, y, b.broadcast(bias, shape))
        if extra in ("residual", "both"):
            y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, shape)))
        if rule:
            (y,) = applied(b, rule, y, params)
        yield b.build([y])


def counted_rows() -> Iterator[Graph]:
    """Products whose rows are counted in two dimensions behind them."""
    for dtype, bias, rule in itertools.product(FLOATS, (True, False), ("", "relu")):
        b = GraphBuilder()
        x = b.input(TensorType(dtype, (2, 3, 10)))
        y = b.add(Prim.MATMUL, b.reshape(x, (6, 10)), b.input(TensorType(dtype, (10, 8)), is_weight=True))
        y = b.reshape(y, (2, 3, 8))
        added = b.input(TensorType(dtype, (8,) if bias else (2, 3, 8)), is_weight=bias)
        y = b.apply(Prim.ADD, y, b.broadcast(added, (2, 3, 8)) if bias else added)
        yield b.build(applied(b, rule, y, {}) if rule else [y])


def rounded_once() -> Iterator[Graph]:
    """A sum or a product with a number in f32, between two casts."""
    for dtype, prim, turned in itertools.product((DType.F16, DType.BF16), (Prim.ADD, Prim.MUL), (True, False)):
        b = GraphBuilder()
        x = b.cast(b.input(TensorType(dtype, IMAGE)), DType.F32)
        number = b.broadcast(b.scalar(0.1767, DType.F32), IMAGE)
        yield b.build([b.cast(b.apply(prim, *((number, x) if turned else (x, number))), dtype)])


def viewed(graph: Graph) -> Iterator[Graph]:
    """The same of views: every operand is read through other strides, as what library calls cover may have them."""
    for through in (_swapped, _cut_out, _tokens):
        b = GraphBuilder()
        new: dict[NodeId, NodeId] = {}
        for node in graph.inputs:
            new[node] = through(b, graph.type_of(node))
        for node, n in enumerate(graph.nodes):
            if n.prim is Prim.CONSTANT:
                new[node] = b.constant(graph.constant(node), n.type.dtype)
            elif n.prim is not Prim.INPUT:
                new[node] = b.add(n.prim, *(new[i] for i in n.inputs), attrs=n.attrs)
        yield b.build([new[o] for o in graph.outputs])


def _swapped(b: GraphBuilder, t: TensorType) -> NodeId:
    perm = (*range(t.rank - 2), t.rank - 1, t.rank - 2) if t.rank > 1 else tuple(range(t.rank))
    return b.transpose(b.input(TensorType(t.dtype, tuple(t.shape[k] for k in perm))), perm)


def _cut_out(b: GraphBuilder, t: TensorType) -> NodeId:
    if t.rank == 0:
        return b.input(t)
    x = b.input(TensorType(t.dtype, tuple(n + 2 for n in t.shape)))
    return b.add(Prim.SLICE, x, attrs=a.SliceAttrs((1,) * t.rank, t.shape, (1,) * t.rank))


def _tokens(b: GraphBuilder, t: TensorType) -> NodeId:
    """An image that is one row of channels after the other."""
    if t.rank != 4:
        return b.input(t)
    n, c, h, w = t.shape
    rows = b.input(TensorType(t.dtype, (n, h * w, c)))
    return b.reshape(b.transpose(rows, (0, 2, 1)), t.shape)


def applied(b: GraphBuilder, rule: str, x: NodeId, params: dict[str, Any]) -> tuple[NodeId, ...]:
    found = fission.apply(b, rule, [x], params)
    if isinstance(found, Declined):
        raise TypeError(found.reason)
    return tuple(found)


def conversions() -> Iterator[Graph]:
    """A value that is only written in another order."""
    for dtype in DType:
        b = GraphBuilder()
        yield b.build([b.input(TensorType(dtype, IMAGE))])


def whole(graph: Graph) -> Iterator[Problem]:
    """The problem that is the whole graph, in every memory format of its inputs and outputs."""
    yield from _formatted(Problem(graph, str(graph), (), ()))


def _formatted(problem: Problem) -> Iterator[Problem]:
    graph = problem.graph
    weights = weight_positions(graph)
    ins = [formats_of(graph.type_of(i))[: 1 if k in weights else 2] for k, i in enumerate(graph.inputs)]
    outs = [formats_of(graph.type_of(o)) for o in graph.outputs]
    for chosen in itertools.product(*ins, *outs):
        key = f"{problem.key} {[f.value for f in chosen]}"
        split = len(ins)
        yield replace(problem, key=key, input_formats=chosen[:split], output_formats=chosen[split:])


def _cut_out_of(graph: Graph, candidate: Candidate) -> Problem:
    """A candidate's problem, row-major."""
    ins, outs = ([formats_of(graph.type_of(x))[0] for x in xs] for xs in (candidate.inputs, candidate.outputs))
    return extract(graph, candidate, tuple(ins), tuple(outs)).problem


def of_viewed(graph: Graph, rule: str) -> Iterator[Problem]:
    """The operator with views in front, in every memory format."""
    written = {stored_root(graph, o) for o in graph.outputs}
    for candidate in enumerate_candidates(graph, EnumerationLimits(library_calls=True)).candidates:
        if candidate.kind is not Kind.CALL or set(candidate.outputs) != written:
            continue
        if (problem := _cut_out_of(graph, candidate)).origin_rule == rule:
            yield from _formatted(problem)
            return


def viewed_operators(rule: str) -> Iterator[Graph]:
    """Graphs of one source operator whose operands are views."""
    for (shapes, params), dtype, through in itertools.product(
        RULES[rule], (DType.F32, DType.F16), (_swapped, _cut_out, _tokens)
    ):
        b = GraphBuilder()
        types = [s if isinstance(s, TensorType) else TensorType(dtype, s) for s in shapes]
        ids = [through(b, t) for t in types]
        absent = [-1] if rule == "sdpa" and len(ids) < 4 else []
        results = fission.apply(b, rule, [*ids, *absent], params)
        if isinstance(results, Declined):
            raise TypeError(f"{rule} of {dtype.value}: {results.reason}")
        yield b.build(results)


def of_operator(graph: Graph, rule: str) -> Iterator[Problem]:
    """The problems that are exactly the operator, in every memory format."""
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is Kind.CONVERT:
            continue
        if (problem := _cut_out_of(graph, candidate)).origin_rule == rule:
            yield from _formatted(problem)
            return
