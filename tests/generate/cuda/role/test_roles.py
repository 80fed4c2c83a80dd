"""What a role is told, and the kernels that are made of roles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft.generate.cuda
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.cuda.role import beside
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RegisterSplit, RoleSource
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Inside, Pointer, Schedule, TensorMap

PACKAGE = Path(weft.generate.cuda.__file__).parent
MACHINE = PACKAGE / "intrinsics" / "weft_cuda_machine.h"
"""Names the machine, as do `role`, which makes kernels of roles, and `foreign`, which reads those of others."""
OF_THE_KERNEL = re.compile(
    r"\b(threadIdx|blockIdx|gridDim|blockDim|__syncthreads|__launch_bounds__|__global__|extern __shared__|w_wait"
    r"|w_release|w_named_barrier\w*|bar\.sync|bar\.arrive)\b"
)
WHOLE = Schedule("cuda", (("template", "none"),))


def role(body: str = "out0[role.thread()] = in0[role.thread()];", **fields: Any) -> DeviceRole:
    parameters = (
        Parameter("in0", Pointer("in", 0), "const float* __restrict__"),
        Parameter("out0", Pointer("out", 0), "float* __restrict__"),
    )
    return replace(DeviceRole(32, body, parameters, (3, 2, 1)), **fields)


def source(*roles: DeviceRole, **fields: Any) -> RoleSource:
    return replace(RoleSource(WHOLE, (prelude(), tma_header()), roles), **fields)


def kernels(text: str) -> str:
    return text.replace(prelude(), "").replace(tma_header(), "")


def test_only_who_assembles_names_the_machine() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()[:80]}"
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".h") and path != MACHINE and path.parent.name not in ("role", "foreign")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if OF_THE_KERNEL.search(line)
    ]
    assert found == []


def test_a_kernel_of_one_role() -> None:
    made = solo(source(role(shared_bytes=2048, min_ctas_per_sm=2, cluster=(1, 2, 1), co_resident=2, pdl=False)), "k0")
    assert kernels(made.text) == (
        'extern "C" __global__ void __launch_bounds__(32, 2) k0(const float* __restrict__ in0,'
        " float* __restrict__ out0) {\n"
        "static constexpr w_solo role{};\n"
        "W_DYNAMIC(sm);\n"
        "out0[role.thread()] = in0[role.thread()];\n}\n"
    )
    (launch,) = made.launches
    assert (launch.entry, launch.grid, launch.block, launch.shared_bytes) == ("k0", (3, 2, 1), (32, 1, 1), 2048)
    assert (launch.cluster, launch.co_resident, launch.dependent) == ((1, 2, 1), 2, False)
    assert launch.arguments == (Pointer("in", 0), Pointer("out", 0))


def test_roles_are_launched_in_their_order_and_named_behind_the_entry() -> None:
    two = source(role(), role(name="copy"), order=(1, 0), pack=(role(name="pack", bounded=False),))
    made = solo(two, "k0")
    assert [x.entry for x in made.launches] == ["k0_copy", "k0"]
    assert [x.entry for x in made.pack] == ["k0_pack"]
    assert re.findall(r"void ((?:__launch_bounds__\(32\) )?k0\w*)\(", kernels(made.text)) == [
        "__launch_bounds__(32) k0", "__launch_bounds__(32) k0_copy", "k0_pack",
    ]  # fmt: skip


def test_a_decline_is_handed_on() -> None:
    why = Declined("no such product")
    assert solo(why, "k0") is why


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_function_of_the_frame_compiles(arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    body = """u32 x = role.block_x() + role.block_y() * role.blocks_x() + role.block_z();
role.pdl_wait(); role.pdl_trigger();
if (role.any(x == 7u)) return;
role.sync();
if (role.thread() < 64) role.named_barrier(0, 96); else role.named_barrier_arrive(0, 96);
*(u32*)sm = x;
if (role.thread() < 128) { MORE } else { LESS }
role.sync();
out0[role.thread()] = in0[role.thread()] + *(const u32*)sm;"""
    split = RegisterSplit(40, 232) if arch == "sm_90a" else None
    told = ("role.alloc_registers();", "role.dealloc_registers();") if split else ("", "")
    moved = body.replace("MORE", told[0]).replace("LESS", told[1])
    headers = (prelude(), tma_header()) if split else (prelude(),)
    whole = source(role(moved, threads=256, shared_bytes=16, named_barriers=1, registers=split), headers=headers)
    for made in (solo(whole, "k0"), beside.side_by_side(WHOLE, "k1", [beside.Member(whole, (0,), (0,), 1.0)] * 2)):
        assert isinstance(made, CudaSource)
        compiled = nvrtc.compile(made.text, arch=arch, cache_dir=tmp_path)
        assert dict(compiled.resources).keys() == {made.entry}
        assert ("w_more_registers<232>" in made.text) == bool(split)


def member(one: RoleSource, inputs: tuple[int, ...], outputs: tuple[int, ...], length: float = 1.0) -> beside.Member:
    return beside.Member(one, inputs, outputs, length)


def test_roles_side_by_side_have_blocks_of_their_own() -> None:
    short, long = source(role()), source(role("out0[0] = in0[role.block_x()];", grid=(5, 1, 1)))
    made = beside.side_by_side(WHOLE, "k0", [member(short, (0,), (0,)), member(long, (1,), (1,), 2.0)])
    assert isinstance(made, CudaSource)
    (launch,) = made.launches
    assert launch.grid == (5 + 6, 1, 1)
    body = kernels(made.text)
    assert body.index("namespace m0") < body.index("in0[role.block_x()]") < body.index("namespace m1")
    assert "typedef w_beside<5u> frame;" in body and "typedef w_beside<3u> frame;" in body
    assert "m0::member(m0::frame(tile % 5u, 0u, 0u), (const float*)in1, (float*)out1);" in body
    assert "m1::member(m1::frame(tile % 3u, tile / 3u % 2u, 0u), (const float*)in0, (float*)out0);" in body


def test_roles_of_equal_text_share_a_body_and_weights_their_packing() -> None:
    packs = DeviceRole(
        256, "", (Parameter("w", Pointer("in", 1)), Parameter("pk", Pointer("packed", 0), WRITTEN)), (1, 1, 1),
        name="pack", bounded=False,
    )  # fmt: skip
    reads = (*role().parameters, Parameter("pk", Pointer("packed", 0)))
    one = source(role(parameters=reads), pack=(packs,), packed_bytes=(64,), replaces_weights=(1,), workspace_bytes=10)
    made = beside.side_by_side(
        WHOLE, "k0", [member(one, (0, 2), (0,)), member(one, (1, 2), (1,)), member(one, (1, 3), (2,))]
    )
    assert isinstance(made, CudaSource)
    assert kernels(made.text).count("W_FN void member(") == 1
    assert made.packed_bytes == (64, 64) and made.replaces_weights == (2, 3)
    assert [x.arguments[0] for x in made.pack] == [Pointer("in", 2), Pointer("in", 3)]
    assert {x.entry for x in made.pack} == {"k0_0_pack"}
    assert made.workspace_bytes == 3 * 256


MAP = TensorMap(Pointer("in", 0), "f16", (64, 64), (128,), (64, 64), (1, 1), 128)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (source(role(), role(name="copy")), "two launches"),
        (source(role(co_resident=2)), "spin on each other"),
        (source(role(threads=64)), "differ in threads"),
        (source(role(min_ctas_per_sm=2)), "differ in threads"),
        (source(role(parameters=(Parameter("x", Inside(Pointer("in", 0), 8)),))), "neither a buffer nor a tensor map"),
    ],
)
def test_roles_that_cannot_stand_beside_each_other(other: RoleSource, reason: str) -> None:
    made = beside.side_by_side(WHOLE, "k0", [member(source(role()), (0,), (0,)), member(other, (1,), (1,))])
    assert isinstance(made, Declined) and reason in made.reason


def test_tensor_maps_are_parameters_of_the_kernel_and_references_in_a_function() -> None:
    mapped = source(role("w_map_prefetch(&ma);", parameters=(Parameter("ma", MAP), *role().parameters)))
    made = solo(mapped, "k0")
    assert "k0(const __grid_constant__ w_map ma, " in made.text
    both = beside.side_by_side(WHOLE, "k0", [member(mapped, (0,), (0,)), member(mapped, (1,), (1,))])
    assert isinstance(both, CudaSource)
    assert "member(const frame role, const w_map& ma, " in both.text
    assert "k0(const __grid_constant__ w_map map0, const __grid_constant__ w_map map1, " in both.text
