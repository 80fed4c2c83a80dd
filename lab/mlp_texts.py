"""Other ways of a fused network's kernel, for `lab.gpu_mlp_acts`: changes of its text, layer by layer or whole.

`old`: results are not pre-scaled. `whole`: a turn is given when all its products
are done. `fence`: reading the clock keeps steps in front of a product there. `first asks`: for
panels of weights, the first warpgroup.
Those in `WRONG` are ablations: their results are not those of the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from weft.generate.cuda.mlp import kernel as mlp
from weft.generate.cuda.mlp import shapes as mlp_shapes
from weft.generate.cuda.mlp import text as mlp_text
from weft.generate.cuda.mlp.image import Image
from weft.generate.cuda.mlp.match import Chain
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.generate.cuda.mlp.text import Kernel

COUNTED = ("turn", "products", "between", "ends")
"""Clocks that `clocks` counts: waiting for a turn, products, steps between them, storing and loading x."""
WRONG = frozenset({"near memory"})


@dataclass(frozen=True, slots=True)
class Way(Kernel):
    """A kernel with words that say what is different."""

    words: frozenset[str] = frozenset()

    def _products(self, part: int) -> list[str]:
        lines = "\n".join(Kernel._products(self, part))
        if "whole" in self.words:
            lines = _given_behind(lines, "w_group_wait<0>();")
        if "fence" in self.words:
            lines = "\n".join(("(void)w_clock();", *self._read(part), "(void)w_clock();", lines))
        return [*self._stamps(part, lines)] if "clocks" in self.words else [lines]

    def _stamps(self, part: int, lines: str) -> Iterator[str]:
        layer = self.p.layers[part - 1]
        for head, left in self._steps(layer, 0, layer.depth // 16):
            yield f"{head}\n#pragma unroll\nfor (int e = 0; e < 4; ++e) w_read_until({left.replace('[m]', '[0]')}[e]);"
        yield f"w_stamp({3 if part == 1 else 2});"
        lines = re.sub(r"(role\.named_barrier\([^;]*;)", r"\1 w_stamp(0);", lines)
        yield lines.replace("w_group_wait<0>();", "w_group_wait<0>(); w_stamp(1);")

    def lines(self) -> list[str]:
        """From the weights in memory to the result."""
        text = "\n".join(Kernel.lines(self))
        loop = re.search(r"#pragma unroll 1\nfor \(int t", text)
        assert loop is not None
        before = ""
        if "clocks" in self.words:
            before += (
                "u32 spent[4] = {0, 0, 0, 0}, last = w_clock();\n"
                "auto w_stamp = [&](int i) { const u32 now = w_clock(); spent[i] += now - last; last = now; };\n"
            )
            text += (
                "\nif ((t & 127) == 0)\nfor (int i = 0; i < 4; ++i)"
                " ((u32*)out0)[(role.block_x() * 4 + owner) * 4 + i] = spent[i];"
            )
        return [text[: loop.start()] + before + text[loop.start() :]]


def _given_behind(lines: str, wait: str) -> str:
    """A turn is given behind the last such wait."""
    found = re.search(r" role\.named_barrier_arrive\([^;]*;", lines)
    if found is None:
        return lines
    lines = lines.replace(found[0], "")
    at = lines.rindex(wait) + len(wait)
    return f"{lines[:at]}{found[0]}{lines[at:]}"


@contextmanager
def emitting(words: frozenset[str]) -> Iterator[None]:
    """Kernels are made in that way."""

    def make(p: Chain, s: MlpConfig, image: Image) -> Kernel:
        return Way(p, s, image, words)

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(mlp, "Kernel", make))
        if "old" in words:
            changes.enter_context(mock.patch.object(mlp, "prepared", mlp_text.halved))
        if "first asks" in words:
            for module in (mlp_text, mlp_shapes):
                changes.enter_context(mock.patch.object(module, "last_asks", return_value=False))
        yield


FUNCTIONS = """
#ifndef W_EMULATED
W_FN u32 w_clock() { u32 x; asm volatile("mov.u32 %0, %%clock;" : "=r"(x) :: "memory"); return x; }
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


def _near_memory(body: str) -> str:
    """Rows of x and of results are those of the first tiles: they stay in caches."""
    body = body.replace("const int r = row + ", "const int r = 2047 & row + ")
    return body.replace("const int r = row0 + ", "const int r = 2047 & row0 + ")


_WHOLE: dict[str, Callable[[str], str]] = {"near memory": _near_memory}


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
