"""`weft.compile` of modules that no plan holds whole: what can be in plans is, and the framework runs the rest."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.errors import ArtifactError, NotTracedError, RefitError, UnsupportedError, WeftError
from weft.frontends.imported import Imported
from weft.frontends.torch import as_function, functional_program
from weft.pipeline import compile as compiling
from weft.pipeline import framework
from weft.pipeline.deadline import Deadline
from weft.pipeline.framework import TOO_LATE, LeftToFramework
from weft.pipeline.job import Compilation, Job
from weft.platform.cpu import Cpu
from weft.torch_backend import Run, parts

LIB = "weft_in_parts_tests"


@torch.library.custom_op(f"{LIB}::median_filter", mutates_args=())
def median_filter(x: torch.Tensor) -> torch.Tensor:
    padded = np.pad(x.numpy(), ((0, 0), (1, 1)), mode="edge")
    return torch.from_numpy(np.median(np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1), axis=-1))


@median_filter.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def given(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Filtered(nn.Module):
    """A custom operator between two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
        self.second = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.second(median_filter(self.first(x))), -1)


class Chosen(nn.Module):
    """Python that looks at values, and as many results as these ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        if float(y.mean()) > 1e6:
            y = y / y.mean()
        kept = torch.nonzero(y[:, 0] > 0)[:, 0]
        return {"kept": kept, "scores": torch.sigmoid(self.head(y))[kept]}


class Spectral(nn.Module):
    """Complex numbers, of which some are random, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.filter = nn.Parameter(given(9, seed=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        spectrum = torch.fft.rfft(y)
        noise = 0 * torch.rand_like(spectrum.real)
        y = torch.fft.irfft(spectrum * (self.filter + noise), n=16)
        return torch.tanh(self.second(y)) + x


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "custom": (Filtered, (6, 16)),
    "data": (Chosen, (12, 8)),
    "complex": (Spectral, (6, 16)),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    return kind().eval(), given(*shape)


def same(got: object, want: object) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(name: str, tmp_path: Path, **options: object) -> tuple[weft.Compiled, nn.Module, torch.Tensor]:
    model, x = made(name)
    chosen = weft.Options(cache_dir=tmp_path, **{"budget_s": 0.0, **options})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"Weft compiles .* in parts \(\d plans\), and torch runs what no plan holds"):
        return weft.compile(model, x, options=chosen), model, x


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_no_plan_holds_is_compiled_in_parts(name: str, tmp_path: Path) -> None:
    exe, model, x = compiled(name, tmp_path)
    with torch.no_grad():
        for seed in range(3):
            x = given(*x.shape, seed=seed)
            same(exe(x), model(x))
    assert len(exe.parts) >= 2 and all(p.plan is not None for p in exe.parts)
    assert "in parts" in exe.record.notes[-1 - len(exe.parts)]
    assert exe.record.operators == sum(p.record.operators for p in exe.parts) > 0
    assert exe.record.chosen == "parts"


def dynamo_counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The modules that are cut by a trace of dynamo."""
    seen: list[object] = []
    own = parts.InParts.__init__

    def made(self: parts.InParts, module: nn.Module, options: weft.Options) -> None:
        seen.append(module)
        own(self, module, options)

    monkeypatch.setattr(parts.InParts, "__init__", made)
    return seen


@pytest.mark.parametrize(("name", "traced_again"), [("custom", False), ("complex", False), ("data", True)])
def test_what_was_exported_is_cut_without_another_trace(
    name: str, traced_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dynamo_counted(monkeypatch)
    exe, model, x = compiled(name, tmp_path)
    assert bool(seen) is traced_again
    assert ("cut" in {s.name for s in exe.record.stages}) is not traced_again
    with torch.no_grad():
        same(exe(x), model(x))


def test_a_program_that_writes_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = median_filter(torch.relu(self.line(x)))
            x.mul_(2)
            return y * x

    seen = dynamo_counted(monkeypatch)
    torch.manual_seed(0)
    model = Writes().eval()
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, given(4, 16), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    assert len(seen) == 1
    mine, theirs = given(4, 16, seed=1), given(4, 16, seed=1)
    with torch.no_grad():
        same(exe(mine), model(theirs))
    assert torch.equal(mine, theirs), "as the model does"


def test_results_of_a_cut_program_are_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes into a result changes neither a weight nor an argument; what is no tensor comes back as it is."""

    class Hands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
            self.register_buffer("unread", torch.ones(3))

        def forward(self, x: torch.Tensor, count: int = 2, *, bias: torch.Tensor) -> dict[str, object]:
            y = median_filter(torch.relu(self.line(x)) + bias)
            z = median_filter(y.clamp_(max=3) * count)
            return {"y": y, "z": (z, count), "x": x.view(-1), "scale": self.scale, "none": None}

    seen = dynamo_counted(monkeypatch)
    torch.manual_seed(0)
    model, x, bias = Hands().eval(), given(4, 16), given(16, seed=1)
    options = weft.Options(budget_s=0.0, cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, (x,), example_kwargs={"bias": bias}, options=options)
    assert not seen
    for _ in range(2):
        with torch.no_grad():
            want = model(x, bias=bias)
        got = exe(x, bias=bias)
        assert list(got) == list(want) and got["z"][1] == 2 and got["none"] is None
        for key in ("y", "x", "scale"):
            same(got[key], want[key].detach())
        same(got["z"][0], want["z"][0])
        got["x"].zero_()
        with torch.no_grad():
            got["scale"].zero_()
        assert torch.equal(x, given(4, 16))


def test_other_shapes_and_other_weights(tmp_path: Path) -> None:
    exe, model, _ = compiled("custom", tmp_path)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for rows in (3, 9):
            x = given(rows, 16, seed=rows)
            same(exe(x), model(x))
        torch.manual_seed(5)
        other = Filtered().eval()
        exe.refit(other.state_dict())
        for rows in (6, 3, 9):
            x = given(rows, 16, seed=rows)
            same(exe(x), other(x))


def test_what_is_done_to_the_module_later_changes_nothing(tmp_path: Path) -> None:
    exe, model, x = compiled("custom", tmp_path)
    with torch.no_grad():
        want = model(x)
        model.first[0].weight.zero_()  # type: ignore[index, union-attr]
        same(exe(x), want)


def test_what_has_no_one_plan_says_so(tmp_path: Path) -> None:
    exe, _, _ = compiled("custom", tmp_path)
    for ask in (lambda: exe.save(tmp_path / "x.weft"), lambda: exe.executable, exe.diff):
        with pytest.raises(ArtifactError, match=r"there is no one plan: .*\(2\)"):
            ask()
    exe.report(tmp_path / "page.html")
    assert "in parts (2 plans)" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "kind"), [("custom", UnsupportedError), ("data", NotTracedError)])
@pytest.mark.parametrize("option", [{"in_parts": False}, {"memory_limit_bytes": 1 << 20}, {"check_indices": True}])
def test_it_is_refused_where_that_is_asked_for(
    name: str, kind: type[WeftError], option: dict[str, object], tmp_path: Path
) -> None:
    model, x = made(name)
    with pytest.raises(kind):
        weft.compile(model, x, options=weft.Options(budget_s=0.0, cache_dir=tmp_path, **option))  # type: ignore[arg-type]


def test_a_model_in_training_mode_and_one_of_nothing_else_are_refused(tmp_path: Path) -> None:
    options = weft.Options(budget_s=0.0, cache_dir=tmp_path)

    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return median_filter(x)

    with pytest.raises(UnsupportedError, match="median_filter"):
        weft.compile(Alone().eval(), given(4, 4), options=options)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="random numbers") as error:
        weft.compile(model, given(4, 4), options=options)
    assert "model.eval()" in str(error.value)


def test_a_model_that_changes_itself_is_refused(tmp_path: Path) -> None:
    """What it gives would depend on how often it was run while it was compiled."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.seen = nn.Linear(16, 16), 0
            self.register_buffer("sum", torch.zeros(16))
            self.sum: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = median_filter(torch.relu(self.line(x)))
            self.sum.add_(y.sum(0))
            return y + self.sum

    with pytest.raises(UnsupportedError, match=r"median_filter|buffer"):
        weft.compile(Counts().eval(), given(4, 16), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))


def test_results_in_a_form_of_their_own_in_each_call(tmp_path: Path) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
            y = torch.relu(self.line(x)) * 2 + 1
            count = int((x[:, 0] > 0).sum())
            return [y[k] for k in range(count)], count

    torch.manual_seed(0)
    model = Lists().eval()
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, given(5, 8), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    for seed in range(4):
        x = given(5, 8, seed=seed)
        got, count = exe(x)
        want, wanted = model(x)
        assert count == wanted == len(got)
        same(got, [y.detach() for y in want])


def test_a_loop_over_what_depends_on_values_leaves_the_network_before_it_to_plans(tmp_path: Path) -> None:
    """A detector: a network, and of each image as many boxes as are found."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
            self.box, self.score = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)

        def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
            y = self.body(x)
            boxes, scores = self.box(y).flatten(2).transpose(1, 2), self.score(y).sigmoid().flatten(2).transpose(1, 2)
            found = []
            for k in range(x.shape[0]):
                best, label = scores[k].max(-1)
                kept = torch.nonzero(best > 0.5)[:, 0]
                found.append({"boxes": boxes[k][kept], "scores": best[kept], "labels": label[kept]})
            return found

    torch.manual_seed(0)
    model = Detector().eval()
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, given(2, 3, 16, 16), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    assert exe.record.operators >= 8, "the network, in one part"
    for seed in range(3):
        x = given(2, 3, 16, 16, seed=seed)
        with torch.no_grad():
            same(exe(x), model(x))


def test_what_the_first_call_did_not_come_to_is_run_by_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other paths nor sizes that depend on values make a call wait for a search."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            kept = y[y[:, 0] > 0]
            if len(kept) > 3 and float(kept.sum()) > 0:
                return torch.softmax(self.head(kept), -1)
            return torch.sigmoid(self.head(kept)) + 1

    torch.manual_seed(0)
    model = Branches().eval()
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, given(12, 8), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    monkeypatch.setattr(parts, "compile_imported", None)
    sizes = set()
    with torch.no_grad():
        for seed in range(12):
            x = given(12, 8, seed=seed)
            want = model(x)
            same(exe(x), want)
            sizes.add(len(want))
    assert len(sizes) > 3


def test_example_inputs_stay_as_they_are(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = median_filter(torch.relu(self.line(x)))
            x.add_(1)
            return y + x

    torch.manual_seed(0)
    model, x = Writes().eval(), given(4, 16)
    with pytest.warns(UserWarning, match="in parts"):
        exe = weft.compile(model, x, options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    assert torch.equal(x, given(4, 16))
    mine, theirs = given(4, 16, seed=1), given(4, 16, seed=1)
    with torch.no_grad():
        same(exe(mine), model(theirs))
    assert torch.equal(mine, theirs), "as the model does"


def test_many_models_of_one_class(tmp_path: Path) -> None:
    """dynamo leaves a function to Python that it compiled eight times, whosever modules these were."""
    for seed in range(11):
        torch.manual_seed(seed)
        model, x = Filtered().eval(), given(3, 16, seed=seed)
        with pytest.warns(UserWarning, match="in parts"):
            exe = weft.compile(model, x, options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
        with torch.no_grad():
            same(exe(x), model(x))
        assert len(exe.parts) == 2, seed


def test_nothing_is_held_of_a_compiled_model_that_is_gone(tmp_path: Path) -> None:
    """What dynamo keeps under a class's text stays until the process ends."""
    exe, model, x = compiled("custom", tmp_path)
    held = [weakref.ref(p) for p in exe.parts] + [weakref.ref(exe._source)]
    exe(x)
    del exe, model, x
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


def test_callers_at_once(tmp_path: Path) -> None:
    exe, model, x = compiled("custom", tmp_path)
    with torch.no_grad():
        want = {seed: model(given(*x.shape, seed=seed)) for seed in range(8)}
    wrong: list[int] = []

    def call(seed: int) -> None:
        got = [exe(given(*x.shape, seed=seed)) for _ in range(20)]
        wrong.extend(seed for y in got if not torch.allclose(y, want[seed], rtol=1e-4, atol=1e-5))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in want]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
def test_with_a_budget_the_parts_are_tuned_and_timed_beside_the_model(tmp_path: Path) -> None:
    exe, model, x = compiled("custom", tmp_path, budget_s=30.0)
    with torch.no_grad():
        same(exe(x), model(x))
    times = {p.name: p.median_us for p in exe.record.plans}
    assert set(times) == {"parts", "eager"} and all(0 < t < 1e6 for t in times.values())
    assert exe.record.chosen == "parts" or times["eager"] < times["parts"]
    assert exe.record.seconds < 35 and exe.record.measured + exe.record.reused > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_where_no_time_is_left_to_cut_the_model_the_framework_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that can be compiled in parts is not refused because a machine is busy."""
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = kind().eval(), given(*shape)
    monkeypatch.setattr(Deadline, "left_s", property(lambda self: 0.0))
    monkeypatch.setattr(parts, "compile_imported", None)
    with pytest.warns(UserWarning, match="has no plan for this model, so the framework's own execution runs it"):
        exe = weft.compile(model, x, options=weft.Options(budget_s=30.0, cache_dir=tmp_path))
    assert exe.record.chosen == "eager"
    assert exe.parts == ()
    with torch.no_grad():
        same(exe(x), model(x))


def test_where_what_is_left_is_for_timing_parts_the_framework_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that is kept for later is none to cut in, and a model is not refused for that."""
    torch.manual_seed(0)
    model, x = Filtered().eval(), given(6, 16)
    monkeypatch.setattr("weft.api.TIMED_SHARE", 1.0)
    with pytest.warns(UserWarning, match="has no plan for this model, so the framework's own execution runs it"):
        exe = weft.compile(model, x, options=weft.Options(budget_s=30.0, cache_dir=tmp_path))
    assert exe.record.chosen == "eager" and exe.parts == ()
    with torch.no_grad():
        same(exe(x), model(x))


def test_what_there_is_no_time_to_cut_stays_with_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Filtered().eval(), given(6, 16)
    found = parts.InParts(model, weft.Options(budget_s=30.0, cache_dir=tmp_path))
    with torch.no_grad():
        assert found.compile(lambda: found.module(x), lambda: 0.0) == 0
        assert found.compilations == []
        same(found.module(x), model(x))


def test_without_a_budget_no_time_is_needed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Filtered().eval(), given(6, 16)
    found = parts.InParts(model, weft.Options(budget_s=0.0, cache_dir=tmp_path))
    with torch.no_grad():
        assert found.compile(lambda: found.module(x), lambda: 0.0) > 0
        assert found.compilations
        same(found.module(x), model(x))


class Layer(nn.Module):
    """Python looks at its values, so that dynamo leaves the model's loop to Python, and each layer is a graph."""

    def __init__(self, scale: float = 1.5) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(48, 64), nn.Linear(64, 48), nn.LayerNorm(48)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x + self.scale * self.down(torch.relu(self.up(x))))
        if torch.isinf(y).any():
            y = y.clamp(-1e4, 1e4)
        return y


class Layers(nn.Module):
    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def searched(monkeypatch: pytest.MonkeyPatch) -> list[weft.Options]:
    """The options of each part that is compiled."""
    seen: list[weft.Options] = []
    own = compiling.compile_imported

    def compiled(imported: Imported, options: weft.Options, **named: Any) -> Compilation:
        seen.append(options)
        return own(imported, options, **named)

    monkeypatch.setattr(parts, "compile_imported", compiled)
    return seen


def cut_layers(tmp_path: Path, *scales: float, budget_s: float = 0.0) -> tuple[parts.InParts, nn.Module]:
    """Layers in parts, as they stand before they are timed."""
    torch.manual_seed(0)
    model = Layers(*scales).eval()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        nn.init.normal_(layer.norm.weight)
        nn.init.normal_(layer.norm.bias)
    found = parts.InParts(model, weft.Options(budget_s=budget_s, cache_dir=tmp_path))
    with torch.no_grad():
        found.compile(lambda: found.module(given(3, 48)), lambda: 5.0)
    return found, model


def runs_as_compiled(found: parts.InParts, model: nn.Module) -> None:
    """It gives what the model gives, every part by what it was compiled to."""
    compilations = sum(r.compilations for r in found.regions)
    with torch.no_grad():
        for seed in range(4):
            same(found.module(given(3, 48, seed=seed)), model(given(3, 48, seed=seed)))
    assert all(r.fallback == "" for r in found.regions)
    assert sum(r.compilations for r in found.regions) == compilations, "no weight was taken for a changed one"


def test_equal_parts_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = searched(monkeypatch)
    found, model = cut_layers(tmp_path, 1.5, 1.5, 1.5, 1.5)
    assert len(seen) == 1 and len(found.compilations) == 4
    plans = [c.plan for c in found.compilations]
    assert all(p is not None for p in plans) and len({id(p) for p in plans}) == 4
    assert [parts.AS_ANOTHER in c.record.notes for c in found.compilations] == [False, True, True, True]
    runs_as_compiled(found, model)
    calls: list[int] = []

    def counted(k: int, run: Run, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        calls.append(k)
        return run(tensors)

    for k, late in enumerate(found._late):
        late.run = partial(counted, k, late.run)
    with torch.no_grad():
        found.module(given(3, 48))
    assert calls == [0, 1, 2, 3], "each layer by its own plan"


def test_parts_whose_weights_decide_are_compiled_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale of one vanishes, and with it an operator of the plan."""
    seen = searched(monkeypatch)
    found, model = cut_layers(tmp_path, 1.5, 1.0, 1.5)
    assert len(seen) == 2 and len(found.compilations) == 3
    assert [parts.AS_ANOTHER in c.record.notes for c in found.compilations] == [False, False, True]
    runs_as_compiled(found, model)


def test_a_plan_that_is_wrong_with_other_weights_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = searched(monkeypatch)

    def refused(*_: object) -> object:
        raise RefitError(problem="the plan is not right with these weights", remedy="")

    monkeypatch.setattr(parts, "refitted", refused)
    found, model = cut_layers(tmp_path, 1.5, 1.5)
    assert len(seen) == 2
    runs_as_compiled(found, model)


def test_equal_parts_that_eager_runs_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "check_budget", too_late)
    monkeypatch.setattr(compiling, "check_budget", too_late)
    seen, recorded = searched(monkeypatch), recording(monkeypatch)
    with pytest.warns(UserWarning, match=TOO_LATE):
        found, model = cut_layers(tmp_path, 1.5, 1.5, 1.5, budget_s=30.0)
    assert len(seen) == 1 and [c.plan for c in found.compilations] == [None] * 3
    runs_as_compiled(found, model)
    assert recorded == [4, 4, 4], "each is recorded by itself and answers every call"


def too_late(job: Job, needed_s: float = 0.0) -> None:
    del needed_s
    raise LeftToFramework(job, [TOO_LATE], inputs=None)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that records the framework's own execution; how often each recorded one is called."""
    calls: list[int] = []

    def later(_: Cpu, model: Callable[..., Any], types: object, options: object) -> Callable[..., Any]:
        del types, options
        calls.append(0)
        position = len(calls) - 1

        def run(*tensors: torch.Tensor) -> Any:
            calls[position] += 1
            return model(*tensors)

        return run

    monkeypatch.setattr(Cpu, "capture_later", later)
    return calls


@pytest.mark.parametrize("name", ["custom", "data"])
def test_a_part_without_time_is_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the framework's own execution, and needs no judge: on a GPU a CUDA graph, without what launches cost."""
    recorded = recording(monkeypatch)
    model, x = made(name)
    found = cut(name, model, x, tmp_path, left_s=parts.LEAST_S / 2)
    assert found.compilations == [] and len(recorded) >= 2
    run = found if isinstance(found, parts.ProgramInParts) else found.module
    with torch.no_grad():
        for seed in range(3):
            x = given(*x.shape, seed=seed)
            got, want = run(x), model(x)
            same(got[0] if isinstance(got, list) else got, want)
    assert set(recorded) == {3}
    assert all(r.fallback == "" for r in found.regions)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("name", ["custom", "data"])
def test_parts_that_are_recorded_answer_if_they_are_faster(
    name: str, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose trace took all the time is launched kernel by kernel otherwise."""
    recorded = recording(monkeypatch)
    model, x = made(name)
    monkeypatch.setattr("weft.pipeline.parts.wins", lambda *_: faster)
    monkeypatch.setattr("weft.torch_backend.parts.LEAST_S", 1e6)
    monkeypatch.setattr(parts, "compile_imported", None)
    with pytest.warns(UserWarning, match=r"in parts \(0 plans\)"):
        exe = weft.compile(model, x, options=weft.Options(budget_s=30.0, cache_dir=tmp_path))
    assert exe.record.chosen == ("parts" if faster else "eager") and exe.parts == ()
    assert not any(p.verified for p in exe.record.plans)
    before = list(recorded)
    with torch.no_grad():
        same(exe(x), model(x))
    assert [b - a for a, b in zip(before, recorded, strict=True)] == [int(faster)] * len(recorded)
    assert len(recorded) >= 2
    if faster:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
            with pytest.warns(UserWarning, match="in parts"):
                exe.refit(model.state_dict())
            same(exe(x), model(x))


def cut(
    name: str, model: nn.Module, x: torch.Tensor, tmp_path: Path, *, left_s: float
) -> parts.ProgramInParts | parts.InParts:
    """A model in parts, after which so many seconds are left of a budget."""
    options = weft.Options(budget_s=30.0, cache_dir=tmp_path)
    with torch.no_grad():
        if name == "data":
            found = parts.InParts(model, options)
            found.compile(lambda: found.module(x), lambda: left_s)
            return found
        function = as_function(functional_program(torch.export.export(model, (x,))))
        assert function is not None
        program = parts.ProgramInParts(*function, options)
        assert program.cut((x,))
        program.compile(lambda: left_s, has_run=False)
        return program


def test_what_won_beside_the_plans_of_a_part_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was recorded to be timed; the model that it was recorded of is slower."""
    recorded = recording(monkeypatch)
    settled: list[int] = []

    def won(imported: Imported, options: weft.Options, *, eager: Callable[..., Any], **_: Any) -> Compilation:
        del options
        settled.append(0)
        own = Cpu.capture_later(cast("Cpu", None), eager, (), weft.Options())
        return replace(empty, graph=imported.graph, eager=own)

    exe, model, x = compiled("custom", tmp_path)
    empty = exe.parts[0]
    monkeypatch.setattr(parts, "compile_imported", won)
    found = cut("custom", model, x, tmp_path, left_s=20.0)
    assert isinstance(found, parts.ProgramInParts) and len(settled) == 2
    with torch.no_grad():
        same(found(x)[0], model(x))
    assert recorded == [1, 1]


def test_large_parts_come_first_where_time_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has a quarter of a second at least: less is no time, and nothing would be compiled."""
    left = [0.6]
    sizes: list[tuple[int, float]] = []

    def compiled(imported: Imported, options: weft.Options, **_: Any) -> Compilation:
        sizes.append((imported.operators, options.budget_s))
        left[0] -= options.budget_s
        raise UnsupportedError(op="all", reason="it is not looked at")

    monkeypatch.setattr(parts, "compile_imported", compiled)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, line in enumerate(self.lines):
                x = line(x)
                for _ in range(k):
                    x = torch.tanh(x) * 2
                x = median_filter(x)
            return x

    function = as_function(functional_program(torch.export.export(Many().eval(), (given(4, 8),))))
    assert function is not None
    program = parts.ProgramInParts(*function, weft.Options(budget_s=30.0, cache_dir=tmp_path))
    assert program.cut((given(4, 8),))
    program.compile(lambda: left[0], has_run=False)
    assert [budget for _, budget in sizes] == pytest.approx([parts.LEAST_S] * 2)
    assert sizes[0][0] > sizes[1][0], "and what is small has none"


@pytest.mark.parametrize("loads", [True, False])
def test_what_a_first_run_loads_is_loaded_once(loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that takes seconds: the whole is run for it, and no part keeps time for that."""
    runs: list[object] = []
    ran: list[object] = []

    def run_once(eager: Callable[..., Any], inputs: Sequence[torch.Tensor], setting: object) -> None:
        del setting
        runs.append(eager(*inputs))

    def compiled(*_: object, has_run: bool, **__: object) -> Compilation:
        ran.append(has_run)
        raise UnsupportedError(op="all", reason="it is not looked at")

    monkeypatch.setattr(Cpu, "asynchronous", loads)
    monkeypatch.setattr("weft.api.run_once", run_once)
    monkeypatch.setattr(parts, "compile_imported", compiled)
    model, x = made("custom")
    with pytest.raises(UnsupportedError, match="median_filter"):
        weft.compile(model, x, options=weft.Options(budget_s=30.0, cache_dir=tmp_path))
    assert len(runs) == loads and ran == [loads, loads]
