"""Kernels whose machine code differs between two commits, timed beside each other on a GPU.

    python tools/replay.py --base COMMIT --only cuda --cases '^test_' --differing build/differing.json    (no GPU)
    python -m tools.replay_times build/differing.json [--rounds 15] [--out FILE|-]

Both texts are compiled for this GPU, bound to the same memory, launched as this tree launches the kernel, and must
leave the same bits. Each is a CUDA graph of as many launches as take a fifth of a millisecond, and so is each once
more: the four are timed in interleaved rounds. A row has the ratio of the medians, new over old, and that of a kernel
with itself, which is what noise makes of one: of the two that which is farther from 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu_pairs import Loader
from benchmarks.harness.record import Record, Row, folder_of_gpu

from tools import replay_corpus, sanitize
from tools.record_tables import is_slower
from weft.colocate.pair_machine import PairMachine
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import gpu_facts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.streams import fill
from weft.errors import DeviceError, ToolchainError
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.codec import schedule_from_json
from weft.kernels.source import CudaSource, Launch
from weft.tune.cuda_pair import many
from weft.tune.wire import problem_from_json

SUITE = "replay-times"
ROUNDS = 15
LAUNCHES = 20
"""In a graph, at least."""
SAMPLE_US = 200.0
"""What a graph takes, at least."""
_PLACE = re.compile(r"(pack|launches)\[(\d+)\]\.entry")


def source_of(row: Mapping[str, Any]) -> tuple[Problem, CudaSource]:
    """The kernel of a row as this tree makes it. Raises ValueError where it makes another text, or none."""
    case, (_, way, told) = row["case"], row["name"].split(" | ", 2)
    if "problem" not in case:
        raise ValueError("training is launched by a module of its own")
    problem, maker = problem_from_json(case["problem"]), CudaGenerator()
    facts = profile(way.split()[0])
    facts = replace(facts, tf32=True) if "tf32" in way else facts
    offered = maker.schedules(problem, facts)
    few = [] if isinstance(offered, Declined) else list(islice(offered, replay_corpus.MOST))
    every = [*few, *(schedule_from_json(s) for s in case["schedules"])]
    schedule = next((s for s in every if replay_corpus.named(s) == told), None)
    made = maker.emit(problem, schedule) if schedule is not None else None
    if not isinstance(made, CudaSource) or replay_corpus.plain(made.text) != replay_corpus.plain(row["texts"][1]):
        raise ValueError("this tree makes another kernel")
    return problem, made


def with_text(source: CudaSource, text: str, entries: Mapping[str, str]) -> CudaSource:
    """A kernel with another text and the names of what that launches, by their place (`launches[0].entry`)."""

    def renamed(kind: str, launches: Sequence[Launch]) -> tuple[Launch, ...]:
        return tuple(replace(x, entry=entries[f"{kind}[{k}].entry"]) for k, x in enumerate(launches))

    if any(_PLACE.fullmatch(place) is None for place in entries):
        raise ValueError("it is launched otherwise")
    return replace(source, text=text, pack=renamed("pack", source.pack), launches=renamed("launches", source.launches))


def timed(
    problem: Problem, sources: Sequence[CudaSource], loader: Loader, machine: PairMachine, rounds: int
) -> tuple[list[list[float]], bool]:
    """Microseconds of each kernel, in rounds, and whether all leave the same bits."""
    graph, chance = problem.graph, np.random.default_rng(0)
    inputs = []
    for node in graph.inputs:
        data = sanitize.values(graph.type_of(node), chance)
        inputs.append(machine.room(max(1, len(data))))
        machine.write(inputs[-1], data)
    sizes = [graph.type_of(n).nbytes for n in graph.outputs]
    outputs = [machine.room(max(1, n)) for n in sizes]
    works: list[Prepared] = []
    results = []
    for source in sources:
        packed = [machine.room(max(1, n)) for n in source.packed_bytes]
        work = machine.room(source.workspace_bytes) if source.workspace_bytes else 0
        state = machine.room(source.state_bytes) if source.state_bytes else 0
        if state:
            fill(state, 0, source.state_bytes)
        bound = BoundCuda(source, loader.compiled(source.text, source.flags).path, driver=loader.driver)
        machine.run([lambda stream, b=bound, p=packed: b.pack(inputs, p, stream)])  # type: ignore[misc]
        for address, n in zip(outputs, sizes, strict=True):
            fill(address, 0xA5, n)
        works.append(bound.prepare(Addresses(inputs, outputs, packed, work, state)))
        machine.run([works[-1]])
        results.append([machine.read(a, n) for a, n in zip(outputs, sizes, strict=True)])
    found = machine.samples_us([many([works[0]], LAUNCHES)], 3)
    launches = max(LAUNCHES, math.ceil(SAMPLE_US * LAUNCHES / statistics.median(found[0])))
    graphs = [many([work], launches) for work in works]
    samples = [[us / launches for us in found] for found in machine.samples_us(graphs, rounds)]
    return samples, all(r == results[0] for r in results)


def row_of(row: Mapping[str, Any], loader: Loader, rounds: int) -> Row:
    """What became of one kernel."""
    found: Row = {"record": "case", "suite": SUITE, "case": row["name"]}
    try:
        problem, source = source_of(row)
        texts = [replay_corpus.plain(text) for text in row["texts"]]
        old, new = (with_text(source, *told) for told in zip(texts, row["entries"], strict=True))
        with ExitStack() as held:
            samples, same = timed(problem, (old, new, old, new), loader, PairMachine(held), rounds)
    except (ValueError, ToolchainError) as error:
        return {**found, "left_out": str(error).splitlines()[0][:200]}
    return {**found, **compared(samples), "same_bits": same}


def compared(samples: Sequence[Sequence[float]]) -> Row:
    """What a row says of samples of the old kernel, the new one, the old one and the new one again."""
    old_us, new_us = (statistics.median([*samples[k], *samples[k + 2]]) for k in (0, 1))
    own = [statistics.median(samples[k + 2]) / statistics.median(samples[k]) for k in (0, 1)]
    noise = max(own, key=lambda x: abs(x - 1.0))
    return {
        "old_us": round(old_us, 3), "new_us": round(new_us, 3), "ratio": round(new_us / old_us, 4),
        "noise": round(noise, 4),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Rows and one line; 1 where results differ, or a kernel is slower (`record_tables.is_slower`)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("differing", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    chosen = parser.parse_args(arguments)
    nvrtc = find_nvrtc()
    if not isinstance(nvrtc, Nvrtc):
        sys.exit(f"tools.replay_times: no NVRTC ({nvrtc.reason})")
    rows: list[Row] = []
    with primary_context(), ExitStack() as held:
        facts = gpu_facts(None, calibrate=False)
        loader = Loader(nvrtc, facts.arch, held)
        path = None if chosen.out is None or str(chosen.out) == "-" else chosen.out
        record = Record(folder_of_gpu(), SUITE, path=path) if chosen.out else None
        for row in json.loads(chosen.differing.read_text(encoding="utf-8")):
            if not row["arch"].startswith(facts.arch[:5]):
                continue
            try:
                rows.append(row_of(row, loader, chosen.rounds))
            except DeviceError as error:  # nothing more may run in this context
                sys.exit(f"{row['name']}: {error}")
            if record is not None:
                record.add(rows[-1])
            else:
                print(json.dumps(rows[-1]), flush=True)
    slower = [x for x in rows if "ratio" in x and is_slower(x)]
    wrong = [x for x in rows if x.get("same_bits") is False]
    measured = [float(str(x["ratio"])) for x in rows if "ratio" in x]
    mean = statistics.geometric_mean(measured) if measured else 1.0
    print(f"{len(measured)} kernels, new over old {mean:.3f}, {len(slower)} slower, {len(wrong)} with other results")
    return int(bool(slower or wrong))


if __name__ == "__main__":
    sys.exit(main())
