"""Networks with skips that are trained a layer at a time, on a real GPU, and what is chosen for wide ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from benchmarks.cases.radiance import BF16, Radiance, check, layers_of, prepared
from tests.gpu.nn.test_fused_network import module_of

from weft.generate.cuda.training import layered as text
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn import FusedNetwork, GraphedStep, fused_mlp, kernels

# the first product of a thread for backward passes says that it has no context yet, whoever asks for it
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
LIMIT_S = 300
SEEDS = (0, 3, 4, 8, 9, 11, 12)


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no kernel took all layers; also where torch's operations are faster."""
    kernels.kernels_of.cache_clear()
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if it were wide"))
    monkeypatch.setattr(fused_mlp, "contest", lambda ways: [float(k) for k in range(len(ways))])
    yield
    kernels.kernels_of.cache_clear()


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_any_skips(seed: int, by_layers: None) -> None:
    module = module_of(seed)
    layers = layers_of(module, *module.given)
    assert text.refused(layers.network(DType.BF16, DType.BF16 if layers.parts else DType.F32, DType.F32)) is None
    row = check(module, module.given, module.rows)
    assert row["why_not"] is None and row["backward"] is None, row
    assert row["right"] and row["bits"] and row["types"], (module, row)


@pytest.mark.parametrize("width", [48, 256])
def test_gradients_of_a_radiance_field(width: int, by_layers: None) -> None:
    torch.manual_seed(width)
    row = check(prepared(Radiance(width)), (63, 27), 10_001)
    assert row["why_not"] is None and row["backward"] is None, row
    assert row["right"] and row["bits"] and row["types"], row


def test_a_wide_field_is_trained_by_layers_without_being_told() -> None:
    """They take two thirds of the time of one kernel for all; recorded steps end where steps of the modules do."""
    rows = 1 << 17
    kernels.kernels_of.cache_clear()
    torch.manual_seed(0)
    plain = Radiance(256, 4).cuda()
    fused = FusedNetwork(copy.deepcopy(plain))
    x, d = torch.randn(rows, 63, device="cuda"), torch.randn(rows, 27, device="cuda")
    wanted = torch.sigmoid(x[:, :3] + d[:, :3])
    ends = []
    for net in (plain, fused):
        optimizer = torch.optim.Adam(
            net.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True
        )

        def loss(x: torch.Tensor, d: torch.Tensor, net: torch.nn.Module = net) -> torch.Tensor:
            with torch.autocast("cuda", BF16):
                return (net(x, d).float() - wanted).square().mean()

        step = GraphedStep(loss, optimizer)
        last = [step(x, d) for _ in range(60)][-1]
        assert step.recorded
        ends.append(float(last))
    (run,) = fused._images._runs.values()
    assert isinstance(run, fused_mlp._Run)
    assert True in run.kernels.ways.values(), run.kernels.times
    assert ends[1] < 1.15 * ends[0] + 1e-4, ends
