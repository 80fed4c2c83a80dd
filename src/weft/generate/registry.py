"""The generators that take part: our own, and plug-ins of the entry-point group `weft.generators`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from weft.generate.cpp import CppGenerator
from weft.generate.cuda import CudaGenerator
from weft.generate.library import LibraryGenerator
from weft.generate.protocol import Generator

_OURS = frozenset({"library", "cpp", "cuda"})


def generators(*, library: bool = True, generated: bool = True, device: str = "cpu") -> Sequence[Generator]:
    """Instances for one kind of device (`cpu` or `cuda`), the library first. Plug-ins count as generated.

    Works from a source tree too, where our own entry points are not installed.
    """
    found: list[Generator] = []
    if library:
        found.append(LibraryGenerator())
    if generated:
        found.append(CudaGenerator() if device == "cuda" else CppGenerator())
        plug_ins = sorted(entry_points(group="weft.generators"), key=lambda e: e.name)
        found += [entry.load()() for entry in plug_ins if entry.name not in _OURS]
    return found
