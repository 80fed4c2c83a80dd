"""`kernel.toml`: what a `.cu` file does not say about one of its kernels (its launch, its arguments, what is checked).

    source = "mriq.cu"            # beside this file, never outside of its folder
    entry = "compute_q"           # the kernel; of a template with arguments: "reduce<256>"
    grid = [128, 1, 1]            # blocks
    block = [256, 1, 1]           # threads
    dynamic_shared_bytes = 0
    include = ["include"]         # folders beside this file, searched for #include "..."
    define = { TILE = "16" }      # macros in front of the source
    stage = 0                     # position in its job
    state = ["counter"]           # __device__ variables whose content lasts from launch to launch
    [[parameters]]                # one for each parameter of the kernel, in its order
    name = "x"
    type = "float"                # C type of an element, or of the scalar
    kind = "input"                # scalar, input, output or inout
    shape = [32768]               # elements, of buffers
    buffer = "x"                  # stages that name the same buffer share it; `name` if left out
    init = "normal"               # normal, uniform, zeros, arange or file, of inputs
    seed = 1                      # of normal and uniform
    low = 0.0                     # of uniform: low <= x < high
    high = 1.0
    file = "x.bin"                # of file: little-endian, beside this file
    as = "float"                  # of a type that the source defines: `per` elements of this one
    per = 7
    [[parameters]]
    name = "n"
    type = "int"
    kind = "scalar"
    value = 32768                 # a list for vectors such as float4, and for structures (of `per` times `as`)
    [[constants]]                 # __constant__ and __device__ variables that are filled before each launch
    name = "k_table"              # with type, shape, init, ... as above
    [check]
    exact = true                  # any two forms of the kernel agree bit by bit
    rtol = 0.0                    # else: |got - want| <= rtol * (|want| + rms(want))
    [small]                       # a smaller launch for tests: grid, block, dynamic_shared_bytes, define,
    [small.parameters.n]          # and shape, value, low, high of parameters and constants
    [about]                       # anything; not read

The reader is strict: a key that is not above, a value of another type, a size over a limit or a path that leaves the
folder (also through a link) is refused by name and line.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from weft.errors import UserError
from weft.generate.cuda.foreign.types import KNOWN, ElementType

MOST_MANIFEST_BYTES = 1 << 20
MOST_ELEMENTS = 1 << 31
MOST_BYTES = 8 << 30
"""Of all buffers of a kernel."""
MOST_THREADS = 1024
MOST_BLOCK = (1024, 1024, 64)
MOST_GRID = ((1 << 31) - 1, 65535, 65535)
MOST_SHARED_BYTES = 227 << 10
MOST_PARAMETERS = 256
MOST_SCALAR_BYTES = 512
"""Of a structure that is passed by value."""
MOST_TEXT = 400
KINDS = ("scalar", "input", "output", "inout")
INITS = ("normal", "uniform", "zeros", "arange", "file")
Dim3 = tuple[int, int, int]
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_TYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:(?: |::)[A-Za-z_][A-Za-z0-9_]*){0,5}")
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}(?:<[A-Za-z0-9_:, .+-]{1,200}>)?")
_DEFINED = re.compile(r"[ -\[\]-~]{0,200}")
"""One line of ASCII without a backslash."""


class ManifestError(UserError):
    """A kernel.toml, or what it names, that cannot be taken."""

    code = "W015"
    template = "{key}: {problem}"
    todo = "{remedy}"


@dataclass(frozen=True, slots=True)
class Data:
    """What a buffer holds before the launch."""

    name: str
    type: str
    """C type of an element."""
    element: ElementType
    """What an element is made of: `per` of these."""
    per: int
    shape: tuple[int, ...]
    init: str | None
    """One of `INITS`; None: an output, which is poisoned."""
    seed: int = 0
    low: float = 0.0
    high: float = 1.0
    file: Path | None = None

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return self.count * self.per * self.element.nbytes


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of the kernel."""

    name: str
    type: str
    kind: str
    """One of `KINDS`."""
    data: Data | None = None
    """Of buffers."""
    buffer: str = ""
    """Of buffers: whose memory it is."""
    values: tuple[float | int, ...] = ()
    """Of scalars, a component each."""
    element: ElementType | None = None
    """Of scalars of a type that the source defines: what they are made of."""

    @property
    def raw(self) -> bytes:
        """Of scalars: their bytes."""
        return (self.element or KNOWN[self.type]).packed(self.values)

    @property
    def bits(self) -> tuple[int, ...]:
        """Of scalars: their bytes as words of 64 bits."""
        raw = self.raw
        return tuple(int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8))


@dataclass(frozen=True, slots=True)
class Manifest:
    """One kernel of one `.cu` file."""

    path: Path
    """Of the kernel.toml."""
    source: Path
    entry: str
    grid: Dim3
    block: Dim3
    parameters: tuple[KernelParameter, ...]
    constants: tuple[Data, ...] = ()
    state: tuple[str, ...] = ()
    dynamic_shared_bytes: int = 0
    include: tuple[Path, ...] = ()
    define: tuple[tuple[str, str], ...] = ()
    stage: int = 0
    exact: bool = True
    rtol: float = 0.0

    @property
    def root(self) -> Path:
        """The folder that nothing may leave."""
        return self.path.parent

    @property
    def threads(self) -> int:
        """Of a block."""
        return math.prod(self.block)


def read(path: Path, *, small: bool = False, changes: Mapping[str, object] | None = None) -> Manifest:
    """Read a kernel.toml. `small`: with its `[small]` applied; `changes`: dotted key -> value, over what the file says.

    In a dotted key parameters and constants are named: `parameters.n.value`.

    Raises:
        ManifestError: it cannot be read or taken; the message has key, line and remedy [W015].
    """
    text = _text(path)
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        what = str(error).splitlines()[0][:MOST_TEXT]
        raise ManifestError(
            where=path.name, key="TOML", problem=f"not a TOML file: {what}", remedy="correct the file"
        ) from None
    if small:
        raw = _with_small(path, text, raw)
    for key, value in (changes or {}).items():
        _change(path, raw, key, value)
    return _Reader(path, text).manifest(raw)


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ManifestError(where=path.name, key="path", problem="no such file", remedy="name a kernel.toml")
        with path.open("rb") as file:
            data = file.read(MOST_MANIFEST_BYTES + 1)
        if len(data) > MOST_MANIFEST_BYTES:
            problem = f"over {MOST_MANIFEST_BYTES} bytes"
            raise ManifestError(where=path.name, key="path", problem=problem, remedy="name a kernel.toml")
        return data.decode("utf-8")
    except OSError as error:
        raise ManifestError(
            where=path.name, key="path", problem=f"it cannot be read: {error.strerror}", remedy="name a kernel.toml"
        ) from None
    except UnicodeDecodeError:
        raise ManifestError(
            where=path.name, key="path", problem="no text in UTF-8", remedy="name a kernel.toml"
        ) from None


_SMALL = frozenset({"grid", "block", "dynamic_shared_bytes", "define", "parameters", "constants"})
_SMALL_DATA = frozenset({"shape", "value", "low", "high"})


def _with_small(path: Path, text: str, raw: dict[str, object]) -> dict[str, object]:
    """The raw manifest with `[small]` over it."""
    reader = _Reader(path, text)
    small = reader.table("small", raw.get("small", {}))
    reader.only("small", small, _SMALL)
    merged = dict(raw)
    for key, value in small.items():
        if key == "define":
            merged[key] = {**reader.table("define", raw.get("define", {})), **reader.table("small.define", value)}
        elif key not in ("parameters", "constants"):
            merged[key] = value
    for many in ("parameters", "constants"):
        named = reader.table(f"small.{many}", small.get(many, {}))
        listed = raw.get(many, [])
        rows = [dict(row) if isinstance(row, dict) else row for row in listed] if isinstance(listed, list) else listed
        for name, over in named.items():
            changes = reader.table(f"small.{many}.{name}", over)
            reader.only(f"small.{many}.{name}", changes, _SMALL_DATA)
            found = [r for r in rows if isinstance(r, dict) and r.get("name") == name] if isinstance(rows, list) else []
            if not found:
                reader.fail(f"small.{many}.{name}", f"no entry of {many} has this name", "correct the name")
            found[0].update(changes)
        if many in raw:
            merged[many] = rows
    return merged


def _change(path: Path, raw: dict[str, object], key: str, value: object) -> None:
    """Put one value over what the file says."""
    parts = key.split(".")
    if parts[0] in ("parameters", "constants") and len(parts) == 3:
        rows = raw.get(parts[0], [])
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and row.get("name") == parts[1]:
                row[parts[2]] = value
                return
        remedy = "NAME is the name of an entry of the file"
        raise ManifestError(where=path.name, key=key[:MOST_TEXT], problem=f"no {parts[0]} of this name", remedy=remedy)
    if parts[0] in ("check", "define") and len(parts) == 2:
        table = raw.setdefault(parts[0], {})
        if isinstance(table, dict):
            table[parts[1]] = value
        return
    if len(parts) != 1:
        remedy = "a key of the file, parameters.NAME.KEY, constants.NAME.KEY, define.NAME or check.KEY"
        raise ManifestError(where=path.name, key=key[:MOST_TEXT], problem="no such key", remedy=remedy)
    raw[key] = value


_DATA = frozenset({"name", "type", "shape", "init", "seed", "low", "high", "file", "as", "per"})
_TOP = frozenset(
    {
        "source", "entry", "grid", "block", "dynamic_shared_bytes", "include", "define", "stage", "state", "parameters",
        "constants", "check", "small", "about",
    }
)  # fmt: skip


@dataclass(frozen=True)
class _Reader:
    path: Path
    text: str
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", self.text.split("\n"))

    # -- what is said about a mistake

    def fail(self, key: str, problem: str, remedy: str) -> NoReturn:
        """Refuse the file, by the line that holds the key where that is found."""
        line = self._line(key)
        where = f"{self.path.name}:{line}" if line else self.path.name
        raise ManifestError(where=where, key=key[:MOST_TEXT], problem=problem, remedy=remedy)

    def _line(self, key: str) -> int:
        """Of a key such as `grid` or `parameters[2].shape`; 0: not found."""
        parts = key.split(".")
        if found := re.fullmatch(r"(\w+)\[(\d+)\]", parts[0]):
            heads = [i for i, x in enumerate(self.lines) if re.match(rf"\s*\[\[\s*{found[1]}\s*\]\]", x)]
            if int(found[2]) >= len(heads):
                return 0
            first = heads[int(found[2])]
            last = next((i for i in range(first + 1, len(self.lines)) if self.lines[i].lstrip().startswith("[")), None)
            at = self._assigned(parts[1], first, last) if len(parts) > 1 else 0
            return at or first + 1
        if len(parts) > 1:
            head = re.escape(".".join(parts[:-1]))
            for i, x in enumerate(self.lines):
                if re.match(rf"\s*\[\s*{head}\s*\]", x):
                    return self._assigned(parts[-1], i, None) or i + 1
        return self._assigned(parts[0], 0, None)

    def _assigned(self, key: str, first: int, last: int | None) -> int:
        pattern = re.compile(rf"\s*(?:\[\s*)?[\"']?{re.escape(key)}[\"']?\s*(?:=|\]|\.)")
        return next((first + i + 1 for i, x in enumerate(self.lines[first:last]) if pattern.match(x)), 0)

    # -- values of one kind

    def table(self, key: str, value: object) -> dict[str, object]:
        """A table with names as keys."""
        if not isinstance(value, dict):
            self.fail(key, f"{_shown(value)} is no table", "write it as a table")
        return value

    def only(self, key: str, value: Mapping[str, object], allowed: frozenset[str]) -> None:
        """No key besides these."""
        for name in value:
            if name not in allowed:
                at = f"{key}.{name}" if key else name
                self.fail(at, "no such key", f"known are {', '.join(sorted(allowed))}")

    def text_of(self, key: str, value: object, pattern: re.Pattern[str], what: str) -> str:
        """A text of one form."""
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.fail(key, f"{_shown(value)} is not {what}", f"write {what}")
        return value

    def number(self, key: str, value: object) -> float:
        """A finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(key, f"{_shown(value)} is no finite number", "write a number")
        return float(value)

    def integer(self, key: str, value: object, low: int, high: int) -> int:
        """A whole number within bounds."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"{_shown(value)} is no whole number", f"write one from {low} to {high}")
        if not low <= value <= high:
            self.fail(key, f"{_shown(value)} is outside of {low} to {high}", "choose one within")
        return value

    def dim3(self, key: str, value: object, most: Dim3) -> Dim3:
        """Three sizes; those that are left out are 1."""
        if not isinstance(value, list) or not 1 <= len(value) <= 3:
            self.fail(key, f"{_shown(value)} is no list of one to three numbers", "write it as [x, y, z]")
        sizes = [self.integer(key, x, 1, most[i]) for i, x in enumerate(value)] + [1, 1]
        return sizes[0], sizes[1], sizes[2]

    def inside(self, key: str, value: object, wanted: Callable[[Path], bool], what: str) -> Path:
        """A path beside the manifest that stays there, links followed."""
        if not isinstance(value, str) or not value or len(value) > 1000 or "\0" in value or "\\" in value:
            self.fail(key, f"{_shown(value)} is no path", "name a file beside kernel.toml")
        root = self.path.parent.resolve()
        try:
            place = (root / value).resolve()
            if Path(value).is_absolute() or not place.is_relative_to(root):
                self.fail(
                    key, f"{_shown(value)} lies outside of the folder of kernel.toml", "put the file beside kernel.toml"
                )
            found = wanted(place)
        except (OSError, RuntimeError):
            found, place = False, root
        if not found:
            self.fail(key, f"{_shown(value)}: no such {what}", "name one beside kernel.toml")
        return place

    # -- the parts of a manifest

    def manifest(self, raw: dict[str, object]) -> Manifest:
        """All of it."""
        self.only("", raw, _TOP)
        for key in ("source", "entry", "grid", "block", "parameters"):
            if key not in raw:
                self.fail(key, "missing", "every kernel.toml has source, entry, grid, block and parameters")
        grid = self.dim3("grid", raw["grid"], MOST_GRID)
        block = self.dim3("block", raw["block"], MOST_BLOCK)
        if math.prod(block) > MOST_THREADS:
            self.fail("block", f"{math.prod(block)} threads; a block has up to {MOST_THREADS}", "choose fewer")
        if math.prod(grid) >= 1 << 31:
            self.fail("grid", f"{math.prod(grid)} blocks; up to 2^31 - 1 are taken", "split the launch into stages")
        check = self.table("check", raw.get("check", {}))
        self.only("check", check, frozenset({"exact", "rtol"}))
        if not isinstance(check.get("exact", True), bool):
            self.fail("check.exact", f"{_shown(check['exact'])} is not true or false", "write true or false")
        rtol = self.number("check.rtol", check.get("rtol", 0.0))
        if not 0 <= rtol < 1:
            self.fail("check.rtol", f"{rtol} is outside of 0 to 1", "choose one within")
        parameters = self._parameters(raw["parameters"])
        constants = self._constants(raw.get("constants", []))
        total = sum(p.data.nbytes for p in parameters if p.data) + sum(c.nbytes for c in constants)
        if total > MOST_BYTES:
            self.fail("parameters", f"{total} bytes of buffers; up to {MOST_BYTES} are taken", "choose smaller shapes")
        state = raw.get("state", [])
        if not isinstance(state, list) or len(state) > MOST_PARAMETERS:
            self.fail("state", f"{_shown(state)} is no list of names", 'write it as ["counter"]')
        include = raw.get("include", [])
        if not isinstance(include, list) or len(include) > 32:
            self.fail("include", f"{_shown(include)} is no list of up to 32 folders", 'write it as ["include"]')
        return Manifest(
            self.path,
            self.inside("source", raw["source"], Path.is_file, "file"),
            self.text_of("entry", raw["entry"], _ENTRY, "the name of a kernel"),
            grid,
            block,
            parameters,
            constants,
            tuple(self.text_of("state", x, _IDENTIFIER, "the name of a variable") for x in state),
            self.integer("dynamic_shared_bytes", raw.get("dynamic_shared_bytes", 0), 0, MOST_SHARED_BYTES),
            tuple(self.inside("include", x, Path.is_dir, "folder") for x in include),
            self._define(raw.get("define", {})),
            self.integer("stage", raw.get("stage", 0), 0, 1 << 16),
            check.get("exact", True) is True,
            rtol,
        )

    def _define(self, value: object) -> tuple[tuple[str, str], ...]:
        table = self.table("define", value)
        found = []
        for name, body in table.items():
            if not _IDENTIFIER.fullmatch(name):
                self.fail("define", f"{_shown(name)} is no name of a macro", "correct the name")
            if name.lower().startswith(("w_", "__")):
                self.fail("define", f"{_shown(name)}: names that begin with w_ or __ are taken", "choose another name")
            if isinstance(body, int | float) and not isinstance(body, bool):
                body = str(body)
            found.append((name, self.text_of("define", body, _DEFINED, "one line of ASCII without backslashes")))
        return tuple(found)

    def _rows(self, key: str, value: object) -> list[dict[str, object]]:
        if not isinstance(value, list) or len(value) > MOST_PARAMETERS:
            self.fail(key, f"{_shown(value)} is no list of up to {MOST_PARAMETERS} tables", f"write [[{key}]]")
        rows = [self.table(f"{key}[{i}]", row) for i, row in enumerate(value)]
        names = [row.get("name") for row in rows]
        for i, name in enumerate(names):
            if name in names[:i]:
                self.fail(f"{key}[{i}].name", f"{_shown(name)} stands twice", "give each a name of its own")
        return rows

    def _parameters(self, value: object) -> tuple[KernelParameter, ...]:
        found = []
        for i, row in enumerate(self._rows("parameters", value)):
            at = f"parameters[{i}]"
            kind = row.get("kind")
            if kind not in KINDS:
                self.fail(f"{at}.kind", f"{_shown(kind)} is none of {', '.join(KINDS)}", "say what the parameter is")
            found.append(self._scalar(at, row) if kind == "scalar" else self._buffer(at, row, str(kind)))
        return tuple(found)

    def _scalar(self, at: str, row: dict[str, object]) -> KernelParameter:
        self.only(at, row, frozenset({"name", "type", "kind", "value", "as", "per"}))
        name, kind = self._name(at, row), self._type(at, row)
        alias = row.get("as", kind)
        element = KNOWN.get(alias) if isinstance(alias, str) else None
        if element is None:
            remedy = f'say what it is made of: as = "int" and per = how many of them; known are {", ".join(KNOWN)}'
            key = f"{at}.as" if "as" in row else f"{at}.type"
            self.fail(key, f"{_shown(alias)} is no type of a scalar that is known", remedy)
        per = self.integer(f"{at}.per", row.get("per", 1), 1, MOST_SCALAR_BYTES // element.nbytes)
        if per > 1 and "as" not in row:
            self.fail(f"{at}.per", "of types that the source defines alone", "leave it out")
        value = row.get("value")
        values = value if isinstance(value, list) else [value]
        if len(values) != element.components * per:
            self.fail(
                f"{at}.value", f"{_shown(value)} has not {element.components * per} components", "give each a value"
            )
        if element.is_float:
            numbers: tuple[float | int, ...] = tuple(self.number(f"{at}.value", x) for x in values)
        else:
            values = [int(x) if isinstance(x, bool) and element.scalar == "b1" else x for x in values]
            numbers = tuple(self.integer(f"{at}.value", x, *element.range) for x in values)
        try:
            element.packed(numbers)
        except OverflowError:
            self.fail(f"{at}.value", f"{_shown(value)} is outside of the range of {alias}", "choose one within")
        return KernelParameter(name, kind, "scalar", values=numbers, element=element if "as" in row else None)

    def _buffer(self, at: str, row: dict[str, object], kind: str) -> KernelParameter:
        self.only(at, row, _DATA | {"kind", "buffer"})
        data = self._data(at, row, filled=kind != "output")
        buffer = self.text_of(f"{at}.buffer", row.get("buffer", data.name), _IDENTIFIER, "a name")
        return KernelParameter(data.name, data.type, kind, data, buffer)

    def _constants(self, value: object) -> tuple[Data, ...]:
        found = []
        for i, row in enumerate(self._rows("constants", value)):
            self.only(f"constants[{i}]", row, _DATA)
            found.append(self._data(f"constants[{i}]", row, filled=True))
        return tuple(found)

    def _name(self, at: str, row: dict[str, object]) -> str:
        return self.text_of(f"{at}.name", row.get("name"), _IDENTIFIER, "a name")

    def _type(self, at: str, row: dict[str, object]) -> str:
        kind = self.text_of(f"{at}.type", row.get("type"), _TYPE, "the name of a C type, without pointers")
        return " ".join(kind.split())

    def _data(self, at: str, row: dict[str, object], *, filled: bool) -> Data:
        name, kind = self._name(at, row), self._type(at, row)
        alias = row.get("as", kind)
        element = KNOWN.get(alias) if isinstance(alias, str) else None
        if element is None:
            remedy = 'say what its elements are made of: as = "float" and per = how many of them'
            self.fail(f"{at}.type" if "as" not in row else f"{at}.as", f"{_shown(alias)} has no known size", remedy)
        per = self.integer(f"{at}.per", row.get("per", 1), 1, 1 << 16)
        shape = row.get("shape")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 8:
            self.fail(f"{at}.shape", f"{_shown(shape)} is no list of sizes", "write the elements of each dimension")
        sizes = tuple(self.integer(f"{at}.shape", x, 1, MOST_ELEMENTS) for x in shape)
        if math.prod(sizes) > MOST_ELEMENTS:
            self.fail(f"{at}.shape", f"{math.prod(sizes)} elements; up to {MOST_ELEMENTS} are taken", "choose fewer")
        init = row.get("init")
        if filled and init not in INITS:
            remedy = f"one of {', '.join(INITS)}"
            self.fail(f"{at}.init", f"{_shown(init)} says not what is in it before the launch", remedy)
        if not filled and init is not None:
            self.fail(f"{at}.init", "an output holds nothing before the launch", 'kind = "inout", or no init')
        for key, needs in (
            ("seed", ("normal", "uniform")),
            ("low", ("uniform",)),
            ("high", ("uniform",)),
            ("file", ("file",)),
        ):
            if key in row and init not in needs:
                self.fail(f"{at}.{key}", f"of init = {' or '.join(needs)} alone", "leave it out")
        if init == "normal" and not element.is_float:
            self.fail(f"{at}.init", f"normal is for floats, {_shown(alias)} is none", 'init = "uniform"')
        whole = (0.0, 1.0) if element.is_float else (float(element.range[0]), float(element.range[1] + 1))
        low = self.number(f"{at}.low", row.get("low", whole[0]))
        high = self.number(f"{at}.high", row.get("high", whole[1]))
        if low >= high or (not element.is_float and not whole[0] <= low < high <= whole[1]):
            self.fail(f"{at}.low", f"{low} to {high} is no range of {alias}", "low < high, within the type")
        data = Data(name, kind, element, per, sizes, init if isinstance(init, str) else None,
                    self.integer(f"{at}.seed", row.get("seed", 0), 0, (1 << 63) - 1), low, high)  # fmt: skip
        if init != "file":
            return data
        place = self.inside(f"{at}.file", row.get("file"), Path.is_file, "file")
        if place.stat().st_size != data.nbytes:
            problem = f"{place.stat().st_size} bytes; the shape takes {data.nbytes}"
            self.fail(f"{at}.file", problem, "correct the shape or the file")
        return Data(name, kind, element, per, sizes, "file", file=place)


def _shown(value: object) -> str:
    """A value of a file in a message: short, on one line, without control characters."""
    text = repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 80 else text[:77] + "..."
