"""A stand-in for a GPU: a host on which generated kernels of `FusedMLP` run by emulation."""

from __future__ import annotations

import ctypes
import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.generate.cuda.gradients import Text
from tests.generate.cuda.tensor_emulator import Emulated, _record
from tests.tune.cuda_fake import LIBRARY_US, FakeCudaTransport, FakeGpu

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import CompileJob
from weft.generate import bind
from weft.generate.bind import CudaDriver
from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.training import Network, shapes
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Kernel, Launch, Pointer, TensorMap
from weft.nn import fused_mlp, kernels, layered, timing
from weft.nn.judge import Judge, Won
from weft.options import Options
from weft.tune.cuda_device import HungError
from weft.tune.cuda_subject import CudaSubject, GpuSubject
from weft.tune.messages import Message
from weft.tune.timing import TimingPolicy
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import ProblemTrial

ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(k[0-9a-f]{16}\w*)\s*\(([^)]*)\)')
libraries: dict[Path, Any] = {}
FACTS = replace(profile("h200"), sms=6)
"""Of a smaller one, whose blocks are emulated sooner."""


class Cubin:
    """A compiled text, which is run by emulation."""

    seconds = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resources = (("k", SimpleNamespace(spill_stores=0)),)

    def of(self, name: str) -> Any:
        return self.resources[0][1]


class Compiler:
    """Compiles for the host, all texts at once."""

    def compile_many(self, jobs: Sequence[CompileJob], cache_dir: object = None) -> list[Cubin]:
        paths = [Path(hashlib.sha256(j.text.encode()).hexdigest()) for j in jobs]
        new = {p: j.text for p, j in zip(paths, jobs, strict=True) if p not in libraries}
        if new:
            library = Emulated([_text(t) for t in new.values()]).library
            library.add_buffer(ctypes.c_void_p(1), ctypes.c_long(2**62))
            libraries.update(dict.fromkeys(new, library))
        return [Cubin(p) for p in paths]


def _text(text: str) -> Text:
    alone = (1, 1, 1)
    found = ENTRY.findall(text)
    return Text(text, tuple(Launch(e, alone, alone, (Pointer("in", 0),) * (1 + x.count(",")), 0) for e, x in found))


def start(library: Any, launch: Launch, values: Sequence[int]) -> None:
    """Run it, to its end."""
    numbers = (ctypes.c_uint * 9)(*launch.grid, *launch.block, *launch.cluster)
    call = getattr(library, f"run_{launch.entry}")
    call.restype = ctypes.c_char_p
    error = call((ctypes.c_void_p * len(values))(*values), numbers, ctypes.c_uint(launch.shared_bytes), 1)
    assert not error, error.decode()


class Loaded:
    """As `Module`."""

    def __init__(self, path: Path) -> None:
        self.library = libraries[path]

    def function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Sequence[int], **options: object) -> None:
            start(self.library, Launch(name, grid, block, (), 0), arguments)

        return SimpleNamespace(
            launch=launch, library=self.library, entry=name, prepare=lambda shared_bytes, cluster=(): None
        )


@dataclass
class Prepared:
    """A launch with its arguments."""

    library: Any
    what: Launch
    arguments: Sequence[int | bytes]

    def launch(self, stream: int) -> None:
        held = [ctypes.create_string_buffer(x, len(x)) if isinstance(x, bytes) else x for x in self.arguments]
        start(self.library, self.what, [x if isinstance(x, int) else ctypes.addressof(x) for x in held])


class Function:
    """An entry, as binding has it."""

    def __init__(self, library: Any, entry: str) -> None:
        self.library, self.entry = library, entry

    def prepare(self, shared_bytes: int, cluster: Any) -> None:
        pass

    def require_co_resident(self, blocks: int, block: Any, shared_bytes: int) -> None:
        pass

    def bind(
        self, grid: Any, block: Any, arguments: Sequence[int | bytes], *, shared_bytes: int, cluster: Any, **_: object
    ) -> Prepared:
        return Prepared(self.library, Launch(self.entry, grid, block, (), shared_bytes, cluster), arguments)


def driver(function: Callable[[Any, str], Any] = Function) -> CudaDriver:
    """Binding through it runs kernels by emulation."""

    def load(path: Path) -> Any:
        library = libraries[Path(path)]
        return SimpleNamespace(function=lambda entry: function(library, entry))

    def encode(
        address: int,
        dtype: str,
        sizes: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        swizzle_bytes: int,
    ) -> bytes:
        shape, strides, part, steps = map(tuple, (sizes, strides_bytes, box, element_strides))
        return bytes(_record(TensorMap(Pointer("in"), dtype, shape, strides, part, steps, swizzle_bytes), address))

    return CudaDriver(load, encode)


class Gpu(FakeGpu):
    """Emulation takes its time, so a sample is one launch."""

    def record(self, calls: Sequence[Callable[[], object]], *, evict: bool) -> Any:
        calls[0]()
        self.recorded += 1

        final = self.recorded % 2 == 0  # the one before tells how many launches a sample needs

        def sample() -> float:
            if final:
                calls[-1]()
            self.wait()
            return LIBRARY_US

        return SimpleNamespace(sample=sample)


class Death(BaseException):
    """Of the process."""


class Spoiled(Function):
    """An entry whose launches do something else."""

    def __init__(self, library: Any, entry: str, how: str, gpu: FakeGpu) -> None:
        super().__init__(library, entry)
        self.how, self.gpu = how, gpu

    def bind(self, *arguments: Any, **options: Any) -> Any:
        whole = super().bind(*arguments, **options)

        def launch(stream: int) -> None:
            match self.how:
                case "crash":
                    self.gpu.sound, self.gpu.pending = False, RuntimeError("CUDA error: an illegal memory access")
                case "hang":
                    self.gpu.pending = HungError("no end within 5 s")
                case "memory":
                    raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")
                case "dies":
                    raise Death
                case "half":
                    few = max(1, whole.what.grid[0] // 2), 1, 1
                    Prepared(whole.library, replace(whole.what, grid=few), whole.arguments).launch(stream)
                case "nothing":
                    pass

        return SimpleNamespace(launch=launch)


class Worker(FakeCudaTransport):
    """A measuring process that emulates kernels: all else is the worker's own code."""

    def __init__(self, **spoils: str) -> None:
        """`spoils`: end of an entry's name -> what its launches do."""
        super().__init__()
        self.spoils = spoils
        self.asked: list[str] = []
        """Entries of the kernels of all trials."""

    def start(self) -> None:
        super().start()
        self.gpu = Gpu()

    def send(self, message: Message, timeout_s: float) -> None:
        try:
            super().send(message, timeout_s)
        except Death:
            self._alive = False
            self._events.append(WorkerFault(Fault.CRASH, "SIGSEGV"))

    def make(self, problem: Problem, kernel: Kernel, path: str, gpu: Any) -> GpuSubject:
        assert isinstance(kernel, CudaSource)
        self.asked.append(kernel.entry)

        def function(library: Any, entry: str) -> Function:
            how = next((how for end, how in self.spoils.items() if entry.endswith(end)), "")
            return Spoiled(library, entry, how, gpu) if how else Function(library, entry)

        return CudaSubject(problem, kernel, path, gpu, driver=driver(function))


def judge(worker: FakeCudaTransport | None = None) -> Judge:
    """One with a database of its own."""
    options = Options(device="cuda", cache_dir=Path(tempfile.mkdtemp(prefix="weft-judge-")))
    once = TimingPolicy(screening_rounds=1, min_rounds=1, max_rounds=1, max_sets=1)
    return Judge(FACTS, None, options, transport=worker or Worker(), policy=once)


class Trusting:
    """Takes the first kernel of each trial: for tests of what modules do with kernels that were judged."""

    def judged(self, trials: Sequence[ProblemTrial]) -> list[Won | Declined]:
        assert all(trial.kernels for trial in trials)
        return [Won(0, LIBRARY_US) for _ in trials]


TRUSTING = cast("Judge", Trusting())


launched: list[str] = []
"""Entries that were run by `Direct`."""


class Direct:
    """As `weft.device.cuda.direct.Direct`."""

    def __init__(
        self, function: Any, grid: Any, block: Any, words: Sequence[int], *, shared_bytes: int = 0,
        cluster: Any = (1, 1, 1), dependent: bool = False,
    ) -> None:  # fmt: skip
        self.words = (ctypes.c_uint64 * len(words))(*words)
        self._library = function.library
        self._launch = Launch(function.entry, grid, block, (), shared_bytes, cluster)

    def launch(self, stream: int) -> None:
        launched.append(self._launch.entry)
        start(self._library, self._launch, list(self.words))


def made(net: Network, by: Judge | None = None) -> kernels.Kernels:
    """The kernels of a network."""
    return kernels.Kernels(net, FACTS, Compiler(), by or TRUSTING)  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch, by: Judge | None = None) -> None:
    """The host is the GPU: tensors in its memory go to kernels, which `by` judges."""
    cpu = torch.device("cpu")
    for name, value in (
        ("current_device", lambda: cpu), ("is_current_stream_capturing", lambda: False),
        ("current_stream", lambda: SimpleNamespace(cuda_stream=0)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: cpu)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for module in (timing, layered, fused_mlp, kernels):
        monkeypatch.setattr(module, "stream", lambda: 0, raising=False)
        monkeypatch.setattr(module, "make_current", lambda device: None, raising=False)
        monkeypatch.setattr(module, "contest", lambda ways: [(way(), 1.0)[1] for way in ways], raising=False)
        monkeypatch.setattr(module, "CompiledCubin", Cubin, raising=False)
        monkeypatch.setattr(module, "Module", Loaded, raising=False)
        monkeypatch.setattr(module, "Direct", Direct, raising=False)
        monkeypatch.setattr(module, "on_gpu", lambda x: True, raising=False)
    monkeypatch.setattr(bind, "real_driver", driver)
    every = shapes
    monkeypatch.setattr(kernels, "shapes", lambda *a, **k: every(*a, **k)[:1])
    monkeypatch.setattr(mlp, "schedules", _one(mlp.schedules))
    known: dict[Network, kernels.Kernels] = {}

    def of(net: Network, device: object) -> kernels.Kernels:
        if net not in known:
            known[net] = made(net, by)
        return known[net]

    monkeypatch.setattr(fused_mlp, "kernels_of", of)
    launched.clear()


def _one(schedules: Any) -> Any:
    """The first of them."""

    def first(*arguments: Any) -> Any:
        found = schedules(*arguments)
        return found[:1] if isinstance(found, list | tuple) else found

    return first
