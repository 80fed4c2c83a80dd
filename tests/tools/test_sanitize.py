"""The sanitizer's table without a GPU: kernels compile, reports find their kernels, silence is not trust."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tools.sanitize import PLANTED, PLANTED_TEXT, cases, findings, print_table, sources

from tools import sanitize
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.ir.types import DType, TensorType

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at k0123456789abcdef+0x110 in
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
some program's own line about Invalid planted
========= Error: Race reported between Write access at planted+0x70
=========     and Read access at planted+0xb0 [240 hazards]
=========
========= Warning: Race reported between Read access at k9999999999999999_1+0x70
========= Program hit cudaErrorIllegalAddress (error 700) due to "an illegal memory access" on CUDA API call
=========     Saved host backtrace up to driver entry point at error
========= Invalid __shared__ read of size 8 bytes
=========     at somewhere_else+0x10
========= ERROR SUMMARY: 4 errors
"""
ENTRIES = {"one": ["k0123456789abcdef"], "two": ["k9999999999999999", "k9999999999999999_1"], PLANTED: ["planted"]}


def test_reports_find_their_kernels() -> None:
    assert findings(LOG, ENTRIES) == {"one": 1, "two": 1, PLANTED: 1, "(no kernel)": 1}
    assert findings("", ENTRIES) == {}


@pytest.mark.parametrize(
    ("launched", "found", "why", "status"),
    [
        (ENTRIES, {PLANTED: 1}, "", 0),
        (ENTRIES, {PLANTED: 1, "two": 3}, "", 1),
        (ENTRIES, {}, "", 1),
        ({"one": ["k"]}, {}, "Device not supported", 2),
        (ENTRIES, {PLANTED: 1, "(no kernel)": 1}, "", 1),
        ({}, {}, "it says nothing", 2),
    ],
)
def test_silence_is_not_trust(
    launched: dict[str, list[str]], found: dict[str, int], why: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_table({"memcheck": (launched, Counter(found), why)}) == status
    shown = capsys.readouterr()
    assert why in shown.err and all(label in shown.out for label in [*launched, *found])


def test_a_tool_that_does_not_run_here_is_said(tmp_path: Path) -> None:
    refuses = tmp_path / "compute-sanitizer"
    refuses.write_text("#!/bin/sh\necho '========= Device not supported'\nexit 1\n")
    refuses.chmod(0o700)
    launched, found, why = sanitize.watch("memcheck", str(refuses), 30)
    assert launched == {} and not found and "Device not supported" in why
    refuses.write_text("#!/bin/sh\nsleep 20\n")
    assert "not done after 0.2 s" in sanitize.watch("memcheck", str(refuses), 0.2)[2]


def test_every_kernel_is_written_and_compiles(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    found = list(sources(GpuFacts()))
    assert {label.rstrip(" 0123456789") for label, _, _ in found} == {label.rstrip(" 0123456789") for label in cases()}
    entries = [source.entry for _, _, source in found]
    assert len(set(entries)) == len(entries) >= 24
    templates = {dict(source.schedule.params).get("template") for _, _, source in found}
    assert templates >= {None, "mma", "wgmma", "simt", "gemv", "halo", "depthwise", "tma", "attention", "attention_tma"}
    for text, flags in [(PLANTED_TEXT, ()), *((s.text, s.flags) for _, _, s in found[::6])]:
        assert Path(nvrtc.compile(text, arch="sm_90a", flags=flags, cache_dir=tmp_path).path).is_file()


def test_products_are_launched_in_every_way_that_their_blocks_work_together() -> None:
    found = {label: dict(source.schedule.params) for label, _, source in sources(GpuFacts(), ["gemm"])}
    assert all(label.startswith("gemm") for label in found)
    assert len(found) >= 18
    tma = [p for p in found.values() if p["template"] == "tma"]
    assert {int(p.get("pair", 0)) for p in tma} >= {0, 1, 3, 4}
    for name in ("even", "turns"):
        assert any(p.get(name) is True for p in tma)
    assert any(int(p["split"]) > 1 for p in tma) and any(int(p.get("apart", 0)) for p in tma)
    assert {(int(p["split"]) > 1, p["cluster"]) for p in found.values() if p["template"] == "mma"} >= {
        (True, True), (True, False), (False, False),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F8E4M3, DType.I8, DType.F16])
def test_values_fill_their_buffers(dtype: DType) -> None:
    t = TensorType(dtype, (7, 5))
    assert len(sanitize.values(t, np.random.default_rng(0))) == t.nbytes
