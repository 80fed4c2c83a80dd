"""cuBLASLt by its C interface: products by an algorithm that is named, and those of its heuristic. No framework.

    D = epilogue(A · B + beta · C)      all row-major: A is m x k, B is k x n, each as it is or transposed in memory

A row-major matrix is its transpose in column-major order, which is what the library knows: it computes Dᵀ = Bᵀ · Aᵀ.
An algorithm is 64 bytes that mean something to one version of the library on one kind of GPU only; `restore` has the
library check them before they are used.
Source: cuBLAS documentation, "Using the cuBLASLt API"; numbers of enumerations from its header `cublasLt.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from weft.errors import DeviceError
from weft.ir.declined import Declined

Activation = Literal["", "relu", "gelu_tanh"]
"""What the library can do to a result: its GELU is the one with the hyperbolic tangent."""
WORKSPACE_BYTES = 64 << 20
"""What algorithms may ask for: twice what NVIDIA recommends for Hopper."""
MOST = 16
"""Algorithms that the heuristic is asked for."""

_TYPES = {"f32": 0, "tf32": 0, "f16": 2, "bf16": 14, "f8e4m3": 28, "f8e5m2": 29, "i8": 3, "i32": 10}
"""cudaDataType_t of the operands."""
_COMPUTE = {"tf32": 77, "i8": 72}
"""cublasComputeType_t where it is not `_SUMS_F32`."""
_SUMS_F32 = 68
_F32, _I32 = 0, 10
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_SCALE_A, _SCALE_B, _FAST = 17, 18, 25
"""cublasLtMatmulDescAttributes_t."""
_MAX_WORKSPACE, _SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t."""
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
"""cublasLtMatrixLayoutAttribute_t."""
_CONFIG_SPLITS, _CONFIG_SCHEME = 2, 3
"""cublasLtMatmulAlgoConfigAttributes_t."""
IN_ORDER = 2
"""cublasLtReductionScheme_t: parts of a sum lie in the workspace in f32 and are added by a step of their own, always in
the same order. Others add into the result as parts come in, or round each part to the type of the result."""
_ACTIVATIONS: dict[Activation, int] = {"": 0, "relu": 2, "gelu_tanh": 32}
_BIAS, _DEFAULT = 4, 1
"""cublasLtEpilogue_t."""
_STATUS = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip
_REFUSALS = frozenset({7, 8, 15})
"""Of an algorithm that is none, is one for another GPU, or for another product."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class LtProduct:
    """A product as the library is asked for it."""

    m: int
    n: int
    k: int
    dtype: str
    """Of A: `f16`, `bf16`, `f32`, `tf32` (f32 in memory), `f8e4m3` or `f8e5m2`, of which the library takes the layout
    `nt` only, and no product of two e5m2; or `i8`, in that layout too, where `out` is `i32` and nothing follows."""
    layout: str = "nn"
    """A letter for each operand: `t` where its transpose is in memory."""
    bias: bool = False
    """One value per column."""
    residual: bool = False
    """C is added, as large as the result."""
    activation: Activation = ""
    right: str = ""
    """Type of B, where it is another."""
    out: str = ""
    """Type of C, D and the bias, where it is another."""
    fast: bool = False
    """8-bit floats: sums may stay in the tensor cores."""
    batch: int = 1
    """Products of that many matrices; C and D lie one after the other."""
    leading: tuple[int, int] = (0, 0)
    """Elements from one row of A and of B in memory to the next; 0: no gap between them."""
    strides: tuple[int, int] = (0, 0)
    """Elements from one A and B of a batch to the next; 0: they share it."""

    @property
    def scaled(self) -> bool:
        """True for 8-bit floats: A and B are multiplied by a number in f32 each."""
        return self.dtype.startswith("f8")

    @property
    def epilogue(self) -> int:
        """As `cublasLtEpilogue_t`."""
        return (_ACTIVATIONS[self.activation] | (_BIAS if self.bias else 0)) or _DEFAULT


@dataclass(frozen=True, slots=True)
class LtAddresses:
    """Device addresses; 0 where the product has no such operand."""

    a: int
    b: int
    d: int
    bias: int = 0
    c: int = 0
    scales: tuple[int, int] = (0, 0)
    """Of A and B."""
    workspace: int = 0
    """Of `WORKSPACE_BYTES`."""


@final
class CublasLt:
    """The library with a handle of its own, in the context that is current."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Make a handle.

        Raises:
            DeviceError: the library refuses it [W301].
        """
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))

    @property
    def version(self) -> str:
        """As `cublasLtGetVersion` tells it."""
        ask = self._library.cublasLtGetVersion
        ask.restype = ctypes.c_size_t
        return str(ask())

    def algorithms(
        self,
        product: LtProduct,
        most: int = MOST,
        *,
        workspace: int = WORKSPACE_BYTES,
        schemes: int | None = None,
        alignment: int = 0,
    ) -> list[LtAlgorithm]:
        """The heuristic's first few, best first; none for what the library does not take.

        `schemes`: mask of the ways in which sums may be split (cublasLtReductionScheme_t); None: any. `alignment`: of
        all operands, in bytes; 0: the library's own assumption (256).
        """
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        found = (_Found * most)()
        count = ctypes.c_int(0)
        try:
            attributes: list[tuple[int, Any]] = [(_MAX_WORKSPACE, ctypes.c_uint64(workspace))]
            if schemes is not None:
                attributes.append((_SCHEMES, ctypes.c_uint32(schemes)))
            if alignment:
                attributes += [(number, ctypes.c_uint32(alignment)) for number in _ALIGNMENTS]
            for number, value in attributes:
                size = _size(ctypes.sizeof(value))
                self._call("cublasLtMatmulPreferenceSetAttribute", preference, number, ctypes.byref(value), size)
            with self._described(product, 256, (256, 256)) as (operation, a, b, d):
                status = self._library.cublasLtMatmulAlgoGetHeuristic(
                    self._handle, operation, b, a, d, d, preference, most, found, ctypes.byref(count)
                )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        if status == 15:
            return []
        if status:
            raise _error("cublasLtMatmulAlgoGetHeuristic", status)
        return [LtAlgorithm(self, product, i, found[i]) for i in range(count.value) if found[i].state == 0]

    def restore(self, product: LtProduct, data: bytes) -> LtAlgorithm | Declined:
        """An algorithm by its bytes, if the library takes them for this product on this GPU.

        Raises:
            ValueError: not 64 bytes.
            DeviceError: the library fails otherwise than by refusing them [W301].
        """
        given, found = _Found(), _Found()
        if len(data) != ctypes.sizeof(given.algorithm):
            raise ValueError(f"{len(data)} bytes are no algorithm")
        ctypes.memmove(given.algorithm, data, len(data))
        with self._described(product, 256, (256, 256)) as (operation, a, b, d):
            status = self._library.cublasLtMatmulAlgoCheck(
                self._handle, operation, b, a, d, d, ctypes.byref(given.algorithm), ctypes.byref(found)
            )
        status = status or found.state
        if status in _REFUSALS:
            return Declined(f"cuBLASLt does not take this algorithm: {_STATUS[status]} ({status})")
        if status:
            raise _error("cublasLtMatmulAlgoCheck", status)
        given.workspace = found.workspace
        return LtAlgorithm(self, product, 0, given)

    @contextlib.contextmanager
    def _described(self, p: LtProduct, bias: int, scales: tuple[int, int]) -> Iterator[tuple[ctypes.c_void_p, ...]]:
        """Descriptors of the operation and of A, B and D."""
        made: list[tuple[str, ctypes.c_void_p]] = []

        def make(name: str, *arguments: Any) -> ctypes.c_void_p:
            handle = ctypes.c_void_p()
            self._call(f"cublasLt{name}Create", ctypes.byref(handle), *arguments)
            made.append((f"cublasLt{name}Destroy", handle))
            return handle

        def layout(dtype: str, rows: int, columns: int, turned: bool, ld: int, stride: int) -> ctypes.c_void_p:
            high, wide = (rows, columns) if turned else (columns, rows)  # of the column-major matrix
            made = make("MatrixLayout", _TYPES[dtype], ctypes.c_uint64(high), ctypes.c_uint64(wide), _long(ld or high))
            if p.batch > 1:
                for number, value in ((_BATCH_COUNT, ctypes.c_int32(p.batch)), (_BATCH_STRIDE, _long(stride))):
                    size = _size(ctypes.sizeof(value))
                    self._call("cublasLtMatrixLayoutSetAttribute", made, number, ctypes.byref(value), size)
            return made

        try:
            operation = make("MatmulDesc", _COMPUTE.get(p.dtype, _SUMS_F32), _I32 if p.dtype == "i8" else _F32)
            values: list[tuple[int, Any]] = [
                (_TRANSA, ctypes.c_int32(p.layout[1] == "t")),
                (_TRANSB, ctypes.c_int32(p.layout[0] == "t")),
                (_EPILOGUE, ctypes.c_int32(p.epilogue)),
            ]
            if p.bias:
                values.append((_BIAS_POINTER, ctypes.c_void_p(bias)))
            if p.scaled:  # the library's A is our B
                values.append((_SCALE_A, ctypes.c_void_p(scales[1])))
                values.append((_SCALE_B, ctypes.c_void_p(scales[0])))
                values.append((_FAST, ctypes.c_int8(p.fast)))
            for number, value in values:
                self._call(
                    "cublasLtMatmulDescSetAttribute",
                    operation,
                    number,
                    ctypes.byref(value),
                    _size(ctypes.sizeof(value)),
                )
            a = layout(p.dtype, p.m, p.k, p.layout[0] == "t", p.leading[0], p.strides[0])
            b = layout(p.right or p.dtype, p.k, p.n, p.layout[1] == "t", p.leading[1], p.strides[1])
            yield operation, a, b, layout(p.out or p.dtype, p.m, p.n, False, 0, p.m * p.n)
        finally:
            for name, handle in reversed(made):
                self._call(name, handle)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise _error(name, status)


@final
class LtAlgorithm:
    """One algorithm for one product."""

    def __init__(self, lt: CublasLt, product: LtProduct, number: int, found: _Found) -> None:
        self._lt, self._product, self._found = lt, product, found
        self.number = number
        """Place in the heuristic's order."""

    @property
    def data(self) -> bytes:
        """What the library knows it by."""
        return bytes(self._found.algorithm)

    @property
    def workspace(self) -> int:
        """Bytes that it needs."""
        return int(self._found.workspace)

    @property
    def splits(self) -> int:
        """Parts of a sum; -1: the algorithm sees to that."""
        return ctypes.c_int32(self._setting(_CONFIG_SPLITS)).value

    @property
    def scheme(self) -> int:
        """How they are added: cublasLtReductionScheme_t."""
        return self._setting(_CONFIG_SCHEME)

    @property
    def in_order(self) -> bool:
        """Whether it adds up every sum in one order: in one go, or in parts that a step of their own adds in f32.

        False where it does not say how it splits sums.
        """
        return self.splits in (0, 1) or (self.splits > 1 and self.scheme == IN_ORDER)

    def _setting(self, number: int) -> int:
        value, written = ctypes.c_uint32(0), ctypes.c_size_t(0)
        self._lt._call(
            "cublasLtMatmulAlgoConfigGetAttribute",
            ctypes.byref(self._found.algorithm),
            number,
            ctypes.byref(value),
            _size(4),
            ctypes.byref(written),
        )
        return value.value

    def bind(self, at: LtAddresses) -> Callable[[int], None]:
        """What puts the product with these addresses on a stream.

        Raises:
            DeviceError: when called, where the library refuses it [W301].
        """
        lt, p, found = self._lt, self._product, self._found
        held = contextlib.ExitStack()
        operation, a, b, d = held.enter_context(lt._described(p, at.bias, at.scales))
        number = ctypes.c_int32 if p.dtype == "i8" else ctypes.c_float
        one, beta = number(1), number(1 if p.residual else 0)
        pointers = [ctypes.c_void_p(x) for x in (at.b, at.a, at.c if p.residual else at.d, at.d, at.workspace)]
        run = lt._library.cublasLtMatmul

        def launch(stream: int, _held: contextlib.ExitStack = held) -> None:
            status = run(
                lt._handle,
                operation,
                ctypes.byref(one),
                pointers[0],
                b,
                pointers[1],
                a,
                ctypes.byref(beta),
                pointers[2],
                d,
                pointers[3],
                d,
                ctypes.byref(found.algorithm),
                pointers[4],
                _size(found.workspace),
                ctypes.c_void_p(stream),
            )
            if status:
                raise _error("cublasLtMatmul", status)

        return launch


def find_cublaslt() -> CublasLt | Declined:
    """The library that is loaded, else the one that an installed package or the system has."""
    path = _loaded()
    tried = [path] if path else []
    try:
        if not tried:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            tried = [str(load_nvidia_dynamic_lib("cublasLt").abs_path)]
    except Exception as error:  # the package's own classes, and ImportError where it is missing
        tried = ["libcublasLt.so.13", "libcublasLt.so.12"]
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    else:
        reason = ""
    for name in tried:
        try:
            return CublasLt(ctypes.CDLL(name))
        except OSError as error:
            reason = reason or str(error)
    return Declined(f"no cuBLASLt: {reason}")


def _loaded() -> str:
    """Path of the library in this process, empty without."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((x.split(maxsplit=5)[-1] for x in lines if "/libcublasLt.so" in x), "")


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _error(name: str, status: int) -> DeviceError:
    return DeviceError(problem=f"{name} failed with {_STATUS.get(status, 'status')} ({status})")
