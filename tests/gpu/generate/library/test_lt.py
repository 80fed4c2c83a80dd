"""Products by recorded algorithms of cuBLASLt on a real GPU: against float64, bit by bit, in graphs and plans."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.library.lt_cases import (
    calls,
    expected,
    inputs_of,
    launcher,
    linear,
    network,
    network_value,
    plan_of,
    problem_of,
)
from tests.typed import narrow

from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.generate.library import lt
from weft.generate.library.algorithm import Algorithm, chosen, workspace_bytes
from weft.generate.library.execute import plain_math
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.runtime import artifact
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked

pytestmark = pytest.mark.gpu
SIZES = ((200, 136, 328), (1, 256, 512), (384, 768, 3072), (77, 33, 45))
LIMITS = {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-5, "tf32": 2e-3}
"""Error, root of the mean square over that of the exact result."""
AGAIN = 20


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lt, "is_contender", lambda product, facts: True)


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def checked(problem: Problem, facts: GpuFacts, exact: torch.Tensor, inputs: list[torch.Tensor], limit: float) -> int:
    """How many algorithms were right, had the same bits again and again, and in a graph."""
    found = calls(problem, facts)
    graph, results = torch.cuda.CUDAGraph(), []
    launches = [launcher(problem, call, inputs) for call in found]
    for call, (launch, out) in zip(found, launches, strict=True):
        launch()
        first = out.clone()
        assert error(out, exact) < limit, (str(call.schedule), error(out, exact))
        for _ in range(AGAIN):
            out.fill_(torch.nan)
            launch()
            assert torch.equal(out, first), str(call.schedule)
        results.append(first)
    if not found:
        return 0
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for launch, _ in launches:
            launch()
    for _, out in launches:
        out.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(out, first) for (_, out), first in zip(launches, results, strict=True))
    return len(found)


@pytest.mark.parametrize("compute", list(LIMITS))
def test_every_layout_and_epilogue_against_float64(compute: str, stated: GpuFacts, tell: Any) -> None:
    dtype = DType.F32 if compute == "tf32" else DType(compute)
    facts = replace(stated, tf32=compute == "tf32")
    counts: list[int] = []
    for sizes, turned, right in itertools.product(SIZES, (False, True), ("constant", "n", "t")):
        tails = list(itertools.product((False, True), (False, True), ("", "relu", "gelu")))
        if right != "constant" or sizes != SIZES[0]:
            tails = [tails[0], tails[-1]]
        for bias, residual, activation in tails:
            about: dict[str, Any] = {"bias": bias, "residual": residual, "activation": activation}
            about |= {"turned": turned, "right": right}
            problem = linear(dtype, sizes=sizes, **about)
            inputs = inputs_of(problem, device="cuda")
            with plain_math():
                counts.append(checked(problem, facts, expected(inputs, **about), inputs, LIMITS[compute]))
    taken = sum(c > 0 for c in counts)
    tell(f"cuBLASLt {compute}: {taken} of {len(counts)} products taken, {sum(counts)} algorithms, up to {max(counts)}")
    assert taken >= 0.7 * len(counts) and max(counts) >= 2


def test_batches_read_views_in_place(stated: GpuFacts, tell: Any) -> None:
    heads, rows, size = 12, 197, 64
    b = GraphBuilder()
    t = TensorType(DType.F16, (1, rows, heads * size))
    q, k = (b.reshape(b.input(t), (1, rows, heads, size)) for _ in range(2))
    scores = b.add(Prim.MATMUL, b.transpose(q, (0, 2, 1, 3)), b.transpose(k, (0, 2, 3, 1)))
    problem = problem_of(b.build([scores]))
    x, y = inputs_of(problem, device="cuda")
    left, right = (v.view(1, rows, heads, size).double() for v in (x, y))
    count = checked(problem, stated, left.permute(0, 2, 1, 3) @ right.permute(0, 2, 3, 1), [x, y], LIMITS["f16"])
    tell(f"cuBLASLt batched: {count} algorithms")
    assert count >= 1


LOAD = """
import sys, numpy as np, torch
from pathlib import Path
from weft.runtime import artifact
path, digest, inputs, outputs = sys.argv[1:]
loaded = artifact.load(Path(path), trust=digest)
given = [torch.from_numpy(x).cuda() for x in np.load(inputs).values()]
np.savez(outputs, *[loaded(*given)[0].cpu().numpy() for _ in range(3)])
"""


def test_a_plan_runs_its_algorithm_again_in_another_process(stated: GpuFacts, tmp_path: Path) -> None:
    graph = network(DType.F16, (200, 136, 3280))
    facts = {"gpu": stated.name, "capability": str(stated.capability)}
    x, residual = (torch.randn(s, device="cuda").half() for s in ((200, 3280), (200, 136)))
    np.savez(tmp_path / "in.npz", x.cpu().numpy(), residual.cpu().numpy())
    plan = plan_of(graph, -1, stated)
    linked = Linked(graph, plan, {}, None, None, 0, facts)
    exe = CudaExecutable(linked)
    mine = exe(x, residual)[0]
    exact = network_value(graph, x, residual)
    assert error(mine, exact) < LIMITS["f16"]
    work = workspace_bytes(plan.steps[0].kernel)
    assert exe.memory.arena_bytes >= work + mine.nbytes
    digest = artifact.save(linked, tmp_path / "plan.weft", trust_dir=None)
    arguments = [str(tmp_path / "plan.weft"), digest, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run([sys.executable, "-c", LOAD, *arguments], check=True, timeout=80)
    theirs = list(np.load(tmp_path / "out.npz").values())
    assert len(theirs) == 3 and all(np.array_equal(y, mine.cpu().numpy()) for y in theirs)


def test_a_callers_graph_and_two_threads(stated: GpuFacts) -> None:
    graph = network(DType.F16, (200, 136, 328))
    facts = {"gpu": stated.name, "capability": str(stated.capability)}
    made = [CudaExecutable(Linked(graph, plan_of(graph, n, stated), {}, None, None, 0, facts)) for n in (0, -1)]
    x, residual = (torch.randn(s, device="cuda").half() for s in ((200, 328), (200, 136)))
    wanted = [e(x, residual)[0] for e in made]
    recorded = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        inside = [e(x, residual)[0] for e in made]
    recorded.replay()
    assert all(torch.equal(a, b) for a, b in zip(inside, wanted, strict=True))
    wrong: list[int] = []

    def again(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            if not all(torch.equal(made[number](x, residual)[0], wanted[number]) for _ in range(50)):
                wrong.append(number)

    threads = [threading.Thread(target=again, args=(n % 2,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not wrong


def test_bytes_that_are_no_algorithm_are_refused(stated: GpuFacts) -> None:
    problem = linear(DType.F16, sizes=(200, 136, 328))
    inputs = inputs_of(problem, device="cuda")
    call = calls(problem, stated)[0]
    (record,) = chosen(call)
    strange = replace(call.run[-1], kwargs=replace(narrow(Algorithm, record), data="ff" * 64).keywords)
    launch, _ = launcher(problem, replace(call, run=(*call.run[:-1], strange)), inputs)
    with pytest.raises(ArtifactError, match="does not take this algorithm"):
        launch()
    launch, out = launcher(problem, call, inputs)
    launch()
    assert error(out, expected(inputs)) < LIMITS["f16"], "the library goes on after that"
