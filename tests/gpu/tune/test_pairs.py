"""Best-effort jobs in the CTAs of products and convolutions on a real GPU: the bits of both kernels alone."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from benchmarks.gpu_pairs import Bench, Loader, job_of, lc_of

from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.ir.declined import Declined
from weft.tune.cuda_pair import SPLITS

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter", reason="best-effort kernels are cut by tree-sitter: pip install weft[fuse]")

KERNELS = ("512x512x512", "512x512x510", "resnet50/conv3x3s2-512-14")
"""The second copies its operands first, by a launch of its own."""
JOBS = ("mriq", "mri_fhd", "histo", "fft", "stencil", "tpacf", "nn")
"""`__constant__` tables, shared memory and barriers, several stages, atomics, none of these."""


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", JOBS)
def test_fused_kernels_leave_the_bits_of_both_alone(name: str, kernel: str) -> None:
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined)
    job = job_of(name, small=True)
    with primary_context(), ExitStack() as held:
        facts = gpu_facts(None, calibrate=False)
        if facts.capability < 90:
            pytest.skip("products by TMA need compute capability 9.0")
        lc = lc_of(kernel, facts, 2, job.shared_bytes)
        bench = Bench(lc, facts, Loader(nvrtc, facts.arch, held), 3, held)
        found = list(bench.wrongs(job, range(len(lc.sources)), SPLITS))
    assert found, "no shape runs"
    assert {one.shape.in_time for one, _ in found} == {False, True}
    assert [(one.shape, wrong) for one, wrong in found if wrong] == []
