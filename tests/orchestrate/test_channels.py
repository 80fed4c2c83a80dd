"""Products over channels that move: same values, fewer operations, and only past what commutes with them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.ir.random_graphs import random_inputs
from tests.orchestrate.graphs import Net

from weft.ir import attrs as a
from weft.ir.attrs import ConvAttrs
from weft.ir.graph import Graph, NodeId, bits
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.ir.work import node_flops
from weft.orchestrate.alternatives import Alternatives, channels, find_alternatives


def values_of(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    whole = Graph(graph.nodes, graph.inputs, tuple(range(len(graph))), graph.constants)
    return evaluate(whole, random_inputs(graph, seed), precise=True)


def check_values(found: Alternatives, seed: int = 0) -> None:
    values = values_of(found.graph, seed)
    verify_graph(found.graph)
    for extra, original in found.classes.items():
        scale = np.abs(values[original]).max()
        np.testing.assert_allclose(values[extra], values[original], rtol=1e-5, atol=1e-5 * scale)


def flops(found: Alternatives, *, instead: bool) -> int:
    """Operations of the graph, with every alternative taken or none."""
    graph = found.graph
    taken = {o: e for e, o in found.classes.items()} if instead else {}
    live: set[NodeId] = set()
    waiting = list(graph.outputs)
    while waiting:
        v = waiting.pop()
        v = taken.get(v, v)
        if v not in live:
            live.add(v)
            waiting.extend(graph.nodes[v].inputs)
    return sum(node_flops(graph.nodes[v], graph) for v in live)


def upsample(net: Net, x: NodeId, factor: int, *, linear: bool = True) -> NodeId:
    """As the resize rule writes it: two taps per axis, one axis after the other."""
    b = net.b
    for axis in (2, 3):
        n = b.type_of(x).shape[axis]
        at = (np.arange(n * factor) + 0.5) / factor - 0.5
        lower = np.clip(np.floor(at), 0, n - 1)
        upper = np.clip(np.floor(at) + 1, 0, n - 1)
        weight = (at - np.floor(at)).astype(np.float32).reshape(-1, *(1,) * (3 - axis))
        taps = [(lower, 1 - weight), (upper, weight)] if linear else [(lower, None)]
        parts = []
        for index, w in taps:
            part = b.add(Prim.GATHER, x, b.constant(index.astype(np.int64)), attrs=a.GatherAttrs(axis))
            parts.append(part if w is None else b.apply(Prim.MUL, part, b.constant(w)))
        x = parts[0] if len(parts) == 1 else b.apply(Prim.ADD, *parts)
    return x


def concat(net: Net, *parts: NodeId, axis: int = 1) -> NodeId:
    return net.b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(axis))


def to_image(net: Net, x: NodeId, height: int, width: int) -> NodeId:
    n, _, c = net.b.type_of(x).shape
    return net.b.reshape(net.b.transpose(x, (0, 2, 1)), (n, c, height, width))


def decode_head(batch: int = 1, size: int = 16, decoder: int = 24, project: bool = True) -> tuple[Net, NodeId]:
    """SegFormer's: project each level, resize, concatenate, fuse; returns the fused map before its bias."""
    net = Net()
    parts = []
    for level, c in enumerate((4, 8, 12, 16)):
        s = size >> level
        if project:
            y = net.linear(net.input(batch, s * s, c), decoder)
            y = to_image(net, y, s, s)
        else:
            y = net.input(batch, decoder, s, s)
        parts.append(upsample(net, y, 1 << level) if level else y)
    return net, net.conv(concat(net, *parts), decoder, 1, bias=False)


def found_in(net: Net, *outputs: NodeId, strict: bool = False) -> Alternatives:
    return find_alternatives(clean_up(net.build(*outputs), strict=strict).graph, strict=strict)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("project", [True, False], ids=["projections", "maps"])
def test_decode_head_runs_at_low_resolution(batch: int, project: bool) -> None:
    net, fused = decode_head(batch, project=project)
    found = found_in(net, net.relu(fused))
    graph = found.graph
    assert [graph.nodes[o].prim for o in found.classes.values()] == [Prim.CONV]
    kinds = Counter(graph.nodes[i].prim for i in bits(found.extra))
    assert kinds[Prim.CONCAT] == 0, "the concatenation is a sum now"
    assert kinds[Prim.MATMUL] + kinds[Prim.CONV] == 4
    resized = 24 * 16 * 16 * batch * 3 * 3  # what the resizes cost at least
    assert flops(found, instead=True) < flops(found, instead=False) / 2
    assert flops(found, instead=True) > resized
    check_values(found)


def test_projections_and_their_biases_are_multiplied_in_advance() -> None:
    net, fused = decode_head()
    found = found_in(net, fused)
    graph = found.graph
    products = [i for i in bits(found.extra) if graph.nodes[i].prim is Prim.MATMUL]
    sources = {graph.nodes[i].inputs[0] for i in products}
    assert sources == set(graph.inputs), "each reads a level itself, not its projection"
    assert sorted(graph.type_of(graph.nodes[i].inputs[1]).shape for i in products) == [(c, 24) for c in (4, 8, 12, 16)]


def test_the_count_of_segformer_b0() -> None:
    """Shapes of the real head: 9.11 GFLOP become 0.59, of which 0.52 are products."""
    graph = real_head()
    found = find_alternatives(graph)
    assert flops(found, instead=False) == pytest.approx(9.11e9, rel=0.01)
    assert flops(found, instead=True) == pytest.approx(0.587e9, rel=0.01)
    products = [found.graph.nodes[i] for i in bits(found.extra) if found.graph.nodes[i].prim is Prim.MATMUL]
    assert sum(node_flops(n, found.graph) for n in products) == pytest.approx(0.52e9, rel=0.01)


def real_head() -> Graph:
    net = Net()
    parts = []
    for level, c in enumerate((32, 64, 160, 256)):
        s = 128 >> level
        y = to_image(net, net.linear(net.input(1, s * s, c), 256), s, s)
        parts.append(upsample(net, y, 1 << level) if level else y)
    return clean_up(net.build(net.conv(concat(net, *parts[::-1]), 256, 1, bias=False))).graph


def test_nearest_resize_of_one_of_two_maps() -> None:
    """A feature pyramid: the upsampled half of the product runs before the resize."""
    net = Net()
    low, high = net.input(1, 16, 4, 4), net.input(1, 8, 8, 8)
    found = found_in(net, net.conv(concat(net, upsample(net, low, 2, linear=False), high), 8, 1))
    assert len(found.classes) == 1
    assert flops(found, instead=True) < 0.7 * flops(found, instead=False)
    check_values(found)


def test_strict_has_none() -> None:
    net, fused = decode_head()
    assert not found_in(net, fused, strict=True).classes


def test_a_concatenation_alone_saves_no_operations() -> None:
    net = Net()
    x, y = net.input(1, 8, 6, 6), net.input(1, 8, 6, 6)
    assert not found_in(net, net.conv(concat(net, x, y), 8, 1)).classes


def test_what_others_read_is_not_saved() -> None:
    """The resizes of the maps are saved only if nobody else reads the concatenation."""
    net = Net()
    x = net.input(1, 3, 8, 8)
    joined = concat(net, upsample(net, x, 2), upsample(net, net.b.apply(Prim.EXP, x), 2))
    fused = net.conv(joined, 6, 1, bias=False)
    assert len(found_in(net, fused).classes) == 1
    again = found_in(net, fused, net.b.apply(Prim.EXP, joined))
    assert not again.classes


# What does not commute


def candidate() -> tuple[Net, NodeId]:
    """A map of low resolution, to which a test does something before it is resized and multiplied."""
    net = Net()
    return net, net.input(1, 12, 4, 4)


def channel_gather(net: Net, x: NodeId) -> NodeId:
    return net.b.add(Prim.GATHER, x, net.b.constant(np.arange(12)[::-1].copy()), attrs=a.GatherAttrs(1))


def channel_pad(net: Net, x: NodeId) -> NodeId:
    return net.b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 2, 0, 0), (0, 0, 0, 0)))


def padded(net: Net, x: NodeId, value: float, mode: a.PadMode = "constant") -> NodeId:
    return net.b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), mode, value))


def sliced(net: Net, x: NodeId, channels: tuple[int, int] = (0, 12), rows: Any = (0, 4, 1)) -> NodeId:
    n = net.b.type_of(x).shape[0]
    return net.b.slice(x, (0, channels[0], rows[0], 0), (n, channels[1], rows[1], 4), (1, 1, rows[2], 1))


def mixed(net: Net, x: NodeId) -> NodeId:
    return net.b.reshape(net.b.transpose(x, (0, 2, 1, 3)), net.b.type_of(x).shape)


BARRIERS = {
    "relu": lambda net, x: net.relu(x),
    "exp": lambda net, x: net.b.apply(Prim.EXP, x),
    "square": lambda net, x: net.b.apply(Prim.MUL, x, x),
    "factor per channel": lambda net, x: net.b.apply(Prim.MUL, x, net.weight(12, 1, 1)),
    "divided by itself": lambda net, x: net.b.apply(Prim.DIV, 2.0, x),
    "gathered channels": channel_gather,
    "padded channels": channel_pad,
    "sliced channels": lambda net, x: net.b.slice(x, (0, 3, 0, 0), (net.b.type_of(x).shape[0], 8, 4, 4), (1, 1, 1, 1)),
    "channels mixed with positions": lambda net, x: net.b.reshape(
        net.b.transpose(x, (0, 2, 1, 3)), net.b.type_of(x).shape
    ),
    "padded with ones": lambda net, x: padded(net, x, 1.0),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_barriers_stop_the_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may pass the resize, which stands after the barrier, but reads the barrier itself."""
    monkeypatch.setattr(channels, "WORTH", 1e9)
    net, x = candidate()
    barrier = BARRIERS[name](net, x)
    found = found_in(net, net.conv(upsample(net, barrier, 2), 6, 1))
    check_values(found)
    graph = found.graph
    products = [i for i in bits(found.extra) if graph.nodes[i].prim in (Prim.CONV, Prim.MATMUL)]
    assert len(products) == 1
    below = graph.nodes[products[0]].inputs[0]
    assert below not in graph.inputs, "the product reads what the barrier gives"


COMMUTES = {
    "negated": lambda net, x: net.b.apply(Prim.NEG, x),
    "one factor for all": lambda net, x: net.b.apply(Prim.MUL, x, 3.0),
    "factor per position": lambda net, x: net.b.apply(Prim.MUL, net.weight(4, 4), x),
    "divided per position": lambda net, x: net.b.apply(Prim.DIV, x, net.weight(1, 1, 4, 1)),
    "shifted per channel": lambda net, x: net.b.apply(Prim.ADD, x, net.weight(12, 1, 1)),
    "shifted by one number": lambda net, x: net.b.apply(Prim.SUB, x, 2.0),
    "subtracted from one number": lambda net, x: net.b.apply(Prim.SUB, 2.0, x),
    "shifted everywhere": lambda net, x: net.b.apply(Prim.ADD, x, net.weight(12, 4, 4)),
    "added to itself turned": lambda net, x: net.b.apply(Prim.ADD, x, net.b.transpose(x, (0, 1, 3, 2))),
    "padded with zeros": lambda net, x: padded(net, x, 0.0),
    "padded by reflection": lambda net, x: padded(net, x, 0.0, "reflect"),
    "padded by its edge": lambda net, x: padded(net, x, 0.0, "edge"),
    "joined along rows": lambda net, x: concat(net, x, net.b.apply(Prim.NEG, x), axis=2),
    "convolved": lambda net, x: net.conv(x, 12, 3),
}


@pytest.mark.parametrize("name", COMMUTES)
def test_linear_primitives_let_it_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "WORTH", 1e9)
    net, x = candidate()
    found = found_in(net, net.conv(upsample(net, COMMUTES[name](net, x), 2), 6, 1))
    check_values(found)
    graph = found.graph
    products = [i for i in bits(found.extra) if graph.nodes[i].prim in (Prim.CONV, Prim.MATMUL)]
    assert [graph.nodes[i].inputs[0] for i in products] == list(graph.inputs)


def test_a_slice_goes_first_where_it_leaves_less() -> None:
    net, x = candidate()
    found = found_in(net, net.conv(upsample(net, sliced(net, x, rows=(1, 2, 1)), 2), 6, 1))
    products = [n for n in found.graph.nodes[len(found.graph) // 2 :] if n.prim is Prim.CONV]
    assert found.graph.nodes[products[-1].inputs[0]].prim is Prim.SLICE
    check_values(found)


@pytest.mark.parametrize(
    "attrs",
    [
        a.ConvAttrs((2, 2), (0, 0), (0, 0), (1, 1)),
        a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)),
        a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), groups=2),
        a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), transposed=True, output_padding=(0, 0)),
    ],
    ids=["stride", "padding", "groups", "transposed"],
)
def test_products_that_do_more_than_mix_channels_stay(attrs: ConvAttrs) -> None:
    net, x = candidate()
    weight = net.weight(12, 12 // attrs.groups, 1, 1)
    image = upsample(net, x, 2)
    found = found_in(net, net.b.add(Prim.CONV, image, weight, attrs=attrs))
    assert all(
        found.graph.nodes[i].inputs[0] == image for i in found.classes
    )  # a transposed one, as a convolution there
    assert bool(found.classes) == attrs.transposed


def test_a_kernel_of_three_by_three_stays() -> None:
    net, x = candidate()
    assert not found_in(net, net.conv(upsample(net, x, 2), 6, 3)).classes


def test_weights_known_at_run_time_only_stay() -> None:
    net, x = candidate()
    weight = net.b.input(TensorType(DType.F32, (6, 12, 1, 1)))
    y = net.b.add(Prim.CONV, upsample(net, x, 2), weight, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    assert not found_in(net, y).classes


def test_a_weight_that_overflows_is_not_multiplied_in_advance() -> None:
    net, x = candidate()
    huge = net.b.constant(np.full((12, 12, 1, 1), 1e30, np.float32))
    plain = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1))
    y = net.b.add(Prim.CONV, x, huge, attrs=plain)
    weight = net.b.constant(np.full((6, 12, 1, 1), 1e30, np.float32))
    z = net.b.add(Prim.CONV, upsample(net, y, 2), weight, attrs=plain)
    found = find_alternatives(net.build(z))
    graph = found.graph
    assert {
        graph.nodes[graph.nodes[i].inputs[0]].prim for i in bits(found.extra) if graph.nodes[i].prim is Prim.CONV
    } == {Prim.CONV}, "the first product stays as it is"
    assert all(np.isfinite(data).all() for data in graph.constants.values())


def test_a_weight_that_is_not_finite_stays() -> None:
    net, x = candidate()
    weight = np.ones((6, 12, 1, 1), np.float32)
    weight[0, 0] = np.inf
    plain = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1))
    y = net.b.add(Prim.CONV, upsample(net, x, 2), net.b.constant(weight), attrs=plain)
    assert not find_alternatives(net.build(y)).classes


def test_half_precision_stays() -> None:
    net = Net()
    x = net.b.input(TensorType(DType.F16, (1, 12, 4, 4)))
    index = net.b.constant(np.arange(8) // 2)
    y = net.b.add(Prim.GATHER, x, index, attrs=a.GatherAttrs(2))
    weight = net.b.constant(np.ones((6, 12, 1, 1), np.float16))
    z = net.b.add(Prim.CONV, y, weight, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    assert not find_alternatives(net.build(z)).classes


def test_two_products_in_a_row_become_one() -> None:
    """A5 with constants: (x @ A + a) @ B costs less as x @ (A @ B) + a @ B."""
    net = Net()
    x = net.input(32, 8)
    found = found_in(net, net.linear(net.linear(x, 64), 8))
    assert [found.graph.nodes[o].prim for o in found.classes.values()] == [Prim.MATMUL]
    assert flops(found, instead=True) < flops(found, instead=False) / 5
    check_values(found)


def test_two_products_stay_where_the_middle_is_narrow() -> None:
    net = Net()
    x = net.input(32, 64)
    assert not found_in(net, net.linear(net.linear(x, 8), 64)).classes


ALL = [*BARRIERS.values(), *COMMUTES.values(), lambda net, x: sliced(net, x, rows=(3, 4, -1))]


def random_net(seed: int) -> Graph:
    """Branches of random steps, resized, concatenated and multiplied; steps that commute and such that do not."""
    rng = np.random.default_rng(seed)
    net = Net(seed)
    x = net.input(int(rng.integers(1, 3)), 12, 4, 4)
    branches = []
    for _ in range(rng.integers(1, 4)):
        y = x
        for _ in range(rng.integers(0, 4)):
            z = ALL[rng.integers(len(ALL))](net, y)
            if net.b.type_of(z).shape[1:] == (12, 4, 4):
                y = z
        branches.append(upsample(net, y, 2, linear=bool(rng.integers(2))) if rng.random() < 0.8 else y)
    size = max(net.b.type_of(y).shape[2] for y in branches)
    branches = [y if net.b.type_of(y).shape[2] == size else upsample(net, y, 2) for y in branches]
    joined = concat(net, *branches) if len(branches) > 1 else branches[0]
    if rng.random() < 0.3:
        joined = net.b.transpose(net.b.reshape(joined, (*net.b.type_of(joined).shape[:2], size * size)), (0, 2, 1))
        fused = net.linear(joined, int(rng.integers(1, 9)))
    else:
        fused = net.conv(joined, int(rng.integers(1, 9)), 1)
    outputs = [fused, joined] if rng.random() < 0.2 else [fused]
    return clean_up(net.build(*outputs)).graph


def test_200_random_nets_keep_their_values() -> None:
    offers = 0
    for seed in range(200):
        found = find_alternatives(random_net(seed))
        if not found.classes:
            continue
        offers += 1
        with np.errstate(all="ignore"):
            values = values_of(found.graph, seed)
        for extra, original in found.classes.items():
            wanted = values[original]
            finite = np.isfinite(wanted)
            scale = np.abs(wanted[finite]).max(initial=1.0)
            np.testing.assert_allclose(values[extra][finite], wanted[finite], rtol=1e-4, atol=1e-5 * scale)
    assert offers > 80
