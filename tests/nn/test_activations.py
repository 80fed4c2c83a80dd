"""The table of tuned activations: each entry whole, and one more entry is all that a new activation takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import Runner, error_of, exact, made, network, normal, text_of
from tests.generate.cuda.mlps import ACTIVATIONS, Net, mlp
from tests.generate.cuda.mlps import normal as normal_inputs
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.slow import few
from tests.typed import assert_allclose
from torch import nn

from weft.cli.mlp_run import activations
from weft.generate.cuda import templates
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.mlp.activation import unfused
from weft.generate.cuda.mlp.match import chain
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.generate.cuda.training import KINDS, Activation, Kept, Kind, called
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource
from weft.nn.layers import activation_of, layers_of, module_of

SOFTSIGN = Kind(
    "softsign",
    "Softsign",
    "softsign",
    Kept.RESULT,
    graph=lambda b, x: b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.ABS, x), 1.0)),
    slope=lambda n, g: n.mul(g, n.mul(n.less(n.op(Prim.ABS, n.x)), n.less(n.op(Prim.ABS, n.x)))),
    functions="static W_FN float beyond(float z) { return 1.0f + fabsf(z); }\n",
    of="return z / beyond(z);",
    back="const float s = 1.0f - fabsf(z); return g * (s * s);",
    fused=True,
    slots=(2.0, 1.0),
)
"""x / (1 + |x|); the derivative over the result y is (1 - |y|)^2."""


@pytest.fixture
def softsign(monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setitem(KINDS, SOFTSIGN.name, SOFTSIGN)
    return SOFTSIGN


@pytest.mark.parametrize("name", KINDS)
def test_modules_and_activations_are_two_names_of_one_thing(name: str) -> None:
    kind = KINDS[name]
    act = Activation(name, tuple(2 * x + 0.5 for x in kind.numbers.values()))
    assert activation_of(module_of(act)) == act
    assert name == "identity" or name in activations()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.call])
def test_calls_are_activations(name: str) -> None:
    kind = KINDS[name]
    defaults = tuple(kind.numbers.values())
    options = kind.options if name == "gelu_tanh" else {}
    assert called(kind.call, (), options) == Activation(name, defaults)
    assert called(kind.call + "_", (), {"inplace": True, **options}) == Activation(name, defaults)
    takes = list(kind.numbers if kind.call_takes is None else kind.call_takes)
    others = tuple(x + 0.25 for x in defaults[: len(takes)])
    wanted = Activation(name, (*others, *defaults[len(takes) :]))
    assert called(kind.call, others, options) == wanted
    assert called(kind.call, (), {**dict(zip(takes, others, strict=True)), **options}) == wanted


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("relu", (0.5,), {}),
        ("sin", (2.0,), {}),
        ("elu", (1.0, 2.0), {}),
        ("elu", (), {"scale": 2.0}),
        ("leaky_relu", (torch.zeros(1),), {}),
        ("gelu", (), {"approximate": "other"}),
        ("add", (), {}),
        ("", (), {}),
    ],
)
def test_other_calls_are_none(name: str, arguments: tuple[object, ...], named: dict[str, object]) -> None:
    assert called(name, arguments, named) is None


def test_numbers_must_be_those_of_the_kind() -> None:
    with pytest.raises(ValueError, match="leaky_relu takes"):
        Activation("leaky_relu")
    with pytest.raises(ValueError, match="no activation 'swoosh'"):
        Activation("swoosh")
    assert isinstance(activation_of(nn.Softplus(beta=0.0)), Declined)
    assert isinstance(activation_of(nn.ELU(float("inf"))), Declined)


def test_a_derived_class_is_not_the_activation() -> None:
    class Own(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 3.0

    found = activation_of(Own())
    assert isinstance(found, Activation) and found.kind == "formula"


def test_one_entry_makes_a_tuned_activation(softsign: Kind) -> None:
    assert activation_of(nn.Softsign()) == Activation("softsign")
    found = layers_of([nn.Linear(5, 24), nn.Softsign(), nn.Linear(24, 3)])
    assert not isinstance(found, Declined) and found.acts == (Activation("softsign"), Activation())
    assert "softsign" in activations()
    assert called("softsign", (), {}) == Activation("softsign")


@pytest.mark.parametrize("dtype", few([DType.F16, DType.BF16], 1))
def test_its_kernels_are_right(softsign: Kind, dtype: DType) -> None:
    net = network((5, 24, 40, 3), Activation(softsign.name), dtype)
    gradient = made(net)
    emulated = Emulated([text_of(gradient)])
    x, dy, parameters = normal(net, 37)
    dx, others = Runner(emulated, net, gradient).run(x, dy, parameters)
    wanted = exact(net, x, dy, parameters)
    eager = exact(net, x, dy, parameters, torch.bfloat16 if dtype is DType.BF16 else torch.float16)
    unit = 2.0**-8 if dtype is DType.BF16 else 2.0**-11
    error, own = (np.mean([error_of(a, b) for a, b in zip(ys, wanted, strict=True)]) for ys in ([dx, *others], eager))
    assert error <= 1.2 * own + 0.5 * unit, (error, own)


FORWARD = (
    MlpConfig(False, 1, 1, 0, 0, 1, 2),
    MlpConfig(True, 1, 4, 0, 0, 1, 2),
    mlp_wide.MlpWideConfig(False, 1, 4, 64, 2),
    mlp_pair.MlpPairConfig(4, 2),
)
"""A warp's own rows, a warpgroup's, layers a piece at a time, two CTAs for the same rows."""


def forward(
    monkeypatch: pytest.MonkeyPatch,
    act: str,
    dtype: DType,
    *,
    of: Callable[[GraphBuilder, NodeId], NodeId] | None = None,
) -> Problem:
    """Two layers with such an activation behind each; `of`: another one instead."""
    kind = KINDS[act]
    monkeypatch.setitem(ACTIVATIONS, act, of or (lambda b, x: cast("NodeId", kind.graph(b, x, *kind.numbers.values()))))
    return mlp(Net(70, (32, 128, 128), act, dtype))


@pytest.mark.parametrize("name", few([SOFTSIGN.name, *(name for name, kind in KINDS.items() if kind.fused)], 1))
@pytest.mark.parametrize("dtype", few([DType.BF16, DType.F16], 1))
def test_forward_kernels_compute_it_by_its_own_text(
    softsign: Kind, name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = forward(monkeypatch, name, dtype)
    made = [templates.emit(problem, s.schedule()) for s in FORWARD]
    assert all(isinstance(s, CudaSource) for s in made), made
    sources = [s for s in made if isinstance(s, CudaSource)]
    for source in sources:
        body = source.text[source.text.index(f"{source.entry}(const void") :]
        assert source.text.count(f"struct WAct_{name} {{") == 1 and f"WAct_{name}::of(" in body
        assert not re.findall(r"w_(abs|select|rough_\w+)\(", body), "steps beside the text"
    inputs = normal_inputs(problem)
    exact_result = evaluate(problem.graph, inputs, precise=True)[0]
    own = np.asarray(evaluate(problem.graph, inputs)[0], dtype=np.float64)
    emulated = Emulated(sources)
    for source in sources:
        got = np.asarray(run(emulated, problem, source, inputs)[0], dtype=np.float64)
        assert error_of(got, exact_result) <= 1.2 * error_of(own, exact_result), str(source.schedule)


def test_mish_and_its_derivative_far_from_zero() -> None:
    """By its nodes, in float64, where the two branches meet and where exponentials vanish."""
    z = np.array([-1e4, -90.0, -20.0, -3.0, -1e-3, 0.0, 1e-3, 1.0, 19.9, 20.1, 80.0, 1e4])
    x = torch.tensor(z, requires_grad=True)
    y = nn.functional.mish(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    for kept, wanted in ((False, y), (True, slope)):
        b = GraphBuilder()
        node = b.input(TensorType(DType.F32, z.shape))
        act = Activation("mish")
        one = b.broadcast(b.scalar(1.0, DType.F32), z.shape)
        graph = b.build([act.slope(b, one, node) if kept else act.apply(b, node)])
        got = evaluate(graph, [z.astype(np.float32)], precise=True)[0]
        assert_allclose(got, wanted.detach().numpy(), rtol=2e-6, atol=1e-7)


def _swapped(b: GraphBuilder, x: NodeId) -> NodeId:
    one = b.broadcast(b.scalar(1.0, b.type_of(x).dtype), b.type_of(x).shape)
    return b.apply(Prim.DIV, x, b.apply(Prim.ADD, one, b.apply(Prim.ABS, x)))


def _of_two(b: GraphBuilder, x: NodeId) -> NodeId:
    return b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.ABS, x), 2.0))


def _of_another(b: GraphBuilder, x: NodeId) -> NodeId:
    return b.apply(Prim.DIV, b.apply(Prim.NEG, x), b.apply(Prim.ADD, b.apply(Prim.ABS, x), 1.0))


@pytest.mark.parametrize(("of", "found"), [(_swapped, True), (_of_two, False), (_of_another, False)])
def test_a_graph_is_the_activation_or_is_not(
    softsign: Kind, of: Callable[[GraphBuilder, NodeId], NodeId], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = templates.emit(forward(monkeypatch, softsign.name, DType.BF16, of=of), FORWARD[0].schedule())
    assert isinstance(source, CudaSource) and ("WAct_softsign" in source.text) == found


def test_results_in_f32_are_computed_step_by_step(softsign: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    forward(monkeypatch, softsign.name, DType.BF16)
    source = templates.emit(
        mlp(Net(70, (32, 128, 128), softsign.name, DType.BF16, given=DType.F32)), FORWARD[0].schedule()
    )
    assert isinstance(source, CudaSource)
    assert source.text.count("WAct_softsign::of(") == 2 * source.text.count("struct WAct_softsign {"), "layer 1"
    assert "w_abs" in source.text[source.text.index(f"{source.entry}(const void") :], "the last one"


def test_the_cost_of_its_own_text_is_what_the_entry_says(softsign: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    p = chain(forward(monkeypatch, softsign.name, DType.BF16))
    assert not isinstance(p, Declined)
    assert unfused(p, 1)[1:] == (2.0, 1.0) and Prim.DIV not in unfused(p, 1)[0]
    monkeypatch.setitem(KINDS, softsign.name, replace(softsign, fused=False))
    assert unfused(p, 1)[1:] == (0, 0) and Prim.DIV in unfused(p, 1)[0]
