"""Where a line of a kernel is written: the files that `weft explain` and the report name are those that write it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.generate import scans
from tests.generate.cpp.templates.harness import LAST, ROW, Facts, conv, f32, problem
from tests.generate.cuda import test_goldens as goldens
from tests.slow import few

import weft
from weft.generate.cpp import scan, templates
from weft.generate.cuda import generator
from weft.generate.cuda.role.role import RoleSource
from weft.generate.loopnest.scans import scan_group
from weft.generate.written import files_of, origins, without_headers, written_in
from weft.ir.attrs import ScanAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.kernels.pretty import pretty
from weft.kernels.source import KernelSource

ROOT = Path(weft.__file__).parent.parent
PACK = "weft/generate/cuda/gemm/common/pack.py"
NAMES = [n for n in goldens.NAMES if not n.startswith("training")]


def makers(kind: type, make: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a call gives, and the files of ours that made objects of a class on the way."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__init__" and isinstance(frame.f_locals["self"], kind):
            caller = frame.f_back
            while caller is not None and not Path(caller.f_code.co_filename).is_relative_to(ROOT):
                caller = caller.f_back  # `dataclasses.replace`
            assert caller is not None
            found.add(str(Path(caller.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        return make(), found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_make_the_roles(name: str) -> None:
    first, second = (goldens.FOLDER / f"{name}.cu").read_text(encoding="utf-8").split("\n")[:2]
    place, schedule = first.removeprefix("// "), json.loads(second.removeprefix("// "))
    goldens.table(place.partition(" ")[0])
    generator._source.cache_clear()  # another test may have asked for the same
    source, found = makers(RoleSource, partial(goldens.made, place, schedule))
    told = written_in(str(source.schedule))
    assert told
    assert told[0] in found
    assert found <= {*told, PACK}


def test_the_files_make_the_functions_for_cpus() -> None:
    seen = set()
    for groups in (1, 16):
        b = GraphBuilder()
        x = b.input(f32(1, 16, 14, 14))
        posed = problem(b, [conv(b, x, 16, (3, 3), lo=(1, 1), groups=groups)], [LAST, ROW], [LAST])
        schedules = templates.schedules(posed, Facts())
        assert not isinstance(schedules, Declined)
        for schedule in schedules:
            source, found = makers(KernelSource, partial(templates.emit, posed, schedule))
            assert isinstance(source, KernelSource)
            assert written_in(str(schedule)) == tuple(found)
            seen.add(schedule.param("template"))
    posed = scans.plain((4, 32), ScanAttrs(1, "sum"))
    group = scan_group(posed.graph)
    assert not isinstance(group, Declined)
    schedule = scan.configs(group, 8, [1])[0].schedule()
    source, found = makers(KernelSource, partial(scan.emit, posed, schedule))
    assert isinstance(source, KernelSource) and written_in(str(schedule)) == tuple(found)
    seen.add(schedule.param("template"))
    assert seen == {template for template in files_of("cpp") if template}


def test_every_template_is_told_by_files_that_are_there() -> None:
    names = {n.partition(".")[0] for n in NAMES} - goldens.OTHERS
    assert set(files_of("cuda")) == {*names, ""}
    assert all(
        (ROOT / "weft" / "generate" / f).is_file()
        for kind in ("cpp", "cuda")
        for files in files_of(kind).values()
        for f in files
    )


def test_schedules_as_text() -> None:
    assert written_in("cpp(lanes=8,threads=2)") == ("weft/generate/cpp/kernel.py",)
    assert written_in("cpp(algorithm=winograd4,template=winograd)") == ("weft/generate/cpp/templates/winograd.py",)
    assert written_in("cuda(template=tma)") == written_in("cuda(a=(1, 1),template=tma,z=0)")
    for other in ("library(form=eager)", "plugin(template=tma)", "cuda(template=none)", "cuda", "", "cpp.tile(3)"):
        assert written_in(other) == ()


def emitted(name: str) -> tuple[str, str]:
    """(schedule, text) of a template's golden kernel."""
    first, second = (goldens.FOLDER / f"{name}.cu").read_text(encoding="utf-8").split("\n")[:2]
    place, schedule = first.removeprefix("// "), json.loads(second.removeprefix("// "))
    goldens.table(place.partition(" ")[0])
    source = goldens.made(place, schedule)
    return str(source.schedule), source.text


@pytest.mark.parametrize("name", few(NAMES, 6))
def test_most_lines_of_a_kernel_have_an_origin(name: str) -> None:
    schedule, text = emitted(name)
    body = pretty(without_headers(text)).splitlines()
    assert len(body) < len(text.splitlines()) and not any("griddepcontrol" in line for line in body)
    lines = [line for line in body if len("".join(line.split())) >= 24 and not line.startswith("// weft/")]
    found = [origins(line, schedule, text) for line in lines]
    assert sum(map(bool, found)) >= 0.8 * len(lines), [x for x, at in zip(lines, found, strict=True) if not at]
    for origin in (x for at in found for x in at):
        assert (ROOT / origin.file).is_file() and 0 < origin.share <= 1
        assert not origin.file.startswith("weft/generate/cpp/")


@pytest.mark.parametrize(
    ("name", "line", "file", "phrase"),
    [
        (
            "tma",
            "// producer warp: one thread keeps the ring of stages full by TMA",
            "gemm/tma/kernel.py",
            "producer warp",
        ),
        ("tma", "w_bar_init(sb + TURN + 8, 4);", "gemm/tma/kernel.py", "w_bar_init"),
        (
            "tma",
            'asm volatile("griddepcontrol.wait;" ::: "memory");',
            "intrinsics/weft_cuda_machine.h",
            "griddepcontrol",
        ),
        ("attention", "auto fill_k = [&](int first, u32 to) {", "attention/load.py", "auto fill_"),
        ("attention", "float o[1][8][4], top[1][2], total[1][2];", "attention/text.py", "total["),
        ("attention_tma", "w_bar_wait(sb + FULLV + 8 * slot, phase);", "intrinsics/ring.py", "w_bar_wait"),
        ("mma", "(void)g; (void)b; (void)n0; (void)lane;", "gemm/mma/kernel.py", "(void)lane"),
    ],
)
def test_the_file_and_the_line_of_a_line(name: str, line: str, file: str, phrase: str) -> None:
    schedule, text = emitted(name)
    best = origins(line, schedule, text)[0]
    assert best.file == f"weft/generate/cuda/{file}"
    near = (ROOT / best.file).read_text(encoding="utf-8").splitlines()[best.line - 1 : best.line + 8]
    assert phrase in "\n".join(near)


def test_what_no_file_writes_has_no_origin() -> None:
    schedule, text = emitted("tma")
    for line in ("", "}", "  };", "launch_the_missiles(now);", "x" * 1000):
        assert origins(line, schedule, text) == []
    assert origins("role.pdl_wait();", "library(form=eager)", text) == []
