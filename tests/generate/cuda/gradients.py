"""Gradients of fully connected networks in the emulation, and in float64 by torch."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from tests.generate.cuda.tensor_emulator import Buffer, Emulated, from_memory, to_memory
from tests.generate.cuda.test_templates import H200

from weft.generate.cuda.training import Activation, Gradient, Network, gradient
from weft.generate.cuda.training.entry import Entry
from weft.ir.types import DType, round_bf16
from weft.kernels.formats import Format
from weft.kernels.source import Launch, Pointer
from weft.nn import formulas
from weft.nn.layers import module_of


@dataclass
class Text:
    """What `Emulated` asks of a source."""

    text: str
    launches: tuple[Launch, ...]
    pack: tuple[Launch, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def network(
    widths: tuple[int, ...],
    act: Activation | tuple[Activation, ...],
    dtype: DType = DType.BF16,
    *,
    last: Activation | None = None,
    bias: bool = True,
    given: DType | None = None,
) -> Network:
    depth = len(widths) - 1
    acts = act if isinstance(act, tuple) else (act,) * (depth - 1) + (last or Activation(),)
    return Network(widths, acts, (bias,) * depth, dtype, given or dtype)


def text_of(g: Gradient, *, parameters: bool = True) -> Text:
    counts = [(g.pack, g.text.split(f"{g.pack.name}(", 1)[1].split(")", 1)[0].count(",") + 1), (g.chain, 6)]
    if parameters:
        counts += [(g.finish, 3)] if g.inside else [(g.wgrad, 4), (g.finish, 3)]
    return Text(
        g.text,
        tuple(
            Launch(e.name, (e.max_ctas, 1, 1), (e.threads, 1, 1), (Pointer("in", 0),) * n, e.shared_bytes)
            for e, n in counts
        ),
    )


def made(net: Network, **options: object) -> Gradient:
    found = gradient(net, H200, **options)  # type: ignore[arg-type]
    assert isinstance(found, Gradient), found
    return found


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    x = x.astype(np.float32)
    return round_bf16(x) if dtype is DType.BF16 else x.astype(dtype.numpy).astype(np.float32)


def normal(net: Network, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(x, gradient of the result, parameters), rounded to their types."""
    rng = np.random.default_rng(seed)
    x = rounded(rng.standard_normal((rows, net.columns)), net.input_dtype)
    dy = rounded(rng.standard_normal((rows, net.widths[-1])), net.dtype)
    parameters = [
        rounded(rng.standard_normal(p.shape) * (1.4 / p.shape[1] ** 0.5 if len(p.shape) == 2 else 0.3), net.dtype)
        for p in net.slices()
    ]
    return x, dy, parameters


def exact(
    net: Network, x: np.ndarray, dy: np.ndarray, parameters: list[np.ndarray], dtype: torch.dtype = torch.float64
) -> list[np.ndarray]:
    """Gradients of x and of the parameters by torch, in float64 or in a type of 16 bits."""
    first = torch.tensor(x, dtype=dtype, requires_grad=True)
    leaves = [torch.tensor(p, dtype=dtype, requires_grad=True) for p in parameters]
    found = torch.autograd.grad(_forward(net, first, leaves), [first, *leaves], torch.tensor(dy, dtype=dtype))
    return [g.double().numpy() for g in found]


def result(net: Network, x: np.ndarray, parameters: list[np.ndarray]) -> np.ndarray:
    """The forward pass in float64."""
    found: np.ndarray = _forward(net, torch.tensor(x), [torch.tensor(p) for p in parameters]).numpy()
    return found


def _forward(net: Network, first: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    left = iter(leaves)
    values = {-i: first[:, at : at + n] for i, (at, n) in enumerate(net.parts or ((0, net.columns),))}
    for layer, (act, bias) in enumerate(zip(net.acts, net.biases, strict=True)):
        h = torch.cat([values[v] for v in net.reads(layer)], 1) @ next(left).t()
        h = h + next(left) if bias else h
        added = net.adds(layer)
        h = h + values[added.value] if added is not None and added.before else h
        h = by_torch(act, h)
        h = h + values[added.value] if added is not None and not added.before else h
        values[layer + 1] = h
    return values[net.depth]


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the error over the norm of what is right."""
    return float(np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2)))


def by_torch(act: Activation, z: torch.Tensor) -> torch.Tensor:
    """By torch's own function, or by what a formula says."""
    if act.formula is not None:
        return formulas.by_torch(act.formula, z)
    found: torch.Tensor = module_of(act)(z)
    return found


class Runner:
    """The kernels of one network in the emulation, with few blocks."""

    def __init__(self, emulated: Emulated, net: Network, g: Gradient, blocks: int = 2) -> None:
        self.library, self.net, self.g, self.blocks = emulated.library, net, g, blocks

    def _start(self, entry: Entry, values: list[int], blocks: int) -> None:
        numbers = (ctypes.c_uint * 9)(blocks, 1, 1, entry.threads, 1, 1, 1, 1, 1)
        call = getattr(self.library, f"run_{entry.name}")
        call.restype = ctypes.c_char_p
        error = call((ctypes.c_void_p * len(values))(*values), numbers, ctypes.c_uint(entry.shared_bytes), 1)
        assert not error, error.decode()

    def run(
        self, x: np.ndarray, dy: np.ndarray, parameters: list[np.ndarray], *, chunk: int = 1 << 30, sums: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Gradients of x and of the parameters (f32)."""
        net, g = self.net, self.g
        kind = net.masters or net.dtype
        held = [Buffer(kind.itemsize * p.size) for p in net.slices()]
        for buffer, p in zip(held, parameters, strict=True):
            buffer.data[:] = to_memory(p, kind, Format.ROW)
        image = Buffer(g.image_bytes)
        self.library.clear_buffers()
        for b in (*held, image):
            self.library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))
        self._start(g.pack, [*(b.address for b in held), image.address], g.pack.max_ctas)
        assert image.intact() and all(b.intact() for b in held)
        partial, out = Buffer(g.partial_bytes), Buffer(4 * net.elements)
        pieces = []
        shares = 1
        for at in range(0, len(x), chunk):
            rows = min(chunk, len(x) - at)
            ins = [Buffer(rows * net.columns * net.input_dtype.itemsize), Buffer(2 * rows * net.widths[-1])]
            ins[0].data[:] = to_memory(x[at : at + rows], net.input_dtype, Format.ROW)
            ins[1].data[:] = to_memory(dy[at : at + rows], net.dtype, Format.ROW)
            kept, dx = Buffer(g.kept_bytes(rows)), Buffer(rows * net.columns * net.input_dtype.itemsize)
            everything = (*ins, image, kept, dx, partial, out)
            self.library.clear_buffers()
            for b in everything:
                self.library.add_buffer(ctypes.c_void_p(b.address), ctypes.c_long(b.data.size))
            addresses = [b.address for b in (*ins, image, kept, dx)]
            blocks = min(self.blocks, g.count(rows) // g.tiles)
            shares = blocks if g.inside else g.shares
            if g.inside:
                addresses[3] = partial.address
            self._start(g.chain, [*addresses, rows], blocks)
            pieces.append(from_memory(dx.data.copy(), net.input_dtype, (rows, net.columns), Format.ROW))
            if sums and not g.inside:
                self._start(g.wgrad, [kept.address, partial.address, g.count(rows), at > 0], g.wgrad.max_ctas)
            assert all(b.intact() for b in everything), "a guard zone was written"
        if sums:
            self._start(g.finish, [partial.address, out.address, shares], g.finish.max_ctas)
            assert out.intact() and partial.intact()
        values = out.data.view(np.float32)
        return np.concatenate(pieces), [values[p.offset : p.offset + p.size].reshape(p.shape) for p in net.slices()]


def infinite(net: Network, rows: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """As `normal`, with positive parameters and rows of -inf: a relu leaves zeros of them, and finite results."""
    x, dy, parameters = normal(net, rows)
    x[::2] = -np.inf
    return x, dy, [np.abs(p) for p in parameters]


def assert_as_finite(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Numbers that are none stand where they should, and the others are near."""
    for a, b in zip(got, want, strict=True):
        good = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), good)
        assert not good.any() or error_of(a[good], b[good]) < 2.0**-5
    assert any(np.isfinite(b).all() for b in want) and not all(np.isfinite(b).all() for b in want)
