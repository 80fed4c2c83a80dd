"""Networks trained a layer at a time, in the emulation: the same order of kernels as `weft.nn.layered` has."""

from __future__ import annotations

import ctypes

import numpy as np
from tests.generate.cuda.gradients import Text
from tests.generate.cuda.tensor_emulator import Buffer, Emulated, from_memory, run, to_memory

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.training import Network
from weft.generate.cuda.training import layered as text
from weft.generate.cuda.training.entry import Entry
from weft.generate.cuda.training.layered import Product, padded
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Launch, Pointer

ROW = Format.ROW
BLOCKS = 3


class Net:
    """The kernels of one network for one number of rows; of each product the schedule number `choice`."""

    def __init__(self, net: Network, rows: int, facts: GpuFacts, choice: int = 0, dtype: DType = DType.F32) -> None:
        self.net, self.rows, self.dtype = net, rows, dtype
        self.plan = text.layered(net, facts.sms, dtype)
        self.forward = text.forward(net, rows)
        self.backward = text.backward(net, rows, inputs=True, parameters=True, dtype=dtype)
        self.sources = {p.problem.key: _emitted(p, facts, choice) for p in (*self.forward, *self.backward)}

    @property
    def beside(self) -> Text:
        """What stands beside the products."""
        plan = self.plan
        counts = (
            (plan.pack, len(self.net.slices()) + 1),
            *((e, len(text.addressed(reads)) + 2) for reads, e in plan.joins.items()),
            (plan.ending, 4),
            (plan.columns, 5),
            (plan.total, 3),
        )
        launches = (
            Launch(e.name, (e.max_ctas, 1, 1), (e.threads, 1, 1), (Pointer("in", 0),) * n, 0) for e, n in counts
        )
        return Text(plan.text, tuple(launches))


def _emitted(p: Product, facts: GpuFacts, choice: int) -> CudaSource:
    schedules = templates.schedules(p.problem, facts)
    assert not isinstance(schedules, Declined), (p.role, p.layer, schedules)
    source = templates.emit(p.problem, schedules[choice % len(schedules)])
    assert isinstance(source, CudaSource), source
    return source


class Runner:
    """Forward and backward in the emulation."""

    def __init__(self, emulated: Emulated, made: Net) -> None:
        self.emulated, self.made = emulated, made

    def _start(self, entry: Entry, blocks: int, *values: int | Buffer | np.ndarray) -> None:
        library = self.emulated.library
        held = [v for v in values if isinstance(v, Buffer)]
        library.clear_buffers()
        for b in held:
            library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))
        numbers = (ctypes.c_uint * 9)(blocks, 1, 1, entry.threads, 1, 1, 1, 1, 1)
        call = getattr(library, f"run_{entry.name}")
        call.restype = ctypes.c_char_p
        places = [v.address if isinstance(v, Buffer) else int(v) for v in values]
        error = call((ctypes.c_void_p * len(places))(*places), numbers, ctypes.c_uint(0), 1)
        assert not error, error.decode()
        assert all(b.intact() for b in held), "a guard zone was written"

    def _held(self, x: np.ndarray, dtype: DType) -> Buffer:
        buffer = Buffer(x.size * dtype.itemsize)
        buffer.data[:] = to_memory(x, dtype, ROW)
        return buffer

    def _product(self, p: Product, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return run(self.emulated, p.problem, self.made.sources[p.problem.key], inputs)

    def run(
        self, x: np.ndarray, dy: np.ndarray, parameters: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Result, gradient of x, gradients of the parameters."""
        net, plan, rows, short = self.made.net, self.made.plan, self.made.rows, self.made.net.dtype
        kind = net.masters or net.dtype
        image = Buffer(plan.image.bytes)
        self._start(plan.pack, plan.pack.max_ctas, *(self._held(p, kind) for p in parameters), image)

        def weights(at: int, shape: tuple[int, ...]) -> np.ndarray:
            return from_memory(image.data[at : at + 2 * int(np.prod(shape))].copy(), short, shape, ROW)

        h = x
        if text.operand(net, (0,)).kind == "joined":
            taken = Buffer(2 * rows * padded(net.widths[0]))
            self._start(plan.joins[0,], BLOCKS, self._held(x, net.input_dtype), taken, rows)
            h = from_memory(taken.data.copy(), short, (rows, padded(net.widths[0])), ROW)
        inputs, marks = [h], []
        for p in self.made.forward:
            g = p.problem.graph
            given = [h, weights(plan.image.weights[p.layer], g.type_of(g.inputs[1]).shape)]
            if net.biases[p.layer]:
                given.append(weights(plan.image.biases[p.layer], g.type_of(g.inputs[2]).shape))
            outputs = self._product(p, given)
            h = outputs[-1]
            inputs.append(h)
            marks.append(outputs[0] if net.acts[p.layer].keeps else None)
        last = padded(net.widths[-1])
        dz = dy
        if marks[-1] is not None or last != dy.shape[1]:
            ended = Buffer(2 * rows * last)
            last_mark = 0 if marks[-1] is None else self._held(marks[-1], short)
            self._start(plan.ending, BLOCKS, self._held(dy, short), last_mark, ended, rows)
            dz = from_memory(ended.data.copy(), short, (rows, last), ROW)
        shares = min(BLOCKS, rows)
        partial = Buffer(4 * plan.partial_floats * shares)
        out = Buffer(self.made.dtype.itemsize * net.elements, 0)
        sums = np.zeros(net.elements)
        dx = np.zeros(0)
        for p in self.made.backward:
            g = p.problem.graph
            if p.role == "weights":
                at = plan.partial[p.layer] * shares * 4
                self._start(plan.columns, shares, self._held(dz, short), _part(partial, at), rows, dz.shape[1], 0)
                (product,) = self._product(p, [dz, inputs[p.layer]])
                place, _ = net.slices_of(p.layer)
                n, k = place.shape
                sums[place.offset : place.offset + place.size] = product[:n, :k].reshape(-1)
                continue
            turned = weights(plan.image.transposed[p.layer], g.type_of(g.inputs[1]).shape)
            mark = marks[p.layer - 1] if p.role == "below" else None
            (dz,) = self._product(p, [dz, turned] if mark is None else [dz, turned, mark])
            dx = dz
        self._start(plan.total, plan.total.max_ctas, partial, out, shares)
        biases = from_memory(out.data.copy(), self.made.dtype, (net.elements,), ROW)
        found: list[np.ndarray] = []
        for place in net.slices():
            source = sums if len(place.shape) == 2 else biases
            found.append(source[place.offset : place.offset + place.size].reshape(place.shape).astype(np.float64))
        return h, dx, found


def _part(b: Buffer, at: int) -> int:
    return b.address + at
