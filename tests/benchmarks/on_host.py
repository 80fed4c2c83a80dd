"""Runs jobs of best-effort kernels on the host: their sources behind `host_cuda.h`, between guard zones."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from benchmarks.best_effort.jobs import Array, Job, Stage, drawn, word
from tests import compiled

_WAITS = ("__syncthreads", "_sync(", "__syncwarp")
_ENTRY = re.compile(r"__launch_bounds__\([^)]*\)\s*(\w+)\(")
_CONSTANT = re.compile(r"^__constant__ .*?(\w+)\[", re.MULTILINE)
GUARD = 256
"""Bytes in front of and behind every buffer."""


@cache
def built(text: str) -> ctypes.CDLL:
    """A shared object with `run_ENTRY` for every kernel, and `symbol_NAME` for every `__constant__` array."""
    types = "void* const* a, const unsigned* g, const unsigned* b, const unsigned* o, unsigned n, int e, int r"
    glue = [
        f'extern "C" int run_{entry}({types}) {{ return launched({entry}, a, g, b, o, n, e, r); }}'
        for entry in _ENTRY.findall(text)
    ]
    glue += [f'extern "C" void* symbol_{name}() {{ return (void*){name}; }}' for name in _CONSTANT.findall(text)]
    header = Path(__file__).with_name("host_cuda.h").read_text()
    return compiled.library("\n".join([header, text, *glue]), "-std=c++17", "-O1", "-ffp-contract=off")


class Memory:
    """Buffers by name, with guard zones around each."""

    def __init__(self, contents: Mapping[str, Array]) -> None:
        self._zones: dict[str, Array] = {}
        self._like = dict(contents)
        for name, x in contents.items():
            raw = np.full(x.nbytes + 2 * GUARD + 16, 0x5B, np.uint8)
            raw = raw[-raw.ctypes.data % 16 :][: x.nbytes + 2 * GUARD]  # as aligned as vector loads want it
            raw[GUARD : GUARD + x.nbytes] = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
            self._zones[name] = raw

    def address(self, name: str) -> int:
        return int(self._zones[name].ctypes.data) + GUARD

    def read(self, name: str) -> Array:
        """What it holds now; fails where a guard zone was written."""
        zone, like = self._zones[name], self._like[name]
        inner = zone[GUARD : GUARD + like.nbytes]
        assert (zone[:GUARD] == 0x5B).all() and (zone[-GUARD:] == 0x5B).all(), f"{name}: written beside it"
        return inner.view(like.dtype).reshape(like.shape).copy()


def launch(stage: Stage, memory: Memory, order: Sequence[int], *, backwards: bool = False, text: str = "") -> None:
    """One launch: these blocks in that order. `text`: in place of the stage's."""
    text = text or stage.text
    library = built(text)
    for c in stage.manifest.constants:
        symbol = getattr(library, f"symbol_{c.name}")
        symbol.restype = ctypes.c_void_p
        data = drawn(c).tobytes()
        ctypes.memmove(symbol(), data, len(data))
    words = [word(p) if p.kind == "scalar" else memory.address(p.buffer) for p in stage.manifest.parameters]
    values = (ctypes.c_uint64 * max(1, len(words)))(*words)
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
    dims = [(ctypes.c_uint * 3)(*d) for d in (stage.manifest.grid, stage.manifest.block)]
    waits = any(word in text for word in _WAITS)
    run_entry = getattr(library, f"run_{stage.manifest.entry}")
    failed = run_entry(places, *dims, (ctypes.c_uint * len(order))(*order), len(order), int(waits), int(backwards))
    assert not failed, f"{stage.manifest.path}: threads wait for each other in vain"


def run(
    job: Job,
    *,
    seed: int = 0,
    backwards: bool = False,
    before: Mapping[str, Array] | None = None,
    changed: Callable[[str], str] = lambda text: text,
) -> dict[str, Array]:
    """All buffers after the job's stages, blocks in an order of chance (seed 0: in theirs); `changed`: of the texts."""
    before = job.buffers() if before is None else before
    memory = Memory(before)
    for stage in job.stages:
        order = np.arange(int(np.prod(stage.manifest.grid)))
        if seed:
            np.random.default_rng(seed).shuffle(order)
        launch(stage, memory, order.tolist(), backwards=backwards, text=changed(stage.text))
    after = {name: memory.read(name) for name in before}
    kept = set(before) - job.written
    assert all((after[n].view(np.uint8) == before[n].view(np.uint8)).all() for n in kept), "an input was written"
    return after
