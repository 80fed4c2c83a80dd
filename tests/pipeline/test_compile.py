from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.typed import narrow, noting
from torch import nn
from torch.nn import functional as F

import weft
from weft.api import Compiled
from weft.device.files import private_directory
from weft.errors import ArtifactError, DeviceError, NoPlanError, OptionError, UnsupportedError
from weft.frontends.imported import Imported
from weft.frontends.onnx.errors import BindingError, GarbledModelError
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.plan import Plan
from weft.kernels.record import CompileRecord
from weft.kernels.source import KernelSource, LibraryCall
from weft.options import Options
from weft.pipeline import compile as compiling
from weft.pipeline import link as linking
from weft.pipeline.setting import Setting, survey
from weft.runtime.executable import Executable, InputError

WARM = ["imports", "copy", "export", "import", "preflight", "survey", "clean up", "alternatives", "recall", "link"]
"""Stages where a plan is remembered."""
AMPLE_S = 300.0
"""A budget that measuring does not use up, on a busy machine either: how far it comes depends on no clock."""


class Small(nn.Module):
    """A bit of everything: convolution, norm, activation, pooling, linear, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.linear = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.silu(self.norm(self.conv(x))), 2)
        return self.linear(x.flatten(1)).softmax(-1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return private_directory(tmp_path_factory.mktemp("weft-cache"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def compiled(model: nn.Module, x: torch.Tensor, cache: Path) -> Compiled:
    return weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=cache, keep_per_problem=2))


def close(got: object, want: torch.Tensor) -> None:
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_result_is_right_and_its_record_complete(compiled: Compiled, model: nn.Module, x: torch.Tensor) -> None:
    close(compiled(x), model(x))
    close(compiled.executable(x)[0], model(x))
    r = compiled.record
    assert {"library", "eager", "solution-1", "heuristic"} & {p.name for p in r.plans}
    assert all(p.verified for p in r.plans)
    assert r.measured > 0
    assert r.problems > r.pruned >= 0
    assert len(r.steps) == compiled.executable.kernels
    assert r.arena_bytes <= 1.1 * r.live_bytes
    assert from_json(CompileRecord, json.loads(json.dumps(to_json(r)))) == r


def test_alternatives_can_be_chosen(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) * self.k(x) + self.v(x)

    model, x = Heads().eval(), torch.randn(16, 32)
    compiled = weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=tmp_path, keep_per_problem=1))
    close(compiled.executable(x)[0], model(x))
    again = weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=tmp_path, keep_per_problem=1))
    assert again.record.measured == 0
    close(again.executable(x)[0], model(x))


def test_the_plan_is_the_fastest_verified_one(compiled: Compiled) -> None:
    r = compiled.record
    chosen = next(p for p in r.plans if p.name == r.chosen)
    baselines = [p for p in r.plans if p.name in ("library", "eager")]
    if chosen not in baselines:
        assert chosen.median_us < min(p.median_us for p in baselines)


def test_a_limit_on_memory_is_kept_or_an_error(model: nn.Module, x: torch.Tensor, cache: Path) -> None:
    options = weft.Options(budget_s=0, cache_dir=cache, memory_limit_bytes=1 << 20)
    limited = weft.compile(model, x, options=options)
    close(limited.executable(x)[0], model(x))
    assert limited.record.chosen != "eager"
    assert {"eager"} < {p.name for p in limited.record.plans}
    with pytest.raises(OptionError, match=r"option 'memory_limit_bytes'.*takes \d+"):
        weft.compile(model, x, options=weft.Options(budget_s=0, cache_dir=cache, memory_limit_bytes=64))


def test_a_second_compile_is_warm(compiled: Compiled, model: nn.Module, x: torch.Tensor, cache: Path) -> None:
    again = weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=cache, keep_per_problem=2))
    assert again.record.measured == 0
    assert [s.name for s in again.record.stages] == WARM
    assert again.record.stages[-1].detail == "a plan that was chosen before: nothing is measured"
    assert again.executable.plan == compiled.executable.plan
    assert torch.equal(again.executable(x)[0], compiled.executable(x)[0])


@pytest.mark.slow
def test_a_damaged_plan_cache_is_passed_over(
    compiled: Compiled, model: nn.Module, x: torch.Tensor, cache: Path, tmp_path: Path
) -> None:
    del compiled
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    for path in (own / "plans").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"999999999")
    again = weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=own, keep_per_problem=2))
    assert again.record.reused > 0
    close(again(x), model(x))


def test_a_remembered_plan_that_is_refused_is_made_anew(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = weft.Options(budget_s=0, cache_dir=tmp_path)
    weft.compile(model, x, options=options)
    real, refusals = linking.link, [ArtifactError(problem="an algorithm of another library", remedy="")]

    def link(*given: object, **named: object) -> object:
        if refusals:
            raise refusals.pop()
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(linking, "link", link)
    with pytest.warns(UserWarning, match="tunes anew, the plan it remembers does not run: an algorithm of another"):
        again = weft.compile(model, x, options=options)
    assert len(again.record.stages) > len(WARM)
    close(again(x), model(x))


@pytest.mark.slow
def test_a_plan_that_was_cut_short_is_improved_with_more_time(
    model: nn.Module, x: torch.Tensor, tmp_path: Path
) -> None:
    first = weft.compile(model, x, options=weft.Options(budget_s=0, cache_dir=tmp_path))
    again = weft.compile(model, x, options=weft.Options(budget_s=0, cache_dir=tmp_path))
    assert [s.name for s in again.record.stages] == WARM
    more = weft.compile(model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=tmp_path, keep_per_problem=1))
    assert len(more.record.stages) > len(WARM)
    assert more.record.measured > first.record.measured == 0


def test_without_a_budget_the_library_plan_is_used(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    compiled = weft.compile(model, x, options=weft.Options(budget_s=0, cache_dir=tmp_path))
    assert compiled.record.measured == 0
    assert all(isinstance(s.kernel, LibraryCall) for s in compiled.executable.plan.steps)
    close(compiled(x), model(x))


@pytest.mark.slow
def test_without_a_compiler_there_is_a_library_plan_and_one_warning(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CXX", "none")
    with pytest.warns(UserWarning, match="C\\+\\+ compiler") as caught:
        compiled = weft.compile(
            model, x, options=weft.Options(budget_s=AMPLE_S, cache_dir=tmp_path, keep_per_problem=1)
        )
    assert len(caught) == 1
    assert not any(isinstance(s.kernel, KernelSource) for s in compiled.executable.plan.steps)
    close(compiled(x), model(x))


def test_new_shapes_get_plans_of_their_own_within_the_bound(model: nn.Module, tmp_path: Path) -> None:
    options = weft.Options(budget_s=0, cache_dir=tmp_path, max_plans=2)
    compiled = weft.compile(model, torch.randn(1, 3, 8, 8), options=options)
    for batch in (1, 2, 3, 2):
        x = torch.randn(batch, 3, 8, 8)
        close(compiled(x), model(x))
    assert len(compiled._plans) == 2


@pytest.mark.parametrize("bound", [2, 1, 0, -3])
def test_the_least_recently_used_plan_is_dropped(cache: Path, bound: int) -> None:
    module = nn.Linear(4, 3).eval()
    x = {n: torch.randn(n, 4) for n in (1, 2, 3)}
    compiled = weft.compile(module, x[1], options=weft.Options(budget_s=0, cache_dir=cache, max_plans=bound))
    again, built = compiled._again, []
    compiled._again = noting(lambda inputs, layout: built.append(len(inputs[0])), again)
    for n in (2, 1, 3, 1, 2):
        close(compiled(x[n]), module(x[n]))
        assert len(compiled._plans) <= max(bound, 1)
    assert built == ([2, 3, 2] if bound == 2 else [2, 1, 3, 1, 2])
    assert compiled.executable.graph.type_of(0).shape == (1, 4), "the example's plan stays"


def test_a_new_shape_that_fails_leaves_the_plans_as_they_were(cache: Path) -> None:
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    compiled = weft.compile(module, x, options=weft.Options(budget_s=0, cache_dir=cache))
    with pytest.raises(InputError, match="cannot be multiplied"):
        compiled(torch.randn(2, 5))
    close(compiled(x), module(x))
    assert len(compiled._plans) == 1


def test_an_exported_program_refuses_other_shapes(cache: Path) -> None:
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    compiled = weft.compile(torch.export.export(module, (x,)), options=weft.Options(budget_s=0, cache_dir=cache))
    close(compiled(x), module(x))
    with pytest.raises(InputError, match=r"input 0: .*W011"):
        compiled(torch.randn(3, 4))
    assert len(compiled._plans) == 1


def test_a_saved_plan_gives_the_same_bits(compiled: Compiled, x: torch.Tensor, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.weft"
    digest = compiled.save(path)
    loaded = weft.load(path, options=weft.Options(cache_dir=cache))
    want = compiled.executable(x)[0]
    assert torch.equal(narrow(torch.Tensor, loaded(x)), want)
    stranger = weft.Options(cache_dir=private_directory(tmp_path / "other"))
    if any(isinstance(s.kernel, KernelSource) for s in compiled.executable.plan.steps):
        with pytest.raises(ArtifactError, match=digest):
            weft.load(path, options=stranger)
    assert torch.equal(narrow(torch.Tensor, weft.load(path, trust=digest, options=stranger)(x)), want)
    for options in (stranger, weft.Options(cache_dir=cache)):
        with pytest.raises(ArtifactError, match=f"its digest is {digest}, not '{'0' * 64}'"):
            weft.load(path, trust="0" * 64, options=options)
    with pytest.raises(InputError):
        loaded(torch.zeros(9, 3, 8, 8))


def test_every_damaged_byte_of_a_saved_plan_is_noticed(compiled: Compiled, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.weft"
    compiled.save(path)
    whole = path.read_bytes()
    refused = 0
    for k in range(40):
        at = (k * 7919) % len(whole)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            weft.load(path, options=weft.Options(cache_dir=cache))
        except ArtifactError:
            refused += 1
    # a flipped byte of the archive's own padding or dates changes nothing that is read
    assert refused >= 36
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArtifactError):
            weft.load(path, options=weft.Options(cache_dir=cache))


def test_a_path_may_be_given_as_text(tmp_path: Path) -> None:
    options = weft.Options(cache_dir=str(tmp_path), dump_dir=str(tmp_path / "dump"))  # type: ignore[arg-type]
    assert (options.cache_dir, options.dump_dir) == (tmp_path, tmp_path / "dump")
    with pytest.raises(OptionError, match=r"'cache_dir'.*int is no path"):
        weft.Options(cache_dir=3)  # type: ignore[arg-type]


def test_examples_that_are_one_tensor_are_two_inputs(cache: Path) -> None:
    layer = nn.Linear(3, 3, bias=False)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a) @ b

    options = weft.Options(budget_s=0, cache_dir=cache)
    x, a, b = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    for examples in ((x, x), (x, layer.weight)):
        compiled = weft.compile(Product(), examples, options=options)
        with torch.no_grad():
            close(compiled.executable(a, b)[0], Product()(a, b))


def test_where_nothing_agrees_with_float64_the_framework_is_right(cache: Path, tmp_path: Path) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).to(torch.int8)

    x = torch.tensor([1e6, 3.0, -700.0])  # beyond int8, every machine and type gives its own
    with warnings.catch_warnings():  # that no plan is left; an evaluation may happen to agree
        warnings.filterwarnings("ignore", message="Weft has no plan for this model")
        compiled = weft.compile(Cast(), x, options=weft.Options(budget_s=0, cache_dir=cache))
    if compiled.record.chosen == "eager":
        assert not compiled.record.plans[-1].verified
    torch.testing.assert_close(compiled(x), Cast()(x))


def test_arguments_that_cannot_be_taken(model: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    options = weft.Options(cache_dir=tmp_path)
    with pytest.raises(OptionError, match="'cuda:N'"):
        weft.compile(model, x, device="tpu", options=options)
    with pytest.raises(OptionError, match="needs them"):
        weft.compile(model, options=options)
    with pytest.raises(weft.UserError, match=r"the model itself raises TypeError .* \[W116\]"):
        weft.compile(model, [1.0], options=options)
    with pytest.raises(OptionError, match="'example_inputs': a int is no tensor"):
        weft.compile(model, 5, options=options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'options': a dict"):
        weft.compile(model, x, options={"budget_s": 3})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"'dump_dir': .* cannot be written"):
        weft.compile(model, x, options=replace(options, dump_dir=Path("/dev/null/here"), budget_s=0))
    with pytest.raises(BindingError, match="no whole number"):
        weft.compile(b"x", options=options, dims={"n": 2.5})  # type: ignore[dict-item]
    with pytest.raises(BindingError, match="complex64, which Weft has no type for"):
        weft.compile(b"x", x.to(torch.complex64), options=options)
    with pytest.raises(GarbledModelError, match="embedded null"):
        weft.compile("a\0b", x, options=options)
    with pytest.raises(ArtifactError):
        weft.load(tmp_path / "missing.weft", options=options)


def test_a_plan_that_does_not_run_is_left_out(
    model: nn.Module, x: torch.Tensor, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator of the framework may refuse what was never measured; if nothing runs, eager is left."""
    plan, graph = compiled.executable.plan, compiled.executable.graph
    setting = survey(weft.Options(cache_dir=compiled._options.cache_dir))
    link = linking.link

    def refuse(graph: Graph, plan: Plan, setting: Setting, left_s: float) -> object:
        if plan.name.startswith("bad"):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type\nmore")
        return link(graph, plan, setting, left_s)

    monkeypatch.setattr(linking, "link", refuse)
    bad = replace(plan, name="bad", steps=plan.steps[:-1])
    with pytest.warns(UserWarning, match="leaves out the plan bad.*, which does not run: FlashAttention.*type$"):
        found = linking.link_all(graph, [bad, plan], setting, [x], None, [])
    assert {c.name.partition("/")[0] for c in found} == {plan.name.partition("/")[0]}
    lost: list[str] = []
    with pytest.warns(UserWarning, match="leaves out"):
        (left,) = linking.link_all(graph, [bad], setting, [x], lambda *_: [model(x)], lost)
    assert left.name == "eager" and left.executable is None
    assert lost[0] == "the plan bad does not run: FlashAttention only support fp16 and bf16 data type"


def _refuse(*_: object) -> object:
    raise RuntimeError("this machine refuses it")


def test_without_any_plan_the_framework_answers(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "link", _refuse)
    options = weft.Options(budget_s=0, cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="leaves out|has no plan .* framework's own execution runs it: .* refuses it"):
        compiled = weft.compile(model, x, options=options)
    with torch.no_grad():
        assert torch.equal(narrow(torch.Tensor, compiled(x)), model(x))
    r = compiled.record
    assert r.chosen == "eager" and r.steps == () and [p.name for p in r.plans] == ["eager"]
    assert from_json(CompileRecord, json.loads(json.dumps(to_json(r)))) == r
    assert not (tmp_path / "plans").exists(), "there is nothing to remember"
    for touch in (lambda: compiled.save(tmp_path / "m.weft"), lambda: compiled.executable):
        with pytest.raises(ArtifactError, match=r"no plan of this model is left: the framework's own .* \[W401\]"):
            touch()
    compiled.report(tmp_path / "m.html")
    assert (tmp_path / "m.html").stat().st_size > 1000
    with pytest.warns(UserWarning, match="leaves out|has no plan"):
        more = compiled(torch.cat([x, x]))
    close(more, model(torch.cat([x, x])))


def test_an_exported_program_without_a_plan_refuses_other_shapes(
    model: nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "link", _refuse)
    with pytest.warns(UserWarning, match="leaves out|has no plan"):
        compiled = weft.compile(
            torch.export.export(model, (x,)), x, options=weft.Options(budget_s=0, cache_dir=tmp_path)
        )
    close(compiled(x), model(x))
    with pytest.raises(InputError, match=r"input 0: expected .*, got \(4, 3, 8, 8\)"):
        compiled(torch.cat([x, x]))
    with pytest.raises(InputError, match="takes 1 tensors, 2 were given"):
        compiled(x, x)


def test_a_file_without_any_plan_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    v = b.input(TensorType(DType.F32, (4,)))
    monkeypatch.setattr(linking, "link", _refuse)
    imported = Imported(b.build([b.add(Prim.EXP, v)]), 1)
    with pytest.warns(UserWarning, match="leaves out"), pytest.raises(NoPlanError, match=r"refuses it \[W303\]"):
        compiling.compile_imported(imported, weft.Options(budget_s=0, cache_dir=tmp_path))


def test_what_is_no_tensor_is_an_input_error(compiled: Compiled, x: torch.Tensor) -> None:
    for wrong in ("x", x.numpy(), None):
        with pytest.raises(InputError, match=r"input 0: .*\[W011\]"):
            compiled(wrong)
        with pytest.raises(InputError, match="is no tensor"):
            compiled.executable(wrong)  # type: ignore[arg-type]


def test_what_is_no_model_is_an_option_error(x: torch.Tensor) -> None:
    with pytest.raises(OptionError, match=r"option 'model': a int is no torch module"):
        weft.compile(3, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [-1.0, float("nan"), "a", None])
def test_a_budget_is_a_number_of_seconds(budget: object) -> None:
    with pytest.raises(OptionError, match=r"'budget_s': .* is no number of seconds"):
        weft.Options(budget_s=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("threads", "4", "'4' is no whole number"),
        ("threads", 1.5, "1.5 is no whole number"),
        ("threads", -1, "-1 is less than 0"),
        ("max_plans", True, "True is no whole number"),
        ("allow_generated", "no", "'no' is neither True nor False"),
        ("solver_gap", "x", "'x' is no number"),
        ("trial_timeout_s", -1, "-1 is no number of seconds"),
        ("device", 3, "3 is no text"),
        ("threads", np.int64(-3), "-3 is less than 0"),
        ("budget_s", np.float32(-1), "-1.0 is no number of seconds"),
    ],
)
def test_an_option_of_another_type_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}': {said}"):
        weft.Options(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_may_be_torchs_own(device: torch.device, model: nn.Module, x: torch.Tensor, cache: Path) -> None:
    compiled = weft.compile(model, x, device=device, options=weft.Options(budget_s=0, cache_dir=cache))
    close(compiled(x), model(x).detach())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_device_error(model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(DeviceError, match="sees no NVIDIA GPU"):
        weft.compile(model, x, device="cuda")


def test_a_linear_layer_of_two_types_is_refused() -> None:
    """`torch.export` takes it, which torch itself does not run."""
    with pytest.raises(UnsupportedError, match="operands of f64 and f32"):
        weft.compile(nn.Linear(4, 4), torch.randn(2, 4, dtype=torch.float64), options=weft.Options(budget_s=0))


@pytest.mark.slow
def test_a_plan_that_is_right_on_one_set_of_inputs_alone_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan gives again what it gave for the inputs that it is timed on."""
    module, given = nn.Linear(6, 4).eval(), torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    runs = Executable.__call__

    def remembered(self: Executable, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return runs(self, *(given for _ in inputs))

    monkeypatch.setattr(Executable, "__call__", remembered)
    options = Options(budget_s=AMPLE_S, allow_generated=False, cache_dir=private_directory(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is said of plans that are refused
        compiled = weft.compile(module, given, options=options)
    plans = [p for p in compiled.record.plans if p.name != "eager"]
    assert plans and all(p.note.startswith("on other inputs: ") and not p.verified for p in plans)
    x = torch.ones(3, 6)
    assert torch.allclose(narrow(torch.Tensor, compiled(x)), module(x))
