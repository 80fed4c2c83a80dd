from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tests.cli.command_line import Weft, runner
from tests.cli.test_commands import make_model

import weft
from weft.device.files import private_directory
from weft.frontends.onnx import import_onnx
from weft.ir.passes import clean_up
from weft.kernels.source import LibraryCall
from weft.orchestrate.alternatives import find_alternatives
from weft.pipeline import finish, repro
from weft.runtime.executable import Executable


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return private_directory(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(cache))
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "net.onnx", size=24)


def test_layers_of_an_onnx_file_beside_onnxruntime(run: Weft, model: Path) -> None:
    pytest.importorskip("onnxruntime")
    code, out, _ = run("diff", model, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["first_over"] is None
    layers = found["layers"]
    assert {layer["against"] for layer in layers} >= {"onnxruntime"}
    named = [layer["operators"][0] for layer in layers]
    assert named[0] == "node 'net/matmul' (MatMul)"
    assert named[-1] == "node 'net/softmax' (Softmax)"
    assert all(layer["ok"] and layer["weft"]["worst"] < 1e-4 for layer in layers)
    code, out, _ = run("diff", model, "--against", "primitives")
    assert code == 0
    assert "net/act (Relu)" in out
    assert "within their limits" in out


def test_a_saved_plan_by_itself(run: Weft, model: Path, tmp_path: Path) -> None:
    run("compile", model, "--budget", "0", "-o", tmp_path / "m.weft")
    code, out, _ = run("diff", tmp_path / "m.weft", "--format", "json")
    assert code == 0
    assert {layer["against"] for layer in json.loads(out)["layers"]} == {"primitives"}


def test_a_saved_plan_beside_the_file_that_it_was_made_of(run: Weft, model: Path, tmp_path: Path) -> None:
    """With the names of its operators, and ONNX Runtime's values."""
    pytest.importorskip("onnxruntime")
    run("compile", model, "--budget", "0", "-o", tmp_path / "m.weft")
    code, out, _ = run("diff", tmp_path / "m.weft", "--of", model, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["notes"] == []
    assert {layer["against"] for layer in found["layers"]} >= {"onnxruntime"}
    assert found["layers"][0]["operators"] == ["node 'net/matmul' (MatMul)"]


def test_a_saved_plan_with_other_weights_than_the_file_is_told_where(run: Weft, model: Path, tmp_path: Path) -> None:
    run("compile", model, "--budget", "0", "-o", tmp_path / "m.weft")
    proto = onnx.load(model)
    bias = next(t for t in proto.graph.initializer if t.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, "b"))
    onnx.save(proto, tmp_path / "trained.onnx")
    code, out, _ = run("diff", tmp_path / "m.weft", "--of", tmp_path / "trained.onnx", "--format", "json")
    found = json.loads(out)
    assert code == 1
    assert "node 'net/add' (Add)" in found["layers"][found["first_over"]]["operators"]
    assert found["notes"][0] == "1 constants of the plan are not those of trained.onnx"


def test_a_plan_of_another_model_is_refused(run: Weft, model: Path, tmp_path: Path) -> None:
    run("compile", model, "--budget", "0", "-o", tmp_path / "m.weft")
    other = make_model(tmp_path / "other.onnx", op="Sigmoid", size=24)
    code, _, err = run("diff", tmp_path / "m.weft", "--of", other)
    assert code == 2
    assert "other.onnx: it is the plan of another model, from the operator" in err, err
    assert "net/act" in err
    code, _, err = run("diff", model, "--of", other)
    assert code == 2 and "is for a saved plan" in err
    code, _, err = run("diff", tmp_path / "m.weft", "--against", "onnxruntime")
    assert code == 2 and "give it by --of" in err


def test_a_saved_plan_beside_a_torch_module(cache: Path, tmp_path: Path) -> None:
    def net(first: float) -> torch.nn.Module:
        found = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()
        chance = torch.Generator().manual_seed(5)
        for k, p in enumerate(found.parameters()):
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=chance) * (1 if k else first))
        return found

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(6))
    options = weft.Options(budget_s=0, cache_dir=cache)
    weft.compile(net(1.0), (x,), options=options).save(tmp_path / "m.weft")
    saved = weft.load(tmp_path / "m.weft", options=options)
    layers = weft.compile(net(1.0), (x,), options=options).diff(x, plan=saved)
    assert all(layer.ok for layer in layers)
    assert any("linear" in name for layer in layers for name in layer.operators)
    layers = weft.compile(net(1.5), (x,), options=options).diff(x, plan=saved)
    assert not layers[0].ok, "trained since"
    with pytest.raises(weft.WeftError, match=r"another model.*W401"):
        weft.compile(torch.nn.ReLU(), (x,), options=options).diff(x, plan=saved)


def test_the_first_layer_over_its_limit_is_named(run: Weft, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_steps = Executable.run_steps

    def spoilt(self: Any, before: Any, *tensors: Any) -> None:
        def after(number: int) -> None:
            if number == 2:  # the second step has run
                self.stored(self.plan.steps[1].outputs[0]).mul_(1.01)
            before(number)

        run_steps(self, after, *tensors)

    monkeypatch.setattr(Executable, "run_steps", spoilt)
    code, out, _ = run("diff", model, "--format", "json", "--against", "primitives")
    found = json.loads(out)
    assert code == 1
    assert found["first_over"] == 1
    assert not found["layers"][1]["ok"]
    code, out, _ = run("diff", model, "--against", "primitives")
    assert code == 1
    assert re.search(r"the first over its limit: kernel 1, .*net/act", out)


def test_the_same_in_python(cache: Path, model: Path) -> None:
    compiled = weft.compile(model, options=weft.Options(budget_s=0, cache_dir=cache))
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    for layers in (compiled.diff(), compiled.diff(x)):
        assert [layer.step for layer in layers] == list(range(len(compiled.executable.plan.steps)))
        assert all(layer.ok for layer in layers)


def test_repro_says_whether_a_bundle_still_fails(run: Weft, cache: Path, model: Path) -> None:
    options = weft.Options(budget_s=0, cache_dir=cache)
    compiled = weft.compile(model, options=options)
    graph, plan = compiled.executable.graph, compiled.executable.plan
    imported = import_onnx(model)
    classes = find_alternatives(clean_up(imported.graph).graph).classes
    assert isinstance(plan.steps[1].kernel, LibraryCall)
    inputs = [torch.zeros(2, 24)]
    case = repro.Case(imported.graph, graph, plan, classes, inputs, drawn=False)
    folder = repro.keep(cache, case, "output 0: \x1b[31moff", None, options, {})
    code, out, _ = run("repro", folder)
    assert code == 0
    assert "\x1b" not in out
    assert "each kernel is right by itself" in out
    code, out, _ = run("repro", folder, "--format", "json")
    found = json.loads(out)
    assert (code, found["fails"], found["kernel"]) == (0, False, None)
    code, _, err = run("repro", cache / "nothing")
    assert code == 3
    assert "is no readable bundle" in err


def test_repro_of_what_fails_ends_with_1(run: Weft, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = weft.Options(budget_s=0, cache_dir=cache)
    compiled = weft.compile(model, options=options)
    imported = import_onnx(model)
    classes = find_alternatives(clean_up(imported.graph).graph).classes
    case = repro.Case(imported.graph, compiled.executable.graph, compiled.executable.plan, classes, [], drawn=True)
    folder = repro.keep(cache, case, "", None, options, {})
    monkeypatch.setattr(finish, "verify", lambda *_: finish.Check(False, 1.0, "output 0: off"))
    code, out, _ = run("repro", folder)
    assert code == 1
    assert "is wrong: output 0: off" in out
