"""Runs fused and persistent kernels on the host: several roles in one CTA, several CTAs at once, in a random order."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from tests.generate.cuda.tensor_emulator import Buffer, _headers, _record, library_of

from weft.generate.cuda.intrinsics.prelude import float8
from weft.kernels.colocation import BYTES, JOB, FusedParameter, FusedSource, WorkCounter
from weft.kernels.source import CudaSource, Number, Pointer, TensorMap

_HERE = Path(__file__).parent


@dataclass
class Memory:
    """What one role is given: buffers by kind, as a launch has them."""

    pools: dict[str, list[Buffer]] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> list[Buffer]:
        return self.pools.setdefault(kind, [])

    @property
    def buffers(self) -> list[Buffer]:
        return [b for pool in self.pools.values() for b in pool]


class Counter:
    """A work counter in memory."""

    def __init__(self, start: WorkCounter, behind: int = 0) -> None:
        """`behind`: bytes of what a kernel records."""
        self.buffer = Buffer(BYTES + behind)
        self.buffer.data[BYTES:] = 0
        self.clock_ns = 0
        """The GPU's clock after the launches with it: they are in a row, whatever else ran between."""
        self.write(start)

    @property
    def trace(self) -> bytes:
        """What a kernel recorded."""
        return self.buffer.data[BYTES:].tobytes()

    def write(self, value: WorkCounter) -> None:
        self.buffer.data[:BYTES] = np.frombuffer(value.pack(), np.uint8)

    @property
    def now(self) -> WorkCounter:
        return WorkCounter.unpack(self.buffer.data[:BYTES].tobytes())

    def set(self, name: str, value: int) -> None:
        """One word, as the host writes it while kernels run."""
        self.buffer.data.view(np.uint32)[WorkCounter.offset(name) // 4] = value & 0xFFFFFFFF


_STATIC = re.compile(r"\bW_SHARED ([\w:]+(?:<[^;>]*>)?) (\w+)((?:\[[^\]]*\])*);")


def _of_its_block(numbers: Iterator[int]) -> Callable[[re.Match[str]], str]:
    """Static shared memory as memory of the block, each with a number."""

    def changed(found: re.Match[str]) -> str:
        kind, name, sizes = found.groups()
        number = next(numbers)
        t = f"w_kind_{number}"
        return f"typedef {kind} {t}{sizes}; {t}& {name} = *({t}*)w_static({number}, sizeof({t}));"

    return changed


class FusedKernels:
    """Kernels compiled for the host in one go; a namespace each. Entries differ."""

    def __init__(self, sources: Sequence[FusedSource | CudaSource], change: Callable[[str], str] | None = None) -> None:
        parts = ["#define W_FUSED\n"]
        parts += [(_HERE / name).read_text(encoding="utf-8") for name in ("host_tensor.h", "host_tma.h")]
        parts += [_headers()[1], float8()]
        parts += [(_HERE / name).read_text(encoding="utf-8") for name in ("host_float8.h", "host_fused.h")]
        head, parts = "".join(parts), []
        for i, source in enumerate(sources):
            text = change(source.text) if change else source.text
            for header in (*_headers(), float8()):
                text = text.replace(header, "").replace(header.rstrip(), "")
            parts.append(f"namespace kernel_{i} {{\n{_STATIC.sub(_of_its_block(count()), text)}\n")
            launches = [*source.pack, *source.launches] if isinstance(source, CudaSource) else [source]
            parts += [
                f'extern "C" const char* run_{x.entry}'
                "(void* const* a, const unsigned* n, unsigned shared, int defer) {"
                f" w_run([=] {{ w_call({x.entry}, a); }}, dim3{{n[0], n[1], n[2]}}, dim3{{n[3], 1, 1}}, shared,"
                " dim3{n[4], n[5], n[6]}, defer); return w_error; }\n"
                for x in {x.entry: x for x in launches}.values()
            ]
            parts.append("}\n")
        self.library = library_of(head, "".join(parts), "-O1")

    def run(
        self,
        source: FusedSource,
        memory: Mapping[int, Memory],
        counter: Counter,
        *,
        gang: int = 1,
        grid: int = 0,
        order: int = 3,
        seed: int = 1,
        registers: int = 0,
        defer: int = 1,
        host: Callable[[], None] | None = None,
        rounds: int = 0,
    ) -> str:
        """What went wrong, or "". `gang`: CTAs that run at once; `registers`: of a thread at launch, 0: not counted.

        `host` is called now and then, as a host beside the running kernel. `rounds`: after so many turns of all
        threads it is given up; 0: never.
        """
        zones = [(r.first_thread, r.threads, r.barriers) for r in (source.lc, *source.be) if r.threads]
        flat = [x for first, n, b in zones for x in (first, n, b[0] if b else 0, len(b))]
        library = self.library
        library.set_roles((ctypes.c_int * max(1, len(flat)))(*flat), len(zones))
        library.set_order(order, ctypes.c_ulonglong(seed), registers)
        library.set_rounds(ctypes.c_ulong(rounds))
        library.set_clock(ctypes.c_ulonglong(counter.clock_ns))
        call_host = ctypes.CFUNCTYPE(None)(host) if host else None
        library.set_host(call_host if call_host else None)
        values, kept = arguments(source.parameters, memory, counter)
        every = [*(b for m in memory.values() for b in m.buffers), counter.buffer]
        grid_ = (grid or source.grid[0], *source.grid[1:])
        together = (gang, 1, 1) if math.prod(source.cluster) == 1 else source.cluster
        error = self._call(source.entry, values, every, (*grid_, source.threads, *together), source.shared_bytes, defer)
        assert kept is not None
        library.set_host(None)
        library.clock_now.restype = ctypes.c_ulonglong
        counter.clock_ns = library.clock_now()
        return error

    def run_alone(self, source: CudaSource, memory: Memory, *, defer: int = 1) -> str:
        """The kernels that repack, and the launches, of one role; what went wrong, or ""."""
        self.library.set_roles((ctypes.c_int * 1)(), 0)
        self.library.set_order(0, ctypes.c_ulonglong(1), 0)
        self.library.set_host(None)
        self.library.set_rounds(ctypes.c_ulong(0))
        for launch in (*source.pack, *source.launches):
            of = tuple(FusedParameter(0, "", "", a) for a in launch.arguments)
            values, kept = arguments(of, {0: memory}, None)
            sizes = (*launch.grid, launch.block[0], *launch.cluster)
            error = self._call(launch.entry, values, memory.buffers, sizes, launch.shared_bytes, defer)
            assert kept is not None
            if error:
                return error
        return ""

    def _call(
        self,
        entry: str,
        values: Sequence[int],
        buffers: Sequence[Buffer],
        sizes: tuple[int, ...],
        shared_bytes: int,
        defer: int,
    ) -> str:
        self.library.clear_buffers()
        for b in buffers:
            self.library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))
        call = getattr(self.library, f"run_{entry}")
        call.restype = ctypes.c_char_p
        words = (ctypes.c_void_p * max(1, len(values)))(*values)
        error = call(words, (ctypes.c_uint * 7)(*sizes), ctypes.c_uint(shared_bytes), defer)
        return str(error.decode())


def arguments(
    parameters: Sequence[FusedParameter], memory: Mapping[int, Memory], counter: Counter | None
) -> tuple[list[int], list[object]]:
    """The words that a kernel is handed, and what has to live as long."""
    values: list[int] = []
    kept: list[object] = []

    def address(role: int, pointer: Pointer) -> int:
        of = pointer.kind in ("work", "state")
        at = memory[role][pointer.kind][0 if of else pointer.index].address
        return at + (pointer.index if of else 0)

    for p in parameters:
        if p.role == JOB:
            assert counter is not None
            values.append(counter.buffer.address)
        elif isinstance(p.argument, TensorMap):
            kept.append(_record(p.argument, address(p.role, p.argument.base)))
            values.append(ctypes.addressof(kept[-1]))  # type: ignore[arg-type]
        elif isinstance(p.argument, Number):
            values.append(p.argument.value)
        else:
            assert isinstance(p.argument, Pointer)
            values.append(address(p.role, p.argument))
    return values, kept
