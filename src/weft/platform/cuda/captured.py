"""The framework's own model in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from weft.generate.library.execute import plain_math
from weft.ir.declined import Declined
from weft.options import Options
from weft.platform.cuda.device import device_of
from weft.runtime.cuda_executable import StreamOrder
from weft.runtime.executable import InputError
from weft.runtime.in_place import NOTHING_BOUND, Baking, InPlace, Placed, Placing, copies
from weft.runtime.streams import Lease

Tensors = Sequence[torch.Tensor]


@final
class Captured:
    """The framework's own model recorded into a CUDA graph for one set of shapes: a baseline, and a plan to return.

    Calling it copies the inputs in, replays, and copies the outputs out; from several threads and streams, too. Inside
    a caller's own capture the model itself is run, by the numeric policy of the process.
    """

    def __init__(
        self,
        model: Callable[..., Tensors],
        inputs: Tensors,
        lease: Lease | None = None,
        *,
        bound: Mapping[int, torch.Tensor] = NOTHING_BOUND,
        written: Sequence[tuple[int, torch.Tensor]] = (),
        form: Placed | None = None,
    ) -> None:
        """Run it and record it on a stream of `lease`; None: as the framework's manual does it, on two of its own.

        `bound` and `written`: as for `CudaExecutable`. `form`: the model's own that writes what is written; it is
        recorded in place of the model. Nothing is written before a call.
        """
        self._model, self._form = model, form  # owns the weights whose addresses the graph holds
        self._bound = {k: x.detach() for k, x in bound.items()}
        self._written = [(k, x.detach()) for k, x in written]
        self._tf32 = torch.backends.cuda.matmul.allow_tf32
        with torch.inference_mode(mode=False), torch.no_grad():  # what that mode makes cannot be written outside of it
            self._inputs = [self._bound[k] if k in self._bound else x.clone() for k, x in enumerate(inputs)]
        self._lease = lease
        mine = lease.streams(1)[0] if lease is not None else None
        stream = mine or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if stream != torch.cuda.current_stream():
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                (model if form is None else form.dry)(*self._inputs)
        if stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # only this thread is kept from what cannot be recorded
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=mine, capture_error_mode="thread_local"):
            self._outputs = list(self._run_model(self._inputs))
        self._lock, self._order = threading.Lock(), StreamOrder(self._inputs)

    def _run_model(self, inputs: Tensors) -> Tensors:
        """Its outputs; those that are written have been."""
        if self._form is not None:
            return self._form(*inputs)
        return _copying(self._model, self._written)(*inputs)

    @property
    def in_place(self) -> InPlace:
        """As that of `CudaExecutable`, by this one's numeric policy; a `Placing` model writes by itself."""
        kinds = [(x.shape, x.dtype, x.device) for x in self._inputs]
        return in_place(self._model, kinds, self._lease, allow_tf32=self._tf32)

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
            if position in self._bound and given.data_ptr() != mine.data_ptr():
                raise InputError(position=position, problem="it lies elsewhere than the tensor that is read in place")
        device = self._inputs[0].device if self._inputs else None
        with torch.cuda.device(device), torch.no_grad():
            return self._run(inputs)

    def _run(self, inputs: Tensors) -> Tensors:
        if torch.cuda.is_current_stream_capturing():
            return self._run_model(inputs)
        held = {k for k, _ in self._written}
        with self._lock:
            self._order.enter()
            for position, (mine, given) in enumerate(zip(self._inputs, inputs, strict=True)):
                if position not in self._bound:
                    mine.copy_(given)
            self.graph.replay()
            return [x if k in held else x.clone() for k, x in enumerate(self._outputs)]


Kind = tuple[Sequence[int], torch.dtype, torch.device]
"""Shape, type and place of an input."""


def in_place(model: Callable[..., Tensors], kinds: Sequence[Kind], lease: Lease | None, *, allow_tf32: bool) -> InPlace:
    """What records a model that reads and writes in place; one that cannot be recorded is run, and copied at once."""

    def recording(own: InPlace | None) -> InPlace:
        def make(
            bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]
        ) -> Callable[..., Tensors]:
            given = [
                bound[k] if k in bound else torch.zeros(shape, dtype=dtype, device=device)
                for k, (shape, dtype, device) in enumerate(kinds)
            ]
            form = None if own is None else own(bound, written)
            assert form is None or isinstance(form, Placed), "it can run without writing"
            try:
                with plain_math(allow_tf32=allow_tf32):
                    return Captured(model, given, lease, bound=bound, written=written, form=form)
            except RuntimeError:
                torch.cuda.synchronize()
            return _copying(model, written) if form is None else form

        return make

    placing: object = model
    own = placing.in_place if isinstance(placing, Placing) else None
    if isinstance(own, Baking):
        held = own.held
        return Baking(own.inputs, lambda values: recording(held(values)), recording(own.read))
    return recording(own)


def _copying(model: Callable[..., Tensors], written: Sequence[tuple[int, torch.Tensor]]) -> Callable[..., Tensors]:
    def run(*inputs: torch.Tensor) -> Tensors:
        found = model(*inputs)
        for copy in copies((x, found[k]) for k, x in written):
            copy()
        return found

    return run


def capture(
    model: Callable[..., Tensors],
    inputs: Tensors,
    options: Options,
    lease: Lease | None = None,
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
