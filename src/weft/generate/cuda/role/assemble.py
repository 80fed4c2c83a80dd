"""Kernels of roles: who writes entry points, launch bounds, block indices, barrier numbers and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import overload

from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Launch


@cache
def role_header() -> str:
    """Text of weft_cuda_role.h."""
    return Path(__file__).with_name("weft_cuda_role.h").read_text(encoding="utf-8")


_NOTED: ContextVar[list[RoleSource | Declined] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[list[RoleSource | Declined]]:
    """The roles of each kernel that is assembled in this context: for who assembles them in another way."""
    found: list[RoleSource | Declined] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


def note(source: RoleSource | Declined) -> None:
    """Tell `noted` of a kernel's roles, or why its roles cannot be had."""
    found = _NOTED.get()
    if found is not None:
        found.append(source)


@overload
def solo(source: RoleSource, entry: str) -> CudaSource: ...


@overload
def solo(source: RoleSource | Declined, entry: str) -> CudaSource | Declined: ...


def solo(source: RoleSource | Declined, entry: str) -> CudaSource | Declined:
    """Each role as a kernel of its own: `entry`, or `entry_NAME` for one with a name. A decline is handed on."""
    if isinstance(source, Declined):
        return source
    note(source)
    written = (*source.pack, *source.roles) if source.pack_first else (*source.roles, *source.pack)
    kernels = [kernel(role, _entry(entry, role)) for role in written]
    return CudaSource(
        schedule=source.schedule,
        text="".join([*dict.fromkeys(source.headers), *kernels]),
        launches=tuple(launch(role, _entry(entry, role)) for role in source.launched),
        pack=tuple(launch(role, _entry(entry, role)) for role in source.pack),
        workspace_bytes=source.workspace_bytes,
        state_bytes=source.state_bytes,
        packed_bytes=source.packed_bytes,
        replaces_weights=source.replaces_weights,
        capability=source.capability,
        exact_arch=source.exact_arch,
        flags=source.flags,
        max_registers=source.max_registers,
        transforms=source.transforms,
        input_output_aliases=source.input_output_aliases,
    )


def _entry(entry: str, role: DeviceRole) -> str:
    return f"{entry}_{role.name}" if role.name else entry


def kernel(role: DeviceRole, entry: str) -> str:
    """The text of a kernel of one role, with what the role brings."""
    frame, declared = frame_of(role, "w_solo", entry)
    parameters = ", ".join(p.declared(kernel=True) for p in role.parameters)
    return (
        f'{role.globals}{declared}extern "C" __global__ void {bounds(role)}{entry}({parameters}) {{\n'
        f"static constexpr {frame} role{{}};\n{shared(role)}{role.body}\n}}\n"
    )


def bounds(role: DeviceRole) -> str:
    """The launch bounds, with a space behind them; "" for a role that has none."""
    if not role.bounded:
        return ""
    most = f", {role.min_ctas_per_sm}" if role.min_ctas_per_sm else ""
    return f"__launch_bounds__({role.threads}{most}) "


def shared(role: DeviceRole) -> str:
    """The line that gives `sm` its meaning."""
    if not role.shared_bytes:
        return ""
    return "W_DYNAMIC(sm);\n" if role.shared_alignment > 16 else f"W_DYNAMIC_16(sm, {role.shared_bytes});\n"


def frame_of(role: DeviceRole, base: str, name: str) -> tuple[str, str]:
    """The type of `role` in a role's text, and what defines it where the role moves registers."""
    if role.registers is None:
        return base, ""
    producer, consumer = role.registers.producer, role.registers.consumer
    own = f"{name}_frame"
    return own, (
        f"struct {own} : {base} {{\n"
        f"  using {base.partition('<')[0]}::{base.partition('<')[0]};\n"
        f"  static W_FN void dealloc_registers() {{ w_fewer_registers<{producer}>(); }}\n"
        f"  static W_FN void alloc_registers() {{ w_more_registers<{consumer}>(); }}\n"
        "};\n"
    )


def launch(role: DeviceRole, entry: str) -> Launch:
    """How a kernel of one role is launched."""
    arguments = tuple(p.argument for p in role.parameters if p.argument is not None)
    assert len(arguments) == len(role.parameters), "a parameter without an argument"
    return Launch(
        entry,
        role.grid,
        (role.threads, 1, 1),
        arguments,
        role.shared_bytes,
        role.cluster,
        role.pdl,
        role.co_resident,
    )
