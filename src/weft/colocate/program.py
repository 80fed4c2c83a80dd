"""The stand-alone test program of a pair: tables of its kernels, arguments and buffers in front of `pair_test.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from weft.colocate.side import Buffer, Side, Value
from weft.kernels.colocation import FusedSource, WorkCounter
from weft.kernels.source import CudaArgument, Inside, Number, Pointer, TensorMap

_TYPES = """// Tests one fused kernel: see the text behind the tables.
enum Init { POISON, ZEROS, NORMAL, UNIFORM, ARANGE, FROM_FILE };
enum Kind { BUFFER, BYTES, MAP, COUNTER };
struct Buffer {
  const char* name;
  unsigned long long bytes;
  Init init;
  const char* scalar;
  unsigned long long seed;
  double low, high;
  const char* file;
  bool written, scratch;
  double rtol;
};
struct Argument { Kind kind; int buffer; unsigned long long offset; int map; unsigned char bytes[32]; };
struct Map {
  int type, rank;
  unsigned long long sizes[5], strides[5]; unsigned box[5], steps[5]; int swizzle;
};
struct Constant { const char* symbol; Buffer data; };
struct Kernel {
  const char *file, *entry;
  unsigned grid[3], block[3], cluster[3], shared;
  int first_argument, arguments, first_constant, constants;
};
"""
_INITS = {"poison": "POISON", "zeros": "ZEROS", "normal": "NORMAL", "uniform": "UNIFORM", "arange": "ARANGE",
          "file": "FROM_FILE"}  # fmt: skip
_MAP_TYPES = {"u8": 0, "i8": 0, "bool": 0, "u16": 1, "i16": 1, "i32": 3, "i64": 5, "f16": 6, "f32": 7, "f64": 8,
              "bf16": 9, "tf32": 11}  # fmt: skip
"""CUtensorMapDataType."""
Dim3 = tuple[int, int, int]
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@cache
def _behind() -> str:
    return Path(__file__).with_name("pair_test.h").read_text(encoding="utf-8")


def program(
    sides: Sequence[Side],
    fused: FusedSource,
    rest: FusedSource,
    limit: int,
    cycles: int,
    names: Mapping[str, tuple[str, tuple[str, ...]]],
    buffers: Mapping[str, Buffer],
    means: Mapping[tuple[str, str, int], str],
) -> str:
    """The text of test.cpp. `names`: file -> entry and symbols of its constants, as the compiler calls them."""
    tables = _Tables(list(buffers), means)
    own = [s.constants for s in sides]
    every = [c for s in own for c in s]
    kernels = [
        tables.kernel(
            s.name, names[s.name], (s.grid, s.block, s.cluster), s.shared_bytes,
            [(s.name, a) for a in s.arguments], [c.data for c in s.constants],
        )
        for s in sides
    ]  # fmt: skip
    labels = [s.name for s in sides]
    both = []
    for name, source, data in (("fused", fused, every), ("rest", rest, [c for s in own[1:] for c in s])):
        arguments = [("" if p.role < 0 else labels[p.role], p.argument) for p in source.parameters]
        block = (source.threads, 1, 1)
        both.append(
            tables.kernel(
                name,
                names[name],
                (source.grid, block, source.cluster),
                source.shared_bytes,
                arguments,
                [c.data for c in data],
            )
        )
    start = WorkCounter.start(fused.stages, limit).pack()
    words = ", ".join(f"0x{int.from_bytes(start[i : i + 4], 'little'):x}u" for i in range(0, len(start), 4))
    limit_at, finished_at = (WorkCounter.offset(name) // 4 for name in ("limit", "finished"))
    return "".join(
        [
            _TYPES,
            _array("Buffer", "buffers", [_buffer(b) for b in buffers.values()]),
            _array("Argument", "arguments", tables.arguments),
            _array("Map", "maps", tables.maps),
            _array("Constant", "constants", tables.constants),
            _array("Kernel", "originals", kernels),
            f"static const Kernel fused_kernel = {both[0]};\nstatic const Kernel rest_kernel = {both[1]};\n",
            f"static const unsigned counter_start[] = {{{words}}};\n",
            f"enum {{ LIMIT = {limit_at}, FINISHED = {finished_at} }};\n",
            f"static const unsigned fused_limit = {limit}u, total_blocks = {cycles * sum(fused.stages)}u;\n",
            f"static const int cycles = {cycles};\n",
            _behind(),
        ]
    )


def _array(kind: str, name: str, rows: Sequence[str]) -> str:
    """An array; one element that nobody looks at where there would be none."""
    lines = "".join(f"  {row},\n" for row in rows) or "  {},\n"
    return f"static const {kind} {name}[] = {{\n{lines}}};\n"


def _buffer(b: Buffer) -> str:
    file = f'"{b.name}.bin"' if b.init == "file" else "nullptr"
    flags = f"{str(b.written).lower()}, {str(b.scratch).lower()}"
    drawn = f'{_INITS[b.init]}, "{b.scalar}", {b.seed}ull, {b.low!r}, {b.high!r}, {file}'
    return f'{{"{b.name}", {b.nbytes}ull, {drawn}, {flags}, {b.rtol!r}}}'


class _Tables:
    """Rows of what kernels are made of."""

    def __init__(self, order: list[str], means: Mapping[tuple[str, str, int], str]) -> None:
        self.order, self.means = order, means
        self.arguments: list[str] = []
        self.maps: list[str] = []
        self.constants: list[str] = []

    def kernel(
        self,
        file: str,
        names: tuple[str, tuple[str, ...]],
        sizes: tuple[Dim3, Dim3, Dim3],
        shared: int,
        arguments: Sequence[tuple[str, CudaArgument | Value | None]],
        data: Sequence[Buffer],
    ) -> str:
        """A row of a kernel, whose arguments and constants are noted. `sizes`: of its grid, a CTA and a cluster."""
        entry, symbols = names
        first, first_constant = len(self.arguments), len(self.constants)
        self.arguments += [self._argument(whose, a) for whose, a in arguments]
        self.constants += [f'{{"{s}", {_buffer(d)}}}' for s, d in zip(symbols, data, strict=True)]
        dims = ", ".join("{" + ", ".join(f"{n}u" for n in d) + "}" for d in sizes)
        counts = f"{first}, {len(arguments)}, {first_constant}, {len(data)}"
        return f'{{"{file}", "{entry}", {dims}, {shared}u, {counts}}}'

    def _argument(self, whose: str, a: CudaArgument | Value | None) -> str:
        if a is None:
            return "{COUNTER, 0, 0, 0, {}}"
        if isinstance(a, Value | Number):
            data = a.data if isinstance(a, Value) else a.value.to_bytes(8, "little")
            return f"{{BYTES, 0, 0, 0, {{{', '.join(str(x) for x in data)}}}}}"
        if isinstance(a, TensorMap):
            self.maps.append(_map(a))
            return f"{{MAP, {self._buffer(whose, a.base)}, {0}ull, {len(self.maps) - 1}, {{}}}}"
        if isinstance(a, Inside):
            return f"{{BUFFER, {self._buffer(whose, a.base)}, {a.bytes}ull, 0, {{}}}}"
        return f"{{BUFFER, {self._buffer(whose, a)}, 0ull, 0, {{}}}}"

    def _buffer(self, whose: str, p: Pointer) -> int:
        return self.order.index(self.means[whose, p.kind, p.index])


def _map(t: TensorMap) -> str:
    def row(values: Sequence[int], unit: str) -> str:
        return "{" + ", ".join(f"{v}{unit}" for v in values) + "}"

    sizes, strides = row(t.sizes, "ull"), row(t.strides_bytes, "ull")
    box, steps = row(t.box, "u"), row(t.element_strides, "u")
    return (
        f"{{{_MAP_TYPES[t.dtype]}, {len(t.sizes)}, {sizes}, {strides}, {box}, {steps}, {_SWIZZLES[t.swizzle_bytes]}}}"
    )
