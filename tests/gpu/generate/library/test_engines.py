"""Convolutions by recorded engines of cuDNN on a real GPU: against float64, bit by bit, in graphs and plans."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.generate.library.conv_cases import calls, convolution, expected, inputs_of, prepared
from tests.typed import narrow

import weft
from weft.device.cuda.facts import GpuFacts
from weft.generate.library import convolution as module
from weft.generate.library.execute import plain_math
from weft.ir.attrs import ConvAttrs
from weft.ir.types import DType
from weft.kernels.formats import Format

pytestmark = pytest.mark.gpu
LIMITS = {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-5, "tf32": 2e-3}
"""Error, root of the mean square over that of the exact result."""
AGAIN = 20
SIZES = ((16, 64, 56, 56, 64), (1, 48, 33, 21, 40), (2, 32, 17, 40, 24))
WAYS = (
    ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1),
    ConvAttrs((2, 1), (0, 2), (0, 2), (1, 1), 1),
    ConvAttrs((1, 1), (2, 2), (2, 2), (2, 2), 1),
    ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 4),
)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_contender", lambda asked, facts: True)


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("compute", list(LIMITS))
def test_every_form_against_float64(compute: str, stated: GpuFacts, tell: Any) -> None:
    dtype = DType.F32 if compute == "tf32" else DType(compute)
    facts = replace(stated, tf32=compute == "tf32")
    counts: list[int] = []
    forms = [(b, r, a) for b, r, a in itertools.product((False, True), repeat=3)]
    for sizes, attrs in itertools.product(SIZES, WAYS):
        for bias, residual, relu in forms if (sizes, attrs) == (SIZES[0], WAYS[0]) else forms[-1:]:
            formats = (Format.ROW, Format.ROW) if sizes is SIZES[2] else (Format.LAST, Format.LAST)
            about: dict[str, Any] = {"bias": bias, "residual": residual}
            problem = convolution(
                dtype, sizes=sizes, attrs=attrs, activation="relu" if relu else "", formats=formats, **about
            )
            inputs = inputs_of(problem, "cuda")
            exact = expected(problem, inputs, relu=relu, **about)
            found = calls(problem, facts)
            counts.append(len(found))
            with plain_math(allow_tf32=facts.tf32):
                launches = [prepared(problem, call, inputs) for call in found]
                for call, (launch, out) in zip(found, launches, strict=True):
                    launch()
                    first = out.clone()
                    assert error(out, exact) < LIMITS[compute], (str(call.schedule), error(out, exact))
                    for _ in range(AGAIN):
                        out.fill_(torch.nan)
                        launch()
                        assert torch.equal(out, first), str(call.schedule)
                if not launches:
                    continue
                firsts = [out.clone() for _, out in launches]
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for launch, _ in launches:
                        launch()
                for _, out in launches:
                    out.fill_(torch.nan)
                graph.replay()
                assert all(torch.equal(out, y) for (_, out), y in zip(launches, firsts, strict=True))
    taken = sum(c > 0 for c in counts)
    tell(f"cuDNN {compute}: {taken} of {len(counts)} convolutions taken, {sum(counts)} engines, up to {max(counts)}")
    assert taken >= 0.5 * len(counts)


LOAD = """
import hashlib, json, sys, torch, weft
path, values, cache = sys.argv[1:]
x = torch.load(values, weights_only=True).cuda()
exe = weft.load(path, options=weft.Options(device="cuda", cache_dir=cache))
found = {hashlib.sha256(exe(x).cpu().view(torch.uint8).numpy().tobytes()).hexdigest() for _ in range(5)}
print(json.dumps(sorted(found)))
"""


def test_convolutions_have_the_same_bits_in_another_process(tmp_path: Path) -> None:
    """By the framework's operators: this process lets cuDNN try algorithms, the other one does not."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, s, 1), torch.nn.SiLU()) for a, b, s in
          ((3, 32, 2), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)))
    ).half().cuda().eval()  # fmt: skip
    x = torch.randn(4, 3, 224, 224).half()
    torch.backends.cudnn.benchmark = True
    try:
        with torch.no_grad():
            net(x.cuda())
        options = weft.Options(device="cuda", budget_s=0.0, cache_dir=tmp_path)
        exe = weft.compile(net, x.cuda(), options=options)
        mine = hashlib.sha256(narrow(torch.Tensor, exe(x.cuda())).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    finally:
        torch.backends.cudnn.benchmark = False
    exe.save(tmp_path / "net.weft")
    torch.save(x, tmp_path / "x.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "net.weft"), str(tmp_path / "x.pt"), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [mine]
