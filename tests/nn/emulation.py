"""A stand-in for a GPU: a host on which generated kernels of `FusedMLP` run by emulation."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.generate.cuda.gradients import Text
from tests.generate.cuda.tensor_emulator import Emulated

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import CompileJob
from weft.generate.cuda.training import Network
from weft.kernels.source import Launch, Pointer
from weft.nn import fused_mlp, kernels, layered, timing

ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(k[0-9a-f]{16}\w*)\s*\(([^)]*)\)')
libraries: dict[Path, Any] = {}


class Cubin:
    """A compiled text, which is run by emulation."""

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
            library = Emulated([_text(t) for t in new.values()]).library  # type: ignore[misc]
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


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is the GPU: tensors in its memory go to kernels."""
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
        monkeypatch.setattr(module, "least", lambda call: (call(), 1.0)[1], raising=False)
        monkeypatch.setattr(module, "CompiledCubin", Cubin, raising=False)
        monkeypatch.setattr(module, "Module", Loaded, raising=False)
        monkeypatch.setattr(module, "Direct", Direct, raising=False)
        monkeypatch.setattr(module, "on_gpu", lambda x: True, raising=False)
    every = kernels.shapes
    monkeypatch.setattr(kernels, "shapes", lambda *a, **k: every(*a, **k)[:1])
    monkeypatch.setattr(kernels.mlp, "schedules", _one(kernels.mlp.schedules))
    known: dict[Network, kernels.Kernels] = {}

    def of(net: Network, device: object) -> kernels.Kernels:
        if net not in known:
            known[net] = kernels.Kernels(net, profile("h200"), Compiler())  # type: ignore[arg-type]
        return known[net]

    monkeypatch.setattr(fused_mlp, "kernels_of", of)
    launched.clear()


def _one(schedules: Any) -> Any:
    """The first of them."""

    def first(*arguments: Any) -> Any:
        found = schedules(*arguments)
        return found[:1] if isinstance(found, list | tuple) else found

    return first
