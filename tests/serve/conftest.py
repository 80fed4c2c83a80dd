"""A small network, saved as plans for several batch sizes by this user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import weft
from weft.serve import ServeOptions


@dataclass(frozen=True)
class Saved:
    """Where plans are, and what they give."""

    cache: Path
    one: Path
    eight: Path
    other: Path
    """`eight` with other weights."""
    mixing: Path
    """Of another network, whose rows know each other; batch 3."""
    two: Path
    """Of a network with two inputs and two outputs, of other types; batch 4."""
    modules: dict[str, torch.nn.Module]

    def options(self, **settings: float) -> ServeOptions:
        return ServeOptions(cache=self.cache, **settings)  # type: ignore[arg-type]

    def answer(self, name: str, *given: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        with torch.no_grad():
            found = self.modules[name](*map(torch.from_numpy, given))
        return [x.numpy() for x in (found if isinstance(found, tuple) else [found])]


def mlp() -> torch.nn.Module:
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4), torch.nn.Softmax(-1)]
    return torch.nn.Sequential(*layers).eval()


class Mixing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class Two(torch.nn.Module):
    def forward(self, a: torch.Tensor, flag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(flag[:, None], a * 3, a), a.argmax(1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("serve")
    options = weft.Options(budget_s=0, threads=1, cache_dir=folder / "cache")
    modules = {"mlp": mlp(), "other": mlp(), "mixing": Mixing(), "two": Two()}
    flags = torch.tensor([True, False, True, False])
    for name, module, inputs in (
        ("one", "mlp", (torch.randn(1, 16),)), ("eight", "mlp", (torch.randn(8, 16),)),
        ("other", "other", (torch.randn(8, 16),)), ("mixing", "mixing", (torch.randn(3, 5),)),
        ("two", "two", (torch.randn(4, 5).half(), flags)),
    ):  # fmt: skip
        weft.compile(modules[module], inputs, options=options).save(folder / f"{name}.weft")
    paths = {n: folder / f"{n}.weft" for n in ("one", "eight", "other", "mixing", "two")}
    return Saved(folder / "cache", modules=modules, **paths)
