"""Weights as constants of a compiled region: folded where nothing needs a gradient, and never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.typed import some
from torch import nn

from weft.frontends.imported import Imported
from weft.ir.passes import clean_up
from weft.ir.prims import FREE
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.torch_backend import Backend, Region, compiling_engine, reference_engine
from weft.torch_backend.weights import MAX_RENEWALS, Weights, can_watch, static_inputs


def snapshot_engine(imported: Imported, options: Options, eager: Any) -> Any:
    """The reference engine on copies of the constants: whoever misses a change gives a stale answer."""
    constants = {k: v.copy() for k, v in imported.graph.constants.items()}
    return reference_engine(replace(imported, graph=replace(imported.graph, constants=constants)), options, eager)


class Seen:
    def __init__(self, engine: Any = snapshot_engine, **options: Any) -> None:
        self.regions: list[Region] = []
        self.backend = Backend(Options(**options), engine, self.regions.append)

    def compile(self, model: Callable[..., Any], **kwargs: Any) -> Any:
        return torch.compile(model, backend=self.backend, **kwargs)

    @property
    def only(self) -> Region:
        (region,) = self.regions
        assert region.fallback == "" and region.program is not None
        return region

    @property
    def inputs(self) -> int:
        return len(some(self.only.program).imported.graph.inputs)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        model.get_buffer("1.running_var").uniform_(0.5, 2.0)
        model.get_buffer("1.running_mean").normal_()
    return model


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)


def in_place_of_one_element(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight")[3, 1, 1, 1] += 5


def detached(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").detach().add_(1)


def in_inference_mode(model: nn.Sequential) -> None:
    with torch.inference_mode():
        model.get_parameter("0.bias").add_(1)


def loaded(model: nn.Sequential) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


def loaded_by_assignment(model: nn.Sequential) -> None:
    model.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()}, assign=True)


def data_swapped(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data = torch.randn_like(model.get_parameter("0.weight"))


def data_written(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data.mul_(2)


def numpy_written(model: nn.Sequential) -> None:
    model.get_buffer("1.running_mean").numpy()[2] = 7.0


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn_like(model.get_parameter("0.weight")))


def replaced_in_the_same_memory(model: nn.Sequential) -> None:
    """An object of its own with the old address and the old counter: only its identity tells."""
    version = model.get_parameter("0.bias")._version
    other = nn.Parameter(model.get_parameter("0.bias").data)
    with torch.no_grad():
        other.add_(1)
    assert version != other._version or other.data_ptr() == model.get_parameter("0.bias").data_ptr()
    model[0].bias = other


def buffer_written(model: nn.Sequential) -> None:
    model.get_buffer("1.running_var").fill_(9.0)


def optimised(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").grad = torch.ones_like(model.get_parameter("0.weight"))
    torch.optim.Adam(model.parameters(), 0.5).step()


def optimised_by_one_kernel(model: nn.Sequential) -> None:
    """Neither the counter nor a sampled element tells."""
    weight, version = model.get_parameter("0.weight"), model.get_parameter("0.weight")._version
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(-1)[1] = 1.0
    torch.optim.SGD(model.parameters(), 5.0, fused=True).step()
    assert weight._version == version


CHANGES = [
    in_place, in_place_of_one_element, detached, in_inference_mode, loaded, loaded_by_assignment, data_swapped,
    data_written, numpy_written, replaced, replaced_in_the_same_memory, buffer_written, optimised,
    optimised_by_one_kernel,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_never_answered_from_before(change: Callable[..., Any]) -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step = seen.compile(model)
    with torch.no_grad():
        before = step(x)
        torch.testing.assert_close(before, model(x))
        assert seen.inputs == 1, "weights are constants"
        change(model)
        after = step(x)
        torch.testing.assert_close(after, model(x))
        assert not torch.allclose(after, before), "the change changes the result"
        torch.testing.assert_close(step(x), after)


def test_unchanged_weights_are_compiled_once() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step = seen.compile(model)
    for context in (torch.no_grad(), torch.no_grad()):
        with context:
            torch.testing.assert_close(step(x), model(x))
    assert seen.only.compilations == 1


def test_the_folded_plan_comes_back_after_a_change() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step = seen.compile(model)
    with torch.no_grad():
        step(x)
        loaded(model)
        step(x)
    assert seen.only.compilations == 2
    assert seen.inputs == 1


def test_a_weight_that_keeps_changing_becomes_an_argument() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step = seen.compile(model)
    with torch.no_grad():
        for _ in range(MAX_RENEWALS + 4):
            torch.testing.assert_close(step(x), model(x))
            in_place(model)
    assert seen.only.compilations == 1 + MAX_RENEWALS + 1
    assert seen.inputs == 2, "x and that weight; the others stay constants"


def test_memory_that_comes_back_to_the_same_address_is_another_value() -> None:
    """The old memory is kept, so no new tensor can get its address while the counter stands still."""
    weight = nn.Parameter(torch.randn(1000))
    weights = Weights({0: weight})
    address = weight.data_ptr()
    for _ in range(20):
        weight.data = torch.zeros(1000)
        assert weight.data_ptr() != address
        assert weights.changed([weight]) == {0}


def test_only_the_changed_ones_are_named() -> None:
    tensors = [nn.Parameter(torch.randn(n)) for n in (3, 500, 70)] + [torch.arange(9), torch.ones(4, dtype=torch.bool)]
    weights = Weights(dict(enumerate(tensors)))
    assert weights.changed(tensors) == frozenset()
    tensors[1].data.add_(1)
    assert weights.changed(tensors) == {1}
    with torch.no_grad():
        tensors[3][0] = 4
    other = [*tensors[:4], torch.ones(4, dtype=torch.bool)]
    assert weights.changed(other) == {1, 3, 4}


def test_a_step_of_an_optimizer_is_a_change_of_its_parameters_alone() -> None:
    mine, other = nn.Parameter(torch.randn(500)), nn.Parameter(torch.randn(500))
    for parameter in (mine, other):
        parameter.grad = torch.zeros(500)
        parameter.grad[1] = 1.0
    first, second = (torch.optim.SGD([p], 1.0, fused=True) for p in (mine, other))
    first.step()
    weights = Weights({0: mine, 2: torch.ones(3)})
    assert weights.changed([mine, None, weights.tensors[2]]) == frozenset()  # that step was before
    second.step()
    assert weights.changed([mine, None, weights.tensors[2]]) == frozenset()
    first.step()
    assert weights.changed([mine, None, weights.tensors[2]]) == {0}
    assert weights.changed([mine, None, weights.tensors[2]]) == {0}


def test_nan_is_equal_to_itself() -> None:
    weight = torch.full((100,), float("nan"))
    assert Weights({0: weight}).changed([weight]) == frozenset()


def test_what_cannot_be_watched() -> None:
    base = torch.randn(4, 4)
    with torch.inference_mode():
        without_counter = torch.randn(3)
    assert can_watch(base) and can_watch(base.t()) and can_watch(nn.Parameter(base))
    assert can_watch(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    for tensor in (without_counter, base[:, ::2], base[:1].expand(4, 4), base.to(torch.complex64).conj()):
        assert not can_watch(tensor)


def test_weights_without_a_counter_are_arguments() -> None:
    with torch.inference_mode():
        seen, model, x = Seen(), nn.Linear(4, 3), torch.randn(2, 4)
        step = seen.compile(model)
        torch.testing.assert_close(step(x), model(x))
        model.weight.mul_(2)
        torch.testing.assert_close(step(x), model(x))
    assert seen.inputs == 3
    assert seen.only.compilations == 1


def test_inference_mode_with_ordinary_weights() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step = seen.compile(model)
    with torch.inference_mode():
        torch.testing.assert_close(step(x), model(x))
        in_place(model)
        torch.testing.assert_close(step(x), model(x))
    assert seen.inputs == 1


def test_frozen_parameters_without_no_grad() -> None:
    seen, model, x = Seen(), net().requires_grad_(False), torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(seen.compile(model)(x), model(x))
    assert seen.inputs == 1


def test_statistics_that_the_graph_writes_are_arguments() -> None:
    seen, model, x = Seen(), net().train(), torch.randn(4, 3, 6, 6)
    twin = copy.deepcopy(model)
    step = seen.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(step(x), twin(x))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert seen.only.compilations == 1
    assert seen.inputs == 4, "x, two statistics and the counter of batches"


def test_gradients_leave_weights_as_arguments() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    twin = copy.deepcopy(model)
    step = seen.compile(model)
    for m in (step, twin):
        m(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    forward = next(r for r in seen.regions if "forward" in r.name)
    assert len(some(forward.program).imported.graph.inputs) == 7


def test_training_and_inference_alternate() -> None:
    seen, model, x = Seen(), net(), torch.randn(2, 3, 6, 6)
    step, twin = seen.compile(model), copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    sgd = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    for _ in range(MAX_RENEWALS + 3):
        for f, optimiser in ((step, sgd[0]), (twin, sgd[1])):
            optimiser.zero_grad()
            f(x).square().mean().backward()
            optimiser.step()
        with torch.no_grad():
            torch.testing.assert_close(step(x), twin(x), rtol=1e-4, atol=1e-5)


def test_the_option_turns_it_off() -> None:
    seen, model, x = Seen(freeze_weights=False), net(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(model)(x), model(x))
    assert seen.inputs == 7


def test_other_tensors_are_arguments() -> None:
    """A tensor of the caller is no weight, whatever the function makes of it."""
    seen, w, x = Seen(), torch.randn(4, 4), torch.randn(2, 4)
    step = seen.compile(lambda x: x @ w)
    torch.testing.assert_close(step(x), x @ w)
    assert seen.inputs == 2
    assert static_inputs(torch.fx.symbolic_trace(nn.ReLU()), [x]) == {}


def test_every_shape_notices_a_change() -> None:
    seen, model = Seen(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    step = seen.compile(model, dynamic=True)
    with torch.no_grad():
        for n in (2, 3):
            x = torch.randn(n, 3, 6, 6)
            torch.testing.assert_close(step(x), model(x))
        in_place(model)
        for n in (2, 3):
            x = torch.randn(n, 3, 6, 6)
            torch.testing.assert_close(step(x), model(x))
    assert all(len(some(r.program).imported.graph.inputs) == 1 for r in seen.regions)


def test_a_weight_that_is_returned() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.line(x), self.line.weight, self.line.weight.t() * 2

    seen, model, x = Seen(), Both(), torch.randn(2, 3)
    step = seen.compile(model)
    with torch.no_grad():
        for _ in range(2):
            found = step(x)
            torch.testing.assert_close(found, model(x))
            assert found[1].data_ptr() == model.line.weight.data_ptr()
            model.line.weight.add_(1)


def test_a_weight_that_becomes_something_else_is_an_argument() -> None:
    seen, model, x = Seen(), nn.Linear(4, 3), torch.randn(2, 4)
    step = seen.compile(model)
    with torch.no_grad():
        step(x)
        model.weight.data = torch.randn(3, 8)[:, ::2]  # not dense
        torch.testing.assert_close(step(x), model(x))
        model.weight.data[0, 0] += 1
        torch.testing.assert_close(step(x), model(x))


def test_convolution_and_batch_norm_fold() -> None:
    sizes = {}
    for frozen in (True, False):
        torch._dynamo.reset()
        seen, model, x = Seen(freeze_weights=frozen), net(), torch.randn(2, 3, 6, 6)
        with torch.no_grad():
            seen.compile(model)(x)
        graph = clean_up(some(seen.only.program).imported.graph).graph
        graph = find_alternatives(graph).graph
        alive = [n for n in graph.nodes if n.prim not in FREE]
        sizes[frozen] = len(alive)
    assert sizes[True] < sizes[False], sizes


def test_the_compiler_itself_notices(tmp_path: Path) -> None:
    seen, model, x = Seen(compiling_engine, budget_s=0.0, cache_dir=tmp_path), net(), torch.randn(1, 3, 6, 6)
    step = seen.compile(model)
    with torch.no_grad():
        for change in (loaded, data_swapped):
            torch.testing.assert_close(step(x), model(x), rtol=1e-4, atol=1e-5)
            change(model)
        torch.testing.assert_close(step(x), model(x), rtol=1e-4, atol=1e-5)
    assert seen.only.fallback == ""


class _Equal(nn.Module):
    """Layers that dynamo compiles once: each call brings the weights of another one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.step(layer, x)
        return x

    @staticmethod
    def step(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(layer(x)) * 2


def _layers(count: int, sets: int) -> tuple[_Equal, Any, list[Region]]:
    regions: list[Region] = []
    backend = Backend(Options(), snapshot_engine, regions.append, sets)
    model = _Equal(count).eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model, torch.compile(model, backend=backend), regions


def test_sets_of_weights_stand_beside_each_other() -> None:
    model, compiled, regions = _layers(4, 8)
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert sum(r.compilations for r in regions) == 4, "each once"
    assert all(r.fallback == "" for r in regions)
    assert all(len(some(r.program).imported.graph.inputs) == 1 for r in regions), "weights are constants"


def test_a_changed_weight_of_one_set_is_noticed() -> None:
    model, compiled, regions = _layers(3, 8)
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled(x)
        before = sum(r.compilations for r in regions)
        model.layers[1].weight.mul_(-1)  # type: ignore[operator]
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert sum(r.compilations for r in regions) == before + 1


@pytest.mark.parametrize("sets", [1, 2])
def test_more_sets_than_are_kept_make_weights_arguments(sets: int) -> None:
    model, compiled, regions = _layers(6, sets)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert all(r.fallback == "" for r in regions)
    assert {len(some(r.program).imported.graph.inputs) for r in regions} == {3}
    assert sum(r.compilations for r in regions) <= sets + MAX_RENEWALS + 2
