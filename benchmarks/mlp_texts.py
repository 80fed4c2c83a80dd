"""Other ways of a fused network's kernel, for `benchmarks.gpu_mlp_acts`: changes of its text, layer by layer or whole.

`old`: sums begin with copies, and results are not stretched.
Those in `WRONG` are ablations: their results are not those of the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from weft.generate.cuda.templates import mlp, mlp_text
from weft.generate.cuda.templates.mlp_image import Image
from weft.generate.cuda.templates.mlp_match import Chain
from weft.generate.cuda.templates.mlp_shapes import Shape
from weft.generate.cuda.templates.mlp_text import Kernel
from weft.ir.graph import NodeId

COUNTED = ("turn", "products", "between", "ends")
"""Clocks that `clocks` counts: waiting for a turn, products, steps between them, storing and loading x."""
WRONG = frozenset({"near memory", "bias wide", "short"})


@dataclass(frozen=True, slots=True)
class Way(Kernel):
    """A kernel with words that say what is different."""

    words: frozenset[str] = frozenset()

    def _products(self, part: int) -> list[str]:
        lines = "\n".join(Kernel._products(self, part))
        if "exclusive" in self.words:
            lines = _given_behind(lines, "w_group_wait<0>();")
        if "tail" in self.words:
            lines = _given_behind(_in_two(lines, self.p.layers[part - 1].depth // 16), "w_group_wait<1>();")
        return [*self._stamps(part, lines)] if "clocks" in self.words else [lines]

    def _begin(self, part: int, chunks: int, bias: NodeId | None) -> list[str]:
        lines = Kernel._begin(self, part, chunks, bias)
        if part == 1 or bias is None or "bias wide" not in self.words:
            return lines
        d = [self._d(part, "0", "j", str(e)) for e in range(4)]
        layer = self.p.layers[part - 1]
        # not before what was made of the last sums: they lie in the same registers
        behind = f"{self._name(layer.left[0])}[0][j / 2 < {layer.widths[0] // 16} ? j / 2 : 0][j % 2 * 2 + 1]"
        at = f"w_shared(sm) + {self._vectors_at} + (4 * j + q) * 16"  # anything of the right alignment
        return [lines[0], f"w_bias4({', '.join(d)}, {at}, {behind}); }}"]

    def _stamps(self, part: int, lines: str) -> Iterator[str]:
        layer = self.p.layers[part - 1]
        for head, left in self._steps(layer, 0, layer.depth // 16):
            yield f"{head}\n#pragma unroll\nfor (int e = 0; e < 4; ++e) w_read_until({left.replace('[m]', '[0]')}[e]);"
        yield f"w_stamp({3 if part == 1 else 2});"
        lines = re.sub(r"(w_turn_take\([^;]*;)", r"\1 w_stamp(0);", lines)
        yield lines.replace("w_group_wait<0>();", "w_group_wait<0>(); w_stamp(1);")

    def lines(self) -> list[str]:
        """From the weights in memory to the result."""
        text = "\n".join(Kernel.lines(self))
        loop = re.search(r"#pragma unroll 1\nfor \(int t", text)
        assert loop is not None
        before = ""
        if "staggered" in self.words:
            before += "{ const long long from = clock64(); while (clock64() - from < 700 * owner) {} }\n"
        if "clocks" in self.words:
            before += (
                "u32 spent[4] = {0, 0, 0, 0}, last = w_clock();\n"
                "auto w_stamp = [&](int i) { const u32 now = w_clock(); spent[i] += now - last; last = now; };\n"
            )
            text += (
                "\nif ((t & 127) == 0)\nfor (int i = 0; i < 4; ++i)"
                " ((u32*)out0)[(blockIdx.x * 4 + owner) * 4 + i] = spent[i];"
            )
        return [text[: loop.start()] + before + text[loop.start() :]]


def _given_behind(lines: str, wait: str) -> str:
    """A turn is given behind the last such wait."""
    found = re.search(r" w_turn_give\([^;]*;", lines)
    if found is None:
        return lines
    lines = lines.replace(found[0], "")
    at = lines.rindex(wait) + len(wait)
    return f"{lines[:at]}{found[0]}{lines[at:]}"


def _in_two(lines: str, count: int) -> str:
    """The last two steps of a layer whose weights stay are a group of their own."""
    if "w_group_wait<1>" in lines:
        return lines
    start = lines.index("#pragma unroll\nfor (int k")
    end = lines.index("w_group_commit();")
    loop = lines[start:end]
    early = loop.replace(f"k < {count}", f"k < {count - 2}")
    late = loop.replace("int k = 0", f"int k = {count - 2}")
    rest = lines[end:].replace("w_group_wait<0>();", "w_group_wait<1>(); w_group_wait<0>();")
    return f"{lines[:start]}{early}w_group_commit();\n{late}{rest}"


@contextmanager
def emitting(words: frozenset[str]) -> Iterator[None]:
    """Kernels are made in that way."""

    def make(p: Chain, s: Shape, image: Image) -> Kernel:
        return Way(p, s, image, words)

    early = 256 if "early" in words else mlp_text._EARLY
    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(mlp, "Kernel", make))
        changes.enter_context(mock.patch.object(mlp_text, "_EARLY", early))
        if "old" in words:
            changes.enter_context(mock.patch.object(mlp, "prepared", mlp_text.halved))
        yield


FUNCTIONS = """
#ifndef W_EMULATED
W_FN u32 w_clock() { u32 x; asm volatile("mov.u32 %0, %%clock;" : "=r"(x) :: "memory"); return x; }
W_FN void w_bias4(float& a, float& b, float& c, float& d, u32 at, u32 behind) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(at), "r"(behind));
}
W_FN void w_gelu_f16(float x, float y, float& a, float& b) {
  u32 h, p, q, u, t;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(y), "f"(x));
  asm("mul.rn.f16x2 %0, %1, %1;" : "=r"(p) : "r"(h));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(q) : "r"(p), "r"(0x34713471u), "r"(0x3e673e67u));
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(u) : "r"(h), "r"(q));
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(t) : "r"(u));
  const float2 v = w_unpack_f16(t);
  a = fmaf(x, v.x, x); b = fmaf(y, v.y, y);
}
W_FN void w_gelu_bf16(float x, float y, float& a, float& b) {
  u32 h, p, q, u;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(y), "f"(x));
  asm("mul.rn.bf16x2 %0, %1, %1;" : "=r"(p) : "r"(h));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(q) : "r"(p), "r"(0x3e8e3e8eu), "r"(0x3fcd3fcdu));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(u) : "r"(h), "r"(q));
  a = fmaf(x, w_mlp_tanh_bf16(__uint_as_float(u << 16)), x);
  b = fmaf(y, w_mlp_tanh_bf16(__uint_as_float(u)), y);  // what is below 16 bits is the other one: half a unit too far
}
W_FN w_f32 w_gelu_short(w_f32 h) { return fmaf(h, w_mlp_tanh_bf16(h * fmaf(h, h, 1.6003f)), h); }
#endif
"""


def changed(text: str, words: frozenset[str]) -> str:
    """The whole text in that way."""
    at = text.rindex('extern "C" __global__')
    head, body = text[:at] + FUNCTIONS, text[at:]
    for word in sorted(words):
        if word in _WHOLE:
            body = _WHOLE[word](body)
        elif word.startswith("hints "):
            functions, body = _hinted(body, *word.split(" ")[1:])
            head += functions
    return head + body


def _pairs(kind: str) -> Callable[[str], str]:
    """The polynomial of GELU's tanh in pairs of 16 bits."""
    pattern = (
        r"const w_f32 (\w+)_0 = w_mlp_gelu_of_half\((.*), 0.70[^;]*\);\n"
        r"const w_f32 \w+_1 = w_mlp_gelu_of_half\((.*), 0.70[^;]*\);"
    )
    return lambda body: re.sub(pattern, rf"w_f32 \1_0, \1_1; w_gelu_{kind}(\2, \3, \1_0, \1_1);", body)


def _near_memory(body: str) -> str:
    """Rows of x and of results are those of the first tiles: they stay in caches."""
    body = body.replace("const int r = row + ", "const int r = 2047 & row + ")
    return body.replace("const int r = row0 + ", "const int r = 2047 & row0 + ")


_WHOLE: dict[str, Callable[[str], str]] = {
    "near memory": _near_memory,
    "f16": _pairs("f16"),
    "bf16": _pairs("bf16"),
    "short": lambda body: re.sub(r"w_mlp_gelu_of_half\((.*), 0.70[^;]*\);", r"w_gelu_short(\1);", body),
}


def _hinted(body: str, load: str, store: str) -> tuple[str, str]:
    """Loads of x and stores of results with those suffixes, or with a policy of the L2 cache ("-": as they are)."""

    def of(kind: str) -> tuple[str, str, str]:
        policy = {"first": "evict_first", "last": "evict_last", "unchanged": "evict_unchanged"}.get(kind)
        if policy is None:
            return kind.strip("-"), "", ""
        make = f"createpolicy.fractional.L2::{policy}.b64 %0, 1.0;"
        return ".L2::cache_hint", f'u64 keep; asm("{make}" : "=l"(keep));', "keep"

    suffix, made, keep = of(load)
    also = (", %5", ', "l"(keep)') if keep else ("", "")
    functions = f"""W_FN uint4 w_hinted_load(const void* p) {{
  uint4 w; {made}
  asm volatile("ld.global{suffix}.v4.u32 {{%0, %1, %2, %3}}, [%4]{also[0]};"
    : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p){also[1]});
  return w;
}}
"""
    suffix, made, keep = of(store)
    also = (", %5", ', "l"(keep)') if keep else ("", "")
    functions += f"""W_FN void w_hinted_store(void* p, uint4 w) {{
  {made}
  asm volatile("st.global{suffix}.v4.u32 [%0], {{%1, %2, %3, %4}}{also[0]};"
    :: "l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w){also[1]} : "memory");
}}
"""
    if load != "-":
        body = re.sub(r"w = \*\(const uint4\*\)\((from [^;]*)\);", r"w = w_hinted_load(\1);", body)
    if store != "-":
        body = re.sub(r"\*\(uint4\*\)\((to [^=]*)\) = ([^;]*);", r"w_hinted_store(\1, \2);", body)
    return functions, body
