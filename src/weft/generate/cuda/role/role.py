"""The unit below a kernel: a role is what some threads of a kernel do, told only by what it is handed where it runs.

A template returns roles; `assemble` makes kernels of them: of one role alone, or of several side by side in one grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.kernels.source import CudaArgument, Schedule, TensorMap

Dim3 = tuple[int, int, int]
READ = "const void* __restrict__"
WRITTEN = "void* __restrict__"
PDL = "// PDL: behind the wait, what earlier kernels wrote may be read; later kernels may start"
"""Comment of the text where roles wait."""
_MAP = ("const __grid_constant__ w_map", "const w_map&")
"""Type of a tensor map as a parameter of a kernel, and of a function."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A name that a role's text uses, and what the launch passes for it."""

    name: str
    argument: CudaArgument | None = None
    """None where the launches are not made of the role."""
    type: str = READ
    """C type; not looked at for tensor maps."""

    def declared(self, *, kernel: bool) -> str:
        """As a parameter of a kernel, or of a device function."""
        kind = _MAP[0 if kernel else 1] if isinstance(self.argument, TensorMap) else self.type
        return f"{kind} {self.name}"


@dataclass(frozen=True, slots=True)
class RegisterSplit:
    """Registers of a thread once warps have taken their parts (setmaxnreg): a producer's and a consumer's.

    As CUTLASS's LoadRegisterRequirement and MmaRegisterRequirement; multiples of 8, from 24 to 240.
    """

    producer: int
    consumer: int


@dataclass(frozen=True, slots=True)
class DeviceRole:
    """What `threads` threads of a block do.

    The body is a sequence of statements. It knows of the machine around it only `role`, whose functions are those of
    `w_solo` in weft_cuda_role.h (its thread and block, barriers, the dependent-launch wait), `sm`, its part of the
    block's dynamic shared memory, and its parameters. It may end early with `return`, but not between barriers, unless
    it says so (`early_return`).
    """

    threads: int
    """Whole warps; whole warpgroups where wgmma is used. Of best-effort roles any number."""
    body: str
    parameters: tuple[Parameter, ...]
    grid: Dim3
    globals: str = ""
    """Functions and constants of this role alone, in front of it."""
    name: str = ""
    """What the entry's name ends in; "": the kernel itself."""
    bounded: bool = True
    """Whether the compiler is told the number of threads (`__launch_bounds__`)."""
    min_ctas_per_sm: int = 0
    """Second launch bound; 0: not told."""
    shared_bytes: int = 0
    """Dynamic shared memory; more than 0 where the body names `sm`."""
    shared_alignment: int = 1024
    """Of `sm`: 1024 (swizzled tiles of TMA and wgmma) or 16."""
    named_barriers: int = 0
    """Barriers besides `role.sync()`: `role.named_barrier(i, threads)` with i less than this."""
    registers: RegisterSplit | None = None
    """Asked for by `role.dealloc_registers()` in producers and `role.alloc_registers()` in consumers."""
    cluster: Dim3 = (1, 1, 1)
    co_resident: int = 1
    """Neighbouring CTAs that spin on each other and must be resident at once."""
    pdl: bool = True
    """Waits for the kernels before it itself (`role.pdl_wait()`), in every thread."""
    idle_threads: int = 0
    """Of the producer warpgroup its last threads, whole warps, that only pass through the body: another role may have
    them once they have come to its end."""
    early_return: bool = False
    """Some threads may return where others still come to a barrier: only a role whose barriers count those that are
    there (best-effort ones) can be such."""


@dataclass(frozen=True, slots=True)
class RoleSource:
    """What a template makes: roles, and what they share. Fields without a word are those of `CudaSource`."""

    schedule: Schedule
    headers: tuple[str, ...]
    """Texts of header files, in order; each stands once in a translation unit."""
    roles: tuple[DeviceRole, ...]
    """In the order of the text."""
    order: tuple[int, ...] = ()
    """Positions of the roles in the order in which they are launched; empty: as in the text."""
    pack: tuple[DeviceRole, ...] = ()
    pack_first: bool = False
    """Whether those of `pack` stand in front of the others in the text."""
    workspace_bytes: int = 0
    state_bytes: int = 0
    packed_bytes: tuple[int, ...] = ()
    replaces_weights: tuple[int, ...] = ()
    capability: int = 80
    exact_arch: bool = False
    flags: tuple[str, ...] = ()
    max_registers: int = 0
    transforms: bool = False
    input_output_aliases: tuple[tuple[int, int], ...] = ()

    @property
    def launched(self) -> tuple[DeviceRole, ...]:
        """The roles in the order of their launches."""
        return tuple(self.roles[i] for i in self.order) if self.order else self.roles
