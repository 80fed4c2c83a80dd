"""What `weft gemm` runs: the search of one product, or of a list of them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from weft.cli.age import age_s
from weft.cli.show import Screen, microseconds, plain, print_pairs
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import DeviceError, OptionError, WeftError
from weft.gemm import folder
from weft.gemm.epilogue import epilogue
from weft.gemm.search import Measure, SearchResult, dry_run, rejected, search
from weft.gemm.spec import Gemm, Search, layout_of, read_list, read_tokens, thirteen, typed
from weft.kernels.measurement import Measurement
from weft.options import Options

PEERS = ("cublas", "cutlass")
SHOWN = 8
MOST_LIST_BYTES = 1 << 20


def run(
    tokens: list[str], layout: str, dtype: str, epilogue_text: str, against: str, limit: int, output: Path, device: str,
    form: str, *, constant: bool, tf32: bool, fast_f8: bool, dry: bool,
) -> None:  # fmt: skip
    """As the command's options say.

    Raises:
        OptionError: one that is none, or tokens that are none [W001].
        WeftError: of the search, where there is one product.
    """
    screen = Screen(form)
    if against not in ("", *PEERS):
        raise OptionError(option="--against", problem=f"{against!r} is not one of {', '.join(PEERS)}")
    if dry and against:
        raise OptionError(option="--against", problem="a dry run measures nothing, so it compares nothing")
    kind = replace(Options.from_environment(os.environ), device=device)
    fast = fast_f8 or kind.allow_fast_f8
    base = Gemm(layout=layout_of(layout), epilogue=epilogue(epilogue_text), constant=constant, fast=fast)
    base = typed(base, dtype)
    problems = _problems(tokens, base)
    if dry and any(g.search is Search.LIBRARY for g in problems):
        raise OptionError(option="TOKEN", problem="O=1 asks for the library, which a dry run does not call")
    done: list[dict[str, object]] = []
    worst = 0
    options = replace(kind, allow_tf32=tf32 or kind.allow_tf32)
    results = _dry(problems, limit, options) if dry else _measured(problems, limit, against, options, screen)
    for g, found in results:
        if isinstance(found, WeftError):
            if len(problems) == 1:
                raise found
            worst = max(worst, found.exit_code)
            done.append({"name": g.name, "error": str(found)})
            screen.err.print(f"weft: {plain(g.name)}: {plain(str(found).splitlines()[0], 400)}")
            continue
        for one, suffix in found:
            place = folder.write(output, one, suffix)
            done.append({"name": one.gemm.name, "folder": str(place), **folder.parameters(one)})
            if not screen.json:
                _show(screen, one, place)
    if screen.json:
        screen.data(done)
    if worst:
        sys.exit(worst)


def _problems(tokens: list[str], base: Gemm) -> list[Gemm]:
    if tokens[:1] != ["run"]:
        return [read_tokens(tokens, base)]
    if len(tokens) > 2:
        raise OptionError(option="LIST", problem="one file: `weft gemm run LIST`")
    if len(tokens) == 1:
        return list(thirteen(base))
    path = Path(tokens[1])
    try:
        data = path.read_bytes()
        if len(data) > MOST_LIST_BYTES:
            raise OptionError(option="LIST", problem=f"{len(data)} bytes; {MOST_LIST_BYTES} are allowed")
        text = data.decode("utf-8")
    except OSError as error:
        raise OptionError(option="LIST", problem=f"{path.name!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(option="LIST", problem=f"{path.name!r} is no text in UTF-8") from None
    return read_list(text, base, "LIST")


Result = tuple[Gemm, list[tuple[SearchResult, str]] | WeftError]


def _dry(problems: list[Gemm], limit: int, options: Options) -> Iterator[Result]:
    nvrtc = find_nvrtc()
    for g in problems:
        try:
            found = dry_run(g, nvrtc, limit=limit, tf32=options.allow_tf32)
            yield g, [(x, f"_{arch}") for arch, x in found.items()]
        except WeftError as error:
            yield g, error


def _measured(problems: list[Gemm], limit: int, against: str, options: Options, screen: Screen) -> Iterator[Result]:
    from weft.pipeline.search.measure import progress_line
    from weft.platform.cuda.device import device_of
    from weft.platform.cuda.platform import survey
    from weft.tune.ahead import Ahead
    from weft.tune.sites import worker_of
    from weft.tune.store import Database
    from weft.tune.tuner import ProblemTrial, Progress, Tuner

    if not options.device.startswith("cuda"):
        raise OptionError(option="--device", problem=f"{options.device!r} is no GPU: cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(problem="weft gemm measures on an NVIDIA GPU, and this torch sees none; --dry-run needs none")
    if ":" in options.device:
        torch.cuda.set_device(device_of(options))
    before = {"start": age_s()}
    began = time.monotonic()
    with ExitStack() as stack:
        worker = None
        if any(g.search is not Search.LIBRARY for g in problems):
            worker = stack.enter_context(Ahead(worker_of(options, options.threads)))
        facts, nvrtc, _ = survey(options)
        before["survey"] = time.monotonic() - began
        if nvrtc is None:
            raise DeviceError(problem="weft gemm needs NVRTC, the CUDA compiler as a library")
        database = stack.enter_context(Database.open(options.cache))
        tuner = stack.enter_context(Tuner(options, facts, database, compiler=nvrtc, transport=worker))
        for g in problems:

            def listen(progress: Progress, name: str = g.name) -> None:
                screen.progress("measure", f"{name}: {progress_line(progress)}")

            def measure(trials: Iterable[ProblemTrial], heard: object = listen) -> Iterator[Measurement]:
                return tuner.measure(trials, progress=heard)  # type: ignore[arg-type]

            waited = dict(tuner.seconds)
            try:
                found = _one(g, facts, measure, limit, against, nvrtc, options)
            except WeftError as error:
                yield g, error
                continue
            screen.done()
            found.stage_s = before | found.stage_s | {k: s - waited[k] for k, s in tuner.seconds.items()}
            before = {}
            yield g, [(found, "")]


def _one(
    g: Gemm, facts: GpuFacts, measure: Measure, limit: int, against: str, nvrtc: Nvrtc, options: Options
) -> SearchResult:
    """Search one product, and compare its best kernel where that is asked for."""
    from weft.gemm.again import AGAINST, library_alone

    alone = g.search is Search.LIBRARY
    found = (
        library_alone(g, facts, options.cache, tf32=options.allow_tf32)
        if alone
        else search(g, facts, measure, limit=limit)
    )
    if found.best is None:
        first = next((o.note for o in found.outcomes if o.note), "nothing was measured")
        raise DeviceError(problem=f"none of {len(found.outcomes)} configurations passed: {plain(first, 200)}")
    if against and found.kernel is not None:
        began = time.monotonic()
        found.against = AGAINST[against](g, found.kernel, facts, nvrtc, options.cache, tf32=options.allow_tf32)
        found.stage_s["against"] = time.monotonic() - began
        library = found.against.get("library")
        found.library_us = float(library["median_us"]) if isinstance(library, dict) else math.inf
    return found


def _show(screen: Screen, found: SearchResult, place: Path) -> None:
    """One search for people."""
    g, best = found.gemm, found.best
    facts = {
        "product": f"{g.m} x {g.n} x {g.k}, {g.layout}, {g.types}, epilogue {plain(g.epilogue.text, 200)}",
        "device": plain(found.device),
        "searched": f"{len(found.outcomes)} of {found.feasible} feasible configurations",
        "table": plain(found.table) or "none",
        "rejected": ", ".join(f"{n} {plain(k)}" for k, n in rejected(found)) or "none",
        "time": f"{found.seconds:.1f} s" + "".join(f", {k} {s:.1f} s" for k, s in found.stage_s.items() if s >= 0.05),
        "folder": plain(str(place), 400),
    }
    if found.measured and best is not None:
        facts["best"] = f"{microseconds(best.median_us)}, {found.tflops:.1f} TFLOP/s"
    elif best is not None:
        facts["best"] = f"{microseconds(best.modelled_us)} by the model; it compiled, nothing was measured"
    if found.against:
        ratio = found.against.get("ratio")
        facts[plain(str(found.against.get("peer", "cuBLASLt")).partition(" ")[0], 40)] = (
            f"{microseconds(found.library_us)}, {ratio} times the best kernel's time beside it"
        )
    print_pairs(screen, facts)
    ranked = sorted(enumerate(found.outcomes, 1), key=lambda x: (x[1].median_us, x[0]))[:SHOWN]
    rows = [
        [
            ", ".join(f"{k}={v}" for k, v in o.schedule.params if k not in ("halo_stages", "panel", "taps_per_stage")),
            str(rank),
            microseconds(o.modelled_us),
            microseconds(o.median_us)
            if found.measured
            else o.state + (f", {o.registers} registers" if o.registers else ""),
        ]
        for rank, o in ranked
    ]
    screen.out.print()
    screen.table("", ["configuration", "rank", "model", "measured" if found.measured else "compiled"], rows)
    screen.out.print()
