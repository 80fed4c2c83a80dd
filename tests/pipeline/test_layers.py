from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.typed import narrow
from torch import nn

import weft
from weft.errors import ArtifactError
from weft.frontends.torch import import_exported
from weft.ir.passes import clean_up
from weft.kernels.candidate import Kind
from weft.kernels.plan import Plan
from weft.kernels.pretty import pretty
from weft.kernels.source import CallStep, KernelSource, LibraryCall, Ref
from weft.orchestrate.alternatives import find_alternatives
from weft.pipeline import finish, reference, repro, untuned
from weft.pipeline.layers import check_steps, compare
from weft.pipeline.link import link
from weft.pipeline.reference import working_dtype
from weft.pipeline.setting import survey
from weft.runtime.any import AnyExecutable


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.conv, self.norm, self.last = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.Linear(24, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return torch.softmax(self.last(y.mean((2, 3))) * 3, -1)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))


class _Case:
    def __init__(self, cache: Path, way: str) -> None:
        self.options = weft.Options(budget_s=0, cache_dir=cache)
        self.imported = import_exported(torch.export.export(_Net().eval(), (X,)))
        self.executable = untuned.build(self.imported, self.options, [way]).executables[way]
        cleaned = clean_up(self.imported.graph)
        self.alternatives = find_alternatives(cleaned.graph)

    def broken(self, change: Callable[[str], str]) -> tuple[AnyExecutable, int]:
        """The plan with one generated kernel of other text, and that step."""
        plan = self.executable.plan
        for k, step in enumerate(plan.steps):
            if isinstance(step.kernel, KernelSource) and change(step.kernel.text) != step.kernel.text:
                wrong = replace(step.kernel, text=change(step.kernel.text))
                steps = (*plan.steps[:k], replace(step, kernel=wrong), *plan.steps[k + 1 :])
                return link(self.executable.graph, replace(plan, steps=steps), survey(self.options)), k
        raise AssertionError("no kernel to break")

    def case(self, plan: Plan, *, drawn: bool = False) -> repro.Case:
        graph = self.executable.graph
        inputs = reference.example_inputs(graph, 0) if drawn else [X]
        return repro.Case(self.imported.graph, graph, plan, self.alternatives.classes, inputs, drawn)


def _wrong_store(text: str) -> str:
    """A result a hundredth too large."""
    return re.sub(r"(w_stv\(out0 [^;]*), (e\d+)\);", r"\1, \2 * w_splat_f32(1.01f));", text, count=1)


def _wrong_weights(text: str) -> str:
    """Packed weights a hundredth too large."""
    return text.replace("? w[", "? 1.01f * w[", 1)


@pytest.mark.parametrize("way", untuned.WAYS)
def test_steps_of_right_plans_are_right(way: str, cache: Path) -> None:
    case = _Case(cache, way)
    checks = check_steps(case.executable, [X], case.alternatives.classes)
    assert len(checks) == len(case.executable.plan.steps)
    assert all(c.ok and c.judged for c in checks), [c.note for c in checks]
    assert max(c.worst for c in checks) > 0, "something was compared"
    torch.testing.assert_close(case.executable(X)[0], _Net().eval()(X), rtol=1e-4, atol=1e-5)


def _broken(case: _Case) -> tuple[AnyExecutable, int]:
    changes = (_wrong_store, _wrong_weights)
    texts = [s.kernel.text for s in case.executable.plan.steps if isinstance(s.kernel, KernelSource)]
    return case.broken(next(c for c in changes if any(c(t) != t for t in texts)))


@pytest.mark.parametrize("way", ["single", "fused"])
def test_the_kernel_that_is_wrong_is_named_and_no_later_one(way: str, cache: Path) -> None:
    case = _Case(cache, way)
    executable, broken = _broken(case)
    checks = check_steps(executable, [X], case.alternatives.classes)
    assert [c.step for c in checks if not c.ok] == [broken]
    assert "outside" in checks[broken].note


def test_a_conversion_of_the_memory_format_is_judged_like_a_kernel(cache: Path) -> None:
    """Also that of an input, whose plain form is the caller's own tensor."""
    case = _Case(cache, "library")
    plan = case.executable.plan
    [k] = [k for k, s in enumerate(plan.steps) if s.kind is Kind.CONVERT]
    step = plan.steps[k]
    assert step.inputs[0][0] == step.outputs[0][0] in case.executable.graph.inputs
    assert isinstance(step.kernel, LibraryCall)
    wrong = replace(
        step.kernel,
        run=(CallStep("aten.mul.Scalar", (Ref("in", 0), 1.01)),),
        outputs=(Ref("tmp", 0),),
        out_variant=False,
    )
    steps = (*plan.steps[:k], replace(step, kernel=wrong), *plan.steps[k + 1 :])
    executable = link(case.executable.graph, replace(plan, steps=steps), survey(case.options))
    checks = check_steps(executable, [X], case.alternatives.classes)
    assert [c.step for c in checks if not c.ok] == [k]
    assert checks[k].operators == ("convert",)
    told: list[str] = []
    note = repro.blame(executable, case.case(executable.plan), "off", case.options, {}, told.append, seconds=60)
    assert f"kernel {k} " in note and "convert is wrong" in note
    assert len(told) == 1


def test_a_value_that_is_overwritten_is_told(cache: Path) -> None:
    case = _Case(cache, "single")
    plan, executable = case.executable.plan, case.executable
    second = next(k for k, s in enumerate(plan.steps) if k and s.inputs and s.inputs[0] in plan.steps[k - 1].outputs)
    stored, calls = executable.stored, []

    def spoil(key: Any) -> Any:
        found = stored(key)
        if key == plan.steps[second].inputs[0]:
            calls.append(key)
            if len(calls) == 2:  # written once, read now
                found.add_(1)
        return found

    executable.stored = spoil  # type: ignore[method-assign]
    checks = check_steps(executable, [X], case.alternatives.classes)
    assert f"%{plan.steps[second].inputs[0][0]} was overwritten" in checks[second].note


def test_a_bundle_shows_the_failure_again(cache: Path) -> None:
    case = _Case(cache, "single")
    executable, broken = _broken(case)
    told: list[str] = []
    note = repro.blame(
        executable, case.case(executable.plan), "output 0: off", case.options, {"cpu": "x"}, told.append, seconds=60
    )
    assert f"kernel {broken} " in note
    (line,) = told
    match = re.search(r"weft repro ([^\s`]+)", line)
    assert match is not None
    folder = Path(match[1])
    wrong = narrow(KernelSource, executable.plan.steps[broken].kernel)
    assert (folder / f"kernel-{broken}.cpp").read_text() == pretty(wrong.text)
    found = repro.replay(folder, case.options)
    assert found.fails
    assert found.drawn == ()
    assert found.culprit is not None
    assert found.culprit.step == broken
    assert not any(p.suffix in (".pkl", ".pt") for p in folder.iterdir())


def test_weights_and_inputs_beyond_the_bound_are_drawn_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case(cache, "fused")
    executable, broken = _broken(case)
    monkeypatch.setattr(repro, "MOST_BYTES", 0)
    folder = repro.keep(cache, case.case(executable.plan), "", None, case.options, {})
    assert folder is not None
    assert {p.name for p in folder.iterdir()} == {"bundle.json", "model.txt", "plan.json"}
    found = repro.replay(folder, case.options)
    assert found.drawn == ("weights", "inputs")
    assert found.fails
    assert found.culprit is not None
    assert found.culprit.step == broken


def test_a_plan_of_right_kernels_is_told_so(cache: Path) -> None:
    case = _Case(cache, "single")
    plan = case.executable.plan
    note = repro.blame(case.executable, case.case(plan), "why", case.options, {}, pytest.fail, seconds=60)
    assert note == "why; each kernel is right by itself"
    folder = repro.keep(cache, case.case(plan, drawn=True), "", None, case.options, {})
    assert folder is not None
    assert not repro.replay(folder, case.options).fails


def test_a_bundle_is_code_and_damage_is_seen(cache: Path, tmp_path: Path) -> None:
    case = _Case(cache, "single")
    folder = repro.keep(cache, case.case(case.executable.plan), "", None, case.options, {})
    assert folder is not None
    other = weft.Options(budget_s=0, cache_dir=tmp_path / "other")
    with pytest.raises(ArtifactError, match=r"not trusted.*W401\]\n  .*--trust [0-9a-f]{64}") as refused:
        repro.replay(folder, other)
    digest = str(refused.value).split("--trust ")[1]
    assert not repro.replay(folder, other, trust=digest).fails
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    (copied / "plan.json").write_text((folder / "plan.json").read_text().replace("f32", "f64"))
    with pytest.raises(ArtifactError, match="damaged"):
        repro.replay(copied, case.options)
    (copied / "bundle.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(ArtifactError, match="another version"):
        repro.replay(copied, case.options)
    with pytest.raises(ArtifactError, match="no readable bundle"):
        repro.replay(tmp_path / "none", case.options)


def test_only_the_newest_bundles_stay(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case(cache, "library")
    monkeypatch.setattr(repro, "MOST_BUNDLES", 2)
    for k in range(4):
        repro.keep(tmp_path, case.case(case.executable.plan, drawn=True), f"note {k}", None, case.options, {})
    left = [json.loads((p / "bundle.json").read_text())["note"] for p in (tmp_path / "repro").iterdir()]
    assert len(left) == 2
    assert "note 3" in left


def test_a_compilation_that_refuses_a_plan_names_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Any]
    verify, refused, broken = finish.verify, [], []

    def refuses(contender: Any, expected: Any, dtype: Any) -> Any:
        found = verify(contender, expected, dtype)
        if refused or contender.executable is None:
            return found
        refused.append(contender.name)
        # its kernels become wrong by the time they are looked at
        launches, steps = contender.executable._launches, contender.executable.plan.steps
        at = next(i for i, s in enumerate(steps) if s.kind is not Kind.CONVERT)
        right = launches[at]

        def off() -> None:
            right()
            contender.executable._static[steps[at].outputs[0]].add_(1)

        launches[at] = off
        broken.append(at)
        return finish.Check(False, 1.0, "output 0: 100.00% outside, cosine 0.000000")

    monkeypatch.setattr(finish, "verify", refuses)
    options = weft.Options(budget_s=0, cache_dir=tmp_path)
    with warnings.catch_warnings(record=True, action="always") as told:  # that no plan is left, too
        compiled = weft.compile(_Net().eval(), X, options=options)
    said = f"refuses the plan .*kernel {broken[0]} .*is wrong.*weft repro"
    assert any(re.search(said, str(w.message)) for w in told)
    record = next(p for p in compiled.record.plans if p.name == refused[0])
    assert f"kernel {broken[0]} " in record.note
    assert not record.verified


def test_values_against_the_model_s_own(cache: Path) -> None:
    case = _Case(cache, "fused")
    layers = compare(case.executable, [X])
    assert [x.step for x in layers] == sorted(x.step for x in layers)
    assert {x.step for x in layers} == set(range(len(case.executable.plan.steps)))
    assert all(x.ok for x in layers)
    assert all(x.weft.rms <= x.weft.worst < 1e-4 for x in layers)
    executable, broken = _broken(case)
    off = compare(executable, [X])
    assert next(x.step for x in off if not x.ok) == broken
    assert working_dtype(executable.graph).value == "f32"
