"""Plans for a GPU in the server, with what stands in for the GPU: where inputs go, and what a lost one ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.serve.conftest import Saved
from tests.serve.fakes import Launcher, query
from tests.serve.test_process import right, served, special, works

import weft
from weft.errors import DeviceError, InputError
from weft.runtime.loaded import Loaded
from weft.serve import plans, worker
from weft.serve.backend import Job
from weft.serve.errors import InferenceFailedError, LostDeviceError
from weft.serve.layout import places
from weft.serve.local import LocalBackend
from weft.serve.plans import Plans
from weft.serve.query import Query


class OnGpu:
    """A plan that is on a device of another kind; it computes where it can."""

    def __init__(self, plan: Any, device: str, fail: Exception | None = None) -> None:
        self.graph, self.device, self._plan, self.fail = plan.graph, torch.device(device), plan, fail
        self.given: list[str] = []

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.given += [x.device.type for x in inputs]
        if self.fail is not None:
            raise self.fail
        return tuple(self._plan(*(torch.ones(x.shape, dtype=x.dtype) for x in inputs)))


def on(saved: Saved, name: str, device: str, fail: Exception | None = None) -> tuple[Loaded, OnGpu]:
    made = OnGpu(weft.load(getattr(saved, name), options=weft.Options(cache_dir=saved.cache)).executable, device, fail)
    return Loaded(made), made  # type: ignore[arg-type]


def test_each_plan_gets_its_inputs_on_its_own_device(saved: Saved) -> None:
    (eight, gpu), (one, cpu) = on(saved, "eight", "meta"), on(saved, "one", "cpu")
    model = Plans([eight, one])
    assert model.signature.sizes == (1, 8)
    for k, rows in enumerate((1, 8)):
        inputs, outputs = places(model.signature, rows)
        inputs[0][...] = 1
        model.bind(k, inputs, outputs)()
        (want,) = saved.answer("mlp", np.ones((rows, 16), np.float32))
        assert np.allclose(outputs[0], want, atol=1e-6)
    assert gpu.given == ["meta"] and cpu.given == ["cpu"]


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access was encountered\nmore"),
    DeviceError(problem="cuGraphLaunch gives 700"),
])  # fmt: skip
def test_a_failure_behind_which_the_gpu_answers_no_more(saved: Saved, error: Exception) -> None:
    loaded, _ = on(saved, "one", "meta", error)
    asked: list[str] = []

    def lost(device: torch.device) -> bool:
        asked.append(device.type)
        return False

    inputs, outputs = places(Plans([loaded]).signature, 1)
    with pytest.raises(LostDeviceError, match="meta answers no more"):
        Plans([loaded], answers=lost).bind(0, inputs, outputs)()
    assert asked == ["meta"], "it is asked behind a failure alone"


@pytest.mark.parametrize(("error", "kind"), [
    (RuntimeError("no room"), InferenceFailedError), (InputError(position=0, problem="an index"), InputError),
    (DeviceError(problem="one launch"), DeviceError),
])  # fmt: skip
def test_a_failure_behind_which_it_answers_is_one_of_that_query(saved: Saved, error: Exception, kind: type) -> None:
    loaded, _ = on(saved, "one", "meta", error)
    model = Plans([loaded], answers=lambda _: True)
    inputs, outputs = places(model.signature, 1)
    with pytest.raises(kind) as found:
        model.bind(0, inputs, outputs)()
    assert not isinstance(found.value, LostDeviceError)


def test_who_is_asked_whether_a_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error")

    assert plans.answers(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not plans.answers(torch.device("cuda", 0)) and plans.answers(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert plans.answers(torch.device("cuda", 0))


def test_a_worker_whose_gpu_is_lost_is_replaced_and_no_other_query_is(tmp_path: Path) -> None:
    launcher = Launcher()
    with served(launcher, tmp_path) as model:
        assert works(model)
        lost = model.submit(special(-5))
        given = [query(1, i) for i in range(20)]
        futures = [model.submit(q) for q in given]
        assert all(right(q, f) for q, f in zip(given, futures, strict=True)), "they waited for another worker"
        with pytest.raises(InferenceFailedError):  # it ends every worker that it is given to
            lost.result(20)
        assert len(launcher.started) > 1 and works(model)


def test_the_worker_s_process_ends_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(*_: object) -> None:
        raise LostDeviceError(problem="cuda:0 answers no more")

    here, there = socket.socketpair()
    monkeypatch.setattr(worker, "serve", lost)
    monkeypatch.setattr(sys, "argv", ["worker", str(there.detach())])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    watched = threading.Event()

    def end_with(parent: int) -> None:
        assert parent == os.getppid()
        watched.set()

    monkeypatch.setattr(worker, "_end_with", end_with)  # the real one would watch this process's parent for good
    with here, pytest.raises(SystemExit, match="cuda:0 answers no more"):
        worker.main()
    assert watched.wait(10)


def test_plans_of_this_process_are_gone_with_its_gpu(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, gpu = on(saved, "one", "meta")
    monkeypatch.setattr(plans, "answers", lambda _: False)
    backend = LocalBackend([loaded])
    told: list[str] = []

    class Keeper:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: told.append(name)

    backend.start(Keeper())
    gpu.fail = RuntimeError("CUDA error")
    array = np.ones((1, 16), np.float32)
    backend._plans._answers = lambda _: False
    backend.run(Job([Query((array,), 1, arrived=0.0, deadline=1.0)], backend.signature))
    assert backend.gone and "answers no more" in backend.problem and told == ["changed", "failed", "changed"]


def test_a_plan_for_a_gpu_where_there_is_none_is_refused_by_its_file_s_name(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with zipfile.ZipFile(saved.eight) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"]) | {"device": "cuda", "target": "sm_90a"}
    members["manifest.json"] = json.dumps(manifest, sort_keys=True).encode()
    with zipfile.ZipFile(tmp_path / "gpu.weft", "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    fd = os.open(tmp_path / "gpu.weft", os.O_RDONLY)
    trust = [hashlib.sha256(members["manifest.json"]).hexdigest()]
    settings = {
        "threads": 0, "cache": str(saved.cache), "names": ["gpu.weft"], "trust": trust, "bundle": False, "alone": False,
    }  # fmt: skip
    try:
        with pytest.raises(DeviceError, match=r"^gpu.weft: the plan was made for an NVIDIA GPU"):
            worker.load_plans(settings, [fd])
    finally:
        os.close(fd)
