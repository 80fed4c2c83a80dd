"""Gradients of embedding tables: exact on integers in the emulation, rows of many indices, what is declined."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.cases.embedding_gradient import embedding_problem
from tests.generate.cuda.products import BF16, F16
from tests.generate.cuda.tensor_emulator import Emulated, emitted, rounded, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.embedding_gradient.kernel import MANY, EmbeddingConfig
from weft.generate.cuda.embedding_gradient.match import MOST_INDICES, EmbeddingGradient, embedding_gradient
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource
from weft.tune.inputs import roles
from weft.tune.verify import build_reference

Array = npt.NDArray[np.generic]
CASES: dict[str, tuple[Problem, EmbeddingConfig]] = {
    "a warp a row": (embedding_problem((4, 9), 50, 128), EmbeddingConfig(32, 4)),
    "padding": (embedding_problem((3, 40), 20, 24, padding=0), EmbeddingConfig(8, 4)),
    "half of the vectors": (embedding_problem((70,), 33, 40, dtype=BF16), EmbeddingConfig(8, 8)),
    "several turns": (embedding_problem((33,), 17, 160, dtype=F16), EmbeddingConfig(4, 8)),
    "turns that end early": (embedding_problem((2, 5), 12, 152), EmbeddingConfig(4, 4)),
    "one column": (embedding_problem((100,), 300, 1), EmbeddingConfig(1, 1)),
    "odd columns": (embedding_problem((50,), 65, 7, dtype=BF16), EmbeddingConfig(8, 1)),
    "one index": (embedding_problem((1,), 3, 8), EmbeddingConfig(2, 4)),
    "rows one after another": (embedding_problem((60,), 75, 24, padding=70), EmbeddingConfig(8, 4, 3)),
    "columns apart": (embedding_problem((9, 9), 41, 100), EmbeddingConfig(8, 4, 2, 3)),
    "more than are held": (embedding_problem((1100,), 40, 8), EmbeddingConfig(2, 4, 1)),
    "many of some rows": (embedding_problem((400,), 5, 40, padding=2), EmbeddingConfig(8, 4, 2, 2)),
    "many of a row": (embedding_problem((5, 80), 3, 64), EmbeddingConfig(16, 4)),
    "many of a row, idle lanes": (embedding_problem((5, 90), 3, 24, padding=1), EmbeddingConfig(8, 4)),
    "many of a row, several turns": (embedding_problem((300,), 2, 96, dtype=F16), EmbeddingConfig(2, 8)),
}


def drawn(problem: Problem, *, whole: bool = True, seed: int = 0) -> list[Array]:
    """A gradient, of small integers or normal, and indices of which some occur several times and some are `padding`."""
    rng = np.random.default_rng(seed)
    found = embedding_gradient(problem)
    assert isinstance(found, EmbeddingGradient), found
    dy, index = (problem.graph.type_of(i).shape for i in problem.graph.inputs)
    values = rng.integers(-2, 3, dy) if whole else rng.standard_normal(dy)
    return [values.astype(np.float32), rng.integers(0, found.rows, index)]


def right(problem: Problem, inputs: list[Array]) -> Array:
    """The framework's sums in float64."""
    found = embedding_gradient(problem)
    assert isinstance(found, EmbeddingGradient)
    dy, index = (torch.from_numpy(x) for x in inputs)
    made = torch.ops.aten.embedding_dense_backward(dy.double(), index, found.rows, found.padding, False)
    return np.asarray(made.numpy())


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return emitted(CASES)


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("name", CASES)
def test_sums_of_integers_are_exact(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = drawn(problem)
    (got,) = run(kernels, problem, sources[name], inputs)
    dtype = problem.graph.type_of(problem.graph.outputs[0]).dtype
    np.testing.assert_array_equal(got, rounded(right(problem, inputs), dtype))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["many of a row", "padding"])
def test_every_sum_has_one_order(name: str, order: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = drawn(problem, whole=False)
    first, again = (run(kernels, problem, sources[name], inputs, order=k)[0] for k in (0, order))
    np.testing.assert_array_equal(first, again)


def test_a_row_of_many_indices_is_shared_by_its_cta() -> None:
    problem = CASES["many of a row"][0]
    assert np.bincount(drawn(problem)[1].reshape(-1)).min() > MANY
    problem = CASES["a warp a row"][0]
    assert np.bincount(drawn(problem)[1].reshape(-1)).max() <= MANY


def test_what_is_not_finite_stays_in_its_row(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    for name in ("padding", "many of a row"):
        problem = CASES[name][0]
        inputs = drawn(problem, whole=False)
        dy = inputs[0].reshape(-1, inputs[0].shape[-1])
        dy[3], dy[7, 1] = np.inf, np.nan
        (got,) = run(kernels, problem, sources[name], inputs)
        wanted = right(problem, inputs)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))
        assert np.isfinite(got).any()


@pytest.mark.parametrize("name", ["half of the vectors", "padding", "many of a row, several turns"])
def test_within_what_a_kernel_is_held_to(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    rows = problem.graph.type_of(problem.graph.outputs[0]).shape[0]
    assert roles(problem.graph)[1].index_below == rows, "all of the table is met"
    reference = build_reference(problem, seed=0)
    assert not reference.opaque
    for case in reference.cases:
        given = [x.float().numpy() if x.is_floating_point() else x.numpy() for x in case.inputs]
        (got,) = run(kernels, problem, sources[name], given)
        (expected,) = case.expected
        off = np.abs(got - expected.value.double().numpy())
        assert expected.limits is None or (off.max() <= expected.limits.max)


OF_NETWORKS = {
    "GPT-2": embedding_problem((8, 512), 50257, 768),
    "BERT": embedding_problem((16, 128), 30522, 768, padding=0),
    "DLRM": embedding_problem((2048,), 100_000, 64),
    "wide": embedding_problem((MOST_INDICES,), 32000, 4096, dtype=BF16),
    "narrow": embedding_problem((512,), 1_000_000, 16),
}


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", OF_NETWORKS)
def test_tables_of_networks(name: str, facts: GpuFacts) -> None:
    problem = OF_NETWORKS[name]
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    assert {s.param("template") for s in found} == {"embedding_gradient"}
    assert all(0 < (predicted_us(problem, s, facts) or 0) < 1000 for s in found)
    made = [CudaGenerator().emit(problem, s) for s in found]
    sources = [x for x in made if isinstance(x, CudaSource)]
    assert sources == made
    compiled_well(sources, "sm_90a" if facts is H200 else "sm_80", facts)


@pytest.mark.parametrize(
    "problem",
    [embedding_problem((MOST_INDICES + 1,), 100, 8), embedding_problem((9,), 100, 8, scaled=True)],
    ids=["too many indices", "scaled by frequency"],
)
def test_what_is_left_to_libraries(problem: Problem) -> None:
    assert isinstance(embedding_gradient(problem), Declined)
    assert isinstance(CudaGenerator().schedules(problem, H200), Declined)


def test_a_schedule_that_does_not_fit_is_declined() -> None:
    for shape in (EmbeddingConfig(3, 4), EmbeddingConfig(8, 16), EmbeddingConfig(8, 8), EmbeddingConfig(8, 4, 0)):
        assert isinstance(CudaGenerator().emit(CASES["a warp a row"][0], shape.schedule()), Declined)
