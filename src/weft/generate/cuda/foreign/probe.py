"""A kernel in a frame that is no hardware: what is compiled to be judged, and to learn how large shared variables are.

Threads, blocks and barriers of the frame are memory and comments of PTX, so that whatever instruction or register of
that kind the compiler's output holds was brought by the source itself.
"""

from __future__ import annotations

from weft.generate.cuda.foreign.manifest import Manifest
from weft.generate.cuda.foreign.refuse import PROBE_SHARED
from weft.generate.cuda.foreign.wrap import Wrapped, argument_names, foreign_header, role_text

ENTRY = "w_probe"
_FRAME = f"""
#define W_FN __device__ __forceinline__
extern __shared__ __align__(1024) unsigned char {PROBE_SHARED}[];
struct w_probe_frame {{
  const unsigned* at;
  W_FN unsigned read(int i) const {{ return ((const volatile unsigned*)at)[i]; }}
  W_FN unsigned thread() const {{ return read(0); }}
  W_FN unsigned block_x() const {{ return read(1); }}
  W_FN unsigned block_y() const {{ return read(2); }}
  W_FN unsigned block_z() const {{ return read(3); }}
  W_FN unsigned blocks_x() const {{ return read(4); }}
  W_FN void sync() const {{ asm volatile("// w_sync" ::: "memory"); }}
}};
W_FN unsigned w_blocks_y(const w_probe_frame& role) {{ return role.read(5); }}
W_FN unsigned w_blocks_z(const w_probe_frame& role) {{ return role.read(6); }}
W_FN bool w_any(const w_probe_frame& role, bool x) {{
  role.sync();
  return x | (role.read(7) != 0u);
}}
W_FN int w_count(const w_probe_frame& role, bool x) {{
  role.sync();
  return x + (int)role.read(8);
}}
template <int N, unsigned long long S, unsigned long long A> W_FN void w_foreign_size() {{
  asm volatile("// w_size %0 %1 %2" ::"n"(N), "n"((int)(S > 0x7fffffffull ? 0x7fffffffull : S)), "n"((int)A));
}}
"""


def probe_text(wrapped: Wrapped, manifest: Manifest) -> str:
    """One translation unit with the kernel `w_probe`."""
    names = [(n, p) for i, p in enumerate(manifest.parameters) for n in argument_names(p, i)]
    declared = [f"{'unsigned long long' if p.kind == 'scalar' else 'void*'} {n}" for n, p in names]
    given = ", ".join(n for n, _ in names)
    return (
        f"{_FRAME}{foreign_header()}{role_text(wrapped, manifest, 'w_foreign', None, lines=True)}"
        f'extern "C" __global__ void {ENTRY}({", ".join(["const unsigned* at", *declared])}) {{\n'
        f"w_foreign::w_kernel<w_probe_frame>{{w_probe_frame{{at}}, {PROBE_SHARED}}}.w_run({given});\n}}\n"
    )
