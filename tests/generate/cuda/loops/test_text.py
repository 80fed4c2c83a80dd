"""Texts of CUDA kernels, what they cost in registers, and what the generator refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests import goldens
from tests.generate.cpp.test_groups import NAMED, f32, problem
from tests.generate.cuda.loops.test_groups import LONG, mixed

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.facts import CpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.intrinsics.prelude import runtime_header
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.wait import WAIT, with_wait
from weft.generate.cuda.role.assemble import role_header
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

TEXTS: dict[str, tuple[Problem, Form]] = {
    "softmax": (NAMED["softmax(33, 100)/1"](), Form(threads=128)),
    "residual-norm": (NAMED["residual-norm"](), Form(threads=128)),
    "norm-pad-last": (NAMED["norm-pad/last"](), Form(threads=256, fuse=False, spread=264)),
    "group-norm-cluster": (LONG["cluster"][0], Form(threads=128, per_row=128, cluster=4)),
    "norm-meet": (LONG["columns"][0], Form(threads=64, columns=2, single_pass=True, cross_cta=3)),
    "pool-last": (NAMED["pool2201/last"](), Form(threads=128)),
    "upsample-concat": (NAMED["upsample-concat/last"](), Form()),
    "tile-f16": (mixed(DType.F16, Format.ROW, Format.LAST, Format.LAST), Form(tile=True)),
    "large": (NAMED["large"](), Form(items=2)),
}


def emit(p: Problem, form: Form) -> CudaSource:
    source = CudaGenerator().emit(p, form.schedule())
    assert isinstance(source, CudaSource), source.reason
    return source


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    source = emit(*TEXTS[name])
    launches = "".join(f"// {x.grid[0]} x {x.block[0]}, cluster {x.cluster[0]}\n" for x in source.launches)
    own = source.text.split(runtime_header().rstrip())[1].replace(role_header(), "")
    text = launches + own.replace(source.entry, "kernel").lstrip()
    goldens.check(f"cuda/{name}.txt", text)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_spills_and_few_registers(arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    for name in ("residual-norm", "group-norm-cluster", "norm-pad-last", "tile-f16"):
        source = emit(*TEXTS[name])
        if source.capability > int(re.sub(r"\D", "", arch)):
            continue  # clusters need sm_90
        compiled = nvrtc.compile(source.text, arch=arch, cache_dir=tmp_path)
        for entry, used in compiled.resources:
            threads = next(x.block[0] for x in source.launches if x.entry == entry)
            assert used.spill_stores == used.spill_loads == used.stack_bytes == 0, name
            assert used.registers <= 128 and used.registers * threads <= 65536, name


def test_every_thread_waits_before_it_reads_what_others_write() -> None:
    for p, form in TEXTS.values():
        weights = {f"in{k}" for k, n in enumerate(p.graph.inputs) if p.graph.nodes[n].attrs.is_weight}  # type: ignore[union-attr]
        for body in re.findall(r"__launch_bounds__\(\d+\) \w+\([^)]*\) \{\n(.*?)\n\}", emit(p, form).text, re.DOTALL):
            before, wait, after = body.partition("role.pdl_wait();")
            assert wait and after.lstrip().startswith("role.pdl_trigger();") and "pdl_wait" not in after
            touched = set(re.findall(r"\b(?:in|out|v|state)\d+\b", before))
            assert touched <= weights
            opened = [line for line in before.split("\n") if line.rstrip().endswith("{")]
            assert all(line.strip() == "{" for line in opened), "a condition or loop around the wait"
            assert "return" not in body


def test_what_needs_no_predecessor_goes_before_the_wait() -> None:
    lines = [
        "{",
        "  const w_index t = role.thread();",
        "  w_f32 q1[4];",
        "  w_ldv<4>(in0 + (t), q1);",
        "  w_f32 q2[4];",
        "  w_ldv<4>(in1 + (t), q2);",
        "  const w_f32 e1 = (q1[0] + q2[0]);",
        "  const w_f32 e2 = w_ld(in1 + (t));",
        "  if (t < 3u) {",
        "    const w_f32 e3 = w_ld(in1 + 7);",
        "    w_st(out0 + (t), e1);",
        "  }",
        "}",
    ]
    assert [x.strip() for x in with_wait(lines, ["in0", "out0"])] == [
        "{", "const w_index t = role.thread();", "w_f32 q1[4];", "w_f32 q2[4];", "w_ldv<4>(in1 + (t), q2);",
        "const w_f32 e2 = w_ld(in1 + (t));", *WAIT, "w_ldv<4>(in0 + (t), q1);", "const w_f32 e1 = (q1[0] + q2[0]);",
        "if (t < 3u) {", "const w_f32 e3 = w_ld(in1 + 7);", "w_st(out0 + (t), e1);", "}", "}",
    ]  # fmt: skip
    assert with_wait(["{", "if (t) {", "w_st(out0, e1);", "}", "}"], ["out0"])[1:3] == list(WAIT)
    loop = ["{", "#pragma unroll", "for (int o = 1; o < 2; ++o) { s1 = w_plus(s1, w_ld(in0 + o)); }", "}"]
    assert with_wait(loop, ["in0"])[1:3] == list(WAIT)
    assert with_wait(["x;"], []) == ["x;", *WAIT]


def test_equal_problems_give_equal_text() -> None:
    texts = [emit(NAMED["norm-pad/row"](), Form()) for _ in range(2)]
    assert texts[0] == texts[1]


def test_names_from_the_model_stay_out() -> None:
    b = GraphBuilder()
    x = b.input(f32(64), "*/ evil(); /*")
    source = emit(problem(b.build([b.apply(Prim.NEG, x)], ["*/ evil(); /*"]), "*/ evil(); /*"), Form())
    assert "evil" not in source.text + source.entry


def test_wide_indices_where_the_sizes_need_them() -> None:
    assert "#define W_WIDE" not in emit(NAMED["large"](), Form()).text
    b = GraphBuilder()
    x = b.input(f32(3, 2**30))
    assert emit(problem(b.build([b.apply(Prim.NEG, x)]), "wide"), Form()).text.startswith("#define W_WIDE\n")


def test_schedules() -> None:
    for name in ("large", "to-last", "residual-norm", "softmax/last"):
        p = NAMED[name]()
        found = CudaGenerator().schedules(p, GpuFacts())
        assert not isinstance(found, Declined)
        assert 1 <= len(found) <= 8, name
        texts = {emit(p, Form.of(s)).text.replace(emit(p, Form.of(s)).entry, "") for s in found}
        assert len(texts) == len(found), name
    assert not any(
        s.param("cluster") != 1
        for s in CudaGenerator().schedules(NAMED["softmax(1, 70001)/1"](), GpuFacts(capability=80))  # type: ignore[union-attr]
    )


def decline(p: Problem) -> str:
    found = CudaGenerator().schedules(p, GpuFacts())
    assert isinstance(found, Declined)
    return found.reason


def test_a_cpu_is_no_gpu() -> None:
    found = CudaGenerator().schedules(NAMED["large"](), CpuFacts())
    assert isinstance(found, Declined)
    assert "GPU" in found.reason


def test_opaque_operators_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(4, 4))
    attrs = a.OpaqueAttrs("aten", "aten.sort.default", "{}", 0, (f32(4, 4),))
    assert "opaque" in decline(problem(b.build([b.add(Prim.OPAQUE, x, attrs=attrs)]), "opaque"))


def test_large_constants_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(200, 200))
    c = b.constant(np.ones((200, 200), np.float32))
    assert "constant of 160000 B" in decline(problem(b.build([b.apply(Prim.ADD, x, c)]), "constant"))


def test_constants_as_outputs_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(2))
    graph = b.build([b.constant(np.ones(2, np.float32)), b.apply(Prim.NEG, x)])
    assert "is a constant" in decline(problem(graph, "constant-output"))
