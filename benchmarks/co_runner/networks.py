"""Networks as best-effort work: ways of sharing the GPU, what a row says, and rounds of queries beside a network."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.co_runner.beside import Queries, Served
from benchmarks.co_runner.machine import LIMIT_S, wait
from benchmarks.co_runner.rows import Sample, clocks, mean_us, over, quantile, spread
from weft.colocate.feeder import Throttle
from weft.colocate.network import NetworkCoRunner, digest, feeding
from weft.runtime.cuda_executable import CudaExecutable

LATENCY_CRITICAL = (("resnet50", 1), ("resnet50", 16), ("vit_b16", 1), ("vit_b16", 16))
BEST_EFFORT = (("bert_base", 8), ("segformer_b0", 8), ("llama_4", 8))
Kind = Literal["stages", "priority", "slices", "green"]
_WAY = re.compile(
    r"stages(?:-ctas(?P<ctas>[0-9]+))?(?:-duty(?P<duty>[0-9]+))?|(?P<kind>priority|slices|green)(?P<number>[0-9]*)"
)
Given = tuple[torch.Tensor, ...]
VERIFIED = 12
"""Inferences whose results are compared in front of each round."""


@dataclass(frozen=True, slots=True)
class NetworkWay:
    """How a network shares the GPU with a model; its text is what stands in a case."""

    kind: Kind
    number: int = 0
    """Of `stages` CTAs on an SM at most, 0: no limit; of `slices` milliseconds; of `green` SMs of the network."""
    duty: int = 100
    """Per cent of the time in which stages are launched."""

    def __str__(self) -> str:
        if self.kind == "stages":
            limit = f"-ctas{self.number}" if self.number else ""
            return f"stages{limit}{f'-duty{self.duty}' if self.duty != 100 else ''}"
        return f"{self.kind}{self.number or ''}"

    @property
    def plain(self) -> bool:
        """Both run by the plans without a budget: whole kernels of the network beside or between the model's."""
        return self.kind != "stages"

    @staticmethod
    def of(text: str) -> NetworkWay:
        """The way that is written so.

        Raises:
            ValueError: none is.
        """
        if (found := _WAY.fullmatch(text)) is None:
            raise ValueError(
                f"{text!r}: neither like stages, stages-ctas1, stages-duty50 nor priority, slices2, green36"
            )
        if found["kind"] is None:
            ctas, duty = int(found["ctas"] or 0), int(found["duty"] or 100)
            if (found["ctas"] and not ctas) or not 0 < duty <= 100:
                raise ValueError(f"{text}: at least one CTA, and a duty of 1 to 100 per cent")
            return NetworkWay("stages", ctas, duty)
        if (found["kind"] == "priority") == bool(found["number"]) or found["number"] == "0":
            raise ValueError(f"{text}: slices2 are of 2 ms, green36 has 36 SMs, priority has no number")
        kind: Kind = "slices" if found["kind"] == "slices" else "green" if found["kind"] == "green" else "priority"
        return NetworkWay(kind, int(found["number"] or 0))


WAYS = tuple(
    map(
        NetworkWay.of,
        ("stages", "stages-ctas1", "stages-ctas1-duty50", "stages-duty25", "priority", "slices2", "green20", "green36",
         "green68"),
    )
)  # fmt: skip


def asked(only: Sequence[str], ways: Sequence[NetworkWay]) -> dict[tuple[str, int, str, int], list[NetworkWay]]:
    """(model, batch, network, its batch) -> ways: cases that have all parts of one of the texts side by side."""
    found: dict[tuple[str, int, str, int], list[NetworkWay]] = {}
    for name, batch in LATENCY_CRITICAL:
        for other, its in BEST_EFFORT:
            case = f"{name}/b{batch}/{other}/{its}"
            own = [w for w in ways if not only or any(f"/{x}/" in f"/{case}/{w}/" for x in only)]
            if own:
                found[name, batch, other, its] = own
    return found


def row(way: NetworkWay, sample: Sample, alone: Sample, plain: Sample, inference_us: float) -> dict[str, Any]:
    """The numbers of a model beside a network.

    `alone`: the same plan of the model beside nothing, `plain`: that without a budget; `inference_us`: of the network
    alone on the whole GPU, by its plan without a budget. `sample.work` is in inferences.
    """
    be = sample.work / sample.span_us * inference_us
    base = plain if way.plain else alone
    return {
        "way": way.kind,
        "lc_us": spread(sample),
        "alone_us": spread(base),
        "plain_us": spread(plain),
        **over(sample, base),
        "lc_p50_plain": round(quantile(sample.us, 0.5) / quantile(plain.us, 0.5), 4),
        "lc_p99_plain": round(quantile(sample.us, 0.99) / quantile(plain.us, 0.99), 4),
        "be": round(be, 4),
        "be_per_s": round(sample.work / sample.span_us * 1e6, 1),
        "added": round(mean_us(base) / mean_us(sample) + be, 4),
        "added_plain": round(mean_us(plain) / mean_us(sample) + be, 4),
        "price": round(quantile(alone.us, 0.5) / quantile(plain.us, 0.5), 4),
        "queries": len(sample.us),
        **clocks(sample),
    }


class Network:
    """A network recorded on a stream in one form, with the share of an inference that each of its stages is."""

    def __init__(
        self, executable: CudaExecutable, stream: torch.cuda.Stream, batches: Sequence[Given], most_queued: int
    ) -> None:
        self.executable, self.stream, self.batches, self.most_queued = executable, stream, batches, most_queued
        self.stage_us = self._alone()
        whole = sum(self.stage_us)
        self._before = [sum(self.stage_us[:k]) / whole for k in range(len(self.stage_us))]
        self.wanted = [self._result(x) for x in batches]

    @property
    def inference_us(self) -> float:
        """Alone, its stages one after the other."""
        return sum(self.stage_us)

    def _result(self, given: Given) -> str:
        with torch.cuda.stream(self.stream):
            self.executable.place(*given)
            for stage in self.executable.stages:
                stage.launch()
        self.stream.synchronize()
        return digest(self.executable.static_outputs)

    def _alone(self, rounds: int = 5) -> list[float]:
        """Medians over rounds of the time of each stage, all of them back to back."""
        found: list[list[float]] = []
        with torch.cuda.stream(self.stream):
            self.executable.place(*self.batches[0])
            for _ in range(rounds + 1):
                marks = []
                for stage in self.executable.stages:
                    marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                    marks[-1].record(self.stream)
                    stage.launch()
                marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                marks[-1].record(self.stream)
                self.stream.synchronize()
                found.append([float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(marks)])
        return [quantile([x[k] for x in found[1:]], 0.5) for k in range(len(found[0]))]

    def back_to_back_us(self, count: int = 20) -> float:
        """Microseconds of an inference when so many follow each other."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            for stage in self.executable.stages:
                stage.launch()
            first.record(self.stream)
            for _ in range(count):
                for stage in self.executable.stages:
                    stage.launch()
            last.record(self.stream)
        self.stream.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / count

    def done(self, stages: int) -> float:
        """Inferences, and the share of the one under way, that so many stages are."""
        whole, more = divmod(stages, len(self.stage_us))
        return whole + self._before[more]

    def fed(self, duty: int = 100) -> NetworkCoRunner[Sequence[torch.Tensor]]:
        """What launches it again and again on the first batch."""
        throttle = Throttle(duty=duty / 100)
        return feeding(self.executable, self.stream, self.batches[0], most_queued=self.most_queued, throttle=throttle)

    def checked(self, served: Served, duty: int) -> None:
        """Some inferences on every batch in turn, beside queries.

        Raises:
            ValueError: results are not those of the same plan alone, bit for bit.
        """
        found: list[str] = []

        def batches() -> Iterator[Given]:
            for k in range(VERIFIED):
                yield self.batches[k % len(self.batches)]

        beside = feeding(
            self.executable,
            self.stream,
            batches(),
            most_queued=self.most_queued,
            throttle=Throttle(duty=duty / 100),
            deliver=lambda _, outputs: found.append(digest(outputs)),
        )
        beside.start()
        while beside.running:
            served.query()
            served.stream.synchronize()
        beside.wait(LIMIT_S)
        served.right()
        if found != [self.wanted[k % len(self.batches)] for k in range(VERIFIED)]:
            raise ValueError("the network's results are others than alone")


def with_network(served: Served, network: Network, count: int, duty: int = 100) -> tuple[Sample, float]:
    """Queries back to back beside a network, and the seconds of the stop behind them."""
    network.checked(served, duty)
    beside = network.fed(duty)
    beside.start()
    until = time.monotonic() + LIMIT_S
    while beside.counts.stages < len(network.stage_us):
        if time.monotonic() > until:
            beside.stop()
            raise TimeoutError("the network does not go on")
        time.sleep(1e-4)
    try:
        with torch.cuda.stream(served.stream):
            queries = Queries.begun(served)  # on an idle stream: it is passed at once
            began, first = time.perf_counter(), beside.counts.stages
            for _ in range(count):
                queries.one()
        wait(queries.ends[-1], 4 * LIMIT_S)
        ended, last = time.perf_counter(), beside.counts.stages
    finally:
        stop_s = beside.stop()
    found = queries.sample(0.0)
    # by the host's clock, as its counts are: the rate, over the span that the events tell
    found.work = (network.done(last) - network.done(first)) / (ended - began) * found.span_us / 1e6
    served.right()
    return found, stop_s


def in_slices(served: Served, network: Network, count: int, slice_us: float, query_us: float) -> Sample:
    """On one stream: queries for so long, then the network for so long, at least one of each."""
    together = max(1, round(slice_us / query_us))
    each = max(1, round(slice_us / network.inference_us))
    with torch.cuda.stream(served.stream):
        network.executable.place(*network.batches[0])
        queries = Queries.begun(served)
        inferences = 0
        for k in range(count):
            if k and k % together == 0:
                for _ in range(each):
                    for stage in network.executable.stages:
                        stage.launch()
                inferences += each
            queries.one()
    found = queries.sample(float(inferences))
    served.right()
    if digest(network.executable.static_outputs) != network.wanted[0]:
        raise ValueError("the network's results are others than alone")
    return found
