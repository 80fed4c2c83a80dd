"""Kernels of CUTLASS for a product, as a peer that is built with nvcc and run in the measuring worker like any call.

A short list of its templates for sm_90 (warp-specialised, ping-pong or cooperative, clusters of one or two CTAs, data
parallel or stream-K), those first that cover the result with the fewest waves. Bias, residual and activation are fused
as its epilogues do; what they cannot do follows as torch's operators, as behind cuBLASLt. Found are CUTLASS's headers
where `CUTLASS_PATH` says, else in the package `nvidia-cutlass`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.device.files import publish
from weft.errors import DeviceError
from weft.gemm.epilogue import Epilogue, Fused, epilogue
from weft.gemm.library import follow
from weft.gemm.spec import Gemm
from weft.generate.library import execute
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CallStep, LibraryCall, Ref, Schedule
from weft.tune.keys import PACKAGE, source_hash

TARGET = "weft.gemm.cutlass"
MOST = 10
"""Kernels of the list that are built for a product."""
BUILD_S = 400.0
"""Seconds for one of them."""
ARCH = "sm_90a"
SMS = 132
"""Multiprocessors that waves are counted for."""
LEAST_K = 1024
"""Of a CTA's share of a tile's sum, about: what is cheaper to fix up than to sum."""
_PACKAGE_HEADERS = Path("source")
_FLAGS = (
    "-std=c++17",
    "-O3",
    f"-arch={ARCH}",
    "-shared",
    "-Xcompiler",
    "-fPIC",
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
)
_TYPES: Mapping[DType, str] = {DType.F16: "cutlass::half_t", DType.BF16: "cutlass::bfloat16_t", DType.F32: "float"}
_ACTIVATIONS: Mapping[str, str] = {
    "": "cutlass::epilogue::thread::Identity",
    "relu": "cutlass::epilogue::thread::ReLu",
    "gelu": "cutlass::epilogue::thread::GELU",
    "gelu_tanh": "cutlass::epilogue::thread::GELU_taylor",
    "silu": "cutlass::epilogue::thread::SiLu",
}
_FUSED = re.compile(r"(?:(relu|gelu|gelu_tanh|silu)\()?acc( \+ bias)?( \+ residual)?(\))?")


@dataclass(frozen=True, slots=True)
class Cutlass:
    """Headers and the compiler."""

    root: Path
    """A folder with `include`, and with `tools/util/include`."""
    version: str
    nvcc: str


def find_cutlass(environ: Mapping[str, str] = os.environ) -> Cutlass | Declined:
    """CUTLASS and nvcc on this machine, or what is missing and how to get it."""
    nvcc = shutil.which("nvcc", path=environ.get("PATH")) or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return Declined("nvcc is not installed: it comes with the CUDA toolkit")
    told = environ.get("CUTLASS_PATH")
    spec = None if told else importlib.util.find_spec("cutlass_library")
    places = spec.submodule_search_locations if spec is not None else None
    root = Path(told) if told else Path(next(iter(places))) / _PACKAGE_HEADERS if places else None
    if root is None:
        return Declined("CUTLASS is not installed: `pip install nvidia-cutlass`, or its folder in CUTLASS_PATH")
    try:
        text = (root / "include" / "cutlass" / "version.h").read_text(encoding="utf-8")
    except OSError:
        return Declined("no CUTLASS where CUTLASS_PATH or the package points: no include/cutlass/version.h there")
    numbers = [re.search(rf"#define CUTLASS_{x}\s+(\d+)", text) for x in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers) or int(numbers[0][1]) < 3:  # type: ignore[index]
        return Declined("a CUTLASS before 3.0, which knows no sm_90")
    return Cutlass(root, ".".join(x[1] for x in numbers if x), nvcc)


@dataclass(frozen=True, slots=True)
class CutlassConfig(Parameters):
    """Parameters of its template; counts."""

    bm: int
    bn: int
    pingpong: bool
    """Else two warpgroups work on one tile together."""
    cluster_m: int
    cluster_n: int
    stream_k: bool

    def schedule(self) -> Schedule:
        """As a schedule of this peer."""
        return self.named("cutlass")


def fused_of(e: Epilogue) -> tuple[Fused, Epilogue | None]:
    """What CUTLASS does of an epilogue in the kernel, and what is left, with that as `acc`; None: nothing is."""
    found = _FUSED.fullmatch(e.text)
    if found is not None and bool(found[1]) == bool(found[4]):
        return Fused("bias" * bool(found[2]), "residual" * bool(found[3]), found[1] or ""), None  # type: ignore[arg-type]
    return e.divided


def declined(g: Gemm, *, arch: str = ARCH, tf32: bool = True) -> Declined | None:
    """Why none of these kernels takes a product, on a GPU of this architecture."""
    if arch != ARCH:
        return Declined(f"its kernels of this list are for {ARCH}, and the GPU is {arch}")
    if g.dtype is DType.F32 and not g.bytes and not tf32:
        return Declined("its products of f32 are by TF32: ask for --tf32")
    if g.bytes or g.dtype not in _TYPES:
        return Declined(f"CUTLASS is a peer for f16, bf16 and f32 (as TF32), not for {g.types}")
    unit = 16 // g.dtype.itemsize
    if any(n % unit for n in (g.m if g.layout[0] == "t" else g.k, g.k if g.layout[1] == "t" else g.n, g.n)):
        return Declined(f"its kernels with TMA need rows of a multiple of {unit} elements")
    return None


def configurations(g: Gemm, most: int = MOST) -> list[CutlassConfig]:
    """Those that cover the result best, different tiles before other clusters of the same."""
    shapes = [(64, 64, True), (64, 128, True), (64, 256, True), (128, 64, True), (128, 128, True), (128, 128, False),
              (128, 192, False), (128, 256, False), (256, 64, False), (256, 128, False)]  # fmt: skip
    ranked: list[tuple[int, float, CutlassConfig]] = []
    for bm, bn, pingpong in shapes:
        tiles = math.ceil(g.m / bm) * math.ceil(g.n / bn)
        waves = math.ceil(tiles / SMS)
        # a wave takes as long as its tile is large, and small tiles load more for each multiply-add
        cost = waves * bm * bn * (1.0 + 24.0 / bm + 24.0 / bn)
        clusters = [(1, 1), (2, 1), (1, 2)]
        fit = [(x, y) for x, y in clusters if math.ceil(g.m / bm) >= x and math.ceil(g.n / bn) >= y]
        ranked += [(i, cost, CutlassConfig(bm, bn, pingpong, x, y, stream_k=False)) for i, (x, y) in enumerate(fit)]
        if not pingpong and tiles % SMS and bm * bn >= 128 * 128:
            share = max(tiles / SMS, min(1.0, LEAST_K / g.k))
            even = share * bm * bn * 1.15 * (1.0 + 24.0 / bm + 24.0 / bn)
            ranked.append((0, even, CutlassConfig(bm, bn, pingpong, 1, 1, stream_k=True)))
    best = min(cost for _, cost, _ in ranked)
    ranked.sort(key=lambda x: (x[1] * (1.0 + 0.1 * x[0]) / best, x[0]))
    return [c for *_, c in ranked[:most]]


def text_of(g: Gemm, c: CutlassConfig) -> str:
    """The kernel with its two entries, for any sizes of these types, layouts and epilogue."""
    kind, unit = _TYPES[g.dtype], 16 // g.dtype.itemsize
    fused, _ = fused_of(g.epilogue)
    rows, columns = "cutlass::layout::RowMajor", "cutlass::layout::ColumnMajor"
    result = "LinCombPerColBiasEltAct" if fused.bias else "LinCombEltAct"
    more = ", Number, Number, float" if fused.bias else ", Number, float"
    how = "Pingpong" if c.pingpong else "Cooperative"
    after = "" if c.pingpong else "Cooperative"
    scheduler = "StreamKScheduler" if c.stream_k else "PersistentScheduler"
    bias = "x.epilogue.thread.bias_ptr = static_cast<const Number*>(bias);" if fused.bias else ""
    return f"""#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/thread/activation.h>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>
namespace peer {{
using cute::Shape;
using cute::Int;
using Number = {kind};
using Rows = {rows};
using TileShape = Shape<Int<{c.bm}>, Int<{c.bn}>, Int<{128 // g.dtype.itemsize}>>;
using ClusterShape = Shape<Int<{c.cluster_m}>, Int<{c.cluster_n}>, Int<1>>;
using Source = {"Number" if fused.residual else "void"};
using Fusion = cutlass::epilogue::fusion::{result}<{_ACTIVATIONS[fused.activation]}, Number, float{more}>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, Rows, {unit}, Number, Rows, {unit},
    cutlass::epilogue::TmaWarpSpecialized{after}, Fusion>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Number, {columns if g.layout[0] == "t" else rows}, {unit},
    Number, {columns if g.layout[1] == "t" else rows}, {unit}, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecialized{how}>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<
    Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::{scheduler}>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
typename Gemm::Arguments arguments(
    int m, int n, int k, const void* a, const void* b, const void* source, const void* bias, void* d) {{
  auto sa = cutlass::make_cute_packed_stride(typename Kernel::StrideA{{}}, {{m, k, 1}});
  auto sb = cutlass::make_cute_packed_stride(typename Kernel::StrideB{{}}, {{n, k, 1}});
  auto sc = cutlass::make_cute_packed_stride(typename Kernel::StrideC{{}}, {{m, n, 1}});
  auto sd = cutlass::make_cute_packed_stride(typename Kernel::StrideD{{}}, {{m, n, 1}});
  typename Gemm::Arguments x{{
      cutlass::gemm::GemmUniversalMode::kGemm, {{m, n, k, 1}},
      {{static_cast<const Number*>(a), sa, static_cast<const Number*>(b), sb}},
      {{{{}}, static_cast<const Source*>(source), sc, static_cast<Number*>(d), sd}}}};
  x.epilogue.thread.alpha = 1.0f;
  x.epilogue.thread.beta = {"1.0f" if fused.residual else "0.0f"};
  {bias}
  int device = 0;
  cudaGetDevice(&device);
  x.hw_info.device_id = device;
  x.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(device);
  return x;
}}
}}  // namespace peer
extern "C" long long weft_bytes(int m, int n, int k) {{
  return peer::Gemm::get_workspace_size(peer::arguments(m, n, k, nullptr, nullptr, nullptr, nullptr, nullptr));
}}
extern "C" int weft_run(
    int m, int n, int k, const void* a, const void* b, const void* source, const void* bias, void* d, void* work,
    void* stream) {{
  peer::Gemm gemm;
  auto x = peer::arguments(m, n, k, a, b, source, bias, d);
  auto found = peer::Gemm::can_implement(x);
  if (found != cutlass::Status::kSuccess) return 1000 + static_cast<int>(found);
  found = gemm.initialize(x, work, static_cast<cudaStream_t>(stream));
  if (found != cutlass::Status::kSuccess) return 2000 + static_cast<int>(found);
  found = gemm.run(static_cast<cudaStream_t>(stream));
  return found == cutlass::Status::kSuccess ? 0 : 3000 + static_cast<int>(found);
}}
"""


def build(peer: Cutlass, text: str, cache: Path, *, seconds: float = BUILD_S) -> Path | Declined:
    """The kernel as a shared object, from the cache where it was built before."""
    told = "\0".join((peer.version, _nvcc_version(peer.nvcc), *_FLAGS, text))
    path = cache / "cutlass" / f"{hashlib.sha256(told.encode()).hexdigest()}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(prefix="weft-cutlass-") as folder:
        source, made = Path(folder) / "kernel.cu", Path(folder) / "kernel.so"
        source.write_text(text, encoding="utf-8")
        headers = [f"-I{peer.root / x}" for x in ("include", "tools/util/include")]
        command = [peer.nvcc, *_FLAGS, *headers, "-o", str(made), str(source)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=folder,
            process_group=0,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the passes that it started, too
            process.communicate()
            return Declined(f"nvcc was not done after {seconds:g} s")
        if process.returncode or not made.exists():
            first = next((x for x in said.splitlines() if "error" in x), "no reason given")
            return Declined(f"nvcc refuses it: {first.strip()[:300]}")
        publish(path, made.read_bytes())
    return path


@functools.lru_cache(maxsize=4)
def _nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def contenders(
    g: Gemm, peer: Cutlass, cache: Path, *, most: int = MOST
) -> tuple[list[tuple[Schedule, LibraryCall]], dict[Schedule, str]]:
    """Calls of the kernels of the list, built several at a time, and why others could not be built."""
    chosen = configurations(g, most)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        built = list(pool.map(lambda c: build(peer, text_of(g, c), cache), chosen))
    inputs = tuple(Ref("in", i) for i in range(len(g.shapes)))
    calls: list[tuple[Schedule, LibraryCall]] = []
    refused: dict[Schedule, str] = {}
    for c, path in zip(chosen, built, strict=True):
        schedule = c.schedule()
        if isinstance(path, Declined):
            refused[schedule] = path.reason
            continue
        text = json.dumps(
            {
                "m": g.m, "n": g.n, "k": g.k, "epilogue": g.epilogue.text, "object": str(path),
                # measurements are found again by what ran
                "sources": source_hash(PACKAGE, ("gemm/cutlass.py", "gemm/library.py", "gemm/epilogue.py")),
            },
            sort_keys=True,
        )  # fmt: skip
        step = CallStep(TARGET, (text, *inputs))
        calls.append((schedule, LibraryCall(schedule, (), (step,), (Ref("tmp", 0),), out_variant=True)))
    return calls, refused


@dataclass(frozen=True)
class _Loaded:
    """A built kernel, and the memory that it works in."""

    run: ctypes._CFuncPtr  # type: ignore[name-defined]
    sizes: tuple[int, int, int]
    epilogue: Epilogue
    room: torch.Tensor


@functools.lru_cache(maxsize=32)
def _loaded(text: str, device: torch.device) -> _Loaded:
    m = json.loads(text)
    sizes = m["m"], m["n"], m["k"]
    library = ctypes.CDLL(m["object"])
    library.weft_bytes.restype = ctypes.c_longlong
    library.weft_run.argtypes = [*[ctypes.c_int] * 3, *[ctypes.c_void_p] * 7]
    room = torch.empty(max(1, library.weft_bytes(*sizes)), dtype=torch.uint8, device=device)
    return _Loaded(library.weft_run, sizes, epilogue(m["epilogue"]), room)


def run(text: str, *inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The step: A, B, the epilogue's operands; `out` is the result.

    Raises:
        DeviceError: CUTLASS refuses the sizes, or the launch fails [W301].
    """
    kernel = _loaded(text, out.device)
    a, b, *others = inputs
    named = {name: x for (name, _), x in zip(kernel.epilogue.operands, others, strict=False)}
    fused, rest = fused_of(kernel.epilogue)
    source, bias = (named[x].data_ptr() if x else 0 for x in (fused.residual, fused.bias))
    now = torch.cuda.current_stream().cuda_stream
    status = kernel.run(
        *kernel.sizes, a.data_ptr(), b.data_ptr(), source, bias, out.data_ptr(), kernel.room.data_ptr(), now
    )
    if status:
        raise DeviceError(problem=f"CUTLASS ended with status {status}")
    follow(rest, out, named)
    return out


execute.register(TARGET, run)


def names_of(schedules: Sequence[Schedule]) -> dict[Schedule, str]:
    """Short names: `128x256 cooperative, cluster 2x1, stream-K`."""
    found = {}
    for s in schedules:
        c = CutlassConfig.of(s)
        how = "ping-pong" if c.pingpong else "cooperative"
        rest = f", cluster {c.cluster_m}x{c.cluster_n}" * (c.cluster_m * c.cluster_n > 1) + ", stream-K" * c.stream_k
        found[s] = f"{c.bm}x{c.bn} {how}{rest}"
    return found
