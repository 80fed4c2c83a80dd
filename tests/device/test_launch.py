"""Objects of kernels are loaded as long as a kernel of theirs lives, and no longer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.typed import narrow
from torch import nn

import weft
from weft.device.launch import NativeKernel, pointer_array
from weft.device.toolchain import HostCompiler, find_compiler
from weft.errors import DeviceError
from weft.options import Options
from weft.runtime.executable import Executable

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/maps")
TEXT = """
extern "C" void first(const void* const* in, void* const* out, void*, const void* const*) {
  #pragma omp parallel for
  for (long i = 0; i < 4096; ++i) ((float*)out[0])[i] = ((const float*)in[0])[i] + %d;
}
extern "C" void second(const void* const* in, void* const* out, void*, const void* const*) {
  while (!*(volatile int*)in[0]) {}
  *(int*)out[0] = %d;
}
"""


@pytest.fixture(scope="module")
def compiler() -> HostCompiler:
    found = find_compiler()
    if not isinstance(found, HostCompiler):
        pytest.skip(found.reason)
    return found


def is_loaded(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def loaded_from(folder: Path) -> set[str]:
    return {name for name in Path("/proc/self/maps").read_text().split() if name.startswith(str(folder))}


def object_of(compiler: HostCompiler, cache: Path, number: int) -> Path:
    return compiler.compile(TEXT % (number, number), cache_dir=cache).path


@pytest.fixture
def some(compiler: HostCompiler, tmp_path: Path) -> Path:
    """An object that is not the first of its OpenMP runtime."""
    NativeKernel(object_of(compiler, tmp_path, 1), "first")
    return object_of(compiler, tmp_path, 2)


def test_an_object_goes_with_its_last_kernel(some: Path) -> None:
    one, two = NativeKernel(some, "first"), NativeKernel(some, "second")
    x, y = torch.arange(4096.0), torch.zeros(4096)
    inputs, outputs = pointer_array([x.data_ptr()]), pointer_array([y.data_ptr()])
    one(inputs, outputs, 0, pointer_array([]))
    assert torch.equal(y, x + 2)
    del one
    assert is_loaded(some)
    del two
    assert not is_loaded(some)


def test_an_object_without_the_entry_does_not_stay(some: Path) -> None:
    with pytest.raises(DeviceError, match="has no such entry"):
        NativeKernel(some, "third")
    assert not is_loaded(some)


def test_an_object_stays_while_a_thread_is_in_it(some: Path) -> None:
    kernel = NativeKernel(some, "second")
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inputs, outputs = pointer_array([flag.data_ptr()]), pointer_array([out.data_ptr()])
    thread = threading.Thread(target=kernel, args=(inputs, outputs, 0, pointer_array([])))
    thread.start()
    del kernel
    assert is_loaded(some)
    flag[0] = 1
    thread.join(60)
    assert int(out) == 2
    del thread
    assert not is_loaded(some)


LOOP = """
import ctypes, gc, sys
from weft.device.launch import NativeKernel, pointer_array
assert "torch" not in sys.modules, "which has an OpenMP runtime of its own"
x, y = (ctypes.c_float * 4096)(), (ctypes.c_float * 4096)()
inputs, outputs = pointer_array([ctypes.addressof(x)]), pointer_array([ctypes.addressof(y)])
for _ in range(50):
    for number, path in enumerate(sys.argv[1:]):
        kernel = NativeKernel(path, "first")
        kernel(inputs, outputs, 0, pointer_array([]))
        assert set(y) == {number + 1.0}
        del kernel
found = open("/proc/self/maps").read()
print(sum(path in found for path in sys.argv[1:]), "gomp" in found or "libomp" in found)
"""


def test_the_openmp_runtime_stays_for_its_threads(compiler: HostCompiler, tmp_path: Path) -> None:
    """They wait in its code: it must not go when for a moment no object needs it."""
    paths = [str(object_of(compiler, tmp_path, number)) for number in (1, 2, 3)]
    command, environ = [sys.executable, "-c", LOOP, *paths], {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1", "True"], "")


@pytest.mark.slow
def test_plans_that_were_pushed_out_leave_no_objects_behind(compiler: HostCompiler, tmp_path: Path) -> None:
    del compiler
    options = Options(cache_dir=tmp_path, budget_s=60.0, max_plans=1, allow_library=False)
    compiled = weft.compile(nn.Softmax(-1), (torch.randn(4, 3),), options=options)
    kept = loaded_from(tmp_path)  # with what is of no plan: runner, probes
    for rows in (5, 6):
        x = torch.randn(rows, 3)
        assert torch.allclose(narrow(torch.Tensor, compiled(x)), torch.softmax(x, -1), atol=1e-6)
        gc.collect()
        (made,) = compiled._plans._found.values()
        assert isinstance(made[0].plan, Executable)
        mine = {str(path) for path in made[0].plan.linked.objects.values()}
        assert mine
        assert mine <= loaded_from(tmp_path) <= kept | mine
