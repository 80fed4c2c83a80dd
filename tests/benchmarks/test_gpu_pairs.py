from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu_pairs import candidates, gemm_of, job_of, lc_sources, main, mangled

from benchmarks import gpu_pairs
from weft.device.cuda.facts import GpuFacts
from weft.ir.types import DType


def test_products_by_their_sizes() -> None:
    g = gemm_of("64x32x128")
    assert (g.m, g.n, g.k, g.dtype, g.layout) == (64, 32, 128, DType.BF16, "nt")
    for text in ("64x32", "64x32x0", "axbxc", "64x32x128x1", "-1x2x3"):
        with pytest.raises(ValueError, match="is not of the form"):
            gemm_of(text)


def test_names_of_variables_are_those_of_the_compiler() -> None:
    assert mangled(["w_be0", "w_f0", "table"]) == "_ZN5w_be04w_f05tableE"


def test_a_job_as_roles_has_its_buffers_in_place() -> None:
    job = job_of("histo", small=True)
    names = list(job.job.buffers())
    at = {name: 0x1000 * (i + 1) for i, name in enumerate(names)}
    clear, count = job.addresses(at)
    assert list(clear.outputs) == [at["counts"]] and list(count.inputs) == [at["values"]]
    assert list(count.outputs) == [at["counts"]]
    assert len(job.sources) == 2 and job.sources[0].roles[0].threads == 512


def test_products_and_jobs_give_fused_kernels() -> None:
    facts = GpuFacts()
    sources = lc_sources(gemm_of("4096x4096x4096"), facts, 3)
    assert len(sources) == 3
    found = list(candidates(sources, job_of("mriq", small=True), facts, 1))
    assert found
    for lc, shape, made in found:
        assert made.threads >= lc.roles[0].threads and shape.threads >= 32 and made.grid == lc.roles[0].grid


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lc", "1x2"], "is not of the form"),
        (["--be", "nothing"], "no job 'nothing'"),
        (["--rounds", "0"], "at least 1"),
        (["--fractions", "0"], "invalid"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_process_that_dies_is_the_pairs_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(stdout='noise\n{"record": "shape"}\n', stderr="a\nlast word\n", returncode=-11)

    monkeypatch.setattr(subprocess, "run", dies)
    rows = gpu_pairs._child("1x1x1", "mriq", [], 1.0)
    assert next(rows) == {"record": "shape"}
    with pytest.raises(RuntimeError, match="ended with -11: last word"):
        next(rows)
