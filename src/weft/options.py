"""One frozen `Options`; environment and options file are read in one place, by `cli` and `torch_backend` only."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from weft import private
from weft.errors import OptionError
from weft.sm_budget import NAMES, SmBudget


def default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """`WEFT_CACHE_DIR`, else XDG's cache directory, else `~/.cache/weft`; None where no variable says where."""
    if environ.get("WEFT_CACHE_DIR"):
        return Path(environ["WEFT_CACHE_DIR"])
    home = environ.get("HOME")
    base = environ.get("XDG_CACHE_HOME") or (str(Path(home) / ".cache") if home else "")
    return Path(base) / "weft" if base else None


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a caller may choose. Each field is also a variable `WEFT_<FIELD>` and a key of the options file."""

    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    allow_tf32: bool = False
    """On a GPU: products of f32 may round their operands to TF32."""
    allow_fast_f8: bool = False
    """On a GPU: sums of products of 8-bit floats may stay in the tensor cores, which keep some 14 bits; without, they
    move to f32 every 128 terms."""
    budget_s: float = 600.0
    """Wall time for tuning; 0 means: no measuring, the plan that the cache has, else a library plan."""
    threads: int = 0
    """OpenMP threads of generated kernels; 0: as many as torch uses."""
    build_jobs: int = 0
    """Parallel compiler processes; 0: one per core. Measuring is one process: two would disturb each other."""
    cache_dir: Path | None = None
    """Directory of database and binaries, a path or its text; None: WEFT_CACHE_DIR or XDG."""
    memory_limit_bytes: int = 0
    """Most memory that the intermediate values and results of a plan may take at once, without inputs, weights and what
    a library call takes for itself; 0: no limit. With one, the model's own execution is only a comparison."""
    sm_budget: SmBudget | None = None
    """On a GPU: what the kernels of a plan may take of one SM, so that a persistent grid of another job stays resident
    beside them; an object or its text, `registers=49152,shared=200KiB,threads=1792,ctas=24`. None: all of it."""
    compile_memory_bytes: int = 0
    """Most memory that the values of a model may take at once while it is compiled, float64 reference included; a model
    that needs more is refused before anything is computed. 0: what is free."""
    max_primitives: int = 12_000
    """A larger graph is refused: finding a plan takes more than linear time."""
    strict: bool = False
    """No re-association: only rewrites and kernels that are exact."""
    check_indices: bool = False
    """Indices outside of what they index raise `IndexOutsideError`; without, they are clamped."""
    max_members: int = 24
    """Primitives per candidate."""
    max_inputs: int = 12
    max_reductions: int = 6
    max_candidates: int = 20_000
    keep_worker: bool = True
    """The process that measures is kept for the next compilation, for three minutes; on a GPU it holds some memory."""
    keep_per_problem: int = 6
    """Schedules of a problem that are measured after pruning."""
    solver_s: float = 30.0
    solver_gap: float = 1e-3
    trial_timeout_s: float = 30.0
    compile_timeout_s: float = 60.0
    max_plans: int = 8
    """Compiled shapes kept per dynamic model."""
    in_parts: bool = True
    """`weft.compile` of a module that no plan holds whole compiles what can be in plans; without, it refuses it."""
    freeze_weights: bool = True
    """`torch.compile` without gradients: weights are constants, compiled again when they change."""
    allow_library: bool = True
    """Without, a library call stands only where no generated kernel was found right."""
    allow_generated: bool = True
    seed: int = 0
    verbose: bool = False
    dump_dir: Path | None = None
    """Every stage writes what it made there."""

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, str(f.type), getattr(self, f.name)))

    @property
    def cache(self) -> Path | None:
        """The cache directory in use; None, said once, where others could write to it or no place is known."""
        return private.usable(self.cache_dir or default_cache_dir(os.environ))

    @property
    def bounds_plans(self) -> bool:
        """Whether plans keep to what nobody knows of the framework's own execution, which then is no answer."""
        return bool(self.memory_limit_bytes) or self.sm_budget is not None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Options with each `WEFT_<FIELD>` that is set, else as the options file has it (see `options_table`).

        Raises:
            OptionError: a variable or a line of the file that does not parse [W001].
        """
        table = options_table(environ)
        names = {f.name: f.name for f in fields(cls)}
        known = {*names, *SECTIONS}
        unknown = sorted(set(table) - known)
        if unknown:
            raise OptionError(option=unknown[0], problem=f"the options file {table.path} has it, Weft does not")
        chosen = read_fields(cls, names, environ, {k: v for k, v in table.items() if k not in SECTIONS}, table.path)
        return cls(**chosen)  # type: ignore[arg-type]


def _checked(name: str, kind: str, value: object) -> object:
    """A value that a caller gave to a field of this type.

    Raises:
        OptionError: it is of another type, or less than 0 [W001].
    """
    if kind.startswith("SmBudget"):
        return _checked_budget(name, value)
    if kind.startswith("Path"):
        if value is None or isinstance(value, str | os.PathLike):
            return None if value is None else Path(value)
        raise OptionError(option=name, problem=f"{type(value).__name__} is no path")
    types = {"bool": bool, "int": Integral, "float": Real, "str": str}[kind]
    no_such = _NO_SUCH.get(name.rpartition("_")[2])
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise OptionError(option=name, problem=f"{value!r} is {no_such or _KINDS[kind]}")
    number: Any = value
    if kind == "int":
        value = int(number)
    elif kind == "float" and not isinstance(value, int | float):
        value = float(number)  # NumPy's
    if isinstance(value, int | float) and not (value >= 0 or name in _ANY_SIGN):
        raise OptionError(option=name, problem=f"{value!r} is {no_such or 'less than 0'}")
    return value


def _checked_budget(name: str, value: object) -> SmBudget | None:
    if isinstance(value, str):
        value = parse_text(name, "SmBudget", value)
    if value is None:
        return None
    if not isinstance(value, SmBudget):
        raise OptionError(option=name, problem=f"{value!r} is no SmBudget, and not its text")
    if problem := value.problem():
        raise OptionError(option=name, problem=problem)
    return value


_NO_SUCH = {"s": "no number of seconds, 0 or more", "bytes": "no number of bytes, 0 or more"}
_KINDS = {"bool": "neither True nor False", "int": "no whole number", "float": "no number", "str": "no text"}
_ANY_SIGN = ("seed", "max_plans")
SECTIONS = ("limits",)
"""Tables of the options file that others than `Options` read."""
_SIZE = re.compile(r"(-?[0-9][0-9_]*) ?(?:([KMGT])iB)?")


class OptionsTable(dict[str, object]):
    """The options file as a table; empty where there is none."""

    path: str = ""


def options_table(environ: Mapping[str, str]) -> OptionsTable:
    """The TOML file that `WEFT_CONFIG` names (empty: none), else `weft/weft.toml` in XDG's configuration directory.

    Never a file of the working directory: a folder that came with a model must not choose the cache, whose binaries
    are trusted. What is set nearer wins: an argument or flag, the environment, the file, the default.

    Raises:
        OptionError: a file that cannot be read or is no TOML [W001].
    """
    named = environ.get("WEFT_CONFIG")
    table = OptionsTable()
    if named == "":
        return table
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".config")
    path = Path(named) if named else Path(base) / "weft" / "weft.toml"
    try:
        table.update(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        if named:
            raise OptionError(option="WEFT_CONFIG", problem=f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(option="WEFT_CONFIG", problem=f"{path}: {error}") from None
    table.path = str(path)
    return table


def read_fields(
    kind: type[Any], names: Mapping[str, str], environ: Mapping[str, str], table: Mapping[str, object], path: str
) -> dict[str, object]:
    """Fields of a dataclass that are set: `WEFT_<NAME>` first, then `name` in the table; `names` by field.

    Raises:
        OptionError: a value of another type [W001].
    """
    found: dict[str, object] = {}
    for f in fields(kind):
        name = names[f.name]
        text = environ.get(f"WEFT_{name.upper()}")
        if text:
            found[f.name] = parse_text(f"WEFT_{name.upper()}", str(f.type), text)
        elif name in table:
            found[f.name] = _take(f"{name} in {path}", str(f.type), table[name])
    return found


_WORDS = {
    "bool": "true or false",
    "int": "a whole number, or a size such as 256MiB",
    "float": "a number",
    "SmBudget | None": "a text such as registers=49152,shared=200KiB,threads=1792,ctas=24",
}


def parse_text(option: str, kind: str, text: str) -> object:
    """The value of a text for a field of type `kind`, as its annotation spells it.

    Raises:
        OptionError: it is none [W001]; `option` is how the user named it.
    """
    if kind.startswith("SmBudget"):
        return _budget(option, text)
    try:
        if kind == "bool":
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        if kind == "int":
            return _integer(text)
        if kind == "float":
            return float(text)
        return Path(text) if kind.startswith("Path") else text
    except (KeyError, ValueError):
        raise OptionError(option=option, problem=f"{text!r} is not {_WORDS.get(kind, kind)}") from None


def _budget(option: str, text: str) -> SmBudget:
    """`registers=49152,shared=200KiB,threads=1792,ctas=24`, in any order; what is left out has no limit."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (x.strip() for x in part.partition("="))
        if name not in NAMES or name in found:
            problem = f"{name[:40]!r} stands there twice" if name in found else f"{part[:40]!r} is none of its parts"
            raise OptionError(option=option, problem=f"{problem}: {', '.join(f'{n}=N' for n in NAMES)}")
        try:
            found[name] = _integer(number)
        except ValueError:
            problem = f"{name}={number[:40]!r} is not a whole number, or a size such as 200KiB"
            raise OptionError(option=option, problem=problem) from None
    try:
        budget = SmBudget(**{NAMES[name]: value for name, value in found.items()})
    except ValueError as error:
        raise OptionError(option=option, problem=str(error)) from None
    if problem := budget.problem():
        raise OptionError(option=option, problem=problem)
    return budget


def _integer(text: str) -> int:
    """A whole number, also in the units KiB to TiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return int(found[1]) << (10 * (" KMGT".index(found[2]) if found[2] else 0))


def _take(option: str, kind: str, value: object) -> object:
    """A value of TOML, which has types of its own; a text is parsed like a variable's."""
    if isinstance(value, str):
        return parse_text(option, kind, value)
    fits = {"bool": (bool,), "int": (int,), "float": (int, float)}.get(kind, ())
    if not isinstance(value, fits) or (isinstance(value, bool) and kind != "bool"):
        raise OptionError(option=option, problem=f"{value!r} is not {_WORDS.get(kind, kind)}")
    return float(value) if kind == "float" and isinstance(value, int) else value
