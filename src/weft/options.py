"""One frozen `Options`; the environment is read in one place, by `cli` and `torch_backend` only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from weft.errors import OptionError


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`WEFT_CACHE_DIR`, else XDG's cache directory, else `~/.cache/weft`."""
    if environ.get("WEFT_CACHE_DIR"):
        return Path(environ["WEFT_CACHE_DIR"])
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".cache")
    return Path(base) / "weft"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a caller may choose. Each field is also an environment variable `WEFT_<FIELD>`."""

    device: str = "cpu"
    budget_s: float = 600.0
    """Wall time for tuning; 0 means: no measuring, library plan only."""
    threads: int = 0
    """OpenMP threads of generated kernels; 0: as many as torch uses."""
    workers: int = 1
    """Measuring processes. One per device; building runs beside it."""
    build_jobs: int = 0
    """Parallel compiler processes; 0: one per core."""
    cache_dir: Path | None = None
    """Directory of database and binaries; None: WEFT_CACHE_DIR or XDG."""
    strict: bool = False
    """No re-association: only rewrites and kernels that are exact."""
    max_members: int = 24
    """Primitives per candidate."""
    max_inputs: int = 12
    max_reductions: int = 6
    max_candidates: int = 20_000
    keep_per_problem: int = 6
    """Schedules of a problem that are measured after pruning."""
    solver_s: float = 30.0
    solver_gap: float = 1e-3
    trial_timeout_s: float = 30.0
    compile_timeout_s: float = 60.0
    max_plans: int = 8
    """Compiled shapes kept per dynamic model."""
    freeze_weights: bool = True
    """`torch.compile` without gradients: weights are constants, compiled again when they change."""
    allow_library: bool = True
    allow_generated: bool = True
    seed: int = 0
    verbose: bool = False
    dump_dir: Path | None = None
    """Every stage writes what it made there."""

    @property
    def cache(self) -> Path:
        """The cache directory in use."""
        return self.cache_dir or default_cache_dir(os.environ)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Options with each `WEFT_<FIELD>` that is set.

        Raises:
            OptionError: a variable that does not parse [W001].
        """
        found: dict[str, object] = {}
        for f in fields(cls):
            text = environ.get(f"WEFT_{f.name.upper()}")
            if text is None or text == "":
                continue
            found[f.name] = _parse(f.name, str(f.type), text)
        return cls(**found)  # type: ignore[arg-type]


def _parse(name: str, kind: str, text: str) -> object:
    try:
        if kind == "bool":
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        return Path(text) if kind.startswith("Path") else text
    except (KeyError, ValueError):
        raise OptionError(option=f"WEFT_{name.upper()}", problem=f"{text!r} is not a {kind}") from None
