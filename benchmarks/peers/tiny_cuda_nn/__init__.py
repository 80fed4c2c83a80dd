"""tiny-cuda-nn's fully connected networks, called on torch's tensors.

Built from a checkout of NVlabs/tiny-cuda-nn with its submodules (`git clone --recursive`), with nvcc and CMake:

    cmake -S benchmarks/peers/tiny_cuda_nn -B build/tiny-cuda-nn -G Ninja -DTINY_CUDA_NN=CHECKOUT \\
        -DCMAKE_CUDA_ARCHITECTURES=90
    cmake --build build/tiny-cuda-nn

(`-DCMAKE_CUDA_FLAGS=-IFOLDER` where nvcc's own folders lack `nvrtc.h`, which the package `nvidia-cuda-nvrtc` has). The
driver and NVRTC are loaded with it, and must be of that machine.

Its networks are in f16 and have no biases.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

KINDS = {"tcnn": ("FullyFusedMLP", False), "tcnn_jit": ("FullyFusedMLP", True), "tcnn_cutlass": ("CutlassMLP", False)}
"""Peers by name: what it calls the network, and whether its JIT makes the kernel."""
ACTIVATIONS = {"relu": "ReLU", "tanh": "Tanh", "sigmoid": "Sigmoid", "sin": "Sine", "silu": "SiLU"}
"""By our names."""
_CODE = ctypes.c_int


def _nvrtc() -> str:
    from cuda import pathfinder

    return str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)


NEEDED: tuple[Callable[[], str], ...] = (lambda: "libcuda.so.1", _nvrtc)
"""Libraries whose functions it finds among those that are loaded."""


class Library:
    """`libweft_tcnn.so`."""

    def __init__(self, path: Path) -> None:
        """OSError: there is no such library, or something it needs is missing."""
        for needed in NEEDED:
            ctypes.CDLL(needed(), ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(str(path))
        self._lib.tcnn_error.restype = ctypes.c_char_p
        self._lib.tcnn_parameters.restype = ctypes.c_int64
        self._lib.tcnn_parameters.argtypes = (ctypes.c_void_p,)
        self._lib.tcnn_free.argtypes = (ctypes.c_void_p,)
        text, held = ctypes.c_char_p, ctypes.c_void_p
        self._lib.tcnn_make.argtypes = (ctypes.POINTER(held), _CODE, _CODE, text, text, _CODE)
        self._lib.tcnn_set.argtypes = (held, held, held)
        self._lib.tcnn_infer.argtypes = (held, held, held, held, ctypes.c_uint32, _CODE)

    def network(
        self, name: str, activation: str, weights: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """(x, y) -> y, both (rows, width) f16 on the GPU; of the JIT (width, rows), which it is fastest with.

        Args:
            name: one of `KINDS`.
            activation: behind each layer, one of `ACTIVATIONS`.
            weights: (layers, outputs, inputs), f16 on the GPU, of equal widths.

        Raises:
            RuntimeError: tiny-cuda-nn does not take it, in its words.
        """
        kind, jit = KINDS[name]
        layers, width, _ = weights.shape
        made = ctypes.c_void_p()
        self._done(
            self._lib.tcnn_make(
                ctypes.byref(made), width, layers, ACTIVATIONS[activation].encode(), kind.encode(), int(jit)
            )
        )

        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            rows = x.shape[1 if jit else 0]
            self._done(self._lib.tcnn_infer(made, _stream(), x.data_ptr(), y.data_ptr(), rows, int(jit)))
            return y

        weakref.finalize(run, self._lib.tcnn_free, made).atexit = False  # the device may be gone by then
        if self._lib.tcnn_parameters(made) != weights.numel():
            raise RuntimeError(f"{self._lib.tcnn_parameters(made)} parameters in place of {weights.numel()}")
        self._done(self._lib.tcnn_set(made, _stream(), weights.contiguous().data_ptr()))
        return run

    def _done(self, code: int) -> None:
        if code:
            raise RuntimeError(self._lib.tcnn_error().decode(errors="replace").strip().splitlines()[0])


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
