"""Kernels of modules before they are used: a worker runs, verifies and times them; what fails there never runs here."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn import emulation
from tests.nn.emulation import FACTS, Worker, launched
from tests.slow import few
from tests.tune.cuda_fake import tuner_waits
from tests.typed import narrow
from torch import nn

from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.training import Activation, Network, gradient, gradient_problem, shapes, step
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Inside, Number, Pointer
from weft.nn import FusedMLP, kernels
from weft.nn.judge import Judge
from weft.options import Options
from weft.tune.transport import Fault, WorkerFault

ROWS = 19
NET = Network((4, 16, 2), (Activation("relu"), Activation()), (True, True), DType.F16, DType.F16)


@pytest.fixture(autouse=True)
def float16() -> None:
    torch.manual_seed(1)


def module() -> FusedMLP:
    return FusedMLP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).half())


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(net(x).float().square().sum(), [x, *net.parameters()]))


def check(net: FusedMLP) -> None:
    """A step is that of torch, whoever computes it."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2)).half()
    plain = nn.Sequential(*copy.deepcopy(net))
    for a, b in zip(gradients(net, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


FAILURES = {"nothing": "unwritten", "crash": "crash", "hang": "hang", "dies": "poisoned"}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("part", few(["_chain", "_finish"], 1))
def test_gradients_that_fail_in_the_worker_are_those_of_torch(
    part: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(**{part: how})
    emulation.install(monkeypatch, emulation.judge(worker))
    net = module()
    with pytest.warns(UserWarning, match=f"no kernel for gradients of {ROWS} rows was found right: ") as heard:
        check(net)
    assert not any(e.endswith(part) for e in launched)
    assert worker._alive == (how == "nothing") and worker.started == (2 if how == "dies" else 1)
    assert len(heard) == 1
    reason = net.why_no_fused_backward(torch.zeros(ROWS, 4).half())
    # sums of what nobody wrote are wrong, or no numbers
    assert reason is not None and (FAILURES[how] in reason or (part, how) == ("_chain", "nothing"))
    with torch.no_grad():
        assert net.why_not(torch.zeros(ROWS, 4).half()) is None
    check(net)  # nobody is asked again, and nobody is warned


@pytest.mark.parametrize("how", FAILURES)
def test_a_forward_pass_that_fails_in_the_worker_is_that_of_torch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = []
    emit = mlp.emit

    def emitted(*a: Any) -> CudaSource | Declined:
        made = emit(*a)
        entry.append(narrow(CudaSource, made).entry)
        return made

    monkeypatch.setattr(mlp, "emit", emitted)
    net, x = module(), torch.randn(ROWS, 4).half()
    emulation.install(monkeypatch, emulation.judge(Worker()))
    with torch.no_grad():
        wanted = net(x)
    assert entry[0] in launched
    emulation.install(monkeypatch, emulation.judge(Worker(**{entry[0]: how})))
    net = copy.deepcopy(net)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=f"no kernel for a forward pass of {ROWS} rows was found right: "),
    ):
        found = net(x)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert not launched
    assert FAILURES[how] in str(net.why_not(x))


@pytest.mark.slow
def test_the_next_shape_is_taken_where_one_kills_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    every = shapes
    emulation.install(monkeypatch)
    monkeypatch.setattr(kernels, "shapes", lambda *a, **k: every(*a, **k)[:2])
    first, second = every(NET, FACTS)[:2]
    bad, good = (gradient(NET, FACTS, s, dtype=DType.F16).chain.name for s in (first, second))  # type: ignore[union-attr]
    worker = Worker(**{bad: "dies"})
    emulation.install(monkeypatch, emulation.judge(worker))
    monkeypatch.setattr(kernels, "shapes", lambda *a, **k: every(*a, **k)[:2])
    check(module())
    assert good in launched and bad not in launched
    assert worker.started == 2 and worker.asked.count(bad) == 2  # it was given a second chance, alone


def test_a_second_process_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workers = Worker(), Worker()
    for worker in workers:
        judge = Judge(FACTS, None, Options(device="cuda", cache_dir=tmp_path), transport=worker)
        emulation.install(monkeypatch, judge)
        check(module())
        assert any(e.endswith("_chain") for e in launched)
        judge.close()
    assert [w.started for w in workers] == [1, 0]
    assert not workers[1].asked


@pytest.mark.slow
def test_one_worker_serves_all_modules_rests_in_between_and_ends_when_it_is_idle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = Worker()
    judge = Judge(FACTS, None, Options(device="cuda", cache_dir=tmp_path), transport=worker, idle_s=0.01)
    emulation.install(monkeypatch, judge)
    judge._idle_s = 60.0
    for width in (16, 24):
        check(FusedMLP(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)).half()))
    assert worker.started == judge.workers_started == 1
    said = [m["op"] for m in worker.messages]
    assert said[-1] == "rest" and said.count("rest") == 4 and worker._alive
    ended = threading.Event()

    def kill() -> None:
        Worker.kill(worker)
        ended.set()

    monkeypatch.setattr(worker, "kill", kill)
    judge._idle_s = 0.01
    with torch.no_grad():
        FusedMLP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).half())(torch.ones(ROWS, 4).half())
    assert ended.wait(60)
    judge._idle_s = 60.0
    check(FusedMLP(nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 2)).half()))
    assert worker.started == 2
    judge.close()


def test_where_no_worker_starts_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(Worker):
        def start(self) -> None:
            raise WorkerFault(Fault.CRASH, "cannot start: no such file")

    tuner_waits(monkeypatch)
    emulation.install(monkeypatch, emulation.judge(Absent()))
    with pytest.warns(UserWarning, match="the measuring worker does not start") as heard:
        check(module())
    assert len(heard) == 2 and not launched  # of the forward and of the backward pass


@pytest.mark.slow
def test_memory_that_lacked_once_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full, free = Worker(_chain="memory"), Worker()
    for worker in (full, free):
        judge = Judge(FACTS, None, Options(device="cuda", cache_dir=tmp_path), transport=worker)
        emulation.install(monkeypatch, judge)
        if worker is full:
            with pytest.warns(UserWarning, match="found right: oom"):
                check(module())
        else:
            check(module())
        assert any(e.endswith("_chain") for e in launched) == (worker is free)
        judge.close()


@pytest.mark.slow
def test_other_rows_are_verified_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    emulation.install(monkeypatch, emulation.judge(worker))
    net = module()
    for rows in (7, 23, 7):
        x = torch.randn(rows, 4).half()
        gradients(net, x)
    chains = [m for m in worker.messages if m["op"] == "trial" and _problem(m).startswith("gradients")]
    assert sorted(_rows(m) for m in chains) == [7, 23]


def _problem(message: Any) -> str:
    return str(message["problem"]["key"])


def _rows(message: Any) -> int:
    launches = [x for _, kernel, _ in message["kernels"] for x in kernel["launches"]]
    return int(next(x["arguments"][-1]["number"] for x in launches if x["entry"].endswith("_chain")))


def test_launches_of_a_call_are_those_that_were_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, blocks, shared memory and numbers are the source's; addresses lie in the regions of the caller."""
    emulation.install(monkeypatch)
    for rows, limit in ((ROWS, 1 << 30), (70, 1)):
        plan = gradient(NET, FACTS, dtype=DType.F16)
        asked = {"inputs": True, "parameters": True, "dtype": DType.F16}
        made = step(plan, NET, rows, limit, name="", **asked)  # type: ignore[arg-type]
        backward = kernels.Backward(made, dict.fromkeys(("",)))  # type: ignore[arg-type]
        monkeypatch.setattr(backward, "direct", launch_of)
        call = backward.call(torch.zeros(8, dtype=torch.uint8))
        bases = dict(zip(("x", "dy", "dx", "grads", "scratch"), range(1 << 20, 6 << 20, 1 << 20), strict=True))
        call.run(bases["x"], bases["dy"], bases["dx"], bases["grads"], bases["scratch"], 0)
        assert len(call._launches) == len(made.source.launches)
        for direct, launch in zip(call._launches, made.source.launches, strict=True):
            for word, x in zip(direct.words, launch.arguments, strict=True):
                if isinstance(x, Number):
                    assert word == x.value
                elif isinstance(x, Inside):
                    assert word == bases[("x", "dy")[x.base.index]] + x.bytes
                elif isinstance(x, Pointer) and x.kind == "work":
                    region = "dx" if x.index >= made.dx else "grads" if x.index >= made.grads else "scratch"
                    start = {"dx": made.dx, "grads": made.grads, "scratch": 0}[region]
                    assert word == bases[region] + x.index - start
        assert limit > 1 or len(made.source.launches) > 3


class launch_of:
    """As `Direct`."""

    def __init__(self, launch: Any) -> None:
        self.words = [x.value if isinstance(x, Number) else 0 for x in launch.arguments]

    def launch(self, stream: int) -> None:
        pass


def test_a_wrong_row_of_many_is_found() -> None:
    """On whole numbers sums over rows are exact, so that sixteen rows of many thousands are not lost in rounding."""
    from weft.tune.verify import build_reference, compare

    problem = gradient_problem(NET, 4096, inputs=False, parameters=True, dtype=DType.F32)
    assert problem.finite and problem.alignment == 16
    case = build_reference(problem, seed=0).cases[0]
    assert all(x.equal for x in case.expected)
    x, dy, w, bias, *_ = (t.double() for t in case.inputs)
    w2 = case.inputs[4].double()
    h = (x @ w.t() + bias).relu()
    dz = (dy @ w2) * (h > 0)
    right = [dz.t() @ x, dz.sum(0), dy.t() @ h, dy.sum(0)]
    for want, got in zip(case.expected, right, strict=True):
        assert compare(got.float(), want, "").verdict.value == "ok"
    lost = [dz[:-16].t() @ x[:-16], dz[:-16].sum(0), dy[:-16].t() @ h[:-16], dy[:-16].sum(0)]
    for want, got in zip(case.expected, lost, strict=True):
        assert compare(got.float(), want, "").verdict.value == "wrong"
