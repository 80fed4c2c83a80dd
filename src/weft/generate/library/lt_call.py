"""Runs `weft.cublaslt`: a product on the current stream by the algorithm that its step records, and by no other.

    y = activation(x · w + bias + residual)      x: (..., m, k), w: (..., k, n), bias: (n,), y and residual: dense

What the library is told about memory is read off the tensors, never off the record, so that no record can make it
leave them. Another version of the library, another GPU, or bytes that the library does not take end in an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeVar, final

import torch

from weft.device.cuda.cublaslt import CublasLt, LtAddresses, LtAlgorithm, LtProduct, find_cublaslt
from weft.errors import ArtifactError, DeviceError
from weft.generate.library import execute
from weft.generate.library.algorithm import TARGET, Algorithm, Record, algorithm_of, identity
from weft.ir.declined import Declined
from weft.kernels.source import CallValue

ALIGNMENT = 16
"""Bytes: of every address; what the library is asked for needs no more."""
_REMEDY = "compile the model again on this machine"
_DTYPES = {torch.float16: ("f16",), torch.bfloat16: ("bf16",), torch.float32: ("f32", "tf32")}


@final
@dataclass
class Library:
    """cuBLASLt with a handle for one device."""

    lt: CublasLt
    gpu: str
    """See `identity`."""
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Descriptors and handle are used by one thread at a time."""
    restored: dict[tuple[LtProduct, str], LtAlgorithm] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Of the library."""
        return self.lt.version

    def algorithm(self, product: LtProduct, chosen: Algorithm) -> LtAlgorithm:
        """What the record names. ArtifactError: the library does not take it, or as something else [W401]."""
        chosen.check(self.version, self.gpu)
        key = product, chosen.data
        if key not in self.restored:
            found = self.lt.restore(product, bytes.fromhex(chosen.data))
            if isinstance(found, Declined):
                raise ArtifactError(problem=found.reason, remedy=_REMEDY)
            if found.workspace > chosen.workspace or not found.in_order:
                raise ArtifactError(problem="a product's algorithm is not the one that was chosen", remedy=_REMEDY)
            self.restored[key] = found
        return self.restored[key]


def library(device: torch.device | None = None) -> Library | Declined:
    """The library for a device (None: the current GPU); why there is none."""
    index = number_of(device, "cuBLASLt")
    if isinstance(index, Declined):
        return index
    with _OPENING:
        return _open(index)


def number_of(device: torch.device | None, name: str) -> int | Declined:
    """Which GPU a device is (None: the current one); why the library of that name has nothing to do with it."""
    if device is not None and device.type != "cuda":
        return Declined(f"{name} on {device}")
    if not torch.cuda.is_available():
        return Declined("torch sees no GPU")
    index = device.index if device is not None else None
    return torch.cuda.current_device() if index is None else index


_OPENING: Final = threading.Lock()


@lru_cache
def _open(index: int) -> Library | Declined:
    found = found_for(index, find_cublaslt, "cuBLASLt")
    return found if isinstance(found, Declined) else Library(*found)


L = TypeVar("L")


def found_for(index: int, find: Callable[[], L | Declined], name: str) -> tuple[L, str, torch.device] | Declined:
    """A library with a handle for that GPU, the GPU's identity and device; why there is none."""
    try:
        with torch.cuda.device(index):
            found = find()
            if isinstance(found, Declined):
                return found
            about = torch.cuda.get_device_properties(index)
            gpu = identity(about.name, about.major * 10 + about.minor, about.multi_processor_count)
    except (DeviceError, RuntimeError, AssertionError) as error:  # torch's own: no such device, or none at all
        return Declined(f"{name} cannot be used: {str(error).splitlines()[0]}")
    return found, gpu, torch.device("cuda", index)


def room_for(chosen: Record, room: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The workspace of an algorithm: what is given, or memory of the framework's; None where it needs none.

    Raises:
        ArtifactError: what is given is too small, or lies otherwise than it has to [W401].
    """
    if not chosen.workspace:
        return None
    room = torch.empty(chosen.workspace, dtype=torch.uint8, device=device) if room is None else room
    usable = room.is_contiguous() and room.nbytes >= chosen.workspace and room.device == device
    if not usable or room.data_ptr() % ALIGNMENT:
        raise ArtifactError(problem=f"the workspace of {chosen.what} is too small", remedy=_REMEDY)
    return room


def operand(x: torch.Tensor) -> tuple[str, int, int, int] | None:
    """Letter of the layout, leading dimension, number of matrices and elements between them; None: in no order.

    Matrices are the last two dimensions; those before them must lie at equal distances.
    """
    rows, columns = x.shape[-2:]
    down, right = x.stride()[-2:]
    if right == 1 or columns == 1:
        letter, leading, least = "n", down if rows > 1 else columns, columns
    elif down == 1 or rows == 1:
        letter, leading, least = "t", right, rows
    else:
        return None
    if leading < least:
        return None
    count, step = 1, 0
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if count == 1:
            step = stride
        elif stride != count * step:
            return None
        count *= size
    return letter, leading, count, step


def product_of(
    x: torch.Tensor,
    w: torch.Tensor,
    compute: str,
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str = "",
) -> LtProduct | Declined:
    """What the library is asked for, from how the operands lie in memory; why it cannot be."""
    if compute not in _DTYPES.get(x.dtype, ()) or w.dtype != x.dtype:
        return Declined(f"no product of {x.dtype} and {w.dtype} in {compute}")
    if x.dim() < 2 or w.dim() < 2 or x.shape[-1] != w.shape[-2] or 0 in x.shape or 0 in w.shape:
        return Declined("no matrices that fit, or without elements")
    if x.shape[:-2] != w.shape[:-2] and w.dim() > 2:
        return Declined("matrices of different numbers")
    left, right = operand(x), operand(w)
    if left is None or right is None:
        return Declined("an operand whose matrices do not lie in order")
    (m, k), n = x.shape[-2:], w.shape[-1]
    if left[2] > 1 and right[3] == 0 and left[0] == "n" and left[3] == m * left[1]:
        m, left, right = m * left[2], (*left[:2], 1, 0), (*right[:2], 1, 0)  # one tall matrix
    batch = max(left[2], right[2])
    if batch > 1 and bias:
        return Declined("a bias with several products")
    return LtProduct(
        m, n, k, compute, left[0] + right[0], bias, residual, activation,  # type: ignore[arg-type]
        batch=batch, leading=(left[1], right[1]), strides=(left[3], right[3]),
    )  # fmt: skip


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    room: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **record: CallValue,
) -> torch.Tensor:
    """The step. `room`: bytes that serve as workspace; None: taken from the framework.

    Raises:
        ArtifactError: a damaged record, one of another library or GPU, or tensors that it is not for [W401].
        DeviceError: the library fails [W301].
    """
    chosen = algorithm_of(record)
    found = library(x.device)
    if isinstance(found, Declined):
        raise ArtifactError(problem=f"a product's algorithm needs cuBLASLt: {found.reason}", remedy=_REMEDY)
    product = product_of(
        x, w, chosen.compute, bias=bias is not None, residual=residual is not None, activation=chosen.activation
    )
    if isinstance(product, Declined):
        raise ArtifactError(problem=f"a product that is not as recorded: {product.reason}", remedy=_REMEDY)
    result = out if out is not None else torch.empty((*x.shape[:-1], w.shape[-1]), dtype=x.dtype, device=x.device)
    size = product.batch * product.m * product.n
    _check([t for t in (w, result, bias, residual) if t is not None], x)
    if result.numel() != size or (residual is not None and residual.numel() != size):
        raise ArtifactError(problem="a product's result or residual of another size", remedy=_REMEDY)
    if bias is not None and bias.numel() != product.n:
        raise ArtifactError(problem="a product's bias of another size", remedy=_REMEDY)
    if not all(t.is_contiguous() for t in (result, bias, residual) if t is not None):
        raise ArtifactError(problem="a product's result, bias or residual is not dense", remedy=_REMEDY)
    room = room_for(chosen, room, x.device)
    addresses = LtAddresses(
        x.data_ptr(),
        w.data_ptr(),
        result.data_ptr(),
        bias.data_ptr() if bias is not None else 0,
        residual.data_ptr() if residual is not None else 0,
        workspace=room.data_ptr() if room is not None else 0,
    )
    with found.lock, on_device(x.device):
        launch = found.algorithm(product, chosen).bind(addresses)
        launch(torch.cuda.current_stream(x.device).cuda_stream)
    return result


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The handle belongs to the device, which has to be the thread's."""
    other = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if other else contextlib.nullcontext()


def _check(others: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    for t in (x, *others):
        if t.dtype != x.dtype or t.device != x.device:
            raise ArtifactError(problem="a product of tensors of several types or devices", remedy=_REMEDY)
        if t.data_ptr() % ALIGNMENT:
            raise ArtifactError(problem=f"a product's operand is not aligned to {ALIGNMENT} bytes", remedy=_REMEDY)


execute.register(TARGET, run)
