"""The primitives of the rules that matter most, as text: a change of a rule is reviewed as a diff of these files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fission.harness import build, random

from weft.ir.declined import Declined

F16 = torch.float16
IMAGE = random(1, 4, 6, 6)
V4 = random(4)
WINDOW = {"kernel": (3, 3), "strides": (2, 2), "pads_lo": (1, 1), "pads_hi": (1, 1)}
PLACED = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1)}

GOLDEN: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "softmax": ("softmax", [random(4, 128)], {"axis": -1}),
    "softmax_f16": ("softmax", [random(4, 128, dtype=F16)], {"axis": 0}),
    "log_softmax": ("log_softmax", [random(4, 128)], {"axis": 1}),
    "logsumexp": ("logsumexp", [random(4, 128)], {"axes": (1,), "keepdims": False}),
    "layer_norm_f16": ("layer_norm", [random(4, 64, dtype=F16), random(64), random(64)], {"axes": (-1,), "eps": 1e-5}),
    "rms_norm": ("rms_norm", [random(4, 64), random(64)], {"axes": (-1,), "eps": 1e-6}),
    "group_norm": ("group_norm", [IMAGE, V4, V4], {"groups": 2, "eps": 1e-5}),
    "batch_norm": ("batch_norm", [IMAGE, V4, V4, V4, V4], {"eps": 1e-5}),
    "sigmoid": ("sigmoid", [V4], {}),
    "silu_f16": ("silu", [random(8, dtype=F16)], {}),
    "gelu": ("gelu", [V4], {}),
    "gelu_tanh": ("gelu", [V4], {"approximate": "tanh"}),
    "mish": ("mish", [V4], {}),
    "hard_swish": ("hard_swish", [V4], {}),
    "softplus": ("softplus", [V4], {"beta": 1.0, "threshold": 20.0}),
    "linear": ("linear", [random(2, 3, 8), random(5, 8), random(5)], {}),
    "gemm": ("gemm", [random(8, 3), random(5, 8), random(5)], {"alpha": 0.5, "trans_a": True, "trans_b": True}),
    "conv": (
        "conv",
        [IMAGE, random(8, 4, 3, 3), random(8)],
        {k: v for k, v in WINDOW.items() if k != "kernel"} | {"dilations": (1, 1)},
    ),
    "max_pool": ("max_pool", [IMAGE], WINDOW | {"ceil": True}),
    "max_pool_taps": ("max_pool_taps", [IMAGE], PLACED),
    "max_pool_positions": ("max_pool_positions", [random(1, 4, 3, 3).to(torch.uint8)], {"sizes": (6, 6), **PLACED}),
    "max_pool_taps_gradient": (
        "max_pool_taps_gradient",
        [random(1, 4, 3, 3, dtype=F16), random(1, 4, 3, 3).to(torch.uint8)],
        {"sizes": (6, 6), **PLACED},
    ),
    "avg_pool": ("avg_pool", [IMAGE], WINDOW),
    "adaptive_avg_pool": ("adaptive_avg_pool", [IMAGE], {"output_size": (4, 3)}),
    "resize_nearest": (
        "resize_nearest",
        [IMAGE],
        {"sizes": (1, 4, 12, 12), "coordinate_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "resize_linear": ("resize_linear", [random(1, 1, 2, 2)], {"sizes": (1, 1, 4, 4)}),
    "sdpa": ("sdpa", [random(1, 2, 4, 8), random(1, 2, 6, 8), random(1, 2, 6, 8)], {"causal": True}),
    "sdpa_f16_grouped_masked": (
        "sdpa",
        [random(1, 4, 4, 64, dtype=F16), *[random(1, 2, 6, 64, dtype=F16)] * 2, random(4, 6) > 0],
        {"enable_gqa": True},
    ),
    "einsum": ("einsum", [random(2, 3, 4), random(2, 5, 4)], {"equation": "bij,bkj->bik"}),
    "var": ("var", [random(4, 8)], {"axes": (1,), "correction": 1}),
    "quantize_linear": ("quantize_linear", [V4, torch.tensor(0.5), torch.tensor(3, dtype=torch.uint8)], {}),
    "gather": ("gather", [random(5, 3), torch.tensor([1, -1])], {}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str], None]) -> None:
    rule, operands, params = GOLDEN[name]
    built = build(rule, operands, **params)
    assert not isinstance(built, Declined)
    golden(str(built[0]))
