"""Runs `weft.cudnn`: a convolution on the current stream by the engine that its step records, and by no other.

    y = activation(conv(x, w) + residual + bias)      x: (n, c, h, w), w: (k, c / groups, r, s), bias: (k,)

What the library is told about memory is read off the tensors, never off the record, so that no record can make it
leave them. Another version of the library, another GPU, or an engine that does not take the convolution is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, final

import torch

from weft.device.cuda.cudnn import ALIGNMENT, ConvAddresses, ConvAlgorithm, Convolution, Cudnn, find_cudnn
from weft.errors import ArtifactError
from weft.generate.library import execute
from weft.generate.library.algorithm import CONVOLUTION, Engine, engine_of
from weft.generate.library.lt_call import found_for, number_of, on_device, room_for
from weft.ir.declined import Declined
from weft.kernels.source import CallValue

_REMEDY = "compile the model again on this machine"
_DTYPES = {torch.float16: ("f16",), torch.bfloat16: ("bf16",), torch.float32: ("f32", "tf32")}


@final
@dataclass
class Engines:
    """cuDNN with a handle for one device."""

    cudnn: Cudnn
    gpu: str
    """See `identity`."""
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Descriptors and handle are used by one thread at a time."""
    restored: dict[tuple[Convolution, int, str], ConvAlgorithm] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of the library."""
        return self.cudnn.version

    def algorithm(self, asked: Convolution, chosen: Engine) -> ConvAlgorithm:
        """What the record names. ArtifactError: the library does not take it, or as something else [W401]."""
        chosen.check(self.version, self.gpu)
        key = asked, chosen.number, chosen.knobs
        if key not in self.restored:
            found = self.cudnn.restore(asked, chosen.number, chosen.settings)
            if isinstance(found, Declined):
                raise ArtifactError(problem=found.reason, remedy=_REMEDY)
            if found.workspace > chosen.workspace or not found.in_order:
                raise ArtifactError(problem="a convolution's engine is not the one that was chosen", remedy=_REMEDY)
            self.restored[key] = found
        return self.restored[key]


def engines(device: torch.device | None = None) -> Engines | Declined:
    """The library for a device (None: the current GPU); why there is none."""
    index = number_of(device, "cuDNN")
    if isinstance(index, Declined):
        return index
    with _OPENING:
        return _open(index)


_OPENING: Final = threading.Lock()


@lru_cache
def _open(index: int) -> Engines | Declined:
    found = found_for(index, find_cudnn, "cuDNN")
    return found if isinstance(found, Declined) else Engines(*found)


def convolution_of(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    compute: str,
    *,
    strides: Sequence[int] = (1, 1),
    pads: tuple[Sequence[int], Sequence[int]] = ((0, 0), (0, 0)),
    dilations: Sequence[int] = (1, 1),
    bias: bool = False,
    residual: bool = False,
    activation: str = "",
) -> Convolution | Declined:
    """What the library is asked for, from how the operands and the result lie in memory; why it cannot be."""
    if compute not in _DTYPES.get(x.dtype, ()) or not x.dtype == w.dtype == y.dtype:
        return Declined(f"no convolution of {x.dtype} and {w.dtype} to {y.dtype} in {compute}")
    if not x.dim() == w.dim() == y.dim() == 4 or 0 in (*x.shape, *w.shape, *y.shape):
        return Declined("not two-dimensional, or without elements")
    if x.shape[1] % w.shape[1] or w.shape[0] % (x.shape[1] // w.shape[1]):
        return Declined("channels that are no whole groups")
    if (
        any(len(v) != 2 for v in (strides, dilations, *pads))
        or min(*strides, *dilations) < 1
        or min(map(min, pads)) < 0
    ):
        return Declined("steps, distances or padding that are none")
    asked = Convolution(
        tuple(x.shape), x.stride(), tuple(w.shape), w.stride(), y.stride(), compute,
        (_two(pads[0]), _two(pads[1])), _two(strides), _two(dilations),
        bias=bias, residual=residual, activation=activation,  # type: ignore[arg-type]
    )  # fmt: skip
    return asked if asked.y == tuple(y.shape) else Declined(f"a result of {tuple(y.shape)}, not {asked.y}")


def _two(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    dilations: Sequence[int],
    *,
    out: torch.Tensor | None = None,
    room: torch.Tensor | None = None,
    **record: CallValue,
) -> torch.Tensor:
    """The step. `room`: bytes that serve as workspace; None: taken from the framework.

    Raises:
        ArtifactError: a damaged record, one of another library or GPU, or tensors that it is not for [W401].
        DeviceError: the library fails [W301].
    """
    chosen = engine_of(record)
    found = engines(x.device)
    if isinstance(found, Declined):
        raise ArtifactError(problem=f"a convolution's engine needs cuDNN: {found.reason}", remedy=_REMEDY)
    y = out if out is not None else _result(x, w, strides, (pads_lo, pads_hi), dilations)
    asked = convolution_of(
        x, w, y, chosen.compute, strides=strides, pads=(pads_lo, pads_hi), dilations=dilations,
        bias=bias is not None, residual=residual is not None, activation=chosen.activation,
    )  # fmt: skip
    if isinstance(asked, Declined):
        raise ArtifactError(problem=f"a convolution that is not as recorded: {asked.reason}", remedy=_REMEDY)
    if residual is not None and (residual.shape, residual.stride()) != (y.shape, y.stride()):
        raise ArtifactError(problem="a convolution's residual does not lie as its result", remedy=_REMEDY)
    if bias is not None and (bias.numel() != w.shape[0] or not bias.is_contiguous()):
        raise ArtifactError(problem="a convolution's bias of another size", remedy=_REMEDY)
    for t in (x, w, y, *(t for t in (bias, residual) if t is not None)):
        if t.dtype != x.dtype or t.device != x.device or t.data_ptr() % ALIGNMENT:
            text = f"a convolution of tensors of several types or devices, or not aligned to {ALIGNMENT} bytes"
            raise ArtifactError(problem=text, remedy=_REMEDY)
    room = room_for(chosen, room, x.device)
    addresses = ConvAddresses(
        x.data_ptr(),
        w.data_ptr(),
        y.data_ptr(),
        bias.data_ptr() if bias is not None else 0,
        residual.data_ptr() if residual is not None else 0,
        room.data_ptr() if room is not None else 0,
    )
    with found.lock, on_device(x.device):
        found.algorithm(asked, chosen).bind(addresses)(torch.cuda.current_stream(x.device).cuda_stream)
    return y


def _result(
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    pads: tuple[Sequence[int], Sequence[int]],
    dilations: Sequence[int],
) -> torch.Tensor:
    """Memory for the result, in the order of the operand."""
    sides = [
        (n + lo + hi - d * (k - 1) - 1) // max(s, 1) + 1
        for n, k, lo, hi, s, d in zip(x.shape[2:], w.shape[2:], *pads, strides, dilations, strict=False)
    ]
    made = torch.empty((x.shape[0], w.shape[0], *(max(n, 0) for n in sides)), dtype=x.dtype, device=x.device)
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return made.to(memory_format=torch.channels_last) if last else made


execute.register(CONVOLUTION, run)
