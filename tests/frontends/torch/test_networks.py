"""The ten networks: imported whole, nothing opaque, and equal to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.models import NETWORKS
from tests.frontends.torch.support import evaluate
from tests.slow import few

from weft.frontends.torch import import_exported
from weft.ir.verify import verify_graph

SMALL = {
    "candy": (3, 24, 24),
    "efficientvit_b1": (3, 64, 64),
    "yolox_nano": (3, 64, 64),
    "segformer_b0": (3, 64, 64),
    "resnet50": (3, 40, 40),
    "inception_v3": (3, 75, 75),
    "bert_base": (6,),
}
"""Sizes at which NumPy is quick; the other three (a fixed number of patches, large layers) are only imported."""


def exported(name: str, shape: tuple[int, ...]) -> Any:
    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().eval()
    x = torch.randint(network.vocabulary, (1, *shape)) if network.vocabulary else torch.randn(1, *shape)
    with torch.no_grad():
        return model, x, torch.export.export(model, (x,), strict=False)


@pytest.mark.parametrize("name", few(NETWORKS, 2))
def test_nothing_is_opaque(name: str) -> None:
    _, _, program = exported(name, SMALL.get(name, NETWORKS[name].shape))
    imported = import_exported(program)
    verify_graph(imported.graph)
    assert imported.opaque == ()
    assert imported.operators > 30
    located = [o for o in imported.graph.origins if o.rule]
    assert all(o.source and o.location for o in located)


@pytest.mark.parametrize("name", few(SMALL, 2))
def test_agrees_with_eager(name: str) -> None:
    model, x, program = exported(name, SMALL[name])
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(x))
    found = evaluate(import_exported(program).graph, [x])
    assert len(found) == len(wanted)
    for y, z in zip(found, wanted, strict=True):
        scale = float(z.abs().max()) or 1.0
        torch.testing.assert_close(y / scale, z / scale, rtol=1e-4, atol=1e-4)
