"""What the templates of attention make: roles that hold wherever they run, and what they ask of the kernel around."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.generate.cuda.attention import test_attention, test_attention_linear, test_attention_tma

from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.attention import kernel, linear, tma
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

MACHINE = re.compile(
    r"\b(threadIdx|blockIdx|gridDim|blockDim|__syncthreads|bar\.sync|bar\.arrive|w_named_barrier\w*|w_sync|w_wait|w_release"
    r"|w_fewer_registers|w_more_registers|__launch_bounds__|__global__|__shared__|W_DYNAMIC)\b"
)
"""What belongs to a kernel: a role that names it takes itself for the only one."""
CASES: dict[str, tuple[Problem, Schedule]] = {
    **{f"{name}, by warps": (p, s.schedule(tf32=True)) for name, (p, s) in test_attention.ROUNDED.items()},
    **{name: (p, s.schedule()) for name, (p, s) in test_attention.CASES.items()},
    **{f"{name}, by warpgroups": (p, s.schedule()) for name, (p, s) in test_attention_tma.CASES.items()},
    **{
        f"{name}, linear": (p, Schedule("cuda", (("template", "linear_attention"), ("threads", threads))))
        for name, (p, threads) in test_attention_linear.CASES.items()
    },
}


def roles(problem: Problem, schedule: Schedule) -> RoleSource | Declined:
    template = templates.template_of(schedule)
    assert not isinstance(template, Declined)
    found: Any = template.pattern.match(problem, tf32=False)
    match schedule.param("template"):
        case "linear_attention":
            return linear.roles(found, schedule)
        case "attention_tma":
            return tma.roles(found, schedule, kernel.EXP2)
        case _:
            return kernel.roles(found, schedule)


@pytest.fixture(scope="module")
def made() -> dict[str, RoleSource]:
    found = {}
    for name, (problem, schedule) in CASES.items():
        source = roles(problem, schedule)
        assert not isinstance(source, Declined), (name, source.reason)
        found[name] = source
    return found


def test_roles_name_nothing_of_the_machine_around_them(made: dict[str, RoleSource]) -> None:
    for name, source in made.items():
        (role,) = source.roles
        own = [h for h in source.headers if h not in (prelude(), tma_header())]
        for text in (role.globals, role.body, *own):
            assert not MACHINE.search(text), name
        assert "role.thread()" in role.body and "role.pdl_wait(); role.pdl_trigger();" in role.body, name


def test_roles_ask_for_the_barriers_and_registers_that_they_use(made: dict[str, RoleSource]) -> None:
    split, met = set(), set()
    for name, source in made.items():
        (role,) = source.roles
        numbers = {int(x) for x in re.findall(r"role\.named_barrier\w*\((\d+),", role.body)}
        assert numbers == set(range(role.named_barriers)), name
        for side in ("alloc", "dealloc"):
            assert (f"role.{side}_registers();" in role.body) == (role.registers is not None), name
        split.add(role.registers)
        met.add(role.named_barriers)
    assert None in split and len(split) > 2 and met == {0, 1}


@pytest.mark.parametrize(
    "names",
    [
        ("one tile", "one tile, by warpgroups", "bias, by warpgroups", "three tiles, by warpgroups"),
        ("tf32, ring, by warps", "tf32, masked, by warps", "odd, linear"),
    ],
    ids=["warpgroups", "tf32"],
)
def test_roles_stand_side_by_side_in_one_text(made: dict[str, RoleSource], names: tuple[str, ...]) -> None:
    """Functions that several bring stand there once."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    parts = [made[name] for name in names]
    headers = tuple(h for part in parts for h in part.headers)
    roles = tuple(replace(part.roles[0], name=f"part{i}") for i, part in enumerate(parts))
    source = solo(replace(parts[0], headers=headers, roles=roles), "k")
    (compiled,) = nvrtc.compile_many([CompileJob(source.text, "sm_90a")])
    assert isinstance(compiled, CompiledCubin), compiled
    assert [x.entry for x in source.launches] == [f"k_part{i}" for i in range(len(names))]
    for launch, role in zip(source.launches, roles, strict=True):
        assert compiled.of(launch.entry).spill_stores == 0
        assert launch.block == (role.threads, 1, 1) and launch.shared_bytes == role.shared_bytes
