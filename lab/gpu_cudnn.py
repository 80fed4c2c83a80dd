"""Convolutions by several algorithms of cuDNN beside the framework's call, on an NVIDIA GPU.

    python -m lab.gpu_cudnn [--seconds S] [--out FILE]

Each algorithm is found by cuDNN's heuristic, made again from what a plan records of it (the engine's number and its
settings), compared with float64 on normal data, run twice for equal bits, and timed in a CUDA graph. Errors are norms
over the norm of the result. A line: microseconds of the framework's call by its heuristic and by trying
(`cudnn.benchmark`), then of each algorithm; the milliseconds that asking the library and making one algorithm took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness.gpu_time import median_us
from benchmarks.harness.record import environment
from torch.nn import functional

from weft.device.cuda.cudnn import ConvAddresses, Convolution, Cudnn, find_cudnn
from weft.ir.declined import Declined

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32}
LIMIT = {"f16": 2e-3, "bf16": 1e-2, "f32": 1e-5, "tf32": 3e-3}
ALGORITHMS = 6
WORKSPACE = 64 << 20


@dataclass(frozen=True)
class Case:
    """One convolution with what follows it; `x` is (batch, channels, side), `w` (out channels, kernel)."""

    x: tuple[int, int, int]
    w: tuple[int, int]
    dtype: str = "f16"
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    tail: str = ""
    """Any of `bias`, `residual`, `relu`, by plus signs."""
    last: bool = True
    """Channels last in memory."""

    @property
    def name(self) -> str:
        """For people."""
        (n, c, side), (k, kernel) = self.x, self.w
        more = f" dilation {self.dilation}" * (self.dilation > 1) + f" groups {self.groups}" * (self.groups > 1)
        order = "" if self.last else " channels first"
        return f"{n}x{c}x{side} -> {k} {kernel}x{kernel}/{self.stride}{more} {self.dtype} {self.tail}{order}".strip()


CASES = (
    Case((16, 512, 26), (512, 1)),
    Case((16, 64, 56), (64, 3), pad=1, tail="bias+relu"),
    Case((16, 64, 56), (256, 1), tail="bias+residual+relu"),
    Case((1, 128, 208), (64, 1), tail="bias"),
    Case((16, 32, 208), (64, 3), pad=1),
    Case((1, 512, 14), (512, 3), pad=1, tail="bias+relu"),
    Case((4, 48, 33), (64, 3), stride=2, pad=1, tail="bias+relu"),
    Case((2, 64, 40), (64, 3), pad=2, dilation=2, tail="bias"),
    Case((2, 64, 40), (64, 3), pad=1, groups=4, tail="bias+relu"),
    Case((16, 64, 56), (64, 3), "bf16", pad=1, tail="bias+relu"),
    Case((16, 64, 56), (64, 3), "f32", pad=1, tail="bias+relu"),
    Case((16, 64, 56), (64, 3), "tf32", pad=1, tail="bias+relu"),
    Case((4, 64, 56), (64, 3), pad=1, tail="bias+relu", last=False),
)


def drawn(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Operands, and the result in float64."""
    (n, c, side), (k, kernel) = case.x, case.w
    order = torch.channels_last if case.last else torch.contiguous_format

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, device="cuda").to(DTYPES[case.dtype])
        return made.to(memory_format=order) if len(shape) == 4 else made

    given = {"x": normal(n, c, side, side), "w": normal(k, c // case.groups, kernel, kernel)}
    exact = functional.conv2d(
        given["x"].double(), given["w"].double(), None, case.stride, case.pad, case.dilation, case.groups
    )
    if "residual" in case.tail:
        given["residual"] = normal(*exact.shape)
        exact = exact + given["residual"].double()
    if "bias" in case.tail:
        given["bias"] = normal(k)
        exact = exact + given["bias"].double()[None, :, None, None]
    given["y"] = torch.empty(exact.shape, dtype=DTYPES[case.dtype], device="cuda").to(memory_format=order)
    return given, exact.relu() if "relu" in case.tail else exact


def asked(case: Case, given: dict[str, torch.Tensor]) -> Convolution:
    """As the library is asked for it."""
    x, w, y = (given[name] for name in "xwy")
    return Convolution(
        tuple(x.shape), x.stride(), tuple(w.shape), w.stride(), y.stride(), case.dtype,
        ((case.pad, case.pad), (case.pad, case.pad)), (case.stride, case.stride), (case.dilation, case.dilation),
        bias="bias" in given, residual="residual" in given, activation="relu" if "relu" in case.tail else "",
    )  # fmt: skip


def frameworks(case: Case, given: dict[str, torch.Tensor], *, trying: bool) -> float:
    """Microseconds of the framework's convolution and operators for what follows."""
    torch.backends.cudnn.benchmark = trying
    torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"

    def call() -> torch.Tensor:
        y = functional.conv2d(
            given["x"], given["w"], given.get("bias"), case.stride, case.pad, case.dilation, case.groups
        )
        y = y + given["residual"] if "residual" in given else y
        return torch.relu(y) if "relu" in case.tail else y

    return median_us(call, launches=20, rounds=9)


def row_of(cudnn: Cudnn, case: Case) -> dict[str, Any]:
    """One case: every algorithm, right or not, and its time."""
    given, exact = drawn(case)
    convolution = asked(case, given)
    start = time.perf_counter()
    found = cudnn.algorithms(convolution, ALGORITHMS, workspace=WORKSPACE)
    asking_ms = (time.perf_counter() - start) * 1e3
    row: dict[str, Any] = {"case": case.name, "asking_ms": asking_ms, "algorithms": []}
    row |= {"heuristic_us": frameworks(case, given, trying=False), "trying_us": frameworks(case, given, trying=True)}
    for one in found:
        start = time.perf_counter()
        again = cudnn.restore(convolution, one.engine, one.knobs)
        about: dict[str, Any] = {"engine": one.engine, "knobs": one.knobs, "workspace": one.workspace}
        about["making_ms"] = (time.perf_counter() - start) * 1e3
        row["algorithms"].append(about)
        if isinstance(again, Declined):
            about["declined"] = again.reason
            continue
        room = torch.empty(max(again.workspace, 1), dtype=torch.uint8, device="cuda")
        x, w, y = (given[name].data_ptr() for name in "xwy")
        bias, residual = (given[name].data_ptr() if name in given else 0 for name in ("bias", "residual"))
        at = ConvAddresses(x, w, y, bias, residual, room.data_ptr())
        first, second = one.bind(at), again.bind(at)
        results = []
        for launch in (first, second, second):
            given["y"].fill_(torch.nan)
            launch(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            results.append(given["y"].clone())
        about["error"] = float((results[1].double() - exact).norm() / exact.norm())
        about["equal_bits"] = all(torch.equal(results[0], y) for y in results[1:])
        about["right"] = about["error"] <= LIMIT[case.dtype] and about["equal_bits"]

        def run(launch: Callable[[int], None] = second) -> None:
            launch(torch.cuda.current_stream().cuda_stream)

        about["us"] = median_us(run, launches=20, rounds=9)
    return row


def main() -> int:
    """Measure every case; 1 where one is wrong, 2 without a library."""
    parser = argparse.ArgumentParser(prog="lab.gpu_cudnn", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="no case is begun after so many (60)")
    parser.add_argument("--out", type=Path, help="file of results, JSON lines")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU here", file=sys.stderr)
        return 2
    torch.zeros(1, device="cuda")
    cudnn = find_cudnn()
    if isinstance(cudnn, Declined):
        print(cudnn.reason, file=sys.stderr)
        return 2
    started, right = time.perf_counter(), True
    lines = [json.dumps(environment(" ".join(sys.argv)))]
    print(f"cuDNN {cudnn.version}", flush=True)
    for case in CASES:
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for {case.name} and what follows")
            break
        try:
            row = row_of(cudnn, case)
        except Exception as error:
            print(f"FAILED {case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            right = False
            continue
        lines.append(json.dumps({"record": "case", "suite": "cudnn", **row}))
        times = " ".join(f"{x['us']:.1f}{'' if x['right'] else '!'}" if "us" in x else "-" for x in row["algorithms"])
        making = [round(x["making_ms"], 1) for x in row["algorithms"]]
        print(
            f"{case.name:55} heuristic {row['heuristic_us']:7.1f} trying {row['trying_us']:7.1f} algorithms {times}"
            f"  asking {row['asking_ms']:.0f} ms, making {making}",
            flush=True,
        )
        for x in row["algorithms"]:
            if not x.get("right"):
                print(f"   {'NOT RIGHT':10} {x}", flush=True)
                right = False
        if given.out:
            given.out.write_text("\n".join(lines) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
