"""Runs generated CUDA text on the host: the machine's functions are replaced by an emulation, the rest is compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
from tests import compiled

import weft.generate.cuda
from weft.device.cuda import tensor_map
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.intrinsics.prelude import float8
from weft.ir.declined import Declined
from weft.ir.reference import evaluate, round_to
from weft.ir.types import DType, from_bits, to_bits
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule, TensorMap

_HERE = Path(__file__).parent
_INTRINSICS = Path(weft.generate.cuda.__file__).parent / "intrinsics"
GUARD = 256
NONE: Mapping[int, int] = MappingProxyType({})
S = TypeVar("S")


class Configured(Protocol):
    """The parameters of a template."""

    def schedule(self) -> Schedule:
        """As a schedule of the generator."""
        ...


def to_memory(x: np.ndarray, dtype: DType, format: Format) -> np.ndarray:
    """Bytes as they lie on the device."""
    flat = np.ascontiguousarray(x.transpose(format.order(x.ndim))).reshape(-1)
    if dtype.is_emulated:
        return to_bits(flat, dtype).view(np.uint8)
    return flat.astype(dtype.numpy).view(np.uint8)


def from_memory(raw: np.ndarray, dtype: DType, shape: tuple[int, ...], format: Format) -> np.ndarray:
    if dtype.is_emulated:
        flat = from_bits(raw.view(np.uint16 if dtype is DType.BF16 else np.uint8), dtype)
    else:
        flat = raw.view(dtype.numpy)
    order = format.order(len(shape))
    return flat.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def emitted(cases: Mapping[str, tuple[Problem, Configured]]) -> dict[str, CudaSource]:
    """The kernel of each case, by the parameters that stand beside its problem."""
    found = {}
    for name, (problem, shape) in cases.items():
        made = CudaGenerator().emit(problem, shape.schedule())
        assert isinstance(made, CudaSource), made
        found[name] = made
    return found


def offered(problem: Problem, facts: GpuFacts) -> list[CudaSource]:
    """The kernel of each schedule that is offered."""
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    sources = [CudaGenerator().emit(problem, s) for s in found]
    kernels = [x for x in sources if isinstance(x, CudaSource)]
    assert kernels == sources
    return kernels


class Buffer:
    """Bytes between zones of 0xFF, aligned to 256."""

    def __init__(self, size: int, fill: int = 0xFF) -> None:
        raw = np.full(size + 3 * GUARD, 0xFF, np.uint8)
        start = GUARD + (-(raw.ctypes.data + GUARD)) % GUARD
        self.raw, self.start, self.stop = raw, start, start + size
        self.data = raw[start : self.stop]
        self.data[:] = fill
        self.address = raw.ctypes.data + start

    def intact(self) -> bool:
        return bool((self.raw[: self.start] == 0xFF).all() and (self.raw[self.stop :] == 0xFF).all())


def _record(m: TensorMap, address: int) -> ctypes.Array[ctypes.c_longlong]:
    """What the emulation knows of a tensor map; DeviceError for one that CUDA would refuse."""
    tensor_map._check(address, m.dtype, m.sizes, m.strides_bytes, m.box, m.element_strides, m.swizzle_bytes)
    size = {"f16": 2, "bf16": 2, "tf32": 4, "u8": 1}[m.dtype]
    fields = [
        (*values, *(5 - len(values)) * (0,)) for values in (m.sizes, (size, *m.strides_bytes), m.box, m.element_strides)
    ]
    numbers = [address, size, len(m.sizes), m.swizzle_bytes, *(x for field in fields for x in field)]
    return (ctypes.c_longlong * len(numbers))(*numbers)


@cache
def _headers() -> tuple[str, str, str]:
    names = ("weft_cuda_machine.h", "weft_cuda.h", "weft_cuda_tensor.h")
    machine, functions, tensor = ((_INTRINSICS / n).read_text(encoding="utf-8") for n in names)
    return machine, functions, tensor


class Text(Protocol):
    """What is asked of a source."""

    @property
    def text(self) -> str: ...
    @property
    def launches(self) -> tuple[Launch, ...]: ...
    @property
    def pack(self) -> tuple[Launch, ...]: ...
    @property
    def sha256(self) -> str: ...


class Emulated:
    """Many kernels compiled for the host in one go; a namespace each."""

    def __init__(self, sources: Sequence[Text]) -> None:
        parts = [(_HERE / name).read_text(encoding="utf-8") for name in ("host_tensor.h", "host_tma.h")]
        parts += [_headers()[1], float8(), (_HERE / "host_float8.h").read_text(encoding="utf-8")]
        parts.append(
            'extern "C" void add_buffer(char* p, long n) { w_buffers.push_back({p, p + n}); }\n'
            'extern "C" void clear_buffers() { w_buffers.clear(); }\n'
            'extern "C" void set_order(int order) { w_order = order; }\n'
        )
        head, parts = "".join(parts), []
        for i, source in enumerate({s.sha256: s for s in sources}.values()):
            text = source.text
            for header in _headers():
                assert header in text
                text = text.replace(header, "")
            text = text.replace(float8(), "")
            parts.append(f"namespace kernel_{i} {{\n{text}\n")
            for launch in {x.entry: x for x in (*source.pack, *source.launches)}.values():
                arguments = ", ".join(f"a[{j}]" for j in range(len(launch.arguments)))
                parts.append(
                    f'extern "C" const char* run_{launch.entry}'
                    "(void** a, const unsigned* n, unsigned shared, int defer) {"
                    f" w_run([=] {{ {launch.entry}({arguments}); }}, dim3{{n[0], n[1], n[2]}},"
                    " dim3{n[3], n[4], n[5]}, shared, dim3{n[6], n[7], n[8]}, defer); return w_error; }\n"
                )
            parts.append("}\n")
        self.library = library_of(head, "".join(parts), "-O0")


def library_of(head: str, text: str, level: str) -> ctypes.CDLL:
    """C++ text behind what all begin with, compiled for this machine at an optimisation level, and loaded."""
    return compiled.library(text, level, "-std=c++17", "-march=native", head=head)


def run(
    kernels: Emulated,
    problem: Problem,
    source: CudaSource,
    inputs: list[np.ndarray],
    *,
    defer: bool = True,
    order: int = 0,
    over: Mapping[int, int] = NONE,
) -> list[np.ndarray]:
    """Outputs of the emulated kernel; asserts guard zones, untouched inputs and that the state is left zero.

    `order`: 0 lets all threads take turns, 1 and 2 let the first or the last warp go as far ahead as it can.
    `over`: inputs that outputs are written over, by output.
    """
    library = kernels.library
    library.set_order(order)
    g = problem.graph
    types = [g.type_of(i) for i in g.inputs]
    ins = [Buffer(t.nbytes) for t in types]
    for buffer, x, t, f in zip(ins, inputs, types, problem.input_formats, strict=True):
        buffer.data[:] = to_memory(x, t.dtype, f)
    before = [bytes(b.data) for b in ins]
    outs = [ins[over[k]] if k in over else Buffer(g.type_of(o).nbytes) for k, o in enumerate(g.outputs)]
    packed = [Buffer(n) for n in source.packed_bytes]
    work, state = Buffer(source.workspace_bytes), Buffer(source.state_bytes, 0)
    pools = {"in": ins, "out": outs, "packed": packed}
    library.clear_buffers()
    everything = (*ins, *(b for b in outs if b not in ins), *packed, work, state)
    for b in everything:
        library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))

    def start(launch: Launch, hidden: tuple[int, ...]) -> None:
        values, maps = [], []
        for p in launch.arguments:
            if isinstance(p, TensorMap):
                kind, index = p.base.kind, p.base.index
                at = work.address + index if kind == "work" else pools[kind][index].address
                maps.append(_record(p, at))
                values.append(ctypes.addressof(maps[-1]))
                continue
            assert isinstance(p, Pointer), p
            if p.kind in pools:
                gone = p.kind == "in" and p.index in hidden
                values.append(0 if gone else pools[p.kind][p.index].address)
            else:
                values.append({"work": work, "state": state}[p.kind].address + p.index)
        numbers = (ctypes.c_uint * 9)(*launch.grid, *launch.block, *launch.cluster)
        pointers = (ctypes.c_void_p * max(len(values), 1))(*values)
        call = getattr(library, f"run_{launch.entry}")
        call.restype = ctypes.c_char_p
        error = call(pointers, numbers, ctypes.c_uint(launch.shared_bytes), int(defer))
        assert not error, error.decode()

    for launch in source.pack:
        start(launch, ())
    for launch in source.launches:
        start(launch, source.replaces_weights)
    assert all(b.intact() for b in everything), "a guard zone was written"
    kept = [k for k in range(len(ins)) if k not in over.values()]
    assert [bytes(ins[k].data) for k in kept] == [before[k] for k in kept], "an input was modified"
    assert not state.data.any(), "the state was not left zero"
    return [
        from_memory(b.data.copy(), g.type_of(o).dtype, g.type_of(o).shape, f)
        for b, o, f in zip(outs, g.outputs, problem.output_formats, strict=True)
    ]


def small_integers(problem: Problem, seed: int = 0, most: int = 2) -> list[np.ndarray]:
    """Inputs whose sums of products are exact in f32: a result may differ from the exact one by its rounding only."""
    rng = np.random.default_rng(seed)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        found.append(rng.integers(-most, most + 1, t.shape).astype(t.dtype.numpy))
    return found


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    """An exact result in the output's own type."""
    return round_to(x, dtype)


def written(
    cases: Mapping[str, tuple[Problem, S]], write: Callable[[Problem, S, str], CudaSource | Declined]
) -> dict[str, CudaSource]:
    """The kernel of each case, under an entry of its own."""
    found = {}
    for i, (name, (problem, shape)) in enumerate(cases.items()):
        source = write(problem, shape, f"k{i}")
        assert isinstance(source, CudaSource), (name, source)
        found[name] = source
    return found


def assert_exact(kernels: Emulated, problem: Problem, source: CudaSource, *, most: int = 2, defer: int = False) -> None:
    """On integers of up to `most` every bit is that of the reference, rounded once."""
    inputs = small_integers(problem, most=most)
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, source, inputs, defer=defer)  # type: ignore[arg-type]
    for x, y, node in zip(got, exact, problem.graph.outputs, strict=True):
        np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype))
