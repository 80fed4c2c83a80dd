"""Kernels of others as latency-critical and best-effort roles of one CTA, on the host: every bit is the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.generate.cuda.foreign import on_host
from tests.generate.cuda.foreign.test_same import KERNELS, case
from tests.generate.cuda.fused_emulator import Counter, FusedKernels, Memory
from tests.generate.cuda.tensor_emulator import Buffer
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.persistent import persistent
from weft.kernels.colocation import FusedSource, WorkCounter

FACTS = profile("a100")
PAIRS = (("leaves", "counts"), ("predicates", "shared memory of the file"), ("macros", "leaves"))


def memory(m: Manifest) -> Memory:
    found = Memory()
    for i, p in enumerate(m.parameters):
        if p.data is not None:
            buffer = Buffer(p.data.nbytes)
            buffer.data[:] = on_host.drawn(p.data, i)
            found["in" if p.kind == "input" else "out"].append(buffer)
    return found


def text(source: str) -> str:
    return "struct uint3 { unsigned x, y, z; };\n" + source


@pytest.mark.parametrize(("lc", "be"), few(PAIRS, 1, unpack=True), ids=lambda x: x)
def test_both_give_their_own_results(lc: str, be: str, tmp_path: Path) -> None:
    (tmp_path / "lc").mkdir()
    (tmp_path / "be").mkdir()
    latency, first = case(tmp_path / "lc", lc)
    effort, second = case(tmp_path / "be", be)
    every = shapes(first.source, [second.source], FACTS)
    assert {s.replicas for s in every} >= {1, 2}
    fused = []
    for i, shape in enumerate(every[:2]):
        one = fuse(first.source, [second.source], shape, entry=f"fused{i}", facts=FACTS)
        assert isinstance(one, FusedSource), one.reason
        fused.append(one)
    rest = persistent([second.source], ctas=2, entry="rest", facts=FACTS)
    assert isinstance(rest, FusedSource), rest.reason
    kernels = FusedKernels([*fused, rest], change=text)
    wanted = (on_host.original(latency, KERNELS[lc][0]), on_host.original(effort, KERNELS[be][0]))
    for i, source in enumerate(fused):
        for limit in (0, 3, 4):  # what is left is for the kernel of the job alone
            there = {0: memory(latency), 1: memory(effort)}
            counter = Counter(WorkCounter.start(source.stages, limit))
            assert kernels.run(source, there, counter, gang=2, seed=10 * i + limit) == ""
            assert counter.now.finished <= limit
            counter.set("limit", sum(source.stages))
            assert kernels.run(rest, there, counter, gang=2, seed=limit) == ""
            assert counter.now.finished == sum(source.stages)
            for role in (0, 1):
                for buffer, want in zip(there[role]["out"], wanted[role], strict=True):
                    assert buffer.intact()
                    assert np.array_equal(buffer.data, want)
