"""Sources for the tests of foreign kernels, with a kernel.toml beside each."""

from __future__ import annotations

from pathlib import Path

from weft.generate.cuda.foreign.manifest import Manifest, read

HEAD = """source = "k.cu"
entry = "k"
grid = [4]
block = [64]
"""
IN_OUT = """[[parameters]]
name = "x"
type = "float"
kind = "inout"
shape = [256]
init = "normal"
seed = 3
"""
KERNEL = "__global__ void k(float* x) {\n  %s\n}\n"


def manifest(folder: Path, source: str, head: str = HEAD, rest: str = IN_OUT, **changes: object) -> Manifest:
    """A kernel.toml, read, and its source."""
    (folder / "k.cu").write_text(source, encoding="utf-8")
    (folder / "kernel.toml").write_text(head + rest, encoding="utf-8")
    return read(folder / "kernel.toml", changes={k.replace("__", "."): v for k, v in changes.items()})
