"""What a call costs beside its kernels, and that all that is checked is checked where it costs little."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from benchmarks.call_overhead import network

import weft
from weft.api import Compiled
from weft.errors import InputError
from weft.frontends.torch import import_exported
from weft.pipeline import untuned
from weft.runtime.executable import Executable

X = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> weft.Options:
    return weft.Options(budget_s=0, threads=1, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def plan(options: weft.Options) -> Executable:
    """Generated kernels alone."""
    imported = import_exported(torch.export.export(network(), (X,)))
    found = untuned.build(imported, options, ["fused"]).executables["fused"]
    assert isinstance(found, Executable)
    return found


def calls_of(run: Callable[[], object]) -> int:
    """Functions, of Python and of C, that it calls once it is warm: a measure that no load changes."""
    count = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_a_call_of_native_kernels_is_few_calls(plan: Executable, options: weft.Options) -> None:
    """It was 51 of the plan and 90 of the compiled model: some 20 microseconds, of kernels that take one."""
    compiled = weft.compile(network(), (X,), options=options)
    native = Compiled(
        compiled._first._replace(compilation=replace(compiled._first.compilation, plan=plan, eager=None)),
        compiled._source,
        options=options,
    )
    assert native.run is plan
    assert calls_of(lambda: plan(X)) <= 20
    assert calls_of(lambda: native(X)) <= 40
    torch.testing.assert_close(native(X), network()(X).detach(), rtol=1e-5, atol=1e-6)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """At an address that is not aligned."""
    room = torch.empty(x.numel() + 1)
    room[1:].copy_(x.reshape(-1))
    return room[1:].reshape(x.shape)


@pytest.mark.parametrize(
    "given",
    [
        X, shifted(X), torch.stack([X, X], -1)[..., 0], torch.nn.Parameter(X.clone()),
        torch.view_as_complex(torch.stack([X * 0, -X], -1)).conj().imag,
    ],
    ids=["plain", "unaligned", "strided", "wants a gradient", "negative bit"],
)  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_whatever_lies_how_it_may(plan: Executable, given: torch.Tensor, grad: bool) -> None:
    with torch.no_grad():
        want = network()(X)
    with torch.set_grad_enabled(grad):
        (y,) = plan(given)
        (again,) = plan(given)
    assert not y.requires_grad
    assert y.data_ptr() != again.data_ptr(), "results are the caller's own"
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(y, again)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((X[:, :8],), "expected 1x16xf32"), ((X.double(),), "torch.float64"), ((X, X), "takes 1 tensors, 2 were given"),
        ((), "takes 1 tensors, 0 were given"), ((X.to("meta"),), "expected a CPU tensor"), ((X.numpy(),), "no tensor"),
    ],
    ids=["shape", "type", "too many", "none", "device", "array"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_as_before(plan: Executable, given: tuple[torch.Tensor, ...], told: str) -> None:
    plan(X)
    with pytest.raises(InputError, match=told):
        plan(*given)


def test_poison_is_seen(plan: Executable) -> None:
    """The next call, and that one alone, finds memory as it was poisoned."""
    plan(X)
    plan.poison(0xFF)
    (y,) = plan(X)
    assert plan._poison is None
    assert torch.equal(y, plan(X)[0])


def test_results_do_not_follow_the_default_device(plan: Executable) -> None:
    with torch.device("meta"):
        assert plan(X)[0].device.type == "cpu"


def test_the_script_that_measures_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    from benchmarks import call_overhead

    monkeypatch.setattr(call_overhead, "ROUNDS", 1)
    monkeypatch.setattr(call_overhead, "CALLS", 2)
    threads = torch.get_num_threads()
    try:
        call_overhead.main([])
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr().out
    assert all(name in told for name in ("compiled (", "fused:", "library:", "onnxruntime:", "eager:"))
