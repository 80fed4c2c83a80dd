"""Convolutions of few channels in other forms: the same numbers, and where they are not offered."""

from __future__ import annotations

import numpy as np
import pytest
from tests.typed import assert_allclose

from weft.fission.conv_gradient import conv_weight_gradient
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate, round_to
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, few_channels, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

Dims = tuple[int, ...]


def patched(
    size: Dims,
    window: Dims,
    stride: Dims = (),
    *,
    pads: Dims = (),
    channels: int = 3,
    weight: bool = False,
    groups: int = 1,
) -> Graph:
    """conv(x, w) + bias, then positions in a row."""
    ones = (1,) * len(size)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, channels, *size)))
    shape = (8, channels // groups, *window)
    rng = np.random.default_rng(0)
    w = b.constant(rng.normal(size=shape).astype(np.float32)) if weight else b.input(TensorType(DType.F32, shape))
    lo = pads or (0,) * len(size)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs(stride or window, lo, lo, ones, groups))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(DType.F32, (8,))), (8, *ones)))
    flat = b.reshape(y, (2, 8, int(np.prod(b.type_of(y).shape[2:]))))
    return b.build([b.transpose(flat, (0, 2, 1))])


def products(found: Alternatives) -> list[int]:
    return [i for i, n in enumerate(found.graph.nodes) if n.prim is Prim.MATMUL]


@pytest.mark.parametrize(
    "graph",
    [patched((8, 12), (4, 4)), patched((6, 10), (2, 5)), patched((12,), (3,)), patched((4, 4), (4, 4), channels=1)],
    ids=["4x4", "2x5", "one dimension", "one patch"],
)
def test_the_same_numbers(graph: Graph) -> None:
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    assert len(products(found)) == 1 and len(found.classes) == 1
    ((extra, original),) = found.classes.items()
    whole = Graph(found.graph.nodes, found.graph.inputs, (original, extra), found.graph.constants)
    rng = np.random.default_rng(1)
    inputs = [rng.normal(size=graph.type_of(i).shape).astype(np.float32) for i in graph.inputs]
    one, other = evaluate(whole, inputs, precise=True)
    assert_allclose(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "graph",
    [
        patched((8, 8), (4, 4), (2, 2)),
        patched((9, 8), (4, 4)),
        patched((8, 8), (4, 4), pads=(2, 2)),
        patched((8, 8), (4, 4), channels=4, groups=2),
        patched((8, 8), (4, 4), channels=16),
        patched((8, 8), (4, 4), weight=True),
    ],
    ids=["overlap", "a rest", "padding", "groups", "many channels", "a constant weight"],
)
def test_where_it_is_not_offered(graph: Graph) -> None:
    assert products(find_alternatives(graph, on_gpu=True)) == []


def test_on_a_processor_it_is_not_offered() -> None:
    assert products(find_alternatives(patched((8, 12), (4, 4)))) == []


def test_the_product_with_what_is_around_it_is_a_candidate() -> None:
    """From the image and the weight as they lie: what a template of products takes."""
    found = find_alternatives(patched((8, 12), (4, 4)), on_gpu=True)
    (product,) = products(found)
    groups = [c for c in enumerate_candidates(found.graph, alternatives=found).candidates if c.members >> product & 1]
    assert any(c.inputs == found.graph.inputs[:2] for c in groups)
    (alone,) = (c for c in groups if c.members == 1 << product)
    cut = extract(found.graph, alone, (Format.ROW,) * len(alone.inputs), (Format.ROW,)).problem
    assert [cut.graph.type_of(i).shape for i in cut.graph.inputs] == [(2, 2, 3, 4, 4, 3), (4, 4, 3, 8)]


def stem(channels: int, *, dtype: DType = DType.BF16, size: int = 224, rows: int = 8, weight: bool = False) -> Graph:
    """The first convolution of a ResNet."""
    b = GraphBuilder()
    x, shape = b.input(TensorType(dtype, (rows, channels, size, size))), (64, channels, 7, 7)
    w = b.constant(np.ones(shape, np.float32), dtype) if weight else b.input(TensorType(dtype, shape))
    return b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((2, 2), (3, 3), (3, 3), (1, 1), 1))])


def multiplied(graph: Graph) -> list[tuple[int, ...]]:
    """Shapes of the left operands of products that stand for convolutions."""
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    return [found.graph.type_of(found.graph.nodes[i].inputs[0]).shape for i in products(found)]


def test_windows_that_overlap_are_rows_of_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplied(stem(3)) == [(8 * 112 * 112, 7 * 8 * 3)]
    for other in (stem(3, dtype=DType.F32), stem(8), stem(16), stem(3, size=32, rows=1), stem(3, weight=True)):
        assert multiplied(other) == []
    monkeypatch.setattr(few_channels, "LEAST_FLOPS", 0)
    graph = stem(3, size=9, rows=1)
    found = find_alternatives(graph, on_gpu=True)
    ((extra, original),) = found.classes.items()
    whole = Graph(found.graph.nodes, found.graph.inputs, (original, extra), found.graph.constants)
    rng = np.random.default_rng(1)
    inputs = [round_to(rng.normal(size=graph.type_of(i).shape).astype(np.float32), DType.BF16) for i in graph.inputs]
    one, other_ = evaluate(whole, inputs, precise=True)
    assert_allclose(other_, one, rtol=1e-12, atol=1e-12)


def test_what_only_makes_lines_longer_reads_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite pixel beside a window is not multiplied with the zero that stands behind its last tap."""
    monkeypatch.setattr(few_channels, "LEAST_FLOPS", 0)
    graph = stem(3, size=9, rows=1)
    found = find_alternatives(graph, on_gpu=True)
    ((extra, original),) = found.classes.items()
    whole = Graph(found.graph.nodes, found.graph.inputs, (original, extra), found.graph.constants)
    inputs = [np.ones(graph.type_of(i).shape, np.float32) for i in graph.inputs]
    inputs[0][0, :, 0, 4] = np.inf  # of the fields of the first column of results the seventh tap is at column 3
    one, other = evaluate(whole, inputs, precise=True)
    assert np.isfinite(one[..., 0]).all() and not np.isfinite(one[..., 0, 1]).any()
    np.testing.assert_array_equal(np.isfinite(other), np.isfinite(one))


def trained(kernel: int = 7, stride: int = 2, pad: int = 3, *, wrong: int = 0, dilation: int = 1) -> Graph:
    """A first convolution and its weight's gradient; `wrong`: of an image that is padded by so many more."""
    b = GraphBuilder()
    x, w = (b.input(TensorType(DType.BF16, shape)) for shape in ((2, 3, 13, 12), (8, 3, kernel, kernel)))
    attrs = a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (dilation, dilation))
    y = b.add(Prim.CONV, x, w, attrs=attrs)
    dy = b.input(b.type_of(y))
    other = b.apply(Prim.NEG, x) if wrong else x
    gradient = conv_weight_gradient(
        b, dy, other, kernel=(kernel,) * 2, strides=(stride,) * 2, pads=(pad,) * 2, dilations=(dilation,) * 2
    )
    assert not isinstance(gradient, Declined)
    return b.build([y, gradient])


@pytest.mark.parametrize("graph", [trained(), trained(3, 2, 1), trained(3, 1, 0), trained(3, 1, 2, dilation=2)])
def test_the_weights_gradient_reads_the_same_windows(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    monkeypatch.setattr(few_channels, "LEAST_FLOPS", 0)
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    pairs = [(e, o) for e, o in found.classes.items() if found.graph.nodes[o].prim is Prim.MATMUL]
    ((extra, original),) = pairs
    matrices = [found.graph.nodes[i].inputs for i, n in enumerate(found.graph.nodes) if n.prim is Prim.MATMUL]
    forward, backward = (inputs for inputs in matrices if inputs != graph.nodes[original].inputs)
    assert forward[0] == backward[1]
    whole = Graph(found.graph.nodes, found.graph.inputs, (original, extra), found.graph.constants)
    rng = np.random.default_rng(4)
    inputs = [rng.integers(-3, 4, graph.type_of(i).shape).astype(np.float32) for i in graph.inputs]
    one, other = evaluate(whole, inputs, precise=True)
    np.testing.assert_array_equal(other, one)


def test_the_gradient_of_another_image_reads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_channels, "LEAST_FLOPS", 0)
    found = find_alternatives(trained(wrong=1), on_gpu=True)
    assert Prim.MATMUL not in {found.graph.nodes[o].prim for o in found.classes.values()}
