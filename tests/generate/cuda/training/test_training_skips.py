"""Gradients of networks with skips and several inputs: near float64 in the emulation; texts compile."""

from __future__ import annotations

import random

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
    normal,
    result,
    text_of,
)
from tests.generate.cuda.tensor_emulator import Emulated
from tests.generate.cuda.test_templates import A100, H200
from tests.slow import asked, few

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.training import Activation, Added, ChainConfig, Gradient, Network, gradient, shapes
from weft.ir.declined import Declined
from weft.ir.types import DType

RELU, SILU, TANH, GELU, NONE = (Activation(x) for x in ("relu", "silu", "tanh", "gelu", "identity"))


def net(
    widths: tuple[int, ...],
    act: Activation | tuple[Activation, ...],
    dtype: DType = DType.BF16,
    *,
    last: Activation = NONE,
    sources: dict[int, tuple[int, ...]] | None = None,
    added: dict[int, tuple[int, bool]] | None = None,
    parts: tuple[tuple[int, int], ...] = (),
    row: int = 0,
    given: DType | None = None,
    bias: bool = True,
) -> Network:
    """Layers that read the last value, but for `sources`; `added` by layer."""
    depth = len(widths) - 1
    acts = act if isinstance(act, tuple) else (act,) * (depth - 1) + (last,)
    sources, added = sources or {}, added or {}
    return Network(
        widths, acts, (bias,) * depth, dtype, given or dtype,
        sources=tuple(sources.get(i, (i,)) for i in range(depth)),
        added=tuple(Added(*added[i]) if i in added else None for i in range(depth)),
        parts=parts, row=row or sum(n for _, n in parts),
    )  # fmt: skip


def field(
    width: int, depth: int = 8, dtype: DType = DType.BF16, act: Activation = RELU, *, given: DType | None = None
) -> Network:
    """A radiance field: the position again in the middle, the direction in front of the last hidden layer."""
    widths = (63, *(width,) * (depth + 1), width // 2, 3)
    return net(
        widths, (*(act,) * depth, NONE, act, Activation("sigmoid")), dtype,
        sources={depth // 2 + 1: (0, depth // 2 + 1), depth + 1: (depth + 1, -1)}, parts=((0, 63), (64, 27)), row=96,
        given=given,
    )  # fmt: skip


CASES: dict[str, tuple[Network, int]] = {
    "input again": (net((16, 32, 32, 8), RELU, sources={2: (0, 2)}), 33),
    "input again, odd": (net((5, 24, 17, 3), SILU, sources={2: (2, 0)}, given=DType.F32), 37),
    "residual behind": (net((16, 32, 32, 32, 8), TANH, DType.F16, added={1: (1, False), 2: (2, False)}), 40),
    "residual before": (net((16, 32, 32, 32, 8), RELU, added={1: (1, True), 2: (1, True)}), 40),
    "residual, sums kept": (net((16, 24, 24, 24, 8), GELU, added={1: (1, False), 2: (2, True)}), 20),
    "residual at the end": (net((8, 24, 8), SILU, last=TANH, added={1: (0, False)}), 20),
    "residual at the end, before": (net((8, 24, 8), SILU, last=TANH, added={1: (0, True)}), 20),
    "dense": (net((16, 24, 24, 24, 8), RELU, DType.F16, sources={1: (0, 1), 2: (0, 1, 2), 3: (0, 1, 2, 3)}), 50),
    "two inputs": (net((16, 32, 32, 8), SILU, sources={2: (2, -1)}, parts=((0, 16), (16, 9)), row=25), 45),
    "second input added": (net((16, 32, 32, 8), TANH, added={1: (-1, False)}, parts=((0, 16), (16, 32))), 45),
    "second input first": (net((7, 32, 8), TANH, sources={0: (-1, 0)}, parts=((4, 7), (0, 3)), row=12), 19),
    "input beside and added": (net((32, 32, 32, 4), RELU, sources={1: (1, 0)}, added={1: (0, False)}), 20),
    "radiance field": (field(32, 4, act=SILU), 50),
    "radiance field, f32": (field(48, 4, DType.F16, given=DType.F32), 35),
    "streamed": (net((40, *(256,) * 2, 144, 144, 24), SILU, DType.F16, sources={3: (3, 0)}, added={3: (3, False)}), 20),
    "layers alike": (net((16, *(32,) * 8, 8), SILU, sources={4: (0, 4)}), 40),
    "alike, read again": (net((16, *(32,) * 8, 8), TANH, DType.F16, sources={7: (2, 7)}, added={5: (1, True)}), 33),
    "layers alike, streamed": (net((24, *(256,) * 6, 8), SILU, DType.F16, sources={4: (4, 0)}), 9),
    "branches": (net((16, 24, 32, 8), RELU, sources={1: (0,), 2: (1, 2)}), 30),
    "no bias": (net((24, 40, 40, 8), RELU, bias=False, sources={1: (1, 0)}), 30),
}  # fmt: skip


def _any(seed: int) -> tuple[Network, int]:
    rng = random.Random(seed)
    depth = rng.randint(2, 6)
    wide = rng.choice([rng.randint(1, 60), 16 * rng.randint(1, 4)])
    widths = [wide if rng.random() < 0.6 else rng.randint(1, 60) for _ in range(depth + 1)]
    parts = [(0, widths[0])]
    row = widths[0]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        row += rng.choice([0, 1, 3])
        parts.append((row, rng.choice([wide, rng.randint(1, 40)])))
        row += parts[-1][1]
    columns = {**dict(enumerate(widths)), **{-i: n for i, (_, n) in enumerate(parts)}}
    sources, added = {}, {}
    used = {0}
    for layer in range(depth):
        earlier = [v for v in range(1 - len(parts), layer) if rng.random() < 0.3]
        read = [layer, *earlier]
        rng.shuffle(read)
        sources[layer] = tuple(dict.fromkeys(read))
        fitting = [v for v in range(1 - len(parts), layer + 1) if columns[v] == widths[layer + 1]]
        if fitting and rng.random() < 0.6:
            added[layer] = rng.choice(fitting), rng.random() < 0.5
        used |= {*sources[layer], *([added[layer][0]] if layer in added else [])}
    sources[depth - 1] += tuple(v for v in range(1 - len(parts), 0) if v not in used)
    kinds = [RELU, SILU, TANH, GELU, NONE, Activation("elu", (1.0,)), Activation("sin", (1.5,))]
    acts = tuple(rng.choices(kinds, k=depth))
    dtype = rng.choice([DType.F16, DType.BF16])
    found = net(
        tuple(widths), acts, dtype, sources=sources, added=added, parts=tuple(parts) if len(parts) > 1 else (), row=row,
        given=rng.choice([dtype, DType.F32]), bias=rng.random() < 0.8,
    )  # fmt: skip
    return found, rng.randint(1, 80)


CASES |= {f"any {seed}": _any(seed) for seed in range(8)}
INSIDE = {f"{name}, inside": shape for name, shape in (
    ("input again", ChainConfig(1, 4, 1, 0, inside=True)), ("input again, odd", ChainConfig(1, 2, 1, 0, inside=True)),
    ("residual behind", ChainConfig(2, 2, 1, 0, inside=True)), ("dense", ChainConfig(1, 4, 1, 0, inside=True)),
    ("second input first", ChainConfig(1, 3, 1, 0, inside=True)),
    ("radiance field", ChainConfig(1, 4, 1, 0, inside=True)),
)}  # fmt: skip
CASES |= {name: CASES[name.removesuffix(", inside")] for name in INSIDE}


@pytest.fixture(scope="module")
def gradients() -> dict[str, Gradient]:
    return {name: made(n, shape=INSIDE.get(name)) for name, (n, _) in CASES.items()}


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, gradients: dict[str, Gradient]) -> Emulated:
    return Emulated([text_of(g) for g in asked(request, gradients, "dense", "radiance field")])


@pytest.mark.parametrize("name", few(CASES, 3))
def test_near_float64(name: str, gradients: dict[str, Gradient], emulated: Emulated) -> None:
    n, rows = CASES[name]
    x, dy, parameters = normal(n, rows)
    dx, others = Runner(emulated, n, gradients[name]).run(x, dy, parameters)
    if n.parts:  # what no layer reads has no gradient, and none is written
        read = np.zeros(n.columns, dtype=bool)
        for at, count in n.parts:
            read[at : at + count] = True
        dx = np.where(read, dx, 0.0)
    wanted = exact(n, x, dy, parameters)
    eager = exact(n, x, dy, parameters, torch.bfloat16 if n.dtype is DType.BF16 else torch.float16)
    unit = 2.0**-8 if n.dtype is DType.BF16 else 2.0**-11
    own = [error_of(a, b) for a, b in zip(eager, wanted, strict=True)]
    errors = [error_of(a, b) for a, b in zip([dx, *others], wanted, strict=True)]
    assert np.mean(errors) <= 1.2 * np.mean(own) + 0.5 * unit, (errors, own)
    assert max(errors) <= 4 * max(own) + 4 * unit, (errors, own)


def test_equal_bits_whatever_the_number_of_blocks(gradients: dict[str, Gradient], emulated: Emulated) -> None:
    n, rows = CASES["dense"]
    inputs = normal(n, rows)
    (dx, one), (again, two) = (Runner(emulated, n, gradients["dense"], blocks).run(*inputs) for blocks in (1, 3))
    np.testing.assert_array_equal(dx, again)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_rows_in_chunks_add_up(gradients: dict[str, Gradient], emulated: Emulated) -> None:
    n, _ = CASES["radiance field"]
    x, dy, parameters = normal(n, 100)
    runner = Runner(emulated, n, gradients["radiance field"])
    whole, chunks = runner.run(x, dy, parameters), runner.run(x, dy, parameters, chunk=32)
    read = [*range(63), *range(64, 91)]
    np.testing.assert_array_equal(whole[0][:, read], chunks[0][:, read])
    for a, b in zip(whole[1], chunks[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(a).max())


def test_the_input_alone() -> None:
    n = net((16, 32, 32, 32, 4), SILU, DType.F16, sources={2: (0, 2)}, added={1: (1, False)})
    x, dy, parameters = normal(n, 200)
    g = made(n, parameters=False)
    got, _ = Runner(Emulated([text_of(g, parameters=False)]), n, g).run(x, dy, parameters, sums=False)
    assert error_of(got, exact(n, x, dy, parameters)[0]) < 6e-3


def test_gradients_by_differences() -> None:
    """What kernels are compared with, against central differences in float64."""
    n = net((3, 5, 5, 2), TANH, sources={1: (0, 1), 2: (-1, 2)}, added={1: (1, True)}, parts=((0, 3), (4, 2)), row=6)
    x, dy, parameters = normal(n, 4)
    given = [v.astype(np.float64) for v in (x, *parameters)]
    found = exact(n, given[0], dy, given[1:])
    step = 1e-6
    for at, (values, gradient_) in enumerate(zip(given, found, strict=True)):
        for i in range(0, values.size, 3):
            sides = []
            for sign in (1, -1):
                moved = [v.copy() for v in given]
                moved[at].flat[i] += sign * step
                sides.append(float((result(n, moved[0], moved[1:]) * dy).sum()))
            assert abs((sides[0] - sides[1]) / (2 * step) - gradient_.flat[i]) < 1e-7


@pytest.mark.parametrize(
    ("n", "part"),
    [
        (net((512, 512, 512), RELU, sources={1: (0, 1)}), "need more registers or shared memory"),
        (net((8,) * 30, RELU, added={3: (3, False)}), "layers with skips"),
    ],
)
def test_what_is_declined_says_why(n: Network, part: str) -> None:
    refused = gradient(n, H200)
    assert isinstance(refused, Declined) and part in refused.reason


@pytest.mark.slow
@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_kernels_compile_without_spills(arch: str) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    facts = H200 if arch == "sm_90a" else A100
    residual = net((32, *(64,) * 5, 4), SILU, added={1: (1, False), 3: (3, False)})
    nets = [field(64), residual, *([field(128)] if arch == "sm_90a" else [])]
    for n, shape in [*((n, None) for n in nets), *((residual, x) for x in shapes(residual, facts) if x.inside)]:
        g = gradient(n, facts, shape)
        assert isinstance(g, Gradient), g
        cubin = nvrtc.compile(g.text, arch=arch)
        assert cubin.warnings == ()
        for entry in (g.chain, g.finish) if g.inside else (g.chain, g.wgrad, g.finish):
            used = cubin.of(entry.name)
            assert used.spill_stores == used.stack_bytes == 0, (n.widths, shape, entry.name, used)


@pytest.mark.slow
def test_infinities_stay_in_their_columns() -> None:
    nets = (
        net((24, 37, 37, 37, 9), RELU, added={1: (1, False), 2: (2, True)}),
        net((24, 37, 33, 9), RELU, sources={2: (2, 1)}),
        net((24, *(40,) * 5, 9), RELU, sources={4: (0, 4)}),
        net((24, 40, 33, 33, 33, 33, 9), RELU, sources={5: (1, 5)}),
    )
    found = [made(n) for n in nets]
    emulated = Emulated([text_of(g) for g in found])
    for n, g in zip(nets, found, strict=True):
        x, dy, parameters = infinite(n, 40)
        dx, others = Runner(emulated, n, g).run(x, dy, parameters)
        assert_as_finite([dx, *others], exact(n, x, dy, parameters))
