"""Layout rules: exact against torch, in every element type (they move bytes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import DTYPES, declined, random, run, same

X = torch.arange(120.0).reshape(2, 3, 4, 5)

EXACT: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "identity": ("identity", {}, lambda x: x),
    "reshape": ("reshape", {"shape": (6, -1)}, lambda x: x.reshape(6, -1)),
    "reshape_zero_copies": ("reshape", {"shape": (0, -1, 5), "zero_copies": True}, lambda x: x.reshape(2, 12, 5)),
    "unsqueeze": ("unsqueeze", {"axes": (0, -1)}, lambda x: x[None, ..., None]),
    "flatten": ("flatten", {"axis": 2}, lambda x: x.reshape(6, 20)),
    "flatten_0": ("flatten", {"axis": 0}, lambda x: x.reshape(1, 120)),
    "flatten_last": ("flatten", {"axis": 4}, lambda x: x.reshape(120, 1)),
    "flatten_negative": ("flatten", {"axis": -1}, lambda x: x.reshape(24, 5)),
    "flatten_range": ("flatten_range", {"start": 1, "end": 2}, lambda x: x.flatten(1, 2)),
    "transpose": ("transpose", {"perm": (2, 0, -1, 1)}, lambda x: x.permute(2, 0, 3, 1)),
    "transpose_reverse": ("transpose", {}, lambda x: x.permute(3, 2, 1, 0)),
    "swap_axes": ("swap_axes", {"first": 1, "second": -1}, lambda x: x.transpose(1, -1)),
    "slice": ("slice", {"starts": (1, -3), "ends": (9, -1), "axes": (1, 3)}, lambda x: x[:, 1:9, :, -3:-1]),
    "slice_steps": (
        "slice",
        {"starts": (0, 3), "ends": (4, -99), "steps": (2, -2), "axes": (1, 2)},
        lambda x: x[:, 0:4:2][:, :, [3, 1]],
    ),
    "slice_default_axes": ("slice", {"starts": (1,), "ends": (2,)}, lambda x: x[1:2]),
    "slice_empty": ("slice", {"starts": (3,), "ends": (1,), "axes": (2,)}, lambda x: x[:, :, 3:1]),
    "slice_huge": ("slice", {"starts": (-(2**62),), "ends": (2**62,), "axes": (2,)}, lambda x: x),
    "slice_backward": (
        "slice",
        {"starts": (2**62,), "ends": (-(2**62),), "steps": (-1,), "axes": (3,)},
        lambda x: x.flip(3),
    ),
    "select": ("select", {"axis": 2, "index": -1}, lambda x: x.select(2, -1)),
    "expand": ("expand", {"shape": (3, -1, -1, -1, -1)}, lambda x: x.expand(3, -1, -1, -1, -1)),
    "tile": ("tile", {"repeats": (2, 1, 3, 2)}, lambda x: x.repeat(2, 1, 3, 2)),
    "tile_more": ("tile", {"repeats": (2, 1, 1, 3, 1)}, lambda x: x.repeat(2, 1, 1, 3, 1)),
    "repeat_interleave": ("repeat_interleave", {"repeats": 3, "axis": 1}, lambda x: x.repeat_interleave(3, 1)),
    "flip": ("flip", {"axes": (0, -1)}, lambda x: x.flip(0, -1)),
    "roll": ("roll", {"shifts": (1, -2), "axes": (1, 3)}, lambda x: x.roll((1, -2), (1, 3))),
    "roll_flat": ("roll", {"shifts": (7,)}, lambda x: x.roll(7)),
    "diagonal": ("diagonal", {"offset": 1, "axis1": 2, "axis2": 3}, lambda x: x.diagonal(1, 2, 3)),
    "diagonal_below": ("diagonal", {"offset": -2, "axis1": 3, "axis2": 1}, lambda x: x.diagonal(-2, 3, 1)),
    "diagonal_outside": ("diagonal", {"offset": 9, "axis1": 2, "axis2": 3}, lambda x: x.diagonal(9, 2, 3)),
    "pad": (
        "pad",
        {"lo": (0, 1, 0, 2), "hi": (1, 0, 0, 3), "value": 3.0},
        lambda x: F.pad(x, (2, 3, 0, 0, 1, 0, 0, 1), value=3),
    ),
    "pad_negative": ("pad", {"lo": (0, 0, -1, 2), "hi": (0, 0, 1, -3)}, lambda x: F.pad(x, (2, -3, -1, 1))),
    "pad_reflect": (
        "pad",
        {"lo": (0, 0, 3, 2), "hi": (0, 0, 1, 4), "mode": "reflect"},
        lambda x: F.pad(x.double(), (2, 4, 3, 1), "reflect").to(x.dtype),
    ),
    "pad_edge": (
        "pad",
        {"lo": (0, 0, 3, 2), "hi": (0, 0, 1, 7), "mode": "edge"},
        lambda x: F.pad(x.double(), (2, 7, 3, 1), "replicate").to(x.dtype),
    ),
    "pad_wrap": (
        "pad",
        {"lo": (0, 0, 3, 2), "hi": (0, 0, 1, 5), "mode": "wrap"},
        lambda x: F.pad(x.double(), (2, 5, 3, 1), "circular").to(x.dtype),
    ),
    "tril": ("tril", {"k": 1}, lambda x: x.tril(1)),
    "triu": ("triu", {"k": -2}, lambda x: x.triu(-2)),
    "trilu": ("trilu", {"upper": False, "k": -1}, lambda x: x.tril(-1)),
    "unfold_axis": ("unfold_axis", {"axis": 2, "size": 3, "step": 1}, lambda x: x.unfold(2, 3, 1)),
    "unfold_axis_step": ("unfold_axis", {"axis": 3, "size": 2, "step": 3}, lambda x: x.unfold(3, 2, 3)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_layout_equals_torch(case: str, dtype: torch.dtype) -> None:
    rule, params, definition = EXACT[case]
    x = X.to(dtype)
    if dtype is torch.bool and rule == "pad" and "value" in params:
        params = {**params, "value": 1.0}
    same(run(rule, x, **params)[0], definition(x).contiguous())


def test_reshape_of_nothing_and_of_scalars() -> None:
    same(run("reshape", torch.zeros(0, 3), shape=(0, 7))[0], torch.zeros(0, 7))
    same(run("reshape", torch.tensor(2.0), shape=())[0], torch.tensor(2.0))
    same(run("reshape", torch.tensor(2.0), shape=(1, 1))[0], torch.tensor([[2.0]]))


def test_squeeze() -> None:
    x = torch.arange(6.0).reshape(1, 2, 1, 3)
    same(run("squeeze", x)[0], x.squeeze())
    same(run("squeeze", x, axes=(0,))[0], x.squeeze(0))
    same(run("squeeze", x, axes=(-2, 1))[0], x.squeeze((-2, 1)))


def test_split_chunk_unbind() -> None:
    for name, params, wanted in (
        ("split", {"axis": -1, "sizes": (1, 0, 4)}, X.split((1, 0, 4), -1)),
        ("chunk", {"axis": 2, "chunks": 3}, X.chunk(3, 2)),
        ("chunk", {"axis": 3, "chunks": 4}, X.chunk(4, 3)),
        ("unbind", {"axis": 1}, X.unbind(1)),
    ):
        found = run(name, X, **params)
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            same(f, w.contiguous())


def test_concat_and_stack() -> None:
    x, y = X, X[:, :1] + 0.5
    same(run("concat", x, y, x, axis=1)[0], torch.cat([x, y, x], 1))
    same(run("concat", x, axis=-2)[0], x)
    same(run("concat", torch.zeros(0), x, axis=2)[0], torch.cat([torch.zeros(0), x], 2))
    same(run("stack", x, x + 1, axis=-1)[0], torch.stack([x, x + 1], -1))
    same(run("stack", x, axis=0)[0], x[None])


def test_broadcast_tensors() -> None:
    found = run("broadcast_tensors", X[:1], X[0, 0, 0])
    same(found[0], X[:1])
    same(found[1], X[0, 0, 0].expand(1, 3, 4, 5).contiguous())


def test_depth_and_space() -> None:
    x = random(2, 12, 4, 6)
    n, _, h, w = x.shape
    dcr = x.reshape(n, 2, 2, 3, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, 3, 8, 12)
    same(run("depth_to_space", x, block=2)[0], dcr)
    same(run("depth_to_space", x, block=2, mode="CRD")[0], F.pixel_shuffle(x, 2))
    same(run("pixel_shuffle", x, factor=2)[0], F.pixel_shuffle(x, 2))
    same(run("pixel_shuffle", x[None, None], factor=2)[0], F.pixel_shuffle(x[None, None], 2))
    same(run("pixel_unshuffle", x[0], factor=2)[0], F.pixel_unshuffle(x[0], 2))
    same(run("space_to_depth", dcr, block=2)[0], x)
    same(run("space_to_depth", F.pixel_shuffle(x, 2), block=2, mode="CRD")[0], x)
    same(run("channel_shuffle", x, groups=3)[0], F.channel_shuffle(x, 3))


def test_unfold_and_fold() -> None:
    x = random(2, 3, 6, 7)
    params = {"kernel": (3, 2), "dilations": (1, 2), "strides": (2, 1)}
    wanted = F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1))
    same(run("unfold", x, pads=(1, 0), **params)[0], wanted)
    same(run("unfold", x[0], pads=(1, 0), **params)[0], wanted[0])
    back = run("fold", wanted, output_size=(6, 7), pads_lo=(1, 0), pads_hi=(1, 0), **params)[0]
    torch.testing.assert_close(back, F.fold(wanted, (6, 7), (3, 2), (1, 2), (1, 0), (2, 1)))


def test_pad_reflects_more_than_once_as_numpy_does() -> None:
    x = torch.arange(3.0)
    found = run("pad", x, lo=(5,), hi=(4,), mode="reflect")[0]
    same(found, torch.from_numpy(np.pad(x.numpy(), (5, 4), mode="reflect")))
    same(run("pad", torch.ones(1), lo=(2,), hi=(2,), mode="reflect")[0], torch.ones(5))


def test_generated_tensors() -> None:
    same(run("filled", shape=(2, 3), value=7, dtype="i64")[0], torch.full((2, 3), 7))
    same(run("filled", shape=(), value=1.5, dtype="bf16")[0], torch.tensor(1.5, dtype=torch.bfloat16))
    same(run("filled", shape=(2,), value=True, dtype="bool")[0], torch.ones(2, dtype=torch.bool))
    same(run("arange", size=5, start=-3, step=2)[0], torch.arange(-3, 7, 2))
    same(run("arange", size=0)[0], torch.arange(0))
    same(run("arange", size=4, start=10, step=-3, dtype="f32")[0], torch.arange(10.0, 0, -3))
    same(run("arange", size=7, start=0.5, step=0.1, dtype="f64")[0], 0.5 + 0.1 * torch.arange(7, dtype=torch.float64))
    same(run("arange", size=3000, dtype="f16")[0], torch.arange(3000, dtype=torch.float64).half())
    same(run("eye", rows=3, cols=4)[0], torch.eye(3, 4))
    same(
        run("eye", rows=3, cols=4, k=-1, dtype="i32")[0],
        torch.eye(4, 4, dtype=torch.int32)[[3, 0, 1]] * torch.tensor([[0], [1], [1]]).int(),
    )
    x = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -2.0, -1.0]])
    same(run("hardmax", x, axis=1)[0], torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    same(run("hardmax", x, axis=0)[0], torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))


def test_reverse_sequence() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    wanted = torch.stack([x[:, b].clone() for b in range(4)], 1)
    for b, n in enumerate((4, 3, 2, 1)):
        wanted[:n, b] = x[:n, b].flip(0)
    same(run("reverse_sequence", x, torch.tensor([4, 3, 2, 1]))[0], wanted)
    found = run("reverse_sequence", x.t().contiguous(), torch.tensor([4, 3, 2, 1]), batch_axis=0, time_axis=1)[0]
    same(found, wanted.t().contiguous())


@pytest.mark.parametrize(
    ("rule", "params", "reason"),
    [
        ("reshape", {"shape": (7, -1)}, "reshape of"), ("reshape", {"shape": (-1, -1)}, "reshape of"),
        ("reshape", {"shape": (-2, 60)}, "reshape of"),
        ("reshape", {"shape": (1,) * 4 + (0,), "zero_copies": True}, "reshape"),
        ("squeeze", {"axes": (9,)}, "axis 9"), ("unsqueeze", {"axes": (0, 0)}, "repeat"),
        ("flatten", {"axis": 5}, "axis 5"), ("flatten_range", {"start": 2, "end": 1}, "flatten"),
        ("transpose", {"perm": (0, 0, 1, 2)}, "transpose by"), ("swap_axes", {"first": 0, "second": 7}, "swap"),
        ("slice", {"starts": (0,), "ends": (1,), "steps": (0,)}, "slice"),
        ("slice", {"starts": (0, 0), "ends": (1, 1), "axes": (1, 1)}, "repeat"),
        ("select", {"axis": 0, "index": 2}, "select of"), ("split", {"axis": 0, "sizes": (1, 2)}, "split"),
        ("chunk", {"axis": 0, "chunks": 0}, "chunk"), ("unbind", {"axis": 5}, "unbind"),
        ("concat", {"axis": 4}, "concat along"), ("stack", {"axis": 6}, "stack along"),
        ("expand", {"shape": (2, 3, 4, 6)}, "do not broadcast"), ("tile", {"repeats": (2,)}, "tile"),
        ("repeat_interleave", {"repeats": -1, "axis": 0}, "repeat_interleave"), ("flip", {"axes": (4,)}, "axis 4"),
        ("roll", {"shifts": (1, 2), "axes": (0,)}, "roll"), ("diagonal", {"axis1": 1, "axis2": 1}, "diagonal"),
        ("pad", {"lo": (0,), "hi": (0,)}, "pad of"), ("pad", {"lo": (0,) * 4, "hi": (1,) * 4, "mode": "odd"}, "odd"),
        ("pad", {"lo": (-3, 0, 0, 0), "hi": (0,) * 4}, "cuts more"),
        ("depth_to_space", {"block": 2}, "depth_to_space"), ("space_to_depth", {"block": 3}, "space_to_depth"),
        ("pixel_shuffle", {"factor": 2}, "depth_to_space"), ("channel_shuffle", {"groups": 2}, "2 groups"),
        ("unfold_axis", {"axis": 0, "size": 3, "step": 1}, "unfold_axis"), ("hardmax", {"axis": 4}, "hardmax"),
    ],
)  # fmt: skip
def test_layout_declines(rule: str, params: dict[str, Any], reason: str) -> None:
    assert reason in declined(rule, X, **params)


def test_concat_and_stack_decline_unequal_operands() -> None:
    assert "concat" in declined("concat", X, X[:, :2, :1], axis=0)
    assert "several element types" in declined("concat", X, X.long(), axis=0)
    assert "of nothing" in declined("concat", axis=0)
    assert "of nothing" in declined("stack", axis=0)
    assert "stack along" in declined("stack", X, X[:1], axis=0)
