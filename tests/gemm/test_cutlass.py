"""CUTLASS as a peer: which of its kernels, their texts, how they are built and run, what is said without it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.gemm.test_again import SOURCE, Worker

from weft.device.cuda.facts import GpuFacts, profile
from weft.errors import DeviceError
from weft.gemm import again, cutlass
from weft.gemm.cutlass import Cutlass, CutlassConfig
from weft.gemm.epilogue import NAMED, epilogue
from weft.gemm.library import torch_value
from weft.gemm.spec import LAYOUTS, Gemm, typed
from weft.generate.library.execute import BoundCall
from weft.ir.declined import Declined
from weft.ir.types import DType

NVCC = r"""#!{python}
import re, subprocess, sys
if "--version" in sys.argv:
    print("nvcc of the tests")
    raise SystemExit
text = open(sys.argv[-1]).read()
if {refuse!r} and {refuse!r} in text:
    print("kernel.cu(7): error: a static assertion failed", file=sys.stderr)
    raise SystemExit(2)
out = sys.argv[sys.argv.index("-o") + 1]
turned = [x == "Column" for x in re.findall(r"Number, cutlass::layout::(Row|Column)Major", text)]
stub = f'''
extern "C" long long weft_bytes(int, int, int) {{ return 64; }}
extern "C" int weft_run(int m, int n, int k, const float* a, const float* b, const float* c, const float* v, float* d,
                        char* work, void*) {{
  if (k == 64) return 1001;
  work[63] = 1;
  for (int i = 0; i < m; ++i) for (int j = 0; j < n; ++j) {{
    float x = c ? c[i * n + j] : 0;
    x += v ? v[j] : 0;
    for (int l = 0; l < k; ++l)
      x += a[{"l * m + i" if turned[0] else "i * k + l"}] * b[{"j * k + l" if turned[1] else "l * n + j"}];
    d[i * n + j] = {"x > 0 ? x : 0" if "thread::ReLu" in text else "x"};
  }}
  return 0;
}}'''
subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", out], input=stub.encode(), check=True)
"""
"""Of a kernel of f32 it makes one for the host that does the same."""


def fake(folder: Path, refuse: str = "") -> Cutlass:
    """Headers and a compiler of the tests."""
    (folder / "include" / "cutlass").mkdir(parents=True, exist_ok=True)
    version = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    (folder / "include" / "cutlass" / "version.h").write_text(version)
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.replace("{python}", sys.executable).replace("{refuse!r}", repr(refuse)))
    nvcc.chmod(0o700)
    found = cutlass.find_cutlass({"PATH": str(folder), "CUTLASS_PATH": str(folder)})
    assert isinstance(found, Cutlass), found
    return found


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is a number."""
    cutlass._loaded.cache_clear()
    cutlass._nvcc_version.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake(tmp_path)
    assert (found.version, found.root) == ("4.2.0", tmp_path)

    def why(**environ: str) -> str:
        declined = cutlass.find_cutlass(environ)
        assert isinstance(declined, Declined)
        return declined.reason

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install nvidia-cutlass" in why(PATH=str(tmp_path))
    assert "no include/cutlass/version.h" in why(PATH=str(tmp_path), CUTLASS_PATH=str(tmp_path / "none"))
    (tmp_path / "include" / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 2\n#define CUTLASS_MINOR 9\n")
    assert "before 3.0" in why(PATH=str(tmp_path), CUTLASS_PATH=str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert "nvcc is not installed" in why(PATH="")


def test_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "source")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    found = cutlass.find_cutlass({"PATH": str(tmp_path / "source")})
    assert isinstance(found, Cutlass) and found.root == tmp_path / "source"


@given(st.integers(1, 6000), st.integers(1, 6000), st.integers(1, 4000), st.integers(1, 12))
def test_a_short_list_of_kernels_that_fit(m: int, n: int, k: int, most: int) -> None:
    found = cutlass.configurations(Gemm(m, n, k), most)
    assert 1 <= len(found) <= most and len(set(found)) == len(found)
    for c in found:
        assert c.cluster_m <= math.ceil(m / c.bm) and c.cluster_n <= math.ceil(n / c.bn)
        assert not (c.stream_k and c.pingpong), "stream-K is of cooperative kernels"
        assert c.pingpong or c.bm >= 128, "two warpgroups have 64 rows each"
    assert len(set(cutlass.names_of([c.schedule() for c in found]).values())) == len(found)


def test_the_tile_that_leaves_least_idle_comes_first() -> None:
    first = cutlass.configurations(Gemm(8192, 8192, 4096))[0]
    assert first.bm * first.bn >= 128 * 192
    small = cutlass.configurations(Gemm(512, 256, 640))[0]
    assert (small.bm, small.bn) == (64, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", ["f16", "bf16", "f32"])
def test_a_text_has_the_layouts_and_types_of_its_product(layout: str, types: str) -> None:
    g = typed(Gemm(256, 256, 256, layout=layout, epilogue=epilogue("bias_gelu")), types)
    text = cutlass.text_of(g, CutlassConfig(128, 256, False, 2, 1, stream_k=False))
    name = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "f32": "float"}[types]
    assert f"using Number = {name};" in text and "StreamK" not in text
    assert f"Int<128>, Int<256>, Int<{32 if types == 'f32' else 64}>" in text and "Int<2>, Int<1>, Int<1>" in text
    for letter, operand in zip(layout, ("Number, cutlass::layout::", "    Number, cutlass::layout::"), strict=True):
        assert operand + ("ColumnMajor" if letter == "t" else "RowMajor") in text
    assert "thread::GELU," in text and "bias_ptr" in text and "using Source = void" in text
    assert text.count("{") == text.count("}")
    assert "StreamKScheduler" in cutlass.text_of(g, CutlassConfig(128, 128, False, 1, 1, stream_k=True))


@pytest.mark.parametrize("name", NAMED)
def test_what_is_fused_and_what_follows_are_the_epilogue(name: str) -> None:
    e = epilogue(name)
    fused, rest = cutlass.fused_of(e)
    chance = torch.Generator().manual_seed(0)
    acc, *others = (torch.randn(5, 7, generator=chance, dtype=torch.float64) for _ in range(4))
    given_ = {"bias": others[0][0], "residual": others[1], "full": others[2]}
    x = acc + (given_[fused.bias] if fused.bias else 0) + (given_[fused.residual] if fused.residual else 0)
    x = torch_value(epilogue(f"{fused.activation}(acc)"), x, {}) if fused.activation else x
    x = x if rest is None else torch_value(rest, x, given_)
    assert torch.allclose(x, torch_value(e, acc, given_))
    assert (rest is None) == (name != "bias_gate")


@pytest.mark.parametrize(
    ("g", "why"),
    [
        (typed(Gemm(), "i8"), "not for i8"),
        (typed(Gemm(), "e4m3"), "not for e4m3"),
        (Gemm(64, 64, 60), "multiple of 8"),
        (Gemm(64, 60, 64), "multiple of 8"),
        (Gemm(60, 64, 64, layout="tn"), "multiple of 8"),
        (typed(Gemm(64, 62, 64, layout="nt"), "f32"), "multiple of 4"),
    ],
)
def test_a_product_that_it_does_not_take(g: Gemm, why: str) -> None:
    found = cutlass.declined(g)
    assert found is not None and why in found.reason
    assert cutlass.declined(Gemm(60, 64, 64)) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["none", "bias_residual_relu", "bias_gate", "residual"])
def test_built_and_run_as_a_call(layout: str, name: str, tmp_path: Path) -> None:
    g = typed(Gemm(24, 32, 16, layout=layout, epilogue=epilogue(name)), "f32")
    calls, refused = cutlass.contenders(g, fake(tmp_path), tmp_path / "cache", most=2)
    assert len(calls) == 2 and not refused
    chance = torch.Generator().manual_seed(1)
    a, b, *others = (torch.randn(s, generator=chance) for s in g.shapes)
    out = torch.full((24, 32), math.nan)
    BoundCall(calls[1][1], {}).run([a, b, *others], out)
    product = (a.mT if layout[0] == "t" else a) @ (b.mT if layout[1] == "t" else b)
    named = {n: x for (n, _), x in zip(g.epilogue.operands, others, strict=True)}
    assert torch.allclose(out, torch_value(g.epilogue, product, named), atol=1e-4)


def test_a_kernel_is_built_once_for_all_sizes(tmp_path: Path) -> None:
    peer, cache = fake(tmp_path), tmp_path / "cache"
    c = CutlassConfig(128, 128, False, 1, 1, stream_k=False)
    one, other = (typed(Gemm(m, 32, 16), "f32") for m in (16, 640))
    path = cutlass.build(peer, cutlass.text_of(one, c), cache)
    assert isinstance(path, Path)
    before = path.stat().st_mtime_ns
    assert cutlass.build(peer, cutlass.text_of(other, c), cache) == path and path.stat().st_mtime_ns == before
    assert cutlass.build(peer, cutlass.text_of(typed(one, "f16"), c), cache) != path


def test_what_nvcc_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    g = typed(Gemm(640, 640, 16), "f32")
    calls, refused = cutlass.contenders(g, fake(tmp_path, "ClusterShape = Shape<Int<2>"), tmp_path / "cache")
    assert calls and refused
    assert {dict(s.params)["cluster_m"] for s in refused} == {2} and {
        dict(s.params)["cluster_m"] for s, _ in calls
    } == {1}
    assert all("error: a static assertion failed" in why for why in refused.values())


def test_a_compiler_that_hangs_is_ended(tmp_path: Path) -> None:
    peer = fake(tmp_path)
    cutlass._nvcc_version(peer.nvcc)
    Path(peer.nvcc).write_text("#!/bin/sh\nsleep 60\n")
    found = cutlass.build(peer, "x", tmp_path / "cache", seconds=0.3)
    assert isinstance(found, Declined) and "not done after 0.3 s" in found.reason


def test_a_launch_that_fails_is_an_error(tmp_path: Path) -> None:
    g = typed(Gemm(8, 8, 64), "f32")
    ((_, call),), _ = cutlass.contenders(g, fake(tmp_path), tmp_path / "cache", most=1)
    with pytest.raises(DeviceError, match="CUTLASS ended with status 1001"):
        BoundCall(call, {}).run([torch.ones(8, 64), torch.ones(64, 8)], torch.empty(8, 8))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.tune.cuda_site import CudaSite
    from weft.tune.site import Built

    monkeypatch.setattr(CudaSite, "build", lambda self, kernel, left_s: Built("/nonexistent.cubin", 0.1))


def against(
    g: Gemm, peer: Cutlass | Declined, cache: Path, monkeypatch: pytest.MonkeyPatch, *, tf32: bool = True,
    facts: GpuFacts = profile("h200"),  # noqa: B008
) -> dict[str, Any]:  # fmt: skip
    monkeypatch.setattr(cutlass, "find_cutlass", lambda: peer)
    return again.against_cutlass(g, SOURCE, facts, None, cache, tf32=tf32, transport=Worker(g))  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled")
def test_both_sides_in_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = typed(Gemm(256, 256, 16, layout="nt", epilogue=epilogue("bias_relu")), "f32")
    told = against(g, fake(tmp_path, "ClusterShape = Shape<Int<2>"), tmp_path / "cache", monkeypatch)
    assert told["peer"].startswith("CUTLASS 4.2.0, ") and told["weft"]["median_us"] == 4.0
    assert told["library"]["median_us"] == 5.0 and told["ratio"] == 1.25
    assert "ping-pong" in told["library"]["name"] or "cooperative" in told["library"]["name"]
    assert told["refused"] and all("cluster 2x1" in name for name in told["refused"])


@pytest.mark.parametrize(
    ("types", "changes", "why"),
    [
        ("i8", {}, "not for i8"),
        ("f32", {"tf32": False}, "--tf32"),
        ("f16", {"facts": profile("a100")}, "the GPU is sm_80"),
    ],
)
def test_nothing_to_compare_with(
    types: str, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=why):
        against(typed(Gemm(64, 64, 64), types), fake(tmp_path), tmp_path / "cache", monkeypatch, **changes)


def test_without_cutlass_or_with_none_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g, peer = typed(Gemm(64, 64, 64), "f16"), fake(tmp_path, "cutlass")
    with pytest.raises(DeviceError, match="nothing to compare with: none here"):
        against(g, Declined("none here"), tmp_path, monkeypatch)
    with pytest.raises(DeviceError, match=r"none of CUTLASS's kernels could be built: nvcc refuses it"):
        against(g, peer, tmp_path / "cache", monkeypatch)


def test_the_types_are_those_that_its_texts_name() -> None:
    assert set(cutlass._TYPES) == {DType.F16, DType.BF16, DType.F32}
