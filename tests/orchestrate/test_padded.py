"""Channels padded to whole vectors: the same values, zeros behind them, and chosen where the prices say so."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from weft.fission.gelu import gelu
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.kernels.candidate import Kind
from weft.orchestrate.alternatives import Alternatives, find_alternatives, padded
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import format_choices
from weft.orchestrate.select import Priced, select

PRODUCTS = (Prim.MATMUL, Prim.CONV)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are looked at as well."""
    monkeypatch.setattr(padded, "LEAST_FLOPS", 0)


class Net:
    def __init__(self, dtype: DType = DType.F16, seed: int = 0, *, positive: bool = False) -> None:
        self.b, self.dtype, self.rng = GraphBuilder(), dtype, np.random.default_rng(seed)
        self.positive = positive
        """Weights leave an infinity one: with both signs it becomes NaN anyway."""

    def input(self, *shape: int) -> NodeId:
        return self.b.input(TensorType(self.dtype, shape))

    def weight(self, *shape: int) -> NodeId:
        data = self.rng.standard_normal(shape) / max(1, math.prod(shape[1:])) ** 0.5
        data = np.abs(data) + 1e-3 if self.positive else data
        return self.b.constant(data.astype(self.dtype.numpy), self.dtype)

    def linear(self, x: NodeId, out: int) -> NodeId:
        y = self.b.add(Prim.MATMUL, x, self.weight(self.b.type_of(x).shape[-1], out))
        return self.b.apply(Prim.ADD, y, self.weight(out))

    def conv(self, x: NodeId, out: int, k: int = 3, groups: int = 1) -> NodeId:
        w = self.weight(out, self.b.type_of(x).shape[1] // groups, k, k)
        attrs = a.ConvAttrs((1, 1), (k // 2, k // 2), (k // 2, k // 2), (1, 1), groups)
        return self.b.apply(Prim.ADD, self.b.add(Prim.CONV, x, w, attrs=attrs), self.weight(out, 1, 1))

    def relu(self, x: NodeId) -> NodeId:
        return self.b.apply(Prim.MAX, x, 0.0)

    def exp(self, x: NodeId) -> NodeId:
        return self.b.apply(Prim.EXP, x)

    def pool(self, x: NodeId) -> NodeId:
        return self.b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)))


def images() -> Graph:
    """Convolutions with 35, 255 and 3 channels between, one of them by channel, one behind a pool."""
    net = Net()
    x = net.relu(net.conv(net.input(1, 16, 12, 12), 35))
    x = net.exp(net.conv(x, 35, groups=35))
    x = net.pool(net.relu(net.conv(x, 255, 1)))
    return net.b.build([net.conv(net.exp(net.conv(x, 3)), 16)])


def layers() -> Graph:
    """Rows in two dimensions, 255 and 35 columns."""
    net = Net()
    b = net.b
    x = b.reshape(net.input(4, 32, 40), (128, 40))
    x = b.reshape(net.linear(x, 255), (4, 32, 255))
    x = net.linear(b.reshape(net.relu(x), (128, 255)), 35)
    y = gelu(b, x)
    assert isinstance(y, int)
    return b.build([net.linear(y, 64)])


def residuals() -> Graph:
    """35 channels everywhere, sums of two, a head over means."""
    net = Net()
    x = net.relu(net.conv(net.input(2, 16, 9, 9), 35))
    for _ in range(2):
        x = net.relu(net.b.apply(Prim.ADD, x, net.conv(net.relu(net.conv(x, 35)), 35)))
    mean = net.b.reshape(net.b.reduce(Prim.REDUCE_SUM, x, (2, 3)), (2, 35))
    return net.b.build([net.linear(mean, 10)])


def squeezed() -> Graph:
    """Channels scaled by what is made of their means: every form of broadcast."""
    net = Net()
    x = net.relu(net.conv(net.input(2, 16, 9, 9), 35))
    gate = net.conv(net.relu(net.conv(net.b.reduce(Prim.REDUCE_SUM, x, (2, 3)), 9, 1)), 35, 1)
    high = net.b.reduce(Prim.REDUCE_MAX, x, (1,))
    x = net.b.apply(Prim.ADD, net.b.apply(Prim.MUL, x, gate), high)
    return net.b.build([net.conv(x, 16)])


def turned() -> Graph:
    """Tokens that become pixels, reflected and shifted on the way."""
    net = Net()
    b = net.b
    x = b.transpose(net.linear(net.input(2, 81, 24), 35), (0, 2, 1))
    x = b.reshape(x, (2, 35, 9, 9))
    x = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    x = b.slice(x, (0, 0, 1, 0), (2, 35, 9, 11), (1, 1, 1, 1))
    two = b.add(Prim.CONCAT, x, net.exp(x), attrs=a.ConcatAttrs(3))
    return b.build([net.conv(two, 16)])


def concatenated() -> Graph:
    """Channels side by side, which only a copy pads."""
    net = Net()
    x = net.input(1, 12, 16, 16)
    parts = [net.b.slice(x, (0, 0, i, 0), (1, 12, 8, 16), (1, 1, 1, 1)) for i in (0, 8)]
    both = net.b.add(Prim.CONCAT, *parts, net.exp(parts[0]), attrs=a.ConcatAttrs(1))
    whole = net.b.slice(both, (0, 0, 0, 0), (1, 35, 8, 16), (1, 1, 1, 1))
    return net.b.build([net.conv(whole, 16)])


GRAPHS: dict[str, Callable[[], Graph]] = {
    f.__name__: f for f in (images, layers, residuals, squeezed, turned, concatenated)
}


def found_in(graph: Graph) -> Alternatives:
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    assert found.acyclic()
    return found


def extras(found: Alternatives, *prims: Prim) -> list[NodeId]:
    """Nodes of the alternatives, which are padded forms alone in these graphs."""
    return [i for i in bits(found.extra) if found.graph.nodes[i].prim in prims]


def values_of(graph: Graph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    whole = Graph(graph.nodes, graph.inputs, tuple(range(len(graph))), graph.constants)
    with np.errstate(all="ignore"):
        return evaluate(whole, inputs, precise=True)


def random_inputs(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(graph.type_of(i).shape).astype(graph.type_of(i).dtype.numpy) for i in graph.inputs]


@pytest.mark.parametrize("name", list(GRAPHS))
def test_the_values_are_the_same(name: str) -> None:
    found = found_in(GRAPHS[name]())
    values = values_of(found.graph, random_inputs(found.graph))
    assert found.classes
    for extra, original in found.classes.items():
        np.testing.assert_allclose(values[extra], values[original], rtol=1e-9, atol=1e-9)


def channels_read(graph: Graph, i: NodeId) -> int:
    """Channels of a group, or columns of the left operand."""
    node = graph.nodes[i]
    return graph.type_of(node.inputs[1]).shape[1 if node.prim is Prim.CONV else 0]


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "concatenated"])
def test_products_read_whole_vectors_with_zeros_behind(name: str) -> None:
    found = found_in(GRAPHS[name]())
    graph = found.graph
    values = values_of(graph, random_inputs(graph))
    sums = [channels_read(graph, i) for i in extras(found, *PRODUCTS)]
    assert len(sums) >= 2
    assert all(k % 8 == 0 or k == 1 for k in sums), "1: by channel"
    cleaned = extras(found, Prim.SELECT)
    assert cleaned
    for i in cleaned:
        lanes = values[graph.nodes[i].inputs[0]]
        assert not lanes.all()
        assert (values[i][~lanes] == 0).all()


@pytest.mark.parametrize("name", ["images", "layers", "residuals"])
def test_infinities_stay_where_they_were(name: str) -> None:
    """A zero of a weight times an infinity is NaN: it must not reach the sums of the other channels."""
    graph = GRAPHS[name]()
    found = found_in(graph)
    inputs = random_inputs(graph)
    inputs[0].reshape(-1)[:3] = (-np.inf, np.inf, np.nan)
    inputs[0].reshape(-1)[-1] = -np.inf
    values = values_of(found.graph, inputs)
    for extra, original in found.classes.items():
        np.testing.assert_array_equal(np.isnan(values[extra]), np.isnan(values[original]))
        np.testing.assert_array_equal(np.isinf(values[extra]), np.isinf(values[original]))


def test_minus_infinity_that_a_relu_makes_zero_is_zero() -> None:
    """Every weight positive: -inf everywhere, 0 behind the relu, finite results; lanes of NaN would spoil them."""
    net = Net()
    b = net.b
    x = net.input(64, 16)
    y = net.relu(b.add(Prim.MATMUL, x, b.constant(np.ones((16, 35), np.float16))))
    found = found_in(b.build([b.add(Prim.MATMUL, y, net.weight(35, 64))]))
    inputs = [np.full((64, 16), -np.inf, np.float16)]
    values = values_of(found.graph, inputs)
    ((extra, original),) = found.classes.items()
    assert (values[original] == 0).all()
    assert (values[extra] == 0).all()


def repeated() -> Graph:
    """One number of each row in all its columns, behind rows that a product writes."""
    net = Net(positive=True)
    b = net.b
    x = net.relu(net.linear(net.input(70, 16), 35))
    one = b.broadcast(net.exp(net.input(6, 1)), (6, 35))
    return b.build([net.linear(b.add(Prim.CONCAT, x, one, attrs=a.ConcatAttrs(0)), 24)])


def repeated_alone() -> Graph:
    """A product reads nothing else."""
    net = Net(positive=True)
    b = net.b
    x = b.reshape(b.broadcast(net.exp(net.input(70, 1, 1)), (70, 1, 35)), (70, 35))
    return b.build([net.linear(x, 24)])


def counted() -> Graph:
    """Rows of indices behind rows that a product writes."""
    net = Net(positive=True)
    b = net.b
    x = net.linear(net.input(70, 16), 35)
    return b.build([net.linear(b.add(Prim.CONCAT, x, b.iota((6, 35), 1, net.dtype), attrs=a.ConcatAttrs(0)), 24)])


def empty_windows() -> Graph:
    """Largest numbers of windows of which some lie beside the image: minus infinity in every channel."""
    net = Net(positive=True)
    x = net.conv(net.input(2, 16, 32, 2), 35)
    x = net.b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((1, 2), (1, 1), (0, 1), (0, 2), (1, 3)))
    return net.b.build([net.conv(x, 24, 1)])


SPREADING = (repeated, repeated_alone, counted, empty_windows)


@pytest.mark.parametrize("made", SPREADING, ids=lambda f: f.__name__)
def test_lanes_that_are_no_zeros_by_themselves_do_not_spoil_sums(made: Callable[[], Graph]) -> None:
    """What is repeated along the channels, or no maximum at all, is infinite behind the last channel, too."""
    graph = made()
    found = found_in(graph)
    inputs = random_inputs(graph)
    inputs[-1].reshape(-1)[:2] = np.inf, -np.inf  # of which one leaves a finite number
    compare(found, inputs)
    assert any(channels_read(found.graph, i) == 40 for i in extras(found, *PRODUCTS))


def compare(found: Alternatives, inputs: list[np.ndarray]) -> int:
    """Every alternative is what it stands for, infinities and NaN included; how many numbers were none."""
    values, strange = values_of(found.graph, inputs), 0
    for extra, original in found.classes.items():
        np.testing.assert_allclose(values[extra], values[original], rtol=1e-9, atol=1e-9, equal_nan=True)
        strange += int((~np.isfinite(values[original])).sum())
    return strange


class Random(Net):
    """Steps on an image of odd channels, or on rows of them, of any kind that keeps or moves lanes."""

    def step(self, x: NodeId) -> NodeId:
        b, shape = self.b, self.b.type_of(x).shape
        match self.rng.integers(9):
            case 0:
                return self.relu(x)
            case 1:
                return b.apply(Prim.SUB, b.apply(Prim.MUL, x, x), x)
            case 2:
                return b.apply(Prim.DIV, 1.0, self.relu(x))
            case 3:
                return self.pool(x)
            case 4:
                axis = int(self.rng.choice([0, 2, 3]))
                other = tuple(
                    1 if i == 1 or (i != axis and self.rng.random() < 0.5) else n for i, n in enumerate(shape)
                )
                one = b.apply(Prim.DIV, 1.0, self.relu(self.input(*other)))
                return b.add(Prim.CONCAT, x, b.broadcast(one, shape), attrs=a.ConcatAttrs(axis))
            case 5:
                turned = b.transpose(x, (0, 2, 1, 3))
                turned = b.add(Prim.PAD, turned, attrs=a.PadAttrs((0, 1, 0, 1), (0, 0, 0, 1), "edge"))
                return b.transpose(turned, (0, 2, 1, 3))
            case 6:
                gate = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_MAX, x, (1,)), b.reduce(Prim.REDUCE_SUM, x, (2, 3)))
                return b.apply(Prim.MUL, x, gate)
            case 7:
                return b.apply(Prim.ADD, x, b.apply(Prim.DIV, 1.0, self.relu(self.input(shape[0], 1, 1, 1))))
            case _:
                return self.conv(x, shape[1], groups=shape[1])


def random_net(seed: int) -> Graph:
    net = Random(seed=seed, positive=seed % 4 > 0)
    channels = int(net.rng.choice([3, 11, 35]))
    x = net.conv(net.input(2, 8, 7, 7), channels, 1)
    for _ in range(int(net.rng.integers(2, 6))):
        x = net.step(x)
        if net.rng.random() < 0.4:
            x = net.conv(x, channels, int(net.rng.choice([1, 3])))
    return net.b.build([net.conv(x, 8, 1)])


def test_padded_networks_are_right_about_numbers_that_are_none() -> None:
    strange = 0
    for seed in range(60):
        graph = random_net(seed)
        found = found_in(graph)
        inputs, rng = random_inputs(graph, seed), np.random.default_rng(seed)
        for x in inputs:
            few = rng.random(x.shape) < 0.01
            x[few] = rng.choice([np.inf, -np.inf, np.nan, 0.0], size=few.sum())
        strange += compare(found, inputs)
    assert strange > 10_000


# ---- the program


def priced(found: Alternatives, cost: Callable[[Graph, int], float], *, convert: float = 1.0) -> list[Priced]:
    """Every candidate at the sum of its members' costs, a launch of 1 and something for what it reads and writes."""
    graph = found.graph
    made = []
    for c in enumerate_candidates(graph, alternatives=found).candidates:
        for f in format_choices(graph, c):
            price = convert if c.kind is Kind.CONVERT else 1.0 + sum(cost(graph, i) for i in bits(c.members))
            made.append(Priced(c, f.inputs, f.outputs, price))
    return made


def chosen_members(found: Alternatives, cost: Callable[[Graph, int], float]) -> set[int]:
    offers = priced(found, cost)
    solution = select(found.graph, offers, alternatives=found, gap=0.0, plans=1)[0]
    return {i for k in solution.chosen for i in bits(offers[k].candidate.members)}


def cost_of(odd: float, *, other: float = 0.0, copy: float = 0.0) -> Callable[[Graph, int], float]:
    """Contractions with an odd sum cost `odd`, all others 2; copies and slices `copy`."""

    def cost(graph: Graph, i: int) -> float:
        node = graph.nodes[i]
        if node.prim in PRODUCTS:
            return odd if channels_read(graph, i) % 8 and channels_read(graph, i) > 1 else 2.0
        return copy if node.prim in (Prim.PAD, Prim.SLICE) else other

    return cost


@pytest.mark.parametrize("name", ["images", "layers", "residuals", "squeezed"])
def test_the_padded_form_is_taken_where_it_is_cheaper(name: str) -> None:
    found = found_in(GRAPHS[name]())
    assert chosen_members(found, cost_of(20.0)) & set(extras(found, *PRODUCTS))
    assert not chosen_members(found, cost_of(1.0)) & set(extras(found, *PRODUCTS))


def test_a_plan_with_padded_forms_has_no_copies_where_kernels_write_them() -> None:
    found = found_in(images())
    members = chosen_members(found, cost_of(20.0))
    kinds = [found.graph.nodes[i].prim for i in members]
    assert Prim.PAD not in kinds
    assert Prim.SLICE not in kinds
    channels = [found.graph.type_of(i).shape[1] for i in members if found.graph.nodes[i].prim in PRODUCTS]
    assert sorted(channels) == [8, 16, 40, 40, 256]


def test_a_copy_is_taken_where_it_costs_less_than_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "WORTH_A_COPY", 0)
    net = Net()
    found = found_in(net.b.build([net.conv(net.input(1, 35, 12, 12), 16)]))
    (copy,) = extras(found, Prim.PAD)
    assert copy in chosen_members(found, cost_of(9.0, copy=1.0))
    assert copy not in chosen_members(found, cost_of(9.0, copy=30.0))
    assert copy not in chosen_members(found, cost_of(2.0))


def test_results_of_the_graph_are_sliced_or_computed_plainly() -> None:
    """A value that a product reads and the caller wants: both forms, or the plain one for both."""
    net = Net()
    y = net.relu(net.conv(net.input(1, 16, 12, 12), 35))
    graph = net.b.build([y, net.conv(y, 16)])
    found = found_in(graph)
    (sliced,) = extras(found, Prim.SLICE)
    assert found.classes[sliced] == y
    assert sliced in chosen_members(found, cost_of(30.0, copy=1.0))
    assert sliced not in chosen_members(found, cost_of(2.0, copy=1.0))
    assert found.graph.outputs == graph.outputs
    assert [found.graph.type_of(o).shape[1] for o in found.graph.outputs] == [35, 16]


def test_the_alternatives_of_other_rules_stay_candidates() -> None:
    """Two products that may be merged, whose results are padded: both ways are enumerated."""
    net = Net()
    x = net.input(1, 16, 12, 12)
    parts = [net.relu(net.conv(net.relu(net.conv(x, 35)), 16)) for _ in range(2)]
    graph = net.b.build([net.b.apply(Prim.ADD, *parts)])
    plain = find_alternatives(graph)
    assert len(plain.classes) == 2
    found = found_in(graph)

    def sets(of: Alternatives) -> set[tuple[int, tuple[int, ...]]]:
        return {(c.members, c.outputs) for c in enumerate_candidates(of.graph, alternatives=of).candidates}

    assert sets(plain) < sets(found)


# ---- where there is none


def untouched(graph: Graph) -> bool:
    plain = find_alternatives(graph)
    found = find_alternatives(graph, on_gpu=True)
    return found.graph == plain.graph and found.classes == plain.classes


def chain(channels: int, dtype: DType = DType.F16, batch: int = 1, groups: int = 1) -> Graph:
    net = Net(dtype)
    y = net.relu(net.conv(net.input(batch, 16, 12, 12), channels))
    return net.b.build([net.conv(y, 16 * groups, groups=groups)])


@pytest.mark.parametrize(
    ("channels", "dtype", "padded_to"),
    [(35, DType.F16, 40), (35, DType.BF16, 40), (35, DType.F32, 36), (36, DType.F16, 40), (3, DType.F32, 4)],
)
def test_a_vector_is_sixteen_bytes(channels: int, dtype: DType, padded_to: int) -> None:
    found = found_in(chain(channels, dtype))
    assert {found.graph.type_of(i).shape[1] for i in extras(found, Prim.SELECT)} == {padded_to}


@pytest.mark.parametrize(
    "graph",
    [
        chain(40),
        chain(36, DType.F32),
        chain(35, DType.F64),
        chain(1),
        chain(2),
        chain(35, batch=0),
        chain(36, groups=4),
    ],
    ids=["whole", "whole for f32", "f64", "one", "mostly zeros", "empty", "groups"],
)
def test_nothing_is_padded_where_there_is_nothing_to_gain(graph: Graph) -> None:
    assert untouched(graph)


def test_weights_that_are_no_constants_are_not_padded() -> None:
    net = Net()
    y = net.relu(net.linear(net.input(128, 16), 35))
    assert untouched(net.b.build([net.b.add(Prim.MATMUL, y, net.input(35, 16))]))


def test_few_rows_and_small_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    assert untouched(net.b.build([net.linear(net.relu(net.linear(net.input(8, 64), 35)), 64)]))
    monkeypatch.setattr(padded, "LEAST_FLOPS", 1 << 30)
    assert untouched(images())


def test_a_graph_input_is_copied_for_large_products_alone() -> None:
    net = Net()
    small = net.b.build([net.conv(net.input(1, 35, 12, 12), 16)])
    assert untouched(small)
    net = Net()
    large = found_in(net.b.build([net.linear(net.input(4096, 1001), 512)]))
    assert len(extras(large, Prim.PAD)) == 1
    assert [large.graph.type_of(i) for i in large.graph.inputs] == [TensorType(DType.F16, (4096, 1001))]


def test_images_of_three_channels_are_read_as_they_are() -> None:
    """Windows that overlap have a kernel for so few channels; patches beside each other have none."""
    for stride, copies in ((1, 0), (16, 1)):
        net = Net()
        attrs = a.ConvAttrs((stride,) * 2, (0, 0), (0, 0), (1, 1))
        y = net.b.add(Prim.CONV, net.input(16, 3, 224, 224), net.weight(768, 3, 16, 16), attrs=attrs)
        assert len(extras(found_in(net.b.build([y])), Prim.PAD)) == copies


def test_neither_strict_nor_a_processor_has_padded_forms() -> None:
    graph = images()
    assert find_alternatives(graph, strict=True, on_gpu=True).graph is graph
    assert not any(graph.type_of(i).shape[1:2] == (40,) for i in range(len(find_alternatives(graph).graph)))


def test_a_limit_on_forms_leaves_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "MOST_NODES", 3)
    assert untouched(images())
