"""What benchmarks of single kernels share: their command line, kernels without spills, a case at a time, the record."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.record import Record, folder_of_gpu
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.generate.cuda.generator import CudaGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

DRY, DRY_GPU = "sm_90a", "h200"
"""What is compiled for without a GPU, and whose facts order the schedules."""
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled schedule."""

    source: CudaSource
    cubin: CompiledCubin


def parser(doc: str | None, *, first: int, seconds: float, threads: int) -> argparse.ArgumentParser:
    """The options that all have; the numbers are their defaults."""
    found = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    found.add_argument("--only", default="", help="cases whose name holds one of these texts, by commas")
    found.add_argument("--first", type=int, default=first, help=f"schedules of each ({first})")
    found.add_argument("--seconds", type=float, default=seconds, help=f"when to begin no further case ({seconds:g})")
    found.add_argument("--threads", type=int, default=threads, help=f"of the compiler ({threads})")
    found.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    found.add_argument("--dry", action="store_true", help=f"no GPU: write and compile for {DRY}")
    return found


@dataclass(slots=True)
class Shop:
    """What makes kernels, until when, and where results go."""

    nvrtc: Nvrtc
    facts: GpuFacts
    arch: str
    threads: int
    first: int
    only: tuple[str, ...]
    end: float
    out: Path | None

    @staticmethod
    def of(given: argparse.Namespace) -> Shop | Declined:
        """As `parser` has read it. Declined: there is no NVRTC.

        Raises:
            DeviceError: not `--dry`, and no GPU [W301].
        """
        end = time.perf_counter() + given.seconds
        nvrtc = find_nvrtc()
        if isinstance(nvrtc, Declined):
            return nvrtc
        facts = profile(DRY_GPU) if given.dry else gpu_facts(None, calibrate=False)
        arch = DRY if given.dry else facts.arch
        return Shop(nvrtc, facts, arch, given.threads, given.first, tuple(given.only.split(",")), end, given.out)

    @property
    def closed(self) -> bool:
        """Whether no further case is begun."""
        return time.perf_counter() > self.end

    def wants(self, name: str) -> bool:
        """Whether a case of that name is asked for."""
        return any(x in name for x in self.only)

    def kernels(self, problem: Problem, first: int = 0) -> list[Kernel]:
        """The first ones that the generator offers."""
        return self.of_schedules(problem, CudaGenerator().schedules(problem, self.facts), first or self.first)

    def of_schedules(self, problem: Problem, schedules: Sequence[Schedule] | Declined, first: int) -> list[Kernel]:
        """The kernels of the first ones."""
        if isinstance(schedules, Declined):
            print(f"declined: {schedules.reason}", flush=True)
            return []
        sources = (CudaGenerator().emit(problem, s) for s in schedules[:first])
        return self.compiled([s for s in sources if isinstance(s, CudaSource)])

    def compiled(self, sources: Sequence[CudaSource]) -> list[Kernel]:
        """Those that the compiler takes without spills."""
        return compiled(self.nvrtc, self.arch, sources, self.threads)

    def in_turn(
        self, work: Sequence[_Item], prepared: Callable[[_Item], _Made], *, ahead: int, patience_s: int = 0
    ) -> Iterator[tuple[_Item, _Made]]:
        """Each case that is begun in time, prepared while others run; one that takes longer than that ends the run."""
        with ThreadPoolExecutor(ahead) as pool:
            made = pool.map(lambda item: None if self.closed else prepared(item), work)
            for item, found in zip(work, made, strict=True):
                if found is None or self.closed:
                    continue
                signal.alarm(patience_s)
                yield item, found
                signal.alarm(0)

    def record(self, suite: str, *key: str) -> Record | None:
        """The record of a suite, if one is asked for; `key`: the fields of a row that say which case it is."""
        if self.out is None:
            return None
        if str(self.out) == "-":
            return Record(folder_of_gpu(), suite, key=key)
        return Record("", suite, path=self.out, key=key)

    def note(self, name: str, line: Mapping[str, object]) -> str:
        """Write a case's line into the record, if there is one; its text."""
        text = json.dumps({"name": name, **line})
        if self.out:
            with self.out.open("a") as file:
                file.write(text + "\n")
        return text


def measuring(record: Record | None, **case: object) -> AbstractContextManager[None]:
    """`Record.measuring`; without a record what fails ends the run."""
    return nullcontext() if record is None else record.measuring(**case)


def compiled(nvrtc: Nvrtc, arch: str, sources: Sequence[CudaSource], threads: int) -> list[Kernel]:
    """Those that the compiler takes without spills."""
    kernels = []
    jobs = [CompileJob(s.text, arch, s.flags) for s in sources]
    for s, r in zip(sources, nvrtc.compile_many(jobs, threads=threads), strict=True):
        own = [r.of(x.entry) for x in s.launches] if isinstance(r, CompiledCubin) else []
        if not isinstance(r, CompiledCubin) or r.warnings or any(x.spill_stores + x.stack_bytes for x in own):
            said = r if not isinstance(r, CompiledCubin) else (r.warnings, own)
            print(f"refused: {s.schedule} {said}"[:400], flush=True)
        else:
            kernels.append(Kernel(s, r))
    return kernels


def opened(given: argparse.Namespace) -> Shop:
    """`Shop.of`; SystemExit with status 2 where there is no NVRTC."""
    shop = Shop.of(given)
    if isinstance(shop, Declined):
        print(shop.reason, file=sys.stderr)
        raise SystemExit(2)
    return shop
