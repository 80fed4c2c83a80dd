"""Gradients of fully connected networks: near float64 in the emulation; texts compile for sm_80 and sm_90a."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import (
    Runner,
    assert_as_finite,
    error_of,
    exact,
    infinite,
    made,
    network,
    normal,
    rounded,
    text_of,
)
from tests.generate.cuda.tensor_emulator import Emulated
from tests.generate.cuda.test_templates import A100, H200
from tests.slow import asked, few

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.training import KINDS, Activation, ChainConfig, Gradient, Network, gradient, shapes
from weft.ir.declined import Declined
from weft.ir.types import DType

RELU, SILU, TANH, GELU = (Activation(x) for x in ("relu", "silu", "tanh", "gelu"))
SMALL = GELU, Activation("gelu_tanh"), Activation("elu", (1.0,)), Activation("leaky_relu", (0.1,))
CASES: dict[str, tuple[Network, int]] = {
    "one layer": (network((16, 16), RELU), 16),
    "three to one": (network((3, 24, 17, 1), TANH, DType.F16), 37),
    "ragged": (network((5, 40, 72, 24, 3), SILU, given=DType.F32), 50),
    "layers alike": (network((16, *(32,) * 5, 8), RELU, last=Activation("sigmoid")), 33),
    "layers alike that keep sums": (network((32,) * 6, SILU, DType.F16, last=TANH), 40),
    "no bias": (network((8, 80, 80, 80, 80, 16), RELU, bias=False), 20),
    "each its own": (network((8, 16, 16, 16, 16, 4), (*SMALL, Activation())), 17),
    "periodic": (network((2, 32, 32, 1), Activation("sin", (3.0,)), DType.F16, given=DType.F32), 29),
    "streamed": (network((40, *(256,) * 2, 144, 144, 144, 144, 24), SILU, DType.F16, last=TANH), 150),
    "squares": (network((128, 128, 128), TANH, bias=False), 200),
    "squares and others": (network((130, 256, 40, 128), SILU, DType.F16), 70),
    "softplus": (network((16, 16, 16), Activation("softplus", (1.0, 20.0)), last=SILU), 1),
}


def _any(seed: int) -> tuple[Network, int]:
    rng = random.Random(seed)
    widths = tuple(rng.choice([rng.randint(1, 70), 16 * rng.randint(1, 4)]) for _ in range(rng.randint(2, 6)))
    numbers = {"leaky_relu": (0.1,), "elu": (1.0,), "softplus": (1.0, 20.0), "sin": (1.5,)}
    acts = tuple(Activation(k, numbers.get(k, ())) for k in rng.choices(sorted(KINDS), k=len(widths) - 1))
    dtype = rng.choice([DType.F16, DType.BF16])
    biases = tuple(rng.random() < 0.8 for _ in acts)
    return Network(widths, acts, biases, dtype, rng.choice([dtype, DType.F32])), rng.randint(1, 90)


CASES |= {f"any {seed}": _any(seed) for seed in range(8)}
INSIDE = {f"{name}, inside": shape for name, shape in (
    ("three to one", ChainConfig(1, 4, 1, 0, inside=True)), ("ragged", ChainConfig(1, 2, 1, 0, inside=True)),
    ("layers alike", ChainConfig(2, 2, 1, 0, inside=True)), ("each its own", ChainConfig(1, 8, 1, 0, inside=True)),
    ("layers alike that keep sums", ChainConfig(1, 3, 1, 0, inside=True)),
    ("no bias", ChainConfig(1, 4, 1, 0, inside=True)),
)}  # fmt: skip
"""The same networks where blocks add the sums over their rows themselves."""
CASES |= {name: CASES[name.removesuffix(", inside")] for name in INSIDE}


@pytest.fixture(scope="module")
def gradients() -> dict[str, Gradient]:
    return {name: made(net, shape=INSIDE.get(name)) for name, (net, _) in CASES.items()}


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, gradients: dict[str, Gradient]) -> Emulated:
    return Emulated([text_of(g) for g in asked(request, gradients, "ragged")])


@pytest.mark.parametrize("name", few(CASES, 4))
def test_near_float64(name: str, gradients: dict[str, Gradient], emulated: Emulated) -> None:
    net, rows = CASES[name]
    x, dy, parameters = normal(net, rows)
    dx, others = Runner(emulated, net, gradients[name]).run(x, dy, parameters)
    wanted = exact(net, x, dy, parameters)
    short = torch.bfloat16 if net.dtype is DType.BF16 else torch.float16
    eager = exact(net, x, dy, parameters, short)
    unit = 2.0**-8 if net.dtype is DType.BF16 else 2.0**-11
    # one sign of ReLU that rounding turns is seen in many gradients: all together are compared
    error, own = (np.mean([error_of(a, b) for a, b in zip(x, wanted, strict=True)]) for x in ([dx, *others], eager))
    assert error <= 1.2 * own + 0.5 * unit, (error, own)


def test_rows_in_chunks_add_up(gradients: dict[str, Gradient], emulated: Emulated) -> None:
    net, _ = CASES["ragged"]
    x, dy, parameters = normal(net, 100)
    runner = Runner(emulated, net, gradients["ragged"])
    whole, chunks = runner.run(x, dy, parameters), runner.run(x, dy, parameters, chunk=32)
    np.testing.assert_array_equal(whole[0], chunks[0])
    for a, b in zip(whole[1], chunks[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(a).max())


def test_equal_bits_whatever_the_number_of_blocks(gradients: dict[str, Gradient], emulated: Emulated) -> None:
    net, rows = CASES["ragged"]
    inputs = normal(net, rows)
    (dx, one), (again, two) = (Runner(emulated, net, gradients["ragged"], n).run(*inputs) for n in (1, 3))
    np.testing.assert_array_equal(dx, again)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_infinities_stay_in_their_columns() -> None:
    """What lies behind the columns of a layer has zero weights: an infinity in another column must not make it NaN."""
    nets = network((24, 37, 33, 9), RELU), network((24, 40, 9, 9, 9), RELU)
    found = [made(net, shape=shape) for net in nets for shape in (None, ChainConfig(1, 4, 1, 0, inside=True))]
    emulated = Emulated([text_of(g) for g in found])
    for i, g in enumerate(found):
        x, dy, parameters = infinite(nets[i // 2], 40)
        dx, others = Runner(emulated, nets[i // 2], g).run(x, dy, parameters)
        assert_as_finite([dx, *others], exact(nets[i // 2], x, dy, parameters))
    assert "w_bound<" not in made(network((5, 32, 16, 3), RELU)).text.split("chain(", 1)[1]


def test_parameters_in_float32_are_rounded_where_they_are_read() -> None:
    net = network((5, 24, 3), TANH, given=DType.F32)
    x, dy, parameters = normal(net, 20)
    rng = np.random.default_rng(1)
    held = [(p + 1e-4 * rng.standard_normal(p.shape)).astype(np.float32) for p in parameters]
    wide = replace(net, masters=DType.F32)
    one, two = made(net), made(wide)
    emulated = Emulated([text_of(one), text_of(two)])
    dx, others = Runner(emulated, net, one).run(x, dy, [rounded(p, net.dtype) for p in held])
    again, more = Runner(emulated, wide, two).run(x, dy, held)
    np.testing.assert_array_equal(dx, again)
    assert all(np.array_equal(a, b) for a, b in zip(others, more, strict=True))
    assert any(not np.array_equal(rounded(p, net.dtype), p) for p in held)


def test_infinity_arrives() -> None:
    net = network((16, 16, 16), RELU, DType.F16)
    x, dy, parameters = normal(net, 20)
    dy[3, 2] = np.inf
    g = made(net)
    dx, others = Runner(Emulated([text_of(g)]), net, g).run(x, dy, parameters)
    assert not np.isfinite(dx[3]).all() and np.isfinite(np.delete(dx, 3, 0)).all()
    assert not np.isfinite(others[2][2]).any() and np.isfinite(np.delete(others[2], 2, 0)).all()


def test_the_input_alone() -> None:
    net = network((3, 32, 32, 1), Activation("sin", (2.0,)), DType.F16, given=DType.F32)
    x, dy, parameters = normal(net, 300)
    g = made(net, parameters=False)
    runner = Runner(Emulated([text_of(g, parameters=False)]), net, g)
    got, _ = runner.run(x, dy, parameters, sums=False)
    assert error_of(got, exact(net, x, dy, parameters)[0]) < 4e-3


def test_what_is_declined_says_why() -> None:
    wide = gradient(network((2048, 2048, 2048), RELU), H200)
    old = gradient(network((16, 16, 16), RELU), replace(H200, capability=75))
    assert isinstance(wide, Declined) and "need more registers or shared memory" in wide.reason
    assert isinstance(old, Declined) and "need 8.0" in old.reason
    with pytest.raises(ValueError, match="no number"):
        Activation("sin", (float("nan"),)).text("A", DType.F16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_without_spills(arch: str) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    facts = H200 if arch == "sm_90a" else A100
    nets = [
        network((width,) * (depth + 1), act) for width, depth, act in ((64, 4, SILU), (128, 3, RELU), (256, 3, RELU))
    ]
    inside = [(nets[0], x) for x in shapes(nets[0], facts) if x.inside]
    assert inside or arch == "sm_80"
    for net, shape in [*((n, None) for n in nets), *inside]:
        g = gradient(net, facts, shape)
        assert isinstance(g, Gradient), g
        cubin = nvrtc.compile(g.text, arch=arch)
        assert cubin.warnings == ()
        for entry in (g.chain, g.finish) if g.inside else (g.chain, g.wgrad, g.finish):
            used = cubin.of(entry.name)
            assert used.spill_stores == used.stack_bytes == 0, (net.widths, shape, entry.name, used)
