"""Operators without a rule on a real GPU: inside of the plan's one graph, those of ONNX where ATen has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.library import onnx_cases as cases
from tests.generate.library.test_onnx_aten import HOSTED, SCATTERS
from torch import nn

import weft
from weft.frontends.onnx import import_onnx
from weft.frontends.torch import import_exported
from weft.ir.types import Array
from weft.kernels.plan import Plan
from weft.kernels.source import LibraryCall
from weft.options import Options
from weft.pipeline.untuned import build
from weft.runtime.any import AnyExecutable
from weft.runtime.cuda_executable import CudaExecutable

pytestmark = pytest.mark.gpu
BUDGET_S = 20.0
SETS = 3
Made = tuple[bytes, dict[str, Array]]


def hosted(plan: Plan) -> bool:
    calls = [step.kernel for step in plan.steps if isinstance(step.kernel, LibraryCall)]
    return any(step.target == "weft.opaque_onnx" for call in calls for step in call.run)


def one_graph(found: AnyExecutable) -> CudaExecutable:
    """The executable, which is one graph without a step on the host."""
    assert isinstance(found, CudaExecutable)
    assert not hosted(found.plan) and len(found.recorded_graphs) == 1 and len(found.stages) == 1
    return found


def fresh(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The same values in another order: few distinct ones stay few, and indices inside along the first axis."""
    rng = np.random.default_rng(seed)
    return {
        k: rng.permutation(x) if k == "i" else rng.permutation(x.reshape(-1)).reshape(x.shape)
        for k, x in inputs.items()
    }


def check(run: Callable[..., Any], data: bytes, inputs: Mapping[str, Array], *, exact: bool) -> None:
    """Several inputs, each twice, against ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    for seed in range(SETS):
        values = fresh(inputs, seed)
        tensors = [torch.from_numpy(x).cuda() for x in values.values()]
        first, again = ([y.cpu().numpy() for y in _tuple(run(*tensors))] for _ in range(2))
        for mine, other, want in zip(first, again, cases.expected(data, values), strict=True):
            cases.assert_results(mine, other, want, exact=exact, rtol=1e-4, atol=1e-5)


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def planned(data: bytes) -> AnyExecutable:
    """The library plan."""
    return build(import_onnx(data), Options(device="cuda", budget_s=0), ("library",)).executables["library"]


TOP_K: dict[str, Callable[[], Made]] = {
    "rows": lambda: cases.top_k((8, 300), k=20),
    "columns": lambda: cases.top_k((300, 8), k=20, axis=0, largest=0),
    "long rows": lambda: cases.top_k((2, 9000), k=100),
    "one long row": lambda: cases.top_k((70000,), k=1000),
    "every element": lambda: cases.top_k((5, 40), k=40),
    "f64": lambda: cases.top_k((5, 5000), np.float64, k=9),
    "int64": lambda: cases.top_k((5, 5000), np.int64, k=9),
    "int32": lambda: cases.top_k((5, 50), np.int32, k=9, largest=0),
    "opset 9": lambda: cases.top_k((5, 50), k=9, opset=9),
}


@pytest.mark.parametrize("name", TOP_K)
def test_top_k_with_ties(name: str) -> None:
    data, inputs = TOP_K[name]()
    check(one_graph(planned(data)), data, inputs, exact=True)


@pytest.mark.parametrize("name", SCATTERS)
def test_scattered_updates(name: str) -> None:
    """Some are written to one place, in every run the last one stays."""
    op, shape, index, attributes = SCATTERS[name]
    data, inputs = cases.scatter(op, shape, index, **attributes)
    check(one_graph(planned(data)), data, inputs, exact=True)


def test_what_is_scattered_outside_is_left_out() -> None:
    """And the GPU can be used as before."""
    data, inputs = cases.scatter("ScatterElements", (2100,), (2000,))
    inputs["i"][:3] = 2100, -2101, 1 << 40
    want = inputs["x"].copy()
    want[inputs["i"][3:].astype(np.int64) % 2100] = inputs["u"][3:]
    (y,) = one_graph(planned(data))(*(torch.from_numpy(x).cuda() for x in inputs.values()))
    assert np.array_equal(y.cpu().numpy(), want)


LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTM", {"sizes": (20, 4, 48, 64)}),
    "LSTM, both": ("LSTM", {"sizes": (20, 4, 48, 64), "direction": "bidirectional", "given": "Bhc"}),
    "LSTM, reverse": ("LSTM", {"direction": "reverse", "given": "hc"}),
    "LSTM, small": ("LSTM", {}),
    "GRU": ("GRU", {"sizes": (20, 4, 48, 64), "linear_before_reset": 1}),
    "GRU, both": ("GRU", {"direction": "bidirectional", "given": "Bh", "linear_before_reset": 1}),
    "RNN": ("RNN", {"sizes": (20, 4, 48, 64), "given": ""}),
    "RNN of relu": ("RNN", {"activations": ["Relu"], "direction": "reverse"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name: str) -> None:
    """That weights lie apart would be a warning, and an error here."""
    op, attributes = LAYERS[name]
    data, inputs = cases.recurrent(op, **attributes)
    check(one_graph(planned(data)), data, inputs, exact=False)


@pytest.mark.parametrize("name", HOSTED)
def test_what_stays_with_onnx_runtime_is_right(name: str) -> None:
    op, attributes = HOSTED[name]
    data, inputs = cases.recurrent(op, **attributes)
    exe = planned(data)
    assert isinstance(exe, CudaExecutable) and hosted(exe.plan) and not exe.recorded_graphs
    check(exe, data, inputs, exact=False)


@pytest.mark.parametrize("budget_s", [0.0, BUDGET_S])
def test_a_network_of_them_is_one_graph(budget_s: float, shared_cache: Path, tmp_path: Path) -> None:
    data, inputs = cases.network()
    options = Options(device="cuda", budget_s=budget_s, cache_dir=shared_cache)
    compiled = weft.compile(data, options=options)
    one_graph(compiled.executable)
    check(compiled, data, inputs, exact=False)
    compiled.save(tmp_path / "plan.weft")
    loaded = weft.load(tmp_path / "plan.weft", options=options)
    one_graph(loaded.executable)
    check(loaded, data, inputs, exact=False)


class Chosen(nn.Module):
    """The largest of each row."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.topk(x.relu() + x, 7, dim=-1)
        return values.exp(), places


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.sort(x * 2, dim=-1, descending=True, stable=True)
        return values.cumsum(-1), places


class Filtered(nn.Module):
    """A convolution as a product of spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.filter), n=x.shape[-1])
        return found.tanh()


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x[None].relu())[0]
        return found * 2


MODULES: dict[str, Callable[[], nn.Module]] = {
    "topk": Chosen,
    "sort": Sorted,
    "spectra": Filtered,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name: str) -> None:
    torch.manual_seed(3)
    module = MODULES[name]().eval().cuda().requires_grad_(False)
    program = torch.export.export(module, (torch.randn(9, 256, device="cuda"),))
    options = Options(device="cuda", budget_s=0)
    exe = one_graph(build(import_exported(program, device="cuda"), options, ("library",)).executables["library"])
    for _ in range(SETS):
        x = torch.randn(9, 256, device="cuda")
        wanted = module(x)
        for mine, again, want in zip(exe(x), exe(x), _tuple(wanted), strict=True):
            assert torch.equal(mine, again)
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch 2.11 flattens its weights while it exports
@pytest.mark.filterwarnings("ignore:RNN module weights")  # its weights are inputs of the framework's operator
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda x: x.__name__)
def test_recurrent_modules_of_torch(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(3)
    module = Recurrent(kind(256, 32, batch_first=True)).eval().cuda().requires_grad_(False)
    exact = copy.deepcopy(module).double()
    program = torch.export.export(module, (torch.randn(9, 256, device="cuda"),))
    options = Options(device="cuda", budget_s=0)
    exe = one_graph(build(import_exported(program, device="cuda"), options, ("library",)).executables["library"])
    for _ in range(SETS):
        x = torch.randn(9, 256, device="cuda")
        want = exact(x.double()).float()  # cuDNN's own is rounded to TF32 as torch has it by default
        torch.testing.assert_close(exe(x)[0], want, rtol=1e-4, atol=1e-4)
