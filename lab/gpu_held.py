"""Norms of few long rows on an NVIDIA GPU: what each step of a kernel costs whose blocks keep what they read.

    python -m lab.gpu_held [TEXT ...] [--seconds 80] [--dry]

The kernel (`lab/held_norm.cu`) is written by hand; the norms are those of `benchmarks.cases.memory`. A
block reads its part once, into registers or shared memory, all of it before it needs any; blocks meet through the L2
cache as those of `weft.generate.cuda.loops.moments` do, and every element is stored to all places that show it. Per
form the time of: nothing (the launch), a copy to all places, that with sums within blocks, with an exchange nobody
waits for, and everything, which is verified. Of resizes: forms whose threads keep what they gathered, of several
sizes. Times as in `benchmarks.gpu_memory`. Nothing is recorded. `--dry` compiles.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.cases.memory import Case, group_norm, norm_pad, norm_up_pad, residual_norm_pad
from benchmarks.gpu_memory import CASES, TOLERANCE, Bench, medians, prepare, sample, timed

from lab import gpu_meet
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.cuda.intrinsics.approx import approx_header
from weft.generate.cuda.intrinsics.prelude import machine_header, runtime_header
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.moments import meet_header, moments_header
from weft.ir.declined import Declined

STEPS = ("nothing", "copy", "sums", "no-wait", "all")
MORE_SHARED = (48 << 10) + 128
"""From here on a launch asks for what it needs, with what the kernel declares itself."""
WANTED = "candy", "group norm", "instance norm", "resize 256"
RESIZES = [
    Form(threads=n, items=k, corners=True, eager=e) for e in (True, False) for n in (64, 128, 256) for k in (2, 4)
]


@dataclass(frozen=True)
class Shape:
    """One way of dividing the work."""

    threads: int
    columns: int
    """Vectors of 8 channels of a block."""
    parts: int
    """Blocks that share rows."""
    hold: bool = False
    """In shared memory, not in registers."""
    blocks: int = 1
    """Of a multiprocessor, at least."""
    early: bool = False
    """The next kernel may start before this one has waited for the last."""
    dependent: bool = True


SMALL = {
    "candy norm+relu+pad 32x224": [(256, 2, 66), (256, 4, 132), (512, 2, 66), (128, 2, 66)],
    "candy norm+relu+pad 64x112": [(256, 2, 33), (128, 2, 33), (128, 4, 66), (256, 4, 66)],
    "candy norm+residual+pad 128x56": [(128, 2, 16), (256, 4, 33), (256, 2, 16), (128, 4, 33), (64, 2, 16)],
    "candy norm+relu+up+pad 128x56": [(256, 4, 33), (128, 4, 33), (128, 8, 66), (256, 8, 66)],
    "group norm+silu 128x64": [(256, 4, 33), (128, 4, 33), (128, 8, 66), (256, 16, 132)],
    "candy norm 32x224 channels-first": [(512, 1, 4), (256, 1, 4), (128, 1, 4)],
}
LARGE = {
    "candy b16 norm+relu+pad 32x224": [(512, 4, 33, 2), (256, 4, 33, 2), (256, 4, 50, 2), (256, 4, 66, 4)],
    "candy b16 norm+residual+pad 128x56": [(512, 4, 3, 2), (256, 4, 4, 3), (256, 2, 2, 3), (512, 8, 6, 2)],
    "1 GB instance norm 16x128x360": [(512, 4, 88, 2), (256, 4, 88, 2), (256, 4, 132, 3), (512, 8, 132, 1)],
}  # fmt: skip


def shapes(case: Case) -> list[Shape]:
    """What is tried: the best ones also with the next kernel started earlier, and not before the end."""
    small = [Shape(*x) for x in SMALL.get(case.name, [])]
    large = [Shape(*x[:3], hold=True, blocks=x[3]) for x in LARGE.get(case.name, [])]
    starts = [replace(s, early=e, dependent=d) for s in small[:2] for e, d in ((True, True), (False, False))]
    return [*small[:2], *starts, *small[2:], *large]


def text(case: Case, shape: Shape, step: int) -> str:
    """The program for one form."""
    _, channels, height, width = case.shapes[0]
    rows = not case.last
    run = 8 if rows else 4 if case.function is group_norm else 1
    border = 2 if case.function is norm_up_pad else 1 if case.function in (norm_pad, residual_norm_pad) else 0
    out = {0: height * width, 1: (height + 2) * (width + 2), 2: (2 * height + 2) * (2 * width + 2)}[border]
    defines = {
        "THREADS": shape.threads, "COLS": shape.columns, "PARTS": shape.parts, "BLOCKS": shape.blocks,
        "HOLD": int(shape.hold), "STEP": step, "EARLY": int(shape.early), "RUN": run,
        "BORDER": border, "OUT": out, "CHANNELS": channels,
        "HEIGHT": height, "WIDTH": width, "N": height * width // (8 if rows else 1), "STRIDE": 8 if rows else channels,
        "CHANNEL_ROWS": int(rows), "GRID": grid(case, shape),
        "GROUPS": channels if rows else channels // (8 * shape.columns),
        "ACT": 2 if case.function is group_norm else 1 if case.function in (norm_pad, norm_up_pad) else 0,
        "RESIDUAL": int(case.function is residual_norm_pad), "PATIENCE": 1 if step == 3 else 4096,
    }  # fmt: skip
    headers = [machine_header(), runtime_header(), approx_header(), moments_header(), meet_header()]
    body = Path(__file__).with_name("held_norm.cu").read_text()
    return "".join([*headers, *(f"#define {k} {v}\n" for k, v in defines.items()), body])


def grid(case: Case, shape: Shape) -> int:
    """Blocks of the launch."""
    images, channels, _, _ = case.shapes[0]
    return images * shape.parts * (channels // (8 * shape.columns) if case.last else channels)


def shared_bytes(case: Case, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    _, _, height, width = case.shapes[0]
    vectors = -(-(height * width // (1 if case.last else 8)) // shape.parts)
    needed = -(-vectors // (shape.threads // shape.columns)) * shape.threads * 16
    return max(needed, MORE_SHARED) if shape.hold else 0


def compiled(nvrtc: Nvrtc, case: Case, shape: Shape, step: int, cache: str) -> tuple[Path, str] | str:
    """The program and what it takes; or what is wrong with it."""
    try:
        done = nvrtc.compile(text(case, shape, step), arch="sm_90a", cache_dir=Path(cache))
    except WeftError as error:
        return str(getattr(error, "log", error))[:900]
    used = done.resources[-1][1]
    return done.path, f"r={used.registers} spills={used.spill_stores} stack={used.stack_bytes}"


def measure(case: Case, made: dict[tuple[Shape, int], tuple[Path, str] | str], bench: Bench) -> None:
    """All forms and steps of a case."""
    from weft.device.cuda.driver import Module

    given = sample(case, "cuda")
    with torch.no_grad():
        exact = case.function(*(x.float() for x in given))
    images = [x for x in given if x.dim() == 4]
    order = torch.channels_last if case.last else torch.contiguous_format
    result = torch.empty_like(exact, dtype=torch.float16, memory_format=order)
    scale, shift = given[-2:]
    moved = sum(x.nbytes for x in given) + result.nbytes
    law = moved / bench.facts.bandwidth_at(moved) / 1e3
    launches = bench.launches(moved)
    samplers: dict[str, Callable[[], float]] = {}
    alive: list[object] = []
    for (shape, step), found in made.items():
        name = f"{shape} {STEPS[step]}"
        if isinstance(found, str):
            print(f"FAILED {case.name} {name}: {found}", flush=True)
            continue
        blocks = grid(case, shape)
        slots = torch.zeros(2 * blocks * shape.columns * 8, dtype=torch.int64, device="cuda")
        epochs = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        function = Module(found[0]).function("held")
        tensors = (images[0], images[-1], scale, shift, result, slots, epochs)
        bound = function.bind(
            (blocks, 1, 1), (shape.threads, 1, 1), [x.data_ptr() for x in tensors],
            shared_bytes=shared_bytes(case, shape), dependent=shape.dependent,
        )  # fmt: skip
        alive.append((function, tensors))
        run = _on_stream(bound.launch)
        if step == len(STEPS) - 1:
            result.fill_(float("nan"))
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            error = float((result.float() - exact).square_().mean().sqrt() / exact.square().mean().sqrt())
            if not error < TOLERANCE:
                print(f"WRONG {case.name} {name}: error {error:.2g}", flush=True)
                continue
        samplers[name] = timed(run, launches)
    del exact
    times = medians(samplers, 5)
    print(f"{case.name}: {moved / 1e6:.2f} MB, a copy takes {law:.2f} us; {', '.join(STEPS)}", flush=True)
    for shape in dict.fromkeys(s for s, _ in made):
        values = [times.get(f"{shape} {step}") for step in STEPS]
        share = f"{law / values[-1]:.2f}" if values[-1] else "    "
        numbers = " ".join("       -" if v is None else f"{v:8.3f}" for v in values)
        last = next(f for (s, _), f in reversed(made.items()) if s == shape)
        form = f"{shape.threads} threads, {shape.columns} columns, {shape.parts} parts{', held' if shape.hold else ''}"
        form += f"{', early' if shape.early else ''}{'' if shape.dependent else ', plain'}"
        print(f"  {numbers}  {share}  {form} grid={grid(case, shape)} {last[1] if isinstance(last, tuple) else ''}")


def _on_stream(launch: Callable[[int], None]) -> Callable[[], None]:
    def run() -> None:
        launch(torch.cuda.current_stream().cuda_stream)

    return run


def resizes(cases: Sequence[Case], cache: str) -> dict[str, gpu_meet.Made | str]:
    """What resizes have, and further forms."""
    found: dict[str, gpu_meet.Made | str] = {}
    for case in (c for c in cases if c.indices == 0 and "resize" in c.name):
        one = prepare(case, GpuFacts(), 6, cache, lambda _p, _f: [form.schedule() for form in RESIZES])
        found[case.name] = one if isinstance(one, str) else gpu_meet.Made(one, ())
    return found


def main() -> None:
    """Compile all, measure case by case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", help="cases whose name holds one of these; all norms by default")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--workers", type=int, default=12)
    given = parser.parse_args()
    start = time.perf_counter()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(nvrtc.reason)
    cases = [c for c in CASES if any(t in c.name for t in given.texts or WANTED)]
    with tempfile.TemporaryDirectory(prefix="weft-held-") as cache, ThreadPoolExecutor(given.workers) as pool:
        others = resizes(cases, cache)
        cases = [c for c in cases if c.name not in others]
        waiting = {
            (case, shape, step): pool.submit(compiled, nvrtc, case, shape, step, cache)
            for case in cases for shape in shapes(case) for step in range(len(STEPS))
        }  # fmt: skip
        made = {key: future.result() for key, future in waiting.items()}
        print(f"{len(made)} programs after {time.perf_counter() - start:.1f} s", flush=True)
        bench = None if given.dry else Bench(gpu_facts(None))
        for case in (c for c in CASES if c.name in others):
            one = others[case.name]
            if isinstance(one, str) or bench is None:
                print(
                    f"{case.name}: {one if isinstance(one, str) else [one.label(s) for s, _ in one.prepared.kernels]}"
                )
            else:
                gpu_meet.measure(case, one, bench)
        for case in sorted(cases, key=lambda c: math.prod(c.shapes[0])):
            mine = {(s, k): v for (c, s, k), v in made.items() if c is case}
            if bench is None:
                for (shape, step), found in mine.items():
                    if step == len(STEPS) - 1 or isinstance(found, str):
                        print(f"{case.name} {shape} {shared_bytes(case, shape)} B: {found}")
            elif time.perf_counter() - start < given.seconds:
                try:
                    measure(case, mine, bench)
                except (WeftError, RuntimeError) as error:  # one case must not stop the others
                    print(f"FAILED {case.name}: {str(error)[:300]}", flush=True)
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.1f} s in all; facts of {GpuFacts().name}")


if __name__ == "__main__":
    main()
