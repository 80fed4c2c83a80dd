"""Stand-ins for cuBLASLt and cuDNN, compiled and opened."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest


def cublaslt(folder: Path) -> ctypes.CDLL:
    """The library, built in that folder; the test is skipped where there is no compiler."""
    return _built(folder, "cublasLt", "cublaslt_stub.cpp")


def cudnn(folder: Path) -> ctypes.CDLL:
    """As `cublaslt`."""
    return _built(folder, "cudnn", "cudnn_stub.cpp")


def _built(folder: Path, name: str, source: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = folder / f"lib{name}.so"
    given = Path(__file__).parent / source
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(path), str(given)], check=True, timeout=600
    )
    return ctypes.CDLL(str(path))
