from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from benchmarks.models import NETWORKS, load
from benchmarks.models.export import main
from tests.slow import few

SHAPES = {
    "candy": [(1, 3, 224, 224)],
    "efficientvit_b1": [(1, 1000)],
    "yolox_nano": [(1, 3549, 85)],
    "yolov4": [(1, 255, 52, 52), (1, 255, 26, 26), (1, 255, 13, 13)],
    "segformer_b0": [(1, 150, 128, 128)],
    "vgg16": [(1, 1000)],
    "resnet50": [(1, 1000)],
    "inception_v3": [(1, 1000)],
    "bert_base": [(1, 128, 768)],
    "vit_b16": [(1, 1000)],
}


def run(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs = module(*inputs)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def test_every_network_is_tested() -> None:
    assert SHAPES.keys() == NETWORKS.keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_size(name: str) -> None:
    with torch.device("meta"):
        module = NETWORKS[name].build()
    found = sum(parameter.numel() for parameter in module.parameters())
    assert found == pytest.approx(NETWORKS[name].num_parameters, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_of_order_one(name: str) -> None:
    module, inputs = load(name)
    assert not module.training
    assert inputs[0].shape == (1, *NETWORKS[name].shape)
    outputs = run(module, inputs)
    assert [tuple(y.shape) for y in outputs] == SHAPES[name]
    for y in outputs:
        assert y.isfinite().all()
        assert 0.1 < y.std().item() < 10
        assert y.abs().max().item() < 100


@pytest.mark.parametrize("name", few(["yolox_nano", "candy"], 1))
def test_outputs_depend_on_the_input(name: str) -> None:
    module, _ = load(name)
    one, other = (run(module, NETWORKS[name].inputs(1, seed))[0] for seed in (1, 2))
    assert (one - other).std() > 0.1 * one.std()


@pytest.mark.slow
def test_the_batch_does_not_change_the_weights() -> None:
    one, two = load("yolox_nano"), load("yolox_nano", batch=2)
    assert two[1][0].shape[0] == 2
    for name, tensor in one[0].state_dict().items():
        assert torch.equal(tensor, two[0].state_dict()[name])


def test_the_seed_changes_the_weights() -> None:
    one, two = (load("candy", seed=seed)[0].state_dict() for seed in (0, 1))
    assert all(not torch.equal(one[name], two[name]) for name in one)


def test_loading_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    load("candy")
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="resnet51"):
        load("resnet51")


@pytest.mark.slow
def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ort = pytest.importorskip("onnxruntime")
    main(["yolox_nano", "--out", str(tmp_path)])
    assert "yolox_nano.onnx" in capsys.readouterr().out
    path = tmp_path / "yolox_nano.onnx"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    model = onnx.load(path)
    assert model.opset_import[0].version >= 18
    module, inputs = load("yolox_nano")
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": inputs[0].numpy()})[0]
    wanted = run(module, inputs)[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.max(np.abs(wanted)))


def test_export_refuses_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resnet51", "--out", str(tmp_path)])
    assert "invalid choice" in capsys.readouterr().err
