from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.slow import few
from tests.typed import narrow
from torch import nn

import weft
from weft.device.files import private_directory
from weft.errors import RefitError
from weft.frontends.torch import import_exported
from weft.kernels.source import KernelSource
from weft.options import Options
from weft.pipeline import finish, untuned
from weft.pipeline.refit import refitted

M = TypeVar("M", bound=nn.Module)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _seeded(make: Callable[[], M], seed: int) -> M:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make().eval()
        with torch.no_grad():  # trained, so to say: nothing is one or zero everywhere
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(torch.rand_like(tensor) * 0.3 + 0.05)
        return module


def _images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 20)
    )


def _rows() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 30))


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _close(got: object, module: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(got, module(x), rtol=1e-4, atol=1e-4)


CASES = {"images": (_images, (2, 3, 6, 6), (1, 3, 6, 6)), "rows": (_rows, (4, 24), (7, 24))}


@pytest.mark.parametrize("case", CASES)
def test_all_plans_take_other_weights_over(case: str, cache: Path) -> None:
    make, shape, other = CASES[case]
    first, second = _seeded(make, 1), _seeded(make, 2)
    compiled = weft.compile(first, _drawn(*shape), options=weft.Options(budget_s=0, cache_dir=cache))
    _close(compiled(_drawn(*other)), first, _drawn(*other))
    old = compiled.executable
    compiled.refit(second.state_dict())
    for x in (_drawn(*shape), _drawn(*other)):
        _close(compiled(x), second, x)
        assert not torch.allclose(narrow(torch.Tensor, compiled(x)), first(x), atol=1e-2)
    assert compiled.executable.plan is old.plan, "nothing is tuned"
    _close(old(_drawn(*shape))[0], first, _drawn(*shape))
    fresh = _drawn(3, *shape[1:])
    _close(compiled(fresh), second, fresh)
    assert any("refit" in note for note in compiled.record.notes)


@pytest.mark.parametrize("case", few(CASES, 1))
def test_packed_weights_of_generated_kernels_are_made_anew(case: str, cache: Path) -> None:
    make, shape, _ = CASES[case]
    options, x = weft.Options(budget_s=0, cache_dir=cache), _drawn(*shape)
    first, second = (_seeded(make, seed) for seed in (1, 2))
    before, after = (import_exported(torch.export.export(m, (x,))) for m in (first, second))
    built = untuned.build(before, options).executables
    kernels = [s.kernel for e in built.values() for s in e.plan.steps if isinstance(s.kernel, KernelSource)]
    assert any(k.packed_bytes for k in kernels)
    for old in built.values():
        new = refitted(old, after, options, [x], None)
        _close(old(x)[0], first, x)
        _close(new(x)[0], second, x)


def test_what_is_not_given_stays(cache: Path) -> None:
    first, second = _seeded(_rows, 1), _seeded(_rows, 2)
    compiled = weft.compile(first, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled.refit({"3.bias": second.state_dict()["3.bias"].numpy()})
    with torch.no_grad():
        first.get_parameter("3.bias").copy_(second.get_parameter("3.bias"))
    _close(compiled(_drawn(4, 24)), first, _drawn(4, 24))


def test_weights_are_copied(cache: Path) -> None:
    module = _seeded(_rows, 1)
    compiled = weft.compile(module, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    other = _seeded(_rows, 2)
    compiled.refit(other.state_dict())
    want = other(_drawn(4, 24)).detach()
    with torch.no_grad():
        other.get_parameter("0.weight").zero_()
    torch.testing.assert_close(compiled(_drawn(4, 24)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"nope": torch.zeros(3)}, r"no 'nope'.*W012"),
        ({"0.weight": torch.zeros(3)}, r"'0.weight' is torch.float32 of \(40, 24\), given is torch.float32 of \(3,\)"),
        ({"0.bias": torch.zeros(40, dtype=torch.complex64)}, "'0.bias' is torch.float32"),
        ({"0.bias": [0.0] * 40}, "'0.bias' is a list"),
        ([], "a list is no mapping"),
    ],
)
def test_weights_that_the_module_does_not_have_are_named(state: object, said: str, cache: Path) -> None:
    module = _seeded(_rows, 1)
    compiled = weft.compile(module, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    with pytest.raises(RefitError, match=said):
        compiled.refit(state)  # type: ignore[arg-type]
    _close(compiled(_drawn(4, 24)), module, _drawn(4, 24))


def _fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 30)).eval()


def test_values_that_decide_what_is_computed_are_refused_or_compiled(cache: Path) -> None:
    first, second = _fresh(), _seeded(_fresh, 5)  # scales of one vanish from the graph
    compiled = weft.compile(first, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled(_drawn(5, 24))
    with pytest.raises(RefitError, match=r"another graph.*W012\]\n  .*recompile=True"):
        compiled.refit(second.state_dict())
    _close(compiled(_drawn(4, 24)), first, _drawn(4, 24))
    compiled.refit(second.state_dict(), recompile=True)
    for rows in (4, 5, 6):
        _close(compiled(_drawn(rows, 24)), second, _drawn(rows, 24))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(24, 20), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def test_a_number_in_the_text_of_a_kernel_is_refused(cache: Path) -> None:
    first, second = _seeded(_Scaled, 1), _seeded(_Scaled, 2)
    compiled = weft.compile(first, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    with pytest.raises(RefitError, match="stands in the text of kernel"):
        compiled.refit(second.state_dict())
    _close(compiled(_drawn(4, 24)), first, _drawn(4, 24))
    compiled.refit(second.state_dict(), recompile=True)
    _close(compiled(_drawn(4, 24)), second, _drawn(4, 24))


def test_a_plan_that_is_not_right_with_the_weights_never_takes_the_place(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _seeded(_rows, 1), _seeded(_rows, 2)
    compiled = weft.compile(first, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled(_drawn(5, 24))
    verify, seen = finish.verify, []

    def wrong_once(contender: Any, expected: Any, dtype: Any) -> Any:
        seen.append(contender.name)
        if len(seen) < 2:
            return verify(contender, expected, dtype)
        off = finish.Contender("off", lambda: [x + 1 for x in contender.run()], 1, 0.0, False, None)
        return verify(off, expected, dtype)

    monkeypatch.setattr(finish, "verify", wrong_once)
    with pytest.raises(RefitError, match="not right with these weights"):
        compiled.refit(second.state_dict())
    assert len(seen) == 2, "the second of two plans"
    for rows in (4, 5):
        _close(compiled(_drawn(rows, 24)), first, _drawn(rows, 24))


def test_calls_meanwhile_see_the_old_weights_or_the_new_ones(cache: Path) -> None:
    modules = [_seeded(_rows, seed) for seed in (1, 2)]
    compiled = weft.compile(modules[0], _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    x = _drawn(4, 24)
    with torch.no_grad():
        want = [m(x) for m in modules]
    stop: list[Any] = []

    def call(_: int) -> int:
        count = 0
        while not stop:
            got = narrow(torch.Tensor, compiled(x))
            assert any(torch.allclose(got, w, rtol=1e-4, atol=1e-4) for w in want)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(call, k) for k in range(3)]
        for k in (1, 0, 1):
            compiled.refit(modules[k].state_dict())
        stop.append(True)
        assert all(c.result(60) for c in calls)
    torch.testing.assert_close(compiled(x), want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_framework_s_own_execution_takes_them_over_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _seeded(_rows, 3), _seeded(_rows, 4)
    monkeypatch.setattr(finish, "wins", lambda challenger, incumbent: False)
    monkeypatch.setattr(
        finish, "interleave", lambda runs, **_: {name: [1.0 if name == "eager" else 9.0] * 5 for name in runs}
    )
    compiled = weft.compile(first, _drawn(6, 24), options=weft.Options(budget_s=60, cache_dir=cache))
    assert compiled.record.chosen == "eager"
    compiled.refit(second.state_dict())
    with torch.no_grad():
        assert torch.equal(narrow(torch.Tensor, compiled(_drawn(6, 24))), second(_drawn(6, 24)))
    _close(compiled.executable(_drawn(6, 24))[0], second, _drawn(6, 24))


def test_an_exported_program(cache: Path) -> None:
    first, second = _seeded(_rows, 1), _seeded(_rows, 2)
    program = torch.export.export(first, (_drawn(4, 24),))
    compiled = weft.compile(program, options=weft.Options(budget_s=0, cache_dir=cache))
    compiled.refit(second.state_dict())
    _close(compiled(_drawn(4, 24)), second, _drawn(4, 24))
    torch.testing.assert_close(program.state_dict["0.weight"], first.get_parameter("0.weight"))  # as it was


def test_tied_weights_are_one(cache: Path) -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24))
        module[2].weight = module.get_parameter("0.weight")
        return module

    first, second = _seeded(tied, 1), _seeded(tied, 2)
    compiled = weft.compile(first, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled.refit(second.state_dict())
    _close(compiled(_drawn(4, 24)), second, _drawn(4, 24))
    with pytest.raises(RefitError, match="one tensor with another name"):
        compiled.refit({"0.weight": torch.ones(24, 24), "2.weight": torch.zeros(24, 24)})


# -- ONNX


def _onnx(seed: int) -> SimpleNamespace:
    chance = np.random.default_rng(seed)
    data = {
        "w": chance.standard_normal((24, 32)).astype(np.float32),
        "b": chance.standard_normal(32).astype(np.float32),
        "s": (1 + chance.random(32)).astype(np.float32),
        "size": np.array([-1, 4, 8], dtype=np.int64),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Mul", ["p", "s"], ["q"]),
        helper.make_node("Add", ["q", "b"], ["r"]),
        helper.make_node("Reshape", ["r", "size"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in data.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    def want(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy((x.numpy() @ data["w"] * data["s"] + data["b"]).reshape(-1, 4, 8))

    return SimpleNamespace(model=model, data=data, want=want)


@pytest.mark.slow
def test_an_onnx_file_by_the_names_of_its_initializers(cache: Path, tmp_path: Path) -> None:
    first, second, path = _onnx(1), _onnx(2), tmp_path / "m.onnx"
    onnx.save(first.model, path)
    compiled = weft.compile(path, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled(_drawn(6, 24))
    weights = {k: second.data[k] for k in "wbs"}
    compiled.refit({k: torch.from_numpy(v) if k == "w" else v for k, v in weights.items()})
    for rows in (4, 6, 3):
        torch.testing.assert_close(compiled(_drawn(rows, 24)), second.want(_drawn(rows, 24)), rtol=1e-4, atol=1e-4)
    with pytest.raises(RefitError, match="initializer 'nope': the model has none of this name"):
        compiled.refit({"nope": np.zeros(3, np.float32)})
    with pytest.raises(RefitError, match=r"initializer 'b': the model has f32 of shape \(32,\)"):
        compiled.refit({"b": np.zeros(3, np.float32)})
    with pytest.raises(RefitError, match="another graph"):
        compiled.refit({"size": np.array([-1, 8, 4], dtype=np.int64)})
    torch.testing.assert_close(compiled(_drawn(4, 24)), second.want(_drawn(4, 24)), rtol=1e-4, atol=1e-4)


def test_a_file_that_changed_meanwhile_is_told(cache: Path, tmp_path: Path) -> None:
    first, path = _onnx(1), tmp_path / "m.onnx"
    onnx.save(first.model, path)
    compiled = weft.compile(path, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    onnx.save(_onnx(2).model, path)
    with pytest.raises(RefitError, match=r"m\.onnx has changed"):
        compiled.refit({"b": first.data["b"]})
    with pytest.warns(UserWarning, match=r"m\.onnx has changed"):
        compiled(_drawn(5, 24))


def test_bytes_of_a_model(cache: Path) -> None:
    first, second, held = _onnx(1), _onnx(2), io.BytesIO()
    onnx.save(first.model, held)
    compiled = weft.compile(held.getvalue(), _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled.refit({k: second.data[k] for k in "wbs"})
    torch.testing.assert_close(compiled(_drawn(4, 24)), second.want(_drawn(4, 24)), rtol=1e-4, atol=1e-4)


# -- saved plans, and weights that change behind a plan


def test_a_saved_plan_says_that_it_cannot(cache: Path, tmp_path: Path) -> None:
    module = _seeded(_rows, 1)
    compiled = weft.compile(module, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    second = _seeded(_rows, 2)
    compiled.refit(second.state_dict())
    compiled.save(tmp_path / "m.weft")
    loaded = weft.load(tmp_path / "m.weft", options=weft.Options(cache_dir=cache))
    _close(loaded(_drawn(4, 24)), second, _drawn(4, 24))
    with pytest.raises(RefitError, match=r"a saved plan holds no model.*W012"):
        loaded.refit(module.state_dict())


def test_a_module_that_changed_is_told_once(cache: Path, tmp_path: Path) -> None:
    module = _seeded(_rows, 1)
    compiled = weft.compile(module, _drawn(4, 24), options=weft.Options(budget_s=0, cache_dir=cache))
    compiled.save(tmp_path / "m.weft")  # nothing to tell
    with torch.no_grad():
        module.get_parameter("3.weight").mul_(2)
    with pytest.warns(UserWarning, match=r"weights of the module changed.*'3\.weight'.*refit"):
        compiled.save(tmp_path / "m.weft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.save(tmp_path / "m.weft")
        compiled(_drawn(5, 24))
    module[0] = nn.Linear(24, 40)
    with pytest.warns(UserWarning, match="weights of the module changed"):
        compiled(_drawn(6, 24))
    compiled.refit(module.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.save(tmp_path / "m.weft")
    _close(compiled(_drawn(6, 24)), module, _drawn(6, 24))


TRACED, GO_ON = threading.Event(), threading.Event()


class Watched(torch.nn.Module):
    """Says that it is traced, and waits a moment there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            TRACED.set()
            GO_ON.wait(0.5)
        return self.layer(x)


def test_a_module_is_not_copied_while_it_is_traced_for_another_shape(tmp_path: Path) -> None:
    """Tracing puts other tensors into the module: a copy of these would be no model."""
    torch.manual_seed(0)
    module, x = Watched().eval(), torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    options = Options(budget_s=0.0, cache_dir=private_directory(tmp_path / "cache"), allow_generated=False)
    compiled = weft.compile(module, x[:1], options=options)
    other = Watched().eval()
    TRACED.clear()
    GO_ON.clear()
    grower = threading.Thread(target=compiled, args=(x,))
    grower.start()
    assert TRACED.wait(60)
    compiled.refit(other.state_dict())
    GO_ON.set()
    grower.join()
    torch.testing.assert_close(compiled(x[:1]), other(x[:1]))
    torch.testing.assert_close(compiled(x), other(x))
