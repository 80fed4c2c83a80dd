"""The stand-in for cuBLASLt, compiled and opened."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest


def cublaslt(folder: Path) -> ctypes.CDLL:
    """The library, built in that folder; the test is skipped where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = folder / "libcublasLt.so"
    source = Path(__file__).parent / "cublaslt_stub.cpp"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(path))
