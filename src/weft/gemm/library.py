"""The algorithms of cuBLASLt's heuristic for a product, as calls that the measuring worker runs like any other.

What the library cannot fuse follows as torch's operators; of integers it leaves sums in i32, so that their scales and
whatever follows are torch's, too. These calls are for measuring alone: plans name an algorithm by its bytes
(`weft.generate.library.lt`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from weft.device.cuda.cublaslt import (
    MOST,
    WORKSPACE_BYTES,
    CublasLt,
    LtAddresses,
    LtAlgorithm,
    LtProduct,
    find_cublaslt,
)
from weft.errors import DeviceError
from weft.gemm.epilogue import Epilogue, epilogue
from weft.gemm.spec import Gemm, layout_of, typed
from weft.generate.library import execute
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CallStep, LibraryCall, Ref, Schedule
from weft.tune.keys import PACKAGE, source_hash

TARGET = "weft.gemm.algorithm"
ABSENT = "the heuristic has no algorithm of this number"


def schedule_of(number: int) -> Schedule:
    """Of the heuristic's algorithm of that number."""
    return Schedule("cublaslt", (("algorithm", number),))


def contenders(g: Gemm, *, tf32: bool, most: int = MOST) -> list[tuple[Schedule, LibraryCall]]:
    """Calls of the heuristic's first algorithms; those that it turns out not to have are errors when they are run.

    Raises:
        DeviceError: there is no cuBLASLt [W301].
    """
    text = json.dumps(
        {
            "m": g.m, "n": g.n, "k": g.k, "layout": g.layout, "dtype": g.types, "epilogue": g.epilogue.text,
            "fast": g.fast, "tf32": tf32 and g.dtype is DType.F32, "most": most,
            # measurements are found again by what ran: this module and the library
            "sources": source_hash(PACKAGE, ("gemm/library.py", "gemm/epilogue.py")),
            "version": found_library().version,
        },
        sort_keys=True,
    )  # fmt: skip
    inputs = tuple(Ref("in", i) for i in range(len(g.shapes)))
    calls = []
    for number in range(most):
        step = CallStep(TARGET, (text, number, *inputs))
        schedule = schedule_of(number)
        calls.append((schedule, LibraryCall(schedule, (), (step,), (Ref("tmp", 0),), out_variant=True)))
    return calls


def found_library() -> CublasLt:
    """The library.

    Raises:
        DeviceError: there is none [W301].
    """
    found = find_cublaslt()
    if isinstance(found, Declined):
        raise DeviceError(problem=f"nothing to compare with: {found.reason}")
    return found


@dataclass(frozen=True)
class _Offer:
    """What the heuristic has for a product on one GPU."""

    gemm: Gemm
    algorithms: list[LtAlgorithm]
    room: torch.Tensor


@lru_cache(maxsize=4)
def _offer(text: str, device: torch.device) -> _Offer:
    m = json.loads(text)
    g = Gemm(m["m"], m["n"], m["k"], layout=layout_of(m["layout"]), epilogue=epilogue(m["epilogue"]), fast=m["fast"])
    g = typed(g, m["dtype"])
    if g.dtype.is_integer:
        asked = LtProduct(g.m, g.n, g.k, "i8", g.layout, out="i32")
    else:
        fused, _ = g.epilogue.divided
        asked = LtProduct(
            g.m, g.n, g.k, "tf32" if m["tf32"] else g.dtype.value, g.layout, bool(fused.bias), bool(fused.residual),
            fused.activation, (g.right or g.dtype).value if g.dtype.is_float8 else "",
            g.out.value if g.dtype.is_float8 else "", g.fast,
        )  # fmt: skip
    room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _Offer(g, found_library().algorithms(asked, int(m["most"])), room)


def run(text: str, number: int, *inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The step: A, B, the epilogue's operands, the scales of A and B; `out` is the result.

    Raises:
        DeviceError: the library fails, is not there, or has no such algorithm [W301].
    """
    offer = _offer(text, out.device)
    if number >= len(offer.algorithms):
        raise DeviceError(problem=ABSENT)
    g, algorithm = offer.gemm, offer.algorithms[number]
    a, b, *others = inputs
    named = {name: x for (name, _), x in zip(g.epilogue.operands, others, strict=False)}
    now = torch.cuda.current_stream().cuda_stream
    room = offer.room.data_ptr()
    if g.dtype.is_integer:
        sums = torch.empty(g.m, g.n, dtype=torch.int32, device=out.device)
        algorithm.bind(LtAddresses(a.data_ptr(), b.data_ptr(), sums.data_ptr(), workspace=room))(now)
        scale = others[-2] * others[-1]
        if g.epilogue.name == "none":
            torch.mul(sums, scale, out=out)
        else:
            out.copy_(torch_value(g.epilogue, sums * scale, {k: x.float() for k, x in named.items()}))
        return out
    fused, rest = g.epilogue.divided
    bias, c = (named[x].data_ptr() if x else 0 for x in (fused.bias, fused.residual))
    scales = (others[-2].data_ptr(), others[-1].data_ptr()) if g.dtype.is_float8 else (0, 0)
    algorithm.bind(LtAddresses(a.data_ptr(), b.data_ptr(), out.data_ptr(), bias, c, scales, room))(now)
    follow(rest, out, named)
    return out


def follow(rest: Epilogue | None, out: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
    """What a library did not fuse, by torch's operators on its result, in place."""
    if rest is None:
        return
    after = IN_PLACE.get(rest.text)
    if after is None:
        out.copy_(torch_value(rest, out, named))
    else:
        after(out, named)


def torch_value(e: Epilogue, acc: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An epilogue by torch's own operators, in the type of its operands."""

    def call(name: str, arguments: list[torch.Tensor | float]) -> torch.Tensor:
        if name in ("max", "min"):
            x, y = sorted(arguments, key=lambda a: isinstance(a, float))
            assert isinstance(x, torch.Tensor)
            if isinstance(y, float):
                return x.clamp(min=y) if name == "max" else x.clamp(max=y)
            return torch.maximum(x, y) if name == "max" else torch.minimum(x, y)
        return _TORCH[name](*arguments)

    return e.fold({"acc": acc, **given}, call)


_TORCH: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "erf": torch.erf,
    "log": torch.log,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
}
IN_PLACE: Mapping[str, Callable[[torch.Tensor, Mapping[str, torch.Tensor]], object]] = {
    "silu(acc)": lambda out, named: torch.ops.aten.silu.out(out, out=out),
    "gelu(acc)": lambda out, named: torch.ops.aten.gelu.out(out, out=out),
    "gelu_tanh(acc)": lambda out, named: torch.ops.aten.gelu.out(out, approximate="tanh", out=out),
    "acc * full": lambda out, named: out.mul_(named["full"]),
    "acc + residual": lambda out, named: out.add_(named["residual"]),
    "relu(acc)": lambda out, named: out.relu_(),
}
"""One operator that writes where it reads."""

execute.register(TARGET, run)
