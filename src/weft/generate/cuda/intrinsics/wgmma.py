"""Hopper's warpgroup products: the one place that writes wgmma.mma_async.

Source: PTX ISA, wgmma.mma_async; note on matrix products, sections 2.3 to 2.5 (descriptors, fragments).
"""

from __future__ import annotations

_LINE = 16
"""Registers that a line of the instruction's text names."""


def wgmma(
    name: str,
    columns: int,
    types: str,
    *,
    k: int = 16,
    sums: str = "f32",
    left_in_registers: bool = False,
    mn_major: tuple[bool, ...] | None = None,
    always_adds: bool = False,
) -> str:
    """The function `name(d, a, b, add)` that multiplies 64 rows by `k` of the sum by `columns`; tests bring their own.

    Args:
        name: of the function.
        columns: of the right operand and of the sums, `columns / 2` registers of a thread.
        types: of the left and right operand as the instruction names them, e.g. `f16.f16`.
        k: length of the products: 32 bytes of each operand.
        sums: f32 or s32.
        left_in_registers: `a` is a fragment of four registers, not the descriptor of a tile in shared memory.
        mn_major: of each operand in shared memory that may be so, whether it is; None: the types know K-major alone.
        always_adds: there is no `add`, which is otherwise 0 where the sums before do not count.
    """
    count = columns // 2
    held, register = ("float", "f") if sums == "f32" else ("int", "r")
    a = count if not left_in_registers else 0
    b = count + (4 if left_in_registers else 1)
    lines = [", ".join(f"%{i}" for i in range(at, min(at + _LINE, count))) for at in range(0, count, _LINE)]
    left = f"%{a}" if not left_in_registers else "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    scales = ", 1, 1" if sums == "f32" else ""
    majors = "".join(f", {int(x)}" for x in mn_major or ())
    end = f" {left}, %{b}, {'1' if always_adds else 'p'}{scales}{majors};{'' if always_adds else ' }'}"
    strings = [
        *([] if always_adds else ["{ .reg .pred p; setp.ne.b32 p, %" + f"{b + 1}, 0;\\n"]),
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{k}.{sums}.{types}",
        *(f"{' {' if i == 0 else '  '}{x}{'},' if i == len(lines) - 1 else ','}" for i, x in enumerate(lines)),
        end,
    ]
    written = "\n    ".join(f'"{x}"' for x in strings)
    results = ", ".join(f'"+{register}"(d[{i}])' for i in range(count))
    given = ['"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])' if left_in_registers else '"l"(a)', '"l"(b)']
    parameter = "const u32 (&a)[4]" if left_in_registers else "u64 a"
    if not always_adds:
        given.append('"r"(add)')
    return f"""#ifndef W_EMULATED
W_FN void {name}({held} (&d)[{count}], {parameter}, u64 b{"" if always_adds else ", int add"}) {{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile({written}
    : {results} : {", ".join(given)});
#endif
}}
#endif
"""
