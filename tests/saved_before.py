"""Plans that an earlier version of Weft saved, and what they must give; see tests/fixtures/plans/README.md."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent / "fixtures/plans"
PLANS = ("cpu-library", "cpu-kernels", "cuda")
DIGESTS: dict[str, str] = json.loads((FOLDER / "digests.json").read_text())


def unpacked(name: str, folder: Path) -> tuple[Path, str]:
    """The plan as a file of that folder, and its digest."""
    path = folder / f"{name}.weft"
    path.write_bytes(lzma.decompress((FOLDER / f"{path.name}.xz").read_bytes()))
    return path, DIGESTS[path.name]


def numbers(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of a plan, and its results in f64."""
    found = load_file(FOLDER / "numbers.safetensors")
    width = 64 if name == "cuda" else 48
    return found[f"input_{width}"], found[f"expected_{width}"]
