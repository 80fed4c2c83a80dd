"""Mutants of generated kernels through the tuner's own verification: how many wrong kernels would be timed?

    python -m benchmarks.mutants [--device cpu|cuda] [--count 250] [--seed 0] [--jobs J] [--only OPERATOR] [--dry]
                                 [--part K/N] [--journal FILE] [--finish]

Kernels come from the cases of the tests of the generators, by all templates. A mutant is a kernel with one change in
its own text (not in the headers) by one of `OPERATORS`. Those that do not compile, or that the compiler refuses for
their resources, are none. Each of the others is a candidate of a trial of `weft.tune.tuner`, behind the kernel that it
was made of. It is

    caught       its verdict is not OK, and was there before the kernel would have been timed
    equivalent   it means the same. Its machine code is that of the kernel, at once or once the compiler knows the
                 launch; or, where a barrier or a wait is missing, its emulation on the host gives the same numbers
                 though copies arrive as late as the waits allow and the first or the last warp goes as far ahead of the
                 others as it can; or `EQUIVALENT` has the reason
    survived     neither

The file of results has a line for each that was not caught, and a summary; `total` counts what is not equivalent.
`--dry` only compiles. What may hang comes last. `--journal` keeps every outcome at once: a run that was cut short, or
the other parts of `--part`, go on from there, on another machine as well. `--finish` judges nothing: it looks for the
reasons of those that passed and writes the record, as a run without parts does in its end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import queue
import random
import re
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from tests.generate.cpp.test_groups import NAMED
from tests.generate.cuda import test_templates
from tests.generate.cuda.attention import test_attention, test_attention_linear
from tests.generate.cuda.conv import test_depthwise_wgrad, test_halo, test_pooled, test_separable
from tests.generate.cuda.gemm import test_bytes, test_grouped, test_normed, test_swap, test_tma
from tests.generate.cuda.products import convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, small_integers
from tests.generate.cuda.tensor_emulator import run as emulated

import weft.generate
from benchmarks.harness.record import RESULTS, environment
from weft.device.any import DeviceFacts
from weft.device.cuda.facts import gpu_facts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.facts import CpuFacts, cpu_facts
from weft.device.toolchain import HostCompiler, find_compiler
from weft.generate.cpp import CppGenerator
from weft.generate.cuda import CudaGenerator
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.text import parse_graph, print_graph
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, KernelSource, Schedule
from weft.options import Options
from weft.tune.cuda_trial import DELAYED
from weft.tune.site import Built
from weft.tune.sites import site_of
from weft.tune.store import Database
from weft.tune.timing import TimingPolicy
from weft.tune.tuner import ProblemTrial, Tuner

Source = KernelSource | CudaSource
QUICK = TimingPolicy(sample_us=20.0, screening_rounds=1, min_rounds=1, max_rounds=1, trial_s=0.01)
PATIENCE_S = 8.0
"""Of a worker on a CPU with one kernel; on a GPU it has a limit of its own."""
SPARE = 1.5
"""Mutants that are made for each that is wanted: some do not compile, some are equivalent."""


# --- operators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A part of one line and what stands in its place."""

    start: int
    end: int
    new: str
    wider: bool = False
    """A bound that lets more through."""


Operator = Callable[[str], Iterator[Change]]
_CONDITION = re.compile(r"\bfor \(|\bif \(|\bwhile \(|\?|&&")
_NAME = r"[a-zA-Z_]\w*(?:\[[\w\s*+]*\])?"


def _subs(pattern: str, *news: str) -> Operator:
    """Every match of a pattern, replaced in each of some ways."""
    found = re.compile(pattern)

    def changes(line: str) -> Iterator[Change]:
        for m in found.finditer(line):
            for new in news:
                made = m.expand(new)
                if made != m.group():
                    yield Change(m.start(), m.end(), made)

    return changes


def _all(*operators: Operator) -> Operator:
    def changes(line: str) -> Iterator[Change]:
        for one in operators:
            yield from one(line)

    return changes


_BOUND = re.compile(r"(?<![<\w])<=? (\d+)(?=u?\b)")
_CLAMP = re.compile(r"(?P<of>(?:\([\w +]+\)|\b\w+)(?: [*+] \w+)*) < (?P<n>\d+)(?P<u>u?) \? (?P=of) : (?P<m>\d+)u?\b")
"""The lesser of a value and a number: one bound, written twice."""


def _other_bounds(line: str, others: Callable[[int], Sequence[int]]) -> Iterator[Change]:
    if not _CONDITION.search(line):
        return
    clamps = list(_CLAMP.finditer(line))
    for m in clamps:
        for n in others(int(m["n"])):
            least = int(m["m"]) + n - int(m["n"])
            if least >= 0 and least < int(m["m"]):  # above, it may only read what it does not use
                yield Change(m.start(), m.end(), f"{m['of']} < {n}{m['u']} ? {m['of']} : {least}{m['u']}")
    for m in _BOUND.finditer(line):
        if any(c.start() <= m.start() < c.end() for c in clamps):
            continue
        for n in others(int(m[1])):
            yield Change(m.start(1), m.end(1), str(n), n > int(m[1]))


def _bounds(line: str) -> Iterator[Change]:
    """`x < 7` with 6 or 8 in its place."""
    yield from _other_bounds(line, lambda n: [k for k in (n - 1, n + 1) if k >= 0])


def _tails(line: str) -> Iterator[Change]:
    """`x < 130` with 128 in its place: the elements behind the last whole vector are left out."""
    yield from _other_bounds(line, lambda n: [n // u * u for u in (16, 8, 4) if n > u and n % u][:1])


def _axes(line: str) -> Iterator[Change]:
    """`i * 24 + j * 6` with the strides exchanged; `blockIdx.x` with another axis."""
    for m in re.finditer(rf"({_NAME}) \* (\d+)(u?L? \+ )({_NAME}) \* (\d+)", line):
        if m[2] != m[5] and "0" not in (m[2], m[5]):  # a stride of 0: there is one place along that axis
            yield Change(m.start(), m.end(), f"{m[1]} * {m[5]}{m[3]}{m[4]} * {m[2]}")
    for m in re.finditer(
        r"\b(i\d+|j\d+|tm|tn|row|col)\b( [*/%] \d+u?)( \+ )\b(i\d+|j\d+|tm|tn|row|col)\b(?! ?[*/%\w\[])", line
    ):
        yield Change(m.start(), m.end(), f"{m[4]}{m[2]}{m[3]}{m[1]}")


def _constants(line: str) -> Iterator[Change]:
    """Another floating constant, or another stride."""
    for m in re.finditer(r"(?<![\w.])(\d+\.\d+(?:e[+-]?\d+)?)(?=f\b)", line):
        value = float(m[1])
        yield Change(m.start(1), m.end(1), repr(value * 1.25) if value else "1.0")
    for m in re.finditer(rf"(?<={' * '.replace('*', '[*]')})(\d+)(?=u?\b)(?!\.)", line):
        if int(m[1]) > 1:
            yield Change(m.start(1), m.end(1), str(int(m[1]) + 1))


def _narrowed(line: str) -> Iterator[Change]:
    """A value that passes through the next narrower type."""
    for m in re.finditer(r"^(?P<head>\s*const w_f32v? e\w+ = )(?P<value>.*)(?=;$)", line):
        if "?" not in m["value"]:
            yield Change(m.start("value"), m.end("value"), f"m_narrow({m['value']})")
    for m in re.finditer(r"^(?P<sum>c\d\w*) \+= (?P<value>[^;]*)(?=;)", line):
        yield Change(m.start(), m.end(), f"{m['sum']} = m_narrow({m['sum']} + {m['value']})")
    for m in re.finditer(r"(?<== )(acc\[[^;=]*\])(?=;)", line):
        yield Change(m.start(), m.end(), f"m_narrow({m[1]})")


OPERATORS: Mapping[str, Operator] = {
    "off-by-one bound": _bounds,
    "wrong axis": _axes,
    "dropped term": _all(
        _subs(rf"w_plus\(({_NAME}), ({_NAME})\)", r"\1", r"\2"),
        _subs(rf"\(({_NAME}) \+ ({_NAME})\)", r"(\1)", r"(\2)"),
        _subs(rf" \+ {_NAME} \* \d+(?=[ )\];,])", ""),
        _subs(rf"({_NAME}) \+= [^;{{}}()]*(?=;)", r"(void)\1"),
    ),
    "swapped operand": _all(
        _subs(rf"\(({_NAME}) ([-/]) ({_NAME})\)", r"(\3 \2 \1)"),
        _subs(rf"\(({_NAME}) (-) (w_splat_f32\({_NAME}\))\)", r"(\3 \2 \1)"),
        _subs(rf"\? ({_NAME}) : ({_NAME})(?=[;,) ])", r"? \2 : \1"),
        _subs(rf"w_select\(([^,()]*(?:\([^()]*\))?), ({_NAME}), ({_NAME})\)", r"w_select(\1, \3, \2)"),
    ),
    "lost tail": _tails,
    "wrong constant": _constants,
    "wrong dtype": _narrowed,
    "missing barrier": _subs(
        r"__syncthreads\(\);|\brole\.sync\(\);|\bw_sync\(\);"
        r"|w_cluster_sync\(\);|w_cluster_wait\(\);|#pragma omp barrier",
        ";",
    ),
    # not the wait for an empty slot: in problems of this size few slots are used twice
    "missing wait": _subs(
        r"\bw_wait\(\);|\brole\.pdl_wait\(\);"
        r"|w_bar_wait\((?![^;]*EMPTY)[^;]*\);|w_group_wait<\d+>\(\);|w_arrived<\d+>\(\);",
        ";",
    ),
}
LAST = ("missing barrier", "missing wait")
"""What may hang a kernel."""

NARROW_CPP = """
static inline float m_narrow(float x) {{ return {scalar}; }}
static inline w_f32v m_narrow(w_f32v x) {{
  for (unsigned i = 0; i < sizeof(x) / 4; ++i) x[i] = m_narrow((float)x[i]);
  return x;
}}
"""
NARROW_CUDA = """
static __device__ __forceinline__ float m_narrow(float x) {{ {body} }}
"""
_MASKED = "unsigned b; __builtin_memcpy(&b, &x, 4); b &= 0xFFFFE000u; __builtin_memcpy(&x, &b, 4); return x;"


def narrowing(problem: Problem, source: Source) -> str:
    """The function that `wrong dtype` puts into a text; empty where the problem has no output that it is for.

    What is stored in f32 keeps the 10 bits of a TF32; what is stored in 16 bits, where the gate allows the rounding of
    every step, becomes a whole number.
    """
    floats = {d for d in (problem.graph.type_of(i).dtype for i in problem.graph.outputs) if d.is_float}
    if DType.F64 in floats or not floats:
        return ""
    whole = DType.F32 not in floats
    if isinstance(source, CudaSource):
        kept = "(float)(int)x" if whole else "__uint_as_float(__float_as_uint(x) & 0xFFFFE000u)"
        return NARROW_CUDA.format(body=f"return {kept};")
    return NARROW_CPP.format(scalar="(float)(int)x" if whole else f"[](float x) {{ {_MASKED} }}(x)")


@dataclass(frozen=True)
class Equivalent:
    """Mutants that mean the same though their machine code differs."""

    operator: str
    """Empty: any."""
    holds: Callable[[Mutant], bool]
    reason: str


def _only_squared(m: Mutant) -> bool:
    """Is the value that the line defines read as a factor of its own square alone?"""
    name = re.match(r"const (?:w_f\d\dv?|float) ([ev]\w+) = ", m.before)
    if name is None:
        return False
    lines = m.origin.source.text.split("\n")
    others = [x for x in lines if re.search(rf"\b{name[1]}\b", x) and x.strip() != m.before]
    return bool(others) and all(f"({name[1]} * {name[1]})" in x and x.count(name[1]) == 2 for x in others)


def _only_whether_zero(m: Mutant) -> bool:
    """Is it a difference of which a product only asks whether it is zero: whether to begin a sum or to go on?"""
    return bool(re.search(r"\(st - first\) \| (?:u \| )?q\)", m.before)) and m.after == m.before.replace(
        "(st - first)", "(first - st)"
    )


def _low_bits(m: Mutant) -> bool:
    """Does an address of an operand differ in bits that its descriptor, which counts in 16 bytes, does not hold?"""
    was, now = (re.search(r"\(u32\)\(q \* (\d+)\), 16, 1024", x) for x in (m.before, m.after))
    lines, at = _place(m)
    loop = next((x for x in reversed(lines[:at]) if "int q = 0; q < " in x), "")
    most = re.search(r"q < (\d+)", loop)
    if was is None or now is None or most is None:
        return False
    # all else in the address is a multiple of 128 bytes
    same = all(q * int(was[1]) // 16 == q * int(now[1]) // 16 for q in range(int(most[1])))
    return same and m.after == m.before.replace(was[0], now[0], 1)


def _set_again(m: Mutant) -> bool:
    """Does a thread write one element behind its table, which it then writes again as the first of the next?"""
    table = r"for \(int i = t; i < (\d+); i \+= (\d+)\) \(\(float\*\)\(sm \+ TABLES\)\)\[(\d+) \+ i\] = "
    lines, at = _place(m)
    loop, behind = re.match(table, m.before), re.match(table, lines[at + 1].strip())
    if loop is None or behind is None or f"i < {int(loop[1]) + 1};" not in m.after:
        return False
    same = loop[1] == behind[1] and loop[2] == behind[2] and int(loop[1]) % int(loop[2]) == 0
    return same and int(behind[3]) == int(loop[3]) + int(loop[1])


def _no_second_group(m: Mutant) -> bool:
    """Is it a multiple of the number of the warpgroup, of which one alone computes?"""
    changed = re.search(r"\(group \* (\d+) \* ", m.before)
    lines, at = _place(m)
    alone = any(re.match(r"if \(warp >= 4\) \{", x) for x in lines[:at])
    return alone and changed is not None and m.after == m.before.replace(changed[0], _next(changed[0], changed[1]), 1)


def _next(text: str, number: str) -> str:
    return text.replace(number, str(int(number) + 1))


def _never_so_late(m: Mutant) -> bool:
    """Is it when to wait for a slot that is used twice, in a block that uses none twice?"""
    limit = re.match(r"if \(it >= \(last - first < (\d+) \? \(u32\)\(last - first\) : \1u\)\) \{", m.before)
    lines, at = _place(m)
    tile = next((x for x in reversed(lines[:at]) if x.startswith("for (int tile = ")), "")
    depth = next((x for x in reversed(lines[:at]) if x.startswith("const int first = 0, last = ")), "")
    once = re.match(r"for \(int tile = \w+; tile < (\d+); tile \+= \1u\)", tile)
    return limit is not None and once is not None and int(re.findall(r"\d+", depth)[1]) <= int(limit[1])


def _never_that_thread(m: Mutant) -> bool:
    """Is the last element, which is left out, another one's: no thread has that number here?"""
    bound = re.match(r"if \((t\d+_) < (\d+)u\) \{", m.before)
    launches = m.source.launches if isinstance(m.source, CudaSource) else ()
    if bound is None or len(launches) != 1 or m.after != f"if ({bound[1]} < {int(bound[2]) - 1}u) {{":
        return False
    lines, _ = _place(m)
    text = "\n".join(lines)
    start = re.search(rf"const w_index {bound[1]} = t \+ (\d+)u;", text)
    t = re.search(r"const w_index t = blockIdx\.x \* \(w_index\)(\d+) \+ threadIdx\.x;", text)
    if start is None or t is None:
        return False
    place = (int(bound[2]) - 1) % int(t[1]) - int(start[1])
    return not 0 <= place < launches[0].block[0]


def _window_ends_before(m: Mutant) -> bool:
    """Is it the end of an axis that no window reaches?"""
    ends = re.findall(r"\[i\] \+ \(?d\.y[^<]*?\)+ < (\d+)u", m.before)
    other = re.findall(r"\[i\] \+ \(?d\.y[^<]*?\)+ < (\d+)u", m.after)
    changed = [(x, y) for x, y in zip(ends, other, strict=False) if x != y]
    if len(changed) != 1 or int(changed[0][1]) != int(changed[0][0]) + 1:
        return False
    for node in m.origin.problem.graph.nodes:
        if isinstance(node.attrs, ConvAttrs) and not node.attrs.transposed:
            x, w = (m.origin.problem.graph.type_of(i).shape for i in node.inputs[:2])
            a = node.attrs
            axis = ends.index(changed[0][0])
            last = (node.type.shape[2 + axis] - 1) * a.strides[axis] - a.pads_lo[axis]
            return last + (w[2 + axis] - 1) * a.dilations[axis] < x[2 + axis] == int(changed[0][0])
    return False


def _same_in_table(m: Mutant) -> bool:
    """Does the table end with what stands for whatever lies behind it?"""
    read = re.search(r"(\w+) < (\d+) \? (\w+)\[\1\] : (-?\d+);", m.before)
    if read is None or f"{read[1]} < {int(read[2]) - 1} ?" not in m.after:
        return False
    table = re.search(rf"\b{read[3]}\[\] = \{{([-\d,]+)\}};", m.origin.source.text)
    numbers = table[1].split(",") if table else []
    return len(numbers) == int(read[2]) and numbers[-1] == read[4]


def _sums_not_stored(m: Mutant) -> bool:
    """Is it the row that a thread reads for sums which are not stored, as it lies behind the last?"""
    row = re.search(r"const int r = (t[pe]) \+ i \* \d+ < (\d+) \? ", m.before)
    return row is not None and f"const int r = {row[1]} < {row[2]} ? " in m.after


def _same_parts(m: Mutant) -> bool:
    """Do threads read behind the barrier what they wrote themselves: the same part of the same rows on both sides?"""
    lines, at = _place(m)
    parts = re.compile(r"for \(long t\d+ = (\d+) \* tid / nt; t\d+ < \1 \* \(tid \+ 1\) / nt;")
    before = [f[1] for x in lines[:at] if (f := parts.search(x))]
    behind = [f[1] for x in lines[at:] if (f := parts.search(x))]
    return bool(before) and bool(behind) and before[-1] == behind[0]


def _place(m: Mutant) -> tuple[list[str], int]:
    """The lines of the kernel, and which of them is changed."""
    return m.origin.source.text.split("\n"), m.number


def _first_of_rest(m: Mutant) -> bool:
    """Is the sum that is dropped still zero: the rest of a row that is shorter than a vector, in no loop of its own?"""
    sum_ = re.match(r"(rv\d+) = w_select\((w_first\(n\d+\)), w_plus\(\1, (e\d+)\), \1\);", m.before)
    if sum_ is None or m.after != f"{sum_[1]} = w_select({sum_[2]}, {sum_[3]}, {sum_[1]});":
        return False
    lines, at = _place(m)
    written = [k for k in range(at) if re.match(rf"\s*(w_f32v )?{sum_[1]} = ", lines[k])]
    if not written or "w_splat_f32(0.0f)" not in lines[written[-1]]:
        return False
    return not any("for (" in x or "while (" in x for x in lines[written[-1] : at])


def _first_of_one(m: Mutant) -> bool:
    """Is the sum that is dropped still zero: the first of a loop that runs once?"""
    sum_ = re.match(r"(rv\d+) = w_plus\(\1, e\d+\);", m.before)
    lines, at = _place(m)
    loop = next((x for x in reversed(lines[:at]) if "for (" in x), "")
    once = re.search(r"for \(; x\d+ \+ (\d+) <= (\d+); x\d+ \+= \1\)", loop)
    if sum_ is None or once is None or not int(once[1]) <= int(once[2]) < 2 * int(once[1]):
        return False
    writes = [x for x in lines[:at] if re.match(rf"\s*(w_f32v )?{sum_[1]} = ", x)]
    return len(writes) == 1 and "w_splat_f32(0.0f)" in writes[0] and m.after.startswith(f"{sum_[1]} = e")


def _never_run(m: Mutant) -> bool:
    """Does the line stand in a loop over whole vectors that no part of the work is long enough for?"""
    lines, at = _place(m)
    steps = re.compile(r"for \(; (x\d+) \+ (\d+) <= (b\d+); \1 \+= \2\)")
    around = next((k for k in range(at, 0, -1) if steps.search(lines[k])), 0)
    loop = steps.search(lines[around])
    if loop is None:
        return False
    start = next(k for k in range(around, 0, -1) if f"long {loop[1]} = " in lines[k])
    widths = [int(f[2]) for k in range(start, around + 1) if (f := steps.search(lines[k])) and f[1] == loop[1]]
    parts = re.search(rf"{loop[3]} = w_least\(b\d+ \+ (\d+), (\d+)\)", "\n".join(lines[:around]))
    if parts is None:
        return False
    size, whole = int(parts[1]), int(parts[2])
    rests = [min(size, whole - k) for k in range(0, whole, size)]
    for width in widths[:-1]:
        rests = [r % width for r in rests]
    depth = 0
    for k in range(around, at):  # still inside?
        depth += lines[k].count("{") - lines[k].count("}")
        if depth <= 0:
            return False
    return all(r < widths[-1] for r in rests)


def _written_again(m: Mutant) -> bool:
    """Is the one element more at the end of a border written once more by the piece behind it?"""
    loop = re.match(r"for \(; (x\d+) < (\d+); \+\+\1\) \{", m.before)
    if loop is None or f"{loop[1]} < {int(loop[2]) + 1};" not in m.after:
        return False
    lines, at = _place(m)
    first = re.search(r"w_st\((out\d+) \+ ", "\n".join(lines[at : at + 9]))
    behind = "\n".join(lines[at + 9 : at + 30])
    return first is not None and re.search(rf"w_stv?\({first[1]} \+ .* \+ {loop[2]}\b", behind) is not None


def _shift(m: Mutant) -> bool:
    """Is the value read for the maximum of a softmax alone, which cancels?"""
    name = re.match(r"const w_f32v? (e\w+) = ", m.before)
    if name is None or not m.origin.name.startswith("softmax"):
        return False
    others = [x for x in m.origin.source.text.split("\n") if re.search(rf"\b{name[1]}\b", x) and x.strip() != m.before]
    return bool(others) and all(re.search(rf"= w_max\(\w+, {name[1]}\);", x) for x in others)


def _around_again(m: Mutant) -> bool:
    """Is the tile behind the last the first once more, as its number is taken modulo every size?"""
    sizes = re.match(r"for \(i64 t = 0; t < (\d+); \+\+t\) \{ i64 q = t;", m.before)
    more = re.match(r"for \(i64 t = 0; t < (\d+); \+\+t\) \{ i64 q = t;", m.after)
    if sizes is None or more is None or int(more[1]) != int(sizes[1]) + 1:
        return False
    lines, at = _place(m)
    digits = [re.findall(r"q % (\d+)", x) for x in lines[at : at + 12]]
    return math.prod(int(d) for found in digits for d in found) == int(sizes[1])


def _beside_the_image(m: Mutant) -> bool:
    """Does the line belong to a row of the input that lies beside the image in every tile of its height?"""
    lines, at = _place(m)
    start = next((k for k in range(at, 0, -1) if re.match(r"(static|extern) .*\{$", lines[k])), 0)
    asked = re.compile(r"if \(\(unsigned long\)\(h \+ (\d+)\) < (\d+)ul\) \{")
    around = next((k for k in range(at, start, -1) if asked.match(lines[k])), 0)
    inside = sum(x.count("{") - x.count("}") for x in lines[around:at]) > 0
    text = "\n".join(lines)
    step = re.search(r"const i64 h = r \* (\d+) - (\d+);", text)
    if not start or not around or not inside or step is None:
        return False
    row, rows = (int(x) for x in asked.match(lines[around]).groups())  # type: ignore[union-attr]
    name = re.search(r" void (tile_\w+\()", lines[start])
    if name is None:
        return False
    call, tiles = name[1], set[int]()
    for tall, others, last in re.findall(r"if \(r \+ 1 < (\d+)\) \{(.*?)\} else \{(.*?)\}", text):
        tiles |= set(range(int(tall) - 1)) if call in others else set()
        tiles |= {int(tall) - 1} if call in last else set()
    return bool(tiles) and all(not 0 <= r * int(step[1]) - int(step[2]) + row < rows for r in tiles)


def _one_image(m: Mutant) -> bool:
    """Is it a multiple of the number of the image, of which there is one?"""
    changed = re.search(r"\(img \* (\d+) \+ ", m.before)
    if changed is None or m.after != m.before.replace(changed[0], _next(changed[0], changed[1]), 1):
        return False
    graph = m.origin.problem.graph
    convolutions = [n for n in graph.nodes if isinstance(n.attrs, ConvAttrs)]
    return bool(convolutions) and all(n.type.shape[0] == 1 for n in convolutions)


def _arrives_by_ending(m: Mutant) -> bool:
    """Is it the last cluster barrier of a warp that has nothing else to do? A thread that ends has arrived there."""
    lines, at = _place(m)
    last = m.before.endswith("w_cluster_sync(); w_cluster_sync();") and m.after.endswith("w_cluster_sync(); ;")
    depth = 0
    for line in lines[at + 1 :]:
        if depth == 0 and line.startswith("} else {"):
            depth = 1  # what the other warps do
        elif depth:
            depth += line.count("{") - line.count("}")
        else:
            return last and line.strip() == "}"
    return False


def _largest_again(m: Mutant) -> bool:
    """Does the maximum take the last element once more, which stands for all behind it?"""
    taken = re.match(r"if \((\w+)_ < (\d+)u\) (\w+) = w_max\(\3, \w+(\[\d+\])?\);", m.before)
    if taken is None or m.after != m.before.replace(f"{taken[2]}u", f"{int(taken[2]) + 1}u", 1):
        return False
    clamped = f"const w_index {taken[1]} = {taken[1]}_ < {taken[2]}u ? {taken[1]}_ : {int(taken[2]) - 1}u;"
    lines, at = _place(m)
    return any(x.strip() == clamped for x in lines[max(0, at - 12) : at])


def _asked_again(m: Mutant) -> bool:
    """Is the one row more, whose number is read off the loop's, refused by the next question?"""
    loop = re.match(r"for \(int x = t; x < (\d+); x \+= \d+\) \{ const int r = x / (\d+),", m.before)
    lines, at = _place(m)
    asked = re.match(r"if \(r < (\d+) && ", lines[at + 1].strip())
    if loop is None or asked is None or f"x < {int(loop[1]) + 1};" not in m.after:
        return False
    return int(loop[1]) // int(loop[2]) >= int(asked[1])


def _never_below(m: Mutant) -> bool:
    """Is it the end of an axis that no pixel under this weight of the window reaches?"""
    for was, now in zip(
        re.finditer(r"\(u32\)\((\w+) \+ (\d+)\) < (\d+)u", m.before),
        re.finditer(r"\(u32\)\((\w+) \+ (\d+)\) < (\d+)u", m.after),
        strict=True,
    ):
        if was[0] == now[0]:
            continue
        start = re.search(rf"const int {was[1]} = m(?: / \d+)? % (\d+) \* (\d+) - (\d+);", m.origin.source.text)
        if start is None or int(now[3]) != int(was[3]) + 1:
            return False
        count, stride, pad = (int(x) for x in start.groups())
        return (count - 1) * stride - pad + int(was[2]) < int(was[3])
    return False


def _row_zero(m: Mutant) -> bool:
    """Is it a multiple of a number of rows of which there is one: what is left of a division by more than it?"""
    changed = re.search(r" y \* (\d+)u", m.before)
    lines, at = _place(m)
    near = " ".join(lines[max(0, at - 2) : at])
    row = re.search(r"y = p / (\d+)u, .*if \(p >= (\d+)u \|\|", near)
    if changed is None or row is None or int(row[2]) > int(row[1]):
        return False
    return m.after == m.before.replace(changed[0], _next(changed[0], changed[1]), 1)


def _first_of_once(m: Mutant) -> bool:
    """Is the sum that is dropped still zero: the only term of a thread?"""
    sum_ = re.match(r"(s\d+) = w_plus\(\1, (e\d+|q\d+\[\d+\])\);", m.before)
    lines, at = _place(m)
    loop = next((x for x in reversed(lines[:at]) if "for (" in x), "")
    if sum_ is None or "w_index u = 0u; u < 1u; ++u" not in loop or m.after != f"{sum_[1]} = {sum_[2]};":
        return False
    writes = [x.strip() for x in lines[:at] if re.match(rf"\s*(w_f\d\d )?{sum_[1]} = ", x)]
    return len(writes) == 1 and writes[0].endswith(" = 0.0f;")


def _another_shift(m: Mutant) -> bool:
    """Is it which element is read to shift a variance by, which cancels? Any of the row may be."""
    lines, at = _place(m)
    behind = [x.strip() for x in lines[at : at + 12]]
    read = re.match(r"const w_index (\w+) = \1_ < (\d+)u \? \1_ : \d+u;", m.before)
    kept = [f[1] for x in behind if (f := re.match(r"(s\d+) = q\d+\[\d+\];", x))]
    end = next((k for k, x in enumerate(behind) if x == "}"), 0)
    if read is None or not kept or not end or not all(re.match(r"s\d+ = q", x) for x in behind[end - len(kept) : end]):
        return False
    uses = [x for x in lines[at + end :] if any(re.search(rf"\b{k}\b", x) for k in kept)]
    return bool(uses) and all("= w_middle(" in x for x in uses)


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent("swapped operand", _only_whether_zero, "a product asks of the difference only whether it is zero"),
    Equivalent("wrong constant", _low_bits, "the descriptor of the operand does not hold the bits that differ"),
    Equivalent("off-by-one bound", _set_again, "its thread writes the element again, as the next table's first"),
    Equivalent("wrong constant", _no_second_group, "it is a multiple of the number of the warpgroup, which is 0"),
    Equivalent("swapped operand", _never_so_late, "a block uses no slot twice, so it asks for none"),
    Equivalent("off-by-one bound", _never_that_thread, "no thread has the number of the element that is left out"),
    Equivalent("off-by-one bound", _window_ends_before, "no window reaches the end of that axis"),
    Equivalent("off-by-one bound", _same_in_table, "the table ends with what stands for all behind it"),
    Equivalent("dropped term", _sums_not_stored, "the sums of the row that is read instead are never stored"),
    Equivalent("dropped term", _first_of_one, "the sum is zero there: the first term of a loop that runs once"),
    Equivalent("dropped term", _first_of_rest, "the sum is zero there: a row shorter than a vector has one part"),
    Equivalent("wrong dtype", _shift, "the value is read for the maximum of a softmax alone, a shift that cancels"),
    Equivalent("off-by-one bound", _written_again, "the element more is written again by the piece behind the border"),
    Equivalent("", _never_run, "no part of the work is long enough for the loop that the line stands in"),
    Equivalent("", _beside_the_image, "the line is for a row of the input that lies beside the image in all its tiles"),
    Equivalent("off-by-one bound", _around_again, "the tile behind the last is the first once more, computed twice"),
    Equivalent("swapped operand", _only_squared, "the difference is only squared"),
    Equivalent("wrong constant", _one_image, "it is a multiple of the number of the image, which is 0"),
    Equivalent("missing barrier", _arrives_by_ending, "threads that end have arrived at their cluster's barrier"),
    Equivalent("off-by-one bound", _largest_again, "the maximum takes its last element once more"),
    Equivalent("off-by-one bound", _asked_again, "the row more is refused by the question behind it"),
    Equivalent("off-by-one bound", _never_below, "no pixel under that weight reaches the end of the axis"),
    Equivalent("wrong constant", _row_zero, "it is a multiple of the number of the row, which is 0"),
    Equivalent("dropped term", _first_of_once, "the sum is zero there: a thread adds once"),
    Equivalent("lost tail", _another_shift, "a variance is shifted by another element of the row, which cancels"),
    Equivalent("missing barrier", _same_parts, "each thread reads behind the barrier what it wrote itself"),
)


# --- kernels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """A kernel to make mutants of."""

    name: str
    problem: Problem
    source: Source


def _schedules(found: Sequence[Schedule] | Declined, most: int, chance: random.Random) -> list[Schedule]:
    """One of each template first, then others by chance."""
    if isinstance(found, Declined):
        return []
    first = {str(dict(s.params).get("template")): s for s in reversed(found)}
    rest = [s for s in found if s not in first.values()]
    return [*first.values(), *chance.sample(rest, min(len(rest), most))][:most]


def _case(case: object) -> Problem:
    found = case[0] if isinstance(case, tuple) else case
    assert isinstance(found, Problem)
    return found


UNJUDGED = ("softmax(1, 70001)", "softmax(5, 1)", "empty")
"""Sums so long that f32 leaves few digits; rows of one element, whose softmax is 1; no elements at all."""


def named() -> dict[str, Problem]:
    """Groups in f32 and f64. In 16 bits the gate allows what 16-bit sums would do, and hides a lost term among many."""
    found = {name: made() for name, made in NAMED.items() if not name.startswith(UNJUDGED)}
    for name, problem in list(found.items())[::2]:
        text = re.sub(r"(?<=x)f32\b|(?<= )f32\b|(?<=dtype=)f32\b", "f64", print_graph(problem.graph))
        graph = parse_graph(text, problem.graph.constants)
        found[f"{name} f64"] = replace(problem, graph=graph)
    return found


def problems_for_cpu() -> dict[str, Problem]:
    """Groups, products and convolutions."""
    found = named()
    f32, row = DType.F32, Format.ROW
    more = {"fin": row, "fout": row, "dtype": f32}
    found |= {
        "3x3": convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True, dtype=f32),
        "3x3 row-major": convolution(1, 8, 14, 13, 16, 3, 1, 1, **more),  # type: ignore[arg-type]
        "1x1": convolution(2, 24, 9, 9, 40, 1, dtype=f32),
        "1x1 row-major": convolution(2, 24, 8, 8, 24, 1, **more),  # type: ignore[arg-type]
        "7x7 strided": convolution(1, 3, 19, 17, 24, 7, 2, 3, **more),  # type: ignore[arg-type]
        "depthwise": convolution(2, 24, 9, 11, 24, 3, 2, 1, groups=24, dtype=f32),
        "groups": convolution(1, 32, 9, 9, 48, 3, 1, 1, 1, 4, dtype=f32),
        "wide 3x3": convolution(1, 32, 24, 24, 32, 3, 1, 1, **more),  # type: ignore[arg-type]
        "linear": product((50, 40), (72, 40), turn_right=True, dtype=f32),
        "linear, columns": product((33, 40), (40, 19), dtype=f32),
        "batched": product((3, 50, 44), (3, 44, 20), weight=False, dtype=f32),
        "few rows": product((2, 264), (264, 10), dtype=f32),
    }
    return found


def problems_for_gpu() -> dict[str, Problem]:
    """Groups, and the cases of every template."""
    found = named()
    cases: dict[str, Mapping[str, object]] = {
        "": test_templates.CASES, "tma ": test_tma.CASES, "attention ": test_attention.CASES,
        "linear attention ": test_attention_linear.CASES, "separable ": test_separable.CASES,
        "pooled ": test_pooled.CASES, "bytes ": test_bytes.CASES, "normed ": test_normed.NORMED,
        "grouped ": test_grouped.CASES, "halo ": test_halo.CASES, "swapped ": test_swap.CASES,
        "depthwise gradient ": test_depthwise_wgrad.CASES,
    }  # fmt: skip
    for family, some in cases.items():
        found |= {f"{family}{name}": _case(case) for name, case in list(some.items())[:: max(1, len(some) // 10)]}
    return found


def origins(device: str, facts: DeviceFacts, seed: int, most: int = 3) -> list[Origin]:
    """Kernels of all problems, several schedules of each."""
    chance = random.Random(seed)
    generator = CudaGenerator() if device == "cuda" else CppGenerator()
    found = []
    for name, problem in (problems_for_gpu() if device == "cuda" else problems_for_cpu()).items():
        problem = replace(problem, key=f"mutants {name}")
        for schedule in _schedules(generator.schedules(problem, facts), most, chance):  # type: ignore[arg-type]
            source = generator.emit(problem, schedule)
            if isinstance(source, KernelSource | CudaSource):
                found.append(Origin(name, problem, source))
    return found


# --- mutants ------------------------------------------------------------------------------------------------


@dataclass
class Mutant:
    """A kernel with one change, and what became of it."""

    origin: Origin
    operator: str
    number: int
    """Of the line, in the kernel's text."""
    before: str
    after: str
    source: Source
    outcome: str = ""
    note: str = ""
    path: str = field(default="", repr=False)


@cache
def header_lines() -> frozenset[str]:
    """What stands in the headers that texts begin with."""
    folder = Path(weft.generate.__file__).parent
    return frozenset(line for path in folder.rglob("*.h") for line in path.read_text().split("\n"))


_NO_SITE = re.compile(r"^\s*(//|#define|#if|typedef|INLINE|template|static __device__|W_FN)|asm|prefetch|w_hint")


def sites(origin: Origin, operator: str) -> Iterator[tuple[int, Change]]:
    """Where an operator applies: line and change.

    A bound is not widened where an unrolled loop counts registers, which has no meaning in C++, nor where weights are
    repacked, whose padding nobody reads.
    """
    narrow_only = packing = False
    for number, line in enumerate(origin.source.text.split("\n")):
        if "void " in line and line.rstrip().endswith("{"):
            packing = "_pack" in line
        if line in header_lines() or _NO_SITE.search(line):
            continue
        for change in OPERATORS[operator](line):
            if not (change.wider and (packing or narrow_only)):
                yield number, change
        narrow_only = line.strip().startswith(("#pragma unroll", "_Pragma"))


def mutant(origin: Origin, operator: str, number: int, change: Change, label: int) -> Mutant:
    """The kernel with the change."""
    lines = origin.source.text.split("\n")
    before = lines[number]
    lines[number] = after = before[: change.start] + change.new + before[change.end :]
    if "m_narrow" in change.new:
        first = next(
            k
            for k, line in enumerate(lines)
            if k and line not in header_lines() and line.strip() and not line.startswith("#")
        )
        lines.insert(first, narrowing(origin.problem, origin.source))
    schedule = Schedule(origin.source.schedule.generator, (*origin.source.schedule.params, ("mutant", label)))
    source = replace(origin.source, schedule=schedule, text="\n".join(lines))
    return Mutant(origin, operator, number, before.strip(), after.strip(), source)


def draw(kernels: Sequence[Origin], count: int, seed: int, only: str) -> list[Mutant]:
    """So many mutants, equally many of each operator where there are enough, of as many kernels as possible."""
    chance = random.Random(seed)
    waiting: dict[str, list[tuple[Origin, int, Change]]] = {}
    for operator in OPERATORS:
        if only and only != operator:
            continue
        by_kernel = []
        for origin in kernels:
            if operator == "wrong dtype" and not narrowing(origin.problem, origin.source):
                continue
            found = [(origin, number, change) for number, change in sites(origin, operator)]
            chance.shuffle(found)
            by_kernel.append(found)
        chance.shuffle(by_kernel)
        # the first of each kernel, then the second of each, ...
        deepest = max((len(x) for x in by_kernel), default=0)
        waiting[operator] = [x[k] for k in range(min(deepest, 60)) for x in by_kernel if k < len(x)][::-1]
    made: list[Mutant] = []
    while len(made) < count and any(waiting.values()):
        for operator, left in waiting.items():
            if left and len(made) < count:
                made.append(mutant(left[-1][0], operator, left[-1][1], left[-1][2], len(made)))
                left.pop()
    return made


def known_equivalent(m: Mutant) -> str:
    """The reason that the table has; empty: none."""
    for e in EQUIVALENT:
        if e.operator in ("", m.operator) and e.holds(m):
            return e.reason
    return ""


def code_of(path: str) -> str:
    """SHA-256 of what an object file executes and reads: the sections of an ELF file that hold code or constants."""
    data = Path(path).read_bytes()
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, start + size * k) for k in range(count)]
    texts = headers[names][4]
    digest = hashlib.sha256()
    for name, kind, _, _, at, length in headers:
        label = data[texts + name : data.index(b"\0", texts + name)].decode()
        if kind == 1 and label.startswith((".text", ".rodata", ".data", ".nv.constant", ".init", ".fini")):
            digest.update(label.encode() + data[at : at + length])
    return digest.hexdigest()


# --- running ------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What compiles and what judges."""

    device: str
    facts: DeviceFacts
    compiler: HostCompiler | Nvrtc
    options: Options
    jobs: int

    @classmethod
    def here(cls, device: str, folder: Path, jobs: int, *, dry: bool) -> Bench:
        """For this machine; SystemExit where it cannot be."""
        compiler = find_nvrtc() if device == "cuda" else find_compiler()
        if isinstance(compiler, Declined):
            sys.exit(f"benchmarks.mutants: no compiler ({compiler.reason})")
        threads = 1 if device == "cuda" else 2
        options = Options(device=device, cache_dir=folder, threads=threads, build_jobs=1, trial_timeout_s=PATIENCE_S)
        facts: DeviceFacts
        if device == "cuda":
            facts = profile("h200") if dry else gpu_facts(folder, calibrate=False)
            options = replace(options, trial_timeout_s=60.0)
        else:
            facts = replace(cpu_facts(folder, calibrate=False), threads=2)
        return cls(device, facts, compiler, options, jobs)

    def build(self, source: Source) -> str:
        """The object, or nothing: it does not compile, or takes too much."""
        found = site_of(self.options, self.facts, self.compiler, QUICK).build(source)
        return found.path if isinstance(found, Built) else ""

    def tuner(self) -> Tuner:
        """With a database of its own, so that nothing is looked up."""
        return Tuner(self.options, self.facts, Database.open(None), compiler=self.compiler, policy=QUICK)


def prepare(bench: Bench, drawn: Sequence[Mutant], count: int, journal: Journal) -> tuple[list[Mutant], list[Mutant]]:
    """Those that compile, up to `count`, and those whose machine code is that of their kernel; or as is known."""
    asked = [m for m in drawn if not journal.recall(m)]
    kernels = {id(m.origin): m.origin for m in asked}
    with ThreadPoolExecutor(bench.jobs) as pool:
        own = dict(zip(kernels, pool.map(lambda k: bench.build(k.source), kernels.values()), strict=True))
        paths = dict(zip((id(m) for m in asked), pool.map(lambda m: bench.build(m.source), asked), strict=True))
    different: list[Mutant] = []
    same: list[Mutant] = []
    for m in drawn:
        if id(m) in paths:
            m.path = paths[id(m)]
            if not m.path or not own[id(m.origin)]:
                continue  # none
            if code_of(m.path) == code_of(own[id(m.origin)]):
                m.outcome, m.note = "equivalent", "the machine code is the same"
                journal.keep(m, "")
        if m.outcome == "equivalent":
            same.append(m)
        elif len(different) < count:
            different.append(m)
    return different, same


def in_order(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those of one kernel together; what may hang comes last."""
    place = {id(m.origin): k for k, m in reversed(list(enumerate(mutants)))}
    return sorted(mutants, key=lambda m: (m.operator in LAST, place[id(m.origin)]))


def judge(m: Mutant, found: Sequence[Measurement]) -> str:
    """Set the outcome; a text says why the sound kernel was not found right."""
    verdicts = {x.schedule: x for x in found}
    measured = verdicts.get(m.source.schedule)
    own = verdicts.get(m.origin.source.schedule)
    if measured is None:
        m.outcome, m.note = "survived", "no verdict"
    elif measured.verdict is Verdict.OK or measured.verdict is Verdict.IMPOSSIBLE or "after timing" in measured.error:
        m.outcome, m.note = "survived", f"{measured.verdict.value}, error over limit {measured.rmse:.3g}"
    else:
        delayed = " with warps delayed" * measured.error.startswith(DELAYED)
        m.outcome, m.note = "caught", measured.verdict.value + delayed
    if own is None or own.verdict is not Verdict.OK:
        return "no verdict" if own is None else f"{own.verdict.value}: {own.error}"
    return ""


@dataclass
class Journal:
    """Outcomes as they come, one a line: what was judged is not judged again. Without a path it keeps nothing."""

    path: Path | None
    head: dict[str, object] = field(default_factory=dict)
    """What the first of its runs was made in."""
    known: dict[str, dict[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Read what is there; a line that was cut off counts as none."""
        if self.path is None or not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(text)
                if row.get("record") == "environment":
                    self.head = self.head or row
                    continue
                self.known[row["key"]] = {k: str(row[k]) for k in ("outcome", "note", "unsound")}

    def begin(self, head: dict[str, object]) -> None:
        """Say what outcomes are made in, where nothing says so yet."""
        if not self.head:
            self.head = head
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(head) + "\n")

    def recall(self, m: Mutant) -> bool:
        """Set the outcome that is known; False: none is."""
        row = self.known.get(key_of(m))
        if row is not None:
            m.outcome, m.note = row["outcome"], row["note"]
        return row is not None

    def keep(self, m: Mutant, unsound: str) -> None:
        """Add an outcome."""
        row = {"key": key_of(m), "outcome": m.outcome, "note": m.note, "unsound": unsound}
        with self._lock:
            self.known[row["key"]] = row
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(row | {"case": line(m)["case"]}) + "\n")


def key_of(m: Mutant) -> str:
    """The same for the same change of the same kernel anywhere."""
    return hashlib.sha256(f"{m.operator}\0{m.origin.source.sha256}\0{m.source.sha256}".encode()).hexdigest()


def run(bench: Bench, mutants: Sequence[Mutant], journal: Journal) -> None:
    """Outcomes of all."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for m in in_order(mutants):
        if not journal.recall(m):
            waiting.put(m)

    def work() -> None:
        with bench.tuner() as tuner:
            while True:
                try:
                    m = waiting.get_nowait()
                except queue.Empty:
                    return
                origin = m.origin
                kernels = [(s.schedule, s, None) for s in (origin.source, m.source)]
                # as the incumbent it is judged however slow it is
                trial = ProblemTrial(origin.problem, kernels, incumbent=m.source.schedule)
                said = judge(m, list(tuner.measure([trial])))
                journal.keep(m, said and f"{origin.name} {origin.source.schedule}: {said}")
                if m.outcome != "caught":
                    print(json.dumps(line(m)), flush=True)

    threads = [threading.Thread(target=work) for _ in range(max(1, bench.jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def explain(bench: Bench, survivors: Sequence[Mutant]) -> None:
    """Look for the reason why what survived means the same."""
    for m in survivors:
        if reason := known_equivalent(m):
            m.outcome, m.note = "equivalent", reason
        elif isinstance(m.source, CudaSource) and same_code_where_known(bench, m):
            m.outcome, m.note = "equivalent", "the machine code is the same where the compiler knows the launch"
        elif m.operator in LAST and (reason := needless(m)):
            m.outcome, m.note = "equivalent", reason
        print(json.dumps(line(m)), flush=True)


def same_code_where_known(bench: Bench, m: Mutant) -> bool:
    """Do both texts give the same code where the sizes of their launches are assumed in them?"""
    sources = [x for x in (m.origin.source, m.source) if isinstance(x, CudaSource)]
    paths = [bench.build(told(x)) for x in sources]
    return len(paths) == 2 and all(paths) and code_of(paths[0]) == code_of(paths[1])


Dim3 = tuple[int, int, int]
_ENTRY = re.compile(r"extern \"C\" __global__|W_KERNEL\(")


def told(source: CudaSource) -> CudaSource:
    """The text with what the launches say: sizes of grid and block of each entry, and where shared memory begins."""
    launches: dict[str, set[tuple[Dim3, Dim3]]] = {}
    for launch in (*source.launches, *source.pack):
        launches.setdefault(launch.entry, set()).add((launch.block, launch.grid))
    lines, sizes = [], None
    for line in source.text.split("\n"):
        if _ENTRY.match(line):
            asked = next((x for name, x in launches.items() if re.search(rf"\b{name}\b", line)), set())
            sizes = next(iter(asked)) if len(asked) == 1 else None
            if sizes is not None and line.endswith("{"):
                line += f" __builtin_assume({_within(*sizes)});"
        for axis, n in zip("xyz", sizes[1] if sizes else (), strict=False):
            line = line.replace(f"gridDim.{axis}", f"{n}u").replace(f"role.blocks_{axis}()", f"{n}u")
        lines.append(line)
    base = "const u32 sb = w_shared(sm);"
    text = "\n".join(lines).replace(base, f"{base} __builtin_assume((sb & 1023u) == 0u);")
    return replace(source, text=text)


def _within(block: Dim3, grid: Dim3) -> str:
    names = (("threadIdx", block), ("blockIdx", grid))
    return " && ".join(f"{name}.{axis} < {n}u" for name, of in names for axis, n in zip("xyz", of, strict=True))


def needless(m: Mutant) -> str:
    """Why a wait that is missing is not missed; empty: it may be. By emulation, for kernels of templates alone."""
    own = m.origin.source
    if not isinstance(m.source, CudaSource) or not isinstance(own, CudaSource):
        return ""
    mutated = renamed(m.source)
    inputs = small_integers(m.origin.problem)
    try:
        both = Emulated([own, mutated])
        want = emulated(both, m.origin.problem, own, inputs)
        for order, defer in ((1, True), (2, True), (1, False), (2, False)):
            try:
                got = emulated(both, m.origin.problem, mutated, inputs, defer=defer, order=order)
            except AssertionError as error:
                if defer or "are emulated late" not in str(error):
                    raise
                continue  # those cannot come early
            if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(got, want, strict=True)):
                return ""
    except AssertionError:  # it cannot be emulated, or breaks a rule of the machine
        return ""
    if not any(np.isfinite(x).any() and x.any() for x in want):
        return ""  # nothing would show
    return "emulated with copies as late as the waits allow and either end's warp far ahead, the numbers are the same"


def renamed(source: CudaSource) -> CudaSource:
    """With other names of its entries, for one object with the kernel that it was made of."""
    launches = (*source.launches, *source.pack)
    entries = sorted({x.entry for x in launches}, key=len, reverse=True)
    text = re.sub(rf"\b({'|'.join(entries)})\b", r"m\1", source.text)
    named, packing = (tuple(replace(x, entry=f"m{x.entry}") for x in some) for some in (source.launches, source.pack))
    return replace(source, text=text, launches=named, pack=packing)


def line(m: Mutant) -> dict[str, object]:
    """One record."""
    return {
        "record": "case", "suite": "mutants", "case": f"{m.operator} in {m.origin.name}", "outcome": m.outcome,
        "reason" if m.outcome == "equivalent" else "note": m.note, "schedule": str(m.origin.source.schedule),
        "before": m.before[:300], "after": m.after[:300],
    }  # fmt: skip


def summary(judged: Sequence[Mutant], unsound: Sequence[str]) -> dict[str, object]:
    """The last line."""
    count = Counter(m.outcome for m in judged)
    by = {
        name: {
            o: sum(m.outcome == o for m in judged if m.operator == name) for o in ("caught", "survived", "equivalent")
        }
        for name in OPERATORS
    }
    return {
        "record": "summary", "suite": "mutants", "total": count["caught"] + count["survived"],
        "caught": count["caught"], "survived": count["survived"], "equivalent": count["equivalent"],
        "verdicts": dict(Counter(m.note for m in judged if m.outcome == "caught").most_common()),
        "operators": {k: v for k, v in by.items() if any(v.values())}, "unsound": list(unsound),
        "kernels": len({id(m.origin) for m in judged}),
    }  # fmt: skip


def main() -> None:
    """Make, judge, record; exits with 1 where over a hundredth survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, min(12, len(os.sched_getaffinity(0)) * 3 // 4)))
    parser.add_argument("--only", default="", choices=("", *OPERATORS))
    parser.add_argument("--dry", action="store_true", help="only compile")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of every N mutants")
    parser.add_argument("--journal", type=Path, help="outcomes as they come; those that it has are not judged again")
    parser.add_argument("--finish", action="store_true", help="judge nothing: reasons and record of what was judged")
    parser.add_argument("--out", type=Path, help="instead of the file of results")
    given = parser.parse_args()
    part, parts = (int(x) for x in given.part.split("/"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        bench = Bench.here(given.device, Path(folder), given.jobs, dry=given.dry or given.finish)
        # the same kernels on every machine: schedules depend on lanes and threads
        stated = CpuFacts(simd_bytes=64, threads=2) if given.device == "cpu" else bench.facts
        drawn = draw(origins(given.device, stated, given.seed), int(given.count * SPARE), given.seed, given.only)
        journal = Journal(given.journal)
        command = " ".join(["python -m benchmarks.mutants", *sys.argv[1:]])
        journal.begin(environment(command, on_cpu=given.device == "cpu"))
        drawn = [m for m in drawn[part - 1 :: parts] if not given.finish or key_of(m) in journal.known]
        different, same = prepare(bench, drawn, -(-given.count // parts), journal)
        print(
            f"{len(drawn)} made, {len(different)} differ, {len(same)} equal, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if given.dry:
            print(dict(Counter(m.operator for m in different)), dict(Counter(m.operator for m in same)))
            return
        run(bench, different, journal)
        if given.finish or given.journal is None or parts == 1:
            explain(bench, [m for m in different if m.outcome == "survived"])
    end = summary([*different, *same], sorted({x["unsound"] for x in journal.known.values()} - {""}))
    name = "cpu" if given.device == "cpu" else str(bench.facts.name).lower().replace(" ", "-")
    path = given.out or RESULTS / name / "mutants.jsonl"
    cases = [line(m) for m in (*different, *same) if m.outcome != "caught"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in (journal.head, *cases, end)))
    print(json.dumps({**end, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(1 if int(str(end["survived"])) * 100 > int(str(end["total"])) else 0)


if __name__ == "__main__":
    main()
