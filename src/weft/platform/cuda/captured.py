"""The framework's own model in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

import torch

from weft.generate.library.execute import plain_math
from weft.ir.declined import Declined
from weft.options import Options
from weft.platform.cuda.device import device_of
from weft.runtime.cuda_executable import StreamOrder
from weft.runtime.executable import InputError
from weft.runtime.streams import Lease

Tensors = Sequence[torch.Tensor]


@final
class Captured:
    """The framework's own model recorded into a CUDA graph for one set of shapes: a baseline, and a plan to return.

    Calling it copies the inputs in, replays, and copies the outputs out; from several threads and streams, too. Inside
    a caller's own capture the model itself is run, by the numeric policy of the process.
    """

    def __init__(self, model: Callable[..., Tensors], inputs: Tensors, lease: Lease | None = None) -> None:
        """Run it and record it on a stream of `lease`; None: as the framework's manual does it, on two of its own."""
        self._model = model  # owns the weights whose addresses the graph holds
        with torch.inference_mode(mode=False), torch.no_grad():  # what that mode makes cannot be written outside of it
            self._inputs = [x.clone() for x in inputs]
        self._lease = lease
        mine = lease.streams(1)[0] if lease is not None else None
        stream = mine or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if stream != torch.cuda.current_stream():
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                model(*self._inputs)
        if stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is kept from what cannot be recorded
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=mine, capture_error_mode="thread_local"):
            self._outputs = list(model(*self._inputs))
        self._lock, self._order = threading.Lock(), StreamOrder(self._inputs)

    def replay(self) -> Tensors:
        """Run on the inputs it holds."""
        self.graph.replay()
        return self._outputs

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run on these inputs; fresh outputs.

        Raises:
            InputError: a tensor on another device [W011].
        """
        for position, (mine, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            if given.device != mine.device:
                problem = f"expected a tensor on {mine.device}, got {given.device}"
                raise InputError(position=position, problem=problem)
        device = self._inputs[0].device if self._inputs else None
        with torch.cuda.device(device), torch.no_grad():
            return self._run(inputs)

    def _run(self, inputs: Tensors) -> Tensors:
        if torch.cuda.is_current_stream_capturing():
            return self._model(*inputs)
        with self._lock:
            self._order.enter()
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
            self.graph.replay()
            return [x.clone() for x in self._outputs]


def capture(
    model: Callable[..., Tensors], inputs: Tensors, options: Options, lease: Lease | None = None
) -> Captured | Declined:
    """The model in a CUDA graph, by the numeric policy of the options; or why it cannot be recorded.

    `lease`: as for `CudaExecutable`.
    """
    try:
        with plain_math(allow_tf32=options.allow_tf32):
            return Captured(model, inputs, lease or Lease(device_of(options)))
    except RuntimeError as error:
        torch.cuda.synchronize()
        return Declined(str(error).splitlines()[0][:200])
