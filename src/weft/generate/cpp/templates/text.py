"""Pieces of C++ text that every template shares: the prelude, leaves, and the epilogue of one vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from weft.generate.contraction.match import Contraction, Source, Step, constants_of
from weft.generate.expr.ctype import literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.ir.prims import Prim
from weft.ir.types import DType


def team(threads: int) -> str:
    """The clause of a parallel region: at most `threads`, and no more than whoever runs the kernel allows."""
    return f"num_threads((int)w_least(omp_get_max_threads(), {threads}))"


_PRELUDE = """
typedef long i64;
typedef w_f32v vf;
typedef float vfu __attribute__((vector_size({bytes}), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
INLINE vf ld(const float* p) {{ return *(const vfu*)p; }}
INLINE void st(float* p, vf v) {{ *(vfu*)p = v; }}
INLINE vf splat(float x) {{ return x - (vf){{}}; }}
{partial}
extern "C" int omp_get_thread_num(void);
"""

_PARTIAL = """
// the first N elements, and nothing beyond them, are read or written
template <int N> INLINE vf ldn(const float* p) { vf v = {}; __builtin_memcpy(&v, p, N * sizeof(float)); return v; }
template <int N> INLINE void stn(float* p, vf v) { __builtin_memcpy(p, &v, N * sizeof(float)); }
"""

_PARTIAL_512 = """
#if defined(__AVX512F__) && !defined(__clang__)
template <int N> INLINE vf ldn(const float* p) { return (vf)__builtin_ia32_loadups512_mask(p, (vf){}, (unsigned short)((1 << N) - 1)); }
template <int N> INLINE void stn(float* p, vf v) { __builtin_ia32_storeups512_mask(p, v, (unsigned short)((1 << N) - 1)); }
#else
template <int N> INLINE vf ldn(const float* p) { vf v = {}; __builtin_memcpy(&v, p, N * sizeof(float)); return v; }
template <int N> INLINE void stn(float* p, vf v) { __builtin_memcpy(p, &v, N * sizeof(float)); }
#endif
"""  # noqa: E501


@cache
def _simd() -> str:
    return (Path(__file__).parents[1] / "weft_simd.h").read_text(encoding="utf-8")


def prelude(lanes: int) -> str:
    """Header of elementwise functions and the vector type of `lanes` floats."""
    partial = _PARTIAL_512 if lanes == 16 else _PARTIAL
    return f"#define WL {lanes}\n" + _simd() + _PRELUDE.format(bytes=lanes * 4, partial=partial)


def array(name: str, data: np.ndarray) -> str:
    """A static array of exactly these f32 values."""
    body = ",".join(literal(float(x), DType.F32) for x in np.ravel(data))
    return f"alignas(64) static const float {name}[] = {{{body}}};\n"


def indices(name: str, data: Sequence[int]) -> str:
    """A static table of indices."""
    return f"static const int {name}[] = {{{','.join(map(str, data))}}};\n"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the epilogue reads: parameter `name` points at the tile's first element."""

    slot: int
    name: str
    step: Step


def is_scalar(c: Contraction, step: Step) -> float | None:
    """The number that a leaf is, when it is a constant with one value."""
    if step.source is None or step.source.kind != "const" or c.graph is None:
        return None
    data = np.asarray(c.graph.constant(step.source.index))
    return float(data.reshape(-1)[0]) if data.size == 1 else None


def leaves(c: Contraction) -> tuple[Leaf, ...]:
    """Leaves of the epilogue that are read from memory, in order."""
    found: list[Leaf] = []
    for slot, step in enumerate(c.body):
        if step.source is not None and is_scalar(c, step) is None:
            found.append(Leaf(slot, f"p{len(found)}", step))
    return tuple(found)


def statics(c: Contraction) -> tuple[str, Mapping[int, str]]:
    """Text and names (by node) of the constants that are arrays."""
    text, names = "", {}
    for node, data in constants_of(c).items():
        if data.size > 1 or (c.w == Source("const", node)) or (c.a == Source("const", node)):
            names[node] = f"k{node}"
            text += array(names[node], data)
    return text, names


def pointer(source: Source, names: Mapping[int, str]) -> str:
    """Expression of a source's first element."""
    return f"((const float*)inputs[{source.index}])" if source.kind == "input" else names[source.index]


def cost(c: Contraction) -> int:
    """Rough count of instructions of the epilogue per vector."""
    dear = {Prim.EXP: 14, Prim.TANH: 20, Prim.ERF: 25, Prim.LOG: 15, Prim.LOG1P: 20, Prim.EXPM1: 20, Prim.DIV: 4}
    return sum(dear.get(s.prim, 1) for s in c.body if s.source is None)


def epilogue(c: Contraction, acc: str, load: Callable[[Leaf], str], prefix: str) -> tuple[list[str], list[str]]:
    """Statements that turn the accumulator vector `acc` into the outputs; names of the values per output."""
    by_slot = {leaf.slot: leaf for leaf in leaves(c)}
    values: list[Value] = []
    lines: list[str] = []

    def value(slot: int) -> Value:
        return Value(acc, DType.F32, vector=True) if slot < 0 else values[slot]

    for slot, step in enumerate(c.body):
        name = f"{prefix}{slot}"
        if slot in by_slot:
            lines.append(f"const vf {name} = {load(by_slot[slot])};")
            values.append(Value(name, DType.F32, vector=True))
        elif step.source is not None:
            number = is_scalar(c, step)
            assert number is not None
            values.append(Value(literal(number, step.dtype), step.dtype, constant=number))
        else:
            text, vector = elementwise(step.prim, [value(s) for s in step.args], step.dtype)
            found = Value(name, step.dtype, vector)
            lines.append(f"const {found.c_type} {name} = {text};")
            values.append(found)
    results = []
    for slot, _ in c.outputs:
        v = value(slot)
        results.append(v.name if v.vector else f"splat({v.name})")
    return lines, results
