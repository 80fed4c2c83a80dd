"""Green contexts on a real GPU: what runs on one part never runs on the other's multiprocessors."""

from __future__ import annotations

import pytest
import torch

from weft.device.cuda.driver import Module
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.partition import Partition, Unit, partitioned, unit_of
from weft.device.cuda.streams import Stream
from weft.ir.declined import Declined

pytestmark = pytest.mark.gpu

CTAS, THREADS = 4096, 128
WHERE = r"""
extern "C" __global__ void __launch_bounds__(128) where(unsigned* sm) {
  unsigned x;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(x));
  const long long begin = clock64();
  while (clock64() - begin < 20000) {
  }
  if (threadIdx.x == 0) sm[blockIdx.x] = x;
}
"""


@pytest.fixture
def unit(context: None) -> Unit:
    torch.zeros(1, device="cuda")
    found = unit_of()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    return found


def test_the_driver_says_how_many_multiprocessors_there_are(unit: Unit, stated: GpuFacts) -> None:
    assert unit.sms == stated.sms and unit.least >= 1 and unit.sizes()


@pytest.mark.parametrize("in_graph", [False, True])
def test_parts_share_no_multiprocessor(unit: Unit, nvrtc: Nvrtc, stated: GpuFacts, in_graph: bool) -> None:
    made = nvrtc.compile(WHERE, arch=stated.arch)
    function = Module(made.path).function("where")
    sizes = unit.sizes()
    for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        with partitioned(size) as found:
            assert isinstance(found, Partition), found
            parts = (found.first, found.rest)
            assert found.first.sms == size and size + found.rest.sms == unit.sms
            places = [torch.full((CTAS,), 9999, dtype=torch.int32, device="cuda") for _ in parts]
            torch.cuda.synchronize()
            streams = [Stream(part.stream()) for part in parts]
            for stream, place in zip(streams, places, strict=True):
                bound = function.bind((CTAS, 1, 1), (THREADS, 1, 1), [place.data_ptr()])
                if in_graph:
                    with stream.graph(bound.launch) as graph:
                        graph(stream.handle)
                else:
                    bound.launch(stream.handle)
            for stream in streams:
                stream.synchronise()
                stream.close()
            seen = [set(place.tolist()) for place in places]
            assert not seen[0] & seen[1], "an SM of both"
            assert len(seen[0]) == parts[0].sms and len(seen[1]) == parts[1].sms
            assert max(seen[0] | seen[1]) < unit.sms


def test_a_part_that_cannot_be_is_declined(unit: Unit) -> None:
    for size in (0, unit.sms, unit.sms + unit.multiple):
        with partitioned(size) as found:
            assert isinstance(found, Declined) and "can be" in found.reason
