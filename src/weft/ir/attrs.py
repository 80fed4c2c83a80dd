"""The attributes of primitives: one small frozen record per kind, never a loose dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

PadMode = Literal["constant", "reflect", "edge"]
ScanKind = Literal["sum", "prod", "linear"]


@dataclass(frozen=True, slots=True)
class NoAttrs:
    """Elementwise arithmetic, select, matmul."""


@dataclass(frozen=True, slots=True)
class InputAttrs:
    """Position among the graph's inputs."""

    index: int
    is_weight: bool = False
    """In a candidate's graph: the value is constant at run time, so a kernel may repack it once at link time."""


@dataclass(frozen=True, slots=True)
class ConstantAttrs:
    """SHA-256 (hex) of dtype, shape and bytes; the data stand in `Graph.constants` under this digest."""

    digest: str


@dataclass(frozen=True, slots=True)
class CastAttrs:
    """Target element type."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class ReduceAttrs:
    """Reduced axes, ascending, non-negative; they stay in the shape with size 1."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArgAttrs:
    """The one reduced axis of ARGMAX / ARGMIN."""

    axis: int


@dataclass(frozen=True, slots=True)
class WindowAttrs:
    """Windows over the last `len(kernel)` dimensions. size = (in + lo + hi - (kernel-1)*dilation - 1) // stride + 1."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads_lo: tuple[int, ...]
    pads_hi: tuple[int, ...]
    dilations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScanAttrs:
    """The axis of a SCAN and what is carried along it."""

    axis: int
    kind: ScanKind
    exclusive: bool = False
    """The value before each element instead of the one with it."""
    reverse: bool = False
    """From the last element to the first."""


@dataclass(frozen=True, slots=True)
class BroadcastAttrs:
    """Target shape; the operand is aligned to the right, missing or size-1 dimensions repeat."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReshapeAttrs:
    """Target shape, row-major order, no -1."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransposeAttrs:
    """out.shape[i] = in.shape[perm[i]]."""

    perm: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceAttrs:
    """out[i] = in[starts + i * steps] for i < sizes, per dimension; steps may be negative, never 0."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConcatAttrs:
    """The joined axis."""

    axis: int


@dataclass(frozen=True, slots=True)
class PadAttrs:
    """Elements added before and after each dimension (>= 0). reflect excludes the edge (needs pad < size)."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    mode: PadMode = "constant"
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class GatherAttrs:
    """The indexed axis of GATHER / TAKE_ALONG."""

    axis: int


@dataclass(frozen=True, slots=True)
class IotaAttrs:
    """Counts along `axis` of `shape`."""

    shape: tuple[int, ...]
    axis: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class ConvAttrs:
    """Spatial attributes of a 1-, 2- or 3-d convolution.

    transposed: out = (in-1)*stride - lo - hi + dilation*(k-1) + output_padding + 1.
    """

    strides: tuple[int, ...]
    pads_lo: tuple[int, ...]
    pads_hi: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpaqueAttrs:
    """Result `result` of one call of a framework operator.

    Nodes with equal operands, framework, op and payload are results of the same call.
    """

    framework: Literal["aten", "onnx"]
    op: str
    """For reports: e.g. `aten.topk.default`, `onnx::LSTM`."""
    payload: str
    """JSON that the executor of `framework` turns back into a call; never code."""
    result: int
    types: tuple[TensorType, ...]
    """Types of all results of the call."""
    reason: str = field(default="", compare=False)
    """Why no rule took the operator."""


Attrs = (
    NoAttrs
    | InputAttrs
    | ConstantAttrs
    | CastAttrs
    | ReduceAttrs
    | ArgAttrs
    | WindowAttrs
    | ScanAttrs
    | BroadcastAttrs
    | ReshapeAttrs
    | TransposeAttrs
    | SliceAttrs
    | ConcatAttrs
    | PadAttrs
    | GatherAttrs
    | IotaAttrs
    | ConvAttrs
    | OpaqueAttrs
)

_KINDS: dict[Prim, type] = {
    Prim.INPUT: InputAttrs,
    Prim.CONSTANT: ConstantAttrs,
    Prim.CAST: CastAttrs,
    Prim.BROADCAST: BroadcastAttrs,
    Prim.RESHAPE: ReshapeAttrs,
    Prim.TRANSPOSE: TransposeAttrs,
    Prim.SLICE: SliceAttrs,
    Prim.CONCAT: ConcatAttrs,
    Prim.PAD: PadAttrs,
    Prim.GATHER: GatherAttrs,
    Prim.TAKE_ALONG: GatherAttrs,
    Prim.IOTA: IotaAttrs,
    Prim.REDUCE_SUM: ReduceAttrs,
    Prim.REDUCE_PROD: ReduceAttrs,
    Prim.REDUCE_MAX: ReduceAttrs,
    Prim.REDUCE_MIN: ReduceAttrs,
    Prim.ARGMAX: ArgAttrs,
    Prim.ARGMIN: ArgAttrs,
    Prim.WINDOW_SUM: WindowAttrs,
    Prim.WINDOW_MAX: WindowAttrs,
    Prim.SCAN: ScanAttrs,
    Prim.CONV: ConvAttrs,
    Prim.OPAQUE: OpaqueAttrs,
}
ATTRS: dict[Prim, type] = {p: _KINDS.get(p, NoAttrs) for p in Prim}
"""The record class of each primitive's attributes."""
NO_ATTRS = NoAttrs()
