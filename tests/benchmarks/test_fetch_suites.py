"""Public suites: what is fetched, which files are looked at, and what is said of a kernel."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from benchmarks.cases import public_suites
from benchmarks.cases.assumed_launches import entries
from benchmarks.cases.public_suites import Suite
from benchmarks.harness.record import Record

from benchmarks import fetch_suites
from weft.generate.cuda.foreign.declared import kernels
from weft.generate.cuda.foreign.unit import Unit

GOOD = """#include <stdio.h>
#include "kernels.h"
#define BLOCK 32
typedef float real;
template <typename T, int N> __global__ void filled(T* x, T value) { if (threadIdx.x < N) x[threadIdx.x] = value; }
__global__ void scaled(real* x, real by, int n) { if (threadIdx.x < n) x[threadIdx.x] *= by; }
void host(float* x) { filled<float, BLOCK><<<4, 128>>>(x, 1.0f); printf("done"); }
int main() { return 0; }
"""
HEADER = """struct Points { float* x; int n; };
struct Range { int first, last; };
__global__ void moved(Points p) { p.x[threadIdx.x] += 1.0f; }
__global__ void between(int* y, Range r) { y[0] = r.first + r.last; }
__global__ void matrix(float** rows) { rows[0][threadIdx.x] = 1.0f; }
__global__ void told(float* x) { printf("%f", x[0]); }
__global__ void half_done(__half* x) { x[0] = x[1]; }
namespace inner { __global__ void hidden(int* x) { x[0] = 1; } }
"""


def git(home: Path, *command: str) -> str:
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *command], cwd=home, check=True, capture_output=True, text=True, env={**os.environ, **names}
    )
    return done.stdout.strip()


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with four folders, of which every second one is looked at."""
    home = tmp_path / "repository"
    for name in ("a-cuda", "b-cuda", "c-cuda", "c-hip", "d-cuda"):
        (home / "src" / name).mkdir(parents=True)
        (home / "src" / name / "main.cu").write_text(GOOD)
        (home / "src" / name / "kernels.h").write_text(HEADER)
        (home / "src" / name / "data.bin").write_bytes(b"\0")
    (home / "src" / "a-cuda" / "link.cu").symlink_to("main.cu")
    git(home, "init", "-q")
    git(home, "add", ".")
    git(home, "commit", "-q", "-m", "first")
    commit = git(home, "rev-parse", "HEAD")
    (home / "src" / "a-cuda" / "main.cu").write_text("changed")
    git(home, "commit", "-q", "-a", "-m", "second")
    monkeypatch.setattr(public_suites, "SUITES", {"own": Suite(home.as_uri(), commit, "src/*-cuda", every=2)})
    monkeypatch.setattr(fetch_suites, "SUITES", public_suites.SUITES)
    return home


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_suite_is_fetched_at_its_commit(suite: Path, tmp_path: Path, mirrored: bool) -> None:
    before = git(suite, "status", "--porcelain")
    home = public_suites.fetch("own", tmp_path / "here", suite / ".git" if mirrored else None)
    assert (home / "src" / "a-cuda" / "main.cu").read_text() == GOOD
    assert not (home / "src" / "a-cuda" / "data.bin").exists(), "data stay where they are"
    looked = [str(p.relative_to(home)) for p in public_suites.files("own", home)]
    assert looked == ["src/a-cuda/main.cu", "src/c-cuda/main.cu"]
    assert git(suite, "status", "--porcelain") == before, "a mirror is only read"
    (home / "src" / "a-cuda" / "main.cu").write_text("mine")
    assert (public_suites.fetch("own", tmp_path / "here") / "src" / "a-cuda" / "main.cu").read_text() == "mine"


def test_a_commit_that_is_not_there_is_an_error(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_suites, "SUITES", {"own": Suite(suite.as_uri(), "0" * 40, "src/*-cuda")})
    with pytest.raises(subprocess.CalledProcessError):
        public_suites.fetch("own", tmp_path / "here", suite / ".git")
    assert not (tmp_path / "here" / "own" / ".commit").exists()


@pytest.mark.slow
def test_what_is_said_of_every_kernel(suite: Path, tmp_path: Path) -> None:
    home = public_suites.fetch("own", tmp_path / "here", suite / ".git")
    record = Record("cpu", "foreign-kernels", path=tmp_path / "record.jsonl", command="test")
    cases = fetch_suites.looked_at("own", home, record, "a-cuda")
    rows = {c.rpartition(":")[2]: x for c, x in record.before().items()}
    assert len(cases) == len(rows) == 8 and "own/src/a-cuda/kernels.h:moved" in cases
    assert {n for n, x in rows.items() if x["state"] == "fused"} == {"filled", "scaled", "between"}
    assert {n: str(x["reason"]).rpartition(": ")[2] for n, x in rows.items() if x["state"] == "refused"} == {
        "moved": "a structure with pointers that is passed by value",
        "matrix": "a pointer to pointers, and no kernel.toml says what is in it",
        "told": "its buffer belongs to the process, and the host must drain it",
        "hidden": "inner::hidden stands in a namespace; a kernel is taken from the file's own scope",
    }
    assert rows["half_done"]["state"] == "not taken by NVRTC"


def test_a_template_gets_what_its_host_code_gives_it(suite: Path, tmp_path: Path) -> None:
    home = public_suites.fetch("own", tmp_path / "here", suite / ".git")
    _, _, text = next(fetch_suites.found("own", home))
    assert isinstance(text, Unit)
    filled = next(k for k in kernels(text) if k.name == "filled")
    assert [e for e, _ in entries(text, filled)] == [
        "filled<float, BLOCK>", "filled<float, 16>", "filled<int, 16>",
    ]  # fmt: skip


def test_a_kernel_that_takes_too_long_is_given_up() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(fetch_suites._OverError), fetch_suites.within(1):
        signal.pause()
    assert signal.getsignal(signal.SIGALRM) == before and signal.alarm(0) == 0
