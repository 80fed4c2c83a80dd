"""`weft fuse`: what it writes, what it refuses, and that its test program finds what is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.best_effort
import pytest
from typer.testing import CliRunner

from weft.cli.app import app
from weft.colocate.fuse import Pair, fuse_pair, parameters, resources, write
from weft.errors import KernelDeclinedError, OptionError
from weft.generate.cuda.foreign.manifest import ManifestError
from weft.generate.cuda.role.fused import fuse as roles_fused
from weft.generate.cuda.role.role import RoleSource
from weft.kernels.colocation import FusionShape

OURS = Path(benchmarks.best_effort.__path__[0])
LC = """source = "lc.cu"
entry = "scaled"
grid = [4]
block = [64]
[[parameters]]
name = "x"
type = "float"
kind = "input"
shape = [256]
init = "normal"
[[parameters]]
name = "y"
type = "float"
kind = "output"
shape = [256]
"""
LC_SOURCE = """__global__ void scaled(const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2.0f * x[i] + 1.0f;
}
"""
BE = """source = "be.cu"
entry = "add"
grid = [4]
block = [256]
[[parameters]]
name = "w"
type = "float"
kind = "input"
shape = [1024]
init = "uniform"
low = -1.0
seed = 3
[[parameters]]
name = "z"
type = "float"
kind = "inout"
shape = [1024]
init = "normal"
[[parameters]]
name = "step"
type = "float"
kind = "scalar"
value = 0.5
"""
BE_SOURCE = """__global__ void add(const float* w, float* z, float step) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  z[i] += w[i] * step;
}
"""


def files(folder: Path) -> tuple[Path, Path]:
    for name, text in (("lc.toml", LC), ("lc.cu", LC_SOURCE), ("be.toml", BE), ("be.cu", BE_SOURCE)):
        (folder / name).write_text(text)
    return folder / "lc.toml", folder / "be.toml"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Path]:
    home = tmp_path_factory.mktemp("pair")
    lc, be = files(home)
    made = fuse_pair(lc, [be], ratio=0.5)
    write(made, home / "out")
    return made, home / "out"


@pytest.fixture(scope="module")
def built(pair: tuple[Pair, Path]) -> Path:
    """The test program beside a driver for the host."""
    folder = pair[1]
    shutil.copyfile(Path(__file__).with_name("fake_driver.cpp"), folder / "fake_driver.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra"]
    for command in (
        ["g++", *flags, "-Werror", "test.cpp", "-o", "test", "-ldl"],
        ["g++", *flags, "-fPIC", "-shared", "fake_driver.cpp", "-o", "libcuda.so.1"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
    return folder


def run(folder: Path, fault: str = "", *, driver: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FAKE_FAULT": fault, "LD_LIBRARY_PATH": str(folder) if driver else ""}
    return subprocess.run(
        ["./test"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_folder_of_a_pair(pair: tuple[Pair, Path]) -> None:
    made, folder = pair
    kernels = ("fused", "rest", "lc", "be0")
    assert {p.name for p in folder.iterdir()} >= {
        "fused.json", "test.cpp", *(f"{k}.cu" for k in kernels),
        *(f"{k}.{arch}.cubin" for k in kernels for arch in ("sm_80", "sm_90a")),
    }  # fmt: skip
    for row in resources(made):
        assert row["registers"] and row["spilled_bytes"] == 0
    about = json.loads((folder / "fused.json").read_text())
    assert (about["limit"], about["stages"], about["launch"]["grid"]) == (2, [4], [4, 1, 1])
    assert [(p["of"], p["argument"]) for p in about["launch"]["parameters"]] == [
        ("lc", {"buffer": "lc_x"}), ("lc", {"buffer": "lc_y"}), ("be0", {"buffer": "be_w"}),
        ("be0", {"buffer": "be_z"}), ("be0", {"value": 0x3F000000}), ("job", {"work_counter": True}),
    ]  # fmt: skip
    assert about["roles"]["lc"]["threads"] == 64 and about["roles"]["be"][0]["first_thread"] == 64
    assert made.declined == {}
    for name in kernels:
        assert "#include" not in (folder / f"{name}.cu").read_text()


def test_the_program_says_equal(built: Path) -> None:
    done = run(built)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "results: equal" in done.stdout
    assert "best-effort blocks: 2 of 4 in the fused launch" in done.stdout
    assert "both one after the other 1.0000 ms, on streams of two priorities 1.0000 ms" in done.stdout
    assert "fused (with what was left) 2.0000 ms\n" in done.stdout
    assert "fused is 0.500 times as fast as the best of these peers (one after the other)" in done.stdout


def test_the_best_peer_is_the_one_that_is_compared_with(built: Path) -> None:
    done = run(built, "fast streams")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one after the other 1.0000 ms, on streams of two priorities 0.5000 ms" in done.stdout
    assert "fused is 0.250 times as fast as the best of these peers (streams)" in done.stdout
    broken = run(built, "stream")
    assert broken.returncode == 2 and "cu.stream(" in broken.stderr


def test_kernels_in_clusters_are_launched_so(pair: tuple[Pair, Path], built: Path, tmp_path: Path) -> None:
    made, _ = pair
    lc = replace(made.sides[0], cluster=(2, 1, 1))
    made = replace(made, sides=(lc, *made.sides[1:]), fused=replace(made.fused, cluster=(2, 1, 1)))
    write(made, tmp_path / "out")
    shutil.copyfile(built / "libcuda.so.1", tmp_path / "out" / "libcuda.so.1")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "test.cpp", "-o", "test", "-ldl"]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    done = run(tmp_path / "out", "clusters")
    assert done.returncode == 0 and "results: equal" in done.stdout, done.stdout + done.stderr
    launched = set(done.stderr.split("\n")) - {""}
    assert launched == {"lc.sm_90a.cubin in clusters", "fused.sm_90a.cubin in clusters"}, "the job's kernels are not"
    assert "in clusters" not in run(built, "clusters").stderr


def test_a_product_in_clusters_is_an_lc_kernel(tmp_path: Path) -> None:
    (tmp_path / "product.toml").write_text('product = "M=128 N=1024 K=8192"\nlayout = "nt"\n')
    made = fuse_pair(tmp_path / "product.toml", [OURS / "mriq" / "kernel.toml"], small=True)
    assert made.sides[0].cluster == made.fused.cluster != (1, 1, 1) and made.rest.cluster == (1, 1, 1)
    write(made, tmp_path / "out")
    x, y, z = made.fused.cluster
    rows = [line for line in (tmp_path / "out" / "test.cpp").read_text().splitlines() if ".cubin" not in line]
    told = f"{{{x}u, {y}u, {z}u}}"
    assert sum(told in line and ('"lc"' in line or '"fused"' in line) for line in rows) == 2
    launch = json.loads((tmp_path / "out" / "fused.json").read_text())["launch"]
    assert launch["cluster"] == list(made.fused.cluster)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("result", "lc_y: differs from byte 8"),
        ("last bit", "be_z: differs from byte 4"),
        ("input", "lc_x: an input was written"),
        ("beside", "be_z: written beside it"),
        ("lost", "3 of 4 blocks ran"),
        ("twice", "be_z: differs from byte 1024"),
    ],
)
def test_the_program_finds_what_is_wrong(fault: str, said: str, built: Path) -> None:
    done = run(built, fault)
    assert done.returncode == 1
    assert "results: WRONG" in done.stdout and said in done.stdout


def test_the_program_ends_when_a_kernel_does_not(built: Path) -> None:
    done = run(built, "hang")
    assert done.returncode == 3 and "watchdog" in done.stderr


def test_the_program_names_errors(built: Path, tmp_path: Path) -> None:
    done = run(built, "init")
    assert done.returncode == 2 and "CUDA_ERROR_NO_DEVICE" in done.stderr
    shutil.copytree(built, tmp_path / "moved")
    (tmp_path / "moved" / "lc.sm_90a.cubin").unlink()
    done = run(tmp_path / "moved")
    assert done.returncode == 2 and "lc.sm_90a.cubin: no such file" in done.stderr


@pytest.mark.slow
def test_a_shape_with_the_registers_that_the_job_wants_is_tried_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles whose warpgroups move registers: the job's threads get enough, at once."""
    tried = []

    def counted(lc: RoleSource, be: list[RoleSource], shape: FusionShape, **more: Any) -> Any:
        tried.extend([shape] * bool(be))
        return roles_fused(lc, be, shape, **more)

    monkeypatch.setattr("weft.colocate.fuse.fuse", counted)
    (tmp_path / "product.toml").write_text('product = "M=4096 N=1024 K=1024"\nlayout = "nt"\ndtype = "f16"\n')
    made = fuse_pair(tmp_path / "product.toml", [OURS / "cp" / "kernel.toml"], small=True)
    assert made.fused.shape == tried[-1] and len(tried) == 1 and tried[0].registers is not None
    tried.clear()
    made = fuse_pair(tmp_path / "product.toml", [OURS / "lbm" / "forth.toml"], small=True)
    given = [s.registers.best_effort for s in tried if s.registers is not None]
    assert given == sorted(set(given)) and len(tried) <= 3, "no shape with registers that were too few before"
    found = next(x for x in made.compiled if x.file == "fused")
    assert found.resources.spill_stores + found.resources.spill_loads <= 64


def test_a_product_of_weft_hosts_a_kernel_with_a_table(tmp_path: Path) -> None:
    (tmp_path / "product.toml").write_text('product = "M=256 N=128 K=256"\nlayout = "nt"\n')
    began, cpu = time.perf_counter(), _cpu()
    made = fuse_pair(tmp_path / "product.toml", [OURS / "mriq" / "kernel.toml"], small=True)
    write(made, tmp_path / "out")
    seconds, spent = time.perf_counter() - began, _cpu() - cpu
    sys.stderr.write(f"weft fuse of a pair: {seconds:.2f} s, {spent:.2f} s of processor time\n")
    assert spent < 30, "3 s on one core that does nothing else"
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "test.cpp"],
        cwd=tmp_path / "out", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:2000]
    program = (tmp_path / "out" / "test.cpp").read_text()
    symbols = {x.file: x.symbols for x in made.compiled}
    assert symbols["be0"] == ("samples",) and symbols["fused"] == ("_ZN5w_be09w_foreign7samplesE",)
    assert program.count('"_ZN5w_be09w_foreign7samplesE"') == 2, "of the fused kernel, and of that of the rest"
    assert "normal" not in made.declined and all(r["registers"] for r in resources(made))


def _cpu() -> float:
    """Processor time of this process and of those that it waited for, seconds."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def test_stages_of_a_job_share_their_buffers() -> None:
    histo = [OURS / "histo" / "clear.toml", OURS / "histo" / "count.toml"]
    made = fuse_pair(OURS / "cp" / "kernel.toml", histo, small=True, ratio=2.0)
    about = parameters(made)
    assert made.cycles == 2 and made.limit == 2 * sum(made.fused.stages) and len(made.fused.stages) == 2
    buffers = about["buffers"]
    assert isinstance(buffers, dict)
    named = [p["argument"] for p in about["launch"]["parameters"] if p["of"] in ("be0", "be1")]  # type: ignore[index]
    shared = [a["buffer"] for a in named if "buffer" in a]
    assert len(shared) > len(set(shared)), "both stages name the counters"


@pytest.mark.parametrize(("ratio", "problem"), [(0.0, "0.0 is outside"), (17.0, "17.0 is outside")])
def test_ratios_out_of_range(ratio: float, problem: str, tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    with pytest.raises(OptionError, match=problem):
        fuse_pair(lc, [be], ratio=ratio)


def test_kernels_that_cannot_be_fused(tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    with pytest.raises(OptionError, match="'lcc' is none of lc, be0"):
        fuse_pair(lc, [be], changes={"lcc": {}})
    with pytest.raises(ManifestError, match="block: 2048 is outside"):
        fuse_pair(lc, [be], changes={"be0": {"block": [2048]}})
    (tmp_path / "product.toml").write_text('product = "MNK=64"\ncolour = "red"\n')
    with pytest.raises(ManifestError, match=r"product\.toml: colour: no such key"):
        fuse_pair(tmp_path / "product.toml", [be])
    (tmp_path / "be.cu").write_text(BE_SOURCE.replace("z[i] +=", 'asm("exit;"); z[i] +='))
    with pytest.raises(KernelDeclinedError) as found:
        fuse_pair(lc, [be])
    assert str(found.value).startswith("be.cu:3: inline PTX: exit") and found.value.exit_code == 4
    crowded: dict[str, dict[str, object]] = {
        "lc": {"block": [512], "dynamic_shared_bytes": 4096},
        "be0": {"block": [512], "dynamic_shared_bytes": 231000},
    }
    (tmp_path / "be.cu").write_text(BE_SOURCE.replace("z[i] +=", "__syncthreads(); z[i] +="))
    with pytest.raises(KernelDeclinedError, match=r"no room in a CTA for 512 and 512 threads with 235096"):
        fuse_pair(lc, [be], changes=crowded)


def test_the_command(tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    out = tmp_path / "out"
    common = ["fuse", str(lc), str(be), "--ratio", "0.25", "-o", str(out)]
    done = CliRunner().invoke(app, [*common, "--set", "be0.parameters.step.value=2.0", "--format", "json"])
    assert done.exit_code == 0, done.output
    about = json.loads(done.stdout)
    assert about["limit"] == 1 and (out / "test.cpp").is_file()
    assert {"value": 0x40000000} in [p["argument"] for p in about["launch"]["parameters"]]
    shown = CliRunner().invoke(app, common)
    assert shown.exit_code == 0 and "scaled of lc.cu, 64 threads" in shown.output and "sm_90a" in shown.output
    for bad in ("be0.grid", "grid=[1]", "be0.grid=[1"):
        wrong = CliRunner().invoke(app, [*common, "--set", bad])
        assert isinstance(wrong.exception, OptionError)
    alone = CliRunner().invoke(app, ["fuse", str(lc)])
    assert isinstance(alone.exception, OptionError)
