"""`weft.compile` of modules that no plan holds whole: what can be in plans is, and the framework runs the rest."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.errors import ArtifactError, NotTracedError, UnsupportedError, WeftError
from weft.pipeline.deadline import Deadline
from weft.torch_backend import parts

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
