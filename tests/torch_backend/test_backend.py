"""torch.compile through the backend: inference, training, shapes, mutation, strides and every way out."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.torch_backend.seen import Seen
from tests.typed import some
from torch import nn

from weft.errors import OptionError, UserError
from weft.frontends.torch import whole_resizes
from weft.options import Options
from weft.torch_backend import reference_engine, register, weft_backend, weft_backend_with
from weft.torch_backend.engine import compiling_engine


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.attend, self.line = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
        self.after = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.after(x + self.attend(x, x, x, need_weights=False)[0])
        return F.log_softmax(self.line(F.gelu(x)).mean(1), -1)


def test_inference() -> None:
    seen, model, x = Seen(), Block().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(model)(x), model(x))
    (region,) = seen.regions
    assert region.fallback == ""
    assert region.program is not None
    assert region.program.imported.opaque == ()


def test_training_step() -> None:
    seen, model, x = Seen(), Block().train(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    step = seen.compile(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    for _ in range(2):
        for f, optimizer in ((step, optimizers[0]), (twin, optimizers[1])):
            optimizer.zero_grad()
            F.nll_loss(f(x), torch.tensor([1, 3])).backward()
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c)
    kinds = [r.name.partition("(")[2] for r in seen.regions]
    assert kinds == ["forward)", "backward)"]
    assert seen.fallbacks() == []


def test_a_backward_graph_that_cannot_be_compiled_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def engine(imported: Any, options: Any, eager: Any) -> Any:
        if len(imported.graph.outputs) == 1 and calls:
            raise UserError(message="no backward today")
        calls.append(1)
        return reference_engine(imported, options, eager)

    calls: list[int] = []
    seen = Seen(engine)
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    with caplog.at_level(logging.WARNING, "weft"):
        seen.compile(lambda w: torch.tanh(x @ w).sum())(w).backward()
    grad, w.grad = w.grad, None
    torch.tanh(x @ w).sum().backward()
    torch.testing.assert_close(grad, w.grad)
    assert [r.getMessage() for r in caplog.records if "(backward)" in r.getMessage()]
    assert seen.fallbacks() == ["no backward today [W000]"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_module(dtype: torch.dtype) -> None:
    seen, x = Seen(), torch.randn(4, 12).to(dtype)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6), nn.LayerNorm(6), nn.Softmax(-1)).to(dtype)
    with torch.no_grad():
        found, wanted = seen.compile(model)(x), model(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=1e-2)
    assert seen.fallbacks() == []


def test_autocast() -> None:
    seen, model, x = Seen(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, wanted = seen.compile(model)(x), model(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_each_batch_size_is_right_and_has_a_plan() -> None:
    seen = Seen()
    step = seen.compile(lambda x: x.relu().reshape(x.shape[0] * 2, -1) + x.shape[0])
    for n in (2, 3, 5, 7, 3, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(step(x), x.relu().reshape(n * 2, -1) + n)
    shapes = [r.program.imported.graph.nodes[0].type.shape for r in seen.regions if r.program]
    assert set(shapes) == {(2, 4), (3, 4), (5, 4), (7, 4)}
    assert len(shapes) <= 5  # dynamo's first graph is static, the second serves every size


def test_the_number_of_plans_is_bounded() -> None:
    seen = Seen(max_plans=2)
    step = seen.compile(lambda x: x * 2, dynamic=True)
    for n in (3, 4, 5, 5, 4, 3):
        torch.testing.assert_close(step(torch.ones(n)), torch.full((n,), 2.0))
    assert len(seen.regions) == 4  # 3, 4, 5, and 3 again: it was the oldest when 5 came


def test_numbers_that_dynamo_leaves_open_are_fixed_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    """dynamo passes such a float as a tensor whose value the graph reads."""
    seen = Seen(max_plans=3)
    step = seen.compile(lambda x, s: torch.tanh(x) / s, dynamic=True)
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "weft"):
        for s in (2.0, 0.0, -0.0, 0.0, 2.0):
            torch.testing.assert_close(step(x, s), torch.tanh(x) / s)
        assert len(seen.regions) == 3 and not seen.fallbacks() and not caplog.records
        for s in (5.0, 6.0, 2.0):
            torch.testing.assert_close(step(x, s), torch.tanh(x) / s)
    assert len(seen.regions) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "weft: a number of the caller's had 3 values: eager runs the graph for others"
    ]


def test_numbers_that_dynamo_leaves_open_in_training() -> None:
    step = Seen().compile(lambda x, s: (torch.tanh(x) * s).sum(), dynamic=True)
    for s in (2.0, 3.0):
        x = torch.randn(3, 4, requires_grad=True)
        step(x, s).backward()
        torch.testing.assert_close(x.grad, s * (1 - torch.tanh(x.detach()) ** 2))


def test_training_with_open_sizes() -> None:
    seen = Seen()
    w = torch.randn(4, 3, requires_grad=True)
    step = seen.compile(lambda x: torch.tanh(x @ w).sum(), dynamic=True)
    for n in (2, 5):
        x = torch.randn(n, 4)
        w.grad = None
        step(x).backward()
        grad, w.grad = w.grad, None
        torch.tanh(x @ w).sum().backward()
        torch.testing.assert_close(grad, w.grad)


def test_input_mutation() -> None:
    def f(x: torch.Tensor, y: Any) -> Any:
        x.add_(y)
        y = y * 2
        return x * y, x

    seen = Seen()
    a, b = torch.randn(3), torch.randn(3)
    c, d = a.clone(), b.clone()
    found, wanted = seen.compile(f)(a, b), f(c, d)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(a, c)
    assert found[1] is a
    assert seen.fallbacks() == []


def test_buffers_are_updated() -> None:
    seen, model = Seen(), nn.BatchNorm1d(4).train()
    twin, x = copy.deepcopy(model), torch.randn(8, 4)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(model)(x), twin(x))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_weights_that_change_are_seen() -> None:
    seen, model, x = Seen(), nn.Linear(3, 2), torch.randn(4, 3)
    step = seen.compile(model)
    with torch.no_grad():
        step(x)
        model.weight.data.mul_(2)
        torch.testing.assert_close(step(x), model(x))


def test_outputs_have_the_strides_of_eager() -> None:
    seen = Seen()
    model = nn.Conv2d(3, 4, 3).eval()
    functions = (
        lambda x: (model(x.to(memory_format=torch.channels_last)), x.permute(0, 2, 3, 1) + 1, x[0, 0].t() * 2),
        lambda x: (x.sum(1, keepdim=True).expand(2, 3, 5, 6), x.mean(0).expand(4, 3, 5, 6)),
    )
    x = torch.randn(2, 3, 5, 6)
    with torch.no_grad():
        for f in functions:
            for found, wanted in zip(seen.compile(f)(x), f(x), strict=True):
                torch.testing.assert_close(found, wanted, check_stride=True)


def test_views_and_aliases_of_inputs() -> None:
    seen, x = Seen(), torch.arange(6.0)
    found = seen.compile(lambda x: (x.view(2, 3), x, x[1:] + 0))(x)
    assert found[0].data_ptr() == x.data_ptr()
    assert found[1] is x
    torch.testing.assert_close(found[2], x[1:])


def test_results_that_are_not_tensors() -> None:
    seen, x = Seen(), torch.ones(3)
    assert seen.compile(lambda x: (x.shape[0], None, x + 1, "s"))(x)[:2] == (3, None)


def test_an_operator_without_a_rule_stays_inside() -> None:
    seen, x = Seen(), torch.randn(4, 6)
    f = lambda x: (x * 2).logcumsumexp(1).relu().topk(2)  # noqa: E731
    torch.testing.assert_close(tuple(seen.compile(f)(x)), tuple(f(x)))
    (region,) = seen.regions
    assert {u.op for u in some(region.program).imported.opaque} == {"aten.logcumsumexp.default", "aten.topk.default"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.fft.rfft, "a complex tensor"),
        (lambda x: F.dropout(x, 0.5, True), "random numbers"),
        (lambda x: x.to(torch.float8_e4m3fnuz).float() * 2, "float8"),
    ],
    ids=["complex", "random", "float8"],
)
def test_what_is_refused_runs_eagerly_with_one_warning(
    function: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen, x = Seen(), torch.randn(6, 6)
    step = seen.compile(function)
    with caplog.at_level(logging.WARNING, "weft"):
        torch.manual_seed(3)
        found = [step(x), step(x)]
    torch.manual_seed(3)
    torch.testing.assert_close(found, [function(x), function(x)])
    assert reason in seen.fallbacks()[0]
    warnings = [r.getMessage() for r in caplog.records if r.name == "weft"]
    assert len(warnings) == 1
    assert "is run by eager" in warnings[0]
    assert reason in warnings[0]


def test_an_engine_that_crashes_leaves_the_graph_to_eager(caplog: pytest.LogCaptureFixture) -> None:
    def engine(imported: Any, options: Any, eager: Any) -> None:
        raise RuntimeError("segment of a stack")

    seen, x = Seen(engine), torch.randn(3)
    with caplog.at_level(logging.WARNING, "weft"):
        torch.testing.assert_close(seen.compile(lambda x: x * 2)(x), x * 2)
    assert "met a bug in Weft" in caplog.text


def test_an_executable_that_fails_is_given_up_before_it_wrote(caplog: pytest.LogCaptureFixture) -> None:
    def engine(imported: Any, options: Any, eager: Any) -> Any:
        def run(inputs: Any) -> None:
            raise RuntimeError("sick device")

        return run

    def f(x: torch.Tensor) -> Any:
        x.add_(1)
        return x * 2

    seen, x = Seen(engine), torch.zeros(3)
    step = seen.compile(f)
    with caplog.at_level(logging.WARNING, "weft"):
        torch.testing.assert_close(step(x), torch.full((3,), 2.0))
        torch.testing.assert_close(step(x), torch.full((3,), 4.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))
    assert caplog.text.count("failed at run time") == 1


def test_threads_share_a_model() -> None:
    seen = Seen()
    step = seen.compile(lambda x: torch.tanh(x) @ x.t(), dynamic=True)
    x = {n: torch.randn(n, 4) for n in (2, 3, 4, 5)}
    step(x[2])
    failures = []

    def work(n: Any) -> None:
        try:
            for _ in range(5):
                torch.testing.assert_close(step(x[n]), torch.tanh(x[n]) @ x[n].t())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 4, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_options_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def engine(imported: Any, options: Any, eager: Any) -> Any:
        used.append(options.budget_s)
        return reference_engine(imported, options, eager)

    backend = weft_backend_with(engine, Options())
    asked: dict[str, Any] = {"budget_s": 3.0}
    torch.compile(lambda x: x + 1, backend=backend, options=asked)(torch.ones(2))
    assert used == [3.0]
    wrong: dict[str, Any] = {"budget": 3.0}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such option") as error:
        torch.compile(lambda x: x + 2, backend=backend, options=wrong)(torch.ones(2))
    assert isinstance(error.value.inner_exception, OptionError)


def test_the_name_is_registered() -> None:
    register()
    register()
    assert "weft" in torch._dynamo.list_backends()
    assert torch._dynamo.backends.registry.lookup_backend("weft") in (weft_backend,)


def test_eager_may_stand_in_for_an_executable() -> None:
    """What the compiler gives back where the framework beats every plan."""
    model = Block().train()
    twin, x, count = copy.deepcopy(model), torch.randn(2, 3, 8, 8), torch.zeros(1)
    seen = Seen(lambda imported, options, eager: eager)

    def step(m: nn.Module, x: torch.Tensor, count: Any) -> Any:
        count.add_(1)
        return m(x) * count

    found = torch.compile(step, backend=seen.backend)(model, x, count)
    wanted = step(twin, x, torch.zeros(1))
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert count.item() == 1
    assert seen.fallbacks() == []


def test_the_region_of_an_identity() -> None:
    seen, x = Seen(), torch.ones(2)
    assert seen.compile(lambda x: x)(x) is x


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_updated_in_training_only(training: bool) -> None:
    def normed(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        return torch.ops.aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, 0.5, 1e-3)[0]

    seen = Seen()
    x, weight, bias = torch.randn(4, 3, 5), torch.rand(3) + 0.5, torch.randn(3)
    mine, theirs = ([torch.full((3,), 2.0), torch.full((3,), 6.0)] for _ in range(2))
    with torch.no_grad():
        got = seen.compile(normed)(x, weight, bias, *mine)
        want = normed(x, weight, bias, *theirs)
    assert not seen.fallbacks()
    torch.testing.assert_close([got, *mine], [want, *theirs])
    assert (mine[0] == 2).all() == (not training)


def _looked_up(x: torch.Tensor, i: Any, j: Any) -> Any:
    return x[i, j] + F.embedding(i + 2, x).sum(-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_plans_are_judged_on_the_integers_of_the_caller(tmp_path: Path, dynamic: bool) -> None:
    """Drawn ones would be indices outside of what they index once arithmetic is done on them."""
    given = []

    def engine(imported: Any, options: Any, eager: Any) -> Any:
        given.append(imported.integers)
        return compiling_engine(imported, options, eager)

    seen = Seen(engine, budget_s=0.0, cache_dir=tmp_path)
    x, i, j = torch.randn(5, 4), torch.tensor([2, 0, 1]), torch.tensor([3, 3, 0])
    with torch.no_grad():
        found = seen.compile(_looked_up, dynamic=dynamic)(x, i, j)
    torch.testing.assert_close(found, _looked_up(x, i, j))
    assert seen.fallbacks() == []
    assert sorted(v.tolist() for v in given[0].values()) == [[2, 0, 1], [3, 3, 0]]


def test_eager_that_refuses_drawn_indices_takes_no_part(tmp_path: Path) -> None:
    def engine(imported: Any, options: Any, eager: Any) -> Any:
        return compiling_engine(replace(imported, integers={}), options, eager)

    seen = Seen(engine, budget_s=0.0, cache_dir=tmp_path)
    x, i, j = torch.randn(5, 4), torch.tensor([2, 0, 1]), torch.tensor([3, 3, 0])
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(_looked_up)(x, i, j), _looked_up(x, i, j))
    assert seen.fallbacks() == []


def test_a_graph_that_the_framework_itself_cannot_run_is_compiled(tmp_path: Path) -> None:
    """aot_autograd takes the result of a norm for dense, and views it; the norm keeps the strides of its input."""
    norm, line = nn.BatchNorm1d(6).eval(), nn.Linear(6, 5)

    def normed(x: torch.Tensor, count: Any) -> Any:
        return line(norm(x.transpose(1, 2)).transpose(1, 2)), count.sort().values  # without a meaning in float64

    seen, x = Seen(compiling_engine, budget_s=0.0, cache_dir=tmp_path), torch.randn(3, 7, 6)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(normed)(x, torch.arange(4)), normed(x, torch.arange(4)))
    assert seen.fallbacks() == []


def test_resizes_are_traced_whole_as_long_as_anybody_traces() -> None:
    vec = torch.ops.aten.upsample_nearest2d.vec
    before = dict(vec.py_kernels)
    key = torch._C.DispatchKey.Autograd
    with whole_resizes():
        with whole_resizes():
            assert key not in vec.py_kernels
        assert key not in vec.py_kernels
    assert vec.py_kernels == before
    with contextlib.suppress(KeyError), whole_resizes():
        raise KeyError
    assert vec.py_kernels == before
