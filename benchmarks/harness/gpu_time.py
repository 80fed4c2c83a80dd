"""Times of single kernels and calls on an NVIDIA GPU, for the benchmarks: medians over replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.generate.bind import Addresses, BoundCuda
from weft.kernels.source import CudaSource


def median_us(
    launch: Callable[[], object], *, launches: int, rounds: int, behind: Callable[[], object] | None = None
) -> float:
    """Microseconds per launch of a graph of so many; two further replays come first and do not count.

    `behind` is called once with the last replay still under way.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            launch()
    samples = []
    for i in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        if behind is not None and i == rounds + 1:
            behind()
        torch.cuda.synchronize()
        if i > 1:
            samples.append(float(start.elapsed_time(end)) * 1e3 / launches)
    return statistics.median(samples)


@dataclass(slots=True)
class Kernel:
    """One compiled schedule of a problem with one result."""

    source: CudaSource
    path: str

    def time(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        launches: int,
        rounds: int,
        behind: Callable[[], object] | None = None,
    ) -> float:
        """Microseconds, weights packed before; `out` holds the result. `behind` as for `median_us`."""
        packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in self.source.packed_bytes]
        bound = BoundCuda(self.source, self.path)  # its module stays loaded as long as this lives
        given, places = ([x.data_ptr() for x in tensors] for tensors in (inputs, packed))
        bound.pack(given, places, torch.cuda.current_stream().cuda_stream)
        work = torch.empty(self.source.workspace_bytes, dtype=torch.uint8, device="cuda")
        state = torch.zeros(self.source.state_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        ready = bound.prepare(Addresses(given, [out.data_ptr()], places, work.data_ptr(), state.data_ptr()))

        def launch() -> None:
            ready(torch.cuda.current_stream().cuda_stream)

        return median_us(launch, launches=launches, rounds=rounds, behind=behind)
