"""What lets kernels start beside a persistent grid at once: one carve-out for all, and nothing that is loaded late.

An SM changes how its memory is divided into L1 cache and shared memory (the carve-out) only while it is empty, and it
never is while another grid is resident on it: all kernels there ask for the same division, the one with most shared
memory. For the same reason a recorded graph is brought to the GPU before it is launched for the first time.
"""

from __future__ import annotations

from weft.device.cuda.api import call, driver_api
from weft.device.cuda.driver import Function

CARVEOUT = 100
"""Per cent of the largest shared memory that kernels prefer."""


def prefer_shared(function: Function, per_cent: int = CARVEOUT) -> None:
    """The SM shall give so much of its memory to shared memory while the function runs.

    Raises:
        CudaError: the driver refuses it [W302].
    """
    api = driver_api()
    name = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    call(api.cuFuncSetAttribute, function._handle, name, per_cent, detail=function.entry)


def upload(graph: int, stream: int) -> None:
    """Bring an instantiated graph (the handle of a `CUgraphExec`) to the GPU, in the order of a stream, without a run.

    Raises:
        CudaError: the driver refuses it [W302].
    """
    api = driver_api()
    call(api.cuGraphUpload, api.CUgraphExec(graph), api.CUstream(stream))
