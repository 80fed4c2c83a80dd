"""Hostile files by families, with variations: what a reader meets that takes any file. Everything is made here.

Each is a named refusal or a right result, in a few seconds and bounded memory: `tools/hostile.py` measures it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tests.hostile import onnx_files as files
from tests.hostile import test_confinement as places
from tests.hostile import test_faults as faults
from tests.hostile.onnx_files import value

Made = Callable[[Path], ModelProto | bytes]
I64 = TensorProto.INT64


def _array(name: str, values: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def _summed(nodes: Sequence[onnx.NodeProto], initialisers: Any, given: Any = None) -> onnx.ModelProto:
    """What is huge is summed up at once: the result is small, so that nothing stops it later."""
    total = helper.make_node("ReduceSum", ["z"], ["y"], keepdims=0)
    return files.model(
        [*nodes, total], inputs=given if given is not None else [value("x")], outputs=[value("y", ())],
        initialisers=initialisers,
    )  # fmt: skip


def _bomb(op: str, inputs: Any, initialisers: Any, given: Any = None, **attributes: Any) -> Any:
    return _summed([helper.make_node(op, inputs, ["z"], name="bomb", **attributes)], initialisers, given)


def _doubled(op: str, times: int) -> Any:
    names = ["x", *(f"v{k}" for k in range(times - 1)), "z"]
    pairs = itertools.pairwise(names)
    named: dict[str, Any] = {"axis": 0} if op == "Concat" else {}
    return _summed([helper.make_node(op, [a, a], [b], **named) for a, b in pairs], [])


def _weights(shape: Sequence[Any]) -> Any:
    return _array("w", np.ones(shape), np.float32)


def _sparse_file(size: Any) -> Any:
    def make(root: Path) -> Any:
        with (root / "holes.bin").open("wb") as f:
            f.truncate(size)
        t = files.external([("location", "holes.bin")], dims=(size // 4,))
        return _summed([helper.make_node("Add", ["x", "w"], ["z"], name="bomb")], [t], [value("x", (1,))])

    return make


def _chain(op: Sequence[str], length: int) -> onnx.ModelProto:
    nodes = [helper.make_node(op[k % len(op)], [f"v{k}" if k else "x"], [f"v{k + 1}"]) for k in range(length)]
    return files.model(nodes, outputs=[value(f"v{length}")])


def bombs() -> dict[str, Made]:
    """More memory than there is, by a few bytes; below the limits on single values."""
    found: dict[str, Made] = {}
    for k in (31, 32, 33):
        found |= _of_power(k)
    for n in (1600, 2000, 2500):
        found |= _of_size(n)
    return found


def _of_power(k: int) -> dict[str, Made]:
    return {
        f"Tile 2^{k}": lambda _: _bomb("Tile", ["x", "r"], [_array("r", [1 << k])]),
        f"Pad 2^{k}": lambda _: _bomb("Pad", ["x", "p"], [_array("p", [0, 1 << k])]),
        f"Range 2^{k}": lambda _: faults.counted(0, 1 << k, 1),
        f"OneHot 2^{k}": lambda _: _bomb(
            "OneHot", ["x", "d", "v"], [_array("d", 1 << k), _array("v", [0, 1], np.float32)], [value("x", (4,), I64)]
        ),
        f"Concat doubled {k}": lambda _: _doubled("Concat", k),
        f"HannWindow 2^{k}": lambda _: _bomb("HannWindow", ["s"], [_array("s", 1 << k)], []),
        f"BlackmanWindow 2^{k}": lambda _: _bomb("BlackmanWindow", ["s"], [_array("s", 1 << k)], []),
        f"file with holes 2^{k + 3}": _sparse_file(1 << (k + 3)),
        f"Resize 2^{k}": lambda _: _bomb(
            "Resize", ["x", "", "s"], [_array("s", [1, 1, 1 << (k - 16), 1 << 14], np.float32)],
            [value("x", (1, 1, 2, 2))], mode="nearest", coordinate_transformation_mode="asymmetric",
        ),
        f"Expand 2^{k}": lambda _: _summed(
            [helper.make_node("Expand", ["x", "s"], ["e"]), helper.make_node("Exp", ["e"], ["z"], name="bomb")],
            [_array("s", [1 << k, 2])],
        ),
    }  # fmt: skip


def _of_size(n: int) -> dict[str, Made]:
    return {
        f"Einsum {n}": lambda _: _bomb("Einsum", ["x", "x", "x"], [], [value("x", (n,))], equation="a,b,c->abc"),
        f"ConvTranspose stride {10 * n}": lambda _: _bomb(
            "ConvTranspose", ["x", "w"], [_weights((2, 2, 1, 1))], [value("x", (1, 2, 4, 4))], strides=[10 * n] * 2
        ),
        f"EyeLike {20 * n}": lambda _: _bomb("EyeLike", ["x"], [], [value("x", (20 * n, 20 * n))]),
        f"MatMul outer {50 * n}": lambda _: _bomb(
            "MatMul", ["x", "t"], [], [value("x", (50 * n, 1)), value("t", (1, 50 * n))]
        ),
    }


def at_fault() -> dict[str, Made]:
    """Operators that nothing can compute, long chains, high ranks."""
    found: dict[str, Made] = {f"fault: {name}": _anywhere(make) for name, (make, _told) in faults.FAULTS.items()}
    for n in (15_000, 20_000, 40_000):
        found[f"chain of {n}"] = _anywhere(_chain, ("Sin", "Relu"), n)
    found["90,000 Relus"] = _anywhere(_chain, ("Relu",), 90_000)
    found["150,000 Relus"] = _anywhere(_chain, ("Relu",), 150_000)
    for rank in (33, 64, 1000, 200_000):
        found |= _of_rank(rank)
    for n in (0, 2, 3, 1000):
        found[f"{n} conditions"] = _anywhere(faults.switch, n)
    return found


def _of_rank(rank: int) -> dict[str, Made]:
    return {
        f"rank {rank}": lambda _: files.model([files.relu()], inputs=[value("x", (1,) * rank)]),
        f"Unsqueeze to {rank}": lambda _: _bomb("Unsqueeze", ["x", "a"], [_array("a", range(rank))]),
    }


def _anywhere(make: Callable[..., ModelProto | bytes], *args: object) -> Made:
    """Whatever the folder is."""
    return lambda _: make(*args)


def confined() -> dict[str, Made]:
    """Files that the model must not read, wherever it names them."""
    found: dict[str, Made] = {}
    locations = {
        "above": "../secret.bin", "absolute": "/etc/hostname", "link": "link.bin", "missing": "none.bin",
        "short": "short.bin",
    }  # fmt: skip
    for place, make in places.PLACES.items():
        for what, location in locations.items():

            def made(root: Path, make: Any = make, location: Any = location) -> Any:
                (root / "short.bin").write_bytes(b"\0" * 4)
                if not (root / "link.bin").is_symlink():
                    (root / "link.bin").symlink_to("/etc/hostname")
                return make(places.outside(location))

            found[f"{place}: {what}"] = made
    return found


def corpus() -> dict[str, Made]:
    """Name -> what makes the file in a folder."""
    old: dict[str, Made] = {f"file: {name}": _anywhere(make) for name, (_, make) in files.MODELS.items()}

    def external(prepare: Any, make: Any) -> Any:
        def made(root: Path) -> Any:
            prepare(root)
            return make(root)

        return made

    outer = {f"external: {name}": external(p, m) for name, (_, p, m) in files.EXTERNAL.items()}
    return {**bombs(), **at_fault(), **confined(), **old, **outer}


QUICK = (
    "Tile 2^32", "OneHot 2^31", "file with holes 2^36", "fault: no groups", "Constant in a branch: above", "rank 1000",
    "file: garbage", "external: symbolic link",
)  # fmt: skip
"""One of each family, for the tests."""
